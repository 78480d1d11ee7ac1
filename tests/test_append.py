"""--append: the old bytes and the client's own record behind them; segments that stand in the log itself."""

import fcntl
import itertools
import json

import pytest
from conftest import CORPUS, ROOT, transcripts

from haocompact.cli import main
from haocompact.compaction import COMPACTION_SUMMARY, ESTIMATORS, CompactionSettings
from haocompact.errors import TranscriptError, UsageError
from haocompact.files import Source, client_at_work
from haocompact.formats import FORMATS
from haocompact.formats.session import ReadOptions
from haocompact.logged import logged_segments
from haocompact.pipeline import (
    Compacted,
    Request,
    Skipped,
    compact,
    directory,
    load,
    raw_segment,
    segment_messages,
    warnings_of,
)
from haocompact.records import Extended, read

FILES = transcripts(ROOT / "samples", ROOT / "tests" / "cases", CORPUS)
SETTINGS = tuple(itertools.product((400, 2000, 20000), ("keep-recent", "segment")))
APPENDABLE = ("pi", "claude", "codex", "berry")


def request_for(keep=400, strategy="keep-recent", **more):
    settings = CompactionSettings(
        keep_recent_tokens=keep, estimator=ESTIMATORS["chars"], strategy=strategy, tail_keep=2
    )
    return Request(settings, append=True, **more)


def appended(path, **more):
    """(source, result) of appending to one file; None where there is nothing to append."""
    source = Source(str(path), path.read_bytes())
    try:
        result = compact(source, request_for(**more))
    except (TranscriptError, UsageError):
        return None
    return (source, result) if isinstance(result, Compacted) else None


@pytest.fixture(params=FILES)
def made(request):
    found = []
    for keep, strategy in SETTINGS:
        one = appended(FILES[request.param], keep=keep, strategy=strategy)
        found += [one] if one else []
    if not found:
        pytest.skip("nothing is appended to it")
    return found


def signatures(messages):
    return [(m.role, m.parts) for m in messages if m.told]


def test_the_old_bytes_stand_untouched_in_front(made):
    for source, result in made:
        output = result.output[:]
        assert output.startswith(source.data)
        added = output[len(source.data) :]
        assert added.endswith(b"\n")
        assert source.data.endswith(b"\n") or added.startswith((b"\n", b"\r\n"))


def test_it_reads_as_the_summary_and_the_kept_messages(made):
    for _, result in made:
        session = FORMATS[result.planned.session.format].read(read(result.output), ReadOptions())
        assert session.messages[0].kind == COMPACTION_SUMMARY
        assert signatures(session.messages[1:]) == signatures(result.plan.kept)


def test_compacting_it_again_at_once_does_nothing(made):
    for source, result in made:
        settings = result.planned.settings
        again = compact(Source(source.path, result.output), Request(settings, append=True))
        assert isinstance(again, Skipped)


def test_the_same_bytes_come_out_twice(made):
    for source, result in made:
        settings = result.planned.settings
        again = compact(source, Request(settings, append=True))
        assert again.output[:] == result.output[:]


def test_the_log_gives_back_what_it_took_out_of_the_context(made, tmp_path):
    for source, result in made:
        path = tmp_path / "log.jsonl"
        path.write_bytes(result.output[:])
        request = Request(result.planned.settings, archive=tmp_path / "none.db")
        found = directory(Source(str(path), result.output), request)
        assert found.segments[-1].hash == result.checkpoint.hash
        assert result.checkpoint.hash in found.in_log
        told = [m for m in result.plan.removed if m.told]
        messages = [m for m in segment_messages(result.checkpoint.hash, request, str(path))
                    if m.kind != COMPACTION_SUMMARY]  # fmt: skip
        if len(found.segments) == 1 and result.planned.previous_summary is None:
            edited = b'"context_edit"' in source.data  # pi: the log has what stood there before the edit
            assert edited or signatures(messages) == signatures(told)
            assert {m.line for m in told} <= {
                m.line for m in messages
            } or result.planned.session.format == "berry"
        else:  # what an old Codex compaction had kept was told in its segment already
            earlier = [m for s in found.segments for m in segment_messages(s.hash, request, str(path))]
            lines = b"".join(raw for s in found.segments for raw in raw_segment(s.hash, request, str(path)))
            missing = [m for m in told if str((m.role, m.parts)) not in {str(s) for s in signatures(earlier)}]
            assert all(m.text.encode() in lines for m in missing)
        raw = b"".join(raw_segment(result.checkpoint.hash, request, str(path)))
        assert raw
        assert all(line in source.data for line in raw.splitlines(keepends=True))
        assert not request.archive.exists()


@pytest.mark.parametrize("format", APPENDABLE)
def test_ten_rounds_lose_no_message(format, tmp_path):
    """Grow by the same turns, append, ten times: all messages are in the segments or in the context."""
    path = next(p for n, p in FILES.items() if n.startswith(f"{format}/") and appended(p))
    _source, first = appended(path)
    log, request = tmp_path / "log.jsonl", Request(first.planned.settings, append=True)
    log.write_bytes(first.output[:])
    texts = {str(m.parts) for m in first.planned.session.messages if m.told and m.kind != COMPACTION_SUMMARY}
    hashes = [first.checkpoint.hash]
    for round in range(9):
        texts |= grow(format, log, round)
        result = compact(Source(str(log), log.read_bytes()), request)
        if isinstance(result, Compacted):
            log.write_bytes(result.output[:])
            hashes.append(result.checkpoint.hash)
    assert len(hashes) >= 4
    session, _ = load(Source(str(log), log.read_bytes()), request)
    found = {str(m.parts) for m in session.messages}
    segments = directory(Source(str(log), log.read_bytes()), Request(archive=tmp_path / "none.db")).segments
    assert [s.hash for s in segments][-len(hashes) :] == hashes
    for segment in segments:
        found |= {str(m.parts) for m in segment_messages(segment.hash, Request(archive=None), str(log))}
    assert texts <= found


def grow(format, log, round):
    """Append one turn of 600 tokens to a log as its client would; the texts of its messages."""
    lines = [json.loads(line) for line in log.read_bytes().splitlines() if line.startswith(b"{")]
    asked, said = f"Question {round}: {'pear ' * 250}", f"Answer {round}: {'plum ' * 250}"
    new = GROW[format](lines, asked, said, round)
    with log.open("ab") as file:
        file.writelines(json.dumps(line).encode() + b"\n" for line in new)
    session, _ = load(Source(str(log), log.read_bytes()), Request())
    return {str(m.parts) for m in session.messages[-2:]}


def _pi(lines, asked, said, round):
    parent, ids = lines[-1]["id"], (f"aaaa000{round}", f"bbbb000{round}")
    stamp = f"2027-01-01T00:00:0{round}.000Z"
    for id, message in zip(ids, ({"role": "user", "content": asked},
                                 {"role": "assistant", "content": [{"type": "text", "text": said}],
                                  "stopReason": "stop"}), strict=True):  # fmt: skip
        yield {"type": "message", "id": id, "parentId": parent, "timestamp": stamp, "message": message}
        parent = id


def _claude(lines, asked, said, round):
    """The client's next line hangs on the last line of its context: the kept tail's, not the summary."""
    boundary = next(line for line in reversed(lines) if line.get("subtype") == "compact_boundary")
    at = lines.index(boundary)
    later = [line["uuid"] for line in lines[at + 2 :] if "uuid" in line]
    kept = boundary["compactMetadata"].get("preservedMessages", {}).get("uuids", [])
    parent = (later or kept or [lines[at + 1]["uuid"]])[-1]
    common = {k: boundary[k] for k in ("sessionId", "version", "cwd") if k in boundary} | {
        "isSidechain": False
    }
    for name, role, text in (("u", "user", asked), ("a", "assistant", said)):
        message = {"role": role, "content": text if role == "user" else [{"type": "text", "text": text}]}
        if role == "assistant":
            message |= {"id": f"msg_{round}", "model": "claude-x"}
        id = f"{round}{round}{round}{round}0000-0000-4000-8000-00000000000{'a' if name == 'a' else 'b'}"
        yield {"parentUuid": parent, "type": role, "message": message, "uuid": id,
               "timestamp": f"2027-01-01T00:0{round}:0{'1' if name == 'a' else '0'}.000Z", **common}  # fmt: skip
        parent = id


def _codex(lines, asked, said, round):
    ordinal = lines[-1].get("ordinal")
    for i, (role, kind, text) in enumerate(
        (("user", "input_text", asked), ("assistant", "output_text", said))
    ):
        payload = {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}
        more = {} if ordinal is None else {"ordinal": ordinal + 1 + i}
        yield {
            "timestamp": f"2027-01-01T00:00:0{round}.00{i}Z",
            "type": "response_item",
            "payload": payload,
        } | more


def _berry(lines, asked, said, round):
    seq = lines[-1]["seq"]
    bodies = (("turn/start", {}), ("user/message", {"content": asked}),
              ("assistant/message", {"content": [{"type": "text", "text": said}], "stopReason": "stop"}),
              ("turn/end", {"reason": "completed"}))  # fmt: skip
    for i, (kind, data) in enumerate(bodies, 1):
        yield {"type": kind, "seq": seq + i, "time": 1893456000000 + 1000 * round + i, "data": data}


GROW = {"pi": _pi, "claude": _claude, "codex": _codex, "berry": _berry}


@pytest.mark.parametrize("name", [n for n in FILES if n.startswith(("openai/", "anthropic/", "haocode/"))])
def test_a_list_of_messages_has_no_record_to_append(name):
    source = Source(name, FILES[name].read_bytes())
    with pytest.raises(UsageError, match=r"without --append a new file is written"):
        compact(source, request_for(keep=20, allow_growth=True))


def test_an_older_claude_client_is_warned_of():
    path = next(p for n, p in FILES.items() if n.startswith("claude/") and appended(p))
    source, result = appended(path)
    assert any("a client before 2.1.144" in line for line in warnings_of(result.planned))
    newer = Source(source.path, source.data.replace(b'"version":"2.1.97"', b'"version":"2.1.332"'))
    result = compact(newer, request_for())
    assert not any("2.1.144" in line for line in warnings_of(result.planned))


def run(*args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["haocompact", *map(str, args)])
        with pytest.raises(SystemExit) as exit:
            main()
    return exit.value.code or 0


def test_in_place_on_a_paginated_codex_session(tmp_path, capfd):
    """It may not be shortened, but a record may be added; the file keeps its name and its old bytes."""
    path = tmp_path / "rollout.jsonl"
    old = (ROOT / "samples" / "codex" / "paginated-parallel.jsonl").read_bytes()
    path.write_bytes(old)
    keep = ("--keep-recent", "400", "--estimator", "chars", "--in-place")
    assert run("compact", *keep, path) == 7
    assert path.read_bytes() == old
    assert run("compact", *keep, "--append", path) == 0
    assert path.read_bytes().startswith(old)
    assert len(path.read_bytes()) > len(old)
    capfd.readouterr()
    assert run("retrieve", "--json", path) == 0
    segment = json.loads(capfd.readouterr().out)["segments"][-1]
    assert segment["where"] == "log"
    assert run("retrieve", path, segment["hash"]) == 0
    assert capfd.readouterr().out.startswith("[user] The pruning planner is slow on the big orchard file")


@pytest.mark.parametrize("name", ["pi/native-compaction.jsonl", "claude/native-compaction.jsonl",
                                  "codex/legacy-compacted.jsonl", "berry/native-compaction.jsonl"])  # fmt: skip
def test_what_the_client_compacted_is_listed_and_comes_back(name, tmp_path):
    path = FILES[name]
    request = Request(archive=tmp_path / "none.db")
    source = Source(str(path), path.read_bytes())
    found = directory(source, request)
    assert found.segments
    assert not found.missing
    session, _ = load(source, request)
    current = {m.line for m in session.messages}
    for logged in logged_segments(session, str(path)):
        messages = segment_messages(logged.segment.hash, request, str(path))
        assert len(messages) == logged.segment.messages > 0
        raw = b"".join(raw_segment(logged.segment.hash, request, str(path)))
        assert len(raw) == logged.segment.size
        if session.format != "codex":
            assert not current & {i + 1 for i in logged.lines}


def test_extended_bytes_are_the_two_parts_as_one():
    data = Extended(b"abc", b"defg")
    whole = b"abcdefg"
    assert len(data) == 7
    assert b"".join(data.chunks()) == whole
    assert all(data[i:j] == whole[i:j] for i in range(9) for j in range(9))


@pytest.mark.parametrize("held", [True, False])
def test_a_session_that_its_codex_client_has_open_is_left_alone(held, tmp_path, capfd):
    """The client's lock: <home>/thread-writer-locks/<thread id>.lock, held with flock while a thread is loaded."""
    data = (ROOT / "samples" / "codex" / "legacy-tools.jsonl").read_bytes()
    thread = json.loads(data.splitlines()[0])["payload"]["id"]
    path = tmp_path / "sessions" / "2026" / "12" / "01" / "rollout.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    lock = tmp_path / "thread-writer-locks" / f"{thread}.lock"
    lock.parent.mkdir()
    with lock.open("wb") as file:
        if held:
            fcntl.flock(file, fcntl.LOCK_EX)
        code = run("compact", "--keep-recent", "400", "--estimator", "chars", "--in-place", path)
    assert (code, path.read_bytes() == data) == ((7, True) if held else (0, False))
    assert ("writer lock" in capfd.readouterr().err) == held


def test_a_session_id_never_leads_to_another_path(tmp_path):
    (tmp_path / "locks").mkdir()
    (tmp_path / "x.lock").touch()
    with (tmp_path / "x.lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not client_at_work(tmp_path / "s.jsonl", "locks", "../x")


# ------------------------------------------------------------------------------------- branches
def forked(tmp_path):
    """A pi session whose second question was asked twice, in two branches; the newest entry is a label."""
    log = [{"type": "session", "version": 3, "id": "s", "timestamp": "2026-01-01T00:00:00.000Z", "cwd": "/x"}]

    def add(id, parent, role, text):
        message = {"role": role, "content": [{"type": "text", "text": text}]}
        log.append({"type": "message", "id": id, "parentId": parent, "timestamp": log[0]["timestamp"],
                    "message": message})  # fmt: skip

    add("a", None, "user", "FIRST " * 400)
    add("b", "a", "assistant", "ANSWER")
    add("c", "b", "user", "LEFT " * 400)
    add("d", "c", "assistant", "left")
    add("e", "b", "user", "RIGHT " * 400)
    add("f", "e", "assistant", "right")
    log.append(
        {"type": "label", "id": "g", "parentId": "f", "timestamp": log[0]["timestamp"], "targetId": "f"}
    )
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in log))
    return path


def test_branch_ends_are_listed_and_chosen_by_number(tmp_path, capfd):
    path = forked(tmp_path)
    assert run("plan", "--json", path) == 0
    told = capfd.readouterr()
    assert json.loads(told.out)["leaves"] == ["d", "f"]
    assert "2 branch ends: 1: d (line 5), 2: f (line 7)" in told.err
    for number, word in (("1", "LEFT"), ("2", "RIGHT")):
        args = (
            "--branch",
            number,
            "--keep-recent",
            "400",
            "--estimator",
            "chars",
            "--strategy",
            "keep-recent",
        )
        assert run("compact", *args, path) == 0
        kept = capfd.readouterr().out
        assert f"{word} {word}" in kept
    assert run("plan", "--branch", "3", path) == 4
    assert run("plan", "--branch", "1", "--leaf", "d", path) == 2


def test_restoring_a_log_that_lost_nothing_says_so(tmp_path, capfd):
    other, path = tmp_path / "other.jsonl", tmp_path / "o.jsonl"
    sample = ROOT / "samples" / "pi" / "weather-station.jsonl"
    archive = ("--archive", tmp_path / "a.db")
    another = ROOT / "samples" / "pi" / "chinese.jsonl"
    assert run("compact", "--keep-recent", "500", another, "-o", other, *archive) == 0
    assert run("compact", "--append", "--keep-recent", "2000", sample, "-o", path) == 0
    assert run("retrieve", "--restore", path, *archive) == 6
    assert "the lines before its compaction record are the original" in capfd.readouterr().err
