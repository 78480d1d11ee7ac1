"""The archive: what goes in comes back byte for byte, and damage is always named."""

import errno
import os
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import textwrap
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from haocompact import archive as module
from haocompact.archive import SCHEMA_VERSION, Archive, Run, Seen, Segment, Stats
from haocompact.errors import (
    ArchiveError,
    DamagedArchive,
    HaoError,
    SourceChanged,
    UnknownHash,
    WriteError,
)

ROOT = Path(__file__).parent.parent
SAMPLE = [b'{"n":%d,"text":"line %d"}\n' % (i, i * i) for i in range(40)]


def compaction(lines: list[bytes], gone: Iterable[bool], source: str = "/logs/a.jsonl") -> Run:
    """The run that removes the lines marked in `gone`."""
    flags = list(gone)
    recipe = [len(list(group)) for _, group in groupby(flags)]
    if flags and not flags[0]:
        recipe.insert(0, 0)
    whole = b"".join(lines)
    removed = b"".join(line for line, flag in zip(lines, flags, strict=True) if flag)
    output = sha256(b"summary" + whole).hexdigest()
    digests = (sha256(whole).hexdigest(), len(whole), output, 7)
    return Run(
        sha256(removed).hexdigest()[:16], source, "pi", "2026-01-02T03:04:05Z", *digests, tuple(recipe)
    )


def middle(lines: list[bytes]) -> list[bool]:
    """Everything but the first line and the last two goes."""
    return [0 < i < len(lines) - 2 for i in range(len(lines))]


def store(archive: Archive, run: Run, lines: list[bytes], gone: Iterable[bool]) -> Segment:
    flags = list(gone)
    removed = [line for line, flag in zip(lines, flags, strict=True) if flag]
    rest = [line for line, flag in zip(lines, flags, strict=True) if not flag]
    numbers = range(0, len(removed), 2)
    return archive.store(run, removed, rest, messages=len(numbers), chars=99, message_lines=numbers)


def keep(archive: Archive, lines: list[bytes], source: str = "/logs/a.jsonl") -> Run:
    """Store the compaction that removes the middle of `lines`."""
    run = compaction(lines, middle(lines), source)
    store(archive, run, lines, middle(lines))
    return run


def long_lines(megabytes: float, seed: int = 0) -> list[bytes]:
    """Lines of 1 KiB that hardly compress."""
    numbers = random.Random(seed)
    return [numbers.randbytes(767).hex().encode()[:1023] + b"\n" for _ in range(int(megabytes * 1024))]


def count(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def flip(path: Path, part: int, index: int) -> None:
    """Invert one byte of a stored blob: a fixed value could be the one that is there."""
    with closing(sqlite3.connect(path)) as db, db:
        rowid, data = db.execute("SELECT rowid, data FROM parts LIMIT 1 OFFSET ?", (part,)).fetchone()
        spoilt = bytearray(data)
        spoilt[index] ^= 0xFF
        db.execute("UPDATE parts SET data = ? WHERE rowid = ?", (bytes(spoilt), rowid))


def child(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)


@contextmanager
def not_root() -> Iterator[None]:
    """Root may write anywhere; be nobody for a while."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "archive.db"


@pytest.fixture
def archive(path: Path) -> Iterator[Archive]:
    with Archive.open(path, create=True) as opened:
        yield opened


# What goes in comes back.


@settings(max_examples=80, deadline=None)
@given(
    lines=st.lists(st.one_of(st.binary(max_size=99), st.text("a\r\n", max_size=5).map(str.encode))),
    data=st.data(),
    frame=st.sampled_from([1, 64, 1 << 20]),
)
def test_any_lines_and_any_recipe_come_back(lines: list[bytes], data: st.DataObject, frame: int) -> None:
    gone = data.draw(st.lists(st.booleans(), min_size=len(lines), max_size=len(lines)))
    removed = [line for line, flag in zip(lines, gone, strict=True) if flag]
    run = compaction(lines, gone)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(module, "FRAME_SIZE", frame)
        with Archive.open(Path(folder, "a.db"), create=True) as archive:
            segment = store(archive, run, lines, gone)
            assert list(archive.raw(run.hash)) == removed
            assert b"".join(archive.restore(run)) == b"".join(lines)
            numbers = data.draw(st.lists(st.integers(0, len(removed) - 1))) if removed else []
            assert list(archive.lines(run.hash, numbers)) == [removed[n] for n in numbers]
            assert list(archive.verify()) == []
    assert (segment.lines, segment.size) == (len(removed), sum(map(len, removed)))


@given(st.lists(st.integers(-(2**61), 2**61)))
def test_packed_numbers_come_back(numbers: list[int]) -> None:
    assert module._unpack(module._pack(numbers)) == tuple(numbers)


def test_a_flipped_bit_in_packed_numbers_is_found() -> None:
    numbers = tuple(range(0, 900, 3))
    blob = module._pack(numbers)
    for bit in range(8 * len(blob)):
        spoilt = (int.from_bytes(blob) ^ 1 << bit).to_bytes(len(blob))
        with suppress(zstandard.ZstdError, struct.error):
            assert module._unpack(spoilt) == numbers
    for end in range(len(blob)):
        with pytest.raises(zstandard.ZstdError):
            module._unpack(blob[:end])


def test_everything_about_a_segment_and_a_run_is_kept(archive: Archive, path: Path) -> None:
    source = "/logs/caf\udce9 ü.jsonl"  # not every file name is UTF-8
    run = keep(archive, SAMPLE, source)
    removed = b"".join(SAMPLE[1:-2])
    expected = Segment(
        run.hash, sha256(removed).hexdigest(), len(removed), 37, 19, 99, "pi", "2026-01-02T03:04:05Z", source
    )
    assert run.recipe == (0, 1, 37, 2)
    with Archive.open(path) as again:
        assert again.find(run.hash) == expected
        assert list(again.segments()) == [expected]
        assert list(again.message_lines(run.hash)) == list(range(0, 37, 2))
        assert again.runs() == again.runs(run.hash) == again.runs(output_sha256=run.output_sha256) == [run]
        assert again.runs("0" * 16) == again.runs(output_sha256="0") == []


def test_the_hash_need_not_be_that_of_the_bytes(archive: Archive) -> None:
    run = replace(compaction(SAMPLE, middle(SAMPLE)), hash="00000000deadbeef")
    assert store(archive, run, SAMPLE, middle(SAMPLE)).hash == "00000000deadbeef"
    assert list(archive.raw("00000000deadbeef")) == SAMPLE[1:-2]


def test_runs_come_newest_first(archive: Archive) -> None:
    for day, source in ((2, "b"), (3, "c"), (1, "a")):
        run = replace(compaction(SAMPLE, middle(SAMPLE), source), created=f"2026-01-0{day}T00:00:00Z")
        store(archive, run, SAMPLE, middle(SAMPLE))
    assert [run.source for run in archive.runs()] == ["c", "b", "a"]


@pytest.mark.parametrize("level", [1, 19])
def test_a_line_of_30_mb(tmp_path: Path, level: int) -> None:
    size = 30_000_000 if level == 1 else 3_000_000
    lines = [b"a\n", b"b\n", random.Random(1).randbytes(size) + b"\n", b"c\n", b"d\n", b"e\n"]
    with Archive.open(tmp_path / "a.db", create=True, level=level) as archive:
        run = keep(archive, lines)
        assert count(tmp_path / "a.db", "parts") == 4 + (size - 1) // module.PART_SIZE
        assert list(archive.lines(run.hash, [1, 0])) == [lines[2], b"b\n"]
        assert b"".join(archive.restore(run)) == b"".join(lines)


def test_a_far_repetition_within_a_long_line_is_found(archive: Archive) -> None:
    image = random.Random(2).randbytes(9_000_000).replace(b"\n", b" ")
    keep(archive, [b"a\n", image + image + b"\n", b"b\n", b"c\n"])
    assert archive.stats().stored_bytes < 1.1 * len(image)


def test_memory_does_not_grow_with_the_input(archive: Archive) -> None:
    line = b"x" * 1023 + b"\n"
    whole = sha256(line * 40_000).hexdigest()
    run = Run("0" * 16, "s", "pi", "2026", whole, 40_000 * 1024, "0", 0, (30_000, 10_000))
    tracemalloc.start()
    try:
        archive.store(
            run,
            (b"x" * 1023 + b"\n" for _ in range(30_000)),
            (b"x" * 1023 + b"\n" for _ in range(10_000)),
            messages=1,
            chars=1,
            message_lines=[0],
        )
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# Stored once; read no more than needed.


def test_equal_segments_and_equal_runs_are_stored_once(archive: Archive, path: Path) -> None:
    first = keep(archive, SAMPLE)
    frames = count(path, "frames")
    keep(archive, SAMPLE)
    assert archive.runs() == [first]
    second = keep(archive, SAMPLE, "/logs/fork.jsonl")
    assert {run.source for run in archive.runs(first.hash)} == {first.source, second.source}
    assert archive.find(first.hash).source == first.source
    assert (count(path, "segments"), count(path, "frames")) == (1, frames)


def test_segments_that_begin_alike_share_their_frames(archive: Archive, path: Path) -> None:
    lines = long_lines(5)
    keep(archive, [b"head\n", *lines, b"1\n", b"2\n"])
    assert count(path, "frames") == 5 + 1
    keep(archive, [b"head\n", *lines, *long_lines(1, seed=1), b"1\n", b"2\n"])
    assert count(path, "frames") == 6 + 1


def test_only_the_frames_asked_for_are_decompressed(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = long_lines(5)
    run = keep(archive, [b"head\n", *lines, b"1\n", b"2\n"])
    read: list[int] = []
    inflate = module._Piece.inflate

    def counting(piece: module._Piece) -> Iterator[bytes]:
        read.append(piece.first)
        return inflate(piece)

    monkeypatch.setattr(module._Piece, "inflate", counting)
    assert list(archive.lines(run.hash, [2000, 2040])) == [lines[2000], lines[2040]]
    assert read == [1024]
    assert list(archive.lines(run.hash, [0, 5119])) == [lines[0], lines[5119]]
    assert read == [1024, 0, 4096]


@pytest.mark.parametrize("number", [-1, 37])
def test_no_such_line(archive: Archive, number: int) -> None:
    run = keep(archive, SAMPLE)
    with pytest.raises(IndexError):
        list(archive.lines(run.hash, [number]))


def test_stats(archive: Archive, path: Path) -> None:
    assert archive.stats() == Stats(0, 0, 0, path.stat().st_size or archive.stats().stored_bytes)
    keep(archive, SAMPLE, "a")
    keep(archive, SAMPLE, "b")
    stats = archive.stats()
    assert (stats.segments, stats.runs, stats.raw_bytes) == (1, 2, 2 * sum(map(len, SAMPLE)))
    archive.close()
    assert stats.stored_bytes == path.stat().st_size


# What does not fit is refused, and nothing of it stays.


def test_an_unknown_hash(archive: Archive) -> None:
    unknown = "0123456789abcdef"
    run = replace(keep(archive, SAMPLE), source="/elsewhere")
    for ask in (archive.find, archive.message_lines, lambda h: list(archive.raw(h))):
        with pytest.raises(UnknownHash, match=f"no segment {unknown}"):
            ask(unknown)
    with pytest.raises(UnknownHash):
        list(archive.lines(unknown, [0]))
    with pytest.raises(UnknownHash, match="no run of /elsewhere"):
        list(archive.restore(run))


def test_another_segment_under_the_same_hash(archive: Archive, path: Path) -> None:
    """A format may count a hash of its own, which need not tell two segments apart."""
    run = keep(archive, SAMPLE)
    lines = [b"other\n" * 3, *SAMPLE]
    other = replace(compaction(lines, middle(lines), "/logs/other.jsonl"), hash=run.hash)
    store(archive, other, lines, middle(lines))
    assert {r.source for r in archive.runs(run.hash)} == {run.source, other.source}
    for each, input in ((run, SAMPLE), (other, lines)):
        removed = [line for line, gone in zip(input, middle(input), strict=True) if gone]
        assert b"".join(archive.restore(each)) == b"".join(input)
        assert list(archive.raw(run.hash, each.source)) == removed
        assert list(archive.lines(run.hash, [0], each.source)) == removed[:1]
        assert archive.find(run.hash, each.source).source == each.source
    assert list(archive.raw(run.hash)) == list(archive.raw(run.hash, run.source))
    assert not list(archive.verify())
    with Archive.open(path.with_name("copy.db"), create=True) as copy:
        assert copy.merge(path) == 2
        assert b"".join(copy.restore(other)) == b"".join(lines)
    archive.prune(lambda r: r != other)
    assert archive.runs() == [run]
    assert b"".join(archive.restore(run)) == b"".join(SAMPLE)


def test_an_archive_of_the_first_schema_is_brought_up_to_date(archive: Archive, path: Path) -> None:
    run = keep(archive, SAMPLE)
    archive.close()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            "DROP TABLE seen; DROP TABLE places; DROP INDEX segments_hash;"
            "ALTER TABLE runs DROP COLUMN segment; PRAGMA user_version = 1"
        )
    with Archive.open(path) as opened:
        assert opened.runs() == [run]
        assert b"".join(opened.restore(run)) == b"".join(SAMPLE)
        assert not list(opened.verify())
        opened.remember([Seen("/a", "stamp", "settings", "ok", "", 1)])
        assert opened.seen("/a") == Seen("/a", "stamp", "settings", "ok", "", 1)
        opened.forget(["/a"])
        assert opened.seen("/a") is None
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION


@pytest.mark.parametrize("change", [b"", b"one more\n"])
def test_a_source_that_changed_length(archive: Archive, path: Path, change: bytes) -> None:
    run = compaction(SAMPLE, middle(SAMPLE))
    with pytest.raises(SourceChanged, match=run.source):
        archive.store(
            run, SAMPLE[1:-2], [SAMPLE[0], SAMPLE[-2], change], messages=1, chars=1, message_lines=[]
        )
    assert count(path, "runs") == count(path, "frames") == 0


def test_a_source_that_changed_in_place(archive: Archive, path: Path) -> None:
    keep(archive, SAMPLE[:20], "other")
    tables = ("runs", "segments", "streams", "pieces", "frames", "parts")
    before = [count(path, table) for table in tables]
    lines = [line.upper() for line in SAMPLE]
    with pytest.raises(DamagedArchive, match="does not read back"):
        store(archive, compaction(SAMPLE, middle(SAMPLE)), lines, middle(SAMPLE))
    assert [count(path, table) for table in tables] == before


def test_the_removed_bytes_are_compared_too(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = Archive._read_back
    first = archive.find(keep(archive, SAMPLE).hash)
    other = replace(first, sha256="0" * 64)
    monkeypatch.setattr(Archive, "_read_back", lambda self, run, segment: compare(self, run, other))
    with pytest.raises(DamagedArchive, match="does not read back"):
        keep(archive, SAMPLE, "other")
    assert [run.source for run in archive.runs()] == [first.source]


def test_an_error_of_the_source_passes(archive: Archive, path: Path) -> None:
    def vanishing() -> Iterator[bytes]:
        yield SAMPLE[1]
        raise OSError(errno.ESTALE, "gone")

    with pytest.raises(OSError, match="gone"):
        archive.store(
            compaction(SAMPLE, middle(SAMPLE)), vanishing(), [], messages=1, chars=1, message_lines=[]
        )
    assert count(path, "frames") == 0


def test_a_prune_between_reading_and_writing(archive: Archive, path: Path) -> None:
    keep(archive, SAMPLE)

    def rest() -> Iterator[bytes]:
        with Archive.open(path) as other:
            assert len(other.prune(lambda run: False)) == 1
        yield from (SAMPLE[0], *SAMPLE[-2:])

    with pytest.raises(ArchiveError, match="pruned"):
        archive.store(
            compaction(SAMPLE, middle(SAMPLE)), SAMPLE[1:-2], rest(), messages=1, chars=1, message_lines=[]
        )
    assert archive.runs() == []
    keep(archive, SAMPLE)


# Damage.


@pytest.mark.parametrize("index", [0, 1000, -1])
def test_a_flipped_byte_is_named(archive: Archive, path: Path, index: int) -> None:
    lines = long_lines(3)
    run = keep(archive, [b"head\n", *lines, b"1\n", b"2\n"])
    whole = keep(archive, SAMPLE, "/logs/whole.jsonl")
    flip(path, 1, index)
    damage = list(archive.verify())
    assert {d.hash for d in damage} == {run.hash}
    assert len(damage) == 2
    assert all(run.source in d.what for d in damage)
    with pytest.raises(DamagedArchive, match=str(path)):
        list(archive.raw(run.hash))
    with pytest.raises(DamagedArchive):
        list(archive.restore(run))
    with pytest.raises(DamagedArchive):
        list(archive.lines(run.hash, [1500]))
    assert list(archive.lines(run.hash, [0, 3000])) == [lines[0], lines[3000]]
    assert b"".join(archive.restore(whole)) == b"".join(SAMPLE)
    with pytest.raises(DamagedArchive):
        keep(archive, [b"head\n", *lines, b"1\n", b"2\n"], "/logs/new.jsonl")
    with pytest.raises(DamagedArchive):
        keep(archive, [b"head\n", *lines, b"1\n", b"2\n"], run.source)
    assert {r.source for r in archive.runs()} == {run.source, whole.source}


@pytest.mark.parametrize("statement", [
    "DELETE FROM parts WHERE frame = 1",
    "DELETE FROM frames WHERE id = 1",
    "DELETE FROM pieces WHERE first > 0",
    "UPDATE pieces SET first = first + 1",
    "UPDATE segments SET message_lines = x'00'",
    "UPDATE runs SET input_sha256 = 'x'",
])  # fmt: skip
def test_a_damaged_table_is_named(archive: Archive, path: Path, statement: str) -> None:
    run = keep(archive, [b"head\n", *long_lines(2), b"1\n", b"2\n"])
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(statement)
    assert {damage.hash for damage in archive.verify()} == {run.hash}


def test_missing_frames_and_a_damaged_index(archive: Archive, path: Path) -> None:
    run = keep(archive, [b"head\n", *long_lines(2), b"1\n", b"2\n"])
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM pieces WHERE first > 0")
    assert len(list(archive.verify())) == 2
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA writable_schema = ON")
        index = "CREATE INDEX runs_output ON runs (input_sha256)"
        db.execute("UPDATE sqlite_schema SET sql = ? WHERE name = 'runs_output'", (index,))
    with pytest.raises(DamagedArchive, match="SHA-256"):
        list(archive.raw(run.hash))
    archive.close()
    with Archive.open(path) as again, pytest.raises(DamagedArchive, match="runs_output"):
        list(again.verify())


def test_any_flipped_byte_of_the_file_is_harmless_or_found(tmp_path: Path) -> None:
    original = tmp_path / "a.db"
    with Archive.open(original, create=True) as archive:
        keep(archive, SAMPLE)
    numbers, data = random.Random(7), original.read_bytes()
    for place in numbers.sample(range(len(data)), 250):
        spoilt = bytearray(data)
        spoilt[place] ^= 1 << numbers.randrange(8)
        copy = tmp_path / "copy.db"
        copy.write_bytes(spoilt)
        try:
            with Archive.open(copy) as archive:
                for run in archive.runs():
                    assert b"".join(archive.restore(run)) == b"".join(SAMPLE)
                list(archive.verify())
        except HaoError:
            pass
        for leftover in tmp_path.glob("copy.db*"):
            leftover.unlink()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_database(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.db"
    with Archive.open(path, create=True) as archive:
        keep(archive, long_lines(1))
    os.truncate(path, int(path.stat().st_size * share))

    def check() -> None:
        with Archive.open(path) as archive:
            list(archive.verify())

    with pytest.raises(DamagedArchive, match=str(path)):
        check()


@pytest.mark.parametrize("create", [False, True])
def test_a_file_that_is_no_archive(tmp_path: Path, create: bool) -> None:
    text, foreign = tmp_path / "text", tmp_path / "foreign.db"
    text.write_text("no database at all\n" * 100)
    with closing(sqlite3.connect(foreign)) as db:
        db.execute("CREATE TABLE t (x)")
    for file in (text, foreign):
        before = file.read_bytes()
        with pytest.raises(DamagedArchive):
            Archive.open(file, create=create)
        assert file.read_bytes() == before


# Files, modes, faults.


def test_a_missing_archive(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="no archive") as caught:
        Archive.open(tmp_path / "a.db")
    assert not isinstance(caught.value, DamagedArchive)
    assert list(tmp_path.iterdir()) == []


def test_private_modes(archive: Archive, path: Path) -> None:
    keep(archive, SAMPLE)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    files = list(path.parent.iterdir())
    assert {file.name for file in files} == {"archive.db", "archive.db-wal", "archive.db-shm"}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_a_directory_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    Archive.open(tmp_path / "a.db", create=True).close()
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_newer_schema(archive: Archive, path: Path) -> None:
    archive.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")
    for create in (False, True):
        with pytest.raises(ArchiveError, match=r"schema 99.*update"):
            Archive.open(path, create=create)


def test_a_read_only_directory() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        with Archive.open(folder / "a.db", create=True) as archive:
            run = keep(archive, SAMPLE)
        if os.getuid() == 0:
            os.chown(folder / "a.db", 65534, 65534)
        folder.chmod(0o555)
        with not_root():
            with Archive.open(folder / "a.db") as archive:
                assert b"".join(archive.restore(run)) == b"".join(SAMPLE)
                with pytest.raises(ArchiveError, match="ermission"):
                    keep(archive, SAMPLE, "b")
                with pytest.raises(ArchiveError, match="readonly"):
                    archive.prune(lambda run: False)
            with pytest.raises(ArchiveError, match="ermission"):
                Archive.open(folder / "b.db", create=True)
            (folder / "a.db").chmod(0)
            with pytest.raises(ArchiveError, match="unable to open"):
                Archive.open(folder / "a.db")
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)


def test_a_full_disk(archive: Archive, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = keep(archive, SAMPLE)
    archive._db.execute("PRAGMA max_page_count = 40")
    with pytest.raises(WriteError, match="disk is full"):
        keep(archive, long_lines(1))

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(WriteError, match="disk is full"):
        keep(archive, SAMPLE, "b")
    assert archive.runs() == [run]
    assert list(archive.verify()) == []


def test_a_commit_reaches_the_disk(archive: Archive) -> None:
    assert archive._db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_locked_archive(archive: Archive, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.05)
    with Archive.open(path) as second, archive._transaction():
        with pytest.raises(ArchiveError, match="another process"):
            keep(second, SAMPLE)
        assert second.runs() == []


# Many processes, and kills.

WORKER = """
import sys
from hashlib import sha256
from haocompact.archive import Archive, Run
path, name = sys.argv[1:]
lines = [b"%d of %s\\n" % (i, name.encode()) for i in range(2000)]
whole = b"".join(lines)
digest = sha256(whole).hexdigest()
run = Run(digest[:16], name, "pi", "2026", digest, len(whole), "", 0, (2000,))
with Archive.open(path, create=True) as archive:
    archive.store(run, lines, [], messages=1, chars=1, message_lines=[0])
"""


def test_sixteen_processes_into_one_new_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    workers = [child(WORKER, path, f"session {i}") for i in range(16)]
    assert [(w.communicate()[1], w.returncode) for w in workers] == [(b"", 0)] * 16
    with Archive.open(path) as archive:
        assert len(archive.runs()) == len(list(archive.segments())) == 16
        assert list(archive.verify()) == []


@pytest.mark.parametrize(("method", "stored"), [
    ("_compress", False), ("_insert_segment", False), ("_insert_run", False), ("_read_back", True)
])  # fmt: skip
def test_kill_9_in_the_middle_of_store(archive: Archive, path: Path, method: str, stored: bool) -> None:
    before = keep(archive, SAMPLE)
    kill = f"Archive.{method} = lambda *_: os.kill(os.getpid(), 9)\nwith"
    worker = child("import os\n" + WORKER.replace("with", kill), path, "killed")
    assert (worker.communicate()[1], worker.returncode) == (b"", -signal.SIGKILL)
    assert [run.source for run in archive.runs()] == [before.source] + ["killed"] * stored
    assert {file.name for file in path.parent.iterdir()} == {"archive.db", "archive.db-wal", "archive.db-shm"}
    assert list(archive.verify()) == []
    again = child(WORKER, path, "killed")
    assert (again.communicate()[1], again.returncode) == (b"", 0)
    assert len(archive.runs()) == 2


def test_another_process_makes_the_tables_first(path: Path) -> None:
    class Late:
        def __init__(self, db: sqlite3.Connection) -> None:
            self.db = db

        def execute(self, statement: str) -> sqlite3.Cursor:
            if statement == "BEGIN IMMEDIATE":
                Archive.open(path, create=True).close()
            return self.db.execute(statement)

    path.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        module._create_schema(Late(db))
    Archive.open(path).close()


def test_a_reader_delays_the_switch_to_wal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_switch_to_wal", lambda db: None)
        Archive.open(path, create=True).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM runs").fetchall()
        clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: reader.execute("COMMIT"))
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "BUSY_SECONDS", 0.05)
        with Archive.open(path, create=True) as archive:
            assert archive._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_kill_9_before_the_archive_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    for function in ("_create_schema", "_switch_to_wal"):
        patch = "import os\nfrom haocompact import archive\n"
        patch += f"archive.{function} = lambda *_: os.kill(os.getpid(), 9)\n"
        worker = child(patch + WORKER, path, "killed")
        assert (worker.communicate()[1], worker.returncode) == (b"", -signal.SIGKILL)
    with Archive.open(path, create=True) as archive:
        assert archive._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        keep(archive, SAMPLE)


# Prune and merge.


def test_prune_removes_what_nothing_refers_to(archive: Archive, path: Path) -> None:
    shared = [b"head\n", *long_lines(1), b"1\n", b"2\n"]
    keep(archive, shared, "gone")
    kept = keep(archive, shared, "kept")
    small = archive.stats().stored_bytes
    lost = keep(archive, [b"head\n", *long_lines(2, seed=3), b"1\n", b"2\n"], "gone too")
    went = archive.prune(lambda run: not run.source.startswith("gone"))
    assert [segment.hash for segment in went] == [lost.hash]
    assert archive.runs() == [kept]
    assert b"".join(archive.restore(kept)) == b"".join(shared)
    assert archive.stats().stored_bytes <= small
    assert archive.prune(lambda run: True) == []
    archive.prune(lambda run: False)
    assert [count(path, t) for t in ("runs", "segments", "streams", "pieces", "frames", "parts")] == [0] * 6
    archive.close()
    assert path.stat().st_size < 100_000


def test_merge_takes_over_what_is_new(archive: Archive, path: Path, tmp_path: Path) -> None:
    keep(archive, SAMPLE, "both")
    other = tmp_path / "worker.db"
    with Archive.open(other, create=True) as worker:
        keep(worker, SAMPLE, "both")
        keep(worker, SAMPLE, "fork")
        run = keep(worker, [b"head\n", *long_lines(2), b"1\n", b"2\n"], "new")
        expected = worker.find(run.hash)
    assert archive.merge(other) == 2
    assert archive.merge(other) == 0
    assert archive.find(run.hash) == expected
    assert list(archive.message_lines(run.hash)) == list(range(0, 2048, 2))
    assert {r.source for r in archive.runs()} == {"both", "fork", "new"}
    assert (count(path, "segments"), list(archive.verify())) == (2, [])
    assert archive.merge(path) == 0


def test_merge_leaves_a_damaged_run_behind(archive: Archive, tmp_path: Path) -> None:
    other = tmp_path / "worker.db"
    with Archive.open(other, create=True) as worker:
        keep(worker, long_lines(1), "damaged")
        keep(worker, SAMPLE, "whole")
    flip(other, 0, 100)
    with pytest.raises(DamagedArchive):
        archive.merge(other)
    assert [run.source for run in archive.runs()] == ["whole"]
    assert list(archive.verify()) == []
