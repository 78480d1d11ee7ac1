"""The whole Codex client on every rollout and on every compaction of it: what its model receives.

Slow, so only `make test-clients` runs it: about a second and a half a file, two at a time.
"""

import re

import pytest
from installed import FOLDER, needs, needs_harness, outcomes, report, resumed
from judged import data_of, difference, of_format, said
from replay import codex_atoms, unpaired

from haocompact.errors import TranscriptError
from haocompact.formats import codex
from haocompact.formats.session import ReadOptions
from haocompact.records import read

pytestmark = [needs("codex"), needs_harness("codex")]
PROMPT = ("user", "NEW-PROMPT-AFTER-RESUME")
CUT = re.compile(r"…\d+ (tokens|chars) truncated…")  # a client cuts long outputs again


@pytest.fixture(scope="module")
def binary():
    return next(FOLDER.glob("codex/node_modules/@openai/codex-*/vendor/*/bin/codex"))


def atoms(items):
    return [atom for item in items for atom in codex_atoms(item) if atom != PROMPT]


def ours(data):
    try:
        return said(codex.read(read(data), ReadOptions()).messages)
    except TranscriptError as error:
        return str(error)


def alike(mine, theirs):
    """The difference, once calls without output (which it closes) and cut outputs are left out."""
    orphans, unanswered = unpaired(mine)
    loose = {*orphans, *unanswered}
    mine, theirs = ([a for a in atoms if a[0] not in ("call", "result") or a[1] not in loose]
                    for atoms in (mine, theirs))  # fmt: skip
    if len(mine) == len(theirs):
        theirs = [a if is_cut(a, b) else b for a, b in zip(mine, theirs, strict=True)]
    return difference(mine, theirs)


def is_cut(whole, seen):
    if whole[0] != "result" or whole[:2] != seen[:2]:
        return False
    mark = CUT.search(seen[2])
    return mark is not None and whole[2].endswith(seen[2][mark.end() :])


def test_codex_shows_its_model_the_originals_as_we_read_them(binary, tmp_path):
    files = {n: data_of(p) for n, p in of_format("codex").items() if isinstance(ours(data_of(p)), list)}
    found = {}
    for name, result in resumed("codex", binary, files, tmp_path / "codex").items():
        mine = ours(files[name])
        bare = {
            ("user", a[1]): a for a in mine[:1] if a[0] == "summary"
        }  # written without the client's opening
        theirs = sorted((bare.get(a, a) for a in atoms(result["input"])), key=lambda a: a[0] != "summary")
        found[name] = alike(mine, theirs) if result["ok"] else result["stderr_tail"][-300:]
        found[name] = "" if unresumable(result) else found[name]
    report(found)


@pytest.mark.parametrize("way", ["shrink", "append"])
def test_codex_shows_its_model_the_summary_and_the_tail(way, binary, tmp_path):
    done = outcomes("codex", tmp_path, ways=(way,))
    if not done:
        pytest.skip("compact has no --append")
    files = {key: outcome.path.read_bytes() for key, outcome in done.items()}
    found = {}
    for key, result in resumed("codex", binary, files, tmp_path / "codex").items():
        if way == "append" and unresumable(result):
            continue  # nor was the original
        found[key] = against(result) or alike(done[key].expected, atoms(result["input"]))
    report(found)


def unresumable(result):
    """The client refuses a legacy file with invalid UTF-8 anywhere; we read it, and say so."""
    return not result["ok"] and "did not contain valid UTF-8" in result["stderr_tail"]


def against(result):
    """What the harness says against the file, "" for nothing."""
    if not result["ok"]:
        return f"not resumed: {result['stderr_tail'][-300:]}"
    if result["auto_compacted"]:
        return "compacted at once"
    if not result["prefix_kept"]:
        return "the client changed the old bytes"
    return f"orphans {result['orphans']}" if result["orphans"] else ""
