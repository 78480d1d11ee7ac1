"""Shell completion, as bash asks for it."""

import os
import shutil
import subprocess

import pytest
from test_cli import HAOCOMPACT, KEEP, chat, jsonl, process, put


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HAOCOMPACT_ARCHIVE", str(tmp_path / "a.db"))
    monkeypatch.setenv("HOME", str(tmp_path))


def completed(line):
    """What is offered for the last word."""
    words = line.split(" ")
    told = {"_HAOCOMPACT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(HAOCOMPACT, env={**os.environ, **told}, capture_output=True, text=True, check=False)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("haocompact ", {"plan", "compact", "diag", "retrieve"}),
        ("haocompact plan --format open", {"openai", "openai-requests", "openhands"}),
        ("haocompact plan --estimator c", {"cjk", "chars"}),
        ("haocompact compact --strategy s", {"segment"}),
        ("haocompact compact --on", {"--on-failure"}),
        ("haocompact retrieve s", set()),  # file names: the shell's own
    ],
)
def test_words(line, offered):
    assert completed(line) == offered


def test_hashes_are_those_of_the_named_transcript():
    found = {}
    for name, size in (("x.jsonl", 90), ("y.jsonl", 110)):
        put(name, jsonl(chat(30, size)))
        done = process("compact", "--in-place", name, "--json", *KEEP, "--log", "log")
        found[name] = done.json[0]["hash"]
    assert completed("haocompact retrieve x.jsonl ") == {found["x.jsonl"]}
    assert completed("haocompact retrieve none.jsonl ") == set(found.values())
    start = found["y.jsonl"][:6]
    assert completed(f"haocompact retrieve {start}") == {found["y.jsonl"]}
    assert completed(f"haocompact retrieve x.jsonl {start}") == set()


def test_bash_takes_it_from_where_it_was_installed(tmp_path):
    if not shutil.which("bash"):
        pytest.skip("bash is not installed")
    program = put(".bin/haocompact", f'#!/bin/sh\nexec {" ".join(HAOCOMPACT)} "$@"\n'.encode())
    program.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    subprocess.run(["haocompact", "--install-completion", "bash"], env=env, check=True, capture_output=True)
    ask = (
        "source ~/.bashrc; COMP_WORDS=(haocompact plan --form); COMP_CWORD=2; "
        '_haocompact_completion haocompact; echo "${COMPREPLY[@]}"; complete -p haocompact'
    )
    done = subprocess.run(["bash", "-c", ask], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "--format",
        "complete -o default -F _haocompact_completion haocompact",
    ]
