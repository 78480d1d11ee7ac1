"""From removed messages to the text that stands in for them.

serialize_conversation -> prompts -> a summarizer -> history and turn prefix joined -> file lists.
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
    SUMMARIZATION_SYSTEM_PROMPT,
    TURN_PREFIX_SUMMARIZATION_PROMPT,
    UPDATE_SUMMARIZATION_PROMPT,
)
from haocompact.records import clean
from haocompact.segment import build_summary_prompt as build_segment_prompt
from haocompact.segment import projected, summary_budget

TOOL_RESULT_MAX_CHARS = 2000
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

SummarizeFn = Callable[[str, str, int], str]
"""(prompt, system prompt, max output tokens) -> summary. Raises SummaryError."""


# --------------------------------------------------------------------------------- serialisation
_FRAME = re.compile(r"<(?=/?(?:conversation|previous-summary)\b)", re.IGNORECASE)
_SPEAKER = re.compile(
    r"^\[(?=(?:User|Assistant|Assistant thinking|Assistant tool calls|Tool result|System)\]:)", re.M
)
_BASE64 = "[A-Za-z0-9+/=]{60,}"
_DATA_URL = re.compile(rf"(data:[\w.+-]+/[\w.+-]+;base64,){_BASE64}(?:\r?\n{_BASE64})*")


def serialize_conversation(messages: Iterable[Message], *, repair: bool = True) -> str:
    """The seed's text form: `[User]: ...`, `[Assistant thinking]: ...`, `[Tool result]: ...` and so on.

    Tool results are cut at 2000 characters. With `repair`, text can neither close the frame nor open a
    speaker of its own, and lone surrogates are replaced.
    """
    return "\n\n".join(line for m in messages if m.told for line in _lines(m, repair))


def _lines(message: Message, repair: bool) -> Iterator[str]:
    safe = _neutral if repair else str
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
            result = _truncate_for_summary("\n".join(t for t in part.texts if t), TOOL_RESULT_MAX_CHARS)
            yield from _labelled("Tool result", safe(result), repair)
        elif isinstance(part, Shell):
            yield from _labelled("User", safe(_shell_text(part)), repair)
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


def _shell_text(shell: Shell) -> str:
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


def build_turn_prefix_prompt(conversation: str) -> str:
    return f"<conversation>\n{conversation}\n</conversation>\n\n{TURN_PREFIX_SUMMARIZATION_PROMPT}"


def output_budget(reserve_tokens: int, share: float, model_max_tokens: int = 0) -> int:
    """`min(share x reserve, model's own limit)`; a limit of 0 is none."""
    return min(int(share * reserve_tokens), model_max_tokens if model_max_tokens > 0 else 1 << 30)


def generate_summary(messages: Sequence[Message], summarize_fn: SummarizeFn, reserve_tokens: int,
                     model_max_tokens: int = 0, previous_summary: str | None = None, *,
                     focus: str | None = None, repair: bool = True) -> str:  # fmt: skip
    """Summary of the history. Raises SummaryError, also for an empty answer or one without any heading."""
    previous = _neutral(previous_summary) if previous_summary and repair else previous_summary
    prompt = build_summary_prompt(serialize_conversation(messages, repair=repair), previous)
    budget = output_budget(reserve_tokens, HISTORY_SHARE, model_max_tokens)
    text = _ask(summarize_fn, _focused(prompt, focus), budget, "Summarization failed")
    if repair and not HEADINGS.search(text):
        raise SummaryError("Summarization failed: the answer has none of the headings that were asked for")
    return text


def generate_turn_prefix_summary(messages: Sequence[Message], summarize_fn: SummarizeFn, reserve_tokens: int,
                                 model_max_tokens: int = 0, *, focus: str | None = None,
                                 repair: bool = True) -> str:  # fmt: skip
    """Summary of the first half of a split turn. Raises SummaryError."""
    prompt = build_turn_prefix_prompt(serialize_conversation(messages, repair=repair))
    budget = output_budget(reserve_tokens, PREFIX_SHARE, model_max_tokens)
    return _ask(summarize_fn, _focused(prompt, focus), budget, "Turn prefix summarization failed")


def _focused(prompt: str, focus: str | None) -> str:
    return f"{prompt}\n\nAdditional focus: {focus}" if focus else prompt


def _ask(summarize_fn: SummarizeFn, prompt: str, budget: int, label: str) -> str:
    try:
        text = summarize_fn(prompt, SUMMARIZATION_SYSTEM_PROMPT, budget)
    except SummaryError as error:
        raise SummaryError(f"{label}: {error.args[0]}") from error
    if not text or not text.strip():
        raise SummaryError(f"{label}: empty response")
    return text.strip()


# --------------------------------------------------------------------------------- the summarizers
@dataclass(frozen=True, slots=True)
class Summary:
    """`body` without file lists and markers. `degraded`: why the summarizer failed, None when it did not."""

    body: str
    summarizer: str
    degraded: str | None = None


class Summarizer(Protocol):
    @property
    def name(self) -> str: ...

    def summarize(self, plan: CompactionPreparation) -> str:
        """Body of the new summary, the previous one taken in. Raises SummaryError."""


@dataclass(frozen=True, slots=True)
class Extract:
    """Offline and deterministic: a ledger of what the transcript says."""

    max_chars: int | None = None
    name: str = "extract"

    def summarize(self, plan: CompactionPreparation) -> str:
        lists = format_file_operations(*compute_file_lists(plan.file_ops))
        return extract(_told(plan.messages_to_summarize), _told(plan.turn_prefix_messages),
                       previous_body(plan.previous_summary), max_chars=self.max_chars,
                       reserved=len(lists))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The seed's mechanical degradation, asked for on purpose."""

    lang: str = "en"
    name: str = "excerpt"

    def summarize(self, plan: CompactionPreparation) -> str:
        return degraded_body(plan, "not asked for", self.lang)


@dataclass(frozen=True, slots=True)
class Prompted:
    """A program or a model that answers the seed's prompts, history first, then the turn prefix."""

    name: str
    summarize_fn: SummarizeFn
    model_max_tokens: int = 0
    focus: str | None = None
    lang: str = "en"

    def summarize(self, plan: CompactionPreparation) -> str:
        settings = plan.settings
        history, prefix = _told(plan.messages_to_summarize), _told(plan.turn_prefix_messages)
        previous = previous_body(plan.previous_summary) if settings.repair else plan.previous_summary
        if settings.strategy == "segment":
            return self._segment_summary(history, previous)
        body = (previous if settings.repair else None) or NO_HISTORY
        if history:
            body = generate_summary(history, self.summarize_fn, settings.reserve_tokens, self.model_max_tokens,
                                    previous, focus=self.focus, repair=settings.repair)  # fmt: skip
        if not prefix:
            return body
        return body + TURN_CONTEXT + generate_turn_prefix_summary(
            prefix, self.summarize_fn, settings.reserve_tokens, self.model_max_tokens,
            focus=self.focus, repair=settings.repair)  # fmt: skip

    def _segment_summary(self, history: Sequence[Message], previous: str | None) -> str:
        prompt = _focused(_segment_prompt(history, previous, self.lang), self.focus)
        return _ask(self.summarize_fn, prompt, self.model_max_tokens, "Summarization failed")


def _segment_prompt(messages: Sequence[Message], previous: str | None, lang: str) -> str:
    """berry-agent's five-section prompt over the messages of any format."""
    forms = [form for m in messages for form in projected(m)]
    chars = sum(len(json.dumps(form, ensure_ascii=False)) for form in forms)
    return clean(build_segment_prompt(forms, previous, summary_budget(chars), lang))


def _told(messages: Sequence[Message]) -> list[Message]:
    return [m for m in messages if m.told]


def compact_context(plan: CompactionPreparation, summarizer: Summarizer, *, on_failure: str = "degrade",
                    lang: str = "en", keep_rules: bool = True) -> Summary:  # fmt: skip
    """The summary of a plan. `on_failure`: "degrade" to the excerpt, or "fail" (raises SummaryError).

    `keep_rules`: the rules that a model's summary lacks are put back, word for word.
    """
    try:
        body = summarizer.summarize(plan)
        if keep_rules and plan.settings.repair and not isinstance(summarizer, (Extract, Excerpt)):
            body = with_rules(body, _told(plan.messages_to_summarize), _told(plan.turn_prefix_messages),
                              previous_body(plan.previous_summary))  # fmt: skip
        return Summary(body, summarizer.name)
    except SummaryError as error:
        reason = mask_secrets(str(error.args[0]))
        if on_failure == "fail":
            raise SummaryError(reason) from error
        return Summary(degraded_body(plan, reason, lang), summarizer.name, reason)


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
        if text := serialize_conversation([message], repair=repair):
            parts.insert(0, text)
    return "\n\n".join(parts)[-EXCERPT_CHARS:]


_SECRETS = (
    (re.compile(r"(https?://)[^\s/@]+@"), r"\1"),
    (re.compile(r"(https?://[^\s?#]+)[?#]\S*"), r"\1"),
    (re.compile(r"(?i)((?:api[_-]?key|token|secret|password|authorization)\"?\s*[=:]\s*\"?)(?:bearer\s+)?[^\s\"',}]+"),
     r"\1[REDACTED]"),
    (re.compile(r"(?i)bearer\s+\S+"), "Bearer [REDACTED]"),
    (re.compile(r"\b(?:sk|pk|rk)-[\w-]{8,}"), "[REDACTED]"),
)  # fmt: skip


_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SECRET_CHARS = 8  # a shorter value would stand in too many innocent places


def mask_secrets(text: str) -> str:
    """An error text without keys: URL credentials and queries, tokens and Authorization values go, and so does
    what the environment calls a key."""
    for name, value in os.environ.items():
        if len(value) >= _SECRET_CHARS and _SECRET_NAME.search(name):
            text = text.replace(value, "[REDACTED]")
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


# ----------------------------------------------------------------------------------- any command
SYSTEM_PROMPT_VARIABLE = "HAOCOMPACT_SYSTEM_PROMPT"


@dataclass(frozen=True, slots=True)
class Command:
    """Any program: system prompt and prompt on stdin, summary on stdout. Run without a shell."""

    line: str
    timeout: float = 600.0
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
        return out.decode("utf-8", "replace")

    def _words(self) -> list[str]:
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
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return f": {lines[-1][:200]}" if lines else ""
