"""The rules that a summary by a model must not lose: those it lacks are put back, word for word."""

from __future__ import annotations

import re
from collections.abc import Iterable

from haocompact.compaction import Message
from haocompact.ledger.budget import fit
from haocompact.ledger.entries import TURN_SEPARATOR, USER, Entry, Ledger, forbids, line_of, weighed
from haocompact.ledger.lines import clean
from haocompact.ledger.reader import Reader
from haocompact.ledger.wording import RULE, Said

KEPT_CHARS = 4_000  # what all rules that are put back may take
_HEADING = re.compile(r"^#{1,4} +Constraints\b[^\n]*$", re.MULTILINE)
_RULES_HEADING = re.compile(
    r"#{1,4} +.*\b(?:constraints?|rules?|preferences?)\b|#{1,4} +.*(?:约束|规则|偏好)", re.I
)
_SECTION_ENDS = re.compile(r"\n+(?=#{1,4} |---\n|\(left out: )")
_ITEM = re.compile(r"\s*(?:[-*•]|\d{1,3}[.)]) +(?=\S)")
_NONE = re.compile(r"\n[-*] \(?none\)?\.?(?=\n|$)", re.I)


def with_rules(body: str, history: Iterable[Message], prefix: Iterable[Message], previous: str | None) -> str:
    """`body` and, in its section for constraints, the rules of the messages and of `previous` that it lacks."""
    lines = [line_of(e) for e in _rules(history, prefix, previous) if not holds(body, e.text)]
    return _insert(body, lines) if lines else body


def _rules(history: Iterable[Message], prefix: Iterable[Message], previous: str | None) -> list[Entry]:
    reader = Reader(Ledger(rules_of(previous)))
    for message in (*history, *prefix):
        if message.role != "assistant":
            reader.read(message)
    return fit(Ledger(reader.close().find(RULE)), KEPT_CHARS).find(RULE)


def rules_of(previous: str | None) -> list[Entry]:
    """The rules that a previous summary states, whoever wrote it."""
    ledger = Ledger.of(previous)
    return ledger.find(RULE) or [weighed(Entry(RULE, text, USER)) for text in _listed(previous or "")]


def _listed(text: str) -> Iterable[str]:
    inside = False
    for line in text.split("\n"):
        if line.startswith("#"):
            inside = _RULES_HEADING.match(line) is not None
        item = _ITEM.match(line) if inside else None
        rule = clean(line[item.end() :]) if item else ""
        if rule and rule.strip("(). ").lower() not in ("none", "无"):
            yield rule


def holds(body: str, rule: str) -> bool:
    """Does one line of `body` say this rule: word for word, or with its values, its words and its "not"?"""
    if _bare(rule) in _bare(body):
        return True
    said = Said(rule)
    lines = (Said(line) for line in body.split("\n") if all(v in line.lower() for v in said.values))
    return any(
        said.stems and said.stems <= line.stems and forbids(rule) == forbids(line.text) for line in lines
    )


def _bare(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text.casefold()).strip()


def _insert(body: str, lines: list[str]) -> str:
    head = _HEADING.search(body)
    if head is None:
        main, turn, rest = body.partition(TURN_SEPARATOR)
        return "\n".join((main.rstrip() + "\n\n## Constraints & Preferences", *lines)) + turn + rest
    end = _SECTION_ENDS.search(body, head.end())
    stop = end.start() if end else len(body.rstrip())
    section = _NONE.sub("", body[head.start() : stop])
    return "\n".join((body[: head.start()] + section, *lines)) + body[stop:]
