"""ShareGPT conversations: `{"conversations": [{"from", "value"}]}`, one a line or in one array. Only read.

Source: the data sets that share the format; calls as in LLaMA-Factory (`function_call`, `observation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from haocompact.compaction import Message, Text, ToolCall
from haocompact.errors import TranscriptError
from haocompact.formats.document import (
    all_conversations,
    all_of,
    call_of,
    choose,
    cut,
    first_of,
    gather,
    leaves_of,
    result_of,
)
from haocompact.formats.session import Json, ReadOptions, Session, word
from haocompact.records import Record, Records

NAME = "sharegpt"
TITLE = "ShareGPT conversations"
KINDS: Mapping[str, str] = {
    "system": "the system prompt",
    **dict.fromkeys(("human", "user"), "message (role user)"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard"), "message (role assistant)"),
    "function_call": "a tool call (role assistant)",
    **dict.fromkeys(("tool", "observation", "function_response"), "message (role toolResult)"),
}


def sniff(obj: Json, first: bool) -> int:
    turns = obj.get("conversations")
    turn = turns[0] if isinstance(turns, list) and turns else None
    return 2 if isinstance(turn, dict) and "from" in turn and "value" in turn else 0


def conversations(records: Records) -> list[int]:
    """Indexes of the lines that hold one."""
    if records.document is not None:
        return []
    return [i for i, record in enumerate(records) if sniff(record.dict, False)]


def read(records: Records, options: ReadOptions) -> Session:
    found = all_conversations(records, ("conversations",), lambda o: str(o.get("id") or ""))
    if not found:
        raise TranscriptError("no conversations in it")
    chosen = choose(found, options)
    leaves = leaves_of(records, found)
    records = cut(records, chosen.spans)
    session = gather(NAME, records, records.values, _told, lambda o: word(o.get("from")), KINDS)
    session.session_id = chosen.name or None
    session.leaves = leaves
    return session


def _told(obj: Json) -> Sequence[Message]:
    kind, value = word(obj.get("from")), obj.get("value")
    text = value if isinstance(value, str) else ""
    role = KINDS.get(kind, "")
    if kind == "function_call":
        return [Message("assistant", (_call(text),))]
    if "toolResult" in role:
        return [Message("toolResult", (result_of(None, (Text(text),)),))]
    if kind == "system":
        return [Message("system", (Text(text),))]
    return [Message("user" if "user" in role else "assistant", (Text(text),))] if role else []


def _call(text: str) -> ToolCall:
    found = call_of(None, "", text).arguments
    if isinstance(found, dict) and "name" in found:
        return call_of(None, found["name"], found.get("arguments"))
    return call_of(None, "", text)


def message_of(record: Record) -> Message | None:
    return first_of(_told, record)


def messages_of(records: Iterable[Record]) -> Iterable[Message]:
    return all_of(_told, records)
