"""The known transcript formats, and how one is told from its content."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from haocompact.errors import NoTranscript
from haocompact.formats import anthropic, berry, claude_code, codex, haocode, openai_chat, pi, responses
from haocompact.formats.requests import Requests
from haocompact.formats.session import Format
from haocompact.records import Record, Records

FORMATS: dict[str, Format] = {
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

SAMPLE_LINES = 200
SAMPLE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Detected:
    """`others`: formats that some line can only belong to, while another can't: a mixed file."""

    name: str
    others: tuple[str, ...] = ()


def detect(records: Records) -> Detected:
    """The format of a transcript, by what its lines can and can't be. Raises NoTranscript."""
    strong = dict.fromkeys(FORMATS, 0)
    weak = dict.fromkeys(FORMATS, 0)
    lines = 0
    for first, record in _sample(records):
        votes = {name: form.sniff(record.dict, first) for name, form in FORMATS.items()}
        if any(votes.values()):
            lines += 1
        for name, vote in votes.items():
            strong[name] += vote == 2
            weak[name] += vote > 0
    best = max(FORMATS, key=lambda name: (weak[name] == lines, strong[name], weak[name]))
    if not weak[best]:
        raise NoTranscript(f"unknown format; known ones: {', '.join(FORMATS)} (--format names one)")
    return Detected(best, tuple(n for n in FORMATS if n != best and strong[n] and weak[best] < lines))


def _sample(records: Records) -> Iterable[tuple[bool, Record]]:
    size = count = 0
    for record in records:
        if not record.dict:
            continue
        yield count == 0, record
        count, size = count + 1, size + len(record.raw)
        if count >= SAMPLE_LINES or size > SAMPLE_BYTES:
            return
