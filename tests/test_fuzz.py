"""The fuzzer's short version, invented records from Hypothesis, and hostile text in every field that is shown."""

import json
import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from fuzz import HOSTILE, ODD, RAW, UNSAFE, examine, fuzz
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import put, run  # noqa: F401

from haocompact.archive import Archive
from haocompact.compaction import CHARS, CompactionSettings
from haocompact.formats import FORMATS
from haocompact.pipeline import Request

MUTANTS = 400


@pytest.fixture
def deep(monkeypatch):
    """As deep as the command line reads."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("deep")
def test_mutants_are_compacted_within_the_laws_or_refused(tmp_path):
    seen = fuzz(MUTANTS, 5, tmp_path)
    assert sum(seen.values()) == MUTANTS
    assert min(seen["compacted"], seen["skipped"], seen["refused"]) > MUTANTS / 20


WORDS = st.sampled_from(
    [
        "type",
        "role",
        "content",
        "text",
        "id",
        "parentId",
        "uuid",
        "parentUuid",
        "sessionId",
        "timestamp",
        "message",
        "user",
        "assistant",
        "tool_use",
        "tool_result",
        "toolResult",
        "toolCall",
        "session",
        "session_meta",
        "response_item",
        "payload",
        "event_msg",
        "compaction",
        "summary",
        "usage",
        "input_tokens",
        "output",
        "name",
        "input",
        "arguments",
        "tool_calls",
        "tool_call_id",
        "system",
        "seq",
        "version",
        "isSidechain",
        "kind",
        "data",
    ]
)
VALUES = st.recursive(
    WORDS | st.sampled_from(ODD) | st.text(max_size=20) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=6),
    max_leaves=12,
)
LINES = st.dictionaries(WORDS, VALUES, max_size=8).map(
    lambda r: json.dumps(r).encode() + b"\n"
) | st.sampled_from(RAW)


@pytest.mark.usefixtures("deep")
@settings(max_examples=150)
@given(st.lists(LINES, max_size=12), st.sampled_from([None, *FORMATS]), st.integers(0, 200))
def test_invented_records_are_read_or_refused(lines, format, keep):
    request = Request(CompactionSettings(keep_recent_tokens=keep, estimator=CHARS), format=format)
    assert examine(b"".join(lines), request) in ("compacted", "skipped", "refused")


# -------------------------------------------------------------------------------------- terminals
EVIL = "".join(h for h in HOSTILE if h != "\ud800").replace("\x00", "") + "\x9b31m\u2067"


def poisoned(value, key=""):
    """The same JSON with hostile text behind every string that carries no structure."""
    if isinstance(value, dict):
        return {k: poisoned(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [poisoned(v, key) for v in value]
    structure = ("type", "role", "version", "timestamp", "kind", "arguments", "event")
    if isinstance(value, str) and key not in structure and value not in ("assistant", "user"):
        return value + EVIL
    return value


NEVER_ARCHIVED = {n for n, f in FORMATS.items() if not hasattr(f, "rebuild")} | {
    n for n in FORMATS if "-requests" in n
}
SAMPLES = sorted(p.relative_to(ROOT / "samples").as_posix() for p in ROOT.glob("samples/*/*.jsonl"))


@pytest.mark.parametrize("name", SAMPLES)
def test_hostile_text_in_every_field_is_shown_escaped_by_every_command(run, name):
    lines = (ROOT / "samples" / name).read_bytes().splitlines()
    data = b"".join(json.dumps(poisoned(json.loads(line))).encode() + b"\n" for line in lines)
    path = put("in/[bold]\x1b]0;x\x07\u202e.jsonl", data)
    keep = ("--keep-recent", "500")
    format = ("--format", name.split("/")[0])
    shared = ("--archive", "a.db")
    texts = [
        run(*words, *format)
        for words in (
            ["plan", path, *keep],
            ["plan", path, *keep, "--turns", "--all"],
            ["plan", path, *keep, "--json"],
            ["diag", path, "--log", "log"],
            ["diag", path, *keep, "--json"],
            ["compact", path, *keep, "-o", "one.jsonl", *shared, "--log", "log"],
            ["compact", path, *keep, "--output-dir", "out", "--json", *shared],
            ["compact", "in", *keep, "--in-place", "--min-age", "0", *shared, "--log", "log"],
            ["retrieve", path, *shared],
            ["retrieve", path, "--json", *shared],
            ["retrieve", path, "--summary", *shared],
        )
    ]
    texts += [run("diag", "--read-log", "--log", "log"), run("retrieve", "--export", "ex", *shared),
              run("retrieve", "--stats", *shared)]  # fmt: skip
    with Archive.open("a.db", create=True) as archive:
        hashes = {segment.hash for segment in archive.segments()}
    assert hashes or name == "openai/plain-chat.jsonl" or name.split("/")[0] in NEVER_ARCHIVED
    texts += [run("retrieve", path, hash, *words, *shared) for hash in hashes for words in ([], ["--json"])]
    path.unlink()
    texts += [run("retrieve", "--prune", "--older-than", "0", *shared)]
    for text in texts:
        shown = text.out.decode() + text.err
        found = UNSAFE.search(shown)
        assert found is None, shown[max(0, found.start() - 100) : found.end() + 20]
    here = {str(p) for p in Path(".").rglob("*")}
    assert all(Path(p).resolve().is_relative_to(Path.cwd()) for p in here)
    assert {p.split("/")[0] for p in here} <= {"in", "one.jsonl", "out", "ex", "a.db", "log"}
    assert len(os.listdir("out")) <= 1


def test_an_id_that_looks_like_a_path_stays_within_the_folder(run):
    """Codex names a new session's file after ids and times of the transcript."""
    lines = (ROOT / "samples/codex/legacy-tools.jsonl").read_text("utf-8").splitlines()
    for evil in ("../../../../tmp/evil", "/etc/evil", "a/b", "..", "\x00", "x" * 5000):
        first = json.loads(lines[0])
        first["payload"]["id"] = first["payload"]["timestamp"] = first["timestamp"] = evil
        data = "\n".join([json.dumps(first), *lines[1:]]).encode() + b"\n"
        put("s.jsonl", data)
        found = run("compact", "s.jsonl", "--output-dir", "out", "--keep-recent", "500", "--archive", "a.db")
        assert found.code in (0, 4, 7)
        names = sorted(
            p.as_posix() for p in Path(".").rglob("*") if p.is_file() and not p.name.startswith("a.db")
        )
        assert all(n == "s.jsonl" or (n.startswith("out/") and n.count("/") == 1) for n in names), names


def test_a_log_that_somebody_else_wrote_is_shown_escaped(run):
    line = f"2026-05-11T06:30:00+00:00 [COMPACT_NONE] branch={EVIL} sub={EVIL} msgs={EVIL} source={EVIL}\n"
    put("log", (line + line.replace("branch=", "branch=x ")).encode("utf-8", "surrogatepass"))
    for words in ([], ["--json"]):
        found = run("diag", "--read-log", "--log", "log", *words)
        assert UNSAFE.search(found.out.decode() + found.err) is None
