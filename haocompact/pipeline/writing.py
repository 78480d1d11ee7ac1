"""Where a compaction goes: a file, a folder, a stream, or the place of the original."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from haocompact.chunks import Ask, Report
from haocompact.compaction import (
    NoCompaction,
)
from haocompact.errors import (
    HaoError,
    HardLinked,
    HasForks,
    NotInPlace,
    SourceBusy,
    TranscriptError,
    UsageError,
)
from haocompact.files import (
    Source,
    changed_lately,
    client_at_work,
    forks_of,
    locked,
    open_source,
    sha256_of,
    write_error,
    write_file,
)
from haocompact.formats import FORMATS
from haocompact.pipeline.compacting import Compacted, Skipped, compact, converts, decide, store
from haocompact.pipeline.planning import (
    Planned,
    Request,
    conversations,
    figures,
    own_lines,
    record_skip,
    warnings_of,
)
from haocompact.records import Data, chunks_of
from haocompact.stages import stage
from haocompact.summarize import (
    Prompted,
)


def rehearse(source: Source, request: Request, summarizer: Prompted) -> Done:
    """What `compact` would ask a model or program; nothing is sent, and nothing is written."""
    planned, outcome = decide(source, request)
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
    own = own_lines(source, request)
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
        with stage("write"):
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
    if isinstance(result, Skipped) or result.run is None or converts(result.planned, request):
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
        _refuse_kind(path, source, request)
        _refuse_hard_links(path, target)
        result = compact(source, request)
        warning = None
        if isinstance(result, Compacted):
            _refuse_in_place(result)
            _refuse_forked(result, target)
            _refuse_at_work(result.planned, target)
            store(result, str(target), request.level)
            with stage("write"):
                write_file(target, result.output, like=os.stat(target), source=source)
        else:
            warning = record_skip(result.skip, path, request)
        return _done(source, result, path, request, warning)


def rehearse_in_place(path: str, request: Request) -> Done:
    """What `compact_in_place` would do with a file, its refusals included; nothing is written or sent."""
    target = Path(os.path.realpath(path))
    with open_source(path) as source:
        _refuse_kind(path, source, request)
        _refuse_hard_links(path, target)
        if isinstance(request.summarizer, Prompted):
            return rehearse(source, request, request.summarizer)
        result = compact(source, request)
        if isinstance(result, Compacted):
            _refuse_in_place(result)
            _refuse_forked(result, target)
        return _done(source, result, None, request)


def attempt_in_place(path: str, request: Request, min_age: float = 0, *, dry_run: bool = False) -> Done:
    """As `compact_in_place`, with an error as part of the result: one bad file never stops the rest."""
    try:
        if changed_lately(Path(path), min_age):
            raise SourceBusy(f"changed within the last {min_age:g} s: its client may still be at it "
                             "(--min-age)", path=path)  # fmt: skip
        if dry_run:
            return rehearse_in_place(path, request)
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


def _refuse_kind(path: str, source: Source, request: Request) -> None:
    """What is one file for several conversations, or packed, is written elsewhere."""
    if own_lines(source, request) is not None:
        raise UsageError(
            f"{path}: each line is a conversation of its own: write it with -o", code="NOT_IN_PLACE"
        )
    if source.compressed:
        raise UsageError(f"{path}: a compressed transcript can't be compacted in place: write it with -o",
                         code="NOT_IN_PLACE")  # fmt: skip
    if request.to:
        raise UsageError("--to writes another file beside the transcript: it does not go with --in-place")


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


def _refuse_forked(result: Compacted, target: Path) -> None:
    """A client whose threads have forks cuts their bases at an offset: what lies there may not move."""
    session = result.planned.session
    if result.run is None or not session.session_id or not hasattr(FORMATS[session.format], "LOCKS"):
        return
    if forks := forks_of(target, session.session_id):
        more = f" and {len(forks) - 1} more" if len(forks) > 1 else ""
        raise HasForks(
            f"{Path(forks[0]).name}{more} is a fork that reads its earlier turns out of this file: write the result "
            "elsewhere (-o, --output-dir) or use --append",
            path=result.planned.path,
        )
