"""A Codex session that a fork reads from may not be shortened where it stands: forks hold offsets into it."""

from pathlib import Path

import pytest
import zstandard
from test_codex import LONG, PAGINATED, answer, rollout, user

from haocompact import batch, files
from haocompact.compaction import CHARS, CompactionSettings
from haocompact.pipeline import Request, attempt_in_place

BASE = "019b0000-0000-7000-8000-00000000000b"


def request_in(folder):
    settings = CompactionSettings(keep_recent_tokens=200, estimator=CHARS)
    return Request(settings, archive=folder / "a.db", log=folder / "log")


def forked_tree(folder, fork):
    """A client's home with a legacy base, and a fork of it under the name `fork`."""
    base = folder / "sessions/2026/10/01/rollout-base.jsonl"
    data = rollout(user("1"), answer(LONG), user("2" * 900), head={"id": BASE, "cwd": "/w"})
    for path in (base, *((folder / fork,) if fork else ())):
        path.parent.mkdir(parents=True, exist_ok=True)
    base.write_bytes(data)
    if fork:
        origin = {"thread_id": BASE, "end_ordinal_exclusive": 3, "end_byte_offset": 400}
        raw = rollout(user("3"), head={**PAGINATED, "history_base": origin})
        (folder / fork).write_bytes(zstandard.compress(raw) if fork.endswith(".zst") else raw)
    return base, data


@pytest.mark.parametrize("fork", [
    "sessions/2026/10/01/rollout-fork.jsonl", "sessions/2026/11/30/rollout-fork.jsonl.zst",
    "archived_sessions/rollout-fork.jsonl"])  # fmt: skip
def test_a_file_that_a_fork_reads_is_not_shortened_in_place(fork, tmp_path):
    base, data = forked_tree(tmp_path, fork)
    done = attempt_in_place(str(base), request_in(tmp_path))
    assert done.error is not None
    assert done.error.code == "HAS_FORKS"
    assert Path(fork).name in str(done.error)
    assert "--append" in str(done.error)
    assert base.read_bytes() == data


def test_a_file_without_forks_is_shortened_in_place(tmp_path):
    base, data = forked_tree(tmp_path, None)
    (base.parent / "rollout-torn.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00")
    done = attempt_in_place(str(base), request_in(tmp_path))
    assert done.error is None
    assert len(base.read_bytes()) < len(data)


def test_a_batch_passes_over_what_has_forks_and_reads_no_first_line_again(tmp_path, monkeypatch):
    base, data = forked_tree(tmp_path, "sessions/2026/10/02/rollout-fork.jsonl")
    for number in range(3):
        other = data.replace(BASE.encode(), f"019b0000-0000-7000-8000-0000000000c{number}".encode())
        (base.parent / f"rollout-{number}.jsonl").write_bytes(other)
    opened = []
    first_line = files._first_line
    monkeypatch.setattr(files, "_first_line", lambda path: opened.append(path.name) or first_line(path))
    request = request_in(tmp_path)
    items = batch.find([str(tmp_path / "sessions")], batch.Choice(min_age=0), request)
    left = {Path(d.path).name: d.left for d in batch.run(items, request, 1)}
    assert left["rollout-base.jsonl"] == "has_forks"
    assert not any(left[f"rollout-{number}.jsonl"] for number in range(3))
    assert len(set(opened)) == 5
    assert all(
        opened.count(name) == 1 for name in ("rollout-base.jsonl", "rollout-fork.jsonl")
    )  # as they were


def test_a_fork_that_was_made_a_moment_ago_is_seen(tmp_path):
    base, _ = forked_tree(tmp_path, None)
    assert files.forks_of(base, BASE) == []
    half = tmp_path / "sessions/2026/10/01/rollout-new.jsonl"
    half.write_bytes(b'{"timestamp":"2026-10-01T')
    assert files.forks_of(base, BASE) == []
    half.unlink()
    forked_tree(tmp_path, "sessions/2026/10/01/rollout-new.jsonl")
    assert files.forks_of(base, BASE) == [str(half)]
