"""Every cause that `diag` tells apart, on several formats, through the command line."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from haocompact.diag import RIGHT, TITLES

KEEP = 400
FILLER = "leek soup "


def words(tokens):
    return (FILLER * tokens)[: 4 * tokens]


# Each maker takes (role, tokens) rows: user, assistant, call (an assistant that calls a tool) or result.
def openai(rows):
    for number, (role, tokens) in enumerate(rows):
        if role == "call":
            call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            yield {"role": "assistant", "content": words(tokens), "tool_calls": [call]}
        elif role == "result":
            yield {"role": "tool", "tool_call_id": f"c{number - 1}", "content": words(tokens)}
        else:
            yield {"role": role, "content": words(tokens)}


def anthropic(rows):
    for number, (role, tokens) in enumerate(rows):
        text = {"type": "text", "text": words(tokens)}
        if role == "call":
            call = {"type": "tool_use", "id": f"c{number}", "name": "look", "input": {}}
            yield {"role": "assistant", "content": [text, call]}
        elif role == "result":
            block = {"type": "tool_result", "tool_use_id": f"c{number - 1}", "content": words(tokens)}
            yield {"role": "user", "content": [block]}
        else:
            yield {"role": role, "content": [text]}


def pi(rows):
    yield {"type": "session", "version": 3, "id": "s", "timestamp": "2026-05-11T06:30:00.000Z", "cwd": "/g"}
    for number, (role, tokens) in enumerate(rows):
        content = [{"type": "text", "text": words(tokens)}]
        message = {"role": {"call": "assistant", "result": "toolResult"}.get(role, role), "content": content}
        if role == "call":
            content.append({"type": "toolCall", "id": f"c{number}", "name": "look", "arguments": {}})
        if role == "result":
            message |= {"toolCallId": f"c{number - 1}", "toolName": "look", "isError": False}
        yield {"type": "message", "id": f"m{number:07}", "parentId": f"m{number - 1:07}" if number else None,
               "timestamp": "2026-05-11T06:30:00.000Z", "message": message}  # fmt: skip


def claude(rows):
    for number, row in enumerate(anthropic(rows)):
        message = dict(row)
        if row["role"] == "assistant":
            message |= {"id": f"r{number}", "type": "message", "model": "m"}
        yield {"type": row["role"], "uuid": f"u{number}", "parentUuid": f"u{number - 1}" if number else None,
               "isSidechain": False, "sessionId": "s", "timestamp": f"2026-05-11T06:30:{number:02}.000Z",
               "message": message}  # fmt: skip


FORMATS = {"openai": openai, "anthropic": anthropic, "pi": pi, "claude": claude}
SHORT = [("user", 20), ("assistant", 20)]
LONG = [("user", 300), ("assistant", 300), ("user", 300), ("assistant", 300)]
TALK = {
    "below_keep_recent": SHORT,
    "pinned_by_first_message": [("user", 5000), ("assistant", 20)],
    "tail_exceeds_keep_recent": [("call", 20), ("result", 900)],
    "no_gain": [("user", 30), ("user", 300), ("assistant", 200)],
}


@pytest.fixture
def diag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("ARCHIVE", "LOG"):
        monkeypatch.setenv(f"HAOCOMPACT_{name}", str(tmp_path / "own" / name))

    def diag(*options, lines=None, data=None):
        if lines is not None:
            data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        if data is not None:
            (tmp_path / "s.jsonl").write_bytes(data)
        words = [sys.executable, "-m", "haocompact", "diag", "s.jsonl", "--keep-recent", str(KEEP), *options]
        told = subprocess.run([*words, "--json"], capture_output=True, timeout=60)
        shown = subprocess.run(words, capture_output=True, timeout=60, text=True)
        assert told.returncode == shown.returncode
        (found,) = [json.loads(line) for line in told.stdout.splitlines()]
        if found["result"] == "error":
            assert (shown.stdout, len(shown.stderr.splitlines())) == ("", 1)
            assert found["explanation"] in shown.stderr or found["message"] in found["explanation"]
            return told.returncode, found
        assert (TITLES[found["cause"]] if found["cause"] else "would be compacted") in shown.stdout
        assert found["explanation"][:24] in shown.stdout
        return told.returncode, found

    return diag


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cause", TALK)
def test_what_the_messages_themselves_cause(diag, name, cause):
    code, found = diag(lines=FORMATS[name](TALK[cause]))
    assert (code, found["result"], found["cause"]) == (0, "none", cause)


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_to_tell_where_it_compacts(diag, name):
    code, found = diag(lines=FORMATS[name](LONG))
    assert (code, found["result"], found["cause"], found["suggestions"]) == (0, "ok", None, [])
    assert (found["summarize"], found["tokens_kept"]) == (2, 600)


@pytest.mark.parametrize("name", ["openai", "anthropic", "pi"])
def test_no_valid_cut_point(diag, name):
    rows = [("result", 500), ("result", 500)]
    assert diag(lines=FORMATS[name](rows))[1]["cause"] == "no_valid_cut_points"


@pytest.mark.parametrize("name", FORMATS)
def test_below_the_trigger_disabled_and_no_segment(diag, name):
    lines = [*FORMATS[name](LONG)]
    assert diag("--if-needed", lines=lines)[1]["cause"] == "below_trigger"
    _, found = diag("--strategy", "segment", lines=lines)
    assert (found["cause"], found["sub"]) == ("no_segment", "segment_too_short")


@pytest.mark.parametrize("name", FORMATS)
def test_summaries_and_cooldown(diag, name, tmp_path):
    lines = [*FORMATS[name](LONG)]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        sys.executable,
        "-m",
        "haocompact",
        "compact",
        "--in-place",
        "s.jsonl",
        "--keep-recent",
        str(KEEP),
    ]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    _, found = diag()
    if name == "pi":
        assert (found["cause"], found["suggestions"]) == ("tail_is_summary", [RIGHT])
        assert "nothing has been added since" in found["explanation"]
    else:  # where the file does not say whether messages came after the summary
        assert found["cause"] == "pinned_by_first_message"
    if name in ("openai", "anthropic"):
        with (tmp_path / "s.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines[-2:])
        _, found = diag("--if-needed", "--window", "500", "--reserve", "100", "--cooldown", "600")
        assert (found["cause"], found["cooldown"]) == ("cooldown", 600)
        assert found["suggestions"][0].startswith("wait ")


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_only_a_summary(diag, name, tmp_path):
    lines = [*FORMATS[name](LONG)]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [sys.executable, "-m", "haocompact", "compact", "s.jsonl", "--keep-recent", str(KEEP)]
    done = subprocess.run(words, check=True, capture_output=True, timeout=60)
    _, found = diag(data=done.stdout.splitlines(keepends=True)[0])
    assert (found["cause"], found["suggestions"]) == ("only_summary", [RIGHT])


def test_disabled():
    from haocompact.compaction import CompactionSettings
    from haocompact.files import Source
    from haocompact.pipeline import Request, as_needed, explain, plan

    data = b"".join(json.dumps(line).encode() + b"\n" for line in openai(LONG))
    request = Request(CompactionSettings(enabled=False, keep_recent_tokens=KEEP), if_needed=True)
    found = explain(as_needed(plan(Source("-", data), request), request))
    assert (found.cause, found.explanation) == ("disabled", "Compaction is switched off.")


@pytest.mark.parametrize("data", [b"", b"\n\n \n"])
def test_empty(diag, data):
    code, found = diag(data=data)
    assert (code, found["result"], found["cause"]) == (4, "error", "empty")


HEADERS = {
    "pi": '{"type":"session","version":3,"id":"s","timestamp":"2026-05-11T06:30:00.000Z","cwd":"/g"}',
    "claude": '{"type":"file-history-snapshot","messageId":"m","snapshot":{},"isSnapshotUpdate":false}',
    "codex": '{"timestamp":"2026-05-11T06:30:00.000Z","type":"session_meta","payload":{"id":"a","cwd":"/g",'
             '"timestamp":"2026-05-11T06:30:00.000Z","originator":"o","cli_version":"1"}}',
    "berry": '{"format":"berry-agent/session","version":1}',
    "openai": '{"role":"system","content":"You are a gardener."}',
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_header_only(diag, name):
    code, found = diag("--format", name, data=HEADERS[name].encode() + b"\n")
    assert (code, found["cause"]) == (0 if name == "pi" else 4, "header_only")
    assert found["explanation"].startswith("1 line of ")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"garbage\nmore\n", "None of its 2 lines is a JSON object"),
        (bytes(range(256)) * 3, "is a JSON object"),
        (b'{"a":1}\n', "of no known format (see line 1)"),
        (None, "no such file"),
    ],
)
def test_unreadable(diag, data, words):
    code, found = diag(data=data)
    assert (code, found["result"], found["cause"]) == (4, "error", "unreadable")
    assert words in found["explanation"]


@pytest.mark.parametrize("name", ["pi", "claude"])
def test_not_the_active_branch(diag, name):
    """A long conversation, then a new one from its first message on."""
    lines = [*FORMATS[name](LONG)]
    first = next(i for i, line in enumerate(lines) if "message" in line)
    fork = dict(lines[first + 1])
    short = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
    if name == "pi":
        fork |= {"id": "mfork", "parentId": lines[first]["id"], "message": short}
        fork |= {"timestamp": "2026-05-12T06:30:00.000Z"}
    else:
        fork |= {"uuid": "ufork", "parentUuid": lines[first]["uuid"], "timestamp": "2026-05-12T06:30:00.000Z",
                 "message": short | {"id": "rfork", "type": "message", "model": "m"}}  # fmt: skip
    code, found = diag(lines=[*lines, fork])
    assert (code, found["cause"], found["branch"]) == (0, "other_branch", "nothing_to_summarize")
    assert found["suggestions"][0] == "--branch 1: 2 messages would be summarised"
    assert diag("--branch", "1")[1]["result"] == "ok"


def test_what_never_gains_is_not_tried_for_every_message():
    from haocompact.compaction import DEFAULT_COMPACTION_SETTINGS
    from haocompact.diag import largest_keep_recent
    from haocompact.formats import openai_chat
    from haocompact.formats.session import ReadOptions
    from haocompact.records import read

    data = b"".join(
        json.dumps(line).encode() + b"\n" for line in openai([("user", 1), ("assistant", 1)] * 1000)
    )
    messages = openai_chat.read(read(data), ReadOptions()).messages
    tried = []
    assert largest_keep_recent(messages, DEFAULT_COMPACTION_SETTINGS, lambda plan: tried.append(plan)) is None
    assert len(tried) < 100
    enough = largest_keep_recent(messages, DEFAULT_COMPACTION_SETTINGS, lambda plan: len(plan.removed) >= 700)
    assert enough == 1300


# ------------------------------------------------------------------------- what is suggested is run
def tried(*options):
    """What `compact` itself would make of the file: (result, messages summarised)."""
    words = [sys.executable, "-m", "haocompact", "compact", "--dry-run", "--json", "s.jsonl"]
    done = subprocess.run([*words, *options], capture_output=True, timeout=60, check=True)
    (found,) = map(json.loads, done.stdout.splitlines())
    return found["result"], found["summarize"] + found["prefix"]


def promised(suggestion):
    """Messages that a suggestion says would be summarised."""
    return int(re.search(r"(\d+) messages? (?:of about [\d,]+ tokens )?would be summarised", suggestion)[1])


BELOW = [("user", 150), ("assistant", 130), ("user", 30), ("assistant", 60)]
HEAVY = [("user", 5000), ("assistant", 20), ("user", 20), ("assistant", 20)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [BELOW, HEAVY, TALK["no_gain"]])
def test_the_largest_keep_recent_compacts_and_one_more_does_not(diag, name, rows):
    _, found = diag(lines=FORMATS[name](rows))
    (largest,) = [s for s in found["suggestions"] if s.startswith("--keep-recent ")]
    value = int(largest.split()[1])
    assert "is the largest value that compacts" in largest
    assert tried("--keep-recent", str(value)) == ("ok", promised(largest))
    assert tried("--keep-recent", str(value + 1))[0] == "none"


@pytest.mark.parametrize("name", FORMATS)
def test_the_other_suggestions_do_what_they_say(diag, name):
    lines, keep = [*FORMATS[name](LONG)], ("--keep-recent", str(KEEP))
    without, window, reserve = diag("--if-needed", lines=lines)[1]["suggestions"]
    assert without.startswith("leave out --if-needed: ")
    assert tried(*keep) == ("ok", promised(without))
    for option, step in ((window, 1), (reserve, -1)):
        setting, value = option.split()[:2]
        assert tried("--if-needed", *keep, setting, value)[0] == "ok"
        assert tried("--if-needed", *keep, setting, str(int(value) + step))[0] == "none"
    (other,) = diag("--strategy", "segment", lines=lines)[1]["suggestions"]
    assert other.startswith("--strategy keep-recent: ")
    assert tried(*keep, "--strategy", "keep-recent") == ("ok", promised(other))
    *_, growth = diag(lines=FORMATS[name](TALK["no_gain"]))[1]["suggestions"]
    assert growth == "--allow-growth writes it all the same"
    assert tried(*keep, "--allow-growth")[0] == "ok"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [SHORT, TALK["tail_exceeds_keep_recent"]])
def test_where_nothing_helps_nothing_does(diag, name, rows):
    """ "... and that is right": no value of keep_recent and no strategy compacts it."""
    assert diag(lines=FORMATS[name](rows))[1]["suggestions"] == [RIGHT]
    for keep in (0, 1, 20, 21, 100, 899, 900, 1000):
        assert tried("--keep-recent", str(keep))[0] == "none"
    assert tried("--strategy", "segment", "--tail-keep", "1")[0] == "none"
