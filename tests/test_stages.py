"""--verbose says what took place, --quiet nothing but errors, and a terminal what long work is at."""

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from test_cli import HAOCOMPACT, KEEP, SMALL, chat, jsonl, process, put

from haocompact import cli, stages

STAGE = re.compile(r" +\d+\.\d\d s  (.+)")
KNOWN = ("--archive", "a.db", "--log", "log")
DATA = jsonl(chat(30, 100))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put("s.jsonl", DATA)
    monkeypatch.setenv("HAOCOMPACT_CONFIG", str(put("c.toml", b"window = 90000\n").absolute()))
    monkeypatch.setenv("HAOCOMPACT_RESERVE", "500")


def stages_of(done):
    return [found[1] for line in done.lines if (found := STAGE.fullmatch(line))]


def test_compact_tells_settings_stages_format_archive_and_hash():
    done = process("compact", "-v", "s.jsonl", "-o", "out.jsonl", *KEEP, *KNOWN)
    assert stages_of(done) == ["read and plan", "summarise", "rebuild and check", "archive", "write"]
    told = done.lines[0]
    assert told.startswith("settings: --output out.jsonl (option), --keep-recent 1000 (option), ")
    assert "--reserve 500 (HAOCOMPACT_RESERVE), --window 90000 (settings file)" in told
    assert told.endswith(f"settings file: {os.environ['HAOCOMPACT_CONFIG']}")
    hash = re.search(r"<<ccr:(\w+)>>", done.err)[1]
    assert done.lines[-3:-1] == ["s.jsonl: format openai, told by its content", f"archive: a.db, {hash}"]
    assert re.fullmatch(r"written: out\.jsonl, sha256 \w{64}", done.lines[-1])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("plan", "s.jsonl"), ["read and plan"]),
        (("diag", "s.jsonl", "--log", "log"), ["read and plan", "explain"]),
        (("compact", "--in-place", "s.jsonl", *KNOWN, *KEEP),
         ["read and plan", "summarise", "rebuild and check", "archive", "write"]),
    ],
)  # fmt: skip
def test_stages_of_other_ways(words, found):
    assert stages_of(process(*words, "--verbose")) == found
    assert stages_of(process(*words)) == []


def test_retrieve_tells_its_stages():
    process("compact", "s.jsonl", "-o", "out.jsonl", *KEEP, *KNOWN)
    (hash,) = re.findall(r"<<ccr:(\w+)>>", Path("out.jsonl").read_text())
    words = ("retrieve", "out.jsonl", "--archive", "a.db", "-v")
    assert stages_of(process(*words, "--restore", "-o", "back.jsonl")) == ["restore"]
    assert Path("back.jsonl").read_bytes() == DATA
    assert stages_of(process(*words, hash)) == ["look up"]


def test_a_format_that_was_named_is_said_to_be_named():
    assert "s.jsonl: format openai, as named" in process("plan", "-v", "--format", "openai", "s.jsonl").lines


def test_a_batch_tells_of_each_file_but_no_stages():
    put("x/a.jsonl", DATA)
    put("x/b.jsonl", SMALL)
    done = process("compact", "--in-place", "-v", "--jobs", "2", "--min-age", "0", "x", *KEEP, *KNOWN)
    assert stages_of(done) == []
    assert {"x/a.jsonl: format openai, told by its content", "x/b.jsonl: nothing to compact "
            "(total_below_keep_recent)"} <= set(done.lines)  # fmt: skip


@pytest.mark.parametrize(
    "words", [("plan",), ("diag", "--log", "log"), ("compact", "-o", "o", *KNOWN, *KEEP)]
)
def test_quiet_says_nothing_but_errors(words):
    assert process(*words, "s.jsonl", "--quiet", "-v").err == ""
    assert process(*words, "none.jsonl", "-q").lines[-1].startswith("haocompact: none.jsonl: no such file")


def on_a_terminal(*words):
    """What a command writes to stderr where that is a terminal."""
    ours, theirs = pty.openpty()
    command = [*HAOCOMPACT, *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as done:
        os.close(theirs)
        text = b""
        while block := _read(ours):
            text += block
    os.close(ours)
    assert done.returncode == 0
    return text.decode()


def _read(stream):
    try:
        return os.read(stream, 4096)
    except OSError:  # the other end is closed
        return b""


def test_long_work_says_on_a_terminal_what_it_is_at():
    put("big.jsonl", jsonl(chat(30, 30_000)))
    assert os.path.getsize("big.jsonl") >= cli.LONG
    words = ("compact", "big.jsonl", "-o", "out.jsonl", *KEEP, *KNOWN)
    shown = on_a_terminal(*words)
    assert re.findall(r"([a-z ]+) \.\.\.\r\x1b\[K", shown) == [
        "read and plan", "summarise", "rebuild and check", "archive", "write"]  # fmt: skip
    assert shown.count("...") == 5
    assert on_a_terminal(*words, "--quiet") == ""
    assert "..." not in process(*words).err
    assert "..." not in on_a_terminal("compact", "s.jsonl", "-o", "o", *KEEP, *KNOWN)


def test_a_stage_that_fails_ends_too():
    told = []
    with stages.heard(lambda *what: told.append(what)), pytest.raises(KeyError), stages.stage("work"):
        raise KeyError
    assert [name for name, _ in told] == ["work", "work"]
    assert told[0][1] is None
    assert told[1][1] >= 0
    with stages.stage("unheard"):
        assert len(told) == 2


def test_who_names_nothing_at_a_terminal_is_told_what_it_waits_for():
    ours, theirs = pty.openpty()
    with subprocess.Popen([*HAOCOMPACT, "plan"], stdin=theirs, stderr=subprocess.PIPE) as done:
        os.write(ours, b"\x04")
        told = done.stderr.read().decode()
    os.close(ours)
    os.close(theirs)
    assert told.startswith("haocompact: reads a transcript from the terminal; Ctrl-D ends it")
    assert done.returncode == 4
