"""Why a transcript would or would not be compacted: the seed's line, the evidence, plain words, what helps.

The line is the seed's, field by field: `[COMPACT_NONE] branch=... sub=... msgs=... top3=[idx0=12; ...]`.
Nothing is decided here: what is told comes from the functions that decide, and a suggestion is tried by them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import accumulate, compress, pairwise

from haocompact.compaction import (
    COMPACTION_SUMMARY,
    CompactionPreparation,
    CompactionSettings,
    ContextEstimate,
    CutPoint,
    Message,
    NoCompaction,
    cut_obstacles,
    estimate_context_tokens,
    prepare_compaction,
)

TAG = "[COMPACT_NONE]"


# -------------------------------------------------------------------------------------- the line
def compaction_line(skip: NoCompaction) -> str:
    """The seed's diagnosis line for a skip (without stamp)."""
    words = [f"{TAG} branch={skip.branch}"]
    if skip.branch == "compactable_empty":
        words.append("(上下文只剩旧摘要)")
    if skip.sub:
        words.append(f"sub={skip.sub}")
    return " ".join([*words, *(_field(k, v) for k, v in skip.figures.items())])


def _field(key: str, value: object) -> str:
    if key == "top3" and isinstance(value, list):
        return "top3=[" + "; ".join(f"idx{i}={tokens}" for i, tokens in value) + "]"
    if key == "head_roles" and isinstance(value, list):
        return f"head_roles=[{' '.join(value)}]"
    return f"{key}={value!r}" if key == "tail_head" else f"{key}={value}"


# -------------------------------------------------------------------------------------- evidence
@dataclass(frozen=True, slots=True)
class Lines:
    """Messages that have something in common: how many, and the first few of their lines."""

    what: str
    count: int
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Account:
    """How the size of the context is known.

    `usage_line`: the line whose usage report anchors it, None when everything is estimated. `estimated`:
    messages whose tokens are estimated. `rejected`: reports that do not count, by reason.
    """

    tokens: float
    usage_tokens: float
    trailing_tokens: int
    usage_line: int | None
    estimated: int
    rejected: tuple[Lines, ...]


@dataclass(frozen=True, slots=True)
class Walk:
    """Where the walk from the tail stopped, and which place it led to.

    `tokens` counted up to `stopped_line`; None when keep_recent was never reached. `obstacle`: why that
    line itself can't start the kept tail. `cut_line`: the first line that is kept.
    """

    tokens: int
    stopped_line: int | None
    obstacle: str | None
    cut_line: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a transcript would or would not be compacted.

    `cause`: one stable word (a key of TITLES), None when something would be summarised. `heaviest`: (line,
    role, tokens), largest first. `valid` messages could start a kept tail, `obstacles` tell why others
    can't; both are empty where no cut was looked for.
    """

    outcome: CompactionPreparation | NoCompaction
    cause: str | None
    explanation: str
    suggestions: tuple[str, ...] = ()
    heaviest: tuple[tuple[int, str, int], ...] = ()
    account: Account | None = None
    walk: Walk | None = None
    valid: Lines | None = None
    obstacles: tuple[Lines, ...] = ()


TITLES = {
    "empty": "the file is empty",
    "header_only": "a header and no message",
    "unreadable": "this can't be read as a transcript",
    "tail_is_summary": "nothing new since the last summary",
    "only_summary": "only a summary",
    "no_valid_cut_points": "no valid cut point",
    "below_keep_recent": "smaller than what is always kept",
    "pinned_by_first_message": "pinned by the first message",
    "tail_exceeds_keep_recent": "the tail is larger than what is to be kept",
    "no_segment": "no segment between head and tail",
    "no_gain": "the summary would be no smaller",
    "below_trigger": "below the trigger",
    "disabled": "switched off",
    "cooldown": "too soon after the last compaction",
    "other_branch": "the messages are on another branch",
}
_CAUSES = {
    "empty_messages": "empty",
    "compactable_empty": "only_summary",
    "total_below_keep_recent": "below_keep_recent",
    "cut_pinned_at_zero": "pinned_by_first_message",
    "segment_too_short": "no_segment",
    "segment_one_turn": "no_segment",
    "segment_empty": "no_segment",
}
LINES_SHOWN = 5
Gains = Callable[[CompactionPreparation], bool]
"""Whether a plan would make the transcript smaller."""


def diagnose(messages: Sequence[Message], settings: CompactionSettings,
             outcome: CompactionPreparation | NoCompaction, gains: Gains = lambda plan: True) -> Diagnosis:  # fmt: skip
    """Explain what `prepare_compaction` (or `prepare_segment`) decided; suggestions are found by trying.

    Lines are those of the messages; `with_lines` makes them those of the file, where they differ.
    """
    skip = outcome if isinstance(outcome, NoCompaction) else None
    compactable = messages[_head(messages) :]
    found = Diagnosis(
        outcome,
        cause=cause_of(skip, messages) if skip else None,
        explanation=_explanation(outcome, messages),
        suggestions=tuple(_suggest(messages, settings, skip, gains)) if skip else (),
        heaviest=_heaviest(messages, settings),
        account=_account(messages, settings),
    )
    if outcome.cut is None or settings.strategy != "keep-recent":
        return found
    obstacles = cut_obstacles(compactable, repair=settings.repair)
    free = compress(compactable, (obstacle is None for obstacle in obstacles))
    valid = next(iter(_lines(("valid", m) for m in free)), None)
    return replace(
        found,
        walk=_walk(compactable, settings, outcome.cut, obstacles) if valid else None,
        valid=valid or Lines("valid", 0, ()),
        obstacles=_lines((o, m) for o, m in zip(obstacles, compactable, strict=True) if o is not None),
    )


def with_lines(found: Diagnosis, line: Callable[[int], int]) -> Diagnosis:
    """The diagnosis with lines of the file, in a format whose records are no lines."""

    def group(lines: Lines) -> Lines:
        return replace(lines, lines=tuple(map(line, lines.lines)))

    a, w = found.account, found.walk
    stopped = None if w is None or w.stopped_line is None else line(w.stopped_line)
    return replace(
        found,
        heaviest=tuple((line(n), role, tokens) for n, role, tokens in found.heaviest),
        account=a and replace(a, usage_line=None if a.usage_line is None else line(a.usage_line),
                              rejected=tuple(map(group, a.rejected))),
        walk=w and replace(w, stopped_line=stopped, cut_line=line(w.cut_line)),
        valid=found.valid and group(found.valid),
        obstacles=tuple(map(group, found.obstacles)),
    )  # fmt: skip


def cause_of(skip: NoCompaction, messages: Sequence[Message]) -> str:
    """The key of TITLES for a skip."""
    name = known_cause(skip.sub or skip.branch)
    return "only_summary" if name == "tail_is_summary" and len(messages) == 1 else name


def known_cause(name: str) -> str:
    """The cause that a sub-branch (or branch without one) stands for."""
    return _CAUSES.get(name, name)


def _head(messages: Sequence[Message]) -> int:
    return 1 if messages and messages[0].kind == COMPACTION_SUMMARY else 0


def _heaviest(messages: Sequence[Message], settings: CompactionSettings) -> tuple[tuple[int, str, int], ...]:
    top = nlargest(3, ((m.tokens(settings.estimator), -m.line, m.role) for m in messages))
    return tuple((-line, role, tokens) for tokens, line, role in top if tokens)


def _account(messages: Sequence[Message], settings: CompactionSettings) -> Account:
    e: ContextEstimate = estimate_context_tokens(messages, settings.estimator)
    anchor = e.last_usage_index
    return Account(
        tokens=e.tokens,
        usage_tokens=e.usage_tokens,
        trailing_tokens=e.trailing_tokens,
        usage_line=None if anchor is None else messages[anchor].line,
        estimated=sum(not m.hidden for m in messages[0 if anchor is None else anchor + 1 :]),
        rejected=_lines((m.usage_note, m) for m in messages if m.usage is None and m.usage_note),
    )


def _walk(compactable: Sequence[Message], settings: CompactionSettings, cut: CutPoint,
          obstacles: Sequence[str | None]) -> Walk:  # fmt: skip
    stopped, kept = cut.crossed_index, compactable[cut.first_kept_index].line
    tokens = sum(m.tokens(settings.estimator) for m in compactable[stopped or 0 :])
    if stopped is None:
        return Walk(tokens, None, None, kept)
    return Walk(tokens, compactable[stopped].line, obstacles[stopped], kept)


def _lines(found: Iterable[tuple[str, Message]]) -> tuple[Lines, ...]:
    """By what they have in common, the most frequent first."""
    groups: dict[str, list[int]] = {}
    for what, message in found:
        groups.setdefault(what, []).append(message.line)
    made = (Lines(what, len(lines), tuple(lines[:LINES_SHOWN])) for what, lines in groups.items())
    return tuple(sorted(made, key=lambda group: -group.count))


# ------------------------------------------------------------------------------------ plain words
def plural(count: int, thing: str) -> str:
    """1 message, 1,234 messages."""
    return f"{count:,} {thing}" + "s" * (count != 1)


def _explanation(outcome: CompactionPreparation | NoCompaction, messages: Sequence[Message]) -> str:
    if isinstance(outcome, NoCompaction):
        return _EXPLAIN[outcome.sub or outcome.branch](outcome.figures, messages)
    return (f"{plural(told(outcome.removed), 'message')} would be summarised and {told(outcome.kept):,} kept "
            f"(about {plural(outcome.tokens_kept, 'token')}).")  # fmt: skip


def told(messages: Iterable[Message]) -> int:
    """How many of them a summary retells."""
    return sum(m.told for m in messages)


def _tail_is_summary(figures: Figures, messages: Sequence[Message]) -> str:
    kept = told(messages[1:])
    if not kept:
        return "The conversation is nothing but a summary: there is nothing new to compact."
    if messages[-1].kind == COMPACTION_SUMMARY:
        return "The last thing in the conversation is a summary: there is nothing new to compact."
    return (f"The last thing that was stored is a compaction: {plural(kept, 'message')} after its summary "
            f"{'was' if kept == 1 else 'were'} kept by it, and nothing has been added since.")  # fmt: skip


def _pinned(figures: Figures, messages: Sequence[Message]) -> str:
    first = messages[_head(messages)].line if messages else 0
    return (f"The kept part reaches {_n(figures, 'keep_recent')} tokens only with the first message (line {first}), "
            f"which has about {_n(figures, 'est_first')} (all others {_n(figures, 'est_rest')}): nothing stands "
            "before it.")  # fmt: skip


def _below_keep_recent(figures: Figures, messages: Sequence[Message]) -> str:
    total = f"{_int(figures, 'est_first') + _int(figures, 'est_rest'):,}"
    after = " after the summary" if _head(messages) else ""
    return (f"All {_n(figures, 'compactable')} messages{after} together are about {total} tokens, fewer than the "
            f"{_n(figures, 'keep_recent')} that are always kept.")  # fmt: skip


Figures = dict[str, object]
_EXPLAIN: dict[str, Callable[[Figures, Sequence[Message]], str]] = {
    "empty_messages": lambda f, m: "The transcript holds no message.",
    "tail_is_summary": _tail_is_summary,
    "compactable_empty": lambda f, m: "The conversation is nothing but a summary.",
    "no_valid_cut_points": lambda f, m: (
        "No message could start a kept tail: a tool result can't stand without its call, and nothing else is there."
    ),
    "total_below_keep_recent": _below_keep_recent,
    "cut_pinned_at_zero": _pinned,
    "tail_exceeds_keep_recent": lambda f, m: (
        f"What must stay together at the end is larger than {_n(f, 'keep_recent')} tokens and reaches back to the "
        "first message: nothing stands before it."
    ),
    "below_trigger": lambda f, m: (
        f"The context has {_n(f, 'tokens')} tokens, not more than the trigger of {_n(f, 'trigger')}."
    ),
    "disabled": lambda f, m: "Compaction is switched off.",
    "no_gain": lambda f, m: (
        f"The summary would have about {_n(f, 'summary_tokens')} tokens, and what it replaces has about "
        f"{_n(f, 'removed_tokens')}: nothing would be gained."
    ),
    "cooldown": lambda f, m: (
        f"The last compaction was {_n(f, 'seconds')} s ago, less than the cooldown of {_n(f, 'cooldown')} s."
    ),
    "segment_too_short": lambda f, m: (
        f"{plural(_int(f, 'msgs'), 'message')}: the first turn, one message and the last {_n(f, 'tail_keep')} "
        "are the least."
    ),
    "segment_one_turn": lambda f, m: "There is only one turn, and the first turn is protected.",
    "segment_empty": lambda f, m: (
        f"Between the first turn and the last {_n(f, 'tail_keep')} messages there is no whole segment to compact."
    ),
}


def _int(figures: Figures, name: str) -> int:
    value = figures[name]
    return value if isinstance(value, int) else 0


def _n(figures: Figures, name: str) -> str:
    """A figure with thousands separators."""
    value = figures[name]
    return (
        f"{value:,.10g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


# ------------------------------------------------------------------------------------ what helps
RIGHT = "there is nothing to compact and that is right"


def _suggest(messages: Sequence[Message], settings: CompactionSettings, skip: NoCompaction,
             gains: Gains) -> Iterator[str]:  # fmt: skip
    """What would make it compact, each tried; at least one line."""
    found: list[str] = []
    if skip.branch == "nothing_to_summarize" and settings.strategy == "segment":
        found = [*_shorter_tail(messages, settings, gains), *_other_cut(messages, settings, gains)]
    elif skip.branch == "nothing_to_summarize":
        found = [*_without_compat(messages, settings, gains), *_smaller_keep(messages, settings, gains),
                 *_as_segment(messages, settings, gains)]  # fmt: skip
    elif skip.branch == "below_trigger":
        found = _past_the_trigger(messages, settings, skip)
    elif skip.branch == "no_gain":
        found = [*_smaller_keep(messages, settings, gains), "--allow-growth writes it all the same"]
    elif skip.branch == "cooldown":
        left = math.ceil(float(str(skip.figures["cooldown"])) - float(str(skip.figures["seconds"])))
        found = [f"wait {left:,} s more, or leave out --cooldown"]
    elif skip.branch == "disabled":
        found = ["enabled=True in the settings"]
    yield from found or [RIGHT]


def attempt(messages: Sequence[Message], settings: CompactionSettings,
            gains: Gains = lambda plan: True) -> CompactionPreparation | None:  # fmt: skip
    """The plan under other settings, when there is one that gains."""
    trial = _prepare(messages, settings)
    return trial if isinstance(trial, CompactionPreparation) and gains(trial) else None


def _prepare(messages: Sequence[Message],
             settings: CompactionSettings) -> CompactionPreparation | NoCompaction:  # fmt: skip
    if settings.strategy != "segment":
        return prepare_compaction(messages, settings)
    from haocompact.segment import prepare_segment

    return prepare_segment(messages, settings)


def _effect(plan: CompactionPreparation) -> str:
    tokens = sum(m.tokens(plan.settings.estimator) for m in plan.removed)
    return f"{plural(told(plan.removed), 'message')} of about {plural(tokens, 'token')} would be summarised"


def _smaller_keep(messages: Sequence[Message], settings: CompactionSettings, gains: Gains) -> Iterator[str]:
    largest = largest_keep_recent(messages, settings, gains)
    if largest is not None:
        plan = prepare_compaction(messages, replace(settings, keep_recent_tokens=largest))
        effect = f": {_effect(plan)}" if isinstance(plan, CompactionPreparation) else ""
        yield f"--keep-recent {largest} is the largest value that compacts{effect}"


def _as_segment(messages: Sequence[Message], settings: CompactionSettings, gains: Gains) -> Iterator[str]:
    plan = attempt(messages, replace(settings, strategy="segment"), gains)
    if plan is not None:
        yield f"--strategy segment: {_effect(plan)}"


def _without_compat(messages: Sequence[Message], settings: CompactionSettings, gains: Gains) -> Iterator[str]:
    plan = None if settings.repair else attempt(messages, replace(settings, repair=True), gains)
    if plan is not None:
        yield f"leave out --compat seed: {_effect(plan)}"


def _other_cut(messages: Sequence[Message], settings: CompactionSettings, gains: Gains) -> Iterator[str]:
    """The keep-recent strategy, at the same keep_recent or at the largest that works."""
    other = replace(settings, strategy="keep-recent")
    plan = attempt(messages, other, gains)
    if plan is not None:
        yield f"--strategy keep-recent: {_effect(plan)}"
    else:
        yield from (f"--strategy keep-recent {text}" for text in _smaller_keep(messages, other, gains))


def _shorter_tail(messages: Sequence[Message], settings: CompactionSettings, gains: Gains) -> Iterator[str]:
    for tail in range(settings.tail_keep - 1, 0, -1):
        plan = attempt(messages, replace(settings, tail_keep=tail), gains)
        if plan is not None:
            yield f"--tail-keep {tail} is the largest value that compacts: {_effect(plan)}"
            return


def _past_the_trigger(
    messages: Sequence[Message], settings: CompactionSettings, skip: NoCompaction
) -> list[str]:
    plan = attempt(messages, settings)
    found = [f"leave out --if-needed: {_effect(plan)}"] if plan else []
    tokens = skip.figures["tokens"]
    if settings.strategy == "keep-recent" and isinstance(tokens, (int, float)):
        window = math.ceil(tokens) + settings.reserve_tokens - 1
        found.append(f"--window {window} is the largest that is past the trigger (give the model's own)")
        found.append(f"--reserve {math.floor(settings.context_window - tokens) + 1} is the smallest that is")
    return found or ["give the real --window of the model"]


def largest_keep_recent(messages: Sequence[Message], settings: CompactionSettings,
                        gains: Gains = lambda plan: True) -> int | None:  # fmt: skip
    """The largest keep_recent at which something would be summarised; None when there is none.

    Found by trying from the top: another message reaches `keep_recent` only where a sum of the tail ends. After
    TRIES in vain (so much gains nothing) the steps below are halved, as more is gained the more is removed.
    """
    compactable = messages[_head(messages) :]
    obstacles = cut_obstacles(compactable, repair=settings.repair)
    if not any(obstacle is None for obstacle in obstacles[1:]):
        return None

    def works(keep_recent: int) -> bool:
        return attempt(messages, replace(settings, keep_recent_tokens=keep_recent), gains) is not None

    sums = sorted({0, *accumulate(m.tokens(settings.estimator) for m in reversed(compactable))})
    steps = [*pairwise(sums)][::-1]
    if len(steps) > TRIES and not any(works(b) or works(a + 1) for a, b in steps[:TRIES]):
        steps = steps[bisect_left(steps, True, TRIES, key=lambda s: works(s[1]) or works(s[0] + 1)) :][:1]
    for below, reached in steps:
        if works(reached):
            return reached
        if works(below + 1):  # within one step, only a small value goes forward to the next cut point
            return bisect_left(range(below + 2, reached), True, key=lambda k: not works(k)) + below + 1
    return 0 if works(0) else None


TRIES = 25
