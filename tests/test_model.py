"""A model over a real connection: what is sent, what comes back, and every way in which that can fail."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT
from server import SOON, SUMMARY, error, reply, running, window_of

from haocompact import prompts, show
from haocompact.archive import Archive
from haocompact.chunks import Answers, Report
from haocompact.compaction import CHARS, CompactionSettings
from haocompact.errors import SummaryError
from haocompact.files import open_source
from haocompact.model import OpenAI
from haocompact.pipeline import Request, compact_in_place, compact_to, plan
from haocompact.summarize import Prompted, compact_context

KEY = "sk-server-KEY-0123456789"
PREFIX = "## Original Request\nWater.\n"
LARGE = ROOT.parent / "shared" / "oracle" / "fixtures" / "large-session.jsonl"


@pytest.fixture
def server():
    with running() as server:
        yield server


@pytest.fixture
def model(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def make(**more):
        return OpenAI("tiny", server.url, **({"timeout": 20.0, "retries": 0} | more))

    return make


def chat(tmp_path, turns=8, words=300, name="s.jsonl"):
    path = tmp_path / name
    path.write_bytes(b"".join(
        json.dumps({"role": role, "content": f"{role} {i} " + "bean " * words}).encode() + b"\n"
        for i in range(turns) for role in ("user", "assistant")))  # fmt: skip
    return path


SETTINGS = CompactionSettings(keep_recent_tokens=700, estimator=CHARS)


def failure(fn):
    with pytest.raises(SummaryError) as caught:
        fn("PROMPT", "SYSTEM", 77)
    return str(caught.value)


# ---------------------------------------------------------------------------------- what is sent
def test_one_request(server, model):
    answer = model()("PROMPT", "SYSTEM", 77)
    assert (answer.text, answer.input_tokens, answer.output_tokens) == (SUMMARY, 100, 20)
    assert server.asked == [{
        "model": "tiny", "max_completion_tokens": 77,
        "messages": [{"role": "system", "content": "SYSTEM"}, {"role": "user", "content": "PROMPT"}],
    }]  # fmt: skip
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_no_limit_and_a_temperature(server, model):
    model(temperature=0.5)("PROMPT", "SYSTEM", 0)
    assert server.asked[0]["temperature"] == 0.5
    assert not {"max_completion_tokens", "max_tokens"} & set(server.asked[0])


def test_a_server_that_wants_no_key(server, monkeypatch):
    assert OpenAI("tiny", server.url)("PROMPT", "SYSTEM", 7).text == SUMMARY
    monkeypatch.setenv("OTHER_KEY", KEY)
    OpenAI("tiny", server.url, "OTHER_KEY")("PROMPT", "SYSTEM", 7)
    assert server.headers[-1]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("status", [400, 422])
def test_the_older_name_of_the_limit_is_tried_and_remembered(server, model, status):
    def old(body):
        if "max_completion_tokens" in body:
            return error(status, "Unsupported parameter: 'max_completion_tokens'")
        return reply(SUMMARY)

    server.script = [old]
    asked = model()
    assert asked("PROMPT", "SYSTEM", 7).text == asked("PROMPT", "SYSTEM", 8).text == SUMMARY
    assert [b.get("max_tokens") for b in server.asked] == [None, 7, 8]


def test_a_limit_beyond_the_model_is_lowered_and_remembered(server, model):
    def small(body):
        if body["max_completion_tokens"] > 4096:
            return error(400, "max_completion_tokens is too large: 9999. This model supports at most 4096 completion "
                         "tokens, whereas you provided 9999.")  # fmt: skip
        return reply(SUMMARY)

    server.script = [small]
    asked = model()
    assert asked("PROMPT", "SYSTEM", 9999).text == asked("PROMPT", "SYSTEM", 5000).text == SUMMARY
    assert asked("PROMPT", "SYSTEM", 50).text == SUMMARY
    assert [b["max_completion_tokens"] for b in server.asked] == [9999, 4096, 4096, 50]


def test_a_request_that_stays_wrong_is_not_made_for_ever(server, model):
    for text in (
        "max_completion_tokens: at most 4096 completion tokens",
        "unknown max_completion_tokens",
        "bad",
    ):
        server.script = [error(400, text)]
        assert failure(model()) == f"HTTP 400: the request was refused ({text})"
    assert len(server.asked) == 2 + 2 + 1


def test_it_travels_to_other_processes_without_its_key(server, model):
    asked = model()
    asked("PROMPT", "SYSTEM", 7)
    stored = pickle.dumps(asked)
    assert KEY.encode() not in stored + repr(asked).encode() + asked.identity.encode()
    assert pickle.loads(stored) == asked


# ------------------------------------------------------------------------------------- failures
def raw(data, headers=""):
    """Bytes as a server's whole answer, then the end of the connection."""

    def write(body, handler):
        handler.wfile.write(f"HTTP/1.1 200 OK\r\n{headers}\r\n".encode() + data)
        handler.close_connection = True

    return write


HTML = b"<!DOCTYPE html><html><head><title>Sign in\n here</title></head></html>"
PAGE = {"content-type": "text/html"}
FAILURES = {
    "empty": (reply(""), "empty response"),
    "blank": (reply(" \n"), "empty response"),
    "null": (reply(None), "empty response"),
    "cut": (reply("...and the valve was set to thr", "length"), "the answer was cut at the output limit of 77 tokens"),
    "refusal": (reply(None, refusal="I can not do that."), "the model refused: I can not do that."),
    "filter": (reply("", "content_filter"), "the answer was stopped by a content filter"),
    "tool": (reply(None, "tool_calls", tool_calls=[{"id": "1"}]), "the model called a tool instead of answering"),
    "tool beside text": (reply(SUMMARY, tool_calls=[{"id": "1"}]), "the model called a tool instead of answering"),
    "page": ((200, HTML, PAGE), "the reply is no JSON but an HTML page titled 'Sign in here'"),
    "no JSON": ((200, b"{\"choices\": [", {}), "the reply is no JSON but '{\"choices\": ['"),
    "a list": ((200, [], {}), "the reply is no JSON object"),
    "no choice": ((200, {"choices": []}, {}), "the reply holds no message"),
    "error in 200": ((200, {"error": {"message": "overloaded", "code": 529}}, {}),
                     "the server answered with an error: overloaded"),
    "error as a choice": (reply("", "error"), "the server answered with an error: error"),
    "401": (error(401, "Incorrect API key provided"),
            "HTTP 401: the key in OPENAI_API_KEY was refused (Incorrect API key provided)"),
    "403": (error(403, "no access"), "HTTP 403: the key may not use this model or address (no access)"),
    "404": (error(404, "no such model"), "HTTP 404: no model 'tiny' at URL, or no such address (no such model)"),
    "404 page": ((404, HTML, PAGE),
                 "HTTP 404: no model 'tiny' at URL, or no such address (an HTML page titled 'Sign in here')"),
    "429": (error(429, "slow down", "rate_limit_exceeded"),
            "HTTP 429: the rate limit or the quota is used up, after 0 retries (rate_limit_exceeded: slow down)"),
    "500": (error(500, "oops"), "HTTP 500: the server failed, after 0 retries (oops)"),
    "502 page": ((502, b"<html><title>Bad Gateway</title>", PAGE),
                 "HTTP 502: the server failed, after 0 retries (an HTML page titled 'Bad Gateway')"),
    "dropped": (raw(b"{\"choices\"", "content-length: 999\r\n"), "no connection to URL"),
    "dropped at once": (raw(b"")  , "the reply is no JSON but ''"),
    "eaten by reasoning": (reply("", "length", reasoning_content="hm, hm"),
                           "the answer was eaten by reasoning, up to the output limit of 77 tokens"),
    "nothing but reasoning": (reply("", reasoning_content="hm"), "the answer was eaten by reasoning: empty response"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_says_what_happened(server, model, name):
    answer, reason = FAILURES[name]
    server.script = [answer]
    found = failure(model()).replace(server.url + "/", "URL")
    assert found.startswith(reason)
    assert "\n" not in found


def test_reasoning_tokens_are_named(server, model):
    body = reply("", "length")
    body["usage"]["completion_tokens_details"] = {"reasoning_tokens": 1234}
    server.script = [body]
    assert failure(model()) == (
        "the answer was eaten by reasoning (1,234 reasoning tokens), up to the output limit of 77 tokens"
    )


def test_a_failed_answer_is_paid_all_the_same(server, model):
    server.script = [reply("cut", "length", usage=(500, 77))]
    with pytest.raises(SummaryError) as caught:
        model()("PROMPT", "SYSTEM", 77)
    assert caught.value.tokens == (500, 77)


def test_no_server_at_all(server, model):
    asked = model()
    server.shutdown()
    server.server_close()
    assert re.match(rf"no connection to {server.url}/: .+", failure(asked))


def drip(body, handler):
    """A byte now and then: no single read ever times out."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n")
    for _ in range(200):
        handler.wfile.write(b" ")
        time.sleep(0.05)


def silence(body, handler):
    time.sleep(3)


def late_head(body, handler):
    for byte in b"HTTP/1.1 200 OK\r\n" * 10:
        handler.wfile.write(bytes([byte]))
        time.sleep(0.05)


@pytest.mark.parametrize("stall", [drip, silence, late_head])
def test_a_server_that_stalls_meets_the_time_limit(server, model, stall):
    server.script = [stall]
    start = time.monotonic()
    assert failure(model(timeout=0.4)) == "no complete answer within 0.4 s"
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("status", [401, 500, 200])
def test_a_key_that_a_server_repeats_is_in_no_message(server, model, monkeypatch, status):
    odd = "plain words that no pattern takes for one"
    monkeypatch.setenv("MY_VALUE", odd)
    for variable, key in (("OPENAI_API_KEY", KEY), ("MY_VALUE", odd)):
        server.script = [error(status, f"your key {key} is bad")]
        assert key not in failure(model(key_variable=variable))


def test_what_may_pass_is_tried_again(server, model):
    server.script = [error(500, "a", headers=SOON), error(429, "b", headers=SOON), reply(SUMMARY)]
    assert model(retries=2)("PROMPT", "SYSTEM", 7).text == SUMMARY
    assert len(server.asked) == 3


def test_what_will_not_pass_is_not_tried_again(server, model):
    server.script = [error(401, "no")]
    failure(model(retries=5))
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"<think>\nhm ## Goal\n</think>\n{SUMMARY}", SUMMARY),
        (f"so they want a summary\n</think>\n\n{SUMMARY}", SUMMARY),
        (f"```markdown\n{SUMMARY}\n```", SUMMARY),
        ("## Goal\nParse `</think>` tags.", "## Goal\nParse `</think>` tags."),
    ],
)
def test_reasoning_and_fences_are_no_part_of_a_summary(server, model, tmp_path, text, wanted):
    server.script = [reply(text)]
    assert run(chat(tmp_path), Prompted("openai", model())).summary.body == wanted


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<think>\nhm", "the answer was eaten by reasoning: nothing comes after it"),
        ("Error: upstream timed out", "the answer is an error text or a refusal, not a summary"),
        ("I’m sorry, but I can’t help with that.", "the answer is an error text or a refusal, not a summary"),
        ('{"error": {"message": "rate limit"}}', "the answer is an error text or a refusal, not a summary"),
        ("It went well.", "the answer has none of the headings that were asked for"),
    ],
)
def test_a_text_in_place_of_a_summary(server, model, tmp_path, text, reason):
    server.script = [reply(text)]
    assert (
        run(chat(tmp_path), Prompted("openai", model())).summary.degraded == f"Summarization failed: {reason}"
    )


# ------------------------------------------------------------------------------ from end to end
class Run:
    def __init__(self, planned, summary):
        self.planned, self.summary = planned, summary


def run(path, summarizer, **settings):
    with open_source(str(path)) as source:
        chosen = CompactionSettings(**{"keep_recent_tokens": 700, "estimator": CHARS} | settings)
        planned = plan(source, Request(chosen))
        return Run(planned, compact_context(planned.outcome, summarizer))


def split_chat(tmp_path):
    """A transcript whose cut splits the last turn."""
    path = chat(tmp_path, turns=3)
    more = [
        ("user", "LAST request"),
        ("assistant", "first " + "bean " * 600),
        ("assistant", "second " + "bean " * 600),
    ]
    with path.open("ab") as file:
        file.writelines(json.dumps({"role": r, "content": c}).encode() + b"\n" for r, c in more)
    return path


def slow(body):
    time.sleep(0.3)
    return reply(PREFIX if body["messages"][-1]["content"].count("PREFIX of a turn") else SUMMARY)


def test_history_and_turn_prefix_are_asked_side_by_side(server, model, tmp_path):
    server.script = [slow]
    found = run(split_chat(tmp_path), Prompted("openai", model(), focus="the beans", side_by_side=True))
    assert found.summary.degraded is None
    assert found.summary.body == f"{SUMMARY}\n\n---\n\n**Turn Context (split turn):**\n\n{PREFIX.strip()}"
    assert server.most == 2
    assert sorted(b["max_completion_tokens"] for b in server.asked) == [8192, 13107]
    assert all(p.endswith("Additional focus: the beans") for p in server.prompts())
    assert {b["messages"][0]["content"] for b in server.asked} == {prompts.SUMMARIZATION_SYSTEM_PROMPT}


def test_no_more_requests_at_once_than_asked_for(server, model, tmp_path):
    server.script = [slow]
    run(split_chat(tmp_path), Prompted("openai", model(concurrency=1), side_by_side=True))
    assert (server.most, len(server.asked)) == (1, 2)


def test_a_rate_limit_holds_for_all_requests(server, model):
    limited = error(429, "slow down", headers={"retry-after": "0.6", "retry-after-ms": "600"})
    server.script = [limited, reply(SUMMARY)]
    asked = model(retries=1)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(asked, "ONE", "SYSTEM", 7)
        while not server.asked:
            time.sleep(0.01)
        time.sleep(0.1)
        assert threads.submit(asked, "TWO", "SYSTEM", 7).result().text == first.result().text == SUMMARY
    assert all(t - server.times[0] >= 0.5 for t in server.times[1:])


def test_usage_and_cost(server, model, tmp_path):
    request = Request(
        SETTINGS, summarizer=Prompted("openai", model()), archive=tmp_path / "a.db", prices=(2.0, 10.0)
    )
    with open_source(str(chat(tmp_path))) as source:
        done = compact_to(source, request, tmp_path / "out.jsonl")
    found = show.done_json(done)
    assert found["usage"] == {
        "requests": 1, "reused": 0, "input_tokens": 100, "output_tokens": 20, "estimated": False,
    }  # fmt: skip
    assert found["cost"] == pytest.approx((100 * 2 + 20 * 10) / 1e6)
    assert show.spent_line(done).endswith("1 requests, 100 tokens in, 20 out, cost 0.0004")


def test_tokens_that_a_server_does_not_count_are_estimated(server, model, tmp_path):
    server.script = [reply(SUMMARY, usage=None)]
    report = run(chat(tmp_path), Prompted("openai", model())).summary.report
    assert report.estimated
    assert report.input_tokens > 1000
    assert report.output_tokens == len(SUMMARY) // 4 + 1


@pytest.mark.parametrize("id", ["B26", "B28"])
def test_cases_of_failed_answers(server, model, tmp_path, id):
    server.script = [
        reply("...and after that the valve was set to thr", "length") if id == "B26" else reply("  \n")
    ]
    path = tmp_path / "s.jsonl"
    path.write_bytes((Path(__file__).parent / "cases" / f"{id}.jsonl").read_bytes())
    settings = CompactionSettings(keep_recent_tokens=400, reserve_tokens=1024, estimator=CHARS)
    request = Request(settings, summarizer=Prompted("openai", model()), archive=tmp_path / "a.db")
    reason = compact_in_place(str(path), request).degraded
    assert ("output limit" if id == "B26" else "empty response") in reason
    assert b"was set to thr" not in path.read_bytes()


# --------------------------------------------------------------------------------------- chunks
def test_a_long_session_goes_through_a_small_window(server, model, tmp_path):
    if not LARGE.exists():
        pytest.skip("the session is not here")
    server.script = [window_of(16_000)]
    answers = Answers(tmp_path / "a.db", "x")
    found = run(LARGE, Prompted("openai", model(), window=16_000, answers=answers), keep_recent_tokens=20_000)
    assert (found.summary.degraded, found.summary.body.startswith(SUMMARY)) == (None, True)
    assert found.summary.report.input_tokens > 85_000
    assert all(body["max_completion_tokens"] == 4000 for body in server.asked)
    sent = "\n".join(server.prompts())
    told = [m for m in found.planned.outcome.removed if m.told and m.role in ("user", "assistant") and m.text]
    assert all(m.text[:200].replace("<", "&lt;") in sent for m in told)


@pytest.mark.parametrize("names_it", [True, False])
def test_a_window_that_nobody_named(server, model, tmp_path, names_it):
    limited = window_of(6_000)

    def unnamed(body):
        answer = limited(body)
        return error(400, "input is too long") if isinstance(answer, tuple) else answer

    server.script = [limited if names_it else unnamed]
    found = run(chat(tmp_path, turns=40), Prompted("openai", model(), model_max_tokens=1000))
    assert found.summary.degraded is None
    assert every_message_was_sent(server, 40, found)


def every_message_was_sent(server, turns, found):
    """Whether each removed message is in a request that was answered."""
    removed = found.planned.outcome.removed
    assert len(removed) > turns
    sent = "\n".join(server.prompts())
    return all(m.text[:20] in sent for m in removed)


def test_a_chunk_that_fails_is_retried_alone(server, model, tmp_path):
    server.script = [reply(SUMMARY), reply("cut", "length"), reply(SUMMARY)]
    found = run(chat(tmp_path, turns=30), Prompted("openai", model(), window=6_000))
    assert found.summary.degraded is None
    sent = server.prompts()
    assert sent[1] == sent[2] != sent[0]
    assert len(set(sent)) == len(sent) - 1


def test_what_was_answered_is_not_asked_again(server, model, tmp_path):
    path, archive = chat(tmp_path, turns=30), tmp_path / "a.db"

    def summarizer(**more):
        return Prompted("openai", model(), window=6_000, answers=Answers(archive, model().identity, **more))

    server.script = [reply(SUMMARY), reply(SUMMARY), error(500, "gone")]
    first = run(path, summarizer())
    assert "HTTP 500" in first.summary.degraded
    failed = len(server.asked)
    server.script = [reply(SUMMARY)]
    second = run(path, summarizer())
    assert second.summary.degraded is None
    assert (second.summary.report.reused, second.summary.report.requests) == (2, len(server.asked) - failed)
    assert not set(server.prompts()[:2]) & set(server.prompts()[failed:])
    asks = summarizer().requests(first.planned.outcome, Report())
    assert all(a.answered for a in asks)
    third = run(path, summarizer())
    assert (third.summary.report.requests, third.summary.body) == (0, second.summary.body)
    asked = len(server.asked)
    run(path, summarizer(fresh=True))
    assert len(server.asked) > asked


def test_a_bad_answer_is_not_kept(server, model, tmp_path):
    answers = Answers(tmp_path / "a.db", "x")
    server.script = [reply("It went well."), reply(SUMMARY)]
    assert run(chat(tmp_path), Prompted("openai", model(), answers=answers)).summary.degraded
    assert run(chat(tmp_path), Prompted("openai", model(), answers=answers)).summary.degraded is None


def test_the_key_of_an_answer_is_all_that_it_depends_on(tmp_path):
    keys = {
        Answers(tmp_path, name).key(prompt, limit) for name in "ab" for prompt in "pq" for limit in (1, 2)
    }
    assert len(keys) == 8
    with Archive.open(tmp_path / "a.db", create=True) as archive:
        assert archive.answer("k") is None
        archive.keep_answer("k", "text 中", "2026-01-01")
        archive.keep_answer("k", "newer", "2026-01-02")
        assert archive.answer("k") == "newer"
        archive._db.execute("UPDATE answers SET text = x'00'")
        assert archive.answer("k") is None


# ---------------------------------------------------------------------------------- command line
def cli(*words, **more):
    env = {**os.environ, **more.pop("env", {})}
    return subprocess.run([sys.executable, "-m", "haocompact", *map(str, words)], capture_output=True, text=True,
                          timeout=60, env=env, **more)  # fmt: skip


SMALL = ("--keep-recent", "700", "--estimator", "chars")


def test_a_model_named_on_the_command_line_is_asked(server, tmp_path):
    done = cli("compact", chat(tmp_path), *SMALL, "--model", "tiny", "--base-url", server.url, "-o", tmp_path / "out",
               "--json", "--price-in", "1")  # fmt: skip
    assert (done.returncode, len(server.asked)) == (0, 1)
    found = json.loads(done.stdout)
    assert found["asked"] == f"tiny at {server.url}"
    assert (found["summarizer"], found["degraded"], found["redacted"]) == ("openai", False, {})
    assert found["cost"] == pytest.approx(100 / 1e6)


def test_a_model_in_the_environment_sends_nothing_by_itself(server, tmp_path):
    env = {"HAOCOMPACT_MODEL": "tiny", "HAOCOMPACT_BASE_URL": server.url}
    assert cli("compact", chat(tmp_path), *SMALL, "-o", tmp_path / "out", env=env).returncode == 0
    assert not server.asked
    done = cli("compact", chat(tmp_path), *SMALL, "-o", tmp_path / "out", "--summarizer", "openai", env=env)
    assert (done.returncode, len(server.asked)) == (0, 1)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model", "m", "--command", "cat"], "only one summarizer can be named"),
        (["--base-url", "http://x/v1", "--summarizer", "extract"], "only one summarizer can be named"),
        (["--model", "m", "--summarizer", "command"], "only one summarizer can be named"),
        (["--summarizer", "openai"], "--summarizer openai needs --model"),
        (["--model", "m"], "no key: OPENAI_API_KEY is not set"),
        (["--model", "m", "--base-url", "http://x/v1", "--api-key-env", "MINE"], "no key: MINE is not set"),
    ],
)
def test_options_that_contradict_each_other(tmp_path, words, text):
    done = cli("compact", chat(tmp_path), *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_a_dry_run_prints_the_requests_and_their_cost(server, tmp_path):
    words = ("compact", chat(tmp_path, turns=30), *SMALL, "--model", "tiny", "--base-url", server.url,
             "--summarizer-window", "6000", "--price-in", "2", "--price-out", "10", "--dry-run")  # fmt: skip
    text = cli(*words).stdout.splitlines()
    found = json.loads(cli(*words, "--json").stdout)
    assert not server.asked
    asks = found["requests"]
    assert [a["name"] for a in asks] == [f"history {i + 1}/{len(asks)}" for i in range(len(asks))]
    assert all(a["input_tokens"] + a["max_tokens"] <= 6000 for a in asks)
    assert found["cost"] == pytest.approx(
        sum(a["input_tokens"] * 2 + a["max_tokens"] * 10 for a in asks) / 1e6
    )
    assert found["usage"] is found["tokens_after"] is None
    assert len(text) == 1 + len(asks)
    assert f"{len(asks)} requests to tiny at {server.url}, about" in text[0]
    server.script = [reply(SUMMARY)]
    cli(*words[:-1], "-o", tmp_path / "out")
    assert len(server.asked) == len(asks)


def test_the_prompts_are_shown_as_they_would_be_sent(server, tmp_path):
    words = ("compact", chat(tmp_path), *SMALL, "--model", "tiny", "--base-url", server.url)
    shown = cli(*words, "--show-prompt").stdout
    (ask,) = json.loads(cli(*words, "--show-prompt", "--json").stdout)["requests"]
    assert not server.asked
    cli(*words, "-o", tmp_path / "out")
    assert [m["content"] for m in server.asked[0]["messages"]] == [ask["system"], ask["prompt"]]
    assert ask["prompt"] in shown


def test_secrets_are_masked_for_a_model_and_for_a_program_when_asked(server, tmp_path):
    path = chat(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"user 0", b"user 0 password=hunter2"))
    before, echo = path.read_bytes(), f"sh -c 'cat >{tmp_path}/prompt; printf \"## Goal\\nx\"'"
    model, program = ("--model", "tiny", "--base-url", server.url), ("--command", echo)
    for words, masked in (
        (model, True),
        ((*model, "--no-redact"), False),
        (program, False),
        ((*program, "--redact"), True),
    ):
        done = cli("compact", path, *SMALL, *words, "-o", tmp_path / "out", "--json")
        sent = server.prompts()[-1] if words[0] == "--model" else (tmp_path / "prompt").read_text()
        assert ("hunter2" in sent, "password=[REDACTED]" in sent) == (not masked, masked)
        assert json.loads(done.stdout)["redacted"] == ({"password or token": 1} if masked else None)
        assert ("masked in what is sent: 1 password or token" in done.stderr) == masked
    restored = subprocess.run([sys.executable, "-m", "haocompact", "retrieve", str(tmp_path / "out"), "--restore"],
                              capture_output=True, timeout=60)  # fmt: skip
    assert restored.stdout == before


def test_a_skip_asks_for_nothing(server, tmp_path):
    words = ("compact", chat(tmp_path, turns=1), "--model", "tiny", "--base-url", server.url)
    for more in (["--dry-run"], ["--show-prompt"], ["-o", tmp_path / "out"]):
        done = cli(*words, *more)
        assert (done.returncode, "[COMPACT_NONE]" in done.stderr, server.asked) == (0, True, [])


def test_a_model_of_a_small_window_in_the_settings_file(server, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(
        f'summarizer = "openai"\nmodel = "tiny"\nbase-url = "{server.url}"\nsummarizer-window = 6000\n'
    )
    env = {"HAOCOMPACT_CONFIG": str(config)}
    done = cli("compact", chat(tmp_path, turns=30), *SMALL, "-o", tmp_path / "out", env=env)
    assert (done.returncode, len(server.asked) > 1) == (0, True)
    asked = len(server.asked)
    cli(
        "compact",
        chat(tmp_path, turns=30),
        *SMALL,
        "-o",
        tmp_path / "out",
        "--summarizer",
        "extract",
        env=env,
    )
    assert len(server.asked) == asked


def test_many_files_go_to_one_server(server, tmp_path):
    def answered(body):
        return error(500, "oops") if "DOOMED" in body["messages"][-1]["content"] else slow(body)

    server.script = [answered]
    for i in range(6):
        path = chat(tmp_path, name=f"s{i}.jsonl")
        if i == 3:
            path.write_bytes(path.read_bytes().replace(b"user 0", b"user 0 DOOMED"))
    done = cli("compact", "--in-place", tmp_path, *SMALL, "--model", "tiny", "--base-url", server.url, "--jobs", "6",
               "--concurrency", "3", "--min-age", "0", "--json", "--retries", "0", "--on-failure", "fail")  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    *found, totals = (json.loads(line) for line in done.stdout.splitlines())
    assert [f["result"] for f in found] == ["ok", "ok", "ok", "error", "ok", "ok"]
    assert totals["result"] == "totals"
    assert (done.returncode, server.most) == (7, 3)
    assert "HTTP 500" in found[3]["message"]


def test_what_a_failure_took_is_told(server, tmp_path):
    server.script = [reply("cut", "length", usage=(500, 77))]
    done = cli("compact", chat(tmp_path), *SMALL, "--model", "tiny", "--base-url", server.url, "-o", tmp_path / "out",
               "--json", "--on-failure", "fail")  # fmt: skip
    assert done.returncode == 5
    assert json.loads(done.stdout)["usage"] == {"input_tokens": 500, "output_tokens": 77}
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_ends_at_once_and_goes_on_where_it_was(server, tmp_path):
    path = chat(tmp_path, turns=30)
    before = path.read_bytes()
    words = [sys.executable, "-m", "haocompact", "compact", "--in-place", str(path), *SMALL, "--model", "tiny",
             "--base-url", server.url, "--summarizer-window", "6000"]  # fmt: skip
    server.script = [reply(SUMMARY), reply(SUMMARY), lambda body: time.sleep(20)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE)
    while len(server.asked) < 3:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    process.communicate(timeout=10)
    assert time.monotonic() - start < 5
    assert (process.returncode, path.read_bytes()) == (130, before)
    asked = len(server.asked)
    server.script = [reply(SUMMARY)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "2 answered before" in done.stderr) == (0, True)
    assert not set(server.prompts()[:2]) & set(server.prompts()[asked:])


def test_an_interrupted_batch_ends_at_once(server, tmp_path):
    for i in range(6):
        chat(tmp_path, name=f"s{i}.jsonl")
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    words = [sys.executable, "-m", "haocompact", "compact", "--in-place", str(tmp_path), *SMALL, "--model", "tiny",
             "--base-url", server.url, "--jobs", "4", "--concurrency", "2", "--min-age", "0"]  # fmt: skip
    server.script = [lambda body: time.sleep(20)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE)
    while len(server.asked) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    process.communicate(timeout=15)
    assert time.monotonic() - start < 5
    assert (process.returncode, len(server.asked)) == (130, 2)
    assert {p: p.read_bytes() for p in before} == before


def test_no_key_is_written_anywhere(server, tmp_path):
    server.script = [error(500, f"bad key {KEY}")]
    places = {"HAOCOMPACT_ARCHIVE": str(tmp_path / "a.db"), "HAOCOMPACT_LOG": str(tmp_path / "log")}
    done = cli("compact", "--in-place", chat(tmp_path), *SMALL, "--model", "tiny", "--base-url", server.url, "--json",
               "--retries", "0", env={"OPENAI_API_KEY": KEY, **places})  # fmt: skip
    assert done.returncode == 0
    assert "HTTP 500" in json.loads(done.stdout)["degraded_reason"]
    written = b"".join(p.read_bytes() for p in tmp_path.iterdir() if p.is_file())
    assert KEY not in done.stdout + done.stderr
    assert KEY.encode() not in written


def test_the_report_adds_up():
    report = Report()
    assert (report.requests, report.reused, report.input_tokens, report.estimated) == (0, 0, 0, False)
