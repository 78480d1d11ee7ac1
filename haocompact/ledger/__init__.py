"""The offline summary: a ledger of entries, filled from the messages, never a summary of a summary.

    previous --parse--> Ledger --Reader, one pass over the messages--> Ledger --fit--> render

lines     one safe line of text: no control characters, forged structure or secrets; cut at boundaries
wording   the language patterns: sentences, exact values, and what a sentence is (rule, goal, fact, ...)
entries   the ledger: entries under the seed's headings, what replaces what, text <-> ledger
budget    which entries find room, and what is dropped first
outputs   what tool calls and their outputs say
reader    messages -> ledger -> summary
rules     the rules that a summary by a model must not lose

An entry is one line under one heading of the seed's format, in the words of whoever said it. What `render`
writes, `parse` reads back exactly, so the next compaction goes on where this one stopped. A previous summary
that `render` did not write is carried as quoted lines under its own heading.
"""

from haocompact.ledger.budget import MAX_CHARS, MIN_CHARS
from haocompact.ledger.entries import Ledger
from haocompact.ledger.reader import extract
from haocompact.ledger.rules import with_rules

__all__ = ["MAX_CHARS", "MIN_CHARS", "Ledger", "extract", "with_rules"]
