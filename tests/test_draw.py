"""The picture of a context: to scale, complete, readable at any length, and inert."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from test_diag import A, T, U, settings, talk

from haocompact import draw
from haocompact.compaction import COMPACTION_SUMMARY, Message, Text, estimate_context_tokens
from haocompact.formats.session import Session
from haocompact.pipeline import Planned, prepare
from haocompact.records import read
from haocompact.show import rows

NS = "{http://www.w3.org/2000/svg}"


def planned(messages, keep=20, path="s.jsonl", **more):
    s = settings(keep, **more)
    session = Session("openai", read(b""), messages)
    return Planned(path, session, prepare(messages, s), estimate_context_tokens(messages, s.estimator), s)


def with_summary(*rows_):
    return [Message(U, (Text("x" * 40),), kind=COMPACTION_SUMMARY, line=1), *talk(*rows_)]


def texts(picture):
    return [e.text for e in ElementTree.fromstring(picture).iter(f"{NS}text")]


TALK = [(U, 10), (A, 10), (T, 30), (U, 10), (A, 10), (A, 5)]


def test_what_the_picture_shows():
    found = texts(draw.svg(planned(with_summary(*TALK), 12)))
    for word in ("previous summary", "summarised", "turn prefix, summarised apart", "kept", "cut", "tokens"):
        assert word in found
    assert found[0] == "s.jsonl: openai, 6 messages"
    assert "trigger 183,616" in found
    assert {"text 40", "result 120", "text 20"} <= set(found)


def test_without_a_cut_there_is_no_mark_of_one():
    found = texts(draw.svg(planned(talk(*TALK), 500)))
    assert "cut" not in found
    assert "kept" in found


def test_segments_keep_their_head():
    messages = talk(*[(U, 9), (A, 9)] * 4)
    root = ElementTree.fromstring(draw.svg(planned(messages, strategy="segment", tail_keep=2)))
    marks = [e.text for e in root.iter(f"{NS}text") if e.get("class") == "mark"]
    assert [t for t in marks if t in ("kept", "summarised")] == ["kept", "summarised", "kept"]


@given(st.lists(st.tuples(st.sampled_from([U, A, T]), st.integers(0, 90)), max_size=30), st.integers(0, 99))
def test_every_token_is_drawn_once_and_to_scale(shape, keep):
    plan = planned(talk(*shape), keep)
    found = rows(plan)
    for most in (1, 3, 100):
        made = draw.stretches(found, most)
        assert sum(part.total for part in made) == sum(row.tokens for row in found)
        assert sum(part.count for part in made) == len(found)
        assert all(sum(p.place == place for p in made) <= 2 * most for place in draw.FATES)
    root = ElementTree.fromstring(draw.svg(plan))
    bars = [e for e in root.iter(f"{NS}rect") if e.get("height") == "22" and e.get("class") != "rail"]
    if sum(row.tokens for row in found):
        assert sum(float(e.get("width")) for e in bars) == pytest.approx(
            draw.WIDTH - 2 * draw.MARGIN, abs=0.2
        )


@pytest.mark.parametrize("count", [0, 1, 20, 5000])
def test_it_is_a_page_at_any_length(count):
    picture = draw.svg(planned(talk(*[(U, 3), (A, 70)] * (count // 2 + count % 2))[:count], 20_000))
    root = ElementTree.fromstring(picture)
    assert int(root.get("height")) < 3500
    assert len(picture) < 400_000
    for text in root.iter(f"{NS}text"):
        assert 0 <= float(text.get("x")) <= draw.WIDTH
        assert 0 < float(text.get("y")) < int(root.get("height"))


def test_rows_do_not_overlap():
    root = ElementTree.fromstring(draw.svg(planned(with_summary(*TALK), 12)))
    tops = sorted({float(e.get("y")) for e in root.iter(f"{NS}rect") if e.get("height") == str(draw.BAR)})
    assert len(tops) == 7
    assert min(b - a for a, b in pairwise(tops)) >= draw.BAR


@pytest.mark.parametrize("render", [draw.svg, draw.html])
def test_names_are_data(render):
    evil = 'a"><script>alert(1)</script>\x1b]0;x\x07\u202e]]>&amp;.jsonl'
    picture = render(planned(talk((U, 3)), path=evil))
    assert "<script" not in picture
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", picture)
    assert not re.search(r"(?:href|src|url\(|@import)", picture)


def test_the_page_holds_the_picture():
    plan = planned(talk(*TALK))
    page = draw.html(plan)
    assert draw.svg(plan) in page
    assert page.startswith("<!doctype html>")
    assert "prefers-color-scheme: dark" in page


def test_bars_of_several_messages_can_be_compared():
    rows_ = [row for i in range(100) for row in ((T, 5), (A, i), (U, 9))]
    made = draw.stretches(rows(planned(talk(*rows_), 0)), 10)
    assert {tuple(part.tokens) for part in made if part.count > 2} == {("user", "assistant", "tool")}
    assert {part.what for part in made} >= {"30 messages"}


def test_a_single_message_is_named_by_its_role_too():
    found = texts(draw.svg(planned(talk(*TALK), 12)))
    at = found.index("result 120")
    assert found[at - 2 : at] == ["3", "tool"]


def test_the_legend_speaks_of_fading_only_where_something_fades():
    faded = "faded: goes into the summary"
    assert faded in texts(draw.svg(planned(talk(*TALK), 12)))
    for stays in (talk(*TALK), with_summary(*TALK)):
        picture = draw.svg(planned(stays, 500))
        assert faded not in texts(picture)
        assert 'class="gone"' not in picture


def test_a_context_past_its_window_says_by_how_much():
    full = texts(draw.svg(planned(talk((U, 300), (A, 300)), 12, context_window=400)))
    assert "context 600, 200 more than the window of 400" in full


@pytest.mark.parametrize("name", ["会话" * 60, "x" * 200])
def test_a_long_name_fits_beside_its_end(name):
    head = texts(draw.svg(planned(talk((U, 3)), path=f"{name}.jsonl")))[0]
    assert head.startswith("…")
    assert head.endswith(".jsonl: openai, 1 message")
    assert 90 < cell_len(head) <= 96
