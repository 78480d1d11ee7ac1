"""pi's own SessionManager on every pi session and on every compaction of it."""

import pytest
from installed import copies, needs, node, outcomes, report
from judged import data_of, difference, of_format, said
from replay import pi_message, unpaired

from haocompact.errors import TranscriptError
from haocompact.formats import pi
from haocompact.formats.session import ReadOptions
from haocompact.records import read

VERSIONS = [pytest.param(v, marks=needs(f"pi-{v}")) for v in ("1.6.0", "0.74.2")]
OLD_LACKS = ("pi/every-record.jsonl",)  # 0.74.2 knows no context_edit


def atoms(messages):
    found = []
    for message in messages:
        if message["role"] == "compactionSummary":
            found.append(("summary", message["summary"]))
        elif message["role"] == "branchSummary":
            found.append(("user", message["summary"]))
        else:
            found += pi_message(message)
    return found


def read_by_pi(version, files, folder):
    """Name -> atoms, or the client's error."""
    names = copies(files, folder)
    found = node(f"pi-{version}", "pi.mjs", *names)
    return {names[p]: atoms(f["messages"]) if "messages" in f else f["error"] for p, f in found.items()}


def ours(data):
    try:
        return said(pi.read(read(data), ReadOptions()).messages)
    except TranscriptError as error:
        return str(error)


@pytest.mark.parametrize("version", VERSIONS)
def test_pi_reads_the_originals_as_we_do(version, tmp_path):
    files = {name: data_of(path) for name, path in of_format("pi").items()}
    found = {}
    for name, theirs in read_by_pi(version, files, tmp_path / "pi").items():
        mine = ours(files[name])
        both = isinstance(mine, list) and isinstance(theirs, list)
        found[name] = difference(mine, theirs) if both else f"ours {mine[:3]}, theirs {theirs[:3]}"
    for name in OLD_LACKS if version == "0.74.2" else ():
        assert found.pop(name)
    report(found)


@pytest.mark.parametrize("version", VERSIONS)
def test_pi_reads_a_compacted_session_as_summary_and_tail(version, tmp_path):
    done = outcomes("pi", tmp_path)
    files = {key: outcome.path.read_bytes() for key, outcome in done.items()}
    theirs = read_by_pi(version, files, tmp_path / "pi")
    report({key: difference(done[key].expected, theirs[key]) for key in done})
    for key, outcome in done.items():
        assert set(unpaired(theirs[key])[0]) <= set(unpaired(said(outcome.planned.session.messages))[0]), key
