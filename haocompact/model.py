"""A model behind an OpenAI-compatible server, asked through the openai client.

The client retries, backs off and honours Retry-After. Here: one answer or one named failure, a limit on the
whole time a request may take, and one rate limit for all requests of a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from haocompact.chunks import Answer
from haocompact.errors import SummaryError
from haocompact.redact import SECRET, mask_error

if TYPE_CHECKING:
    import openai

OPENAI_URL = "https://api.openai.com/v1"
NO_KEY = "none"  # what a local server is given; it takes anything
LONGEST_PAUSE = 60.0  # seconds of Retry-After that are honoured, as in the client
SHOWN = 200  # characters of a server's own words in an error


@dataclass(frozen=True)
class OpenAI:
    """One model of one server; requests of all threads share its connections and its rate limit.

    The key stands in the environment, under `key_variable`. `timeout`: seconds that a request may take in
    all, retries included. `concurrency`: requests under way at once.
    """

    model: str
    base_url: str | None = None
    key_variable: str = "OPENAI_API_KEY"
    temperature: float | None = None
    timeout: float = 600.0
    retries: int = 3
    concurrency: int = 4

    def __call__(self, prompt: str, system_prompt: str, max_tokens: int) -> Answer:
        server = self._server
        waiting = asyncio.run_coroutine_threadsafe(server.ask(prompt, system_prompt, max_tokens), server.loop)
        try:
            return waiting.result()
        except BaseException:
            waiting.cancel()
            raise

    def stop(self) -> None:
        """End all requests that are under way, and make no more."""
        self._server.stopped = True
        self._server.loop.call_soon_threadsafe(_cancel_all)

    @property
    def place(self) -> str:
        """Model and server, in words; a URL's password is no part of them."""
        return mask_error(
            f"{self.model} at {self.base_url or os.environ.get('OPENAI_BASE_URL') or OPENAI_URL}"
        )

    @property
    def identity(self) -> str:
        """What an answer depends on beside the prompt."""
        url = self.base_url or os.environ.get("OPENAI_BASE_URL")
        return json.dumps(["openai", url, self.model, self.temperature])

    @cached_property
    def _server(self) -> _Server:
        with _opening:
            if "_server" not in self.__dict__:
                self.__dict__["_server"] = _Server(self)
            server: _Server = self.__dict__["_server"]
            return server

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_server"}


_opening = threading.Lock()


def _cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


class _Server:
    """The client, an event loop for it in a thread that ends with the process, and what this run has learned."""

    def __init__(self, settings: OpenAI) -> None:
        import openai

        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="haocompact-model", daemon=True).start()
        self._settings = settings
        self._key = os.environ.get(settings.key_variable, "").strip()
        self._limit = "max_completion_tokens"
        self._most = 0  # output tokens that the model can give, once its server has said so
        self.stopped = False
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._not_before = 0.0
        hooks: dict[str, list[Callable[..., Any]]] = {
            "request": [self._wait_for_turn],
            "response": [self._note_pause],
        }
        self._client = openai.AsyncOpenAI(
            api_key=self._key or NO_KEY,
            base_url=settings.base_url,
            timeout=settings.timeout,
            max_retries=settings.retries,
            default_headers={"Connection": "close"},  # requests are long and rare: nothing to keep open
            http_client=openai.DefaultAsyncHttpxClient(event_hooks=hooks),
        )

    async def ask(self, prompt: str, system_prompt: str, max_tokens: int) -> Answer:
        import openai

        async with self._slots:
            if self.stopped:
                raise asyncio.CancelledError
            try:
                async with asyncio.timeout(self._settings.timeout):
                    body = await self._post(prompt, system_prompt, max_tokens)
                return read_reply(body, max_tokens)
            except (TimeoutError, openai.APITimeoutError):
                raise SummaryError(f"no complete answer within {self._settings.timeout:g} s") from None
            except openai.APIStatusError as error:
                raise SummaryError(self._safe(self._status_text(error))) from None
            except openai.APIConnectionError as error:
                raise SummaryError(
                    self._safe(f"no connection to {self._client.base_url}: {_root(error)}")
                ) from None
            except openai.OpenAIError as error:
                raise SummaryError(self._safe(str(error))) from None
            except SummaryError as error:
                raise SummaryError(self._safe(str(error.args[0])), tokens=error.tokens) from None

    async def _post(self, prompt: str, system_prompt: str, max_tokens: int) -> str:
        """The body of a reply; the output limit has the name and the size that this server takes."""
        import openai

        while True:
            try:
                return await self._create(prompt, system_prompt, max_tokens)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                if not self._learned(error.response.text):
                    raise

    def _learned(self, complaint: str) -> bool:
        """Whether a refusal says something new about the output limit."""
        most = _AT_MOST.search(complaint)
        if most and not self._most:
            self._most = int(most.group(1))
        elif "max_completion_tokens" in complaint and not most and self._limit != "max_tokens":
            self._limit = "max_tokens"
        else:
            return False
        return True

    async def _create(self, prompt: str, system_prompt: str, max_tokens: int) -> str:
        limit = min(max_tokens, self._most) if self._most else max_tokens
        more: dict[str, Any] = {self._limit: limit} if limit else {}
        if self._settings.temperature is not None:
            more["temperature"] = self._settings.temperature
        reply = await self._client.chat.completions.with_raw_response.create(
            model=self._settings.model,
            messages=[{"role": "system", "content": system_prompt}, {"role": "user", "content": prompt}],
            **more,
        )
        return str(reply.http_response.text)

    async def _wait_for_turn(self, request: object) -> None:
        """What one request was told by Retry-After holds for all."""
        while (pause := self._not_before - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(pause)

    async def _note_pause(self, response: Any) -> None:
        if response.status_code in (429, 503):
            seconds = _seconds(response.headers.get("retry-after"))
            if 0 < seconds <= LONGEST_PAUSE:
                self._not_before = max(self._not_before, asyncio.get_running_loop().time() + seconds)

    def _status_text(self, error: openai.APIStatusError) -> str:
        status, settings = error.status_code, self._settings
        said = _told(error.response.text)
        meaning = {
            401: f"the key in {settings.key_variable} was refused" if self._key else
                 f"a key is wanted and {settings.key_variable} is not set",
            403: "the key may not use this model or address",
            404: f"no model {settings.model!r} at {self._client.base_url}, or no such address",
            429: f"the rate limit or the quota is used up, after {settings.retries} retries",
        }.get(status, f"the server failed, after {settings.retries} retries" if status >= 500
              else "the request was refused")  # fmt: skip
        return f"HTTP {status}: {meaning}" + (f" ({said})" if said else "")

    def _safe(self, text: str) -> str:
        return mask_error(text.replace(self._key, SECRET) if self._key else text)


def _seconds(value: str | None) -> float:
    try:
        return float(value or 0)
    except ValueError:  # a date
        return 0.0


_AT_MOST = re.compile(r"(?:at most|maximum of) (\d+) (?:completion|output) tokens", re.IGNORECASE)


def _root(error: BaseException) -> str:
    """The innermost cause of a failed connection, in words."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


# ------------------------------------------------------------------------------------------ replies
def _told(body: str) -> str:
    """What a server says in an error's body: its message, the title of a page, or the text as it is."""
    try:
        found = json.loads(body)
    except ValueError:
        return _page(body) or _short(body)
    if isinstance(found, dict):
        error = found.get("error", found.get("detail", found.get("message", found)))
        if isinstance(error, dict):
            code, words = error.get("code"), error.get("message", error)
            error = f"{code}: {words}" if isinstance(code, str) and code not in str(words) else words
        found = error
    return _short(found if isinstance(found, str) else json.dumps(found))


def _page(body: str) -> str:
    """What to call an HTML page; empty when it is none."""
    if not re.match(r"\s*(?:<!doctype html|<html|<head)", body, re.IGNORECASE):
        return ""
    title = re.search(r"<title[^>]*>(.*?)</title>", body, re.IGNORECASE | re.DOTALL)
    return "an HTML page" + (f" titled {_short(title.group(1))!r}" if title else "")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def read_reply(body: str, max_tokens: int = 0) -> Answer:
    """The answer in a reply's body. Raises SummaryError that names what is there in place of a summary."""
    try:
        reply = json.loads(body)
    except ValueError:
        raise SummaryError(f"the reply is no JSON but {_page(body) or repr(_short(body)[:60])}") from None
    if not isinstance(reply, dict):
        raise SummaryError("the reply is no JSON object")
    if reply.get("error"):
        raise SummaryError(f"the server answered with an error: {_told(body)}")
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise SummaryError("the reply holds no message")
    usage = reply.get("usage")
    counts = _Counts(usage if isinstance(usage, dict) else {})
    text = _text_of(message.get("content"))
    if problem := _problem(choice, message, text, counts, max_tokens):
        raise SummaryError(problem, tokens=(counts.input or 0, counts.output or 0))
    return Answer(text, counts.input, counts.output)


class _Counts:
    """The figures of a reply's `usage`; None where there is none."""

    def __init__(self, usage: dict[str, Any]) -> None:
        details = usage.get("completion_tokens_details")
        self.input = _count(usage.get("prompt_tokens"))
        self.output = _count(usage.get("completion_tokens"))
        self.reasoning = _count(details.get("reasoning_tokens")) if isinstance(details, dict) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _text_of(content: object) -> str:
    """A message's content: text, or a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _problem(choice: dict[str, Any], message: dict[str, Any], text: str, counts: _Counts, limit: int) -> str:
    """Why a reply is no summary; empty when it may be one."""
    finish = str(choice.get("finish_reason") or "").lower()
    reasoned = counts.reasoning or _text_of(message.get("reasoning_content") or message.get("reasoning"))
    eaten = not text.strip() and bool(reasoned)
    thought = f" ({counts.reasoning:,} reasoning tokens)" if counts.reasoning else ""
    if message.get("refusal"):
        return f"the model refused: {_short(str(message['refusal']))}"
    if finish in ("content_filter", "safety"):
        return "the answer was stopped by a content filter"
    if finish in ("tool_calls", "function_call") or message.get("tool_calls") or message.get("function_call"):
        return "the model called a tool instead of answering"
    if finish in ("length", "max_tokens"):
        where = f" of {limit:,} tokens" if limit else ""
        return (f"the answer was eaten by reasoning{thought}, up to the output limit{where}" if eaten
                else f"the answer was cut at the output limit{where}{thought}")  # fmt: skip
    if finish == "error" or choice.get("error"):
        return f"the server answered with an error: {_short(str(choice.get('error') or finish))}"
    if eaten:
        return f"the answer was eaten by reasoning{thought}: empty response"
    return "" if text.strip() else "empty response"
