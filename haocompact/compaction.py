"""The compaction algorithm, once, for every command: values in, values out.

Ports Haocode's `compaction.py` (itself a port of pi), with the names of the seed. Where the seed loses
data, `CompactionSettings.repair` (on by default) does better; `repair=False` follows it to the letter.

    estimate_context_tokens -> should_compact
    prepare_compaction = find_cut_point (find_valid_cut_points, find_turn_start) + file operations

A conversation is a list of messages, oldest first. A first message of kind `compaction_summary` is the
summary of everything before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain

from haocompact.cjk import cjk_quarters
from haocompact.errors import UsageError
from haocompact.jsjson import stringify, utf16_key, utf16_length

COMPACTION_SUMMARY = "compaction_summary"
SYSTEM_PATCH = "system_patch"  # a change of the system prompt: counted, never summarised
WITHDRAWN = "withdrawn"  # a message that a later edit of the client's took out of the context
IMAGE_CHARS = 4800  # an image costs 1200 tokens, whatever its base64 length (pi)
SEED_CUT_ROLES = frozenset({"user", "assistant"})
CUT_ROLES = SEED_CUT_ROLES | {"bashExecution", "custom", "branchSummary"}
SEED_TURN_ROLES = frozenset({"user"})
TURN_ROLES = SEED_TURN_ROLES | {"bashExecution", "custom", "branchSummary"}


# ------------------------------------------------------------------------------------- messages
@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    text: str


@dataclass(frozen=True, slots=True)
class Image:
    media_type: str = ""


@dataclass(frozen=True, slots=True)
class Shell:
    """A command that the user ran, with what the client tells the model about how it ended."""

    command: str
    output: str = ""
    status: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is an object, or the raw text where the client's string was not a JSON object."""

    id: str | None
    name: str
    arguments: object = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    id: str | None
    texts: tuple[str, ...] = ()
    images: int = 0
    is_error: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class SystemPatch:
    """A change of the system prompt inside a conversation (pi): later patches overlay earlier ones."""

    text: str = ""
    sections: tuple[tuple[str, str | None], ...] = ()
    tools_added: tuple[object, ...] = ()
    tools_removed: tuple[str, ...] = ()


PATH_KEYS = ("path", "file_path", "notebook_path")
Touch = tuple[str, tuple[tuple[str, str], ...]]
"""A call that names files: the tool's name, then (key, path) for each of PATH_KEYS that it has."""

Part = Text | Thinking | Image | Shell | SystemPatch | ToolCall | ToolResult
Parts = tuple[Part, ...]


@dataclass(slots=True)
class FileOperations:
    """Paths that tool calls named. `read`, `written`, `edited` as in the seed."""

    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    edited: set[str] = field(default_factory=set)


class Message:
    """One message of the active conversation.

    `role`: user, assistant, toolResult, system, bashExecution, custom, branchSummary.
    `line`: 1-based number of its record (in a log: the physical line). `kind`: "", compaction_summary, or a
    client's own word.
    `usage`: context tokens that the provider reported with it, None when there is no valid figure, and
    then `usage_note` says why one was rejected. `group`: messages of one group are never parted (lines of
    one streamed response, reasoning and the item it belongs to). `hidden`: never sent to a model.
    `files`: what a summary names, or what calls of the client's own file tools touched.
    Of a summary: `at_end` says that the client has stored no new message after it, `kept` is how many
    messages after it were already there when it was written.
    `parts` may be given as a function: it is then called each time, so that a long transcript is not
    held in memory. `touches`: its calls that name files, where the adapter has seen them (None: see `parts`).
    """

    __slots__ = ("_parts", "_tokens", "at_end", "files", "group", "hidden", "id", "kept", "kind", "line",
                 "role", "touches", "usage", "usage_note")  # fmt: skip

    def __init__(self, role: str, parts: Parts | Callable[[], Parts] = (), *, line: int = 0,
                 id: str | None = None, kind: str = "", usage: float | None = None, usage_note: str = "",
                 group: object = None, hidden: bool = False,
                 files: FileOperations | None = None, at_end: bool = False, kept: int = 0) -> None:  # fmt: skip
        self.role = role
        self._parts = parts
        self.line = line
        self.id = id
        self.kind = kind
        self.usage = usage
        self.usage_note = usage_note
        self.group = group
        self.hidden = hidden
        self.files = files
        self.at_end = at_end
        self.kept = kept
        self.touches: Sequence[Touch] | None = None
        self._tokens: tuple[str, int] | None = None

    @property
    def parts(self) -> Parts:
        return self._parts if isinstance(self._parts, tuple) else self._parts()

    @parts.setter
    def parts(self, parts: Parts | Callable[[], Parts]) -> None:
        self._parts, self._tokens, self.touches = parts, None, None

    def mentions(self, words: Iterable[bytes]) -> bool:
        """Whether its record holds one of these; without a record of its own it may. Cheaper than `parts`."""
        found = getattr(self._parts, "mentions", None)
        return found is None or found(words)

    @property
    def told(self) -> bool:
        """Whether it is part of the conversation that a summary retells (not hidden, not prompt state)."""
        return not self.hidden and self.kind != SYSTEM_PATCH

    @property
    def text(self) -> str:
        """Its plain text (thinking, calls and results left out), parts joined by newline, empty ones dropped."""
        return "\n".join(p.text for p in self.parts if isinstance(p, Text) and p.text)

    def tokens(self, estimator: Estimator) -> int:
        """Estimated tokens; computed once an estimator."""
        if self._tokens is None or self._tokens[0] != estimator.name:
            self._tokens = estimator.name, estimate_tokens(self, estimator)
        return self._tokens[1]

    def __repr__(self) -> str:
        return f"Message({self.role!r}, line={self.line}, id={self.id!r})"


# ------------------------------------------------------------------------------------ estimators
@dataclass(frozen=True, slots=True)
class Estimator:
    """`quarters(text)` is four times the tokens of one text (chars/4 then is a plain length)."""

    name: str
    quarters: Callable[[str], float]


CHARS = Estimator("chars", utf16_length)
CJK = Estimator("cjk", cjk_quarters)
ESTIMATORS = {"cjk": CJK, "chars": CHARS}


def tiktoken_estimator(encoding: str) -> Estimator:
    """Exact counts. Raises UsageError when the encoding can't be had: its files may have to be fetched."""
    import tiktoken

    try:
        tiktoken.get_encoding(encoding)
    except ValueError as error:
        raise UsageError(f"tiktoken knows no encoding {encoding!r}") from error
    except (OSError, KeyError) as error:  # requests' errors derive from OSError
        raise UsageError(f"the encoding {encoding} can't be loaded: set TIKTOKEN_CACHE_DIR to a folder that "
                         "has its file, or choose another --estimator") from error  # fmt: skip
    return Estimator(f"tiktoken:{encoding}", partial(_tiktoken_quarters, encoding))


def _tiktoken_quarters(encoding: str, text: str) -> float:
    import tiktoken

    whole = text.encode("utf-8", "replace").decode()
    return 4 * len(tiktoken.get_encoding(encoding).encode_ordinary(whole))


def estimate_tokens(message: Message, estimator: Estimator) -> int:
    """Tokens of one message: its texts, thinking, calls (name and compact JSON) and images, rounded up.

    Two texts of 5 and 2 ASCII characters and one image are ceil((5 + 2 + 4800) / 4) = 1202 tokens.
    """
    if message.hidden:
        return 0
    parts = message.parts
    if message.role == "toolResult":  # a call in there was made by the tool itself: no model sees it
        parts = tuple(p for p in parts if not isinstance(p, ToolCall))
    return math.ceil(sum(_part_quarters(part, estimator.quarters) for part in parts) / 4)


def _part_quarters(part: Part, quarters: Callable[[str], float]) -> float:
    if isinstance(part, (Text, Thinking)):
        return quarters(part.text)
    if isinstance(part, ToolResult):
        return sum(map(quarters, part.texts)) + part.images * IMAGE_CHARS
    if isinstance(part, Shell):
        return quarters(part.command) + quarters(part.output)
    if isinstance(part, SystemPatch):
        tools = quarters(stringify(list(part.tools_added))) if part.tools_added else 0
        return quarters(part.text) + sum(quarters(text) for _, text in part.sections if text) + tools
    if isinstance(part, ToolCall):
        return quarters(part.name) + quarters(arguments_text(part.arguments))
    return IMAGE_CHARS  # an Image


def arguments_text(arguments: object) -> str:
    """Arguments as the client sends them: compact JSON, or the raw text when they were not JSON."""
    if isinstance(arguments, str):
        return arguments
    return "" if arguments is None else stringify(arguments)


# -------------------------------------------------------------------------------------- settings
FILE_TOOLS = (("read", "read"), ("write", "written"), ("edit", "edited"))


@dataclass(frozen=True, slots=True)
class CompactionSettings:
    """pi's defaults. Tokens, except `tail_keep` (messages that the segment strategy protects).

    `file_tools`: (name of a tool, "read", "written" or "edited"); `file_keys`: arguments that may hold its path.
    """

    enabled: bool = True
    reserve_tokens: int = 16384
    keep_recent_tokens: int = 20000
    context_window: int = 200_000
    estimator: Estimator = CJK
    strategy: str = "keep-recent"
    tail_keep: int = 6
    repair: bool = True
    file_tools: tuple[tuple[str, str], ...] = FILE_TOOLS
    file_keys: tuple[str, ...] = ("path",)


DEFAULT_COMPACTION_SETTINGS = CompactionSettings()


# ---------------------------------------------------------------------------------- token account
@dataclass(frozen=True, slots=True)
class ContextEstimate:
    """`tokens = usage_tokens + trailing_tokens`; anchored on the usage of message `last_usage_index`."""

    tokens: float
    usage_tokens: float
    trailing_tokens: int
    last_usage_index: int | None


def estimate_context_tokens(messages: Sequence[Message], estimator: Estimator) -> ContextEstimate:
    """The newest valid usage plus estimates for what follows it; without one, estimates for all."""
    for index in range(len(messages) - 1, -1, -1):
        usage = messages[index].usage
        if usage is not None:
            trailing = sum(m.tokens(estimator) for m in messages[index + 1 :])
            return ContextEstimate(usage + trailing, usage, trailing, index)
    total = sum(m.tokens(estimator) for m in messages if m.role != "system")
    total += _system_tokens([m for m in messages if m.role == "system"], estimator)
    return ContextEstimate(total, 0, total, None)


def _system_tokens(systems: Sequence[Message], estimator: Estimator) -> int:
    patches = [p for m in systems for p in m.parts if isinstance(p, SystemPatch)]
    plain = sum(m.tokens(estimator) for m in systems if not any(isinstance(p, SystemPatch) for p in m.parts))
    return plain + (Message("system", (replay_system(patches),)).tokens(estimator) if patches else 0)


def replay_system(patches: Iterable[SystemPatch]) -> SystemPatch:
    """The system prompt that a series of patches leaves: texts joined, sections and tools by name."""
    texts: list[str] = []
    sections: dict[str, str | None] = {}
    tools: dict[object, object] = {}
    for patch in patches:
        texts += [patch.text] if patch.text else []
        sections.update(patch.sections)
        for name in patch.tools_removed:
            tools.pop(name, None)
        tools.update({t.get("name") if isinstance(t, dict) else None: t for t in patch.tools_added})
    current = tuple((name, text) for name, text in sections.items() if text is not None)
    return SystemPatch("\n\n".join(texts), current, tuple(tools.values()))


def should_compact(context_tokens: float, settings: CompactionSettings) -> bool:
    """`context_tokens > window - reserve`, and never when disabled."""
    return settings.enabled and context_tokens > settings.context_window - settings.reserve_tokens


# ------------------------------------------------------------------------------------- cut points
@dataclass(frozen=True, slots=True)
class CutPoint:
    """`crossed_index`: where the walk from the tail reached `keep_recent` (None: it never did)."""

    first_kept_index: int
    turn_start_index: int = -1
    is_split_turn: bool = False
    crossed_index: int | None = None


def find_valid_cut_points(messages: Sequence[Message], start_index: int, end_index: int, *,
                          repair: bool = True) -> list[int]:  # fmt: skip
    """Indexes whose role may start a tail: never a tool result, which would lose its call."""
    roles = CUT_ROLES if repair else SEED_CUT_ROLES
    return [i for i in range(start_index, end_index) if messages[i].role in roles and not messages[i].hidden]


def find_turn_start(messages: Sequence[Message], entry_index: int, start_index: int, *,
                    repair: bool = True) -> int:  # fmt: skip
    """Index of the message that began the turn of `entry_index`, or -1."""
    roles = TURN_ROLES if repair else SEED_TURN_ROLES
    indexes = range(entry_index, start_index - 1, -1)
    return next((i for i in indexes if messages[i].role in roles and not messages[i].hidden), -1)


def find_cut_point(messages: Sequence[Message], start_index: int, end_index: int,
                   settings: CompactionSettings) -> CutPoint:  # fmt: skip
    """Walk from the tail until `keep_recent` is reached, then take the first valid point at or after.

    Sizes 10, 10, 10, 10 (user, assistant, user, assistant) with keep_recent 20: the walk crosses at
    index 2, a user message: cut there. With keep_recent 5 it crosses at index 3, an assistant: the cut
    splits the turn that began at 2.
    """
    points = find_valid_cut_points(messages, start_index, end_index, repair=settings.repair)
    if not points:
        return CutPoint(start_index)
    crossed = _crossing(messages, start_index, end_index, settings)
    cut = points[0]
    if crossed is not None:
        cut = next((c for c in points if c >= crossed), points[-1] if settings.repair else points[0])
        if settings.repair:
            cut = _after_failed_attempt(messages, cut, end_index)
    if settings.repair:
        cut = _keep_together(messages, cut, points, settings)
    roles = TURN_ROLES if settings.repair else SEED_TURN_ROLES
    starts_turn = messages[cut].role in roles
    turn = -1 if starts_turn else find_turn_start(messages, cut, start_index, repair=settings.repair)
    return CutPoint(cut, turn, turn != -1, crossed)


def _crossing(messages: Sequence[Message], start: int, end: int, settings: CompactionSettings) -> int | None:
    accumulated = 0
    for index in range(end - 1, start - 1, -1):
        tokens = messages[index].tokens(settings.estimator)
        if tokens == 0 and settings.repair:
            continue
        accumulated += tokens
        if accumulated >= settings.keep_recent_tokens:
            return index
    return None


def _after_failed_attempt(messages: Sequence[Message], cut: int, end: int) -> int:
    """pi: when only withdrawn messages follow, a failed attempt among them, the request goes with them."""
    rest = messages[cut + 1 : end]
    withdrawn = bool(rest) and all(m.kind == WITHDRAWN for m in rest)
    return cut + 1 if withdrawn and any(m.role == "assistant" for m in rest) else cut


def _keep_together(messages: Sequence[Message], cut: int, points: list[int],
                   settings: CompactionSettings) -> int:  # fmt: skip
    """Move a cut that would part what belongs together (R7).

    Back to the start of the group or pair; forward to the next whole point when going back for the sake of
    a late result would keep over twice `keep_recent`.
    """
    start = joined_start(messages, cut)
    if start == cut:
        return cut
    while start > 0 and start not in points:  # a group that begins with a result
        start = joined_start(messages, start - 1)
    group_only = _group_start(messages, cut) == start
    kept = sum(m.tokens(settings.estimator) for m in messages[start:])
    if group_only or kept <= 2 * settings.keep_recent_tokens:
        return start
    later = (c for c in points if c > cut and joined_start(messages, c) == c)
    return next(later, start)


def joined_start(messages: Sequence[Message], index: int, first: int = 0) -> int:
    """Start of what must stay with `messages[index:]`: itself when a cut there parts nothing."""
    while index > first:
        start = min(_group_start(messages, index), _call_start(messages, index))
        if start >= index:
            return index
        index = start
    return max(index, first)


def _group_start(messages: Sequence[Message], index: int) -> int:
    """First index of the groups that reach over the cut at `index` (groups lie close together)."""
    groups = {m.group for m in messages[index : index + GROUP_REACH] if m.group is not None}
    start = index
    for i in range(index - 1, max(index - 1 - GROUP_REACH, -1), -1):
        if messages[i].group in groups:
            start = i
    return start


GROUP_REACH = 256  # lines that one streamed response, its calls and results may span


def _call_start(messages: Sequence[Message], index: int) -> int:
    """Earliest call, before `index`, that a result at or after `index` answers."""
    called: set[str] = set()
    missing: set[str] = set()
    for message in messages[index:]:
        for part in message.parts:
            if isinstance(part, ToolCall) and part.id is not None:
                called.add(part.id)
            elif isinstance(part, ToolResult) and part.id is not None and part.id not in called:
                missing.add(part.id)
    start = index
    for i in range(index - 1, -1, -1):
        if not missing:
            break
        found = missing.intersection(_call_ids(messages[i]))
        if found:
            start, missing = i, missing - found
    return start


def cut_obstacles(messages: Sequence[Message], *, repair: bool = True) -> list[str | None]:
    """Why each message can't start a kept tail; None where it can. One pass over all messages.

    "tool result" or the role; "group" inside one response; "pair" between a call and its result.
    """
    obstacles: list[str | None] = [None] * len(messages)
    if repair:
        for name, first, last in chain(_group_spans(messages), _pair_spans(messages)):
            obstacles[first + 1 : last + 1] = [name] * (last - first)
    points = set(find_valid_cut_points(messages, 0, len(messages), repair=repair))
    for i, message in enumerate(messages):
        if i not in points:
            obstacles[i] = "tool result" if message.role == "toolResult" else message.role
    return obstacles


def _group_spans(messages: Sequence[Message]) -> Iterable[tuple[str, int, int]]:
    spans: dict[object, tuple[int, int]] = {}
    for i, message in enumerate(messages):
        if message.group is not None:
            spans[message.group] = spans.get(message.group, (i, i))[0], i
    return [("group", first, last) for first, last in spans.values()]


def _pair_spans(messages: Sequence[Message]) -> Iterable[tuple[str, int, int]]:
    calls: dict[str, int] = {}
    for i, message in enumerate(messages):
        parts = message.parts
        if message.role == "assistant":
            calls.update((p.id, i) for p in parts if isinstance(p, ToolCall) and p.id is not None)
        yield from (("pair", calls[p.id], i) for p in parts if isinstance(p, ToolResult) and p.id in calls)


def _call_ids(message: Message) -> list[str]:
    if message.role != "assistant":
        return []
    return [p.id for p in message.parts if isinstance(p, ToolCall) and p.id is not None]


# --------------------------------------------------------------------------------- file operations
def extract_file_ops_from_message(message: Message, file_ops: FileOperations,
                                  tools: Iterable[tuple[str, str]] = FILE_TOOLS,
                                  keys: Sequence[str] = ("path",), *, repair: bool = True) -> None:  # fmt: skip
    """Add the path of each read, write or edit call of an assistant message (repaired: or that a tool made)."""
    if message.role != "assistant" and not repair:
        return
    kinds = dict(tools)
    touches = message.touches if set(keys) <= set(PATH_KEYS) else None
    for name, paths in touches_of(_calls(message), keys) if touches is None else touches:
        path = next((path for key in keys for own, path in paths if own == key), None)
        if name in kinds and path:
            getattr(file_ops, kinds[name]).add(path)


def touches_of(calls: Iterable[tuple[object, object]], keys: Sequence[str] = PATH_KEYS) -> tuple[Touch, ...]:
    """Of (name, arguments) the calls that name a file."""
    found = (
        (name, tuple((k, v) for k in keys if isinstance(v := arguments.get(k), str) and v))
        for name, arguments in calls if isinstance(name, str) and isinstance(arguments, dict)
    )  # fmt: skip
    return tuple(_shared(touch) for touch in found if touch[1])


@lru_cache(4096)
def _shared(touch: Touch) -> Touch:
    """One object for equal ones: a session names the same files again and again."""
    return touch


def _calls(message: Message) -> Iterable[tuple[str, object]]:
    return ((part.name, part.arguments) for part in message.parts if isinstance(part, ToolCall))


def compute_file_lists(file_ops: FileOperations, *, repair: bool = True) -> tuple[list[str], list[str]]:
    """(read only, modified), each sorted as JavaScript sorts (the seed: by code point)."""
    modified = file_ops.edited | file_ops.written
    key = utf16_key if repair else None
    return sorted(file_ops.read - modified, key=key), sorted(modified, key=key)


# -------------------------------------------------------------------------------------- the plan
@dataclass(frozen=True, slots=True)
class CompactionPreparation:
    """What a compaction would do. `first_kept_index` and `turn_start_index` count in `compactable`.

    messages = [previous summary] + protected + messages_to_summarize + turn_prefix_messages + retained_tail

    `protected` stays in front of the removed part (segment strategy: the first turn); else it is empty.
    """

    messages_to_summarize: Sequence[Message]
    turn_prefix_messages: Sequence[Message]
    retained_tail: Sequence[Message]
    is_split_turn: bool
    tokens_before: float
    previous_summary: str | None
    file_ops: FileOperations
    settings: CompactionSettings
    cut: CutPoint
    estimate: ContextEstimate
    protected: Sequence[Message] = ()

    @property
    def kept(self) -> Sequence[Message]:
        return [*self.protected, *self.retained_tail]

    @property
    def removed(self) -> Sequence[Message]:
        return [*self.messages_to_summarize, *self.turn_prefix_messages]

    @property
    def tokens_kept(self) -> int:
        return sum(m.tokens(self.settings.estimator) for m in self.kept)


@dataclass(frozen=True, slots=True)
class NoCompaction:
    """Why nothing would be compacted: the seed's branch and sub-branch, with its figures.

    `cut`: the cut that was found and had nothing before it; None where none was looked for.
    """

    branch: str
    sub: str | None = None
    figures: dict[str, object] = field(default_factory=dict)
    estimate: ContextEstimate = ContextEstimate(0, 0, 0, None)
    cut: CutPoint | None = None


def prepare_compaction(messages: Sequence[Message],
                       settings: CompactionSettings = DEFAULT_COMPACTION_SETTINGS,
                       ) -> CompactionPreparation | NoCompaction:  # fmt: skip
    """Decide what to summarise and what to keep. Every command calls this one function."""
    if not messages:
        return NoCompaction("empty_messages")
    estimate = estimate_context_tokens(messages, settings.estimator)
    newest = next((m for m in (messages[-1], messages[0]) if m.kind == COMPACTION_SUMMARY), None)
    if newest is messages[-1] or (newest is not None and newest.at_end):
        figures: dict[str, object] = {"msgs": len(messages), "tail_head": newest.text[:60]}
        return NoCompaction("tail_is_summary", None, figures, estimate)
    summary = messages[0] if messages[0].kind == COMPACTION_SUMMARY else None
    previous = summary.text if summary else None
    compactable = messages[1:] if summary else messages
    cut = find_cut_point(compactable, 0, len(compactable), settings)
    history_end = cut.turn_start_index if cut.is_split_turn else cut.first_kept_index
    history, prefix = compactable[:history_end], compactable[history_end : cut.first_kept_index]
    if not any(m.told for m in (*history, *prefix)):
        return _nothing_to_summarize(messages, compactable, cut, settings, estimate)
    return CompactionPreparation(
        messages_to_summarize=history,
        turn_prefix_messages=prefix,
        retained_tail=compactable[cut.first_kept_index :],
        is_split_turn=cut.is_split_turn,
        tokens_before=estimate.tokens,
        previous_summary=(previous or None) if settings.repair else previous,
        file_ops=file_operations(summary, (*history, *prefix), settings),
        settings=settings,
        cut=cut,
        estimate=estimate,
    )


def file_operations(summary: Message | None, removed: Iterable[Message],
                     settings: CompactionSettings) -> FileOperations:  # fmt: skip
    """Files named by the removed calls, and (R3) by the compactions before."""
    file_ops = FileOperations()
    if settings.repair and summary is not None and summary.files is not None:
        file_ops = FileOperations(
            set(summary.files.read), set(summary.files.written), set(summary.files.edited)
        )
    names = [f'"{name}"'.encode() for name, _ in settings.file_tools]
    for message in removed:
        if message.told:
            if message.touches is not None or message.mentions(names):
                extract_file_ops_from_message(message, file_ops, settings.file_tools, settings.file_keys,
                                              repair=settings.repair)  # fmt: skip
            if settings.repair and message.files is not None:  # the client's own file tools
                file_ops.read |= message.files.read
                file_ops.written |= message.files.written
                file_ops.edited |= message.files.edited
    return file_ops


def _nothing_to_summarize(messages: Sequence[Message], compactable: Sequence[Message], cut: CutPoint,
                          settings: CompactionSettings, estimate: ContextEstimate) -> NoCompaction:  # fmt: skip
    sizes = [m.tokens(settings.estimator) for m in compactable]
    top = sorted(((size, i) for i, size in enumerate(sizes)), reverse=True)[:3]
    figures: dict[str, object] = {
        "msgs": len(messages),
        "est_total": estimate.tokens,
        "compactable": len(compactable),
        "keep_recent": settings.keep_recent_tokens,
        "first_kept": cut.first_kept_index,
        "turn_start": cut.turn_start_index,
        "split": cut.is_split_turn,
        "user": sum(m.role == "user" for m in compactable),
        "asst": sum(m.role == "assistant" for m in compactable),
        "est_first": sizes[0] if sizes else 0,
        "est_rest": sum(sizes[1:]),
        "top3": [(i, size) for size, i in top],
        "head_roles": ["T" if m.role == "toolResult" else m.role[0].upper() for m in compactable[:10]],
    }
    return NoCompaction(
        "nothing_to_summarize", _sub_branch(compactable, sizes, cut, settings), figures, estimate, cut
    )


def _sub_branch(compactable: Sequence[Message], sizes: Sequence[int], cut: CutPoint,
                settings: CompactionSettings) -> str:  # fmt: skip
    if not find_valid_cut_points(compactable, 0, len(compactable), repair=settings.repair):
        return "no_valid_cut_points"
    if sum(sizes) < settings.keep_recent_tokens:
        return "total_below_keep_recent"
    if settings.repair and cut.crossed_index != 0:
        return "tail_exceeds_keep_recent"
    return "cut_pinned_at_zero"
