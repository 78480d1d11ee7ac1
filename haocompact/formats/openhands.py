"""OpenHands conversations: one event of the agent SDK a line, or all in one array. Only read.

Source: OpenHands/software-agent-sdk, `openhands-sdk/openhands/sdk/event` (2026).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from haocompact.compaction import COMPACTION_SUMMARY, Message, Part, Text, Thinking
from haocompact.formats.document import (
    all_of,
    call_of,
    content_parts,
    cut,
    first_of,
    gather,
    result_of,
    spans_of,
)
from haocompact.formats.session import Json, ReadOptions, Session, files_in_summary, word
from haocompact.records import Record, Records

NAME = "openhands"
TITLE = "OpenHands events"
NOT_SENT = "never sent to the model, not read"
KINDS: Mapping[str, str] = {
    "SystemPromptEvent": "the system prompt",
    "MessageEvent": "message",
    "ActionEvent": "a tool call with what was thought (role assistant)",
    "ObservationEvent": "message (role toolResult)",
    "UserRejectObservation": "message (role toolResult): the user refused the call",
    "AgentErrorEvent": "message (role toolResult): the call failed",
    "Condensation": "the client's own compaction: what it forgot is left out, its summary is read",
    "CondensationSummaryEvent": "message (role user)",
    **dict.fromkeys(
        ("CondensationRequest", "ConversationStateUpdateEvent", "ConversationErrorEvent", "PauseEvent",
         "TokenEvent", "LLMCompletionLogEvent", "StreamingDeltaEvent"),
        NOT_SENT,
    ),
}  # fmt: skip
FILE_TOOLS = {"file_editor": "edited", "str_replace_editor": "edited"}
SOURCES = ("agent", "user", "environment", "hook")


def sniff(obj: Json, first: bool) -> int:
    kind = word(obj.get("kind"))
    envelope = obj.get("source") in SOURCES and isinstance(obj.get("id"), str)
    return 2 if envelope and (kind in KINDS or kind.endswith("Event")) else 0


def read(records: Records, options: ReadOptions) -> Session:
    indexes: Sequence[int] = range(len(records))
    if isinstance(records.document, list):
        records = own = cut(records, spans_of(records.data[:], ()))
        indexes = own.values
    view, leads = _view(records, indexes)
    session = gather(NAME, records, view, _told, lambda o: word(o.get("kind")), KINDS)
    for message in session.messages[:1] if leads else ():
        message.kind, message.files = COMPACTION_SUMMARY, files_in_summary(message.text)
        message.at_end = view[-1] == message.line - 1
    return session


def _view(records: Records, indexes: Sequence[int]) -> tuple[list[int], bool]:
    """The events that the model is shown, and whether they begin with a summary (behind the system prompt).

    A Condensation takes events out and puts its summary at its offset; where there are several, the summary
    of the earlier one is gone with what it stood for.
    """
    view: list[int] = []
    kinds: dict[int, str] = {}
    names: dict[int, str] = {}
    for index in indexes:
        event = records[index].dict
        kinds[index], names[index] = word(event.get("kind")), word(event.get("id"))
        if kinds[index] != "Condensation":
            view.append(index)
            continue
        forgotten = event.get("forgotten_event_ids")
        gone = set(forgotten) if isinstance(forgotten, list) else set()
        view = [i for i in view if names[i] not in gone and kinds[i] != "Condensation"]
        if event.get("summary"):
            view.insert(_place(view, kinds, event.get("summary_offset")), index)
    shown = [i for i in view if kinds[i] != "SystemPromptEvent" and KINDS.get(kinds[i]) != NOT_SENT]
    return view, bool(shown) and kinds[shown[0]] == "Condensation"


def _place(view: Sequence[int], kinds: Mapping[int, str], offset: object) -> int:
    """Where in `view` the summary goes: its offset counts only events that the model is shown."""
    sent = [i for i, index in enumerate(view) if KINDS.get(kinds[index], NOT_SENT) != NOT_SENT]
    if not isinstance(offset, int) or offset >= len(sent):
        return len(view)
    return sent[max(offset, 0)]


def _told(obj: Json) -> Sequence[Message]:
    kind = word(obj.get("kind"))
    extra = tuple(content_parts(obj.get("extended_content")))
    match kind:
        case "SystemPromptEvent":
            return [Message("system", tuple(content_parts(obj.get("system_prompt"))))]
        case "MessageEvent":
            return _message(obj.get("llm_message"), extra)
        case "ActionEvent":
            return [Message("assistant", tuple(_action(obj)), group=word(obj.get("llm_response_id")) or None)]
        case "ObservationEvent" | "UserRejectObservation" | "AgentErrorEvent":
            content = (*_observed(obj), *extra)
            failed = kind != "ObservationEvent" or _flag(obj.get("observation"), "is_error")
            result = result_of(obj.get("tool_call_id"), content, word(obj.get("tool_name")), is_error=failed)
            return [Message("toolResult", (result,))]
        case "Condensation" | "CondensationSummaryEvent" if isinstance(obj.get("summary"), str):
            return [Message("user", (Text(obj["summary"]),))]
    return []


def _message(inner: object, extra: tuple[Part, ...]) -> Sequence[Message]:
    if not isinstance(inner, dict):
        return []
    role = word(inner.get("role"))
    parts = (*_thinking(inner), *content_parts(inner.get("content")), *extra)
    return [Message(role if role in ("system", "assistant") else "user", parts)]


def _thinking(obj: Json) -> Iterator[Part]:
    text = obj.get("reasoning_content")
    if isinstance(text, str) and text:
        yield Thinking(text)


def _action(obj: Json) -> Iterator[Part]:
    yield from _thinking(obj)
    yield from content_parts(obj.get("thought"))
    call = obj.get("tool_call")
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    inner = function if isinstance(function, dict) else call
    arguments = inner.get("arguments", obj.get("action"))
    yield call_of(obj.get("tool_call_id"), inner.get("name") or obj.get("tool_name"), arguments)


def _observed(obj: Json) -> Iterator[Part]:
    seen = obj.get("observation")
    if isinstance(seen, dict):
        yield from content_parts(seen["content"] if "content" in seen else seen.get("output"))
    elif isinstance(obj.get("rejection_reason"), str):
        yield Text(f"Action rejected: {obj['rejection_reason']}")
    elif isinstance(obj.get("error"), str):
        yield Text(obj["error"])


def _flag(obj: object, key: str) -> bool:
    return isinstance(obj, dict) and obj.get(key) is True


def message_of(record: Record) -> Message | None:
    return first_of(_told, record)


def messages_of(records: Iterable[Record]) -> Iterable[Message]:
    return all_of(_told, records)
