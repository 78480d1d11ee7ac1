"""The reader of claude-agent-sdk on every Claude Code session and on every compaction of it.

It shows no meta lines and no system lines, but errors of the API, which no model sees. It stops at a parent
that is not there, and it knows no preserved lines: of an appended compaction it shows the summary alone.
"""

import json
import subprocess
import sys
from pathlib import Path

from installed import FOLDER, copies, has_gap, needs, outcomes, report
from judged import data_of, of_format
from replay import SYNTHETIC, objects

from haocompact.formats import claude_code
from haocompact.formats.session import ReadOptions
from haocompact.records import read

pytestmark = needs("claude-sdk")


def read_by_sdk(files, folder):
    """Name -> uuids of the messages that the SDK shows and a model may see."""
    names = copies(files, folder)
    command = [sys.executable, Path(__file__).parent / "claude_sdk.py", FOLDER / "claude-sdk", *names]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {names[path]: uuids for path, uuids in json.loads(found.stdout).items()}
    unsent = {name: noise(data) for name, data in files.items()}
    return {name: [u for u in uuids if u not in unsent[name]] for name, uuids in found.items()}


def noise(data):
    """Uuids of lines that no client sends, and of those that only some show."""
    return {o.get("uuid") for o in objects(data) if o.get("isApiErrorMessage") or o.get("isMeta")
            or o.get("isVirtual") or (o.get("message") or {}).get("model") == SYNTHETIC}  # fmt: skip


def shown(session, messages):
    """Uuids of our messages that the SDK shows as well."""
    lines = [(m.id, session.records[m.line - 1].dict) for m in messages]
    return [id for id, line in lines if line["type"] in ("user", "assistant") and not line.get("isMeta")]


def preserved(data):
    """Uuids that the client puts behind the summary; the SDK's reader does not."""
    found = [o["compactMetadata"] for o in objects(data) if o.get("subtype") == "compact_boundary"]
    return set((found[-1].get("preservedMessages") or {}).get("uuids") or ()) if found else set()


def difference(ours, theirs, gap=False):
    if ours == theirs or (gap and theirs and ours[-len(theirs) :] == theirs):
        return ""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    return f"{len(ours)} ours, {len(theirs)} theirs, first at {at}"


def test_the_sdk_reads_the_originals_as_we_do(tmp_path):
    files = {name: data_of(path) for name, path in of_format("claude").items()}
    found = {}
    for name, theirs in read_by_sdk(files, tmp_path / "sdk").items():
        session = claude_code.read(read(files[name]), ReadOptions())
        ours = [u for u in shown(session, session.messages) if u not in preserved(files[name])]
        found[name] = difference(ours, theirs, has_gap(files[name]))
    report(found)


def test_the_sdk_reads_a_new_file_as_summary_and_tail(tmp_path):
    done = outcomes("claude", tmp_path, ways=("shrink",))
    files = {key: outcome.path.read_bytes() for key, outcome in done.items()}
    found = {}
    for key, theirs in read_by_sdk(files, tmp_path / "sdk").items():
        tail = shown(done[key].planned.session, done[key].planned.outcome.retained_tail)
        summary = [o["uuid"] for o in objects(files[key]) if o.get("isCompactSummary")][:1]
        found[key] = difference([*summary, *tail], theirs)
    report(found)
