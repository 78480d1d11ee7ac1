"""berry-agent session events: an append-only log in which a compaction hides a range of `seq`.

Source: berry-agent 0.1.0-alpha.15 (`session/derive.js`, `session.js`, `import-gates.js`, `compaction/`).
Nothing is ever removed here: the client's importer wants every event, `seq` without a gap. A compacted log is
the old one, byte for byte, plus four events (one `compaction/surface` more per further range).

The client shows the summary where it stands, after the kept messages; here it is the first message.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

from haocompact import ccr, segment
from haocompact.ccr import CcrEntry, Wording, js_string
from haocompact.compaction import (
    COMPACTION_SUMMARY,
    CompactionPreparation,
    Image,
    Message,
    Parts,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from haocompact.errors import TranscriptError
from haocompact.formats.session import (
    Checkpoint,
    Compaction,
    Json,
    Piece,
    ReadOptions,
    Session,
    ends_in_torn_line,
    files_in_summary,
    format_time,
    no_messages,
    numbers,
    opaque,
    warn_unknown,
)
from haocompact.jsjson import stringify
from haocompact.records import Record, Records, dump

NAME = "berry"
TITLE = "berry-agent events"
HEADER = "berry-agent/session"
_AUDIT = "audit only, kept"
KINDS: Mapping[str, str] = {
    HEADER: "header, kept",
    "user/message": "message; of source compaction: the newest is the previous summary",
    "assistant/message": "message, with the tool/call events after it",
    "tool/call": "part of the assistant message before it",
    "tool/result": "message (role toolResult)",
    "turn/start": "turn limit, kept",
    "turn/end": "turn limit, kept",
    "compaction/surface": "hides a range of events",
    "llm/retry": "may hide the events of a failed attempt",
    "compaction/start": _AUDIT,
    "compaction/end": _AUDIT,
    "compaction/fallback": _AUDIT,
    "compaction/skip": _AUDIT,
    "llm/usage": _AUDIT,
    "request/header": "metadata, kept",
    "todo/write": "metadata, kept",
    "session/end-seed": "metadata, kept",
    "session/thinking-level": "metadata, kept",
    "session/paused": "metadata, kept",
    "sandbox/mode": "metadata, kept",
    "gate/decision": _AUDIT,
    "approval/asked": _AUDIT,
    "approval/decided": _AUDIT,
    "preset/applied": _AUDIT,
    "hook/registered": _AUDIT,
    "kv/written": _AUDIT,
    "doors/updated": _AUDIT,
    "capability/used": _AUDIT,
    "credentials/changed": _AUDIT,
    "plugin/installed": _AUDIT,
    "plugin/uninstalled": _AUDIT,
    "plugin/mounted": _AUDIT,
    "plugin/unmounted": _AUDIT,
    "plugin/toggled": _AUDIT,
    "plugin/updated": _AUDIT,
    "plugin/opens": _AUDIT,
}
TURN_BYTES = 64 * 1024  # a turn up to this size is kept or hidden as a whole
TURN_MESSAGES = 200
LIMITS = ("turn/end", "compaction/end")  # a turn begins after one of these


@dataclass(slots=True)
class Event:
    """What is remembered of one event. `index`: its record; `span`: the seq range it hides, inclusive."""

    index: int
    seq: int
    type: str
    call: object = None
    is_summary: bool = False
    usage: float | None = None
    usage_note: str = ""
    carrier: bool = False
    span: tuple[int, int] | None = None
    entry: CcrEntry | None = None


@dataclass(slots=True)
class Log:
    """All events in file order. `hidden`, by position in `events`: an older range covers it.

    `entries` remembers what series of messages (by the records they begin at) hash to.
    """

    events: list[Event]
    hidden: bytearray = field(default_factory=bytearray)
    entries: dict[tuple[int, ...], CcrEntry] = field(default_factory=dict)

    def entry(self, messages: Sequence[Projected]) -> CcrEntry:
        """Hash and size of a segment of these messages."""
        key = tuple(m.events[0].index for m in messages)
        if key not in self.entries:
            self.entries[key] = ccr.ccr_entry(m.form for m in messages)
        return self.entries[key]

    def span(self, first: int, last: int) -> list[Event]:
        """The events with `first <= seq <= last`."""
        return [e for e in self.events if first <= e.seq <= last]


class Group(NamedTuple):
    """The events of one projected message; `call` is the one that a result answers."""

    role: str
    events: list[Event]
    call: Event | None = None


class Projected(Message):
    """A message that knows its events, so that berry's own form of it can be made again."""

    __slots__ = ("events", "origin", "records")

    def __init__(self, records: Sequence[Record], group: Group) -> None:
        first = group.events[0]
        super().__init__(group.role, line=records[first.index].number, id=str(first.seq))
        self.records = records
        self.events = group.events
        self.origin = group.call
        self.usage, self.usage_note = first.usage, first.usage_note
        self.parts = lambda: _parts(self.form)

    @property
    def form(self) -> Json:
        """berry's projected message: `{"type":"user","seq":7,"content":"..."}`."""
        return _form(Group(self.role, self.events, self.origin), lambda e: self.records[e.index].dict)


def sniff(obj: Json, first: bool) -> int:
    if obj.get("format") == HEADER:
        return 2 if first else 1
    kind = obj.get("type")
    return 2 if _is_event(obj) and isinstance(kind, str) and "/" in kind and "data" in obj else 0


def _is_event(obj: Json) -> bool:
    seq = obj.get("seq")
    return isinstance(seq, int) and not isinstance(seq, bool) and isinstance(obj.get("type"), str)


# --------------------------------------------------------------------------------------- reading
def read(records: Records, options: ReadOptions) -> Session:
    """What the client derives from the log, the newest visible summary first. Raises TranscriptError."""
    session = Session(NAME, records, [])
    log = Log(list(_events(records, session)))
    log.hidden = _hidden(log.events)
    session.state = log
    visible = (e for e, gone in zip(log.events, log.hidden, strict=True) if not gone)
    session.messages = [Projected(records, group) for group in fold(visible)]
    if not session.messages:
        raise no_messages(records, TITLE)
    _check(session, log)
    if options.repair:
        _mark_stale(log, session.messages)
    _group(log, session)
    _summary_first(session)
    return session


def _events(records: Records, session: Session) -> Iterator[Event]:
    unknown: list[tuple[int, str]] = []
    for index, record in enumerate(records):
        session.warnings.extend(opaque([record]))
        obj = record.dict
        if _is_event(obj):
            if obj["type"] not in KINDS:
                unknown.append((record.number, obj["type"]))
            session.context_window = _window(obj) or session.context_window
            yield _event(index, obj)
        elif obj and obj.get("format") != HEADER:
            session.warn(
                record.number, "not an event (no type or no whole number seq): kept as it is, not read"
            )
    warn_unknown(session, unknown)


def _window(obj: Json) -> int | None:
    """The window that the client itself measured against, as it notes it when it compacts."""
    size = _data(obj).get("effectiveWindow") if obj["type"] == "compaction/start" else None
    return size if isinstance(size, int) and size > 0 else None


def _event(index: int, obj: Json) -> Event:
    event = Event(index, obj["seq"], sys.intern(obj["type"]))
    event.carrier = segment.carries_range(obj)
    event.span = segment.range_of(obj)
    if event.type in ("tool/call", "tool/result"):
        event.call = _call_key(_data(obj).get("toolCallId"))
    elif event.type == "assistant/message":
        event.usage, event.usage_note = _usage(_data(obj))
    elif event.type == "user/message":
        event.is_summary = segment.is_summary_event(obj)
    elif event.type == "compaction/surface":
        event.entry = next(iter(ccr.ccr_directory([obj])), None)
    return event


def _data(obj: Json) -> Json:
    data = obj.get("data")
    return data if isinstance(data, dict) else {}


def _call_key(value: object) -> object:
    """Ids are compared as JavaScript's Map does: 1 is not "1", and an object is only itself."""
    return (type(value).__name__, value) if isinstance(value, (str, int, float, type(None))) else object()


def _usage(data: Json) -> tuple[float | None, str]:
    """(context tokens, "") or (None, why the figure does not count)."""
    usage = data.get("usage")
    if not isinstance(usage, dict):
        return None, ""
    if data.get("stopReason") in ("error", "aborted"):
        return None, f"the turn ended with {data['stopReason']}"
    total = numbers(usage, "totalTokens") or numbers(usage, "input", "output", "cacheRead", "cacheWrite")
    return (total, "") if total > 0 else (None, "all figures are zero")


def _hidden(events: Sequence[Event]) -> bytearray:
    """For each event whether some range covers its seq."""
    spans = sorted(e.span for e in events if e.span is not None and e.span[0] <= e.span[1])
    starts: list[int] = []
    ends: list[int] = []
    for start, end in spans:
        if ends and start <= ends[-1] + 1:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    places = (bisect_right(starts, e.seq) - 1 for e in events)
    return bytearray(at >= 0 and e.seq <= ends[at] for e, at in zip(events, places, strict=True))


def fold(events: Iterable[Event]) -> Iterator[Group]:
    """The client's projection: calls belong to the assistant message before them, results stand alone.

    assistant, call, call, result, result -> assistant(2 calls), result, result
    """
    group: Group | None = None
    waiting: dict[object, Event] = {}
    for event in events:
        if event.type not in segment.MESSAGE_EVENTS:
            continue
        if event.type == "tool/call":
            group = group or Group("assistant", [])
            group.events.append(event)
            waiting[event.call] = event
            continue
        if group:
            yield group
        group = Group("assistant", [event]) if event.type == "assistant/message" else None
        if event.type == "user/message":
            yield Group("user", [event])
        elif event.type == "tool/result":
            yield Group("toolResult", [event], waiting.pop(event.call, None))
    if group:
        yield group


def derive(events: Sequence[Json]) -> list[Json]:
    """berry's projected messages of a list of events, ranges applied (`deriveMessages`)."""
    known = [_event(i, obj) for i, obj in enumerate(events) if _is_event(obj)]
    visible = (e for e, gone in zip(known, _hidden(known), strict=True) if not gone)
    return [_form(group, lambda e: events[e.index]) for group in fold(visible)]


def _form(group: Group, load: Callable[[Event], Json]) -> Json:
    """The projected message in berry's key order; what the event lacks stays away."""
    first = group.events[0]
    data = _data(load(first))
    if group.role == "user":
        return {"type": "user", "seq": first.seq} | _only(data, "content", "source")
    if group.role == "toolResult":
        return _result_form(first, data, load(group.call) if group.call else None)
    calls = [_call_form(_data(load(e))) for e in group.events if e.type == "tool/call"]
    own = data if first.type == "assistant/message" else {"content": []}
    form = {"type": "assistant", "seq": first.seq} | _only(own, "content") | {"toolCalls": calls}
    return form | _only(own, "usage", "stopReason", "errorMessage")


def _call_form(data: Json) -> Json:
    form = {"type": "toolCall"} | _only(data, "toolCallId")
    form |= {"toolName": data["name"]} if "name" in data else {}
    return form | _only(data, "arguments")


def _result_form(event: Event, data: Json, call: Json | None) -> Json:
    asked = _data(call) if call else {}
    name = asked.get("name")
    form = {"type": "toolResult", "seq": event.seq} | _only(data, "toolCallId")
    form |= {"toolName": "" if name is None else name} | _only(asked, "arguments")
    form |= {"output": data["content"]} if "content" in data else {}
    return form | {"isError": "error" in data}


def _only(data: Json, *keys: str) -> Json:
    return {key: data[key] for key in keys if key in data}


# ........................................................................................... parts
def _parts(form: Json) -> Parts:
    if form["type"] == "toolResult":
        blocks = list(_blocks(form.get("output")))
        texts = tuple(b.text for b in blocks if isinstance(b, (Text, Thinking)))
        images = sum(isinstance(b, Image) for b in blocks)
        return (ToolResult(_id(form), texts, images, form["isError"], _name(form)),)
    calls = form.get("toolCalls", ())
    return (*_blocks(form.get("content")), *(ToolCall(_id(c), _name(c), _arguments(c)) for c in calls))


def _blocks(content: object) -> Iterator[Text | Thinking | Image]:
    """Text, thinking and images; any other block as its JSON, so that nothing goes missing."""
    if not isinstance(content, list):
        if content is not None:
            yield Text(content if isinstance(content, str) else stringify(content))
        return
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            yield Text(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            yield Thinking(block["thinking"])
        elif kind == "image":
            yield Image(str(block.get("mimeType") or block.get("mediaType") or ""))
        else:
            yield Text(stringify(block))


def _id(form: Json) -> str | None:
    name = form.get("toolCallId")
    return name if isinstance(name, str) else None


def _name(form: Json) -> str:
    name = form.get("toolName")
    return name if isinstance(name, str) else ""


def _arguments(call: Json) -> object:
    """The parsed object; the text itself when it is no JSON object."""
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def message_of(record: Record) -> Message | None:
    """The message of one event, seen alone: a call without its assistant, a result without its tool."""
    return next(iter(messages_of([record])), None)


def messages_of(records: Sequence[Record]) -> list[Message]:
    """The messages that a series of events holds together, ranges among them applied."""
    known = [_event(i, record.dict) for i, record in enumerate(records) if _is_event(record.dict)]
    visible = (e for e, gone in zip(known, _hidden(known), strict=True) if not gone)
    messages: list[Message] = [Projected(records, group) for group in fold(visible)]
    for message in messages:
        if _is_summary(message):
            message.kind = COMPACTION_SUMMARY
    return messages


# .................................................................................. after the fold
def _check(session: Session, log: Log) -> None:
    """Warn about results without call, calls without result, and a seq that does not ascend."""
    waiting: dict[object, Event] = {}
    previous: Event | None = None
    for event in log.events:
        line = event.index + 1
        if previous is not None and event.seq <= previous.seq:
            session.warn(line, f"seq {event.seq} after {previous.seq}: the log is out of order")
        if event.type == "tool/call":
            waiting[event.call] = event
        elif event.type == "tool/result" and waiting.pop(event.call, None) is None:
            session.warn(line, f"result {_call_name(event)} has no call before it")
        previous = event
    for event in waiting.values():
        session.warn(event.index + 1, f"call {_call_name(event)} has no result")


def _call_name(event: Event) -> str:
    return str(event.call[1]) if isinstance(event.call, tuple) else "of an odd id"


def _mark_stale(log: Log, messages: Sequence[Message]) -> None:
    """A usage measured before the last compaction describes another prompt (R4)."""
    surface = next((e for e in reversed(log.events) if e.type == "compaction/surface" and e.carrier), None)
    for message in messages if surface else ():
        if message.usage is not None and message.line <= surface.index + 1:  # type: ignore[union-attr]
            message.usage = None
            message.usage_note = f"measured before the compaction on line {surface.index + 1}"  # type: ignore[union-attr]


def _group(log: Log, session: Session) -> None:
    """Mark what a cut may not part.

    A turn is hidden or kept as a whole, as the client does; only the last turn, and one too large to keep for
    the sake of its end, may be split. A message that begins with a call is tied to the message before it:
    alone it would be read as part of whatever assistant message happens to stand there.
    """
    turns = [
        e.index for e, gone in zip(log.events, log.hidden, strict=True) if e.type == "turn/end" and not gone
    ]
    by_turn: dict[int, list[Message]] = {}
    for message in session.messages:
        if not _is_summary(message):
            by_turn.setdefault(bisect_left(turns, message.line - 1), []).append(message)
    last = max(by_turn, default=0)
    for turn, messages in by_turn.items():
        if turn < last and len(messages) <= TURN_MESSAGES and _size(session.records, messages) <= TURN_BYTES:
            for message in messages:
                message.group = f"turn {turn}"
        else:
            _tie_calls(messages)


def _size(records: Records, messages: Iterable[Message]) -> int:
    return sum(len(records.raw(e.index)) for m in messages if isinstance(m, Projected) for e in m.events)


def _tie_calls(messages: Sequence[Message]) -> None:
    """One group from a response's first message to the last one that a later call of it opened."""
    opening = 0
    for i, message in enumerate(messages):
        if message.role == "assistant" and _first(message).type == "tool/call":
            for tied in messages[opening : i + 1]:
                tied.group = f"response {_first(messages[opening]).seq}"
        elif message.role != "toolResult":
            opening = i


def _first(message: Message) -> Event:
    assert isinstance(message, Projected)
    return message.events[0]


def _is_summary(message: Message) -> bool:
    return _first(message).is_summary


def _summary_first(session: Session) -> None:
    """Move the newest visible summary to the front, where every other client has it; its prefix goes."""
    messages = session.messages
    at = next((i for i in range(len(messages) - 1, -1, -1) if _is_summary(messages[i])), None)
    if at is None:
        return
    summary = messages.pop(at)
    text = summary.text.removeprefix(segment.SUMMARY_PREFIX).strip(ccr.JS_SPACE)
    summary.kind, summary.parts, summary.files = COMPACTION_SUMMARY, (Text(text),), files_in_summary(text)
    summary.kept, summary.at_end = at, at == len(messages)
    session.messages = [summary, *messages]


# ---------------------------------------------------------------------------- archive and retrieval
@dataclass(frozen=True, slots=True)
class Hidden:
    """One range of a compaction: positions of its first and last event, and the messages it hides."""

    first: int
    last: int
    messages: Sequence[Projected]
    entry: CcrEntry


def projected(session: Session, messages: Iterable[Message]) -> list[Json]:
    """berry's own form of messages of this session: what `ccr_hash` hashes."""
    return [m.form for m in messages if isinstance(m, Projected)]


def address(session: Session, plan: CompactionPreparation) -> tuple[str, int]:
    """(hash, UTF-16 units) of all that the plan hides, by berry's own rule: the marker's."""
    log: Log = session.state
    entry = log.entry(_removed(session, plan))
    return entry.hash, int(entry.chars)


def directory(session: Session) -> list[CcrEntry]:
    """The segments archived by the log's own compactions, oldest first: the markers to repeat."""
    return [e.entry for e in session.state.events if e.entry is not None]


def compactions(session: Session) -> list[Compaction]:
    """The log's own, each with all ranges that it hid."""
    log: Log = session.state
    summaries = {e.seq: e for e in log.events if e.is_summary}
    found: dict[int, Compaction] = {}
    for event in log.events:
        if event.entry is None or event.span is None:
            continue
        obj = session.records[event.index].dict
        seq = _data(obj).get("summarySeq")
        key = seq if isinstance(seq, int) else event.seq
        old = found.get(key) or Compaction(event.index, _summary_text(session, summaries.get(key)), ())
        lines = sorted({*old.lines, *(e.index for e in log.span(*event.span))})
        found[key] = Compaction(old.record, old.summary, lines, _created(obj), old.hash or event.entry.hash)
    return list(found.values())


def _summary_text(session: Session, event: Event | None) -> str:
    content = _data(session.records[event.index].dict).get("content") if event is not None else None
    return content.removeprefix(segment.SUMMARY_PREFIX) if isinstance(content, str) else ""


def _created(obj: Json) -> str:
    time = obj.get("time")
    if isinstance(time, (int, float)) and not isinstance(time, bool) and 0 <= time < 2**47:
        return format_time(datetime.fromtimestamp(time / 1000, UTC))
    return ""


def in_log(session: Session, hash: str) -> list[Message] | None:
    """The originals of a segment that this log's own compaction hid; None when it names no such hash."""
    log: Log = session.state
    surface = next((e for e in log.events if e.entry is not None and e.entry.hash == hash), None)
    if surface is None:
        return None
    inside = log.span(*surface.span) if surface.span else []
    return messages_of([session.records[e.index] for e in inside])


def render(message: Message, lang: str = "en") -> str:
    """A message as berry's `ccr_retrieve` prints it."""
    if isinstance(message, Projected) and message.kind != COMPACTION_SUMMARY:
        return render_form(message.form, lang)
    return ccr.render_message(message, lang)


def render_form(form: Json, lang: str = "zh", *, repair: bool = True) -> str:
    """A projected message as text. Repaired: arguments that are an object show as JSON."""
    words = ccr.wording(lang)
    if form["type"] == "toolResult":
        text = _text_of(form.get("output"))
        return ccr.result_line(js_string(form["toolName"]), text, form["isError"], words)
    lines = [f"[{form['type']}] {_text_of(form.get('content'))}"]
    lines += [_call_text(call, words, repair) for call in form.get("toolCalls", ())]
    if "errorMessage" in form:
        lines.append(words.error.format(error=js_string(form["errorMessage"])))
    return "\n".join(lines)


def _call_text(call: Json, words: Wording, repair: bool) -> str:
    name, id, arguments = (call.get(k, "undefined") for k in ("toolName", "toolCallId", "arguments"))
    plain = isinstance(arguments, str) or not repair
    return ccr.call_line(
        js_string(name), js_string(id), js_string(arguments) if plain else stringify(arguments), words
    )


def _text_of(content: object) -> str:
    if not isinstance(content, list):
        return "" if content is None else js_string(content)
    return "\n".join(_block_text(block) for block in content)


def _block_text(block: object) -> str:
    is_text = isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)
    return str(block["text"]) if is_text else stringify(block)  # type: ignore[index]


# --------------------------------------------------------------------------------------- writing
def segments(session: Session, plan: CompactionPreparation) -> list[Hidden]:
    """The ranges that hide what the plan removes, and the summary before it; disjoint, in order.

    One range, unless an older compaction (or a failed attempt that the client hid) lies in between: ranges
    never overlap, and never cover an event that hides something itself. A range starts at a turn limit
    wherever what it hides does; it ends after the turn's `turn/end` when the turn is hidden to its end.
    Raises TranscriptError for a log whose `seq` do not ascend: a range there would hide something else.
    """
    log: Log = session.state
    if any(a.seq >= b.seq for a, b in pairwise(log.events)):
        raise TranscriptError("seq does not ascend: no range of this log can be hidden")
    gone = _removed(session, plan)
    states = _states(log, session, gone)
    ranges = [_trimmed(log, states, *run) for run in _runs(states) if GONE in states[run[0] : run[1]]]
    seqs = [_first(m).seq for m in gone]
    found = []
    for first, last in ranges:
        start, stop = log.events[first].seq, log.events[last].seq
        inside = gone[bisect_left(seqs, start) : bisect_right(seqs, stop)]
        found.append(Hidden(first, last, inside, log.entry(inside)))
    return found


def archived(session: Session, plan: CompactionPreparation) -> list[int]:
    """Indexes of the records that hold the hidden messages: what the archive is to keep."""
    return sorted(e.index for m in _removed(session, plan) for e in m.events)


def _removed(session: Session, plan: CompactionPreparation) -> list[Projected]:
    old = [m for m in session.messages[:1] if m.kind == COMPACTION_SUMMARY]
    gone = (*old, *plan.messages_to_summarize, *plan.turn_prefix_messages)
    return sorted((m for m in gone if isinstance(m, Projected)), key=lambda m: m.events[0].index)


FREE, GONE, BLOCKED = 0, 1, 2


def _states(log: Log, session: Session, gone: Iterable[Projected]) -> bytearray:
    """By position: part of a message to hide, not to be covered (kept, hidden before, a carrier), neither."""
    position = {e.index: i for i, e in enumerate(log.events)}
    states = bytearray(
        BLOCKED if hid or e.carrier else FREE for e, hid in zip(log.events, log.hidden, strict=True)
    )
    for state, messages in ((BLOCKED, session.messages), (GONE, gone)):
        for message in messages:
            assert isinstance(message, Projected)
            for event in message.events:
                states[position[event.index]] = state
    return states


def _runs(states: bytearray) -> Iterator[tuple[int, int]]:
    """Stretches without a blocked event: (first, past the last)."""
    start = 0
    for i, state in enumerate(states):
        if state == BLOCKED:
            if i > start:
                yield start, i
            start = i + 1
    if start < len(states):
        yield start, len(states)


def _trimmed(log: Log, states: bytearray, start: int, stop: int) -> tuple[int, int]:
    """(first, last) position of the range in a run: from the turn's first event to the turn's last."""
    first = states.index(GONE, start)
    last = states.rindex(GONE, start, stop)
    begin = next((i + 1 for i in range(first - 1, start - 1, -1) if log.events[i].type in LIMITS), None)
    if begin is None:
        begin = start if start == 0 or log.hidden[start - 1] or log.events[start - 1].carrier else first
    end = next((i for i in range(last + 1, stop) if log.events[i].type in ("turn/end", "turn/start")), None)
    return begin, end if end is not None and log.events[end].type == "turn/end" else last


def select(session: Session, plan: CompactionPreparation) -> list[int]:
    """Every line, but for a half-written last one: the importer refuses a file with it."""
    return list(range(len(session.records) - ends_in_torn_line(session.records)))


def rebuild(session: Session, plan: CompactionPreparation, kept: Sequence[int],
            checkpoint: Checkpoint) -> Iterable[Piece]:  # fmt: skip
    """All old lines, then the compaction's events."""
    yield from kept
    for event in _compaction(session, plan, checkpoint):
        yield dump(event) + session.records.newline


def append(session: Session, plan: CompactionPreparation, checkpoint: Checkpoint) -> bytes:
    """The bytes to add to the log (to its whole lines: a torn last one has to go)."""
    records = session.records
    whole = len(records) - ends_in_torn_line(records)
    gap = b"" if not whole or records.raw(whole - 1).endswith(b"\n") else records.newline
    return gap + b"".join(dump(e) + records.newline for e in _compaction(session, plan, checkpoint))


def _compaction(session: Session, plan: CompactionPreparation, checkpoint: Checkpoint) -> list[Json]:
    """`compaction/start`, the summary, one `compaction/surface` per range, `compaction/end`.

    Each surface has the hash of what its range hides. Of several the largest has the marker's, so that the
    marker leads somewhere in the client too; the client lists the others in its directory.
    """
    hidden = segments(session, plan)
    hashes = [h.entry.hash for h in hidden]
    largest = max(range(len(hidden)), key=lambda i: hidden[i].entry.messages)
    hashes[largest] = checkpoint.hash or hashes[largest]
    bodies: list[tuple[str, Json]] = [
        ("compaction/start", _intent(plan)),
        (
            "user/message",
            {"content": f"{segment.SUMMARY_PREFIX} {checkpoint.summary}", "source": "compaction"},
        ),
        *(("compaction/surface", _sizes(h)) for h in hidden),
        ("compaction/end", {"reason": "completed"} | _total(hidden)),
    ]
    log: Log = session.state
    last = log.events[-1]
    time = _last_time(session)
    events: list[Json] = [{"type": kind, "seq": last.seq + i, "time": time + i, "data": data}
              for i, (kind, data) in enumerate(bodies, 1)]  # fmt: skip
    for event, part, name in zip(events[2:-1], hidden, hashes, strict=True):
        seqs = [e.seq for e in log.events[part.first : part.last + 1]]
        event["data"] = {"summarySeq": events[1]["seq"]} | event["data"] | {"ccrHash": name}
        event["surfaceOp"] = {"op": "replace", "start": seqs[0], "end": seqs[-1]}
        event["sourceEventSeqs"] = [*seqs, events[1]["seq"]]
    return events


def _intent(plan: CompactionPreparation) -> Json:
    basis = "estimate" if plan.estimate.last_usage_index is None else "usage"
    return {"reason": "threshold", "willRetry": True, "basis": basis, "estTokens": plan.tokens_before,
            "summarizer": "plugin:haocompact"}  # fmt: skip


def _sizes(hidden: Hidden) -> Json:
    return {"occludedMessages": hidden.entry.messages, "occludedChars": hidden.entry.chars}


def _total(hidden: Sequence[Hidden]) -> Json:
    return {"occludedMessages": sum(h.entry.messages for h in hidden),
            "occludedChars": sum(h.entry.chars for h in hidden)}  # fmt: skip


def _last_time(session: Session) -> int:
    """The newest time in the log (milliseconds), 0 when no event has one: made times are derived from it."""
    log: Log = session.state
    times = (session.records[e.index].dict.get("time") for e in reversed(log.events))
    return next((int(t) for t in times if isinstance(t, (int, float)) and not isinstance(t, bool)), 0)


__all__ = [
    "KINDS",
    "NAME",
    "TITLE",
    "address",
    "append",
    "archived",
    "compactions",
    "derive",
    "directory",
    "in_log",
    "message_of",
    "messages_of",
    "projected",
    "read",
    "rebuild",
    "render",
    "segments",
    "select",
    "sniff",
]
