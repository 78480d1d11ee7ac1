"""The log of skips in words and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from haocompact.diag import (
    TITLES,
    known_cause,
    plural,
)
from haocompact.show.text import VERSION, place, visible
from haocompact.skiplog import Group, Log, LogEntry, grouped

if TYPE_CHECKING:
    pass


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
            f"{g.count:7,}  {_when(g.first)}  {_when(g.last)}  {place(g.source) if g.source else '-'}"
            for g in found
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


def _source(path: str | None) -> str:
    """A dash where the line names none: Haocode's do not."""
    return place(path) if path else "-"


def entry_line(entry: LogEntry) -> str:
    cause = f"{entry.branch}{f' {entry.sub}' if entry.sub else ''}"
    return f"{_when(entry)}  {cause}  {_source(entry.source)}"


def entry_json(entry: LogEntry) -> dict[str, Any]:
    return {
        "version": VERSION,
        "time": _iso(entry),
        "branch": entry.branch,
        "sub": entry.sub,
        "source": entry.source,
    }
