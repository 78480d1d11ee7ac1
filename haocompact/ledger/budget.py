"""Which entries find room in a summary, and what is dropped first when it is tight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from haocompact.ledger.entries import (
    AROUND,
    ASKED,
    ASSISTANT,
    BY_KIND,
    EARLY,
    LATEST,
    NO_HISTORY,
    PLANNED,
    SYSTEM,
    TOOL,
    TURN_KINDS,
    TURN_SEPARATOR,
    USER,
    Entry,
    Ledger,
    line_of,
    render,
)
from haocompact.ledger.lines import cut_middle
from haocompact.ledger.wording import BLOCKED, DECISION, DOING, DONE, EARLIER, FACT, GOAL, NEXT, RULE

MIN_CHARS, MAX_CHARS, RATIO = 2_000, 12_000, 0.2


@dataclass(frozen=True, slots=True)
class Pool:
    """Entries that compete with each other; `share` of the budget is theirs before others may fill up.

    `recency`: what the newest weighs more than the oldest; `least`: what an entry must weigh to be among them.
    """

    share: float
    kinds: tuple[str, ...]
    who: tuple[str, ...]
    recency: float = 1.0
    least: float = -math.inf


_ANYONE = (USER, ASSISTANT, SYSTEM, TOOL)
RULES = Pool(0.40, (RULE,), (USER,), 0)
WORK = Pool(0.06, (DONE,), _ANYONE, 9)
POOLS = (
    RULES,
    Pool(0.50, (EARLIER,), (SYSTEM,), 0),
    Pool(0.06, (DOING,), _ANYONE, 0),
    Pool(0.06, (DONE,), _ANYONE, 9, PLANNED),
    Pool(0.10, (NEXT,), _ANYONE, 0),
    Pool(0.05, (BLOCKED,), _ANYONE, 9),
    Pool(0.14, (FACT, DECISION), (USER,)),
    Pool(0.10, (GOAL,), (USER,), 2),
    Pool(0.20, (DECISION, FACT), (ASSISTANT,)),
    Pool(0.10, (FACT,), (TOOL,)),
    Pool(0.03, (RULE,), (SYSTEM,)),
    Pool(0.10, (EARLY,), _ANYONE),
    Pool(0.10, (AROUND,), _ANYONE),
)
WORTH = 2.5  # entries of less are not used to fill up what room is left
SPARE = 700  # below this budget there is no room for "(none)"
_Ranked = tuple[float, int, Entry]


def fit(ledger: Ledger, budget: int) -> Ledger:
    """What of the ledger goes into `budget` characters. The latest request always does."""
    entries = _visible(ledger)
    fixed = [e for e in entries if e.who == LATEST or e.kind == ASKED]
    room = budget - _overhead(entries, budget) - sum(map(_cost, fixed))
    chosen = {e.seq for e in fixed}
    scored = [_ranked(pool, entries, ledger.seen) for pool in POOLS]
    for pool, ranked in zip(POOLS, scored, strict=True):
        room -= _take((x for x in ranked if x[0] >= WORTH), min(room, int(pool.share * budget)), chosen)
    for ranked in scored[:2]:
        room -= _take(ranked, room, chosen)
    room -= _take(_ranked(WORK, entries, ledger.seen), min(room, int(WORK.share * budget)), chosen)
    worth = (x for ranked in scored for x in ranked if x[0] >= WORTH)
    _take(sorted(worth, key=lambda x: (-x[0], -x[1])), room, chosen)
    kept = [e for e in entries if e.seq in chosen]
    dropped = Counter(e.kind for e in entries if e.seq not in chosen)
    return Ledger(kept, ledger.left_out + dropped)


def _visible(ledger: Ledger) -> list[Entry]:
    """Entries without the requests that the latest one holds word for word."""
    latest = " ".join(e.text for e in ledger.entries if e.who == LATEST or e.kind == ASKED)
    return [e for e in ledger.entries if not (e.kind == GOAL and e.who == USER and e.text in latest)]


def _overhead(entries: list[Entry], budget: int) -> int:
    kinds = {e.kind for e in entries}
    heads = sum(len(s.heading) + 11 * s.none + 2 for s in BY_KIND.values() if s.kind in kinds or s.none)
    turn = len(TURN_SEPARATOR) + len(NO_HISTORY) if kinds.intersection(TURN_KINDS) else 0
    return min(heads + turn + len("## Progress\n") + 120, budget // 3)


def _cost(entry: Entry) -> int:
    return len(line_of(entry)) + 2


def _ranked(pool: Pool, entries: list[Entry], seen: Mapping[str, int]) -> list[_Ranked]:
    """(score, age, entry), best first: weight, how recent, how rare its values are."""
    mine = [e for e in entries if e.kind in pool.kinds and e.who in pool.who and e.weight >= pool.least]
    last = max(len(mine) - 1, 1)
    scored = []
    for index, entry in enumerate(mine):
        score = entry.weight + pool.recency * index / last + _rarity(entry, seen)
        scored.append((score + 4 * (entry.kind == GOAL and index == 0), entry.seq, entry))
    return sorted(scored, key=lambda x: (-x[0], -x[1]))


def _rarity(entry: Entry, seen: Mapping[str, int]) -> float:
    counts = [seen.get(v, 1) for v in entry.values]
    return max(-1.0, min(1.2, 0.4 * sum(c <= 1 for c in counts) - 0.3 * sum(c > 4 for c in counts)))


def _take(ranked: Iterable[_Ranked], room: int, chosen: set[int]) -> int:
    used = 0
    for _, seq, entry in ranked:
        cost = _cost(entry)
        if seq not in chosen and used + cost <= room:
            chosen.add(seq)
            used += cost
    return used


def budget_of(removed: int, previous: int, max_chars: int | None, reserved: int = 0) -> int:
    """A fifth of the removed text, within limits. Of the most there may be, what else the summary has to hold
    (`reserved`) takes half at most."""
    most = MAX_CHARS if max_chars is None else max_chars
    wanted = min(max(int(RATIO * removed) + previous, MIN_CHARS), most) if max_chars is None else most
    return min(wanted, max(most - reserved, most // 2), previous + removed // 2)


def render_within(ledger: Ledger, budget: int) -> str:
    """The fullest summary of at most `budget` characters (but for the latest request)."""
    whole = Ledger(_visible(ledger), ledger.left_out)
    for spare in (False, True):
        text = render(whole, spare=spare)
        if len(text) <= budget:
            return text
    for entry in ledger.find(GOAL, ASKED):
        if entry.who == LATEST or entry.kind == ASKED:
            entry.text = cut_middle(entry.text, max(400, budget // 4))
    room = budget
    while len(text) > budget and room > 0:
        text = render(fit(ledger, room), spare=budget < SPARE)
        room -= max(0, len(text) - budget)
    return text
