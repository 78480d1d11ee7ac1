"""SWE-agent trajectories (`.traj`): one JSON document; `history` is what the model saw. Only read.

Source: SWE-agent's own trajectories, 2024 (text commands) and 2025 (tool calls).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from haocompact.compaction import Message
from haocompact.errors import TranscriptError
from haocompact.formats.document import (
    all_of,
    chat_message,
    cut,
    documents,
    first_of,
    gather,
    spans_of,
)
from haocompact.formats.session import Json, ReadOptions, Session, word
from haocompact.records import Record, Records

NAME = "swe-agent"
TITLE = "SWE-agent trajectory"
KINDS: Mapping[str, str] = {
    "system": "the system prompt",
    "user": "message: the task, demonstrations, and what commands printed",
    "assistant": "message",
    "tool": "message (role toolResult)",
}
FILE_TOOLS = {"str_replace_editor": "edited", "create": "written", "open": "read"}
FILE_KEYS = ("path", "filename")


def sniff(obj: Json, first: bool) -> int:
    return 2 if isinstance(obj.get("trajectory"), list) and isinstance(obj.get("history"), list) else 0


def read(records: Records, options: ReadOptions) -> Session:
    raw = records.data[:]
    found = [spans_of(raw, ("history",), a, b) for o, a, b in documents(records) if "history" in o]
    if not found:
        raise TranscriptError("no history in it")
    records = cut(records, found[-1])
    return gather(NAME, records, records.values, _told, lambda o: word(o.get("role")), KINDS)


def _told(obj: Json) -> Sequence[Message]:
    message = chat_message(obj)
    return [message] if message is not None else []


def message_of(record: Record) -> Message | None:
    return first_of(_told, record)


def messages_of(records: Iterable[Record]) -> Iterable[Message]:
    return all_of(_told, records)
