"""One compaction in memory: summarise, rebuild, re-read and compare; then the archive."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from haocompact.archive import DEFAULT_LEVEL, Archive, Run, Segment
from haocompact.ccr import CcrEntry, parse_ccr_section, with_ccr_section
from haocompact.compaction import (
    COMPACTION_SUMMARY,
    CompactionPreparation,
    CompactionSettings,
    Message,
    NoCompaction,
    Text,
    compute_file_lists,
)
from haocompact.convert import texts_lost, to_openai
from haocompact.errors import (
    OnlyRead,
    TranscriptError,
    UsageError,
    WriteError,
)
from haocompact.files import (
    Source,
    absolute,
)
from haocompact.formats import FORMATS, WRITABLE
from haocompact.formats.session import (
    Checkpoint,
    Format,
    Piece,
    ReadOptions,
    Session,
    WritableFormat,
    removed,
)
from haocompact.pipeline.planning import Planned, Request, not_needed, plan
from haocompact.records import Data, Extended, Records, read
from haocompact.stages import stage
from haocompact.summarize import (
    OFFLINE,
    Summary,
    compact_context,
    summary_text,
)


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
    with stage("read and plan"):
        planned, outcome = decide(source, request)
    if isinstance(outcome, NoCompaction):
        return _skipped(planned, outcome, request)
    with stage("summarise"):
        summary = compact_context(outcome, request.summarizer or OFFLINE, on_failure=request.on_failure,
                                  lang=request.lang, keep_rules=request.keep_rules)  # fmt: skip
    made = _appended if request.append else _converted if converts(planned, request) else _rebuilt
    with stage("rebuild and check"):
        return made(source, request, planned, outcome, summary)


def decide(source: Source, request: Request) -> tuple[Planned, CompactionPreparation | NoCompaction]:
    """The plan, and what comes of it for `compact`."""
    planned = plan(source, request)
    outcome = planned.outcome
    if not converts(planned, request) and planned.session.format not in WRITABLE:
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


def converts(planned: Planned, request: Request) -> bool:
    return request.to not in ("", planned.session.format)


def _undecided(planned: Planned) -> TranscriptError:
    name, others = planned.session.format, ", ".join(planned.mixed)
    meant = getattr(FORMATS[planned.mixed[0]], "MIXED", {}).get(name)
    reason = meant or f"some lines are {name}, others {others}: name one with --format"
    return TranscriptError(reason, path=planned.path)


def _skipped(
    planned: Planned, skip: NoCompaction, request: Request, summary: Summary | None = None
) -> Skipped:
    """Nothing is compacted; another format is written all the same."""
    if not converts(planned, request):
        return Skipped(planned, skip, summary)
    if planned.mixed:
        raise _undecided(planned)
    messages = planned.session.messages
    output = to_openai(planned.session, messages, None)
    told = [m for m in messages if m.told and m.kind != COMPACTION_SUMMARY]
    _check_conversion(told, output, led=messages[0].kind == COMPACTION_SUMMARY)
    return Skipped(planned, skip, summary, output)


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
    text = full_summary(outcome, summary, request, CcrEntry(hash, len(told), chars) if archiving else None)
    tokens_after = outcome.tokens_kept + _text_tokens(text, planned.settings)
    if (skip := no_gain(outcome, text, planned.settings, request)) is not None:
        failed = {"failed": summary.degraded} if summary.degraded else {}
        return _skipped(planned, replace(skip, figures=skip.figures | failed), request, summary)
    reads, edits = compute_file_lists(outcome.file_ops, repair=outcome.settings.repair)
    checkpoint = Checkpoint(text, reads, edits, outcome.tokens_before, tokens_after, hash)
    output = write(checkpoint)
    run = _run(source, session, gone, hash, output)
    lines = list(_places(gone, (m.line - 1 for m in told)))
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
    text = full_summary(outcome, summary, request, CcrEntry(hash, len(told), chars))
    if (skip := no_gain(outcome, text, planned.settings, request)) is not None:
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
    return hidden(session, outcome) if hidden else array("Q", removed(len(session.records), kept))


def _address(adapter: Format, session: Session, outcome: CompactionPreparation,
             gone: Sequence[int]) -> tuple[str, int]:  # fmt: skip
    """(16-digit hash, characters) of what is removed: of its bytes, or as the format itself counts."""
    own = getattr(adapter, "address", None)
    if own is not None:
        hash, chars = own(session, outcome)
        return hash, chars
    digest, chars = hashlib.sha256(), 0
    for raw in session.records.raws(gone):
        digest.update(raw)
        chars += len(raw.decode("utf-8", "replace"))
    return digest.hexdigest()[:16], chars


def full_summary(
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


def no_gain(outcome: CompactionPreparation, text: str, settings: CompactionSettings,
             request: Request, more: int = 0) -> NoCompaction | None:  # fmt: skip
    """A result that does not shrink the context is no result. `more`: tokens of the summary beside `text`."""
    if request.allow_growth or not settings.repair:
        return None
    after, before = (_text_tokens(part, settings) for part in (text, outcome.previous_summary or ""))
    after += more
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


def _lengths(total: int, gone: Sequence[int]) -> Iterator[int]:
    """Run lengths in lines: removed, rest, removed, rest, ... in the order of the input."""
    at, turn, length = 0, True, 0
    for index in range(total):
        here = at < len(gone) and gone[at] == index
        at += here
        if here != turn:
            yield length
            turn, length = not turn, 0
        length += 1
    yield length


def _places(gone: Sequence[int], indexes: Iterable[int]) -> Iterator[int]:
    """Where these records stand in the ascending list `gone`, each once; those that don't are passed over."""
    seen = bytearray(len(gone))
    for index in indexes:
        place = bisect_left(gone, index)
        if place < len(gone) and gone[place] == index and not seen[place]:
            seen[place] = 1
            yield place


def store(result: Compacted, place: str = "", level: int | None = None) -> Segment | None:
    """Put the removed lines into the archive, commit, read back, compare. Raises ArchiveError, WriteError.

    `place`: where the result will be written.
    """
    if result.archive is None or result.run is None:
        return None
    records, gone = result.planned.session.records, result.gone
    with stage("archive"), Archive.open(result.archive, create=True, level=level or DEFAULT_LEVEL) as archive:
        return archive.store(result.run, records.raws(gone), records.raws(removed(len(records), gone)),
                             messages=result.messages, chars=result.chars,
                             message_lines=result.message_lines, place=absolute(place) if place else "")  # fmt: skip
