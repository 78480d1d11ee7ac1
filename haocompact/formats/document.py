"""What the formats that are only read share: one JSON document a session, and messages of several a record.

`cut` makes a record of each message inside a document, so that everything behind the adapter sees records, as it
does of a log with one record a line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from haocompact.compaction import Image, Message, Part, Parts, Text, Thinking, ToolCall, ToolResult
from haocompact.errors import TranscriptError
from haocompact.formats.session import (
    Json,
    LazyParts,
    ReadOptions,
    Session,
    check_pairs,
    no_messages,
    numbers,
    opaque,
    warn_unknown,
    word,
)
from haocompact.records import Cut, Record, Records, elements, value_span

Told = Callable[[Json], Sequence[Message]]
"""The messages that one record holds, oldest first."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One of several in a file: its own name, "" for none, and the byte ranges of its messages."""

    name: str
    spans: Sequence[tuple[int, int]]


def spans_of(
    raw: bytes, path: tuple[str, ...], start: int = 0, end: int | None = None
) -> list[tuple[int, int]]:
    """Byte ranges of the elements of the array at `path` in the value that is `raw[start:end]`."""
    inner = raw[start:end]
    found = value_span(inner, path) if path else (0, len(inner))
    return [(start + a, start + b) for a, b in elements(inner, *found)] if found else []


def documents(records: Records) -> Iterator[tuple[Json, int, int]]:
    """Each JSON object of a file, with its byte range: one a line, the elements of one array, or the file itself."""
    whole = records.document
    if isinstance(whole, list):
        spans = spans_of(records.data[:], ())
        yield from ((o, a, b) for o, (a, b) in zip(whole, spans, strict=True) if isinstance(o, dict))
    elif isinstance(whole, dict):
        yield whole, 0, len(records.data)
    else:
        position = 0
        for record in records:
            if record.dict:
                yield record.dict, position, position + len(record.raw)
            position += len(record.raw)


def all_conversations(records: Records, path: tuple[str, ...],
                      name_of: Callable[[Json], str]) -> list[Conversation]:  # fmt: skip
    """Every object that has an array at `path`, as a conversation of its own."""
    raw = records.data[:]
    return [Conversation(name_of(o), spans_of(raw, path, a, b)) for o, a, b in documents(records)
            if isinstance(o.get(path[0]), list)]  # fmt: skip


def choose(found: Sequence[Conversation], options: ReadOptions) -> Conversation:
    """The one that --leaf names, by its name or its 1-based number; else the last. Raises TranscriptError."""
    if options.leaf is None:
        return found[-1]
    for number, one in enumerate(found, 1):
        if options.leaf in (one.name, str(number)):
            return one
    raise TranscriptError(f"no conversation {options.leaf} in it: there are {len(found)}, numbered from 1")


def leaves_of(records: Records, found: Sequence[Conversation]) -> list[tuple[int, str]]:
    """(line, name) of each of several conversations; of one without a name of its own, its number."""
    raw = records.data[:]
    names = Counter(one.name for one in found)
    if len(found) < 2:
        return []
    return [(raw.count(b"\n", 0, one.spans[0][0]) + 1 if one.spans else 0,
             one.name if one.name and names[one.name] == 1 else str(number))
            for number, one in enumerate(found, 1)]  # fmt: skip


def cut(records: Records, spans: Sequence[tuple[int, int]]) -> Cut:
    return Cut(records.data, spans)


def gather(name: str, records: Records, indexes: Iterable[int], told: Told, kind_of: Callable[[Json], str],
           kinds: Mapping[str, str]) -> Session:  # fmt: skip
    """The messages of these records. Those of one record are never parted; a leading system prompt is apart."""
    session = Session(name, records, [])
    unknown: list[tuple[int, str]] = []
    for index in indexes:
        record = records[index]
        session.warnings.extend(opaque([record]))
        kind = kind_of(record.dict)
        if record.dict and kind not in kinds:
            unknown.append((record.number, kind))
        for message in placed(records, index, record, told):
            leads = message.role == "system" and not session.messages
            (session.system if leads else session.messages).append(message)
    if not session.messages:
        raise no_messages(records, name)
    warn_unknown(session, unknown)
    check_pairs(session)
    session.warnings = [replace(w, line=records.line(w.line)) for w in session.warnings]
    return session


def placed(records: Records, index: int, record: Record, told: Told) -> Sequence[Message]:
    """The messages of one record, with its place; their parts are parsed when they are asked for."""
    found = told(record.dict)
    for position, message in enumerate(found):
        message.line = record.number
        message.parts = LazyParts(records, index, partial(_parts_at, told, position))
        if len(found) > 1 and message.group is None:
            message.group = index
    return found


def _parts_at(told: Told, position: int, obj: Json) -> Parts:
    return told(obj)[position].parts


def first_of(told: Told, record: Record) -> Message | None:
    return next(iter(told(record.dict)), None)


def all_of(told: Told, records: Iterable[Record]) -> Iterator[Message]:
    """The conversation's messages of a segment's records."""
    for record in records:
        yield from told(record.dict)


# --------------------------------------------------------------------------------- shared shapes
CHAT_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
              "tool": "toolResult", "function": "toolResult"}  # fmt: skip


def chat_message(obj: Json, usage: object = None) -> Message | None:
    """A message in the shape of OpenAI's chat API, as most agents store them; None for another role."""
    role = CHAT_ROLES.get(word(obj.get("role")))
    if role is None:
        return None
    content = tuple(content_parts(obj.get("content")))
    if role == "toolResult":
        ids = obj.get("tool_call_ids")
        name = ids[0] if isinstance(ids, list) and ids else obj.get("tool_call_id") or obj.get("name")
        return Message(role, (result_of(name, content, word(obj.get("name"))),))
    reasoning = obj.get("reasoning_content")
    thinking = (Thinking(reasoning),) if isinstance(reasoning, str) and reasoning else ()
    total = numbers(usage, "total_tokens") if isinstance(usage, dict) else 0
    return Message(role, (*thinking, *content, *_chat_calls(obj)), usage=total or None)


def content_parts(content: object) -> Iterator[Part]:
    """Texts and images of a content field; an object that is neither is given as JSON."""
    if isinstance(content, str):
        yield Text(content)
    elif isinstance(content, list):
        for block in content:
            yield from content_parts(block)
    elif isinstance(content, dict):
        kind = word(content.get("type"))
        if isinstance(content.get("text"), str):
            yield Text(content["text"])
        elif "image" in kind or "inlineData" in content or "image_urls" in content:
            urls = content.get("image_urls")
            yield from (Image() for _ in (urls if isinstance(urls, list) else (1,)))
        elif not kind:
            yield Text(json.dumps(content, ensure_ascii=False))


def result_of(id: object, content: Iterable[Part], name: str = "", *, is_error: bool = False) -> ToolResult:
    content = tuple(content)
    texts = tuple(p.text for p in content if isinstance(p, Text))
    images = sum(isinstance(p, Image) for p in content)
    return ToolResult(id if isinstance(id, str) and id else None, texts, images, is_error, name)


def _chat_calls(obj: Json) -> Iterator[ToolCall]:
    calls = obj.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        inner = call.get("function") if isinstance(call, dict) else None
        if isinstance(inner, dict):
            yield call_of(call.get("id"), inner.get("name"), inner.get("arguments"))


def call_of(id: object, name: object, arguments: object) -> ToolCall:
    """`arguments` as an object, or the text as it is where it holds none."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    return ToolCall(id if isinstance(id, str) and id else None, word(name), arguments)
