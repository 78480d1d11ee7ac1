"""Anthropic messages, one a line: `{"role", "content"}`, or whole responses of the Messages API.

Source: Anthropic Messages API reference (content blocks, usage).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from haocompact.compaction import (
    CompactionPreparation,
    Image,
    Message,
    Part,
    Parts,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from haocompact.formats.session import (
    Checkpoint,
    Json,
    Piece,
    ReadOptions,
    Session,
    as_list_summary,
    block_types,
    list_summary,
    numbers,
    read_list,
    rebuild_list,
    select_list,
    texts_of,
    word,
)
from haocompact.records import Record, Records, dump

NAME = "anthropic"
TITLE = "Anthropic messages, one a line"
KINDS: Mapping[str, str] = {
    "user": "message; only tool results: role toolResult; the first may be a summary of haocompact's",
    "assistant": "message",
    "system": "leading ones stay in front, later ones are summarised",
}
OWN_BLOCKS = {"tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use"}
KNOWN_BLOCKS = OWN_BLOCKS | {"text", "image", "document", "search_result", "compaction"}
USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


def sniff(obj: Json, first: bool) -> int:
    if word(obj.get("role")) not in KINDS or obj.get("type", "message") != "message" or "sessionId" in obj:
        return 0
    if any(k in obj for k in ("tool_calls", "tool_call_id", "kind", "parentId")):
        return 0
    content = obj.get("content")
    if isinstance(content, str):
        return 1
    if not isinstance(content, list):
        return 0
    types = block_types(content)
    tools = {t for t in types if t.endswith(("tool_use", "tool_result"))}
    if not types <= KNOWN_BLOCKS | tools:
        return 0
    images = any(isinstance(b, dict) and b.get("type") == "image" and "source" in b for b in content)
    if tools or types & OWN_BLOCKS or images or obj.get("type") == "message":
        return 2
    return (
        2 if obj["role"] == "assistant" and types == {"text"} else 1
    )  # chat assistants store a plain string


def read(records: Records, options: ReadOptions) -> Session:
    return read_list(NAME, records, message_of, _parts, options)


def message_of(record: Record) -> Message | None:
    obj = record.dict
    role = word(obj.get("role"))
    if role not in KINDS:
        return None
    content = obj.get("content")
    if role == "user" and isinstance(content, str) and (found := as_list_summary(content, record.number)):
        return found
    usage = obj.get("usage")
    total = numbers(usage, *USAGE) if role == "assistant" and isinstance(usage, dict) else 0
    results = role == "user" and isinstance(content, list) and any(_is_result(b) for b in content)
    return Message(
        "toolResult" if results else str(role), partial(_parts, obj), line=record.number, usage=total or None
    )


def _is_result(block: object) -> bool:
    return isinstance(block, dict) and word(block.get("type")).endswith("tool_result")


def _parts(obj: Json) -> Parts:
    content = obj.get("content")
    if isinstance(content, str):
        return (Text(content),)
    blocks = content if isinstance(content, list) else []
    return tuple(part for b in blocks if isinstance(b, dict) for part in _block(b))


def _block(block: Json) -> Iterator[Part]:
    match block.get("type"):
        case "text":
            yield Text(str(block.get("text") or ""))
        case "compaction" if isinstance(
            block.get("content"), str
        ):  # the API's own summary of what was before
            yield Text(block["content"])
        case "thinking":
            yield Thinking(str(block.get("thinking") or ""))
        case str(kind) if kind.endswith("tool_use"):
            yield ToolCall(_string(block.get("id")), str(block.get("name") or ""), block.get("input"))
        case str(kind) if kind.endswith("tool_result"):
            inner = block.get("content")
            images = (
                sum(isinstance(b, dict) and b.get("type") == "image" for b in inner)
                if isinstance(inner, list)
                else 0
            )
            yield ToolResult(
                _string(block.get("tool_use_id")), texts_of(inner), images, block.get("is_error") is True
            )
        case "image":
            yield Image()
        case "document" | "search_result":
            source = block.get("source")
            text = (
                source.get("data")
                if isinstance(source, dict) and source.get("type") == "text"
                else block.get("title")
            )
            yield Text(str(text or ""))


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def select(session: Session, plan: CompactionPreparation) -> list[int]:
    return select_list(session, plan)


def rebuild(session: Session, plan: CompactionPreparation, kept: Sequence[int],
            checkpoint: Checkpoint) -> Iterable[Piece]:  # fmt: skip
    text = list_summary(checkpoint.summary, len(plan.kept))
    return rebuild_list(session, plan, kept, dump({"role": "user", "content": text}))
