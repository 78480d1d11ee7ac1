"""Segments that stand in a transcript's own log: what its client, or --append, took out of the context.

The originals are still in the file, so nothing of them is archived: they are read where they are. A segment is
named by the marker that ends its summary, by the log's own hash, or else by the SHA-256 of its lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from haocompact.archive import Segment
from haocompact.ccr import parse_ccr_section
from haocompact.compaction import Message
from haocompact.formats import FORMATS
from haocompact.formats.session import Compaction, Session


@dataclass(frozen=True, slots=True)
class Logged:
    """A segment and the indexes of its records in the transcript."""

    segment: Segment
    lines: Sequence[int]

    def raw(self, session: Session) -> Iterator[bytes]:
        """Its lines in the file's order."""
        return (session.records.raw(i) for i in sorted(self.lines))


def logged_segments(session: Session, source: str) -> list[Logged]:
    """All on the active branch, oldest first. A compaction whose originals are gone from the file is none."""
    compactions = getattr(FORMATS[session.format], "compactions", None)
    taken: set[str] = set()
    found = []
    for compaction in compactions(session) if compactions else ():
        markers = [entry.hash for entry in parse_ccr_section(compaction.summary)]
        own = markers[-1] if markers and markers[-1] not in taken else compaction.hash
        taken.update(markers)
        if compaction.lines:
            found.append(_logged(session, compaction, own, source))
    return found


def _logged(session: Session, compaction: Compaction, own: str, source: str) -> Logged:
    digest, size, chars = hashlib.sha256(), 0, 0
    for index in sorted(compaction.lines):
        raw = session.records.raw(index)
        digest.update(raw)
        size, chars = size + len(raw), chars + len(raw.decode("utf-8", "replace"))
    sha256 = digest.hexdigest()
    messages = sum(1 for _ in _messages(session, compaction.lines))
    segment = Segment(own or sha256[:16], sha256, size, len(compaction.lines), messages, chars, session.format,
                      compaction.created, source)  # fmt: skip
    return Logged(segment, compaction.lines)


def messages(session: Session, logged: Logged) -> list[Message]:
    """The segment's messages, oldest first."""
    return list(_messages(session, logged.lines))


def _messages(session: Session, lines: Sequence[int]) -> Iterator[Message]:
    adapter = FORMATS[session.format]
    together = getattr(adapter, "messages_of", None)  # where a message spans several lines
    if together is not None:
        yield from together([session.records[i] for i in lines])
        return
    for index in lines:
        message = adapter.message_of(session.records[index])
        if message is not None and message.told:
            yield message
