"""The log of skips: whole lines from many processes, rotation, reading back by cause, since and follow."""

import os
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haocompact import skiplog as log
from haocompact.compaction import NoCompaction
from haocompact.errors import UsageError
from haocompact.skiplog import append_log, grouped, log_line, parse_log_line, read_log, since

NOON = datetime(2026, 1, 2, 12, 0, 0, 5000, tzinfo=UTC)
EMPTY = NoCompaction("empty_messages")


def test_log_line():
    skip = NoCompaction("tail_is_summary", None, {"msgs": 1, "tail_head": "x"})
    assert log_line(skip, 'a "b".jsonl', NOON) == (
        "[2026-01-02T12:00:00.005+00:00] [COMPACT_NONE] branch=tail_is_summary msgs=1 tail_head='x'"
        ' source="a \\"b\\".jsonl"'
    )


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        (
            "[11:22:33.044] [COMPACT_NONE] branch=empty_messages",
            ("11:22:33.044", "empty_messages", None, None),
        ),
        (
            "[11:22:33.044] [COMPACT_NONE] branch=nothing_to_summarize sub=cut_pinned_at_zero msgs=3",
            ("11:22:33.044", "nothing_to_summarize", "cut_pinned_at_zero", None),
        ),
        (
            "[11:22:33.044] [COMPACT_NONE] branch=compactable_empty (上下文只剩旧摘要)",
            ("11:22:33.044", "compactable_empty", None, None),
        ),
        (
            "[11:22:33.044] [COMPACT_NONE] branch=nothing_to_summarize (diag failed: sub=x)",
            ("11:22:33.044", "nothing_to_summarize", None, None),
        ),
        (
            "[11:22:33.044] [COMPACT_NONE] branch=tail_is_summary tail_head='sub=x branch=y'",
            ("11:22:33.044", "tail_is_summary", None, None),
        ),
        (
            '[2026-01-02T12:00:00.005+00:00] [COMPACT_NONE] branch=a source="a\\\\b \\"c\\".jsonl"',
            ("2026-01-02T12:00:00.005+00:00", "a", None, 'a\\b "c".jsonl'),
        ),
        (
            '[11:22:33.044] [COMPACT_NONE] branch=empty_messages source="broken \\x"',
            ("11:22:33.044", "empty_messages", None, None),
        ),
        ('[11:22:33.044] [COMPACT_NONE] branch=a source="中"', ("11:22:33.044", "a", None, None)),
    ],
)
def test_parse_log_line(line, entry):
    found = parse_log_line(line)
    assert (found.time, found.branch, found.sub, found.source, found.text) == (*entry, line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "hello",
        "[11:22:33.044] [COMPACT_OK] branch=x",
        "[11:22:33.044] [COMPACT_NONE]",
        "[11:22:33.044] [COMPACT_NONE] branch=",
        "[11:22:33.044] [COMPACT_NONE] branch=\x1b[31m",
        "[COMPACT_NONE] branch=empty_messages",
        "[\x1b[31m] [COMPACT_NONE] branch=empty_messages",
        "x [11:22:33.044] [COMPACT_NONE] branch=empty_messages",
    ],
)
def test_foreign_lines_are_no_entries(line):
    assert parse_log_line(line) is None


@given(st.text(), st.text())
def test_no_line_breaks_the_parser(before, after):
    for line in (
        before,
        f"[11:22:33.044] [COMPACT_NONE] branch={before}",
        f'[1] [COMPACT_NONE] branch=x {before} source="{after}"',
    ):
        entry = parse_log_line(line)
        assert entry is None or entry.text == line


@given(st.text(), st.text(st.characters(categories=["L", "Cs", "Cc", "Zs", "Po"])))
def test_what_is_logged_is_read_back(text, path):
    line = log_line(NoCompaction("tail_is_summary", None, {"msgs": 1, "tail_head": text}), path, NOON)
    assert "\n" not in line
    entry = parse_log_line(line)
    assert (entry.time, entry.branch, entry.sub, entry.source) == (
        "2026-01-02T12:00:00.005+00:00",
        "tail_is_summary",
        None,
        path,
    )


def test_the_log_is_private_and_grows(tmp_path):
    path = tmp_path / "new" / "log"
    append_log(path, "one")
    append_log(path, "two \ud83d 中")
    assert path.read_text() == "one\ntwo ? 中\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    append_log(path, "three")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [p.name for p in path.parent.iterdir()] == ["log"]
    with pytest.raises(OSError, match="directory"):
        append_log(tmp_path / "new", "x")


def test_a_full_disk_is_an_error_of_the_caller(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with pytest.raises(OSError, match="No space left"):
        append_log(log.Path("/dev/full"), "x")


SCRIPT = """
import sys
from pathlib import Path
from haocompact.skiplog import append_log
for i in range(int(sys.argv[3])):
    append_log(Path(sys.argv[1]), f"{sys.argv[2] * 3000} {i}", max_bytes=int(sys.argv[4]), backups=20)
"""


@pytest.mark.parametrize("max_bytes", [1 << 30, 100_000])
def test_many_processes_append_whole_lines_also_while_it_rotates(tmp_path, max_bytes):
    path = tmp_path / "log"
    words = [[sys.executable, "-c", SCRIPT, path, c, "100", str(max_bytes)] for c in "abcd"]
    workers = [subprocess.Popen(w) for w in words]
    assert [w.wait(120) for w in workers] == [0] * 4
    files = sorted(tmp_path.iterdir())
    assert (len(files) > 10) == (max_bytes == 100_000)
    assert all(stat.S_IMODE(f.stat().st_mode) == 0o600 and f.stat().st_size <= max_bytes for f in files)
    lines = [line for f in files for line in f.read_text().splitlines()]
    assert sorted(lines) == sorted(f"{c * 3000} {i}" for c in "abcd" for i in range(100))


def test_only_so_much_is_remembered(tmp_path):
    for i in range(50):
        append_log(tmp_path / "log", f"{i:02} " + "x" * 96, max_bytes=1000, backups=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "log.1", "log.2"]
    assert (tmp_path / "log").read_text().splitlines()[-1].startswith("49 ")


def test_what_was_rotated_away_is_read_first(tmp_path):
    path = tmp_path / "log"
    for i in range(30):
        line = log_line(EMPTY, f"{i}.jsonl", NOON + timedelta(minutes=i))
        append_log(path, line, max_bytes=1000, backups=log.BACKUPS)
    found = read_log(path)
    numbers = [int(e.source.split(".")[0]) for e in found.entries]
    assert numbers == list(range(numbers[0], 30))
    assert len(numbers) > 15


def test_broken_and_foreign_lines_are_counted(tmp_path):
    path = tmp_path / "log"
    lines = [
        log_line(EMPTY, "a", NOON),
        "[COMPACT_NONE] half a li",
        "hello",
        "",
        log_line(EMPTY, "a", NOON)[:50],
        "x",
    ]
    path.write_bytes("\r\n".join(lines).encode() + b"\n\xff\xfe\n")
    found = read_log(path)
    assert (len(found.entries), found.broken, found.foreign) == (1, 2, 3)


def test_a_seed_line_is_dated_by_what_follows_it(tmp_path):
    path = tmp_path / "log"
    clocks = ("23:58:00.000", "23:59:30.000", "00:10:00.000", "23:00:00.000", "01:00:00.000")
    path.write_text("".join(f"[{c}] [COMPACT_NONE] branch=empty_messages\n" for c in clocks))
    written = datetime(2026, 3, 10, 2, 0, 0).timestamp()
    os.utime(path, (written, written))
    days = [e.moment.day for e in read_log(path).entries]
    assert days == [8, 8, 9, 9, 10]
    recent = read_log(path, datetime(2026, 3, 9, 12).astimezone())
    assert [e.time for e in recent.entries] == list(clocks[3:])


def test_a_time_that_is_none_is_never_recent(tmp_path):
    path = tmp_path / "log"
    path.write_text("[99:99:99.000] [COMPACT_NONE] branch=empty_messages\n")
    assert len(read_log(path).entries) == 1
    assert read_log(path, NOON).entries == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", NOON - timedelta(seconds=90)),
        ("30m", NOON - timedelta(minutes=30)),
        ("2h", NOON - timedelta(hours=2)),
        ("1.5h", NOON - timedelta(minutes=90)),
        ("7d", NOON - timedelta(days=7)),
        ("2w", NOON - timedelta(weeks=2)),
        ("2026-01-01T06:30+00:00", datetime(2026, 1, 1, 6, 30, tzinfo=UTC)),
        ("2026-01-01", datetime(2026, 1, 1).astimezone()),
    ],
)
def test_since(text, expected):
    assert since(text, NOON) == expected


@pytest.mark.parametrize("text", ["", "yesterday", "7", "-3h", "7y", "2026-13-01"])
def test_since_is_a_duration_or_a_time(text):
    with pytest.raises(UsageError, match="neither a duration"):
        since(text, NOON)


def test_groups_are_by_branch_sub_and_transcript():
    pinned = NoCompaction("nothing_to_summarize", "cut_pinned_at_zero", {"msgs": 3})
    short = NoCompaction("nothing_to_summarize", "total_below_keep_recent", {"msgs": 3})
    skips = [(pinned, "a"), (short, "a"), (pinned, "a"), (pinned, "b"), (EMPTY, "a")]
    lines = (log_line(s, path, NOON + timedelta(seconds=i)) for i, (s, path) in enumerate(skips))
    groups = grouped(map(parse_log_line, lines))
    assert [(g.branch, g.sub, g.source, g.count) for g in groups] == [
        ("nothing_to_summarize", "cut_pinned_at_zero", "a", 2),
        ("nothing_to_summarize", "total_below_keep_recent", "a", 1),
        ("nothing_to_summarize", "cut_pinned_at_zero", "b", 1),
        ("empty_messages", None, "a", 1),
    ]
    assert groups[0].last.moment - groups[0].first.moment == timedelta(seconds=2)


def test_follow_sees_each_line_once_across_a_rotation(tmp_path):
    path = tmp_path / "log"
    append_log(path, log_line(EMPTY, "old", NOON))

    def add(text):
        with path.open("a") as file:
            file.write(text)

    steps = [
        lambda: append_log(path, log_line(EMPTY, "1", NOON)),
        lambda: add(log_line(EMPTY, "2", NOON)[:50]),
        lambda: add(log_line(EMPTY, "2", NOON)[50:] + "\nforeign\n"),
        lambda: [append_log(path, log_line(EMPTY, n, NOON)) for n in "34"],
        lambda: append_log(path, log_line(EMPTY, "5", NOON), max_bytes=200),
        lambda: (append_log(path, log_line(EMPTY, "6", NOON)), append_log(path, "x", max_bytes=10)),
        lambda: append_log(path, log_line(EMPTY, "7", NOON)),
    ]

    follow = log.follow(path, lambda: steps.pop(0)())
    assert [next(follow).source for _ in range(7)] == list("1234567")
    assert steps == []


def test_follow_waits_for_a_log_that_is_not_there_yet(tmp_path):
    path = tmp_path / "log"
    steps = iter([lambda: None, lambda: append_log(path, log_line(EMPTY, "a", NOON))])
    assert next(log.follow(path, lambda: next(steps)())).source == "a"
