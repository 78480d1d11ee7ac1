"""Items of the OpenAI Responses API, one a line: messages, calls and their outputs, reasoning.

Source: OpenAI API reference, responses: input and output items, usage, compaction.
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
    list_summary,
    no_messages,
    read_list,
    rebuild_list,
    select_list,
    texts_of,
    word,
)
from haocompact.jsjson import stringify
from haocompact.records import Record, Records, dump

NAME = "responses"
TITLE = "OpenAI Responses items, one a line"
CALL, RESULT = "message (a call)", "message (role toolResult)"
KINDS: Mapping[str, str] = {
    "message": "by role: leading system and developer ones stay in front; the first user one may be a summary",
    "reasoning": "message, kept together with the item that it led to",
    "compaction": "the server's own, unreadable: the newest is kept in front, what is before it is removed",
    "item_reference": "left in place, not read: the item is on the server",
    **dict.fromkeys(("function_call", "custom_tool_call", "web_search_call", "file_search_call", "computer_call",
                     "code_interpreter_call", "image_generation_call", "local_shell_call", "shell_call",
                     "apply_patch_call", "mcp_call", "tool_search_call"), CALL),
    **dict.fromkeys(("function_call_output", "custom_tool_call_output", "computer_call_output", "shell_call_output",
                     "local_shell_call_output", "apply_patch_call_output", "tool_search_output"), RESULT),
}  # fmt: skip
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
SELF_CONTAINED = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
)
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def sniff(obj: Json, first: bool) -> int:
    kind = word(obj.get("type"))
    if "payload" in obj or "sessionId" in obj or "parentId" in obj or "seq" in obj:
        return 0
    if kind == "message" or (not kind and word(obj.get("role")) in ROLES):
        types = {word(b.get("type")) for b in _blocks(obj.get("content"))}
        own = types & {"input_text", "output_text", "input_image", "input_file"}
        easy = (
            not kind
            and isinstance(obj.get("content"), str)
            and not obj.keys() & {"tool_calls", "function_call"}
        )
        return 2 if own and word(obj.get("role")) in ROLES else int(easy or (kind == "message" and not types))
    if kind == "reasoning":
        return 2 if isinstance(obj.get("summary"), list) else 0
    if kind in ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"):
        return 2 if isinstance(obj.get("call_id"), str) else 0
    return int(kind in KINDS)


def read(records: Records, options: ReadOptions) -> Session:
    """The items that the model is shown: all, or those from the newest compaction of the server's own on."""
    session = read_list(NAME, records, message_of, _parts, options, silent=("compaction", "item_reference"))
    sealed = [r.number for r in records if r.dict.get("type") == "compaction"]
    if sealed and sealed[-1] - 1 not in session.state.head:
        session.messages = [m for m in session.messages if m.line > sealed[-1]]
        session.state.head.append(sealed[-1] - 1)
    if not session.messages:
        raise no_messages(records, NAME)
    _group(session.messages)
    return session


def _group(messages: Sequence[Message]) -> None:
    """Reasoning and the items of its response that follow it, up to the next reasoning, stay together."""
    group, before = None, ""
    for message in messages:
        kind = "reasoning" if message.kind == "reasoning" else "item"
        if message.role != "assistant":
            group, before = None, ""
            continue
        if kind == "reasoning" and before != "reasoning":
            group = message.line
        message.group, before = group, kind


def message_of(record: Record) -> Message | None:
    obj = record.dict
    kind, role = _kind(obj), ROLES.get(word(obj.get("role")))
    if kind == "message":
        if role is None:
            return None
        text = "\n".join(texts_of(obj.get("content"), block_types=TEXTS))
        if role == "user" and (found := as_list_summary(text, record.number)):
            return found
        return Message(role, partial(_parts, obj), line=record.number)
    if kind in ("item_reference", "compaction") or kind not in KINDS:
        return None
    role = "toolResult" if KINDS[kind] == RESULT else "assistant"
    return Message(
        role, partial(_parts, obj), line=record.number, kind="reasoning" if kind == "reasoning" else ""
    )


def _kind(obj: Json) -> str:
    return word(obj.get("type")) or ("message" if "role" in obj else "")


def _parts(obj: Json) -> Parts:
    kind = _kind(obj)
    if kind == "message":
        return tuple(_said(obj.get("content")))
    if kind == "reasoning":
        texts = texts_of(obj.get("content"), block_types=TEXTS) or texts_of(
            obj.get("summary"), block_types=TEXTS
        )
        return tuple(Thinking(text) for text in texts)
    if KINDS.get(kind) == RESULT:
        return (_result(obj),)
    return tuple(_call(kind, obj)) if KINDS.get(kind) == CALL else ()


def _said(content: object) -> Iterable[Part]:
    if isinstance(content, str):
        yield Text(content)
    for block in _blocks(content):
        if isinstance(text := block.get("text", block.get("refusal")), str):
            yield Text(text)
        elif block.get("type") == "input_image":
            yield Image()


def _blocks(content: object) -> list[Json]:
    return [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []


def _call(kind: str, obj: Json) -> Iterable[Part]:
    name = obj.get("call_id")
    own = name if isinstance(name, str) and kind not in SELF_CONTAINED else None
    fields = ("arguments", "action", "queries", "operation")
    free = {"custom_tool_call": "input", "code_interpreter_call": "code"}.get(kind)  # text, no JSON
    arguments = {free: obj.get(free)} if free else _first(obj, fields)
    yield ToolCall(own, word(obj.get("name")) or kind.removesuffix("_call"), _arguments(arguments))
    if kind == "image_generation_call":
        yield Image()


def _first(obj: Json, keys: Sequence[str]) -> object:
    return next((obj[k] for k in keys if k in obj), None)


def _arguments(value: object) -> object:
    """The object that an argument string holds, or the string itself."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def _result(obj: Json) -> ToolResult:
    name, output = obj.get("call_id"), obj.get("output", obj.get("tools"))
    texts = texts_of(output, block_types=TEXTS)
    if not texts and output is not None and not isinstance(output, str):
        texts = () if any(b.get("type") == "input_image" for b in _blocks(output)) else (stringify(output),)
    images = sum(b.get("type") in ("input_image", "computer_screenshot") for b in _blocks(output))
    return ToolResult(name if isinstance(name, str) else None, texts, images)


def select(session: Session, plan: CompactionPreparation) -> list[int]:
    return select_list(session, plan)


def rebuild(session: Session, plan: CompactionPreparation, kept: Sequence[int],
            checkpoint: Checkpoint) -> Iterable[Piece]:  # fmt: skip
    text = list_summary(checkpoint.summary, len(plan.kept))
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return rebuild_list(session, plan, kept, dump(message))
