"""pi sessions, JSONL v1 to v3: a tree of entries; the last entry of the file is the leaf.

Source: pi-coding-agent 1.6.0, docs/session-format.md and its session manager's behaviour.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from haocompact.compaction import (
    COMPACTION_SUMMARY,
    SYSTEM_PATCH,
    WITHDRAWN,
    CompactionPreparation,
    FileOperations,
    Image,
    Message,
    Parts,
    Shell,
    SystemPatch,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    Touch,
    replay_system,
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
    check_pairs,
    ends_in_torn_line,
    files_in_summary,
    format_time,
    numbers,
    opaque,
    parse_time,
    texts_of,
    warn_unknown,
    word,
)
from haocompact.records import Record, Records, dump, splice

NAME = "pi"
TITLE = "pi session (v1, v2, v3)"
KINDS: Mapping[str, str] = {
    "session": "header, kept",
    "message": "message",
    "custom_message": "message (role custom)",
    "branch_summary": "message (role branchSummary)",
    "compaction": "the newest on the path is the previous summary",
    "context_edit": "applied to its target",
    "model_change": "metadata, the latest is kept",
    "thinking_level_change": "metadata, the latest is kept",
    "active_tools_change": "metadata, the latest is kept",
    "session_info": "metadata, the latest is kept",
    "custom": "metadata, the latest of each customType is kept",
    "label": "metadata of the tree",
    "leaf": "metadata of the tree (the client ignores its target)",
    "usage": "metadata, cost only",
}
CARRIED = ("model_change", "thinking_level_change", "active_tools_change", "session_info", "custom")
ROLES = {
    "user": "user",
    "assistant": "assistant",
    "toolResult": "toolResult",
    "system": "system",
    "bashExecution": "bashExecution",
    "custom": "custom",
    "hookMessage": "custom",
    "branchSummary": "branchSummary",
    "compactionSummary": "branchSummary",
}
OMITTED = "omitted"
EDITABLE = ("user", "assistant", "toolResult", "custom")


@dataclass(slots=True)
class Entry:
    """A node of the tree. `index`: its record. `key`: customType of a custom entry. `message`: what it says."""

    index: int
    id: str | None
    parent: str | None
    type: str
    key: str = ""
    message: Message | None = None


@dataclass(slots=True)
class Tree:
    header: int
    version: int
    entries: list[Entry]
    path: list[Entry]
    context: list[Entry] = field(default_factory=list)  # entries of the path that the client projects
    by_id: dict[str, Entry] = field(default_factory=dict)
    systems: list[SystemPatch] = field(default_factory=list)


def sniff(obj: Json, first: bool) -> int:
    if obj.get("type") == "session" and isinstance(obj.get("id"), str) and "payload" not in obj:
        return 2 if first else 1
    if word(obj.get("type")) in KINDS and (
        "parentId" in obj or isinstance(obj.get("message"), dict) or "summary" in obj
    ):
        return 0 if "uuid" in obj or "sessionId" in obj else 1
    return int("parentId" in obj and "type" in obj)


# --------------------------------------------------------------------------------------- reading
def read(records: Records, options: ReadOptions) -> Session:
    """The path from the root to the leaf, projected as the client does. Raises TranscriptError."""
    session = Session(NAME, records, [])
    tree = _tree(records, session, options)
    session.state = tree
    session.leaves = _leaves(tree)
    compaction = next((e for e in reversed(tree.path) if e.type == "compaction"), None)
    entries = tree.path if compaction is None else _kept_by(records, tree, compaction)
    tree.context = entries
    edits = _edits(records, entries)
    if compaction is not None:
        session.messages.append(_summary(records, tree, compaction, options))
    for entry in entries:
        message = _message(tree, entry, edits.get(entry.id or ""))
        if message is not None:
            session.messages.append(message)
    _mark_withdrawn(records, entries, edits, session.messages)
    if options.repair:
        _mark_stale(tree, records, session.messages)
    warn_unknown(session, [(e.index + 1, e.type) for e in tree.entries if e.type not in KINDS])
    check_pairs(session)
    return session


def _tree(records: Records, session: Session, options: ReadOptions) -> Tree:
    tree: Tree | None = None
    previous: str | None = None
    for index, record in enumerate(records):
        obj = record.obj
        if record.fault or record.note or not isinstance(obj, dict):
            session.warnings.extend(opaque([record]))
        if tree is None and obj:
            tree = _header(index, obj)
            session.session_id = obj.get("id")
        elif tree is not None and obj and record.dict.get("type") != "session":
            entry = _entry(index, obj, tree.version, previous)
            entry.message = message_of(record)
            if entry.message is not None:
                entry.message.parts = LazyParts(records, index, _parts)
                entry.message.touches = _touches(obj)
            previous = entry.id
            tree.entries.append(entry)
            if entry.id is not None:
                tree.by_id[entry.id] = entry
    if tree is None:
        raise TranscriptError("no session header: the file is empty or holds no JSON line")
    _walk(tree, session, options)
    return tree


def _header(index: int, obj: Any) -> Tree:
    if not isinstance(obj, dict) or obj.get("type") != "session" or not isinstance(obj.get("id"), str):
        raise TranscriptError("not a pi session: the first record is no session header", line=index + 1)
    version = obj.get("version")
    return Tree(index, max(version, 1) if isinstance(version, int) else 1, [], [])


def _entry(index: int, obj: Any, version: int, previous: str | None) -> Entry:
    if not isinstance(obj, dict):
        return Entry(index, None, None, "")
    kind = obj.get("type")
    custom = obj.get("customType")
    key = custom if isinstance(custom, str) else ""
    if version == 1:
        return Entry(index, f"#{index}", previous, kind if isinstance(kind, str) else "", key)
    name, parent = obj.get("id"), obj.get("parentId")
    parent = previous if parent == previous else parent  # one string for both, and one for each kind
    return Entry(index, name if isinstance(name, str) else None, parent if isinstance(parent, str) else None,
                 sys.intern(kind) if isinstance(kind, str) else "", key)  # fmt: skip


def _walk(tree: Tree, session: Session, options: ReadOptions) -> None:
    leaf = tree.entries[-1] if tree.entries else None
    if options.leaf is not None:
        leaf = tree.by_id.get(options.leaf)
        if leaf is None:
            raise TranscriptError(f"no entry with id {options.leaf!r}")
    seen: set[str] = set()
    while leaf is not None and leaf.id is not None:
        if leaf.id in seen:
            session.warn(
                leaf.index + 1, f"the parent links of {leaf.id!r} run in a circle; the path starts there"
            )
            break
        seen.add(leaf.id)
        tree.path.append(leaf)
        if leaf.parent and leaf.parent not in tree.by_id:
            session.warn(leaf.index + 1, f"parent {leaf.parent!r} is not in the file; the path starts there")
        leaf = tree.by_id.get(leaf.parent) if leaf.parent else None
    tree.path.reverse()


TALK = ("message", "custom_message", "compaction", "branch_summary")


def _leaves(tree: Tree) -> list[tuple[int, str]]:
    """Entries that say something and that nothing said follows: the ends of branches, in file order."""
    followed: set[str | None] = set()
    talk = [e for e in tree.by_id.values() if e.type in TALK]
    for entry in talk:
        above, seen = tree.by_id.get(entry.parent or ""), {entry.id}
        while above is not None and above.type not in TALK and above.id not in seen:
            seen.add(above.id)
            above = tree.by_id.get(above.parent or "")
        followed.add(above.id if above is not None else None)
    return sorted((e.index + 1, e.id or "") for e in talk if e.id not in followed)


def _kept_by(records: Records, tree: Tree, compaction: Entry) -> list[Entry]:
    """What the compaction kept, then what follows it; system messages it kept are in its own record."""
    at = tree.path.index(compaction)
    first = _first_kept_id(records, tree, compaction)
    start = next((i for i, e in enumerate(tree.path[:at]) if e.id == first), at)
    kept = [e for e in tree.path[start:at] if e.type != "compaction" and not _is_system(e)]
    return kept + tree.path[at + 1 :]


def _first_kept_id(records: Records, tree: Tree, compaction: Entry) -> object:
    obj = records[compaction.index].dict
    if tree.version > 1:
        return obj.get("firstKeptEntryId")
    number = obj.get("firstKeptEntryIndex")  # counts all parsed lines, the header included
    return (
        tree.entries[number - 1].id if isinstance(number, int) and 0 < number <= len(tree.entries) else None
    )


def _is_system(entry: Entry) -> bool:
    return entry.message is not None and entry.message.role == "system"


def _role(obj: Json) -> str:
    message = obj.get("message")
    return ROLES.get(str(message.get("role")), "other") if isinstance(message, dict) else "other"


def _edits(records: Records, entries: Iterable[Entry]) -> dict[str, Json]:
    edits: dict[str, Json] = {}
    for entry in entries:
        if entry.type == "context_edit":
            obj = records[entry.index].dict
            edits[str(obj.get("targetId"))] = obj
    return edits


def _summary(records: Records, tree: Tree, entry: Entry, options: ReadOptions) -> Message:
    obj = records[entry.index].dict
    text = obj.get("summary")
    after = tree.path[tree.path.index(entry) + 1 :]
    talk = any(e.type in ("message", "custom_message", "branch_summary") for e in after)
    system = obj.get("systemMessage")
    if isinstance(system, dict):
        tree.systems.append(_system_patch(system))
    return Message("user", (Text(text if isinstance(text, str) else ""),), line=entry.index + 1, id=entry.id,
                   kind=COMPACTION_SUMMARY, files=_files(obj),
                   at_end=not after or (options.repair and not talk))  # fmt: skip


def _files(obj: Json) -> FileOperations:
    """File lists of a compaction that pi wrote itself; strings only."""
    details = obj.get("details")
    if obj.get("fromHook"):
        return FileOperations()
    if not isinstance(details, dict):
        return files_in_summary(str(obj.get("summary") or ""))

    def paths(key: str) -> set[str]:
        values = details.get(key)
        return {v for v in values if isinstance(v, str)} if isinstance(values, list) else set()

    return FileOperations(read=paths("readFiles"), edited=paths("modifiedFiles"))


def _message(tree: Tree, entry: Entry, edit: Json | None) -> Message | None:
    message = entry.message
    if message is None:
        return None
    message.id = entry.id
    if edit is not None:
        _apply_edit(message, edit)
    if message.role == "system":
        tree.systems += [p for p in message.parts if isinstance(p, SystemPatch)]
    return message


def _apply_edit(message: Message, edit: Json) -> None:
    replacement = edit.get("replacement")
    if replacement is None:
        message.hidden, message.kind, message.usage = True, OMITTED, None
    elif message.role in EDITABLE and isinstance(replacement, dict):
        message.parts = _content_parts(replacement.get("content"), message.role, None)


def message_of(record: Record) -> Message | None:
    """The message of one entry, or None when it is metadata (or an empty branch summary)."""
    obj = record.dict
    kind = obj.get("type")
    if kind == "message" and isinstance(inner := obj.get("message"), dict):
        role = _role(obj)
        usage, note = _usage(inner) if role == "assistant" else (None, "")
        kind = SYSTEM_PATCH if role == "system" else ""
        return Message(
            role, partial(_parts, obj), line=record.number, kind=kind, usage=usage, usage_note=note
        )
    if kind == "custom_message":
        return Message("custom", partial(_parts, obj), line=record.number)
    if kind == "branch_summary" and obj.get("summary"):
        return Message("branchSummary", partial(_parts, obj), line=record.number)
    return None


def _parts(obj: Json) -> Parts:
    if obj.get("type") == "custom_message":
        return _content_parts(obj.get("content"), "custom", None)
    if obj.get("type") == "branch_summary":
        return (Text(str(obj.get("summary"))),)
    message = obj.get("message")
    message = message if isinstance(message, dict) else {}
    role = _role(obj)
    if role == "bashExecution":  # one that is excluded from the context has no size and no text there
        return () if message.get("excludeFromContext") else (_shell(message),)
    if role == "branchSummary":
        return (Text(str(message.get("summary") or "")),)
    if role == "system":
        return (_system_patch(message),)
    if role == "other":
        return ()
    return _content_parts(message.get("content"), role, message)


def _touches(obj: Json) -> tuple[Touch, ...] | None:
    """The calls of an entry that name files; None where a tool made some itself, which `_parts` lists."""
    message = obj.get("message")
    if not isinstance(message, dict) or "nestedCalls" in message:
        return None
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, list):
        return ()
    calls = (b for b in content if isinstance(b, dict) and b.get("type") == "toolCall")
    return touches_of((c.get("name"), c.get("arguments")) for c in calls)


def _content_parts(content: object, role: str, message: Json | None) -> Parts:
    if role == "toolResult":
        return _result_parts(content, message or {})
    if isinstance(content, str):
        return (Text(content),)
    blocks = content if isinstance(content, list) else []
    return tuple(part for b in blocks if isinstance(b, dict) and (part := _block(b)) is not None)


def _block(block: Json) -> Text | Thinking | Image | ToolCall | None:
    match block.get("type"):
        case "text":
            return Text(str(block.get("text") or ""))
        case "thinking":
            return Thinking(str(block.get("thinking") or ""))
        case "image":
            return Image(str(block.get("mimeType") or ""))
        case "toolCall":
            return ToolCall(_string(block.get("id")), str(block.get("name") or ""), block.get("arguments"))
    return None


def _result_parts(content: object, message: Json) -> Parts:
    images = (
        sum(isinstance(b, dict) and b.get("type") == "image" for b in content)
        if isinstance(content, list)
        else 0
    )
    result = ToolResult(_string(message.get("toolCallId")), texts_of(content), images,
                        message.get("isError") is True, str(message.get("toolName") or ""))  # fmt: skip
    return (result, *_nested(message.get("nestedCalls")))


def _nested(nested: object) -> Iterator[ToolCall]:
    """Calls that a tool made itself: they touch files, but have no result of their own and no size."""
    calls = nested.get("calls") if isinstance(nested, dict) else None
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            yield ToolCall(None, str(call.get("name") or ""), call.get("arguments"))


def _shell(message: Json) -> Shell:
    status = []
    code = message.get("exitCode")
    if message.get("cancelled"):
        status.append("(command cancelled)")
    elif code not in (None, 0):
        status.append(f"Command exited with code {code}")
    if message.get("truncated") and message.get("fullOutputPath"):
        status.append(f"[Output truncated. Full output: {message['fullOutputPath']}]")
    return Shell(str(message.get("command") or ""), str(message.get("output") or ""), "\n\n".join(status))


def _system_patch(message: Json) -> SystemPatch:
    sections = message.get("sections")
    added, gone = message.get("toolsAdded"), message.get("toolsRemoved")
    return SystemPatch(
        text="".join(texts_of(message.get("content"))),
        sections=tuple((k, v if isinstance(v, str) else None) for k, v in sections.items())
        if isinstance(sections, dict) else (),
        tools_added=tuple(added) if isinstance(added, list) else (),
        tools_removed=tuple(str(t.get("name")) if isinstance(t, dict) else str(t) for t in gone)
        if isinstance(gone, list) else (),
    )  # fmt: skip


def _usage(message: Json) -> tuple[float | None, str]:
    """(context tokens, "") or (None, why the figure does not count)."""
    usage = message.get("usage")
    if not isinstance(usage, dict):
        return None, ""
    if message.get("stopReason") in ("aborted", "error"):
        return None, f"the turn ended with {message['stopReason']}"
    total = numbers(usage, "totalTokens") or numbers(usage, "input", "output", "cacheRead", "cacheWrite")
    return (total, "") if total > 0 else (None, "all figures are zero")


def _mark_withdrawn(records: Records, entries: Sequence[Entry], edits: Mapping[str, Json],
                    messages: Sequence[Message]) -> None:  # fmt: skip
    """Hidden messages at the end are a withdrawn attempt, unless an edit there replaces something else."""
    hidden: list[Message] = []
    for message in reversed(messages):
        if message.kind != OMITTED:
            break
        hidden.append(message)
    if not hidden:
        return
    ids = {m.id for m in hidden}
    last_visible = min(m.line for m in hidden)
    external = any(
        e.type == "context_edit" and e.index + 1 > last_visible
        and (obj := records[e.index].dict).get("replacement") is not None and obj.get("targetId") not in ids
        for e in entries
    )  # fmt: skip
    if not external:
        for message in hidden:
            message.kind = WITHDRAWN


def _mark_stale(tree: Tree, records: Records, messages: Sequence[Message]) -> None:
    """A usage measured before the last compaction or context edit describes another prompt (R4)."""
    turning = next((e for e in reversed(tree.path) if e.type in ("compaction", "context_edit")), None)
    if turning is None:
        return
    later = {e.index + 1 for e in tree.path[tree.path.index(turning) :]}
    for message in messages:
        if message.usage is not None and message.line not in later:
            message.usage, message.usage_note = (
                None,
                f"measured before the {turning.type} on line {turning.index + 1}",
            )


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


# --------------------------------------------------------------------------------------- writing
def first_kept_entry(session: Session, plan: CompactionPreparation) -> Entry:
    """The entry that the compaction names: metadata right before the first kept message comes along."""
    tree: Tree = session.state
    shown = {m.line for m in session.messages if m.kind != WITHDRAWN and m.kind != OMITTED}
    line = plan.retained_tail[0].line
    at = next(i for i, e in enumerate(tree.context) if e.index + 1 == line)
    while at > 0 and tree.context[at - 1].index + 1 not in shown:
        at -= 1
    return tree.context[at]


def select(session: Session, plan: CompactionPreparation) -> list[int]:
    """Header, latest settings, the kept part of the path with branches that hang on it, opaque lines there."""
    tree: Tree = session.state
    first = first_kept_entry(session, plan)
    entries = _kept_entries(session, plan)
    kept = {tree.header, *(e.index for e in _carried(tree, entries[0])), *(e.index for e in entries)}
    ids = {e.id for e in entries}
    on_path = {e.index for e in tree.path}
    for entry in tree.entries:
        if entry.index > first.index and entry.index not in on_path and entry.parent in ids:
            kept.add(entry.index)
            ids.add(entry.id)
    known = {e.index for e in tree.entries}
    kept.update(i for i in range(first.index + 1, len(session.records)) if i not in known)
    if ends_in_torn_line(session.records):
        kept.discard(len(session.records) - 1)
    return sorted(kept)


def _kept_entries(session: Session, plan: CompactionPreparation) -> list[Entry]:
    """Path entries that stay: protected ones, then from the first kept one on; old compactions left out."""
    tree: Tree = session.state
    tail = tree.path[tree.path.index(first_kept_entry(session, plan)) :]
    front: Sequence[Entry] = ()
    if plan.protected:
        lines = [e.index + 1 for e in tree.path]
        front = tree.path[lines.index(plan.protected[0].line) : lines.index(plan.removed[0].line)]
    return [e for e in (*front, *tail) if e.type != "compaction"]


def _carried(tree: Tree, first: Entry) -> list[Entry]:
    """The latest of each setting on the path before what is kept, so that a resume finds model and name."""
    latest: dict[tuple[str, str], Entry] = {}
    for entry in tree.path[: tree.path.index(first)]:
        if entry.type in CARRIED:
            latest.pop((entry.type, entry.key), None)
            latest[entry.type, entry.key] = entry
    return sorted(latest.values(), key=lambda e: e.index)


def rebuild(session: Session, plan: CompactionPreparation, kept: Sequence[int],
            checkpoint: Checkpoint) -> Iterable[Piece]:  # fmt: skip
    """Header, settings, tail, then the compaction as the new leaf. Only parent links change in kept lines."""
    tree: Tree = session.state
    records = session.records
    entries = _kept_entries(session, plan)
    chain = [*_carried(tree, entries[0]), *entries]
    parents = {e.index: (chain[i - 1].id if i else None) for i, e in enumerate(chain)}
    for index in kept:
        yield _linked(records, tree, index, parents) if index in parents and tree.version > 1 else index
    last = chain[-1]
    yield dump(_compaction(session, entries[0], checkpoint, kept, last)) + records.newline


def append(session: Session, plan: CompactionPreparation, checkpoint: Checkpoint) -> bytes:
    """One entry behind the old bytes, as a child of the leaf: it names where the kept part begins."""
    tree: Tree = session.state
    if plan.protected:
        raise UsageError("a pi compaction keeps a tail only: --append goes with --strategy keep-recent here")
    records = session.records
    line = plan.retained_tail[0].line
    first = next(e for e in tree.path if e.index + 1 == line)
    entry = _compaction(session, first, checkpoint, range(len(records)), tree.path[-1])
    gap = b"" if records.raw(len(records) - 1).endswith(b"\n") else records.newline
    return gap + dump(entry) + records.newline


def compactions(session: Session) -> list[Compaction]:
    """Those on the path. Each took out what lies between what the one before kept and what it keeps."""
    tree: Tree = session.state
    records = session.records
    places = {e.id: i for i, e in enumerate(tree.path)}
    found, start = [], 0
    for at, entry in enumerate(tree.path):
        if entry.type != "compaction":
            continue
        first = _first_kept_id(records, tree, entry)
        end = places.get(first, at) if isinstance(first, str) else at
        end = min(max(end, start), at)
        lines = [
            e.index for e in tree.path[start:end] if e.message is not None and e.message.kind != SYSTEM_PATCH
        ]
        obj = records[entry.index].dict
        text, stamp = obj.get("summary"), obj.get("timestamp")
        found.append(Compaction(entry.index, str(text or ""), lines, stamp if isinstance(stamp, str) else ""))
        start = end
    return found


def _linked(records: Records, tree: Tree, index: int, parents: Mapping[int, str | None]) -> Piece:
    parent = parents[index]
    if records[index].dict.get("parentId") == parent:
        return index
    return index, splice(records.raw(index), ("parentId",), dump(parent))


def _compaction(session: Session, first: Entry, checkpoint: Checkpoint, kept: Sequence[int],
                leaf: Entry) -> Json:  # fmt: skip
    tree: Tree = session.state
    moment = _last_time(session.records, kept)
    entry: Json = {"type": "compaction", "id": _new_id(tree, checkpoint), "parentId": leaf.id}
    entry |= {"timestamp": format_time(moment, milliseconds=1), "summary": checkpoint.summary}
    if tree.version == 1:
        del entry["id"], entry["parentId"]
        entry["firstKeptEntryIndex"] = _line_count(session.records, kept, first.index)
    else:
        entry["firstKeptEntryId"] = first.id
    entry["tokensBefore"] = checkpoint.tokens_before
    entry["details"] = {
        "readFiles": list(checkpoint.read_files),
        "modifiedFiles": list(checkpoint.modified_files),
    }
    if tree.systems:
        entry["systemMessage"] = _system_message(tree.systems, moment)
    return entry


def _line_count(records: Records, kept: Sequence[int], first: int) -> int:
    """Index of the first kept entry among all parsed lines of the new file, as v1 counts."""
    return sum(1 for i in kept if i < first and records[i].obj)


def _new_id(tree: Tree, checkpoint: Checkpoint) -> str:
    """Eight hex digits, derived from what is written, that no entry has."""
    for attempt in range(1000):
        seed = f"{checkpoint.hash}\n{attempt}\n{checkpoint.summary}".encode()
        name = hashlib.sha256(seed).hexdigest()[:8]
        if name not in tree.by_id:
            return name
    raise AssertionError("no free id in a thousand tries")


def _last_time(records: Records, kept: Sequence[int]) -> datetime:
    times = (parse_time(records[i].dict.get("timestamp")) for i in reversed(kept))
    return next((t for t in times if t is not None), datetime(1970, 1, 1, tzinfo=UTC))


def _system_message(patches: Iterable[SystemPatch], moment: datetime) -> Json:
    current = replay_system(patches)
    message: Json = {"role": "system", "content": current.text}
    if current.sections:
        message["sections"] = dict(current.sections)
    if current.tools_added:
        message["toolsAdded"] = list(current.tools_added)
    message["timestamp"] = int(moment.timestamp() * 1000) + 1
    return message
