"""The ways to shorten a conversation that the bench compares: ours and, where they are installed, others."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quality_sessions import FORMS, Turn, Writer, summary_in

LIMIT = 12_000


@dataclass(frozen=True, slots=True)
class Way:
    """`rounds`: the text that stands for what was removed, after each round. `seeds`: no more of them (slow ones)."""

    name: str
    forms: tuple[str, ...] = ("text",)
    wordings: tuple[str, ...] = ("known",)
    arguments: tuple[str, ...] = ()
    seeds: int = 100

    def rounds(self, stretches: list[list[Turn]], form: str) -> Iterator[str]:
        if self.forms != ("text",):
            yield from _compacted(stretches, form, self.arguments)
            return
        shorten = {"last messages": last_messages, "lcc compact": lcc}[self.name]
        text = ""
        for turns in stretches:
            text = shorten(text, turns)
            yield text


def _compacted(stretches: list[list[Turn]], form: str, arguments: tuple[str, ...]) -> Iterator[str]:
    """The command line, on a file that grows and is compacted again."""
    writer, data = Writer(form), b""
    for number, turns in enumerate(stretches):
        data = run_haocompact(data + writer.add(turns, number), "--keep-recent", "2000", *arguments)
        writer.resume(data)
        yield summary_in(data)


def run_haocompact(data: bytes, *arguments: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.toml").touch()
        env = {"HOME": folder, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        env |= {"HAOCOMPACT_LOG": f"{folder}/log", "HAOCOMPACT_CONFIG": f"{folder}/config.toml"}
        command = [sys.executable, "-m", "haocompact", "compact", "-", "--no-archive", "--quiet", *arguments]
        done = subprocess.run(command, input=data, capture_output=True, env=env)
    if done.returncode:
        raise RuntimeError(f"haocompact {' '.join(arguments)}: {done.stderr.decode()[-500:]}")
    return done.stdout


# ------------------------------------------------------------------------- messages in, one text out
def haocompact_text(messages: list[dict[str, str]], budget: int | None) -> str:
    """The compacted messages; a summary that is too long for the budget gets what the rest leaves it."""
    if all(m["role"] == "system" for m in messages):
        return "\n\n".join(m["content"] for m in messages)  # nothing to summarise
    data = b"".join(json.dumps(m, ensure_ascii=False).encode() + b"\n" for m in messages)
    options = ("--format", "openai", "--keep-recent", "2000" if budget is None else "20")
    text = _contents(
        run_haocompact(data, *options, *(() if budget is None else ("--summary-chars", str(budget))))
    )
    if budget is not None and len(text) > budget and len(messages) > 1:
        chars = max(1, 2 * budget - len(text))
        text = _contents(run_haocompact(data, *options, "--summary-chars", str(chars)))
    return text


def _contents(data: bytes) -> str:
    return "\n\n".join(json.loads(line)["content"] for line in data.splitlines())


def last_text(messages: list[dict[str, str]], budget: int | None) -> str:
    return last_messages("", [Turn(m["role"], m["content"]) for m in messages], budget or LIMIT)


def lcc_text(messages: list[dict[str, str]], budget: int | None) -> str:
    return lcc("", [Turn(m["role"], m["content"]) for m in messages])


def available() -> list[str]:
    return ["haocompact", "last messages", *(["lcc compact"] if HAS_LCC else [])]


def as_text(turns: list[Turn]) -> str:
    return "\n\n".join(f"[{t.role}]: {t.text}" for t in turns if t.text)


def last_messages(text: str, turns: list[Turn], limit: int = LIMIT) -> str:
    """The newest messages that fit; of one that doesn't, nothing."""
    kept: list[str] = []
    for turn in reversed(turns):
        line = as_text([turn])
        if sum(map(len, kept)) + len(line) > limit:
            break
        kept.insert(0, line)
    return "\n\n".join(kept)


def lcc(text: str, turns: list[Turn]) -> str:
    """lcc's offline judgment (`--provider mechanical`) with the last request as its objective."""
    whole = "\n\n".join(x for x in (text, as_text(turns)) if x)
    asked = next((t.text[:500] for t in reversed(turns) if t.role == "user"), "continue")
    done = subprocess.run([str(LCC), "compact", "-", "-q", asked, "--provider", "mechanical"], input=whole,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"lcc: {done.stderr.strip()[-300:]}")
    return done.stdout


LCC = Path(sys.executable).with_name("lcc")
HAS_LCC = LCC.exists()
WAYS = [
    Way("haocompact", FORMS, ("known", "unseen")),
    Way("excerpt (the seed's)", FORMS, ("known",), ("--summarizer", "excerpt", "--compat", "seed")),
    Way("last messages"),
    *([Way("lcc compact", seeds=1)] if HAS_LCC else []),
]
