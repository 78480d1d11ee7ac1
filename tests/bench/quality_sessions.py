"""Carriers of the quality bench: real sessions when they are there, invented ones otherwise, in three formats.

A session is a list of (role, text) turns; a tool's turn is (call, text) with a call's name and arguments before it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from haocompact.compaction import COMPACTION_SUMMARY, Text, ToolCall, ToolResult
from haocompact.formats import FORMATS, detect
from haocompact.formats.session import ReadOptions
from haocompact.records import read

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
FORMS = ("pi", "claude", "codex")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. An assistant's `calls` are (id, name, arguments); a tool's turn answers `answers`."""

    role: str
    text: str
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    answers: str = ""
    name: str = ""
    error: bool = False

    @property
    def size(self) -> int:
        return len(self.text) + sum(len(json.dumps(c[2])) for c in self.calls)


# ------------------------------------------------------------------------------------- real ones
def turns_of(path: Path) -> list[Turn]:
    """The active conversation of a file that haocompact reads."""
    records = read(path.read_bytes())
    session = FORMATS[detect(records).name].read(records, ReadOptions())
    turns = [t for m in session.messages if m.kind != COMPACTION_SUMMARY for t in _turns(m)]
    return [_named_apart(t, path.stem[-6:]) for t in turns]


def _named_apart(turn: Turn, name: str) -> Turn:
    """Ids that are not those of another session."""
    answers = name + turn.answers if turn.answers else ""
    return replace(turn, answers=answers, calls=tuple((name + i, n, a) for i, n, a in turn.calls))


def _turns(message: Any) -> Iterator[Turn]:
    texts = "\n".join(p.text for p in message.parts if isinstance(p, Text))
    calls = tuple((p.id or "", p.name, p.arguments if isinstance(p.arguments, dict) else {"input": str(p.arguments)})
                  for p in message.parts if isinstance(p, ToolCall))  # fmt: skip
    for part in message.parts:
        if isinstance(part, ToolResult):
            yield Turn(
                "tool", "\n".join(part.texts), answers=part.id or "", name=part.name, error=part.is_error
            )
    if message.role in ("user", "assistant") and (texts or calls):
        yield Turn(message.role, texts, calls)


@cache
def corpus() -> dict[str, list[Turn]]:
    """Name -> turns of the real sessions of 200 KB and more; empty on a machine without them."""
    found = {}
    for path in sorted(CORPUS.glob("*/*.jsonl")):
        if path.parent.name in ("pi", "claude-code", "codex") and path.stat().st_size > 200_000:
            turns = turns_of(path)
            if sum(t.size for t in turns) > 100_000:
                found[path.stem] = turns
    return found


# ------------------------------------------------------------------------------------- invented ones
_NOUNS = [
    "importer",
    "scheduler",
    "cache",
    "parser",
    "router",
    "exporter",
    "worker",
    "index",
    "queue",
    "session",
    "token",
    "report",
]
_VERBS = [
    "read",
    "write",
    "merge",
    "split",
    "load",
    "store",
    "check",
    "build",
    "send",
    "parse",
    "sort",
    "count",
]
_ASKS = (
    "Have a look at {p}, the {n} is slow again.",
    "The {n} test is red since this morning. Can you see why?",
    "Rename {a}_{n} so that it matches the others.",
    "Okay, go on with {p}.",
    "Why does {a}_{n} return nothing for an empty list?",
    "Good. Now the same for the {n}.",
)
_SAYS = (
    "Let me look at {p} first.",
    "I'll run the tests for the {n}.",
    "The change in {p} is small: {a}_{n} now takes the list as it is.",
    "Now I understand the structure. I'll update {p}.",
    "That works. Next I'll check the {n}.",
)


class _Inventor:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0

    def fill(self, pattern: str) -> str:
        pick = self.random.choice
        return pattern.format(n=pick(_NOUNS), a=pick(_VERBS), p=self.path())

    def path(self) -> str:
        pick = self.random.choice
        return f"{pick(('src', 'lib', 'tests'))}/{pick(_NOUNS)}/{pick(_VERBS)}_{pick(_NOUNS)}.py"

    def code(self, lines: int) -> str:
        return "\n".join(
            self.random.choice(
                (
                    f"{i:6}→def {self.fill('{a}_{n}')}(items, *, limit={self.random.randint(1, 99)}):",
                    f"{i:6}→    return [{self.fill('{a}')}(x) for x in items if x.{self.fill('{n}')}]",
                    f"{i:6}→    # {self.fill('{a} the {n} before the {n} is closed')}",
                    f"{i:6}→    self.{self.fill('{n}_{n}')} = {self.random.randint(0, 9999)}",
                    f"{i:6}→",
                )
            )
            for i in range(1, lines)
        )

    def log(self, lines: int) -> str:
        passed = "\n".join(
            f"tests/test_{self.fill('{n}')}.py::test_{self.fill('{a}_{n}')} PASSED [{i}%]"
            for i in range(lines)
        )
        return f"{passed}\n{lines} passed in {self.random.random() * 9:.2f}s"

    def step(self) -> Iterator[Turn]:
        self.count += 1
        path, id = self.path(), f"call{self.count}"
        kind = self.random.random()
        if kind < 0.5:
            call, text = ("Read", {"file_path": path}), self.code(self.random.randint(20, 160))
        elif kind < 0.75:
            call, text = ("Bash", {"command": f"pytest -q {path}"}), self.log(self.random.randint(5, 60))
        else:
            call = ("Edit", {"file_path": path, "old_string": self.code(4), "new_string": self.code(6)})
            text = f"The file {path} has been updated."
        yield Turn("assistant", self.fill(self.random.choice(_SAYS)), ((id, *call),))
        yield Turn("tool", text, answers=id, name=call[0])


def invented(seed: int, chars: int) -> list[Turn]:
    """A coding session of about so many characters: requests, files read, tests run, edits."""
    inventor, turns, size = _Inventor(seed), [], 0
    while size < chars:
        new = [Turn("user", inventor.fill(inventor.random.choice(_ASKS)))]
        for _ in range(inventor.random.randint(2, 9)):
            new += inventor.step()
        new.append(Turn("assistant", inventor.fill(inventor.random.choice(_SAYS))))
        turns += new
        size += sum(t.size for t in new)
    return turns


def chunks(sessions: dict[str, list[Turn]], seed: int, count: int, chars: int) -> list[list[Turn]]:
    """`count` stretches of at least `chars` characters, each beginning with a request."""
    if not sessions:
        return [invented(100 * seed + i, chars) for i in range(count)]
    names = sorted(sessions)
    random.Random(seed).shuffle(names)
    stream = [t for _ in range(4) for name in names for t in sessions[name]]
    found: list[list[Turn]] = [[]]
    size = 0
    for turn in stream:
        if size >= chars and turn.role == "user":
            if len(found) == count:
                break
            found.append([])
            size = 0
        found[-1].append(turn)
        size += turn.size
    return [_paired(chunk) for chunk in found]


def _paired(turns: list[Turn]) -> list[Turn]:
    """Without answers whose call is elsewhere, and without a second use of one id."""
    kept, known = [], set[str]()
    for turn in turns:
        if turn.answers and turn.answers not in known:
            continue
        known.discard(turn.answers)
        calls = tuple(c for c in turn.calls if c[0] not in known)
        known.update(c[0] for c in calls)
        kept.append(replace(turn, calls=calls))
    return kept


# ------------------------------------------------------------------------------------- three formats
@dataclass
class Writer:
    """Turns as lines of one client's format; goes on where the last line of a compacted file stops."""

    form: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    parent: str | None = None
    count: int = 0

    def add(self, turns: list[Turn], round_: int) -> bytes:
        self.lines = []
        if round_ == 0:
            self._open()
        for turn in turns:
            self.count += 1
            getattr(self, f"_{self.form}")(turn, f"r{round_}-")
        return b"".join(json.dumps(x, ensure_ascii=False).encode() + b"\n" for x in self.lines)

    def _stamp(self) -> str:
        hours, seconds = divmod(self.count, 3600)
        return f"2026-01-{1 + hours // 24:02}T{hours % 24:02}:{seconds // 60:02}:{seconds % 60:02}.000Z"

    def _open(self) -> None:
        if self.form == "pi":
            self.lines.append(
                {"type": "session", "version": 3, "id": "bench", "timestamp": self._stamp(), "cwd": "/w"}
            )
        elif self.form == "codex":
            meta = {"id": "bench", "timestamp": self._stamp(), "cwd": "/w", "originator": "codex_cli_rs",
                    "cli_version": "0.142.0", "source": "cli"}  # fmt: skip
            self.lines.append({"timestamp": self._stamp(), "type": "session_meta", "payload": meta})

    def _pi(self, turn: Turn, prefix: str) -> None:
        content: list[dict[str, Any]] = [{"type": "text", "text": turn.text}] if turn.text else []
        content += [
            {"type": "toolCall", "id": prefix + i, "name": n, "arguments": a} for i, n, a in turn.calls
        ]
        message: dict[str, Any] = {"role": turn.role, "content": content, "timestamp": self.count}
        if turn.role == "tool":
            message |= {
                "role": "toolResult",
                "toolCallId": prefix + turn.answers,
                "toolName": turn.name,
                "isError": turn.error,
            }
        id = f"{prefix[:2]}{self.count:06x}"
        self.lines.append(
            {
                "type": "message",
                "id": id,
                "parentId": self.parent,
                "timestamp": self._stamp(),
                "message": message,
            }
        )
        self.parent = id

    def _claude(self, turn: Turn, prefix: str) -> None:
        content: list[dict[str, Any]] = [{"type": "text", "text": turn.text}] if turn.text else []
        content += [{"type": "tool_use", "id": prefix + i, "name": n, "input": a} for i, n, a in turn.calls]
        if turn.role == "tool":
            content = [
                {
                    "type": "tool_result",
                    "tool_use_id": prefix + turn.answers,
                    "content": turn.text,
                    "is_error": turn.error,
                }
            ]
        role = "user" if turn.role == "tool" else turn.role
        id = f"00000000-0000-4000-8000-{self.count:012x}"
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "assistant":
            message |= {"id": f"msg_{self.count}", "type": "message", "model": "bench"}
        self.lines.append({"parentUuid": self.parent, "isSidechain": False, "type": role, "message": message,
                           "uuid": id, "timestamp": self._stamp(), "sessionId": "bench", "cwd": "/w",
                           "version": "2.0.0", "userType": "external"})  # fmt: skip
        self.parent = id

    def _codex(self, turn: Turn, prefix: str) -> None:
        def item(**payload: Any) -> None:
            self.lines.append({"timestamp": self._stamp(), "type": "response_item", "payload": payload})

        if turn.role == "tool":
            item(type="function_call_output", call_id=prefix + turn.answers, output=turn.text)
            return
        if turn.text:
            kind = "input_text" if turn.role == "user" else "output_text"
            item(type="message", role=turn.role, content=[{"type": kind, "text": turn.text}])
        for i, name, arguments in turn.calls:
            item(
                type="function_call",
                name=name,
                arguments=json.dumps(arguments, ensure_ascii=False),
                call_id=prefix + i,
            )

    def resume(self, compacted: bytes) -> None:
        """New lines hang on the last one that the client would hang them on."""
        last = [json.loads(line) for line in compacted.splitlines() if line.strip()]
        keys = {"pi": "id", "claude": "uuid"}
        if self.form in keys:
            self.parent = next(x[keys[self.form]] for x in reversed(last) if keys[self.form] in x)


def summary_in(compacted: bytes) -> str:
    """The summary that stands in a compacted file."""
    records = read(compacted)
    session = FORMATS[detect(records).name].read(records, ReadOptions())
    texts = [
        p.text
        for m in session.messages
        if m.kind == COMPACTION_SUMMARY
        for p in m.parts
        if isinstance(p, Text)
    ]
    return texts[-1] if texts else ""
