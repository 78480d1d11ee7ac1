"""Many transcripts in place: find them, leave alone what is not meant, share the rest among processes.

A batch decides for each file first what can be told without opening it (age, name, what an earlier run
remembers), then hands the same function to a `concurrent.futures.Executor`: local processes, or a cluster's.
One bad file never stops the rest, nor does a worker that dies. What needs no second look is remembered in the
archive, by the file's device, inode, size and times: a file that changed in any of them is read again.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from haocompact import __version__
from haocompact.archive import Archive, Seen
from haocompact.compaction import NoCompaction
from haocompact.errors import (
    HaoError,
    UsageError,
    WorkerDied,
)
from haocompact.files import clean_folder, open_source, sha256_of, transcripts_under
from haocompact.pipeline import Done, Request, attempt_in_place, opened_archives, workers_folder
from haocompact.summarize import OFFLINE, stop

MIN_AGE = 120.0  # seconds; what changed later in a folder is left to its client
SAFE_AGE = 2_000_000_000  # nanoseconds after which a change is sure to show in a file's times
FLUSH_SECONDS = 2.0
RECURSION = 20_000  # the parser reads 1,024 levels; what walks them needs several frames a level


@dataclass(frozen=True, slots=True)
class Choice:
    """Which files a batch takes. Ages in seconds; `min_age` None: MIN_AGE in folders, 0 for files that are named.

    `include` and `exclude` are globs over the name and over the path below the folder; `*` matches `/`, too.
    """

    min_age: float | None = None
    older_than: float = 0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """One file of a batch. `done`: what is known of it without opening it. `checked`: ns since the epoch."""

    path: str
    in_folder: bool
    min_age: float
    state: str
    checked: int
    done: Done | None = None


# ------------------------------------------------------------------------------------------ find
def find(paths: Iterable[str], choice: Choice, request: Request) -> list[Item]:
    """The files of a batch in the order of the walk, each once; removes what killed runs left in the folders."""
    items, met = list[Item](), set[str]()
    with _memory(request) as memory:
        for root in paths:
            for path, in_folder in transcripts_under([root], clean_folder):
                real = os.path.realpath(path)
                if real in met or (in_folder and not _wanted(os.path.relpath(path, root), choice)):
                    continue
                met.add(real)
                items.append(_item(path, in_folder, choice, memory))
    return items


def _wanted(name: str, choice: Choice) -> bool:
    """Whether the globs take a file, by its name or its path below the folder."""

    def matches(patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(text, p) for p in patterns for text in (name, os.path.basename(name)))

    return (not choice.include or matches(choice.include)) and not matches(choice.exclude)


def _item(path: str, in_folder: bool, choice: Choice, memory: Memory | None) -> Item:
    now = time.time_ns()
    age = choice.min_age if choice.min_age is not None else MIN_AGE * in_folder
    try:
        info = os.lstat(path) if in_folder else os.stat(path)
    except OSError:
        return Item(path, in_folder, age, "", now)  # the attempt says what is wrong
    item = Item(path, in_folder, age, state_of(info), now)
    cause = _passed_over(path, info, now, choice) if in_folder else _too_young(info, now, choice)
    if cause is not None:
        return replace(item, done=_left(path, *cause, info.st_size))
    if in_folder and memory is not None and (outcome := memory.known(item, info)) is not None:
        return replace(
            item, done=_left(path, "unchanged", f"as an earlier run left it ({outcome})", info.st_size)
        )
    return item


def _passed_over(path: str, info: os.stat_result, now: int, choice: Choice) -> tuple[str, str] | None:
    """(cause, in words) for which a file in a folder is left alone without opening it."""
    if stat.S_ISLNK(info.st_mode):
        return "symlink", "a symbolic link: name its target to compact it"
    if path.endswith((".gz", ".zst")):
        return "compressed", "compressed: write the result with -o"
    return _too_young(info, now, choice)


def _too_young(info: os.stat_result, now: int, choice: Choice) -> tuple[str, str] | None:
    if choice.older_than and now - info.st_mtime_ns < choice.older_than * 1e9:
        return "too_young", "younger than --older-than"
    return None


def _left(path: str, cause: str, message: str, size: int) -> Done:
    return Done(path, left=cause, message=message, bytes_before=size, bytes_after=size)


# ---------------------------------------------------------------------------------------- memory
def state_of(info: os.stat_result) -> str:
    """Everything that changes when a file does; no user can set the last one."""
    return " ".join(map(str, (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)))


def settings_key(request: Request) -> str:
    """What decides the outcome besides the file itself."""
    s = request.settings
    named = {name: getattr(s, name) for name in type(s).__dataclass_fields__ if name != "estimator"}
    parts = (__version__, sorted(named.items()), s.estimator.name, request.format, request.leaf,
             (request.summarizer or OFFLINE).name, request.on_failure, request.lang, request.if_needed, request.lines,
             request.allow_growth, request.append)  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


class Memory:
    """Files that need no second look, in the archive; a lost note costs one look.

    `notes`: what is to be written at the end.
    """

    def __init__(self, archive: Archive, settings: str) -> None:
        self._archive = archive
        self._settings = settings
        self.notes: list[Seen] = []

    def known(self, item: Item, info: os.stat_result) -> str | None:
        """How an earlier run left this very file under these settings, if it did."""
        seen = self._archive.seen(os.path.abspath(item.path))
        if seen is None or (seen.stamp, seen.settings) != (item.state, self._settings):
            return None
        if seen.checked - max(info.st_mtime_ns, info.st_ctime_ns) > SAFE_AGE:
            return seen.outcome
        # so young when it was noted that a later change may not show in its times: compare the bytes, once
        if not seen.sha256 or _sha256(item.path) != seen.sha256 or state_of(os.stat(item.path)) != item.state:
            return None
        self.notes.append(replace(seen, checked=item.checked))
        return seen.outcome


def _sha256(path: str) -> str | None:
    try:
        with open_source(path) as source:
            return sha256_of(source.data)
    except HaoError:
        return None


@contextmanager
def _memory(request: Request) -> Iterator[Memory | None]:
    if request.archive is None or not request.archive.exists():
        yield None
        return
    with Archive.open(request.archive, create=True) as archive:
        memory = Memory(archive, settings_key(request))
        yield memory
        if memory.notes:
            archive.remember(memory.notes)


def _note(item: Item, done: Done, request: Request) -> Seen | None:
    """What to remember of a file, if it would come out the same next time."""
    path, settings = os.path.abspath(item.path), settings_key(request)
    if done.skip is not None and _lasting(done.skip, request):
        return Seen(path, item.state, settings, done.skip.sub or done.skip.branch, "", item.checked)
    if done.left in ("no_transcript", "only_read", "not_in_place"):
        return Seen(path, item.state, settings, done.left, "", item.checked)
    if done.sha256:
        try:
            return Seen(path, state_of(os.stat(path)), settings, "compacted", done.sha256, 0)
        except OSError:
            return None
    return None


def _lasting(skip: NoCompaction, request: Request) -> bool:
    """Whether a skip depends on nothing but file and settings: not on the clock, nor on what a model says."""
    return skip.branch != "cooldown" and (skip.branch != "no_gain" or request.summarizer in (None, OFFLINE))


# ------------------------------------------------------------------------------------------- run
def run(items: Sequence[Item], request: Request, jobs: int = 1, *, dry_run: bool = False,
        cluster: Any = None) -> Iterator[Done]:  # fmt: skip
    """Compact the items; results come in their order. `cluster`: a Dask client that runs them instead."""
    notes, flushed = list[Seen](), time.monotonic()
    work = [(n, item) for n, item in enumerate(items) if item.done is None]
    ready = {n: item.done for n, item in enumerate(items) if item.done is not None}
    following = 0
    try:
        for number, done in _attempts(work, request, jobs, dry_run, cluster):
            ready[number] = _judged(items[number], done, request)
            if not dry_run and (note := _note(items[number], ready[number], request)) is not None:
                notes.append(note)
            if time.monotonic() - flushed > FLUSH_SECONDS:
                _flush(notes, request)
                flushed = time.monotonic()
            while following in ready:
                yield ready.pop(following)
                following += 1
        while following in ready:
            yield ready.pop(following)
            following += 1
    finally:
        _flush(notes, request)


def _flush(notes: list[Seen], request: Request) -> None:
    with _memory(request) as memory:
        if memory is not None:
            memory.notes += notes
    notes.clear()


_CAUSES = {  # code of an error: why a batch passes the file over
    "NO_TRANSCRIPT": "no_transcript",
    "ONLY_READ": "only_read",
    "SOURCE_BUSY": "in_use",
    "HARD_LINKED": "hard_linked",
    "HAS_FORKS": "has_forks",
    "NOT_IN_PLACE": "not_in_place",
}


def _judged(item: Item, done: Done, request: Request) -> Done:
    """In a folder, what is no transcript, in use or linked is passed over; under a name it is an error."""
    if done.skip is not None:
        return _finished_before(item, request) or done
    cause = _CAUSES.get(done.error.code) if done.error is not None and item.in_folder else None
    if cause is None or done.error is None:
        return done
    size = int(item.state.split()[2]) if item.state else 0
    return _left(done.path, cause, str(done.error.args[0]), size)


def _finished_before(item: Item, request: Request) -> Done | None:
    """The result of a worker that was killed after its work was done, before it could say so."""
    try:
        changed = state_of(os.stat(item.path)) != item.state
    except OSError:
        return None
    if not changed or request.archive is None or not request.archive.exists():
        return None
    with opened_archives(request) as archives:
        runs = archives.runs(output_sha256=_sha256(item.path) or "?")
    for run in runs:
        if run.source == os.path.abspath(item.path) and str(run.input_size) == item.state.split()[2]:
            return Done(item.path, {"result": "ok"}, item.path, str(request.archive), run.hash,
                        bytes_before=run.input_size, bytes_after=run.output_size, sha256=run.output_sha256)  # fmt: skip
    return None


Work = Sequence[tuple[int, Item]]


def _attempts(
    work: Work, request: Request, jobs: int, dry_run: bool, cluster: Any
) -> Iterator[tuple[int, Done]]:
    """(number, result) of every item, in the order they are finished."""
    if cluster is not None:
        with _merged(request) as folder:
            task = _Task(request, dry_run, folder)
            yield from _shared(work, task, lambda _: cluster.get_executor(), 4 * _threads(cluster))
    elif jobs == 1 or len(work) < 2:
        task = _Task(request, dry_run)
        yield from ((number, task(item.path, item.min_age)) for number, item in work)
    else:
        local = partial(_local_executor, threads=getattr(request.summarizer, "side_by_side", False))
        yield from _shared(work, _Task(request, dry_run), local, jobs)


@dataclass(frozen=True, slots=True)
class _Task:
    """The function that every worker runs. With `folder`, a process archives into a file of its own there."""

    request: Request
    dry_run: bool
    folder: Path | None = None

    def __call__(self, path: str, min_age: float) -> Done:
        request = self.request
        if self.folder is None or request.archive is None:
            return attempt_in_place(path, request, min_age, dry_run=self.dry_run)
        sys.setrecursionlimit(max(RECURSION, sys.getrecursionlimit()))
        own = self.folder / f"{socket.gethostname()}-{os.getpid()}.db"
        done = attempt_in_place(path, replace(request, archive=own), min_age, dry_run=self.dry_run)
        return replace(done, archive=str(request.archive)) if done.archive else done


def _shared(
    work: Work, task: _Task, executor_for: Callable[[int], Executor], jobs: int
) -> Iterator[tuple[int, Done]]:
    """Run the task on all items. When a worker dies, those that were running are tried again one by one."""
    waiting, suspects = deque(work), deque[tuple[int, Item]]()
    while waiting or suspects:
        alone = bool(suspects)
        queue = deque([suspects.popleft()]) if alone else waiting
        first = queue[0]
        running: dict[Future[Done], tuple[int, Item]] = {}
        try:
            with executor_for(1 if alone else jobs) as executor, _stopping(executor, task.request):
                while queue or running:
                    _top_up(running, queue, executor, task, 2 * jobs)
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        done = _result(future, running[future][1])
                        yield running.pop(future)[0], done
        except BrokenExecutor:
            if alone:
                yield first[0], _died(first[1])
                continue
            for future, (number, item) in running.items():
                if future.done() and future.exception() is None:
                    yield number, future.result()
                else:
                    suspects.append((number, item))


@contextmanager
def _stopping(executor: Executor, request: Request) -> Iterator[None]:
    """When the batch is broken off (Ctrl-C), nothing new is begun and no model is waited for."""
    try:
        yield
    except BrokenExecutor:
        raise
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)
        stop(request.summarizer or OFFLINE)
        raise


def _top_up(running: dict[Future[Done], tuple[int, Item]], queue: deque[tuple[int, Item]], executor: Executor,
            task: _Task, limit: int) -> None:  # fmt: skip
    while queue and len(running) < limit:
        future = executor.submit(task, queue[0][1].path, queue[0][1].min_age)
        running[future] = queue.popleft()


def _result(future: Future[Done], item: Item) -> Done:
    try:
        return future.result()
    except BrokenExecutor:
        raise
    except Exception:  # the task itself raises nothing: a cluster has given up on it
        return _died(item)


def _died(item: Item) -> Done:
    text = "the process that worked on it was killed (out of memory?); it was left as it is"
    return Done(item.path, error=WorkerDied(text, path=item.path))


def _local_executor(jobs: int, threads: bool) -> Executor:
    """Processes, or threads where all requests go to one server under one rate limit."""
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    from multiprocessing import get_context

    if threads:
        return ThreadPoolExecutor(jobs)
    # fork: no script that starts us is run a second time; there are no threads to lose
    return ProcessPoolExecutor(jobs, mp_context=get_context("fork"), initializer=_begin_worker)


def _begin_worker() -> None:
    """A worker leaves Ctrl-C to its parent, ends when that is killed, and reads as deep as it does."""
    from multiprocessing import parent_process
    from multiprocessing.connection import wait as wait_for

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setrecursionlimit(RECURSION)
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            wait_for([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ------------------------------------------------------------------------------------- a cluster
def connect(address: str) -> AbstractContextManager[Any]:
    """A client of the Dask scheduler at this address. Raises UsageError."""
    try:
        from distributed import Client
    except ImportError:
        raise UsageError("--dask needs the extra: pip install 'haocompact[dask]'") from None
    try:
        client: AbstractContextManager[Any] = Client(address, set_as_default=False, timeout=10)
    except (OSError, ValueError) as error:
        raise UsageError(f"no Dask scheduler answers at {address}: {error}") from None
    return client


def _threads(cluster: Any) -> int:
    return max(1, sum(map(int, cluster.nthreads().values())))


@contextmanager
def _merged(request: Request) -> Iterator[Path | None]:
    """A folder beside the archive for those of the workers; what is in it at the end goes into the archive."""
    if request.archive is None:
        yield None
        return
    Archive.open(request.archive, create=True).close()
    folder = workers_folder(request.archive.absolute())
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield folder
    finally:
        take_in(request.archive)


def take_in(archive: Path) -> None:
    """Merge the archives of workers into the one they belong to. What can't be merged stays where it is."""
    folder = workers_folder(archive.absolute())
    found = sorted(folder.glob("*.db"))
    if found:
        with Archive.open(archive, create=True) as target:
            for file in found:
                target.take_in(file)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


# ---------------------------------------------------------------------------------------- totals
@dataclass(slots=True)
class Totals:
    """What became of a batch. `skipped` counts by cause; bytes are those of the files that were compacted."""

    files: int = 0
    compacted: int = 0
    failed: int = 0
    degraded: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    bytes_before: int = 0
    bytes_after: int = 0

    def add(self, done: Done) -> None:
        self.files += 1
        if done.error is not None:
            self.failed += 1
        elif (cause := skip_cause(done)) is not None:
            self.skipped[cause] += 1
        else:
            self.compacted += 1
            self.degraded += done.degraded is not None
            self.bytes_before += done.bytes_before
            self.bytes_after += done.bytes_after


def skip_cause(done: Done) -> str | None:
    """Why a file stays as it is, None when it was compacted or failed."""
    if done.skip is not None:
        return done.skip.sub or done.skip.branch
    return done.left
