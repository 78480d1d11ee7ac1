"""What a user does with the archive itself: how large it is, all originals back as files, and pruning.

Pruning removes only what nothing can need any more: the place a result was written to is known and empty,
no transcript at hand has its marker, and it is not young.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from haocompact.archive import Archive, Archives, Run, Stats
from haocompact.errors import ArchiveError, HaoError, UsageError, WriteError
from haocompact.files import open_source, transcripts_under, write_error, write_stream
from haocompact.pipeline import Request, opened_archives
from haocompact.records import chunks_of

_MARKER = re.compile(rb"<<ccr:([0-9a-f]{16})>>")
_OVERLAP = 32  # bytes; longer than a marker


def stats(request: Request) -> Iterator[tuple[Path, Stats]]:
    """Path and figures of each archive."""
    with opened_archives(request) as archives:
        for archive in archives:
            yield archive.path, archive.stats()


# ---------------------------------------------------------------------------------------- export
@dataclass(frozen=True, slots=True)
class Exported:
    """One original that was written to `path`, or the error that prevented it."""

    run: Run
    path: Path
    error: HaoError | None = None


def export(request: Request, folder: Path) -> Iterator[Exported]:
    """Write the input of every compaction into a folder, oldest first; equal ones once, none over another file."""
    with opened_archives(request) as archives:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error) from error
        written = set[str]()
        for run in sorted(archives.runs(), key=lambda run: (run.created, run.source)):
            if run.input_sha256 not in written:
                written.add(run.input_sha256)
                yield _exported(archives, run, folder / file_name(run))


def file_name(run: Run) -> str:
    """The name of the transcript's file, reduced to harmless letters, and the beginning of its SHA-256."""
    stem = os.path.basename(run.source).removesuffix(".jsonl")
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', stem).strip('_-')[:80] or 'transcript'}-{run.input_sha256[:16]}.jsonl"


def _exported(archives: Archives, run: Run, target: Path) -> Exported:
    try:
        if os.path.lexists(target):
            with open_source(str(target)) as there:
                if there.compressed or there.sha256 != run.input_sha256:
                    raise WriteError("there is another file of this name", path=str(target))
        else:
            write_stream(target, archives.restore(run))
    except HaoError as error:
        error.path = error.path or run.source
        return Exported(run, target, error)
    return Exported(run, target)


# ----------------------------------------------------------------------------------------- prune
def prunable(request: Request, folders: Sequence[str], older_than: float) -> list[Run]:
    """The runs that no transcript needs any more, oldest first. `folders` are searched for markers, too.

    `older_than`: seconds since a run was archived, below which it is left alone.
    """
    with _one_archive(request) as archive:
        return _prunable(archive, folders, older_than)


def prune(request: Request, folders: Sequence[str], older_than: float) -> list[Run]:
    """Remove what `prunable` lists; returns what was removed, oldest first."""
    with _one_archive(request) as archive:
        doomed = set(_prunable(archive, folders, older_than))
        removed = list[Run]()

        def keep(run: Run) -> bool:  # asked once more while nobody else can store
            if run not in doomed or not _gone(run, archive.places(run.hash), folders):
                return True
            removed.append(run)
            return False

        if doomed:
            archive.prune(keep)
            archive.forget(run.source for run in removed)
        return removed[::-1]


def _one_archive(request: Request) -> Archive:
    named = request.archives or ((request.archive,) if request.archive is not None else ())
    if len(named) != 1 or named[0].is_dir():
        raise UsageError("--prune works on one archive: name it with --archive")
    if not named[0].is_file():
        raise ArchiveError("there is no archive here", path=str(named[0]))
    return Archive.open(named[0], create=True)


def _prunable(archive: Archive, folders: Sequence[str], older_than: float) -> list[Run]:
    for folder in folders:
        if not os.path.isdir(folder):
            raise UsageError(f"{folder}: --prune takes a folder of transcripts")
    runs = archive.runs()
    places = {run.hash: archive.places(run.hash) for run in runs}
    before = time.time() - older_than
    gone = [r for r in runs if _archived_at(r) <= before and _gone(r, places[r.hash], folders)]
    if not gone:
        return []
    known = {place for found in places.values() for place in found} | {run.source for run in runs}
    named = markers_in([*known, *(path for path, _ in transcripts_under(folders))])
    return [run for run in reversed(gone) if run.hash not in named]


def _archived_at(run: Run) -> float:
    """Seconds since the epoch; a time that can't be read counts as now."""
    try:
        return datetime.fromisoformat(run.created).timestamp()
    except ValueError:
        return time.time()


def _gone(run: Run, places: Sequence[str], folders: Sequence[str]) -> bool:
    """Whether neither the transcript nor any result of its compactions is where it was.

    A stream may have gone anywhere, and a folder that is not there may be on a disk that is not mounted (unless
    it would be below one of `folders`): both count as being there.
    """
    roots = [os.path.join(os.path.abspath(folder), "") for folder in folders]

    def missing(path: str) -> bool:
        if not os.path.isabs(path) or os.path.lexists(path):
            return False
        return os.path.isdir(os.path.dirname(path)) or any(path.startswith(root) for root in roots)

    written = [place for place in places if place != run.source]
    return bool(places) and missing(run.source) and all(map(missing, written))


def markers_in(paths: Iterable[str]) -> set[str]:
    """The hashes of all markers in these files; one that can't be read has none."""
    found = set[str]()
    for path in dict.fromkeys(paths):
        with suppress(HaoError), open_source(path) as source:
            tail = b""
            for chunk in chunks_of(source.data):
                found.update(match.decode() for match in _MARKER.findall(tail + chunk))
                tail = chunk[-_OVERLAP:]
    return found
