"""Content-addressed store of removed bytes: one SQLite file, zstd frames, everything checked by SHA-256.

It knows lines and bytes, not transcripts. One compaction of one transcript is a *run*; what it removed is a
*segment*, shared by every run that removed the same bytes; what it left alone is the run's *rest*:

    run n--1 segment 1--1 stream 1--n piece n--1 frame 1--n part
    run 1--1 stream (the rest)

Beside them, in a table of their own, stand answers of summarizers: a run that was interrupted need not ask again.

A stream is a sequence of lines, cut from its start into frames of about 1 MiB, so streams that begin alike
share their frames; a frame is stored once, under the SHA-256 of its raw bytes. A piece is a frame at its
place in a stream and knows its line numbers, so reading one line costs one frame. A part fits into one row.

Write order, and what a kill leaves behind:

1. Frames are compressed into an unnamed temporary file beside the archive, without a lock: nothing stays.
2. One transaction writes frames, streams, segment and run (`synchronous=FULL`): all of it or nothing.
3. The run is read back and compared: a run that is there, checked or not yet. A failed check removes it.
"""

from __future__ import annotations

import errno
import io
import os
import sqlite3
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import accumulate, count, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zstandard

from haocompact.errors import ArchiveError, DamagedArchive, HaoError, SourceChanged, UnknownHash, WriteError

SCHEMA_VERSION = 3
APPLICATION_ID = 0x48414F43  # "HAOC"
DEFAULT_LEVEL = 6
FRAME_SIZE = 1 << 20  # raw bytes after which a frame is closed
LONG_FRAME = 2 * FRAME_SIZE  # raw bytes; only a single line makes a longer frame
PART_SIZE = 8 << 20  # compressed bytes in one row, far below SQLite's limit of 1 GB
PAGE_SIZE = 1024  # the end of a row wastes less of it, and rows are few and large
WINDOW_LOG = 27  # the largest window every zstd reads without being asked
BUSY_SECONDS = 60.0

_SCHEMA = f"""
CREATE TABLE frames (id INTEGER PRIMARY KEY, sha256 BLOB NOT NULL UNIQUE);
CREATE TABLE parts (
    frame INTEGER NOT NULL, part INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (frame, part));
CREATE TABLE streams (
    id INTEGER PRIMARY KEY, sha256 TEXT NOT NULL, size INTEGER NOT NULL, lines INTEGER NOT NULL);
CREATE TABLE pieces (
    stream INTEGER NOT NULL, first INTEGER NOT NULL, lines INTEGER NOT NULL, frame INTEGER NOT NULL,
    lengths BLOB, PRIMARY KEY (stream, first)) WITHOUT ROWID;
CREATE TABLE segments (
    id INTEGER PRIMARY KEY, hash TEXT NOT NULL UNIQUE, stream INTEGER NOT NULL, messages INTEGER NOT NULL,
    chars INTEGER NOT NULL, format TEXT NOT NULL, created TEXT NOT NULL, source TEXT NOT NULL,
    message_lines BLOB NOT NULL);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, hash TEXT NOT NULL, source TEXT NOT NULL, format TEXT NOT NULL,
    created TEXT NOT NULL, input_sha256 TEXT NOT NULL, input_size INTEGER NOT NULL,
    output_sha256 TEXT NOT NULL, output_size INTEGER NOT NULL, recipe BLOB NOT NULL, rest INTEGER NOT NULL,
    UNIQUE (hash, source, input_sha256, output_sha256));
CREATE INDEX runs_output ON runs (output_sha256);
PRAGMA application_id = {APPLICATION_ID};
"""

# Made when it is first needed, so archives without it stay readable, and those with it by older programs.
_ANSWERS = """CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY, text BLOB NOT NULL, sha256 BLOB NOT NULL, created TEXT NOT NULL)"""

_STEPS = (  # from one schema version to the next; step n makes version n + 1
    _SCHEMA,
    """CREATE TABLE seen (
    path TEXT NOT NULL PRIMARY KEY, stamp TEXT NOT NULL, settings TEXT NOT NULL, outcome TEXT NOT NULL,
    sha256 TEXT NOT NULL, checked INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE places (hash TEXT NOT NULL, path TEXT NOT NULL, PRIMARY KEY (hash, path)) WITHOUT ROWID""",
    """CREATE TABLE new_segments (
    id INTEGER PRIMARY KEY, hash TEXT NOT NULL, stream INTEGER NOT NULL, messages INTEGER NOT NULL,
    chars INTEGER NOT NULL, format TEXT NOT NULL, created TEXT NOT NULL, source TEXT NOT NULL,
    message_lines BLOB NOT NULL);
INSERT INTO new_segments SELECT * FROM segments;
DROP TABLE segments;
ALTER TABLE new_segments RENAME TO segments;
CREATE INDEX segments_hash ON segments (hash);
ALTER TABLE runs ADD COLUMN segment INTEGER NOT NULL DEFAULT 0;
UPDATE runs SET segment = (SELECT id FROM segments WHERE segments.hash = runs.hash)""",
)

_SWEEP = (
    "DELETE FROM segments WHERE id NOT IN (SELECT segment FROM runs)",
    "DELETE FROM places WHERE hash NOT IN (SELECT hash FROM runs)",
    "DELETE FROM streams WHERE id NOT IN (SELECT stream FROM segments UNION SELECT rest FROM runs)",
    "DELETE FROM pieces WHERE stream NOT IN (SELECT id FROM streams)",
    "DELETE FROM frames WHERE id NOT IN (SELECT frame FROM pieces)",
    "DELETE FROM parts WHERE frame NOT IN (SELECT id FROM frames)",
)

_SEGMENTS = """SELECT hash, sha256, size, lines, messages, chars, format, created, source
    FROM segments JOIN streams ON streams.id = segments.stream"""

_PIECES = """SELECT first, lines, sha256, lengths, frame
    FROM pieces LEFT JOIN frames ON frames.id = pieces.frame WHERE stream = ?"""

_RUN_COLUMNS = "hash, source, format, created, input_sha256, input_size, output_sha256, output_size"

_THIS_RUN = "hash = ? AND source = CAST(? AS TEXT) AND input_sha256 = ? AND output_sha256 = ?"


@dataclass(frozen=True, slots=True)
class Segment:
    """What one compaction removed.

    `hash` is the marker's 16 hexadecimal digits, `size` in bytes, `created` ISO 8601 in UTC, `source` the
    transcript's path.
    """

    hash: str
    sha256: str
    size: int
    lines: int
    messages: int
    chars: int
    format: str
    created: str
    source: str


@dataclass(frozen=True, slots=True)
class Run:
    """One compaction of one transcript: everything needed to undo it.

    `recipe` counts lines in the input's order: removed, rest, removed, rest, ... (the first may be 0), so
    `(0, 1, 5, 2)` reads one line of the rest, five removed lines, two lines of the rest.
    """

    hash: str
    source: str
    format: str
    created: str
    input_sha256: str
    input_size: int
    output_sha256: str
    output_size: int
    recipe: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing `verify` found: the hash it belongs to, and what is wrong in plain words."""

    hash: str
    what: str


@dataclass(frozen=True, slots=True)
class Stats:
    """`raw_bytes`: the originals of all runs together; `stored_bytes`: what the archive occupies.

    `oldest` and `newest`: when the first and the last run were stored, None in an empty archive.
    """

    segments: int
    runs: int
    raw_bytes: int
    stored_bytes: int
    oldest: str | None = None
    newest: str | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A file that needs no second look: in the state `stamp`, under `settings`, it was left as it is.

    `sha256` of its bytes may be empty. `checked`: when it was read, in nanoseconds since the epoch.
    """

    path: str
    stamp: str
    settings: str
    outcome: str
    sha256: str
    checked: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """A frame at its place in a stream: lines `first` to `first + lines - 1`.

    `lengths` are the packed lengths of the lines in bytes, or None where every line ends at its line feed.
    `parts` reads the frame's compressed bytes.
    """

    first: int
    lines: int
    sha256: bytes
    lengths: bytes | None
    parts: Callable[[], Iterable[bytes]]

    def inflate(self) -> Iterator[bytes]:
        """The raw bytes in chunks; unchecked."""
        inflater = zstandard.ZstdDecompressor().decompressobj()
        return (inflater.decompress(part) for part in self.parts())

    def read(self) -> bytes:
        """The raw bytes. Raises DamagedArchive when they do not match their SHA-256."""
        data = b"".join(self.inflate())
        if sha256(data).digest() != self.sha256:
            raise DamagedArchive(
                f"lines {self.first + 1}-{self.first + self.lines} do not match their SHA-256"
            )
        return data

    def read_lines(self) -> list[bytes]:
        """The lines, with their terminators. Raises DamagedArchive."""
        lines = _split(self.read(), self.lines, self.lengths)
        if len(lines) != self.lines:
            raise DamagedArchive(f"a frame has {len(lines)} lines instead of {self.lines}")
        return lines


@dataclass(frozen=True, slots=True)
class _Stream:
    """A sequence of lines: the SHA-256 and the size in bytes of all of them, and where they are."""

    sha256: str
    size: int
    lines: int
    pieces: list[_Piece]


class Archive:
    """An open archive file; a context manager. Many processes may use one file at once.

    Any method may raise ArchiveError (locked, read-only), DamagedArchive, or WriteError (disk full), but no
    error of sqlite3 or zstd. Iterators raise when they are advanced.
    """

    def __init__(self, path: Path, db: sqlite3.Connection, level: int) -> None:
        self.path = path
        self._db = db
        self._level = level
        self._streams = _Streams(db)
        self._place = _place(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, create: bool = False, level: int = DEFAULT_LEVEL) -> Self:
        """Open the archive at `path`. `create` makes it: mode 0600, its directory 0700 if that is new.

        `level` is the zstd level of frames yet to be stored.
        """
        path = Path(path).absolute()
        with _plain_errors(path):
            if create:
                _create_file(path)
            elif not path.is_file():
                raise ArchiveError("there is no archive here")
            return cls(path, _connect(path, create), level)

    def close(self) -> None:
        with _plain_errors(self.path):
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def store(
        self,
        run: Run,
        removed: Iterable[bytes],
        rest: Iterable[bytes],
        *,
        messages: int,
        chars: int,
        message_lines: Sequence[int],
        place: str = "",
    ) -> Segment:
        """Keep one run: its removed and its other lines, with their terminators, each in the input's order.

        `place` is where its result will be written: a path, or - for a stream.

        `removed` is used up before `rest` is begun; no more than a frame is held. `message_lines` are the
        0-based numbers of the removed lines that carry a message. Equal segments and runs are stored once.
        Returns the stored segment. Raises SourceChanged when the lines do not fit `run`, and DamagedArchive
        when `run`'s input does not come back; nothing of the run stays then.
        """
        with closing(_Spool(self.path.parent, self._level)) as spool:
            gone = self._compress(removed, spool)
            kept = self._compress(rest, spool)
            _check_fit(run, gone, kept)
            size = (gone.sha256, gone.size, gone.lines)
            segment = Segment(run.hash, *size, messages, chars, run.format, run.created, run.source)
            with _plain_errors(self.path):
                self._keep(run, segment, message_lines, gone, kept, [place] * bool(place))
                if _place(self.path) != self._place:
                    raise ArchiveError("the archive was moved or removed meanwhile; nothing was changed")
        return self.find(run.hash, run.source)

    def find(self, hash: str, source: str = "") -> Segment:
        """The segment of this hash. Raises UnknownHash.

        A format that counts a hash of its own may give one to segments of different bytes: that of the
        transcript at `source` is found then, or else the first.
        """
        with _plain_errors(self.path):
            row = self._db.execute(
                f"{_SEGMENTS} WHERE segments.id = ?", (self._number(hash, source),)
            ).fetchone()
        return Segment(*row)

    def _number(self, hash: str, source: str = "", sha256: str | None = None) -> int:
        """The row of a segment: with this hash, then of this source, or these bytes. Raises UnknownHash."""
        query = """SELECT segments.id FROM segments JOIN streams ON streams.id = segments.stream
            WHERE hash = :hash AND (:sha256 IS NULL OR sha256 = :sha256)
            ORDER BY segments.id IN (SELECT segment FROM runs WHERE hash = :hash AND source = CAST(:source AS TEXT))
            DESC, segments.id"""
        with _plain_errors(self.path):
            found = {"hash": hash, "sha256": sha256, "source": _text(source)}
            row = self._db.execute(query, found).fetchone()
            if row is None:
                raise UnknownHash(f"not found: the archive has no segment {hash}")
        return int(row[0])

    def segments(self) -> Iterator[Segment]:
        """All segments, in the order they were stored."""
        with _plain_errors(self.path):
            rows = self._db.execute(f"{_SEGMENTS} ORDER BY segments.id").fetchall()
        return (Segment(*row) for row in rows)

    def runs(self, hash: str | None = None, *, output_sha256: str | None = None) -> list[Run]:
        """The runs, newest first: all, those of one segment, or those that wrote one output."""
        wanted = {"hash": hash, "output_sha256": output_sha256}
        given = {column: value for column, value in wanted.items() if value is not None}
        condition = " AND ".join(f"{column} = ?" for column in given) or "1"
        query = f"SELECT {_RUN_COLUMNS}, recipe FROM runs WHERE {condition} ORDER BY created DESC, id DESC"
        with _plain_errors(self.path):
            rows = self._db.execute(query, tuple(given.values())).fetchall()
            return [Run(*(*row[:-1], _unpack(row[-1]))) for row in rows]

    def message_lines(self, hash: str, source: str = "") -> Sequence[int]:
        """The 0-based numbers of the segment's lines that carry a message, in conversation order."""
        with _plain_errors(self.path):
            return _unpack(self._of_segment(self._number(hash, source), "message_lines"))

    def lines(self, hash: str, numbers: Iterable[int], source: str = "") -> Iterator[bytes]:
        """The segment's lines with these 0-based numbers, as asked; reads only the frames they are in.

        Only the last frame is held, so ask in ascending order. Raises IndexError past the end.
        """
        stream = self._of_segment(self._number(hash, source), "stream")
        first, held = 0, list[bytes]()
        for number in numbers:
            if not first <= number < first + len(held):
                with _plain_errors(self.path):
                    piece = self._streams.piece_at(stream, number)
                    first, held = piece.first, piece.read_lines()
            yield held[number - first]

    def raw(self, hash: str, source: str = "") -> Iterator[bytes]:
        """All lines of the segment. Raises DamagedArchive after the last one when the SHA-256 differs."""
        segment, seen = self.find(hash, source), sha256()
        with _plain_errors(self.path):
            for piece in self._streams.pieces(self._of_segment(self._number(hash, source), "stream")):
                for line in piece.read_lines():
                    seen.update(line)
                    yield line
            if seen.hexdigest() != segment.sha256:
                raise DamagedArchive(f"segment {hash} does not match its SHA-256")

    def restore(self, run: Run) -> Iterator[bytes]:
        """The run's whole input in chunks. Raises DamagedArchive after the last when the SHA-256 differs."""
        seen = sha256()
        with _plain_errors(self.path):
            for _, chunk in self._assemble(run):
                seen.update(chunk)
                yield chunk
            if seen.hexdigest() != run.input_sha256:
                raise DamagedArchive(f"the original of {run.source} does not match its SHA-256")

    def verify(self) -> Iterator[Damage]:
        """Re-hash every frame, segment and run; yield what is damaged.

        Raises DamagedArchive when SQLite itself finds the file malformed.
        """
        with _plain_errors(self.path):
            problem = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if problem != "ok":
                raise DamagedArchive(f"the archive is damaged ({problem})")
            for segment in self.segments():
                yield from (Damage(segment.hash, what) for what in self._segment_damage(segment))
            for run in self.runs():
                yield from (Damage(run.hash, what) for what in self._run_damage(run))

    def answer(self, key: str) -> str | None:
        """The text kept under `key`; None when there is none, or when it is damaged: it can be asked for again."""
        with _plain_errors(self.path):
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'answers'").fetchone():
                return None
            row = self._db.execute("SELECT text, sha256 FROM answers WHERE key = ?", (key,)).fetchone()
            if row is None or sha256(row[0]).digest() != row[1]:
                return None
            return bytes(row[0]).decode()

    def keep_answer(self, key: str, text: str, created: str) -> None:
        """Keep `text` under `key`, in place of what stood there. `created`: ISO 8601 in UTC."""
        data = text.encode("utf-8", "replace")
        with _plain_errors(self.path), self._transaction():
            self._db.execute(_ANSWERS)
            values = (key, data, sha256(data).digest(), created)
            self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", values)

    def stats(self) -> Stats:
        """How much is stored, and in how many bytes."""
        query = "SELECT (SELECT count(*) FROM segments), count(*), coalesce(sum(input_size), 0) FROM runs"
        times = "SELECT min(created), max(created) FROM runs"
        pages = "SELECT (page_count - freelist_count) * page_size FROM " + ", ".join(
            f"pragma_{name}" for name in ("page_count", "freelist_count", "page_size")
        )
        with _plain_errors(self.path):
            found = (row for text in (query, pages, times) for row in self._db.execute(text).fetchone())
            return Stats(*found)

    def prune(self, keep: Callable[[Run], bool]) -> list[Segment]:
        """Remove the runs that `keep` refuses, then what no run refers to. Returns the segments that went.

        `keep` is asked while the archive is locked, so nobody stores meanwhile. A run is stored before its
        transcript is rewritten, so `keep` must not refuse young ones.
        """
        with _plain_errors(self.path):
            with self._transaction():
                before = list(self.segments())
                self._forget([run for run in self.runs() if not keep(run)])
                left = set(self.segments())
            self._db.executescript("PRAGMA incremental_vacuum")
        return [segment for segment in before if segment not in left]

    def places(self, hash: str) -> list[str]:
        """Where the results of this segment's runs were written: paths, or - for a stream."""
        with _plain_errors(self.path):
            rows = self._db.execute("SELECT path FROM places WHERE hash = ?", (hash,)).fetchall()
        return [row[0] for row in rows]

    def seen(self, path: str) -> Seen | None:
        """What is remembered of a file, if anything."""
        with _plain_errors(self.path):
            row = self._db.execute(
                "SELECT * FROM seen WHERE path = CAST(? AS TEXT)", (_text(path),)
            ).fetchone()
        return None if row is None else Seen(*row)

    def remember(self, files: Iterable[Seen]) -> None:
        """Note files that need no second look, in one transaction."""
        rows = [(_text(f.path), f.stamp, f.settings, f.outcome, f.sha256, f.checked) for f in files]
        with _plain_errors(self.path), self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO seen VALUES (CAST(? AS TEXT), ?, ?, ?, ?, ?)", rows)

    def forget(self, paths: Iterable[str]) -> None:
        """Remember these files no longer."""
        with _plain_errors(self.path), self._transaction():
            self._db.executemany(
                "DELETE FROM seen WHERE path = CAST(? AS TEXT)", [(_text(p),) for p in paths]
            )

    def take_in(self, other: Path) -> int:
        """`merge` another archive, then delete its file: whoever is still storing there is told so."""
        with _plain_errors(other), Archive.open(other, create=True) as source:
            source._db.execute("BEGIN IMMEDIATE")  # from here on nobody stores there
            taken = self.merge(other)
            for name in (other, *(other.with_name(other.name + end) for end in ("-wal", "-shm"))):
                name.unlink(missing_ok=True)
            source._db.execute("ROLLBACK")
        return taken

    def merge(self, other: str | os.PathLike[str]) -> int:
        """Take over the runs of another archive file, each in its own transaction. Returns how many were new.

        A run that can't be taken over does not stop the others; the first such error is raised at the end.
        """
        taken, failures = 0, list[ArchiveError]()
        with Archive.open(other) as source:
            for run in reversed(source.runs()):
                try:
                    with _plain_errors(self.path):
                        taken += self._take(run, source)
                except ArchiveError as error:
                    failures.append(error)
        if failures:
            raise failures[0]
        return taken

    def _take(self, run: Run, source: Archive) -> bool:
        gone, kept = (source._streams.get(number) for number in source._streams_of(run))
        number = source._segment_of(run)
        segment = Segment(*source._db.execute(f"{_SEGMENTS} WHERE segments.id = ?", (number,)).fetchone())
        numbers = _unpack(source._of_segment(number, "message_lines"))
        return self._keep(run, segment, numbers, gone, kept, source.places(run.hash))

    def _compress(self, lines: Iterable[bytes], spool: _Spool) -> _Stream:
        """Read a stream to its end; frames the archive does not hold yet go into the spool."""
        whole, size, number, pieces = sha256(), 0, 0, list[_Piece]()
        for group in _groups(lines):
            data = b"".join(group)
            whole.update(data)
            digest = sha256(data).digest()
            with _plain_errors(self.path):
                parts = _pruned if self._streams.frame(digest) else spool.add(data)
            pieces.append(_Piece(number, len(group), digest, _lengths(group, data), parts))
            number, size = number + len(group), size + len(data)
            del group, data
        with _plain_errors(self.path):
            spool.finish()
        return _Stream(whole.hexdigest(), size, number, pieces)

    def _keep(
        self,
        run: Run,
        segment: Segment,
        message_lines: Sequence[int],
        gone: _Stream,
        kept: _Stream,
        places: Iterable[str],
    ) -> bool:
        """Write a run in one transaction and read it back. Returns whether it is new."""
        with self._transaction():
            new = self._insert_run(run, kept, self._insert_segment(segment, message_lines, gone))
            rows = [(run.hash, _text(place)) for place in places]
            self._db.executemany("INSERT OR IGNORE INTO places VALUES (?, CAST(? AS TEXT))", rows)
        try:
            self._read_back(run, segment)
        except Exception:
            if new:
                with self._transaction():
                    self._forget([run])
            raise
        return new

    def _insert_segment(self, segment: Segment, message_lines: Sequence[int], stream: _Stream) -> int:
        """The row of a segment; equal ones share it."""
        try:
            return self._number(segment.hash, sha256=segment.sha256)
        except UnknownHash:
            pass
        values = (segment.messages, segment.chars, segment.format, segment.created, _text(segment.source))
        return self._db.execute(
            """INSERT INTO segments
            (hash, stream, messages, chars, format, created, source, message_lines)
            VALUES (?, ?, ?, ?, ?, ?, CAST(? AS TEXT), ?)""",
            (segment.hash, self._streams.add(stream), *values, _pack(message_lines)),
        ).lastrowid or 0  # fmt: skip

    def _insert_run(self, run: Run, rest: _Stream, segment: int) -> bool:
        if self._db.execute(f"SELECT 1 FROM runs WHERE {_THIS_RUN}", _run_key(run)).fetchone():
            return False
        sizes = (run.input_sha256, run.input_size, run.output_sha256, run.output_size)
        values = (run.hash, _text(run.source), run.format, run.created, *sizes)
        self._db.execute(
            f"""INSERT INTO runs ({_RUN_COLUMNS}, recipe, rest, segment)
            VALUES (?, CAST(? AS TEXT), ?, ?, ?, ?, ?, ?, ?, ?, ?)""",
            (*values, _pack(run.recipe), self._streams.add(rest), segment),
        )
        return True

    def _forget(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self._db.execute(f"DELETE FROM runs WHERE {_THIS_RUN}", _run_key(run))
        for statement in _SWEEP:
            self._db.execute(statement)

    def _read_back(self, run: Run, segment: Segment) -> None:
        """Raise DamagedArchive unless the stored run gives back its input and its removed bytes."""
        whole, gone = sha256(), sha256()
        for removed, chunk in self._assemble(run):
            whole.update(chunk)
            if removed:
                gone.update(chunk)
        if (whole.hexdigest(), gone.hexdigest()) != (run.input_sha256, segment.sha256):
            raise DamagedArchive(f"what was stored of {run.source} does not read back as it was")

    def _assemble(self, run: Run) -> Iterator[tuple[bool, bytes]]:
        """The run's input in chunks, each with whether it was removed; unchecked."""
        readers = [_Reader(self._streams.pieces(number)) for number in self._streams_of(run)]
        for index, lines in enumerate(run.recipe):
            for chunk in readers[index % 2].take(lines):
                yield index % 2 == 0, chunk

    def _streams_of(self, run: Run) -> tuple[int, int]:
        """The stream of the run's segment and the stream of its rest."""
        rest = self._db.execute(f"SELECT rest FROM runs WHERE {_THIS_RUN}", _run_key(run)).fetchone()
        return self._of_segment(self._segment_of(run), "stream"), rest[0]

    def _segment_of(self, run: Run) -> int:
        """The row of the run's segment. Raises UnknownHash where there is no such run."""
        row = self._db.execute(f"SELECT segment FROM runs WHERE {_THIS_RUN}", _run_key(run)).fetchone()
        if row is None:
            raise UnknownHash(f"the archive has no run of {run.source} under {run.hash}")
        return int(row[0])

    def _of_segment(self, number: int, column: str) -> Any:
        with _plain_errors(self.path):
            row = self._db.execute(f"SELECT {column} FROM segments WHERE id = ?", (number,)).fetchone()
            if row is None:
                raise DamagedArchive(f"segment {number} is missing")
        return row[0]

    def _segment_damage(self, segment: Segment) -> Iterator[str]:
        """What is wrong with a segment, frame by frame."""
        whole, lines, placed, readable = sha256(), 0, True, True
        number = self._number(segment.hash, sha256=segment.sha256)
        for piece in self._streams.pieces(self._of_segment(number, "stream")):
            placed = placed and piece.first == lines
            lines += piece.lines
            try:
                with _plain_errors(self.path):
                    whole.update(piece.read())
            except DamagedArchive as error:
                readable = False
                yield f"{error.args[0]}, removed from {segment.source}"
        same = (whole.hexdigest(), lines) == (segment.sha256, segment.lines)
        if readable and not (placed and same):
            yield f"the segment removed from {segment.source} does not match its SHA-256"
        try:
            with _plain_errors(self.path):
                _unpack(self._of_segment(number, "message_lines"))
        except DamagedArchive as error:
            yield f"the message numbers of the segment removed from {segment.source}: {error.args[0]}"

    def _run_damage(self, run: Run) -> Iterator[str]:
        try:
            for _ in self.restore(run):
                pass
        except ArchiveError as error:
            yield f"the original of {run.source} can't be restored: {error.args[0]}"

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


class Archives:
    """Several archives read as one; a context manager. The first that has a segment gives it."""

    def __init__(self, archives: Sequence[Archive]) -> None:
        self._archives = archives

    @classmethod
    def open(cls, paths: Iterable[Path]) -> Self:
        """Open archives; a folder stands for the *.db files in it. Raises ArchiveError when there is none."""
        with ExitStack() as stack:
            opened = [stack.enter_context(Archive.open(file)) for path in paths for file in _files_of(path)]
            stack.pop_all()
        return cls(opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for archive in self._archives:
            archive.close()

    @property
    def paths(self) -> list[Path]:
        return [archive.path for archive in self._archives]

    def __iter__(self) -> Iterator[Archive]:
        return iter(self._archives)

    def holding(self, hash: str) -> Archive:
        """The archive that has this segment. Raises UnknownHash."""
        for archive in self._archives:
            with suppress(UnknownHash):
                archive.find(hash)
                return archive
        names = ", ".join(str(path) for path in self.paths)
        raise UnknownHash(f"not found: there is no segment {hash} in it", path=names)

    def segments(self) -> Iterator[Segment]:
        """The segments of all archives; an equal one comes once."""
        known = set[str]()
        for archive in self._archives:
            for segment in archive.segments():
                if segment.hash not in known:
                    known.add(segment.hash)
                    yield segment

    def runs(self, hash: str | None = None, *, output_sha256: str | None = None) -> list[Run]:
        """As `Archive.runs`, over all archives."""
        found = [run for a in self._archives for run in a.runs(hash, output_sha256=output_sha256)]
        return sorted(dict.fromkeys(found), key=lambda run: run.created, reverse=True)

    def restore(self, run: Run) -> Iterator[bytes]:
        """As `Archive.restore`, from the archive that has the run."""
        owner = next((a for a in self._archives if run in a.runs(run.hash)), None)
        if owner is None:
            raise UnknownHash(f"the archive has no run of {run.source} under {run.hash}")
        return owner.restore(run)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.db"))
    if not found:
        raise ArchiveError("there is no archive (*.db) in this folder", path=str(path))
    return found


class _Streams:
    """The tables `streams`, `pieces`, `frames` and `parts`."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def frame(self, digest: bytes) -> int | None:
        """The number of the frame with this SHA-256, if it is stored; numbers start at 1."""
        row = self._db.execute("SELECT id FROM frames WHERE sha256 = ?", (digest,)).fetchone()
        return None if row is None else int(row[0])

    def add(self, stream: _Stream) -> int:
        """Write a stream and those of its frames that are not stored yet. Returns its number."""
        number = self._insert("streams (sha256, size, lines)", stream.sha256, stream.size, stream.lines)
        for piece in stream.pieces:
            frame = self.frame(piece.sha256) or self._add_frame(piece)
            place = (number, piece.first, piece.lines, frame, piece.lengths)
            self._insert("pieces (stream, first, lines, frame, lengths)", *place)
        return number

    def _add_frame(self, piece: _Piece) -> int:
        number = self._insert("frames (sha256)", piece.sha256)
        for part, data in enumerate(piece.parts()):
            self._insert("parts (frame, part, data)", number, part, data)
        return number

    def _insert(self, columns: str, *values: object) -> int:
        marks = ", ".join("?" * len(values))
        return self._db.execute(f"INSERT INTO {columns} VALUES ({marks})", values).lastrowid or 0

    def get(self, number: int) -> _Stream:
        row = self._db.execute("SELECT sha256, size, lines FROM streams WHERE id = ?", (number,)).fetchone()
        if row is None:
            raise DamagedArchive(f"stream {number} is missing")
        return _Stream(*(*row, self.pieces(number)))

    def pieces(self, number: int) -> list[_Piece]:
        rows = self._db.execute(f"{_PIECES} ORDER BY first", (number,)).fetchall()
        return [self._piece(*row) for row in rows]

    def piece_at(self, number: int, line: int) -> _Piece:
        """The piece that has the 0-based line. Raises IndexError past the end."""
        query = f"{_PIECES} AND first <= ? ORDER BY first DESC LIMIT 1"
        row = self._db.execute(query, (number, line)).fetchone()
        if row is None or line >= row[0] + row[1]:
            raise IndexError(f"the segment has no line {line}")
        return self._piece(*row)

    def _piece(self, first: int, lines: int, digest: bytes, lengths: bytes | None, frame: int) -> _Piece:
        return _Piece(first, lines, digest, lengths, partial(self._parts, frame))

    def _parts(self, frame: int) -> Iterator[bytes]:
        query = "SELECT data FROM parts WHERE frame = ? AND part = ?"
        for part in count():
            row = self._db.execute(query, (frame, part)).fetchone()
            if row is None:
                return
            yield row[0]


class _Reader:
    """Takes lines off a stream from its start; a frame that is taken whole is never split."""

    def __init__(self, pieces: Iterable[_Piece]) -> None:
        self._pieces = iter(pieces)
        self._held: list[bytes] = []
        self._next = 0

    def take(self, lines: int) -> Iterator[bytes]:
        """The next `lines` lines in chunks. Raises DamagedArchive when the stream has fewer."""
        while lines > 0:
            if self._next == len(self._held):
                piece = next(self._pieces, None)
                if piece is None:
                    raise DamagedArchive(f"{lines} lines are missing")
                if piece.lines <= lines:
                    yield from piece.inflate()
                    lines -= piece.lines
                    continue
                self._held, self._next = piece.read_lines(), 0
            taken = self._held[self._next : self._next + lines]
            yield b"".join(taken)
            self._next, lines = self._next + len(taken), lines - len(taken)


class _Spool:
    """Compressed frames in an unnamed temporary file, until a transaction copies them into the archive.

    A thread compresses a frame while the next one is read and hashed.
    """

    def __init__(self, directory: Path, level: int) -> None:
        self._level = level
        self._usual = _compressor(level, FRAME_SIZE)
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[tuple[int, list[int]]] | None = None
        with _plain_errors(directory):
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115

    def close(self) -> None:
        self._thread.shutdown()
        self._file.close()

    def add(self, data: bytes) -> Callable[[], Iterator[bytes]]:
        """Compress one frame, once the one before it is. The result reads its parts of at most PART_SIZE bytes."""
        self.finish()
        self._last = self._thread.submit(self._write, data)
        return partial(self._read, self._last)

    def finish(self) -> None:
        """Wait for the last frame. Raises what went wrong with it."""
        if self._last is not None:
            self._last.result()

    def _write(self, data: bytes) -> tuple[int, list[int]]:
        start, sizes = self._file.tell(), list[int]()
        compressor = self._usual if len(data) < LONG_FRAME else _compressor(self._level, len(data))
        for part in _compressed(data, compressor):
            self._file.write(part)
            sizes.append(len(part))
        return start, sizes

    def _read(self, written: Future[tuple[int, list[int]]]) -> Iterator[bytes]:
        start, sizes = written.result()
        self._file.seek(start)
        yield from (self._file.read(size) for size in sizes)


def _groups(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The lines of each frame: FRAME_SIZE bytes are reached by its last line; a longer line stands alone."""
    group, size = list[bytes](), 0
    for line in lines:
        if group and len(line) >= FRAME_SIZE:
            yield group
            group, size = [], 0
        group.append(line)
        size += len(line)
        if size >= FRAME_SIZE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _lengths(group: list[bytes], data: bytes) -> bytes | None:
    """The packed line lengths of a frame, or None when they follow from its line feeds."""
    feeds = len(group) - (not group[-1].endswith(b"\n"))
    plain = group[-1] and data.count(b"\n") == feeds and all(line.endswith(b"\n") for line in group[:-1])
    return None if plain else _pack([len(line) for line in group])


def _split(data: bytes, lines: int, lengths: bytes | None) -> list[bytes]:
    if lines == 1:
        return [data]
    if lengths is None:
        return io.BytesIO(data).readlines()
    return [data[start:end] for start, end in pairwise(accumulate(_unpack(lengths), initial=0))]


def _pruned() -> Iterable[bytes]:
    raise ArchiveError("another process pruned the archive at the same time; run the command again")


def _compressor(level: int, size: int) -> zstandard.ZstdCompressor:
    """For a frame of `size` raw bytes; a long one gets a window of its size, to find far repetitions."""
    if size < LONG_FRAME:
        return zstandard.ZstdCompressor(level=level)
    window = min(WINDOW_LOG, (size - 1).bit_length())
    parameters = zstandard.ZstdCompressionParameters.from_level(level, source_size=size, window_log=window)
    return zstandard.ZstdCompressor(compression_params=parameters)


def _compressed(data: bytes, compressor: zstandard.ZstdCompressor) -> Iterator[bytes]:
    """One zstd frame in parts of at most PART_SIZE bytes."""
    parts = compressor.chunker(size=len(data), chunk_size=min(PART_SIZE, len(data) + 1024))
    yield from parts.compress(data)
    yield from parts.finish()  # type: ignore[no-untyped-call]


def _pack(numbers: Sequence[int]) -> bytes:
    """Whole numbers as checksummed zstd of 64-bit little-endian steps: `(3, 4, 6)` packs `(3, 1, 2)`."""
    steps = [new - old for old, new in pairwise([0, *numbers])]
    return zstandard.ZstdCompressor(write_checksum=True).compress(struct.pack(f"<{len(steps)}q", *steps))


def _unpack(blob: bytes) -> tuple[int, ...]:
    inflater = zstandard.ZstdDecompressor().decompressobj()  # trusts no size that the blob claims
    data = inflater.decompress(blob)
    if not inflater.eof:
        raise zstandard.ZstdError("a list of numbers is cut short")
    return tuple(accumulate(struct.unpack(f"<{len(data) // 8}q", data)))


def _check_fit(run: Run, gone: _Stream, kept: _Stream) -> None:
    """Raise SourceChanged when these are not as many lines and bytes as the run's input has."""
    expected = (sum(run.recipe[::2]), sum(run.recipe[1::2]), run.input_size)
    if (gone.lines, kept.lines, gone.size + kept.size) != expected:
        raise SourceChanged("it changed while it was being archived; nothing was stored", path=run.source)


def _text(path: str) -> bytes:
    """A path as SQLite stores it; a file name need not be UTF-8."""
    return path.encode("utf-8", "surrogateescape")


def _run_key(run: Run) -> tuple[str, bytes, str, str]:
    return run.hash, _text(run.source), run.input_sha256, run.output_sha256


def _create_file(path: Path) -> None:
    """Make an empty file of mode 0600 unless there is one, its directory 0700, and both durable."""
    if path.exists():
        return
    if not path.parent.is_dir():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    for directory in path.parents[:2]:
        _sync_directory(directory)


def _place(path: Path) -> tuple[int, int] | None:
    """Which file stands at a path now."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


def _sync_directory(directory: Path) -> None:
    if os.name == "nt" or not os.access(directory, os.R_OK):
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _connect(path: Path, create: bool) -> sqlite3.Connection:
    """A checked connection; a directory that can't be written is read as it stands."""
    waiting = path.with_name(path.name + "-wal").exists()
    fixed = not os.access(path.parent, os.W_OK) and not waiting
    mode = "mode=ro&immutable=1" if fixed else "mode=rw"
    db = sqlite3.connect(f"{path.as_uri()}?{mode}", timeout=BUSY_SECONDS, isolation_level=None, uri=True)
    try:
        db.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
        db.execute("PRAGMA synchronous=FULL")
        if not fixed and (create or 0 < _version(db) < SCHEMA_VERSION):
            _create_schema(db)
        _check_schema(db)
        if create and not fixed:
            _switch_to_wal(db)
    except BaseException:
        db.close()
        raise
    return db


def _create_schema(db: sqlite3.Connection) -> None:
    """Make the tables that are missing, unless another process is faster. A newer schema is left alone."""
    if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        if not 0 < _version(db) < SCHEMA_VERSION or _application(db) != APPLICATION_ID:
            return
    else:
        db.execute(f"PRAGMA page_size={PAGE_SIZE}")
        db.execute("PRAGMA auto_vacuum=INCREMENTAL")
    db.execute("BEGIN IMMEDIATE")
    for step in _STEPS[_version(db) :]:
        for statement in step.split(";"):
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {max(SCHEMA_VERSION, _version(db))}")
    db.execute("COMMIT")
    db.execute("PRAGMA incremental_vacuum").fetchall()


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _application(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA application_id").fetchone()[0])


def _switch_to_wal(db: sqlite3.Connection) -> None:
    """Where two processes switch at once, SQLite refuses one without waiting."""
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL").fetchone()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)


def _check_schema(db: sqlite3.Connection) -> None:
    """Raise unless this is an archive of a version this program reads."""
    version = _version(db)
    if _application(db) != APPLICATION_ID:
        raise DamagedArchive("the file is not an archive of haocompact")
    if version < SCHEMA_VERSION:
        raise ArchiveError(f"the archive has schema {version}; open it once where it can be written")
    if version > SCHEMA_VERSION:
        raise ArchiveError(
            f"the archive has schema {version}, this program reads up to {SCHEMA_VERSION}; update haocompact"
        )


# What reading raises where a damaged file gives bytes that are no zstd, or a value of another type.
_NONSENSE = (zstandard.ZstdError, struct.error, UnicodeDecodeError, TypeError)


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """Turn errors of sqlite3, zstd and the disk into one line that names the archive and what happened."""
    try:
        yield
    except HaoError as error:
        error.path = error.path or str(path)
        raise
    except sqlite3.Error as error:
        raise _sqlite_error(error, path) from error
    except _NONSENSE as error:
        raise DamagedArchive(f"what is stored makes no sense ({error})", path=str(path)) from error
    except OSError as error:
        raise _disk_error(error, path) from error


def _sqlite_error(error: sqlite3.Error, path: Path) -> HaoError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if code != sqlite3.SQLITE_IOERR_SHORT_READ:
        code &= 0xFF
    if code == sqlite3.SQLITE_FULL:
        return WriteError("the disk is full; nothing was changed", path=str(path))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        text = f"another process has held the archive for {BUSY_SECONDS:.0f} s; try again later"
        return ArchiveError(text, path=str(path))
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR):
        return ArchiveError(f"the archive can't be read or written ({error})", path=str(path))
    return DamagedArchive(f"the archive is damaged ({error})", path=str(path))


def _disk_error(error: OSError, path: Path) -> HaoError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WriteError("the disk is full; nothing was changed", path=str(path))
    return ArchiveError(f"the archive can't be read or written ({error.strerror})", path=str(path))
