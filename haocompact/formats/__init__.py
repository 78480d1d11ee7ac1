"""The known transcript formats, and how one is told from its content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar, cast

from haocompact.errors import NoTranscript
from haocompact.formats.session import Format, Json, WritableFormat
from haocompact.records import Records

F = TypeVar("F", bound=Format)


class Adapters(Mapping[str, F]):
    """Name -> adapter: a module, or an object in one, loaded when it is first asked for."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def __getitem__(self, name: str) -> F:
        module, _, member = self._homes[name].partition(":")
        adapter = import_module(f"haocompact.formats.{module}")
        return cast(F, getattr(adapter, member) if member else adapter)

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


_WRITABLE = {
    "pi": "pi",
    "claude": "claude_code",
    "codex": "codex",
    "berry": "berry",
    "openai": "openai_chat",
    "anthropic": "anthropic",
    "haocode": "haocode",
    "responses": "responses",
    "openai-requests": "requests:OPENAI",
    "anthropic-requests": "requests:ANTHROPIC",
    "responses-requests": "requests:RESPONSES",
}
_READ_ONLY = {
    "swe-agent": "swe_agent",
    "mini-swe-agent": "mini_swe_agent",
    "atif": "atif",
    "sharegpt": "sharegpt",
    "openhands": "openhands",
    "gemini": "gemini",
}
WRITABLE: Adapters[WritableFormat] = Adapters(_WRITABLE)
READ_ONLY: Adapters[Format] = Adapters(_READ_ONLY)
FORMATS: Adapters[Format] = Adapters(_WRITABLE | _READ_ONLY)

if TYPE_CHECKING:  # each is what it says
    from haocompact.formats import (
        anthropic,
        atif,
        berry,
        claude_code,
        codex,
        gemini,
        haocode,
        mini_swe_agent,
        openai_chat,
        openhands,
        pi,
        responses,
        sharegpt,
        swe_agent,
    )

    _: tuple[WritableFormat, ...]
    _ = anthropic, berry, claude_code, codex, haocode, openai_chat, pi, responses
    __: tuple[Format, ...] = atif, gemini, mini_swe_agent, openhands, sharegpt, swe_agent

SAMPLE_LINES = 200
SAMPLE_BYTES = 4 << 20
SURE = ("claude", "pi", "codex")  # what a line of these is told by, no other format has


@dataclass(frozen=True, slots=True)
class Detected:
    """`others`: formats that some line can only belong to, while another can't: a mixed file."""

    name: str
    others: tuple[str, ...] = ()


def detect(records: Records) -> Detected:
    """The format of a transcript, by what its records can and can't be. Raises NoTranscript."""
    for name in SURE if records.document is None else ():  # the common case, without loading all the others
        if _is_surely(records, FORMATS[name]):
            return Detected(name)
    strong = dict.fromkeys(FORMATS, 0)
    weak = dict.fromkeys(FORMATS, 0)
    seen = 0
    for votes in _votes(records):
        if any(votes.values()):
            seen += 1
        for name, vote in votes.items():
            strong[name] += vote == 2
            weak[name] += vote > 0
    narrow_first = (
        *READ_ONLY,
        *WRITABLE,
    )  # of equals, one whose signs are its own before a list of any messages
    best = max(narrow_first, key=lambda name: (weak[name] == seen, strong[name], weak[name]))
    if not weak[best]:
        raise NoTranscript(f"unknown format; known ones: {', '.join(FORMATS)} (--format names one)")
    return Detected(best, tuple(n for n in FORMATS if n != best and strong[n] and weak[best] < seen))


def _is_surely(records: Records, form: Format) -> bool:
    """Whether each line of the sample could be of this format, and one of them of no other."""
    certain = size = 0
    objects = (record for record in records if record.dict)
    for count, record in enumerate(objects):
        if count >= SAMPLE_LINES or size > SAMPLE_BYTES:
            break
        vote = form.sniff(record.dict, count == 0)
        if not vote:
            return False
        certain, size = certain + (vote == 2), size + len(record.raw)
    return certain > 0


def _votes(records: Records) -> Iterator[dict[str, int]]:
    """What each record of a sample could be, by format; of a document only those know that are read whole."""
    document = records.document
    if document is None:
        yield from _line_votes(records)
        return
    elements = document if isinstance(document, list) else [document]
    for obj in [e for e in elements if isinstance(e, dict)][:SAMPLE_LINES]:
        yield {name: _document_vote(form, obj) for name, form in READ_ONLY.items()}


def _line_votes(records: Records) -> Iterator[dict[str, int]]:
    """Only lines that some format knows make up the sample: a head of others, however long, hides nothing."""
    seen = size = 0
    objects = (record for record in records if record.dict)
    for count, record in enumerate(objects):
        votes = {name: form.sniff(record.dict, count == 0) for name, form in FORMATS.items()}
        if any(votes.values()):
            yield votes
            seen, size = seen + 1, size + len(record.raw)
        if seen >= SAMPLE_LINES or size > SAMPLE_BYTES:
            return


def _document_vote(form: Format, obj: Json) -> int:
    element = getattr(form, "sniff_element", None)  # of an array of messages
    return form.sniff(obj, True) or (element(obj) if element else 0)
