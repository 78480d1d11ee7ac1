"""Every error of haocompact: one class, one exit code, one stable code string.

    HaoError
    ├── UsageError          2   options that contradict each other
    ├── NothingToCompact    3   --check: no compaction would happen
    ├── TranscriptError     4   unreadable, unknown or undecidable transcript
    │   ├── NoTranscript    4   a file that holds no conversation
    │   └── OnlyRead        4   a format that is read, never written
    ├── SummaryError        5   the summarizer failed (--on-failure fail)
    ├── ArchiveError        6   archive missing or unreadable
    │   ├── UnknownHash     6   no such segment
    │   ├── ArchivedElsewhere 6 the marker is good, its segment is in another archive
    │   └── DamagedArchive  6   a segment does not match its hash
    └── WriteError          7   the result could not be written
        ├── SourceChanged   7   the transcript changed while it was being compacted
        ├── SourceBusy      7   another process is compacting it, or its client may be at it
        ├── NotInPlace      7   its client would not stand a replaced file of this kind
        ├── HasForks        7   forks of the session read from its file by offset
        ├── HardLinked      7   the transcript has several names
        └── WorkerDied      7   the process that worked on the transcript was killed

Exit code 0 is success (skips included) and 1 a bug: an exception that is none of these.
"""

from __future__ import annotations


class HaoError(Exception):
    """An error with an exit code. `str(error)` is one line: place, numbers, next step.

    `why`: what `diag` says of it: (cause, explanation, suggestion).
    """

    exit_code = 1
    code = "ERROR"
    why: tuple[str, str, str] | None = None

    def __init__(self, message: str, *, path: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.line = line

    def __str__(self) -> str:
        path = "(stdin)" if self.path == "-" else self.path
        place = ":".join(str(p) for p in (path, self.line) if p is not None)
        text = " ".join(str(self.args[0]).split())
        return f"{place}: {text}" if place else text


class UsageError(HaoError):
    """Options that contradict each other, or a value out of range."""

    exit_code = 2
    code = "USAGE"

    def __init__(self, message: str, *, code: str = "USAGE") -> None:
        super().__init__(message)
        self.code = code


class NothingToCompact(HaoError):
    """Raised by --check when no compaction would happen."""

    exit_code = 3
    code = "NOTHING_TO_COMPACT"


class TranscriptError(HaoError):
    """The transcript is missing, unreadable, of an unknown format, or holds no message."""

    exit_code = 4
    code = "TRANSCRIPT"


class NoTranscript(TranscriptError):
    """The file is no transcript of a known format, or holds no message. A batch passes it over."""

    code = "NO_TRANSCRIPT"


class OnlyRead(TranscriptError):
    """The format is only read: plan and diag take it, compact writes it as another. A batch passes it over."""

    code = "ONLY_READ"


class SummaryError(HaoError):
    """The summarizer failed, and its answer must not become a checkpoint.

    `tokens`: what the failed request took all the same (input, output), as its server counted.
    """

    exit_code = 5
    code = "SUMMARY"

    def __init__(self, message: str, *, tokens: tuple[int, int] = (0, 0)) -> None:
        super().__init__(message)
        self.tokens = tokens


class ArchiveError(HaoError):
    """The archive is missing or can't be opened."""

    exit_code = 6
    code = "ARCHIVE"


class UnknownHash(ArchiveError):
    """The archive holds no segment of this hash."""

    code = "ARCHIVE_UNKNOWN"


class ArchivedElsewhere(ArchiveError):
    """A transcript has this marker, but what it stands for is in another archive: name that one."""

    code = "ARCHIVED_ELSEWHERE"


class DamagedArchive(ArchiveError):
    """A stored segment does not match its hash, or the store itself is damaged."""

    code = "ARCHIVE_DAMAGED"


class WriteError(HaoError):
    """The result could not be written; the original is untouched."""

    exit_code = 7
    code = "WRITE"


class SourceChanged(WriteError):
    """The transcript changed while it was being compacted; it was left alone."""

    code = "SOURCE_CHANGED"


class SourceBusy(WriteError):
    """Another process is compacting this transcript, or it changed so lately that its client may be at it."""

    code = "SOURCE_BUSY"


class NotInPlace(WriteError):
    """The client of this transcript would not stand its replacement; write the result elsewhere."""

    code = "NOT_IN_PLACE"


class HasForks(WriteError):
    """Forks of this session read their earlier turns out of its file; write the result elsewhere, or append."""

    code = "HAS_FORKS"


class HardLinked(WriteError):
    """The transcript has several names (hard links); replacing it would part them."""

    code = "HARD_LINKED"


class WorkerDied(WriteError):
    """The process that worked on this transcript was killed, out of memory perhaps; it was left alone."""

    code = "WORKER_DIED"
