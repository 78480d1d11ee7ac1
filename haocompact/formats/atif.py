"""Harbor's Agent Trajectory Interchange Format (ATIF v1.0 to 1.7): a document, several in an array, or a step a line.

Only read. Source: the ATIF RFC; `steps[]` with `source` system, user or agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from haocompact.compaction import Message, Part, Thinking, ToolResult
from haocompact.formats.document import (
    all_conversations,
    all_of,
    call_of,
    choose,
    content_parts,
    cut,
    first_of,
    gather,
    leaves_of,
    result_of,
)
from haocompact.formats.session import Json, ReadOptions, Session, numbers, word
from haocompact.records import Record, Records

NAME = "atif"
TITLE = "ATIF trajectory"
KINDS: Mapping[str, str] = {
    "header": "schema version and agent: not read",
    "system": "message; the first one is the system prompt",
    "user": "message",
    "agent": "message, and what its calls gave (role toolResult)",
}
ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def sniff(obj: Json, first: bool) -> int:
    if word(obj.get("schema_version")).startswith("ATIF"):
        return 2
    step = isinstance(obj.get("step_id"), int) and word(obj.get("source")) in ROLES
    return 2 if step and ("message" in obj or "observation" in obj) else 0


def read(records: Records, options: ReadOptions) -> Session:
    found = all_conversations(records, ("steps",), lambda o: word(o.get("session_id")))
    if not found:
        session = gather(NAME, records, range(len(records)), _told, _kind, KINDS)
        header = records[0].dict
        session.session_id = word(header.get("session_id")) or None
        return session
    chosen = choose(found, options)
    leaves = leaves_of(records, found)
    records = cut(records, chosen.spans)
    session = gather(NAME, records, records.values, _told, _kind, KINDS)
    session.session_id = chosen.name or None
    session.leaves = leaves
    return session


def _kind(obj: Json) -> str:
    return "header" if "schema_version" in obj else word(obj.get("source"))


def _told(obj: Json) -> Sequence[Message]:
    role = ROLES.get(word(obj.get("source")))
    if role is None or "schema_version" in obj:
        return []
    results = list(_results(obj.get("observation")))
    texts = tuple(content_parts(obj.get("message")))
    if role == "system" and results:  # something that the harness did by itself
        return [Message("toolResult", (*texts, *results))]
    said = Message(role, (*_thinking(obj), *texts, *_calls(obj)), usage=_usage(obj))
    return [said, Message("toolResult", tuple(results))] if results else [said]


def _thinking(obj: Json) -> Iterator[Part]:
    text = obj.get("reasoning_content")
    if isinstance(text, str) and text:
        yield Thinking(text)


def _calls(obj: Json) -> Iterator[Part]:
    calls = obj.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            yield call_of(call.get("tool_call_id"), call.get("function_name"), call.get("arguments"))


def _results(observation: object) -> Iterator[ToolResult]:
    results = observation.get("results") if isinstance(observation, dict) else None
    for result in results if isinstance(results, list) else ():
        if isinstance(result, dict):
            content = result.get("content")
            yield result_of(
                result.get("source_call_id"), content_parts(content) if content is not None else ()
            )


def _usage(obj: Json) -> float | None:
    """Prompt (cached input included) and completion."""
    metrics = obj.get("metrics")
    return (
        numbers(metrics, "prompt_tokens", "completion_tokens") or None if isinstance(metrics, dict) else None
    )


def message_of(record: Record) -> Message | None:
    return first_of(_told, record)


def messages_of(records: Iterable[Record]) -> Iterable[Message]:
    return all_of(_told, records)
