"""What several test files need: the transcripts at hand, and an environment of their own for each test."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[1]
CORPUS = ROOT.parent / "shared" / "corpus"

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")


def transcripts(*folders: Path) -> dict[str, Path]:
    """Name -> path of every transcript below the folders; a folder that is not there has none."""
    files = (p for folder in folders for p in sorted(folder.rglob("*")) if p.is_file())
    named = (p for p in files if p.suffix in (".jsonl", ".json", ".traj", ".gz", ".zst"))
    return {str(p.relative_to(p.parents[1])): p for p in named}


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory, monkeypatch):
    """No test sees the user's settings, keys, archive or log, or leaves anything there."""
    for name in list(os.environ):
        if name.startswith("HAOCOMPACT_") or name.endswith("_API_KEY"):
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(home / name))
    monkeypatch.setenv("HOME", str(home))
    return home
