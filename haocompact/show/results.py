"""What became of transcripts: lines, the table of a batch, JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from haocompact.batch import Totals, skip_cause
from haocompact.show.text import VERSION, error_json, format_line, place, printable, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from haocompact.chunks import Ask, Report
    from haocompact.pipeline import Done


def done_line(done: Done) -> str:
    """One line about one transcript of a batch."""
    path = place(done.path)
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


def detail_lines(done: Done, named: str | None) -> list[str]:
    """What --verbose adds: format, archive, and what was written."""
    if done.error is not None or not done.figures:
        return []
    lines = [format_line(done.path, done.figures["format"], named)]
    if done.hash and done.archive:
        lines.append(f"archive: {visible(done.archive)}, {done.hash}")
    if done.sha256 and done.output:
        lines.append(
            f"written: {place(done.output) if done.output != '-' else '(stdout)'}, sha256 {done.sha256}"
        )
    return lines


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
        table.add_row(RichText(place(path)), result, *sizes, RichText(visible(what)))
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
    if "in_use" in totals.skipped:
        yield "in_use: changed a short while ago (--min-age), or held by its client or another process"
    if totals.compacted:
        saved = totals.bytes_before - totals.bytes_after
        yield (f"{totals.bytes_before:,} -> {totals.bytes_after:,} bytes, "
               f"{saved / max(1, totals.bytes_before):.0%} less")  # fmt: skip


def totals_json(totals: Totals) -> dict[str, Any]:
    return {"version": VERSION, "result": "totals", "files": totals.files, "compacted": totals.compacted,
            "skipped": dict(sorted(totals.skipped.items())), "failed": totals.failed, "degraded": totals.degraded,
            "bytes_before": totals.bytes_before, "bytes_after": totals.bytes_after}  # fmt: skip


def asks_text(done: Done, prompts: bool) -> list[str]:
    """The requests of a dry run, a line each; with `prompts`, each in full."""
    asks = done.asks or ()
    sent = sum(a.input_tokens for a in asks if not a.answered)
    received = sum(a.max_tokens for a in asks if not a.answered)
    many = f"{len(asks)} request{'s' * (len(asks) != 1)}"
    cost = "" if done.cost is None else f", cost at most {done.cost:.6g}"
    whom = visible(done.report.asked if done.report and done.report.asked else done.summarizer)
    lines = [f"{place(done.path)}: {many} to {whom}, about {sent:,} tokens in, "
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
    return (f"{place(done.path)}: {report.requests} requests{reused}, {about}{report.input_tokens:,} tokens in, "
            f"{report.output_tokens:,} out{cost}")  # fmt: skip


def redacted_line(done: Done) -> str | None:
    """How many secrets were masked in what was sent, by kind; None when there was none."""
    found = done.report.redacted if done.report else None
    if not found:
        return None
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.items())
    return f"{place(done.path)}: masked in what is sent: {kinds}"


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
