"""Read and decide: the plan of one transcript, which every command starts from."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haocompact.compaction import (
    COMPACTION_SUMMARY,
    DEFAULT_COMPACTION_SETTINGS,
    CompactionPreparation,
    CompactionSettings,
    ContextEstimate,
    Message,
    NoCompaction,
    compute_file_lists,
    estimate_context_tokens,
    prepare_compaction,
    should_compact,
)
from haocompact.errors import (
    NoTranscript,
    TranscriptError,
)
from haocompact.files import (
    Source,
)
from haocompact.formats import FORMATS, detect
from haocompact.formats.session import (
    ReadOptions,
    Session,
)

if TYPE_CHECKING:
    from haocompact.summarize import Summarizer


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for; `archive` None is --no-archive, `log` None writes no log.

    `level`: of the archive's compression (None: its default). `archives`: those that are read, where they are several.

    `cooldown`: seconds since the last compaction of the same transcript (with `if_needed`). `lines`: a
    narrower range for the segment strategy. `append`: the client's own record behind the old bytes. `to`: the
    format to write instead of the transcript's own ("" for its own). `summarizer` None is the offline one.
    `prices`: of a million tokens, sent and received.
    """

    settings: CompactionSettings = DEFAULT_COMPACTION_SETTINGS
    format: str | None = None
    leaf: str | None = None
    branch: int | None = None
    summarizer: Summarizer | None = None
    on_failure: str = "degrade"
    keep_rules: bool = True
    lang: str = "en"
    archive: Path | None = None
    log: Path | None = None
    if_needed: bool = False
    cooldown: float = 0
    lines: tuple[int, int] | None = None
    allow_growth: bool = False
    append: bool = False
    level: int | None = None
    archives: tuple[Path, ...] = ()
    to: str = ""
    prices: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """What would happen to one transcript. `mixed`: formats that some lines belong to instead."""

    path: str
    session: Session
    outcome: CompactionPreparation | NoCompaction
    estimate: ContextEstimate
    settings: CompactionSettings
    mixed: tuple[str, ...] = ()

    @property
    def should_compact(self) -> bool:
        """Whether the context is past the trigger of the strategy."""
        if self.settings.strategy == "segment":
            from haocompact.segment import evaluate_threshold

            usage = None if self.estimate.last_usage_index is None else self.estimate.tokens
            threshold = evaluate_threshold(usage, 4 * self.estimate.tokens, self.settings.context_window)
            return self.settings.enabled and threshold is not None and threshold.fire
        return should_compact(self.estimate.tokens, self.settings)

    @property
    def trigger(self) -> float:
        """Tokens: window - reserve, or half the window for the segment strategy."""
        s = self.settings
        if s.strategy == "segment":
            from haocompact.segment import DEFAULT_SEGMENT_CONFIG

            return DEFAULT_SEGMENT_CONFIG.threshold_ratio * s.context_window
        return s.context_window - s.reserve_tokens

    @property
    def previous_summary(self) -> Message | None:
        first = self.session.messages[0] if self.session.messages else None
        return first if first is not None and first.kind == COMPACTION_SUMMARY else None


def load(source: Source, request: Request) -> tuple[Session, tuple[str, ...]]:
    """Records, format, active conversation. Raises TranscriptError with the path."""
    records = source.records
    try:
        name: str | None = request.format
        mixed: tuple[str, ...] = ()
        if name is None:
            if not len(records):
                raise NoTranscript("empty file")
            detected = detect(records)
            name, mixed = detected.name, detected.others
        options = ReadOptions(leaf=request.leaf, repair=request.settings.repair)
        session = FORMATS[name].read(records, options)
        if request.branch:
            session = FORMATS[name].read(records, replace(options, leaf=leaf_of(session, request.branch)))
        return session, mixed
    except TranscriptError as error:
        error.path = error.path or source.path
        raise


def conversations(source: Source, request: Request) -> list[Source]:
    """The transcripts in a file: itself, or each line of a format whose lines are conversations of their own."""
    found = own_lines(source, request)
    return [source] if found is None else [part for part in found if isinstance(part, Source)]


def own_lines(source: Source, request: Request) -> list[Source | bytes] | None:
    """The lines of such a file, those that are no conversation as they are; None for any other file."""
    records = source.records
    try:
        name = request.format or (detect(records).name if len(records) else "")
    except TranscriptError:
        return None
    lines = getattr(FORMATS.get(name), "conversations", None)
    if lines is None or len(records) < 2:
        return None
    own = set(lines(records))
    return [Source(f"{source.path}:{i + 1}", records.raw(i), source.stamp) if i in own else records.raw(i)
            for i in range(len(records))] if own else None  # fmt: skip


def leaf_of(session: Session, branch: int) -> str:
    """Id of the branch end with this number. Raises TranscriptError."""
    if not 0 < branch <= len(session.leaves):
        raise TranscriptError(f"there is no branch {branch}: {len(session.leaves) or 'no'} branch ends")
    return session.leaves[branch - 1][1]


def plan(source: Source, request: Request) -> Planned:
    """The decision of one transcript, for every command."""
    session, mixed = load(source, request)
    settings = _settings_for(session, request.settings)
    outcome = prepare(session.messages, settings, request.lines)
    estimate = estimate_context_tokens(session.messages, settings.estimator)
    return Planned(source.path, session, outcome, estimate, settings, mixed)


def prepare(messages: Sequence[Message], settings: CompactionSettings,
            lines: tuple[int, int] | None = None) -> CompactionPreparation | NoCompaction:  # fmt: skip
    """The one decision behind every command, by strategy."""
    if settings.strategy == "segment":
        from haocompact.segment import prepare_segment  # loaded by those that want it: most do not

        return prepare_segment(messages, settings, lines)
    return prepare_compaction(messages, settings)


def _settings_for(session: Session, settings: CompactionSettings) -> CompactionSettings:
    """The names that this client gives its file tools."""
    adapter = FORMATS[session.format]
    tools, keys = getattr(adapter, "FILE_TOOLS", None), getattr(adapter, "FILE_KEYS", settings.file_keys)
    return (
        replace(settings, file_tools=tuple(tools.items()), file_keys=keys)
        if tools and settings.repair
        else settings
    )


def figures(planned: Planned) -> dict[str, Any]:
    """What `plan --json` says of a transcript, and `compact --json` repeats (without version and path)."""
    outcome, estimate, settings, session = (
        planned.outcome,
        planned.estimate,
        planned.settings,
        planned.session,
    )
    plan = outcome if isinstance(outcome, CompactionPreparation) else None
    skip = outcome if isinstance(outcome, NoCompaction) else None
    reads, edits = compute_file_lists(plan.file_ops, repair=settings.repair) if plan else ([], [])
    return {
        "format": session.format,
        "session_id": session.session_id,
        "result": "ok" if plan else "none",
        "branch": skip.branch if skip else None,
        "sub": skip.sub if skip else None,
        "strategy": settings.strategy,
        "estimator": settings.estimator.name,
        "tokens_before": estimate.tokens,
        "usage_tokens": estimate.usage_tokens,
        "trailing_tokens": estimate.trailing_tokens,
        "basis": "estimate" if estimate.last_usage_index is None else "usage",
        "window": settings.context_window,
        "should_compact": planned.should_compact,
        "keep_recent_tokens": settings.keep_recent_tokens,
        "reserve_tokens": settings.reserve_tokens,
        "first_kept_line": session.records.line(plan.retained_tail[0].line) if plan else None,
        "turn_start_line": session.records.line(plan.turn_prefix_messages[0].line)
        if plan and plan.turn_prefix_messages
        else None,
        "is_split_turn": plan.is_split_turn if plan else False,
        "messages": sum(m.told and m.kind != COMPACTION_SUMMARY for m in session.messages),
        "summarize": _count(plan.messages_to_summarize) if plan else 0,
        "prefix": _count(plan.turn_prefix_messages) if plan else 0,
        "kept": _count(plan.kept if plan else session.messages),
        "tokens_kept": plan.tokens_kept if plan else None,
        "previous_summary": planned.previous_summary is not None,
        "read_files": reads,
        "modified_files": edits,
        "ends": session.ends,
        "leaves": [name for _, name in session.leaves],
        "opaque_lines": session.opaque_lines,
        "unknown_kinds": dict(session.unknown),
        "warnings": [{"line": w.line or None, "text": w.text} for w in session.warnings],
    }


def _count(messages: Iterable[Message]) -> int:
    return sum(m.told for m in messages)


def record_skip(skip: NoCompaction, path: str, request: Request) -> str | None:
    """Write the [COMPACT_NONE] line to the log; returns a warning when that is not possible."""
    if request.log is None:
        return None
    from haocompact.skiplog import append_log, log_line

    try:
        append_log(request.log, log_line(skip, path))
    except OSError as error:
        return f"the log can't be written: {request.log}: {error.strerror}"
    return None


def not_needed(planned: Planned, request: Request) -> NoCompaction | None:
    """--if-needed: below the trigger (of the strategy), switched off, or too soon after the last one."""
    settings, tokens = planned.settings, planned.estimate.tokens
    if not settings.enabled:
        return NoCompaction("disabled", None, {"tokens": tokens}, planned.estimate)
    if not planned.should_compact:
        return NoCompaction(
            "below_trigger", None, {"tokens": tokens, "trigger": planned.trigger}, planned.estimate
        )
    last = _last_run(planned.path, request)
    if last is not None and _cooling(last, request.cooldown):
        figures: dict[str, object] = {"seconds": int(time.time() - last), "cooldown": request.cooldown}
        return NoCompaction("cooldown", None, figures, planned.estimate)
    return None


def _cooling(last: float, seconds: float) -> bool:
    """Whether the last compaction (seconds since the epoch) is too young."""
    from haocompact.segment import SegmentConfig, in_cooldown

    return in_cooldown(last * 1000, time.time() * 1000, SegmentConfig(cooldown_ms=int(seconds * 1000)))


def as_needed(planned: Planned, request: Request) -> Planned:
    """The plan as --if-needed would have it."""
    skip = not_needed(planned, request)
    return planned if skip is None else replace(planned, outcome=skip)


def _last_run(path: str, request: Request) -> float | None:
    """When this transcript was last compacted (seconds since the epoch), by the archive's record."""
    if not request.cooldown or request.archive is None or not request.archive.exists():
        return None
    from haocompact.archive import Archive

    with Archive.open(request.archive) as archive:
        wanted = os.path.abspath(path)
        own = (r.created for r in archive.runs() if os.path.abspath(r.source) == wanted)
        newest = next(own, None)
    return datetime.fromisoformat(newest).timestamp() if newest else None


WARNINGS_SHOWN = 5  # of one kind; the rest is counted


def warnings_of(planned: Planned, *, everything: bool = False) -> list[str]:
    """One line a warning, with its place; more than five of one kind are counted in one line."""
    warned = planned.session.warnings
    opaque = [w for w in warned if w.opaque]
    hidden = set() if everything else set(opaque[WARNINGS_SHOWN:])
    lines = [f"{planned.path}:{w.line}: {w.text}" if w.line else f"{planned.path}: {w.text}"
             for w in warned if w not in hidden]  # fmt: skip
    if hidden:
        more = ", ".join(str(w.line) for w in opaque[WARNINGS_SHOWN : WARNINGS_SHOWN + 10])
        lines.append(f"{planned.path}: {len(hidden)} more lines that are kept as they are, not read ({more}"
                     f"{', ...' if len(hidden) > 10 else ''})")  # fmt: skip
    if planned.session.ends > 1:
        leaves = list(enumerate(planned.session.leaves, 1))
        more = "..., " if len(leaves) > WARNINGS_SHOWN else ""
        shown = more + ", ".join(f"{n}: {name} (line {line})" for n, (line, name) in leaves[-WARNINGS_SHOWN:])
        lines.append(f"{planned.path}: {planned.session.ends} branch ends: {shown}; the client's own choice is read "
                     "unless --branch N or --leaf ID names one")  # fmt: skip
    return lines
