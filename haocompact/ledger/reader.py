"""Messages -> ledger -> summary."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from haocompact.compaction import (
    COMPACTION_SUMMARY,
    Message,
    Part,
    Shell,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from haocompact.ledger.budget import MAX_CHARS, budget_of, render_within
from haocompact.ledger.entries import (
    AROUND,
    ASKED,
    ASSISTANT,
    COMMAND,
    EARLY,
    EDITED,
    LATEST,
    LEAST,
    PLANNED,
    SYSTEM,
    TOOL,
    TURN_KINDS,
    USER,
    Entry,
    Ledger,
    shape_of,
)
from haocompact.ledger.lines import clean, cut_middle
from haocompact.ledger.outputs import (
    BRIEF,
    CHECKBOX,
    END,
    NOTABLE,
    STATUS,
    Call,
    call_of,
    error_line,
    exit_code,
    looks_failed,
    outcome_of,
    plain_lines,
    plan_items,
    signature,
    whole_sentences,
)
from haocompact.ledger.wording import (
    BLOCKED,
    DECISION,
    DID,
    DOING,
    DONE,
    FACT,
    FLAT_BULLET,
    GOAL,
    HAN,
    NEXT,
    PLANS,
    RULE,
    STRONG,
    TELLING,
    Said,
    judge_assistant,
    judge_user,
    leads_to,
    looks_like_prose,
    refers_back,
    sentences,
)

_OPENING = re.compile(r"<([A-Za-z][\w-]{0,60})\b[^<>]{0,400}>")
_INJECTED = {"instructions", "environment", "output", "stdout", "stderr", "returncode", "context"}
_INJECTED |= {"documents", "attachment", "observation", "document", "file", "files", "page", "result", "log"}
_INJECTED |= {"paste", "pasted", "quote", "email", "article", "source", "content", "contents", "tool", "web"}
_LABELLED = re.compile(r"\s*[A-Z]\w*: \S")
_QUOTED = re.compile(r"^[ \t]*>.*$", re.M)  # what somebody else said
_NOT_A_REQUEST = ("Caveat: The messages below", "[Request interrupted")
_STANDING = ("# AGENTS.md instructions", "# CLAUDE.md", "Contents of ")
PLENTY = 2_000_000  # characters, past which only figures and decisions of assistant and tools are looked for,
VAST = 5_000_000  # and past which of an output only the whole sentences near its ends are
_SUMMARIES = ("This session is being continued from a previous", "Another language model started to solve")
_OBSERVED = (
    "OBSERVATION:",
    "Observation:",
    "EXECUTION RESULT",
    "Exit code:",
    "Tool result:",
    "Command output:",
)


def without_injected(text: str) -> str:
    """The user's own words: markup that a client put around or between them is left out. Linear time."""
    if "</" not in text:
        return text
    kept: list[str] = []
    position, unclosed = 0, set[str]()
    for match in _OPENING.finditer(text):
        tag = match[1]
        injected = "-" in tag or "_" in tag or tag.lower() in _INJECTED
        if match.start() < position or tag in unclosed or not injected:
            continue
        end = text.find(f"</{tag}>", match.end()) if len(unclosed) < 50 else -1
        if end < 0:
            unclosed.add(tag)
            continue
        kept.append(text[position : match.start()])
        position = end + len(tag) + 3
    return "".join((*kept, text[position:]))


def _is_spoken(line: str) -> bool:
    """Words that join other words, few code marks: not a log, a table or a listing."""
    if _LABELLED.match(line) or not looks_like_prose(line):
        return False
    return HAN.search(line) is not None or not TELLING.isdisjoint(line.split())


def own_words(text: str) -> tuple[str, str]:
    """(what a user wrote, what they pasted): of a long paste, its first and last lines are theirs
    if they are spoken."""
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) <= 12 or 2 * sum(map(_is_spoken, lines)) >= len(lines):
        return text, ""
    return "\n".join(filter(_is_spoken, (*lines[:3], *lines[-3:]))), "\n".join(lines[3:-3])


class Reader:
    """Fills a ledger from messages, one at a time; holds nothing of a message but its entries."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.in_turn = False
        self.chars = 0
        self.carried = 0
        self._planned = False
        self._request: tuple[str, bool] | None = None  # the last one, and whether it opens a split turn
        self._calls: dict[str | None, Call] = {}
        self._tasks: dict[str, tuple[str, str]] = {}
        self._outputs: dict[int, None] = {}
        self._shapes: Counter[int] = Counter()

    def read(self, message: Message) -> None:
        if message.hidden:
            return
        if not self.ledger.message:
            _fold_turn(self.ledger)
        self.ledger.message += 1
        for part in message.parts:
            self.chars += _length(part)
            if isinstance(part, Text):
                self._text(message, part.text)
            elif isinstance(part, ToolCall):
                self._call(part)
            elif isinstance(part, ToolResult):
                self._result(
                    self._calls.pop(part.id, Call(part.name or "tool")), "\n".join(part.texts), part.is_error
                )
            elif isinstance(part, Shell):
                self._result(Call("bash", part.command[:2000]), part.output, bool(exit_code(part.status)))

    # -- what was said
    def _text(self, message: Message, text: str) -> None:
        if message.kind == COMPACTION_SUMMARY or (message.role == "system" and text.startswith("## Goal\n")):
            self._absorb(text)
        elif message.role == "user":
            self._user(without_injected(text).strip())
        elif message.role in ("assistant", "branchSummary"):
            self._assistant(text)
        elif message.role == "system":
            self._system(text)
        else:
            self._facts(text)

    def _absorb(self, text: str) -> None:
        """A summary that stands among the messages is taken in as the previous one is."""
        self.carried += len(text)
        self.chars -= len(text)
        other = Ledger.of(re.split(r"\n\n(?=<read-files>\n|<modified-files>\n|<<ccr:)", text.strip())[0])
        _fold_turn(other)
        self.ledger.left_out += other.left_out
        for entry in other.entries:
            if entry.who == LATEST:
                self._demote()
                self._request = None
            if entry.who == LATEST or self.ledger.at(entry.key) is None:
                self.ledger.put(entry, news=False)

    def _user(self, text: str) -> None:
        if not text or text.startswith(_NOT_A_REQUEST):
            return
        if text.startswith((*_OBSERVED, *_STANDING, *_SUMMARIES)):
            self._by_others(text)
            return
        self._demote()
        own, pasted = own_words(_QUOTED.sub("", text) if ">" in text else text)
        self._facts(pasted)
        self._sentences(own)
        self._request = text, self.in_turn

    def _by_others(self, text: str) -> None:
        """What a client sends in the user's name: outputs, standing instructions, its own summaries."""
        if text.startswith(_OBSERVED):
            self._result(Call(), text, False)
        elif text.startswith(_STANDING):
            self._system(text)
        else:
            self._absorb(text)

    def _demote(self) -> None:
        """The request that was the latest becomes one of the requests."""
        entry = self.ledger.latest()
        if entry is None:
            return
        entry.gone = True
        known = [e.text for e in self.ledger.find(GOAL, RULE, FACT)]
        lines = [said.text for said in sentences(FLAT_BULLET.sub("\n- ", entry.text))]
        news = [x for x in lines if not any(x in k or (k in x and len(k) > 20) for k in known)]
        self._sentences("\n".join(news))

    def close(self) -> Ledger:
        """The ledger, the last request word for word in it."""
        text, in_turn = self._request or ("", False)
        latest = cut_middle(clean(text), 2 * MAX_CHARS)
        if latest and latest != "(none)":
            self.ledger.put(Entry(ASKED, latest, USER) if in_turn else Entry(GOAL, latest, LATEST))
        return self.ledger

    def _sentences(self, text: str) -> None:
        """The sentences of a request; those of a long text weigh less, the more it has that weigh as much."""
        judged = _with_what_they_refer_to([(*judge_user(said), said) for said in sentences(text)])
        weights = sorted((w for _, w, _ in judged), reverse=True)
        for kind, weight, said in judged:
            if weight >= LEAST:
                above = weights.index(weight)
                weight -= min(6.0, max(0, above - 6) * 0.3)
                self.ledger.add(kind, said.text, USER, weight, limit=400, said=said)

    def _system(self, text: str) -> None:
        for said in sentences(text):
            kind, weight = judge_user(said)
            if kind == RULE:
                self.ledger.add(RULE, said.text, SYSTEM, weight - 3)

    def _assistant(self, text: str) -> None:
        self._checklist(text)
        proposed = False
        floor = max(1.5, self.ledger.floor(ASSISTANT, FACT, DECISION, DONE, EARLY, AROUND))
        for said in sentences(text, telling=self.chars > PLENTY):
            if said.bullet and said.lead and leads_to(said.lead, PLANS):
                if not proposed:
                    self.ledger.clear(NEXT, who=ASSISTANT)
                proposed = True
                self.ledger.add(NEXT, said.text, ASSISTANT, limit=200)
                continue
            kind, weight = judge_assistant(said, floor)
            if weight >= floor:
                self.ledger.add(self._placed(kind), said.text, ASSISTANT, weight, said=said)

    def _placed(self, kind: str) -> str:
        """In the first half of a split turn, work and facts stand in its own block."""
        return {DONE: EARLY, DECISION: EARLY, FACT: AROUND}.get(kind, kind) if self.in_turn else kind

    # -- plans
    def _checklist(self, text: str) -> None:
        if self._planned or "[ ]" not in text:
            return
        boxes = CHECKBOX.findall(text)
        if len(boxes) >= 2:
            self._plan(
                [({" ": "pending", "~": "in_progress"}.get(mark, "completed"), item) for mark, item in boxes]
            )

    def _plan(self, items: list[tuple[str, str]]) -> None:
        """The last state of a plan replaces the one before; what it completed is done."""
        self.ledger.clear(DOING, NEXT)
        for status, text in items:
            kind = STATUS.get(status.lower().replace("-", "_"), NEXT)
            if kind:
                self.ledger.add(kind, text, USER if kind == NEXT else ASSISTANT, PLANNED, limit=200)

    def _task(self, arguments: Mapping[str, object]) -> None:
        """Single tasks: created by subject, later updated by number."""
        number = str(arguments.get("taskId") or len(self._tasks) + 1)
        status, subject = self._tasks.get(number, ("pending", ""))
        subject = str(arguments.get("subject") or subject)
        if len(self._tasks) < 500:
            self._tasks[number] = str(arguments.get("status") or status), subject
        self._plan([(s, t) for s, t in self._tasks.values() if t])

    # -- what was done
    def _call(self, part: ToolCall) -> None:
        arguments = part.arguments if isinstance(part.arguments, dict) else {"input": part.arguments}
        name = part.name.rpartition("__")[2].rpartition(".")[2]
        items = plan_items(arguments)
        if name in ("TaskCreate", "TaskUpdate"):
            self._planned = True
            self._task(arguments)
        elif items:
            self._planned = True
            self._plan(items)
        if len(self._calls) > 1000:
            self._calls.clear()
        self._calls[part.id] = call_of(name, arguments)

    def _result(self, call: Call, text: str, is_error: bool) -> None:
        if is_error or looks_failed(call, text):
            self.ledger.add(BLOCKED, f"`{call.label}` failed: {error_line(text)}", TOOL, 2.0, limit=500)
        else:
            self._resolve(f"`True{signature(call.label)}")
            self._did(call, text)
        self._facts(text, besides=call.path if call.edits else "")

    def _resolve(self, key: str) -> None:
        blocked = self.ledger.at(key)
        if blocked is not None:
            blocked.gone = True
            self.ledger.add(DONE, f"Resolved: {blocked.text}", ASSISTANT, 2.0, limit=520)

    def _did(self, call: Call, text: str) -> None:
        done = self._placed(DONE)
        if call.edits:
            known = self.ledger.at(f"`{call.path}")
            match = EDITED.match(known.text) if known else None
            times = int(match[2] or 1) + 1 if match else 1
            self.ledger.add(
                done, f"Edited `{call.path}`" + (f" ({times} times)" if times > 1 else ""), ASSISTANT
            )
        elif call.command and NOTABLE.search(call.command):
            outcome = outcome_of(call.command, text)
            self.ledger.add(done, f"`{call.label}` ok" + (f": {outcome}" if outcome else ""), ASSISTANT, 2.0)

    def _facts(self, text: str, besides: str = "") -> None:
        """Facts in plain words of an output, unless the same output was read before."""
        if len(text) < 24 or hash(text) in self._outputs:
            return
        if len(self._outputs) > 5000:
            self._outputs.clear()
        self._outputs[hash(text)] = None
        floor = max(1.5, self.ledger.floor(TOOL, FACT, AROUND))
        plain, vast = without_injected(text) if "<system-" in text else text, self.chars > VAST
        found = whole_sentences(plain, floor, BRIEF) if vast else plain_lines(plain, floor, self._end)
        # One plain line among code or logs tells more than a page of them.
        common = min(1.5, math.log2(len(found) + 1) / 4)
        for weight, line in sorted(found, key=lambda p: -p[0])[:6]:
            weight -= common + (self._routine(line) if weight - common >= LEAST else 0)
            if weight >= LEAST and (not besides or besides not in line):
                self.ledger.add(self._placed(FACT), line, TOOL, weight)

    @property
    def _end(self) -> int:
        """How much of each end of an output is read line by line, in characters."""
        return END if self.chars <= PLENTY else BRIEF

    def _routine(self, line: str) -> float:
        """How often a line of this shape was seen: `Checked 12 files in 14 ms.` is routine."""
        if len(self._shapes) > 50_000:
            self._shapes.clear()
        shape = hash(shape_of(line))
        self._shapes[shape] += 1
        return 0.7 * min(4, self._shapes[shape] - 1)


_Judged = tuple[str, float, Said]


def _with_what_they_refer_to(judged: list[_Judged]) -> list[_Judged]:
    """ "Find out why and fix it." goes with the sentence before it, and says little without one."""
    out: list[_Judged] = []
    for kind, weight, said in judged:
        if kind != GOAL or not refers_back(said):
            out.append((kind, weight, said))
        elif not out or out[-1][2] in STRONG or len(out[-1][2].text) > 250:
            out.append((kind, weight - 2, said))
        else:
            _, other, before = out.pop()
            out.append((GOAL, max(weight, other) + 0.5, Said(f"{before.text} {said.text}", before.lead)))
    return out


def _length(part: Part) -> int:
    if isinstance(part, (Text, Thinking)):
        return len(part.text)
    if isinstance(part, ToolResult):
        return sum(map(len, part.texts))
    if isinstance(part, Shell):
        return len(part.command) + len(part.output)
    return _size(part.arguments) if isinstance(part, ToolCall) else 0


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 0


def _fold_turn(ledger: Ledger) -> None:
    """The block of an earlier split turn joins the history that it now belongs to."""
    for entry in ledger.find(*TURN_KINDS):
        entry.gone = True
        done = any(p.match(entry.text) for p in (COMMAND, EDITED, DID))
        kind = {ASKED: GOAL, EARLY: DONE if done else DECISION}.get(entry.kind, FACT)
        ledger.put(
            Entry(kind, entry.text, LATEST if entry.kind == ASKED else entry.who, entry.weight), news=False
        )


# ------------------------------------------------------------------------------------- the summarizer
def extract(history: Iterable[Message], prefix: Iterable[Message], previous: str | None, *,
            max_chars: int | None = None, reserved: int = 0) -> str:  # fmt: skip
    """The summary of `history`, of the first half `prefix` of a split turn, and of what `previous` holds.

    Each message is read once. The result has at most `max_chars` characters (default: a fifth of the removed
    text, 2,000 to 12,000), and about half of what it replaces at most; the latest request may exceed that.
    """
    reader = Reader(Ledger.of(previous))
    for message in history:
        reader.read(message)
    reader.in_turn = True
    for message in prefix:
        reader.read(message)
    carried = len(previous or "") + reader.carried
    return render_within(reader.close(), budget_of(reader.chars, carried, max_chars, reserved))
