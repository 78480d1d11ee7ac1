"""Facts in plain words, made by seed, planted in a session, and looked for in a summary."""

from __future__ import annotations

import random
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from quality_sessions import Turn

WORDING = tomllib.loads((Path(__file__).parent / "wording.toml").read_text("utf-8"))
PLAN = {
    "rule": 4,
    "constraint": 2,
    "preference": 2,
    "goal": 1,
    "value": 1,
    "correction": 2,
    "assistant": 5,
    "tool": 3,
}
WORDS = [
    "amber",
    "birch",
    "cobalt",
    "dune",
    "ember",
    "fjord",
    "garnet",
    "harbor",
    "indigo",
    "jasper",
    "kestrel",
    "larch",
    "mango",
    "nimbus",
    "ochre",
    "pewter",
    "quartz",
    "raven",
    "sable",
    "tundra",
    "umber",
    "velvet",
    "willow",
    "xenon",
    "yarrow",
    "zephyr",
    "heron",
    "lotus",
    "maple",
    "otter",
    "puffin",
]
PEOPLE = [
    "Priya",
    "Marek",
    "Aiko",
    "Tomas",
    "Ingrid",
    "Kofi",
    "Lena",
    "Ravi",
    "Sofia",
    "Dmitri",
    "Yara",
    "Chen",
    "Olu",
    "Bianca",
]
THINGS = [
    "importer",
    "scheduler",
    "billing job",
    "search index",
    "export screen",
    "login page",
    "report builder",
    "webhook receiver",
    "image resizer",
    "audit log",
    "rate limiter",
    "mailer",
    "sync daemon",
    "price feed",
    "session store",
]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
]
BEFORE = {
    "en": ("", "", "By the way: ", "One more thing. ", "Ok. ", "Also, "),
    "zh": ("", "", "对了，", "另外，", "好的。"),
}


class Values:
    """Made-up values, by kind."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def make(self, kind: str) -> str:
        pick, number = self.rng.choice, self.rng.randint
        return {
            "n": lambda: str(number(2, 97)),
            "big": lambda: str(number(101, 9899)),
            "w": lambda: pick(WORDS),
            "id": lambda: f"{pick(WORDS)}-{pick(('db', 'svc', 'queue', 'bucket', 'cache'))}-{number(1, 30)}",
            "sn": lambda: f"{pick(WORDS)}_{pick(('flag', 'limit', 'table', 'mode', 'window'))}",
            "p": lambda: pick(PEOPLE),
            "thing": lambda: pick(THINGS),
            "day": lambda: pick(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")),
            "date": lambda: f"{pick(MONTHS)} {number(2, 28)}",
            "hx": lambda: f"{self.rng.getrandbits(28):07x}",
            "path": lambda: f"{pick(('src', 'lib', 'app'))}/{pick(WORDS)}/{pick(WORDS)}{pick(('.py', '.ts', '.go'))}",
            "ver": lambda: f"{number(1, 9)}.{number(0, 20)}.{number(0, 9)}",
            "LANG": lambda: pick(("German", "Portuguese", "Finnish", "Turkish", "Polish")),
        }[kind]()  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fact:
    """`tokens` must be in one line of the summary; `before` is the sentence that it corrects."""

    who: str
    kind: str
    text: str
    tokens: tuple[str, ...]
    lang: str
    before: str = ""

    def survives(self, summary: str) -> bool:
        lines = summary.lower().split("\n")
        return any(all(t.lower() in line for t in self.tokens) for line in lines)

    def is_stale(self, summary: str) -> bool:
        return bool(self.before) and self.before.rstrip(".。").lower() in summary.lower()


def facts(seed: int, wording: str = "known") -> list[Fact]:
    """20 facts: 12 of the user (two of them corrected later), 5 of the assistant, 3 of tools; a third in Chinese."""
    rng = random.Random(f"{seed}{wording}")
    values = Values(rng)
    found = []
    for kind, count in PLAN.items():
        patterns = [(x, lang) for lang in ("en", "zh") for x in WORDING[wording][lang][kind]]
        weights = [2 / len(WORDING[wording][lang][kind]) if lang == "en" else 1 / len(WORDING[wording][lang][kind])
                   for _, lang in patterns]  # fmt: skip
        chosen: list[tuple[object, str]] = []
        while len(chosen) < count:
            pair = rng.choices(patterns, weights)[0]
            if pair not in chosen:
                chosen.append(pair)
        who = kind if kind in ("assistant", "tool") else "user"
        found += [_fact(who, kind, pattern, lang, values) for pattern, lang in chosen]
    return found


def _fact(who: str, kind: str, pattern: object, lang: str, values: Values) -> Fact:
    if isinstance(pattern, list):
        before, after, value = pattern
        thing, a = values.make("thing"), values.make(value)
        b = next(x for x in iter(lambda: values.make(value), None) if x != a)
        return Fact(
            who, kind, after.format(thing=thing, a=a, b=b), (b,), lang, before.format(thing=thing, a=a)
        )
    tokens: list[str] = []

    def fill(match: re.Match[str]) -> str:
        made = values.make(match[1])
        if match[1] != "thing":
            tokens.append(made)
        return made

    text = re.sub(r"\{(\w+)\}", fill, str(pattern))
    return Fact(who, kind, text, tuple(tokens), lang)


def planted(turns: list[Turn], planted_facts: list[Fact], seed: int) -> list[Turn]:
    """The turns with every fact said once, by whom it belongs to; a correction after what it corrects."""
    rng = random.Random(seed)
    limit = int(len(turns) * 0.9)
    said: dict[int, list[tuple[str, str, str]]] = {}
    for fact in planted_facts:
        at = rng.randrange(limit // 2, limit)
        if fact.before:
            said.setdefault(rng.randrange(1, limit // 2), []).append((fact.who, fact.before, fact.lang))
        else:
            at = rng.randrange(1, limit)
        said.setdefault(at, []).append((fact.who, fact.text, fact.lang))
    out: list[Turn] = []
    waiting: list[tuple[str, str, str]] = []
    for index, turn in enumerate(turns):
        waiting += said.get(index, [])
        if turn.role != "tool":
            out += [
                Turn("user", rng.choice(BEFORE[lang]) + text) for who, text, lang in waiting if who == "user"
            ]
            waiting = [x for x in waiting if x[0] != "user"]
        mine = next((x for x in waiting if x[0] == turn.role), None)
        if mine is not None and turn.text:
            waiting.remove(mine)
            turn = _saying(turn, mine[1], rng)
        out.append(turn)
    return out


def _saying(turn: Turn, text: str, rng: random.Random) -> Turn:
    if turn.role == "tool":
        lines = turn.text.split("\n")
        lines.insert(rng.randint(0, len(lines)), text)
        return replace(turn, text="\n".join(lines))
    return replace(
        turn,
        text=rng.choice(
            (f"{turn.text}\n\n{text}", f"{text}\n\n{turn.text}", f"Let me see. {text} {turn.text}")
        ),
    )
