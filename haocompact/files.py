"""Transcripts on disk: open, read, walk, lock, and replace them without ever leaving half of one.

A file is written beside its target, fsynced, renamed, and the folder fsynced; before the rename of a
replacement the original is compared with what was read. A lock is the kernel's and goes with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import io
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from haocompact.errors import NoTranscript, SourceBusy, SourceChanged, TranscriptError, WriteError
from haocompact.records import Data, FileBytes, Records, chunks_of, read

_SESSION_ID = re.compile(r"[0-9A-Za-z-]{1,64}")
ZSTD_MAGIC, GZIP_MAGIC = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"


# --------------------------------------------------------------------------------------- reading
@dataclass(slots=True)
class Source:
    """A transcript's bytes. `stamp` identifies the file's state; None for stdin and compressed files."""

    path: str
    data: Data
    stamp: tuple[int, ...] | None = None
    compressed: bool = False
    _sha256: str | None = field(default=None, repr=False)
    _records: Records | None = field(default=None, repr=False)

    @property
    def records(self) -> Records:
        if self._records is None:
            self._records = read(self.data)
        return self._records

    @property
    def sha256(self) -> str:
        if self._sha256 is None:
            self._sha256 = sha256_of(self.data)
        return self._sha256


def sha256_of(data: Data) -> str:
    digest = hashlib.sha256()
    for chunk in chunks_of(data):
        digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def open_source(path: str, stdin: IO[bytes] | None = None) -> Iterator[Source]:
    """Open a file or "-"; .gz and .zst are told by their first bytes. Raises TranscriptError."""
    if path == "-":
        with tempfile.TemporaryFile() as spool:
            if stdin is not None:
                while block := stdin.read(1 << 20):
                    spool.write(block)
            spool.flush()
            yield _unpacked("-", _file_bytes(spool.fileno()), None)
        return
    with _opened(path) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise NoTranscript("not a regular file", path=path)
        yield _unpacked(path, _file_bytes(file.fileno()), _stamp(info))


_OPENING = {errno.EISDIR: "is a directory", errno.ENOENT: "no such file", errno.EACCES: "permission denied"}


def _opened(path: str) -> IO[bytes]:
    """The file, opened without waiting for a writer. Raises TranscriptError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            os.close(handle)
            raise IsADirectoryError(errno.EISDIR, "is a directory")
        return os.fdopen(handle, "rb")
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        reason = _OPENING.get(number or 0) or getattr(error, "strerror", None) or str(error)
        raise TranscriptError(reason.lower(), path=path) from None


SMALL = 4 << 20  # bytes; a file up to this size is held in memory


def _file_bytes(handle: int) -> Data:
    data = FileBytes(handle, os.fstat(handle).st_size)
    return data[:] if len(data) <= SMALL else data


def _unpacked(path: str, data: Data, stamp: tuple[int, ...] | None) -> Source:
    try:
        if data[:4] == ZSTD_MAGIC:
            return Source(path, _unzstd(data[:]), stamp, compressed=True)
        if data[:2] == GZIP_MAGIC:
            return Source(path, gzip.decompress(data[:]), stamp, compressed=True)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise TranscriptError(f"compressed, but damaged: {error}", path=path) from error
    return Source(path, data, stamp)


def _unzstd(data: bytes) -> bytes:
    """All frames of a .zst file. Raises EOFError when it is cut short, ValueError when it is damaged."""
    import zstandard

    parts = []
    try:
        while data:
            frame = zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(data))
            if not frame.eof:
                raise EOFError("the file is cut short")
            data = frame.unused_data
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    return b"".join(parts)


def _stamp(info: os.stat_result) -> tuple[int, ...]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


# --------------------------------------------------------------------------------------- writing
def write_file(target: Path, data: Data, *, like: os.stat_result | None = None,
               source: Source | None = None) -> None:  # fmt: skip
    write_stream(target, chunks_of(data), like=like, source=source)


def write_stream(target: Path, chunks: Iterable[bytes], *, like: os.stat_result | None = None,
                 source: Source | None = None) -> None:  # fmt: skip
    """Write beside the target, fsync, rename, fsync the folder. With `source`, only if it has not changed.

    `like`: the mode, owner and times that the new file gets. A symbolic link stays one; what is no regular
    file (a pipe, a device) is written to as it is.
    """
    if target.exists() and not target.is_file():
        _write_into(target, chunks)
        return
    target = Path(os.path.realpath(target))
    try:
        with _temporary(target.parent) as (file, name):
            file.writelines(chunks)
            file.flush()
            if like is not None:
                _take_after(file.fileno(), like)
            os.fsync(file.fileno())
            if source is None:
                os.replace(name, target)
            else:
                _replace_unchanged(name, target, source, file)
            _sync_folder(target.parent)
    except OSError as error:
        raise write_error(target, error) from error


def _replace_unchanged(name: str, target: Path, source: Source, new: IO[bytes]) -> None:
    """Rename over the target unless it has changed since it was read. Raises SourceChanged.

    A writer may append in the moment between the last look and the rename: what it wrote is carried over.
    """
    with _opened(str(target)) as old:
        check_unchanged(source, target)
        os.replace(name, target)
        if os.fstat(old.fileno()).st_size > len(source.data):
            old.seek(len(source.data))
            new.write(old.read())
            new.flush()
            os.fsync(new.fileno())


TEMPORARY_PREFIX = ".haocompact-"
_TEMPORARY = re.compile(
    r"\.haocompact-(\d+)-[a-z0-9_]{8}\.tmp"
)  # what `_temporary` makes: process id, random
ABANDONED = 3600.0  # seconds after which an unlocked temporary file is nobody's, whatever its process id


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[tuple[IO[bytes], str]]:
    """A locked file of mode 0600 that is gone at the end, unless it has been renamed."""
    handle, name = tempfile.mkstemp(prefix=f"{TEMPORARY_PREFIX}{os.getpid()}-", suffix=".tmp", dir=folder)
    with os.fdopen(handle, "wb") as file:
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file, name
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


def _take_after(handle: int, like: os.stat_result) -> None:
    """Owner, mode and times of another file. Raises PermissionError when the owner can't be kept."""
    made = os.fstat(handle)
    if (made.st_uid, made.st_gid) != (like.st_uid, like.st_gid):
        os.fchown(handle, like.st_uid, like.st_gid)
    os.fchmod(handle, stat.S_IMODE(like.st_mode))
    os.utime(handle, ns=(like.st_atime_ns, like.st_mtime_ns))


def clean_folder(folder: str) -> list[str]:
    """Remove the temporary files that killed runs left in a folder; their names. Nothing else is touched."""
    removed = []
    try:
        with os.scandir(folder) as entries:
            names = [e.path for e in entries if _TEMPORARY.fullmatch(e.name)]
        for name in names:
            if _abandoned(name):
                os.unlink(name)
                removed.append(name)
    except OSError:  # a folder that can't be read or written: the walk reports what matters
        pass
    return removed


def _abandoned(name: str) -> bool:
    """Whether a temporary file is ours, unlocked, and its process is gone (or it is an hour old)."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(handle, "rb") as file:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or os.geteuid() not in (0, info.st_uid):
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        process = int(_TEMPORARY.fullmatch(os.path.basename(name))[1])  # type: ignore[index]
        return not _alive(process) or time.time() - info.st_mtime > ABANDONED


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        pass
    return True


def _write_into(target: Path, chunks: Iterable[bytes]) -> None:
    try:
        with target.open("wb") as file:
            file.writelines(chunks)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise write_error(target, error) from error


def check_unchanged(source: Source, target: Path) -> None:
    """Compare size, time, inode and content with what was read. Raises SourceChanged."""
    try:
        with target.open("rb") as file:
            same = sha256_of(FileBytes(file.fileno(), os.fstat(file.fileno()).st_size)) == source.sha256
        same = same and _stamp(os.stat(target)) == source.stamp  # last: it may have grown while it was read
    except (FileNotFoundError, SourceChanged):
        same = False
    if not same:
        raise SourceChanged(
            "the transcript changed while it was being compacted; left alone", path=source.path
        )


def write_error(target: Path, error: OSError) -> WriteError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WriteError("the disk is full; the original is untouched", path=str(target))
    return WriteError(f"can't be written: {error.strerror or error}", path=str(target))


def _sync_folder(folder: Path) -> None:
    if not os.access(folder, os.R_OK):  # one may write into it without reading it
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the advisory lock of a transcript; it goes with the process. Raises SourceBusy."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise TranscriptError(error.strerror or str(error), path=str(path)) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SourceBusy("another process is working on this transcript", path=str(path)) from None
        if not os.path.exists(path) or os.fstat(file.fileno()).st_ino != os.stat(path).st_ino:
            raise SourceBusy("another process has just replaced this transcript", path=str(path))
        yield


def client_at_work(path: Path, folder: str, session_id: str) -> bool:
    """Whether a client holds `<its home>/<folder>/<session id>.lock`; its home is above the transcript."""
    if not _SESSION_ID.fullmatch(session_id):
        return False
    homes = (parent / folder / f"{session_id}.lock" for parent in path.absolute().parents)
    lock = next((p for p in homes if p.is_file()), None)
    if lock is None:
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


# ----------------------------------------------------------------------------------------- forks
HOMES = ("sessions", "archived_sessions")  # folders of one client's home that hold rollouts
FIRST_LINE = 16 << 20  # bytes that are read of it at most
_BASE = re.compile(rb'"history_base"\s*:\s*\{[^{}]*?"thread_id"\s*:\s*"([^"\\]+)"')


def forks_of(path: Path, session_id: str) -> list[str]:
    """Sessions in the tree around `path` that read their earlier turns out of it, by offset: as they are now."""
    found = []
    for folder in _folders(path.absolute()):
        deep = folder.name in HOMES or any(p.name.isdigit() for p in folder.glob("[0-9]*"))
        rollouts = sorted(folder.glob("**/*.jsonl*" if deep else "*.jsonl*"))
        found += [str(rollout) for rollout in rollouts if session_id in _bases(rollout)]
    return found


def _folders(path: Path) -> tuple[Path, ...]:
    """Where forks of a session may be: the client's folders, or those by date around it, or its own."""
    top = next((p for p in path.parents if not p.name.isdigit()), path.parent)
    return tuple(top.parent / name for name in HOMES) if top.name in HOMES else (top,)


def _bases(path: Path) -> tuple[str, ...]:
    """The sessions that a rollout reads from. A first line that was whole once is not read again."""
    try:
        key = (str(path), path.stat().st_ino)
    except OSError:
        return ()
    if key not in _KNOWN:
        line = _first_line(path)
        bases = tuple(name.decode(errors="replace") for name in _BASE.findall(line))
        if not line.endswith(b"\n"):
            return bases
        _KNOWN[key] = bases
    return _KNOWN[key]


_KNOWN: dict[tuple[str, int], tuple[str, ...]] = {}


def _first_line(path: Path) -> bytes:
    """Of a .jsonl or .jsonl.zst; of what can't be read, nothing."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            if path.suffix != ".zst":
                return file.readline(FIRST_LINE)
            return _unzstd_line(file)
    except OSError:
        return b""


def _unzstd_line(file: IO[bytes]) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as unpacked:
            return io.BufferedReader(unpacked).readline(FIRST_LINE)
    except zstandard.ZstdError:
        return b""


# --------------------------------------------------------------------------------------- walking
def changed_lately(path: Path, min_age: float) -> bool:
    """Whether a file was written in the last `min_age` seconds: its client may still be at it."""
    return min_age > 0 and time.time() - path.stat().st_mtime < min_age


def transcripts_under(paths: Iterable[str], visit: Callable[[str], object] = lambda folder: None
                      ) -> Iterator[tuple[str, bool]]:  # fmt: skip
    """(path, whether it was found in a folder): folders are walked in name order, links not followed.

    `visit` is called with every folder before its files come.
    """
    for path in paths:
        if path != "-" and os.path.isdir(path):
            for folder, folders, names in os.walk(path):
                visit(folder)
                folders.sort()
                for name in sorted(names):
                    if name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")) and not name.startswith(
                        TEMPORARY_PREFIX
                    ):
                        yield os.path.join(folder, name), True
        else:
            yield path, False


def absolute(path: str) -> str:
    """A path that means the same in every folder; stdin stays "-"."""
    return path if path == "-" else os.path.abspath(path)
