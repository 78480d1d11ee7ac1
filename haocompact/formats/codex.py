"""Codex CLI rollouts, legacy and paginated: one `{timestamp, type, payload}` a line.

The model's history are the `response_item` lines behind the newest `compacted`, whose
`replacement_history` stands for everything before. Source: codex-rs/history and codex-rs/core (compact,
event_mapping, contextual_user_message), and what client 0.171.0 sends to its model after a resume.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from haocompact.compaction import (
    COMPACTION_SUMMARY,
    CompactionPreparation,
    FileOperations,
    Image,
    Message,
    Part,
    Parts,
    Shell,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    Touch,
    touches_of,
)
from haocompact.errors import TranscriptError, UsageError
from haocompact.formats.session import (
    Checkpoint,
    Compaction,
    Json,
    LazyParts,
    Piece,
    ReadOptions,
    Session,
    ends_in_torn_line,
    files_in_summary,
    format_time,
    no_messages,
    numbers,
    opaque,
    parse_time,
    texts_of,
    warn_unknown,
)
from haocompact.jsjson import stringify
from haocompact.records import BOM, Record, Records, clean, dump, elements, splice, value_span

NAME = "codex"
LOCKS = "thread-writer-locks"  # folder of the client's home; it holds the lock of a thread that is loaded
TITLE = "Codex CLI"
BARE = (
    "a Codex rollout of the first releases (bare items), which Codex itself can't resume: "
    "--format responses compacts its items"
)
MIXED = {"responses": BARE}  # what it means when some lines are of this format and others of that one

HEAD = "header: the first one is kept"
MESSAGE = "message"
NOTE = "sent to the model with the kept messages, never summarised"
CONTEXT = "left out: the client writes it again"
PAST = "left out: the new compaction replaces it"
SEALED = "unreadable compaction of the client, carried behind the summary"
EVENT = "kept among the kept messages"
MIRROR = "kept in front of the kept message it shows"
TURN = "kept in front of the turn it opens"
UNDO = "applied: the turns it takes back are left out"
UNREAD = "kept as it is, not read"
STAY = (MESSAGE, NOTE, SEALED, EVENT, MIRROR, TURN, UNREAD)

_ITEMS = {
    "message": MESSAGE,
    "reasoning": MESSAGE,
    "function_call": MESSAGE,
    "function_call_output": MESSAGE,
    "custom_tool_call": MESSAGE,
    "custom_tool_call_output": MESSAGE,
    "local_shell_call": MESSAGE,
    "tool_search_call": MESSAGE,
    "tool_search_output": MESSAGE,
    "web_search_call": MESSAGE,
    "image_generation_call": MESSAGE,
    "agent_message": MESSAGE,
    "additional_tools": CONTEXT,
    "ghost_snapshot": CONTEXT,
    "compaction": SEALED,
    "compaction_summary": SEALED,
    "context_compaction": SEALED,
}
_PLAIN_EVENTS = (
    "task_complete turn_complete turn_aborted token_count thread_settings_applied thread_goal_updated "
    "user_message item_completed patch_apply_begin patch_apply_end mcp_tool_call_begin mcp_tool_call_end "
    "web_search_begin web_search_end image_generation_end exec_command_begin exec_command_end "
    "view_image_tool_call entered_review_mode exited_review_mode sub_agent_activity error"
)
_EVENTS = {
    "task_started": TURN,
    "turn_started": TURN,
    "agent_message": MIRROR,
    "agent_reasoning": MIRROR,
    "agent_reasoning_raw_content": MIRROR,
    "context_compacted": PAST,
    "thread_rolled_back": UNDO,
    **dict.fromkeys(_PLAIN_EVENTS.split(), EVENT),
}
KINDS: Mapping[str, str] = {
    "session_meta": HEAD,
    "compacted": PAST,
    "retained_context": PAST,
    "turn_context": CONTEXT,
    "world_state": CONTEXT,
    "inter_agent_communication": MESSAGE,
    "inter_agent_communication_metadata": EVENT,
    "token_usage_record": EVENT,
    "security_risk_score": EVENT,
    "realtime_item": EVENT,
    "rollout_reference": EVENT,
    **{f"response_item/{name}": fate for name, fate in _ITEMS.items()},
    **{f"event_msg/{name}": fate for name, fate in _EVENTS.items()},
}

SUMMARY_PREFIX = (  # codex-rs/prompts/templates/compact/summary_prefix.md: what the client knows a summary by
    "Another language model started to solve this problem and produced a summary of its thinking process. "
    "You also have access to the state of the tools that were used by that language model. Use this to "
    "build on the work that has already been done and avoid duplicating work. Here is the summary produced "
    "by the other language model, use the information in this summary to assist with your own analysis:"
)
_CONTEXT_KINDS = ("agents_md.", "environments.", "permissions.", "host_skills.", "tools.")
_CONTEXT_TEXTS = (
    ("# AGENTS.md instructions", "</INSTRUCTIONS>"),
    ("<environment_context>", "</environment_context>"),
    ("<user_instructions>", "</user_instructions>"),
    ("<skills_instructions>", "</skills_instructions>"),
)
_NOTE_TEXTS = (
    ("<turn_aborted>", "</turn_aborted>"),
    ("<subagent_notification>", "</subagent_notification>"),
    ("<skill>", "</skill>"),
    ("<hook_prompt", "</hook_prompt>"),
)
_SHELL = re.compile(
    r"\s*<user_shell_command>\s*<command>\n?(?P<command>.*?)\n?</command>\s*<result>\n?(?P<status>.*?)"
    r"(?:Output:\n(?P<output>.*?)\n?)?</result>\s*</user_shell_command>\s*",
    re.DOTALL,
)
_PATCHED = re.compile(r"\*\*\* (Add|Update|Delete) File: (.+?)\s*?(?:\\n|\n|$)")
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {  # without these the client drops the line
    "message": {"role": str, "content": list},
    "reasoning": {"summary": list},
    "function_call": {"name": str, "arguments": str, "call_id": str},
    "function_call_output": {"output": (str, list)},
    "custom_tool_call": {"name": str, "input": str, "call_id": str},
    "custom_tool_call_output": {"output": (str, list), "call_id": str},
    "local_shell_call": {"action": dict},
}
_AGENT = re.compile(r"/root(?:/(?!root(?:/|$))[a-z0-9_]+)*|/morpheus")  # as 0.171.0 takes them, tried by name
_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
_KEPT_USERS = 20_000  # tokens of user messages that survive an old compaction without replacement_history


@dataclass(slots=True)
class Item:
    """One entry of the model's history. `place`: its position in the replacement_history of line `index`, -1
    when the line is the item. `kind`: its type. `call`: the call it makes or answers. `opens`: a user's turn
    starts here, as a rollback counts turns. `prefixed`: it begins as a summary does."""

    index: int
    place: int
    fate: str
    kind: str = ""
    message: Message | None = None
    call: str | None = None
    opens: bool = False
    prefixed: bool = False
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class Compacted:
    index: int
    whole: bool
    text: str
    stamp: str


@dataclass(frozen=True, slots=True)
class Rollback:
    index: int
    turns: int


@dataclass(frozen=True, slots=True)
class Usage:
    """`estimate`: the client's own figure after a compaction, which covers the whole context."""

    tokens: int | float
    estimate: bool
    stamp: str
    note: str = ""


Step = Item | Compacted | Rollback | Usage


@dataclass(slots=True)
class State:
    """`fates`: one a line. `items`: the model's history in the client's order. `undone`: lines that a
    rollback took back. `window`: the newest compaction's numbering. `calls`: event line -> the call that it
    reports. `bare`: there are lines of the first releases, without envelope."""

    repair: bool = True
    fates: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    undone: set[int] = field(default_factory=set)
    calls: dict[int, str] = field(default_factory=dict)
    base: Compacted | None = None
    summary: Item | None = None
    head: int | None = None
    meta: Json = field(default_factory=dict)
    window: Json = field(default_factory=dict)
    total_usage: Json = field(default_factory=dict)
    compactions: int = 0
    last_stamp: str = ""
    last_ordinal: int = -1
    bare: bool = False

    @property
    def paginated(self) -> bool:
        return self.meta.get("history_mode") == "paginated"

    @property
    def moment(self) -> datetime:
        """Newest time in the file."""
        return parse_time(self.last_stamp) or datetime.fromtimestamp(0, UTC)


def kind_of(obj: Json) -> str:
    """Key of a line in KINDS: its type, and of items and events also the payload's."""
    kind, payload = obj.get("type"), obj.get("payload")
    if kind in ("response_item", "event_msg") and isinstance(payload, dict):
        return f"{kind}/{payload.get('type')}"
    return str(kind)


def sniff(obj: Json, first: bool) -> int:
    if _is_bare(obj):
        return 2
    if not isinstance(obj.get("payload"), dict) or not isinstance(obj.get("type"), str):
        return 0
    if not isinstance(obj.get("timestamp"), str):
        return 0
    return 2 if obj["type"] in ("response_item", "event_msg") or obj["type"] in KINDS else 1


def _is_bare(obj: Json) -> bool:
    """A header or state line of the first releases, whose items stand without envelope."""
    header = "instructions" in obj and "type" not in obj and isinstance(obj.get("timestamp"), str)
    return obj.get("record_type") == "state" or (header and isinstance(obj.get("id"), str))


# --------------------------------------------------------------------------------------- reading
def read(records: Records, options: ReadOptions) -> Session:
    """The history that the client would send to its model. Raises TranscriptError."""
    session = Session(NAME, records, [], state=State(repair=options.repair))
    state: State = session.state
    unknown: list[tuple[int, str]] = []
    for record in records:
        state.fates.append(_line(session, record))
        if not record.dict or record.note:
            _warn_unread(session, record)
        elif (kind := kind_of(record.dict)) not in KINDS:
            unknown.append((record.number, kind))
    _refuse(session)
    warn_unknown(session, unknown)
    _replay(session)
    _group(state.items)
    _list_messages(session)
    _check_pairs(session)
    if not session.messages:
        raise no_messages(records, TITLE)
    return session


def _line(session: Session, record: Record) -> str:
    """What becomes of one line; what it does to the history is added to the steps."""
    state: State = session.state
    obj, index = record.dict, record.number - 1
    payload = obj.get("payload")
    if record.note or not isinstance(payload, dict):
        state.bare |= _is_bare(obj)
        return UNREAD if obj or record.fault or record.note else EVENT
    stamp = _envelope(state, obj)
    kind = str(obj.get("type"))
    if kind in ("response_item", "inter_agent_communication"):
        return _item_line(session, record, stamp)
    if kind == "event_msg":
        return _event_line(session, index, payload, stamp)
    if kind == "session_meta":
        return _header_line(session, index, payload)
    if kind == "compacted":
        return _compacted_line(state, index, payload, stamp)
    return KINDS.get(kind, EVENT)


def _warn_unread(session: Session, record: Record) -> None:
    """The client skips a line with a lone surrogate or NULs; with invalid UTF-8, a legacy file as a whole."""
    for warned in opaque([record]):
        text = warned.text.partition(", read with")[0] if record.note else warned.text
        unread = ", not read by the client" if record.note else ""
        fatal = "invalid UTF-8" in text and not session.state.paginated
        session.warn(warned.line, text + unread + (": it can't resume this file" if fatal else ""))


def _envelope(state: State, obj: Json) -> str:
    """The line's time, "" when it has none; notes the newest time and the highest ordinal."""
    stamp, ordinal = obj.get("timestamp"), obj.get("ordinal")
    stamp = stamp if isinstance(stamp, str) and _STAMP.match(stamp) else ""
    state.last_stamp = max(state.last_stamp, stamp)
    if isinstance(ordinal, int):
        state.last_ordinal = max(state.last_ordinal, ordinal)
    return stamp


def _header_line(session: Session, index: int, payload: Json) -> str:
    """The first header is the session's own, later ones came with a copied history."""
    state: State = session.state
    if state.head is None:
        state.head, state.meta = index, payload
        session.session_id = payload.get("id") if isinstance(payload.get("id"), str) else None
        return HEAD
    return CONTEXT


def _compacted_line(state: State, index: int, payload: Json, stamp: str) -> str:
    text, history = payload.get("message"), payload.get("replacement_history")
    if not isinstance(text, str):
        return UNREAD
    state.compactions += 1
    if isinstance(payload.get("window_number"), int):
        names = ("window_number", "first_window_id", "window_id")
        state.window = {name: payload.get(name) for name in names}
    state.steps.append(Compacted(index, isinstance(history, list), text, stamp))
    return PAST


def _event_line(session: Session, index: int, payload: Json, stamp: str) -> str:
    state: State = session.state
    kind = payload.get("type")
    item = payload["item"] if isinstance(payload.get("item"), dict) else {}
    if isinstance(call := payload.get("call_id") or item.get("id"), str):
        state.calls[index] = call
    if kind == "thread_rolled_back":
        state.steps.append(Rollback(index, int(numbers(payload, "num_turns"))))
    elif kind == "token_count" and isinstance(payload.get("info"), dict):
        _note_usage(session, payload["info"], stamp)
    elif kind in ("task_started", "turn_started"):
        session.context_window = _whole(payload.get("model_context_window")) or session.context_window
    elif kind == "item_completed":
        shown = {"AgentMessage": MIRROR, "Reasoning": MIRROR, "ContextCompaction": PAST}
        return shown.get(str(item.get("type")), EVENT)
    return _EVENTS.get(str(kind), EVENT)


def _note_usage(session: Session, info: Json, stamp: str) -> None:
    """`last_token_usage` is the context; input includes cached input, the total includes all turns before."""
    state: State = session.state
    if isinstance(info.get("total_token_usage"), dict):
        state.total_usage = info["total_token_usage"]
    window = _whole(info.get("model_context_window"))
    session.context_window = window or session.context_window
    last = info["last_token_usage"] if isinstance(info.get("last_token_usage"), dict) else {}
    tokens = numbers(last, "total_tokens") or numbers(last, "input_tokens", "output_tokens")
    estimate = not numbers(last, "input_tokens", "output_tokens")
    note = f"{tokens} recorded, above the window of {window}" if window and tokens > window else ""
    if tokens > 0:
        state.steps.append(Usage(tokens, estimate, stamp, note))


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _item_line(session: Session, record: Record, stamp: str) -> str:
    index, payload = record.number - 1, _as_item(record.dict)
    if record.dict["type"] == "inter_agent_communication" and not _is_delivered(record.dict["payload"]):
        session.warn(record.number, "not a message between agents that the client can read: no message")
        return UNREAD
    fate = _fate(payload)
    if fate == UNREAD:
        session.warn(record.number, f"not a {payload.get('type')} item that the client can read: no message")
    if fate in (MESSAGE, NOTE, SEALED):
        parts = LazyParts(session.records, index, _line_parts)
        session.state.steps.append(_item(payload, index, -1, fate, stamp, parts))
        _warn_arguments(session, record.number, payload)
    return fate


def _is_delivered(payload: Json) -> bool:
    """Whether the client reads a message between agents: it drops the line over any other name or type."""
    others = payload.get("other_recipients", [])
    names = (
        payload.get("author"),
        payload.get("recipient"),
        *(others if isinstance(others, list) else (None,)),
    )
    typed = isinstance(payload.get("content"), str) and isinstance(payload.get("trigger_turn"), bool)
    return typed and all(isinstance(name, str) and _AGENT.fullmatch(name) for name in names)


def _as_item(obj: Json) -> Json:
    """The item of a line; a message between agents is an input of this one."""
    payload: Json = obj["payload"]
    if obj.get("type") == "response_item":
        return payload
    names = {k: v for k in ("author", "recipient") if isinstance(v := payload.get(k), str)}
    texts = texts_of(payload.get("content"), block_types=("input_text", "text"))
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "agent_message", **names, "content": content}


def _fate(payload: Json) -> str:
    """What becomes of a response item, on a line or in a replacement_history."""
    kind = str(payload.get("type"))
    fate = _ITEMS.get(kind, EVENT)
    if any(not isinstance(payload.get(name), types) for name, types in _FIELDS.get(kind, {}).items()):
        return UNREAD
    if fate == SEALED and not isinstance(payload.get("encrypted_content"), str):
        return CONTEXT
    return _message_fate(payload) if kind == "message" else fate


def _message_fate(payload: Json) -> str:
    """Speech, or context that the client injected: told by its kinds, in older files by its text."""
    if payload["role"] != "user":
        return MESSAGE if payload["role"] == "assistant" else CONTEXT
    passthrough = payload.get("internal_chat_message_metadata_passthrough")
    kinds = passthrough.get("content_item_kinds") if isinstance(passthrough, dict) else None
    kinds = [k for k in kinds if isinstance(k, str)] if isinstance(kinds, list) else []
    if any(k.startswith("user.") for k in kinds):
        return MESSAGE
    if kinds and all(k.startswith(_CONTEXT_KINDS) for k in kinds):
        return CONTEXT
    texts = texts_of(payload["content"], block_types=("input_text",))
    if not texts or len(texts) < len(payload["content"]):
        return MESSAGE
    if all(_framed(text, _CONTEXT_TEXTS) for text in texts):
        return CONTEXT
    return NOTE if all(_framed(text, _CONTEXT_TEXTS + _NOTE_TEXTS) for text in texts) else MESSAGE


def _framed(text: str, frames: Iterable[tuple[str, str]]) -> bool:
    text = text.strip()
    return any(text.startswith(start) and text.endswith(end) for start, end in frames)


def _item(payload: Json, index: int, place: int, fate: str, stamp: str,
          parts: Parts | Callable[[], Parts] | None = None) -> Item:  # fmt: skip
    """An entry of the history; `place` -1 for a line, else its position in a replacement_history."""
    item = Item(index, place, fate, sys.intern(str(payload.get("type"))), stamp=stamp)
    if fate != MESSAGE:
        return item
    role = _role(item.kind, payload)
    said = _parts(payload) if role == "user" else ()
    if any(isinstance(part, Shell) for part in said):
        role = "bashExecution"
    item.message = Message(role, _parts(payload) if parts is None else parts, line=index + 1)
    item.message.id = _name(payload, index, place)
    item.message.files = _patched_files(payload)
    item.message.touches = _touches(payload)
    item.call = payload["call_id"] if isinstance(payload.get("call_id"), str) else None
    item.prefixed = _starts_as_summary(said)
    item.opens = role in ("user", "custom") and not item.prefixed
    return item


def _starts_as_summary(parts: Parts) -> bool:
    first = next((part.text for part in parts if isinstance(part, Text)), "")
    return first.startswith(SUMMARY_PREFIX + "\n")


def _name(payload: Json, index: int, place: int) -> str:
    """The message's id: the item's own, or the line; items of one replacement_history are told apart."""
    if place >= 0:
        return f"L{index + 1}.{place + 1}"
    return payload["id"] if isinstance(payload.get("id"), str) else f"L{index + 1}"


def _role(kind: str, payload: Json) -> str:
    if kind == "message":
        return str(payload["role"])
    if kind == "agent_message":
        return "custom"
    return "toolResult" if kind.endswith("_output") else "assistant"


def _patched_files(payload: Json) -> FileOperations | None:
    """Files that a call's patch adds or changes."""
    text = payload.get("input") if payload.get("type") == "custom_tool_call" else payload.get("arguments")
    if not isinstance(text, str) or "*** Begin Patch" not in text:
        return None
    found = _PATCHED.findall(text)
    added = {path for verb, path in found if verb == "Add"}
    return FileOperations(written=added, edited={path for verb, path in found if verb != "Add"})


def _touches(payload: Json) -> tuple[Touch, ...]:
    called = payload.get("type") == "function_call"
    return touches_of([(payload["name"], _arguments(payload["arguments"]))]) if called else ()


def _warn_arguments(session: Session, line: int, payload: Json) -> None:
    if payload.get("type") == "function_call" and isinstance(_arguments(payload["arguments"]), str):
        name, call = payload["name"], payload["call_id"]
        session.warn(line, f"arguments of {name} ({call}) are not a JSON object: kept and shown as text")


# ----------------------------------------------------------------------------- parts of one item
def _line_parts(obj: Json) -> Parts:
    return _parts(_as_item(obj))


def _parts(payload: Json) -> Parts:
    kind = str(payload.get("type"))
    if kind in ("message", "agent_message"):
        return _message_parts(payload.get("content"))
    if kind == "reasoning":
        return _reasoning_parts(payload)
    if kind.endswith("_output"):
        return (_result(payload),)
    return _call_parts(kind, payload)


def _message_parts(content: object) -> Parts:
    if not isinstance(content, list):
        return tuple(Text(text) for text in texts_of(content))
    parts: list[Part] = []
    for block in content:
        text = block.get("text") if isinstance(block, dict) else None
        if isinstance(text, str):
            parts.append(_shell(text) or Text(text))
        elif isinstance(block, dict) and block.get("type") == "input_image":
            parts.append(Image())
    return tuple(parts)


def _shell(text: str) -> Shell | None:
    """A command that the user ran in the client, which tells the model command and output."""
    match = _SHELL.fullmatch(text) if "<user_shell_command>" in text[:40] else None
    return Shell(match["command"], match["output"] or "", match["status"].strip()) if match else None


def _reasoning_parts(payload: Json) -> Parts:
    """The readable part; `encrypted_content` is neither text nor tokens."""
    texts = texts_of(payload.get("content"), block_types=("reasoning_text", "text"))
    texts = texts or texts_of(payload.get("summary"), block_types=("summary_text",))
    return tuple(Thinking(text) for text in texts)


def _call_parts(kind: str, payload: Json) -> Parts:
    call = payload.get("call_id") if isinstance(payload.get("call_id"), str) else None
    if kind == "function_call":
        return (ToolCall(call, payload["name"], _arguments(payload["arguments"])),)
    if kind == "custom_tool_call":
        return (ToolCall(call, payload["name"], payload["input"]),)
    if kind == "image_generation_call":
        return ToolCall(None, "image_generation", {"prompt": payload.get("revised_prompt")}), Image()
    arguments = payload.get("arguments") if kind == "tool_search_call" else payload.get("action")
    return (ToolCall(None if kind == "web_search_call" else call, kind.removesuffix("_call"), arguments),)


def _arguments(text: str) -> object:
    """The object that an argument string holds, or the string itself."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, dict) else text


def _result(payload: Json) -> ToolResult:
    call = payload.get("call_id") if isinstance(payload.get("call_id"), str) else None
    output = payload.get("output")
    if payload.get("type") == "tool_search_output":
        return ToolResult(call, (stringify(payload.get("tools")),), name="tool_search")
    blocks = output if isinstance(output, list) else ()
    images = sum(isinstance(b, dict) and b.get("type") == "input_image" for b in blocks)
    name = payload["name"] if isinstance(payload.get("name"), str) else ""
    return ToolResult(call, texts_of(output, block_types=("input_text", "text")), images, name=name)


# ------------------------------------------------------------------------------------ the history
def _refuse(session: Session) -> None:
    """Files that hold no history, or only a part of it. Raises TranscriptError."""
    state: State = session.state
    if state.bare and state.head is None and not state.steps:
        raise TranscriptError(BARE)
    origin = state.meta.get("history_base")
    whole = any(isinstance(step, Compacted) and step.whole for step in state.steps)
    if isinstance(origin, dict) and not whole:
        raise TranscriptError(
            f"this fork holds only its own turns, the rest is in session {origin.get('thread_id')}: "
            "resume it once and run /compact there, then this file stands on its own"
        )
    if state.head is None and state.steps:
        session.warn(1, "no session_meta: the client can't resume this file")
    if len(session.records) and session.records.raw(0).startswith(BOM):
        session.warn(1, "byte order mark: the client refuses the file with it, the output has none")


def _replay(session: Session) -> None:
    """Base, then every later step, as the client does on resume."""
    state: State = session.state
    start = max((i for i, s in enumerate(state.steps) if isinstance(s, Compacted) and s.whole), default=-1)
    if start >= 0:
        base = state.steps[start]
        assert isinstance(base, Compacted)
        state.base = base
        _load_replacement(session, base)
    for step in state.steps[start + 1 :]:
        if isinstance(step, Item):
            state.items.append(step)
        elif isinstance(step, Usage):
            _place_usage(state, step)
        elif isinstance(step, Rollback):
            _roll_back(state, step)
        else:
            _load_old_compaction(state, step)
    state.steps.clear()


def _load_replacement(session: Session, base: Compacted) -> None:
    """`replacement_history` goes to the model as it is; the summary is the item with the record's text."""
    state: State = session.state
    payloads = session.records[base.index].dict["payload"]["replacement_history"]
    for place, payload in enumerate(payloads):
        fate = _fate(payload) if isinstance(payload, dict) else UNREAD
        if fate in (MESSAGE, NOTE, SEALED):
            state.items.append(_item(payload, base.index, place, fate, base.stamp))
        if fate == SEALED:
            session.warn(base.index + 1, "compacted by the client's server: unreadable, carried along")
    users = [i for i in state.items if i.message is not None and i.message.role == "user"]
    same = [i for i in users if i.message is not None and i.message.text == base.text]
    prefixed = [i for i in users if i.prefixed]
    if same or prefixed:
        _make_summary(state, (same or prefixed)[-1])


def _make_summary(state: State, item: Item) -> None:
    old = item.message
    assert old is not None
    text = old.text.removeprefix(SUMMARY_PREFIX + "\n")
    item.message = Message("user", (Text(text),), line=old.line, id=old.id, kind=COMPACTION_SUMMARY,
                           files=files_in_summary(text), usage=old.usage)  # fmt: skip
    item.opens = False
    state.summary = item


def _load_old_compaction(state: State, step: Compacted) -> None:
    """Without replacement_history: the newest user messages that fit 20 000 tokens, then the summary."""
    users: list[Item] = []
    room = _KEPT_USERS
    for item in reversed(state.items):
        if item.opens and item.message is not None and room > 0:
            users.append(item)
            room -= math.ceil(len(clean(item.message.text).encode()) / 4)
    line = step.index + 1
    summary = Item(step.index, -1, MESSAGE, "message", stamp=step.stamp)
    summary.message = Message("user", (Text(step.text),), line=line, id=f"L{line}")
    _make_summary(state, summary)
    state.base = step
    state.items = [*reversed(users), summary]


def _roll_back(state: State, step: Rollback) -> None:
    """Drop the last turns that a user opened; what stands before the first one always stays."""
    opening = [i for i, item in enumerate(state.items) if item.opens]
    if not opening or step.turns <= 0:
        return
    cut = opening[max(len(opening) - step.turns, 0)]
    first = state.items[cut]
    base = state.base.index if state.base else -1
    start = _turn_line(state, first.index) if first.index > base else base + 1
    state.undone.update(range(start, step.index + 1))
    if state.summary in state.items[cut:]:
        state.summary = None
    del state.items[cut:]


def _place_usage(state: State, usage: Usage) -> None:
    """A figure belongs to the newest answer before it; the client's own estimate to the newest message."""
    base = state.base
    for item in reversed(state.items):
        message = item.message
        answered = message is not None and message.role == "assistant" and item.place < 0
        if message is None or not (answered or usage.estimate):
            continue
        stale = state.repair and base is not None and usage.stamp < base.stamp
        message.usage_note = usage.note or ("recorded before the last compaction" if stale else "")
        message.usage = None if message.usage_note else usage.tokens
        return


def _group(items: Sequence[Item]) -> None:
    """Reasoning and the items of its response that follow it, up to the next reasoning, stay together."""
    group: tuple[int, int] | None = None
    before = ""
    for item in items:
        if item.message is None or item.message.role != "assistant":
            group, before = None, ""
            continue
        if item.kind == "reasoning" and before != "reasoning":
            group = item.index, item.place
        item.message.group, before = group, item.kind


def _list_messages(session: Session) -> None:
    """The summary first, wherever the client put it, then all other messages in order."""
    state: State = session.state
    told = [item for item in state.items if item.message is not None]
    if state.summary is None and told and told[0].prefixed:
        _make_summary(state, told[0])
    rest = [item for item in told if item is not state.summary]
    session.messages = [item.message for item in rest if item.message is not None]
    if state.summary is not None and state.summary.message is not None:
        _note_age(state, state.summary.message, rest)
        session.messages.insert(0, state.summary.message)


def _note_age(state: State, summary: Message, rest: Sequence[Item]) -> None:
    """How many messages were there when the summary was written; a usage on it covers all of these."""
    base = state.base
    old = [i for i in rest if base and (i.place >= 0 or i.index < base.index or i.stamp < base.stamp)]
    summary.kept, summary.at_end = len(old), len(old) == len(rest)
    if old and old[-1].message is not None and summary.usage is not None:
        old[-1].message.usage, summary.usage = summary.usage, None


def _check_pairs(session: Session) -> None:
    """Warnings for calls without output and outputs without call."""
    items = [item for item in session.state.items if item.message is not None]
    calls = {i.call: place for place, i in enumerate(items) if i.call and _role_of(i) == "assistant"}
    outputs = {i.call: place for place, i in enumerate(items) if _role_of(i) == "toolResult"}
    last_talk = max((place for place, item in enumerate(items) if item.kind == "message"), default=0)
    for call in outputs.keys() - calls.keys() - {None}:
        session.warn(
            items[outputs[call]].index + 1, f"output without call ({call}): the client leaves it out"
        )
    for call in calls.keys() - outputs.keys():
        fate = "pending: no output yet" if calls[call] > last_talk else "without output: told as aborted"
        session.warn(items[calls[call]].index + 1, f"call {call} is {fate}")
    session.warnings.sort(key=lambda warned: warned.line)


def _role_of(item: Item) -> str:
    return "" if item.message is None else item.message.role


# --------------------------------------------------------------------------------------- writing
def in_place_refusal(session: Session) -> str | None:
    """Why this file must not be shortened under its own name, with the way out; None when it may."""
    if not session.state.paginated:
        return None
    return (
        "a paginated session can't be shortened in place: the client's list of turns would freeze, and forks "
        "point into this file; write the result elsewhere (-o, --output-dir) or use --append"
    )


def file_name(session: Session, checkpoint: Checkpoint) -> str | None:
    """The name under which the client finds a session with a new id (in sessions/YYYY/MM/DD of its home)."""
    state: State = session.state
    if not state.paginated:
        return None
    moment = parse_time(state.meta.get("timestamp")) or state.moment
    name = _new_id(session, checkpoint, "thread")
    return f"rollout-{moment.astimezone(UTC):%Y-%m-%dT%H-%M-%S}-{name}.jsonl"


def select(session: Session, plan: CompactionPreparation) -> list[int]:
    """The header, and the tail's own lines without the context that the client writes again."""
    state: State = session.state
    lines, removed_calls = _kept_lines(state, plan)
    start = _tail_start(state, min(lines)) if lines else len(session.records)
    gap = range(plan.removed[0].line - 1, plan.retained_tail[0].line - 1) if plan.protected else ()
    chosen = [] if state.head is None else [state.head]
    for index in range(start, len(session.records) - ends_in_torn_line(session.records)):
        fate = state.fates[index]
        if (
            index in gap
            or fate not in STAY
            or index in state.undone
            or (fate == MESSAGE and index not in lines)
        ):
            continue
        if index not in state.calls or state.calls[index] not in removed_calls:
            chosen.append(index)
    return chosen


def _kept_lines(state: State, plan: CompactionPreparation) -> tuple[set[int], set[str | None]]:
    """Lines that are kept messages, and the calls that are removed."""
    kept = _kept(state, plan)
    lines = {item.index for item in kept if item.message is not None and _behind_base(state, item)}
    return lines, {item.call for item in state.items} - {item.call for item in kept}


def _kept(state: State, plan: CompactionPreparation) -> list[Item]:
    """Items of the kept messages, the notes behind the first of them, and every sealed compaction."""
    tail = {id(message) for message in plan.kept}
    places = [p for p, item in enumerate(state.items) if id(item.message) in tail]
    first = places[0] if places else len(state.items)
    return [
        item
        for place, item in enumerate(state.items)
        if item.fate == SEALED or (item.message is None and place > first) or id(item.message) in tail
    ]


def _behind_base(state: State, item: Item) -> bool:
    return item.place < 0 and (state.base is None or item.index > state.base.index)


def _tail_start(state: State, first: int) -> int:
    """The line that opens the turn of the first kept message, or the events that announce the message."""
    start = _turn_line(state, first)
    if start == first:
        while start > 0 and state.fates[start - 1] == MIRROR:
            start -= 1
    return start


def _turn_line(state: State, index: int) -> int:
    """Line of the `task_started` before `index` when only context and events lie between, else `index`."""
    for line in range(index - 1, -1, -1):
        if state.fates[line] == TURN:
            return line
        if state.fates[line] in (MESSAGE, NOTE, SEALED, PAST, UNDO, HEAD):
            return index
    return index


def rebuild(session: Session, plan: CompactionPreparation, kept: Sequence[int],
            checkpoint: Checkpoint) -> Iterator[Piece]:  # fmt: skip
    """Header, the client's own compaction record, the tail, and an honest `token_count`.

    A paginated session gets a new thread id (`file_name`), and its lines are numbered from 0.
    """
    state: State = session.state
    numbered = iter(range(len(kept) + 2)) if state.paginated else None
    head = [index for index in kept if index == state.head]
    for index in head:
        yield _header(session, index, checkpoint, numbered)
    lines = set(kept)
    moved = [i for i in _kept(state, plan) if not _behind_base(state, i) or i.index not in lines]
    yield _new_line(session, 1, numbered, "compacted", _compacted(session, moved, checkpoint))
    for index in (i for i in kept if i != state.head):
        yield _tail_line(session, index, numbered)
    yield _new_line(session, 2, numbered, "event_msg", _token_count(session, checkpoint))


def append(session: Session, plan: CompactionPreparation, checkpoint: Checkpoint) -> bytes:
    """What is written behind the old bytes instead, which stay: a turn with the client's own records."""
    state: State = session.state
    if plan.protected:
        raise UsageError("--append goes with --strategy keep-recent in a Codex session")
    ordinal = state.last_ordinal + 1
    numbered = iter(range(ordinal, ordinal + 5)) if state.paginated else None
    turn = _new_id(session, checkpoint, "turn")
    started = {"type": "task_started", "turn_id": turn, "model_context_window": session.context_window}
    shown = _shown_compaction(session, checkpoint, turn) if state.paginated else {"type": "context_compacted"}
    complete = {"type": "task_complete", "turn_id": turn, "last_agent_message": None}
    raw = session.records.raw(len(session.records) - 1)
    return b"".join((
        b"" if raw.endswith(b"\n") else session.records.newline,
        _new_line(session, 1, numbered, "event_msg", dump(started)),
        _new_line(session, 2, numbered, "compacted", _compacted(session, _kept(state, plan), checkpoint)),
        _new_line(session, 3, numbered, "event_msg", _token_count(session, checkpoint)),
        _new_line(session, 4, numbered, "event_msg", dump(shown)),
        _new_line(session, 5, numbered, "event_msg", dump(complete)),
    ))  # fmt: skip


def compactions(session: Session) -> list[Compaction]:
    """Each took out the lines before it that its replacement does not end with.

    What a replacement holds beside copies of lines stands nowhere else: it is a line of the next segment.
    """
    scratch = Session(NAME, session.records, [], state=State())
    state: State = scratch.state
    for record in session.records:
        state.fates.append(_line(scratch, record))
    found: list[Compaction] = []
    for step in state.steps:
        if isinstance(step, Item) and step.fate != SEALED:
            state.items.append(step)
        elif isinstance(step, Rollback):
            _roll_back(state, step)
        elif isinstance(step, Compacted):
            found.append(_segment(state, session.records, step))
    return found


def _segment(state: State, records: Records, step: Compacted) -> Compaction:
    """What one compaction took out; the items that it kept stay for the next."""
    history = records[step.index].dict["payload"].get("replacement_history")
    lines = [item.index for item in state.items]
    kept = _copied(records, lines, history)
    state.base, state.items = step, state.items[len(lines) - kept :]
    if isinstance(history, list) and len(history) > kept + 1:
        state.items.insert(0, Item(step.index, -1, NOTE))
    text = step.text.removeprefix(SUMMARY_PREFIX + "\n")
    return Compaction(step.index, text, lines[: len(lines) - kept], step.stamp)


def _copied(records: Records, lines: Sequence[int], history: object) -> int:
    """How many of the lines, from the last one back, stand at the end of a replacement_history."""
    items = history if isinstance(history, list) else []
    count = 0
    for index, item in zip(reversed(lines), reversed(items), strict=False):
        if _as_item(records[index].dict) != item:
            break
        count += 1
    return count


def _header(session: Session, index: int, checkpoint: Checkpoint, numbered: Iterator[int] | None) -> Piece:
    """A legacy header as it is; a paginated one with the new thread id, and no parent to read from."""
    raw = session.records.raw(index)
    terminated = _terminated(session, raw.removeprefix(BOM))
    if numbered is None:
        return index if terminated == raw else (index, terminated)
    name = dump(_new_id(session, checkpoint, "thread"))
    spliced = splice(terminated, ("ordinal",), b"%d" % next(numbered))
    for path in (("payload", "id"), ("payload", "session_id")):
        spliced = splice(spliced, path, name)
    return index, splice(spliced, ("payload", "history_base"), b"null")


def _tail_line(session: Session, index: int, numbered: Iterator[int] | None) -> Piece:
    raw = session.records.raw(index)
    line = _terminated(session, raw)
    if numbered is not None and session.state.fates[index] != UNREAD:
        line = splice(line, ("ordinal",), b"%d" % next(numbered))
    return index if line == raw else (index, line)


def _terminated(session: Session, raw: bytes) -> bytes:
    return raw if raw.endswith(b"\n") else raw + session.records.newline


def _new_line(session: Session, milliseconds: int, numbered: Iterator[int] | None, kind: str,
              payload: bytes) -> bytes:  # fmt: skip
    """One line, `milliseconds` after the newest one of the file."""
    stamp = format_time(session.state.moment, milliseconds=milliseconds).encode()
    ordinal = b"" if numbered is None else b',"ordinal":%d' % next(numbered)
    line = b'{"timestamp":"%s"%s,"type":"%s","payload":%s}' % (stamp, ordinal, kind.encode(), payload)
    return line + session.records.newline


def _compacted(session: Session, items: Iterable[Item], checkpoint: Checkpoint) -> bytes:
    """Payload of a compaction record; kept items are copied from their lines, byte for byte."""
    text = dump(f"{SUMMARY_PREFIX}\n{checkpoint.summary}")
    summary = b'{"type":"message","role":"user","content":[{"type":"input_text","text":%s}]}' % text
    ordered = sorted(items, key=lambda item: item.fate != SEALED)
    history = b",".join([summary, *_item_bytes(session.records, ordered)])
    window = dump(_window(session, checkpoint))[1:-1]
    return b'{"message":%s,"replacement_history":[%s],%s}' % (text, history, window)


def _item_bytes(records: Records, items: Sequence[Item]) -> Iterator[bytes]:
    """The item's own bytes: a line's payload, or an element of a replacement_history."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for item in items:
        if item.place < 0:
            yield _payload_bytes(records[item.index])
            continue
        raw = records.raw(item.index)
        if item.index not in spans:
            span = value_span(raw, ("payload", "replacement_history")) or (0, 0)
            spans[item.index] = list(elements(raw, *span))
        start, end = spans[item.index][item.place]
        yield raw[start:end]


def _payload_bytes(record: Record) -> bytes:
    """The payload's own bytes; a message between agents as the input that the client makes of it."""
    if record.dict.get("type") != "response_item":
        item = _as_item(record.dict)
        named = "author" in item and "recipient" in item
        return dump(item if named else {"type": "message", "role": "user", "content": item["content"]})
    start, end = value_span(record.raw, ("payload",)) or (0, 0)
    return record.raw[start:end]


def _window(session: Session, checkpoint: Checkpoint) -> Json:
    """The client numbers its context windows: 0 is the session's first, each compaction begins another."""
    state: State = session.state
    known = state.meta.get("context_window")
    first = known.get("window_id") if isinstance(known, dict) else None
    number = state.compactions + 1
    previous: Any = None
    if state.window:
        number = state.window["window_number"] + 1
        first, previous = state.window["first_window_id"] or first, state.window["window_id"]
    elif first is not None:
        number, previous = 1, first
    ids = {"first_window_id": first, "previous_window_id": previous}
    return {
        "window_number": number,
        **{name: value for name, value in ids.items() if value is not None},
        "window_id": _new_id(session, checkpoint, "window"),
    }


def _token_count(session: Session, checkpoint: Checkpoint) -> bytes:
    """The client compacts at once when this figure is stale, and believes it when it is too low."""
    names = ("input_tokens", "cached_input_tokens", "output_tokens", "reasoning_output_tokens")
    none = dict.fromkeys((*names, "total_tokens"), 0)
    info = {
        "total_token_usage": session.state.total_usage or none,
        "last_token_usage": {**none, "total_tokens": checkpoint.tokens_after},
        "model_context_window": session.context_window,
    }
    return dump({"type": "token_count", "info": info, "rate_limits": None})


def _shown_compaction(session: Session, checkpoint: Checkpoint, turn: str) -> Json:
    """How a paginated session shows on the screen that it was compacted."""
    moment = int(session.state.moment.timestamp() * 1000) + 4
    return {
        "type": "item_completed",
        "thread_id": session.session_id,
        "turn_id": turn,
        "item": {"type": "ContextCompaction", "id": _new_id(session, checkpoint, "item")},
        "started_at_ms": moment,
        "completed_at_ms": moment,
    }


def _new_id(session: Session, checkpoint: Checkpoint, purpose: str) -> str:
    """A UUIDv7 (RFC 9562) whose time is the file's newest and whose random bits are derived."""
    seed = "\0".join((purpose, session.session_id or "", checkpoint.hash, clean(checkpoint.summary)))
    bits = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:10])
    value = int(session.state.moment.timestamp() * 1000) << 80 | bits
    value = value & ~(0xF << 76) | 7 << 76
    return str(uuid.UUID(int=value & ~(0b11 << 62) | 0b10 << 62))


def message_of(record: Record) -> Message | None:
    """The message on one line; of a compaction its summary."""
    payload = record.dict.get("payload")
    if record.note or not isinstance(payload, dict):
        return None
    if record.dict.get("type") == "compacted" and isinstance(payload.get("message"), str):
        text = payload["message"].removeprefix(SUMMARY_PREFIX + "\n")
        return Message("user", (Text(text),), line=record.number, kind=COMPACTION_SUMMARY)
    if record.dict.get("type") == "inter_agent_communication":
        return Message("custom", _line_parts(record.dict), line=record.number)
    if record.dict.get("type") != "response_item" or _fate(payload) != MESSAGE:
        return None
    return _item(payload, record.number - 1, -1, MESSAGE, "").message
