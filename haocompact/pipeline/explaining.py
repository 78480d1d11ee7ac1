"""Why a plan is as it is, and the smallest change that would help: for `diag`."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

from haocompact.ccr import CcrEntry
from haocompact.compaction import (
    CompactionPreparation,
    CompactionSettings,
    NoCompaction,
)
from haocompact.diag import RIGHT, Diagnosis, attempt, diagnose, plural, told, with_lines
from haocompact.errors import (
    HaoError,
    TranscriptError,
)
from haocompact.files import (
    Source,
)
from haocompact.formats import FORMATS, detect
from haocompact.formats.session import (
    NO_MESSAGE,
    ReadOptions,
)
from haocompact.ledger import MAX_CHARS
from haocompact.pipeline.compacting import full_summary, no_gain
from haocompact.pipeline.planning import Planned, Request, leaf_of
from haocompact.summarize import (
    OFFLINE,
    Summary,
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


MOST_TOKENS = 8 * MAX_CHARS  # no offline summary has more, whatever its script and the estimator


def _offline_loss(trial: CompactionPreparation, settings: CompactionSettings) -> NoCompaction | None:
    """What `compact` would say of this plan with the offline summary, which is made only where it matters."""
    request = Request(settings=settings)
    entry = CcrEntry("0" * 16, len(trial.removed), 1_000_000)
    lists = full_summary(trial, Summary("", OFFLINE.name), request, entry)
    if no_gain(trial, lists, settings, request, MOST_TOKENS) is None:
        return None
    text = full_summary(trial, Summary(OFFLINE.summarize(trial), OFFLINE.name), request, entry)
    return no_gain(trial, text, settings, request)


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
        options = ReadOptions(leaf=leaf_of(session, number), repair=settings.repair)
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
