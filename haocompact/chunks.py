"""A summary that is asked for: in one request, or chunk by chunk where the text is longer than the window (R9).

    Task --partition--> chunks --one request each, in turn--> the running summary

Each chunk is folded into the summary of those before it. Chunks end between messages, never inside a tool
call and its results. Where a server says that a request is too long, the chunk is parted and the work goes
on. Answers are kept in the archive by content, so that an interrupted run pays only for what is missing.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from haocompact.compaction import CHARS, Estimator, Message, cut_obstacles
from haocompact.errors import SummaryError
from haocompact.prompts import SUMMARIZATION_SYSTEM_PROMPT

Block = Sequence[str]
"""The texts of messages that a chunk holds together, in order."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a summarizer said, and what its server counted (None: nothing)."""

    text: str
    input_tokens: int | None = None
    output_tokens: int | None = None


SummarizeFn = Callable[[str, str, int], str | Answer]
"""(prompt, system prompt, max output tokens; 0 is no limit) -> summary. Raises SummaryError."""


@dataclass(frozen=True, slots=True)
class Task:
    """One summary to be asked for: of the history, or of a turn's prefix.

    `prompt(texts, running summary)` makes a request; `check` returns the summary in an answer, or raises
    SummaryError. `failure` begins every error. `parts`: whether it may be asked for in chunks.
    """

    name: str
    failure: str
    blocks: Sequence[Block]
    previous: str | None
    max_tokens: int
    prompt: Callable[[Sequence[str], str | None], str]
    check: Callable[[str], str]
    parts: bool = True


@dataclass(slots=True)
class Report:
    """What a summary took. `redacted`: secrets masked in what was sent, by kind. `notes`: for the user."""

    asked: str = ""
    spent: list[Spent] = field(default_factory=list)
    redacted: dict[str, int] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return sum(not s.reused for s in self.spent)

    @property
    def reused(self) -> int:
        return sum(s.reused for s in self.spent)

    @property
    def input_tokens(self) -> int:
        return sum(s.input_tokens for s in self.spent)

    @property
    def output_tokens(self) -> int:
        return sum(s.output_tokens for s in self.spent)

    @property
    def estimated(self) -> bool:
        """Whether some figure is an estimate, since its server gave none."""
        return any(s.estimated for s in self.spent)


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens of one request; a reused answer costs none."""

    input_tokens: int = 0
    output_tokens: int = 0
    estimated: bool = False
    reused: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """One request that would be made. `input_tokens` are estimated, with a running summary at its largest.

    `answered`: the archive has its answer, so that it costs nothing.
    """

    name: str
    prompt: str
    input_tokens: int
    max_tokens: int
    answered: bool = False
    system: str = SUMMARIZATION_SYSTEM_PROMPT


# -------------------------------------------------------------------------------------- partition
MARGIN = 0.9  # of the room is used: estimates fall short of what a server counts
OUTPUT_SHARE = 4  # a quarter of the window at most is the answer's, as much the running summary's
LEAST_TOKENS = 100  # room for a conversation below which a window is too small
LEAST_CHARS = 2000  # a text that is not parted any further
TIGHT = 16  # messages of a block that is cut down as a whole; a longer one is parted after all
RUNNING = "[the summary of the requests before this one]"
TOO_LONG = "characters left out of the middle: longer than the summarizer's window ...]"
LEFT_OUT = f"\n\n[... {{count}} {TOO_LONG}\n\n"


def tokens(text: str, estimator: Estimator) -> int:
    return math.ceil(estimator.quarters(text) / 4)


def blocks_of(messages: Sequence[Message], text_of: Callable[[Message], str]) -> list[Block]:
    """The messages' texts, those of a call and its results, or of one response, in one block."""
    blocks: list[list[str]] = []
    for message, obstacle in zip(messages, cut_obstacles(messages), strict=True):
        if not blocks or obstacle not in ("group", "pair", "tool result"):
            blocks.append([])
        if text := text_of(message):
            blocks[-1].append(text)
    return [block for block in blocks if block]


def texts_of(blocks: Sequence[Block]) -> list[str]:
    return [text for block in blocks for text in block]


def answer_limit(max_tokens: int, window: int) -> int:
    """Output tokens of one request; 0 is no limit."""
    return min(max_tokens or window, window // OUTPUT_SHARE) if window else max_tokens


@dataclass(frozen=True, slots=True)
class _Room:
    """What fits into a window of `window` tokens, by the estimator."""

    task: Task
    window: int
    estimator: Estimator

    def whole(self, blocks: Sequence[Block]) -> bool:
        """Whether one request takes all of it."""
        size = self._size(self.task.prompt(texts_of(blocks), self.task.previous))
        return size + answer_limit(self.task.max_tokens, self.window) <= self.window * MARGIN

    def conversation(self) -> int:
        """Tokens of conversation in one chunk. Raises SummaryError when the window is too small for any."""
        answer = answer_limit(self.task.max_tokens, self.window)
        running = max(tokens(self.task.previous or "", self.estimator), answer)
        room = int((self.window - self._size(self.task.prompt([], RUNNING)) - answer - running) * MARGIN)
        if room < LEAST_TOKENS:
            raise SummaryError(
                f"{self.task.failure}: a window of {self.window:,} tokens leaves no room for a conversation "
                f"(answer {answer:,}, summary so far {running:,})"
            )
        return room

    def _size(self, prompt: str) -> int:
        return tokens(SUMMARIZATION_SYSTEM_PROMPT, self.estimator) + tokens(prompt, self.estimator)


def partition(task: Task, blocks: Sequence[Block], window: int, estimator: Estimator) -> list[list[Block]]:
    """Chunks that fit the window; one chunk when it is 0, when all fits, or when the task can't be parted."""
    room = _Room(task, window, estimator)
    if not window or not task.parts or room.whole(blocks):
        return [list(blocks)]
    limit = room.conversation()
    chunks: list[list[Block]] = [[]]
    free = limit
    for block in _fitting(blocks, limit, estimator):
        size = sum(tokens(text, estimator) + 1 for text in block)
        if size > free and chunks[-1]:
            chunks.append([])
            free = limit
        chunks[-1].append(block)
        free -= size
    return chunks


def _fitting(blocks: Sequence[Block], limit: int, estimator: Estimator) -> Iterator[Block]:
    """The blocks, what is too long for any chunk cut down or, in a block of many messages, parted."""
    for block in blocks:
        size = sum(tokens(text, estimator) + 1 for text in block)
        if size <= limit:
            yield block
        elif len(block) > TIGHT:
            yield from _fitting([[text] for text in block], limit, estimator)
        else:
            chars = sum(map(len, block))
            yield shortened(block, int(chars * limit / size * MARGIN))


def shortened(block: Block, chars: int) -> Block:
    """About `chars` characters of the block: the longest texts lose their middle, and say so."""
    limits = [len(text) for text in block]
    while sum(limits) > chars and max(limits) > 1:
        longest = limits.index(max(limits))
        rest = sum(limits) - limits[longest]
        limits[longest] = max(chars - rest, limits[longest] // 2)
    return [_cut_middle(text, limit) for text, limit in zip(block, limits, strict=True)]


def _cut_middle(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    keep = max(limit - len(LEFT_OUT), 0) // 2
    return text[:keep] + LEFT_OUT.format(count=f"{len(text) - 2 * keep:,}") + text[len(text) - keep :]


def halved(chunk: Sequence[Block]) -> list[list[Block]]:
    """Two chunks of about the same length, or one with half the text, or none when that leads nowhere."""
    lengths = [sum(map(len, block)) for block in chunk]
    if sum(lengths) < LEAST_CHARS:
        return []
    if len(chunk) == 1:
        return [[shortened(chunk[0], sum(lengths) // 2)]]
    cut, length = 1, lengths[0]
    while cut < len(chunk) - 1 and length < sum(lengths) / 2:
        length += lengths[cut]
        cut += 1
    return [list(chunk[:cut]), list(chunk[cut:])]


_TOO_LONG = re.compile(
    r"context_length_exceeded|context (?:length|window|size)|(?:prompt|input) is too long|too many (?:input )?tokens",
    re.IGNORECASE,
)
_WINDOW = re.compile(
    r"(?:context (?:length|window|size)|n_ctx)\D{0,24}?(\d[\d,]{2,})|> ?(\d[\d,]{2,}) maximum", re.IGNORECASE
)


def window_named(error: str) -> int:
    """The window in a server's complaint, in tokens; 0 when it names none."""
    match = _WINDOW.search(error)
    return int((match.group(1) or match.group(2)).replace(",", "")) if match else 0


# ------------------------------------------------------------------------------------------- asking
@dataclass(frozen=True, slots=True)
class Answers:
    """Answers that were checked, in an archive, by everything that they depend on.

    `identity` names model and settings. `fresh`: none is reused.
    """

    archive: Path
    identity: str
    fresh: bool = False

    def key(self, prompt: str, max_tokens: int) -> str:
        parts = (self.identity, SUMMARIZATION_SYSTEM_PROMPT, prompt, str(max_tokens))
        return sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()

    def find(self, key: str) -> str | None:
        if self.fresh or not self.archive.exists():
            return None
        from haocompact.archive import Archive

        with Archive.open(self.archive) as archive:
            return archive.answer(key)

    def keep(self, key: str, text: str) -> None:
        from haocompact.archive import Archive

        with Archive.open(self.archive, create=True) as archive:
            archive.keep_answer(key, text, datetime.now(UTC).isoformat(timespec="seconds"))


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks one summarizer; `window` in tokens, 0 when it is not known. `progress` gets one line a request."""

    summarize_fn: SummarizeFn
    estimator: Estimator = CHARS
    window: int = 0
    answers: Answers | None = None
    report: Report = field(default_factory=Report)
    progress: Callable[[str], None] | None = None

    def fold(self, task: Task) -> str:
        """The summary of the whole task. Raises SummaryError."""
        window, running = self.window, task.previous
        pending = deque(partition(task, task.blocks, window, self.estimator))
        done = 0
        while pending:
            chunk = pending.popleft()
            self._tell(task, chunk, done, len(pending))
            try:
                running = self._again(task, chunk, running, window, tries=1 + (done + len(pending) > 0))
                done += 1
            except SummaryError as error:
                window = window_named(str(error)) or window
                parts = self._smaller(task, chunk, window) if _TOO_LONG.search(str(error)) else []
                if not parts:
                    raise
                pending.extendleft(reversed(parts))
        return running or ""

    def asks(self, task: Task) -> list[Ask]:
        """The requests that `fold` would make if every answer is as long as it may be."""
        chunks = partition(task, task.blocks, self.window, self.estimator)
        limit = answer_limit(task.max_tokens, self.window)
        found, running = [], task.previous
        for number, chunk in enumerate(chunks):
            prompt = task.prompt(texts_of(chunk), running)
            unknown = limit if running == RUNNING else 0
            size = (
                tokens(SUMMARIZATION_SYSTEM_PROMPT, self.estimator) + tokens(prompt, self.estimator) + unknown
            )
            name = f"{task.name} {number + 1}/{len(chunks)}" if len(chunks) > 1 else task.name
            answer = self.answers.find(self.answers.key(prompt, limit)) if self.answers else None
            found.append(Ask(name, prompt, size, limit, answer is not None))
            running = RUNNING if answer is None else answer
        return found

    def _tell(self, task: Task, chunk: Sequence[Block], done: int, waiting: int) -> None:
        for text in texts_of(chunk):
            if TOO_LONG in text:
                self.report.notes.append(
                    f"a message of the {task.name} is longer than the summarizer's window: its middle was not sent"
                )
        if self.progress is not None and done + waiting:
            self.progress(f"summarising the {task.name}: request {done + 1} of {done + waiting + 1}")

    def _again(self, task: Task, chunk: Sequence[Block], running: str | None, window: int, tries: int) -> str:
        """One request; of several, one that fails is made twice before the others are given up."""
        prompt = task.prompt(texts_of(chunk), running)
        limit = answer_limit(task.max_tokens, window)
        while True:
            tries -= 1
            try:
                return self._ask(task, prompt, limit)
            except SummaryError as error:
                if not tries or _TOO_LONG.search(str(error)):
                    raise

    def _ask(self, task: Task, prompt: str, max_tokens: int) -> str:
        key = self.answers.key(prompt, max_tokens) if self.answers else ""
        known = self.answers.find(key) if self.answers else None
        if known is not None:
            self.report.spent.append(Spent(reused=True))
            return known
        try:
            text = task.check(self._paid(prompt, max_tokens).text)
        except SummaryError as error:
            raise SummaryError(f"{task.failure}: {error.args[0]}") from error
        if self.answers:
            self.answers.keep(key, text)
        return text

    def _paid(self, prompt: str, max_tokens: int) -> Answer:
        try:
            said = self.summarize_fn(prompt, SUMMARIZATION_SYSTEM_PROMPT, max_tokens)
        except SummaryError as error:
            self.report.spent.append(Spent(*error.tokens))
            raise
        answer = said if isinstance(said, Answer) else Answer(said or "")
        system = tokens(SUMMARIZATION_SYSTEM_PROMPT, self.estimator)
        counted = answer.input_tokens is not None and answer.output_tokens is not None
        self.report.spent.append(Spent(
            answer.input_tokens if answer.input_tokens is not None else system + tokens(prompt, self.estimator),
            answer.output_tokens if answer.output_tokens is not None else tokens(answer.text, self.estimator),
            estimated=not counted))  # fmt: skip
        return answer

    def _smaller(self, task: Task, chunk: Sequence[Block], window: int) -> list[list[Block]]:
        """What a chunk that was too long becomes; nothing when it can't be parted."""
        if not task.parts:
            return []
        parts = partition(task, chunk, window, self.estimator)
        return parts if len(parts) > 1 else halved(chunk)
