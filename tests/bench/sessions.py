"""Large invented sessions for the benches: pi, Claude Code and Codex, any size, the same bytes for the same seed.

Sizes follow real sessions: a line has about 2.5 KB on average, tool results are most of the bytes, some are
100 KB, now and then there is an image, and one line of 20 MB in sessions of 100 MB or more.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Writer = Callable[["Maker"], Iterator[Json]]

_WORDS = (
    "the of and to in is that it for was on are as with be at one have this from or had by but some what "
    "there we can out other were all your when up use word how said an each which do their time if will "
    "way about many then them would write like so these her long make thing see him two has look more day "
    "could go come did my sound no most number who over know water than call first people may down side "
    "been now find any new work part take get place made live where after back little only round man year "
    "came show every good me give our under name very through just form much great think say help low "
    "line before turn cause same mean differ move right boy old too does tell sentence set three want air "
    "well also play small end put home read hand port large spell add even land here must big high such "
    "follow act why ask men change went light kind off need house picture try us again "
)
WORDS = _WORDS.split()
CODE = (
    "def {a}_{b}({c}, limit={n}):\n    return [{c}.{a} for {b} in range(limit) if {b} % {n}]\n",
    '{a}.py:{n}: error: Argument {n} to "{b}" has incompatible type "{c}"\n',
    "-rw-r--r-- 1 ida staff {n} 2026-04-{d:02d} 07:52 src/{a}/{b}_{c}.py\n",
    '    self.{a} = {b}["{c}"] if {b} else None  # {a} {c} {b}\n',
    "{n:08x}: {a} {b} {c} <{n}> [{d}]\n",
    "PASSED tests/test_{a}.py::test_{b}_{c} ({n} ms)\n",
)


class Maker:
    """Seeded pieces of text; `size` is the bytes that are wanted in all, `at` a running clock in seconds."""

    def __init__(self, seed: int, size: int) -> None:
        self.random = random.Random(seed)
        self.size = size
        self.at = 0
        self.count = 0
        self.prose = self._pool(lambda: " ".join(self.random.choices(WORDS, k=12)).capitalize() + ". ")
        self.code = self._pool(self._code_line)
        self.image = base64.b64encode(self.random.randbytes(300_000)).decode()

    def _pool(self, piece: Callable[[], str], length: int = 4_000_000) -> str:
        parts, total = [], 0
        while total < length:
            parts.append(piece())
            total += len(parts[-1])
        return "".join(parts)

    def _code_line(self) -> str:
        a, b, c = self.random.choices(WORDS, k=3)
        line = self.random.choice(CODE)
        return line.format(a=a, b=b, c=c, n=self.random.randrange(1, 99999), d=self.random.randrange(1, 29))

    def text(self, pool: str, median: int, most: int) -> str:
        length = min(int(self.random.lognormvariate(0, 1) * median) + 20, most)
        start = self.random.randrange(len(pool) - length) if length < len(pool) else 0
        return (pool * (1 + length // len(pool)))[start : start + length]

    def id(self, digits: int = 8) -> str:
        return f"{self.random.getrandbits(4 * digits):0{digits}x}"

    def next_id(self) -> str:
        """Eight digits that never return."""
        self.count += 1
        return f"{self.count * 0x9E3779B1 % (1 << 32):08x}"

    def uuid(self) -> str:
        return "-".join(map(self.id, (8, 4, 4, 4, 12)))

    def stamp(self) -> str:
        self.at += self.random.randrange(1, 9)
        days, seconds = divmod(self.at, 86400)
        clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        return f"2026-04-{1 + days % 28:02d}T{clock}.000Z"

    def path(self) -> str:
        a, b = self.random.choices(WORDS, k=2)
        return f"src/{a}/{b}_{self.random.randrange(200)}.py"

    def step(self) -> tuple[str, Json, str, bool]:
        """One tool use: name, arguments, output, whether it failed."""
        name = self.random.choice(("read", "bash", "bash", "edit", "grep"))
        arguments: Json = {"path": self.path()}
        if name == "bash":
            arguments = {
                "command": f"cd src && pytest -q {self.path()} | tail -{self.random.randrange(5, 60)}"
            }
        if name == "edit":
            arguments |= {
                "oldText": self.text(self.code, 200, 4000),
                "newText": self.text(self.code, 240, 4000),
            }
        median = 150 if name == "edit" else 2500
        return name, arguments, self.text(self.code, median, 100_000), self.random.random() < 0.05


def pi(make: Maker) -> Iterator[Json]:
    yield {
        "type": "session",
        "version": 3,
        "id": make.uuid(),
        "timestamp": make.stamp(),
        "cwd": "/home/ida/src/app",
    }
    parent: str | None = None

    def entry(message: Json) -> Json:
        nonlocal parent
        line = {
            "type": "message",
            "id": make.next_id(),
            "parentId": parent,
            "timestamp": make.stamp(),
            "message": message,
        }
        parent = line["id"]
        return line

    used = 4000
    while True:
        content: list[Json] = [{"type": "text", "text": make.text(make.prose, 250, 5000)}]
        if make.random.random() < 0.02:
            content.append({"type": "image", "data": make.image, "mimeType": "image/png"})
        yield entry({"role": "user", "content": content, "timestamp": 0})
        for _ in range(make.random.randrange(2, 14)):
            name, arguments, output, failed = make.step()
            call, used = f"toolu_{make.id(24)}", 4000 + (used + 900) % 150_000
            thought = make.text(make.prose, 200, 4000)
            blocks = [{"type": "thinking", "thinking": thought, "thinkingSignature": make.id(200)},
                      {"type": "text", "text": make.text(make.prose, 120, 2000)},
                      {"type": "toolCall", "id": call, "name": name, "arguments": arguments}]  # fmt: skip
            usage = {"input": 6, "output": 66, "cacheRead": used, "cacheWrite": 330, "totalTokens": used + 402,
                     "cost": {"input": 1.8e-05, "output": 0.00099, "cacheRead": 0, "cacheWrite": 0.016}}  # fmt: skip
            yield entry({"role": "assistant", "content": blocks, "api": "anthropic-messages",
                         "provider": "anthropic", "model": "claude-sonnet-4-5", "usage": usage,
                         "stopReason": "toolUse", "timestamp": 0})  # fmt: skip
            yield entry({"role": "toolResult", "toolCallId": call, "toolName": name, "isError": failed,
                         "content": [{"type": "text", "text": output}], "timestamp": 0})  # fmt: skip


def claude(make: Maker) -> Iterator[Json]:
    session, parent = make.uuid(), None

    def line(kind: str, message: Json, **more: Any) -> Json:
        nonlocal parent
        made = {"parentUuid": parent, "isSidechain": False, "type": kind, "message": message, "uuid": make.uuid(),
                "timestamp": make.stamp(), "userType": "external", "cwd": "/home/mara/src/app", "sessionId": session,
                "version": "2.1.97", "gitBranch": "main"} | more  # fmt: skip
        parent = made["uuid"]
        return made

    used = 4000
    while True:
        yield line("user", {"role": "user", "content": make.text(make.prose, 250, 5000)})
        for _ in range(make.random.randrange(2, 14)):
            name, arguments, output, failed = make.step()
            call, used = f"toolu_{make.id(24)}", 4000 + (used + 900) % 90_000
            usage = {
                "input_tokens": 6,
                "cache_creation_input_tokens": 176,
                "cache_read_input_tokens": used,
                "output_tokens": 56,
            }
            head = {
                "model": "claude-sonnet-4-5-20250929",
                "id": f"msg_{make.id(26)}",
                "type": "message",
                "role": "assistant",
            }
            arguments = {"file_path" if k == "path" else k: v for k, v in arguments.items()}
            blocks = [{"type": "text", "text": make.text(make.prose, 200, 4000)},
                      {"type": "tool_use", "id": call, "name": name.title(), "input": arguments}]  # fmt: skip
            for block in blocks:
                yield line("assistant", head | {"content": [block], "stop_reason": "tool_use", "usage": usage},
                           requestId=f"req_{make.id(24)}")  # fmt: skip
            result: Json = {"tool_use_id": call, "type": "tool_result", "content": output, "is_error": failed}
            if make.random.random() < 0.01:
                image = {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": make.image},
                }
                result["content"] = [image]
            yield line(
                "user", {"role": "user", "content": [result]}, toolUseResult={"stdout": output, "stderr": ""}
            )


def codex(make: Maker) -> Iterator[Json]:
    def line(kind: str, payload: Json) -> Json:
        return {"timestamp": make.stamp(), "type": kind, "payload": payload}

    yield line("session_meta", {"id": make.uuid(), "timestamp": make.stamp(), "cwd": "/home/lin/src/app",
                                "originator": "codex_cli_rs", "cli_version": "0.142.0", "source": "cli",
                                "model_provider": "openai"})  # fmt: skip
    used = 4000
    while True:
        asked = make.text(make.prose, 250, 5000)
        turn = make.uuid()
        yield line("event_msg", {"type": "task_started", "turn_id": turn, "model_context_window": 272000})
        yield line(
            "turn_context",
            {"turn_id": turn, "cwd": "/home/lin/src/app", "approval_policy": "never", "model": "gpt-5.5"},
        )
        yield line(
            "response_item",
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": asked}]},
        )
        yield line("event_msg", {"type": "user_message", "message": asked})
        for _ in range(make.random.randrange(2, 14)):
            _, arguments, output, failed = make.step()
            call, used = f"call_{make.id(24)}", 4000 + (used + 900) % 150_000
            thought = make.text(make.prose, 150, 2000)
            hidden = make.image[: make.random.randrange(400, 2400)]
            summary = [{"type": "summary_text", "text": thought}]
            yield line("response_item", {"type": "reasoning", "id": f"rs_{make.id(20)}", "summary": summary,
                                         "content": None, "encrypted_content": hidden})  # fmt: skip
            command = json.dumps({"cmd": arguments.get("command") or f"sed -n 1,80p {arguments['path']}"})
            yield line(
                "response_item",
                {"type": "function_call", "name": "exec_command", "arguments": command, "call_id": call},
            )
            status = f"Process exited with code {int(failed)}\nOutput:\n"
            yield line(
                "response_item", {"type": "function_call_output", "call_id": call, "output": status + output}
            )
            usage = {
                "input_tokens": used,
                "cached_input_tokens": used - 90,
                "output_tokens": 66,
                "total_tokens": used + 66,
            }
            info = {"total_token_usage": usage, "last_token_usage": usage, "model_context_window": 272000}
            yield line("event_msg", {"type": "token_count", "info": info})
        said = make.text(make.prose, 250, 5000)
        yield line(
            "response_item",
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]},
        )
        yield line("event_msg", {"type": "agent_message", "message": said})


FORMATS: dict[str, Writer] = {"pi": pi, "claude": claude, "codex": codex}
HUGE = 20_000_000  # bytes of the longest line


def write_session(path: Path, format: str, size: int, seed: int = 1) -> Path:
    """Write at least `size` bytes of a session; it ends with a whole turn's step."""
    make = Maker(seed, size)
    written, huge = 0, size >= 5 * HUGE
    with path.open("wb") as out:
        for made in FORMATS[format](make):
            if huge and written > size // 3 and (block := _result(made)) is not None:
                key, value = block
                made_text = make.text(make.code, HUGE, HUGE)
                value[key] = (made_text * 2)[:HUGE] if len(made_text) < HUGE else made_text
                huge = False
            line = json.dumps(made, separators=(",", ":")).encode() + b"\n"
            written += out.write(line)
            if written >= size and _result(made) is not None:
                return path
    raise AssertionError("a session never ends by itself")


def _result(made: Json) -> tuple[str, Json] | None:
    """Where a line's tool output stands: (key, object), or None for any other line."""
    payload, message = made.get("payload"), made.get("message")
    if payload is not None:
        return ("output", payload) if payload.get("type") == "function_call_output" else None
    if message is None:
        return None
    if message["role"] == "toolResult":
        return "text", message["content"][0]
    blocks = message["content"]
    first = blocks[0] if isinstance(blocks, list) else {}
    return (
        ("content", first)
        if first.get("type") == "tool_result" and isinstance(first["content"], str)
        else None
    )
