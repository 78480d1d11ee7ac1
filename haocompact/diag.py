"""[COMPACT_NONE] lines: make, write, parse, explain.

The line is the seed's, field by field: `[COMPACT_NONE] branch=... sub=... msgs=... top3=[idx0=12; ...]`.
In the log an ISO time stands before it and the transcript's path behind it.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate, pairwise
from pathlib import Path

from haocompact.compaction import (
    COMPACTION_SUMMARY,
    CompactionPreparation,
    CompactionSettings,
    Message,
    NoCompaction,
    cut_obstacles,
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


def log_line(skip: NoCompaction, source: str, now: datetime | None = None) -> str:
    """One line of the log: ISO 8601 time, the seed's line, source=PATH (quoted as JSON would)."""
    stamp = (now or datetime.now(UTC)).isoformat(timespec="milliseconds")
    return f"[{stamp}] {compaction_line(skip)} source={_quoted(source)}"


def _quoted(text: str) -> str:
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def append_log(path: Path, line: str) -> None:
    """Append one whole line (a single write, so that processes do not mix theirs). Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, line.encode("utf-8", "replace") + b"\n")
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------ reading back
@dataclass(frozen=True, slots=True)
class LogEntry:
    """One [COMPACT_NONE] line of a log. `time` as written: ISO in our lines, HH:MM:SS.mmm in the seed's."""

    time: str
    branch: str
    sub: str | None
    source: str | None
    text: str


_LOGGED = re.compile(
    r"^\[(?P<time>[\dT:.+\-Z ]+)\] \[COMPACT_NONE\] branch=(?P<branch>\w+)(?: sub=(?P<sub>\w+))?(?= |$)"
)
_SOURCE = re.compile(r' source="((?:[^"\\]|\\.)*)"$')


def parse_log_line(line: str) -> LogEntry | None:
    """The entry of one log line, or None for a foreign or broken line."""
    match = _LOGGED.match(line)
    if match is None:
        return None
    source = _SOURCE.search(line)
    return LogEntry(
        match["time"], match["branch"], match["sub"], _unquoted(source[1]) if source else None, line
    )


def _unquoted(text: str) -> str | None:
    try:
        return text.replace('\\"', '"').encode("ascii").decode("unicode_escape")
    except UnicodeError:  # nothing that `_quoted` writes
        return None


# ------------------------------------------------------------------------------------- explaining
@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a transcript would or would not be compacted. `heaviest`: (line, role, tokens), largest first."""

    outcome: CompactionPreparation | NoCompaction
    explanation: str
    suggestions: tuple[str, ...] = ()
    heaviest: tuple[tuple[int, str, int], ...] = ()


Gains = Callable[[CompactionPreparation], bool]
"""Whether a plan would make the transcript smaller."""


def diagnose(messages: Sequence[Message], settings: CompactionSettings,
             outcome: CompactionPreparation | NoCompaction, gains: Gains = lambda plan: True) -> Diagnosis:  # fmt: skip
    """Explain what `prepare_compaction` decided; suggestions are found by trying."""
    heaviest = sorted(((m.tokens(settings.estimator), -m.line, m.role) for m in messages), reverse=True)[:3]
    rows = tuple((-line, role, tokens) for tokens, line, role in heaviest if tokens)
    if isinstance(outcome, CompactionPreparation):
        return Diagnosis(outcome, _explain_plan(outcome), heaviest=rows)
    return Diagnosis(outcome, _EXPLAIN[outcome.sub or outcome.branch](outcome.figures),
                     tuple(_suggest(messages, settings, outcome, gains)), rows)  # fmt: skip


def _explain_plan(plan: CompactionPreparation) -> str:
    removed = sum(m.told for m in (*plan.messages_to_summarize, *plan.turn_prefix_messages))
    return (f"{removed} messages would be summarised and {len(plan.kept)} kept "
            f"(about {plan.tokens_kept} tokens).")  # fmt: skip


Figures = dict[str, object]
_EXPLAIN: dict[str, Callable[[Figures], str]] = {
    "empty_messages": lambda f: "The transcript holds no message.",
    "tail_is_summary": lambda f: (
        "The last thing in the conversation is a summary: there is nothing new to compact."
    ),
    "compactable_empty": lambda f: "The conversation is nothing but a summary.",
    "no_valid_cut_points": lambda f: "No message could start a kept tail: there are only tool results.",
    "total_below_keep_recent": lambda f: (
        f"All {f['compactable']} messages together are about {_total(f)} tokens, fewer than the "
        f"{f['keep_recent']} that are always kept."
    ),
    "cut_pinned_at_zero": lambda f: (
        f"The kept part reaches {f['keep_recent']} tokens only with the first message, which has about "
        f"{f['est_first']} (all others {f['est_rest']}): nothing stands before it."
    ),
    "tail_exceeds_keep_recent": lambda f: (
        f"What must stay together at the end is larger than {f['keep_recent']} tokens and reaches back to the "
        "first message: nothing stands before it."
    ),
    "below_trigger": lambda f: (
        f"The context has {f['tokens']} tokens, not more than the trigger of {f['trigger']} (window - reserve)."
    ),
    "disabled": lambda f: "Compaction is switched off.",
    "no_gain": lambda f: (
        f"The summary would have about {f['summary_tokens']} tokens, the {f['removed_tokens']} it replaces are "
        "not more: nothing would be gained."
    ),
    "cooldown": lambda f: (
        f"The last compaction was {f['seconds']} s ago, less than the cooldown of {f['cooldown']} s."
    ),
    "segment_too_short": lambda f: (
        f"{f['msgs']} messages: the first turn, one message and the last {f['tail_keep']} are the least."
    ),
    "segment_one_turn": lambda f: "There is only one turn, and the first turn is protected.",
    "segment_empty": lambda f: (
        f"Between the first turn and the last {f['tail_keep']} messages there is no whole segment to compact."
    ),
}


def _total(figures: Figures) -> int:
    first, rest = figures["est_first"], figures["est_rest"]
    return (first if isinstance(first, int) else 0) + (rest if isinstance(rest, int) else 0)


def _suggest(
    messages: Sequence[Message], settings: CompactionSettings, skip: NoCompaction, gains: Gains
) -> list[str]:
    if skip.sub in ("segment_too_short", "segment_one_turn", "segment_empty"):
        return ["--strategy keep-recent", "a smaller --tail-keep"]
    if skip.branch == "nothing_to_summarize":
        largest = largest_keep_recent(messages, settings, gains)
        if largest is not None:
            return [f"--keep-recent {largest} is the largest value that compacts"]
        return ["there is nothing to compact and that is right"]
    return {
        "below_trigger": ["leave out --if-needed", "give the real --window of the model"],
        "no_gain": [
            "a smaller --keep-recent summarises more at once",
            "--allow-growth writes it all the same",
        ],
        "cooldown": ["wait, or leave out --cooldown"],
    }.get(skip.branch, ["there is nothing to compact and that is right"])


def largest_keep_recent(messages: Sequence[Message], settings: CompactionSettings,
                        gains: Gains = lambda plan: True) -> int | None:  # fmt: skip
    """The largest keep_recent at which something would be summarised; None when there is none.

    Found by trying from the top: another message reaches `keep_recent` only where a sum of the tail ends.
    """
    start = 1 if messages and messages[0].kind == COMPACTION_SUMMARY else 0
    compactable = messages[start:]
    obstacles = cut_obstacles(compactable, repair=settings.repair)
    if not any(obstacle is None for obstacle in obstacles[1:]):
        return None

    def works(keep_recent: int) -> bool:
        trial = prepare_compaction(messages, replace(settings, keep_recent_tokens=keep_recent))
        return isinstance(trial, CompactionPreparation) and gains(trial)

    sums = sorted({0, *accumulate(m.tokens(settings.estimator) for m in reversed(compactable))})
    for below, reached in reversed([*pairwise(sums)]):
        if works(reached):
            return reached
        if works(below + 1):  # within one step, only a small value goes forward to the next cut point
            return bisect_left(range(below + 2, reached), True, key=lambda k: not works(k)) + below + 1
    return 0 if works(0) else None
