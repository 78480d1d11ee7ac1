"""What can go wrong on a disk: each fault is one line and a code, and the transcript is what it was."""

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_batch import SHORT, forked, request_in
from test_cli import CHAT, KEEP, chat, jsonl, put, run  # noqa: F401

from haocompact.archive import Archive
from haocompact.files import open_source
from haocompact.pipeline import Request, attempt_in_place, restore
from haocompact.summarize import Prompted

IN_PLACE = ("compact", "--in-place", *KEEP)
BIG = jsonl(
    [{"role": r, "content": os.urandom(3000).hex()} for _ in range(100) for r in ("user", "assistant")]
)


def untouched(found, path, code, *words, data=CHAT):
    """One line, this code, the same bytes, nothing left behind."""
    assert (found.code, len(found.lines)) == (code, 1), found.err
    assert all(word in found.err for word in words), found.err
    assert Path(path).read_bytes() == data
    assert not list(Path(path).parent.glob(".haocompact-*"))


# -------------------------------------------------------------------------------------------- disk
@contextmanager
def tmpfs(folder, size):
    """A small disk; skips where it can't be mounted."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True)
    if done.returncode:
        pytest.skip("no right to mount a disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.skipif(os.name != "posix" or not shutil.which("mount"), reason="no mount")
@pytest.mark.parametrize("full", ["transcript", "archive", "both"])
def test_a_full_disk(run, tmp_path, full):
    with tmpfs(tmp_path / "disk", "1500k") as disk:
        path = put(disk / "s.jsonl" if full != "archive" else "s.jsonl", BIG)
        archive = disk / "a.db" if full != "transcript" else Path("a.db")
        if full == "transcript":
            (disk / "filler").write_bytes(b"x" * (1500 * 1024 - len(BIG) - 12 * 1024))
        if full == "archive":
            (disk / "filler").write_bytes(b"x" * (1100 << 10))
        found = run("compact", "--in-place", path, "--archive", archive, "--keep-recent", "60000")
        untouched(found, path, 7, "full", data=BIG)
        (disk / "filler").unlink(missing_ok=True)
        if archive.exists():
            with Archive.open(archive, create=True) as opened:
                assert not list(opened.verify())


def as_somebody(function):
    """What it returns in a process without the rights of root."""

    def attempt():
        if not os.geteuid():
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        return function()

    return forked(attempt)()


@pytest.fixture
def public(tmp_path):
    """A folder that anybody can get to."""
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH and folder.stat().st_uid == os.geteuid():
            folder.chmod(0o711)
    folder = tmp_path / "public"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def outcome(path, request):
    def attempt():
        done = attempt_in_place(str(path), request)
        return [done.error.code if done.error else "ok", str(done.error)]

    return as_somebody(attempt)


def test_a_folder_that_can_not_be_written(public):
    path = put(public / "read-only/s.jsonl")
    path.chmod(0o666)
    path.parent.chmod(0o555)
    code, text = outcome(path, request_in(public))
    assert (code, "can't be written: Permission denied" in text) == ("WRITE", True)
    assert path.read_bytes() == CHAT


def test_a_transcript_that_can_not_be_read(public):
    path = put(public / "s.jsonl")
    path.chmod(0)
    if os.geteuid():
        pytest.skip("the file would be its owner's own")
    assert outcome(path, request_in(public)) == ["TRANSCRIPT", f"{path}: permission denied"]


def test_an_archive_that_can_not_be_read_or_made(public):
    path = put(public / "s.jsonl")
    path.chmod(0o666)
    archive = public / "closed/a.db"
    request = Request(request_in(public).settings, archive=archive)
    archive.parent.mkdir(mode=0o700)
    if os.geteuid():
        archive.parent.chmod(0o500)
    code, text = outcome(path, request)
    assert (code, str(archive) in text) == ("ARCHIVE", True)
    assert path.read_bytes() == CHAT


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_owner_that_can_not_be_kept_is_no_reason_to_take_a_file_over(public):
    path = put(public / "s.jsonl")
    path.chmod(0o666)
    code, text = outcome(path, request_in(public))
    assert (code, "Operation not permitted" in text) == ("WRITE", True)
    assert (path.read_bytes(), path.stat().st_uid) == (CHAT, 0)
    assert os.listdir(public) == [p for p in os.listdir(public) if not p.startswith(".haocompact")]


# ------------------------------------------------------------------------------------------- change
CHANGES = {
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "replaced by the same": lambda path: (put(path.parent / "new"), os.replace(path.parent / "new", path)),
    "replaced by a folder": lambda path: (path.unlink(), path.mkdir()),
    "grown": lambda path: path.write_bytes(CHAT + jsonl(chat(1))),
    "rewritten within its size": lambda path: path.write_bytes(CHAT.replace(b"bean", b"pear")),
    "another owner's folder": lambda path: path.parent.rename(path.parent.parent / "moved"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_meanwhile_is_left_as_the_other_left_it(tmp_path, change):
    path = put(tmp_path / "x/s.jsonl")

    def meddle(prompt, system, max_tokens):
        CHANGES[change](path)
        state.append(seen(tmp_path))
        return SHORT

    state = []
    done = attempt_in_place(str(path), request_in(tmp_path, summarizer=Prompted("stub", meddle)))
    assert done.error is not None
    assert done.error.exit_code in (4, 7)
    assert seen(tmp_path) == state[0]


def seen(folder):
    """Every file and its content, the archive's aside."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
        if not p.name.startswith("a.db")
    }


# ------------------------------------------------------------------------------------------ archive
def test_a_locked_archive(run, monkeypatch):
    monkeypatch.setattr("haocompact.archive.BUSY_SECONDS", 0.2)
    Archive.open("a.db", create=True).close()
    path = put("s.jsonl")
    db = sqlite3.connect("a.db", isolation_level=None)
    db.execute("BEGIN EXCLUSIVE")
    untouched(run(*IN_PLACE, path, "--archive", "a.db"), path, 6, "another process has held the archive")
    db.execute("ROLLBACK")
    db.close()
    assert run(*IN_PLACE, path, "--archive", "a.db").code == 0


@pytest.mark.parametrize("how", ["truncated", "text", "a folder", "another database", "empty page"])
def test_a_damaged_archive_takes_nothing_and_the_transcript_stays(run, how):
    put("old.jsonl")
    run(*IN_PLACE, "old.jsonl", "--archive", "a.db")
    path, archive = put("s.jsonl", jsonl(chat(9))), Path("a.db")
    data = archive.read_bytes()
    archive.unlink()
    if how == "a folder":
        archive.mkdir()
    elif how == "another database":
        with sqlite3.connect("a.db") as db:
            db.execute("CREATE TABLE beans (n)")
        db.close()
    else:
        archive.write_bytes(
            {
                "truncated": data[: len(data) // 2],
                "text": b"no database\n" * 9,
                "empty page": b"\0" * len(data),
            }[how]
        )
    before = archive.read_bytes() if archive.is_file() else None
    untouched(run(*IN_PLACE, path, "--archive", "a.db"), path, 6, "a.db", data=jsonl(chat(9)))
    if before is not None and how != "truncated":
        assert archive.read_bytes() == before


def test_a_flipped_byte_is_found_before_it_is_needed_and_never_returned(run):
    path = put("s.jsonl")
    run(*IN_PLACE, path, "--archive", "a.db")
    with sqlite3.connect("a.db") as db:
        (blob,) = db.execute("SELECT data FROM parts WHERE frame = 1").fetchone()
        at = len(blob) // 2
        db.execute(
            "UPDATE parts SET data = ? WHERE frame = 1",
            (blob[:at] + bytes([blob[at] ^ 64]) + blob[at + 1 :],),
        )
    db.close()
    found = run("retrieve", "--verify", "--archive", "a.db")
    assert (found.code, "do not match" in found.out.decode() or "no sense" in found.out.decode()) == (6, True)
    assert run("retrieve", path, "--restore", "--archive", "a.db", "-o", "back.jsonl").code == 6
    assert not os.path.exists("back.jsonl")
    again = put("again.jsonl")  # the same bytes: the stored frame is not taken on trust
    untouched(run(*IN_PLACE, again, "--archive", "a.db"), again, 6)


# --------------------------------------------------------------------------------- kinds and modes
def test_a_fifo_and_a_device_are_refused_at_once(run):
    os.mkfifo("pipe.jsonl")
    signal.alarm(300)
    try:
        for name in ("pipe.jsonl", "/dev/null", "/dev/zero"):
            found = run(*IN_PLACE, name, "--archive", "a.db")
            assert (found.code, "not a regular file" in found.err) == (4, True)
    finally:
        signal.alarm(0)
    assert stat.S_ISFIFO(os.stat("pipe.jsonl").st_mode)


def test_a_transcript_with_two_names_keeps_both(run):
    path = put("s.jsonl")
    os.link(path, "t.jsonl")
    found = run(*IN_PLACE, path, "--archive", "a.db", "--json")
    untouched(found, path, 7, "2 names", "-o")
    assert found.json[0]["code"] == "HARD_LINKED"
    assert os.path.samefile("s.jsonl", "t.jsonl")
    assert run("compact", path, "-o", "out.jsonl", "--archive", "a.db", *KEEP).code == 0


def test_links_stay_links_and_their_target_is_compacted(run):
    path = put("real/s.jsonl")
    os.symlink("real/s.jsonl", "one.jsonl")
    os.symlink("one.jsonl", "two.jsonl")
    assert run(*IN_PLACE, "two.jsonl", "--archive", "a.db").code == 0
    assert (os.readlink("two.jsonl"), os.readlink("one.jsonl")) == ("one.jsonl", "real/s.jsonl")
    assert path.stat().st_size < len(CHAT)
    os.symlink("three.jsonl", "three.jsonl")
    assert run(*IN_PLACE, "three.jsonl", "--archive", "a.db").code == 4


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o700, 0o777])
def test_mode_owner_and_times_are_kept(run, mode):
    path = put("s.jsonl")
    path.chmod(mode)
    if not os.geteuid():
        os.chown(path, 1234, 5678)
    os.utime(path, ns=(10**18 + 1, 10**18 + 2))
    before = path.stat()
    assert run(*IN_PLACE, path, "--archive", "a.db").code == 0
    after = path.stat()
    for what in ("st_mode", "st_uid", "st_gid", "st_mtime_ns"):
        assert getattr(after, what) == getattr(before, what), what
    with open_source(str(path)) as source:
        assert b"".join(restore(source, Request(archive=Path("a.db")))) == CHAT
