"""Many transcripts at once: what is passed over, what is remembered, who survives what, and what is told."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
from conftest import ROOT
from test_cli import CHAT, HAOCOMPACT, KEEP, SMALL, chat, jsonl, process, put, run  # noqa: F401
from torture import torture

from haocompact import batch
from haocompact.archive import Archive
from haocompact.batch import Choice, Totals
from haocompact.compaction import CHARS, CompactionSettings
from haocompact.errors import ArchiveError, SourceBusy
from haocompact.files import open_source
from haocompact.pipeline import Request, attempt_in_place, restore
from haocompact.summarize import Prompted

NOW = ("--min-age", "0")
IN_PLACE = ("compact", "--in-place", "--archive", "a.db", *KEEP)
SAMPLES = ("pi/weather-station.jsonl", "claude/edit-and-test.jsonl")
MIXED = b"".join(
    (ROOT / "samples" / name).read_bytes() for name in SAMPLES
)  # refused: which format is meant?
SHORT = "## Goal\nGrow beans.\n\n## Next Steps\n1. Go on."


def numbered(number):
    """A chat that no other number has."""
    return jsonl([{"role": "user", "content": f"This is chat {number}."}]) + CHAT


def results(found):
    return {Path(o["path"]).name: o["branch"] or o["result"] for o in found.json[:-1]}


def request_in(folder, **more):
    settings = CompactionSettings(keep_recent_tokens=1000, estimator=CHARS)
    return Request(settings, archive=folder / "a.db", **more)


def run_batch(folder, request, jobs=1, **more):
    items = batch.find([str(folder)], Choice(min_age=0), request)
    return list(batch.run(items, request, jobs, **more))


# ----------------------------------------------------------------------------------- passed over
def test_what_is_no_transcript_is_counted_and_no_failure(run):
    put("x/good.jsonl")
    put("x/notes.jsonl", b'{"a": 1}\n')
    put("x/empty.jsonl", b"")
    put("x/torn.jsonl", b"\x00\xff")
    put("x/packed.jsonl.gz", b"\x1f\x8b")
    put("elsewhere.jsonl")
    os.mkdir("x/folder.jsonl")
    os.mkfifo("x/pipe.jsonl")
    os.symlink("../elsewhere.jsonl", "x/link.jsonl")
    os.symlink("nowhere", "x/dangling.jsonl")
    put("x/one.jsonl")
    os.link("x/one.jsonl", "x/two.jsonl")
    found = run(*IN_PLACE, "x", *NOW, "--json")
    assert results(found) == {
        "good.jsonl": "ok",
        "notes.jsonl": "no_transcript",
        "empty.jsonl": "no_transcript",
        "torn.jsonl": "no_transcript",
        "pipe.jsonl": "no_transcript",
        "packed.jsonl.gz": "compressed",
        "link.jsonl": "symlink",
        "dangling.jsonl": "symlink",
        "one.jsonl": "hard_linked",
        "two.jsonl": "hard_linked",
    }
    assert found.code == 0
    assert Path("elsewhere.jsonl").read_bytes() == Path("x/one.jsonl").read_bytes() == CHAT


def test_a_file_comes_once_whatever_its_names(run):
    put("x/s.jsonl")
    found = run(*IN_PLACE, "x/s.jsonl", "x", "x/../x/s.jsonl", *NOW, "--json")
    assert [o["result"] for o in found.json] == ["ok", "totals"]


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (["--include", "a*"], {"a1.jsonl", "a2.jsonl"}),
        (["--include", "a*", "--exclude", "*2*"], {"a1.jsonl"}),
        (["--exclude", "sub/*"], {"a1.jsonl", "b1.jsonl"}),
        (["--exclude", "a1.jsonl", "--exclude", "b1.jsonl"], {"a2.jsonl"}),
    ],
)
def test_globs(run, words, taken):
    for name in ("a1", "sub/a2", "b1"):
        put(f"x/{name}.jsonl")
    assert results(run(*IN_PLACE, "x", *NOW, "--json", *words)).keys() == taken


def test_ages(run):
    for name, age in (("now", 0), ("hour", 3700), ("month", 31 * 86400)):
        path = put(f"x/{name}.jsonl")
        os.utime(path, (time.time() - age,) * 2)
    assert results(run(*IN_PLACE, "x", "--json", "--older-than", "30d", "--dry-run")) == {
        "now.jsonl": "too_young", "hour.jsonl": "too_young", "month.jsonl": "ok"}  # fmt: skip
    assert results(run(*IN_PLACE, "x", "--json", "--min-age", "2h", "--dry-run")) == {
        "now.jsonl": "in_use", "hour.jsonl": "in_use", "month.jsonl": "ok"}  # fmt: skip
    assert results(run(*IN_PLACE, "x", "--json")) == {
        "now.jsonl": "in_use", "hour.jsonl": "ok", "month.jsonl": "ok"}  # fmt: skip
    named = run(*IN_PLACE, "x/now.jsonl", "--min-age", "15m")
    assert (named.code, named.lines[0].endswith("its client may still be at it (--min-age)")) == (7, True)


@pytest.mark.parametrize("text", ["", "30y", "d", "-1d", "nan", "1e99w"])
def test_what_is_no_duration(run, text):
    found = run(*IN_PLACE, "x", f"--older-than={text}")
    assert (found.code, "no duration" in found.err) == (2, True)


def test_a_file_in_use_is_passed_over_in_a_folder_and_an_error_by_name(tmp_path):
    path = put(tmp_path / "x/s.jsonl")
    os.utime(path, (1, 1))
    holder = f"""import fcntl, time
with open({str(path)!r}) as file:
    fcntl.flock(file, fcntl.LOCK_EX); print(1, flush=True); time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert [d.left for d in run_batch(tmp_path / "x", request_in(tmp_path))] == ["in_use"]
        assert isinstance(attempt_in_place(str(path), request_in(tmp_path)).error, SourceBusy)
        other.kill()
    assert attempt_in_place(str(path), request_in(tmp_path)).hash


# ---------------------------------------------------------------------------------------- memory
def test_a_second_run_does_nothing(run):
    for name in ("a", "b"):
        put(f"x/{name}.jsonl", numbered(name))
    put("x/small.jsonl", SMALL)
    put("x/notes.jsonl", b'{"a": 1}\n')
    for path in Path("x").iterdir():
        os.utime(path, (1e9, 1e9))
    time.sleep(2.1)  # younger than that, a file's time says little
    assert results(run(*IN_PLACE, "x", "--json"))["a.jsonl"] == "ok"
    before = {p: (p.read_bytes(), p.stat().st_mtime) for p in Path("x").iterdir()}
    for _ in range(2):
        found = run(*IN_PLACE, "x", "--json")
        assert set(results(found).values()) == {"unchanged"}
        assert found.json[-1]["skipped"] == {"unchanged": 4}
        assert {p: (p.read_bytes(), p.stat().st_mtime) for p in Path("x").iterdir()} == before
    again = run("compact", "--in-place", "--archive", "a.db", "x", "--json", "--keep-recent", "300")
    assert "unchanged" not in results(again).values()


@pytest.mark.parametrize("wait", [0, 2.1])
def test_what_changed_is_never_taken_for_unchanged(tmp_path, wait):
    folder, request = tmp_path / "x", request_in(tmp_path)
    path = put(folder / "s.jsonl")
    os.utime(path, (1e9, 1e9))
    run_batch(folder, request)
    time.sleep(wait)
    assert [d.left for d in run_batch(folder, request)] == ["unchanged"]
    data, info = path.read_bytes(), path.stat()
    changed = data.replace(b"bean", b"pear")
    assert (len(changed), changed != data) == (len(data), True)
    with path.open("r+b") as file:
        file.write(changed)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert [d.left for d in run_batch(folder, request)] == [None]
    path.write_bytes(changed + jsonl(chat()))
    assert [bool(d.hash) for d in run_batch(folder, request)] == [True]


def test_a_skip_that_depends_on_the_clock_is_not_remembered(tmp_path):
    path = put(tmp_path / "x/s.jsonl")
    request = request_in(tmp_path, if_needed=True, cooldown=3600)
    run_batch(tmp_path / "x", request_in(tmp_path))
    path.write_bytes(path.read_bytes() + jsonl(chat(40, 4000)))
    for _ in range(2):
        (done,) = run_batch(tmp_path / "x", request)
        assert done.skip.branch == "cooldown"


def test_without_an_archive_nothing_is_made_for_the_memory(tmp_path):
    put(tmp_path / "x/s.jsonl", SMALL)
    run_batch(tmp_path / "x", request_in(tmp_path))
    assert not (tmp_path / "a.db").exists()


# -------------------------------------------------------------------------------------- failures
def test_one_bad_file_gives_7_in_a_batch_and_its_own_code_alone(run):
    put("x/bad.jsonl", MIXED)
    put("x/good.jsonl")
    assert run(*IN_PLACE, "x", *NOW).code == 7
    assert len(Path("x/good.jsonl").read_bytes()) < len(CHAT)
    assert run(*IN_PLACE, "x/bad.jsonl").code == 4
    os.remove("x/good.jsonl")
    assert run(*IN_PLACE, "x", *NOW).code == 7
    assert run(*IN_PLACE, "x", *NOW, "--check").code == 7
    os.remove("x/bad.jsonl")
    put("x/small.jsonl", SMALL)
    assert run(*IN_PLACE, "x", *NOW).code == 0
    assert run(*IN_PLACE, "x", *NOW, "--check").code == 3


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_bug_in_one_file_does_not_stop_the_rest(tmp_path, monkeypatch, jobs):
    for name in ("a", "b", "c"):
        put(tmp_path / f"x/{name}.jsonl", numbered(name))
    whole = batch.attempt_in_place.__globals__["compact_in_place"]

    def broken(path, request):
        if "b.jsonl" in path:
            raise ZeroDivisionError("of beans")
        return whole(path, request)

    monkeypatch.setattr("haocompact.pipeline.writing.compact_in_place", broken)
    done = run_batch(tmp_path / "x", request_in(tmp_path), jobs)
    assert [bool(d.hash) for d in done] == [True, False, True]
    assert str(done[1].error).startswith(
        f"{tmp_path}/x/b.jsonl: a bug: ZeroDivisionError: of beans (test_batch.py:"
    )


def dying(when, name, flag):
    """The per-file function, killed before or after its work on one file; once only where there is a flag."""

    def attempt(path, *words, **more):
        mine = name in path and not (flag and flag.exists())
        if mine and flag:
            flag.touch()
        if mine and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        done = attempt_in_place(path, *words, **more)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    return attempt


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("once", [True, False])
def test_a_worker_that_dies_does_not_stop_the_rest(tmp_path, monkeypatch, when, once):
    data = {put(tmp_path / f"x/{n}.jsonl", numbered(n)): numbered(n) for n in range(8)}
    monkeypatch.setattr(
        batch, "attempt_in_place", dying(when, "3.jsonl", tmp_path / "flag" if once else None)
    )
    request, totals = request_in(tmp_path), Totals()
    done = run_batch(tmp_path / "x", request, 2)
    assert [d.path for d in done] == sorted(map(str, data))
    for one in done:
        totals.add(one)
    assert (totals.compacted, totals.failed) == ((8, 0) if once else (7, 1))
    if not once:
        (failed,) = (d.error for d in done if d.error is not None)
        assert (failed.code, failed.exit_code, "out of memory?" in str(failed)) == ("WORKER_DIED", 7, True)
    for path, original in data.items():
        if path.read_bytes() != original:
            with open_source(str(path)) as source:
                assert b"".join(restore(source, request)) == original
    with Archive.open(tmp_path / "a.db") as archive:
        assert not list(archive.verify())


# ---------------------------------------------------------------------------------- kill -9, locks
def test_kills_at_random_points_lose_nothing(tmp_path):
    seen = torture(tmp_path, kills=8, seed=1, large=500)
    assert seen["kills"] == 8


def test_what_killed_runs_left_is_removed_and_nothing_else(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    put(tmp_path / "x/s.jsonl")
    ours = [put(tmp_path / f"x/.haocompact-{gone.pid}-abcd_{n}yz.tmp") for n in range(3)]
    others = [put(tmp_path / "x" / name) for name in (
        f".haocompact-{os.getpid()}-abcdefgh.tmp", f".haocompact-{gone.pid}-abcdefgh.tmp.bak",
        f".haocompact-{gone.pid}-abcdefghi.tmp", ".haocompact-1x-abcdefgh.tmp", ".haocompact-abcdefgh.tmp",
        f"haocompact-{gone.pid}-abcdefgh.tmp")]  # fmt: skip
    link = tmp_path / f"x/.haocompact-{gone.pid}-linklink.tmp"
    link.symlink_to("s.jsonl")
    os.mkfifo(tmp_path / f"x/.haocompact-{gone.pid}-pipepipe.tmp")
    run_batch(tmp_path / "x", request_in(tmp_path))
    assert not any(path.exists() for path in ours)
    assert all(path.exists() for path in [*others, link])


def test_a_temporary_file_that_is_locked_is_left_to_its_writer(tmp_path):
    import fcntl

    path = put(tmp_path / "x/.haocompact-99999999-abcdefgh.tmp")
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run_batch(tmp_path / "x", request_in(tmp_path))
        assert path.exists()
    run_batch(tmp_path / "x", request_in(tmp_path))
    assert not path.exists()


def forked(function):
    """Run it in a child; a function that waits for its result."""
    end, start = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(start, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(start)

    def wait():
        with os.fdopen(end) as stream:
            text = stream.read()
        os.waitpid(child, 0)
        return json.loads(text)

    return wait


@pytest.mark.parametrize("round", range(20))
def test_of_two_processes_on_one_file_one_wins_and_the_other_says_so(tmp_path, round):
    path = put(tmp_path / "s.jsonl")

    def slow(prompt, system, max_tokens):
        time.sleep(0.01 * (round % 4))
        return SHORT

    request = request_in(tmp_path, summarizer=Prompted("stub", slow), log=tmp_path / "log")

    def attempt():
        done = attempt_in_place(str(path), request)
        return "won" if done.hash else done.error.code if done.error else done.skip.branch

    waits = [forked(attempt) for _ in range(2)]
    first, second = sorted((wait() for wait in waits), key=lambda r: r != "won")
    assert first == "won"
    assert second in ("SOURCE_BUSY", "SOURCE_CHANGED", "tail_is_summary", "nothing_to_summarize")
    assert all(json.loads(line) for line in path.read_bytes().splitlines())
    with open_source(str(path)) as source:
        assert b"".join(restore(source, request)) == CHAT
    with Archive.open(tmp_path / "a.db") as archive:
        assert len(archive.runs()) == 1


def test_sixteen_processes_into_one_archive(tmp_path):
    data = {put(tmp_path / f"x/{n:02}.jsonl", numbered(n)): numbered(n) for n in range(32)}
    request = request_in(tmp_path)
    done = run_batch(tmp_path / "x", request, 16)
    assert [bool(d.hash) for d in done] == [True] * 32
    for path, original in data.items():
        with open_source(str(path)) as source:
            assert b"".join(restore(source, request)) == original
    with Archive.open(tmp_path / "a.db") as archive:
        assert not list(archive.verify())
        assert len(archive.runs()) == 32


def test_lines_that_a_client_appends_meanwhile_are_never_lost(tmp_path):
    path, request = put(tmp_path / "s.jsonl"), request_in(tmp_path)
    written = [jsonl([{"role": "user", "content": f"Appended {n}: {'pea ' * 300}"}]) for n in range(60)]

    def client():
        for line in written:
            with path.open("ab") as file:
                file.write(line)
            time.sleep(0.004)

    compacted = 0
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(client)
        while not writing.done():
            done = attempt_in_place(str(path), request)
            compacted += bool(done.hash)
            assert done.error is None or done.error.code == "SOURCE_CHANGED"
    attempt_in_place(str(path), request)
    with open_source(str(path)) as source:
        assert (
            sha256(b"".join(restore(source, request))).digest() == sha256(CHAT + b"".join(written)).digest()
        )


def test_what_is_appended_between_the_last_look_and_the_rename_is_carried_over(tmp_path, monkeypatch):
    path, request = put(tmp_path / "s.jsonl"), request_in(tmp_path)
    line = jsonl([{"role": "user", "content": "At the last moment."}])
    rename = os.replace

    def late(old, new):
        with open(new, "ab") as file:
            file.write(line)
        rename(old, new)

    monkeypatch.setattr("haocompact.files.os.replace", late)
    assert attempt_in_place(str(path), request).hash
    assert path.read_bytes().endswith(line)
    with open_source(str(path)) as source:
        assert b"".join(restore(source, request)) == CHAT + line


# ------------------------------------------------------------------------------------- the report
def test_the_table_names_each_file_with_its_figures(run):
    put("x/a.jsonl")
    put("x/bad.jsonl", MIXED)
    put("x/small.jsonl", SMALL)
    put("x/notes.jsonl", b"{}\n")
    found = run(*IN_PLACE, "x", *NOW)
    lines = [line.split() for line in found.out.decode().splitlines()]
    after = Path("x/a.jsonl").stat().st_size
    with Archive.open("a.db") as archive:
        (segment,) = archive.segments()
    assert lines[2] == ["x/a.jsonl", "compacted", f"{len(CHAT):,}", f"{after:,}", segment.hash]
    assert lines[3][:4] == ["x/bad.jsonl", "failed", "some", "lines"]
    small = f"{len(SMALL):,}"
    assert ["x/small.jsonl", "skipped", small, small, "total_below_keep_recent"] in lines
    assert not any("notes.jsonl" in words for words in lines)
    text = found.out.decode()
    assert "1 compacted, 2 skipped (1 no_transcript, 1 total_below_keep_recent), 1 failed" in text
    assert f"{len(CHAT):,} -> {after:,} bytes" in text
    assert found.lines == [line for line in found.lines if line.startswith("haocompact: x/bad.jsonl: ")]


def test_a_large_table_shows_failures_and_what_shrank_most(run, monkeypatch):
    monkeypatch.setattr("haocompact.show.results.ROWS_SHOWN", 3)
    for n in range(5):
        put(f"x/{n}.jsonl", SMALL if n < 3 else numbered(n))
    put("x/z.jsonl", MIXED)
    text = run(*IN_PLACE, "x", *NOW).out.decode()
    names = [line.split()[0] for line in text.splitlines()[2:-2] if line.startswith(("x/", "..."))]
    assert names == ["x/z.jsonl", "x/3.jsonl", "x/4.jsonl", "..."]
    assert "... 3 more" in text


def test_json_has_a_line_a_file_and_the_totals(run):
    put("x/a.jsonl")
    put("x/bad.jsonl", MIXED)
    put("x/notes.jsonl", b"{}\n")
    good, bad, notes, totals = run(*IN_PLACE, "x", *NOW, "--json").json
    assert (good["result"], bad["code"], notes["branch"], notes["bytes_before"]) == (
        "ok",
        "TRANSCRIPT",
        "no_transcript",
        3,
    )
    assert totals == {
        "version": 1,
        "result": "totals",
        "files": 3,
        "compacted": 1,
        "skipped": {"no_transcript": 1},
        "failed": 1,
        "degraded": 0,
        "bytes_before": len(CHAT),
        "bytes_after": good["bytes_after"],
    }


def test_a_dry_run_tells_the_same_and_writes_nothing(run):
    put("x/a.jsonl")
    put("x/small.jsonl", SMALL)
    dry = run(*IN_PLACE, "x", *NOW, "--dry-run")
    assert Path("x/a.jsonl").read_bytes() == CHAT
    assert not Path("a.db").exists()
    assert dry.out.decode().replace("would be ", "") == run(*IN_PLACE, "x", *NOW).out.decode()


def test_a_failed_summary_is_told_once(run):
    put("s.jsonl")
    found = run(*IN_PLACE, "s.jsonl", "--command", "false")
    assert found.err.count("exit code 1") == 1
    put("x/a.jsonl")
    found = run(*IN_PLACE, "x", *NOW, "--command", "false")
    assert (found.code, found.err.count("exit code 1")) == (0, 1)
    assert "1 of them with an excerpt" in found.out.decode()


def on_a_terminal(words, folder):
    """What a program writes to stderr when that is a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([*HAOCOMPACT, *words], cwd=folder, stdout=subprocess.DEVNULL, stderr=theirs,
                          env={**os.environ, "TERM": "xterm", "COLUMNS": "100"}) as done:  # fmt: skip
        os.close(theirs)
        text = b""
        while True:
            try:
                block = os.read(ours, 4096)
            except OSError:
                break
            if not block:
                break
            text += block
    os.close(ours)
    assert done.returncode == 0
    return text.decode()


def test_a_bar_moves_on_a_terminal_only(tmp_path):
    for n in range(3):
        put(tmp_path / f"x/{n}.jsonl", numbered(n))
    words = [*IN_PLACE, "x", *NOW, "--dry-run"]
    assert "3/3" in on_a_terminal(words, tmp_path)
    assert on_a_terminal([*words, "--quiet"], tmp_path) == ""
    assert process(*words, cwd=tmp_path).err == ""


def test_an_empty_folder_is_no_mistake_but_a_missing_one_is(run):
    os.mkdir("x")
    assert run(*IN_PLACE, "x").code == 4
    assert run(*IN_PLACE, "nowhere").code == 4


# ---------------------------------------------------------------------------------------- cluster
def test_the_archives_of_workers_are_taken_in_and_read_until_then(tmp_path):
    path, request = put(tmp_path / "s.jsonl"), request_in(tmp_path)
    folder = batch.workers_folder(request.archive)
    Archive.open(request.archive, create=True).close()
    folder.mkdir()
    done = batch._Task(request, False, folder)(str(path), 0)
    assert (done.archive, len(list(folder.glob("*.db")))) == (str(request.archive), 1)
    for _ in range(2):
        with open_source(str(path)) as source:
            assert b"".join(restore(source, request)) == CHAT
        batch.take_in(request.archive)
        assert not folder.exists()


def test_whoever_stores_into_an_archive_that_was_taken_in_is_told(tmp_path):
    request = request_in(tmp_path)
    other = tmp_path / "other.db"
    path = put(tmp_path / "s.jsonl")
    store = Archive.store

    def late(self, *words, **more):
        if self.path == other:
            with Archive.open(request.archive, create=True) as target:
                target.take_in(other)
        return store(self, *words, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Archive, "store", late)
        done = attempt_in_place(str(path), Request(request.settings, archive=other))
    assert isinstance(done.error, ArchiveError)
    assert path.read_bytes() == CHAT


def test_a_dry_run_in_place_refuses_what_the_run_itself_refuses(tmp_path):
    put(tmp_path / "x/chat.jsonl", numbered(1))
    put(tmp_path / "x/requests.jsonl", (ROOT / "samples/openai-requests/batch.jsonl").read_bytes())
    words = [*IN_PLACE, "x", *NOW, "--json"]
    rehearsed = process(*words, "--dry-run", cwd=tmp_path).json[-1]
    assert rehearsed == process(*words, cwd=tmp_path).json[-1]
    assert rehearsed["skipped"] == {"not_in_place": 1}
