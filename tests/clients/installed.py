"""The clients that `make test-clients` installs, and what their tests share."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from judged import CAN_APPEND, compacted, keeps, of_format

FOLDER = Path(os.environ.get("HAOCOMPACT_CLIENTS") or ROOT / ".clients")
ASKED_FOR = bool(os.environ.get("HAOCOMPACT_CLIENTS"))  # whole clients take minutes: not in `make test`
HARNESS = ROOT.parent / "shared" / "clients"


def needs(name):
    """Skips when that client's package is not installed."""
    there = (FOLDER / name / "installed.json").exists()
    return pytest.mark.skipif(not there, reason=f"{name} is not installed: make test-clients does it")


def needs_harness(name):
    """Skips when the scripts that run a whole client are not there, or nobody asked for them."""
    there = (HARNESS / name).exists()
    why = "the harness of ../shared/clients is not there" if not there else "run by make test-clients"
    return pytest.mark.skipif(not (there and ASKED_FOR), reason=why)


def node(name, script, *words):
    """What a script prints as JSON, run by the node that is installed beside the package."""
    modules = FOLDER / name / "node_modules"
    command = [modules / "node" / "bin" / "node", Path(__file__).parent / script, modules, *words]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout)


def copies(files, folder):
    """Copies for a reader that may write: copy -> name."""
    folder.mkdir()
    made = {}
    for number, (name, data) in enumerate(files.items()):
        path = folder / f"{number}.jsonl"
        path.write_bytes(data)
        made[str(path)] = name
    return made


def outcomes(form, folder, ways=("shrink", "append")):
    """(name, keep, way) -> outcome for every file of a format that can be compacted."""
    ways = [way for way in ways if way == "shrink" or CAN_APPEND]
    runs = [(n, k, w) for n, path in of_format(form).items() for k in keeps(path) for w in ways]
    found = {(n, k, w): compacted(of_format(form)[n], k, w, folder) for n, k, w in runs}
    return {key: outcome for key, outcome in found.items() if outcome is not None}


def report(found):
    """Fails with one line a difference; nothing compared is a failure too."""
    assert found
    wrong = {key: difference for key, difference in found.items() if difference}
    lines = "\n".join(f"{key}: {difference}" for key, difference in wrong.items())
    assert not wrong, f"{len(wrong)} of {len(found)} differ\n{lines}"


def resumed(client, binary, files, folder):
    """Name -> what the harness found when the whole client resumed that file, and `input`: what its model got."""
    folder.mkdir()
    harness = folder / "harness"
    shutil.copytree(HARNESS / client, harness, ignore=shutil.ignore_patterns("ground"))
    for place in (harness, *harness.rglob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    names = copies(files, folder / "files")
    out = folder / "out.json"
    command = [sys.executable, Path(__file__).parent / "drive.py", client, harness, out, *names]
    variable = {"codex": "CODEX_BIN", "claude": "CLAUDE_BIN"}[client]
    done = subprocess.run(command, env={**os.environ, variable: str(binary)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {names[path]: found for path, found in json.loads(out.read_text()).items()}


def has_gap(data):
    """Whether a parent is missing for Claude's readers, who read past no byte order mark or NUL, or a uuid repeated."""
    uuids, parents = [], []
    for line in data.split(b"\n"):
        try:
            obj = json.loads(line.decode("utf-8", "replace").strip())
        except ValueError:
            continue
        if isinstance(obj, dict) and isinstance(obj.get("uuid"), str):
            uuids.append(obj["uuid"])
            parents.append(obj.get("parentUuid"))
    return len(set(uuids)) < len(uuids) or not {p for p in parents if p} <= set(uuids)
