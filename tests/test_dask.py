"""A batch on a cluster gives what a local one gives, even when a worker is killed in the middle."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from haocompact import batch
from haocompact.archive import Archive
from haocompact.batch import Choice, Totals
from haocompact.compaction import CompactionSettings
from haocompact.files import open_source
from haocompact.pipeline import Request, restore, workers_folder

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.filterwarnings("ignore")  # the engine's own

FILES = 200
SAMPLES = sorted(Path(__file__).parent.parent.glob("samples/*/*.jsonl"))


def sessions(folder):
    """200 transcripts of every format that can be compacted in place, no two of them equal."""
    rng = random.Random(4)
    for number in range(FILES):
        sample = SAMPLES[number % len(SAMPLES)]
        path = folder / sample.parent.name / f"{number:03}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        extra = f'{{"note": "{rng.random()}"}}\n' if sample.parent.name == "openai" else ""
        path.write_bytes(sample.read_bytes() + extra.encode())
    return folder


def request_in(folder):
    return Request(CompactionSettings(keep_recent_tokens=500), archive=folder / "archive.db")


def run(folder, request, **more):
    totals, items = Totals(), batch.find([str(folder)], Choice(min_age=0), request)
    for done in batch.run(items, request, **more):
        totals.add(done)
    return totals


def test_a_cluster_that_loses_a_worker_gives_the_same_result_as_this_machine(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    local, remote = request_in(here), request_in(there)
    originals = {p.relative_to(here / "s"): p.read_bytes() for p in sessions(here / "s").rglob("*.jsonl")}
    sessions(there / "s")
    expected = run(here / "s", local)

    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=60
        ) as cluster,
        batch.connect(cluster.scheduler_address) as client,
    ):
        victim, *_ = client.run(os.getpid).values()
        killer = threading.Thread(target=kill_in_the_middle, args=(victim, there, originals))
        killer.start()
        found = run(there / "s", remote, cluster=client)
        killer.join()
        assert victim not in client.run(os.getpid).values()

    assert found == expected
    assert found.files == FILES
    assert found.failed == 0
    for name, original in originals.items():
        assert (there / "s" / name).read_bytes() == (here / "s" / name).read_bytes()
        if (there / "s" / name).read_bytes() != original:
            with open_source(str(there / "s" / name)) as source:
                assert b"".join(restore(source, remote)) == original
    with Archive.open(remote.archive) as archive, Archive.open(local.archive) as other:
        assert not list(archive.verify())
        assert {s.hash for s in archive.segments()} == {s.hash for s in other.segments()}
    assert not workers_folder(remote.archive).exists()
    assert not list(there.rglob(".haocompact-*"))


def kill_in_the_middle(process, folder, originals):
    """Wait until some files are done, then kill."""
    end = time.monotonic() + 120
    names = list(originals)[:40]
    while time.monotonic() < end and sum((folder / "s" / n).read_bytes() != originals[n] for n in names) < 10:
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)


def test_an_address_where_nobody_answers(monkeypatch):
    from haocompact.errors import UsageError

    with pytest.raises(UsageError, match="no Dask scheduler"), batch.connect("tcp://127.0.0.1:9"):
        pass
