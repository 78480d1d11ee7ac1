"""make bench-quality: what a summary keeps, ours beside its rivals', all offline and by seed.

    python tests/bench/quality.py [facts] [kit] [conpact] [corpus] [--seeds 10] [--json FILE]

Tables go to stdout, the same figures to --json. A rival that isn't installed is named as such.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import quality_kits
import quality_rivals as rivals
from quality_corpus import corpus_rows
from quality_facts import Fact, facts, planted
from quality_sessions import FORMS, Writer, chunks, corpus, summary_in

CHARS = 200_000  # of a carrier, and of what each round adds
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["facts", "kit", "conpact", "corpus"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sessions = corpus()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "carriers": sorted(sessions) or "invented",
        "rivals": {
            name: _version(name)
            for name in ("local-context-compiler", "compaction-conformance-kit", "conpact")
        },
    }
    print(f"Carriers: {', '.join(sorted(sessions)) or 'invented (no corpus here)'}")
    for name, version in report["rivals"].items():
        print(f"{name}: {version or 'not installed, its rows are missing'}")
    for part in options.parts:
        rows = PARTS[part](options.seeds)
        report[part] = rows
        print(f"\n{TITLES[part]}\n{_table(rows)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _table(rows: list[dict[str, Any]]) -> str:
    heads = [h for h in rows[0] if not isinstance(rows[0][h], list)] if rows else []
    cells = [heads, *([_cell(row.get(h)) for h in heads] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cell(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else "-" if value is None else str(value)


# ------------------------------------------------------------------------------------- planted facts
def fact_rows(seeds: int) -> list[dict[str, Any]]:
    """Means over seeds and formats: facts of 20 after one and five rounds, rules of 12, tokens of old values."""
    jobs = [(way, form, wording, seed) for way in rivals.WAYS for form in way.forms for wording in way.wordings
            for seed in range(min(seeds, way.seeds))]  # fmt: skip
    with ProcessPoolExecutor(2) as pool:
        results = list(pool.map(_one, jobs, chunksize=4))
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for (way, form, wording, _), result in zip(jobs, results, strict=True):
        for key in (form, "all") if len(way.forms) > 1 else (form,):
            rows.setdefault((way.name, wording, key), []).append(result)
    return [
        _mean(key, found)
        for key, found in sorted(rows.items(), key=lambda row: (row[0][1] != "known", row[0][0]))
    ]


def _one(job: tuple[rivals.Way, str, str, int]) -> dict[str, Any]:
    way, form, wording, seed = job
    stretches = chunks(corpus(), seed, ROUNDS, CHARS)
    told = facts(seed, wording)
    stretches[0] = planted(stretches[0], told, seed)
    texts = list(way.rounds(stretches, form))
    return {
        "counts": [sum(f.survives(t) for f in told) for t in texts],
        "users": sum(f.survives(texts[-1]) for f in told if f.who == "user"),
        "stale": sum(f.is_stale(texts[-1]) for f in told),
        "size": len(texts[-1]),
        "lost": [f.text for f in told if not f.survives(texts[-1])],
    }


def _mean(key: tuple[str, str, str], found: list[dict[str, Any]]) -> dict[str, Any]:
    count = len(found)
    return {
        "summary by": key[0],
        "wording": key[1],
        "format": key[2],
        "runs": count,
        "round 1 (of 20)": sum(r["counts"][0] for r in found) / count,
        f"round {ROUNDS} (of 20)": sum(r["counts"][-1] for r in found) / count,
        "user's (of 12)": sum(r["users"] for r in found) / count,
        "worst user's": min(r["users"] for r in found),
        "old values": sum(r["stale"] for r in found),
        "chars": max(r["size"] for r in found),
        "lost": sorted({text for r in found for text in r["lost"]})[:200]
        if key[2] in ("all", "text")
        else [],
    }


PARTS = {
    "facts": fact_rows,
    "kit": quality_kits.kit_rows,
    "conpact": quality_kits.conpact_rows,
    "corpus": corpus_rows,
}
TITLES = {
    "facts": f"Planted facts: 20 in {CHARS // 1000} KB, then {ROUNDS - 1} rounds of as much again",
    "kit": "compaction-conformance-kit: canaries of 20 that survive, and the size of what is left",
    "conpact": "conpact: 15 side constraints, kept word for word",
    "corpus": "Real sessions: what the summary must have",
}
__all__ = ["FORMS", "Fact", "Writer", "summary_in"]

if __name__ == "__main__":
    main()
