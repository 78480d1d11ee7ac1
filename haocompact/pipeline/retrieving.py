"""The way back: segments and whole originals out of the archive, or out of the log itself."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import overload

from haocompact.archive import Archive, Archives, Damage, Run, Segment
from haocompact.ccr import parse_ccr_section, render_message, window
from haocompact.compaction import (
    COMPACTION_SUMMARY,
    Message,
)
from haocompact.errors import (
    ArchivedElsewhere,
    ArchiveError,
    DamagedArchive,
    TranscriptError,
    UnknownHash,
)
from haocompact.files import (
    Source,
    absolute,
    open_source,
)
from haocompact.formats import FORMATS
from haocompact.formats.session import (
    Format,
    Session,
)
from haocompact.logged import Logged, logged_segments
from haocompact.logged import messages as logged_messages
from haocompact.pipeline.planning import Request, load, own_lines
from haocompact.records import Data, Record, chunks_of


@dataclass(frozen=True, slots=True)
class Directory:
    """Segments of a transcript, oldest first; `missing`: markers whose segment is not here.

    `in_log`: hashes of those that still stand in the transcript itself.
    """

    path: str
    segments: tuple[Segment, ...]
    missing: tuple[str, ...] = ()
    in_log: frozenset[str] = frozenset()


def directory(source: Source, request: Request) -> Directory:
    """The segments that a transcript's markers name, or else those archived from its path; then its log's own."""
    session, _ = load(source, request)
    previous = session.messages[0] if session.messages else None
    text = previous.text if previous is not None and previous.kind == COMPACTION_SUMMARY else ""
    markers = [e.hash for e in parse_ccr_section(text)]
    logged = {found.segment.hash: found.segment for found in logged_segments(session, source.path)}
    known: dict[str, Segment] = {}
    here: list[Segment] = []
    if set(markers) - logged.keys() or not logged or any(path.exists() for path in _named(request)):
        with opened_archives(request) as archive:
            known = {s.hash: s for s in archive.segments()}  # only what is here is ours, whatever a text says
            path = os.path.abspath(source.path)
            here = [known[r.hash] for r in reversed(archive.runs()) if os.path.abspath(r.source) == path]
    pool = logged | known
    others = [s for h, s in logged.items() if h not in markers]
    found = [*others, *(pool[h] for h in markers if h in pool)] if markers else [*here, *others]
    missing = tuple(h for h in markers if h not in pool)
    return Directory(
        source.path, tuple(dict.fromkeys(found)), missing, frozenset(logged.keys() - known.keys())
    )


def clean_hash(text: str) -> str:
    """The 16 digits of a hash or marker. Raises UnknownHash for anything else."""
    digits = text.strip().removeprefix("<<ccr:").removesuffix(">>")
    if len(digits) != 16 or any(c not in "0123456789abcdef" for c in digits):
        raise UnknownHash(f"not found: {text!r} is no hash of an archive (16 hexadecimal digits)")
    return digits


def raw_segment(hash: str, request: Request, path: str = "") -> Iterator[bytes]:
    """The original lines of a segment: out of the archive, or of the log of the transcript at `path`."""
    with _home(hash, request, path) as home:
        if isinstance(home, Archive):
            yield from home.raw(clean_hash(hash), absolute(path))
        else:
            session, logged = home
            yield from logged.raw(session)


@contextlib.contextmanager
def _home(hash: str, request: Request, path: str) -> Iterator[Archive | tuple[Session, Logged]]:
    """Where a segment is: the archive, else the transcript's own log.

    Raises UnknownHash, ArchivedElsewhere where `path` has the marker, ArchiveError.
    """
    digits = clean_hash(hash)
    with contextlib.ExitStack() as stack:
        home: Archive | tuple[Session, Logged] | None
        try:
            home = stack.enter_context(opened_archives(request)).holding(digits)
        except DamagedArchive:
            raise
        except ArchiveError as error:
            home = _in_log(digits, request, path, stack)
            if home is None:
                if isinstance(error, UnknownHash) and digits in _markers(path, request):
                    raise _elsewhere([digits], request, path) from None
                raise
        yield home


def _markers(path: str, request: Request) -> list[str]:
    """The hashes that a transcript's summary names; none when it can't be read."""
    if path in ("", "-"):
        return []
    try:
        with open_source(path) as source:
            return [e.hash for e in parse_ccr_section(summary_of(source, request))]
    except TranscriptError:
        return []


def _elsewhere(hashes: Sequence[str], request: Request, path: str) -> ArchivedElsewhere:
    names, searched = ", ".join(hashes), ", ".join(map(str, _named(request)))
    return ArchivedElsewhere(f"archived elsewhere: the marker of {names} is good, but it is not in {searched}; "
                             "name the archive it was written to with --archive", path=path)  # fmt: skip


def _in_log(
    hash: str, request: Request, path: str, stack: contextlib.ExitStack
) -> tuple[Session, Logged] | None:
    """The segment of this hash in a transcript, which stays open as long as the stack."""
    if not path or not os.path.isfile(path):
        return None
    session, _ = load(stack.enter_context(open_source(path)), request)
    found = (s for s in logged_segments(session, path) if s.segment.hash == hash)
    return next(((session, logged) for logged in found), None)


def segment_messages(hash: str, request: Request, path: str = "") -> list[Message]:
    """The messages of a segment, oldest first. Raises as `raw_segment` does."""
    with _home(hash, request, path) as home:
        return list(_messages_in(home, hash, path)[0])


def window_text(hash: str, request: Request, from_message: int, budget: int, path: str = "") -> str:
    """One window of a segment as text, with a last line that says how to go on."""
    with _home(hash, request, path) as home:
        messages, adapter = _messages_in(home, hash, path)
        render = getattr(adapter, "render", render_message)
        return window(messages, from_message, budget, request.lang, render=render)


def _messages_in(
    home: Archive | tuple[Session, Logged], hash: str, path: str
) -> tuple[Sequence[Message], Format]:
    """The messages of a segment, to be read while its home is open, and their format."""
    if not isinstance(home, Archive):
        session, logged = home
        return logged_messages(session, logged), FORMATS[session.format]
    hash, path = clean_hash(hash), absolute(path)
    adapter = FORMATS[home.find(hash, path).format]
    together = getattr(adapter, "messages_of", None)  # where a message spans several lines
    if together is None:
        return _Archived(home, hash, path, adapter), adapter
    records = (Record(number, raw) for number, raw in enumerate(home.raw(hash, path), 1))
    return list(together(list(records))), adapter


class _Archived(Sequence[Message]):
    """The messages of a segment, a line each; only the frames of those that are asked for are read."""

    BLOCK = 32  # lines that are read together

    def __init__(self, archive: Archive, hash: str, path: str, adapter: Format) -> None:
        self._numbers = archive.message_lines(hash, path)
        self._lines = partial(archive.lines, hash, source=path)
        self._record = getattr(adapter, "record", Record)
        self._message_of = adapter.message_of
        self._block: tuple[int, list[bytes]] = 0, []

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        first, raws = self._block
        if not first <= index < first + len(raws):
            first = index
            raws = list(self._lines(numbers=self._numbers[index : index + self.BLOCK]))
            self._block = first, raws
        record = self._record(self._numbers[index] + 1, raws[index - first])
        return self._message_of(record) or Message("other", line=record.number)


def verify(request: Request) -> Iterator[Damage]:
    """Re-hash the whole archive and name what is damaged."""
    with opened_archives(request) as archives:
        for archive in archives:
            yield from archive.verify()


def summary_of(source: Source, request: Request) -> str:
    """The summary that a transcript begins with. Raises TranscriptError when it has none."""
    session, _ = load(source, request)
    first = session.messages[0] if session.messages else None
    if first is None or first.kind != COMPACTION_SUMMARY:
        raise TranscriptError("there is no summary in it", path=source.path)
    return first.text


def restore_input(hash: str, request: Request, path: str = "") -> Iterator[bytes]:
    """The whole input of one compaction: of `path` when that transcript has one by this hash, else the newest."""
    with opened_archives(request) as archive:
        digits = clean_hash(hash)
        runs = archive.runs(digits)
        if not runs and digits in _markers(path, request):
            raise _elsewhere([digits], request, path)
        if not runs:
            raise UnknownHash(f"not found: {hash} is no segment of {', '.join(map(str, archive.paths))}")
        own = [r for r in runs if path and os.path.abspath(r.source) == os.path.abspath(path)]
        yield from archive.restore((own or runs)[0])


def restore(source: Source, request: Request, hash: str | None = None) -> Iterator[bytes]:
    """The original of a compacted transcript, with whatever was appended since.

    With `hash`, the input of that one compaction. Without, compactions are undone as long as the transcript
    still begins with what one of them wrote. Raises UnknownHash, DamagedArchive, ArchiveError.
    """
    if hash is not None:
        yield from restore_input(hash, request, source.path)
        return
    own = own_lines(source, request)
    if own is not None:
        for part in own:
            yield from _restored_line(part, request)
        return
    with opened_archives(request) as archive:
        yield from _restored(archive, source, request)


def _restored_line(part: Source | bytes, request: Request) -> Iterator[bytes]:
    """A conversation as it was, or, when nothing of it is archived, as it is."""
    if isinstance(part, bytes):
        yield part
        return
    with opened_archives(request) as archive:
        run = _run_of(archive, part.data)
        yield from archive.restore(run) if run is not None else (part.data[:],)


def _restored(archive: Archives, source: Source, request: Request) -> Iterator[bytes]:
    """Undo from the newest compaction back; what stands behind each output is carried along."""
    data: Data = source.data
    appended: list[bytes] = []
    undone = 0
    while (run := _run_of(archive, data)) is not None:
        appended.insert(0, data[run.output_size :])
        data = b"".join(archive.restore(run))
        undone += 1
    if not undone:
        listed = directory(source, request)
        if listed.missing:
            raise _elsewhere(listed.missing, request, source.path)
        if listed.in_log:
            raise ArchiveError(
                "nothing was taken out of this transcript: the lines before its compaction record are "
                "the original",
                path=source.path,
            )
        if listed.segments:
            raise ArchiveError("the transcript was changed after its compaction, so its original can't be put "
                               "together; retrieve FILE HASH --restore gives the input of one compaction")  # fmt: skip
        raise UnknownHash("nothing in the archive belongs to this transcript", path=source.path)
    yield from chunks_of(data)
    for part in filter(None, appended):
        if not data[-1:].endswith(
            b"\n"
        ):  # a torn or unended last line of the original stays a line of its own
            yield b"\n"
        yield part
        data = part


def _run_of(archive: Archives, data: Data) -> Run | None:
    """The newest run whose output this file begins with."""
    sizes = sorted({r.output_size for r in archive.runs() if 0 < r.output_size <= len(data)}, reverse=True)
    for size in sizes:
        digest = hashlib.sha256(data[:size]).hexdigest()
        runs = archive.runs(output_sha256=digest)
        if runs:
            return runs[0]
    return None


def opened_archives(request: Request) -> Archives:
    """The archives to read from: those named, with what a distributed batch left beside them."""
    named = _named(request)
    if not named:
        raise ArchiveError("--no-archive leaves nothing to retrieve from")
    left = [file for path in named for file in sorted(workers_folder(path).glob("*.db"))]
    return Archives.open([*named, *left])


def _named(request: Request) -> tuple[Path, ...]:
    return request.archives or ((request.archive,) if request.archive is not None else ())


def workers_folder(archive: Path) -> Path:
    """Where the workers of a distributed batch keep their archives until they are merged."""
    return archive.with_name(f"{archive.name}.workers")
