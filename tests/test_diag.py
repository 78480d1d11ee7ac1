"""[COMPACT_NONE] lines: the seed's format field by field, the log and back, plain words, what helps."""

import ast
import re
import stat
import subprocess
import sys
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
)
from haocompact.diag import (
    LogEntry,
    append_log,
    compaction_line,
    diagnose,
    largest_keep_recent,
    log_line,
    parse_log_line,
)

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


# --------------------------------------------------------------------------------------- the log
def test_log_line():
    skip = NoCompaction("tail_is_summary", None, {"msgs": 1, "tail_head": "x"})
    assert log_line(skip, 'a "b".jsonl', NOON) == (
        "[2026-01-02T12:00:00.005+00:00] [COMPACT_NONE] branch=tail_is_summary msgs=1 tail_head='x'"
        ' source="a \\"b\\".jsonl"'
    )


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        (
            "[11:22:33.044] [COMPACT_NONE] branch=empty_messages",
            ("11:22:33.044", "empty_messages", None, None),
        ),
        (
            "[11:22:33.044] [COMPACT_NONE] branch=nothing_to_summarize sub=cut_pinned_at_zero msgs=3",
            ("11:22:33.044", "nothing_to_summarize", "cut_pinned_at_zero", None),
        ),
        (
            "[11:22:33.044] [COMPACT_NONE] branch=compactable_empty (上下文只剩旧摘要)",
            ("11:22:33.044", "compactable_empty", None, None),
        ),
        (
            "[11:22:33.044] [COMPACT_NONE] branch=nothing_to_summarize (diag failed: sub=x)",
            ("11:22:33.044", "nothing_to_summarize", None, None),
        ),
        (
            "[11:22:33.044] [COMPACT_NONE] branch=tail_is_summary tail_head='sub=x branch=y'",
            ("11:22:33.044", "tail_is_summary", None, None),
        ),
        (
            '[2026-01-02T12:00:00.005+00:00] [COMPACT_NONE] branch=a source="a\\\\b \\"c\\".jsonl"',
            ("2026-01-02T12:00:00.005+00:00", "a", None, 'a\\b "c".jsonl'),
        ),
        (
            '[11:22:33.044] [COMPACT_NONE] branch=empty_messages source="broken \\x"',
            ("11:22:33.044", "empty_messages", None, None),
        ),
        ('[11:22:33.044] [COMPACT_NONE] branch=a source="中"', ("11:22:33.044", "a", None, None)),
    ],
)
def test_parse_log_line(line, entry):
    assert parse_log_line(line) == LogEntry(*entry, line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "hello",
        "[11:22:33.044] [COMPACT_OK] branch=x",
        "[11:22:33.044] [COMPACT_NONE]",
        "[11:22:33.044] [COMPACT_NONE] branch=",
        "[11:22:33.044] [COMPACT_NONE] branch=\x1b[31m",
        "[COMPACT_NONE] branch=empty_messages",
        "[\x1b[31m] [COMPACT_NONE] branch=empty_messages",
        "x [11:22:33.044] [COMPACT_NONE] branch=empty_messages",
    ],
)
def test_foreign_lines_are_no_entries(line):
    assert parse_log_line(line) is None


@given(st.text(), st.text())
def test_no_line_breaks_the_parser(before, after):
    for line in (
        before,
        f"[11:22:33.044] [COMPACT_NONE] branch={before}",
        f'[1] [COMPACT_NONE] branch=x {before} source="{after}"',
    ):
        entry = parse_log_line(line)
        assert entry is None or entry.text == line


@given(st.text(), st.text(st.characters(categories=["L", "Cs", "Cc", "Zs", "Po"])))
def test_what_is_logged_is_read_back(text, path):
    line = log_line(NoCompaction("tail_is_summary", None, {"msgs": 1, "tail_head": text}), path, NOON)
    assert "\n" not in line
    entry = parse_log_line(line)
    assert (entry.time, entry.branch, entry.sub, entry.source) == (
        "2026-01-02T12:00:00.005+00:00",
        "tail_is_summary",
        None,
        path,
    )


def test_the_log_is_private_and_grows(tmp_path):
    path = tmp_path / "new" / "log"
    append_log(path, "one")
    append_log(path, "two \ud83d 中")
    assert path.read_text() == "one\ntwo ? 中\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    append_log(path, "three")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    with pytest.raises(OSError, match="directory"):
        append_log(tmp_path / "new", "x")


def test_many_processes_append_whole_lines(tmp_path):
    path = tmp_path / "log"
    script = (
        "import sys; from pathlib import Path; from haocompact.diag import append_log\n"
        "for i in range(200): append_log(Path(sys.argv[1]), sys.argv[2] * 3000)"
    )
    workers = [subprocess.Popen([sys.executable, "-c", script, path, c]) for c in "abcd"]
    assert [w.wait(60) for w in workers] == [0] * 4
    lines = path.read_text().splitlines()
    assert sorted(lines) == sorted(c * 3000 for c in "abcd" for _ in range(200))


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


@pytest.mark.parametrize(
    ("messages", "keep", "explanation", "suggestion"),
    [
        ([], 20, "The transcript holds no message.", "there is nothing to compact and that is right"),
        (
            [summary()],
            20,
            "The last thing in the conversation is a summary: there is nothing new to compact.",
            "there is nothing to compact and that is right",
        ),
        (
            talk((T, 30), (T, 30)),
            20,
            "No message could start a kept tail: there are only tool results.",
            "there is nothing to compact and that is right",
        ),
        (
            talk((U, 5), (A, 6), (T, 3)),
            20,
            "All 3 messages together are about 14 tokens, fewer than the 20 that are always kept.",
            "--keep-recent 9 is the largest value that compacts",
        ),
        (
            talk((U, 30), (A, 5)),
            20,
            "The kept part reaches 20 tokens only with the first message, which has about 30 (all others 5): "
            "nothing stands before it.",
            "--keep-recent 5 is the largest value that compacts",
        ),
        (
            talk((U, 1), (T, 500)),
            20,
            "What must stay together at the end is larger than 20 tokens and reaches back to the first "
            "message: nothing stands before it.",
            "there is nothing to compact and that is right",
        ),
    ],
)
def test_explanations(messages, keep, explanation, suggestion):
    found = told(messages, keep)
    assert (found.explanation, found.suggestions) == (explanation, (suggestion,))


def test_a_plan_is_explained_too():
    found = told(talk((U, 10), (A, 10), (U, 10), (A, 10)))
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


@given(CONVERSATIONS, st.integers(0, 80))
def test_the_suggestion_works_when_it_is_followed(messages, keep):
    (suggestion,) = told(messages, keep).suggestions or ("",)
    if match := re.match(r"--keep-recent (\d+) ", suggestion):
        assert isinstance(prepare_compaction(messages, settings(int(match[1]))), CompactionPreparation)
    elif suggestion:
        tries = (prepare_compaction(messages, settings(k)) for k in range(120))
        assert not any(isinstance(t, CompactionPreparation) for t in tries)


def test_suggested_options_exist():
    text = (ROOT / "haocompact" / "diag.py").read_text("utf-8")
    options = set(re.findall(r"--[a-z][a-z-]+", text))
    cli = (ROOT / "haocompact" / "cli.py").read_text("utf-8")
    assert options
    for option in options:
        assert f'"{option}"' in cli or re.search(rf"^    {option[2:].replace('-', '_')}: ", cli, re.M), option


def test_the_suggestion_makes_compact_compact(tmp_path):
    from haocompact.pipeline import Compacted, Request, Source, compact, explain, plan
    from haocompact.records import dump

    lines = (
        dump({"role": role, "content": f"{role} {i} " + "bean " * 100}) for i in range(8) for role in (U, A)
    )
    source = Source("-", b"\n".join(lines) + b"\n")
    (suggestion,) = explain(plan(source, Request())).suggestions
    keep = int(re.match(r"--keep-recent (\d+) ", suggestion)[1])
    assert isinstance(compact(source, Request(CompactionSettings(keep_recent_tokens=keep))), Compacted)
