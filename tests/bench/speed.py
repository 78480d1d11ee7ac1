"""make bench: whole processes in turn (ours, floor, ours, floor, ...); medians, ratios and peak memory as a table.

The floor is `orjson.loads` on every line of the same file in the same run. Times are wall-clock seconds of whole
processes, memory is the peak RSS of the process in MiB.

    python tests/bench/speed.py [--sizes 10,100,500] [--formats pi,claude,codex] [--runs 3] [--json FILE] [--rows NAMES]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from sessions import FORMATS, HUGE
from sessions import write_session as _write_session

HAOCOMPACT = [sys.executable, "-m", "haocompact"]
FLOOR = [sys.executable, "-c", "import orjson, sys\nfor line in open(sys.argv[1], 'rb'): orjson.loads(line)"]
TYPER = [sys.executable, "-c", "import typer"]
PI = (
    Path(os.environ.get("HAOCOMPACT_CLIENTS") or Path(__file__).parents[2] / ".clients")
    / "pi-1.6.0/node_modules"
)
PI_LOADS = [str(PI / "node/bin/node"), str(Path(__file__).with_name("pi.mjs")), str(PI)]
CORPUS = Path(__file__).parents[3] / "shared" / "corpus"


def write_session(*arguments: Any, **named: Any) -> Path:
    """As in `sessions`, in a process of its own: what this one holds would count as the peak of each that it starts."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_write_session, *arguments, **named).result()


@dataclass(frozen=True, slots=True)
class Row:
    """`ratio` is what was measured over what it is compared with; `goal` the most it should be (None: no goal)."""

    what: str
    ours: float
    base: float
    ratio: float
    goal: float | None
    mib: float = 0.0
    mib_goal: float | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    seconds: float
    mib: float


class Bench:
    def __init__(self, folder: Path, runs: int) -> None:
        self.folder = folder
        self.runs = runs
        self.env = os.environ | {"HAOCOMPACT_LOG": str(folder / "log"), "HAOCOMPACT_CONFIG": os.devnull}

    def run(self, command: Sequence[str], archive: Path | None = None) -> Cost:
        env = self.env | {"HAOCOMPACT_ARCHIVE": str(archive or self.folder / "archive.db")}
        started = time.perf_counter()
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert process.stderr is not None
        told = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed: {told.decode()}")
        scale = 1 << (20 if sys.platform == "darwin" else 10)
        return Cost(time.perf_counter() - started, usage.ru_maxrss / scale)

    def pair(self, ours: Callable[[], Cost], base: Callable[[], Cost]) -> tuple[Cost, Cost]:
        """Medians of both, run in turn."""
        both = [(ours(), base()) for _ in range(self.runs)]
        return _median([a for a, _ in both]), _median([b for _, b in both])

    def row(self, what: str, ours: Callable[[], Cost], base: Callable[[], Cost], goal: float | None,
            mib_goal: float | None = None) -> Row:  # fmt: skip
        a, b = self.pair(ours, base)
        return Row(what, a.seconds, b.seconds, a.seconds / b.seconds, goal, a.mib, mib_goal)

    # ------------------------------------------------------------------------------------- rows
    def start(self) -> Iterator[Row]:
        sample = str(next((Path(__file__).parents[2] / "samples" / "pi").glob("weather*.jsonl")))
        typer = lambda: self.run(TYPER)  # noqa: E731
        yield self.row(
            "--version, over import typer", lambda: self.run([*HAOCOMPACT, "--version"]), typer, 1.5
        )
        yield self.row("plan of a small sample, over import typer",
                       lambda: self.run([*HAOCOMPACT, "plan", sample]), typer, 2.5)  # fmt: skip

    def large(self, format: str, size: int) -> Iterator[Row]:
        path = write_session(self.folder / f"{format}-{size}.jsonl", format, size * 1_000_000)
        longest = 4 * (HUGE if size >= 100 else 500_000) / (1 << 20)
        floor = lambda: self.run([*FLOOR, str(path)])  # noqa: E731
        name = f"{format} {size} MB"
        for command in ("plan", "diag"):
            ours = partial(self.run, [*HAOCOMPACT, command, "--json", str(path)])
            yield self.row(f"{command} {name}", ours, floor, 0.5 if size >= 100 else None, 64 + longest)
        if format == "pi" and PI.is_dir():  # make test-clients installs it
            ours = partial(self.run, [*HAOCOMPACT, "plan", "--json", str(path)])
            pi = lambda: self.run([*PI_LOADS, str(path)])  # noqa: E731
            yield self.row(f"plan {name}, over pi's own load and prepareCompaction", ours, pi, 0.1)
        yield self.row(
            f"compact {name}", lambda: self.compact(path), floor, 2.5 if size >= 100 else None, 128 + longest
        )
        if size >= 500 or format == "pi":
            yield self.window(path, name)
        path.unlink()

    def compact(self, path: Path, *more: str) -> Cost:
        archive, output = self.folder / "fresh.db", self.folder / "output.jsonl"
        for old in self.folder.glob("fresh.db*"):
            old.unlink()
        return self.run([*HAOCOMPACT, "compact", str(path), "-o", str(output), *more], archive)

    def window(self, path: Path, name: str) -> Row:
        self.compact(path)
        listed = subprocess.run([*HAOCOMPACT, "retrieve", "--json", str(self.folder / "output.jsonl")],
                                env=self.env | {"HAOCOMPACT_ARCHIVE": str(self.folder / "fresh.db")},
                                capture_output=True, check=True)  # fmt: skip
        hash = json.loads(listed.stdout)["segments"][-1]["hash"]
        command = [*HAOCOMPACT, "retrieve", hash, "--from-message", "1000", "--budget", "20000"]
        return self.row(f"retrieve of one window, {name}, over --version",
                        lambda: self.run(command, self.folder / "fresh.db"),
                        lambda: self.run([*HAOCOMPACT, "--version"]), 2.0)  # fmt: skip

    def jobs(self) -> Row:
        """200 files of 0.5 MB, in place, two processes over one."""
        first = self.folder / "batch"
        first.mkdir()
        for i in range(200):
            _write_session(first / f"{i}.jsonl", list(FORMATS)[i % len(FORMATS)], 500_000, seed=i)

        def batch(jobs: int) -> Cost:
            copy = self.folder / f"batch-{jobs}"
            shutil.copytree(first, copy)
            for old in self.folder.glob("fresh.db*"):
                old.unlink()
            command = [*HAOCOMPACT, "compact", "--in-place", "--min-age", "0", "-q", "--jobs", str(jobs)]
            cost = self.run([*command, str(copy)], self.folder / "fresh.db")
            shutil.rmtree(copy)
            return cost

        return self.row(
            "compact --jobs 2 on 200 files, over --jobs 1", lambda: batch(2), lambda: batch(1), 0.6
        )

    def archive(self) -> Iterator[Row]:
        """Bytes of the archive of all sessions, over the sum of zstd -19 --long=27 of each file (MB, no times)."""
        import zstandard

        folder = self.folder / "corpus"
        folder.mkdir()
        found = sorted(p for p in CORPUS.rglob("*.jsonl")) if CORPUS.is_dir() else []
        if not found:
            found = [
                _write_session(folder / f"{f}-{i}.jsonl", f, 3_000_000, i) for f in FORMATS for i in range(3)
            ]
        best = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters.from_level(
                19, window_log=27, enable_ldm=True
            )
        )
        base = sum(len(best.compress(p.read_bytes())) for p in found) / 1e6
        for old in self.folder.glob("fresh.db*"):
            old.unlink()
        (self.folder / "out").mkdir()
        for path in found:
            subprocess.run([*HAOCOMPACT, "compact", "--keep-recent", "0", "-q", str(path), "-o",
                            str(self.folder / "out" / path.name)],
                           env=self.env | {"HAOCOMPACT_ARCHIVE": str(self.folder / "fresh.db")},
                           stderr=subprocess.DEVNULL, check=False)  # fmt: skip
        ours = sum(p.stat().st_size for p in self.folder.glob("fresh.db*")) / 1e6
        yield Row(
            f"archive of {len(found)} sessions (MB), over zstd -19 --long=27 of each",
            ours,
            base,
            ours / base,
            1.0,
        )


def growth(rows: Sequence[Row], format: str) -> Iterator[Row]:
    """Time and memory of compact at 500 MB over 100 MB."""
    by_name = {r.what: r for r in rows}
    small, big = by_name.get(f"compact {format} 100 MB"), by_name.get(f"compact {format} 500 MB")
    if small and big:
        yield Row(
            f"growth of compact, {format}: time at 500 MB over 100 MB",
            big.ours,
            small.ours,
            big.ours / small.ours,
            5.5,
        )
        yield Row(f"growth of compact, {format}: memory (MiB)", big.mib, small.mib, big.mib / small.mib, 1.1)


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(statistics.median(c.seconds for c in costs), statistics.median(c.mib for c in costs))


def line(row: Row) -> str:
    goal = "" if row.goal is None else f"{row.goal:.1f}"
    memory = f"{row.mib:.0f}" + (f" / {row.mib_goal:.0f}" if row.mib_goal else "") if row.mib else ""
    return f"| {row.what} | {row.ours:.2f} | {row.base:.2f} | {row.ratio:.2f} | {goal} | {memory} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="10,100,500", help="MB")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="start,large,jobs,archive")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[Row] = []
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(f"{time.strftime('%Y-%m-%d')}, {machine}, {given.runs} runs\n")
    print("| what | ours | compared with | ratio | goal | peak MiB / goal |\n|---|---|---|---|---|---|")

    def told(more: Iterator[Row]) -> None:
        for row in more:
            rows.append(row)
            print(line(row), flush=True)

    with tempfile.TemporaryDirectory(prefix="haocompact-bench-") as folder:
        bench = Bench(Path(folder), given.runs)
        wanted = given.rows.split(",")
        if "start" in wanted:
            told(bench.start())
        for format in given.formats.split(",") if "large" in wanted else ():
            for size in map(int, given.sizes.split(",")):
                told(bench.large(format, size))
            told(growth(rows, format))
        if "jobs" in wanted:
            told(iter([bench.jobs()]))
        if "archive" in wanted:
            told(bench.archive())
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
