"""Mutated transcripts through every command: `python tests/fuzz.py [--files 20000] [--seed 0]`.

Samples, cases and (where they are at hand) real sessions are cut, flipped, doubled, reordered, interleaved and
given odd values. For each result: no exception but our own errors, no hang, nothing unsafe on a terminal, laws
1 (bytes), 2 (kept and removed are all) and 4 (the original comes back), or the file is refused.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

from haocompact import diag, show  # noqa: E402
from haocompact.compaction import ESTIMATORS, CompactionSettings, NoCompaction  # noqa: E402
from haocompact.errors import HaoError  # noqa: E402
from haocompact.files import Source  # noqa: E402
from haocompact.formats import FORMATS  # noqa: E402
from haocompact.formats.session import removed  # noqa: E402
from haocompact.pipeline import (  # noqa: E402
    Compacted,
    Request,
    compact,
    compact_to,
    explain,
    plan,
    restore,
    store,
    warnings_of,
    window_text,
)
from haocompact.records import read, write  # noqa: E402

LARGEST = 200_000  # bytes of a transcript to begin with; of a longer one a stretch of lines is taken
SECONDS = 60  # after which a file counts as a hang
UNSAFE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
HOSTILE = ("\x1b]52;c;aGk=\x07", "\x1b]8;;http://x\x1b\\", "\u202eevil\u2066", "[bold red]x[/]", "\x00", "\ud800",
           "\r\n", "../../etc/passwd")  # fmt: skip
ODD = (None, True, False, 0, -1, 1e308, -0.0, 2**63, 10**40, 1.5, "", " ", "x" * 3000, [], {}, [None], [[]], {"": {}},
       "user", "assistant", "text", "tool_use", "<<ccr:0123456789abcdef>>", "2026-01-01", *HOSTILE)  # fmt: skip
RAW = (b"", b"\n", b"null\n", b"[]\n", b"{}\n", b"7\n", b'"x"\n', b"\x00" * 70 + b"\n", b"\xef\xbb\xbf", b"\xe5\xae\n",
       b'{"a":1e400}\n', b'{"a":NaN}\n', b'{"a":' + b"9" * 5000 + b"}\n", b'{"type":"user"', b"}\n", b"\xff\xfe\n",
       b'{"role":"user","content":"\\ud83d"}\n', b'{"a":1,"a":2}\n', b"\x1e{}\n", b" \t\n")  # fmt: skip


# ------------------------------------------------------------------------------------- mutations
def bases() -> list[bytes]:
    folders = (ROOT / "samples", ROOT / "tests" / "cases", ROOT.parent / "shared" / "corpus")
    files = sorted(p for folder in folders for p in folder.rglob("*.jsonl"))
    return [p.read_bytes() for p in files]


def piece_of(data: bytes, rng: random.Random) -> bytes:
    if len(data) <= LARGEST:
        return data
    lines = data.splitlines(keepends=True)
    start, size, found = rng.randrange(len(lines)), 0, lines[:3]
    for line in lines[start:]:
        size += len(line)
        if size > LARGEST:
            break
        found.append(line)
    return b"".join(found)


def cut(data: bytes, rng: random.Random, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] if rng.random() < 0.7 else data[at:]


def flip(data: bytes, rng: random.Random, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 30))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def drop(data: bytes, rng: random.Random, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 50, 2000)) :]


def double(data: bytes, rng: random.Random, other: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    start, count = rng.randrange(len(lines) + 1), rng.choice((1, 2, 10, 1000))
    at = rng.randrange(len(lines) + 1)
    return b"".join(lines[:at] + lines[start : start + count] + lines[at:])


def reorder(data: bytes, rng: random.Random, other: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    if rng.random() < 0.5 and len(lines) > 1:
        a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[a], lines[b] = lines[b], lines[a]
    elif rng.random() < 0.5:
        rng.shuffle(lines)
    else:
        lines.reverse()
    return b"".join(lines)


def interleave(data: bytes, rng: random.Random, other: bytes) -> bytes:
    mine, theirs = data.splitlines(keepends=True), other.splitlines(keepends=True)
    start = rng.randrange(len(theirs) + 1)
    for line in theirs[start : start + rng.choice((1, 3, 40))]:
        mine.insert(rng.randrange(len(mine) + 1), line)
    return b"".join(mine)


def raw_line(data: bytes, rng: random.Random, other: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    for _ in range(rng.choice((1, 1, 5))):
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(RAW))
    return b"".join(lines)


def nest(data: bytes, rng: random.Random, other: bytes) -> bytes:
    depth = rng.choice((5, 60, 500, 1000, 1023, 1024, 3000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'{"content":[', b"]}")))
    deep = opening * depth + b"1" + closing * depth
    places = [m.end() for m in re.finditer(rb'":\s?(?=["\d\[{])', data[:100_000])] or [0]
    at = rng.choice(places)
    end = re.compile(rb'"(?:[^"\\\n]|\\.)*"|[\d.]+').match(data, at)
    return data[:at] + deep + data[end.end() if end else at :]


def line_ends(data: bytes, rng: random.Random, other: bytes) -> bytes:
    return data.replace(b"\n", rng.choice((b"\r\n", b"\r", b"\n\n", b"")))


def odd_values(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Values, keys and places in the JSON of some lines are exchanged."""
    lines = data.splitlines(keepends=True)
    for _ in range(rng.choice((1, 2, 5, 20))):
        if not lines:
            break
        at = rng.randrange(len(lines))
        try:
            record = json.loads(lines[at])
        except (ValueError, RecursionError):
            continue
        changed = change(record, rng, 0)
        lines[at] = (
            json.dumps(changed, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass") + b"\n"
        )
    return b"".join(lines)


def change(value: object, rng: random.Random, depth: int) -> object:
    """One change somewhere inside a JSON value."""
    if depth > 200 or not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
        return rng.choice((*ODD, value))
    if isinstance(value, list):
        value = list(value)
        at = rng.randrange(len(value))
        kind = rng.randrange(6)
        if kind == 0:
            value.insert(at, value[at])
        elif kind == 1:
            del value[at]
        else:
            value[at] = change(value[at], rng, depth + 1)
        return value
    key = rng.choice(list(value))
    changed = dict(value)
    kind = rng.randrange(8)
    if kind == 0:
        del changed[key]
    elif kind == 1:
        changed[rng.choice(("type", "id", "role", "content", "parentId", "uuid", "text", "x", ""))] = value[
            key
        ]
    else:
        changed[key] = change(value[key], rng, depth + 1)
    return changed


MUTATIONS = (cut, flip, drop, double, reorder, interleave, raw_line, nest, line_ends, *([odd_values] * 6))


def mutant(rng: random.Random, known: list[bytes]) -> bytes:
    data, other = piece_of(rng.choice(known), rng), piece_of(rng.choice(known), rng)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        data = rng.choice(MUTATIONS)(data, rng, other)
    return data[: 4 * LARGEST]


# ------------------------------------------------------------------------------------------- law
def request_for(rng: random.Random, archive: Path) -> Request:
    settings = CompactionSettings(
        keep_recent_tokens=rng.choice((0, 1, 50, 500, 500, 2000)),
        estimator=ESTIMATORS[rng.choice(("chars", "cjk"))],
        repair=rng.random() < 0.8,
        strategy="keep-recent" if rng.random() < 0.7 else "segment",
        context_window=rng.choice((200_000, 1000)),
    )
    named = rng.choice(list(FORMATS)) if rng.random() < 0.1 else None
    return Request(settings, format=named, archive=archive, allow_growth=rng.random() < 0.3,
                   if_needed=rng.random() < 0.1, lang=rng.choice(("en", "zh")))  # fmt: skip


def examine(data: bytes, request: Request) -> str:
    """Everything haocompact does with a transcript. Raises AssertionError, or whatever is a bug; how it ended."""
    assert write(read(data)) == data
    source = Source("s.jsonl", data)
    try:
        planned = plan(source, request)
    except HaoError as error:
        safe(show.visible(str(error)))
        return "refused"
    if len(planned.session.messages) < 100:
        safe(rendered(show.plan_table(planned, turns=len(data) % 2 == 0)))
    safe(show.dumps(show.plan_json(planned, with_rows=True)))
    safe("\n".join([*show.plan_figures(planned), *map(show.visible, warnings_of(planned))]))
    diagnosis = explain(planned)
    safe("\n".join([*show.diag_text(planned, diagnosis), show.dumps(show.diag_json(planned, diagnosis))]))
    if isinstance(planned.outcome, NoCompaction):
        safe(diag.compaction_line(planned.outcome))
    try:
        result = compact(source, request)
    except HaoError as error:
        safe(show.visible(str(error)))
        return "refused"
    if not isinstance(result, Compacted):
        return "skipped"
    check_kept(data, result)
    check_archived(data, result, request)
    return "compacted"


def rendered(table: object) -> str:
    out = io.StringIO()
    Console(file=out, width=120, markup=False, emoji=False, highlight=False).print(table)
    return out.getvalue()


def safe(text: str) -> None:
    found = UNSAFE.search(text)
    assert found is None, f"unsafe on a terminal: {text[max(0, found.start() - 80) : found.end() + 20]!r}"


def check_kept(data: bytes, result: Compacted) -> None:
    """Law 2: what is not removed stands in the output, in order; where no client forces a change, byte for byte."""
    records, session = result.planned.session.records, result.planned.session
    kept = FORMATS[session.format].select(session, result.plan)
    gone = list(removed(len(records), kept))
    assert sorted([*kept, *gone]) == list(range(len(records)))
    if session.format in (
        "pi",
        "claude",
        "codex",
    ):  # links and figures change inside kept lines: tests/test_laws.py
        return
    output, at = result.output[:], 0
    for index in kept:  # records are lines, or the elements of a request's array
        raw = records.raw(index).rstrip(b"\r\n")
        at = output.find(raw, at)
        assert at >= 0, f"record {index + 1} is not kept"
        at += len(raw)


def check_archived(data: bytes, result: Compacted, request: Request) -> None:
    """Law 4: the archive gives back the original, and shows what it holds."""
    output = result.output
    if result.planned.session.format.endswith("-requests"):  # each line is compacted by itself
        compact_to(Source("s.jsonl", data), request, stream := io.BytesIO())
        output = stream.getvalue()
    else:
        store(result, "s.jsonl")
    assert b"".join(restore(Source("s.jsonl", output), request)).rstrip(b"\n") == data.rstrip(b"\n")
    safe(show.printable(window_text(result.run.hash, request, 0, 5000)))


@contextmanager
def time_limit(seconds: int):
    """TimeoutError after so much time of this processor, however busy the machine is."""

    def ring(*_):
        raise TimeoutError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fuzz(files: int, seed: int, folder: Path, keep_going: bool = False) -> Counter[str]:
    """How the mutants ended, counted. Raises the first failure, or counts them all."""
    known, seen = bases(), Counter[str]()
    for number in range(files):
        rng = random.Random(f"{seed}-{number}")
        data = mutant(rng, known)
        request = request_for(rng, folder / f"{number // 200}.db")
        try:
            with time_limit(SECONDS):
                seen[examine(data, request)] += 1
        except Exception as error:
            if not keep_going:
                (folder / "failed.jsonl").write_bytes(data)
                raise AssertionError(f"seed {seed}, number {number}: {error!r}") from error
            trace = traceback.extract_tb(error.__traceback__)[-1]
            seen[f"FAILED {type(error).__name__} {Path(trace.filename).name}:{trace.lineno}"] += 1
            print(f"{number}: {error!r} {Path(trace.filename).name}:{trace.lineno}", flush=True)
        if number % 200 == 199:
            for file in folder.glob("*.db*"):
                file.unlink()
    return seen


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    options.add_argument("--files", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--keep-going", action="store_true", help="count failures instead of stopping at the first"
    )
    given = options.parse_args()
    sys.setrecursionlimit(20_000)  # as the command line does
    start = time.monotonic()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="haocompact-fuzz-", dir=memory if memory.is_dir() else None
    ) as folder:
        seen = fuzz(given.files, given.seed, Path(folder), given.keep_going)
    print(f"{given.files} files in {time.monotonic() - start:.0f} s (seed {given.seed}): "
          + ", ".join(f"{count} {what}" for what, count in seen.most_common()))  # fmt: skip
    sys.exit(any(what.startswith("FAILED") for what in seen))


if __name__ == "__main__":
    main()
