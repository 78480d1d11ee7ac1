"""The log of skipped compactions: whole lines from many processes, rotated by size, read back by cause.

A line is `[TIME] [COMPACT_NONE] branch=...` with the seed's fields; ours have an ISO time in front and
`source="PATH"` behind. The seed's own lines have only a time of day.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from io import TextIOWrapper
from pathlib import Path

from haocompact.compaction import NoCompaction
from haocompact.diag import TAG, compaction_line
from haocompact.errors import UsageError

MAX_BYTES, BACKUPS = 2 << 20, 3  # a line has about 400 bytes: some 20,000 skips are remembered


# --------------------------------------------------------------------------------------- writing
def log_line(skip: NoCompaction, source: str, now: datetime | None = None) -> str:
    """One line of the log: ISO 8601 time, the seed's line, source=PATH (quoted as JSON would)."""
    stamp = (now or datetime.now(UTC)).isoformat(timespec="milliseconds")
    return f"[{stamp}] {compaction_line(skip)} source={_quoted(source)}"


def _quoted(text: str) -> str:
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def append_log(path: Path, line: str, *, max_bytes: int = MAX_BYTES, backups: int = BACKUPS) -> None:
    """Append one whole line, after a rotation when it would not fit (PATH.1 is the newest old one).

    The handler rotates; the lock sees to it that one process at a time writes or rotates. Raises OSError.
    """
    import logging
    from logging.handlers import RotatingFileHandler

    class Handler(RotatingFileHandler):
        def _open(self) -> TextIOWrapper:
            return open(path, "a", encoding="utf-8", errors="replace", opener=_private)

        def handleError(self, record: logging.LogRecord) -> None:
            raise  # whatever stopped `emit`

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(path), contextlib.closing(Handler(path, "a", max_bytes, backups)) as handler:
        handler.emit(logging.LogRecord("haocompact", logging.INFO, "", 0, line, None, None))


_private = partial(os.open, mode=0o600)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the kernel's lock of the file that stands at `path`, made private when there is none."""
    while True:
        with open(path, "a", opener=_private) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(
                    os.fstat(file.fileno()), os.stat(path)
                ):  # else another one has just rotated
                    yield
                    return


# ------------------------------------------------------------------------------------ reading back
@dataclass(frozen=True, slots=True)
class LogEntry:
    """One [COMPACT_NONE] line of a log. `time` as written: ISO in our lines, HH:MM:SS.mmm in the seed's.

    `moment`: the time with its date; what the seed's line leaves out is worked out by `dated`.
    """

    time: str
    branch: str
    sub: str | None
    source: str | None
    text: str
    moment: datetime | None = None


_LOGGED = re.compile(
    r"^\[(?P<time>[\dT:.+\-Z ]+)\] \[COMPACT_NONE\] branch=(?P<branch>\w+)(?: sub=(?P<sub>\w+))?(?= |$)"
)
_SOURCE = re.compile(r' source="((?:[^"\\]|\\.)*)"$')


def parse_log_line(line: str) -> LogEntry | None:
    """The entry of one log line, or None for a foreign or broken line."""
    match = _LOGGED.match(line)
    if match is None:
        return None
    source = _SOURCE.search(line)
    return LogEntry(
        match["time"], match["branch"], match["sub"], _unquoted(source[1]) if source else None, line,
        _moment(match["time"]),
    )  # fmt: skip


def _unquoted(text: str) -> str | None:
    try:
        return text.replace('\\"', '"').encode("ascii").decode("unicode_escape")
    except UnicodeError:  # nothing that `_quoted` writes
        return None


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.astimezone()


@dataclass(frozen=True, slots=True)
class Log:
    """What a log holds. `broken`: lines with the tag that can't be read; `foreign`: all others."""

    path: str
    entries: Sequence[LogEntry]
    broken: int = 0
    foreign: int = 0


def read_log(path: Path, since: datetime | None = None) -> Log:
    """The log and what was rotated away from it, oldest line first. Raises OSError."""
    rotated = [p for n in range(BACKUPS, 0, -1) if (p := path.with_name(f"{path.name}.{n}")).is_file()]
    entries: list[LogEntry] = []
    others: list[str] = []
    for file in (*rotated, path):
        lines = [line for line in file.read_text("utf-8", "replace").split("\n") if line.strip()]
        found = [(parse_log_line(line.rstrip("\r")), line) for line in lines]
        others += [line for entry, line in found if entry is None]
        written = datetime.fromtimestamp(file.stat().st_mtime).astimezone()
        entries += dated([entry for entry, _ in found if entry is not None], written)
    broken = sum(TAG in line for line in others)
    recent = [e for e in entries if since is None or (e.moment is not None and e.moment >= since)]
    return Log(str(path), recent, broken, len(others) - broken)


def dated(entries: Sequence[LogEntry], written: datetime) -> list[LogEntry]:
    """Entries with their dates: a bare time of day is on the last day on which it is no later than what follows.

    `written` is when the file was last written, which is the time of its last line at the earliest.
    """
    result, later = [], written
    for entry in reversed(entries):
        moment = entry.moment or _on_the_day(entry.time, later)
        later = moment or later
        result.append(replace(entry, moment=moment))
    return result[::-1]


def _on_the_day(text: str, later: datetime) -> datetime | None:
    try:
        clock = datetime.strptime(text, "%H:%M:%S.%f" if "." in text else "%H:%M:%S").time()
    except ValueError:
        return None
    found = datetime.combine(later.date(), clock, later.tzinfo)
    return found if found <= later + timedelta(seconds=2) else found - timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Group:
    """Skips of one cause and one transcript; `first` and `last` as they are written in the log."""

    branch: str
    sub: str | None
    source: str | None
    count: int
    first: LogEntry
    last: LogEntry


def grouped(entries: Iterable[LogEntry]) -> list[Group]:
    """By branch, sub-branch and transcript; the most frequent first."""
    groups: dict[tuple[str, str | None, str | None], list[LogEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.branch, entry.sub, entry.source), []).append(entry)
    found = [Group(*key, len(those), those[0], those[-1]) for key, those in groups.items()]
    return sorted(found, key=lambda group: -group.count)


_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def since(text: str, now: datetime) -> datetime:
    """`90s`, `30m`, `2h`, `7d`, `2w` before now, or an ISO date or time (local if bare). Raises UsageError."""
    if match := re.fullmatch(r"(\d{1,5}(?:\.\d+)?) ?([smhdw])", text.strip()):
        return now - timedelta(**{_UNITS[match[2]]: float(match[1])})
    found = _moment(text.strip())
    if found is None:
        raise UsageError(
            f"--since {text!r} is neither a duration (30m, 2h, 7d) nor an ISO time (2026-05-11T06:30)"
        )
    return found


_half_a_second = partial(time.sleep, 0.5)


def follow(path: Path, wait: Callable[[], None] = _half_a_second) -> Iterator[LogEntry]:
    """Entries as they are written from now on, across rotations. Ends when `wait` raises."""
    place = os.stat(path) if path.exists() else None
    offset, rest = (place.st_size, b"") if place else (0, b"")
    while True:
        wait()
        try:
            with path.open("rb") as file:
                now = os.fstat(file.fileno())
                if place is not None and (now.st_ino != place.st_ino or now.st_size < offset):
                    old = path.with_name(f"{path.name}.1")
                    rest += _tail(old, place.st_ino, offset)
                    offset = 0
                file.seek(offset)
                data = file.read()
                place, offset = now, offset + len(data)
        except FileNotFoundError:
            continue
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if (entry := parse_log_line(line.decode("utf-8", "replace").rstrip("\r"))) is not None:
                yield replace(
                    entry, moment=entry.moment or _on_the_day(entry.time, datetime.now().astimezone())
                )


def _tail(path: Path, inode: int, offset: int) -> bytes:
    """What was written to a file after `offset` before it was rotated to `path`."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_ino != inode:
                return b""
            file.seek(offset)
            return file.read()
    except OSError:
        return b""
