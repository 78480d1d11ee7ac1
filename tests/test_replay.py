"""Judges that know the formats from their description only: what we read and write is what a client shows."""

import json

import pytest
from judged import (
    APPENDABLE,
    CAN_APPEND,
    FILES,
    FORMAT,
    WAYS,
    compacted,
    data_of,
    difference,
    keeps,
    said,
)
from replay import READERS, Unreadable, claude_old, objects, replay, unpaired

from haocompact.errors import TranscriptError
from haocompact.formats import FORMATS
from haocompact.formats.session import ReadOptions
from haocompact.records import read

KNOWN = [name for name, format in FORMAT.items() if format in READERS]
RUNS = [(name, way) for name in KNOWN for way in WAYS if way == "shrink" or FORMAT[name] in APPENDABLE]
BETTER = {  # where we read more than the client would, on purpose
    "cases/B56.jsonl": "parents in a circle: the client shows three messages of seven",
}
SUMMARY_LAST = ("berry", "codex")  # these show it behind what an old client kept; Session.messages never does


def summary_first(atoms):
    return sorted(atoms, key=lambda atom: atom[0] != "summary")


@pytest.mark.parametrize("name", KNOWN)
def test_a_session_is_read_as_its_client_reads_it(name):
    form, data = FORMAT[name], data_of(FILES[name])
    try:
        theirs = replay(form, data)
    except Unreadable:
        with pytest.raises(TranscriptError):
            FORMATS[form].read(read(data), ReadOptions())
        return
    ours = said(FORMATS[form].read(read(data), ReadOptions()).messages)
    found = difference(ours, summary_first(theirs) if form in SUMMARY_LAST else theirs)
    assert bool(found) == (name in BETTER), found


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def outcomes(request, tmp_path_factory):
    """One file compacted one way, in several places."""
    name, way = request.param
    if way == "append" and not CAN_APPEND:
        pytest.skip("compact has no --append")
    folder = tmp_path_factory.mktemp("replay")
    found = (compacted(FILES[name], keep, way, folder) for keep in keeps(FILES[name]))
    return [outcome for outcome in found if outcome is not None]


def shown(outcome):
    """What a client shows for the compacted file."""
    form = outcome.planned.session.format
    atoms = replay(form, outcome.path.read_bytes())
    return summary_first(atoms) if form == "berry" else atoms


def test_a_compacted_session_shows_the_summary_and_the_kept_tail(outcomes):
    for outcome in outcomes:
        assert difference(outcome.expected, shown(outcome)) == ""


def test_a_compacted_session_has_no_orphan_that_the_original_had_not(outcomes):
    for outcome in outcomes:
        orphans, unanswered = unpaired(shown(outcome))
        before = unpaired(said(outcome.planned.session.messages))
        assert set(orphans) <= set(before[0])
        assert set(unanswered) <= set(before[1])


def test_what_a_model_signed_stands_as_it_was(outcomes):
    """A signature holds for the block's own bytes: each of the new file is one of the old file's."""
    for outcome in outcomes:
        old = set(signed(bytes(outcome.planned.session.records.data[:])))
        assert set(signed(outcome.path.read_bytes())) <= old


def signed(data):
    """Every object with a signature, or with content that only its API can read, as JSON."""
    waiting = list(objects(data))
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict) and value.keys() & {"signature", "thinkingSignature", "encrypted_content"}:
            yield json.dumps(value)
        elif isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value


def test_signed_blocks_are_there_to_be_judged():
    has = {form for name, form in FORMAT.items() if form in READERS and any(signed(data_of(FILES[name])))}
    assert has >= {"pi", "claude", "codex", "anthropic"}


def test_an_appended_session_begins_with_its_old_bytes(outcomes):
    for outcome in outcomes:
        old = outcome.planned.session.records.data
        if outcome.way == "append" and old[-1:] == b"\n":  # berry takes a torn last line away
            assert outcome.path.read_bytes().startswith(bytes(old))


def test_old_releases_of_claude_code_show_the_same_for_a_new_file(outcomes):
    """2.0.76 takes the newest line for the end of the conversation and knows no preserved lines."""
    for outcome in outcomes:
        if outcome.way == "shrink" and outcome.planned.session.format == "claude":
            data = outcome.path.read_bytes()
            if not all(line.get("isSidechain") for line in objects(data) if line.get("type") == "user"):
                assert difference(outcome.expected, list(claude_old(data))) == ""


@pytest.mark.parametrize("form", READERS)
def test_a_judge_sees_a_message_that_is_lost(form, tmp_path):
    """Every line of the tail taken away in turn: the judge tells at least each one that holds a message."""
    samples = [n for n in KNOWN if FORMAT[n] == form and FILES[n].parent.parent.name == "samples"]
    outcome = next(filter(None, (compacted(FILES[n], 400, "shrink", tmp_path) for n in samples)))
    lines = outcome.path.read_bytes().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if any(said_in(form, line, lines[:i])))
    found = replay(form, b"".join(lines[:last] + lines[last + 1 :]))
    assert difference(shown(outcome), summary_first(found) if form == "berry" else found)


def said_in(form, line, before):
    """What this line adds to what the lines before it show."""
    try:
        return replay(form, b"".join(before) + line)[len(replay(form, b"".join(before))) :]
    except (Unreadable, TranscriptError):
        return []


def test_every_judge_has_something_to_judge():
    assert {FORMAT[name] for name in KNOWN} == set(READERS)
