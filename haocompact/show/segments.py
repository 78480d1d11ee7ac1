"""Segments and runs of the archive as tables and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from haocompact.show.text import VERSION, error_json, near, new_table, place, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from haocompact.archive import Run, Segment, Stats
    from haocompact.pipeline import Directory
    from haocompact.upkeep import Exported


def directory_table(found: Directory) -> RenderableType:
    from rich.text import Text as RichText

    table = new_table(("hash", "left"), ("messages", "right"), ("characters", "right"), ("created", "left"),
                   ("source", "left"), wrap="source")  # fmt: skip
    for s in found.segments:
        source = "in this transcript" if s.hash in found.in_log else place(near(s.source))
        numbers = (f"{s.messages:,}", f"{s.chars:,}", visible(s.created))  # a log may say anything
        table.add_row(RichText(visible(s.hash)), *numbers, RichText(source))
    for hash in found.missing:
        table.add_row(hash, "?", "?", "not in this archive", "")
    return table


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
    return f"{run.hash}  {run.created}  {run.input_size:,} bytes  {place(run.source)}"


def run_json(run: Run) -> dict[str, Any]:
    return {"version": VERSION, "hash": run.hash, "source": run.source, "format": run.format, "created": run.created,
            "bytes": run.input_size, "sha256": run.input_sha256}  # fmt: skip


def exported_json(one: Exported) -> dict[str, Any]:
    if one.error is not None:
        return error_json(one.error, one.run.source)
    return run_json(one.run) | {"result": "ok", "output": str(one.path)}


def directory_json(found: Directory) -> dict[str, Any]:
    segments = [_segment_json(s, s.hash in found.in_log) for s in found.segments]
    return {"version": VERSION, "path": found.path, "segments": segments, "missing": list(found.missing)}


def _segment_json(segment: Segment, in_log: bool) -> dict[str, Any]:
    return {"hash": segment.hash, "messages": segment.messages, "chars": segment.chars, "created": segment.created,
            "source": segment.source, "format": segment.format, "lines": segment.lines, "bytes": segment.size,
            "sha256": segment.sha256, "where": "log" if in_log else "archive"}  # fmt: skip
