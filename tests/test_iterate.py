"""Compact, let the session grow, compact again: ten times, in every format, with both strategies.

A `Story` is what was said, without a format: turns of prompts, thoughts, answers, calls and results, each with a
word of its own (`k0042q`) by which it is found again. A `Client` writes a story as its program would append it.
A `Chain` compacts and grows one session and remembers what it must still hold.
"""

import json
import random
import re
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from haocompact.compaction import COMPACTION_SUMMARY, ESTIMATORS, CompactionSettings, Text, Thinking, ToolCall
from haocompact.files import Source
from haocompact.formats import FORMATS, detect
from haocompact.formats.session import ReadOptions
from haocompact.pipeline import (
    Compacted,
    Request,
    Skipped,
    compact,
    directory,
    raw_segment,
    restore,
    segment_messages,
    store,
    summary_of,
    verify,
)
from haocompact.records import read
from haocompact.summarize import OFFLINE, Prompted

ROUNDS = 10
GROWTH = 9_000  # characters a round
KEEP = 600  # tokens, by `chars`
SUMMARY_CHARS = 12_000  # the most that an offline summary may have, file lists and markers apart
PREFIX = "This is the PREFIX of a turn"
WORD = re.compile(r"k\d{4}q")
MARKER = re.compile(r"^<<ccr:([0-9a-f]{16})>> ", re.MULTILINE)
PATHS = (
    *(f"src/part{i}.py" for i in range(8)),
    "README.md",
    "tests/test_parse.py",
    "etc/run.toml",
    "é/ü.txt",
)
TALK = """the parser reads each row of the table and passes it on while a second worker counts groups by day
so that old values are found again in the index after a restart of the small server in the shed"""


# ------------------------------------------------------------------------------------------ a story
@dataclass(frozen=True)
class Call:
    """`kind`: read, write, edit or run; `path` is a command when it runs one. `output` is its result."""

    id: str
    kind: str
    path: str
    output: str


@dataclass(frozen=True)
class Step:
    """One response of the model: a thought, a text (either may be empty) and calls."""

    thought: str
    text: str
    calls: tuple[Call, ...] = ()

    @property
    def results(self):
        """The calls in the order in which their results come: of three the last one first."""
        return self.calls[::-1] if len(self.calls) == 3 else self.calls


@dataclass(frozen=True)
class Turn:
    """`prompt` is empty when the turn goes on from before; `ends` is False when it will go on later."""

    prompt: str
    steps: tuple[Step, ...]
    ends: bool = True

    @property
    def texts(self):
        """Everything that is said, in order; of a call its id."""
        yield self.prompt
        for step in self.steps:
            yield from (
                step.thought,
                step.text,
                *(c.id for c in step.calls),
                *(c.output for c in step.results),
            )

    @property
    def size(self):
        return sum(map(len, self.texts))


class Story:
    """Random turns. `calls`: every call ever made, in order."""

    def __init__(self, seed, thinks=True):
        self.rng = random.Random(seed)
        self.thinks = thinks
        self.count = 0
        self.calls = []
        self.is_open = False

    def text(self, size, about=""):
        """About `size` characters that hold one new word."""
        self.count += 1
        parts = [f"{about} (k{self.count:04}q)." if about else f"About k{self.count:04}q."]
        while sum(map(len, parts)) < size:
            words = self.rng.choices(TALK.split(), k=self.rng.randint(6, 14))
            parts.append(f"{' '.join(words).capitalize()}.")
        return " ".join(parts)

    def call(self, kind=None, size=None):
        self.count += 1
        kind = kind or self.rng.choice(("read", "read", "write", "edit", "run"))
        path = f"make part{self.rng.randint(0, 9)}" if kind == "run" else self.rng.choice(PATHS)
        made = Call(
            f"call_k{self.count:04}q", kind, path, self.text(size or self.rng.choice((60, 300, 1500)))
        )
        self.calls.append(made)
        return made

    def step(self, calls=None):
        """A response with calls: mostly one, sometimes several at once; its words come before those of its calls."""
        thought = self.text(80) if self.thinks and self.rng.random() < 0.4 else ""
        text = self.text(self.rng.randint(30, 400)) if self.rng.random() < 0.6 else ""
        count = self.rng.choice((1, 1, 1, 2, 3)) if calls is None else calls
        return Step(thought, text, tuple(self.call() for _ in range(count)))

    def turn(self, about="", steps=None, ends=True):
        prompt = self.text(self.rng.randint(40, 600), about)
        count = self.rng.randint(0, 4) if steps is None else steps
        made = [self.step() for _ in range(count)]
        if ends:
            made.append(Step("", self.text(self.rng.randint(60, 900))))
        return Turn(prompt, tuple(made), ends)

    def going_on(self, steps, ends=True):
        """More of the turn that did not end."""
        last = [Step("", self.text(200))] if ends else []
        return Turn("", (*(self.step() for _ in range(steps)), *last), ends)

    def growth(self, *first):
        """At least GROWTH characters: what is left of the last turn, the turns `first`, then new ones."""
        turns = [*first]
        if self.is_open:
            turns.insert(0, self.going_on(self.rng.randint(1, 3)))
        while (
            sum(t.size for t in turns) < GROWTH or len(turns) < 5
        ):  # five: one stands before any tail of six messages
            turns.append(self.turn())
        self.is_open = self.rng.random() < 0.3
        if self.is_open:
            turns.append(self.turn(steps=self.rng.randint(1, 2), ends=False))
        return turns


# ---------------------------------------------------------------------------------------- the clients
class Client:
    """Writes turns as one program appends them to its file; `resume` looks at the file as that program does.

    `reads`: whether the format has a tool for reading files. `loose`: keys that a compaction may change.
    """

    format = ""
    reads = True
    thinks = True
    loose: tuple[tuple[str, ...], ...] = ()

    def __init__(self):
        self.now = datetime(2026, 3, 2, 9, tzinfo=UTC)
        self.made = 0

    def stamp(self):
        self.now += timedelta(seconds=1)
        return self.now.strftime("%Y-%m-%dT%H:%M:%S.250Z")

    def id(self):
        self.made += 1
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.format}{self.made}"))

    def first(self):
        return iter(())

    def start(self):
        return encoded(self.first())

    def grow(self, data, turns):
        self.resume([json.loads(line) for line in data.splitlines()])
        return encoded(obj for turn in turns for obj in self.turn(turn))

    def resume(self, objects):
        pass

    def turn(self, turn):
        if turn.prompt:
            yield from self.prompt(turn.prompt)
        for step in turn.steps:
            yield from self.step(step)

    def prompt(self, text):
        raise NotImplementedError

    def step(self, step):
        raise NotImplementedError


def encoded(objects):
    return b"".join(
        json.dumps(o, ensure_ascii=False, separators=(",", ":")).encode() + b"\n" for o in objects
    )


def arguments_of(call, key="path"):
    match call.kind:
        case "run":
            return {"command": call.path}
        case "read":
            return {key: call.path, "offset": 1}
        case "write":
            return {key: call.path, "content": "pass\n"}
    return {key: call.path, "oldText": "a", "newText": "b"}


NAMES = {"run": "bash", "read": "read", "write": "write", "edit": "edit"}


class Pi(Client):
    format = "pi"
    loose = (("parentId",),)

    def first(self):
        yield {
            "type": "session",
            "version": 3,
            "id": self.id(),
            "timestamp": self.stamp(),
            "cwd": "/home/ida",
        }

    def resume(self, objects):
        self.leaf = objects[-1]["id"] if len(objects) > 1 else None

    def entry(self, kind, **fields):
        own = self.id()[-8:]
        obj = {"type": kind, "id": own, "parentId": self.leaf, "timestamp": self.stamp(), **fields}
        self.leaf = own
        return obj

    def message(self, role, content, **fields):
        return self.entry("message", message={"role": role, "content": content, **fields})

    def prompt(self, text):
        if self.made % 3 == 0:
            yield self.entry("model_change", provider="anthropic", modelId=f"claude-{self.made}")
        yield self.message("user", [{"type": "text", "text": text}])

    def step(self, step):
        content = [{"type": "thinking", "thinking": step.thought}] if step.thought else []
        content += [{"type": "text", "text": step.text}] if step.text else []
        content += [
            {"type": "toolCall", "id": c.id, "name": NAMES[c.kind], "arguments": arguments_of(c)}
            for c in step.calls
        ]
        usage = {"input": 900, "output": 50, "cacheRead": 0, "cacheWrite": 0, "totalTokens": 950}
        stop = "toolUse" if step.calls else "stop"
        yield self.message("assistant", content, provider="anthropic", usage=usage, stopReason=stop)
        for call in step.results:
            output = [{"type": "text", "text": call.output}]
            yield self.message(
                "toolResult", output, toolCallId=call.id, toolName=NAMES[call.kind], isError=False
            )


class PiV1(Pi):
    loose = ()

    def first(self):
        yield {"type": "session", "id": self.id(), "timestamp": self.stamp(), "cwd": "/home/ida"}

    def resume(self, objects):
        self.leaf = None

    def entry(self, kind, **fields):
        return {"type": kind, "timestamp": self.stamp(), **fields}


class Claude(Client):
    format = "claude"
    loose = (("parentUuid",), ("timestamp",))
    tools = {"run": "Bash", "read": "Read", "write": "Write", "edit": "Edit"}  # noqa: RUF012
    session = "bb73cdf0-1106-4633-a8fa-cfa2a1dabf7f"

    def first(self):
        yield {"type": "agent-setting", "agentSetting": "default", "sessionId": self.session}

    def resume(self, objects):
        self.leaf = next((o["uuid"] for o in reversed(objects) if o.get("uuid")), None)

    def line(self, kind, message, parent=None, **fields):
        own = self.id()
        obj = {"parentUuid": parent or self.leaf, "isSidechain": False, "type": kind, "message": message,
               "uuid": own, "timestamp": self.stamp(), "userType": "external", "cwd": "/home/mara",
               "sessionId": self.session, "version": "2.1.97", "gitBranch": "main", **fields}  # fmt: skip
        self.leaf = own
        return obj

    def prompt(self, text):
        yield {
            "type": "file-history-snapshot",
            "messageId": self.id(),
            "snapshot": {},
            "isSnapshotUpdate": False,
        }
        yield self.line("user", {"role": "user", "content": text}, promptId=self.id())

    def step(self, step):
        """One line a block; results of parallel calls hang on their own calls and may come in any order."""
        usage = {"input_tokens": 6, "cache_creation_input_tokens": 176, "cache_read_input_tokens": 800,
                 "output_tokens": 56}  # fmt: skip
        message = {"model": "claude-sonnet-4-5", "id": f"msg_{self.id()}", "type": "message",
                   "role": "assistant", "stop_reason": "tool_use" if step.calls else "end_turn",
                   "usage": usage}  # fmt: skip
        blocks = [{"type": "thinking", "thinking": step.thought, "signature": "Eq=="}] if step.thought else []
        blocks += [{"type": "text", "text": step.text}] if step.text else []
        blocks += [{"type": "tool_use", "id": c.id, "name": self.tools[c.kind],
                    "input": arguments_of(c, "file_path")} for c in step.calls]  # fmt: skip
        asked = {}
        for block in blocks:
            obj = self.line("assistant", message | {"content": [block]}, requestId="req_01")
            asked[block.get("id")] = obj["uuid"]
            yield obj
        for call in step.results:
            result = {"tool_use_id": call.id, "type": "tool_result", "content": call.output}
            source = asked[call.id]
            yield self.line(
                "user", {"role": "user", "content": [result]}, source, sourceToolAssistantUUID=source
            )


class Codex(Client):
    """Legacy rollouts: items and events side by side."""

    format = "codex"
    reads = False
    thread = "019c1a40-2f00-7b31-9c55-6d0e4f7a1001"

    def meta(self):
        return {"id": self.thread, "timestamp": self.stamp(), "cwd": "/home/mara", "originator": "codex_cli_rs",
                "cli_version": "0.142.0", "source": "cli", "model_provider": "openai"}  # fmt: skip

    def first(self):
        yield self.line("session_meta", self.meta())

    def line(self, kind, payload):
        return {"timestamp": self.stamp(), "type": kind, "payload": payload}

    def item(self, kind, **fields):
        return self.line("response_item", {"type": kind, **fields})

    def event(self, kind, **fields):
        return self.line("event_msg", {"type": kind, **fields})

    def turn(self, turn):
        if turn.prompt:
            self.turn_id = self.id()
            yield self.event("task_started", turn_id=self.turn_id, model_context_window=272000)
            context = [{"type": "input_text", "text": "<environment_context>\n</environment_context>"}]
            yield self.item("message", role="user", content=context)
            yield self.line(
                "turn_context", {"turn_id": self.turn_id, "cwd": "/home/mara", "model": "gpt-5.5"}
            )
            yield self.item("message", role="user", content=[{"type": "input_text", "text": turn.prompt}])
            yield self.shown("user_message", turn.prompt)
        for step in turn.steps:
            yield from self.step(step)
        if turn.ends:
            yield self.event("task_complete", turn_id=self.turn_id, last_agent_message=None)

    def shown(self, kind, text):
        return self.event(kind, **{"text" if kind == "agent_reasoning" else "message": text})

    def step(self, step):
        if step.thought:
            yield self.shown("agent_reasoning", step.thought)
            summary = [{"type": "summary_text", "text": step.thought}]
            yield self.item(
                "reasoning", id=self.id(), summary=summary, content=None, encrypted_content="bm90"
            )
        if step.text:
            yield self.shown("agent_message", step.text)
            yield self.item("message", role="assistant", content=[{"type": "output_text", "text": step.text}])
        yield from map(self.call, step.calls)
        for call in step.results:
            kind = "function_call_output" if call.kind in ("run", "read") else "custom_tool_call_output"
            yield self.item(kind, call_id=call.id, output=call.output)
        used = {"input_tokens": 900, "cached_input_tokens": 0, "output_tokens": 50, "reasoning_output_tokens": 0,
                "total_tokens": 950}  # fmt: skip
        info = {"total_token_usage": used, "last_token_usage": used, "model_context_window": 272000}
        yield self.event("token_count", info=info, rate_limits=None)

    def call(self, call):
        if call.kind in ("run", "read"):
            words = json.dumps({"cmd": call.path if call.kind == "run" else f"cat {call.path}"})
            return self.item("function_call", name="exec_command", arguments=words, call_id=call.id)
        verb = "Add" if call.kind == "write" else "Update"
        patch = f"*** Begin Patch\n*** {verb} File: {call.path}\n+pass\n*** End Patch\n"
        return self.item(
            "custom_tool_call", status="completed", call_id=call.id, name="apply_patch", input=patch
        )


class CodexPaginated(Codex):
    """Lines are numbered, and what the screen shows are `item_completed` events. A compaction makes a new file."""

    loose = (("ordinal",), ("payload", "id"), ("payload", "session_id"), ("payload", "history_base"))

    def __init__(self):
        super().__init__()
        self.ordinal = 0

    def meta(self):
        return super().meta() | {"session_id": self.thread, "history_mode": "paginated", "history_base": None}

    def resume(self, objects):
        self.ordinal = objects[-1]["ordinal"] + 1
        self.thread = objects[0]["payload"]["id"]
        assert [o["ordinal"] for o in objects] == list(range(self.ordinal))

    def line(self, kind, payload):
        obj = {"timestamp": self.stamp(), "ordinal": self.ordinal, "type": kind, "payload": payload}
        self.ordinal += 1
        return obj

    def shown(self, kind, text):
        content = [{"type": "text", "text": text}]
        item = {
            "user_message": {"type": "UserMessage", "id": self.id(), "content": content},
            "agent_message": {"type": "AgentMessage", "id": self.id(), "content": content},
            "agent_reasoning": {"type": "Reasoning", "id": self.id(), "summary_text": [text]},
        }[kind]
        return self.event("item_completed", thread_id=self.thread, turn_id=self.turn_id, item=item)


class OpenAI(Client):
    format = "openai"
    thinks = False

    def first(self):
        yield {"role": "system", "content": "You help with a small program."}

    def prompt(self, text):
        yield {"role": "user", "content": text}

    def step(self, step):
        obj = {"role": "assistant", "content": step.text or None}
        if step.calls:
            obj["tool_calls"] = [
                {"id": c.id, "type": "function",
                 "function": {"name": NAMES[c.kind], "arguments": json.dumps(arguments_of(c))}}
                for c in step.calls
            ]  # fmt: skip
        yield obj | {"usage": {"prompt_tokens": 900, "completion_tokens": 50, "total_tokens": 950}}
        for call in step.results:
            yield {"role": "tool", "tool_call_id": call.id, "content": call.output}


class Anthropic(Client):
    """All results of a response stand in one message."""

    format = "anthropic"

    def prompt(self, text):
        yield {"role": "user", "content": text}

    def step(self, step):
        content = (
            [{"type": "thinking", "thinking": step.thought, "signature": "Er=="}] if step.thought else []
        )
        content += [{"type": "text", "text": step.text}] if step.text else []
        content += [
            {"type": "tool_use", "id": c.id, "name": NAMES[c.kind], "input": arguments_of(c)}
            for c in step.calls
        ]
        yield {"id": f"msg_{self.id()}", "type": "message", "role": "assistant", "content": content,
               "usage": {"input_tokens": 900, "output_tokens": 50}}  # fmt: skip
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": c.output} for c in step.results]
        if results:
            yield {"role": "user", "content": results}


class Haocode(Client):
    format = "haocode"

    def prompt(self, text):
        yield {"role": "user", "content": text}

    def step(self, step):
        obj = {"role": "assistant", "content": step.text}
        obj |= {"reasoning": step.thought} if step.thought else {}
        calls = [{"id": c.id, "name": NAMES[c.kind], "arguments": arguments_of(c)} for c in step.calls]
        obj |= {"tool_calls": calls} if calls else {}
        yield obj | {"usage": {"input": 900, "output": 50, "totalTokens": 950}}
        for c in step.results:
            yield {
                "role": "toolResult",
                "tool_call_id": c.id,
                "tool_name": NAMES[c.kind],
                "content": c.output,
            }


class Berry(Client):
    """An append-only log: `seq` runs on, over the compaction's own events too."""

    format = "berry"

    def first(self):
        yield {"format": "berry-agent/session", "version": 1}

    def resume(self, objects):
        self.seq = objects[-1].get("seq", -1) + 1
        assert [o["seq"] for o in objects[1:]] == list(range(self.seq))

    def event(self, kind, **data):
        obj = {"type": kind, "seq": self.seq, "time": int(self.now.timestamp() * 1000), "data": data}
        self.seq += 1
        self.stamp()
        return obj

    def turn(self, turn):
        if turn.prompt:
            yield self.event("user/message", content=turn.prompt, source="user")
            yield self.event("turn/start")
        for step in turn.steps:
            yield from self.step(step)
        if turn.ends:
            yield self.event("turn/end", reason="completed")

    def step(self, step):
        content = [{"type": "thinking", "thinking": step.thought}] if step.thought else []
        content += [{"type": "text", "text": step.text}] if step.text else []
        usage = {"input": 900, "output": 50, "cacheRead": 0, "cacheWrite": 0, "totalTokens": 950}
        yield self.event("assistant/message", content=content, usage=usage, stopReason="stop")
        for c in step.calls:
            yield self.event(
                "tool/call", toolCallId=c.id, name=NAMES[c.kind], arguments=json.dumps(arguments_of(c))
            )
        for c in step.results:
            yield self.event("tool/result", toolCallId=c.id, content=c.output)


CLIENTS = {
    "pi": Pi,
    "pi v1": PiV1,
    "claude": Claude,
    "codex": Codex,
    "codex paginated": CodexPaginated,
    "openai": OpenAI,
    "anthropic": Anthropic,
    "haocode": Haocode,
    "berry": Berry,
}


# ------------------------------------------------------------------------------------------- a chain
class Notebook:
    """A model that answers every prompt with headings and a mark of its own, and keeps the prompts."""

    def __init__(self):
        self.prompts = []

    def __call__(self, prompt, system_prompt, max_tokens):
        self.prompts.append(prompt)
        if PREFIX in prompt:
            return f"## Original Request\n{self.mark(len(self.prompts))}\n\n## Early Progress\n- none"
        return f"## Goal\n- {self.mark(len(self.prompts))}\n\n## Next Steps\n1. go on"

    @staticmethod
    def mark(number):
        return f"mark-{number:03}-here"


class Chain:
    """One session that is compacted and goes on. `whole`: as if it had never been compacted."""

    def __init__(self, client, strategy, folder, summarizer=OFFLINE, keep=KEEP):
        self.client = client
        self.settings = CompactionSettings(
            keep_recent_tokens=keep, estimator=ESTIMATORS["chars"], strategy=strategy
        )
        self.request = Request(self.settings, summarizer=summarizer, archive=folder / "archive.db")
        self.path = str(folder / "s.jsonl")
        self.data = self.whole = client.start()
        self.said, self.inputs, self.hashes, self.summaries = [], [], [], []
        self.sizes, self.written = [], []

    @property
    def source(self):
        return Source(self.path, self.data)

    @property
    def session(self):
        records = read(self.data)
        assert detect(records).name == self.client.format
        return FORMATS[self.client.format].read(records, ReadOptions())

    def grow(self, turns):
        new = self.client.grow(self.data, turns)
        self.data += new
        self.whole += new
        self.said += [word for turn in turns for word in words_in(turn)]

    def compact(self):
        result = compact(self.source, self.request)
        assert isinstance(result, Compacted), result.skip
        assert result.summary.degraded is None
        self.inputs.append(self.data)
        self.hashes.append(store(result).hash)
        self.written.append(len(result.output) - (len(self.data) if self.client.format == "berry" else 0))
        self.data = result.output
        self.summaries.append(summary_of(self.source, self.request))
        self.sizes.append(sum(m.tokens(self.settings.estimator) for m in self.session.messages))
        return result


def words_in(turn):
    return [word for text in turn.texts for word in WORD.findall(text)]


def words_of(messages):
    """The words of texts, thoughts, calls and results, in order."""
    found = []
    for message in messages:
        for part in message.parts:
            texts = (
                (part.text,) if isinstance(part, (Text, Thinking))
                else (part.id,) if isinstance(part, ToolCall)
                else part.texts
            )  # fmt: skip
            found += [word for text in texts for word in WORD.findall(text)]
    return found


def spoken(messages):
    """All but summaries (berry's archive keeps one as the user's message that it is in the log)."""
    return [
        m for m in messages if m.kind != COMPACTION_SUMMARY and not m.text.startswith("[COMPACTION-SUMMARY] ")
    ]


def check_active(chain, first_turn):
    """[summary] + kept messages: the end of what was said (and, with segment, its first turn); whole pairs."""
    summary, *kept = chain.session.messages
    assert summary.kind == COMPACTION_SUMMARY
    assert COMPACTION_SUMMARY not in {m.kind for m in kept}
    active = words_of(kept)
    if chain.settings.strategy == "segment":
        assert active[: len(first_turn)] == first_turn
        active = active[len(first_turn) :]
    assert active
    assert active == chain.said[-len(active) :]
    called = set()
    for part in (part for m in kept for part in m.parts):
        if isinstance(part, ToolCall):
            called.add(part.id)
        elif hasattr(part, "texts"):
            assert part.id in called
    return words_of(kept)


def check_nothing_lost(chain, active):
    """Each message is shown or retrieved, in the order in which it was said; each line is there or archived."""
    retrieved = [w for h in chain.hashes for w in words_of(spoken(segment_messages(h, chain.request)))]
    if chain.settings.strategy == "segment":
        assert sorted(retrieved + active) == sorted(chain.said)
    else:
        assert retrieved + active == chain.said
    archived = [line for h in chain.hashes for line in b"".join(raw_segment(h, chain.request)).splitlines()]
    there = {bare(line, chain.client.loose) for line in (*archived, *chain.data.splitlines())}
    assert [line for line in chain.whole.splitlines() if bare(line, chain.client.loose) not in there] == []


def bare(line, loose):
    """The line without what its client forces a compaction to change."""
    obj = json.loads(line)
    for *outer, key in loose:
        inner = obj
        for name in outer:
            inner = inner.get(name, {})
        if not outer or obj["type"] == "session_meta":
            inner.pop(key, None)
    return json.dumps(obj)


def check_directory(chain):
    assert MARKER.findall(chain.summaries[-1]) == chain.hashes
    assert chain.summaries[-1].endswith(" characters)")
    listed = directory(chain.source, chain.request)
    assert [s.hash for s in listed.segments] == chain.hashes
    assert listed.missing == ()


def check_files(chain, calls, active):
    """The lists name every file of a call that is summarised by now; one that was changed stays so."""
    gone = [c for c in calls if c.id.removeprefix("call_") not in active and c.kind != "run"]
    changed = {c.path for c in gone if c.kind != "read"}
    seen = {c.path for c in gone if chain.client.reads} - changed
    reads, edits = (files_listed(chain.summaries[-1], name) for name in ("read-files", "modified-files"))
    assert (set(reads), set(edits)) == (seen, changed)
    assert (len(reads), len(edits)) == (len(seen), len(changed))
    if len(chain.summaries) > 1:
        before = [set(files_listed(chain.summaries[-2], name)) for name in ("read-files", "modified-files")]
        assert before[1] <= set(edits)
        assert before[0] <= set(reads) | set(edits)


def files_listed(summary, name):
    match = re.search(rf"^<{name}>\n(.*?)\n</{name}>$", summary, re.DOTALL | re.MULTILINE)
    return match[1].split("\n") if match else []


def check_no_op(chain):
    again = compact(chain.source, chain.request)
    assert isinstance(again, Skipped)
    assert again.skip.branch in ("nothing_to_summarize", "tail_is_summary", "no_gain")


def check_restore(chain):
    assert b"".join(restore(chain.source, chain.request)) == chain.whole
    for hash, data in zip(chain.hashes, chain.inputs, strict=True):
        assert b"".join(restore(chain.source, chain.request, hash)) == data
    assert list(verify(chain.request)) == []


def check_bounds(chain):
    """Equal growth, equal size: the context, and what a compaction writes (berry removes nothing: adds)."""
    assert max(chain.sizes) <= 4 * chain.sizes[2]
    assert max(chain.written) <= 4 * chain.written[2]
    assert max(map(len, chain.summaries)) <= SUMMARY_CHARS + 1200


RULE = "Never edit vendor/, it is generated"


def run_rounds(chain, story, each):
    """Ten rounds of growing and compacting, with the laws after each, and `each()`.

    The rule stands in the second turn, which both strategies summarise at once.
    """
    first = story.turn("Please port the importer", steps=1)
    second = story.turn(RULE, steps=2)
    for number in range(ROUNDS):
        chain.grow(story.growth(*((first, second) if number == 0 else ())))
        chain.compact()
        active = check_active(chain, words_in(first))
        check_directory(chain)
        check_files(chain, story.calls, active)
        check_nothing_lost(chain, active)
        check_no_op(chain)
        each()
    chain.grow([story.turn(steps=1)])
    check_restore(chain)
    check_bounds(chain)


# ------------------------------------------------------------------------------------------- the laws
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("strategy", ["keep-recent", "segment"])
@pytest.mark.parametrize("name", CLIENTS)
def test_ten_rounds_offline(name, strategy, seed, tmp_path):
    client = CLIENTS[name]()
    chain = Chain(client, strategy, tmp_path)

    def rule_is_still_there():
        assert RULE in chain.summaries[-1]

    run_rounds(chain, Story(f"{name} {strategy} {seed}", client.thinks), rule_is_still_there)


@pytest.mark.parametrize("strategy", ["keep-recent", "segment"])
@pytest.mark.parametrize("name", CLIENTS)
def test_ten_rounds_with_a_model(name, strategy, tmp_path):
    """What it answered in one round is in its prompt of the next, without file lists and markers."""
    client, model = CLIENTS[name](), Notebook()
    chain = Chain(client, strategy, tmp_path, Prompted("notebook", model))
    last = range(0)

    def last_answers_are_in_the_prompt():
        nonlocal last
        new = range(last.stop, len(model.prompts))
        prompts = [model.prompts[i] for i in new]
        # nothing new but a turn's first half: no prompt takes the previous summary in, it stays as it is
        places = [p for p in prompts if PREFIX not in p] or [chain.summaries[-1]]
        assert all(any(model.mark(i + 1) in place for place in places) for i in last)
        assert all(model.mark(i + 1) in chain.summaries[-1] for i in new)
        assert not any("<<ccr:" in p or "<read-files>" in p or "<modified-files>" in p for p in prompts)
        last = new

    run_rounds(chain, Story(f"{name} {strategy} model", client.thinks), last_answers_are_in_the_prompt)


def split_later(client, folder, summarizer):
    """A chain whose first cut is at a prompt and whose next rounds only go on with that prompt's turn."""
    chain = Chain(client, "keep-recent", folder, summarizer)
    story = Story(client.format, client.thinks)
    crossing = Turn(story.text(50, RULE), (Step("", "", (story.call("run", 4 * KEEP),)),))
    prompt = Turn(story.text(200), (Step("", story.text(100)),), ends=False)
    chain.grow([*(story.turn(steps=2) for _ in range(4)), crossing, prompt])
    plan = chain.compact().plan
    assert not plan.is_split_turn
    assert words_of(plan.retained_tail) == words_in(prompt)
    yield chain, plan
    for _ in range(2):
        chain.grow([story.going_on(25, ends=False)])
        plan = chain.compact().plan
        check_nothing_lost(chain, check_active(chain, ()))
        check_directory(chain)
        check_no_op(chain)
        yield chain, plan
    check_restore(chain)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_turn_that_is_split_later_keeps_what_was_said_before(name, tmp_path):
    """Without new history there is no prompt that could take the previous summary in: it stays as it is (R2)."""
    model = Notebook()
    rounds = split_later(CLIENTS[name](), tmp_path, Prompted("notebook", model))
    next(rounds)
    assert len(model.prompts) == 1
    chain, plan = next(rounds)
    assert plan.is_split_turn
    assert not plan.messages_to_summarize
    assert [PREFIX in p for p in model.prompts] == [False, True]
    assert model.mark(1) in chain.summaries[-1]
    assert model.mark(2) in chain.summaries[-1]
    next(rounds)
    assert model.mark(1) in model.prompts[2]
    assert model.mark(2) in model.prompts[2]
    assert list(rounds) == []


@pytest.mark.parametrize("end", [b"", b'\n{"type":"mess'])
@pytest.mark.parametrize("name", CLIENTS)
def test_what_follows_a_last_line_without_an_end_is_a_line_of_its_own(name, end, tmp_path):
    """A compaction ends a whole last line and takes a half-written one away; the client goes on behind it."""
    client = CLIENTS[name]()
    chain = Chain(client, "keep-recent", tmp_path)
    story = Story(name, client.thinks)
    chain.grow([story.turn() for _ in range(12)])
    chain.data = chain.whole = chain.data.removesuffix(b"\n") + end
    chain.compact()
    assert b"".join(restore(chain.source, chain.request)) == chain.whole
    chain.whole += b"\n"
    for _ in range(2):
        chain.grow([story.turn() for _ in range(12)])
        chain.compact()
    chain.grow([story.turn()])
    assert b"".join(restore(chain.source, chain.request)) == chain.whole


@pytest.mark.parametrize("name", CLIENTS)
def test_a_rule_outlives_a_split_turn_offline(name, tmp_path):
    for chain, _ in split_later(CLIENTS[name](), tmp_path, OFFLINE):
        assert RULE in chain.summaries[-1]
