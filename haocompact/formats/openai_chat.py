"""OpenAI chat messages, one a line.

Source: OpenAI API reference, chat completions: message roles, tool_calls, usage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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

NAME = "openai"
TITLE = "OpenAI chat, one message a line"
KINDS: Mapping[str, str] = {
    "system": "leading ones stay in front, later ones are summarised",
    "developer": "as system",
    "user": "message; the first may be a summary of haocompact's",
    "assistant": "message",
    "tool": "message (role toolResult)",
    "function": "message (role toolResult, the older form)",
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
         "tool": "toolResult", "function": "toolResult"}  # fmt: skip
REASONING = ("reasoning_content", "reasoning", "reasoning_text")


def sniff(obj: Json, first: bool) -> int:
    role = word(obj.get("role"))
    if role not in ROLES or "type" in obj or "kind" in obj:
        return 0
    if role in ("tool", "developer", "function") or "tool_call_id" in obj or "function_call" in obj:
        return 2 if role != "toolResult" else 0
    calls = obj.get("tool_calls")
    if isinstance(calls, list) and calls:
        return 2 if isinstance(calls[0], dict) and ("function" in calls[0] or "custom" in calls[0]) else 0
    types = block_types(obj.get("content"))
    own = {"thinking", "image"} & types or any(t.endswith(("tool_use", "tool_result")) for t in types)
    return 0 if own else 1


def read(records: Records, options: ReadOptions) -> Session:
    return read_list(NAME, records, message_of, _parts, options)


def message_of(record: Record) -> Message | None:
    obj = record.dict
    role = ROLES.get(str(obj.get("role")))
    if role is None:
        return None
    if (
        role == "user"
        and isinstance(obj.get("content"), str)
        and (found := as_list_summary(obj["content"], record.number))
    ):
        return found
    usage = obj.get("usage")
    total = _context_tokens(usage) if role == "assistant" and isinstance(usage, dict) else 0
    return Message(role, partial(_parts, obj), line=record.number, usage=total or None)


def _context_tokens(usage: Json) -> float:
    """Prompt (cached input included) and completion (reasoning included)."""
    return numbers(usage, "total_tokens") or numbers(usage, "prompt_tokens", "completion_tokens")


def _parts(obj: Json) -> Parts:
    role = ROLES.get(str(obj.get("role")))
    if role == "toolResult":
        name = obj.get("tool_call_id") or obj.get("name")
        content = obj.get("content")
        images = sum(isinstance(p, Image) for p in _content(content))
        name = name if isinstance(name, str) else None
        return (ToolResult(name, texts_of(content), images, name=str(obj.get("name") or "")),)
    thinking = next((v for k in REASONING if isinstance(v := obj.get(k), str) and v), None)
    parts: list[Part] = [Thinking(thinking)] if thinking else []
    parts += _content(obj.get("content"))
    if isinstance(obj.get("refusal"), str) and obj["refusal"]:
        parts.append(Text(obj["refusal"]))
    return (*parts, *_calls(obj))


def _content(content: object) -> Iterable[Part]:
    if isinstance(content, str):
        yield Text(content)
    for block in content if isinstance(content, list) else ():
        if not isinstance(block, dict):
            continue
        if block.get("type") in ("text", "refusal", "input_text", "output_text"):
            yield Text(str(block.get("text") or block.get("refusal") or ""))
        elif block.get("type") in ("image_url", "input_image"):
            yield Image()


def _calls(obj: Json) -> Iterable[ToolCall]:
    calls = obj.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if not isinstance(call, dict):
            continue
        inner = call.get("function") or call.get("custom") or {}
        if isinstance(inner, dict):
            name = call.get("id")
            yield ToolCall(name if isinstance(name, str) else None, str(inner.get("name") or ""),
                           _arguments(inner.get("arguments", inner.get("input"))))  # fmt: skip
    legacy = obj.get("function_call")
    if isinstance(legacy, dict):
        name = str(legacy.get("name") or "")
        yield ToolCall(name, name, _arguments(legacy.get("arguments")))


def _arguments(arguments: object) -> object:
    """The parsed object; the text itself when it is no JSON object (an interrupted stream leaves those)."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def select(session: Session, plan: CompactionPreparation) -> list[int]:
    return select_list(session, plan)


def rebuild(session: Session, plan: CompactionPreparation, kept: Sequence[int],
            checkpoint: Checkpoint) -> Iterable[Piece]:  # fmt: skip
    text = list_summary(checkpoint.summary, len(plan.kept))
    return rebuild_list(session, plan, kept, dump({"role": "user", "content": text}))
