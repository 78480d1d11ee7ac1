"""Haocode messages, one a line: the seed's AgentMessage as JSON.

The seed stores no file itself; this form follows its fields: role, content, reasoning, tool_calls
(name and arguments object), kind, usage; ids are optional.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from haocompact.compaction import (
    COMPACTION_SUMMARY,
    CompactionPreparation,
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
    block_types,
    files_in_summary,
    numbers,
    read_list,
    rebuild_list,
    select_list,
    texts_of,
    word,
)
from haocompact.records import Record, Records, dump

NAME = "haocode"
TITLE = "Haocode messages, one a line"
KINDS: Mapping[str, str] = {
    "user": "message; kind compaction_summary in front is the previous summary",
    "assistant": "message",
    "toolResult": "message",
    "system": "leading ones stay in front, later ones are summarised",
}


def sniff(obj: Json, first: bool) -> int:
    if word(obj.get("role")) not in KINDS or "type" in obj:
        return 0
    if any(t.endswith(("tool_use", "tool_result")) for t in block_types(obj.get("content"))):
        return 0
    if obj["role"] == "toolResult" or obj.get("kind") == COMPACTION_SUMMARY:
        return 2
    usage = obj.get("usage")
    if isinstance(usage, dict) and "totalTokens" in usage:
        return 2
    calls = obj.get("tool_calls")
    if isinstance(calls, list) and calls:
        call = calls[0]
        return (
            2
            if isinstance(call, dict) and "name" in call and isinstance(call.get("arguments", {}), dict)
            else 0
        )
    return 1 if isinstance(obj.get("content"), (str, list)) or "reasoning" in obj or "content" in obj else 0


def read(records: Records, options: ReadOptions) -> Session:
    session = read_list(NAME, records, message_of, _parts, options, native_summary=True)
    _name_calls_in_order(session)
    return session


def message_of(record: Record) -> Message | None:
    obj = record.dict
    role = word(obj.get("role"))
    if role not in KINDS:
        return None
    if obj.get("kind") == COMPACTION_SUMMARY:
        return _summary(record, obj)
    usage = obj.get("usage")
    total = _context_tokens(usage) if role == "assistant" and isinstance(usage, dict) else 0
    kind = obj.get("kind")
    return Message(str(role), partial(_parts, obj), line=record.number, usage=total or None,
                   kind=kind if isinstance(kind, str) else "")  # fmt: skip


def _summary(record: Record, obj: Json) -> Message:
    text = "\n".join(t for t in texts_of(obj.get("content")) if t)
    kept = obj.get("kept")
    return Message("user", (Text(text),), line=record.number, kind=COMPACTION_SUMMARY,
                   files=files_in_summary(text), kept=kept if isinstance(kept, int) else 0)  # fmt: skip


def _context_tokens(usage: Json) -> float:
    """pi's names, Anthropic's (input without cache) or OpenAI's (input with cache)."""
    for keys in (("totalTokens",), ("total_tokens",), ("input", "output", "cacheRead", "cacheWrite"),
                 ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
                 ("prompt_tokens", "completion_tokens")):  # fmt: skip
        if total := numbers(usage, *keys):
            return total
    return 0


def _parts(obj: Json) -> Parts:
    texts = texts_of(obj.get("content"))
    if obj.get("role") == "toolResult":
        name = obj.get("tool_call_id")
        return (ToolResult(name if isinstance(name, str) else None, tuple(t for t in texts if t),
                           is_error=obj.get("is_error") is True, name=str(obj.get("tool_name") or "")),)  # fmt: skip
    parts: list[Part] = []
    if isinstance(obj.get("reasoning"), str) and obj["reasoning"]:
        parts.append(Thinking(obj["reasoning"]))
    parts += [Text(t) for t in texts]
    return (*parts, *_calls(obj))


def _calls(obj: Json) -> Iterable[ToolCall]:
    calls = obj.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            name = call.get("id")
            yield ToolCall(
                name if isinstance(name, str) else None, str(call.get("name") or ""), call.get("arguments")
            )


def _name_calls_in_order(session: Session) -> None:
    """Without ids, the results that follow an assistant answer its calls from left to right: same group."""
    group: object = None
    for message in session.messages:
        parts = message.parts
        if message.role == "assistant" and any(isinstance(p, ToolCall) and p.id is None for p in parts):
            message.group = group = f"line {message.line}"
        elif message.role == "toolResult" and all(isinstance(p, ToolResult) and p.id is None for p in parts):
            message.group = group
        else:
            group = None


def select(session: Session, plan: CompactionPreparation) -> list[int]:
    return select_list(session, plan)


def rebuild(session: Session, plan: CompactionPreparation, kept: Sequence[int],
            checkpoint: Checkpoint) -> Iterable[Piece]:  # fmt: skip
    line = {"role": "user", "kind": COMPACTION_SUMMARY, "content": checkpoint.summary}
    return rebuild_list(session, plan, kept, dump(line | {"kept": len(plan.kept)}))
