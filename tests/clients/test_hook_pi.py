"""The extension of the README, loaded and asked by pi itself."""

import json
import re
import shutil

import pytest
from conftest import ROOT
from installed import needs, node
from readme import README, stage

VERSIONS = [pytest.param(v, marks=needs(f"pi-{v}")) for v in ("1.6.0", "0.74.2")]
SESSION = ROOT / "samples" / "pi" / "weather-station.jsonl"


def asked(version, folder, keep, monkeypatch, **more):
    extension, session = folder / "haocompact.ts", folder / "s.jsonl"
    extension.write_text(re.search(r"```js\n(import.*?)```", README.read_text("utf-8"), re.S)[1], "utf-8")
    shutil.copy(SESSION, session)
    with stage() as place:
        for name, value in (place.environment | {k.upper(): v for k, v in more.items()}).items():
            monkeypatch.setenv(name, value)
        return node(f"pi-{version}", "pi_hook.mjs", extension, str(keep), session)


@pytest.mark.parametrize("version", VERSIONS)
def test_pi_takes_the_checkpoint(version, tmp_path, monkeypatch):
    found = asked(version, tmp_path, 2000, monkeypatch)
    assert found["errors"] == []
    assert found["compaction"]["firstKeptEntryId"] == found["expected"]
    assert "<<ccr:" in found["compaction"]["summary"]
    ids = [json.loads(line).get("id") for line in SESSION.read_text("utf-8").splitlines()]
    assert found["messages"][0]["summary"] == found["compaction"]["summary"]
    assert len(found["messages"]) == 1 + len(ids) - ids.index(found["expected"])


@pytest.mark.parametrize("version", VERSIONS)
def test_pi_goes_on_as_usual_without_the_program(version, tmp_path, monkeypatch):
    found = asked(version, tmp_path, 2000, monkeypatch, path="/nowhere")
    assert [error["error"] for error in found["errors"]] == ["spawnSync haocompact ENOENT"]
    assert found.get("compaction") is None
    assert found["messages"][0]["role"] == "user"
