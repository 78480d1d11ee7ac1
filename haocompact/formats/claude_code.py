"""Claude Code transcripts: `~/.claude/projects/<encoded cwd>/<session id>.jsonl`.

A tree of lines linked by `parentUuid`; the conversation is the walk from the newest branch end up to its
root or its last compaction. A response is several lines of one `message.id`, and parallel calls fork.

Reading follows the Agent SDK's session reader (`claude_agent_sdk/_internal/sessions.py` 0.2.189), and the
client (2.0.76 to 2.1.332) where the two differ: a missing parent is bridged to the line before.

Writing: session metadata, a native boundary, the summary, then the kept lines in one straight chain. The
client forces these edits on a kept line, spliced into its bytes, each only where it is needed:

    parentUuid   the kept line before it (forks lose calls on 2.0.76); inserted where it is missing
    timestamp    1 ms after the line before, where time would run backwards, or stand still at the last
                 line (up to 2.1.100 the newest line is the branch end)
    usage        zero where it says more than 100,000 tokens (the client would compact again at once)
    NUL bytes    around a record go, and so does a byte order mark that would not be the first byte
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from itertools import groupby

from haocompact.compaction import (
    COMPACTION_SUMMARY,
    CompactionPreparation,
    Image,
    Message,
    Part,
    Parts,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    Touch,
    touches_of,
)
from haocompact.errors import TranscriptError
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
    removed,
    texts_of,
)
from haocompact.records import BOM, Record, Records, dump, splice, value_span

NAME = "claude"
TITLE = "Claude Code"

CHAIN = frozenset({"user", "assistant", "system", "attachment", "progress"})
LATEST = "kept after the cut; before it the latest one"
AFTER = "kept after the cut, archived before it"
KINDS: Mapping[str, str] = {
    "user": "a message: user, toolResult, the summary (isCompactSummary), or kind `meta`",
    "assistant": "a message; a link only when it is an API error, synthetic or virtual",
    "system": "a link of the chain, kept after the cut",
    "system/compact_boundary": "starts the context; replaced by a new one",
    "system/local_command": "a message of role system, with its command",
    "attachment": "a link of the chain, kept after the cut",
    "progress": "a link of the chain, archived",
    **dict.fromkeys(("pr-link",), "always kept"),
    **dict.fromkeys(("ai-title", "custom-title", "tag", "agent-name", "agent-color", "agent-setting", "mode",
                     "permission-mode", "worktree-state", "last-prompt", "agent_metadata", "cost-state",
                     "atis-latch"), LATEST),
    **dict.fromkeys(("summary", "file-history-snapshot", "file-history-delta", "queue-operation",
                     "content-replacement", "attribution-snapshot", "started", "result", "tools-used",
                     "api-request", "api-request-shape", "api-request-blob"), AFTER),
}  # fmt: skip

FILE_TOOLS = {"Read": "read", "Write": "written", "Edit": "edited", "MultiEdit": "edited",
              "NotebookRead": "read", "NotebookEdit": "edited"}  # fmt: skip
FILE_KEYS = ("file_path", "notebook_path")

USAGE_KEYS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
CAVEAT = "local-command-caveat"
OPENINGS = (CAVEAT, "command-name", "command-message", "bash-input")
KEPT_TAIL = "keptTailUuid"  # our own key in compactMetadata: usage up to this line is stale
QUIET_USAGE = 100_000  # tokens; clients compact at once from 150,000 up
COPIED = ("userType", "entrypoint", "cwd", "sessionId", "version", "gitBranch", "agentId", "teamName")
PREAMBLE = (
    "This session is being continued from a previous conversation that ran out of context. "
    "The summary below covers the earlier portion of the conversation."
)
_PREAMBLE = re.compile(r"This session is being continued from a previous [^\n]*\n+(?:Summary:\n)?")
_CLOSINGS = (
    "\n\nIf you need specific details from before compaction",
    "\n\nRecent messages are preserved verbatim",
    "\n\nContinue the conversation from where",
    "\nPlease continue the conversation from where",
)
_VERSION = re.compile(r"\d{1,6}(\.\d{1,6})*")
LISTED_TAIL = (2, 1, 144)  # the first client that reads the list of kept lines in a boundary
_CLOSING_CHARS = 2000  # a closing stands in the last characters of a summary
_COMMAND = re.compile(r"\s*<(?P<tag>local-command-caveat|command-name|command-message|bash-input"
                      r"|local-command-stdout|local-command-stderr|bash-stdout|bash-stderr)>"
                      r"|Caveat: The messages below were generated by the user")  # fmt: skip


# ------------------------------------------------------------------------------------------ lines
@dataclass(slots=True, eq=False)
class Node:
    """What linking needs of one chain line. `role` is "" when the line is no message."""

    index: int
    uuid: str
    parent: str | None
    type: str
    stamp: str
    role: str = ""
    side: bool = False
    agent: str | None = None
    team: bool = False
    meta: bool = False
    summary: bool = False
    boundary: Json | None = None
    response: str | None = None
    usage: int = 0
    stale: bool = False
    command: str = ""
    calls: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    touches: tuple[Touch, ...] = ()
    source: str | None = None
    above: Node | None = None


@dataclass(slots=True)
class State:
    """`context`: chain lines of the active conversation in model order, its summary first. `start`: record
    index of the compaction that it begins with. `newest`: the newest time of a chain line.

    `others`: record index -> kind, for every line that is no chain line ("" when opaque or blank).
    """

    context: list[Node] = field(default_factory=list)
    start: int | None = None
    newest: str = ""
    others: dict[int, str] = field(default_factory=dict)


def sniff(obj: Json, first: bool) -> int:
    """Chain lines and known metadata are certain; `sessionId` with an unknown type is possible."""
    kind = obj.get("type")
    if kind in ("summary", "file-history-snapshot") and ("leafUuid" in obj or "snapshot" in obj):
        return 2
    if not isinstance(obj.get("sessionId"), str) or not isinstance(kind, str):
        return 0
    if kind in CHAIN:
        return 2 if "parentUuid" in obj or "uuid" in obj else 0
    return 2 if kind in KINDS else 1


def _node(index: int, obj: Json) -> Node | None:
    """The chain line that `obj` is, or None."""
    get = obj.get
    kind, own = get("type"), get("uuid")
    if not isinstance(kind, str) or kind not in CHAIN or not isinstance(own, str) or not own:
        return None
    node = Node(index, own, _string(get("parentUuid")) or None, sys.intern(kind), _string(get("timestamp")))
    node.side, node.team, node.meta = bool(get("isSidechain")), bool(get("teamName")), bool(get("isMeta"))
    node.agent = _string(get("agentId")) or None
    if kind == "system" and get("subtype") == "compact_boundary":
        metadata = get("compactMetadata")
        node.boundary = metadata if isinstance(metadata, dict) else {}
    node.role = _role(kind, obj)
    if node.role:
        _describe(node, obj)
    return node


def _role(kind: str, obj: Json) -> str:
    """Role of the message on a line; "" for a line that the client never sends to the model."""
    if kind == "system":
        return "system" if obj.get("subtype") == "local_command" and obj.get("content") else ""
    message = obj.get("message")
    if kind not in ("user", "assistant") or not isinstance(message, dict) or obj.get("isVirtual"):
        return ""
    if kind == "assistant":
        unsent = obj.get("isApiErrorMessage") or message.get("model") == "<synthetic>"
        return "" if unsent else "assistant"
    return "toolResult" if any(b.get("type") == "tool_result" for b in _blocks(message)) else "user"


def _describe(node: Node, obj: Json) -> None:
    """Ids, usage and flags that come from the message itself."""
    message = obj.get("message") if node.role != "system" else {"content": obj.get("content")}
    assert isinstance(message, dict)
    blocks = _blocks(message)
    if node.role == "assistant":
        node.response = _string(message.get("id")) or None
        node.usage = _context_tokens(message)
        node.calls = _ids(blocks, "tool_use", "id")
        calls = (b for b in blocks if str(b.get("type")).endswith("tool_use"))
        node.touches = touches_of((b.get("name"), b.get("input")) for b in calls)
        return
    node.summary = bool(obj.get("isCompactSummary"))
    node.results = _ids(blocks, "tool_result", "tool_use_id")
    node.source = _string(obj.get("sourceToolAssistantUUID")) or None
    if match := _COMMAND.match("".join(texts_of(message.get("content"))[:1])):
        node.command = match["tag"] or CAVEAT


def _blocks(message: Json) -> list[Json]:
    content = message.get("content")
    return [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []


def _ids(blocks: Iterable[Json], kind: str, key: str) -> tuple[str, ...]:
    return tuple(b[key] for b in blocks if b.get("type") == kind and isinstance(b.get(key), str))


def _context_tokens(message: Json) -> int:
    """Tokens of the context once the response was made: input, both caches and output."""
    usage = message.get("usage")
    return int(numbers(usage, *USAGE_KEYS)) if isinstance(usage, dict) else 0


# ---------------------------------------------------------------------------------------- reading
def read(records: Records, options: ReadOptions) -> Session:
    """The active conversation: last compaction's summary, then the messages after it."""
    session = Session(NAME, records, [], state=State())
    nodes = _scan(session)
    live, missing = _link(session, nodes, options.leaf)
    if not live:
        raise no_messages(records, TITLE)
    leaves = _leaves(live.values())
    leaf = _chosen(live, leaves, options.leaf)
    chain = _walk(session, leaf, list(live.values()))
    _warn_missing(session, [n for n in chain if n.uuid in missing])
    path = [n for n in _with_parallels(live, chain) if n.side == leaf.side]
    _warn_roots(session, live.values(), path)
    boundary, context = _context(path)
    session.state.context = context
    session.state.start = _start(boundary, context)
    session.state.newest = max(n.stamp for n in nodes)
    if options.repair:
        _mark_stale(context, boundary, live)
    session.messages = _messages(records, context)
    if not session.messages:
        raise no_messages(records, TITLE)
    session.session_id = _session_id(records, context)
    _warn_pairs(session, context)
    _count_ends(session, leaves, path, context[0].index)
    return session


def _scan(session: Session) -> list[Node]:
    """All chain lines, in file order; everything else goes to `state.others`."""
    nodes, unknown = list[Node](), Counter[str]()
    for record in session.records:
        index = record.number - 1
        node = _node(index, record.dict)
        if record.fault or record.note or not isinstance(record.obj, dict):
            session.warnings.extend(opaque((record,)))
        if node is not None:
            if nodes and node.parent == nodes[-1].uuid:
                node.parent = nodes[-1].uuid  # one string for both
            nodes.append(node)
            continue
        kind = record.dict.get("type")
        session.state.others[index] = kind if isinstance(kind, str) else ""
        if isinstance(kind, str) and kind in CHAIN:
            session.warn(record.number, f"a {kind} line without uuid: no part of the conversation")
        elif record.dict and (not isinstance(kind, str) or kind not in KINDS):
            unknown[kind if isinstance(kind, str) else "no type"] += 1
    session.unknown = unknown
    if unknown:
        named = ", ".join(f"{kind} ({count})" for kind, count in sorted(unknown.items()))
        session.warn(0, f"records of unknown kind, not read: {named}")
    return nodes


def _link(session: Session, nodes: Sequence[Node], leaf: str | None) -> tuple[dict[str, Node], set[str]]:
    """Lines that count, by uuid and in file order, with `above` set; and uuids whose parent is missing.

    Of lines with one uuid the last counts, as in the client.
    """
    last = {node.uuid: node for node in nodes}
    live = {node.uuid: node for node in nodes if last[node.uuid] is node}
    repeated = len(nodes) - len(live)
    if repeated:
        first = next(n for n in nodes if last[n.uuid] is not n)
        session.warn(first.index + 1, f"uuid {first.uuid} is repeated ({repeated} lines too many): "
                     "the last one counts")  # fmt: skip
    live = _preserve(live, leaf)
    missing = set()
    before: dict[tuple[bool, str | None], Node] = {}
    for node in live.values():
        node.above = live.get(node.parent) if node.parent else None
        if node.parent and node.above is None:
            missing.add(node.uuid)
            node.above = before.get((node.side, node.agent))
        before[node.side, node.agent] = node
    return live, missing


def _preserve(live: dict[str, Node], leaf: str | None) -> dict[str, Node]:
    """Apply the last boundary's list of preserved lines as the client's loader does.

    They are put behind the anchor in the listed order, what hung on the anchor goes behind them, and all
    other lines from before the boundary are dropped. One unknown uuid: the list is ignored.
    """
    boundary = next((n for n in reversed(live.values()) if n.boundary is not None), None)
    if boundary is None or boundary.boundary is None:
        return live
    anchor, uuids = _preserved(boundary.boundary, live)
    if not uuids or not {anchor, *uuids} <= live.keys():
        return live
    listed = set(uuids)
    if leaf in live and live[leaf].index < boundary.index and leaf not in listed:
        return live
    kept = {u: n for u, n in live.items() if n.index >= boundary.index or u in listed or u == anchor}
    moved = {anchor} | (live.keys() - kept.keys())
    for node in kept.values():
        if node.uuid not in listed and node.uuid != anchor and node.parent in moved:
            node.parent = uuids[-1]
    for previous, own in zip([anchor, *uuids], uuids, strict=False):
        kept[own].parent = previous
        kept[own].stale = True
    return kept


def _preserved(metadata: Json, live: Mapping[str, Node]) -> tuple[str, list[str]]:
    """(anchor, uuids) of `preservedMessages`, else of the older `preservedSegment`; ("", []) without."""
    messages, segment = metadata.get("preservedMessages"), metadata.get("preservedSegment")
    if isinstance(messages, dict) and isinstance(uuids := messages.get("uuids"), list):
        return str(messages.get("anchorUuid")), list(dict.fromkeys(map(str, uuids)))
    if not isinstance(segment, dict):
        return "", []
    slice_: list[str] = []
    node = live.get(str(segment.get("tailUuid")))
    while node is not None and node.uuid not in slice_:
        slice_.append(node.uuid)
        if node.uuid == segment.get("headUuid"):
            return str(segment.get("anchorUuid")), slice_[::-1]
        node = live.get(node.parent or "")
    return "", []


def _leaves(live: Iterable[Node]) -> list[tuple[int, Node]]:
    """(rank, leaf) of every branch end; the highest rank is the active one.

    The rank is the file position of the last message before the end, so that a client's own line hanging
    on an old message outranks nothing. Main conversation before sidechains and teams, as the SDK does.
    """
    nodes = list(live)
    named = {n.above.index for n in nodes if n.above is not None and n.above.side == n.side}
    found: dict[int, tuple[int, Node]] = {}
    for terminal in [n for n in nodes if n.index not in named] or nodes[-1:]:
        leaf = _climb(terminal, lambda n: n.type in ("user", "assistant"))
        if leaf is not None:
            said = _climb(leaf, lambda n: n.type in ("user", "assistant") and not n.meta)
            found[leaf.index] = (said or leaf).index, leaf
    main = [pair for pair in found.values() if not pair[1].side and not pair[1].team]
    return sorted(main or found.values(), key=lambda pair: (pair[0], pair[1].index))


def _climb(node: Node | None, wanted: Callable[[Node], bool]) -> Node | None:
    """The nearest line upwards, itself included, that is wanted."""
    seen: set[int] = set()
    while node is not None and node.index not in seen:
        if wanted(node):
            return node
        seen.add(node.index)
        node = node.above
    return None


def _chosen(live: Mapping[str, Node], leaves: Sequence[tuple[int, Node]], wanted: str | None) -> Node:
    """The leaf of the active conversation, or the one that the user named."""
    if wanted is not None:
        if wanted not in live:
            known = ", ".join(leaf.uuid for _, leaf in leaves[-5:])
            raise TranscriptError(f"no line has the uuid {wanted}; branch ends: {known}")
        return live[wanted]
    if not leaves:
        return list(live.values())[-1]
    return leaves[-1][1]


def _walk(session: Session, leaf: Node, nodes: Sequence[Node]) -> list[Node]:
    """Lines from the root to the leaf. A circle of links is left by the line before, as a gap is."""
    positions = [n.index for n in nodes]
    chain: list[Node] = []
    seen: set[int] = set()
    circles: list[int] = []
    node: Node | None = leaf
    while node is not None:
        seen.add(node.index)
        chain.append(node)
        above = node.above
        if above is not None and above.index in seen:
            circles.append(node.index + 1)
            before = reversed(nodes[: bisect_left(positions, node.index)])
            above = next((n for n in before if n.index not in seen and n.side == leaf.side), None)
        node = above
    if circles:
        session.warn(circles[-1], f"parent links form circles (lines {_some(map(str, reversed(circles)))}): "
                     "the line before is taken as the parent")  # fmt: skip
    return chain[::-1]


# --------------------------------------------------------------------------------- parallel calls
def _with_parallels(live: Mapping[str, Node], chain: list[Node]) -> list[Node]:
    """Put back the calls and results of parallel calls that a walk along one branch leaves out.

    Of each response: its other lines, then their results, behind its last line on the chain; each by time.
    """
    anchors = {n.response: n.uuid for n in chain if n.response}
    seen = {n.uuid for n in chain}
    answered = {call for n in chain for call in n.results}
    siblings: dict[str, list[Node]] = {}
    for node in live.values():
        if node.response in anchors and node.role == "assistant":
            siblings.setdefault(str(node.response), []).append(node)
    results = _results_by_response(live, siblings)
    inserts: dict[str, list[Node]] = {}
    for response, anchor in anchors.items():
        members = siblings.get(response, [])
        others = sorted((n for n in members if n.uuid not in seen), key=lambda n: n.stamp)
        found = _unseen_results(results.get(response, []), members, seen, answered)
        seen.update(n.uuid for n in (*others, *found))
        inserts[anchor] = [*others, *found]
    return [n for link in chain for n in (link, *inserts.get(link.uuid, ()))]


def _results_by_response(live: Mapping[str, Node],
                         siblings: Mapping[str, list[Node]]) -> dict[str, list[Node]]:  # fmt: skip
    """Result lines that may belong to a response: by parent, by their source line, by the ids they answer."""
    owners: dict[str, Node | None] = {}
    for members in siblings.values():
        for member in members:
            for call in member.calls:
                owner = owners.get(call, member)
                owners[call] = member if owner is not None and owner.response == member.response else None
    found: dict[str, list[Node]] = {}
    for node in live.values():
        if not node.results or node.parent is None:
            continue
        named = [live.get(node.source or ""), *(owners.get(call) for call in node.results)]
        homes = [n for n in named if n is not None and (n.side, n.agent) == (node.side, node.agent)]
        for response in {h.response for h in (node.above, *homes) if h is not None and h.response}:
            found.setdefault(response, []).append(node)
    return found


def _unseen_results(results: Iterable[Node], members: Sequence[Node], seen: set[str],
                    answered: set[str]) -> list[Node]:  # fmt: skip
    """Result lines off the chain that answer an open call; those hanging on the response come first."""
    own = {n.uuid for n in members}
    calls = {call for n in members for call in n.calls}
    found = []
    for node in sorted((n for n in results if n.uuid not in seen), key=lambda n: n.parent not in own):
        if calls.intersection(node.results) - answered:
            answered.update(node.results)
            found.append(node)
    return sorted(found, key=lambda n: n.stamp)


# --------------------------------------------------------------------------------------- messages
def _context(path: Sequence[Node]) -> tuple[Node | None, list[Node]]:
    """The newest boundary on the path, and the context after it: its summary first, if it has one."""
    start, boundary = 0, None
    for position, node in enumerate(path):
        if node.boundary is not None:
            start, boundary = position + 1, node
        elif node.summary:
            start = position
    return boundary, list(path[start:])


def _start(boundary: Node | None, context: Sequence[Node]) -> int | None:
    """Where the compaction stands that a context begins with: its boundary, or a summary without one."""
    first = context[0] if context and context[0].summary else None
    if boundary is not None and (first is None or boundary.index < first.index):
        return boundary.index
    return first.index if first is not None else None


def _mark_stale(context: Sequence[Node], boundary: Node | None, live: Mapping[str, Node]) -> None:
    """Mark lines whose usage was measured before the last compaction: kept by us, preserved, or older."""
    if boundary is None or boundary.boundary is None:
        return
    last = live.get(str(boundary.boundary.get(KEPT_TAIL)))
    for node in context:
        kept = last is not None and node.index <= last.index
        node.stale = node.stale or kept or bool(node.stamp and node.stamp < boundary.stamp)


def _session_id(records: Records, context: Sequence[Node]) -> str | None:
    """The id of the newest line; older ones may name sessions that this one continues."""
    ids = (records[node.index].dict.get("sessionId") for node in reversed(context))
    return next((i for i in ids if isinstance(i, str)), None)


def _messages(records: Records, context: Sequence[Node]) -> list[Message]:
    """One message a line. The usage of a response stands on its last line (earlier ones are partial)."""
    groups = _response_groups(context) | _command_groups(context)
    last = {n.response or n.uuid: n.index for n in context if n.role == "assistant"}
    messages = []
    for node in context:
        if node.role:
            measured = last.get(node.response or node.uuid) == node.index
            messages.append(_message(records, node, groups.get(node.index), measured))
    return messages


def _message(records: Records, node: Node, group: object, measured: bool) -> Message:
    parts = LazyParts(records, node.index, _parts)
    message = Message(node.role, parts, line=node.index + 1, id=node.uuid, group=group)
    message.touches = node.touches
    if node.summary:
        message.kind, message.files = COMPACTION_SUMMARY, files_in_summary(message.text)
    elif node.meta or node.role == "system":
        message.kind = "meta" if node.meta else "local_command"
    if measured and node.stale:
        message.usage_note = "measured before the last compaction"
    elif measured and not node.usage:
        message.usage_note = "no usage, or all zero"
    elif measured:
        message.usage = node.usage
    return message


def _response_groups(context: Sequence[Node]) -> dict[int, object]:
    """Record index -> group, for the lines from the first to the last of a response, results included."""
    groups: dict[int, object] = {}
    for _, turn in groupby(enumerate(context), key=_turns()):
        lines = [node for _, node in turn]
        last = {n.response: i for i, n in enumerate(lines) if n.response}
        group, end = None, -1
        for i, node in enumerate(lines):
            if i > end:
                group = (node.response, node.uuid)
            end = max(end, last.get(node.response or "", -1))
            if i <= end:
                groups[node.index] = group
    return groups


def _turns() -> Callable[[tuple[int, Node]], int]:
    """A key that grows at each prompt: a response never reaches over one, whatever its id says."""
    count = 0

    def key(item: tuple[int, Node]) -> int:
        nonlocal count
        count += item[1].role == "user" and not item[1].meta
        return count

    return key


def _command_groups(context: Sequence[Node]) -> dict[int, object]:
    """Record index -> group, for a local command: its caveat, the command, what it expands to or prints."""
    groups: dict[int, object] = {}
    group, before = None, ""
    for node in (n for n in context if n.role):
        opens = node.command in OPENINGS and before not in OPENINGS
        if node.command == CAVEAT or opens:
            group = ("command", node.uuid)
        elif not node.command and not (node.meta and group):
            group = None
        if group is not None:
            groups[node.index] = group
        before = node.command
    return groups


def _parts(obj: Json) -> Parts:
    """What a line says to the model; a compaction summary without the client's frame."""
    message = obj.get("message") if obj.get("type") != "system" else obj
    content = message.get("content") if isinstance(message, dict) else None
    if obj.get("isCompactSummary"):
        return (Text(_summary_body("\n".join(texts_of(content)))),)
    if isinstance(content, str):
        return (Text(content),)
    blocks = content if isinstance(content, list) else ()
    return tuple(part for b in blocks if isinstance(b, dict) for part in _block_parts(b))


def _block_parts(block: Json) -> Iterator[Part]:
    kind = str(block.get("type"))
    if kind == "thinking":
        yield Thinking(_string(block.get("thinking")))
    elif kind.endswith("tool_use"):
        yield ToolCall(_string(block.get("id")) or None, _string(block.get("name")), block.get("input"))
    elif kind.endswith("tool_result"):
        yield _result(block)
    elif kind == "image":
        yield Image(_media_type(block))
    elif kind == "document":
        yield from _document(block)
    elif isinstance(block.get("text"), str):
        yield Text(block["text"])


def _result(block: Json) -> ToolResult:
    """A tool's result; of a server tool's result the texts and titles."""
    content = block.get("content")
    inner = [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []
    parts = [p for b in inner if b.get("type") in ("image", "document") for p in _block_parts(b)]
    found = [f"{b.get('title', '')} {b['url']}".strip() for b in inner if isinstance(b.get("url"), str)]
    texts = (*texts_of(content), *(p.text for p in parts if isinstance(p, Text)), *found)
    images = sum(isinstance(p, Image) for p in parts)
    return ToolResult(_string(block.get("tool_use_id")) or None, texts, images, block.get("is_error") is True)


def _document(block: Json) -> Iterator[Part]:
    """A document: its text where it has one; a PDF costs as an image does."""
    source = block.get("source")
    if not isinstance(source, dict):
        return
    if source.get("type") == "text":
        yield Text(_string(source.get("data")))
    elif source.get("type") == "content":
        yield from (Text(text) for text in texts_of(source.get("content")))
    else:
        yield Image(_media_type(block))


def _media_type(block: Json) -> str:
    source = block.get("source")
    return _string(source.get("media_type")) if isinstance(source, dict) else ""


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def _summary_body(text: str) -> str:
    """The summary without the sentences that the client (or we) put around it."""
    frame = _PREAMBLE.match(text)
    if not frame:
        return text
    body = text[frame.end() :]
    for closing in _CLOSINGS:
        position = body.rfind(closing, max(len(body) - _CLOSING_CHARS, 0))
        body = body[:position] if position >= 0 else body
    return body


def message_of(record: Record) -> Message | None:
    """The message that one line holds, whatever became of it; None for a line that is no message."""
    obj = record.dict
    node = _node(record.number - 1, obj)
    if node is None or (node.role != "system" and not isinstance(obj.get("message"), dict)):
        return None
    parts = _parts(obj)
    if any(isinstance(p, ToolCall) for p in parts):
        parts = _parts(record.exact())
    kind = COMPACTION_SUMMARY if node.summary else "meta" if node.meta else ""
    return Message(node.role or node.type, parts, line=record.number, id=node.uuid, kind=kind)


# --------------------------------------------------------------------------------------- warnings
def _warn_missing(session: Session, bridged: Sequence[Node]) -> None:
    if bridged:
        lines = _some(str(n.index + 1) for n in bridged)
        session.warn(bridged[0].index + 1, f"{len(bridged)} dangling parent links (lines {lines}): "
                     "the line before is taken as the parent")  # fmt: skip


def _warn_pairs(session: Session, context: Sequence[Node]) -> None:
    """Calls without a result, results without a call, and second ones; an id may return in a later turn."""
    open_calls: dict[str, Node] = {}
    answered: set[str] = set()
    found: dict[str, list[tuple[Node, str]]] = {
        "no call for the results": [],
        "second results for the calls": [],
    }
    for node in context:
        open_calls.update(dict.fromkeys(node.calls, node))
        for call in dict.fromkeys(node.results):
            if open_calls.pop(call, None) is not None:
                answered.add(call)
            else:
                what = "second results for the calls" if call in answered else "no call for the results"
                found[what].append((node, call))
    found["no result for the calls"] = [(node, call) for call, node in open_calls.items()]
    for what, places in found.items():
        if places:
            names = _some(dict.fromkeys(call for _, call in places))
            session.warn(places[0][0].index + 1, f"{what} {names}")


def _warn_roots(session: Session, nodes: Iterable[Node], chain: Sequence[Node]) -> None:
    """Messages that stand before the conversation's first line, where that is no compaction."""
    root = chain[0]
    if root.boundary is not None or root.summary or root.parent:
        return
    linked = {n.index for n in chain}
    before = [n for n in nodes if n.role and n.index < root.index and n.side == root.side
              and n.agent == root.agent and n.index not in linked]  # fmt: skip
    if before:
        session.warn(root.index + 1, f"a second root: {len(before)} messages before it (from line "
                     f"{before[0].index + 1} on) are no part of the conversation")  # fmt: skip


def _some(names: Iterable[str], most: int = 8) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _count_ends(session: Session, leaves: Sequence[tuple[int, Node]], path: Sequence[Node],
                start: int) -> None:  # fmt: skip
    """The branch ends since the last compaction: ends of branches that said something of their own."""
    on_path = {n.index for n in path}
    responses = {n.response for n in path if n.response}
    ends = []
    for _, leaf in leaves:
        if leaf.index < start or leaf.index in on_path:
            continue
        said = _climb(leaf, lambda n: n.index in on_path or _says(n, responses))
        if said is not None and said.index not in on_path:
            ends.append(leaf)
    active = max((n for n in path if n.role), key=lambda n: n.index, default=path[-1])
    session.leaves = sorted((n.index + 1, n.uuid) for n in (*ends, active))
    newest = max((n.stamp for n in path), default="")
    if later := [n for n in ends if n.stamp > newest]:
        session.warn(later[-1].index + 1, f"another branch is newer: its end is {later[-1].uuid}")


def _says(node: Node, responses: set[str]) -> bool:
    """Whether a line off the path is a prompt or an answer, not a stray of a response on the path."""
    return (node.role == "user" and not node.meta) or (
        node.role == "assistant" and node.response not in responses
    )


# ---------------------------------------------------------------------------------------- writing
def select(session: Session, plan: CompactionPreparation) -> list[int]:
    """The tail's chain lines, everything else from the first of them on, and session metadata before.

    A half-written last line goes: the client would glue its next record to it. So does a message without a
    uuid: some readers would take it for the branch end.
    """
    tail = [node.index for node in _tail(session, plan)]
    cut = _cut(session, tail)
    others: dict[int, str] = session.state.others
    latest = {kind: index for index, kind in others.items() if KINDS.get(kind) in (LATEST, None) and kind}
    kept = [i for i, kind in others.items()
            if (i >= cut and kind not in CHAIN) or kind == "pr-link" or latest.get(kind) == i]  # fmt: skip
    if ends_in_torn_line(session.records):
        kept = [i for i in kept if i != len(session.records) - 1]
    return sorted([*tail, *kept])


def _tail(session: Session, plan: CompactionPreparation) -> list[Node]:
    """Chain lines from the first kept message on, in model order: what is kept, and what hangs between.

    Progress lines are links only, and go.
    """
    context: list[Node] = session.state.context
    if not plan.retained_tail:
        return []
    places = {node.index: i for i, node in enumerate(context)}
    start = places[plan.retained_tail[0].line - 1]
    if context[start].role == "toolResult":
        raise TranscriptError("the kept part would begin with a tool result", line=plan.retained_tail[0].line)
    front: Sequence[Node] = ()
    if plan.protected:
        front = context[places[plan.protected[0].line - 1] : places[plan.removed[0].line - 1]]
    return [n for n in (*front, *context[start:]) if n.type != "progress"]


def _cut(session: Session, tail: Sequence[int]) -> int:
    """Record index from which everything that is no chain line stays."""
    return min(tail) if tail else session.state.context[-1].index + 1


def rebuild(session: Session, plan: CompactionPreparation, kept: Sequence[int],
            checkpoint: Checkpoint) -> Iterator[Piece]:  # fmt: skip
    """Metadata from before the cut, boundary, summary, then the tail in one straight chain."""
    tail = _tail(session, plan)
    cut = _cut(session, [n.index for n in tail])
    boundary, summary = _new_ids(session.records, kept, checkpoint)
    head = _head(session, plan, tail, checkpoint, boundary, summary)
    edits = _straightened(session.records, tail, summary)
    newline = session.records.newline
    before = [i for i in kept if i < cut]
    for index in before:
        yield _piece(session.records, index, None, first=index == before[0])
    yield from (dump(obj) + newline for obj in head)
    for index in kept[len(before) :]:
        yield _piece(session.records, index, edits.get(index), first=False)


# ------------------------------------------------------------------------------- native compactions
def append(session: Session, plan: CompactionPreparation, checkpoint: Checkpoint) -> bytes:
    """Boundary and summary behind the old bytes; the boundary lists the kept lines, which stay where they are.

    Clients from 2.1.144 on read such a list, older ones resume with the summary alone.
    """
    records, tail = session.records, _tail(session, plan)
    boundary, summary = _new_ids(records, [n.index for n in tail], checkpoint)
    first, second = _head(session, plan, tail, checkpoint, boundary, summary)
    moment = parse_time(session.state.newest) or datetime(1970, 1, 2, tzinfo=UTC)
    first["logicalParentUuid"] = session.state.context[-1].uuid
    first["timestamp"] = format_time(moment, milliseconds=1)
    second["timestamp"] = format_time(moment, milliseconds=2)
    if tail:
        uuids = [n.uuid for n in tail]
        first["compactMetadata"] |= {
            "preservedSegment": {"headUuid": uuids[0], "anchorUuid": summary, "tailUuid": uuids[-1]},
            "preservedMessages": {"anchorUuid": summary, "uuids": uuids, "allUuids": uuids},
        }
    _warn_version(session)
    gap = b"" if records.raw(len(records) - 1).endswith(b"\n") else records.newline
    return gap + dump(first) + records.newline + dump(second) + records.newline


def _warn_version(session: Session) -> None:
    """The newest client that wrote to the file may not be the one that will read it; it is all that is known."""
    versions = {_string(session.records[n.index].dict.get("version")) for n in session.state.context}
    newest = max((tuple(map(int, v.split("."))) for v in versions if _VERSION.fullmatch(v)), default=())
    if newest < LISTED_TAIL:
        written = ".".join(map(str, newest)) or "an unknown version"
        session.warn(0, f"written by Claude Code {written}: a client before 2.1.144 may resume this with the "
                     "summary alone; without --append every version reads the result")  # fmt: skip


def compactions(session: Session) -> list[Compaction]:
    """Those that led to the active conversation: each is undone by reading the lines before it on its own."""
    nodes = _scan(Session(NAME, session.records, [], state=State()))
    found: list[Compaction] = []
    start: int | None = session.state.start
    while start is not None:
        compaction, earlier = _undone(session.records, nodes, start)
        found.insert(0, compaction)
        start = earlier if earlier is not None and earlier < start else None
    return found


def _undone(records: Records, nodes: Sequence[Node], start: int) -> tuple[Compaction, int | None]:
    """The compaction on line `start`, and the one that its own context began with."""
    obj = records[start].dict
    scratch = Session(NAME, records, [], state=State())
    logical = obj.get("logicalParentUuid") or obj.get("parentUuid")
    before = [replace(n) for n in nodes if n.index < start]
    leaf = logical if any(n.uuid == logical for n in before) else None
    live, _ = _link(scratch, before, leaf)
    context: list[Node] = []
    earlier = None
    if live:
        chain = _walk(scratch, _chosen(live, _leaves(live.values()), leaf), list(live.values()))
        boundary, context = _context(_with_parallels(live, chain))
        earlier = _start(boundary, context)
    after = (n for n in nodes if n.index >= start and n.summary)
    summary = next((m.text for n in after if (m := message_of(records[n.index]))), "")
    kept = set(_preserved(obj.get("compactMetadata") or {}, {n.uuid: n for n in before})[1])
    lines = [n.index for n in context if n.role and not n.summary and n.uuid not in kept]
    return Compaction(start, summary, lines, _string(obj.get("timestamp"))), earlier


def _piece(records: Records, index: int, edited: bytes | None, *, first: bool) -> Piece:
    """A kept line, ended by a newline, with no byte order mark but at the very start."""
    raw = records.raw(index)
    new = raw if edited is None else edited
    if index == 0 and not first:
        new = new.removeprefix(BOM)
    if not new.endswith(b"\n"):
        new += records.newline
    return index if new == raw else (index, new)


def _new_ids(records: Records, kept: Sequence[int], checkpoint: Checkpoint) -> tuple[str, str]:
    """Uuids of the boundary and the summary, derived from the archive's hash or the removed bytes."""
    seed = sha256(checkpoint.hash.encode())
    if not checkpoint.hash:
        for index in removed(len(records), kept):
            seed.update(records.raw(index))
    names = (sha256(name + seed.digest()).digest()[:16] for name in (b"boundary", b"summary"))
    boundary, summary = (str(uuid.UUID(bytes=name, version=5)) for name in names)
    return boundary, summary


def _head(session: Session, plan: CompactionPreparation, tail: Sequence[Node], checkpoint: Checkpoint,
          boundary: str, summary: str) -> tuple[Json, Json]:  # fmt: skip
    """The native records of a compaction, stamped 2 and 1 ms before the tail."""
    context: list[Node] = session.state.context
    first = tail[0] if tail else context[-1]
    previous = context[max(context.index(first) - 1, 0)] if tail else first
    moment = next(
        (m for n in (tail or context) if (m := parse_time(n.stamp))), datetime(1970, 1, 2, tzinfo=UTC)
    )
    source = session.records[first.index].dict
    copied = {key: source[key] for key in COPIED if key in source}
    if "sessionId" in copied and not isinstance(copied["sessionId"], str):
        copied["sessionId"] = session.session_id
    count = len(plan.messages_to_summarize) + len(plan.turn_prefix_messages)
    metadata: Json = {"trigger": "manual", "preTokens": checkpoint.tokens_before, "messagesSummarized": count}
    if tail:
        metadata[KEPT_TAIL] = max(tail, key=lambda n: n.index).uuid
    message = {"role": "user", "content": f"{PREAMBLE}\n\nSummary:\n{checkpoint.summary}"}
    return (
        {"parentUuid": None, "logicalParentUuid": previous.uuid, "isSidechain": first.side, "type": "system",
         "subtype": "compact_boundary", "content": "Conversation compacted", "isMeta": False,
         "timestamp": format_time(moment, milliseconds=-2), "uuid": boundary, "level": "info",
         "compactMetadata": metadata, **copied},
        {"parentUuid": boundary, "isSidechain": first.side, "type": "user", "message": message,
         "isVisibleInTranscriptOnly": True, "isCompactSummary": True, "uuid": summary,
         "timestamp": format_time(moment, milliseconds=-1), **copied},
    )  # fmt: skip


def _straightened(records: Records, tail: Sequence[Node], summary: str) -> dict[int, bytes]:
    """Record index -> bytes of the lines that change: each hangs on the kept line before it."""
    edits = {}
    stamps = _forward_stamps(tail)
    parent = summary
    for node in tail:
        record = records[node.index]
        raw = _without_nul(record)
        if record.dict.get("parentUuid") != parent:
            raw = _put(raw, "parentUuid", parent)
        if node.index in stamps:
            raw = _put(raw, "timestamp", stamps[node.index])
        if node.usage > QUIET_USAGE:
            raw = _without_usage(raw)
        if raw != record.raw:
            edits[node.index] = raw
        parent = node.uuid
    return edits


def _forward_stamps(tail: Sequence[Node]) -> dict[int, str]:
    """Record index -> new timestamp, so that time never runs backwards and the last line is the newest."""
    stamps: dict[int, str] = {}
    latest: datetime | None = None
    for node in tail:
        moment = parse_time(node.stamp)
        if moment is None:
            continue
        if latest is not None and (moment < latest or (moment == latest and node is tail[-1])):
            stamps[node.index] = format_time(latest, milliseconds=1)
            moment = parse_time(stamps[node.index])
        latest = moment
    return stamps


def _without_nul(record: Record) -> bytes:
    """The line without NUL bytes around its record: the client could not read it."""
    if b"\0" not in record.raw:
        return record.raw
    end = record.raw[len(record.raw.rstrip(b"\r\n")) :]
    return record.body.strip(b"\0 \t\r\n") + end


def _put(raw: bytes, key: str, value: str) -> bytes:
    """Set a top-level key, in its place; a missing one becomes the first."""
    encoded = json.dumps(value).encode()
    if value_span(raw, (key,)) is not None:
        return splice(raw, (key,), encoded)
    start = raw.index(b"{") + 1
    return raw[:start] + json.dumps(key).encode() + b":" + encoded + b"," + raw[start:]


def _without_usage(raw: bytes) -> bytes:
    """Zero every figure from which the client takes the size of the context."""
    for key in USAGE_KEYS:
        raw = splice(raw, ("message", "usage", key), b"0")
    return raw
