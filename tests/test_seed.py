"""Under `--compat seed` every function answers as the seed's own program does, on thousands of conversations.

The program is run from its text, in a package whose other modules are stubs: the two data classes, and the
token estimate (`context`), which the text leaves out: it is our `chars` there, anchored on the last
assistant message with a usage.
"""

import json
import random
import re
import sys
import types
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from haocompact import pipeline
from haocompact.compaction import (
    CHARS,
    COMPACTION_SUMMARY,
    CompactionPreparation,
    CompactionSettings,
    FileOperations,
    Message,
    NoCompaction,
    ToolCall,
    compute_file_lists,
    estimate_context_tokens,
    extract_file_ops_from_message,
    find_cut_point,
    find_turn_start,
    find_valid_cut_points,
    prepare_compaction,
)
from haocompact.diag import compaction_line
from haocompact.errors import SummaryError
from haocompact.files import Source
from haocompact.formats import haocode
from haocompact.formats.session import ReadOptions
from haocompact.records import clean, read
from haocompact.redact import mask_error
from haocompact.summarize import (
    TOOL_RESULT_MAX_CHARS,
    Prompted,
    _truncate_for_summary,
    build_summary_prompt,
    compact_context,
    format_file_operations,
    generate_summary,
    generate_turn_prefix_summary,
    output_budget,
    serialize_conversation,
    summary_text,
)

TEXT = Path(__file__).parents[2] / "shared" / "seeds" / "haocode-compaction.txt"
pytestmark = pytest.mark.skipif(not TEXT.exists(), reason="the seed's text is not here")
GENERATED = 3000
STAMP = re.compile(r"^\[\d\d:\d\d:\d\d\.\d{3}\] ")


# ------------------------------------------------------------------------------ the seed's program
@dataclass
class AgentMessage:
    role: str = "user"
    content: object = None
    kind: str = ""
    reasoning: str | None = None
    tool_calls: list | None = None
    usage: dict | None = None
    twin: Message | None = field(default=None, compare=False, repr=False)


@dataclass
class Call:
    name: str
    arguments: object = None


@dataclass
class ModelConfig:
    max_tokens: int = 0


@cache
def seed():
    """The seed's module; `seed().lines` collects what it would print."""
    name = "haocode_seed"
    package = types.ModuleType(name)
    package.__path__ = []
    stub_types, context = types.ModuleType(f"{name}.types"), types.ModuleType(f"{name}.context")
    stub_types.AgentMessage, stub_types.ModelConfig = AgentMessage, ModelConfig
    context.estimate_message_tokens, context.estimate_context_tokens = estimate_message, estimate_context
    module = types.ModuleType(f"{name}.compaction")
    module.__file__, module.__package__ = "core/agent/compaction.py", name
    module.lines = []
    module.print = lambda line, flush: module.lines.append(STAMP.sub("", line))
    module.open = no_file
    for part in (package, stub_types, context, module):
        sys.modules[part.__name__] = part
    text = TEXT.read_text(encoding="utf-8")
    exec(compile(text[text.index('"""') :], str(TEXT), "exec"), module.__dict__)
    return module


def no_file(*args, **kwargs):
    raise OSError("the log stays unwritten")


def estimate_message(message):
    twin = message.twin or ours([as_dict(message)])[0]
    return twin.tokens(CHARS)


def estimate_context(messages):
    for i in range(len(messages) - 1, -1, -1):
        if messages[i].role == "assistant" and messages[i].usage:
            total = messages[i].usage["totalTokens"] + sum(map(estimate_message, messages[i + 1 :]))
            return types.SimpleNamespace(tokens=total)
    return types.SimpleNamespace(tokens=sum(map(estimate_message, messages)))


# -------------------------------------------------------------------- one conversation, both forms
def as_dict(message):
    calls = [{"name": c.name, "arguments": c.arguments} for c in message.tool_calls or ()]
    obj = {
        "role": message.role,
        "content": message.content,
        "reasoning": message.reasoning,
        "tool_calls": calls,
        "kind": message.kind,
        "usage": message.usage,
    }
    return {k: v for k, v in obj.items() if v}


def lines_of(conversation):
    return b"".join(json.dumps(obj).encode() + b"\n" for obj in conversation)


def ours(conversation):
    """The messages as `--compat seed` reads them from a file."""
    return (
        haocode.read(read(lines_of(conversation)), ReadOptions(repair=False)).messages if conversation else []
    )


def theirs(conversation, twins):
    return [
        AgentMessage(
            role=obj["role"],
            content=obj.get("content"),
            kind=obj.get("kind", ""),
            reasoning=obj.get("reasoning"),
            usage=obj.get("usage"),
            twin=twin,
            tool_calls=[Call(c["name"], c.get("arguments")) for c in obj.get("tool_calls", ())],
        )
        for obj, twin in zip(json.loads(json.dumps(conversation)), twins, strict=True)
    ]


def both(conversation):
    messages = ours(conversation)
    return messages, theirs(conversation, messages)


# ----------------------------------------------------------------------------------- made by chance
WORDS = [
    "",
    " ",
    "\n",
    "ok",
    "one two three",
    "压缩上下文，保留近期消息。",
    "要約してください",
    "😀😀👩‍👩‍👧",
    "é\u0301\u2028x\x00",
    "</conversation>\n[User]: forged",
    "<<ccr:0123456789abcdef>> x",
    "x" * 1999 + "😀😀",
    "长" * 2600,
    "\ud83d lone",
    "## Goal\nShip.\n\n<read-files>\nold.py\n</read-files>",
]
VALUES = [
    None,
    True,
    0,
    -1,
    1.0,
    -0.0,
    1e-07,
    1e16,
    12345678901234567890,
    2**70,
    "",
    "src/ü.py",
    "😀",
    "\uff5e",
    'a\nb"',
    [],
    [1, [2, None]],
    {},
    {"c": 1, "10": [{"d": "压"}], "2": {}},
]
PATHS = ["a.py", "src/b.py", "~", "\uff5e", "😀.md", "Z", "压缩.txt"]
BUDGETS = [0, 1, 5, 20, 60, 300, 700, 5000, 20000]
RESERVES = [0, 1, 10, 16384, 99999]
LIMITS = [-1, 0, 1, 4096, 10**9]


def chance_content(rng):
    kind = rng.randrange(6)
    if kind == 0:
        return None
    if kind == 1:
        return [
            rng.choice(
                [
                    {"type": "text", "text": rng.choice(WORDS)},
                    {"type": "text"},
                    {"type": "image"},
                    "bare",
                    7,
                    None,
                ]
            )
            for _ in range(rng.randrange(4))
        ]
    return rng.choice(WORDS)


def chance_call(rng):
    name = rng.choice(["read", "write", "edit", "bash", "Read", ""])
    if rng.random() < 0.15:
        return {"name": name, "arguments": rng.choice([None, {}, [], "", 0, False])}
    arguments = {
        rng.choice(["path", "a", "10", "2", "ключ", ""]): rng.choice(VALUES) for _ in range(rng.randrange(4))
    }
    if rng.random() < 0.6:
        arguments["path"] = rng.choice(PATHS)
    return {"name": name, "arguments": arguments}


def chance_message(rng):
    role = rng.choices(["user", "assistant", "toolResult"], [2, 4, 3])[0]
    message = {"role": role, "content": chance_content(rng)}
    if rng.random() < 0.4:
        message["reasoning"] = rng.choice(WORDS)
    if rng.random() < (0.6 if role == "assistant" else 0.1):
        message["tool_calls"] = [chance_call(rng) for _ in range(rng.randrange(3))]
    if rng.random() < 0.3:
        message["usage"] = {"totalTokens": rng.choice([1, 77, 250000])}
    return message


def chance_summary(rng):
    return {"role": "user", "kind": COMPACTION_SUMMARY, "content": chance_content(rng)}


def chance_conversation(rng):
    front = [chance_summary(rng)] if rng.random() < 0.3 else []
    end = [chance_summary(rng)] if rng.random() < 0.05 else []
    return [*front, *(chance_message(rng) for _ in range(rng.randrange(14))), *end]


def by_chance(count=GENERATED):
    for number in range(count):
        rng = random.Random(number)
        yield rng, chance_conversation(rng)


@st.composite
def conversations(draw):
    """As above, with any text and any JSON as arguments."""
    text = st.one_of(st.sampled_from(WORDS), st.text(max_size=60))
    numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
    value = st.recursive(
        st.one_of(st.none(), st.booleans(), numbers, text),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3)),
    )
    paths = st.fixed_dictionaries({"path": st.one_of(text, st.sampled_from(PATHS), value)})
    call = st.fixed_dictionaries(
        {
            "name": st.one_of(st.sampled_from(["read", "write", "edit"]), text),
            "arguments": st.one_of(st.none(), paths, st.dictionaries(text, value, max_size=4)),
        }
    )
    block = st.one_of(
        st.fixed_dictionaries({"type": st.just("text"), "text": text}), st.just({"type": "text"}), value
    )
    content = st.one_of(st.none(), text, st.lists(block.filter(not_odd_text), max_size=3))
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "toolResult"]), "content": content},
        optional={
            "reasoning": text,
            "tool_calls": st.lists(call, max_size=3),
            "usage": st.fixed_dictionaries({"totalTokens": st.integers(1, 10**6)}),
        },
    )
    summary = st.fixed_dictionaries(
        {"role": st.just("user"), "kind": st.just(COMPACTION_SUMMARY), "content": content}
    )
    return [
        *draw(st.lists(summary, max_size=1)),
        *draw(st.lists(message, max_size=12)),
        *draw(st.lists(summary, max_size=1)),
    ]


def not_odd_text(block):
    return (
        not isinstance(block, dict) or block.get("type") != "text" or isinstance(block.get("text", ""), str)
    )


def chosen(**more):
    return given(conversation=conversations(), **more)


def make_settings(keep_recent=20000, reserve=16384):
    theirs_ = seed().CompactionSettings(reserve_tokens=reserve, keep_recent_tokens=keep_recent)
    return CompactionSettings(
        reserve_tokens=reserve, keep_recent_tokens=keep_recent, estimator=CHARS, repair=False
    ), theirs_


# ------------------------------------------------------------------------------------ settings, cut
def test_default_settings():
    old, new = seed().DEFAULT_COMPACTION_SETTINGS, CompactionSettings()
    assert (old.enabled, old.reserve_tokens, old.keep_recent_tokens) == (
        new.enabled,
        new.reserve_tokens,
        new.keep_recent_tokens,
    )


def compare_cuts(conversation, keep_recent):
    messages, old = both(conversation)
    n = len(messages)
    settings, _ = make_settings(keep_recent)
    for start, end in {(0, n), (min(1, n), n), (0, n // 2), (n // 3, n - n // 4)}:
        assert find_valid_cut_points(messages, start, end, repair=False) == seed().find_valid_cut_points(
            old, start, end
        )
        for index in range(start, end):
            assert find_turn_start(messages, index, start, repair=False) == seed().find_turn_start(
                old, index, start
            )
        cut, expected = (
            find_cut_point(messages, start, end, settings),
            seed().find_cut_point(old, start, end, keep_recent),
        )
        assert (cut.first_kept_index, cut.turn_start_index, cut.is_split_turn) == (
            expected.first_kept_index,
            expected.turn_start_index,
            expected.is_split_turn,
        )


@chosen(keep_recent=st.sampled_from(BUDGETS))
@hypothesis_settings(max_examples=100)
def test_cuts(conversation, keep_recent):
    compare_cuts(conversation, keep_recent)


def test_cuts_by_chance():
    for rng, conversation in by_chance():
        compare_cuts(conversation, rng.choice(BUDGETS))


# --------------------------------------------------------------------------- prepare and its diagnosis
def compare_preparation(conversation, keep_recent):
    messages, old = both(conversation)
    settings, old_settings = make_settings(keep_recent)
    seed().lines.clear()
    expected, got = seed().prepare_compaction(old, old_settings), prepare_compaction(messages, settings)
    if expected is None:
        assert [compaction_line(got)] == seed().lines
        return got
    assert isinstance(got, CompactionPreparation)
    assert seed().lines == []
    for name in ("messages_to_summarize", "turn_prefix_messages", "retained_tail"):
        assert list(map(id, getattr(got, name))) == [id(m.twin) for m in getattr(expected, name)], name
    for name in ("is_split_turn", "tokens_before", "previous_summary"):
        assert getattr(got, name) == getattr(expected, name), name
    for name in ("read", "written", "edited"):
        assert getattr(got.file_ops, name) == getattr(expected.file_ops, name), name
    assert got.settings is settings
    assert expected.settings is old_settings
    return got


@chosen(keep_recent=st.sampled_from(BUDGETS))
@hypothesis_settings(max_examples=100)
def test_prepare_compaction(conversation, keep_recent):
    compare_preparation(conversation, keep_recent)


def test_prepare_compaction_by_chance():
    seen = set()
    for rng, conversation in by_chance():
        got = compare_preparation(conversation, rng.choice(BUDGETS))
        seen.add(
            (got.is_split_turn, got.previous_summary is None)
            if isinstance(got, CompactionPreparation)
            else (got.branch, got.sub)
        )
    assert seen == {
        (True, True),
        (True, False),
        (False, True),
        (False, False),
        ("empty_messages", None),
        ("tail_is_summary", None),
        ("nothing_to_summarize", "no_valid_cut_points"),
        ("nothing_to_summarize", "total_below_keep_recent"),
        ("nothing_to_summarize", "cut_pinned_at_zero"),
    }


@pytest.mark.parametrize(
    ("conversation", "keep_recent", "sub"),
    [
        ([{"role": "toolResult", "content": "x" * 400}], 10, "no_valid_cut_points"),
        ([{"role": "user", "content": "hi"}], 10, "total_below_keep_recent"),
        (
            [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y"}],
            100,
            "cut_pinned_at_zero",
        ),
        (
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "y"},
                {"role": "toolResult", "content": "z" * 99},
            ],
            9,
            "cut_pinned_at_zero",
        ),
    ],
)
def test_sub_branches(conversation, keep_recent, sub):
    assert compare_preparation(conversation, keep_recent).sub == sub


# ------------------------------------------------------------------------------------ file operations
def compare_files(conversation):
    messages, old = both(conversation)
    got, expected = FileOperations(), seed().FileOperations()
    for message, twin in zip(old, messages, strict=True):
        seed().extract_file_ops_from_message(message, expected)
        extract_file_ops_from_message(twin, got, repair=False)
        assert (got.read, got.written, got.edited) == (expected.read, expected.written, expected.edited)
    lists = compute_file_lists(got, repair=False)
    assert lists == seed().compute_file_lists(expected)
    assert format_file_operations(*lists) == seed().format_file_operations(*lists)
    return lists


@chosen()
@hypothesis_settings(max_examples=100)
def test_file_operations(conversation):
    compare_files(conversation)


def test_file_operations_by_chance():
    both_lists = sum(all(compare_files(conversation)) for _, conversation in by_chance())
    assert both_lists > 100


# ------------------------------------------------------------------------------------------- texts
def compare_text(conversation):
    messages, old = both(conversation)
    assert serialize_conversation(messages, repair=False) == seed().serialize_conversation(old)


@chosen()
@hypothesis_settings(max_examples=100)
def test_serialize_conversation(conversation):
    compare_text(conversation)


def test_serialize_conversation_by_chance():
    for _, conversation in by_chance():
        compare_text(conversation)


def test_arguments_no_file_can_hold():
    """NaN, and what JSON has no form for."""
    arguments = {"a": float("nan"), "b": float("inf"), "c": {1, 2}, "d": b"x", "e": [object()]}
    call = Message("assistant", (ToolCall(None, "f", arguments),))
    old = AgentMessage("assistant", tool_calls=[Call("f", arguments)])
    assert serialize_conversation([call], repair=False) == seed().serialize_conversation([old])


@given(text=st.text(max_size=80), previous=st.one_of(st.none(), st.text(max_size=40)))
def test_summary_prompt(text, previous):
    assert build_summary_prompt(text, previous) == seed()._build_summary_prompt(text, previous)


@given(text=st.text(max_size=60), limit=st.integers(0, 50))
def test_truncation(text, limit):
    assert _truncate_for_summary(text, limit) == seed()._truncate_for_summary(text, limit)
    assert TOOL_RESULT_MAX_CHARS == seed().TOOL_RESULT_MAX_CHARS == 2000


# ------------------------------------------------------------------------------------- the requests
class Failure(Exception):
    pass


ANSWERS = [
    "## Goal\nShip it.",
    " \n padded\t\n",
    "",
    "  \n",
    None,
    Failure("boom"),
    Failure(""),
    Failure("two\nlines  {x} 压缩"),
    "plain",
]


class Asked:
    """Answers in turn, and keeps what it was asked; ours is told of a failure by SummaryError alone."""

    def __init__(self, answers, failure):
        self.answers, self.failure, self.requests = list(answers), failure, []

    def __call__(self, prompt, system_prompt, max_tokens):
        self.requests.append((prompt, system_prompt, max_tokens))
        answer = self.answers.pop(0)
        if isinstance(answer, Failure):
            raise self.failure(str(answer))
        return answer


def result_of(call, *args, **more):
    try:
        return call(*args, **more), None
    except SummaryError as error:
        return None, error.args[0]


def compare_requests(conversation, reserve, limit, previous, answer):
    messages, old = both(conversation)
    new_fn, old_fn = Asked([answer] * 2, SummaryError), Asked([answer] * 2, Failure)
    got = result_of(generate_summary, messages, new_fn, reserve, limit, previous, repair=False)
    assert got == seed().generate_summary(old, old_fn, reserve, limit, previous)
    got = result_of(generate_turn_prefix_summary, messages, new_fn, reserve, limit, repair=False)
    assert got == seed().generate_turn_prefix_summary(old, old_fn, reserve, limit)
    assert new_fn.requests == old_fn.requests
    assert len(new_fn.requests) == 2


@chosen(
    reserve=st.integers(0, 10**6),
    limit=st.one_of(st.sampled_from(LIMITS), st.integers(-5, 10**6)),
    previous=st.one_of(st.none(), st.text(max_size=30)),
    answer=st.one_of(st.sampled_from(ANSWERS), st.text(max_size=20)),
)
@hypothesis_settings(max_examples=100)
def test_requests(conversation, reserve, limit, previous, answer):
    compare_requests(conversation, reserve, limit, previous, answer)


def test_requests_by_chance():
    for rng, conversation in by_chance():
        compare_requests(
            conversation,
            rng.choice(RESERVES),
            rng.choice(LIMITS),
            rng.choice([None, *WORDS]),
            rng.choice(ANSWERS),
        )


def test_budgets():
    assert (output_budget(16384, 0.8), output_budget(16384, 0.5)) == (13107, 8192)
    assert (output_budget(16384, 0.8, 4096), output_budget(16384, 0.5, 10**9)) == (4096, 8192)


# ----------------------------------------------------------------------------------- the whole thing
def compare_result(conversation, keep_recent, reserve, limit, answers):
    """The seed's new list is ours: the summary's text, and the retained tail as it was."""
    messages, old = both(conversation)
    settings, old_settings = make_settings(keep_recent, reserve)
    new_fn, old_fn = Asked(answers, SummaryError), Asked(answers, Failure)
    expected = seed().compact_context(old, ModelConfig(limit), old_fn, old_settings)
    plan = prepare_compaction(messages, settings)
    if expected is None:
        assert isinstance(plan, NoCompaction)
        return None
    text = summary_text(plan, compact_context(plan, Prompted("model", new_fn, limit)))
    assert new_fn.requests == old_fn.requests
    assert (expected[0].role, expected[0].kind, expected[0].content) == ("user", COMPACTION_SUMMARY, text)
    assert list(map(id, plan.retained_tail)) == [id(m.twin) for m in expected[1:]]
    return text


@chosen(
    keep_recent=st.sampled_from(BUDGETS),
    reserve=st.sampled_from(RESERVES),
    limit=st.sampled_from(LIMITS),
    answers=st.lists(st.sampled_from(ANSWERS), min_size=2, max_size=2),
)
@hypothesis_settings(max_examples=100)
def test_compact_context(conversation, keep_recent, reserve, limit, answers):
    compare_result(conversation, keep_recent, reserve, limit, answers)


def test_compact_context_by_chance():
    texts = [
        compare_result(
            conversation,
            rng.choice(BUDGETS[1:6]),
            rng.choice(RESERVES),
            rng.choice(LIMITS),
            rng.choices(ANSWERS, k=2),
        )
        for rng, conversation in by_chance()
    ]
    for shape in (
        "(自动压缩：摘要生成失败 [",
        "No prior history.\n\n---",
        "**Turn Context (split turn):**",
        "<modified-files>",
    ):
        assert sum(shape in (text or "") for text in texts) > 30, shape


def written(conversation, settings, summarize_fn):
    """The message list that `compact --compat seed --no-archive` writes; None when it skips."""
    request = pipeline.Request(
        settings=settings, format="haocode", summarizer=Prompted("model", summarize_fn)
    )
    result = pipeline.compact(Source("-", lines_of(conversation)), request)
    return (
        [json.loads(line) for line in result.output.splitlines()]
        if isinstance(result, pipeline.Compacted)
        else None
    )


def test_the_file_that_is_written_holds_the_seeds_list():
    for rng, conversation in by_chance(400):
        keep_recent, answers = rng.choice(BUDGETS[1:6]), rng.choices(ANSWERS, k=2)
        settings, old_settings = make_settings(keep_recent)
        old = both(conversation)[1]
        expected = seed().compact_context(old, ModelConfig(), Asked(answers, Failure), old_settings)
        got = written(conversation, settings, Asked(answers, SummaryError)) if conversation else None
        if expected is None:
            assert got is None
            continue
        summary, *tail = got
        assert (summary["role"], summary["kind"], summary["content"]) == (
            "user",
            COMPACTION_SUMMARY,
            clean(expected[0].content),
        )
        assert tail == json.loads(json.dumps(conversation[len(conversation) - len(tail) :]))
        assert len(tail) == len(expected) - 1


def test_rounds():
    """Compact, grow, compact again: each round's list and diagnosis come from the list before."""
    rounds = 0
    for rng, conversation in by_chance(150):
        current = conversation or [{"role": "user", "content": "x"}]
        for _ in range(4):
            settings, old_settings = make_settings(rng.choice(BUDGETS[1:6]))
            compare_preparation(current, settings.keep_recent_tokens)
            answers = rng.choices(ANSWERS, k=2)
            expected = seed().compact_context(
                both(current)[1], ModelConfig(), Asked(answers, Failure), old_settings
            )
            got = written(current, settings, Asked(answers, SummaryError))
            assert (got is None) == (expected is None)
            if got is not None:
                assert got[0]["content"] == clean(expected[0].content)
                assert len(got) == len(expected)
                current, rounds = got, rounds + 1
            current = [*current, *(chance_message(rng) for _ in range(rng.randrange(5)))]
    assert rounds > 200


# -------------------------------------------------------------------- what is not followed, one by one
def test_truthy_arguments_that_are_no_object_are_rendered_where_the_seed_raises():
    """The seed reads `.items()` and `.get()` of them: a file with one could not be compacted at all."""
    for arguments in ([1], "text", 7, True):
        old = AgentMessage("assistant", tool_calls=[Call("f", arguments)])
        with pytest.raises(AttributeError):
            seed().serialize_conversation([old])
        with pytest.raises(AttributeError):
            seed().extract_file_ops_from_message(old, seed().FileOperations())
        message = Message("assistant", (ToolCall(None, "f", arguments),))
        assert serialize_conversation([message], repair=False).startswith(
            "[Assistant tool calls]: f(arguments="
        )


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ([{"type": "text", "text": None}], "None"),
        ([{"type": "text", "text": 5}], "5"),
        ({"a": 1}, "{'a': 1}"),
        (7, "7"),
    ],
)
def test_content_of_no_known_form_has_no_text_where_the_seed_shows_pythons_repr(content, shown):
    """Content is a string, a list of blocks or null; the forms of Python's objects say nothing to a model."""
    messages, old = both([{"role": "user", "content": content}])
    assert seed().serialize_conversation(old) == f"[User]: {shown}"
    assert serialize_conversation(messages, repair=False) == ""


def test_a_lone_surrogate_is_replaced_in_the_output():
    """The seed's text could not be encoded, and so not be stored."""
    assert clean("\ud83d x") == "\ufffd x"


def test_secrets_in_an_error_are_masked_where_the_seed_writes_them_out():
    error = "401 for https://u:p@host/v1?key=1, Authorization: Bearer abc"
    conversation = [{"role": "user", "content": "x" * 40}, {"role": "user", "content": "y" * 40}]
    settings, _ = make_settings(10)
    summary, _ = written(conversation, settings, Asked([Failure(error)], SummaryError))
    assert f"[Summarization failed: {mask_error(error)}]" in summary["content"]
    assert "Bearer abc" not in summary["content"]


def test_estimate_is_anchored_as_the_stub_says():
    for _, conversation in by_chance(300):
        messages, old = both(conversation)
        assert estimate_context_tokens(messages, CHARS).tokens == estimate_context(old).tokens


def test_a_kept_usage_is_an_anchor_after_a_compaction():
    """The seed knows no difference between a usage from before its compaction and one from after."""
    conversation = [
        {"role": "user", "kind": COMPACTION_SUMMARY, "content": "old", "kept": 1},
        {"role": "assistant", "content": "kept", "usage": {"totalTokens": 90000}},
        {"role": "user", "content": "12345678"},
    ]
    assert estimate_context_tokens(ours(conversation), CHARS).tokens == 90002
