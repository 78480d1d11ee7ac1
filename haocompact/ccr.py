"""Reversible compaction (CCR): archive hash, marker section, directory, retrieval windows. Opens nothing.

Ports berry-agent's `ccr.js` and `ccr-tools.js`. `lang` "zh" writes that program's own sentences, "en"
English ones of the same shape; both are parsed.

    summary body

    <<ccr:0123456789abcdef>> original archived (12 messages / 34567 characters)
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from haocompact.compaction import Image, Message, Shell, Text, Thinking, ToolCall, ToolResult, arguments_text
from haocompact.errors import UsageError
from haocompact.jsjson import canonical_order, stringify, utf16_length

CCR_MARKER_PREFIX = "<<ccr:"
RENDER_BUDGET = 56 * 1024  # UTF-16 units a window may hold
JS_SPACE = "\t\n\v\f\r \xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"  # fmt: skip  # noqa: E501
"""What JavaScript's `trim` removes: not the same set as Python's `strip`."""

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class CcrEntry:
    """One archived segment: `chars` in UTF-16 units of the messages' JSON. Foreign logs may hold floats."""

    hash: str
    messages: float
    chars: float


# ------------------------------------------------------------------------------------------- hash
def ccr_hash(occluded: object) -> str:
    """First 16 hex digits of the SHA-256 of the canonical JSON of the projected messages, `seq` included.

    The order of keys does not count, the numbers do: the same texts under other `seq` hash otherwise.
    """
    return hashlib.sha256(_canonical(occluded).encode()).hexdigest()[:16]


def ccr_entry(occluded: Iterable[Mapping[str, Any]]) -> CcrEntry:
    """Hash, count and size of a segment in one pass, one message in memory at a time."""
    digest = hashlib.sha256(b"[")
    count = chars = 0
    for form in occluded:
        text = _canonical(form)  # sorting keys changes the order of a text, not its length
        digest.update(b"," * (count > 0) + text.encode())
        count, chars = count + 1, chars + utf16_length(text)
    digest.update(b"]")
    return CcrEntry(digest.hexdigest()[:16], count, chars)


def _canonical(value: object) -> str:
    return stringify(value, order=_canonical_keys)


def _canonical_keys(keys: Iterable[str]) -> list[str]:
    return _order(tuple(keys))


@lru_cache(maxsize=1024)  # objects of few shapes, many times
def _order(keys: tuple[str, ...]) -> list[str]:
    """Sorted; `__proto__` is left out, because assigning it to a JavaScript object makes no key."""
    return [key for key in canonical_order(keys) if key != "__proto__"]


# ---------------------------------------------------------------------------------------- wording
@dataclass(frozen=True, slots=True)
class Wording:
    """The sentences of one language; plain text with `str.format` fields."""

    marker: str
    entry: str
    directory: str
    no_directory: str
    unknown_hash: str
    no_range: str
    no_messages: str
    call: str
    error: str
    failed: str
    more: str
    end: str


ZH = Wording(
    marker="原文已归档（{messages} 条消息 / {chars} 字符）",
    entry="{messages} 条消息 / {chars} 字符",
    directory="本会话已归档压缩段（hash 传入 ccr_retrieve 可取回原文）：",
    no_directory="本会话暂无 CCR 归档（未压缩过，或遮蔽段早于 CCR 机制引入——批前历史不可回取）。",
    unknown_hash="未找到哈希 {hash} 的归档段。可能原因：哈希不在本会话归档集（标记来自其他来源或已损坏）、"
    "或该段遮蔽早于 CCR 机制引入（批前历史不可回取）。可先不传 hash 查看本会话归档目录核对。",
    no_range="区间不可读：归档事件缺少区间信封（数据形态异常）。",
    no_messages="区间不可读：遮蔽区间内无可重导的消息（事件残缺或形态不规则）。",
    call="  · 工具调用 {name}({id}) 参数: {arguments}",
    error="  · 错误: {error}",
    failed="toolResult·出错",
    more="（已渲染 {done}/{total} 条——续取传 fromMessage={done} 可取余下）",
    end="（已渲染 {done}/{total} 条，本段已取尽）",
)
EN = Wording(
    marker="original archived ({messages} messages / {chars} characters)",
    entry="{messages} messages / {chars} characters",
    directory="Archived segments of this session (retrieve one by its hash):",
    no_directory="This session has no archived segment (never compacted, or compacted without an archive).",
    unknown_hash="No archived segment has the hash {hash}. Either it is not one of this session's (the "
    "marker comes from elsewhere, or is damaged), or that segment was never archived. Without a hash, "
    "retrieve lists what is archived.",
    no_range="Segment not readable: the event that archived it names no range.",
    no_messages="Segment not readable: no message is left in it.",
    call="  · tool call {name}({id}) arguments: {arguments}",
    error="  · error: {error}",
    failed="toolResult·error",
    more="(rendered {done}/{total} messages; the rest: --from-message {done})",
    end="(rendered {done}/{total} messages, end of the segment)",
)
WORDING: Mapping[str, Wording] = {"zh": ZH, "en": EN}
_MARKER_LINE = re.compile(
    r"<<ccr:([0-9a-f]{16})>> (?:"
    r"原文已归档（([0-9]+) 条消息 / ([0-9]+) 字符）|"
    r"original archived \(([0-9]+) messages? / ([0-9]+) characters?\))"
)


def wording(lang: str) -> Wording:
    """The sentences of `lang`. Raises UsageError for another language than zh and en."""
    if lang not in WORDING:
        raise UsageError(f"unknown language {lang!r}; known: {', '.join(WORDING)}")
    return WORDING[lang]


# ---------------------------------------------------------------------------- marker and directory
def ccr_directory(events: Iterable[Mapping[str, Any]]) -> list[CcrEntry]:
    """The archived segments that a berry log's `compaction/surface` events name, oldest first.

    An event without a hash or without its two numbers (from before CCR) is not retrievable: not listed.
    """
    entries = []
    for event in events:
        data = event.get("data")
        if event.get("type") == "compaction/surface" and isinstance(data, Mapping):
            name, *sizes = (data.get(k) for k in ("ccrHash", "occludedMessages", "occludedChars"))
            if isinstance(name, str) and all(map(_is_number, sizes)):
                entries.append(CcrEntry(name, sizes[0], sizes[1]))  # type: ignore[arg-type]
    return entries


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def with_ccr_section(body: str, entries: Sequence[CcrEntry], lang: str = "en") -> str:
    """The body, a blank line, then one marker line per segment, oldest first."""
    if not entries:
        return body
    return f"{body}\n\n" + "\n".join(_line(entry, wording(lang).marker) for entry in entries)


def directory_text(entries: Sequence[CcrEntry], lang: str = "en") -> str:
    """What retrieval without a hash answers."""
    words = wording(lang)
    if not entries:
        return words.no_directory
    return "\n".join([words.directory, *(_line(entry, words.entry) for entry in entries)])


def _line(entry: CcrEntry, template: str) -> str:
    text = template.format(messages=stringify(entry.messages), chars=stringify(entry.chars))
    return f"{CCR_MARKER_PREFIX}{entry.hash}>> {text}"


def strip_ccr_section(text: str, *, repair: bool = True) -> str:
    """The text without its marker section.

    Repaired (R8): only a block of marker lines that ends the text, after a blank line; a line of the body
    that merely looks like a marker stays, and so does every other character of the body. With
    `repair=False` everything from the first line that starts with `<<ccr:`, and white space before it.
    """
    if repair:
        return _split_section(text)[0]
    lines = text.split("\n")
    cut = next((i for i, line in enumerate(lines) if line.startswith(CCR_MARKER_PREFIX)), None)
    return text if cut is None else "\n".join(lines[:cut]).rstrip(JS_SPACE)


def parse_ccr_section(text: str) -> list[CcrEntry]:
    """The segments that the marker block at the end of a text names, oldest first, in either language."""
    matches = (_MARKER_LINE.fullmatch(line.rstrip()) for line in _split_section(text)[1])
    return [CcrEntry(m[1], int(m[2] or m[4]), int(m[3] or m[5])) for m in matches if m]


def _split_section(text: str) -> tuple[str, list[str]]:
    """(body, marker lines); the lines are empty when the text does not end in a marker block."""
    lines = text.rstrip().split("\n")
    first = len(lines)
    while first and lines[first - 1].startswith(CCR_MARKER_PREFIX):
        first -= 1
    if first == len(lines) or (first and lines[first - 1].strip()):
        return text, []
    return "\n".join(lines[: max(first - 1, 0)]), lines[first:]


# -------------------------------------------------------------------------------------- rendering
def render_message(message: Message, lang: str = "en") -> str:
    """One message as a reader sees it: `[role] text`, a line per call, a block per result.

    Thinking, images and shell commands are named, so that nothing of the message is silently missing.
    """
    words = wording(lang)
    results = [p for p in message.parts if isinstance(p, ToolResult)]
    lines = [result_line(r.name, _result_text(r), r.is_error, words) for r in results]
    texts = [text for p in message.parts if (text := _plain(p)) is not None]
    calls = [p for p in message.parts if isinstance(p, ToolCall)]
    if texts or calls or not results:
        lines.append(f"[{message.role}] " + "\n".join(texts))
    lines += (call_line(c.name, c.id or "", arguments_text(c.arguments), words) for c in calls)
    return "\n".join(lines)


def call_line(name: str, id: str, arguments: str, words: Wording) -> str:
    return words.call.format(name=name, id=id, arguments=arguments)


def result_line(name: str, text: str, is_error: bool, words: Wording) -> str:
    return f"[{words.failed if is_error else 'toolResult'} {name}] {text}"


def _plain(part: object) -> str | None:
    match part:
        case Text(text):
            return text
        case Thinking(text):
            return f"[thinking] {text}"
        case Image(media_type):
            return f"[image {media_type}]" if media_type else "[image]"
        case Shell(command, output, status):
            return "\n".join(line for line in (f"$ {command}", output, status) if line)
    return None


def _result_text(result: ToolResult) -> str:
    return "\n".join([*result.texts, *["[image]"] * result.images])


def window(messages: Sequence[M], from_message: int = 0, budget: int = RENDER_BUDGET, lang: str = "en",
           render: Callable[[M, str], str] = render_message) -> str:  # type: ignore[assignment]  # fmt: skip
    """A segment from message `from_message` (0-based, clamped) on: what `budget` UTF-16 units hold.

    At least one message, however long; the last line says where to go on.
    """
    words = wording(lang)
    if not messages:
        return words.no_messages
    first = max(0, min(from_message, len(messages) - 1))
    rendered: list[str] = []
    used = 0
    for index in range(first, len(messages)):
        text = render(messages[index], lang)
        used += utf16_length(text)
        if rendered and used > budget:
            break
        rendered.append(text)
    done, total = first + len(rendered), len(messages)
    rendered.append((words.more if done < total else words.end).format(done=done, total=total))
    return "\n\n".join(rendered)


def js_string(value: object) -> str:
    """`String(value)` of a JSON value in JavaScript: an object becomes `[object Object]`."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "[object Object]"
    if isinstance(value, list):
        return ",".join("" if v is None else js_string(v) for v in value)
    return stringify(value)
