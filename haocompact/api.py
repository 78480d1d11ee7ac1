"""For programs that embed haocompact: five functions, a transcript in (a path or bytes), a result object out.

Nothing is printed; every failure is an `errors.HaoError`. A file is read whole, so a result stays valid
whatever becomes of the file. Nothing is written but what `archive` and `output` name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from haocompact import pipeline
from haocompact.compaction import DEFAULT_COMPACTION_SETTINGS, CompactionSettings, Message, NoCompaction
from haocompact.diag import Diagnosis
from haocompact.files import Source, open_source, write_file
from haocompact.formats.session import Session
from haocompact.pipeline import Planned, Request
from haocompact.records import chunks_of
from haocompact.summarize import OFFLINE, Summarizer

Transcript = str | os.PathLike[str] | bytes


def read(transcript: Transcript, *, format: str | None = None, leaf: str | None = None) -> Session:
    """The active conversation of a transcript, as its own client would load it.

    >>> from haocompact import read
    >>> session = read("samples/pi/weather-station.jsonl")
    >>> session.format, len(session.messages), session.messages[0].role
    ('pi', 64, 'user')

    `format` names one of `formats.FORMATS` instead of detecting it; `leaf` is the id of a branch end. Raises
    TranscriptError.
    """
    session, _ = pipeline.load(_source(transcript), Request(format=format, leaf=leaf))
    return session


def plan(transcript: Transcript, settings: CompactionSettings = DEFAULT_COMPACTION_SETTINGS, *,
         format: str | None = None, leaf: str | None = None) -> Planned:  # fmt: skip
    """What a compaction would do; `outcome` is a CompactionPreparation, or a NoCompaction that says why not.

    >>> from haocompact import CompactionSettings, plan
    >>> planned = plan("samples/pi/weather-station.jsonl", CompactionSettings(keep_recent_tokens=2000))
    >>> planned.estimate.tokens, planned.outcome.retained_tail[0].line, planned.outcome.tokens_kept
    (11220, 43, 2099)

    Raises TranscriptError.
    """
    return pipeline.plan(_source(transcript), Request(settings, format=format, leaf=leaf))


@dataclass(frozen=True, slots=True)
class Result:
    """A compaction, or why there is none.

    `output`: the new transcript, or the old one, byte for byte, where `skip` says why. `hash`: of the
    archived lines, None without an archive. `degraded`: why the summarizer failed, where an excerpt stands in.
    `removed`: the messages that the summary replaces.
    """

    output: bytes
    planned: Planned
    skip: NoCompaction | None = None
    summary: str | None = None
    hash: str | None = None
    degraded: str | None = None
    tokens_after: int | None = None
    removed: Sequence[Message] = ()


def compact(transcript: Transcript, settings: CompactionSettings = DEFAULT_COMPACTION_SETTINGS, *,
            archive: str | os.PathLike[str] | None = None, output: str | os.PathLike[str] | None = None,
            summarizer: Summarizer = OFFLINE, on_failure: str = "degrade", lang: str = "en",
            if_needed: bool = False, format: str | None = None, leaf: str | None = None) -> Result:  # fmt: skip
    """Compact a transcript in memory; the original is not touched.

    >>> from haocompact import CompactionSettings, compact
    >>> result = compact("samples/pi/weather-station.jsonl", CompactionSettings(keep_recent_tokens=2000))
    >>> len(result.removed), result.summary.splitlines()[0], result.skip
    (39, '## Goal', None)

    `archive`: where the removed lines are stored first, with a marker in the summary; without, the caller keeps
    the original. `output`: where the result is written, besides. `summarizer`: anything with a `name` and
    `summarize(preparation, report)`; the default works offline. Raises TranscriptError, SummaryError (with
    `on_failure="fail"`), ArchiveError, WriteError.
    """
    source = _source(transcript)
    request = Request(settings, format=format, leaf=leaf, summarizer=summarizer, on_failure=on_failure, lang=lang,
                      archive=None if archive is None else Path(archive), if_needed=if_needed)  # fmt: skip
    done = pipeline.compact(source, request)
    if isinstance(done, pipeline.Skipped):
        result = Result(b"".join(chunks_of(source.data)), done.planned, skip=done.skip)
    else:
        pipeline.store(done)
        marker = done.run.hash if done.run else None
        result = Result(b"".join(chunks_of(done.output)), done.planned, None, done.checkpoint.summary, marker or None,
                        done.summary.degraded, done.tokens_after, done.plan.removed)  # fmt: skip
    if output is not None:
        write_file(Path(output), result.output)
    return result


def diagnose(transcript: Transcript, settings: CompactionSettings = DEFAULT_COMPACTION_SETTINGS, *,
             format: str | None = None, leaf: str | None = None) -> Diagnosis:  # fmt: skip
    """Why a transcript would or would not be compacted, and the smallest change that helps.

    >>> from haocompact import diagnose
    >>> found = diagnose("samples/pi/weather-station.jsonl")
    >>> found.cause
    'below_keep_recent'
    >>> found.explanation
    'All 64 messages together are about 5,476 tokens, fewer than the 20,000 that are always kept.'

    Raises TranscriptError.
    """
    return pipeline.explain(pipeline.as_compacted(plan(transcript, settings, format=format, leaf=leaf)))


def retrieve(transcript: Transcript, hash: str | None = None, *, archive: str | os.PathLike[str]) -> bytes:
    """The original of a compacted transcript, byte for byte; with `hash`, the lines behind one marker.

    >>> import tempfile, pathlib
    >>> from haocompact import CompactionSettings, compact, retrieve
    >>> original = pathlib.Path("samples/pi/weather-station.jsonl").read_bytes()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = f"{folder}/archive.db"
    ...     small = compact(original, CompactionSettings(keep_recent_tokens=2000), archive=store)
    ...     lines = retrieve(small.output, small.hash, archive=store)
    ...     len(lines.splitlines()), retrieve(small.output, archive=store) == original
    (39, True)

    Raises UnknownHash, DamagedArchive, ArchiveError.
    """
    request = Request(archive=Path(archive))
    if hash is not None:
        return b"".join(pipeline.raw_segment(hash, request))
    return b"".join(pipeline.restore(_source(transcript), request))


def _source(transcript: Transcript) -> Source:
    if isinstance(transcript, bytes):
        return Source("-", transcript)
    with open_source(os.fspath(transcript)) as source:
        return Source(source.path, b"".join(chunks_of(source.data)), source.stamp, source.compressed)
