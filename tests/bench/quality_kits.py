"""Benches of others, run offline: compaction-conformance-kit and conpact. No rows where they aren't installed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import quality_rivals as rivals
from quality_sessions import Turn, corpus, invented

SHORTEN: dict[str, Callable[[list[dict[str, str]], int | None], str]] = {
    "haocompact": rivals.haocompact_text,
    "last messages": rivals.last_text,
    "lcc compact": rivals.lcc_text,
}
SLOW = ("lcc compact",)


def kit_rows(seeds: int) -> list[dict[str, Any]]:
    """Canaries of 20 that survive, on the kit's own session and its generated ones, at two budgets."""
    try:
        import compaction_kit
    except ImportError:
        return []
    sessions = {"built-in": (compaction_kit.build_seeded_session(), compaction_kit.seeded_canaries())}
    generated = {
        f"generated {s}": compaction_kit.build_generated_session(s)
        for s in range(1, 13 if seeds > 3 else seeds + 1)
    }
    jobs = [
        (way, name, budget)
        for way in rivals.available()
        for budget in (0.2, 0.3)
        for name in (*sessions, *generated)
    ]
    own = [("kit: " + c.name, c, n, b) for c in (compaction_kit.LossyTruncationCompactor(),
           compaction_kit.SummaryTailCompactor()) for b in (0.2, 0.3) for n in (*sessions, *generated)]  # fmt: skip
    everything = {**sessions, **generated}

    def run(label: str, compactor: Any, name: str, budget: float) -> tuple[str, str, float, int, int, float]:
        session, canaries = everything[name]
        done = compaction_kit.run_conformance(
            session, compactor, rounds=5, canaries=canaries, budget_fraction=budget
        )
        kept = [
            sum(r.survived.values()) if isinstance(r.survived, dict) else len(r.survived) for r in done.rounds
        ]
        size = 100 * done.rounds[0].output_chars / done.rounds[0].input_chars
        return label, name, budget, kept[0], kept[-1], size

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda j: run(j[0], _KitCompactor(j[0]), j[1], j[2]), jobs))
    results += [run(*job) for job in own]
    return list(_kit_means(results))


def _kit_means(results: list[tuple[str, str, float, int, int, float]]) -> Iterator[dict[str, Any]]:
    for label in dict.fromkeys(r[0] for r in results):
        for budget in (0.2, 0.3):
            for kind in ("built-in", "generated"):
                rows = [r for r in results if r[0] == label and r[2] == budget and r[1].startswith(kind)]
                mean = [sum(column) / len(rows) for column in list(zip(*rows, strict=True))[3:]]
                yield {"summary by": label, "session": f"{kind} ({len(rows)})", "budget %": int(100 * budget),
                       "round 1 (of 20)": mean[0], "round 5 (of 20)": mean[1], "size %": mean[2],
                       "within budget": "yes" if mean[2] < 100 * budget + 1.5 else "no"}  # fmt: skip


class _KitCompactor:
    """The kit's interface to a command."""

    def __init__(self, name: str) -> None:
        self.name = name

    def compact(self, turns: Any, round_num: int = 1, budget_chars: int | None = None) -> Any:
        from compaction_kit import CompactedContext

        text = SHORTEN[self.name]([{"role": t.role, "content": t.text} for t in turns], budget_chars)
        return CompactedContext(text=text, compactor_name=self.name, round_num=round_num)


# ------------------------------------------------------------------------------------- conpact
def conpact_rows(seeds: int) -> list[dict[str, Any]]:
    """Side constraints of 15 that stand word for word in what is left, from three haystacks."""
    try:
        from conpact import build_instances
    except ImportError:
        return []
    haystacks = [_haystack(name, turns) for name, turns in _three()]
    rows = []
    for way in rivals.available():
        for position in ("top", "middle", "bottom"):
            few = haystacks[:1] if way in SLOW else haystacks
            instances = build_instances(few, length=10_000_000, position=position)
            with ThreadPoolExecutor(2) as pool:
                texts = list(pool.map(lambda i, way=way: SHORTEN[way](i.messages, None), instances))
            kept = sum(_verbatim(i.sc_text, t) for i, t in zip(instances, texts, strict=True))
            size = 100 * sum(map(len, texts)) / sum(len(m["content"]) for i in instances for m in i.messages)
            rows.append({"summary by": way, "position": position, "kept": f"{kept} of {len(instances)}",
                         "kept %": 100 * kept / len(instances), "size %": size})  # fmt: skip
    return rows


def _three() -> list[tuple[str, list[Turn]]]:
    sessions = corpus()
    largest = sorted(sessions, key=lambda n: -sum(t.size for t in sessions[n]))[:3]
    return [(n, sessions[n]) for n in largest] or [(f"invented {s}", invented(s, 300_000)) for s in range(3)]


def _haystack(name: str, turns: list[Turn]) -> dict[str, Any]:
    messages = [
        {"role": "user" if t.role == "user" else "assistant", "content": t.text} for t in turns if t.text
    ]
    tokens = [len(m["content"]) // 4 for m in messages]
    return {"haystack_id": name, "source": "corpus", "system_prompt": "", "messages": messages,
            "message_tokens": tokens, "token_length": sum(tokens), "source_conversation_count": 1}  # fmt: skip


def _verbatim(constraint: str, text: str) -> bool:
    """Word for word, but for the case that conpact gives its first letter; its sentences may stand apart."""
    flat = " ".join(text.split()).casefold()
    return all(s.casefold() in flat for s in re.split(r"(?<=[.!?]) ", constraint))
