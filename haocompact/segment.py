"""The segment policy: which part in the middle is hidden, when, and how long its summary may be.

Ports berry-agent's `policy.js`: values in, values out. Events and projected messages are berry's own JSON
objects; `segment_of` is the same policy for the messages of every other format.

    evaluate_threshold -> plan_segment -> summary_budget, previous_summary_text -> build_summary_prompt
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from haocompact.ccr import JS_SPACE, js_string, strip_ccr_section, wording
from haocompact.compaction import (
    COMPACTION_SUMMARY,
    SEED_TURN_ROLES,
    TURN_ROLES,
    CompactionPreparation,
    CompactionSettings,
    CutPoint,
    Message,
    NoCompaction,
    Shell,
    Text,
    ToolCall,
    ToolResult,
    arguments_text,
    estimate_context_tokens,
    file_operations,
    joined_start,
)
from haocompact.errors import UsageError
from haocompact.jsjson import js_order, stringify, utf16_length

Json = Mapping[str, Any]
SUMMARY_PREFIX = "[COMPACTION-SUMMARY]"
COMPACTION_CONFIG_TAKEN = "COMPACTION_CONFIG_TAKEN"
COMPACTION_SUMMARIZER_TAKEN = "COMPACTION_SUMMARIZER_TAKEN"
MESSAGE_EVENTS = frozenset({"user/message", "assistant/message", "tool/call", "tool/result"})


@dataclass(frozen=True, slots=True)
class SegmentConfig:
    """berry-agent's defaults: ratios of the window and of the hidden part, milliseconds, UTF-16 units."""

    threshold_ratio: float = 0.5
    tail_keep: int = 6
    cooldown_ms: int = 600_000
    summary_ratio: float = 0.2
    summary_min_chars: int = 2000
    summary_max_chars: int = 12_000
    fallback_window_tokens: int = 200_000


DEFAULT_SEGMENT_CONFIG = SegmentConfig()


# -------------------------------------------------------------------------------------- threshold
@dataclass(frozen=True, slots=True)
class Threshold:
    """`basis`: usage (the provider's count) or estimate (characters / 4)."""

    basis: str
    est_tokens: float
    effective_window: float
    fire: bool


def evaluate_threshold(usage_input: float | None, projected_chars: float, context_window: float | None = None,
                       config: SegmentConfig = DEFAULT_SEGMENT_CONFIG) -> Threshold | None:  # fmt: skip
    """Whether the context fills `threshold_ratio` of the window; None when there is nothing to judge by.

    100000 reported tokens of a window of 200000 fire at the ratio 0.5.
    """
    if usage_input is None and projected_chars == 0:
        return None
    size = config.fallback_window_tokens if context_window is None else context_window
    if size <= 0:
        return None
    tokens = math.ceil(projected_chars / 4) if usage_input is None else usage_input
    basis = "estimate" if usage_input is None else "usage"
    return Threshold(basis, tokens, size, tokens / size >= config.threshold_ratio)


def in_cooldown(last_compact_ms: float | None, now_ms: float,
                config: SegmentConfig = DEFAULT_SEGMENT_CONFIG) -> bool:  # fmt: skip
    """Whether the last completed compaction is less than the cooldown ago (milliseconds)."""
    return last_compact_ms is not None and now_ms - last_compact_ms < config.cooldown_ms


# ------------------------------------------------------------------------------------------- plan
class Range(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Hide the events with `start <= seq <= end`; `occluded` are the projected messages among them."""

    start: int
    end: int
    occluded: Sequence[Json]

    @property
    def occluded_messages(self) -> int:
        return len(self.occluded)

    @property
    def occluded_chars(self) -> int:
        """UTF-16 units of the messages' JSON."""
        return sum(utf16_length(stringify(m)) for m in self.occluded)


def plan_from_range(start: int, end: int, messages: Sequence[Json]) -> SegmentPlan:
    """The plan that hides `start..end` (seq values, inclusive); may hide no message at all."""
    return SegmentPlan(start, end, [m for m in messages if start <= m["seq"] <= end])


def validate_adjusted_range(adjusted: Range, host: Range) -> bool:
    """Whether an adjusted range is a range and lies within the planned one: it may only hide less."""
    return host.start <= adjusted.start <= adjusted.end <= host.end


def plan_segment(events: Sequence[Json], messages: Sequence[Json], tail_keep: int = 6, *,
                 repair: bool = True, exact: bool = False) -> SegmentPlan | None:  # fmt: skip
    """The range to hide next: after the first complete turn, or after the last compaction, up to the tail.

    `messages` is the projection of `events`, of which the last `tail_keep` are protected. None: no range.
    `repair` (R10): seq are looked up, the range starts and ends between turns, parts no call from its
    result, and passes over what earlier compactions left. `exact`: as berry-agent alpha.15 plans;
    `repair=False`: as the seed, alpha.1, does.
    """
    ends = [e["seq"] for e in events if e.get("type") == "turn/end"]
    if isinstance(tail_keep, bool) or not isinstance(tail_keep, int) or tail_keep < 1:
        return None
    if not ends or len(messages) < tail_keep + 2:
        return None
    last = min(ends[-1], messages[-tail_keep]["seq"] - 1)
    if repair and not exact:
        span = _repaired_range(events, messages, last)
    else:
        start = _exact_start(events, ends[0]) if exact else _seed_start(events, ends[0])
        span = _range_below(events, start, last, exact=exact)
    plan = plan_from_range(*span, messages) if span else None
    return plan if plan and plan.occluded else None


def carries_range(event: Json) -> bool:
    """Whether the event has a `surfaceOp`: such an event is never hidden itself."""
    return event.get("surfaceOp") not in (None, False, 0, "")


def range_of(event: Json) -> tuple[int, int] | None:
    """The seq range that an event hides, inclusive; None when it names none (or not in whole numbers)."""
    op = event.get("surfaceOp")
    if not isinstance(op, Mapping):
        return None
    start, end = op.get("start"), op.get("end")
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (start, end))
    return (start, end) if whole else None  # type: ignore[return-value]


def _ranges(events: Sequence[Json]) -> Iterator[tuple[Json, tuple[int, int]]]:
    return ((event, span) for event in events if (span := range_of(event)) is not None)


def _surface_ends(events: Sequence[Json]) -> list[int]:
    """Last seq of what each compaction hid; ranges of other events (a failed attempt's) do not count."""
    return [span[1] for e, span in _ranges(events) if e.get("type") == "compaction/surface" and span[1] >= 0]


# ......................................................................... as the two versions plan
def _seed_start(events: Sequence[Json], first_turn_end: int) -> int | None:
    """alpha.1: after the furthest range of any kind; seq serve as positions."""
    start = max((span[1] for _, span in _ranges(events) if span[1] >= 0), default=first_turn_end) + 1
    if start < len(events) and carries_range(events[start]):
        while start < len(events) and carries_range(events[start]):
            start += 1
        if start >= len(events):
            return None
    return start


def _exact_start(events: Sequence[Json], first_turn_end: int) -> int | None:
    """alpha.15: after the furthest compaction, over carriers and out of ranges; seq serve as positions."""
    cursor = max(_surface_ends(events), default=first_turn_end) + 1
    moved = True
    while moved:
        moved = False
        while cursor < len(events) and carries_range(events[cursor]):
            cursor, moved = cursor + 1, True
        for _, (start, end) in _ranges(events):
            if start <= cursor <= end:
                cursor, moved = end + 1, True
    return cursor if cursor < len(events) else None


def _range_below(events: Sequence[Json], start: int | None, last: int, *,
                 exact: bool) -> tuple[int, int] | None:  # fmt: skip
    """From `start` to `last`, stopping before the next carrier, and (alpha.15) before the next range."""
    if start is None or start > last:
        return None
    above = [e["seq"] for e in events if carries_range(e) and e["seq"] > start]
    if exact:
        above += [span[0] for _, span in _ranges(events) if span[0] > start]
        above = [min(above)] if above else []
    end = min([last, *(seq - 1 for seq in above[:1])])
    return (start, end) if start <= end else None


# .................................................................................... repaired (R10)
@dataclass(frozen=True, slots=True)
class _Limits:
    """By position in the log: already hidden, hidden or a carrier, a range may start or end here."""

    blocked: bytearray
    starts: bytearray
    ends: bytearray


def _repaired_range(events: Sequence[Json], messages: Sequence[Json], last: int) -> tuple[int, int] | None:
    """The first stretch after the frontier that holds whole turns and at least one message."""
    seqs = [e["seq"] for e in events]
    if any(a >= b for a, b in pairwise(seqs)):
        return None  # a range of seq would hide something else
    shown = [m["seq"] for m in messages]
    limits = _limits(events, seqs)
    partner = _partners(events)
    stop = bisect_right(seqs, last)
    for start in range(_frontier(events, seqs), stop):
        if limits.starts[start]:
            end = _furthest_end(start, stop, limits, partner)
            if end is not None and bisect_left(shown, seqs[start]) < bisect_right(shown, seqs[end]):
                return seqs[start], seqs[end]
    return None


def _frontier(events: Sequence[Json], seqs: Sequence[int]) -> int:
    """Position after the furthest compaction, or after the first complete turn."""
    ends = _surface_ends(events)
    if ends:
        return bisect_right(seqs, max(ends))
    return next(i for i, e in enumerate(events) if e.get("type") == "turn/end") + 1


def _limits(events: Sequence[Json], seqs: Sequence[int]) -> _Limits:
    """Starts that berry's own gate accepts: 0, a `turn/start`, right after a `turn/end` or an older range.

    A range may end where no turn is open: after a `turn/end`, and after what stands between two turns.
    """
    hidden = bytearray(len(events))
    for _, (start, end) in _ranges(events):
        first, stop = bisect_left(seqs, start), bisect_right(seqs, end)
        hidden[first:stop] = b"\1" * max(stop - first, 0)
    limits = _Limits(bytearray(hidden), bytearray(len(events)), bytearray(len(events)))
    is_open, before = False, "turn/end"  # nothing stands before the first turn
    for i, event in enumerate(events):
        kind = str(event.get("type"))
        limits.blocked[i] |= carries_range(event)
        if not hidden[i]:
            is_open = kind != "turn/end" and (is_open or _opens_turn(event))
        limits.ends[i] = not is_open
        limits.starts[i] = kind == "turn/start" or before == "turn/end" or bool(i and hidden[i - 1])
        before = kind
    return limits


def _opens_turn(event: Json) -> bool:
    if event.get("type") == "turn/start":
        return True
    return event.get("type") in MESSAGE_EVENTS and not is_summary_event(event)


def is_summary_event(event: Json) -> bool:
    """Whether the event is a summary that a compaction wrote."""
    data = event.get("data")
    return (
        event.get("type") == "user/message"
        and isinstance(data, Mapping)
        and data.get("source") == "compaction"
    )


def _partners(events: Sequence[Json]) -> dict[int, int]:
    """Position of a call <-> position of the result that answers it (the nearest open call of that id)."""
    partner: dict[int, int] = {}
    waiting: dict[str, int] = {}
    for i, event in enumerate(events):
        data = event.get("data")
        name = data.get("toolCallId") if isinstance(data, Mapping) else None
        if not isinstance(name, str):
            continue
        if event.get("type") == "tool/call":
            waiting[name] = i
        elif event.get("type") == "tool/result" and name in waiting:
            call = waiting.pop(name)
            partner[call], partner[i] = i, call
    return partner


def _furthest_end(start: int, stop: int, limits: _Limits, partner: Mapping[int, int]) -> int | None:
    """Last place before `stop` where a range from `start` may end: no pair parted, nothing hidden twice."""
    end, furthest = None, start
    for i in range(start, stop):
        if limits.blocked[i] or partner.get(i, start) < start:
            break
        furthest = max(furthest, partner.get(i, i))
        if limits.ends[i] and furthest <= i:
            end = i
    return end


# ------------------------------------------------------------------------------ any other format
@dataclass(frozen=True, slots=True)
class Segment:
    """Hide `messages[start:end]`."""

    start: int
    end: int


def segment_of(messages: Sequence[Message], settings: CompactionSettings) -> Segment | NoCompaction:
    """The same policy on the messages of any format: keep the first turn and the tail, hide the middle.

    A turn begins at a message of a user's (R11: also a shell command's, ...). A first message that is a
    summary is neither counted nor hidden here. The tail is the last `settings.tail_keep` messages and
    whatever must not be parted from them, from the start of a turn on (R10): a tail that began inside a turn
    would count as part of the first one the next time.
    """
    head = 1 if messages and messages[0].kind == COMPACTION_SUMMARY else 0
    if len(messages) == head:
        return NoCompaction("tail_is_summary" if head else "empty_messages")
    if len(messages) - head < settings.tail_keep + 2:
        return _no_segment(messages, settings, "segment_too_short")
    roles = TURN_ROLES if settings.repair else SEED_TURN_ROLES
    turns = [i for i in range(head, len(messages)) if messages[i].role in roles and not messages[i].hidden]
    if len(turns) < 2:
        return _no_segment(messages, settings, "segment_one_turn")
    latest = joined_start(messages, len(messages) - settings.tail_keep, turns[0])
    end = max((i for i in turns if i <= latest and joined_start(messages, i, turns[0]) == i), default=0)
    start = next((i for i in turns[1:] if joined_start(messages, i, turns[0]) == i), len(messages))
    if start >= end or all(m.hidden for m in messages[start:end]):
        return _no_segment(messages, settings, "segment_empty")
    return Segment(start, end)


def prepare_segment(messages: Sequence[Message], settings: CompactionSettings,
                    lines: tuple[int, int] | None = None) -> CompactionPreparation | NoCompaction:  # fmt: skip
    """The plan of the segment strategy: first turn and tail stay, the middle is summarised.

    `lines`: a narrower range of physical lines, inside the planned one. Raises UsageError when it is not,
    or when it would part what belongs together.
    """
    found = segment_of(messages, settings)
    if isinstance(found, NoCompaction):
        return found
    if lines is not None:
        found = _narrowed(messages, found, lines)
    head = 1 if messages[0].kind == COMPACTION_SUMMARY else 0
    summary = messages[0] if head else None
    middle = messages[found.start : found.end]
    estimate = estimate_context_tokens(messages, settings.estimator)
    return CompactionPreparation(
        messages_to_summarize=middle,
        turn_prefix_messages=(),
        retained_tail=messages[found.end :],
        is_split_turn=False,
        tokens_before=estimate.tokens,
        previous_summary=(summary.text or None) if summary else None,
        file_ops=file_operations(summary, middle, settings),
        settings=settings,
        cut=CutPoint(found.end - head),
        estimate=estimate,
        protected=messages[head : found.start],
    )


def _narrowed(messages: Sequence[Message], planned: Segment, lines: tuple[int, int]) -> Segment:
    inside = [i for i in range(planned.start, planned.end) if lines[0] <= messages[i].line <= lines[1]]
    first, last = messages[planned.start].line, messages[planned.end - 1].line
    if not inside or not validate_adjusted_range(Segment(*lines), Segment(first, last)):
        raise UsageError(f"--range {lines[0]}..{lines[1]} is not inside the planned range {first}..{last}")
    found = Segment(inside[0], inside[-1] + 1)
    for edge in (found.start, found.end):
        if edge < len(messages) and joined_start(messages, edge) != edge:
            raise UsageError(f"--range parts what belongs together before line {messages[edge].line}")
    return found


def _no_segment(messages: Sequence[Message], settings: CompactionSettings, sub: str) -> NoCompaction:
    turns = sum(m.role in TURN_ROLES for m in messages)
    return NoCompaction("nothing_to_summarize", sub, {"msgs": len(messages), "turns": turns,
                                                      "tail_keep": settings.tail_keep})  # fmt: skip


# ---------------------------------------------------------------------------------------- summary
def summary_budget(occluded_chars: float, config: SegmentConfig = DEFAULT_SEGMENT_CONFIG) -> int:
    """Target length of a summary in UTF-16 units: a fifth of what it replaces, from 2000 to 12000."""
    target = math.ceil(occluded_chars * config.summary_ratio)
    return min(max(target, config.summary_min_chars), config.summary_max_chars)


def previous_summary_text(events: Sequence[Json], *, repair: bool = True) -> str | None:
    """The newest summary in the log, hidden or not, without prefix and marker section; or None."""
    for event in reversed(events):
        if is_summary_event(event):
            text = _plain_text(event["data"].get("content"), repair)
            if text:
                return bare_summary(text, repair=repair)
    return None


def bare_summary(text: str, *, repair: bool = True) -> str:
    """A stored summary without `[COMPACTION-SUMMARY]` and marker section."""
    return strip_ccr_section(text.removeprefix(SUMMARY_PREFIX), repair=repair).strip(JS_SPACE)


def _plain_text(content: object, repair: bool) -> str:
    if isinstance(content, str):
        return content
    blocks = [b for b in content if isinstance(b, Mapping)] if isinstance(content, list) else []
    texts = [b.get("text", "" if repair else "undefined") for b in blocks if b.get("type") == "text"]
    return "".join(t if isinstance(t, str) else "" if repair else js_string(t) for t in texts)


@dataclass(frozen=True, slots=True)
class _Prompt:
    opening: str
    sections: str
    fidelity: str
    closing: str
    previous: str
    material: str


_ZH = _Prompt(
    opening="请将以下对话压缩为一份上下文摘要，供后续轮次代替被压缩的原文使用。\n"
    "目标长度：不超过 {chars} 字符。",
    sections="""\
摘要须按五段结构组织：
1. 任务概述：用户在做什么、目标是什么；
2. 关键决策：已确定的技术/方案决策及其理由；
3. 未竟事项：已开始未完成的工作、待验证的假设；
4. 工具与文件痕迹：已用工具、已读写的关键文件路径与结果要点；
5. 下一步建议：紧接着最该做的事。""",
    fidelity="保真纪律：摘要须逐字保留关键精确标识——文件路径、错误码与错误文本要点、行号、命令与参数、"
    "数字阈值/版本号/配置值；这些内容不得意译、不得改写成相近表述、不得省略。",
    closing="只输出摘要正文，不要输出其他说明。",
    previous="## 前次压缩摘要（迭代链——此前历史已并入其中，本摘要须承接不可丢）",
    material="## 待压缩对话（投影消息 JSON）",
)
_EN = _Prompt(
    opening="Condense the conversation below into a context summary that later turns will use in its place.\n"
    "Target length: at most {chars} characters.",
    sections="""\
Organise the summary in five sections:
1. Task: what the user is doing and wants to achieve;
2. Key decisions: technical and design decisions made, with their reasons;
3. Open items: work begun and not finished, assumptions still to be verified;
4. Tools and files: tools used, paths of the key files read or written, and what came of it;
5. Next step: what should be done first.""",
    fidelity="Keep exact identifiers word for word: file paths, error codes and the gist of error texts, "
    "line numbers, commands and their arguments, limits, versions, settings. Do not paraphrase or drop them.",
    closing="Output the summary only, without any other remark.",
    previous="## Previous summary (it holds all earlier history; this summary must carry it on)",
    material="## Conversation to condense (projected messages, JSON)",
)
_PROMPTS: Mapping[str, _Prompt] = {"zh": _ZH, "en": _EN}


def build_summary_prompt(occluded: Sequence[Json], previous_summary: str | None, max_chars: int,
                         lang: str = "zh", *, repair: bool = True) -> str:  # fmt: skip
    """Five-section prompt over the hidden messages; `repair` adds alpha.15's line on exact identifiers."""
    wording(lang)
    words = _PROMPTS[lang]
    lines = [words.opening.format(chars=max_chars), words.sections]
    lines += [words.fidelity] if repair else []
    lines.append(words.closing + (f"\n\n{words.previous}\n{previous_summary}" if previous_summary else ""))
    return "\n".join([*lines, "", words.material, indented(list(occluded))])


def projected(message: Message) -> Iterator[Json]:
    """A message of any format in berry-agent's projected form, for the prompt."""
    parts = message.parts
    text = "\n".join(p.text for p in parts if isinstance(p, Text) and p.text)
    for part in parts:
        if isinstance(part, ToolResult):
            output = "\n".join(t for t in part.texts if t)
            yield {"type": "toolResult", "toolCallId": part.id or "", "toolName": part.name, "output": output,
                   "isError": part.is_error}  # fmt: skip
        elif isinstance(part, Shell):
            text = f"$ {part.command}\n{part.output}"
    if message.role == "assistant":
        calls = [{"toolCallId": p.id or "", "toolName": p.name, "arguments": arguments_text(p.arguments)}
                 for p in parts if isinstance(p, ToolCall)]  # fmt: skip
        yield {"type": "assistant", "content": text, "toolCalls": calls}
    elif text:
        yield {"type": "user", "content": text}


def indented(value: object, margin: str = "\n") -> str:
    """`JSON.stringify(value, null, 2)`."""
    inner = margin + "  "
    if isinstance(value, Mapping) and value:
        pairs = (f"{stringify(k)}: {indented(value[k], inner)}" for k in js_order(value))
        return "{" + inner + ("," + inner).join(pairs) + margin + "}"
    if isinstance(value, list) and value:
        return "[" + inner + ("," + inner).join(indented(v, inner) for v in value) + margin + "]"
    return stringify(value)
