"""Frozen results -> rich table or JSON. Text of a transcript is data: never markup, never control codes.

Nothing here shows message text: a row says what a message is (texts, calls, results), not what it says.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haocompact.archive import Run, Segment, Stats
from haocompact.batch import Totals, skip_cause
from haocompact.chunks import Ask, Report
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
    LINES_SHOWN,
    RIGHT,
    TITLES,
    Diagnosis,
    Lines,
    Walk,
    cause_of,
    known_cause,
    plural,
    told,
)
from haocompact.errors import HaoError
from haocompact.pipeline import Directory, Done, Planned, figures
from haocompact.skiplog import Group, Log, LogEntry, grouped
from haocompact.upkeep import Exported

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

VERSION = 1  # of the JSON contract
ROWS_IN_JSON = 2000
FOLD_ENDS, FOLD_CUT = 6, 8  # rows shown at both ends and on each side of the cut

_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """Text that can't move a terminal's cursor, set its title or clipboard, or reorder its letters."""
    return _UNSAFE.sub(lambda m: m.group().encode("unicode_escape").decode("ascii"), text)


def printable(text: str) -> str:
    """As `visible`, but lines stay lines."""
    return "\n".join(visible(line.replace("\t", "    ")) for line in text.split("\n"))


# ------------------------------------------------------------------------------------------ rows
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


# ---------------------------------------------------------------------------------------- tables
def plan_table(planned: Planned, *, turns: bool = False, everything: bool = False) -> RenderableType:
    """One row a message (or turn), with a line wherever another fate begins: summarised, turn prefix, kept."""
    from rich.text import Text as RichText

    table = _table(("line", "right"), ("role", "left"), ("what", "left"), ("tokens", "right"), ("running", "right"),
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


def _table(*columns: tuple[str, str], wrap: str = "") -> Table:
    """A table whose figures and words are never cut short; only the column `wrap` gives way to a narrow terminal."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name, side in columns:
        table.add_column(name, justify=side, overflow="fold", no_wrap=name != wrap)  # type: ignore[arg-type]
    return table


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
    return f"{visible(planned.path)}: {planned.session.format}, {plural(count, 'message')}"


def plan_figures(planned: Planned) -> list[str]:
    """The lines under the table."""
    s, e, outcome = planned.settings, planned.estimate, planned.outcome
    place = planned.session.records.line
    basis = "estimate" if e.last_usage_index is None else (
        f"usage {_number(e.usage_tokens)} on line {place(planned.session.messages[e.last_usage_index].line)}"
        f" + {e.trailing_tokens:,} estimated after it")  # fmt: skip
    lines = [
        f"context  {_number(e.tokens)} tokens ({basis}; estimator {s.estimator.name})",
        f"trigger  {_trigger(planned)}: should_compact = {'yes' if planned.should_compact else 'no'}",
    ]
    if isinstance(outcome, NoCompaction):
        cause = TITLES[cause_of(outcome, planned.session.messages)]
        return [
            *lines,
            f"result   nothing to compact: {cause} ({outcome.sub or outcome.branch}); diag says more",
        ]
    return [*lines, *_cut_figures(outcome, place)]


def _trigger(planned: Planned) -> str:
    s = planned.settings
    if s.strategy == "segment":
        return f"half the window of {s.context_window:,} = {_number(planned.trigger)}"
    return f"window {s.context_window:,} - reserve {s.reserve_tokens:,} = {_number(planned.trigger)}"


def _cut_figures(plan: CompactionPreparation, place: Callable[[int], int]) -> Iterator[str]:
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


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}".removesuffix(".0")


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
        lines += _cut_figures(outcome, planned.session.records.line)
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
        yield f"context  {_number(a.tokens)} tokens, estimated for {counted}: no usage report counts"
    else:
        yield (f"context  {_number(a.tokens)} tokens: usage {_number(a.usage_tokens)} on line {a.usage_line} + "
               f"{a.trailing_tokens:,} estimated for {plural(a.estimated, 'message')} after it")  # fmt: skip
    for group in a.rejected:
        reports = plural(group.count, "usage report")
        yield f"         not counted: {reports} ({visible(group.what)}), {_places_of(group)}"


def _places_of(group: Lines) -> str:
    words = ", ".join(map(str, group.lines)) + (", ..." if group.count > len(group.lines) else "")
    return f"line{'s' * (group.count != 1)} {words}"


def _trigger_sum(planned: Planned) -> str:
    over = planned.estimate.tokens - planned.trigger
    verdict = f"yes, by {_number(over)}" if planned.should_compact else f"no, {_number(-over)} left"
    return f"{_number(planned.estimate.tokens)} > {_trigger(planned)}? {verdict}"


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


def log_text(log: Log) -> list[str]:
    """Skips of a log by cause and transcript, the most frequent first, then what else the log holds."""
    groups: dict[tuple[str, str | None], list[Group]] = {}
    for group in grouped(log.entries):
        groups.setdefault((group.branch, group.sub), []).append(group)
    lines: list[str] = []
    for (branch, sub), found in sorted(groups.items(), key=lambda item: -sum(g.count for g in item[1])):
        words = TITLES.get(known_cause(sub or branch), "")
        lines.append(f"{' '.join(filter(None, (branch, sub)))}{f': {words}' if words else ''}")
        lines += [
            f"{g.count:7,}  {_when(g.first)}  {_when(g.last)}  {visible(g.source or '-')}" for g in found
        ]
        lines.append("")
    if lines:
        lines.insert(0, f"{'count':>7}  {'first':19}  {'last':19}  transcript")
    return [*lines, log_totals(log)]


def _when(entry: LogEntry) -> str:
    """To the second, local time."""
    return f"{entry.moment.astimezone():%Y-%m-%d %H:%M:%S}" if entry.moment else f"{entry.time:19}"


def log_totals(log: Log) -> str:
    others = [f"{plural(log.broken, 'broken line')}"] * bool(log.broken)
    others += [f"{plural(log.foreign, 'other line')}"] * bool(log.foreign)
    return ", ".join([f"{visible(log.path)}: {plural(len(log.entries), 'skip')}", *others])


def log_json(log: Log) -> dict[str, Any]:
    groups = [{"branch": g.branch, "sub": g.sub, "source": g.source, "count": g.count, "first": _iso(g.first),
               "last": _iso(g.last)} for g in grouped(log.entries)]  # fmt: skip
    return {"version": VERSION, "path": log.path, "skips": len(log.entries), "broken_lines": log.broken,
            "other_lines": log.foreign, "groups": groups}  # fmt: skip


def _iso(entry: LogEntry) -> str:
    return entry.moment.isoformat(timespec="milliseconds") if entry.moment else entry.time


def entry_line(entry: LogEntry) -> str:
    cause = f"{entry.branch}{f' {entry.sub}' if entry.sub else ''}"
    return f"{_when(entry)}  {cause}  {visible(entry.source or '-')}"


def entry_json(entry: LogEntry) -> dict[str, Any]:
    return {
        "version": VERSION,
        "time": _iso(entry),
        "branch": entry.branch,
        "sub": entry.sub,
        "source": entry.source,
    }


Setting = tuple[str, object, str, str]
"""Option, value, source (option, environment, settings file, default), and the variable it comes from."""


def settings_text(found: Sequence[Setting], file: Path) -> list[str]:
    rows = [
        (name, source + (f" {variable}" if variable else ""), value)
        for name, value, source, variable in found
    ]
    names, sources = max(len(name) for name, _, _ in rows), max(len(source) for _, source, _ in rows)
    lines = [
        f"{name:<{names}}  {source:<{sources}}  {visible(_setting_value(value))}"
        for name, source, value in rows
    ]
    return [*lines, f"settings file: {visible(str(file))}{'' if file.is_file() else ', which is not there'}"]


def _setting_value(value: object) -> str:
    return (
        "-" if value is None else {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    )


def settings_json(found: Sequence[Setting], file: Path) -> dict[str, Any]:
    def plain(value: object) -> object:
        return value if value is None or isinstance(value, (int, float)) else str(value)

    settings = {name[2:]: {"value": plain(value), "source": source} for name, value, source, _ in found}
    return {"version": VERSION, "settings_file": str(file), "settings": settings}


def near(path: str) -> str:
    """A path below the current folder as one would type it there."""
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here) or path


def directory_table(found: Directory) -> RenderableType:
    from rich.text import Text as RichText

    table = _table(("hash", "left"), ("messages", "right"), ("characters", "right"), ("created", "left"),
                   ("source", "left"), wrap="source")  # fmt: skip
    for s in found.segments:
        source = "in this transcript" if s.hash in found.in_log else visible(near(s.source))
        numbers = (f"{s.messages:,}", f"{s.chars:,}", visible(s.created))  # a log may say anything
        table.add_row(RichText(visible(s.hash)), *numbers, RichText(source))
    for hash in found.missing:
        table.add_row(hash, "?", "?", "not in this archive", "")
    return table


def done_line(done: Done) -> str:
    """One line about one transcript of a batch."""
    path = visible(done.path)
    if done.error is not None:
        return f"{path}: {visible(str(done.error))}"
    if done.skip is not None:
        return f"{path}: nothing to compact ({done.skip.sub or done.skip.branch})"
    if done.left is not None:
        return f"{path}: left alone ({visible(done.message or done.left)})"
    gone = done.figures["summarize"] + done.figures["prefix"]
    return (f"{path}: {gone:,} messages -> 1 summary, {done.figures['kept']:,} kept, "
            f"{done.bytes_before:,} -> {done.bytes_after:,} bytes"
            + (f", <<ccr:{done.hash}>>" if done.hash else ""))  # fmt: skip


# ----------------------------------------------------------------------------------------- batch
COUNTED_ONLY = {"unchanged", "no_transcript", "only_read", "too_young", "symlink", "compressed"}
ROWS_SHOWN = 200  # of a batch


@dataclass(slots=True)
class BatchReport:
    """A batch in figures: one row a file that was compacted, failed or skipped for a reason worth a row."""

    totals: Totals = field(default_factory=Totals)
    rows: list[tuple[str, str, int, int, str]] = field(default_factory=list)

    def add(self, done: Done) -> None:
        self.totals.add(done)
        cause = skip_cause(done)
        if done.error is not None:
            self.rows.append(
                (done.path, "failed", done.bytes_before, done.bytes_after, str(done.error.args[0]))
            )
        elif cause is None:
            result = "degraded" if done.degraded else "compacted"
            self.rows.append((done.path, result, done.bytes_before, done.bytes_after, done.hash))
        elif cause not in COUNTED_ONLY:
            self.rows.append((done.path, "skipped", done.bytes_before, done.bytes_after, cause))


def batch_table(report: BatchReport) -> RenderableType:
    """Each file's before, after, and hash or cause; of many the failures and those that shrank most."""
    from rich import box
    from rich.table import Table
    from rich.text import Text as RichText

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("file", overflow="fold")
    table.add_column("result", no_wrap=True)
    table.add_column("before", justify="right", no_wrap=True)
    table.add_column("after", justify="right", no_wrap=True)
    table.add_column("hash or cause", overflow="fold", min_width=16)
    shown = report.rows
    if len(shown) > ROWS_SHOWN:
        weight = {id(row): (row[1] == "failed", row[2] - row[3]) for row in shown}
        shown = sorted(shown, key=lambda row: weight[id(row)], reverse=True)[:ROWS_SHOWN]
    for path, result, before, after, what in shown:
        sizes = ("", "") if result == "failed" else (f"{before:,}", f"{after:,}")
        table.add_row(RichText(visible(path)), result, *sizes, RichText(visible(what)))
    if len(shown) < len(report.rows):
        table.add_row(f"... {len(report.rows) - len(shown):,} more (--json lists them all)")
    return table


def totals_text(totals: Totals, *, dry_run: bool = False) -> Iterator[str]:
    """The lines under the table."""
    causes = ", ".join(f"{count:,} {cause}" for cause, count in sorted(totals.skipped.items()))
    skipped = sum(totals.skipped.values())
    yield (f"{totals.compacted:,} {'would be ' * dry_run}compacted, {skipped:,} skipped"
           + (f" ({causes})" if causes else "") + f", {totals.failed:,} failed"
           + (f"; {totals.degraded:,} of them with an excerpt for a summary" if totals.degraded else ""))  # fmt: skip
    if totals.compacted:
        saved = totals.bytes_before - totals.bytes_after
        yield (f"{totals.bytes_before:,} -> {totals.bytes_after:,} bytes, "
               f"{saved / max(1, totals.bytes_before):.0%} less")  # fmt: skip


def totals_json(totals: Totals) -> dict[str, Any]:
    return {"version": VERSION, "result": "totals", "files": totals.files, "compacted": totals.compacted,
            "skipped": dict(sorted(totals.skipped.items())), "failed": totals.failed, "degraded": totals.degraded,
            "bytes_before": totals.bytes_before, "bytes_after": totals.bytes_after}  # fmt: skip


# --------------------------------------------------------------------------------------- archive
def stats_text(path: Path, stats: Stats) -> list[str]:
    share = f" ({stats.stored_bytes / stats.raw_bytes:.1%})" if stats.raw_bytes else ""
    return [
        f"archive    {visible(str(path))}",
        f"originals  {stats.runs:,}, {stats.raw_bytes:,} bytes",
        f"segments   {stats.segments:,}",
        f"stored in  {stats.stored_bytes:,} bytes{share}",
        f"archived   {stats.oldest} to {stats.newest}" if stats.oldest else "archived   nothing yet",
    ]


def stats_json(path: Path, stats: Stats) -> dict[str, Any]:
    return {"version": VERSION, "archive": str(path), "segments": stats.segments, "originals": stats.runs,
            "raw_bytes": stats.raw_bytes, "stored_bytes": stats.stored_bytes, "oldest": stats.oldest,
            "newest": stats.newest}  # fmt: skip


def run_line(run: Run) -> str:
    return f"{run.hash}  {run.created}  {run.input_size:,} bytes  {visible(run.source)}"


def run_json(run: Run) -> dict[str, Any]:
    return {"version": VERSION, "hash": run.hash, "source": run.source, "format": run.format, "created": run.created,
            "bytes": run.input_size, "sha256": run.input_sha256}  # fmt: skip


def exported_json(one: Exported) -> dict[str, Any]:
    if one.error is not None:
        return error_json(one.error, one.run.source)
    return run_json(one.run) | {"result": "ok", "output": str(one.path)}


def asks_text(done: Done, prompts: bool) -> list[str]:
    """The requests of a dry run, a line each; with `prompts`, each in full."""
    asks = done.asks or ()
    sent = sum(a.input_tokens for a in asks if not a.answered)
    received = sum(a.max_tokens for a in asks if not a.answered)
    many = f"{len(asks)} request{'s' * (len(asks) != 1)}"
    cost = "" if done.cost is None else f", cost at most {done.cost:.6g}"
    whom = visible(done.report.asked if done.report and done.report.asked else done.summarizer)
    lines = [f"{visible(done.path)}: {many} to {whom}, about {sent:,} tokens in, "
             + (f"at most {received:,} out" if received else "no limit on the output") + cost]  # fmt: skip
    for ask in asks:
        limit = f"{ask.max_tokens:,}" if ask.max_tokens else "no limit"
        free = ", answered before" if ask.answered else ""
        lines.append(f"  {ask.name}: about {ask.input_tokens:,} tokens in, {limit} out{free}")
        if prompts:
            lines += ["--- system prompt", printable(ask.system), "--- prompt", printable(ask.prompt), "---"]
    return lines


def spent_line(done: Done) -> str | None:
    """What a model or program took, in one line; None when none was asked."""
    report = done.report
    if report is None or done.asks is not None or not report.spent:
        return None
    about = "about " if report.estimated else ""
    reused = f", {report.reused} answered before" if report.reused else ""
    cost = "" if done.cost is None else f", cost {done.cost:.6g}"
    return (f"{visible(done.path)}: {report.requests} requests{reused}, {about}{report.input_tokens:,} tokens in, "
            f"{report.output_tokens:,} out{cost}")  # fmt: skip


def redacted_line(done: Done) -> str | None:
    """How many secrets were masked in what was sent, by kind; None when there was none."""
    found = done.report.redacted if done.report else None
    if not found:
        return None
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.items())
    return f"{visible(done.path)}: masked in what is sent: {kinds}"


# ------------------------------------------------------------------------------------------ JSON
def dumps(obj: dict[str, Any]) -> str:
    """One line; what `visible` escapes is escaped here, too, so that the line can be shown on a terminal."""
    text = json.dumps(obj, ensure_ascii=False, separators=(", ", ": "))
    return _UNSAFE.sub(lambda m: f"\\u{ord(m.group()):04x}", text)


def plan_json(planned: Planned, *, with_rows: bool | None = None) -> dict[str, Any]:
    found = {"version": VERSION, "path": planned.path, **figures(planned)}
    if with_rows or (with_rows is None and len(planned.session.messages) <= ROWS_IN_JSON):
        found["rows"] = [_row_json(row) for row in rows(planned)]
    return found


def _row_json(row: Row) -> dict[str, Any]:
    return {"line": row.line, "role": row.role, "what": row.what, "tokens": row.tokens, "running": row.running,
            "valid_cut": row.obstacle is None, "why_not": row.obstacle, "place": row.place,
            "cut": row.is_cut}  # fmt: skip


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
        **_would(outcome, planned.session.records.line),
        "heaviest": [{"line": n, "role": role, "tokens": t} for n, role, t in found.heaviest],
    }


def _would(outcome: CompactionPreparation | NoCompaction, place: Callable[[int], int]) -> dict[str, Any]:
    """What would be summarised; null where nothing would be."""
    plan = None if isinstance(outcome, NoCompaction) else outcome
    return {
        "first_kept_line": place(plan.retained_tail[0].line) if plan and plan.retained_tail else None,
        "summarize": told(plan.messages_to_summarize) if plan else 0,
        "prefix": told(plan.turn_prefix_messages) if plan else 0,
        "tokens_kept": plan.tokens_kept if plan else None,
    }


def done_json(done: Done, prompts: bool = False) -> dict[str, Any]:
    if done.error is not None:
        return error_json(done.error, done.path)
    if done.left is not None:
        return {"version": VERSION, "path": done.path, "result": "none", "branch": done.left, "sub": None,
                "message": done.message, "bytes_before": done.bytes_before,
                "bytes_after": done.bytes_after}  # fmt: skip
    asks = {} if done.asks is None else {"requests": [_ask_json(ask, prompts) for ask in done.asks]}
    made = done.skip is None and done.asks is None
    return {
        "version": VERSION,
        "path": done.path,
        **done.figures,
        "output": done.output,
        "archive": done.archive,
        "hash": done.hash or None,
        "summarizer": done.summarizer or None,
        "asked": (done.report.asked or None) if done.report else None,
        "degraded": done.degraded is not None,
        "degraded_reason": done.degraded,
        "tokens_after": done.tokens_after if made else None,
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
        "usage": _usage_json(done.report) if done.report and done.asks is None else None,
        "cost": done.cost,
        "redacted": done.report.redacted if done.report else None,
        **asks,
    }


def _ask_json(ask: Ask, prompts: bool) -> dict[str, Any]:
    texts = {"system": ask.system, "prompt": ask.prompt} if prompts else {}
    return {"name": ask.name, "input_tokens": ask.input_tokens, "max_tokens": ask.max_tokens or None,
            "answered": ask.answered, **texts}  # fmt: skip


def _usage_json(report: Report) -> dict[str, Any]:
    return {"requests": report.requests, "reused": report.reused, "input_tokens": report.input_tokens,
            "output_tokens": report.output_tokens, "estimated": report.estimated}  # fmt: skip


def error_json(error: HaoError, path: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"version": VERSION, "path": error.path or path, "result": "error"}
    found |= {"code": error.code, "message": str(error.args[0]), "line": error.line}
    sent, received = getattr(error, "tokens", (0, 0))
    if sent or received:
        found["usage"] = {"input_tokens": sent, "output_tokens": received}
    if error.why is not None:
        cause, explanation, suggestion = error.why
        found |= {"cause": cause, "explanation": explanation, "suggestions": [suggestion]}
    return found


def directory_json(found: Directory) -> dict[str, Any]:
    segments = [_segment_json(s, s.hash in found.in_log) for s in found.segments]
    return {"version": VERSION, "path": found.path, "segments": segments, "missing": list(found.missing)}


def _segment_json(segment: Segment, in_log: bool) -> dict[str, Any]:
    return {"hash": segment.hash, "messages": segment.messages, "chars": segment.chars, "created": segment.created,
            "source": segment.source, "format": segment.format, "lines": segment.lines, "bytes": segment.size,
            "sha256": segment.sha256, "where": "log" if in_log else "archive"}  # fmt: skip
