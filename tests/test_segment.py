"""The segment policy: berry-agent's own plans, and what R10 repairs."""

import hashlib
import json
import random

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from test_berry import compacted_by, make_log

from haocompact import segment
from haocompact.compaction import CompactionSettings, Message, NoCompaction, Text, ToolCall, ToolResult
from haocompact.formats import berry
from haocompact.jsjson import utf16_length
from haocompact.segment import (
    Segment,
    SegmentConfig,
    SegmentPlan,
    build_summary_prompt,
    evaluate_threshold,
    in_cooldown,
    plan_from_range,
    plan_segment,
    previous_summary_text,
    range_of,
    segment_of,
    summary_budget,
    validate_adjusted_range,
)

ORACLE = ROOT.parent / "shared" / "oracle" / "berry_cases.jsonl"
ROWS = [json.loads(line) for line in ORACLE.read_text().splitlines()] if ORACLE.exists() else []
OPTIONS = {
    "thresholdRatio": "threshold_ratio",
    "tailKeep": "tail_keep",
    "summaryRatio": "summary_ratio",
    "summaryMinChars": "summary_min_chars",
    "summaryMaxChars": "summary_max_chars",
    "fallbackWindowTokens": "fallback_window_tokens",
}


def row_name(row):
    return row["name"]


def config_of(row):
    given_options = row["input"].get("config") or {}
    return SegmentConfig(**{OPTIONS[k]: v for k, v in given_options.items() if k in OPTIONS})


def planned(row, **mode):
    events = row["input"]["events"]
    messages = row["input"].get("messages", berry.derive(events))
    return plan_segment(events, messages, row["input"].get("tailKeep", 6), **mode)


def as_berry(plan):
    return plan and {
        "start": plan.start,
        "end": plan.end,
        "occludedMessages": plan.occluded_messages,
        "occludedChars": plan.occluded_chars,
        "seqs": [m["seq"] for m in plan.occluded],
    }


# ----------------------------------------------------------------------------- berry's own answers
@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_exact_plan_is_alpha_15s(row):
    assert as_berry(planned(row, exact=True)) == row["result"]["plan"]


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_plan_without_repairs_is_alpha_1s(row):
    expected = row["result"]["alpha1_plan"]
    if expected and "error" in expected:  # a tailKeep that is no whole number above 0 throws there
        assert row["input"]["tailKeep"] in (0, 1.5)
        expected = None
    assert as_berry(planned(row, repair=False)) == expected


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_threshold(row):
    for asked, expected in zip(row["input"].get("threshold", [{}]), row["result"]["threshold"], strict=True):
        chars = asked.get("projectedChars")
        chars = row["result"]["derived"]["chars"] if chars is None else chars
        found = evaluate_threshold(asked.get("usageInput"), chars, asked.get("contextWindow"), config_of(row))
        assert (found and (found.basis, found.est_tokens, found.effective_window, found.fire)) == (
            expected and tuple(expected[k] for k in ("basis", "estTokens", "effectiveWindow", "fire"))
        )


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_budget(row):
    plan = planned(row, exact=True)
    budget = summary_budget(plan.occluded_chars, config_of(row)) if plan else None
    assert budget == row["result"]["summary_budget"]
    sizes = row["input"].get("budgets", ())
    assert [summary_budget(n, config_of(row)) for n in sizes] == row["result"].get("budgets", [])


NO_TEXT = {  # berry reads a text block without text as the word "undefined"; repaired, it holds no summary
    "057_previous_text_undefined": "OLDER",
    "115_fuzz_020": None,
    "177_fuzz_082": "<<ccr:0123456789abcdef>> fake",
}


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_previous_summary(row):
    events, expected = row["input"]["events"], row["result"]["previous_summary"]
    assert previous_summary_text(events, repair=False) == expected
    assert previous_summary_text(events) == NO_TEXT.get(row["name"], expected)


@pytest.mark.parametrize("row", [r for r in ROWS if "prompt_sha256" in r["result"]], ids=row_name)
def test_prompt(row):
    plan = planned(row, exact=True)
    result = row["result"]
    text = build_summary_prompt(plan.occluded, result["previous_summary"], result["summary_budget"])
    if (
        result["material_stage"] != "full"
    ):  # material over berry's budget is cut there; here it goes in chunks (R9)
        assert utf16_length(text) >= result["prompt_len"]
        return
    clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert hashlib.sha256(clean.encode()).hexdigest() == result["prompt_sha256"]


# ------------------------------------------------------------------------------ what R10 repairs
RULES = {
    "seq": "a log whose seq are not its positions is planned too: berry confuses the two and plans nothing",
    "frontier": "what earlier compactions left behind is passed over: berry stops there for good",
    "start": "berry's range would start where its own gate refuses it",
    "open turn": "berry's range would end inside a turn",
    "pair": "berry's range would part a call from its result",
}


def refusals(events, start, end):
    """What is wrong with hiding `start..end` (seq): written from berry's gate, apart from the planner."""
    seqs = [e["seq"] for e in events]
    first, stop = seqs.index(start), seqs.index(end) + 1
    older = [span for e in events if (span := range_of(e))]
    found = set()
    if not (
        first == 0
        or events[first]["type"] == "turn/start"
        or events[first - 1]["type"] == "turn/end"
        or any(span[1] == seqs[first - 1] for span in older)
    ):
        found.add("start")
    if any(low <= seq <= high for seq in seqs[first:stop] for low, high in older):
        found.add("hidden twice")
    if any(range_of(e) for e in events[first:stop]):
        found.add("carrier")
    if parts_a_pair(events, range(first, stop)):
        found.add("pair")
    if not ends_between_turns(events[:stop], older):
        found.add("open turn")
    return found


def parts_a_pair(events, inside):
    calls, results = {}, {}
    for i, event in enumerate(events):
        if event["type"] in ("tool/call", "tool/result"):
            (calls if event["type"] == "tool/call" else results)[event["data"].get("toolCallId")] = i
    return any((calls[name] in inside) != (results[name] in inside) for name in calls.keys() & results.keys())


def ends_between_turns(events, older):
    for event in reversed(events):
        if any(low <= event["seq"] <= high for low, high in older):
            continue
        if event["type"] == "turn/end":
            return True
        opens = event["type"] == "turn/start" or event["type"] in segment.MESSAGE_EVENTS
        if opens and not segment.is_summary_event(event):
            return False
    return True


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_every_difference_from_alpha_15_has_its_rule(row):
    events, theirs, ours = row["input"]["events"], row["result"]["plan"], planned(row)
    seqs = [e["seq"] for e in events]
    if ours is not None:
        assert refusals(events, ours.start, ours.end) == set()
    if as_berry(ours) == theirs:
        return
    if theirs is not None:
        reasons = refusals(events, theirs["start"], theirs["end"])
    elif seqs != list(range(len(seqs))):
        reasons = {"seq"}
    else:
        surfaces = [e for e in events if e["type"] == "compaction/surface" and range_of(e)]
        reasons = {"frontier"} if surfaces else set()
    assert reasons
    assert reasons <= RULES.keys()


def best_range(events, messages, tail_keep):
    """By trying all: the first start after the frontier that some end fits, with the furthest such end."""
    ends = [e["seq"] for e in events if e["type"] == "turn/end"]
    if not ends or len(messages) < tail_keep + 2:
        return None
    spans = [span[1] for e in events if e["type"] == "compaction/surface" and (span := range_of(e))]
    frontier = max(spans) if spans else ends[0]
    last = min(ends[-1], messages[-tail_keep]["seq"] - 1)
    seqs = [e["seq"] for e in events if frontier < e["seq"] <= last]
    for start in seqs:
        for end in reversed([seq for seq in seqs if seq >= start]):
            shown = any(start <= m["seq"] <= end for m in messages)
            if shown and not refusals(events, start, end):
                return start, end
    return None


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5), st.sampled_from([0, 100]))
def test_the_repaired_plan_is_the_first_and_furthest_that_is_allowed(seed, tail_keep, turns, first):
    events = make_log(random.Random(seed), turns, seq=first)
    for _ in range(2):
        messages = berry.derive(events)
        plan = plan_segment(events, messages, tail_keep)
        assert (plan and (plan.start, plan.end)) == best_range(events, messages, tail_keep)
        if plan is None:
            return
        events = compacted_by(events, plan)
        events += make_log(random.Random(seed + 1), 1, seq=events[-1]["seq"] + 1)


@pytest.mark.parametrize("driver", [True, False])
def test_any_number_of_compactions(driver):
    """berry's third compaction of a session fails at its own gate, for good."""
    rng = random.Random(7)
    events = make_log(rng, 4, driver=driver, masks=False)
    hidden = []
    for _ in range(10):
        plan = plan_segment(events, berry.derive(events), tail_keep=2)
        assert plan is not None
        assert refusals(events, plan.start, plan.end) == set()
        hidden += [m["seq"] for m in plan.occluded]
        events = compacted_by(events, plan)
        events += make_log(rng, 3, seq=events[-1]["seq"] + 1, driver=driver, masks=False)
    assert len(hidden) == len(set(hidden)) > 30


def test_no_plan_for_a_log_out_of_order_or_without_a_closed_turn():
    events = make_log(random.Random(1), 6, masks=False)
    assert plan_segment(events, berry.derive(events), 1) is not None
    assert plan_segment(events[::-1], berry.derive(events[::-1]), 1) is None
    open_turns = [e for e in events if e["type"] != "turn/end"]
    assert plan_segment(open_turns, berry.derive(open_turns), 1) is None
    assert plan_segment(events, berry.derive(events), 0) is None


def test_a_result_that_comes_turns_later_stays_with_its_call():
    def turn(*middle):
        return ["user/message", "turn/start", *middle, "assistant/message", "turn/end"]

    def log(*kinds):
        return [{"type": kind, "seq": i, "data": {"toolCallId": "late"}} for i, kind in enumerate(kinds)]

    asked, answered = turn("assistant/message", "tool/call"), turn("tool/result")
    # head, plain turn, the call, its result, three turns of a tail
    events = log(*turn(), *turn(), *asked, *answered, *turn(), *turn())
    for tail_keep, expected in [(3, (4, 18)), (4, (4, 18)), (5, (4, 7)), (10, (4, 7)), (11, None)]:
        plan = plan_segment(events, berry.derive(events), tail_keep)
        assert (plan and (plan.start, plan.end)) == expected, tail_keep
    # the call is in the head turn: the range can only begin after the result
    events = log(*asked, *answered, *turn(), *turn())
    plan = plan_segment(events, berry.derive(events), 2)
    assert (plan.start, plan.end) == (11, 14)


# --------------------------------------------------------------------------------------- by hand
def test_threshold_by_hand():
    assert evaluate_threshold(100_000, 0).fire
    assert not evaluate_threshold(99_999, 10**9).fire
    assert evaluate_threshold(None, 400_001) == segment.Threshold("estimate", 100_001, 200_000, True)
    assert evaluate_threshold(None, 0) is None
    assert evaluate_threshold(5, 5, 0) is None


def test_cooldown():
    assert not in_cooldown(None, 0)
    assert in_cooldown(1000, 600_999)
    assert not in_cooldown(1000, 601_000)
    assert not in_cooldown(1000, 1001, SegmentConfig(cooldown_ms=1))


def test_budget_by_hand():
    assert [summary_budget(n) for n in (0, 10_000, 10_001, 50_000, 10**7)] == [
        2000,
        2000,
        2001,
        10_000,
        12_000,
    ]


def test_an_adjusted_range_may_only_hide_less():
    host = SegmentPlan(10, 20, [])
    for start, end, fits in [
        (10, 20, True),
        (12, 12, True),
        (9, 20, False),
        (10, 21, False),
        (15, 14, False),
    ]:
        assert validate_adjusted_range(SegmentPlan(start, end, []), host) is fits


def test_plan_from_range_counts_utf16_units():
    plan = plan_from_range(2, 3, [{"seq": 1}, {"seq": 2, "c": "😀"}, {"seq": 3}, {"seq": 4}])
    assert (plan.occluded_messages, plan.occluded_chars) == (2, len('{"seq":2,"c":"xx"}') + len('{"seq":3}'))


def test_previous_summary_by_hand():
    def event(content):
        return {"type": "user/message", "data": {"content": content, "source": "compaction"}}

    old = event("[COMPACTION-SUMMARY] old")
    body = "new\n<<ccr:see above>>\nmore"
    marker = "<<ccr:0123456789abcdef>> original archived (1 messages / 2 characters)"
    marked = event(f"[COMPACTION-SUMMARY] {body}\n\n{marker}")
    assert previous_summary_text([old, marked]) == body
    assert previous_summary_text([old, marked], repair=False) == "new"
    assert previous_summary_text([old, event("")]) == "old"
    assert (
        previous_summary_text([old, event([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])])
        == "ab"
    )
    assert previous_summary_text([]) is None


def test_prompt_by_hand():
    text = build_summary_prompt([{"type": "user", "seq": 1, "content": []}], "BEFORE", 2000, "en")
    assert "at most 2000 characters" in text
    assert [line[:2] for line in text.splitlines() if line[1:2] == "."] == ["1.", "2.", "3.", "4.", "5."]
    assert "\nBEFORE\n" in text
    assert text.endswith('[\n  {\n    "type": "user",\n    "seq": 1,\n    "content": []\n  }\n]')
    chinese = build_summary_prompt([], None, 2000)
    assert "前次压缩摘要" not in chinese
    assert "保真纪律" in chinese
    assert "保真纪律" not in build_summary_prompt([], None, 2000, repair=False)


# ------------------------------------------------------------------------- messages of any format
def talk(roles):
    """u user, a assistant, c assistant with a call, r its result, b shell command, s summary."""
    messages = []
    for i, role in enumerate(roles):
        name = {"u": "user", "s": "user", "r": "toolResult", "b": "bashExecution"}.get(role, "assistant")
        parts = {"c": (ToolCall("x", "read", {}),), "r": (ToolResult("x", ("y",)),)}.get(
            role, (Text(str(i)),)
        )
        messages.append(Message(name, parts, line=i + 1, kind="compaction_summary" if role == "s" else ""))
    return messages


@pytest.mark.parametrize(
    ("roles", "tail", "expected"),
    [
        ("uauauaua", 2, (2, 6)),  # the first turn and the last two stay
        ("uauauaua", 1, (2, 6)),  # the tail begins with a turn
        ("uacruauau", 3, (4, 6)),
        ("uaucrcrua", 2, (2, 7)),
        ("suauauaua", 2, (3, 7)),  # a summary in front is neither counted nor hidden
        ("uabacrua", 1, (2, 6)),  # a shell command begins a turn
    ],
)
def test_segment_of(roles, tail, expected):
    assert segment_of(talk(roles), CompactionSettings(tail_keep=tail)) == Segment(*expected)


@pytest.mark.parametrize(
    ("roles", "tail", "why"),
    [
        ("", 2, ("empty_messages", None)),
        ("s", 2, ("tail_is_summary", None)),
        ("uaua", 3, ("nothing_to_summarize", "segment_too_short")),
        ("uacraa", 2, ("nothing_to_summarize", "segment_one_turn")),
        ("uaaaaua", 2, ("nothing_to_summarize", "segment_empty")),
    ],
)
def test_no_segment(roles, tail, why):
    found = segment_of(talk(roles), CompactionSettings(tail_keep=tail))
    assert isinstance(found, NoCompaction)
    assert (found.branch, found.sub) == why


def test_the_seed_starts_turns_at_user_messages_only():
    assert isinstance(segment_of(talk("uabaua"), CompactionSettings(tail_keep=2, repair=False)), NoCompaction)
    assert segment_of(talk("uabaua"), CompactionSettings(tail_keep=2)) == Segment(2, 4)


@given(st.text("uacrb", min_size=1, max_size=30), st.integers(1, 8))
def test_a_segment_parts_no_pair_and_leaves_head_and_tail(roles, tail):
    messages = talk(roles)
    found = segment_of(messages, CompactionSettings(tail_keep=tail))
    if isinstance(found, Segment):
        assert 0 < found.start < found.end <= len(messages) - tail
        assert found.start == next(i for i, r in enumerate(roles) if r in "ub" and i >= found.start)
