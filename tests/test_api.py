"""The Python interface: lazy, typed, documented by examples that run; paths or bytes in, results out."""

import doctest
import gzip
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import haocompact
from haocompact import CompactionSettings, HaoError, api, compact, diagnose, plan, read, retrieve
from haocompact.errors import SummaryError, TranscriptError, UnknownHash

SAMPLE = ROOT / "samples" / "pi" / "weather-station.jsonl"
SMALL = CompactionSettings(keep_recent_tokens=2000)
FUNCTIONS = ("read", "plan", "compact", "diagnose", "retrieve")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_has_an_example_that_runs(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(api, name), name, globs={})
    assert test.examples
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test).failed == 0


def test_the_names_are_there_and_nothing_is_loaded_before_they_are_used():
    script = (
        "import sys, haocompact; before = [m for m in sys.modules if m.startswith('haocompact.')]\n"
        "print(before, sorted(set(haocompact.__all__) - set(dir(haocompact))))\n"
        "haocompact.plan; print('haocompact.api' in sys.modules, 'openai' in sys.modules, 'typer' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split("\n")[:2] == ["[] []", "True False False"]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        haocompact.nothing  # noqa: B018


def test_everything_public_is_typed_and_documented():
    for name in haocompact.__all__:
        found = getattr(haocompact, name)
        assert found.__doc__
        if inspect.isfunction(found):
            signature = inspect.signature(found)
            parameters = signature.parameters.values()
            assert signature.return_annotation is not inspect.Signature.empty
            assert all(p.annotation is not inspect.Parameter.empty for p in parameters)
    assert (ROOT / "haocompact" / "py.typed").exists()


@pytest.mark.parametrize("kind", [str, Path, bytes, "gz"])
def test_a_transcript_is_a_path_or_bytes(kind, tmp_path):
    given = SAMPLE.read_bytes() if kind is bytes else SAMPLE if kind == "gz" else kind(SAMPLE)
    if kind == "gz":
        given = tmp_path / "s.jsonl.gz"
        given.write_bytes(gzip.compress(SAMPLE.read_bytes()))
    assert len(read(given).messages) == 64
    assert compact(given, SMALL).output == compact(SAMPLE, SMALL).output
    assert diagnose(given).cause == "below_keep_recent"


def test_a_session_outlives_its_file(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(SAMPLE.read_bytes())
    session, planned = read(path), plan(path, SMALL)
    path.write_bytes(b"")
    assert session.messages[0].text == planned.session.messages[0].text != ""


def test_what_the_command_line_writes(tmp_path):
    result = compact(SAMPLE, SMALL, archive=tmp_path / "a.db", output=tmp_path / "o.jsonl")
    words = ["compact", str(SAMPLE), "--keep-recent", "2000", "--archive", str(tmp_path / "b.db")]
    done = subprocess.run(
        [sys.executable, "-m", "haocompact", *words], capture_output=True, cwd=ROOT, check=True
    )
    assert (tmp_path / "o.jsonl").read_bytes() == result.output == done.stdout
    assert f"<<ccr:{result.hash}>>" in result.summary


def test_a_skip_gives_the_input_back_and_says_why(tmp_path):
    result = compact(SAMPLE, archive=tmp_path / "a.db")
    assert (result.output, result.skip.sub, result.summary) == (
        SAMPLE.read_bytes(),
        "total_below_keep_recent",
        None,
    )
    assert not (tmp_path / "a.db").exists()
    assert compact(SAMPLE, SMALL, if_needed=True).skip.branch == "below_trigger"


def test_a_summarizer_of_ones_own():
    class Own:
        name = "own"

        def summarize(self, preparation, report=None):
            return f"{len(preparation.removed)} messages about weather."

    result = compact(SAMPLE, SMALL, summarizer=Own())
    assert result.summary.startswith("39 messages about weather.")
    assert (result.degraded, result.hash) == (None, None)


def test_errors_are_of_one_family(tmp_path):
    class Broken:
        name = "broken"

        def summarize(self, preparation, report=None):
            raise SummaryError("no")

    for error, call in (
        (TranscriptError, lambda: read(tmp_path / "missing.jsonl")),
        (TranscriptError, lambda: plan(b"garbage\n")),
        (SummaryError, lambda: compact(SAMPLE, SMALL, summarizer=Broken(), on_failure="fail")),
        (HaoError, lambda: retrieve(SAMPLE, archive=tmp_path / "missing.db")),
    ):
        with pytest.raises(error):
            call()
    compact(SAMPLE, SMALL, archive=tmp_path / "a.db")
    with pytest.raises(UnknownHash):
        retrieve(SAMPLE, "0" * 16, archive=tmp_path / "a.db")
    assert compact(SAMPLE, SMALL, summarizer=Broken()).degraded == "no"
