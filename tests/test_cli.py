"""The command line: exit codes, one line an error, bytes through pipes, JSON, settings, safe text."""

import gzip
import json
import os
import re
import resource
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import zstandard

from haocompact import __version__
from haocompact.cli import main
from haocompact.formats import FORMATS
from haocompact.formats.session import list_summary

HAOCOMPACT = [sys.executable, "-m", "haocompact"]
KEEP = ("--keep-recent", "1000", "--estimator", "chars")
COMMANDS = ("plan", "compact", "diag", "retrieve")
NUMBER = (int, float)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def chat(turns=8, size=400):
    """Turns of two messages of `size` tokens each."""
    pairs = (
        (user(f"Question {i}: {'bean ' * size}"), assistant(f"Answer {i}: {'leek ' * size}"))
        for i in range(turns)
    )
    return [message for pair in pairs for message in pair]


def jsonl(messages, end="\n"):
    return "".join(json.dumps(m, ensure_ascii=False) + end for m in messages).encode("utf-8", "surrogatepass")


CHAT = jsonl(chat())
SMALL = jsonl(chat(2, 10))


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err.decode()
        self.lines = self.err.splitlines()
        assert "Traceback" not in self.err

    @property
    def json(self):
        return [json.loads(line) for line in self.out.decode().splitlines()]


@pytest.fixture
def run(capsysbinary, monkeypatch, tmp_path):
    """Run the program in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words, stdin=b""):
        monkeypatch.setattr("sys.argv", ["haocompact", *map(str, words)])
        monkeypatch.setattr("sys.stdin", open_bytes(tmp_path, stdin))
        try:
            with pytest.raises(SystemExit) as exit:
                main()
        finally:
            sys.stdin.close()
        return Result(exit.value.code, *capsysbinary.readouterr())

    return run


def open_bytes(folder, data):
    path = folder.parent / f"{folder.name}-stdin"
    path.write_bytes(data)
    return path.open()


def put(path, data=CHAT):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def process(*words, stdin=b"", **more):
    done = subprocess.run(
        [*HAOCOMPACT, *map(str, words)], input=stdin, capture_output=True, timeout=120, check=False, **more
    )
    return Result(done.returncode, done.stdout, done.stderr)


# ------------------------------------------------------------------------------------ bad input
BAD = {
    "empty.jsonl": (b"", "empty file"),
    "blank.jsonl": (b"\n \r\n\n", "unknown format"),
    "malformed.jsonl": (b'{"role":"user"\n{{{\nnot json\n', "unknown format"),
    "scalars.jsonl": (b'1\n"x"\n[]\nnull\n', "unknown format"),
    "binary.jsonl": (bytes(range(256)) * 40, "unknown format"),
    "one-system-line.jsonl": (
        b'{"role":"system","content":"x"}\n',
        "no usable message: 1 line read as openai, none is a message",
    ),
    "claude-header.jsonl": (b'{"type":"mode","mode":"x","sessionId":"s"}\n', "no usable message"),
    "codex-header.jsonl": (
        b'{"timestamp":"2026-01-01T00:00:00.000Z","type":"session_meta","payload":{"id":"x",'
        b'"timestamp":"2026-01-01T00:00:00.000Z","cwd":"/","originator":"codex","cli_version":"0.1.0"}}\n',
        "no usable message",
    ),
    "torn.jsonl.gz": (gzip.compress(CHAT)[:-30], "compressed, but damaged"),
    "torn.jsonl.zst": (zstandard.compress(CHAT)[:40] + bytes(300), "compressed, but damaged"),
    "array.jsonl": (b"[1, 2, 3]", "unknown format"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_4(run, name, command):
    data, message = BAD[name]
    put(name, data)
    found = run(command, name)
    assert found.code == 4
    assert found.out == b""
    (line,) = found.lines
    assert line.startswith(f"haocompact: {name}: {message}")
    assert Path(name).read_bytes() == data


@pytest.mark.parametrize("name", BAD)
def test_bad_input_in_place_is_left_alone(run, name):
    data, _ = BAD[name]
    put(name, data)
    before = os.stat(name)
    assert run("compact", "--in-place", name, "--archive", "a.db").code == 4
    assert Path(name).read_bytes() == data
    assert os.stat(name).st_ino == before.st_ino
    assert not Path("a.db").exists()


def test_unknown_formats_are_told_the_known_ones(run):
    put("s.jsonl", b"{}\n")
    assert all(name in run("plan", "s.jsonl").err for name in FORMATS)
    assert run("plan", "--format", "nonsense", "s.jsonl").code == 2
    assert all(name in run("plan", "--format", "nonsense", "s.jsonl").err for name in FORMATS)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_file(run, command):
    os.mkdir("folder")
    os.mkfifo("pipe")
    pipe = os.open("pipe", os.O_RDWR)
    try:
        for name, message in (("missing", "no such file"), ("pipe", "not a regular file")):
            found = run(command, name)
            assert (found.code, found.out, found.lines) == (4, b"", [f"haocompact: {name}: {message}"])
    finally:
        os.close(pipe)
    found = run(command, "folder")
    message = (
        "is a directory"
        if command == "retrieve"
        else "no transcript in it (*.jsonl, *.jsonl.gz, *.jsonl.zst)"
    )
    assert (found.code, found.out, found.lines) == (4, b"", [f"haocompact: folder: {message}"])


@pytest.mark.parametrize("name", ["loop", "s.jsonl/below", "x" * 300])
def test_other_files_that_cannot_be_opened(run, name):
    put("s.jsonl")
    os.symlink("loop", "loop")
    found = run("plan", name, "s.jsonl", *KEEP)
    assert found.code == 4
    assert found.lines[0].startswith(f"haocompact: {name}: ")
    assert b"kept from line" in found.out


def test_a_pi_header_alone_is_an_empty_conversation(run):
    data = b'{"type":"session","version":3,"id":"x","timestamp":"2026-01-01T00:00:00.000Z","cwd":"/"}\n'
    put("s.jsonl", data)
    found = run("compact", "s.jsonl")
    assert (found.code, found.out) == (0, data)
    assert found.lines == [
        "[COMPACT_NONE] branch=empty_messages",
        "s.jsonl: nothing to compact (empty_messages)",
    ]


def test_one_message_is_a_skip(run):
    data = jsonl([user("hello")])
    found = run("compact", "-", stdin=data)
    assert (found.code, found.out) == (0, data)
    assert found.lines[0].startswith(
        "[COMPACT_NONE] branch=nothing_to_summarize sub=total_below_keep_recent msgs=1 "
    )


ODD = {
    "bom": (b"\xef\xbb\xbf" + CHAT, None),
    "crlf": (CHAT.replace(b"\n", b"\r\n"), None),
    "no final newline": (CHAT[:-1], None),
    "torn last line": (CHAT + b'{"role":"user","conte', "not JSON"),
    "lone surrogate": (CHAT.replace(b"Answer 6", b"Answer \\ud83d 6"), "lone surrogate"),
    "invalid utf-8": (CHAT.replace(b"Answer 6", b"Answer \xff 6"), "invalid UTF-8"),
    "big integer": (
        CHAT.replace(b'{"role": "assistant", ', b'{"role": "assistant", "n": 18446744073709551617, '),
        None,
    ),
    "nan": (
        CHAT[: CHAT.index(b"\n") + 1] + b'{"role":"user","content":NaN}\n' + CHAT[CHAT.index(b"\n") + 1 :],
        "NaN is not JSON",
    ),
    "1e400": (CHAT.replace(b'{"role": "assistant", ', b'{"role": "assistant", "n": 1e400, '), None),
    "separators": (
        CHAT.replace(b"Answer 6", "Answer \u2028\u2029\x85\v 6".encode().replace(b"\v", b"")),
        None,
    ),
    "nul around": (
        CHAT.replace(
            b'{"role": "assistant", "content": "Answer 6', b'\0\0{"role": "assistant", "content": "Answer 6'
        ),
        "NUL",
    ),
    "nul line": (CHAT + b"\0" * 4096, "NUL bytes"),
    "blank lines": (CHAT.replace(b"\n", b"\n\n"), None),
    "too deep": (b"[" * 100_000 + b"\n" + CHAT, "nested too deeply"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_input_is_compacted_reported_and_comes_back(run, name):
    data, warning = ODD[name]
    assert data != CHAT
    put("s.jsonl", data)
    found = run("compact", "s.jsonl", "-o", "out.jsonl", "--archive", "a.db", *KEEP)
    assert (found.code, found.out) == (0, b"")
    warnings = [line for line in found.lines if line.startswith("warning: s.jsonl:")]
    assert bool(warnings) == (warning is not None)
    assert all(warning in line for line in warnings)
    assert Path("s.jsonl").read_bytes() == data
    assert len(Path("out.jsonl").read_bytes()) < len(data) / 2
    assert run("retrieve", "out.jsonl", "--restore", "--archive", "a.db").out == data


def test_line_ends_and_kept_bytes_stay(run):
    data, _ = ODD["crlf"]
    put("s.jsonl", data)
    found = run("compact", "s.jsonl", *KEEP)
    summary, *kept = found.out.splitlines(keepends=True)
    assert summary.endswith(b"\r\n")
    assert kept == data.splitlines(keepends=True)[-len(kept) :]


@pytest.mark.parametrize("depth", [400, 900, 1000])
def test_deep_arguments(run, depth):
    deep = "{" + '"a":{' * depth + "}" * depth + "}"
    call = json.dumps(
        assistant(None, tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "DEEP"}}])
    )
    put("s.jsonl", jsonl(chat(2)) + call.replace('"DEEP"', deep).encode() + b"\n" + CHAT)
    assert run("compact", "s.jsonl", *KEEP).code == 0


@pytest.mark.parametrize("depth", [8000, 12000])
def test_arguments_deeper_than_the_fast_parser_reads(tmp_path, depth):
    """In a process of its own: a traceback of so many frames takes pytest minutes."""
    call = json.dumps(
        assistant(None, tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "DEEP"}}])
    )
    deep = call.replace('"DEEP"', '{"a":' * depth + "1" + "}" * depth).encode() + b"\n"
    found = process("plan", "-", *KEEP, stdin=deep + CHAT)
    assert found.lines == ["warning: (stdin):1: nested too deeply: kept as it is, not read"]


def test_a_line_of_200_megabytes(tmp_path):
    path = tmp_path / "s.jsonl"
    call = assistant(
        None, tool_calls=[{"id": "c", "type": "function", "function": {"name": "cat", "arguments": "{}"}}]
    )
    with path.open("wb") as file:
        file.write(
            jsonl(chat(2))
            + jsonl([user("Show it."), call])
            + b'{"role":"tool","tool_call_id":"c","content":"'
        )
        for _ in range(200):
            file.write(b"bean leek\\n" * 95325)
        file.write(b'"}\n' + CHAT)
    size = path.stat().st_size
    assert size > 200_000_000
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = before.ru_utime + before.ru_stime
    out, archive = tmp_path / "out.jsonl", tmp_path / "a.db"
    assert process("compact", path, "-o", out, "--archive", archive, *KEEP).code == 0
    assert process("retrieve", out, "--restore", "--archive", archive, "-o", tmp_path / "back").code == 0
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime - start < 30
    assert used.ru_maxrss < 2_000_000
    assert out.stat().st_size < 100_000
    assert subprocess.run(["cmp", path, tmp_path / "back"], check=False).returncode == 0
    path.unlink()
    (tmp_path / "back").unlink()


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_zst_file_that_is_cut_short(run, part):
    whole = zstandard.compress(os.urandom(300_000).hex().encode() + b"\n" + CHAT)
    put("s.jsonl.zst", whole[: int(len(whole) * part)])
    found = run("plan", "s.jsonl.zst")
    assert found.code == 4
    assert "compressed, but damaged" in found.err


# -------------------------------------------------------------------------------------- streams
def shell(line, **variables):
    """The exit codes of a pipe's members, its output and its notes."""
    script = f'haocompact() {{ {sys.executable} -m haocompact "$@"; }}\nset -o pipefail\n{line}'
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, **{k: str(v) for k, v in variables.items()}},
    )
    return Result(done.returncode, done.stdout, done.stderr)


def test_pipes(tmp_path):
    path = put(tmp_path / "s.jsonl")
    keep = " ".join(KEEP)
    found = shell(f"cat $FILE | haocompact compact - {keep} | wc -l", FILE=path)
    assert (found.code, int(found.out)) == (0, 3)
    found = shell(f"haocompact compact $FILE {keep} | head -1", FILE=path)
    assert found.code == 0
    assert b"[haocompact] Summary of the conversation so far (2 messages kept after it)" in found.out
    found = shell(
        f"cat $FILE | haocompact compact {keep} | haocompact compact {keep} | haocompact plan --json {keep}",
        FILE=path,
    )
    assert found.json[0]["previous_summary"] is True


def test_a_reader_that_leaves_is_no_error(tmp_path):
    """Larger than any pipe buffer, so that the write itself fails."""
    path = put(tmp_path / "s.jsonl", jsonl(chat(200)))
    for command in ("compact", "plan --all", "plan --json", "compact --keep-recent 1000000"):
        found = shell(f"haocompact {command} $FILE 2>/dev/null | true", FILE=path)
        assert (found.code, found.err) == (0, "")


@pytest.mark.parametrize(
    "command", ["compact", "compact --keep-recent 1", "plan", "plan --json", "diag", "--help", "--version"]
)
def test_standard_output_on_a_full_disk(tmp_path, command):
    path = put(tmp_path / "s.jsonl") if not command.startswith("--") else ""
    found = shell(f"haocompact {command} {path} > /dev/full")
    assert found.code == 7
    assert found.lines[-1].startswith("haocompact: ")
    assert not path or path.read_bytes() == CHAT


def test_closed_streams(tmp_path):
    path = put(tmp_path / "s.jsonl")
    assert shell("haocompact plan <&-").code == 4
    assert shell(f"haocompact plan {path} >&-").code == 0
    found = shell(f"haocompact compact {path} 2>&- {' '.join(KEEP)}")
    assert len(found.out.splitlines()) == 3


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 128 KiB. Needs root."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "none", mount], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("a small file system can't be mounted here")
    yield mount
    subprocess.run(["umount", mount], check=True)


def test_a_full_disk_leaves_the_original(full_disk, tmp_path):
    path = put(full_disk / "s.jsonl", CHAT)
    (full_disk / "filler").write_bytes(b"x" * (128 * 1024 - len(CHAT) - 12 * 1024))
    there = sorted(os.listdir(full_disk))
    for words in (["--in-place"], ["-o", full_disk / "o"], ["--output-dir", full_disk]):
        source = path if "--in-place" in words else put(tmp_path / "t.jsonl")
        found = process("compact", source, "--archive", tmp_path / "a.db", "--keep-recent", "4000", *words)
        assert found.code == 7
        assert found.lines[-1].startswith("haocompact: ")
        assert "the disk is full; the original is untouched" in found.lines[-1]
        assert path.read_bytes() == CHAT
        assert sorted(os.listdir(full_disk)) == there
    found = process(
        "compact",
        tmp_path / "t.jsonl",
        "-o",
        tmp_path / "o",
        "--archive",
        full_disk / "a.db",
        "--keep-recent",
        "4000",
    )
    assert found.code == 7
    assert not (tmp_path / "o").exists()


# ---------------------------------------------------------------------------- skips pass through
def test_a_skip_passes_the_input_through(run):
    data = SMALL[:-1]
    path = put("s.jsonl", data)
    assert run("compact", "s.jsonl").out == data
    assert run("compact", "-", stdin=data).out == data
    assert run("compact", stdin=data).out == data
    assert run("compact", "s.jsonl", "-o", "o.jsonl").out == b""
    assert Path("o.jsonl").read_bytes() == data
    assert run("compact", "s.jsonl", "--output-dir", "new/folder").out == b""
    assert Path("new/folder/s.jsonl").read_bytes() == data
    before = path.stat()
    assert run("compact", "s.jsonl", "--in-place").code == 0
    assert (path.read_bytes(), path.stat()) == (data, before)


def test_a_skip_is_written_to_the_log_and_to_stderr(run):
    put("s.jsonl", SMALL)
    found = run("compact", "s.jsonl", "--log", "logs/skips.log", "-o", "o")
    line, done = found.lines
    assert line.startswith(
        "[COMPACT_NONE] branch=nothing_to_summarize sub=total_below_keep_recent msgs=4 est_total="
    )
    assert done == "s.jsonl: nothing to compact (total_below_keep_recent)"
    (logged,) = Path("logs/skips.log").read_text().splitlines()
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00\] " + re.escape(line) + ' source="s.jsonl"', logged
    )
    assert run("compact", "s.jsonl", "--quiet", "-o", "o").err == ""


def test_check(run):
    put("s.jsonl", SMALL)
    put("long.jsonl")
    for command in ("plan", "diag", "compact"):
        assert run(command, "s.jsonl", "--check").code == 3
        assert run(command, "s.jsonl").code == 0
        assert run(command, "long.jsonl", "--check", *KEEP).code == 0
    assert run("compact", "s.jsonl", "--check").out == SMALL
    assert run("compact", "s.jsonl", "long.jsonl", "--check", *KEEP, "--output-dir", "out").code == 0
    assert run("compact", "s.jsonl", "--check", "--dry-run").code == 3


def test_a_dry_run_writes_nothing(run):
    put("s.jsonl")
    found = run("compact", "s.jsonl", "--dry-run", "--json", "--archive", "a.db", "--log", "l", *KEEP)
    assert found.json[0]["result"] == "ok"
    assert found.json[0]["output"] is None
    assert os.listdir() == ["s.jsonl"]


# -------------------------------------------------------------------------------------- targets
def test_several_paths_one_bad(run):
    put("a.jsonl")
    put("b.jsonl", b"")
    put("c.jsonl")
    found = run(
        "compact", "a.jsonl", "b.jsonl", "missing", "c.jsonl", "--in-place", "--archive", "a.db", *KEEP
    )
    assert found.code == 7
    assert found.lines == ["haocompact: b.jsonl: empty file", "haocompact: missing: no such file"]
    rows = [line.split()[:2] for line in found.out.decode().splitlines()[2:6]]
    assert rows == [
        ["a.jsonl", "compacted"],
        ["b.jsonl", "failed"],
        ["missing", "failed"],
        ["c.jsonl", "compacted"],
    ]
    assert "2 compacted, 0 skipped, 2 failed" in found.out.decode()
    assert all(len(Path(n).read_bytes()) < len(CHAT) for n in ("a.jsonl", "c.jsonl"))
    found = run("compact", "b.jsonl", "c.jsonl", "--output-dir", "out")
    assert (found.code, os.listdir("out")) == (7, ["c.jsonl"])
    found = run("plan", "b.jsonl", "c.jsonl", "--json")
    assert (found.code, [o["result"] for o in found.json]) == (4, ["error", "none"])


@pytest.mark.parametrize("jobs", [1, 2])
def test_folders_are_walked(run, jobs):
    for name in ("x/a.jsonl", "x/deep/b.jsonl", "x/notes.txt", "x/.haocompact-1.tmp", "x/empty.jsonl"):
        put(name, b"" if "empty" in name else CHAT)
    found = run(
        "compact", "x", "--in-place", "--archive", "a.db", "--min-age", "0", "--jobs", jobs, "--json", *KEEP
    )
    assert found.code == 0
    assert [(Path(o["path"]).name, o["result"], o["branch"]) for o in found.json[:-1]] == [
        ("a.jsonl", "ok", None),
        ("empty.jsonl", "none", "no_transcript"),
        ("b.jsonl", "ok", None),
    ]
    assert Path("x/notes.txt").read_bytes() == CHAT
    found = run("compact", "x/a.jsonl", "x/deep", "--in-place", "--archive", "a.db", "--json")
    assert [(o["result"], o["branch"]) for o in found.json[:-1]] == [
        ("none", "nothing_to_summarize"),
        ("none", "in_use"),
    ]
    back = run("retrieve", "x/a.jsonl", "--restore", "--archive", "a.db")
    assert back.out == CHAT


def test_in_place_keeps_mode_owner_and_links(run):
    path = put("real/s.jsonl")
    path.chmod(0o640)
    if os.getuid() == 0:
        os.chown(path, 1234, 5678)
    os.symlink("real/s.jsonl", "link.jsonl")
    before = path.stat()
    assert run("compact", "link.jsonl", "--in-place", "--archive", "a.db", *KEEP).code == 0
    after = path.stat()
    assert os.readlink("link.jsonl") == "real/s.jsonl"
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_size < len(CHAT)
    assert os.listdir("real") == ["s.jsonl"]


def test_private_files(run):
    os.umask(0o022)
    put("s.jsonl")
    put("small.jsonl", SMALL)
    run("compact", "s.jsonl", "-o", "o.jsonl", "--archive", "new/a/archive.db", *KEEP)
    run("compact", "small.jsonl", "-o", "p.jsonl", "--log", "new/l/skips.log")
    for name, mode in (
        ("new/a/archive.db", 0o600),
        ("new/l/skips.log", 0o600),
        ("o.jsonl", 0o600),
        ("p.jsonl", 0o600),
        ("new/a", 0o700),
        ("new/l", 0o700),
    ):
        assert stat.S_IMODE(os.stat(name).st_mode) == mode, name


def test_default_places(run, own_folders):
    put("s.jsonl")
    put("small.jsonl", SMALL)
    run("compact", "s.jsonl", "-o", "o.jsonl", *KEEP)
    run("compact", "small.jsonl", "-o", "o2.jsonl")
    files = sorted(p.name for p in own_folders.rglob("*") if p.is_file() and "db-" not in p.name)
    assert files == ["archive.db", "compaction_diag.log"]
    for path in (*own_folders.rglob("archive.db"), *own_folders.rglob("*.log")):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_targets_that_would_lose_something_are_refused(run):
    put("a/s.jsonl")
    put("b/s.jsonl")
    os.symlink("a/s.jsonl", "link")
    for words, message in (
        (["a/s.jsonl", "-o", "a/s.jsonl"], "-o names the transcript itself: use --in-place"),
        (["a/s.jsonl", "-o", "link"], "-o names the transcript itself: use --in-place"),
        (
            ["a/s.jsonl", "--output-dir", "a"],
            "--output-dir is the folder of a/s.jsonl itself: use --in-place",
        ),
        (
            ["a/s.jsonl", "b/s.jsonl", "--output-dir", "out"],
            "a/s.jsonl and b/s.jsonl would both become out/s.jsonl",
        ),
        (["a", "b", "--output-dir", "out"], "a/s.jsonl and b/s.jsonl would both become out/s.jsonl"),
        (["a", "b", "-o", "out"], "2 transcripts, one output: use --output-dir or --in-place"),
        (["a", "b"], "2 transcripts, one output: use --output-dir or --in-place"),
        (["a/s.jsonl", "-o", "x", "--in-place"], "-o and --in-place contradict each other"),
        (["--in-place"], "--in-place needs files or folders"),
        (["-", "--in-place"], "--in-place needs files or folders"),
        (
            ["a/s.jsonl", "--json"],
            "--json goes with -o, --output-dir, --in-place or --dry-run: stdout carries the transcript",
        ),
    ):
        found = run("compact", *words)
        assert (found.code, found.lines) == (2, [f"haocompact: {message}"])
        assert (Path("a/s.jsonl").read_bytes(), os.path.exists("out")) == (CHAT, False)


@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
def test_output_to_what_is_no_plain_file(run, kind):
    put("s.jsonl")
    if kind == "link":
        os.symlink("real.jsonl", "out")
        put("real.jsonl", b"")
        run("compact", "s.jsonl", "-o", "out", *KEEP)
        assert os.path.islink("out")
        assert len(Path("real.jsonl").read_bytes().splitlines()) == 3
        return
    if kind == "device":
        if os.getuid():
            pytest.skip("needs root")
        os.mknod("out", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    else:
        os.mkfifo("out")
        reader = os.open("out", os.O_RDONLY | os.O_NONBLOCK)
    before = stat.S_IFMT(os.stat("out").st_mode)
    run("compact", "s.jsonl", "-o", "out", *KEEP)
    if kind == "fifo":
        os.close(reader)
    assert stat.S_IFMT(os.stat("out").st_mode) == before


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_input(run, suffix):
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    put(f"s.jsonl{suffix}", pack(CHAT))
    plain = run("compact", "-", *KEEP, "--archive", "a.db", stdin=CHAT).out
    assert run("compact", f"s.jsonl{suffix}", *KEEP, "--archive", "a.db").out == plain
    assert run("compact", "-", *KEEP, "--archive", "a.db", stdin=pack(CHAT)).out == plain
    assert run("compact", f"s.jsonl{suffix}", "--output-dir", "out", "--archive", "a.db", *KEEP).code == 0
    assert Path("out/s.jsonl").read_bytes() == plain
    found = run("compact", f"s.jsonl{suffix}", "--in-place", "--archive", "a.db")
    assert (found.code, "can't be compacted in place" in found.err) == (2, True)


def test_no_archive(run):
    put("s.jsonl")
    found = run("compact", "s.jsonl", "--no-archive", "--archive", "a.db", *KEEP)
    assert found.code == 0
    assert b"<<ccr:" not in found.out
    assert not os.path.exists("a.db")


@pytest.mark.parametrize("archive", ["folder", "text"])
def test_an_archive_that_is_none(run, archive):
    put("s.jsonl")
    os.mkdir("folder")
    put("text", b"not an archive")
    for words in (["compact", "s.jsonl", *KEEP], ["retrieve", "s.jsonl"], ["retrieve", "--verify"]):
        found = run(*words, "--archive", archive)
        assert (found.code, found.out, len(found.lines)) == (6, b"", 1)
    assert Path("text").read_bytes() == b"not an archive"


# ---------------------------------------------------------------------------------------- JSON
PLAN = {
    "version": int,
    "path": str,
    "format": str,
    "result": str,
    "branch": (str, type(None)),
    "sub": (str, type(None)),
    "estimator": str,
    "tokens_before": NUMBER,
    "usage_tokens": NUMBER,
    "trailing_tokens": NUMBER,
    "window": int,
    "should_compact": bool,
    "keep_recent_tokens": int,
    "reserve_tokens": int,
    "first_kept_line": (int, type(None)),
    "turn_start_line": (int, type(None)),
    "is_split_turn": bool,
    "summarize": int,
    "prefix": int,
    "kept": int,
    "tokens_kept": (int, type(None)),
    "previous_summary": bool,
    "read_files": list,
    "modified_files": list,
    "opaque_lines": int,
}
COMPACTED = {
    "version": int,
    "path": str,
    "format": str,
    "result": str,
    "branch": type(None),
    "sub": type(None),
    "output": str,
    "archive": str,
    "hash": str,
    "summarizer": str,
    "degraded": bool,
    "tokens_before": NUMBER,
    "tokens_after": NUMBER,
    "first_kept_line": int,
    "is_split_turn": bool,
    "summarize": int,
    "prefix": int,
    "kept": int,
    "bytes_before": int,
    "bytes_after": int,
}


def check(found, contract):
    for name, kind in contract.items():
        assert name in found, name
        assert isinstance(found[name], kind), name
        assert (
            kind is bool
            or not isinstance(found[name], bool)
            or bool in (kind if isinstance(kind, tuple) else (kind,))
        )
    assert found["version"] == 1


def test_plan_json(run):
    call = assistant(
        None, tool_calls=[{"id": "c", "function": {"name": "edit", "arguments": '{"path":"a.py"}'}}]
    )
    put(
        "s.jsonl",
        jsonl(
            [
                *chat(2),
                user("Edit."),
                call,
                {"role": "tool", "tool_call_id": "c", "content": "done"},
                *chat(6),
            ]
        )
        + b"{\n",
    )
    (found,) = run("plan", "s.jsonl", "--json", *KEEP).json
    check(found, PLAN)
    assert found == found | {
        "path": "s.jsonl",
        "format": "openai",
        "result": "ok",
        "branch": None,
        "sub": None,
        "estimator": "chars",
        "usage_tokens": 0,
        "window": 200000,
        "should_compact": False,
        "keep_recent_tokens": 1000,
        "reserve_tokens": 16384,
        "first_kept_line": 18,
        "turn_start_line": None,
        "is_split_turn": False,
        "summarize": 17,
        "prefix": 0,
        "kept": 2,
        "previous_summary": False,
        "read_files": [],
        "modified_files": ["a.py"],
        "opaque_lines": 1,
    }
    assert found["tokens_before"] == found["trailing_tokens"] == sum(r["tokens"] for r in found["rows"])
    assert found["summarize"] + found["prefix"] + found["kept"] == found["messages"] == 19
    assert found["tokens_kept"] == sum(r["tokens"] for r in found["rows"] if r["place"] == "keep")
    assert [r["line"] for r in found["rows"] if r["cut"]] == [found["first_kept_line"]]


def test_plan_json_of_a_skip(run):
    (found,) = run("plan", "--json", stdin=SMALL).json
    check(found, PLAN)
    assert (found["path"], found["result"], found["branch"], found["sub"], found["first_kept_line"]) == (
        "-",
        "none",
        "nothing_to_summarize",
        "total_below_keep_recent",
        None,
    )


def test_plan_json_of_a_split_turn(run):
    (found,) = run("plan", "--json", "--keep-recent", "300", "--estimator", "chars", stdin=CHAT).json
    assert (found["is_split_turn"], found["turn_start_line"], found["first_kept_line"]) == (True, 15, 16)
    assert (found["summarize"], found["prefix"], found["kept"]) == (14, 1, 1)


def test_compact_json(run):
    put("s.jsonl")
    (found,) = run("compact", "s.jsonl", "--json", "-o", "o.jsonl", "--archive", "a.db", *KEEP).json
    check(found, COMPACTED)
    out = Path("o.jsonl").read_bytes()
    assert (found["result"], found["output"], found["archive"], found["summarizer"], found["degraded"]) == (
        "ok",
        "o.jsonl",
        "a.db",
        "extract",
        False,
    )
    assert (found["bytes_before"], found["bytes_after"]) == (len(CHAT), len(out))
    assert f"<<ccr:{found['hash']}>>".encode() in out
    assert found["tokens_after"] < found["tokens_before"]
    (skip,) = run("compact", "o.jsonl", "--json", "-o", "p.jsonl", "--archive", "a.db", *KEEP).json
    assert (skip["result"], skip["output"], skip["bytes_before"], skip["bytes_after"]) == (
        "none",
        "p.jsonl",
        len(out),
        len(out),
    )
    assert (skip["branch"], skip["sub"]) != (None, None)
    (found,) = run("compact", "s.jsonl", "--json", "--no-archive", "-o", "q.jsonl", *KEEP).json
    assert (found["archive"], found["hash"]) == (None, None)


@pytest.mark.parametrize("keep", ["1000", "100000"])
def test_compact_json_has_every_field_of_plan_json(run, keep):
    put("s.jsonl")
    (planned,) = run("plan", "s.jsonl", "--json", "--keep-recent", keep).json
    (found,) = run("compact", "s.jsonl", "--json", "-o", "o.jsonl", "--keep-recent", keep).json
    assert {k: found.get(k, "missing") for k in PLAN} == {k: planned[k] for k in PLAN}


def test_plan_diag_and_compact_agree(run):
    put("s.jsonl")
    for keep in (0, 300, 1000, 4000, 100000):
        words = ("s.jsonl", "--json", "--keep-recent", keep, "--estimator", "chars")
        (planned,), (told,), (done,) = (
            run("plan", *words).json,
            run("diag", *words).json,
            run("compact", *words, "-o", "o").json,
        )
        for name in ("result", "branch", "sub", "tokens_before"):
            assert told[name] == planned[name]
        for name in (
            "result",
            "branch",
            "sub",
            "first_kept_line",
            "is_split_turn",
            "summarize",
            "prefix",
            "kept",
            "tokens_before",
        ):
            assert done.get(name, planned[name]) == planned[name]


def test_if_needed_is_the_same_for_diag_and_compact(run):
    put("s.jsonl")
    (told,) = run("diag", "s.jsonl", "--json", "--if-needed", *KEEP).json
    (done,) = run("compact", "s.jsonl", "--json", "--if-needed", "-o", "o", *KEEP).json
    assert done["branch"] == "below_trigger"
    assert (told["result"], told["branch"]) == (done["result"], done["branch"])
    assert told["explanation"].startswith("The context has ")


def test_diag_json(run):
    (found,) = run("diag", "--json", "--estimator", "chars", stdin=SMALL).json
    check(
        found,
        {
            "version": int,
            "path": str,
            "result": str,
            "branch": str,
            "sub": str,
            "msgs": int,
            "est_total": NUMBER,
            "compactable": int,
            "keep_recent": int,
            "first_kept": int,
            "turn_start": int,
            "split": bool,
            "user": int,
            "asst": int,
            "est_first": int,
            "est_rest": int,
            "top3": list,
            "head_roles": list,
            "explanation": str,
            "suggestions": list,
        },
    )
    assert found["head_roles"] == ["U", "A", "U", "A"]
    assert found["top3"][0].keys() == {"idx", "tokens"}
    (found,) = run("diag", "--json", *KEEP, stdin=CHAT).json
    assert (found["result"], found["branch"], found["sub"]) == ("ok", None, None)


def test_retrieve_json(run):
    put("s.jsonl")
    (done,) = run("compact", "s.jsonl", "--json", "--in-place", "--archive", "a.db", *KEEP).json
    (found,) = run("retrieve", "s.jsonl", "--json", "--archive", "a.db").json
    (segment,) = found["segments"]
    check(
        found | segment,
        {
            "version": int,
            "path": str,
            "hash": str,
            "messages": int,
            "chars": int,
            "created": str,
            "source": str,
        },
    )
    assert (segment["hash"], segment["messages"]) == (done["hash"], done["summarize"])
    assert os.path.abspath(segment["source"]) == os.path.abspath("s.jsonl")
    (text,) = run("retrieve", "s.jsonl", done["hash"], "--json", "--archive", "a.db").json
    assert text["text"].startswith("[user] Question 0")


@pytest.mark.parametrize("command", ["plan", "diag"])
def test_errors_are_objects_too(run, command):
    put("mixed.jsonl", b'{"type":"session","version":3,"id":"x"}\n[]\n')
    found = run(command, "missing", "--json")
    (told,) = found.json
    assert told == told | {
        "version": 1,
        "path": "missing",
        "result": "error",
        "code": "TRANSCRIPT",
        "message": "no such file",
        "line": None,
    }
    assert told.get("cause") == ("unreadable" if command == "diag" else None)
    assert found.code == 4


def test_compact_errors_are_objects_too(run):
    put("x.jsonl", b"")
    found = run("compact", "x.jsonl", "missing", "--json", "--output-dir", "out")
    assert [(o["result"], o["code"], o["path"]) for o in found.json] == [
        ("error", "NO_TRANSCRIPT", "x.jsonl"),
        ("error", "TRANSCRIPT", "missing"),
    ]
    assert found.code == 7


# ------------------------------------------------------------------------------------- settings
def keep_recent_of(run, *words):
    return run("plan", "--json", *words, stdin=SMALL).json[0]["keep_recent_tokens"]


def test_precedence(run, monkeypatch, own_folders):
    assert keep_recent_of(run) == 20000
    config = put(
        own_folders / "XDG_CONFIG_HOME" / "haocompact" / "config.toml",
        b"keep-recent = 111\nestimator = 'chars'\n",
    )
    assert keep_recent_of(run) == 111
    assert run("diag", "--json", stdin=SMALL).json[0]["keep_recent"] == 111
    monkeypatch.setenv("HAOCOMPACT_CONFIG", str(put("own.toml", b"[tool.haocompact]\nkeep-recent = 222\n")))
    assert keep_recent_of(run) == 222
    monkeypatch.setenv("HAOCOMPACT_KEEP_RECENT", "333")
    assert keep_recent_of(run) == 333
    assert keep_recent_of(run, "--keep-recent", "444") == 444
    monkeypatch.delenv("HAOCOMPACT_CONFIG")
    monkeypatch.delenv("HAOCOMPACT_KEEP_RECENT")
    config.unlink()
    assert keep_recent_of(run) == 20000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keep-recnt = 1", "unknown key 'keep-recnt' (did you mean 'keep-recent'?)"),
        ("keep_recent = 1", "unknown key 'keep_recent' (did you mean 'keep-recent'?)"),
        ("[tool.haocompact]\nwindw = 1", "unknown key 'windw' (did you mean 'window'?)"),
        ("tool = 3", "tool is not a table"),
        ("[tool]\nhaocompact = 3", "haocompact is not a table"),
        ("keep-recent = ", "Invalid value"),
        ("keep-recent = 'many'", "Invalid value for '--keep-recent'"),
        ("keep-recent = [1]", "Invalid value for '--keep-recent'"),
        ("keep-recent = -1", "Invalid value for '--keep-recent'"),
        ("estimator = 'words'", "no such estimator: words"),
        ("lang = 'fr'", "Invalid value for '--lang'"),
    ],
)
def test_bad_settings(run, monkeypatch, text, message):
    monkeypatch.setenv("HAOCOMPACT_CONFIG", str(put("c.toml", text.encode())))
    found = run("compact", stdin=SMALL)
    assert (found.code, found.out, len(found.lines)) == (2, b"", 1)
    assert message in found.err


def test_a_settings_file_that_is_named_must_be_there(run, monkeypatch):
    monkeypatch.setenv("HAOCOMPACT_CONFIG", "nowhere.toml")
    found = run("plan", stdin=SMALL)
    assert (found.code, found.lines) == (2, ["haocompact: nowhere.toml: No such file or directory"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--summarizer", "extract", "--command", "cat"],
            "--command and --summarizer extract: only one summarizer can be named",
        ),
        (["--summarizer", "command"], "--summarizer command needs --command"),
        (["--summary-chars", "500", "--command", "cat"], "--summary-chars goes with the offline summarizer"),
        (["--summary-chars", "0"], "Invalid value for '--summary-chars'"),
        (["--estimator", "words"], "no such estimator: words (known: cjk, chars, tiktoken[:ENCODING])"),
        (["--keep-recent", "x"], "Invalid value for '--keep-recent'"),
        (["--nonsense"], "No such option: --nonsense"),
        (["--lang", "fr"], "Invalid value for '--lang'"),
    ],
)
def test_usage_errors(run, words, message):
    found = run("compact", *words, stdin=SMALL)
    assert (found.code, found.out, len(found.lines)) == (2, b"", 1)
    assert message in found.err


def test_summary_chars(run):
    rules = [user(f"Never rename column c{i}_total in table t{i}.") for i in range(200)]
    lengths = []
    for chars in (1000, 3000):
        found = run("compact", *KEEP, "--no-archive", "--summary-chars", chars, stdin=jsonl(rules + chat()))
        summary = found.json[0]["content"]
        assert "(left out: rules " in summary
        lengths.append(len(summary))
    assert lengths[0] < 1200 < 2500 < lengths[1] < 3200


@pytest.mark.parametrize("keep", [True, False])
def test_a_rule_that_the_program_forgets_is_put_back(run, keep):
    program = f"{sys.executable} -c \"print('## Goal\\n- Go on')\""
    words = ("--command", program, "--keep-rules" if keep else "--no-keep-rules")
    chats = jsonl([user("Never write to the folder beans/raw."), assistant("Fine."), *chat()])
    summary = run("compact", *KEEP, "--no-archive", *words, stdin=chats).json[0]["content"]
    assert ("- Never write to the folder beans/raw." in summary) is keep
    assert "## Goal\n- Go on" in summary


def test_version_and_help(run):
    assert run("--version").out.decode() == f"haocompact {__version__}\n"
    found = run()
    assert (found.code, found.lines[0]) == (2, "Usage: haocompact [OPTIONS] COMMAND [ARGS]...")
    for command in COMMANDS:
        assert run(command, "--help").code == 0


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        ("--version", "openai tiktoken rich orjson zstandard"),
        ("compact s.jsonl -o o.jsonl --keep-recent 1000", "openai tiktoken rich"),
        ("compact s.jsonl --in-place", "openai tiktoken rich"),
        ("plan s.jsonl --json", "openai tiktoken rich"),
        ("diag s.jsonl", "openai tiktoken rich"),
        ("retrieve s.jsonl --json", "openai tiktoken rich"),
    ],
)
def test_nothing_heavy_is_imported(tmp_path, words, absent):
    put(tmp_path / "s.jsonl")
    script = textwrap.dedent(f"""
        import sys
        from haocompact.archive import Archive
        from pathlib import Path
        Archive.open(Path("a.db"), create=True).close()
        for name in list(sys.modules):
            if name.partition(".")[0] in ("haocompact", "zstandard"):
                del sys.modules[name]
        sys.argv = ["haocompact", *{words!r}.split()]
        from haocompact.cli import main
        try:
            main()
        except SystemExit as exit:
            assert not exit.code, exit.code
        loaded = {{name.partition(".")[0] for name in sys.modules}}
        print(*sorted(loaded & set({absent!r}.split())), file=sys.stderr)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
        env=os.environ | {"HAOCOMPACT_ARCHIVE": "a.db"},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr.decode().splitlines()[-1] == ""


# ------------------------------------------------------------------------------------- retrieve
@pytest.fixture
def compacted(run):
    put("s.jsonl", jsonl(chat(30, 100)))
    (done,) = run("compact", "s.jsonl", "--json", "--in-place", "--archive", "a.db", *KEEP).json
    return done


def test_retrieve_lists_shows_and_restores(run, compacted):
    assert compacted["hash"].encode() in run("retrieve", "s.jsonl", "--archive", "a.db").out
    marker = f"<<ccr:{compacted['hash']}>>"
    raw = run("retrieve", "s.jsonl", marker, "--raw", "--archive", "a.db").out
    assert raw == jsonl(chat(30, 100)[: compacted["summarize"]])
    assert run("retrieve", "s.jsonl", "--restore", "--archive", "a.db").out == jsonl(chat(30, 100))
    assert run(
        "retrieve", "-", "--restore", "--archive", "a.db", stdin=Path("s.jsonl").read_bytes()
    ).out == jsonl(chat(30, 100))
    assert run("retrieve", "s.jsonl", "--restore", "-o", "s.jsonl", "--archive", "a.db").code == 0
    assert Path("s.jsonl").read_bytes() == jsonl(chat(30, 100))
    assert run("retrieve", "--verify", "--archive", "a.db").out == b"the archive is whole\n"


@pytest.mark.parametrize(
    "hash", ["0" * 16, "0" * 24, "0" * 15, "xyz", "<<ccr:0123456789abcdef>>", "0123456789ABCDEF", ""]
)
@pytest.mark.parametrize("more", [(), ("--raw",), ("--restore",)])
def test_hashes_that_are_not_here(run, compacted, hash, more):
    found = run("retrieve", "s.jsonl", hash, *more, "--archive", "a.db")
    assert (found.code, found.out, len(found.lines)) == (6, b"", 1)


def test_a_longer_hash_is_no_abbreviation(run, compacted):
    found = run("retrieve", "s.jsonl", compacted["hash"] + "0" * 8, "--archive", "a.db")
    assert (found.code, found.out) == (6, b"")


def test_a_foreign_marker_is_listed_as_missing(run):
    text = "[haocompact] Summary of the conversation so far (1 messages kept after it).\n\n## Goal\nx\n\n"
    marker = "<<ccr:0123456789abcdef>> original archived (3 messages / 99 characters)"
    put("other.jsonl")
    run("compact", "other.jsonl", "-o", "o", "--archive", "a.db", *KEEP)
    found = run("retrieve", "--json", "--archive", "a.db", stdin=jsonl([user(text + marker), user("Go on.")]))
    assert (found.code, found.json[0]["segments"], found.json[0]["missing"]) == (0, [], ["0123456789abcdef"])


def test_a_hash_without_a_transcript(run, compacted):
    marker = f"<<ccr:{compacted['hash']}>>"
    alone, beside = (
        run("retrieve", *words, "--archive", "a.db") for words in ((marker,), ("s.jsonl", marker))
    )
    assert (alone.code, alone.out) == (0, beside.out)
    for unknown in ("<<ccr:0123456789abcdef>>", "feedfeedfeedfeed", "feedfeedfeedfeedfeedfeed"):
        found = run("retrieve", unknown, "--archive", "a.db")
        assert (found.code, found.out) == (6, b"")
        assert "not found" in found.lines[0]


def test_the_summary_alone(run, compacted):
    found = run("retrieve", compacted["output"], "--summary")
    assert found.code == 0
    assert found.out.startswith(b"## Goal")
    put("plain.jsonl")
    assert run("retrieve", "plain.jsonl", "--summary").code == 4


def test_a_setting_given_twice(tmp_path):
    path = put(tmp_path / "s.jsonl")
    found = process("plan", path, "--keep-recent", "1", "--keep-recent=2")
    assert (found.code, found.lines) == (2, ["haocompact: --keep-recent is given twice"])


def test_nothing_to_restore(run, compacted):
    put("other.jsonl")
    found = run("retrieve", "other.jsonl", "--restore", "--archive", "a.db")
    assert (found.code, found.out) == (6, b"")
    assert run("retrieve", "s.jsonl", "--restore", "--archive", "none.db").code == 6


def test_windows_show_every_message_once(run, compacted):
    shown, start, windows = [], 0, 0
    while start is not None:
        text = run(
            "retrieve",
            "s.jsonl",
            compacted["hash"],
            "--from-message",
            start,
            "--budget",
            3000,
            "--archive",
            "a.db",
        ).out.decode()
        windows += 1
        shown += re.findall(r"^\[(?:user|assistant)\] (?:Question|Answer) \d+", text, re.M)
        more = re.search(r"\(rendered (\d+)/(\d+) messages; the rest: --from-message (\d+)\)", text)
        assert bool(more) != ("end of the segment" in text)
        start = int(more[3]) if more else None
    assert shown == [
        f"[{m['role']}] {m['content'].split(':')[0]}" for m in chat(30)[: compacted["summarize"]]
    ]
    assert windows > 5


# ------------------------------------------------------------------------------- terminal safety
EVIL = "\x1b]0;owned\x07\x1b[31m\u202egnp.exe\x9b2J\r\x08\u2066[bold]x[/bold]"
UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture
def evil(run):
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": EVIL, "arguments": json.dumps({EVIL: EVIL})}}
        for i in range(2)
    ]
    result = {"role": "tool", "tool_call_id": "c0", "name": EVIL, "content": EVIL * 3}
    name = EVIL.replace("/", "")[:60] + ".jsonl"
    put(
        name,
        jsonl([*chat(1, 50), user(EVIL), assistant(EVIL, tool_calls=calls), result, *chat(8, 200)])
        + b"\xff{\n",
    )
    return name


@pytest.mark.parametrize(
    "command",
    [
        "plan",
        "plan --all --turns",
        "plan --json",
        "diag",
        "diag --json",
        "compact --dry-run",
        "retrieve",
        "retrieve --json",
    ],
)
@pytest.mark.parametrize("keep", ["800", "900000"])
def test_text_of_a_transcript_is_data(run, evil, command, keep):
    if command.startswith("retrieve"):
        run("compact", evil, "--in-place", "--archive", "a.db", "--keep-recent", keep)
        words = [*command.split(), evil, "--archive", "a.db"]
        found = run(*words)
    else:
        found = run(*command.split(), evil, "--keep-recent", keep)
    text = found.out.decode() + found.err
    assert UNSAFE.search(text) is None
    assert ("\\x1b" in text or "\\u001b" in text) or command.startswith("retrieve")


def test_what_is_retrieved_is_escaped_on_the_terminal_and_exact_as_raw(run, evil):
    (done,) = run("compact", evil, "--json", "--in-place", "--archive", "a.db", "--keep-recent", "800").json
    text = run("retrieve", evil, done["hash"], "--archive", "a.db").out.decode()
    assert UNSAFE.search(text) is None
    assert r"\x1b]0;owned\x07" in text
    assert "[bold]x[/bold]" in text
    raw = run("retrieve", evil, done["hash"], "--archive", "a.db", "--raw").out
    assert "\u202e".encode() in raw


@pytest.mark.parametrize("name", ["missing" + EVIL.replace("/", "")[:40], "b\udcff\udcfe.jsonl"])
def test_odd_file_names_in_errors(run, name):
    for words in (
        ["plan", name],
        ["plan", name, "--json"],
        ["compact", name, "--in-place"],
        ["retrieve", name],
    ):
        found = run(*words)
        assert found.code == 4
        assert UNSAFE.search(found.out.decode() + found.err) is None
        assert len(found.lines) == 1


def test_file_names_that_are_not_utf8(run):
    name = "b\udcff.jsonl"
    put(name)
    assert run("plan", name, *KEEP).code == 0
    (done,) = run("compact", name, "--in-place", "--json", "--archive", "a.db", *KEEP).json
    assert (done["path"], done["result"]) == (name, "ok")
    assert run("compact", name, "--in-place", "--log", "log").code == 0
    assert run("diag", "--log", "log", "--json").json[0]["groups"][0]["source"] == name
    assert run("retrieve", name, "--restore", "--archive", "a.db").out == CHAT
    (listed,) = run("retrieve", name, "--json", "--archive", "a.db").json
    assert listed["segments"][0]["source"] == os.path.abspath(name)


def test_skips_of_a_hostile_summary_are_one_line(run):
    text = list_summary(f"{EVIL}\nsub=forged branch=forged", 0)
    found = run("compact", "--log", "log", stdin=jsonl([user(text)]))
    assert found.lines[0].startswith("[COMPACT_NONE] branch=tail_is_summary msgs=1 tail_head=")
    assert UNSAFE.search(found.err) is None
    (log,) = run("diag", "--log", "log", "--json").json
    (entry,) = log["groups"]
    assert (entry["branch"], entry["sub"]) == ("tail_is_summary", None)


# ------------------------------------------------------------------------------------- mistakes
def test_mistakes_in_the_program_are_not_hidden(run, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("haocompact.pipeline.plan", broken)
    with pytest.raises(ZeroDivisionError):
        main_with(monkeypatch, "plan", "-")


def main_with(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["haocompact", *words])
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    try:
        main()
    finally:
        sys.stdin.close()


def test_mixed_formats_are_refused_with_the_way_out(run):
    lines = [
        *chat(3),
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {}}],
        },
    ]
    put(
        "s.jsonl",
        jsonl(
            [
                *lines,
                assistant(None, tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}"}}]),
                *chat(8),
            ]
        ),
    )
    found = run("compact", "s.jsonl", *KEEP)
    assert found.code == 4
    assert "--format" in found.err


# ------------------------------------------------------------------------------ segment strategy
SEGMENT = ("--strategy", "segment", "--tail-keep", "2", "--estimator", "chars")


def test_cooldown_goes_by_the_archives_record(run):
    put("s.jsonl")
    words = (
        "compact",
        "s.jsonl",
        "-o",
        "o.jsonl",
        "--json",
        "--archive",
        "a.db",
        *KEEP,
        "--if-needed",
        "--window",
        "17000",
    )
    (first,) = run(*words, "--cooldown", "600").json
    (second,) = run(*words, "--cooldown", "600").json
    (third,) = run(*words).json
    assert [r["result"] for r in (first, second, third)] == ["ok", "none", "ok"]
    assert second["branch"] == "cooldown"
    assert Path("o.jsonl").read_bytes() != CHAT  # the third run wrote again


def test_segment_is_triggered_at_half_the_window(run):
    put("s.jsonl")
    (planned,) = run("plan", "s.jsonl", "--json", *SEGMENT).json
    tokens = planned["tokens_before"]
    for window, needed in ((2 * tokens, True), (2 * tokens + 2, False)):
        (found,) = run("plan", "s.jsonl", "--json", "--window", window, *SEGMENT).json
        assert found["should_compact"] is needed


def test_a_range_inside_the_planned_one(run):
    put("s.jsonl")
    (whole,) = run("plan", "s.jsonl", "--json", *SEGMENT).json
    removed = [row["line"] for row in whole["rows"] if row["place"] == "summarise"]
    assert len(removed) >= 4
    inner = f"{removed[2]}..{removed[-1]}"
    (found,) = run(
        "compact", "s.jsonl", "--json", "-o", "o.jsonl", "--range", inner, "--allow-growth", *SEGMENT
    ).json
    assert (found["result"], found["summarize"]) == ("ok", len(removed) - 2)
    outside = run("compact", "s.jsonl", "-o", "p.jsonl", "--range", f"1..{removed[-1]}", *SEGMENT)
    assert (outside.code, os.path.exists("p.jsonl")) == (2, False)
    assert "is not inside the planned range" in outside.err
    assert run("compact", "s.jsonl", "-o", "p.jsonl", "--range", inner, *KEEP).code == 2


# ------------------------------------------------------------------------------------------ stdin
def test_what_comes_through_a_pipe_is_named_so(run):
    data = jsonl(chat(30, 100))
    known = ("--archive", "a.db", "--log", "log")
    done = run("compact", *KEEP, *known, stdin=data)
    assert "(stdin): " in done.err
    assert b"  (stdin)\n" in run("retrieve", "--archive", "a.db", stdin=done.out).out
    assert run("plan", *KEEP, "-", stdin=data).out.startswith(b"(stdin): openai, ")
    found = run("diag", "--log", "log", "-", stdin=jsonl(chat(2, 10)))
    assert found.out.startswith(b"(stdin): openai, ")
    assert b"  (stdin)\n" in run("diag", "--log", "log").out
    assert run("plan", stdin=b"junk\n").err.startswith("haocompact: (stdin): unknown format")
    assert run("plan", "--json", *KEEP, stdin=data).json[0]["path"] == "-"


def test_diag_without_a_word_reads_stdin(run):
    assert run("diag", stdin=b"").code == 4
