"""--keep-rules: what a model's summary lacks of the rules is put back, word for word."""

import shlex
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haocompact.compaction import CompactionSettings, Message, Text, prepare_compaction
from haocompact.ledger import extract, with_rules
from haocompact.ledger.rules import holds
from haocompact.summarize import Command, Extract, Prompted, compact_context

RULES = [
    "Never push to the release branch.",
    "The upload limit is 40 MB and not negotiable.",
    "Nothing may be written to amber-db-7.",
    "接口超时一律不得超过 30 秒。",
]
BODY = "## Goal\nShip it\n\n## Constraints & Preferences\n- (none)\n\n## Next Steps\n1. Go on"


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def told(*texts: str) -> list[Message]:
    return [m for t in texts for m in (user(t), Message("assistant", (Text("Fine, I will go on."),)))]


def test_a_rule_that_is_missing_is_put_into_its_section():
    text = with_rules(BODY, told(*RULES), [], None)
    section = text.split("## Constraints & Preferences\n")[1].split("\n\n")[0]
    assert section.split("\n") == [f"- {rule}" for rule in RULES]
    assert text.startswith("## Goal\nShip it\n\n")
    assert text.endswith("\n\n## Next Steps\n1. Go on")


def test_a_summary_that_holds_them_stays_as_it_is():
    kept = BODY.replace("- (none)", "\n".join(f"- {rule}" for rule in RULES))
    assert with_rules(kept, told(*RULES), [], None) == kept
    assert with_rules(BODY, told("Fix the login page, please."), [], None) == BODY


def test_without_a_section_one_is_made_before_the_turn():
    turn = "\n\n---\n\n**Turn Context (split turn):**\n\n## Original Request\nx"
    text = with_rules("## Goal\nx" + turn, told(RULES[0]), [], None)
    assert text == f"## Goal\nx\n\n## Constraints & Preferences\n- {RULES[0]}" + turn


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("- The user: NEVER push to the release branch!", True),
        ("- pushing to the release branch is never allowed", True),
        ("- push to the release branch", False),
        ("- Never push.", False),
    ],
)
def test_what_counts_as_holding_a_rule(line, kept):
    assert holds(f"## Constraints\n{line}\n", RULES[0]) is kept


def test_values_must_be_there_exactly():
    assert not holds("- The upload limit is 4 MB and not negotiable.", RULES[1])
    assert holds("- not negotiable: upload limit 40 MB", RULES[1])


@pytest.mark.parametrize(
    "previous",
    [
        extract([*told(*RULES), Message("assistant", (Text("x " * 4000),))], [], None),
        BODY.replace("- (none)", "\n".join(f"* {rule}" for rule in RULES)),
        "# 摘要\n## 约束\n" + "\n".join(f"{i}. {rule}" for i, rule in enumerate(RULES, 1)),
    ],
    ids=["ledger", "model", "another language"],
)
def test_rules_of_the_previous_summary_are_kept_too(previous):
    text = with_rules(BODY, told("Go on with the next file."), [], previous)
    assert [rule for rule in RULES if rule not in text] == []
    again = with_rules(BODY, told("And the next one."), [], text)
    assert [rule for rule in RULES if rule not in again] == []


def test_a_rule_that_was_changed_comes_back_as_it_is_now():
    first = with_rules(BODY, told("The uploader retry limit is 5, never more."), [], None)
    text = with_rules(BODY, told("Actually, make the uploader retry limit 8, never more."), [], first)
    assert "retry limit 8" in text
    assert "retry limit is 5" not in text


def test_rules_come_from_those_who_may_set_them():
    assistant = Message("assistant", (Text("You must never touch src/a.py."),))
    tool = Message("toolResult", (Text("Never delete the table orders_7."),))
    assert with_rules(BODY, [user("Go on."), assistant, tool], [], None) == BODY


def test_no_more_than_a_third_of_a_summary():
    many = told(*(f"Never rename column c{i}_total in table t{i}." for i in range(400)))
    assert len(with_rules(BODY, many, [], None)) < len(BODY) + 4_100


@given(st.text(max_size=300), st.lists(st.sampled_from(RULES), max_size=4))
def test_whatever_the_model_wrote_the_rules_are_there(body, rules):
    text = with_rules(body, told(*rules), [], None)
    assert all(holds(text, rule) for rule in rules)
    assert with_rules(text, told(*rules), [], None) == text


# ------------------------------------------------------------------------------------- the whole way
def plan(*texts: str, **settings):
    messages = (*told(*texts), *told(*("Look at the next file. " * 40 for _ in range(4))))
    return prepare_compaction(messages, CompactionSettings(keep_recent_tokens=200, **settings))


FORGETS = Prompted("command", Command(shlex.join([sys.executable, "-c", f"print({BODY!r})"])))


def test_a_program_that_drops_the_rules():
    summary = compact_context(plan(*RULES), FORGETS)
    assert [rule for rule in RULES if rule not in summary.body] == []
    assert compact_context(plan(*RULES), FORGETS, keep_rules=False).body == BODY


def test_the_seed_knows_nothing_of_it():
    assert compact_context(plan(*RULES, repair=False), FORGETS).body == BODY


def test_the_offline_summary_has_them_anyway():
    summarizer = Extract()
    assert compact_context(plan(*RULES), summarizer).body == summarizer.summarize(plan(*RULES))
