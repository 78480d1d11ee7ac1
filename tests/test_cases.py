"""Inputs from public bug reports, each with the right behaviour as facts (tests/cases, README there).

One runner for all: it plans and compacts every case through the command line's own functions, with a stub in
the place of the summarizer, and checks each fact that the case states.
"""

import json
import re
from pathlib import Path

import pytest

from haocompact import show
from haocompact.compaction import (
    CHARS,
    COMPACTION_SUMMARY,
    CompactionSettings,
    ToolCall,
    ToolResult,
)
from haocompact.errors import HaoError, SummaryError
from haocompact.files import open_source
from haocompact.formats import FORMATS
from haocompact.formats.session import ReadOptions
from haocompact.pipeline import (
    Request,
    Skipped,
    compact,
    compact_in_place,
    compact_to,
    plan,
    restore,
    warnings_of,
)
from haocompact.records import read
from haocompact.summarize import Prompted

CASES = Path(__file__).parent / "cases"
SHORT = "## Goal\nKeep the greenhouse running.\n\n## Next Steps\n1. Go on."


def facts_of(path):
    return json.loads(re.findall(r"```json\n(.*?)\n```", path.read_text("utf-8"), re.DOTALL)[-1])


ALL = {f["id"]: f for f in map(facts_of, sorted(CASES.glob("*.expect.md")))}


class Stub:
    """Records every prompt; answers as the case says."""

    def __init__(self, id):
        self.id, self.prompts, self.max_tokens = id, [], []

    def __call__(self, prompt, system, max_tokens):
        self.prompts.append(prompt)
        self.max_tokens.append(max_tokens)
        match self.id:
            case "B100":
                return "PREFIX-OK"
            case "B17":
                return "## Goal\n" + "x" * 4000
            case "B22" if len(prompt) > 8000:
                raise SummaryError("context_length_exceeded")
            case "B24":
                raise SummaryError("connection reset: https://api.example.invalid/v1?key=SECRETKEY123")
            case "B26":
                raise SummaryError("the answer was cut at the output limit")
            case "B28":
                return "  \n"
            case "B94":
                return prompt
            case "B96":
                return "SENTINEL"
        return SHORT


class Run:
    """One case, planned and compacted."""

    def __init__(self, facts, tmp_path):
        s = facts["settings"]
        self.facts, self.path = facts, CASES / f"{facts['id']}.jsonl"
        self.stub = Stub(facts["id"])
        settings = CompactionSettings(keep_recent_tokens=s["keep_recent_tokens"], reserve_tokens=s["reserve_tokens"],
                                      context_window=s["context_window"], estimator=CHARS)  # fmt: skip
        summarizer = Prompted(
            "stub", self.stub, s.get("summarizer_max_tokens", 0), redact=bool(facts.get("redacted"))
        )
        self.request = Request(settings, summarizer=summarizer, archive=tmp_path / "archive.db", log=tmp_path / "log",
                               allow_growth="redacted" in facts)  # fmt: skip
        self.data = self.path.read_bytes()
        self.lines = self.data.split(b"\n")
        self.target = tmp_path / "out.jsonl"
        with open_source(str(self.path)) as source:
            self.planned = plan(source, self.request)
            self.json = show.plan_json(self.planned)
            self.warnings = warnings_of(self.planned)
            self.error = None
            try:
                self.done = compact_to(source, self.request, self.target)
            except HaoError as error:
                self.error = error

    @property
    def output(self):
        return self.target.read_bytes()

    @property
    def session(self):
        return FORMATS[self.planned.session.format].read(read(self.output), ReadOptions())

    @property
    def summary(self):
        return next(m.text for m in self.session.messages if m.kind == COMPACTION_SUMMARY)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    made = {}

    def make(id):
        if id not in made:
            made[id] = Run(ALL[id], tmp_path_factory.mktemp(id))
        return made[id]

    return make


def ids(*keys):
    return [id for id, f in ALL.items() if any(k in f for k in keys)]


@pytest.mark.parametrize("id", ALL)
def test_format_is_detected(run_of, id):
    assert run_of(id).planned.session.format == ALL[id]["format"]


@pytest.mark.parametrize("id", ids("first_kept_line", "allowed", "forbidden"))
def test_cut(run_of, id):
    facts, line = ALL[id], run_of(id).json["first_kept_line"]
    if "first_kept_line" in facts:
        assert line == facts["first_kept_line"]
    if "allowed" in facts:
        assert line in facts["allowed"]
    assert line not in facts.get("forbidden", ())


@pytest.mark.parametrize("id", ids("split_turn"))
def test_split_turn(run_of, id):
    facts, found = ALL[id], run_of(id).json
    assert found["is_split_turn"] == facts["split_turn"]
    assert found["turn_start_line"] == facts.get("turn_start_line")


@pytest.mark.parametrize("id", ids("together"))
def test_together(run_of, id):
    first = run_of(id).json["first_kept_line"]
    for group in ALL[id]["together"]:
        assert len({line >= first for line in group}) == 1


@pytest.mark.parametrize("id", ids("tokens_before", "wrong"))
def test_tokens_before(run_of, id):
    wanted, got = ALL[id].get("tokens_before"), run_of(id).json["tokens_before"]
    if isinstance(wanted, dict) and "min" in wanted:
        assert wanted["min"] <= got <= wanted["max"]
    elif wanted is not None:
        assert got in (wanted if isinstance(wanted, list) else [wanted])
    assert got not in ALL[id].get("wrong", ())


@pytest.mark.parametrize("id", ids("should_compact"))
def test_should_compact(run_of, id):
    assert run_of(id).json["should_compact"] == ALL[id]["should_compact"]


@pytest.mark.parametrize("id", ids("message_count"))
def test_message_count(run_of, id):
    assert run_of(id).json["messages"] == ALL[id]["message_count"]


@pytest.mark.parametrize("id", ids("row_est", "equal_est"))
def test_row_estimates(run_of, id):
    tokens = {row["line"]: row["tokens"] for row in run_of(id).json["rows"]}
    if wanted := ALL[id].get("row_est"):
        assert wanted["min"] <= tokens[wanted["line"]] <= wanted["max"]
    for a, b in ALL[id].get("equal_est", ()):
        assert abs(tokens[a] - tokens[b]) <= 8


@pytest.mark.parametrize("id", ids("in_prompt", "not_in_prompt", "in_prompts_union"))
def test_prompts(run_of, id):
    prompts = run_of(id).stub.prompts
    for text in (
        *ALL[id].get("in_prompt", ()),
        *ALL[id].get("in_prompts_union", ()),
        *ALL[id].get("should_in_prompt", ()),
    ):
        assert any(text in p for p in prompts), text
    for text in ALL[id].get("not_in_prompt", ()):
        assert not any(text in p for p in prompts), text
    for prompt in prompts:
        prompt.encode()


@pytest.mark.parametrize("id", ids("in_summary", "not_in_summary", "nowhere"))
def test_summary(run_of, id):
    run = run_of(id)
    for text in ALL[id].get("in_summary", ()):
        assert text in run.summary
    for text in (*ALL[id].get("not_in_summary", ()), *ALL[id].get("nowhere", ())):
        assert text not in run.summary
        assert text not in (run.done.degraded or "")


@pytest.mark.parametrize("id", ids("redacted"))
def test_redacted(run_of, id):
    run = run_of(id)
    for told in (*run.stub.prompts, run.summary, json.dumps(run.json), json.dumps(show.done_json(run.done))):
        for secret in ALL[id]["redacted"]:
            assert secret not in told
    assert sum(run.done.report.redacted.values()) == len(ALL[id]["redacted"])
    assert "AWS_ACCESS_KEY_ID=[REDACTED]" in run.stub.prompts[0]
    assert run.request.archive.stat().st_mode & 0o777 == 0o600


def test_B94_a_failed_summary_tells_no_secret_either(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes((CASES / "B94.jsonl").read_bytes())
    settings = CompactionSettings(keep_recent_tokens=400, reserve_tokens=1024, estimator=CHARS)
    summarizer = Prompted("stub", Stub("B24"), redact=True)
    request = Request(settings, summarizer=summarizer, archive=tmp_path / "a.db", allow_growth=True)
    done = compact_in_place(str(path), request)
    summary = FORMATS["claude"].read(read(path.read_bytes()), ReadOptions()).messages[0].text
    assert done.degraded
    assert not any(secret in summary for secret in ALL["B94"]["redacted"])


@pytest.mark.parametrize("id", ids("kept_bytes", "must_keep_lines"))
def test_kept_bytes(run_of, id):
    run = run_of(id)
    output = run.output.split(b"\n")
    for line in (*ALL[id].get("kept_bytes", ()), *ALL[id].get("must_keep_lines", ())):
        assert run.lines[line - 1] in output, f"line {line}"


@pytest.mark.parametrize("id", ids("warn_lines", "warn"))
def test_warnings(run_of, id):
    warnings = run_of(id).warnings
    assert warnings
    for line in ALL[id].get("warn_lines", ()):
        assert any(f":{line}: " in w for w in warnings), line


def outcome_of(run):
    if run.error is not None:
        return "error"
    if run.done.skip is not None:
        return "skip"
    return "degraded" if run.done.degraded else "ok"


@pytest.mark.parametrize("id", ids("exit", "outcomes"))
def test_exit(run_of, id):
    if "scenario" in ALL[id]:
        pytest.skip("a scenario of its own, below")
    run, facts = run_of(id), ALL[id]
    got = outcome_of(run)
    allowed = [facts["exit"]] if "exit" in facts else [o.get("exit", "ok") for o in facts["outcomes"]]
    assert got in " ".join(allowed).replace("_or_", " ").split()
    if got == "skip":
        assert "[COMPACT_NONE]" in run.request.log.read_text()
        assert run.output == run.data
        assert facts.get("sub") in (None, run.json["sub"])


@pytest.mark.parametrize("id", [id for id in ALL if "scenario" not in ALL[id]])
def test_every_case_comes_back_byte_for_byte(run_of, id):
    run = run_of(id)
    if run.error is not None or run.done.skip is not None:
        return
    with open_source(str(run.target)) as source:
        assert b"".join(restore(source, run.request)) == run.data


@pytest.mark.parametrize("id", [id for id in ALL if "scenario" not in ALL[id]])
def test_no_result_without_its_call(run_of, id):
    run = run_of(id)
    if run.error is not None or run.done.skip is not None:
        return
    calls = set()
    for message in run.session.messages:
        calls |= {p.id for p in message.parts if isinstance(p, ToolCall)}
        for part in message.parts:
            if isinstance(part, ToolResult):
                assert part.id in calls


@pytest.mark.parametrize("id", [id for id in ALL if "scenario" not in ALL[id]])
def test_output_again_is_no_op(run_of, id):
    run = run_of(id)
    if run.error is not None or run.done.skip is not None:
        return
    assert run.output.endswith(b"\n")
    with open_source(str(run.target)) as source:
        assert isinstance(compact(source, run.request), Skipped)


def test_B16_overshoot_is_shown(run_of):
    run = run_of("B16")
    assert run.json["tokens_kept"] == sum(r["tokens"] for r in run.json["rows"] if r["place"] == "keep") > 400
    assert any("above keep_recent" in line for line in show.plan_figures(run.planned))


def test_B17_both_numbers(run_of):
    assert (
        run_of("B17").done.skip.figures["summary_tokens"]
        > run_of("B17").done.skip.figures["removed_tokens"]
        > 0
    )


@pytest.mark.parametrize(
    ("limit", "wanted"), [(4096, [4096, 4096]), (0, [13107, 8192]), (10000, [10000, 8192])]
)
def test_B23_budgets(tmp_path, limit, wanted):
    facts = ALL["B23"] | {"settings": ALL["B23"]["settings"] | {"summarizer_max_tokens": limit}}
    assert Run(facts, tmp_path).stub.max_tokens == wanted


def test_B75_line_ends(run_of):
    output = run_of("B75").output
    assert output.count(b"\r\n") == output.count(b"\n") > 0
    assert output.count(b"\xef\xbb\xbf") == output.startswith(b"\xef\xbb\xbf")


def test_B77_digits(tmp_path):
    facts = ALL["B77"] | {"settings": ALL["B77"]["settings"] | {"keep_recent_tokens": 10}}
    assert any("seed=9007199254740993123" in p for p in Run(facts, tmp_path).stub.prompts)


def test_B96_frame(run_of):
    (prompt,) = run_of("B96").stub.prompts
    for tag in ("<conversation>", "</conversation>"):
        assert prompt.split("\n").count(tag) == prompt.count(tag) == 1
    assert "<previous-summary>" not in prompt.replace("in <previous-summary> tags", "")
    assert outcome_of(run_of("B96")) != "ok"


@pytest.mark.parametrize("change", ["append", "truncate", "replace"])
def test_B84_changed_meanwhile(tmp_path, change):
    path = tmp_path / "s.jsonl"
    data = (CASES / "B84.jsonl").read_bytes()
    path.write_bytes(data)
    lines = data.splitlines(keepends=True)
    after = {"append": data + lines[-1], "truncate": b"".join(lines[:-1]), "replace": data}[change]

    def meddle(prompt, system, max_tokens):
        if change == "replace":
            (tmp_path / "new").write_bytes(after)
            (tmp_path / "new").replace(path)
        else:
            path.write_bytes(after)
        return SHORT

    settings = CompactionSettings(keep_recent_tokens=400, reserve_tokens=1024, estimator=CHARS)
    request = Request(settings, summarizer=Prompted("stub", meddle), archive=tmp_path / "a.db")
    with pytest.raises(HaoError, match="changed"):
        compact_in_place(str(path), request)
    assert path.read_bytes() == after
    assert not list(tmp_path.glob(".haocompact-*"))


def test_B88_self_check(tmp_path, monkeypatch):
    path = tmp_path / "s.jsonl"
    data = (CASES / "B88.jsonl").read_bytes()
    path.write_bytes(data)
    adapter = FORMATS["claude"]
    whole = adapter.rebuild

    def without_messages(session, plan, kept, checkpoint):
        lines = {m.line - 1 for m in plan.retained_tail}
        return [
            p
            for p in whole(session, plan, kept, checkpoint)
            if (p if isinstance(p, int) else p[0] if isinstance(p, tuple) else -1) not in lines
        ]

    monkeypatch.setattr(adapter, "rebuild", without_messages)
    settings = CompactionSettings(keep_recent_tokens=400, reserve_tokens=1024, estimator=CHARS)
    with pytest.raises(HaoError, match="self-check"):
        compact_in_place(
            str(path), Request(settings, summarizer=Prompted("stub", Stub("B88")), archive=tmp_path / "a.db")
        )
    assert path.read_bytes() == data
