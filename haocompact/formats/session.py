"""What every adapter gives and takes: the session that was read, and the pieces of the one to write."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeGuard

from haocompact.compaction import (
    COMPACTION_SUMMARY,
    CompactionPreparation,
    FileOperations,
    Message,
    Parts,
    Text,
    ToolCall,
    ToolResult,
)
from haocompact.errors import NoTranscript, TranscriptError
from haocompact.records import Record, Records

Json = dict[str, Any]
Piece = int | tuple[int, bytes] | bytes
"""One line of the output: a kept record's index, (index, spliced bytes), or a new line's bytes."""


@dataclass(frozen=True, slots=True)
class Warned:
    """Something a user should know about the input; `line` is 1-based, 0 for the file as a whole.

    `opaque`: the line is no JSON object and could not be read.
    """

    line: int
    text: str
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """`leaf`: id of the entry whose branch is wanted, where a format has branches. `repair` as in the settings."""

    leaf: str | None = None
    repair: bool = True


@dataclass(slots=True)
class Session:
    """The active conversation, as the client itself would load it.

    `messages`: oldest first; a first message of kind compaction_summary is the summary that the client or
    haocompact wrote before. `unknown`: how many records there are of each kind that the adapter does not know.
    `leaves`: (line, id) of every branch end, in file order; none where there is no tree. `system`: messages of the
    system prompt, where it stands before the conversation. `state` belongs to the adapter.
    """

    format: str
    records: Records
    messages: list[Message]
    warnings: list[Warned] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    session_id: str | None = None
    context_window: int | None = None
    leaves: list[tuple[int, str]] = field(default_factory=list)
    system: list[Message] = field(default_factory=list)
    state: Any = None

    @property
    def ends(self) -> int:
        return max(1, len(self.leaves))

    @property
    def opaque_lines(self) -> int:
        return sum(w.opaque for w in self.warnings)

    def warn(self, line: int, text: str) -> None:
        self.warnings.append(Warned(line, text))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What stands in for the removed part. `hash` is the marker's, "" when nothing is archived."""

    summary: str
    read_files: Sequence[str]
    modified_files: Sequence[str]
    tokens_before: float
    tokens_after: int
    hash: str


@dataclass(frozen=True, slots=True)
class Compaction:
    """A compaction that stands in the log itself, whoever wrote it.

    `record`: index of its first record. `lines`: indexes of the records whose messages it took out of the
    context, in the conversation's order; they are still in the log. `created`: the log's own time. `hash`:
    the log's own name for it, "" when it has none.
    """

    record: int
    summary: str
    lines: Sequence[int]
    created: str = ""
    hash: str = ""


class Format(Protocol):
    """One client's format. An adapter is a module with these names; adapters never import each other.

    `sniff`: 2 when the line can only be this format's, 1 when it could be, 0 when it can't.
    `KINDS`: record kind -> what becomes of it.
    `read`: the active conversation. Raises TranscriptError when there is no usable one.
    `message_of`: the message that one record holds, seen alone (for `retrieve`).
    Where the client's log has a record for compactions, also:
    `append`: the bytes that compact it natively when they are put behind the old ones, which stay.
    `compactions`: those that stand in it on the active branch, oldest first.
    """

    NAME: str
    TITLE: str
    KINDS: Mapping[str, str]

    def sniff(self, obj: Json, first: bool) -> int: ...
    def read(self, records: Records, options: ReadOptions) -> Session: ...
    def message_of(self, record: Record) -> Message | None: ...


class WritableFormat(Format, Protocol):
    """A format that a compacted session is written in, too.

    `select`: indexes of the records that stay, ascending (all others are removed).
    `rebuild`: the pieces of the new file. Every selected index appears once.
    """

    def select(self, session: Session, plan: CompactionPreparation) -> list[int]: ...
    def rebuild(self, session: Session, plan: CompactionPreparation, kept: Sequence[int],
                checkpoint: Checkpoint) -> Iterable[Piece]: ...  # fmt: skip


# ------------------------------------------------------------------------------ reading, shared
def opaque(records: Iterable[Record]) -> Iterator[Warned]:
    """A warning for each line that is not JSON, or was read with a replacement."""
    for record in records:
        obj = record.obj
        if record.fault:
            yield Warned(record.number, f"{record.fault}: kept as it is, not read", opaque=True)
        elif record.note:
            yield Warned(record.number, record.note)
        elif obj is not None and not isinstance(obj, dict):
            yield Warned(record.number, "not a JSON object: kept as it is, not read", opaque=True)


@dataclass(frozen=True, slots=True)
class LazyParts:
    """Parts of record `index`, parsed when they are asked for; integers in arguments keep every digit."""

    records: Records
    index: int
    parse: Callable[[Json], Parts]

    def __call__(self) -> Parts:
        record = self.records[self.index]
        parts = self.parse(record.dict)
        if any(isinstance(p, ToolCall) and _has_huge_number(p.arguments) for p in parts):
            parts = self.parse(record.exact())
        return parts

    def mentions(self, words: Iterable[bytes]) -> bool:
        raw = self.records.raw(self.index)
        return any(word in raw for word in words)


def _has_huge_number(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_huge_number, value.values()))
    if isinstance(value, list):
        return any(map(_has_huge_number, value))
    return isinstance(value, float) and abs(value) >= 2**63


def texts_of(content: object, *, block_types: Sequence[str] = ("text",)) -> tuple[str, ...]:
    """The texts of a content field: a string, or a list of text blocks; anything else has none."""
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        return ()
    return tuple(
        b["text"]
        for b in content
        if isinstance(b, dict) and b.get("type") in block_types and isinstance(b.get("text"), str)
    )


def word(value: object) -> str:
    """A field that names a kind: its text, or "" for whatever else stands there."""
    return value if isinstance(value, str) else ""


def block_types(content: object) -> set[str]:
    """The types of the blocks of a content list."""
    return (
        {word(b.get("type")) for b in content if isinstance(b, dict)} if isinstance(content, list) else set()
    )


def numbers(usage: Mapping[str, Any], *keys: str) -> int | float:
    """Sum of the numbers under `keys`; a missing or impossible one (not finite, below 0) counts nothing."""
    total = sum(v for k in keys if _is_count(v := usage.get(k)))
    return (
        int(total) if math.isfinite(total) and total == int(total) else total if math.isfinite(total) else 0
    )


def _is_count(value: object) -> TypeGuard[int | float]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


NO_MESSAGE = "no usable message"


def no_messages(records: Records, format_name: str) -> TranscriptError:
    count = len(records)
    lines = f"{count} line{'s' * (count != 1)} read as {format_name}, none is a message"
    return NoTranscript(f"{NO_MESSAGE}: {lines if count else 'empty file'}")


# ------------------------------------------------------------------------------ writing, shared
def removed(total: int, kept: Sequence[int]) -> Iterator[int]:
    """Indexes in `range(total)` that are not in the ascending list `kept`."""
    wanted = iter(kept)
    following = next(wanted, None)
    for index in range(total):
        if index == following:
            following = next(wanted, None)
        else:
            yield index


def ends_in_torn_line(records: Records) -> bool:
    """Whether the last line is a half-written record: no newline and not JSON. It can't stay at the end
    of a file that a client appends to."""
    if not len(records):
        return False
    last = records[len(records) - 1]
    return not last.raw.endswith(b"\n") and not last.blank and last.obj is None


_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


def parse_time(text: object) -> datetime | None:
    if not isinstance(text, str) or not _STAMP.match(text):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment if 1970 < moment.year < 9998 else None  # room for time zones and added milliseconds


def format_time(moment: datetime, *, milliseconds: int = 0) -> str:
    """ISO 8601 with milliseconds and Z, `milliseconds` later than `moment`."""
    shifted = (moment + timedelta(milliseconds=milliseconds)).astimezone(UTC)
    return shifted.strftime("%Y-%m-%dT%H:%M:%S.") + f"{shifted.microsecond // 1000:03d}Z"


# --------------------------------------------------------------------- file lists inside a summary
_FILES = {
    "read": re.compile(r"^<read-files>\n(.*?)\n</read-files>$", re.DOTALL | re.MULTILINE),
    "edited": re.compile(r"^<modified-files>\n(.*?)\n</modified-files>$", re.DOTALL | re.MULTILINE),
}


def files_in_summary(summary: str) -> FileOperations:
    """The file lists at the end of a summary that haocompact (or pi) wrote."""
    files = FileOperations()
    for kind, pattern in _FILES.items():
        blocks = pattern.findall(summary)
        getattr(files, kind).update(path for path in (blocks[-1].split("\n") if blocks else ()) if path)
    return files


# ---------------------------------------------------------------------- plain lists of messages
_LIST_SUMMARY = re.compile(
    r"\A\[haocompact\] Summary of the conversation so far \((\d+) messages kept after it\)\.\n\n"
)


def list_summary(summary: str, kept: int) -> str:
    """The text of a summary message in formats that have no record of their own for it."""
    return f"[haocompact] Summary of the conversation so far ({kept} messages kept after it).\n\n{summary}"


def as_list_summary(text: str, line: int) -> Message | None:
    """The summary message that `list_summary` wrote, or None for any other text."""
    match = _LIST_SUMMARY.match(text)
    if match is None:
        return None
    body = text[match.end() :]
    return Message("user", (Text(body),), line=line, kind=COMPACTION_SUMMARY, files=files_in_summary(body),
                   kept=int(match[1]))  # fmt: skip


@dataclass(slots=True)
class Listing:
    """A list format's own state: records before the first message (system prompt, headers) stay in front."""

    head: list[int] = field(default_factory=list)


def read_list(name: str, records: Records, message_of: Callable[[Record], Message | None],
              parts: Callable[[Json], Parts], options: ReadOptions, *,
              native_summary: bool = False, silent: Sequence[str] = ()) -> Session:  # fmt: skip
    """One message a line in file order; leading system lines and headers are no part of the conversation.

    Without a summary record of the format's own, only the first message may be one; later, its text is a quote.
    `silent`: types of records that are known to say nothing.
    """
    unknown: list[tuple[int, str]] = []
    session = Session(name, records, [], state=Listing())
    listing: Listing = session.state
    for index, record in enumerate(records):
        session.warnings.extend(opaque([record]))
        message = message_of(record)
        if message is None or (message.role == "system" and not session.messages):
            if record.dict and not session.messages:
                listing.head.append(index)
            if message is not None:
                session.system.append(message)
            if message is None and record.dict and word(record.dict.get("type")) not in silent:
                kind = word(record.dict.get("role")) or word(record.dict.get("type"))
                unknown.append((record.number, kind or "no role"))
            continue
        if message.kind != COMPACTION_SUMMARY or session.messages:
            message.parts = LazyParts(records, index, parts)
            message.kind = message.kind if native_summary or message.kind != COMPACTION_SUMMARY else ""
        session.messages.append(message)
    if not session.messages:
        raise no_messages(records, name)
    if options.repair:
        _mark_kept_usage(session.messages)
    warn_unknown(session, unknown)
    check_pairs(session)
    return session


def warn_unknown(session: Session, records: Sequence[tuple[int, str]]) -> None:
    """Count all (line, kind) that the format does not know, and warn once."""
    session.unknown.update(kind for _, kind in records)
    if records:
        kinds = ", ".join(sorted({kind[:40] for _, kind in records})[:5])
        lines = ", ".join(str(line) for line, _ in records[:8]) + (", ..." if len(records) > 8 else "")
        session.warn(
            records[0][0], f"{len(records)} records of unknown kind ({kinds}), not read: lines {lines}"
        )


def _mark_kept_usage(messages: Sequence[Message]) -> None:
    """Figures on messages that the last compaction kept describe the prompt before it (R4)."""
    for message in messages[1 : 1 + messages[0].kept]:
        if message.usage is not None:
            message.usage, message.usage_note = None, "measured before the last compaction"


def select_list(session: Session, plan: CompactionPreparation) -> list[int]:
    """Head, protected messages, and every line from the first message of the tail on."""
    listing: Listing = session.state
    total = len(session.records) - ends_in_torn_line(session.records)
    front = range(plan.protected[0].line - 1, plan.removed[0].line - 1) if plan.protected else ()
    return [*listing.head, *front, *range(plan.retained_tail[0].line - 1, total)]


def rebuild_list(session: Session, plan: CompactionPreparation, kept: Sequence[int],
                 summary: bytes) -> Iterator[Piece]:  # fmt: skip
    """Head, the summary's line, what is kept."""
    first = plan.kept[0].line - 1
    yield from (i for i in kept if i < first)
    yield summary + session.records.newline
    yield from (i for i in kept if i >= first)


# ------------------------------------------------------------------------------ calls and results
PAIRS_CHECKED = 5000


def check_pairs(session: Session) -> None:
    """Warn about calls without result, results without call, second results and unreadable arguments.

    A result answers the nearest earlier open call of its id (ids may return in every turn). A session of
    more than 5,000 messages is not checked: that would parse all of it.
    """
    if len(session.messages) > PAIRS_CHECKED:
        return
    open_calls: dict[str, int] = {}
    answered: dict[str, int] = {}
    doubled: set[str] = set()
    last = session.messages[-1].line if session.messages else 0
    for message in session.messages:
        for part in message.parts:
            if isinstance(part, ToolCall) and message.role == "assistant":
                _check_call(session, message, part, open_calls)
            elif isinstance(part, ToolResult) and part.id is not None:
                _check_result(session, message, part.id, open_calls, answered, doubled)
    for name, line in open_calls.items():
        pending = "is still pending: it has no result yet" if line == last else "has no result"
        session.warn(line, f"call {name} {pending}")


def _check_call(session: Session, message: Message, call: ToolCall, open_calls: dict[str, int]) -> None:
    if call.id is not None:
        open_calls[call.id] = message.line
    if isinstance(call.arguments, str) and call.arguments.strip():
        session.warn(
            message.line, f"arguments of call {call.id or call.name} are not a JSON object: read as text"
        )


def _check_result(session: Session, message: Message, name: str, open_calls: dict[str, int],
                  answered: dict[str, int], doubled: set[str]) -> None:  # fmt: skip
    if name in open_calls:
        answered[name] = open_calls.pop(name)
    elif name not in answered:
        session.warn(message.line, f"result of {name} has no call before it")
    elif name not in doubled:
        doubled.add(name)
        session.warn(message.line, f"second result for call {name}")
