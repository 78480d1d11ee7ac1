"""A plan as a table, as figures, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from haocompact.compaction import (
    COMPACTION_SUMMARY,
    CompactionPreparation,
    Image,
    Message,
    NoCompaction,
    Shell,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    compute_file_lists,
    cut_obstacles,
)
from haocompact.diag import (
    TITLES,
    cause_of,
    plural,
    told,
)
from haocompact.pipeline import Planned, figures
from haocompact.show.text import VERSION, new_table, number, place, visible

if TYPE_CHECKING:
    from rich.console import RenderableType


ROWS_IN_JSON = 2000

FOLD_ENDS, FOLD_CUT = 6, 8  # rows shown at both ends and on each side of the cut


@dataclass(frozen=True, slots=True)
class Row:
    """One message (or turn) of the cut-point table. `running`: tokens from the tail up to here (None: not counted).

    `obstacle`: why it can't start the kept tail. `place`: previous, summarise, prefix or keep.
    """

    line: int
    role: str
    what: str
    tokens: int
    running: int | None
    obstacle: str | None
    place: str
    is_cut: bool


def rows(planned: Planned, start: int = 0) -> list[Row]:
    """The rows of `session.messages[start:]`, oldest first."""
    messages, settings = planned.session.messages, planned.settings
    head = 1 if planned.previous_summary is not None else 0
    places = ["previous"] * head + _places(planned.outcome, len(messages) - head)
    from_here = max(start - OVERLAP, head)  # a group or pair that began before is still seen
    obstacles = ["previous summary"] * from_here + cut_obstacles(messages[from_here:], repair=settings.repair)
    cut = _cut_index(planned, head)
    running, result, place = 0, [], planned.session.records.line
    for index in range(len(messages) - 1, start - 1, -1):
        message = messages[index]
        tokens = message.tokens(settings.estimator)
        running += tokens
        result.append(Row(place(message.line), _role(message), what(message), tokens, running, obstacles[index],
                          places[index], index == cut))  # fmt: skip
    return result[::-1]


OVERLAP = 256


def _cut_index(planned: Planned, head: int) -> int:
    outcome = planned.outcome
    if isinstance(outcome, NoCompaction):
        return -1
    return head + outcome.cut.first_kept_index


def _shown_rows(planned: Planned, everything: bool) -> list[Row | int]:
    """All rows of a short session; of a long one the first few, and those from shortly before the cut on."""
    messages = planned.session.messages
    start = min(_cut_index(planned, 1), len(messages) - FOLD_ENDS) - FOLD_CUT
    if everything or len(messages) <= ROWS_IN_JSON or start <= FOLD_ENDS:
        return list(rows(planned))
    settings, place = planned.settings, planned.session.records.line
    first = [Row(place(m.line), _role(m), what(m), m.tokens(settings.estimator), None, None, "summarise", False)
             for m in messages[:FOLD_ENDS]]  # fmt: skip
    return [*first, start - FOLD_ENDS, *rows(planned, start)]


def _places(outcome: CompactionPreparation | NoCompaction, total: int) -> list[str]:
    if isinstance(outcome, NoCompaction):
        return ["keep"] * total
    front, history, prefix = map(
        len, (outcome.protected, outcome.messages_to_summarize, outcome.turn_prefix_messages)
    )
    rest = total - front - history - prefix
    return ["keep"] * front + ["summarise"] * history + ["prefix"] * prefix + ["keep"] * rest


def turn_rows(all_rows: Sequence[Row]) -> list[Row]:
    """Rows folded to one a turn; a turn that the cut splits becomes two."""
    turns: list[list[Row]] = []
    for row in all_rows:
        if turns and row.role not in ("user", "bash", "custom", "branch", "summary") and not row.is_cut:
            turns[-1].append(row)
        else:
            turns.append([row])
    return [
        replace(turn[0], what=plural(len(turn), "message"), tokens=sum(r.tokens for r in turn))
        for turn in turns
    ]


_ROLES = {"toolResult": "tool", "bashExecution": "bash", "branchSummary": "branch"}


def _role(message: Message) -> str:
    return "summary" if message.kind == "compaction_summary" else _ROLES.get(message.role, message.role)


def what(message: Message) -> str:
    """What a message consists of, without a word of what it says."""
    parts = message.parts
    words = []
    chars = sum(len(p.text) for p in parts if isinstance(p, Text))
    thinking = sum(len(p.text) for p in parts if isinstance(p, Thinking))
    if chars:
        words.append(f"text {chars:,}")
    if thinking:
        words.append(f"thinking {thinking:,}")
    words += _counted("call", (p.name for p in parts if isinstance(p, ToolCall)))
    for part in parts:
        if isinstance(part, ToolResult):
            words.append(f"{'error' if part.is_error else 'result'} {sum(map(len, part.texts)):,}")
        elif isinstance(part, Shell):
            words.append(f"command, output {len(part.output):,}")
    images = sum(isinstance(p, Image) for p in parts) + sum(
        p.images for p in parts if isinstance(p, ToolResult)
    )
    if images:
        words.append(f"{images} image{'s' * (images > 1)}")
    if message.hidden:
        words.append("not sent")
    return ", ".join(words) or "empty"


def _counted(label: str, names: Iterable[str]) -> list[str]:
    return [f"{label} {visible(n)[:40]}" + (f" x{c}" if c > 1 else "") for n, c in Counter(names).items()]


def plan_table(planned: Planned, *, turns: bool = False, everything: bool = False) -> RenderableType:
    """One row a message (or turn), with a line wherever another fate begins: summarised, turn prefix, kept."""
    from rich.text import Text as RichText

    table = new_table(("line", "right"), ("role", "left"), ("what", "left"), ("tokens", "right"), ("running", "right"),
                   ("cut", "left"), wrap="what")  # fmt: skip
    found: Sequence[Row | int] = turn_rows(rows(planned)) if turns else _shown_rows(planned, everything)
    place = "keep"
    for item in _folded(found, everything):
        if isinstance(item, int):
            table.add_row("", "", f"... {item:,} more (--all)", "", "", "", style="dim")
            continue
        if item.place != place and item.place in _FATES:
            table.add_row("", "", RichText(_FATES[item.place], style="bold"), "", "", "")
        place = item.place
        running = "" if item.running is None else f"{item.running:,}"
        words = RichText(visible(item.role)), RichText(item.what), RichText(visible(item.obstacle or "valid"))
        table.add_row(str(item.line or ""), *words[:2], f"{item.tokens:,}", running, words[2],
                      style="" if place == "keep" else "dim")  # fmt: skip
    return table


_FATES = {"summarise": "-- summarised --", "prefix": "-- turn prefix --", "keep": "-- kept from here --"}


def _folded(items: Sequence[Row | int], everything: bool) -> Iterator[Row | int]:
    """Head, around the cut, tail; a number stands for rows that are left out."""
    cut = next((i for i, row in enumerate(items) if isinstance(row, Row) and row.is_cut), len(items) - 1)
    shown = set(range(FOLD_ENDS)) | set(range(len(items) - FOLD_ENDS, len(items)))
    shown |= set(range(cut - FOLD_CUT, cut + FOLD_CUT))
    skipped = 0
    for index, item in enumerate(items):
        if isinstance(item, int):
            skipped += item
        elif everything or index in shown:
            if skipped:
                yield skipped
            skipped = 0
            yield item
        else:
            skipped += 1


def title(planned: Planned) -> str:
    count = told(m for m in planned.session.messages if m.kind != COMPACTION_SUMMARY)
    return f"{place(planned.path)}: {planned.session.format}, {plural(count, 'message')}"


def plan_figures(planned: Planned) -> list[str]:
    """The lines under the table."""
    s, e, outcome = planned.settings, planned.estimate, planned.outcome
    place = planned.session.records.line
    basis = "estimate" if e.last_usage_index is None else (
        f"usage {number(e.usage_tokens)} on line {place(planned.session.messages[e.last_usage_index].line)}"
        f" + {e.trailing_tokens:,} estimated after it")  # fmt: skip
    lines = [
        f"context  {number(e.tokens)} tokens ({basis}; estimator {s.estimator.name})",
        f"trigger  {trigger(planned)}: should_compact = {'yes' if planned.should_compact else 'no'}",
    ]
    if isinstance(outcome, NoCompaction):
        cause = TITLES[cause_of(outcome, planned.session.messages)]
        return [
            *lines,
            f"result   nothing to compact: {cause} ({outcome.sub or outcome.branch}); diag says more",
        ]
    return [*lines, *cut_figures(outcome, place)]


def trigger(planned: Planned) -> str:
    s = planned.settings
    if s.strategy == "segment":
        return f"half the window of {s.context_window:,} = {number(planned.trigger)}"
    return f"window {s.context_window:,} - reserve {s.reserve_tokens:,} = {number(planned.trigger)}"


def cut_figures(plan: CompactionPreparation, place: Callable[[int], int]) -> Iterator[str]:
    history, prefix = told(plan.messages_to_summarize), told(plan.turn_prefix_messages)
    begin = place(plan.turn_prefix_messages[0].line) if plan.turn_prefix_messages else None
    split = f", splits the turn that began on line {begin}" if plan.is_split_turn else ""
    yield f"cut      kept from line {place(plan.retained_tail[0].line)}{split}"
    yield f"removed  {plural(history, 'message')} summarised" + (
        f" + {prefix:,} of the turn's prefix" if prefix else ""
    )
    over = plan.tokens_kept - plan.settings.keep_recent_tokens
    note = f", above keep_recent ({plan.settings.keep_recent_tokens:,}) by {over:,}" if over > 0 else ""
    yield f"kept     {plural(told(plan.kept), 'message')}, about {plural(plan.tokens_kept, 'token')}{note}"
    reads, edits = compute_file_lists(plan.file_ops)
    yield f"files    {len(reads):,} read, {len(edits):,} modified"


def plan_json(planned: Planned, *, with_rows: bool | None = None) -> dict[str, Any]:
    found = {"version": VERSION, "path": planned.path, **figures(planned)}
    if with_rows or (with_rows is None and len(planned.session.messages) <= ROWS_IN_JSON):
        found["rows"] = [_row_json(row) for row in rows(planned)]
    return found


def _row_json(row: Row) -> dict[str, Any]:
    return {"line": row.line, "role": row.role, "what": row.what, "tokens": row.tokens, "running": row.running,
            "valid_cut": row.obstacle is None, "why_not": row.obstacle, "place": row.place,
            "cut": row.is_cut}  # fmt: skip


def would(outcome: CompactionPreparation | NoCompaction, place: Callable[[int], int]) -> dict[str, Any]:
    """What would be summarised; null where nothing would be."""
    plan = None if isinstance(outcome, NoCompaction) else outcome
    return {
        "first_kept_line": place(plan.retained_tail[0].line) if plan and plan.retained_tail else None,
        "summarize": told(plan.messages_to_summarize) if plan else 0,
        "prefix": told(plan.turn_prefix_messages) if plan else 0,
        "tokens_kept": plan.tokens_kept if plan else None,
    }
