"""The algorithm: worked examples, each repair beside the seed, properties over random conversations."""

import dataclasses
import itertools
import pickle
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haocompact.compaction import (
    CHARS,
    CJK,
    COMPACTION_SUMMARY,
    CUT_ROLES,
    ESTIMATORS,
    WITHDRAWN,
    CompactionPreparation,
    CompactionSettings,
    CutPoint,
    FileOperations,
    Image,
    Message,
    NoCompaction,
    Shell,
    SystemPatch,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    arguments_text,
    compute_file_lists,
    cut_obstacles,
    estimate_context_tokens,
    estimate_tokens,
    extract_file_ops_from_message,
    find_cut_point,
    find_turn_start,
    find_valid_cut_points,
    joined_start,
    prepare_compaction,
    replay_system,
    should_compact,
    tiktoken_estimator,
)
from haocompact.errors import UsageError

A, U, T = "assistant", "user", "toolResult"


def message(role, tokens=10, *, call=None, result=None, **more):
    """A message of exactly `tokens` tokens, with a call or a result of the given id."""
    text = "x" * 4 * tokens
    if role == T:
        return Message(role, (ToolResult(result, (text,)),), **more)
    parts = (Text(text),) if call is None else (Text(text[2 * len("f{}") :]), ToolCall(call, "f", {}))
    return Message(role, parts, **more)


def talk(*rows):
    """Rows of (role, tokens, call or result id)."""
    made = []
    for number, (role, tokens, *id) in enumerate(rows):
        id = id[0] if id else None
        made.append(
            message(
                role,
                tokens,
                call=id if role == A else None,
                result=id if role == T else None,
                line=number + 1,
            )
        )
    return made


def summary(text="## Goal\nOld.", **more):
    return Message(U, (Text(text),), kind=COMPACTION_SUMMARY, line=1, **more)


def settings(keep=20, **more):
    return CompactionSettings(keep_recent_tokens=keep, estimator=CHARS, **more)


def both(messages, keep, **more):
    """(repaired, seed) outcome."""
    return prepare_compaction(messages, settings(keep, **more)), prepare_compaction(
        messages, settings(keep, repair=False, **more)
    )


def shape(plan):
    return len(plan.messages_to_summarize), len(plan.turn_prefix_messages), len(plan.retained_tail)


# ------------------------------------------------------------------------------ worked examples
def test_estimate_worked_example():
    parts = (Text("abcde"), Text("fg"), Image())
    assert estimate_tokens(Message(U, parts), CHARS) == 1202


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        (Text("x" * 9), 3),
        (Thinking("x" * 8), 2),
        (Text("😀" * 4), 2),
        (Text("水" * 8), 2),
        (Image("image/png"), 1200),
        (ToolCall("id", "bash", {"a": [1, 2], "b": "c"}), 6),  # bash{"a":[1,2],"b":"c"}
        (ToolCall("id", "bash", '{"a"'), 2),
        (ToolCall("id", "bash"), 1),
        (Shell("ls -l", "abc", "ignored"), 2),
        (SystemPatch("abcd", (("a", "efgh"), ("b", None)), ({"name": "t"},)), 6),  # [{"name":"t"}]
    ],
)
def test_tokens_of_each_part(part, tokens):
    assert estimate_tokens(Message(A, (part,)), CHARS) == tokens


def test_tokens_of_a_result_count_its_images_and_not_its_own_calls():
    parts = (ToolResult("c", ("x" * 8, "y" * 4), images=1), ToolCall(None, "read", {"path": "x" * 400}))
    assert estimate_tokens(Message(T, parts), CHARS) == 1203
    assert estimate_tokens(Message(U, (Text("x" * 400),), hidden=True), CHARS) == 0


def test_tokens_are_kept_an_estimator_and_follow_new_parts():
    m = Message(U, (Text("水" * 8),))
    assert (m.tokens(CHARS), m.tokens(CJK), m.tokens(CHARS)) == (2, 8, 2)
    m.parts = (Text("x" * 40),)
    assert m.tokens(CHARS) == 10


def test_parts_may_be_made_on_demand():
    made = []

    def parts():
        made.append(1)
        return (Text("abcd"),)

    m = Message(U, parts)
    assert (m.text, m.tokens(CHARS), m.tokens(CHARS), len(made)) == ("abcd", 1, 1, 2)


def test_arguments_text():
    assert arguments_text({"a": [1, 2.0], "b": None}) == '{"a":[1,2],"b":null}'
    assert arguments_text('{"torn') == '{"torn'
    assert arguments_text(None) == ""


def test_tiktoken_unknown_encoding():
    with pytest.raises(UsageError, match="no encoding 'nonsense'"):
        tiktoken_estimator("nonsense")


def test_every_estimator_travels_to_other_processes(monkeypatch):
    fake = types.SimpleNamespace(get_encoding=lambda _: types.SimpleNamespace(encode_ordinary=str.split))
    monkeypatch.setitem(sys.modules, "tiktoken", fake)
    assert tiktoken_estimator("o200k_base").quarters("two words") == 8
    for estimator in (*ESTIMATORS.values(), tiktoken_estimator("o200k_base")):
        assert (
            pickle.loads(pickle.dumps(dataclasses.replace(settings(), estimator=estimator))).estimator.name
            == estimator.name
        )


def test_cut_worked_example():
    messages = talk((U, 10), (A, 10), (U, 10), (A, 10))
    assert find_cut_point(messages, 0, 4, settings(20)) == CutPoint(2, -1, False, 2)
    assert find_cut_point(messages, 0, 4, settings(5)) == CutPoint(3, 2, True, 3)
    assert find_cut_point(messages, 0, 4, settings(41)) == CutPoint(0, -1, False, None)
    assert find_cut_point(messages, 0, 4, settings(40)) == CutPoint(0, -1, False, 0)
    assert find_cut_point(messages[:0], 0, 0, settings(1)) == CutPoint(0)


def test_cut_points_and_turn_starts():
    roles = [U, A, T, "system", "bashExecution", "custom", "branchSummary", "other"]
    messages = [message(r) for r in roles]
    assert find_valid_cut_points(messages, 0, 8) == [0, 1, 4, 5, 6]
    assert find_valid_cut_points(messages, 0, 8, repair=False) == [0, 1]
    assert [find_turn_start(messages, i, 0) for i in range(8)] == [0, 0, 0, 0, 4, 5, 6, 6]
    assert [find_turn_start(messages, i, 0, repair=False) for i in range(8)] == [0] * 8
    assert find_turn_start(messages, 3, 1) == -1
    messages[0].hidden = True
    assert find_valid_cut_points(messages, 0, 2) == [1]
    assert find_turn_start(messages, 1, 0) == -1


@pytest.mark.parametrize(("tokens", "expected"), [(183616, False), (183617, True)])
def test_trigger(tokens, expected):
    assert should_compact(tokens, CompactionSettings()) is expected
    assert should_compact(tokens, CompactionSettings(enabled=False)) is False


def test_context_is_anchored_on_the_last_usage():
    messages = [
        message(U),
        message(A, usage=500),
        message(U),
        message(A, usage=900),
        message(T, 7),
        message(U, 3),
    ]
    found = estimate_context_tokens(messages, CHARS)
    assert (found.tokens, found.usage_tokens, found.trailing_tokens, found.last_usage_index) == (
        910,
        900,
        10,
        3,
    )
    found = estimate_context_tokens(messages[:1] + messages[4:], CHARS)
    assert (found.tokens, found.usage_tokens, found.trailing_tokens, found.last_usage_index) == (
        20,
        0,
        20,
        None,
    )


def test_system_patches_overlay_each_other():
    first = SystemPatch("base", (("a", "1"), ("b", "2")), ({"name": "x"}, {"name": "y"}))
    second = SystemPatch("", (("a", None), ("b", "3")), ({"name": "z"},), ("x",))
    assert replay_system([first, second]) == SystemPatch(
        "base", (("b", "3"),), ({"name": "y"}, {"name": "z"})
    )
    messages = [Message("system", (p,), kind="system_patch") for p in (first, second)]
    one = Message("system", (replay_system([first, second]),))
    assert estimate_context_tokens(messages, CHARS).tokens == one.tokens(CHARS)


def test_file_operations():
    calls = [
        ("read", "b"),
        ("read", "a"),
        ("write", "c"),
        ("edit", "a"),
        ("bash", "d"),
        ("Read", "e"),
        ("read", ""),
    ]
    ops = FileOperations()
    extract_file_ops_from_message(Message(A, tuple(ToolCall(None, n, {"path": p}) for n, p in calls)), ops)
    extract_file_ops_from_message(
        Message(A, (ToolCall(None, "read", "text"), ToolCall(None, "read", {"path": 7}))), ops
    )
    assert (ops.read, ops.written, ops.edited) == ({"a", "b"}, {"c"}, {"a"})
    assert compute_file_lists(ops) == (["b"], ["a", "c"])


def test_paths_are_sorted_as_javascript_sorts():
    assert compute_file_lists(FileOperations({"\uff5e", "\U0001f600", "z", "a"})) == (
        ["a", "z", "\U0001f600", "\uff5e"],
        [],
    )


# -------------------------------------------------------------------------------------- plans
def test_plan_of_a_clean_cut():
    messages = talk((U, 10), (A, 10), (U, 10), (A, 10))
    for plan in both(messages, 20):
        assert shape(plan) == (2, 0, 2)
        assert (plan.is_split_turn, plan.tokens_before, plan.tokens_kept, plan.previous_summary) == (
            False,
            40,
            20,
            None,
        )


def test_plan_of_a_split_turn():
    messages = talk((U, 10), (A, 10), (U, 10), (A, 10), (T, 10), (A, 10))
    for plan in both(messages, 10):
        assert shape(plan) == (2, 3, 1)
        assert plan.is_split_turn


def test_a_previous_summary_is_neither_summarised_nor_kept():
    messages = [summary(), *talk((U, 10), (A, 10), (U, 10), (A, 10))]
    for plan in both(messages, 20):
        assert shape(plan) == (2, 0, 2)
        assert plan.previous_summary == "## Goal\nOld."
        assert plan.tokens_before == 43


@pytest.mark.parametrize("repair", [True, False])
@pytest.mark.parametrize(
    ("messages", "branch", "sub"),
    [
        ([], "empty_messages", None),
        ([summary()], "tail_is_summary", None),
        ([*talk((U, 9), (A, 9)), summary()], "tail_is_summary", None),
        (talk((T, 30), (T, 30)), "nothing_to_summarize", "no_valid_cut_points"),
        (talk((U, 5), (A, 5)), "nothing_to_summarize", "total_below_keep_recent"),
        (talk((U, 30), (A, 5)), "nothing_to_summarize", "cut_pinned_at_zero"),
    ],
)
def test_skips(messages, branch, sub, repair):
    found = prepare_compaction(messages, settings(20, repair=repair))
    assert isinstance(found, NoCompaction)
    assert (found.branch, found.sub) == (branch, sub)


# ------------------------------------------------------------------------------------ repairs
def test_R1_a_tail_of_results_above_keep_recent():
    messages = talk((U, 10), (A, 10), (U, 10), (A, 10, "c"), (T, 500, "c"))
    repaired, seed = both(messages, 100)
    assert shape(repaired) == (2, 1, 2)
    assert (seed.branch, seed.sub) == ("nothing_to_summarize", "cut_pinned_at_zero")


def test_R1_true_cause_when_the_tail_reaches_the_first_message():
    messages = talk((U, 1), (T, 500))
    repaired, seed = both(messages, 100)
    assert (repaired.sub, seed.sub) == ("tail_exceeds_keep_recent", "cut_pinned_at_zero")


def test_R3_file_lists_are_carried_on():
    old = FileOperations(read={"r", "both"}, edited={"e"})
    new = Message(
        A, (Text("x" * 40), ToolCall(None, "edit", {"path": "both"}), ToolCall(None, "read", {"path": "n"}))
    )
    messages = [summary(files=old), message(U), new, message(U), message(A)]
    repaired, seed = both(messages, 20)
    assert compute_file_lists(repaired.file_ops) == (["n", "r"], ["both", "e"])
    assert compute_file_lists(seed.file_ops) == (["n"], ["both"])
    assert (old.read, old.edited) == ({"r", "both"}, {"e"})


def test_R7_a_late_result_stays_with_its_call():
    messages = talk((U, 10), (A, 10), (U, 10), (A, 10, "c"), (U, 10), (A, 10), (T, 5, "c"), (A, 10))
    repaired, seed = both(messages, 25)
    assert repaired.retained_tail[0] is messages[3]
    assert seed.retained_tail[0] is messages[5]


def test_R7_ids_that_return_in_every_turn():
    messages = talk((U, 10), (A, 10, "c"), (T, 10, "c"), (U, 10), (A, 10, "c"), (T, 10, "c"), (A, 10))
    for plan in both(messages, 20):
        assert plan.retained_tail[0] is messages[6]
    assert joined_start(messages, 4) == 4
    assert joined_start(messages, 5) == 4
    assert cut_obstacles(messages) == [None, None, "tool result", None, None, "tool result", None]


def test_R7_messages_of_one_group_stay_together():
    messages = talk((U, 10), (A, 10), (U, 10), (A, 10), (A, 10), (A, 10))
    for m in messages[3:]:
        m.group = "response"
    repaired, seed = both(messages, 10)
    assert repaired.retained_tail[0] is messages[3]
    assert seed.retained_tail[0] is messages[5]
    assert cut_obstacles(messages)[3:] == [None, "group", "group"]
    assert cut_obstacles(messages, repair=False)[3:] == [None, None, None]


def test_R7_forward_when_going_back_would_keep_too_much():
    messages = talk((A, 100, "c"), (U, 10), (A, 10), (T, 10, "c"), (U, 10), (A, 10))
    repaired, seed = both(messages, 40)
    assert repaired.retained_tail[0] is messages[4]
    assert seed.retained_tail[0] is messages[2]


@pytest.mark.parametrize("role", ["bashExecution", "custom", "branchSummary"])
def test_R11_other_messages_start_turns_too(role):
    messages = [message(U), message(A), message(role), message(A), message(A)]
    repaired, seed = both(messages, 20)
    assert (shape(repaired), repaired.is_split_turn) == ((2, 1, 2), True)
    assert (shape(seed), seed.is_split_turn) == ((0, 3, 2), True)
    repaired, seed = both(messages, 30)
    assert (shape(repaired), repaired.is_split_turn) == ((2, 0, 3), False)
    assert shape(seed) == (0, 3, 2)


def test_R12_a_summary_at_the_end_of_a_session_is_not_compacted_again():
    kept = talk((U, 10), (A, 10), (U, 10), (A, 10))
    repaired = prepare_compaction([summary(at_end=True), *kept], settings(20))
    assert (repaired.branch, repaired.sub) == ("tail_is_summary", None)
    assert repaired.figures == {"msgs": 5, "tail_head": "## Goal\nOld."}
    assert isinstance(prepare_compaction([summary(), *kept], settings(20)), CompactionPreparation)


def test_zero_token_messages_do_not_reach_keep_recent_zero():
    messages = [message(U), message(A), message(U), Message(A, ())]
    repaired, seed = both(messages, 0)
    assert repaired.retained_tail[0] is messages[2]
    assert seed.retained_tail[0] is messages[3]


def test_a_withdrawn_attempt_takes_its_request_along():
    messages = [
        *talk((U, 10), (A, 10), (U, 30)),
        *(Message(A, (Text("x"),), hidden=True, kind=WITHDRAWN) for _ in range(2)),
    ]
    plan = prepare_compaction(messages, settings(20))
    assert isinstance(plan, CompactionPreparation)
    assert shape(plan) == (2, 1, 2)


def test_the_figures_of_a_skip():
    messages = talk((U, 30), (A, 4), (T, 3), (A, 2))
    found = prepare_compaction(messages, settings(35))
    assert found.figures == {
        "msgs": 4,
        "est_total": 39,
        "compactable": 4,
        "keep_recent": 35,
        "first_kept": 0,
        "turn_start": -1,
        "split": False,
        "user": 1,
        "asst": 2,
        "est_first": 30,
        "est_rest": 9,
        "top3": [(0, 30), (1, 4), (2, 3)],
        "head_roles": ["U", "A", "T", "A"],
    }
    assert found.estimate.tokens == 39


# --------------------------------------------------------------------------------- properties
IDS = st.sampled_from([None, "a", "b", "c"])
ROWS = st.tuples(
    st.sampled_from([U, A, A, T, T, "system", "custom"]),
    st.integers(0, 12),
    IDS,
    st.sampled_from([None, None, None, 1, 2]),
    st.sampled_from([False, False, False, False, True]),
)


@st.composite
def conversations(draw):
    messages = []
    for number, (role, tokens, id, group, hidden) in enumerate(draw(st.lists(ROWS, max_size=14))):
        made = message(
            role,
            tokens + 2,
            call=id if role == A else None,
            result=id if role == T else None,
            line=number + 1,
        )
        made.group = (group, number // 5) if group else None
        made.hidden = hidden
        messages.append(made)
    return messages


@given(conversations())
def test_obstacles_say_exactly_where_a_cut_parts_nothing(messages):
    obstacles = cut_obstacles(messages)
    for i, m in enumerate(messages):
        valid = m.role in CUT_ROLES and not m.hidden
        assert (obstacles[i] is None) == (valid and joined_start(messages, i) == i)
    assert [o is None for o in cut_obstacles(messages, repair=False)] == [
        m.role in (U, A) and not m.hidden for m in messages
    ]


def parts_a_pair_or_group(messages, cut):
    """By its definition: a result answers the last call of its id before it."""
    before, after = (
        {m.group for m in part if m.group is not None} for part in (messages[:cut], messages[cut:])
    )
    if before & after:
        return True
    last = {}
    for i, m in enumerate(messages):
        for part in m.parts:
            if isinstance(part, ToolCall) and part.id is not None and m.role == A:
                last[part.id] = i
            elif isinstance(part, ToolResult) and part.id in last and last[part.id] < cut <= i:
                return True
    return False


@given(conversations())
def test_joined_start_is_the_nearest_whole_cut_before(messages):
    for i in range(len(messages)):
        whole = next(c for c in range(i, -1, -1) if c == 0 or not parts_a_pair_or_group(messages, c))
        assert joined_start(messages, i) == whole


@given(conversations(), st.integers(0, 150), st.booleans(), st.booleans())
def test_a_plan_partitions_the_messages_and_parts_nothing(messages, keep, repair, with_summary):
    first = [summary()] if with_summary else []
    plan = prepare_compaction([*first, *messages], settings(keep, repair=repair))
    if isinstance(plan, NoCompaction):
        return
    parts = (plan.messages_to_summarize, plan.turn_prefix_messages, plan.retained_tail)
    assert [*itertools.chain(*parts)] == messages
    assert plan.retained_tail
    assert any(m.told for m in itertools.chain(*parts[:2]))
    assert plan.is_split_turn == (plan.cut.turn_start_index >= 0)
    assert plan.retained_tail[0].role in CUT_ROLES
    if repair:
        assert not parts_a_pair_or_group(messages, plan.cut.first_kept_index)


@given(conversations(), st.integers(1, 150))
def test_the_tail_is_the_shortest_that_reaches_keep_recent_or_is_forced(messages, keep):
    """Without calls and groups: the first valid point at or after the message that reaches the budget."""
    for m in messages:
        m.group, m.hidden = None, False
        m.parts = (Text("x" * 4 * m.tokens(CHARS)),)
    plan = prepare_compaction(messages, settings(keep))
    if isinstance(plan, NoCompaction):
        return
    cut = plan.cut.first_kept_index
    points = find_valid_cut_points(messages, 0, len(messages))
    enough = [i for i in range(len(messages)) if sum(m.tokens(CHARS) for m in messages[i:]) >= keep]
    crossing = max(enough, default=0)
    assert cut == min((p for p in points if p >= crossing), default=points[-1])


@given(conversations(), st.integers(0, 150))
def test_the_kept_tail_alone_is_not_compacted_again(messages, keep):
    plan = prepare_compaction(messages, settings(keep))
    if isinstance(plan, CompactionPreparation):
        again = prepare_compaction([summary(), *plan.retained_tail], settings(keep))
        assert isinstance(again, NoCompaction)
