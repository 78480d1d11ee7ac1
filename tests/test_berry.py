"""berry-agent's event logs: what is read, what is appended, and what the client would make of it."""

import hashlib
import json
import random

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from haocompact.ccr import CcrEntry, ccr_entry, ccr_hash, parse_ccr_section, window, with_ccr_section
from haocompact.compaction import (
    CompactionPreparation,
    CompactionSettings,
    Image,
    NoCompaction,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    prepare_compaction,
)
from haocompact.errors import TranscriptError
from haocompact.formats import berry
from haocompact.formats.session import Checkpoint, ReadOptions
from haocompact.jsjson import stringify, utf16_length
from haocompact.records import Record, read

ORACLE = ROOT.parent / "shared" / "oracle" / "berry_cases.jsonl"
ROWS = [json.loads(line) for line in ORACLE.read_text().splitlines()] if ORACLE.exists() else []
SAMPLES = sorted((ROOT / "samples" / "berry").glob("*.jsonl"))
HEADER = b'{"format":"berry-agent/session","version":1}\n'
WORDS = ("alpha", "beta", "压缩", "gamma", "😀")


# -------------------------------------------------------------------------------------- making logs
class Maker:
    def __init__(self, rng, seq=0):
        self.rng, self.first, self.events = rng, seq, []

    def add(self, kind, **data):
        seq = self.first + len(self.events)
        self.events.append({"type": kind, "seq": seq, "time": 1000 * seq, "data": data})
        return seq

    def text(self, most):
        return " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(1, most)))

    def turn(self, driver, masks):
        """driver: the message stands before `turn/start`, as the client writes it."""
        kinds = ("user/message", "turn/start") if driver else ("turn/start", "user/message")
        for kind in kinds:
            self.add(kind, **({"content": self.text(60)} if kind == "user/message" else {}))
        if masks and self.rng.random() < 0.2:
            self.failed_attempt()
        for _ in range(self.rng.randint(0, 3)):
            self.response()
        self.add("assistant/message", content=[{"type": "text", "text": self.text(20)}], stopReason="stop")
        self.add("turn/end", reason="completed")
        if self.rng.random() < 0.2:
            self.add("todo/write", items=[])

    def failed_attempt(self):
        start = self.add("assistant/message", content=[], stopReason="error", errorMessage="boom")
        end = self.add("turn/end", reason="error")
        self.add("llm/retry", phase="scheduled")
        self.events[-1] |= {
            "surfaceOp": {"op": "replace", "start": start, "end": end},
            "sourceEventSeqs": [start, end],
        }
        self.add("turn/start")

    def response(self):
        usage = {"input": 10, "output": 1}
        self.add("assistant/message", content=[{"type": "text", "text": self.text(40)}], usage=usage)
        names = [f"c{self.first + len(self.events)}.{i}" for i in range(self.rng.randint(1, 3))]
        one_by_one = self.rng.random() < 0.3
        for name in names:
            self.add("tool/call", toolCallId=name, name="read", arguments=json.dumps({"path": f"{name}.txt"}))
            if one_by_one:
                self.add("tool/result", toolCallId=name, content=self.text(60))
        for name in () if one_by_one else names:
            self.add("tool/result", toolCallId=name, content=self.text(60))


def make_log(rng, turns, *, seq=0, driver=True, masks=True):
    maker = Maker(rng, seq)
    for _ in range(turns):
        maker.turn(driver, masks)
    return maker.events


def compacted_by(events, plan):
    """The log after berry's own five steps over a segment plan."""
    entry, seq = ccr_entry(plan.occluded), events[-1]["seq"] + 1
    made = [{"type": "compaction/start", "data": {"reason": "threshold"}},
            {"type": "user/message", "data": {"content": "[COMPACTION-SUMMARY] S", "source": "compaction"}},
            {"type": "compaction/surface",
             "surfaceOp": {"op": "replace", "start": plan.start, "end": plan.end},
             "data": {"summarySeq": seq + 1, "occludedMessages": entry.messages, "occludedChars": entry.chars,
                      "ccrHash": entry.hash}},
            {"type": "compaction/end", "data": {"reason": "completed"}}]  # fmt: skip
    return [*events, *(event | {"seq": seq + i, "time": 0} for i, event in enumerate(made))]


def lines(events):
    return b"".join(json.dumps(e, ensure_ascii=False).encode() + b"\n" for e in events)


def event(kind, seq, **data):
    return {"type": kind, "seq": seq, "time": seq, "data": data}


def load(data, **options):
    return berry.read(read(data), ReadOptions(**options))


def prepared(session, keep=400):
    return prepare_compaction(session.messages, CompactionSettings(keep_recent_tokens=keep))


def checkpoint_for(session, plan, body="SUMMARY"):
    hash, chars = berry.address(session, plan)
    told = len(plan.messages_to_summarize) + len(plan.turn_prefix_messages)
    entries = [*parse_ccr_section(plan.previous_summary or ""), CcrEntry(hash, told, chars)]
    return Checkpoint(with_ccr_section(body, entries), [], [], plan.tokens_before, 0, hash)


def compact(data, keep=400):
    """(session, plan, the new log); the plan is a NoCompaction when nothing is to do."""
    session = load(data)
    plan = prepared(session, keep)
    if isinstance(plan, NoCompaction):
        return session, plan, data
    pieces = berry.rebuild(session, plan, berry.select(session, plan), checkpoint_for(session, plan))
    return session, plan, b"".join(session.records.raw(p) if isinstance(p, int) else p for p in pieces)


def shape(messages):
    return [(m.role, m.parts) for m in messages]


def surfaces(data):
    events = [json.loads(line) for line in data.splitlines()]
    return [e for e in events if e.get("type") == "compaction/surface"]


# --------------------------------------------------------------------------------------- projection
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_projection_is_berrys(row):
    forms = berry.derive(row["input"]["events"])
    expected = row["result"]["derived"]
    text = stringify(forms).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert hashlib.sha256(text.encode()).hexdigest() == expected["json_sha256"]
    assert [(m["seq"], m["type"]) for m in forms] == list(
        zip(expected["seqs"], expected["types"], strict=True)
    )
    assert sum(utf16_length(stringify(m)) for m in forms) == expected["chars"]


@pytest.mark.parametrize("row", [r for r in ROWS if r["result"]["derived"]["n"]], ids=lambda row: row["name"])
def test_a_session_holds_the_same_projection(row):
    data = b"".join(json.dumps(e).encode() + b"\n" for e in row["input"]["events"])
    session = load(HEADER + data)
    forms = berry.projected(session, sorted(session.messages, key=lambda m: m.line))
    assert forms == berry.derive(row["input"]["events"])


def test_calls_join_the_assistant_message_before_them():
    log = [event("user/message", 0, content="q"),
           event("assistant/message", 1, content=[{"type": "text", "text": "t"}], stopReason="toolUse"),
           event("tool/call", 2, toolCallId="a", name="read", arguments='{"path":"x"}'),
           event("tool/call", 3, toolCallId="b", name="bash", arguments="not json"),
           event("tool/result", 4, toolCallId="b", content="out", error=None),
           event("tool/result", 5, toolCallId="a",
                 content=[{"type": "text", "text": "r"}, {"type": "image"}])]  # fmt: skip
    user, assistant, first, second = load(lines(log)).messages
    assert user.parts == (Text("q"),)
    assert assistant.parts == (
        Text("t"),
        ToolCall("a", "read", {"path": "x"}),
        ToolCall("b", "bash", "not json"),
    )
    assert first.parts == (
        ToolResult("b", ("out",), 0, True, "bash"),
    )  # an error key that is null is an error
    assert second.parts == (ToolResult("a", ("r",), 1, False, "read"),)
    assert [m.line for m in (user, assistant, first, second)] == [1, 2, 5, 6]


def test_blocks_of_a_message():
    blocks = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "image", "mimeType": "image/png"},
        {"type": "x", "y": 1},
    ]
    message = load(lines([event("user/message", 0, content=blocks)])).messages[0]
    assert message.parts == (Thinking("hm"), Image("image/png"), Text('{"type":"x","y":1}'))


def test_ranges_hide_events_of_any_type():
    log = make_log(random.Random(3), 3, masks=False)
    first_end = next(e["seq"] for e in log if e["type"] == "turn/end")
    log[-1]["surfaceOp"] = {"op": "replace", "start": 0, "end": first_end}
    assert min(m.line for m in load(lines(log)).messages) > first_end + 1
    log[-1]["surfaceOp"] = {"op": "replace", "start": "0", "end": None}
    assert min(m.line for m in load(lines(log)).messages) == 1


def test_the_newest_visible_summary_comes_first():
    log = make_log(random.Random(3), 1, masks=False)
    for body in ("first", "[COMPACTION-SUMMARY] second\n\n<read-files>\na.py\n</read-files>"):
        log.append(event("user/message", len(log), content=body, source="compaction"))
    session = load(lines(log))
    summary = session.messages[0]
    assert (summary.kind, summary.text) == (
        "compaction_summary",
        "second\n\n<read-files>\na.py\n</read-files>",
    )
    assert summary.files.read == {"a.py"}
    assert (summary.at_end, summary.kept) == (True, len(session.messages) - 1)
    assert session.messages[-1].kind == ""  # an orphan of a failed compaction stays where it is
    log.append(event("user/message", len(log), content="go on"))
    assert not load(lines(log)).messages[0].at_end


def test_usage_counts_once_valid_and_newer_than_the_last_compaction():
    def answer(seq, usage, stop="stop"):
        return event("assistant/message", seq, content="x", usage=usage, stopReason=stop)

    full = {"input": 5, "output": 6, "cacheRead": 7, "cacheWrite": 8}
    log = [event("user/message", 0, content="q"), answer(1, full), answer(2, full | {"totalTokens": 99}),
           answer(3, full, "error"), answer(4, {"input": 0})]  # fmt: skip
    messages = load(lines(log)).messages
    assert [m.usage for m in messages] == [None, 26, 99, None, None]
    assert messages[3].usage_note == "the turn ended with error"
    surface = event("compaction/surface", 5) | {"surfaceOp": {"op": "replace", "start": 0, "end": 1}}
    data = lines([*log, surface, answer(6, full)])
    assert [m.usage for m in load(data).messages] == [None, None, None, 26]
    assert load(data).messages[0].usage_note == "measured before the compaction on line 6"
    assert [m.usage for m in load(data, repair=False).messages] == [99, None, None, 26]


def test_the_clients_own_window_is_known_when_it_noted_one():
    log = make_log(random.Random(3), 1)
    assert load(lines(log)).context_window is None
    log.append(event("compaction/start", len(log), effectiveWindow=128_000))
    assert load(lines(log)).context_window == 128_000


def test_what_is_odd_is_warned_about():
    log = [event("user/message", 3, content="q"), event("tool/result", 2, toolCallId="a", content="r"),
           event("tool/call", 4, toolCallId="b", name="x", arguments="{}"), {"type": "note"}]  # fmt: skip
    warned = [(w.line, w.text) for w in load(HEADER + lines(log) + b"{torn").warnings]
    assert [line for line, _ in warned] == [5, 6, 3, 3, 4]
    assert [text.split(":")[0] for _, text in warned[2:]] == [
        "seq 2 after 3",
        "result a has no call before it",
        "call b has no result",
    ]


@pytest.mark.parametrize("data", [b"", HEADER, lines([event("turn/start", 0)])])
def test_a_log_without_a_message_is_refused(data):
    with pytest.raises(TranscriptError, match="no usable message"):
        load(data)


def test_sniffing():
    assert berry.sniff(json.loads(HEADER), True) == 2
    assert berry.sniff(event("plugin/anything", 0), False) == 2
    for other in (
        {"type": "user", "seq": 1},
        {"type": "a/b", "seq": True, "data": {}},
        {"type": "session"},
        {},
    ):
        assert berry.sniff(other, True) == 0


def test_one_record_alone():
    def alone(obj):
        return berry.message_of(Record(7, json.dumps(obj).encode()))

    call = alone(event("tool/call", 1, toolCallId="a", name="read", arguments="{}"))
    assert (call.role, call.parts, call.line) == ("assistant", (ToolCall("a", "read", {}),), 7)
    assert alone(event("tool/result", 1, toolCallId="a", content="r")).parts == (ToolResult("a", ("r",)),)
    assert alone(event("turn/end", 1)) is None
    assert alone(json.loads(HEADER)) is None


# ------------------------------------------------------------------------------------- compaction
def test_the_published_case_of_a_slice_whose_seq_begin_at_100():
    """The hash is that of the projected messages, the range is in seq and at turn limits."""
    path = ROOT / "tests" / "cases" / "B91.jsonl"
    if not path.exists():
        pytest.skip("the case is not here")
    data = path.read_bytes()
    session, plan, output = compact(data)
    assert output.startswith(data)
    added = [json.loads(line) for line in output[len(data) :].splitlines()]
    assert [e["type"] for e in added] == [
        "compaction/start", "user/message", "compaction/surface", "compaction/end"]  # fmt: skip
    assert [e["seq"] for e in added] == [135, 136, 137, 138]
    surface = added[2]
    assert surface["surfaceOp"] == {"op": "replace", "start": 100, "end": 113}
    assert surface["sourceEventSeqs"] == [*range(100, 114), 136]
    archived = [session.records[i] for i in berry.archived(session, plan)]
    forms = [m.form for m in berry.messages_of(archived)]
    digest = hashlib.sha256(
        json.dumps(forms, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    )
    assert surface["data"]["ccrHash"] == digest.hexdigest()[:16]
    assert f"<<ccr:{digest.hexdigest()[:16]}>>" in added[1]["data"]["content"]
    assert surface["data"]["occludedMessages"] == len(forms) == 8


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_samples_compact_and_read_back(path):
    data = path.read_bytes()
    session, plan, output = compact(data)
    assert isinstance(plan, CompactionPreparation)
    assert not session.warnings
    assert output.startswith(data)
    again = load(output)
    assert again.messages[0].kind == "compaction_summary"
    assert shape(again.messages[1:]) == shape(plan.retained_tail)
    assert isinstance(compact(output)[1], NoCompaction)
    kinds = {json.loads(line).get("type", berry.HEADER) for line in output.splitlines()}
    assert kinds <= berry.KINDS.keys()


def test_the_samples_own_compaction_can_be_retrieved():
    session = load((ROOT / "samples" / "berry" / "native-compaction.jsonl").read_bytes())
    (entry,) = berry.directory(session)
    originals = berry.in_log(session, entry.hash)
    assert ccr_hash([m.form for m in originals]) == entry.hash
    assert len(originals) == entry.messages
    text = window(originals, render=berry.render, lang="zh")
    assert text.startswith("[user] Please move our nightly backup")
    assert "  · 工具调用 read(call_001) 参数: {" in text
    assert text.endswith("（已渲染 10/10 条，本段已取尽）")
    assert berry.in_log(session, "0" * 16) is None


def allowed(events, surface):
    """berry's own gate for a range, and the one place more where a turn begins: after a `compaction/end`."""
    before = [e for e in events if e["seq"] < surface["seq"]]
    seqs = [e["seq"] for e in before]
    start, end = surface["surfaceOp"]["start"], surface["surfaceOp"]["end"]
    first, stop = seqs.index(start), seqs.index(end) + 1
    assert surface["sourceEventSeqs"] == [*seqs[first:stop], surface["data"]["summarySeq"]]
    older = [e["surfaceOp"] for e in before if "surfaceOp" in e]
    assert not any(op["start"] <= end and start <= op["end"] for op in older)
    assert not any("surfaceOp" in e for e in before[first:stop])
    names = {"tool/call": set(), "tool/result": set()}
    for e in before[first:stop]:
        names.get(e["type"], set()).add(e["data"].get("toolCallId"))
    assert names["tool/call"] == names["tool/result"]
    assert (
        first == 0
        or before[first]["type"] == "turn/start"
        or before[first - 1]["type"] in ("turn/end", "compaction/end")
        or any(op["end"] == seqs[first - 1] for op in older)
    )


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([0, 100]), st.booleans())
def test_ten_compactions_in_a_row(seed, seq, driver):
    rng = random.Random(seed)
    data = (HEADER if seq == 0 else b"") + lines(make_log(rng, rng.randint(3, 8), seq=seq, driver=driver))
    told, named = [], []
    for _ in range(10):
        keep = rng.choice([50, 400])
        session, plan, output = compact(data, keep)
        if isinstance(plan, CompactionPreparation):
            check_round(session, plan, data, output)
            told += [m.id for m in (*plan.messages_to_summarize, *plan.turn_prefix_messages)]
            named.append(berry.address(session, plan)[0])
            assert isinstance(compact(output, keep)[1], NoCompaction)
        last = json.loads(output.splitlines()[-1])["seq"]
        data = output + lines(make_log(rng, rng.randint(0, 4), seq=last + 1, driver=driver))
    final = load(data)
    assert [e.hash for e in parse_ccr_section(final.messages[0].text)] == named
    assert len(told) == len(set(told))
    shown = {m.id for m in final.messages[1:]}
    everything = {str(m["seq"]) for m in berry.derive(without_compactions(data))}
    assert shown | set(told) == everything


def without_compactions(data):
    events = [json.loads(line) for line in data.splitlines()]
    kept = [e for e in events if e.get("data", {}).get("source") != "compaction"]
    return [e for e in kept if "seq" in e and not e["type"].startswith("compaction/")]


def check_round(session, plan, data, output):
    assert output.startswith(data)
    again = load(output)
    assert shape(again.messages[1:]) == shape(plan.retained_tail)
    hidden = berry.segments(session, plan)
    events = [e for e in map(json.loads, output.splitlines()) if "seq" in e]
    new = surfaces(output[len(data) :])
    assert len(new) == len(hidden)
    for surface in new:
        allowed(events, surface)
    archived = berry.messages_of([session.records[i] for i in berry.archived(session, plan)])
    forms = [m.form for m in archived]
    assert forms == [m.form for part in hidden for m in part.messages]
    assert berry.address(session, plan)[0] == ccr_hash(forms) in {s["data"]["ccrHash"] for s in new}
    for part, surface in zip(hidden, new, strict=True):
        found = berry.in_log(again, surface["data"]["ccrHash"])
        assert berry.projected(again, found) == berry.projected(session, part.messages)


def test_a_complete_turn_is_hidden_or_kept_as_a_whole():
    log = make_log(random.Random(5), 12, masks=False)
    for keep in range(50, 1200, 50):
        plan = prepared(load(lines(log)), keep)
        first = plan.retained_tail[0]
        if not plan.is_split_turn:
            assert first.role == "user"
        else:  # only the last turn may be split
            ends = [e["seq"] for e in log if e["type"] == "turn/end"]
            assert first.line - 1 > ends[-2]


def test_a_turn_too_large_is_split_but_no_response_of_it():
    maker = Maker(random.Random(5))
    maker.add("user/message", content="q")
    maker.add("turn/start")
    while sum(len(json.dumps(e)) for e in maker.events) < 3 * berry.TURN_BYTES:
        maker.response()
    maker.add("turn/end")
    session, plan, output = compact(lines(maker.events + make_log(maker.rng, 1, seq=len(maker.events))), 5000)
    assert plan.is_split_turn
    assert plan.tokens_kept < 10_000
    check_round(session, plan, session.records.data, output)


def test_a_later_call_of_a_response_is_tied_to_its_beginning():
    """Left alone it would be read as part of whatever assistant message is shown before it."""
    call, result = {"name": "x", "arguments": "{}"}, {"content": "r"}
    log = [event("user/message", 0, content="q"), event("assistant/message", 1, content=[]),
           event("tool/call", 2, toolCallId="a", **call), event("tool/result", 3, toolCallId="a", **result),
           event("tool/call", 4, toolCallId="b", **call), event("tool/result", 5, toolCallId="b", **result),
           event("assistant/message", 6, content=[]), event("turn/end", 7)]  # fmt: skip
    groups = [m.group for m in load(lines(log)).messages]
    assert groups == [None, "response 1", "response 1", "response 1", None, None]


def test_a_torn_last_line_goes_and_a_missing_line_end_comes():
    log = lines(make_log(random.Random(9), 8))
    session = load(log + b'{"type":"user/mess')
    plan = prepared(session)
    assert berry.select(session, plan) == list(range(len(session.records) - 1))
    assert berry.append(session, plan, checkpoint_for(session, plan)).startswith(
        b'{"type":"compaction/start"'
    )
    session = load(log[:-1])
    assert berry.select(session, plan) == list(range(len(session.records)))
    added = berry.append(session, prepared(session), checkpoint_for(session, prepared(session)))
    assert added.startswith(b'\n{"type":"compaction/start"')
    assert shape(load(log[:-1] + added).messages[1:]) == shape(prepared(session).retained_tail)


def test_the_same_log_gives_the_same_bytes():
    log = lines(make_log(random.Random(9), 8))
    assert compact(log)[2] == compact(log)[2]


def test_a_log_out_of_order_is_left_alone():
    log = make_log(random.Random(9), 8, masks=False)
    log[0]["seq"], log[1]["seq"] = 1, 0
    session = load(lines(log))
    with pytest.raises(TranscriptError, match="seq does not ascend"):
        berry.segments(session, prepared(session))


def test_segment_strategy_hides_the_middle():
    """A plan whose kept messages stand on both sides of what is hidden."""
    session = load(lines(make_log(random.Random(11), 5, masks=False)))
    turns = [i for i, m in enumerate(session.messages) if m.role == "user"]
    plan = prepared(session, 50)
    middle = session.messages[turns[1] : turns[3]]
    outside = [*session.messages[: turns[1]], *session.messages[turns[3] :]]
    plan = CompactionPreparation(
        middle, [], outside, False, 0, None, plan.file_ops, plan.settings, plan.cut, plan.estimate
    )
    added = berry.append(session, plan, checkpoint_for(session, plan))
    again = load(session.records.data + added)
    assert shape(again.messages[1:]) == shape(outside)
    (surface,) = surfaces(added)
    allowed([json.loads(line) for line in (session.records.data + added).splitlines()], surface)


# --------------------------------------------------------------------------------------- rendering
def test_rendering_shows_error_messages_and_arguments_that_are_no_string():
    form = {"type": "assistant", "seq": 1, "content": [], "errorMessage": "boom",
            "toolCalls": [{"toolCallId": "k", "toolName": "n", "arguments": {"a": 1}}]}  # fmt: skip
    assert berry.render_form(form) == '[assistant] \n  · 工具调用 n(k) 参数: {"a":1}\n  · 错误: boom'
    assert "参数: [object Object]" in berry.render_form(form, repair=False)
    assert "tool call n(k) arguments:" in berry.render_form(form, "en")
