"""The ledger: entries under the seed's headings, what replaces what, and text <-> ledger."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from haocompact.ledger.lines import clean, cut
from haocompact.ledger.outputs import signature
from haocompact.ledger.wording import (
    BLOCKED,
    CORRECTS,
    DECISION,
    DOING,
    DONE,
    EARLIER,
    FACT,
    GOAL,
    NEXT,
    RULE,
    SURELY,
    Said,
    judge_assistant,
    judge_tool,
    judge_user,
    stem,
)

TURN_SEPARATOR = "\n\n---\n\n**Turn Context (split turn):**\n\n"
NO_HISTORY = "No prior history."
LATEST, USER, ASSISTANT, SYSTEM, TOOL = "latest", "user", "assistant", "system", "tool"
ASKED, EARLY, AROUND = "asked", "early", "around"
PLANNED = 6.0  # the weight of a plan's steps
LEAST = 0.3  # what weighs less finds room in no summary


# ------------------------------------------------------------------------------------- entries
@dataclass(slots=True)
class Entry:
    """One line of the ledger. Two entries are equal when they render equally."""

    kind: str
    text: str
    who: str
    weight: float = field(default=1.0, compare=False)
    key: str = field(default="", compare=False)
    seq: int = field(default=0, compare=False)
    message: int = field(default=0, compare=False)
    gone: bool = field(default=False, compare=False)
    values: dict[str, str] = field(default_factory=dict, compare=False)
    stems: set[str] = field(default_factory=set, compare=False)
    spoken: set[str] = field(default_factory=set, compare=False)  # stems of its values
    about: set[str] = field(default_factory=set, compare=False)  # its other stems


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, the kind of its entries, who says them unless tagged, and how a line starts."""

    heading: str
    kind: str
    who: str
    bullet: str = "- "
    none: bool = False


SECTIONS = (
    Section("## Goal", GOAL, USER),
    Section("## Constraints & Preferences", RULE, USER, none=True),
    Section("### Done", DONE, ASSISTANT, "- [x] "),
    Section("### In Progress", DOING, ASSISTANT, "- [ ] "),
    Section("### Blocked", BLOCKED, TOOL),
    Section("## Key Decisions", DECISION, ASSISTANT),
    Section("## Next Steps", NEXT, USER, "1. "),
    Section("## Critical Context", FACT, ASSISTANT, none=True),
    Section("## Earlier Summary", EARLIER, SYSTEM, "> "),
)
TURN_SECTIONS = (
    Section("## Original Request", ASKED, USER),
    Section("## Early Progress", EARLY, ASSISTANT),
    Section("## Context for Suffix", AROUND, ASSISTANT),
)
_BY_HEADING = {s.heading: s for s in (*SECTIONS, *TURN_SECTIONS)}
BY_KIND = {s.kind: s for s in (*SECTIONS, *TURN_SECTIONS)}
TURN_KINDS = (ASKED, EARLY, AROUND)
_ABOUT = frozenset((GOAL, RULE, FACT, DECISION, EARLIER, EARLY, AROUND))
TAGS = {
    LATEST: "Latest request: ",
    USER: "User: ",
    SYSTEM: "System: ",
    TOOL: "Tool: ",
    ASSISTANT: "Proposed: ",
}
_LEFT_OUT = re.compile(r"\(left out: ([a-z ]+ \d{1,12}(?:, [a-z ]+ \d{1,12})*)\)")
_NAMES = {
    RULE: "rules",
    GOAL: "requests",
    DECISION: "decisions",
    FACT: "facts",
    BLOCKED: "errors",
    DONE: "steps done",
    DOING: "steps begun",
    NEXT: "next steps",
    EARLIER: "lines of an earlier summary",
    ASKED: "first requests of the turn",
    EARLY: "steps of the turn",
    AROUND: "facts of the turn",
}
_KINDS = {name: kind for kind, name in _NAMES.items()}
COMMAND = re.compile(r"`([^`]+)` (?:failed|ok)\b")
EDITED = re.compile(r"Edited `([^`]+)`(?: \((\d{1,9}) times\))?$")


def line_of(entry: Entry) -> str:
    """The entry as it stands under its heading (`render` numbers a numbered list)."""
    section = BY_KIND[entry.kind]
    tag = "" if entry.who == section.who else TAGS[entry.who]
    return f"{section.bullet}{tag}{entry.text}"


def shape_of(line: str) -> str:
    """A line without what changes from one output to the next."""
    return _VARYING.sub("0", line)


_VARYING = re.compile(r"'[^']{0,80}'|\b[0-9a-f]{7,40}\b|\d[0-9a-f.:-]*")


def key_of(kind: str, text: str, who: str) -> str:
    """What makes two entries the same: command, file or words; of an output, all but its figures."""
    if who == TOOL and kind in (FACT, AROUND):
        return "`" + shape_of(text)
    if kind in (DONE, BLOCKED, EARLY):
        command, edited = COMMAND.match(text), EDITED.match(text)
        if command:
            return f"`{kind == BLOCKED}{signature(command[1])}"
        if edited:
            return f"`{edited[1]}"
        if text.startswith("Resolved: "):
            return "`resolved"
    return re.sub(r"[\W_]+", " ", text.casefold()).strip() or text


class Ledger:
    """Entries in order of time. `left_out`: how many of each kind found no room, here and in earlier rounds."""

    CAP = 300  # of one kind by one speaker, while reading; a summary has room for about a hundred in all
    CAPS: Mapping[str, int] = {USER: CAP, ASSISTANT: 150, TOOL: 100}

    def __init__(self, entries: Iterable[Entry] = (), left_out: Mapping[str, int] | None = None) -> None:
        self.left_out: Counter[str] = Counter(left_out)
        self.seen: Counter[str] = Counter()
        self._kinds: dict[str, list[Entry]] = {}
        self._by_key: dict[str, Entry] = {}
        self._by_stem: dict[str, deque[Entry]] = {}
        self._floor: dict[tuple[str, str], float] = {}
        self._size: Counter[tuple[str, str]] = Counter()
        self.message = 0
        self._seq = 0
        for entry in entries:
            self.put(entry, news=False)

    @classmethod
    def of(cls, previous: str | None) -> Ledger:
        """The ledger that a previous summary holds, whoever wrote it."""
        text = (previous or "").replace("\r\n", "\n").strip()
        ledger = parse(text) if text else cls()
        return cls(_quoted(text)) if ledger is None else ledger

    @property
    def entries(self) -> list[Entry]:
        return sorted((e for kind in self._kinds for e in self.find(kind)), key=lambda e: e.seq)

    def find(self, *kinds: str) -> list[Entry]:
        return [e for kind in kinds for e in self._kinds.get(kind, ()) if not e.gone]

    def latest(self) -> Entry | None:
        return next((e for e in reversed(self._kinds.get(GOAL, [])) if e.who == LATEST and not e.gone), None)

    def at(self, key: str) -> Entry | None:
        entry = self._by_key.get(key)
        return None if entry is None or entry.gone else entry

    def clear(self, *kinds: str, who: str | None = None) -> None:
        for kind in kinds:
            for entry in self.find(kind):
                entry.gone = who is None or entry.who == who
            self._kinds[kind] = self.find(kind)

    def floor(self, who: str, *kinds: str) -> float:
        """What weighs less will not be taken in, whichever of these kinds it is."""
        return min(self._floor.get((kind, who), LEAST) for kind in kinds)

    def add(self, kind: str, text: str, who: str, weight: float = 1.0, *, limit: int = 320,
            said: Said | None = None) -> None:  # fmt: skip
        """Add an entry unless it stands there already; what it corrects or repeats gives way."""
        if weight < self._floor.get((kind, who), -9.0):
            self.left_out[kind] += 1
            return
        line = cut(clean(text), limit)
        if not line or line == "(none)":
            return
        key = key_of(kind, line, who)
        known = self.at(key)
        if known is None or _gives_way(known, kind, who):
            self.put(Entry(kind, line, who, weight, key), said=said if said and said.text == line else None)
        else:
            known.weight = max(known.weight, weight)

    def put(self, entry: Entry, *, news: bool = True, said: Said | None = None) -> None:
        """Add as it is; `news` may correct what stands there."""
        self._seq += 1
        entry.seq = self._seq
        entry.message = self.message
        entry.key = entry.key or key_of(entry.kind, entry.text, entry.who)
        self._kinds.setdefault(entry.kind, []).append(entry)
        if entry.who == LATEST or entry.kind == ASKED:
            return
        self._by_key[entry.key] = entry
        if entry.kind in _ABOUT:
            self._index(entry, said or Said(entry.text), news)
        self._size[entry.kind, entry.who] += 1
        if self._size[entry.kind, entry.who] > 2 * self.CAPS.get(entry.who, self.CAP):
            self._prune(entry.kind, entry.who)

    def _index(self, entry: Entry, said: Said, news: bool) -> None:
        entry.values, entry.stems = said.values, said.stems - _CUE_STEMS
        entry.spoken = {stem(v) for v in entry.values}
        entry.about = entry.stems - entry.spoken
        self.seen.update(entry.values.keys())
        if news and entry.who in (USER, ASSISTANT):
            self._supersede(entry, said in SURELY or (said in CORRECTS and not forbids(entry.text)))
        for about in entry.stems:
            self._by_stem.setdefault(about, deque(maxlen=32)).append(entry)

    def _supersede(self, entry: Entry, corrects: bool) -> None:
        if not (corrects or entry.values or entry.kind == RULE):
            return
        near = {old.seq: old for about in entry.stems for old in self._by_stem.get(about, ())}
        for old in near.values():
            if old.gone or len(entry.stems & old.stems) < 2 - corrects:
                continue
            mine = entry.who == USER or old.who in (ASSISTANT, TOOL)
            if mine and (old.message != entry.message or entry.message == 0):
                old.gone = _replaces(entry, old, corrects)

    def _prune(self, kind: str, who: str) -> None:
        """Keep the best half of one kind, so that memory stays the same however long the input is."""
        live = [e for e in self.find(kind) if e.who == who]
        scores = {e.seq: e.weight + 2 * i / len(live) + 9 * (kind in _AGING) * i for i, e in enumerate(live)}
        for entry in sorted(live, key=lambda e: (-scores[e.seq], -e.seq))[self.CAPS.get(who, self.CAP) :]:
            entry.gone = True
            self.left_out[kind] += 1
        kept = [e for e in live if not e.gone]
        self._kinds[kind] = self.find(kind)
        self._size[kind, who] = len(kept)
        if kind not in _AGING and kept:
            self._floor[kind, who] = min(scores[e.seq] for e in kept) - 2
        self._forget()

    def _forget(self) -> None:
        self._by_key = {k: e for k, e in self._by_key.items() if not e.gone}
        if len(self._by_stem) > 20_000:
            kept = ((s, [e for e in d if not e.gone]) for s, d in self._by_stem.items())
            self._by_stem = {s: deque(d, maxlen=32) for s, d in kept if d}
        if len(self.seen) > 50_000:
            self.seen = Counter({v: n for v, n in self.seen.items() if n > 1})


_AGING = frozenset((DONE, BLOCKED))
_CUE_STEMS = frozenset(map(stem, CORRECTS.words | {"longer", "mind", "reflection", "plan", "way", "forget"}))


def _gives_way(known: Entry, kind: str, who: str) -> bool:
    """A state gives way to the newer one, a plan to its progress, a fact to the user's own word for it."""
    plan = known.kind in (DOING, NEXT) and known.kind != kind
    known.gone = known.key.startswith("`") or plan or (who == USER != known.who and kind != NEXT)
    return known.gone


def _replaces(new: Entry, old: Entry, corrects: bool) -> bool:
    """Does `new` give another value for what `old` is about?

    It must be about the same: all words of the one in the other, or most of both. And the values must be of
    one class; without values, a word of correction and one word that differs will do. Without such a word,
    only one value may differ, and what forbids adds up: "never touch a", "never touch b".
    """
    if new.kind == old.kind == RULE and _says_again(new, old):
        return True
    shared = len(new.about & old.stems)
    if shared < 2 - corrects:
        return False
    own = len(new.about) - shared
    others = len(old.stems) - len(old.stems & new.spoken) - shared
    if not corrects and ((own and others) or 2 * shared < 3 * max(own, others)):
        return False
    fresh = {c for v, c in new.values.items() if v not in old.values}
    named = any(v in old.values or (c == "name" and v in old.text.lower()) for v, c in new.values.items())
    alike = _same_class(fresh, {c for v, c in old.values.items() if named or v not in new.values})
    if not corrects:
        return alike and _restates(new, old, fresh)
    if not (new.values or old.values):
        return shared >= 2 and max(own, others) <= shared // 2 + 1 - (shared == 2)
    contained = shared >= 1 and not (own and others) and own <= 2 * shared + 1
    mostly = shared >= 3 - named and 2 * others <= shared + named and own <= 2 * shared
    return (alike and (contained or mostly)) or (named and contained and not others)


def _says_again(new: Entry, old: Entry) -> bool:
    """The same rule in other words, or with one word more."""
    if not (1 < len(old.stems) <= len(new.stems) <= len(old.stems) + 1 and old.stems <= new.stems):
        return False
    return new.values.keys() == old.values.keys() and forbids(new.text) == forbids(old.text)


def _restates(new: Entry, old: Entry, fresh: set[str]) -> bool:
    single = sum(v not in old.values and c != "name" for v, c in new.values.items()) <= 1
    return (single or fresh == {"word", "num"}) and not (forbids(old.text) or forbids(new.text))


def forbids(text: str) -> bool:
    return _FORBIDS.search(text) is not None


_FORBIDS = re.compile(
    r"\b(?:never|not?|nobody|nothing|cannot|avoid|without|forbid\w*)\b|n['’]t\b|[不别禁勿]", re.I
)


def _same_class(some: set[str], others: set[str]) -> bool:
    exact = {"id", "path", "code", "name"}
    return bool(some & others or (some & exact and others & exact))


def _quoted(text: str) -> list[Entry]:
    lines = (clean(line) for line in text.split("\n"))
    return [weighed(Entry(EARLIER, line, SYSTEM)) for line in lines if line and line != "(none)"]


# ------------------------------------------------------------------------------------- text <-> ledger
def render(ledger: Ledger, *, spare: bool = False) -> str:
    """The seed's section format. `spare` leaves out the sections that would only say "(none)"."""
    turn = ledger.find(*TURN_KINDS)
    bare = bool(turn) and len(turn) == len(ledger.entries) and not ledger.left_out
    body = "" if bare else _render_sections(SECTIONS, ledger, spare)
    if ledger.left_out:
        body += "\n\n" + notice_of(ledger.left_out)
    if not turn:
        return body.strip() or "## Goal\n- (none)"
    return (body.strip() or NO_HISTORY) + TURN_SEPARATOR + _render_sections(TURN_SECTIONS, ledger, spare)


def notice_of(left_out: Mapping[str, int]) -> str:
    """One line that says how much of each kind found no room."""
    counts = ", ".join(f"{name} {left_out[kind]}" for kind, name in _NAMES.items() if left_out.get(kind))
    return f"(left out: {counts})"


def _counts(text: str) -> dict[str, int]:
    pairs = (item.rpartition(" ") for item in text.split(", "))
    return {_KINDS.get(name, FACT): int(count) for name, _, count in pairs}


def _render_sections(sections: tuple[Section, ...], ledger: Ledger, spare: bool) -> str:
    blocks: list[str] = []
    progress = False
    for section in sections:
        lines = [line_of(e) for e in ledger.find(section.kind)]
        if section.kind == NEXT:
            lines = [f"{n}. {line[3:]}" for n, line in enumerate(lines, 1)]
        if not lines and section.none and not spare:
            lines = ["- (none)"]
        head = section.heading
        if lines and head.startswith("### ") and not progress:
            head, progress = f"## Progress\n{head}", True
        if lines:
            blocks.append("\n".join((head, *lines)))
    return "\n\n".join(blocks)


def parse(text: str) -> Ledger | None:
    """The ledger that `render` made this text from; None when it can't have made it."""
    entries: list[Entry] = []
    section: Section | None = None
    left_out: dict[str, int] = {}
    for line in text.split("\n"):
        section = _BY_HEADING.get(line, section)
        counted = _LEFT_OUT.fullmatch(line)
        left_out = _counts(counted[1]) if counted else left_out
        entry = _parse_line(line, section) if section else None
        if entry is not None and clean(entry.text) == entry.text:
            entries.append(weighed(entry))
    ledger = Ledger(entries, left_out)
    return ledger if text in (render(ledger), render(ledger, spare=True)) else None


def _parse_line(line: str, section: Section) -> Entry | None:
    if section.kind == NEXT:
        line = re.sub(r"^\d{1,9}\. ", section.bullet, line, count=1)
    text = line.removeprefix(section.bullet)
    if text == line or not text or text == "(none)":
        return None
    for who, tag in TAGS.items():
        if text.startswith(tag) and who != section.who:
            return Entry(section.kind, text[len(tag) :], who)
    return Entry(section.kind, text, section.who)


def weighed(entry: Entry) -> Entry:
    """Weigh an entry read back by its words alone; that it was kept before counts a little."""
    said = Said(entry.text)
    if entry.kind in (DOING, NEXT):
        entry.weight = PLANNED
    elif entry.kind == EARLIER:
        entry.weight = max(judge_user(said)[1], judge_assistant(said)[1])
    elif entry.who in (USER, SYSTEM):
        entry.weight = max(judge_user(said)[1], {RULE: 6.0, FACT: 5.5}.get(entry.kind, 2.0)) + 1
        entry.weight += entry.kind == RULE
        entry.weight -= 3 * (entry.who == SYSTEM)
    elif entry.who == TOOL and entry.kind in (FACT, AROUND):
        entry.weight = judge_tool(entry.text) + 0.7
    else:
        entry.weight = max(judge_assistant(said)[1], 1.0) + 0.7
    return entry
