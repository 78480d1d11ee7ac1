"""One request of an API a line: `{"messages": [...]}`, as API logs, batch and fine-tuning files have it.

Each line is a conversation of its own: the elements of its array are the records, so that what is kept stays byte
for byte, with everything around the array. What an element says is the business of the list format that it is in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from haocompact.compaction import CompactionPreparation, Message, Text
from haocompact.errors import TranscriptError
from haocompact.formats import anthropic, openai_chat, responses
from haocompact.formats.session import Checkpoint, Json, Piece, ReadOptions, Session, WritableFormat, texts_of
from haocompact.records import Element, Elements, Record, Records

AROUND = ((), ("body",), ("request",), ("request_params",))  # objects that may stand around the array
PROMPTS = ("system", "instructions")  # Anthropic's and the Responses API's field beside the array
PEEKED = 50  # elements that detection looks at


class Requests:
    """The format of lines that hold an array of `inner`'s messages under one of `keys`."""

    def __init__(
        self, inner: WritableFormat, name: str, title: str, keys: Sequence[str] = ("messages",)
    ) -> None:
        self.inner, self.NAME, self.TITLE = inner, name, title
        self.KINDS: Mapping[str, str] = inner.KINDS
        self.paths = tuple((*around, key) for around in AROUND for key in keys)

    def path(self, obj: Json) -> tuple[str, ...] | None:
        """Where the array of messages stands in a line, None when it has none."""
        return next((p for p in self.paths if _array(obj, p)), None)

    def sniff(self, obj: Json, first: bool) -> int:
        path = self.path(obj)
        if path is None:
            return 0
        votes = [self.inner.sniff(e, False) for e in _array(obj, path)[:PEEKED]]
        return min(1 + (2 in votes), *(2 * v for v in votes))

    def conversations(self, records: Records) -> list[int]:
        """Indexes of the lines that hold one."""
        return [i for i, record in enumerate(records) if self.path(record.dict) is not None]

    def read(self, records: Records, options: ReadOptions) -> Session:
        """The conversation of the one line. Raises TranscriptError for none, or several: each is read by itself."""
        found = self.conversations(records)
        if len(found) != 1 or len(records) > 1:
            count = "no conversation" if not found else f"{len(found)} conversation" + "s" * (len(found) > 1)
            raise TranscriptError(f"{count} in {len(records)} lines: each line is one of its own")
        path = self.path(records[found[0]].dict)
        assert path is not None
        session = self.inner.read(Elements(records.data[:], path), options)
        session.format = self.NAME
        session.system[:0] = _prompts(records[found[0]].dict, path[:-1])
        return session

    def select(self, session: Session, plan: CompactionPreparation) -> list[int]:
        """The document around the array, and what the list format keeps of the array."""
        return sorted({0, *self.inner.select(session, plan), len(session.records) - 1})

    def rebuild(self, session: Session, plan: CompactionPreparation, kept: Sequence[int],
                checkpoint: Checkpoint) -> Iterable[Piece]:  # fmt: skip
        return self.inner.rebuild(session, plan, kept, checkpoint)

    def record(self, number: int, raw: bytes) -> Record:
        """One archived element."""
        return Element(number, raw)

    def message_of(self, record: Record) -> Message | None:
        return self.inner.message_of(record)


def _prompts(obj: Json, path: Sequence[str]) -> list[Message]:
    """The system prompt that stands beside the array, in the object at `path`: one message for each field."""
    for key in path:
        obj = obj[key]
    texts = (texts_of(obj.get(name), block_types=("text", "input_text")) for name in PROMPTS)
    return [Message("system", tuple(map(Text, found)), line=1) for found in texts if any(found)]


def _array(obj: Json, path: Sequence[str]) -> list[Json]:
    """The array of objects at `path`; an empty one when there is none."""
    value: object = obj
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    objects = isinstance(value, list) and all(isinstance(e, dict) for e in value)
    return value if objects and isinstance(value, list) else []


OPENAI = Requests(openai_chat, "openai-requests", "OpenAI chat requests, one a line")
ANTHROPIC = Requests(anthropic, "anthropic-requests", "Anthropic requests, one a line")
RESPONSES = Requests(
    responses, "responses-requests", "OpenAI Responses requests, one a line", ("input", "output")
)
