"""From removed messages to the text that stands in for them.

serialize_conversation -> tasks (chunks.py) -> a summarizer -> history and turn prefix joined -> file lists.
Names and formats are the seed's; the default mode repairs what loses data (R2, R5, R6) and keeps text of
the transcript from forging the prompt's frame.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from haocompact.ccr import strip_ccr_section
from haocompact.chunks import Answers, Ask, Asker, Report, SummarizeFn, Task, blocks_of
from haocompact.compaction import (
    CompactionPreparation,
    Image,
    Message,
    Shell,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    compute_file_lists,
)
from haocompact.errors import SummaryError
from haocompact.jsjson import file_order, stringify
from haocompact.ledger import extract, with_rules
from haocompact.prompts import (
    SUMMARIZATION_PROMPT,
    TURN_PREFIX_SUMMARIZATION_PROMPT,
    UPDATE_SUMMARIZATION_PROMPT,
)
from haocompact.records import clean
from haocompact.redact import Redactor, mask_error, mask_secrets
from haocompact.segment import build_summary_prompt as build_segment_prompt
from haocompact.segment import indented, projected, summary_budget

TOOL_RESULT_MAX_CHARS = 2000
MASKED_BEYOND = 4096  # characters after the cut that masking looks at, so that no half of a secret is left
EXCERPT_CHARS = 500
HISTORY_SHARE, PREFIX_SHARE = 0.8, 0.5  # of the reserve: output budgets of the two requests
NO_HISTORY = "No prior history."
TURN_CONTEXT = "\n\n---\n\n**Turn Context (split turn):**\n\n"
HEADINGS = re.compile(
    r"^#{1,4} +(?:Goal|Constraints|Progress|Done|In Progress|Blocked|Key Decisions|Next Steps|Critical Context)\b",
    re.MULTILINE,
)
NOTICE = {
    "zh": "(自动压缩：摘要生成失败 [{error}]，以下为旧对话尾部摘录)",
    "en": "(automatic compaction: the summary failed [{error}]; the end of the old conversation follows)",
}

Mask = Callable[[str], str]

# --------------------------------------------------------------------------------- serialisation
_FRAME = re.compile(r"<(?=[\s\u200b]*/?[\s\u200b]*(?:conversation|previous-summary)\b)", re.IGNORECASE)
_SPEAKER = re.compile(
    r"(?:^|(?<=[\r\v\f\x85\u2028\u2029]))\["
    r"(?=(?:User|Assistant|Assistant thinking|Assistant tool calls|Tool result|System)\]:)",
    re.MULTILINE,
)
_BASE64 = "[A-Za-z0-9+/=]{60,}"
_DATA_URL = re.compile(rf"(data:[\w.+-]+/[\w.+-]+;base64,){_BASE64}(?:\r?\n{_BASE64})*")


def serialize_conversation(
    messages: Iterable[Message], *, repair: bool = True, mask: Mask | None = None
) -> str:
    """The seed's text form: `[User]: ...`, `[Assistant thinking]: ...`, `[Tool result]: ...` and so on.

    Tool results are cut at 2000 characters. With `repair`, text can neither close the frame nor open a
    speaker of its own, and lone surrogates are replaced. `mask` takes secrets out.
    """
    return "\n\n".join(line for m in messages if m.told for line in _lines(m, repair, mask or str))


def _lines(message: Message, repair: bool, mask: Mask) -> Iterator[str]:
    def safe(text: str) -> str:
        return mask(_neutral(text) if repair else text)

    parts = message.parts
    text = "\n".join(p.text for p in parts if isinstance(p, Text) and p.text)
    if message.role == "assistant":
        thinking = "\n".join(p.text for p in parts if isinstance(p, Thinking) and p.text)
        calls = "; ".join(_call(p, repair) for p in parts if isinstance(p, ToolCall))
        yield from _labelled("Assistant thinking", safe(thinking), repair)
        yield from _labelled("Assistant", safe(text), repair)
        yield from _labelled("Assistant tool calls", safe(calls), repair)
        return
    for part in parts:
        if isinstance(part, ToolResult):
            result = "\n".join(t for t in part.texts if t)
            if len(result) > TOOL_RESULT_MAX_CHARS:
                end = TOOL_RESULT_MAX_CHARS + MASKED_BEYOND
                result = mask(result[:end]) + result[end:]
            result = _truncate_for_summary(result, TOOL_RESULT_MAX_CHARS)
            yield from _labelled("Tool result", safe(result), repair)
        elif isinstance(part, Shell):
            yield from _labelled("User", safe(shell_text(part)), repair)
    images = sum(isinstance(p, Image) for p in parts)
    label = "System" if message.role == "system" else "User"
    yield from _labelled(label, safe(text) or ("(image)" if images and repair else ""), repair)


def _labelled(label: str, text: str, repair: bool) -> Iterator[str]:
    if text.strip() if repair else text:
        yield f"[{label}]: {text}"


def _neutral(text: str) -> str:
    text = _DATA_URL.sub(r"\1[...]", text)
    return clean(_SPEAKER.sub("\\[", _FRAME.sub("&lt;", text)))


def _call(call: ToolCall, repair: bool) -> str:
    if isinstance(call.arguments, dict):
        pairs = ", ".join(f"{k}={_safe_json(v, repair)}" for k, v in call.arguments.items())
        return f"{call.name}({pairs})"
    if call.arguments in (None, "") or not (call.arguments or repair):
        return f"{call.name}()"
    raw = call.arguments if isinstance(call.arguments, str) else _safe_json(call.arguments, repair)
    return f"{call.name}(arguments={raw})"


def _safe_json(value: object, repair: bool) -> str:
    try:
        if repair:
            return stringify(value, order=file_order, exact_integers=True)
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return "[unserializable]"


def shell_text(shell: Shell) -> str:
    output = f"```\n{shell.output}\n```" if shell.output else "(no output)"
    return f"Ran `{shell.command}`\n{output}" + (f"\n\n{shell.status}" if shell.status else "")


def _truncate_for_summary(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n\n[... {len(text) - max_chars} more characters truncated]"


# ------------------------------------------------------------------------------ file lists, previous
_FILE_SECTION = re.compile(r"\n*^<(read-files|modified-files)>\n.*?\n</\1>$", re.DOTALL | re.MULTILINE)


def format_file_operations(read_files: Sequence[str], modified_files: Sequence[str]) -> str:
    """The appendix `<read-files>`, `<modified-files>`; empty when both lists are."""
    sections = []
    if read_files:
        sections.append("<read-files>\n" + "\n".join(read_files) + "\n</read-files>")
    if modified_files:
        sections.append("<modified-files>\n" + "\n".join(modified_files) + "\n</modified-files>")
    return "".join("\n\n" + section for section in sections)


def previous_body(summary: str | None) -> str | None:
    """A previous summary without its file lists and markers; None when nothing is left."""
    if summary is None:
        return None
    body = _FILE_SECTION.sub("", strip_ccr_section(summary)).strip()
    return body or None


_FORGED = re.compile(r"^(?=<<ccr:|</?(?:read-files|modified-files)>)", re.MULTILINE)


def sanitize_body(body: str) -> str:
    """A summary that can't pass off lines of its own as file lists or markers, and can be encoded."""
    return clean(_FORGED.sub(r"\\", body)).strip()


# ----------------------------------------------------------------------------- prompts and requests
def build_summary_prompt(conversation: str, previous_summary: str | None) -> str:
    """The history request: conversation, previous summary if any, then the first or the update prompt."""
    previous = f"<previous-summary>\n{previous_summary}\n</previous-summary>\n\n" if previous_summary else ""
    base = UPDATE_SUMMARIZATION_PROMPT if previous_summary else SUMMARIZATION_PROMPT
    return f"<conversation>\n{conversation}\n</conversation>\n\n{previous}{base}"


CONTINUED = (
    "The messages above go on where an earlier part of the same prefix ended; <previous-summary> covers that part. "
    "Keep all that it says, in the same format, and add what is new."
)


def build_turn_prefix_prompt(conversation: str, earlier: str | None = None) -> str:
    """The request for a turn's prefix; `earlier` is the summary of its part before, where it has several."""
    previous = f"<previous-summary>\n{earlier}\n</previous-summary>\n\n" if earlier else ""
    more = f"\n\n{CONTINUED}" if earlier else ""
    return f"<conversation>\n{conversation}\n</conversation>\n\n{previous}{TURN_PREFIX_SUMMARIZATION_PROMPT}{more}"


def output_budget(reserve_tokens: int, share: float, model_max_tokens: int = 0) -> int:
    """`min(share x reserve, model's own limit)`; a limit of 0 is none."""
    return min(int(share * reserve_tokens), model_max_tokens if model_max_tokens > 0 else 1 << 30)


@dataclass(frozen=True, slots=True)
class _Wording:
    """How requests are worded: the user's focus, the repairs, what takes secrets out."""

    focus: str | None = None
    repair: bool = True
    mask: Mask = str

    def task(self, name: str, failure: str, messages: Sequence[Message], previous: str | None, max_tokens: int,
             build: Callable[[str, str | None], str], check: Callable[[str], str]) -> Task:  # fmt: skip
        def text_of(message: Message) -> str:
            return serialize_conversation([message], repair=self.repair, mask=self.mask)

        def prompt(texts: Sequence[str], running: str | None) -> str:
            safe = _neutral(running) if running and self.repair else running
            return self.focused(build("\n\n".join(texts), safe))

        blocks, earlier = blocks_of(messages, text_of), self.mask(previous) if previous else None
        return Task(name, failure, blocks, earlier, max_tokens, prompt, check, parts=self.repair)

    def focused(self, prompt: str) -> str:
        return f"{prompt}\n\nAdditional focus: {self.focus}" if self.focus else prompt

    def history(self, messages: Sequence[Message], previous: str | None, max_tokens: int) -> Task:
        return self.task("history", "Summarization failed", messages, previous, max_tokens,
                         build_summary_prompt, _with_headings if self.repair else _not_empty)  # fmt: skip

    def prefix(self, messages: Sequence[Message], max_tokens: int) -> Task:
        return self.task("turn prefix", "Turn prefix summarization failed", messages, None, max_tokens,
                         build_turn_prefix_prompt, _a_summary if self.repair else _not_empty)  # fmt: skip

    def segment(self, messages: Sequence[Message], previous: str | None, max_tokens: int, lang: str) -> Task:
        """berry-agent's five-section prompt over the messages of any format."""
        chars = sum(len(json.dumps(form, ensure_ascii=False)) for m in messages for form in projected(m))

        def text_of(message: Message) -> str:
            return self.mask(",\n  ".join(indented(form, "\n  ") for form in projected(message)))

        def prompt(texts: Sequence[str], running: str | None) -> str:
            base = build_segment_prompt([], running, summary_budget(chars), lang).removesuffix("[]")
            material = "[\n  " + ",\n  ".join(texts) + "\n]" if texts else "[]"
            return self.focused(clean(base + material))

        earlier = self.mask(previous) if previous else None
        return Task("history", "Summarization failed", blocks_of(messages, text_of), earlier, max_tokens, prompt,
                    _a_summary if self.repair else _not_empty, parts=self.repair)  # fmt: skip


def generate_summary(messages: Sequence[Message], summarize_fn: SummarizeFn, reserve_tokens: int,
                     model_max_tokens: int = 0, previous_summary: str | None = None, *,
                     focus: str | None = None, repair: bool = True) -> str:  # fmt: skip
    """Summary of the history. Raises SummaryError, also for an empty answer or one without any heading."""
    budget = output_budget(reserve_tokens, HISTORY_SHARE, model_max_tokens)
    return Asker(summarize_fn).fold(_Wording(focus, repair).history(messages, previous_summary, budget))


def generate_turn_prefix_summary(messages: Sequence[Message], summarize_fn: SummarizeFn, reserve_tokens: int,
                                 model_max_tokens: int = 0, *, focus: str | None = None,
                                 repair: bool = True) -> str:  # fmt: skip
    """Summary of the first half of a split turn. Raises SummaryError."""
    budget = output_budget(reserve_tokens, PREFIX_SHARE, model_max_tokens)
    return Asker(summarize_fn).fold(_Wording(focus, repair).prefix(messages, budget))


# ------------------------------------------------------------------------------- what is no summary
_FENCED = re.compile(r"\A```(?:markdown|md)?[ \t]*\n(.*)\n```\Z", re.DOTALL)
_OTHER_TEXT = re.compile(
    r"\A(?:error\b|\{\s*\"?(?:error|detail|message)\"?|<!doctype html|<html|traceback \(most recent"
    r"|(?:internal server error|service unavailable|bad gateway|gateway time-?out|too many requests|rate limit)"
    r"|i(?:'|’)?m sorry\b|i am sorry\b|i (?:can(?:'|’)?t|cannot|am unable|won(?:'|’)?t))",
    re.IGNORECASE,
)
_HEADING = re.compile(r"^#{1,4} ", re.MULTILINE)


def _not_empty(text: str) -> str:
    if not text.strip():
        raise SummaryError("empty response")
    return text.strip()


def _a_summary(text: str) -> str:
    """The answer without its reasoning. Raises SummaryError for an error text or a refusal in its place."""
    text = _not_empty(_without_reasoning(text.strip()))
    fenced = _FENCED.match(text)
    text = _not_empty(fenced.group(1)) if fenced else text
    if _OTHER_TEXT.match(text) and not _HEADING.search(text):
        raise SummaryError("the answer is an error text or a refusal, not a summary")
    return text


def _with_headings(text: str) -> str:
    text = _a_summary(text)
    if not HEADINGS.search(text):
        raise SummaryError("the answer has none of the headings that were asked for")
    return text


def _without_reasoning(text: str) -> str:
    """What stands after `</think>`, where a server leaves a model's reasoning in the answer."""
    thought, end, rest = text.partition("</think>")
    opened = text.startswith("<think>")
    if opened and not rest.strip():
        raise SummaryError("the answer was eaten by reasoning: nothing comes after it")
    return rest if end and (opened or not HEADINGS.search(thought)) else text


# --------------------------------------------------------------------------------- the summarizers
@dataclass(frozen=True, slots=True)
class Summary:
    """`body` without file lists and markers. `degraded`: why the summarizer failed, None when it did not.

    `report`: what it took, None when no model or program was asked.
    """

    body: str
    summarizer: str
    degraded: str | None = None
    report: Report | None = None


class Summarizer(Protocol):
    @property
    def name(self) -> str: ...

    def summarize(self, plan: CompactionPreparation, report: Report | None = None) -> str:
        """Body of the new summary, the previous one taken in. Raises SummaryError. `report` is filled in."""


@dataclass(frozen=True, slots=True)
class Extract:
    """Offline and deterministic: a ledger of what the transcript says."""

    max_chars: int | None = None
    name: str = "extract"

    def summarize(self, plan: CompactionPreparation, report: Report | None = None) -> str:
        lists = format_file_operations(*compute_file_lists(plan.file_ops))
        return extract(_told(plan.messages_to_summarize), _told(plan.turn_prefix_messages),
                       previous_body(plan.previous_summary), max_chars=self.max_chars,
                       reserved=len(lists))  # fmt: skip


OFFLINE = Extract()


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The seed's mechanical degradation, asked for on purpose."""

    lang: str = "en"
    name: str = "excerpt"

    def summarize(self, plan: CompactionPreparation, report: Report | None = None) -> str:
        return degraded_body(plan, "not asked for", self.lang)


@dataclass(frozen=True, slots=True)
class Prompted:
    """A program or a model that answers the seed's prompts: the history's, and the turn prefix's.

    `window`: tokens that one request may have, 0 when that is not known. `redact`: secrets are masked in what
    is sent. `answers`: where answers are kept. `side_by_side`: both requests at once. `asked`: whom, in words.
    """

    name: str
    summarize_fn: SummarizeFn
    model_max_tokens: int = 0
    focus: str | None = None
    lang: str = "en"
    window: int = 0
    redact: bool = False
    answers: Answers | None = None
    side_by_side: bool = False
    progress: Callable[[str], None] | None = None
    asked: str = ""

    def summarize(self, plan: CompactionPreparation, report: Report | None = None) -> str:
        report = Report() if report is None else report
        texts = dict(
            zip((tasks := self._tasks(plan, report)), self._folded(plan, tasks, report), strict=True)
        )
        body = texts.get("history") or (self._previous(plan) if plan.settings.repair else None) or NO_HISTORY
        return body + TURN_CONTEXT + texts["turn prefix"] if "turn prefix" in texts else body

    def requests(self, plan: CompactionPreparation, report: Report) -> list[Ask]:
        """The requests that `summarize` would make; nothing is sent."""
        asker = self._asker(plan, report)
        return [ask for task in self._tasks(plan, report).values() for ask in asker.asks(task)]

    def _asker(self, plan: CompactionPreparation, report: Report) -> Asker:
        window = self.window if plan.settings.repair else 0
        return Asker(self.summarize_fn, plan.settings.estimator, window, self.answers, report, self.progress)

    def _tasks(self, plan: CompactionPreparation, report: Report) -> dict[str, Task]:
        """By name, in the order of the conversation."""
        redactor = Redactor() if self.redact else None
        mask = redactor or str
        wording = _Wording(mask(self.focus) if self.focus else None, plan.settings.repair, mask)
        history, prefix = _told(plan.messages_to_summarize), _told(plan.turn_prefix_messages)
        previous, limit, tasks = self._previous(plan), self.model_max_tokens, list[Task]()
        if plan.settings.strategy == "segment":
            tasks = [wording.segment(history, previous, limit, self.lang)]
            prefix = []
        elif history:
            tasks = [wording.history(history, previous, self._budget(plan, HISTORY_SHARE))]
        if prefix:
            tasks.append(wording.prefix(prefix, self._budget(plan, PREFIX_SHARE)))
        report.redacted = redactor.counts if redactor else None
        return {task.name: task for task in tasks}

    def _budget(self, plan: CompactionPreparation, share: float) -> int:
        return output_budget(plan.settings.reserve_tokens, share, self.model_max_tokens)

    def _previous(self, plan: CompactionPreparation) -> str | None:
        return previous_body(plan.previous_summary) if plan.settings.repair else plan.previous_summary

    def _folded(self, plan: CompactionPreparation, tasks: dict[str, Task], report: Report) -> list[str]:
        fold = self._asker(plan, report).fold
        if not self.side_by_side or len(tasks) < 2:
            return [fold(task) for task in tasks.values()]
        from concurrent.futures import ThreadPoolExecutor  # here: it is slow to load, and few need it

        with ThreadPoolExecutor(len(tasks)) as threads:
            futures = [threads.submit(fold, task) for task in tasks.values()]
            try:
                return [future.result() for future in futures]
            except KeyboardInterrupt:
                stop(self)
                raise


def stop(summarizer: Summarizer) -> None:
    """End the requests that are under way in other threads."""
    end = getattr(getattr(summarizer, "summarize_fn", None), "stop", None)
    if end is not None:
        end()


def _told(messages: Sequence[Message]) -> list[Message]:
    return [m for m in messages if m.told]


def compact_context(plan: CompactionPreparation, summarizer: Summarizer, *, on_failure: str = "degrade",
                    lang: str = "en", keep_rules: bool = True) -> Summary:  # fmt: skip
    """The summary of a plan. `on_failure`: "degrade" to the excerpt, or "fail" (raises SummaryError).

    `keep_rules`: the rules that a model's summary lacks are put back, word for word.
    """
    report = Report(summarizer.asked) if isinstance(summarizer, Prompted) else None
    try:
        body = summarizer.summarize(plan, report)
        if keep_rules and plan.settings.repair and isinstance(summarizer, Prompted):
            body = with_rules(body, _told(plan.messages_to_summarize), _told(plan.turn_prefix_messages),
                              previous_body(plan.previous_summary))  # fmt: skip
        return Summary(body, summarizer.name, report=report)
    except SummaryError as error:
        reason = mask_error(str(error.args[0]))
        if on_failure == "fail":
            tokens = (report.input_tokens, report.output_tokens) if report else (0, 0)
            raise SummaryError(reason, tokens=tokens) from error
        return Summary(degraded_body(plan, reason, lang), summarizer.name, reason, report)


def summary_text(plan: CompactionPreparation, summary: Summary) -> str:
    """The body and its file lists. The seed's degraded excerpt has none."""
    repair = plan.settings.repair
    if summary.degraded is not None and not repair:
        return summary.body
    body = sanitize_body(summary.body) if repair else summary.body
    return body + format_file_operations(*compute_file_lists(plan.file_ops, repair=repair))


def degraded_body(plan: CompactionPreparation, error: str, lang: str = "en") -> str:
    """Notice and the last 500 characters of the old conversation.

    With repairs (R6) also the previous summary, word for word, and the offline summary of what is new.
    """
    repair = plan.settings.repair
    excerpt = _end_of((*plan.messages_to_summarize, *plan.turn_prefix_messages), repair)
    if not repair:
        return f"{NOTICE['zh'].format(error=error)}\n\n{excerpt}"
    notice = NOTICE[lang].format(error=" ".join(error.split()))
    previous = previous_body(plan.previous_summary)
    offline = extract(_told(plan.messages_to_summarize), _told(plan.turn_prefix_messages), None)
    return "\n\n---\n\n".join([f"{notice}\n\n{excerpt}", *([previous] if previous else []), offline])


def _end_of(messages: Sequence[Message], repair: bool) -> str:
    """The last 500 characters of the serialised messages, without serialising all of them."""
    parts: list[str] = []
    for message in reversed(messages):
        if sum(map(len, parts)) >= EXCERPT_CHARS:
            break
        if text := serialize_conversation([message], repair=repair, mask=mask_secrets if repair else None):
            parts.insert(0, text)
    return "\n\n".join(parts)[-EXCERPT_CHARS:]


# ----------------------------------------------------------------------------------- any command
SYSTEM_PROMPT_VARIABLE = "HAOCOMPACT_SYSTEM_PROMPT"
STDERR_LINES = 3


@dataclass(frozen=True, slots=True)
class Command:
    """Any program: system prompt and prompt on stdin, summary on stdout. Run without a shell unless `shell`."""

    line: str
    timeout: float = 600.0
    shell: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, prompt: str, system_prompt: str, max_tokens: int) -> str:
        words = self._words()
        env = {**os.environ, **self.environment, SYSTEM_PROMPT_VARIABLE: system_prompt}
        text = f"{system_prompt}\n\n{prompt}"
        env["HAOCOMPACT_MAX_TOKENS"] = str(max_tokens)
        try:
            process = subprocess.Popen(words, env=env, start_new_session=True, stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
        except FileNotFoundError:
            raise SummaryError(f"command not found: {words[0]}") from None
        except OSError as error:
            raise SummaryError(f"{words[0]} can't be run: {error.strerror}") from error
        with process:
            out, err = self._answer(process, clean(text).encode(), words[0])
        if process.returncode:
            raise SummaryError(f"{words[0]} ended with exit code {process.returncode}{_tail_of(err)}")
        if not out.strip():
            raise SummaryError(f"empty response{_tail_of(err)}")
        return out.decode("utf-8", "replace")

    def _words(self) -> list[str]:
        if self.shell:
            return ["/bin/sh", "-c", self.line]
        try:
            words = shlex.split(self.line)
        except ValueError as error:
            raise SummaryError(f"the command can't be read: {error}") from None
        if not words:
            raise SummaryError("the command is empty")
        return words

    def _answer(self, process: subprocess.Popen[bytes], text: bytes, name: str) -> tuple[bytes, bytes]:
        """Its stdout and stderr. Whatever ends the wait ends the program, too, with all that it started."""
        try:
            return process.communicate(text, timeout=self.timeout)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise SummaryError(f"{name} gave no answer within {self.timeout:g} s") from None


def _tail_of(stderr: bytes) -> str:
    """The last lines of what a program said on stderr."""
    lines = [line.strip()[:200] for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return f": {' | '.join(lines[-STDERR_LINES:])}" if lines else ""
