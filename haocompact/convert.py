"""A conversation in another shape than its own: OpenAI chat, one message a line (`compact --to openai`).

Bytes can't stay the same here; texts, calls and results do. What the chat API has no place for is dropped (thinking)
or moved: a result stands right behind its call, images of results in a user message behind them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from haocompact.compaction import (
    COMPACTION_SUMMARY,
    Image,
    Message,
    Shell,
    Text,
    ToolCall,
    ToolResult,
    arguments_text,
)
from haocompact.formats.session import Json, Session, list_summary
from haocompact.records import clean, dump
from haocompact.summarize import shell_text

TARGETS = ("openai",)
NO_IMAGE = "(image)"
NO_RESULT = "(no result was recorded)"


@dataclass(slots=True)
class _Call:
    """A tool call; `result` is the content of its answer, None as long as there is none."""

    call: ToolCall
    id: str
    result: list[Json] | None = None


@dataclass(slots=True)
class _Turn:
    role: str
    group: object = None
    content: list[Json] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)


def to_openai(session: Session, messages: Sequence[Message], summary: str | None) -> bytes:
    """The system prompt, the summary and `messages` as chat messages, a line each."""
    head = [m for m in session.system if m.told]
    front = list(_lines(_turns(session, head)))
    first = messages[0] if messages and messages[0].kind == COMPACTION_SUMMARY else None
    if first is not None:
        summary, messages = first.text, messages[1:]
    lines = list(_lines(_turns(session, [m for m in messages if m.told])))
    if summary is not None:
        front.append({"role": "user", "content": list_summary(summary, len(lines))})
    return b"".join(dump(line) + b"\n" for line in (*front, *lines))


def texts_lost(messages: Iterable[Message], written: Iterable[Message]) -> list[str]:
    """Texts, calls and results of `messages` that `written` does not have, and the other way round."""
    before, after = Counter(_told(messages)), Counter(_told(written))
    for placeholder in ("", NO_IMAGE, NO_RESULT):
        after.pop(placeholder, None)
        before.pop(placeholder, None)
    return sorted((before - after) + (after - before))


def _told(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        for part in message.parts:
            if isinstance(part, Text):
                yield clean(part.text)
            elif isinstance(part, Shell):
                yield clean(shell_text(part))
            elif isinstance(part, ToolResult):
                yield from map(clean, part.texts)
            elif isinstance(part, ToolCall) and message.role == "assistant":
                yield clean(f"{part.name}({arguments_text(part.arguments) or '{}'})")


# ------------------------------------------------------------------------------------- pairing
def _turns(session: Session, messages: Iterable[Message]) -> list[_Turn]:
    """Messages with each result at its call; what has no call is said by the user."""
    turns: list[_Turn] = []
    calls: list[_Call] = []
    used: set[str] = set()
    for message in messages:
        turn = _Turn({"assistant": "assistant", "system": "system"}.get(message.role, "user"), message.group)
        images = _images(session, message)
        for part in message.parts:
            if isinstance(part, ToolCall) and turn.role == "assistant":
                turn.calls.append(_Call(part, _new_id(part.id, used)))
            elif isinstance(part, ToolResult):
                call = _answered(calls, part)
                content = [*map(_text, part.texts), *(next(images) for _ in range(part.images))]
                if call is None:
                    turn.content += content
                else:
                    call.result = content
            elif isinstance(part, (Text, Shell)):
                turn.content.append(_text(part.text if isinstance(part, Text) else shell_text(part)))
            elif isinstance(part, Image):
                turn.content.append(next(images))
        calls += turn.calls
        turn.content = [part for part in turn.content if part.get("text") != ""]
        _add(turns, turn)
    return turns


def _add(turns: list[_Turn], turn: _Turn) -> None:
    """Lines of one streamed response become one message again; an empty one is none."""
    last = turns[-1] if turns else None
    if last and turn.group is not None and (last.role, last.group) == (turn.role, turn.group):
        last.content += turn.content
        last.calls += turn.calls
    elif turn.content or turn.calls:
        turns.append(turn)


def _answered(calls: Sequence[_Call], result: ToolResult) -> _Call | None:
    """The nearest earlier open call of its id; of those without ids the first open one."""
    waiting = [c for c in calls if c.result is None and c.call.id == result.id]
    if not waiting:
        return None
    return waiting[0] if result.id is None else waiting[-1]


def _new_id(id: str | None, used: set[str]) -> str:
    name, number = id or "call_1", 1
    while name in used:
        number += 1
        name = f"{id or 'call'}_{number}"
    used.add(name)
    return name


# -------------------------------------------------------------------------------------- writing
def _lines(turns: Sequence[_Turn]) -> Iterator[Json]:
    for turn in turns:
        if not turn.calls:
            yield {"role": turn.role, "content": _content(turn.content)}
            continue
        calls = [{"id": c.id, "type": "function",
                  "function": {"name": c.call.name, "arguments": arguments_text(c.call.arguments) or "{}"}}
                 for c in turn.calls]  # fmt: skip
        yield {"role": turn.role, "content": _content(turn.content) or None, "tool_calls": calls}
        yield from _results(turn.calls, pending=turn is turns[-1])


def _results(calls: Sequence[_Call], *, pending: bool) -> Iterator[Json]:
    """An answer for each call (the last message may wait for its own), then what they show."""
    images: list[Json] = []
    for call in calls:
        if call.result is None and pending:
            continue
        told = call.result if call.result is not None else [_text(NO_RESULT)]
        images += (part for part in told if part["type"] != "text")
        texts = [part for part in told if part["type"] == "text"]
        yield {"role": "tool", "tool_call_id": call.id, "content": _content(texts)}
    if images:
        yield {"role": "user", "content": images}


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _content(parts: list[Json]) -> str | list[Json]:
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


# --------------------------------------------------------------------------------------- images
def _images(session: Session, message: Message) -> Iterator[Json]:
    """The images of a message out of its record, in order; a text for each when they are not to be found there."""
    wanted = sum(
        isinstance(p, Image) or (p.images if isinstance(p, ToolResult) else 0) for p in message.parts
    )
    if not wanted:
        return
    found = list(_found(session.records[message.line - 1].dict)) if message.line else []
    yield from found if len(found) == wanted else [_text(NO_IMAGE)] * wanted


def _found(value: object) -> Iterator[Json]:
    """Every image in a record, whatever the client's shape, as a part of a chat message."""
    if isinstance(value, list):
        for item in value:
            yield from _found(item)
    elif isinstance(value, dict):
        urls = list(_urls(value))
        yield from ({"type": "image_url", "image_url": url} for url in urls)
        for key, item in value.items() if not urls else ():
            if key != "toolUseResult":  # Claude Code keeps a second copy there
                yield from _found(item)


def _urls(obj: Json) -> Iterator[Json]:
    """`image_url` objects of one block: OpenAI's, Anthropic's, pi's, Gemini's, OpenHands'."""
    kind, source = obj.get("type"), obj.get("source", obj.get("inlineData", obj))
    if kind in ("image_url", "input_image"):
        url = obj.get("image_url")
        detail = {"detail": obj["detail"]} if isinstance(obj.get("detail"), str) else {}
        yield url if isinstance(url, dict) else {"url": url, **detail}
    elif kind == "image" and isinstance(obj.get("image_urls"), list):
        yield from ({"url": url} for url in obj["image_urls"])
    elif (kind == "image" or "inlineData" in obj) and isinstance(source, dict):
        media = source.get("media_type") or source.get("mimeType") or source.get("mediaType") or "image/png"
        if isinstance(source.get("data"), str):
            yield {"url": f"data:{media};base64,{source['data']}"}
        elif isinstance(source.get("url"), str):
            yield {"url": source["url"]}
