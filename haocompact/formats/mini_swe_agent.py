"""mini-swe-agent trajectories: one JSON document, `{info, messages, trajectory_format}` or the array alone. Only read.

Source: mini-swe-agent's own trajectories, 2025 (array, text commands) and 2026 (`mini-swe-agent-1.1`, tool calls).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from haocompact.compaction import Message
from haocompact.formats.document import all_of, chat_message, cut, first_of, gather, spans_of
from haocompact.formats.session import Json, ReadOptions, Session, word
from haocompact.records import Record, Records

NAME = "mini-swe-agent"
TITLE = "mini-swe-agent trajectory"
KINDS: Mapping[str, str] = {
    "system": "the system prompt",
    "user": "message: the task, and what commands printed",
    "assistant": "message",
    "tool": "message (role toolResult)",
    "exit": "how the run ended: never sent, not read",
}


def sniff(obj: Json, first: bool) -> int:
    if not isinstance(obj.get("messages"), list):
        return 0
    named = word(obj.get("trajectory_format")).startswith("mini-swe-agent")
    info = obj.get("info")
    return 2 if named or (isinstance(info, dict) and "mini_version" in info) else 0


def sniff_element(obj: Json) -> int:
    """An element of a file that is one array: the first releases wrote their messages so."""
    return 1 if chat_message(obj) is not None and "type" not in obj else 0


def read(records: Records, options: ReadOptions) -> Session:
    path = () if isinstance(records.document, list) else ("messages",)
    records = cut(records, spans_of(records.data[:], path))
    return gather(NAME, records, records.values, _told, lambda o: word(o.get("role")), KINDS)


def _told(obj: Json) -> Sequence[Message]:
    message = chat_message(obj, _usage(obj))
    return [message] if message is not None else []


def _usage(obj: Json) -> object:
    """The provider's figures, where the answer itself is stored with the message."""
    extra = obj.get("extra")
    response = extra.get("response") if isinstance(extra, dict) else None
    return response.get("usage") if isinstance(response, dict) else None


def message_of(record: Record) -> Message | None:
    return first_of(_told, record)


def messages_of(records: Iterable[Record]) -> Iterable[Message]:
    return all_of(_told, records)
