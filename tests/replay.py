"""What a client would show its model for a session file, told from the description of the formats alone.

No adapter is used or was copied: these readers are judges. Each takes a file's bytes and gives atoms, in the
order in which the model reads them:

    ("summary", text)           what stands for a compacted part
    ("user", text)  ("assistant", text)  ("thinking", text)  ("shell", command, output)  ("image",)
    ("call", id, name)          ("result", id, text)

Empty texts are left out; so are system prompts, and the context that a client adds anew at each start.
"""

import io
import json
import re

import zstandard

Atom = tuple[str, ...]


class Unreadable(Exception):
    """The client itself would not load this file."""


def objects(data, *, strict=False):
    """One entry a line that holds a JSON object; other lines are passed over as every client does.

    `strict` drops what a Rust client drops: escapes of half a surrogate pair and invalid UTF-8.
    """
    found = []
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        try:
            text = line.decode("utf-8", "strict" if strict else "replace").strip("\0 \t\r")
            value = json.loads(text)
            if strict:
                json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def blocks(content):
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []


def spoken(role, content):
    """Atoms of a message's plain content."""
    for block in blocks(content):
        if block.get("type") in ("text", "input_text", "output_text", "refusal"):
            text = block.get("text") or block.get("refusal")
            if isinstance(text, str) and text:
                yield (role, text)
        elif block.get("type") in ("image", "input_image", "image_url"):
            yield ("image",)


def _thought(text):
    if isinstance(text, str) and text:
        yield ("thinking", text)


def plain(content):
    """The texts of a tool result as one."""
    found = [b["text"] for b in blocks(content) if isinstance(b.get("text"), str) and b["text"]]
    return "\n".join(found)


def pictures(content):
    return [("image",) for b in blocks(content) if b.get("type") in ("image", "input_image", "image_url")]


# -------------------------------------------------------------------------------------------- pi
def pi(data):
    entries = _pi_entries(data)
    path = pi_path(entries)
    return [atom for entry in _pi_projected(path) for atom in pi_atoms(entry)]


def _pi_entries(data):
    header, *entries = objects(data) or [{}]
    if header.get("type") != "session" or not isinstance(header.get("id"), str):
        raise Unreadable("no session header")
    version = header.get("version", 1)
    if version == 1:
        ids = ["header"]
        for entry in entries:
            ids.append(f"line{len(ids)}")
            entry |= {"id": ids[-1], "parentId": ids[-2] if len(ids) > 2 else None}
        for entry in entries:
            index = entry.get("firstKeptEntryIndex")
            if isinstance(index, int) and 0 < index < len(ids):
                entry["firstKeptEntryId"] = ids[index]
    return [e for e in entries if e.get("type") != "session"]


def pi_path(entries):
    """From the root to the leaf: the last entry, or what a last `leaf` entry of a harness points to."""
    by_id = {e.get("id"): e for e in entries}
    leaf = entries[-1] if entries else None
    if leaf is not None and leaf.get("type") == "leaf":
        leaf = by_id.get(leaf.get("targetId"))
    path = []
    while leaf is not None:
        if any(leaf is e for e in path):
            raise Unreadable("the client would hang: parents in a circle")
        path.insert(0, leaf)
        leaf = by_id.get(leaf.get("parentId")) if leaf.get("parentId") is not None else None
    return path


def _pi_projected(path):
    """The entries that count, the newest compaction first, with the edits that they hold."""
    at = max((i for i, e in enumerate(path) if e.get("type") == "compaction"), default=None)
    if at is not None:
        first = path[at].get("firstKeptEntryId")
        start = next((i for i, e in enumerate(path[:at]) if e.get("id") == first), at)
        path = [path[at], *(e for e in path[start:at] if e.get("type") != "compaction"), *path[at + 1 :]]
    edits = {e.get("targetId"): e.get("replacement") for e in path if e.get("type") == "context_edit"}
    for entry in path:
        if entry.get("id") not in edits:
            yield entry
        elif edits[entry["id"]] is not None:
            content = edits[entry["id"]].get("content")
            inner = "message" if entry.get("type") == "message" else None
            yield entry | ({inner: entry[inner] | {"content": content}} if inner else {"content": content})


def pi_atoms(entry):
    kind, message = entry.get("type"), entry.get("message")
    if kind == "compaction":
        yield ("summary", entry.get("summary"))
    elif kind == "branch_summary" and entry.get("summary"):
        yield ("user", entry["summary"])
    elif kind == "custom_message":
        yield from spoken("user", entry.get("content"))
    elif kind == "message" and isinstance(message, dict):
        yield from pi_message(message)


def pi_message(message):
    role, content = message.get("role"), message.get("content")
    if role in ("user", "custom", "hookMessage"):
        yield from spoken("user", content)
    elif role == "bashExecution" and not message.get("excludeFromContext"):
        yield ("shell", message.get("command"), message.get("output"))
    elif role == "toolResult":
        yield ("result", message.get("toolCallId"), plain(content))
        yield from pictures(content)
    elif role == "assistant":
        for block in blocks(content):
            if block.get("type") == "toolCall":
                yield ("call", block.get("id"), block.get("name"))
            elif block.get("type") == "thinking":
                yield from _thought(block.get("thinking"))
            else:
                yield from spoken("assistant", [block])


# ----------------------------------------------------------------------------------- Claude Code
CHAIN = ("user", "assistant", "system", "attachment", "progress")
SYNTHETIC = "<synthetic>"


def claude(data):
    """Releases from 2.1.144 on: the last leaf of the file, preserved lines linked anew, parallel calls put back."""
    lines = [o for o in objects(data) if o.get("type") in CHAIN and isinstance(o.get("uuid"), str)]
    lines = _relinked(list({o["uuid"]: o for o in lines}.values()), lines)
    chain = _walk(lines, _last_leaf(lines))
    return claude_atoms(_parallels(lines, chain))


def claude_old(data):
    """2.0.76: the newest line is the leaf, nothing is linked anew, branches of parallel calls are lost."""
    lines = [o for o in objects(data) if o.get("type") in CHAIN and isinstance(o.get("uuid"), str)]
    own = [o for o in lines if o["type"] in ("user", "assistant") and not o.get("isSidechain")]
    if not own:
        raise Unreadable("no message")
    return claude_atoms(_walk(lines, max(own, key=lambda o: str(o.get("timestamp")))))


def _last_leaf(lines):
    """The user or assistant line above the last end of the tree; ends of the main conversation first."""
    by_uuid = {o["uuid"]: o for o in lines}
    place = {o["uuid"]: i for i, o in enumerate(lines)}
    parents = {o.get("parentUuid") for o in lines}
    ends = []
    for line in lines:
        seen = set()
        at = line if line["uuid"] not in parents else None
        while at is not None and at["type"] not in ("user", "assistant") and at["uuid"] not in seen:
            seen.add(at["uuid"])
            at = by_uuid.get(at.get("parentUuid"))
        if at is not None and at["type"] in ("user", "assistant"):
            ends.append(at)
    main = [o for o in ends if not (o.get("isSidechain") or o.get("teamName") or o.get("isMeta"))]
    if not ends:
        raise Unreadable("no message")
    return max(main or ends, key=lambda o: place[o["uuid"]])


def _walk(lines, line):
    """Parents up to a line without one; a parent that is not there is bridged to the line before."""
    by_uuid = {o["uuid"]: o for o in lines}
    place = {o["uuid"]: i for i, o in reversed(list(enumerate(lines)))}
    chain, seen = [], set()
    while line is not None and line["uuid"] not in seen:
        seen.add(line["uuid"])
        chain.insert(0, line)
        parent = line.get("parentUuid")
        before = lines[: place[line["uuid"]]]
        bridged = [o for o in before if bool(o.get("isSidechain")) == bool(line.get("isSidechain"))]
        line = by_uuid.get(parent) if parent in by_uuid or parent is None else (bridged or [None])[-1]
    return chain


def _relinked(unique, lines):
    """What the loader makes of the last boundary's list (or segment) of preserved lines."""
    boundaries = [o for o in unique if o.get("subtype") == "compact_boundary"]
    meta = (boundaries[-1].get("compactMetadata") or {}) if boundaries else {}
    by_uuid = {o["uuid"]: o for o in unique}
    kept, anchor = _preserved(meta, by_uuid)
    if not kept or anchor not in by_uuid or any(u not in by_uuid for u in kept):
        return unique
    cut = unique.index(by_uuid[boundaries[-1]["uuid"]])
    unique = [o for i, o in enumerate(unique) if i >= cut or o["uuid"] in kept]
    there = {o["uuid"] for o in unique}
    out = []
    for line in unique:
        parent = line.get("parentUuid")
        if line["uuid"] in kept:
            at = kept.index(line["uuid"])
            line = line | {"parentUuid": kept[at - 1] if at else anchor}
        elif parent == anchor or (parent is not None and parent not in there):
            line = line | {"parentUuid": kept[-1]}
        out.append(line)
    return out


def _preserved(meta, by_uuid):
    listed, segment = meta.get("preservedMessages"), meta.get("preservedSegment")
    if isinstance(listed, dict) and isinstance(listed.get("uuids"), list):
        return listed["uuids"], listed.get("anchorUuid")
    if not isinstance(segment, dict):
        return [], None
    walk, at = [], segment.get("tailUuid")
    while at in by_uuid and at not in walk:
        walk.insert(0, at)
        if at == segment.get("headUuid"):
            return walk, segment.get("anchorUuid")
        at = by_uuid[at].get("parentUuid")
    return [], None


def _response(line):
    return (line.get("message") or {}).get("id") if line["type"] == "assistant" else None


def _results(line):
    content = (line.get("message") or {}).get("content") if line["type"] == "user" else None
    return [b.get("tool_use_id") for b in blocks(content) if b.get("type") == "tool_result"]


def _parallels(lines, chain):
    """Lines of a response on the chain that stand on side branches, and their results, behind its last line."""
    on_chain = {o["uuid"] for o in chain}
    last = {_response(o): o["uuid"] for o in chain if _response(o)}
    owners = {}
    for line in lines:
        for block in blocks((line.get("message") or {}).get("content")) if _response(line) else ():
            if block.get("type") == "tool_use":
                owners.setdefault(block.get("id"), set()).add(_response(line))
    out = []
    for link in chain:
        out.append(link)
        own = _response(link)
        if own is None or last[own] != link["uuid"]:
            continue
        members = [o for o in lines if _response(o) == own]
        uuids = {o["uuid"] for o in members}
        results = [o for o in lines if _results(o) and (
            o.get("parentUuid") in uuids or o.get("sourceToolAssistantUUID") in uuids
            or (any(owners.get(i) == {own} for i in _results(o)) and _same_writer(o, link)))]  # fmt: skip
        for group in (members, results):
            more = [o for o in group if o["uuid"] not in on_chain]
            on_chain |= {o["uuid"] for o in more}
            out += sorted(more, key=lambda o: str(o.get("timestamp")))
    return out


def _same_writer(a, b):
    return all(a.get(k) == b.get(k) for k in ("isSidechain", "agentId"))


def claude_atoms(chain):
    """In the order of the chain; a client sends a response's lines as one message, the results behind it."""
    return [atom for line in chain if _is_sent(line) for atom in _claude_line(line)]


def _is_sent(line):
    if line["type"] == "system":
        return line.get("subtype") == "local_command"
    model = (line.get("message") or {}).get("model")
    noise = line.get("isApiErrorMessage") or line.get("isVirtual") or model == SYNTHETIC
    return line["type"] in ("user", "assistant") and not noise


def _claude_line(line):
    if line["type"] == "system":
        yield from spoken("user", line.get("content"))
        return
    content = (line.get("message") or {}).get("content")
    if line.get("isCompactSummary"):
        yield ("summary", plain(content))
        return
    for block in blocks(content):
        kind = block.get("type")
        if kind == "tool_use":
            yield ("call", block.get("id"), block.get("name"))
        elif kind == "tool_result":
            yield ("result", block.get("tool_use_id"), plain(block.get("content")))
            yield from pictures(block.get("content"))
        elif kind == "thinking":
            yield from _thought(block.get("thinking"))
        else:
            yield from spoken(line["type"], [block])


# ----------------------------------------------------------------------------------------- Codex
CODEX_PREFIX = "Another language model started to solve this problem"
CONTEXT_STARTS = ("# AGENTS.md instructions", "<environment_context>", "<user_instructions>", "<skill>",
                  "<skills_instructions>", "<subagent_notification>", "<permissions instructions>",
                  "<turn_aborted>", "<INSTRUCTIONS>", "<hook_prompt>")  # fmt: skip
CALLS = ("function_call", "custom_tool_call", "local_shell_call", "tool_search_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
USER_TOKENS_KEPT = 20_000


def codex(data):
    if data[:4] == b"\x28\xb5\x2f\xfd":
        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
    lines = [o for o in objects(data, strict=True) if isinstance(o.get("payload"), dict)]
    if not lines or lines[0].get("type") != "session_meta" or lines[0]["payload"].get("history_base"):
        raise Unreadable("no session of its own")
    history = []
    for line in lines:
        history = _codex_step(history, line.get("type"), line["payload"])
    return [atom for item in history for atom in codex_atoms(item)]


def _codex_step(history, kind, payload):
    """The model history after one more line."""
    if kind == "compacted" and isinstance(payload.get("replacement_history"), list):
        text = payload.get("message")
        return [i | {"is_summary": plain(i.get("content")) == text} for i in payload["replacement_history"]]
    if kind == "compacted":
        users = [i for i in history if _is_speech(i)]
        kept, room = [], 4 * USER_TOKENS_KEPT
        for item in reversed(users):
            room -= len(plain(item["content"]).encode())
            if room >= 0:
                kept.insert(0, item)
        summary = {"type": "message", "role": "user", "content": payload.get("message")}
        return [*kept, summary | {"is_summary": True}]
    if kind == "event_msg" and payload.get("type") == "thread_rolled_back":
        starts = [n for n, item in enumerate(history) if _is_speech(item)]
        count = payload.get("num_turns") or 0
        return (
            history[: starts[-count] if count <= len(starts) else starts[0]] if count and starts else history
        )
    if kind == "inter_agent_communication":
        names = [payload.get("author"), payload.get("recipient"), *payload.get("other_recipients", [])]
        known = all(re.fullmatch(r"/root(/[a-z0-9_]+)*|/morpheus", str(name)) for name in names)
        return [*history, payload | {"type": "agent_message"}] if known else history
    return [*history, payload] if kind == "response_item" else history


def _is_summary(item):
    return item.get("is_summary") or plain(item.get("content")).startswith(CODEX_PREFIX)


def _is_speech(item):
    own = item.get("type") == "message" and item.get("role") == "user"
    return own and not is_context(item) and not _is_summary(item)


def is_context(item):
    kinds = (item.get("internal_chat_message_metadata_passthrough") or {}).get("content_item_kinds")
    if kinds and any(k != "unknown" for k in kinds):  # the client's word for what an older one wrote
        return not any(k in ("user.text", "user.image", "compaction.summary") for k in kinds)
    return plain(item.get("content")).lstrip().startswith(CONTEXT_STARTS)


def codex_atoms(item):
    kind, role = item.get("type"), item.get("role")
    if kind == "message" and role == "user" and _is_summary(item):
        text = plain(item["content"])
        yield ("summary", text.partition("\n")[2] if text.startswith(CODEX_PREFIX) else text)
    elif kind == "message" and (role == "assistant" or (role == "user" and not is_context(item))):
        yield from spoken(role, item.get("content"))
    elif kind == "reasoning":
        for block in [*blocks(item.get("summary")), *blocks(item.get("content"))]:
            yield from _thought(block.get("text"))
    elif kind == "agent_message":
        yield from spoken("user", item.get("content"))
    elif kind in ("web_search_call", "image_generation_call"):  # they hold their own result
        yield ("call", None, kind.removesuffix("_call"))
        yield from [("image",)] * (kind == "image_generation_call")
    elif kind == "tool_search_output":
        tools = json.dumps(item.get("tools"), separators=(",", ":"), ensure_ascii=False)
        yield ("result", item.get("call_id"), tools)
    elif kind in CALLS:
        yield ("call", item.get("call_id"), item.get("name") or kind.removesuffix("_call"))
    elif kind in OUTPUTS:
        yield ("result", item.get("call_id"), plain(item.get("output")))
        yield from pictures(item.get("output"))


# ----------------------------------------------------------------------------------------- berry
def berry(data):
    """The projection; a summary stands where the log has it: behind what was kept."""
    events = [o for o in objects(data) if "format" not in o]
    hidden = set()
    for event in events:
        op = event.get("surfaceOp")
        if isinstance(op, dict):
            hidden |= set(range(op["start"], op["end"] + 1))
    return [a for e in events if e.get("seq") not in hidden for a in berry_atoms(e)]


def berry_atoms(event):
    data = event.get("data") or {}
    kind = event.get("type")
    if kind == "user/message" and data.get("source") == "compaction":
        yield ("summary", plain(data.get("content")))
    elif kind == "user/message":
        yield from spoken("user", data.get("content"))
    elif kind == "assistant/message":
        for block in blocks(data.get("content")):
            if block.get("type") == "thinking":
                yield from _thought(block.get("thinking"))
            else:
                yield from spoken("assistant", [block])
    elif kind == "tool/call":
        yield ("call", data.get("toolCallId"), data.get("name"))
    elif kind == "tool/result":
        yield ("result", data.get("toolCallId"), plain(data.get("content")))
        yield from pictures(data.get("content"))


# ---------------------------------------------------------------------------- lists of messages
OURS = "[haocompact] Summary of the conversation so far"


def chat(data):
    """OpenAI chat messages, one a line, in file order; a first user message may be our own summary."""
    first = True
    for obj in objects(data):
        role, content = obj.get("role"), obj.get("content")
        if role in ("user", "assistant"):
            if first and plain(content).startswith(OURS):
                role = "summary"
            first = False
            for key in ("reasoning_content", "reasoning"):
                yield from _thought(obj.get(key))
            yield from spoken(role, content)
            for call in obj.get("tool_calls") or ():
                inner = call.get("function") or call.get("custom") or {}
                yield ("call", call.get("id"), inner.get("name"))
            if obj.get("function_call"):  # the older form: a result answers the last call of its name
                yield ("call", obj["function_call"].get("name"), obj["function_call"].get("name"))
        elif role in ("tool", "function"):
            yield ("result", obj.get("tool_call_id" if role == "tool" else "name"), plain(content))


def anthropic(data):
    """Anthropic messages, one a line; results come before the other blocks of their message."""
    first = True
    for obj in objects(data):
        spoke = obj.get("role") in ("user", "assistant")
        if first and spoke and plain(obj.get("content")).startswith(OURS):
            yield ("summary", plain(obj["content"]))
            first = False
            continue
        first = first and not spoke
        for block in blocks(obj.get("content")) if spoke else ():
            kind = block.get("type")
            if kind == "tool_use":
                yield ("call", block.get("id"), block.get("name"))
            elif kind == "tool_result":
                yield ("result", block.get("tool_use_id"), plain(block.get("content")))
                yield from pictures(block.get("content"))
            elif kind == "thinking":
                yield from _thought(block.get("thinking"))
            elif kind == "compaction" and isinstance(block.get("content"), str):
                yield ("assistant", block["content"])
            else:
                yield from spoken(obj["role"], [block])


def haocode(data):
    """Haocode messages, one a line; results without id answer the open calls from left to right."""
    for obj in objects(data):
        role, content = obj.get("role"), obj.get("content")
        if obj.get("kind") == "compaction_summary":
            yield ("summary", plain(content))
        elif role in ("user", "assistant"):
            yield from _thought(obj.get("reasoning"))
            yield from spoken(role, content)
            for call in obj.get("tool_calls") or ():
                yield ("call", call.get("id"), call.get("name"))
        elif role == "toolResult":
            yield ("result", obj.get("tool_call_id"), plain(content))


READERS = {"pi": pi, "claude": claude, "codex": codex, "berry": berry, "openai": chat,
           "anthropic": anthropic, "haocode": haocode}  # fmt: skip


def replay(format, data):
    return list(READERS[format](data))


def unpaired(atoms):
    """(results without a call before them, calls without a result after them), as ids."""
    open_calls, orphans, answered = [], [], set()
    for atom in atoms:
        if atom[0] == "call" and atom[1] is not None:
            open_calls.append(atom[1])
        elif atom[0] == "result" and atom[1] in open_calls:
            open_calls.remove(atom[1])
            answered.add(atom[1])
        elif atom[0] == "result":
            orphans.append(atom[1])
    return orphans, open_calls
