"""[COMPACT_NONE] lines: the seed's format field by field; every cause, its evidence, what helps."""

import ast
import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from test_compaction import conversations

from haocompact.compaction import (
    CHARS,
    COMPACTION_SUMMARY,
    CompactionPreparation,
    CompactionSettings,
    Message,
    NoCompaction,
    Text,
    ToolResult,
    prepare_compaction,
    should_compact,
)
from haocompact.diag import RIGHT, TITLES, Lines, Walk, compaction_line, diagnose, largest_keep_recent
from haocompact.pipeline import prepare

U, A, T = "user", "assistant", "toolResult"
NOON = datetime(2026, 1, 2, 12, 0, 0, 5000, tzinfo=UTC)


def talk(*rows):
    made = []
    for number, (role, tokens) in enumerate(rows):
        text = "x" * 4 * tokens
        parts = (ToolResult(f"c{number}", (text,)),) if role == T else (Text(text),)
        made.append(Message(role, parts, line=number + 1))
    return made


def summary(text="## Goal\nOld."):
    return Message(U, (Text(text),), kind=COMPACTION_SUMMARY, line=1)


def settings(keep=20, **more):
    return CompactionSettings(keep_recent_tokens=keep, estimator=CHARS, **more)


def told(messages, keep=20, **more):
    s = settings(keep, **more)
    return diagnose(messages, s, prepare_compaction(messages, s))


# ------------------------------------------------------------------------- the seed's own lines
def seed_line(messages, compactable, cut, keep, sub):
    """The f-string of the seed, character for character."""
    estimates = [(m.tokens(CHARS), i) for i, m in enumerate(compactable)]
    n_user = sum(1 for m in compactable if m.role == "user")
    n_asst = sum(1 for m in compactable if m.role == "assistant")
    e0 = estimates[0][0] if estimates else 0
    rest = sum(e for e, _ in estimates[1:])
    top3 = sorted(estimates, reverse=True)[:3]
    roles = " ".join(("T" if m.role == "toolResult" else m.role[0].upper()) for m in compactable[:10])
    big = "; ".join(f"idx{i}={e}" for e, i in top3)
    total = sum(m.tokens(CHARS) for m in messages)
    return (
        f"[COMPACT_NONE] branch=nothing_to_summarize sub={sub} "
        f"msgs={len(messages)} est_total={total} compactable={len(compactable)} "
        f"keep_recent={keep} "
        f"first_kept={cut[0]} turn_start={cut[1]} "
        f"split={cut[2]} user={n_user} asst={n_asst} "
        f"est_first={e0} est_rest={rest} top3=[{big}] head_roles=[{roles}]"
    )


@pytest.mark.parametrize("repair", [True, False])
@pytest.mark.parametrize(
    ("messages", "sub"),
    [
        (talk((T, 30), (T, 30)), "no_valid_cut_points"),
        (talk((U, 5), (A, 5), (T, 3)), "total_below_keep_recent"),
        (talk((U, 30), (A, 5)), "cut_pinned_at_zero"),
        (talk((U, 30), *[(A, 1), (T, 0)] * 6), "cut_pinned_at_zero"),
        ([summary(), *talk((U, 5), (A, 5))], "total_below_keep_recent"),
    ],
)
def test_nothing_to_summarize(messages, sub, repair):
    skip = prepare_compaction(messages, settings(repair=repair))
    compactable = messages[messages[0].kind == COMPACTION_SUMMARY :]
    assert compaction_line(skip) == seed_line(messages, compactable, (0, -1, False), 20, sub)


def test_tail_exceeds_keep_recent():
    messages = talk((U, 1), (T, 500))
    assert compaction_line(prepare_compaction(messages, settings())) == seed_line(
        messages, messages, (0, -1, False), 20, "tail_exceeds_keep_recent"
    )
    assert compaction_line(prepare_compaction(messages, settings(repair=False))) == seed_line(
        messages, messages, (0, -1, False), 20, "cut_pinned_at_zero"
    )


def test_the_other_branches_of_the_seed():
    assert compaction_line(prepare_compaction([], settings())) == "[COMPACT_NONE] branch=empty_messages"
    text = 'a\n"b" \x1b \u4e2d' + "x" * 90
    assert compaction_line(prepare_compaction([summary(text)], settings())) == (
        f"[COMPACT_NONE] branch=tail_is_summary msgs=1 tail_head={text[:60]!r}"
    )
    skip = NoCompaction("compactable_empty")
    assert compaction_line(skip) == "[COMPACT_NONE] branch=compactable_empty (上下文只剩旧摘要)"


def test_own_branches_have_the_same_shape():
    skip = NoCompaction("below_trigger", None, {"tokens": 5, "trigger": 9})
    assert compaction_line(skip) == "[COMPACT_NONE] branch=below_trigger tokens=5 trigger=9"


# ------------------------------------------------------------------------------------ plain words
def literals(path):
    """(branch, sub) constants of every NoCompaction that a module makes, and of its sub-branch functions."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("NoCompaction", "_no_segment")
        ):
            choices = (c for a in node.args[:3] if not isinstance(a, ast.Dict) for c in ast.walk(a))
            yield from (c.value for c in choices if isinstance(c, ast.Constant) and isinstance(c.value, str))
        if isinstance(node, ast.FunctionDef) and node.name == "_sub_branch":
            yield from (
                r.value.value
                for r in ast.walk(node)
                if isinstance(r, ast.Return) and isinstance(r.value, ast.Constant)
            )


FIGURES = {
    "tokens": 5,
    "trigger": 9,
    "compactable": 3,
    "keep_recent": 20,
    "est_first": 1,
    "est_rest": 2,
    "summary_tokens": 7,
    "removed_tokens": 6,
    "seconds": 3,
    "cooldown": 60,
    "tail_keep": 6,
    "msgs": 4,
}
NAMES = {
    n for p in sorted((ROOT / "haocompact").rglob("*.py")) for n in literals(p) if re.fullmatch("[a-z_]+", n)
}


def test_the_known_causes_are_all_there():
    assert {
        "empty_messages",
        "tail_is_summary",
        "nothing_to_summarize",
        "no_valid_cut_points",
        "total_below_keep_recent",
        "cut_pinned_at_zero",
        "tail_exceeds_keep_recent",
        "no_gain",
        "below_trigger",
        "disabled",
        "cooldown",
    } <= NAMES


@pytest.mark.parametrize("name", sorted(NAMES - {"nothing_to_summarize"}))
def test_every_cause_has_a_sentence(name):
    for skip in (NoCompaction(name, None, FIGURES), NoCompaction("nothing_to_summarize", name, FIGURES)):
        found = diagnose(talk((U, 1)), settings(), skip)
        assert found.explanation.endswith(".")
        assert found.explanation[0].isupper() or found.explanation[0].isdigit()
        assert found.suggestions
        assert found.cause in TITLES


@pytest.mark.parametrize(
    ("messages", "keep", "cause", "explanation", "suggestions"),
    [
        ([], 20, "empty", "The transcript holds no message.", (RIGHT,)),
        (
            [summary()],
            20,
            "only_summary",
            "The conversation is nothing but a summary: there is nothing new to compact.",
            (RIGHT,),
        ),
        (
            [*talk((U, 30)), summary()],
            20,
            "tail_is_summary",
            "The last thing in the conversation is a summary: there is nothing new to compact.",
            (RIGHT,),
        ),
        (
            [Message(U, (Text("old"),), kind=COMPACTION_SUMMARY, line=3, at_end=True), *talk((U, 9), (A, 9))],
            5,
            "tail_is_summary",
            "The last thing that was stored is a compaction: 2 messages after its summary were kept by it, and "
            "nothing has been added since.",
            (RIGHT,),
        ),
        (
            talk((T, 30), (T, 30)),
            20,
            "no_valid_cut_points",
            "No message could start a kept tail: a tool result can't stand without its call, and nothing else is "
            "there.",
            (RIGHT,),
        ),
        (
            talk((U, 5), (A, 6), (T, 3)),
            20,
            "below_keep_recent",
            "All 3 messages together are about 14 tokens, fewer than the 20 that are always kept.",
            (
                "--keep-recent 9 is the largest value that compacts: 1 message of about 5 tokens would be summarised",
            ),
        ),
        (
            [summary(), *talk((U, 5), (A, 6))],
            2000,
            "below_keep_recent",
            "All 2 messages after the summary together are about 11 tokens, fewer than the 2,000 that are always "
            "kept.",
            (
                "--keep-recent 6 is the largest value that compacts: 1 message of about 5 tokens would be summarised",
            ),
        ),
        (
            talk((U, 30_000), (A, 5)),
            20_000,
            "pinned_by_first_message",
            "The kept part reaches 20,000 tokens only with the first message (line 1), which has about 30,000 (all "
            "others 5): nothing stands before it.",
            (
                "--keep-recent 5 is the largest value that compacts: 1 message of about 30,000 tokens would be "
                "summarised",
            ),
        ),
        (
            talk((U, 1), (T, 500)),
            20,
            "tail_exceeds_keep_recent",
            "What must stay together at the end is larger than 20 tokens and reaches back to the first "
            "message: nothing stands before it.",
            (RIGHT,),
        ),
    ],
)
def test_explanations(messages, keep, cause, explanation, suggestions):
    found = told(messages, keep)
    assert (found.cause, found.explanation, found.suggestions) == (cause, explanation, suggestions)


def test_a_plan_is_explained_too():
    found = told(talk((U, 10), (A, 10), (U, 10), (A, 10)))
    assert found.cause is None
    assert found.explanation == "2 messages would be summarised and 2 kept (about 20 tokens)."
    assert found.suggestions == ()


def test_the_heaviest_messages_are_named():
    found = told(talk((U, 1), (A, 9), (T, 40), (A, 0), (U, 9)), 90)
    assert found.heaviest == ((3, T, 40), (2, A, 9), (5, U, 9))


# ------------------------------------------------------------------------------------ what helps
CONVERSATIONS = st.lists(st.tuples(st.sampled_from([U, A, A, T]), st.integers(0, 12)), max_size=9).map(
    lambda rows: talk(*rows)
)


@given(st.one_of(CONVERSATIONS, conversations()), st.booleans(), st.booleans())
def test_the_largest_keep_recent_works_and_the_next_does_not(messages, repair, with_summary):
    messages = [summary(), *messages] if with_summary else messages
    s = settings(repair=repair)
    total = sum(m.tokens(CHARS) for m in messages)
    works = [
        k
        for k in range(total + 2)
        if isinstance(prepare_compaction(messages, settings(k, repair=repair)), CompactionPreparation)
    ]
    found = largest_keep_recent(messages, s)
    assert (found is None) == (works == [])
    if found is not None and total + 1 not in works:  # a result before the first valid point goes at any size
        assert found == max(works)


OPTIONS = {"--keep-recent": "keep_recent_tokens", "--tail-keep": "tail_keep", "--window": "context_window",
           "--reserve": "reserve_tokens", "--strategy": "strategy"}  # fmt: skip


def followed(suggestion, s):
    """The settings of a suggestion: the options that stand before its explanation."""
    words = suggestion.split(":")[0].split()
    given = {OPTIONS[w]: v for w, v in zip(words, [*words[1:], ""], strict=True) if w in OPTIONS}
    return replace(s, **{k: int(v) if v.isdigit() else v for k, v in given.items()})


@given(CONVERSATIONS, st.integers(0, 80), st.sampled_from(["keep-recent", "segment"]), st.integers(1, 5))
def test_every_suggestion_works_when_it_is_followed(messages, keep, strategy, tail):
    s = settings(keep, strategy=strategy, tail_keep=tail)
    outcome = prepare(messages, s)
    found = diagnose(messages, s, outcome)
    if isinstance(outcome, CompactionPreparation):
        assert found.suggestions == ()
    elif found.suggestions == (RIGHT,):
        tries = (
            settings(k, strategy=n, tail_keep=t) for k in range(0, 120, 3) for n in STRATEGIES for t in (1, 3)
        )
        if found.cause not in ("tail_is_summary", "only_summary"):
            assert not any(isinstance(prepare(messages, t), CompactionPreparation) for t in tries)
    else:
        for suggestion in found.suggestions:
            assert isinstance(prepare(messages, followed(suggestion, s)), CompactionPreparation), suggestion


STRATEGIES = ("keep-recent", "segment")


def test_past_the_trigger():
    messages, s = talk((U, 30), (A, 30), (U, 30)), settings(context_window=1000, reserve_tokens=100)
    skip = NoCompaction("below_trigger", None, {"tokens": 90, "trigger": 900})
    found = diagnose(messages, s, skip)
    assert found.explanation == "The context has 90 tokens, not more than the trigger of 900."
    left_out, window, reserve = found.suggestions
    assert left_out == "leave out --if-needed: 2 messages of about 60 tokens would be summarised"
    for suggestion in (window, reserve):
        tried = followed(suggestion, s)
        assert should_compact(90, tried)
        smaller = replace(tried, reserve_tokens=tried.reserve_tokens - 1)
        assert not should_compact(90, smaller)


def test_a_tail_keep_that_works_is_found():
    messages = talk((U, 9), (A, 9), (U, 9), (A, 9), (U, 9), (A, 9))
    s = settings(200, strategy="segment", tail_keep=4)
    found = diagnose(messages, s, prepare(messages, s))
    assert found.cause == "no_segment"
    assert found.suggestions == (
        "--tail-keep 2 is the largest value that compacts: 2 messages of about 18 tokens would be summarised",
        "--strategy keep-recent --keep-recent 45 is the largest value that compacts: 1 message of about 9 tokens "
        "would be summarised",
    )  # fmt: skip


def test_what_only_the_seed_skips_is_told():
    messages = talk((U, 30), (A, 30), (U, 9), (A, 5), (T, 500))
    assert told(messages).cause is None
    found = told(messages, repair=False)
    assert found.cause == "pinned_by_first_message"
    assert found.suggestions[0].startswith("leave out --compat seed: 3 messages of about 69 tokens")


@pytest.mark.parametrize(
    ("branch", "figures", "suggestion"),
    [
        ("cooldown", {"seconds": 20, "cooldown": 60.0}, "wait 40 s more, or leave out --cooldown"),
        ("disabled", {"tokens": 5}, "enabled=True in the settings"),
    ],
)
def test_what_helps_where_nothing_can_be_tried(branch, figures, suggestion):
    assert diagnose(talk((U, 1)), settings(), NoCompaction(branch, None, figures)).suggestions == (
        suggestion,
    )


# --------------------------------------------------------------------------------------- evidence
def test_how_the_context_is_known():
    messages = talk((U, 10), (A, 10), (U, 10), (A, 10), (A, 7), (U, 5))
    messages[1].usage = 1000
    messages[3].usage_note = "the turn ended with aborted"
    messages[4].usage_note = "all figures are zero"
    account = told(messages).account
    assert (account.tokens, account.usage_tokens, account.trailing_tokens) == (1032, 1000, 32)
    assert (account.usage_line, account.estimated) == (2, 4)
    assert account.rejected == (
        Lines("the turn ended with aborted", 1, (4,)),
        Lines("all figures are zero", 1, (5,)),
    )


def test_without_a_report_everything_is_estimated():
    account = told(talk((U, 10), (A, 10))).account
    assert (account.tokens, account.usage_line, account.estimated, account.rejected) == (20, None, 2, ())


@pytest.mark.parametrize(
    ("messages", "keep", "walk"),
    [
        (talk((U, 10), (A, 10), (U, 10), (A, 10)), 20, Walk(20, 3, None, 3)),
        (talk((U, 10), (A, 10), (T, 10), (A, 10)), 20, Walk(20, 3, "tool result", 4)),
        (talk((U, 10), (A, 10), (T, 90)), 20, Walk(90, 3, "tool result", 2)),
        (talk((U, 10), (A, 10)), 90, Walk(20, None, None, 1)),
    ],
)
def test_where_the_walk_from_the_tail_stopped(messages, keep, walk):
    assert told(messages, keep).walk == walk


def test_why_others_are_no_cut_points():
    messages = talk((U, 1), *[(A, 1), (T, 9)] * 7, (A, 1))
    for message in messages[3:6]:
        message.group = "one"
    found = told(messages)
    assert (found.valid, found.obstacles) == (
        Lines("valid", 8, (1, 2, 4, 8, 10)),
        (Lines("tool result", 7, (3, 5, 7, 9, 11)), Lines("group", 1, (6,))),
    )


@given(st.one_of(CONVERSATIONS, conversations()), st.integers(0, 40))
def test_the_evidence_agrees_with_the_decision(messages, keep):
    s = settings(keep)
    outcome = prepare_compaction(messages, s)
    found = diagnose(messages, s, outcome)
    if found.walk is None:
        return
    assert found.valid.count + sum(g.count for g in found.obstacles) == len(messages)
    assert (found.walk.stopped_line is None) == (sum(m.tokens(CHARS) for m in messages) < max(keep, 1))
    if isinstance(outcome, CompactionPreparation):
        assert found.walk.cut_line == outcome.retained_tail[0].line


def test_suggested_options_exist():
    text = (ROOT / "haocompact" / "diag.py").read_text("utf-8")
    options = set(re.findall(r"--[a-z][a-z-]+", text))
    cli = (ROOT / "haocompact" / "cli.py").read_text("utf-8")
    assert options
    for option in options:
        assert f'"{option}"' in cli or re.search(rf"^    {option[2:].replace('-', '_')}: ", cli, re.M), option


def test_the_suggestion_makes_compact_compact(tmp_path):
    from haocompact.files import Source
    from haocompact.pipeline import Compacted, Request, compact, explain, plan
    from haocompact.records import dump

    lines = (
        dump({"role": role, "content": f"{role} {i} " + "bean " * 100}) for i in range(8) for role in (U, A)
    )
    source = Source("-", b"\n".join(lines) + b"\n")
    suggestion, segment = explain(plan(source, Request())).suggestions
    assert segment.startswith("--strategy segment")
    keep = int(re.match(r"--keep-recent (\d+) ", suggestion)[1])
    assert isinstance(compact(source, Request(CompactionSettings(keep_recent_tokens=keep))), Compacted)
