"""Frozen results -> rich table or JSON. Text of a transcript is data: never markup, never control codes.

Nothing here shows message text: a row says what a message is (texts, calls, results), not what it says.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haocompact.archive import Run, Segment, Stats
from haocompact.batch import Totals, skip_cause
from haocompact.chunks import Ask, Report
from haocompact.compaction import (
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
from haocompact.diag import Diagnosis, LogEntry
from haocompact.errors import HaoError
from haocompact.pipeline import Directory, Done, Planned, figures
from haocompact.upkeep import Exported

if TYPE_CHECKING:
    from rich.console import RenderableType

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
    folded: list[Row] = []
    for row in all_rows:
        if folded and row.role not in ("user", "bash", "custom", "branch", "summary") and not row.is_cut:
            last = folded[-1]
            count = int(last.what.split(" ")[0]) + 1
            folded[-1] = Row(last.line, last.role, f"{count} messages", last.tokens + row.tokens, last.running,
                             last.obstacle, last.place, last.is_cut)  # fmt: skip
        else:
            folded.append(
                Row(
                    row.line,
                    row.role,
                    "1 messages",
                    row.tokens,
                    row.running,
                    row.obstacle,
                    row.place,
                    row.is_cut,
                )
            )
    return folded


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
    from rich import box
    from rich.table import Table
    from rich.text import Text as RichText

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, side in (("line", "right"), ("role", "left"), ("what", "left"), ("tokens", "right"),
                       ("running", "right"), ("cut", "left")):  # fmt: skip
        table.add_column(name, justify=side, overflow="ellipsis", no_wrap=name != "what")  # type: ignore[arg-type]
    found: Sequence[Row | int] = turn_rows(rows(planned)) if turns else _shown_rows(planned, everything)
    for item in _folded(found, everything):
        if isinstance(item, int):
            table.add_row("", "", f"... {item:,} more rows (--all shows them)", "", "", "", style="dim")
            continue
        if item.is_cut:
            table.add_row("", "", RichText("-- cut: kept from here on --", style="bold"), "", "", "")
        running = "" if item.running is None else f"{item.running:,}"
        style = "dim" if item.place in ("summarise", "prefix") else ""
        table.add_row(str(item.line or ""), RichText(visible(item.role)), RichText(item.what),
                      f"{item.tokens:,}", running,
                      RichText(_cut_cell(item)), style=style)  # fmt: skip
    return table


def _cut_cell(row: Row) -> str:
    where = {"prefix": " (turn prefix)", "summarise": "", "keep": "", "previous": ""}[row.place]
    return (row.obstacle if row.obstacle else "valid") + where


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


def plan_figures(planned: Planned) -> list[str]:
    """The lines under the table."""
    s, e, outcome = planned.settings, planned.estimate, planned.outcome
    place = planned.session.records.line
    basis = "estimate" if e.last_usage_index is None else (
        f"usage {_number(e.usage_tokens)} on line {place(planned.session.messages[e.last_usage_index].line)}"
        f" + {e.trailing_tokens:,} estimated after it")  # fmt: skip
    lines = [
        f"{visible(planned.path)}: {planned.session.format}, {sum(m.told for m in planned.session.messages)} messages",
        f"context  {_number(e.tokens)} tokens ({basis}; estimator {s.estimator.name})",
        f"trigger  {_trigger(planned)}: should_compact = {'yes' if planned.should_compact else 'no'}",
    ]
    if isinstance(outcome, NoCompaction):
        return [*lines, f"nothing to compact: {outcome.branch}" + (f", {outcome.sub}" if outcome.sub else "")]
    return [*lines, *_cut_figures(outcome, place)]


def _trigger(planned: Planned) -> str:
    s = planned.settings
    if s.strategy == "segment":
        return f"half the window of {s.context_window:,} = {_number(planned.trigger)}"
    return f"window {s.context_window:,} - reserve {s.reserve_tokens:,} = {_number(planned.trigger)}"


def _cut_figures(plan: CompactionPreparation, place: Callable[[int], int]) -> Iterator[str]:
    history, prefix = _told(plan.messages_to_summarize), _told(plan.turn_prefix_messages)
    begin = place(plan.turn_prefix_messages[0].line) if plan.turn_prefix_messages else None
    split = f", splits the turn that began on line {begin}" if plan.is_split_turn else ""
    yield f"cut      kept from line {place(plan.retained_tail[0].line)}{split}"
    yield f"removed  {history} messages summarised" + (f" + {prefix} of the turn's prefix" if prefix else "")
    over = plan.tokens_kept - plan.settings.keep_recent_tokens
    note = f", above keep_recent ({plan.settings.keep_recent_tokens:,}) by {over:,}" if over > 0 else ""
    yield f"kept     {_told(plan.kept)} messages, about {plan.tokens_kept:,} tokens{note}"
    reads, edits = compute_file_lists(plan.file_ops)
    yield f"files    {len(reads)} read, {len(edits)} modified"


def _told(messages: Iterable[Message]) -> int:
    return sum(m.told for m in messages)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def diag_text(planned: Planned, diagnosis: Diagnosis, line: str | None) -> list[str]:
    """The diagnosis in plain words: line, sentence, the heaviest messages, what would help."""
    lines = [] if line is None else [line]
    lines += plan_figures(planned)
    lines.append(diagnosis.explanation)
    if diagnosis.heaviest:
        place = planned.session.records.line
        heavy = ", ".join(
            f"line {place(n)} ({role}, {tokens:,} tokens)" for n, role, tokens in diagnosis.heaviest
        )
        lines.append(f"largest: {heavy}")
    lines += [f"suggestion: {s}" for s in diagnosis.suggestions]
    return lines


def log_table(entries: Sequence[LogEntry]) -> RenderableType:
    """Skips of a log, grouped by cause and file."""
    from rich import box
    from rich.table import Table
    from rich.text import Text as RichText

    groups: dict[tuple[str, str, str], list[LogEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.branch, entry.sub or "", entry.source or ""), []).append(entry)
    table = Table("branch", "sub", "source", "count", "first", "last", box=box.SIMPLE_HEAD, show_edge=False)
    for (branch, sub, source), found in sorted(groups.items(), key=lambda g: -len(g[1])):
        cells = (branch, sub, source, str(len(found)), found[0].time, found[-1].time)
        table.add_row(*(RichText(visible(cell)) for cell in cells))
    return table


def near(path: str) -> str:
    """A path below the current folder as one would type it there."""
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here) or path


def directory_table(found: Directory) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text as RichText

    table = Table("hash", "messages", "characters", "created", "source", box=box.SIMPLE_HEAD, show_edge=False)
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


def diag_json(planned: Planned, diagnosis: Diagnosis) -> dict[str, Any]:
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
        "tokens_before": planned.estimate.tokens,
        "should_compact": planned.should_compact,
        "heaviest": [
            {"line": planned.session.records.line(n), "role": role, "tokens": t}
            for n, role, t in diagnosis.heaviest
        ],
        "explanation": diagnosis.explanation,
        "suggestions": list(diagnosis.suggestions),
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
    sent, received = getattr(error, "tokens", (0, 0))
    usage = {"usage": {"input_tokens": sent, "output_tokens": received}} if sent or received else {}
    return {"version": VERSION, "path": error.path or path, "result": "error", "code": error.code,
            "message": str(error.args[0]), "line": error.line, **usage}  # fmt: skip


def directory_json(found: Directory) -> dict[str, Any]:
    segments = [_segment_json(s, s.hash in found.in_log) for s in found.segments]
    return {"version": VERSION, "path": found.path, "segments": segments, "missing": list(found.missing)}


def _segment_json(segment: Segment, in_log: bool) -> dict[str, Any]:
    return {"hash": segment.hash, "messages": segment.messages, "chars": segment.chars, "created": segment.created,
            "source": segment.source, "format": segment.format, "lines": segment.lines, "bytes": segment.size,
            "sha256": segment.sha256, "where": "log" if in_log else "archive"}  # fmt: skip
