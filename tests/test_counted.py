"""What makes it fast, counted and not timed: lines parsed, summaries made, bytes read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from haocompact import formats, records
from haocompact.compaction import GROUP_REACH, CompactionPreparation, CompactionSettings
from haocompact.files import open_source
from haocompact.formats import detect
from haocompact.pipeline import Request, conversations, explaining, plan

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from sessions import write_session

FORMATS = ("pi", "claude", "codex")
SAMPLES = sorted((Path(__file__).parents[1] / "samples").glob("*/*.json*"))


@pytest.fixture(scope="module", params=FORMATS)
def session(request, tmp_path_factory):
    return write_session(tmp_path_factory.mktemp("large") / "session.jsonl", request.param, 3_000_000)


@pytest.fixture
def parsed(monkeypatch):
    """The number of every line that is parsed, in order."""
    numbers: list[int] = []
    parse = records.Record._parse

    def noted(record):
        numbers.append(record.number)
        return parse(record)

    monkeypatch.setattr(records.Record, "_parse", noted)
    return numbers


def test_a_plan_parses_each_line_once(session, parsed, monkeypatch):
    """But for those that the format is told by, and the kept ones with what may belong to them."""
    monkeypatch.setattr("haocompact.formats.session.PAIRS_CHECKED", 100)  # as if it were a long session
    with open_source(str(session)) as source:
        detect(source.records)
        sampled = list(parsed)
        planned = plan(source, Request())
        lines = len(source.records)
    assert isinstance(planned.outcome, CompactionPreparation)
    tail = planned.outcome.retained_tail[0].line - GROUP_REACH
    again = (Counter(parsed) - Counter(2 * sampled) - Counter(range(1, lines + 1))).keys()
    assert 0 < len(sampled) < lines / 2
    assert set(parsed) == set(range(1, lines + 1))
    assert [n for n in again if n < tail] == []


def test_files_are_found_though_no_line_is_parsed_again(session):
    """The files that a plan names are those that the parts of the removed messages name."""
    from haocompact.compaction import file_operations

    with open_source(str(session)) as source:
        planned = plan(source, Request())
        found = planned.outcome.file_ops
        for message in planned.outcome.removed:
            message.touches = None
        assert file_operations(None, planned.outcome.removed, planned.settings) == found
        assert found.read | found.edited | found.written or planned.session.format == "codex"


def test_a_diagnosis_makes_no_summary_that_can_only_gain(session, monkeypatch):
    monkeypatch.setattr(
        explaining.OFFLINE.__class__, "summarize", lambda *a, **k: pytest.fail("a summary was made")
    )
    with open_source(str(session)) as source:
        planned = explaining.as_compacted(plan(source, Request()))
    assert isinstance(planned.outcome, CompactionPreparation)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: f"{p.parent.name}/{p.name}")
@pytest.mark.parametrize("keep_recent", [50, 400])
def test_a_gain_told_in_advance_is_a_gain(path, keep_recent, monkeypatch):
    """Whatever bound is taken for the summary's size, the answer is that of the summary itself."""
    settings = CompactionSettings(keep_recent_tokens=keep_recent)
    with open_source(str(path)) as source:
        planned = plan(conversations(source, Request())[0], Request(settings=settings))
        if not isinstance(planned.outcome, CompactionPreparation):
            pytest.skip("nothing to compact")
        told = explaining._offline_loss(planned.outcome, planned.settings)
        monkeypatch.setattr(explaining, "MOST_TOKENS", 10**12)
        assert told == explaining._offline_loss(planned.outcome, planned.settings)


def test_no_offline_summary_is_larger_than_the_bound(session):
    with open_source(str(session)) as source:
        planned = plan(source, Request())
        text = explaining.OFFLINE.summarize(planned.outcome)
    assert len(text) * 4 < explaining.MOST_TOKENS


# ------------------------------------------------------------------------------- what is loaded, and what is not
SAMPLE = {name: str(next(p for p in SAMPLES if p.parent.name == name)) for name in FORMATS}
NEVER = {"openai", "tiktoken", "sqlite3", "zstandard", "detect_secrets", "asyncio", "multiprocessing"}
LATER = {"archive", "ledger", "summarize", "model", "segment", "ccr", "formats.berry", "formats.openai_chat"}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("option", ["--json", "--all"])
def test_a_plan_loads_what_it_needs(name, option, tmp_path):
    code = (
        "import sys\nfrom haocompact.cli import main\n"
        f"sys.argv = ['haocompact', 'plan', {option!r}, {SAMPLE[name]!r}]\n"
        "try: main()\nexcept SystemExit: pass\nprint(*sorted(sys.modules), file=sys.stderr)"
    )
    env = os.environ | {"HAOCOMPACT_CONFIG": os.devnull, "HAOCOMPACT_LOG": str(tmp_path / "log")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    modules = set(done.stderr.split())
    assert "haocompact.pipeline.planning" in modules
    assert modules & (NEVER | {f"haocompact.{m}" for m in LATER}) == set()
    assert ("rich" in modules) == (option != "--json")


def test_a_command_makes_only_its_own_options():
    from haocompact import cli

    every = cli.app.registered_commands
    for words in ([], ["--help"], ["nonsense"]):
        with cli._registered(words):
            assert cli.app.registered_commands == every
    with cli._registered(["plan"]):
        assert [c.callback.__name__ for c in cli.app.registered_commands] == ["plan"]
    assert len(every) == 4


CORPUS = Path(__file__).parents[2] / "shared" / "corpus"


@pytest.mark.parametrize("path", [*SAMPLES, *sorted(p for p in CORPUS.rglob("*.json*") if p.stat().st_size < 5 << 20)],
                         ids=lambda p: f"{p.parent.name}/{p.name}")  # fmt: skip
def test_what_tells_a_sure_format_no_other_has(path):
    """So that detection may end with the first of them that fits, and load no other."""
    for count, record in enumerate(r for r in records.read(path.read_bytes()) if r.dict):
        votes = {name: form.sniff(record.dict, count == 0) for name, form in formats.FORMATS.items()}
        told = [name for name in formats.SURE if votes[name] == 2]
        assert not told or [name for name, vote in votes.items() if vote] == told
