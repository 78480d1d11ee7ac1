"""The known transcript formats, and how one is told from its content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from haocompact.errors import NoTranscript
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
from haocompact.formats.requests import Requests
from haocompact.formats.session import Format, Json, WritableFormat
from haocompact.records import Records

WRITABLE: dict[str, WritableFormat] = {
    "pi": pi,
    "claude": claude_code,
    "codex": codex,
    "berry": berry,
    "openai": openai_chat,
    "anthropic": anthropic,
    "haocode": haocode,
    "responses": responses,
    "openai-requests": Requests(openai_chat, "openai-requests", "OpenAI chat requests, one a line"),
    "anthropic-requests": Requests(anthropic, "anthropic-requests", "Anthropic requests, one a line"),
    "responses-requests": Requests(responses, "responses-requests", "OpenAI Responses requests, one a line",
                                   ("input", "output")),
}  # fmt: skip
READ_ONLY: dict[str, Format] = {
    "swe-agent": swe_agent,
    "mini-swe-agent": mini_swe_agent,
    "atif": atif,
    "sharegpt": sharegpt,
    "openhands": openhands,
    "gemini": gemini,
}
FORMATS: dict[str, Format] = {**WRITABLE, **READ_ONLY}

SAMPLE_LINES = 200
SAMPLE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Detected:
    """`others`: formats that some line can only belong to, while another can't: a mixed file."""

    name: str
    others: tuple[str, ...] = ()


def detect(records: Records) -> Detected:
    """The format of a transcript, by what its records can and can't be. Raises NoTranscript."""
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


def _votes(records: Records) -> Iterator[dict[str, int]]:
    """What each record of a sample could be, by format; of a document only those know that are read whole."""
    document = records.document
    if document is None:
        yield from _line_votes(records)
        return
    elements = document if isinstance(document, list) else [document]
    for obj in [e for e in elements if isinstance(e, dict)][:SAMPLE_LINES]:
        yield {name: _document_vote(name, form, obj) for name, form in READ_ONLY.items()}


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


def _document_vote(name: str, form: Format, obj: Json) -> int:
    return form.sniff(obj, True) or (mini_swe_agent.sniff_element(obj) if name == "mini-swe-agent" else 0)
