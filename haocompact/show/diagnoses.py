"""A diagnosis in words and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from haocompact.compaction import (
    NoCompaction,
)
from haocompact.diag import (
    LINES_SHOWN,
    RIGHT,
    TITLES,
    Diagnosis,
    Lines,
    Walk,
    plural,
)
from haocompact.errors import HaoError
from haocompact.show.plans import cut_figures, title, trigger, would
from haocompact.show.text import VERSION, number, visible

if TYPE_CHECKING:
    from haocompact.pipeline import Planned


def diag_text(planned: Planned, found: Diagnosis, *, verbose: bool = False) -> list[str]:
    """The diagnosis: verdict, plain words, the evidence line by line, what would help."""
    outcome = found.outcome
    if isinstance(outcome, NoCompaction):
        names = ", ".join(filter(None, (outcome.branch, outcome.sub)))
        verdict = f"nothing to compact: {TITLES[found.cause or '']} ({names})"
    else:
        verdict = "would be compacted"
    lines = [title(planned), verdict, "", found.explanation, ""]
    lines += _account_text(found)
    lines.append(f"trigger  {_trigger_sum(planned)}")
    lines += _walk_text(planned, found, verbose)
    if not isinstance(outcome, NoCompaction):
        lines += cut_figures(outcome, planned.session.records.line)
    if found.heaviest:
        heavy = ", ".join(
            f"line {n} ({visible(role)}, {plural(tokens, 'token')})" for n, role, tokens in found.heaviest
        )
        lines.append(f"largest  {heavy}")
    return lines + [_try(s) for s in found.suggestions]


def _try(suggestion: str) -> str:
    return f"{'so' if suggestion == RIGHT else 'try':<9}{suggestion}"


def why_text(error: HaoError) -> str:
    """What `diag` adds to the one line of an error."""
    return f". {visible(error.why[1])}" if error.why and str(error.args[0]) not in error.why[1] else ""


def _account_text(found: Diagnosis) -> Iterator[str]:
    if (a := found.account) is None:
        return
    if a.usage_line is None:
        counted = plural(a.estimated, "message")
        yield f"context  {number(a.tokens)} tokens, estimated for {counted}: no usage report counts"
    else:
        yield (f"context  {number(a.tokens)} tokens: usage {number(a.usage_tokens)} on line {a.usage_line} + "
               f"{a.trailing_tokens:,} estimated for {plural(a.estimated, 'message')} after it")  # fmt: skip
    for group in a.rejected:
        reports = plural(group.count, "usage report")
        yield f"         not counted: {reports} ({visible(group.what)}), {_places_of(group)}"


def _places_of(group: Lines) -> str:
    words = ", ".join(map(str, group.lines)) + (", ..." if group.count > len(group.lines) else "")
    return f"line{'s' * (group.count != 1)} {words}"


def _trigger_sum(planned: Planned) -> str:
    over = planned.estimate.tokens - planned.trigger
    verdict = f"yes, by {number(over)}" if planned.should_compact else f"no, {number(-over)} left"
    return f"{number(planned.estimate.tokens)} > {trigger(planned)}? {verdict}"


def _walk_text(planned: Planned, found: Diagnosis, verbose: bool) -> Iterator[str]:
    if found.walk is not None:
        yield f"walk     {_walk_words(found.walk, planned.settings.keep_recent_tokens)}"
    if found.valid is None:
        return
    total = found.valid.count + sum(group.count for group in found.obstacles)
    yield f"cuts     {found.valid.count:,} of {plural(total, 'message')} can start the kept part"
    shown = found.obstacles if verbose else found.obstacles[:LINES_SHOWN]
    for group in shown:
        yield f"         not {group.count:,}: {_OBSTACLES.get(group.what, visible(group.what))}, {_places_of(group)}"


_OBSTACLES = {"tool result": "tool results, which would lose their call", "group": "inside one response",
              "pair": "between a call and its result", "user": "never sent to the model",
              "system": "system messages"}  # fmt: skip


def _walk_words(walk: Walk, keep_recent: int) -> str:
    if walk.stopped_line is None:
        return f"all {walk.tokens:,} tokens counted from the end, {keep_recent:,} (keep_recent) never reached"
    words = f"from the end back, line {walk.stopped_line} reaches {walk.tokens:,} of {keep_recent:,} (keep_recent)"
    if walk.cut_line == walk.stopped_line:
        return f"{words}: the cut"
    why = _OBSTACLES.get(walk.obstacle or "", visible(walk.obstacle or "")) or "parts what belongs together"
    way = "next" if walk.cut_line > walk.stopped_line else "last valid"
    return f"{words}; no cut there ({why}), the {way} is line {walk.cut_line}"


def diag_json(planned: Planned, found: Diagnosis) -> dict[str, Any]:
    outcome = planned.outcome
    seen = dict(outcome.figures) if isinstance(outcome, NoCompaction) else {}
    if isinstance(seen.get("top3"), list):
        seen["top3"] = [{"idx": i, "tokens": t} for i, t in seen["top3"]]  # type: ignore[attr-defined]
    return {
        "version": VERSION,
        "path": planned.path,
        "format": planned.session.format,
        "result": "none" if isinstance(outcome, NoCompaction) else "ok",
        "branch": outcome.branch if isinstance(outcome, NoCompaction) else None,
        "sub": outcome.sub if isinstance(outcome, NoCompaction) else None,
        **seen,
        "cause": found.cause,
        "explanation": found.explanation,
        "suggestions": list(found.suggestions),
        "tokens_before": planned.estimate.tokens,
        "trigger": planned.trigger,
        "should_compact": planned.should_compact,
        "context": asdict(found.account) if found.account else None,
        "walk": asdict(found.walk) if found.walk else None,
        "valid_cuts": found.valid.count if found.valid else None,
        "no_cuts": [asdict(group) for group in found.obstacles],
        **would(outcome, planned.session.records.line),
        "heaviest": [{"line": n, "role": role, "tokens": t} for n, role, t in found.heaviest],
    }
