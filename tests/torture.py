"""Kill -9 at random points of an in-place batch: `python tests/torture.py [--kills 500] [--seed 0]`.

A folder with sessions of every format is compacted again and again, each time by a process (or two workers of
one) that is killed after a random time. After each kill every file is what it was, or its original comes back
with the same SHA-256; the archive is whole; and the next run that is left alone removes what was left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from haocompact import batch  # noqa: E402
from haocompact.archive import Archive  # noqa: E402
from haocompact.batch import Choice  # noqa: E402
from haocompact.compaction import CompactionSettings  # noqa: E402
from haocompact.files import open_source  # noqa: E402
from haocompact.pipeline import Request, restore  # noqa: E402

ROUND = 8  # kills, at most, before a run is left alone and everything begins anew
SETTINGS = CompactionSettings(keep_recent_tokens=500)


def originals(large: int) -> dict[str, bytes]:
    """Every sample, and one long session: name -> bytes."""
    found = {
        p.relative_to(ROOT / "samples").as_posix(): p.read_bytes() for p in ROOT.glob("samples/*/*.jsonl")
    }
    text = "".join(random.Random(1).choices("abcdefghij klmno", k=200))
    turns = ({"role": r, "content": f"{n} {text}"} for n in range(large) for r in ("user", "assistant"))
    return found | {"openai/long.jsonl": "".join(json.dumps(t) + "\n" for t in turns).encode()}


class Torture:
    """A folder, its archive, and what its files were."""

    def __init__(self, folder: Path, seed: int, large: int = 4000) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.files = {folder / "sessions" / name: data for name, data in originals(large).items()}
        self.request = Request(SETTINGS, archive=folder / "archive.db")
        self.seen: Counter[str] = Counter()
        self.reset()
        self.duration = self.timed()
        self.compactable = sum(path.read_bytes() != data for path, data in self.files.items())

    def reset(self) -> None:
        for name in ("sessions", "archive.db", "archive.db-wal", "archive.db-shm"):
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for path, data in self.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def timed(self) -> float:
        """Seconds of a run that is left alone."""
        start = time.monotonic()
        self.finish(self.start(2))
        return time.monotonic() - start

    def start(self, jobs: int) -> int:
        """A process (group) of its own that compacts the folder."""
        child = os.fork()
        if child:
            return child
        try:
            os.setpgid(0, 0)
            choice = Choice(min_age=0)
            items = batch.find([str(self.folder / "sessions")], choice, self.request)
            failed = [done.error for done in batch.run(items, self.request, jobs) if done.error is not None]
            print(*failed, sep="\n", end="", file=sys.stderr, flush=True)
            os._exit(len(failed))
        finally:
            os._exit(99)

    def finish(self, child: int) -> None:
        assert os.waitpid(child, 0)[1] == 0, "a run that was left alone failed"
        left = list((self.folder / "sessions").rglob(".haocompact-*"))
        assert not left, f"left behind: {left}"

    def kill(self) -> None:
        """One run that is killed: all of it, or only the parent, whose workers must then end by themselves."""
        child = self.start(self.random.choice((1, 2)))
        time.sleep(self.random.random() * self.duration)
        alone = self.random.random() < 0.25
        try:
            (os.kill if alone else os.killpg)(child, signal.SIGKILL)
        except ProcessLookupError:  # not yet the leader of its group
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        end = time.monotonic() + 30
        while _group_lives(child):
            assert time.monotonic() < end, "a worker outlived its parent"
            time.sleep(0.005)
        self.seen["kills"] += 1

    def check(self) -> bool:
        """Every original is there or comes back; the archive is whole. Returns whether there is work left."""
        self.seen["leftovers"] += len(list((self.folder / "sessions").rglob(".haocompact-*")))
        changed = 0
        for path, data in self.files.items():
            if path.read_bytes() != data:
                changed += 1
                with open_source(str(path)) as source:
                    back = b"".join(restore(source, self.request))
                assert sha256(back).digest() == sha256(data).digest(), f"{path} does not come back"
        self.seen["restored"] += changed
        if (self.folder / "archive.db").exists():
            with Archive.open(self.folder / "archive.db", create=True) as archive:
                assert not list(archive.verify())
        self.seen["half done"] += 0 < changed < self.compactable
        return changed < self.compactable

    def round(self, kills: int) -> None:
        self.reset()
        for _ in range(kills):
            self.kill()
            if not self.check():
                break
        self.finish(self.start(2))
        assert not self.check()


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def torture(folder: Path, kills: int, seed: int, large: int = 4000) -> Counter[str]:
    """Raises AssertionError when anything is lost. What was seen, counted."""
    test = Torture(folder, seed, large)
    while test.seen["kills"] < kills:
        test.round(min(ROUND, kills - test.seen["kills"]))
    return test.seen


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    options.add_argument("--kills", type=int, default=500)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    memory = Path("/dev/shm")  # a kill is a kill on any disk, and this one is fast
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="haocompact-torture-", dir=place) as folder:
        start = time.monotonic()
        seen = torture(Path(folder), given.kills, given.seed)
    seconds = time.monotonic() - start
    print(f"{seen['kills']} kills in {seconds:.0f} s (seed {given.seed}): nothing lost; {seen['half done']} in the "
          f"middle, {seen['restored']} originals restored, {seen['leftovers']} leftovers, all cleaned")  # fmt: skip


if __name__ == "__main__":
    main()
