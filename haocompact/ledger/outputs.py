"""What tool calls and their outputs say: what was done, what failed, facts in plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from haocompact.ledger.lines import clean, cut
from haocompact.ledger.wording import DOING, DONE, HAN, TELLING, judge_tool, looks_like_prose

CHECKBOX = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+\[([ xX~])\]\s+(.+)$", re.M)
STATUS = {
    **dict.fromkeys(("completed", "complete", "done", "true", "finished"), DONE),
    **dict.fromkeys(("in_progress", "doing", "active", "started"), DOING),
    **dict.fromkeys(("cancelled", "canceled", "deleted", "skipped"), ""),
}
NOTABLE = re.compile(
    r"\b(?:test\w*|pytest|jest|vitest|tox|nox|check|lint|mypy|ruff|eslint|tsc|build|make|cargo"
    r"|go (?:test|build|vet)"
    r"|mvn|gradle|npm|pnpm|yarn|bun|docker|kubectl|terraform|alembic|migrat\w+|deploy\w*|pip install|apt|brew"
    r"|git (?:commit|push|merge|rebase|tag|revert|reset|checkout -b|switch -c|branch|stash))\b"
)
_EDITS = re.compile(r"edit|write|patch|replace|create|insert|update_file|notebook", re.I)
_PATCHED = re.compile(r"^\*\*\* (?:Update|Add|Delete) File: (.+)$", re.M)
_EXIT = re.compile(r"(?:exit(?:ed)?(?:[ _](?:with|code|status))*|return ?code)[\"'>:=\s]*(-?\d{1,3})\b", re.I)
_ERROR = re.compile(
    r"\b(?:\w*(?:Error|Exception)|error|fatal|panic|[Ff]ailed|FAILED|denied|not found|No such file|cannot"
    r"|unable|refused|Invalid|invalid)\b"
)
_PLACE = re.compile(r'File "([^"\n]+)", line (\d+)')
_TALLY = re.compile(r"\b\d+ (?:passed|failed|errors?|tests?|examples?|skipped|warnings?)\b[^\n]{0,80}", re.I)
_TALLIED = ("passed", "failed", "error", "test", "example", "skipped", "warning")
_COMMITTED = re.compile(r"^\[([^\]\n]{1,80})\] (.{1,120})$", re.M)
_FIGURE = re.compile(r"\d(?!\d*(?:[:\t→|-]|\. ))")  # not the number of a line or of a list's item
_CODE_ENDS = frozenset(",({[=+&:：")
_LISTED = re.compile(r"\d{1,2}[.)] |[0-9a-f]{7,10} ")
_NUMBERED = re.compile(r"\s*\d+(?:→|\t|: ?| ?[|│] ?|-+ )")
_PLAIN = re.compile(
    r"(?:[-*•>#/!]{1,3} )?(?:\[\w+\] )?[A-Za-z$~\d\u3040-\u9fff\uac00-\ud7af][^{}<>|;\\]{5,}$"
)
_PATHS = ("path", "file_path", "filename", "notebook_path", "target_file", "file")
_PLAN_LISTS = ("todos", "plan", "items", "tasks", "steps", "todo_list", "todoList", "task_list")
_PLAN_TEXTS = ("content", "step", "title", "text", "task", "subject", "name", "description")
_GO_THERE = re.compile(r"^\s*(?:cd \S+ *(?:&&|;) *)+")
_CODE = re.compile(r"[{}<>;\\]")
_WHOLE_SENTENCE = re.compile(
    r"\n(?:[ \t]*\d+[→\t:|] ?)?([A-Z][^{}<>|;\\\n]{10,300}\.|[\u3400-\u9fff][^{}<>|;\\\n]{4,200}。)(?=\n)"
)
END, BRIEF = 6_000, 2_000  # characters of each end of a long output that are read line by line


@dataclass(frozen=True, slots=True)
class Call:
    """What a tool was asked to do: a command, or something with a path, which `edits` it or not."""

    name: str = "tool"
    command: str = ""
    path: str = ""
    edits: bool = False

    @property
    def label(self) -> str:
        return _label(self.name, self.command, self.path)


@lru_cache(maxsize=4096)
def _label(name: str, command: str, path: str) -> str:
    """One line that names it: the command without its `cd`, or the tool and its path."""
    line = _GO_THERE.sub("", command).strip().partition("\n")[0] if command else f"{name} {path}"
    return cut(clean(line), 90).replace("`", "'") or name or "tool"


def plan_items(arguments: Mapping[str, object]) -> list[tuple[str, str]]:
    """(status, text) of a todo list or plan among a call's arguments; empty when there is none."""
    for name in _PLAN_LISTS:
        value = arguments.get(name)
        if isinstance(value, str):
            return [
                ("completed" if mark in "xX" else "pending", item) for mark, item in CHECKBOX.findall(value)
            ]
        items = [x for x in map(_plan_item, value) if x] if isinstance(value, list) else []
        if items:
            return items
    return []


def _plan_item(item: object) -> tuple[str, str] | None:
    if not isinstance(item, dict):
        return None
    text = next((v for n in _PLAN_TEXTS if isinstance(v := item.get(n), str) and v.strip()), None)
    status = next((item[n] for n in ("status", "state", "completed", "done") if n in item), None)
    return (str(status), text) if text is not None and status is not None else None


def call_of(name: str, arguments: Mapping[str, object]) -> Call:
    """What a call does, whichever client made it."""
    command = next((arguments[n] for n in ("command", "cmd", "script") if arguments.get(n)), "")
    path = next((v for n in _PATHS if isinstance(v := arguments.get(n), str) and v), "")
    text = next((v for n in ("input", "patch") if isinstance(v := arguments.get(n), str)), "")
    if isinstance(command, list):
        command = command[-1]
    source = (text or str(command))[:4000]
    patched = _PATCHED.search(source) if "*** " in source else None
    if patched or (path and (_EDITS.search(name) or command in ("create", "str_replace", "insert"))):
        target = cut(clean(patched[1] if patched else path).replace("`", "'"), 200)
        return Call(name, path=target, edits=True)
    if command and not path:
        return Call(name, command=str(command)[:2000])
    return Call(name, path=path[:2000])


def signature(label: str) -> str:
    """What makes two commands the same try: program and first words, without flags and pipes."""
    words = [w for w in re.split(r"[|;&]|2>", label)[0].split() if not w.startswith("-") and "=" not in w]
    return " ".join(words[:3])


def exit_code(text: str) -> int | None:
    codes = _EXIT.findall(text) if "xit" in text or "eturn" in text else ()
    return int(codes[-1]) if codes else None


def looks_failed(call: Call, text: str) -> bool:
    code = exit_code(text[-300:])
    code = exit_code(text[:80]) if code is None else code
    if code is not None:
        return code != 0
    if text[:40].lstrip().lower().startswith(("error:", "fatal:", "<tool_use_error>", "error ")):
        return True
    return bool(call.command) and "Traceback (most recent call last)" in text[-8000:]


def error_line(text: str) -> str:
    """The line that says what went wrong, word for word, and where if the text tells."""
    tail = text[:2000] + "\n" + text[-6000:] if len(text) > 8000 else text
    lines = [x for x in tail.split("\n") if x.strip() and not (len(x) < 60 and _EXIT.search(x))]
    lines = lines or [tail.strip()]
    found = [x for x in lines if _ERROR.search(x)]
    traced = "Traceback" in tail
    line = (found[-1] if traced else found[0]) if found else lines[-1]
    places = _PLACE.findall(tail) if traced else []
    return cut(clean(line), 220) + (f" ({clean(':'.join(places[-1]))})" if places else "")


def outcome_of(command: str, text: str) -> str:
    committed = _COMMITTED.search(text[:2000]) if "git" in command else None
    if committed:
        return f"[{committed[1]}] {committed[2]}"
    tail = text[-3000:]
    low = tail.lower()
    tallies = _TALLY.findall(tail) if any(word in low for word in _TALLIED) else ()
    return clean(tallies[-1]) if tallies else ""


def whole_sentences(text: str, floor: float, end: int) -> list[tuple[float, str]]:
    """(weight, line) of the lines near both ends that are one sentence with a figure: a quick look."""
    ends = f"{text[:end]}\n{text[-end:]}" if len(text) > 2 * end else text
    lines = [x for x in ends.split("\n") if x.endswith((".", "。")) and 12 <= len(x) <= 400]
    judged = (_plain(x, floor // 0.5 / 2) for x in lines if _FIGURE.search(x) and not _CODE.search(x))
    return [(weight, line) for line, weight in judged if weight >= floor]


def plain_lines(text: str, floor: float = 1.5, end: int = END) -> list[tuple[float, str]]:
    """(weight, line) of the lines of an output that state something in plain words.

    Of a long output only lines with a figure are looked at, and of its middle only whole sentences: it is
    code or a page that can be read again. A shorter `end` takes every output for a long one.
    """
    middle: list[str] = []
    brief = end < END
    if len(text) > 2 * end:
        middle = _WHOLE_SENTENCE.findall(text, end, len(text) - end)
        text = f"{text[:end]}\n{text[-end:]}"
    lines = [x for x in text.split("\n") if 12 <= len(x) <= 400 and not _CODE.search(x)]
    if brief or len(text) > 3000:
        lines = [x for x in (*lines, *middle) if _FIGURE.search(x)]
    if text.isascii() or not HAN.search(text):
        lines = [x for x in lines if x.count(" ") >= 3 and not TELLING.isdisjoint(x.split())]
    judged = (_plain(line, floor // 0.5 / 2) for line in lines)
    return [(weight, line) for line, weight in judged if weight >= floor]


@lru_cache(maxsize=10_000)  # files are read, and commands run, again and again
def _plain(raw: str, floor: float) -> tuple[str, float]:
    numbered = _NUMBERED.match(raw)
    line = (raw[numbered.end() :] if numbered else raw).strip()
    if not line or line[-1] in _CODE_ENDS or not _PLAIN.match(line):
        return line, 0.0
    listed = _LISTED.match(line)
    weight = judge_tool(line[listed.end() :] if listed else line, floor) - 0.9 * bool(listed)
    if weight < floor or not looks_like_prose(line) or (line.count(" ") < 3 and not HAN.search(line)):
        return line, 0.0
    return line, 0.0 if "exit" in line and _EXIT.search(line) else weight
