"""One function a command; the only place that knows the order of things.

The order of a compaction is its safety argument:

    read -> plan -> summarise -> rebuild -> re-read and compare -> archive, commit, read back
    -> write beside the original, fsync -> check that the original has not changed -> rename -> fsync the folder

A kill before the rename leaves the original; after it the result is there, and what was removed is in the
archive either way.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

from haocompact.archive import DEFAULT_LEVEL, Archive, Archives, Damage, Run, Segment
from haocompact.ccr import CcrEntry, parse_ccr_section, render_message, window, with_ccr_section
from haocompact.chunks import Ask, Report
from haocompact.compaction import (
    COMPACTION_SUMMARY,
    DEFAULT_COMPACTION_SETTINGS,
    CompactionPreparation,
    CompactionSettings,
    ContextEstimate,
    Message,
    NoCompaction,
    Text,
    compute_file_lists,
    estimate_context_tokens,
    prepare_compaction,
    should_compact,
)
from haocompact.convert import texts_lost, to_openai
from haocompact.diag import RIGHT, Diagnosis, attempt, diagnose, plural, told, with_lines
from haocompact.errors import (
    ArchivedElsewhere,
    ArchiveError,
    DamagedArchive,
    HaoError,
    HardLinked,
    NotInPlace,
    NoTranscript,
    OnlyRead,
    SourceBusy,
    TranscriptError,
    UnknownHash,
    UsageError,
    WriteError,
)
from haocompact.files import (
    Source,
    changed_lately,
    client_at_work,
    locked,
    open_source,
    sha256_of,
    write_error,
    write_file,
)
from haocompact.formats import FORMATS, WRITABLE, detect
from haocompact.formats.session import (
    NO_MESSAGE,
    Checkpoint,
    Format,
    Piece,
    ReadOptions,
    Session,
    WritableFormat,
    removed,
)
from haocompact.logged import Logged, logged_segments
from haocompact.logged import messages as logged_messages
from haocompact.records import Data, Extended, Record, Records, chunks_of, read
from haocompact.segment import (
    DEFAULT_SEGMENT_CONFIG,
    SegmentConfig,
    evaluate_threshold,
    in_cooldown,
    prepare_segment,
)
from haocompact.skiplog import append_log, log_line
from haocompact.summarize import (
    Extract,
    Prompted,
    Summarizer,
    Summary,
    compact_context,
    summary_text,
)

OFFLINE = Extract()


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for; `archive` None is --no-archive, `log` None writes no log.

    `level`: of the archive's compression. `archives`: those that are read, where they are several.

    `cooldown`: seconds since the last compaction of the same transcript (with `if_needed`). `lines`: a
    narrower range for the segment strategy. `append`: the client's own record behind the old bytes. `to`: the
    format to write instead of the transcript's own ("" for its own). `prices`: of a million tokens, sent and
    received.
    """

    settings: CompactionSettings = DEFAULT_COMPACTION_SETTINGS
    format: str | None = None
    leaf: str | None = None
    branch: int | None = None
    summarizer: Summarizer = OFFLINE
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
    level: int = DEFAULT_LEVEL
    archives: tuple[Path, ...] = ()
    to: str = ""
    prices: tuple[float, float] | None = None


# ------------------------------------------------------------------------------------------ plan
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
            usage = None if self.estimate.last_usage_index is None else self.estimate.tokens
            threshold = evaluate_threshold(usage, 4 * self.estimate.tokens, self.settings.context_window)
            return self.settings.enabled and threshold is not None and threshold.fire
        return should_compact(self.estimate.tokens, self.settings)

    @property
    def trigger(self) -> float:
        """Tokens: window - reserve, or half the window for the segment strategy."""
        s = self.settings
        if s.strategy == "segment":
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
            session = FORMATS[name].read(records, replace(options, leaf=_leaf(session, request.branch)))
        return session, mixed
    except TranscriptError as error:
        error.path = error.path or source.path
        raise


def conversations(source: Source, request: Request) -> list[Source]:
    """The transcripts in a file: itself, or each line of a format whose lines are conversations of their own."""
    found = _own_lines(source, request)
    return [source] if found is None else [part for part in found if isinstance(part, Source)]


def _own_lines(source: Source, request: Request) -> list[Source | bytes] | None:
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


def _leaf(session: Session, branch: int) -> str:
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


def explain(planned: Planned) -> Diagnosis:
    """Why it is as it is; a suggestion is tried with the offline summary before it is made."""
    session = planned.session
    found = diagnose(session.messages, planned.settings, planned.outcome, partial(_gains, planned.settings))
    found = with_lines(found, session.records.line)
    if found.cause == "empty" and len(session.records):
        lines = plural(len(session.records), "line")
        found = replace(
            found, cause="header_only", explanation=f"{lines} of {session.format} and no message."
        )
    return _other_branch(planned, found) if session.ends > 1 else found


def _gains(settings: CompactionSettings, trial: CompactionPreparation) -> bool:
    return _offline_loss(trial, settings) is None


def _offline_loss(trial: CompactionPreparation, settings: CompactionSettings) -> NoCompaction | None:
    """What `compact` would say of this plan with the offline summary."""
    request = Request(settings=settings)
    summary = Summary(OFFLINE.summarize(trial), OFFLINE.name)
    text = _full_summary(trial, summary, request, CcrEntry("0" * 16, len(trial.removed), 1_000_000))
    return _no_gain(trial, text, settings, request)


def as_compacted(planned: Planned) -> Planned:
    """The plan as `compact` would have it with the offline summary, which may gain nothing."""
    outcome = planned.outcome
    loss = None if isinstance(outcome, NoCompaction) else _offline_loss(outcome, planned.settings)
    return planned if loss is None else replace(planned, outcome=replace(loss, cut=outcome.cut))


BRANCHES_TRIED = 5


def _other_branch(planned: Planned, found: Diagnosis) -> Diagnosis:
    """Whether what is missed stands on another branch of the file: the newest ends are read, and tried."""
    if found.cause not in _SHORT:
        return found
    session, settings = planned.session, planned.settings
    active = session.messages[-1].line if session.messages else 0
    for number in range(session.ends, max(session.ends - BRANCHES_TRIED, 0), -1):
        options = ReadOptions(leaf=_leaf(session, number), repair=settings.repair)
        try:
            messages = FORMATS[session.format].read(session.records, options).messages
        except TranscriptError:  # that branch can't be read: no help
            continue
        plan = attempt(messages, settings, partial(_gains, settings)) if messages else None
        if plan is not None and messages[-1].line != active:
            text = (f"{found.explanation} But that is only the active branch: branch {number}, which ends on line "
                    f"{messages[-1].line}, has {plural(told(messages), 'message')}.")  # fmt: skip
            helps = f"--branch {number}: {plural(told(plan.removed), 'message')} would be summarised"
            return replace(
                found, cause="other_branch", explanation=text, suggestions=(helps, *found.suggestions)
            )
    return found


_SHORT = ("below_keep_recent", "pinned_by_first_message", "tail_exceeds_keep_recent", "no_segment", "empty",
          "header_only", "tail_is_summary", "only_summary", "no_valid_cut_points")  # fmt: skip


OTHER_FORMAT = f"--format NAME when you know it: {', '.join(FORMATS)}"


def explain_error(error: HaoError, source: Source | None) -> tuple[str, str, str]:
    """(cause, explanation, suggestion) of a transcript that can't be planned."""
    records = source.records if source is not None else None
    if records is None:
        return "unreadable", f"It can't be opened: {error.args[0]}.", "check the path"
    if not any(records.raw(i).strip() for i in range(len(records))):
        return "empty", "The file holds nothing at all.", RIGHT
    good = sum(isinstance(r.obj, dict) for r in records)
    if not good:
        text = f"None of its {plural(len(records), 'line')} is a JSON object: this is no JSONL transcript."
        return "unreadable", text, "name a transcript (one JSON object a line)"
    with contextlib.suppress(TranscriptError):
        name = detect(records).name
        if not str(error.args[0]).startswith(NO_MESSAGE):
            return "unreadable", f"It looks like {FORMATS[name].TITLE}, but: {error.args[0]}.", OTHER_FORMAT
        text = f"{plural(good, 'line')} of {FORMATS[name].TITLE}, and no message among them."
        return "header_only", text, RIGHT
    first = next(r.number for r in records if isinstance(r.obj, dict))
    return "unreadable", f"Its lines are JSON, but of no known format (see line {first}).", OTHER_FORMAT


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
    try:
        append_log(request.log, log_line(skip, path))
    except OSError as error:
        return f"the log can't be written: {request.log}: {error.strerror}"
    return None


# --------------------------------------------------------------------------------------- compact
@dataclass(frozen=True, slots=True)
class Compacted:
    """One compaction that is ready to be written. `output`: the new file; `gone`: record indexes for the archive.

    `message_lines`: positions within `gone` of the lines that carried the `messages` that were summarised.
    """

    planned: Planned
    plan: CompactionPreparation
    summary: Summary
    checkpoint: Checkpoint
    output: Data
    run: Run | None
    gone: Sequence[int]
    tokens_after: int
    message_lines: Sequence[int]
    messages: int
    chars: int
    archive: Path | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A transcript that stays as it is, and why. `summary`: one that was made and came out no shorter.

    `converted`: all of it in the format that was asked for.
    """

    planned: Planned
    skip: NoCompaction
    summary: Summary | None = None
    converted: bytes | None = None


def compact(source: Source, request: Request) -> Compacted | Skipped:
    """Plan, summarise, rebuild, check. Nothing is written yet; raises SummaryError, TranscriptError."""
    planned, outcome = _decided(source, request)
    if isinstance(outcome, NoCompaction):
        return _skipped(planned, outcome, request)
    summary = compact_context(outcome, request.summarizer, on_failure=request.on_failure, lang=request.lang,
                              keep_rules=request.keep_rules)  # fmt: skip
    made = _appended if request.append else _converted if _converts(planned, request) else _rebuilt
    return made(source, request, planned, outcome, summary)


def _decided(source: Source, request: Request) -> tuple[Planned, CompactionPreparation | NoCompaction]:
    """The plan, and what comes of it for `compact`."""
    planned = plan(source, request)
    outcome = planned.outcome
    if not _converts(planned, request) and planned.session.format not in WRITABLE:
        title = FORMATS[planned.session.format].TITLE
        raise OnlyRead(f"{title}: only read; --to openai writes the conversation as OpenAI chat",
                              path=source.path)  # fmt: skip
    if isinstance(outcome, CompactionPreparation) and request.if_needed:
        outcome = not_needed(planned, request) or outcome
    if isinstance(outcome, NoCompaction):
        return planned, outcome
    if planned.mixed:
        raise _undecided(planned)
    if request.append:
        _append_of(source, planned)  # refused before a model is asked
    return planned, outcome


def rehearse(source: Source, request: Request, summarizer: Prompted) -> Done:
    """What `compact` would ask a model or program; nothing is sent, and nothing is written."""
    planned, outcome = _decided(source, request)
    if isinstance(outcome, NoCompaction):
        return _done(source, Skipped(planned, outcome), None, request)
    report, size = Report(summarizer.asked), len(source.data)
    asks = tuple(summarizer.requests(outcome, report))
    paid = [ask for ask in asks if not ask.answered]
    return Done(source.path, figures(planned), summarizer=summarizer.name, bytes_before=size,
                bytes_after=size, warnings=tuple(warnings_of(planned)), asks=asks, report=report,
                cost=_cost(sum(a.input_tokens for a in paid), sum(a.max_tokens for a in paid), request))  # fmt: skip


def _rehearse_each(source: Source, request: Request, summarizer: Prompted) -> Done:
    dones = [rehearse(part, request, summarizer) for part in conversations(source, request)]
    if len(dones) == 1:
        return dones[0]
    asks, costs = tuple(a for d in dones for a in d.asks or ()), [d.cost for d in dones if d.cost is not None]
    return replace(dones[0], path=source.path, asks=asks, cost=sum(costs) if costs else None)


def _cost(sent: int, received: int, request: Request) -> float | None:
    """In the currency of the prices; None when none were given."""
    if request.prices is None:
        return None
    return (sent * request.prices[0] + received * request.prices[1]) / 1_000_000


def _converts(planned: Planned, request: Request) -> bool:
    return request.to not in ("", planned.session.format)


def _undecided(planned: Planned) -> TranscriptError:
    others = ", ".join(planned.mixed)
    return TranscriptError(f"some lines are {planned.session.format}, others {others}: name one with --format",
                           path=planned.path)  # fmt: skip


def _skipped(
    planned: Planned, skip: NoCompaction, request: Request, summary: Summary | None = None
) -> Skipped:
    """Nothing is compacted; another format is written all the same."""
    if not _converts(planned, request):
        return Skipped(planned, skip, summary)
    if planned.mixed:
        raise _undecided(planned)
    messages = planned.session.messages
    output = to_openai(planned.session, messages, None)
    told = [m for m in messages if m.told and m.kind != COMPACTION_SUMMARY]
    _check_conversion(told, output, led=messages[0].kind == COMPACTION_SUMMARY)
    return Skipped(planned, skip, summary, output)


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
    if last is not None and in_cooldown(
        last * 1000, time.time() * 1000, SegmentConfig(cooldown_ms=int(request.cooldown * 1000))
    ):
        figures: dict[str, object] = {"seconds": int(time.time() - last), "cooldown": request.cooldown}
        return NoCompaction("cooldown", None, figures, planned.estimate)
    return None


def as_needed(planned: Planned, request: Request) -> Planned:
    """The plan as --if-needed would have it."""
    skip = not_needed(planned, request)
    return planned if skip is None else replace(planned, outcome=skip)


def _last_run(path: str, request: Request) -> float | None:
    """When this transcript was last compacted (seconds since the epoch), by the archive's record."""
    if not request.cooldown or request.archive is None or not request.archive.exists():
        return None
    with Archive.open(request.archive) as archive:
        wanted = os.path.abspath(path)
        own = (r.created for r in archive.runs() if os.path.abspath(r.source) == wanted)
        newest = next(own, None)
    return datetime.fromisoformat(newest).timestamp() if newest else None


def _rebuilt(source: Source, request: Request, planned: Planned, outcome: CompactionPreparation,
             summary: Summary) -> Compacted | Skipped:  # fmt: skip
    """The client's own format: head, summary and kept records."""
    session, adapter = planned.session, WRITABLE[planned.session.format]
    kept = adapter.select(session, outcome)
    gone = _archived(adapter, session, outcome, kept)

    def write(checkpoint: Checkpoint) -> bytes:
        pieces = list(adapter.rebuild(session, outcome, kept, checkpoint))
        output = b"".join(_bytes_of(session.records, pieces))
        _check(adapter, session, outcome, pieces, kept, output, request)
        return output

    return _replaced(source, request, planned, outcome, summary, gone, write)


def _converted(source: Source, request: Request, planned: Planned, outcome: CompactionPreparation,
               summary: Summary) -> Compacted | Skipped:  # fmt: skip
    """Another format: summary and kept messages. The archive has the whole original, as ever."""
    session = planned.session
    adapter = WRITABLE.get(session.format)
    if adapter is not None:
        gone = _archived(adapter, session, outcome, adapter.select(session, outcome))
    else:
        gone = sorted({m.line - 1 for m in outcome.removed})

    def write(checkpoint: Checkpoint) -> bytes:
        output = to_openai(session, outcome.kept, checkpoint.summary)
        _check_conversion([m for m in outcome.kept if m.told], output, led=True)
        return output

    return _replaced(source, request, planned, outcome, summary, gone, write)


def _replaced(source: Source, request: Request, planned: Planned, outcome: CompactionPreparation, summary: Summary,
              gone: Sequence[int], write: Callable[[Checkpoint], bytes]) -> Compacted | Skipped:  # fmt: skip
    """A new file for the old one, whose removed records `gone` go to the archive."""
    session, adapter = planned.session, FORMATS[planned.session.format]
    archiving = request.archive is not None
    told = [m for m in outcome.removed if m.told]
    hash, chars = _address(adapter, session, outcome, gone) if archiving else ("", 0)
    text = _full_summary(outcome, summary, request, CcrEntry(hash, len(told), chars) if archiving else None)
    tokens_after = outcome.tokens_kept + _text_tokens(text, planned.settings)
    if (skip := _no_gain(outcome, text, planned.settings, request)) is not None:
        failed = {"failed": summary.degraded} if summary.degraded else {}
        return _skipped(planned, replace(skip, figures=skip.figures | failed), request, summary)
    reads, edits = compute_file_lists(outcome.file_ops, repair=outcome.settings.repair)
    checkpoint = Checkpoint(text, reads, edits, outcome.tokens_before, tokens_after, hash)
    output = write(checkpoint)
    run = _run(source, session, gone, hash, output)
    positions = {index: i for i, index in enumerate(gone)}
    lines = list(dict.fromkeys(positions[m.line - 1] for m in told if m.line - 1 in positions))
    return Compacted(
        planned,
        outcome,
        summary,
        checkpoint,
        output,
        run,
        gone,
        tokens_after,
        lines,
        len(told),
        chars,
        request.archive,
    )


def _appended(source: Source, request: Request, planned: Planned, outcome: CompactionPreparation,
              summary: Summary) -> Compacted | Skipped:  # fmt: skip
    """The old bytes and the client's own compaction record behind them. Nothing is removed or archived."""
    session, adapter = planned.session, FORMATS[planned.session.format]
    append = _append_of(source, planned)
    told = [m for m in outcome.removed if m.told]
    gone = sorted({m.line - 1 for m in told})
    hash, chars = _address(adapter, session, outcome, gone)
    text = _full_summary(outcome, summary, request, CcrEntry(hash, len(told), chars))
    if (skip := _no_gain(outcome, text, planned.settings, request)) is not None:
        return Skipped(planned, skip, summary)
    reads, edits = compute_file_lists(outcome.file_ops, repair=outcome.settings.repair)
    tokens_after = outcome.tokens_kept + _text_tokens(text, planned.settings)
    checkpoint = Checkpoint(text, reads, edits, outcome.tokens_before, tokens_after, hash)
    output = Extended(source.data, append(session, outcome, checkpoint))
    _check_reading(adapter, outcome, output, request)
    return Compacted(planned, outcome, summary, checkpoint, output, None, (), tokens_after, (), len(told), chars,
                     None)  # fmt: skip


def _append_of(source: Source, planned: Planned) -> Any:
    """What makes the client's own record. Raises UsageError where it has none."""
    adapter = FORMATS[planned.session.format]
    append = getattr(adapter, "append", None)
    if append is None:
        raise UsageError(f"{source.path}: a {adapter.TITLE} transcript has no record for a compaction: without "
                         "--append a new file is written")  # fmt: skip
    return append


def _archived(
    adapter: WritableFormat, session: Session, outcome: CompactionPreparation, kept: Sequence[int]
) -> Sequence[int]:
    """Records that the archive takes: what is removed, or what an append-only format hides."""
    hidden = getattr(adapter, "archived", None)
    return hidden(session, outcome) if hidden else list(removed(len(session.records), kept))


def _address(adapter: Format, session: Session, outcome: CompactionPreparation,
             gone: Sequence[int]) -> tuple[str, int]:  # fmt: skip
    """(16-digit hash, characters) of what is removed: of its bytes, or as the format itself counts."""
    own = getattr(adapter, "address", None)
    if own is not None:
        hash, chars = own(session, outcome)
        return hash, chars
    digest, chars = hashlib.sha256(), 0
    for index in gone:
        raw = session.records.raw(index)
        digest.update(raw)
        chars += len(raw.decode("utf-8", "replace"))
    return digest.hexdigest()[:16], chars


def _full_summary(
    outcome: CompactionPreparation, summary: Summary, request: Request, entry: CcrEntry | None
) -> str:
    """Body, file lists, then one marker line per archived segment, oldest first."""
    text = summary_text(outcome, summary)
    if summary.degraded is not None and not outcome.settings.repair:  # the seed's excerpt is all there is
        return text
    earlier = parse_ccr_section(outcome.previous_summary or "")
    entries = [e for e in earlier if entry is None or e.hash != entry.hash]
    return with_ccr_section(text, [*entries, *([entry] if entry else [])], request.lang)


def _text_tokens(text: str, settings: CompactionSettings) -> int:
    return Message("user", (Text(text),)).tokens(settings.estimator)


def _no_gain(outcome: CompactionPreparation, text: str, settings: CompactionSettings,
             request: Request) -> NoCompaction | None:  # fmt: skip
    """A result that does not shrink the context is no result."""
    if request.allow_growth or not settings.repair:
        return None
    after, before = _text_tokens(text, settings), _text_tokens(outcome.previous_summary or "", settings)
    for message in outcome.removed:
        if after < before:
            return None
        before += message.tokens(settings.estimator)
    if after < before:
        return None
    return NoCompaction(
        "no_gain", None, {"summary_tokens": after, "removed_tokens": before}, outcome.estimate
    )


def _bytes_of(records: Records, pieces: Sequence[Piece]) -> Iterator[bytes]:
    """Lines of the new file; each but the last of the input's own ends in a line end, and so does the last."""
    for piece in pieces:
        raw = (
            records.raw(piece) if isinstance(piece, int) else piece if isinstance(piece, bytes) else piece[1]
        )
        yield records.ended(raw)


def _check(adapter: Format, session: Session, outcome: CompactionPreparation, pieces: Sequence[Piece],
           kept: Sequence[int], output: bytes, request: Request) -> None:  # fmt: skip
    """Read the new file as its client would: it must be the summary and the kept messages, nothing else."""
    written = [p if isinstance(p, int) else p[0] for p in pieces if not isinstance(p, bytes)]
    if sorted(written) != list(kept):
        raise WriteError("self-check failed: the new transcript does not hold exactly the kept lines")
    _check_reading(adapter, outcome, output, request)


def _check_reading(adapter: Format, outcome: CompactionPreparation, output: Data, request: Request) -> None:
    try:
        again = adapter.read(read(output), ReadOptions(repair=request.settings.repair))
    except TranscriptError as error:
        raise WriteError(f"self-check failed: the new transcript can't be read back: {error}") from error
    expected = [_signature(m) for m in outcome.kept if m.told]
    leads = bool(again.messages) and again.messages[0].kind == COMPACTION_SUMMARY
    if not leads or [_signature(m) for m in again.messages[1:] if m.told] != expected:
        raise WriteError(
            f"self-check failed: a summary and {len(expected)} messages were to be written, "
            f"the new transcript reads as {len(again.messages)} messages"
        )


def _check_conversion(kept: Sequence[Message], output: bytes, *, led: bool) -> None:
    """Read the new file: the summary leads, and every text, call and result is there."""
    try:
        again = FORMATS["openai"].read(read(output), ReadOptions()).messages
    except TranscriptError as error:
        raise WriteError(f"self-check failed: the new transcript can't be read back: {error}") from error
    leads = again[0].kind == COMPACTION_SUMMARY
    lost = texts_lost(kept, again[leads:])
    if leads != led or lost:
        raise WriteError(
            f"self-check failed: {len(lost)} texts of the conversation differ in the new transcript"
        )


def _signature(message: Message) -> tuple[object, ...]:
    return message.role, message.parts


def _run(source: Source, session: Session, gone: Sequence[int], hash: str, output: bytes) -> Run:
    return Run(
        hash=hash,
        source=absolute(source.path),
        format=session.format,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        input_sha256=source.sha256,
        input_size=len(source.data),
        output_sha256=hashlib.sha256(output).hexdigest(),
        output_size=len(output),
        recipe=tuple(_lengths(len(session.records), gone)),
    )


def absolute(path: str) -> str:
    """A path that means the same in every folder; stdin stays "-"."""
    return path if path == "-" else os.path.abspath(path)


def _lengths(total: int, gone: Sequence[int]) -> Iterator[int]:
    """Run lengths in lines: removed, rest, removed, rest, ... in the order of the input."""
    wanted, turn, length = set(gone), True, 0
    for index in range(total):
        if (index in wanted) != turn:
            yield length
            turn, length = not turn, 0
        length += 1
    yield length


def store(result: Compacted, place: str = "", level: int = DEFAULT_LEVEL) -> Segment | None:
    """Put the removed lines into the archive, commit, read back, compare. Raises ArchiveError, WriteError.

    `place`: where the result will be written.
    """
    if result.archive is None or result.run is None:
        return None
    records, gone = result.planned.session.records, result.gone
    with Archive.open(result.archive, create=True, level=level) as archive:
        return archive.store(result.run, (records.raw(i) for i in gone),
                             (records.raw(i) for i in removed(len(records), gone)),
                             messages=result.messages, chars=result.chars,
                             message_lines=result.message_lines, place=absolute(place) if place else "")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one transcript. `figures` as `plan --json` has them; `skip` or `error` says why not.

    `left`: the cause for which a batch passed it over, `message` in words. `sha256` of what was written.
    `report` and `cost`: what a model or program took. `asks`: of a dry run, what it would be asked.
    """

    path: str
    figures: dict[str, Any] = field(default_factory=dict)
    output: str | None = None
    archive: str | None = None
    hash: str = ""
    summarizer: str = ""
    degraded: str | None = None
    tokens_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    skip: NoCompaction | None = None
    error: HaoError | None = None
    warnings: tuple[str, ...] = ()
    left: str | None = None
    message: str | None = None
    sha256: str = ""
    report: Report | None = None
    cost: float | None = None
    asks: tuple[Ask, ...] | None = None


def _done(source: Source, result: Compacted | Skipped, output: str | None, request: Request,
          warning: str | None = None) -> Done:  # fmt: skip
    size = len(source.data)
    report = result.summary.report if result.summary is not None else None
    notes = [f"{source.path}: {note}" for note in dict.fromkeys(report.notes)] if report else []
    warnings = (*([warning] if warning else []), *warnings_of(result.planned), *notes)
    cost = _cost(report.input_tokens, report.output_tokens, request) if report else None
    if isinstance(result, Skipped):
        skip = result.skip
        told = figures(result.planned) | {"result": "none", "branch": skip.branch, "sub": skip.sub}
        return Done(source.path, told, output, bytes_before=size, bytes_after=size, skip=skip, warnings=warnings,
                    report=report, cost=cost)  # fmt: skip
    return Done(
        path=source.path,
        figures=figures(result.planned),
        output=output,
        archive=str(result.archive) if result.archive else None,
        hash=result.checkpoint.hash,
        summarizer=result.summary.summarizer,
        degraded=result.summary.degraded,
        tokens_after=result.tokens_after,
        bytes_before=size,
        bytes_after=len(result.output),
        warnings=warnings,
        sha256=sha256_of(result.output),
        report=report,
        cost=cost,
    )


def compact_to(source: Source, request: Request, target: Path | IO[bytes] | None) -> Done:
    """Compact into a file, a folder or a stream; None is a dry run, in which no model or program is asked.

    A skip passes the input through unchanged.
    """
    if target is None and isinstance(request.summarizer, Prompted):
        return _rehearse_each(source, request, request.summarizer)
    own = _own_lines(source, request)
    if own is not None:
        if request.to:
            raise TranscriptError("each line is a conversation of its own: --to takes one at a time "
                                  "(sed -n 1p FILE | haocompact compact - --to openai)", path=source.path)  # fmt: skip
        return _compact_each(source, own, request, target)
    result = compact(source, request)
    if isinstance(target, Path) and target.is_dir():
        target = target / _file_name(source.path, result, request)
    warning = None
    if isinstance(result, Skipped):
        warning = record_skip(result.skip, source.path, request) if target is not None else None
        _deliver(source.data if result.converted is None else result.converted, target)
    elif target is not None:
        store(result, _name(target) or "-", request.level)
        _deliver(result.output, target)
    return _done(source, result, _name(target), request, warning)


def _compact_each(source: Source, parts: Sequence[Source | bytes], request: Request,
                  target: Path | IO[bytes] | None) -> Done:  # fmt: skip
    """Every conversation by itself; a line that is none, or that can't be read, stays as it is."""
    output: list[bytes] = []
    results: list[Compacted | Skipped] = []
    for part in parts:
        result = _attempt(part, request) if isinstance(part, Source) else None
        results += [result] if result is not None else []
        made = (
            result.output if isinstance(result, Compacted) else part if isinstance(part, bytes) else part.data
        )
        made = made[:]
        output.append(made if made.endswith(b"\n") else made + b"\n")
        if isinstance(result, Compacted) and target is not None:
            store(result, _name(target) or "-", request.level)
    done = next((r for r in results if isinstance(r, Compacted)), None) or next(iter(results), None)
    if done is None:
        raise TranscriptError("none of its lines can be read as a conversation", path=source.path)
    if isinstance(target, Path) and target.is_dir():
        target = target / _file_name(source.path, done, request)
    whole = b"".join(output) if isinstance(done, Compacted) else source.data
    _deliver(whole, target)
    count = sum(isinstance(r, Compacted) for r in results)
    told = _done(source, done, _name(target), request, None)
    return replace(told, path=source.path, bytes_after=len(whole), bytes_before=len(source.data),
                   figures=told.figures | {"conversations": len(results), "compacted": count})  # fmt: skip


def _attempt(part: Source, request: Request) -> Compacted | Skipped | None:
    try:
        return compact(part, request)
    except TranscriptError:
        return None


def _file_name(path: str, result: Compacted | Skipped, request: Request) -> str:
    """The name that the client looks for, where the result is a new session; else the input's own."""
    name = output_name(path, request.to)
    if isinstance(result, Skipped) or result.run is None or _converts(result.planned, request):
        return name
    session = result.planned.session
    own = getattr(FORMATS[session.format], "file_name", None)
    return (own(session, result.checkpoint) if own else None) or name


def output_name(path: str, to: str = "") -> str:
    """The name of a result in a folder of results: unpacked, and JSONL where it is converted."""
    name = "stdin.jsonl" if path == "-" else Path(path).name.removesuffix(".gz").removesuffix(".zst")
    return f"{name}.jsonl" if to and not name.endswith(".jsonl") else name


def _deliver(data: Data, target: Path | IO[bytes] | None) -> None:
    if isinstance(target, Path):
        write_file(target, data)
    elif target is not None:
        try:
            for chunk in chunks_of(data):
                target.write(chunk)
            target.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise write_error(Path("-"), error) from error


def _name(target: Path | IO[bytes] | None) -> str | None:
    return str(target) if isinstance(target, Path) else "-" if target is not None else None


def compact_in_place(path: str, request: Request) -> Done:
    """Compact one file where it stands. Mode, owner and times stay; a symbolic link stays one."""
    target = Path(os.path.realpath(path))
    if not target.exists():
        raise TranscriptError("no such file", path=path)
    if target.is_dir():
        raise TranscriptError("is a directory", path=path)
    with open_source(path) as source, locked(target):
        if _own_lines(source, request) is not None:
            raise UsageError(f"{path}: each line is a conversation of its own: write it with -o",
                             code="NOT_IN_PLACE")  # fmt: skip
        if source.compressed:
            raise UsageError(f"{path}: a compressed transcript can't be compacted in place: write it with -o",
                             code="NOT_IN_PLACE")  # fmt: skip
        _refuse_hard_links(path, target)
        if request.to:
            raise UsageError("--to writes another file beside the transcript: it does not go with --in-place")
        result = compact(source, request)
        warning = None
        if isinstance(result, Compacted):
            _refuse_in_place(result)
            _refuse_at_work(result.planned, target)
            store(result, str(target), request.level)
            write_file(target, result.output, like=os.stat(target), source=source)
        else:
            warning = record_skip(result.skip, path, request)
        return _done(source, result, path, request, warning)


def attempt_in_place(path: str, request: Request, min_age: float = 0, *, dry_run: bool = False) -> Done:
    """As `compact_in_place`, with an error as part of the result: one bad file never stops the rest."""
    try:
        if changed_lately(Path(path), min_age):
            raise SourceBusy(f"changed within the last {min_age:g} s: its client may still be at it "
                             "(--min-age)", path=path)  # fmt: skip
        if dry_run:
            with open_source(path) as source:
                return compact_to(source, request, None)
        return compact_in_place(path, request)
    except HaoError as error:
        return Done(path, error=error)
    except OSError as error:
        return Done(path, error=TranscriptError(error.strerror or str(error), path=path))
    except Exception as error:  # a bug or no memory: this file is left alone, the others have their turn
        return Done(path, error=HaoError(f"a bug: {_where(error)}", path=path))


def _where(error: Exception) -> str:
    """What was raised and by which line, in one line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace else ""
    return f"{type(error).__name__}: {error}{place}"


def _refuse_hard_links(path: str, target: Path) -> None:
    names = os.stat(target).st_nlink
    if names > 1:
        raise HardLinked(f"has {names} names (hard links): replacing it here would leave the others as they "
                         "are; write the result with -o", path=path)  # fmt: skip


def _refuse_at_work(planned: Planned, target: Path) -> None:
    """A client that has the session loaded would write on into a file that is gone."""
    session = planned.session
    folder = getattr(FORMATS[session.format], "LOCKS", None)
    if folder and session.session_id and client_at_work(target, folder, session.session_id):
        raise SourceBusy(
            "its client has the session open (its writer lock is held); left alone", path=planned.path
        )


def _refuse_in_place(result: Compacted) -> None:
    if result.run is None:  # nothing is shortened
        return
    session = result.planned.session
    refusal = getattr(FORMATS[session.format], "in_place_refusal", None)
    reason = refusal(session) if refusal else None
    if reason:
        raise NotInPlace(reason, path=result.planned.path)


# -------------------------------------------------------------------------------------- retrieve
@dataclass(frozen=True, slots=True)
class Directory:
    """Segments of a transcript, oldest first; `missing`: markers whose segment is not here.

    `in_log`: hashes of those that still stand in the transcript itself.
    """

    path: str
    segments: tuple[Segment, ...]
    missing: tuple[str, ...] = ()
    in_log: frozenset[str] = frozenset()


def directory(source: Source, request: Request) -> Directory:
    """The segments that a transcript's markers name, or else those archived from its path; then its log's own."""
    session, _ = load(source, request)
    previous = session.messages[0] if session.messages else None
    text = previous.text if previous is not None and previous.kind == COMPACTION_SUMMARY else ""
    markers = [e.hash for e in parse_ccr_section(text)]
    logged = {found.segment.hash: found.segment for found in logged_segments(session, source.path)}
    known: dict[str, Segment] = {}
    here: list[Segment] = []
    if set(markers) - logged.keys() or not logged or any(path.exists() for path in _named(request)):
        with opened_archives(request) as archive:
            known = {s.hash: s for s in archive.segments()}  # only what is here is ours, whatever a text says
            path = os.path.abspath(source.path)
            here = [known[r.hash] for r in reversed(archive.runs()) if os.path.abspath(r.source) == path]
    pool = logged | known
    others = [s for h, s in logged.items() if h not in markers]
    found = [*others, *(pool[h] for h in markers if h in pool)] if markers else [*here, *others]
    missing = tuple(h for h in markers if h not in pool)
    return Directory(
        source.path, tuple(dict.fromkeys(found)), missing, frozenset(logged.keys() - known.keys())
    )


def clean_hash(text: str) -> str:
    """The 16 digits of a hash or marker. Raises UnknownHash for anything else."""
    digits = text.strip().removeprefix("<<ccr:").removesuffix(">>")
    if len(digits) != 16 or any(c not in "0123456789abcdef" for c in digits):
        raise UnknownHash(f"not found: {text!r} is no hash of an archive (16 hexadecimal digits)")
    return digits


def raw_segment(hash: str, request: Request, path: str = "") -> Iterator[bytes]:
    """The original lines of a segment: out of the archive, or of the log of the transcript at `path`."""
    with _home(hash, request, path) as home:
        if isinstance(home, Archive):
            yield from home.raw(clean_hash(hash), absolute(path))
        else:
            session, logged = home
            yield from logged.raw(session)


@contextlib.contextmanager
def _home(hash: str, request: Request, path: str) -> Iterator[Archive | tuple[Session, Logged]]:
    """Where a segment is: the archive, else the transcript's own log.

    Raises UnknownHash, ArchivedElsewhere where `path` has the marker, ArchiveError.
    """
    digits = clean_hash(hash)
    with contextlib.ExitStack() as stack:
        home: Archive | tuple[Session, Logged] | None
        try:
            home = stack.enter_context(opened_archives(request)).holding(digits)
        except DamagedArchive:
            raise
        except ArchiveError as error:
            home = _in_log(digits, request, path, stack)
            if home is None:
                if isinstance(error, UnknownHash) and digits in _markers(path, request):
                    raise _elsewhere([digits], request, path) from None
                raise
        yield home


def _markers(path: str, request: Request) -> list[str]:
    """The hashes that a transcript's summary names; none when it can't be read."""
    if path in ("", "-"):
        return []
    try:
        with open_source(path) as source:
            return [e.hash for e in parse_ccr_section(summary_of(source, request))]
    except TranscriptError:
        return []


def _elsewhere(hashes: Sequence[str], request: Request, path: str) -> ArchivedElsewhere:
    names, searched = ", ".join(hashes), ", ".join(map(str, _named(request)))
    return ArchivedElsewhere(f"archived elsewhere: the marker of {names} is good, but it is not in {searched}; "
                             "name the archive it was written to with --archive", path=path)  # fmt: skip


def _in_log(
    hash: str, request: Request, path: str, stack: contextlib.ExitStack
) -> tuple[Session, Logged] | None:
    """The segment of this hash in a transcript, which stays open as long as the stack."""
    if not path or not os.path.isfile(path):
        return None
    session, _ = load(stack.enter_context(open_source(path)), request)
    found = (s for s in logged_segments(session, path) if s.segment.hash == hash)
    return next(((session, logged) for logged in found), None)


def segment_messages(hash: str, request: Request, path: str = "") -> list[Message]:
    """The messages of a segment, oldest first; parsed when they are rendered."""
    return _segment(hash, request, path)[0]


def _segment(hash: str, request: Request, path: str) -> tuple[list[Message], Format]:
    with _home(hash, request, path) as home:
        if isinstance(home, Archive):
            return _archived_messages(home, clean_hash(hash), absolute(path))
        session, logged = home
        return logged_messages(session, logged), FORMATS[session.format]


def _archived_messages(archive: Archive, hash: str, path: str) -> tuple[list[Message], Format]:
    segment = archive.find(hash, path)
    adapter = FORMATS[segment.format]
    together = getattr(adapter, "messages_of", None)  # where a message spans several lines
    if together is not None:
        lines = list(archive.raw(hash, path))
        return list(together([Record(number, raw) for number, raw in enumerate(lines, 1)])), adapter
    numbers = archive.message_lines(hash, path)
    raws = archive.lines(hash, numbers, path)
    record = getattr(adapter, "record", Record)
    found = (adapter.message_of(record(n + 1, raw)) for n, raw in zip(numbers, raws, strict=True))
    return [m for m in found if m is not None], adapter


def window_text(hash: str, request: Request, from_message: int, budget: int, path: str = "") -> str:
    """One window of a segment as text, with a last line that says how to go on."""
    messages, adapter = _segment(hash, request, path)
    render = getattr(adapter, "render", render_message)
    return window(messages, from_message, budget, request.lang, render=render)


def verify(request: Request) -> Iterator[Damage]:
    """Re-hash the whole archive and name what is damaged."""
    with opened_archives(request) as archives:
        for archive in archives:
            yield from archive.verify()


def summary_of(source: Source, request: Request) -> str:
    """The summary that a transcript begins with. Raises TranscriptError when it has none."""
    session, _ = load(source, request)
    first = session.messages[0] if session.messages else None
    if first is None or first.kind != COMPACTION_SUMMARY:
        raise TranscriptError("there is no summary in it", path=source.path)
    return first.text


def restore_input(hash: str, request: Request, path: str = "") -> Iterator[bytes]:
    """The whole input of one compaction: of `path` when that transcript has one by this hash, else the newest."""
    with opened_archives(request) as archive:
        digits = clean_hash(hash)
        runs = archive.runs(digits)
        if not runs and digits in _markers(path, request):
            raise _elsewhere([digits], request, path)
        if not runs:
            raise UnknownHash(f"not found: {hash} is no segment of {', '.join(map(str, archive.paths))}")
        own = [r for r in runs if path and os.path.abspath(r.source) == os.path.abspath(path)]
        yield from archive.restore((own or runs)[0])


def restore(source: Source, request: Request, hash: str | None = None) -> Iterator[bytes]:
    """The original of a compacted transcript, with whatever was appended since.

    With `hash`, the input of that one compaction. Without, compactions are undone as long as the transcript
    still begins with what one of them wrote. Raises UnknownHash, DamagedArchive, ArchiveError.
    """
    if hash is not None:
        yield from restore_input(hash, request, source.path)
        return
    own = _own_lines(source, request)
    if own is not None:
        for part in own:
            yield from _restored_line(part, request)
        return
    with opened_archives(request) as archive:
        yield from _restored(archive, source, request)


def _restored_line(part: Source | bytes, request: Request) -> Iterator[bytes]:
    """A conversation as it was, or, when nothing of it is archived, as it is."""
    if isinstance(part, bytes):
        yield part
        return
    with opened_archives(request) as archive:
        run = _run_of(archive, part.data)
        yield from archive.restore(run) if run is not None else (part.data[:],)


def _restored(archive: Archives, source: Source, request: Request) -> Iterator[bytes]:
    """Undo from the newest compaction back; what stands behind each output is carried along."""
    data: Data = source.data
    appended: list[bytes] = []
    undone = 0
    while (run := _run_of(archive, data)) is not None:
        appended.insert(0, data[run.output_size :])
        data = b"".join(archive.restore(run))
        undone += 1
    if not undone:
        listed = directory(source, request)
        if listed.missing:
            raise _elsewhere(listed.missing, request, source.path)
        if listed.in_log:
            raise ArchiveError(
                "nothing was taken out of this transcript: the lines before its compaction record are "
                "the original",
                path=source.path,
            )
        if listed.segments:
            raise ArchiveError("the transcript was changed after its compaction, so its original can't be put "
                               "together; retrieve FILE HASH --restore gives the input of one compaction")  # fmt: skip
        raise UnknownHash("nothing in the archive belongs to this transcript", path=source.path)
    yield from chunks_of(data)
    for part in filter(None, appended):
        if not data[-1:].endswith(
            b"\n"
        ):  # a torn or unended last line of the original stays a line of its own
            yield b"\n"
        yield part
        data = part


def _run_of(archive: Archives, data: Data) -> Run | None:
    """The newest run whose output this file begins with."""
    sizes = sorted({r.output_size for r in archive.runs() if 0 < r.output_size <= len(data)}, reverse=True)
    for size in sizes:
        digest = hashlib.sha256(data[:size]).hexdigest()
        runs = archive.runs(output_sha256=digest)
        if runs:
            return runs[0]
    return None


def opened_archives(request: Request) -> Archives:
    """The archives to read from: those named, with what a distributed batch left beside them."""
    named = _named(request)
    if not named:
        raise ArchiveError("--no-archive leaves nothing to retrieve from")
    left = [file for path in named for file in sorted(workers_folder(path).glob("*.db"))]
    return Archives.open([*named, *left])


def _named(request: Request) -> tuple[Path, ...]:
    return request.archives or ((request.archive,) if request.archive is not None else ())


def workers_folder(archive: Path) -> Path:
    """Where the workers of a distributed batch keep their archives until they are merged."""
    return archive.with_name(f"{archive.name}.workers")


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
