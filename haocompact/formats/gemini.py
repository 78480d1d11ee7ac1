"""Gemini CLI sessions: a record a line, or (before) one JSON document. Only read.

Source: google-gemini/gemini-cli, `packages/core/src/services/chatRecordingService.ts` and its types (2026).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from haocompact.compaction import COMPACTION_SUMMARY, Message, Part, Thinking, ToolCall, ToolResult
from haocompact.formats.document import all_of, content_parts, cut, first_of, gather, result_of, spans_of
from haocompact.formats.session import (
    Json,
    ReadOptions,
    Session,
    files_in_summary,
    numbers,
    word,
)
from haocompact.records import Record, Records

NAME = "gemini"
TITLE = "Gemini CLI session"
KINDS: Mapping[str, str] = {
    "session": "session id, project and times: not read",
    "$set": "newer values of the session record; `messages` in it replace all before",
    "$rewindTo": "takes back the messages from this one on",
    "user": "message",
    "gemini": "message, and what its calls gave (role toolResult)",
    **dict.fromkeys(("info", "error", "warning"), "shown to the user only: not read"),
}
FILE_TOOLS = {"read_file": "read", "write_file": "written", "replace": "edited"}
FILE_KEYS = ("file_path", "absolute_path")
SNAPSHOT = "<state_snapshot>"  # how the client's own summary begins


def sniff(obj: Json, first: bool) -> int:
    if isinstance(obj.get("sessionId"), str) and isinstance(obj.get("projectHash"), str):
        return 2
    if isinstance(obj.get("$set"), dict) or isinstance(obj.get("$rewindTo"), str):
        return 2
    named = isinstance(obj.get("id"), str) and "content" in obj and "timestamp" in obj
    return (2 if obj.get("type") == "gemini" else 1) if named and _kind(obj) in KINDS else 0


def read(records: Records, options: ReadOptions) -> Session:
    if records.document is not None or (len(records) == 1 and "messages" in records[0].dict):
        records = own = cut(records, spans_of(records.data[:], ("messages",)))
        indexes = own.values
    else:
        records, indexes = _active(records)
    session = gather(NAME, records, indexes, _told, _kind, KINDS)
    first = session.messages[0]
    if first.role == "user" and first.text.lstrip().startswith(SNAPSHOT):
        first.kind, first.files = COMPACTION_SUMMARY, files_in_summary(first.text)
        first.at_end = len(session.messages) == 1
    return session


def _active(records: Records) -> tuple[Records, list[int]]:
    """The records that count: of one id the last, at the place of the first, without what was taken back."""
    live: dict[str, int] = {}
    replaced = -1
    for index, record in enumerate(records):
        obj = record.dict
        changed = obj.get("$set")
        if isinstance(obj.get("$rewindTo"), str):
            _rewind(live, obj["$rewindTo"])
        elif isinstance(obj.get("id"), str):
            live[obj["id"]] = index
        elif isinstance(changed, dict) and isinstance(changed.get("messages"), list):
            replaced = index if changed["messages"] else -1
    if replaced < 0:
        return records, list(live.values())
    start = sum(len(records.raw(i)) for i in range(replaced))
    end = start + len(records.raw(replaced))
    own = cut(records, spans_of(records.data[:], ("$set", "messages"), start, end))
    return own, own.values


def _rewind(live: dict[str, int], name: str) -> None:
    """Drop it and all behind it; everything, where it is not there (as the client does)."""
    ids = list(live)
    for gone in ids[ids.index(name) if name in live else 0 :]:
        del live[gone]


def _kind(obj: Json) -> str:
    if "$set" in obj or "$rewindTo" in obj:
        return "$set" if "$set" in obj else "$rewindTo"
    return "session" if "projectHash" in obj else word(obj.get("type"))


def _told(obj: Json) -> Sequence[Message]:
    kind = _kind(obj)
    content = tuple(_content(obj.get("content")))
    if kind == "user":
        return [Message("user", content)]
    if kind != "gemini":
        return []
    calls = obj.get("toolCalls")
    calls = [c for c in calls if isinstance(c, dict)] if isinstance(calls, list) else []
    made = (ToolCall(word(c.get("id")) or None, word(c.get("name")), c.get("args")) for c in calls)
    results = tuple(_result(c) for c in calls if c.get("result") is not None)
    said = Message("assistant", (*_thoughts(obj), *content, *made), usage=_usage(obj))
    return [said, Message("toolResult", results)] if results else [said]


def _usage(obj: Json) -> float | None:
    tokens = obj.get("tokens")
    return numbers(tokens, "total") or None if isinstance(tokens, dict) else None


def _content(content: object) -> Iterator[Part]:
    """Parts without those that are thoughts, calls or results: they stand in fields of their own."""
    for part in content if isinstance(content, list) else (content,):
        if isinstance(part, dict) and part.get("thought"):
            continue
        if isinstance(part, dict) and ("functionCall" in part or "functionResponse" in part):
            continue
        yield from content_parts(part)


def _thoughts(obj: Json) -> Iterator[Part]:
    thoughts = obj.get("thoughts")
    for thought in thoughts if isinstance(thoughts, list) else ():
        if isinstance(thought, dict):
            yield Thinking("\n".join(word(thought[k]) for k in ("subject", "description") if thought.get(k)))


def _result(call: Json) -> ToolResult:
    parts = call["result"] if isinstance(call["result"], list) else [call["result"]]
    content = [p for part in parts for p in _response(part)]
    return result_of(call.get("id"), content, word(call.get("name")), is_error=call.get("status") == "error")


def _response(part: object) -> Iterator[Part]:
    response = part.get("functionResponse") if isinstance(part, dict) else None
    inner = response.get("response") if isinstance(response, dict) else None
    if isinstance(inner, dict):
        told = next((inner[k] for k in ("output", "error") if isinstance(inner.get(k), str)), inner)
        yield from content_parts(told)
    else:
        yield from content_parts(part)


def message_of(record: Record) -> Message | None:
    return first_of(_told, record)


def messages_of(records: Iterable[Record]) -> Iterable[Message]:
    return all_of(_told, records)
