"""The whole Claude Code client on every session and on every compaction of it: what its model receives.

Slow, so only `make test-clients` runs it: about two seconds a file, two at a time.
"""

import itertools
import re

import pytest
from installed import FOLDER, has_gap, needs, needs_harness, outcomes, report, resumed
from judged import data_of, difference, of_format, said
from replay import blocks, objects, pictures, plain, spoken, unpaired

from haocompact.formats import claude_code
from haocompact.formats.session import ReadOptions
from haocompact.records import read

VERSIONS = [pytest.param(v, marks=needs(f"claude-{v}")) for v in ("2.1.332", "2.1.197", "2.0.76")]
NEWEST = VERSIONS[0]
pytestmark = needs_harness("claude")
ADDED = re.compile(  # what a client puts between or behind the messages when it resumes
    r"<system-reminder>|\[Tool call interrupted|\[Orphaned tool result removed"
    r"|(mock follow-up prompt|No response requested\.|Continue from where you left off\.|\(no content\))\Z"
)
SUMMARY = re.compile(r"This session is being continued from a previous conversation")


def binary(version):
    return FOLDER / f"claude-{version}" / "node_modules" / ".bin" / "claude"


def atoms(messages):
    """Atoms of an API request."""
    found = []
    for message in messages:
        if message["role"] in ("user", "assistant"):
            found += [a for b in blocks(message["content"]) for a in atoms_of(message["role"], b)]
    return found


def atoms_of(role, block):
    kind = block.get("type")
    if kind == "tool_use":
        return [("call", block["id"], block["name"])]
    if kind == "tool_result":
        content = block.get("content")
        return [("result", block["tool_use_id"], plain(content)), *pictures(content)]
    if kind == "thinking":
        return [("thinking", block["thinking"])] if block["thinking"] else []
    if kind == "text" and role == "user" and SUMMARY.match(block["text"]):
        return [("summary", block["text"])]
    return list(spoken(role, [block]))


def sent(session, messages):
    """Our messages as atoms in the order in which the client sends them: a response first, its results behind."""
    groups = {}
    for message in messages:
        groups.setdefault(message.group or message.line, []).append(message)
    in_order = (sorted(group, key=lambda m: m.role != "assistant") for group in groups.values())
    return said([message for group in in_order for message in group])


def alike(mine, theirs, gap=False):
    """The difference, with what each release treats in its own way left out: thinking, calls without result,
    blanks at the ends of texts, the order of parallel calls, and what a client adds at a start.

    `gap`: a parent is missing. The client then begins behind it, we bridge it.
    """
    loose = {id for ids in (*unpaired(mine), *unpaired(theirs)) for id in ids}
    mine, theirs = (_comparable(atoms, loose) for atoms in (mine, theirs))
    bare = mine[0][:1] == ("summary",) and theirs[:1] == [("user", mine[0][1])]
    theirs[:1] = mine[:1] if bare else theirs[:1]  # a summary that does not begin as the client's own
    return difference(mine[len(mine) - len(theirs) :] if gap and theirs else mine, theirs)


def _comparable(atoms, loose):
    found = []
    for atom in atoms:
        tool = atom[0] in ("call", "result")
        if atom[0] == "thinking" or (tool and atom[1] in loose):
            continue
        atom = ("call", atom[1]) if atom[0] == "call" else tuple(map(_bare, atom))  # Task is Agent now
        if len(atom) == 1 or (atom[1] and (tool or not ADDED.match(atom[1]))):
            found.append(atom)
    runs = (list(run) for _, run in itertools.groupby(found, key=lambda a: a[0]))
    return [a for run in runs for a in (sorted(run) if run[0][0] in ("call", "result") else run)]


def _bare(text):
    """Without blanks at its ends and the reminders that a client glues to the last result."""
    return text.partition("\n<system-reminder>")[0].strip()


@pytest.mark.parametrize("version", [NEWEST])
def test_claude_shows_its_model_the_originals_as_we_read_them(version, tmp_path):
    files = {n: data_of(p) for n, p in of_format("claude").items() if not is_subagent(data_of(p))}
    found = {}
    for name, result in resumed("claude", binary(version), files, tmp_path / "claude").items():
        session = claude_code.read(read(files[name]), ReadOptions())
        theirs = atoms(result["input"])
        mine, gap = sent(session, session.messages), has_gap(files[name])
        found[name] = failed(result) if result["rc"] else alike(mine, theirs, gap)
    report(found)


@pytest.mark.parametrize("way", ["shrink", "append"])
@pytest.mark.parametrize("version", VERSIONS)
def test_claude_shows_its_model_the_summary_and_the_tail(version, way, tmp_path):
    if way == "append" and version == "2.0.76":
        pytest.skip("this release reads no appended compaction: the summary only")
    done = outcomes("claude", tmp_path, ways=(way,))
    if not done:
        pytest.skip("compact has no --append")
    done = {k: o for k, o in done.items() if not is_subagent(o.path.read_bytes())}
    files = {key: outcome.path.read_bytes() for key, outcome in done.items()}
    found = {}
    for key, result in resumed("claude", binary(version), files, tmp_path / "claude").items():
        outcome = done[key]
        expected = [("summary", outcome.summary)]
        expected += sent(outcome.planned.session, outcome.planned.outcome.retained_tail)
        found[key] = against(result, expected) or alike(expected, atoms(result["input"]))
    report(found)


def is_subagent(data):
    return all(o.get("isSidechain") for o in objects(data) if o.get("type") in ("user", "assistant"))


def failed(result):
    return f"not resumed ({result['rc']}): {(result['stdout_head'] + result['stderr_tail'])[-200:]}"


def against(result, expected):
    """What the harness says against the file, "" for nothing."""
    loose = unpaired(expected)
    orphans = [o for o in result["orphans"] if o.rsplit(" ", 1)[-1] not in loose[0] + loose[1]]
    if result["rc"]:
        return failed(result)
    if "compact" in result["request_kinds"]:
        return "compacted at once"
    if not result["prefix_intact"]:
        return "the client changed the old bytes"
    return f"orphans {orphans}" if orphans else ""
