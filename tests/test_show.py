"""What is shown: tables at 80 and 200 columns, folded and whole, the log, the settings, in words and as JSON."""

import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from rich.console import Console
from test_diag import A, T, U, settings, talk
from test_draw import planned, with_summary

from haocompact import show
from haocompact.compaction import Text, ToolCall
from haocompact.diag import diagnose, plural
from haocompact.skiplog import Log, parse_log_line

LONG = [(U, 10), (A, 5), (T, 12_345), (A, 7)] * 300


def text(renderable, width):
    console = Console(width=width, highlight=False, emoji=False, markup=False, no_color=True)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("turns", [False, True])
def test_no_figure_and_no_word_is_cut_at_any_width(width, turns):
    plan = planned(with_summary(*LONG), 30_000)
    for message in plan.session.messages[-3:-1]:
        message.parts = (Text("x"), *(ToolCall(str(i), f"tool_{i}") for i in range(9)))
    lines = text(show.plan_table(plan, turns=turns, everything=True), width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    running = sum(row.tokens for row in show.rows(plan))
    assert any(f"{running:,}" in line for line in lines)
    for words in ("-- summarised --", "-- kept from here --", "previous summary") if width >= 80 else ():
        assert any(words in line for line in lines)
    if not turns:
        assert any("tool result" in line for line in lines)


def test_a_long_session_is_folded_around_the_cut_and_at_its_ends():
    plan = planned(talk(*LONG), 30_000)
    folded = text(show.plan_table(plan), 80)
    assert len(folded) < 45
    shown = {int(m[1]) for line in folded if (m := re.match(r" *(\d+) ", line))}
    cut = plan.outcome.retained_tail[0].line
    assert {1, 2, 1199, 1200, cut - 1, cut, cut + 1} <= shown
    hidden = sum(
        int(m[1].replace(",", "")) for line in folded if (m := re.search(r"\.\.\. ([\d,]+) more", line))
    )
    assert hidden + len(shown) == 1200
    whole = text(show.plan_table(plan, everything=True), 80)
    assert sum(bool(re.match(r" *\d+ ", line)) for line in whole) == 1200


def test_every_fate_is_named_where_it_begins():
    lines = text(show.plan_table(planned(talk((U, 9), (A, 9), (U, 9), (A, 9), (A, 9)), 9)), 80)
    assert [line.strip() for line in lines if "--" in line] == [
        "-- summarised --",
        "-- turn prefix --",
        "-- kept from here --",
    ]
    segment = planned(talk(*[(U, 9), (A, 9)] * 4), strategy="segment", tail_keep=2)
    lines = text(show.plan_table(segment), 80)
    assert [line.strip() for line in lines if "--" in line] == ["-- summarised --", "-- kept from here --"]


def test_turns_count_their_messages():
    rows = show.turn_rows(show.rows(planned(talk((U, 1), *[(A, 1)] * 1499, (U, 2)), 5000)))
    assert [(r.what, r.tokens) for r in rows] == [("1,500 messages", 1500), ("1 message", 2)]


@pytest.mark.parametrize(("count", "words"), [(0, "0 messages"), (1, "1 message"), (1234, "1,234 messages")])
def test_plural(count, words):
    assert plural(count, "message") == words


def test_the_title_names_the_file_and_text_is_no_markup():
    plan = planned(talk((U, 1)), path="[red]a\x1b[31m.jsonl")
    assert show.title(plan) == "[red]a\\x1b[31m.jsonl: openai, 1 message"


def test_a_skip_in_the_plan_says_why():
    lines = show.plan_figures(planned(talk((U, 1)), 500))
    assert lines[-1] == (
        "result   nothing to compact: smaller than what is always kept (total_below_keep_recent); diag says more"
    )


def test_diag_shows_each_piece_of_evidence():
    messages = talk((U, 10), (A, 10), (U, 10), (A, 10), (T, 50))
    messages[1].usage, messages[3].usage_note = 1000, "all figures are zero"
    plan = planned(messages, 20)
    found = diagnose(messages, settings(20), plan.outcome)
    assert show.diag_text(plan, found) == [
        "s.jsonl: openai, 5 messages",
        "would be compacted",
        "",
        "3 messages would be summarised and 2 kept (about 60 tokens).",
        "",
        "context  1,070 tokens: usage 1,000 on line 2 + 70 estimated for 3 messages after it",
        "         not counted: 1 usage report (all figures are zero), line 4",
        "trigger  1,070 > window 200,000 - reserve 16,384 = 183,616? no, 182,546 left",
        "walk     from the end back, line 5 reaches 50 of 20 (keep_recent); no cut there (tool results, which would "
        "lose their call), the last valid is line 4",
        "cuts     4 of 5 messages can start the kept part",
        "         not 1: tool results, which would lose their call, line 5",
        "cut      kept from line 4, splits the turn that began on line 3",
        "removed  2 messages summarised + 1 of the turn's prefix",
        "kept     2 messages, about 60 tokens, above keep_recent (20) by 40",
        "files    0 read, 0 modified",
        "largest  line 5 (toolResult, 50 tokens), line 1 (user, 10 tokens), line 2 (assistant, 10 tokens)",
    ]


# ---------------------------------------------------------------------------------------- the log
ENTRIES = [
    '[2026-01-02T12:00:00.005+00:00] [COMPACT_NONE] branch=empty_messages source="b"',
    '[2026-01-02T13:00:00.005+00:00] [COMPACT_NONE] branch=nothing_to_summarize sub=segment_empty source="a"',
    '[2026-01-03T12:00:00.005+00:00] [COMPACT_NONE] branch=empty_messages source="b"',
]


def test_the_log_by_cause(monkeypatch):
    log = Log("l", [parse_log_line(line) for line in ENTRIES], broken=1, foreign=2)
    lines = show.log_text(log)
    assert [re.sub(r"\d{4}-\d\d-\d\d \d\d", "D", line) for line in lines] == [
        "  count  first                last                 transcript",
        "empty_messages: the file is empty",
        "      2  D:00:00  D:00:00  b",
        "",
        "nothing_to_summarize segment_empty: no segment between head and tail",
        "      1  D:00:00  D:00:00  a",
        "",
        "l: 3 skips, 1 broken line, 2 other lines",
    ]
    found = show.log_json(log)
    assert (found["skips"], found["broken_lines"], found["other_lines"]) == (3, 1, 2)
    assert found["groups"][0] == {"branch": "empty_messages", "sub": None, "source": "b", "count": 2,
                                  "first": "2026-01-02T12:00:00.005+00:00",
                                  "last": "2026-01-03T12:00:00.005+00:00"}  # fmt: skip


# ------------------------------------------------------------------------------- the command line
@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HAOCOMPACT_LOG", "usual.log")
    monkeypatch.setenv("HAOCOMPACT_ARCHIVE", "archive.db")
    monkeypatch.setenv("HAOCOMPACT_CONFIG", str(tmp_path / "config.toml"))
    Path("config.toml").touch()
    Path("s.jsonl").write_text('{"role":"user","content":"Hello."}\n{"role":"assistant","content":"Yes."}\n')

    def run(*words, **env):
        return subprocess.run([sys.executable, "-m", "haocompact", *map(str, words)], capture_output=True, text=True,
                              timeout=60, env=os.environ | env)  # fmt: skip

    return run


def test_log_alone_reads_and_with_a_transcript_it_names_where_to_write(run):
    assert run("diag", "s.jsonl", "-q").returncode == 0
    assert run("diag", "s.jsonl", "--log", "other.log", "-q").returncode == 0
    assert [len(Path(p).read_text().splitlines()) for p in ("usual.log", "other.log")] == [1, 1]
    for words in (
        ["--log"],
        ["--log", "usual.log"],
        ["--log=usual.log"],
        ["--log", "--since", "1h"],
        ["--read-log"],
    ):
        found = run("diag", *words)
        assert (found.returncode, found.stderr) == (0, "")
        assert "total_below_keep_recent: smaller than what is always kept" in found.stdout
        assert found.stdout.endswith("usual.log: 1 skip\n")
        told = json.loads(run("diag", *words, "--json").stdout)
        assert [(g["sub"], g["source"], g["count"]) for g in told["groups"]] == [
            ("total_below_keep_recent", "s.jsonl", 1)
        ]
    assert run("diag", "--log", "--since", "2099-01-01").stdout == "usual.log: 0 skips\n"
    assert (run("diag", "--log", "none.log").returncode, run("diag", "--since", "1h").returncode) == (2, 2)


def test_a_log_that_cant_be_written_is_one_warning(run):
    Path("folder").mkdir()
    for words in (["compact", "s.jsonl", "-o", "o.jsonl"], ["diag", "s.jsonl"]):
        found = run(*words, HAOCOMPACT_LOG="folder")
        assert found.returncode == 0
        assert [line for line in found.stderr.splitlines() if "log can't be written" in line]
    assert Path("o.jsonl").read_bytes() == Path("s.jsonl").read_bytes()


def test_follow_prints_what_comes(run):
    words = [sys.executable, "-u", "-m", "haocompact", "diag", "--log", "--follow", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as following:
        try:
            for _ in range(60):  # until it looks
                run("diag", "s.jsonl", "-q")
                if select.select([following.stdout], [], [], 1)[0]:
                    break
            told = json.loads(following.stdout.readline())
        finally:
            following.kill()
    assert (told["sub"], told["source"]) == ("total_below_keep_recent", "s.jsonl")


def test_settings_name_their_source(run):
    Path("config.toml").write_text('reserve = 77\nlang = "zh"\n')
    told = json.loads(
        run("plan", "--show-settings", "--json", "--keep-recent", "5", HAOCOMPACT_WINDOW="9000").stdout
    )
    values = {k: (v["value"], v["source"]) for k, v in told["settings"].items()}
    assert values["keep-recent"] == (5, "option")
    assert values["window"] == (9000, "environment")
    assert values["reserve"] == (77, "settings file")
    assert values["lang"] == ("zh", "settings file")
    assert values["estimator"] == ("cjk", "default")
    assert values["archive"] == ("archive.db", "environment")
    shown = run("plan", "--show-settings", HAOCOMPACT_WINDOW="9000").stdout
    assert re.search(r"^--window +environment HAOCOMPACT_WINDOW +9000$", shown, re.M)
    assert "show-settings" not in shown


def test_pictures_are_written_and_of_one_transcript(run):
    assert run("plan", "s.jsonl", "--svg", "p.svg", "--html", "p.html").returncode == 0
    assert Path("p.svg").read_text().startswith("<svg")
    assert Path("p.html").read_text().startswith("<!doctype html>")
    Path("t.jsonl").write_bytes(Path("s.jsonl").read_bytes())
    found = run("plan", "s.jsonl", "t.jsonl", "--svg", "q.svg")
    assert (found.returncode, "draw one transcript" in found.stderr) == (2, True)


def test_in_a_pipe_there_is_no_colour_and_no_blank_end(run):
    found = run("plan", ROOT / "samples/pi/weather-station.jsonl", "--keep-recent", "2000", "--all")
    assert "\x1b" not in found.stdout
    assert not [line for line in found.stdout.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("columns", [80, 200])
def test_on_a_terminal_no_color_means_none(run, columns):
    for extra, colours in (({"NO_COLOR": "1"}, False), ({}, True)):
        ours, theirs = pty.openpty()
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
        words = [sys.executable, "-m", "haocompact", "plan", str(ROOT / "samples/pi/weather-station.jsonl")]
        subprocess.run([*words, "--keep-recent", "2000"], stdout=theirs, stderr=subprocess.DEVNULL, timeout=60,
                       check=True, env=env | {"TERM": "xterm-256color", "COLUMNS": str(columns)} | extra)  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 65536):
                shown += block
        except OSError:
            pass
        os.close(ours)
        assert b"kept from here" in shown
        assert not re.search(rb"\x1b\[[0-9;]*3[0-7]m", shown)  # of the terminal's own colours, none is used
        assert (b"\x1b[" in shown) or not colours


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plan --format o", ["openai"]),
        ("plan --estimator tik", ["tiktoken", "tiktoken:o200k_base", "tiktoken:cl100k_base"]),
        ("retrieve o.jsonl 57f", ["57f7406cdac1a345"]),
        ("retrieve o.jsonl 00", []),
    ],
)
def test_the_shell_completes(run, words, expected):
    sample = ROOT / "samples/pi/weather-station.jsonl"
    assert run("compact", sample, "--keep-recent", "2000", "-q", "-o", "o.jsonl").returncode == 0
    line = f"haocompact {words}"
    found = run(_HAOCOMPACT_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(line.split()) - 1))
    assert [e for e in expected if e not in found.stdout.split()] == []
    assert bool(expected) == bool(found.stdout.strip())
