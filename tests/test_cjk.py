"""The `cjk` estimator against true counts of o200k_base and cl100k_base (golden/cjk-samples.json)."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haocompact.cjk import cjk_quarters
from haocompact.compaction import CHARS, CJK, ESTIMATORS, CompactionSettings, Message, Text
from haocompact.jsjson import utf16_length

SAMPLES = json.loads((Path(__file__).parent / "golden" / "cjk-samples.json").read_text(encoding="utf-8"))
PROSE = [row for row in SAMPLES if row["name"][:3] in ("zh-", "ja-", "ko-")]
TEXTS = st.one_of(st.text(), st.text(alphabet="压缩上下文の가나다なアー，。a b😀é\u0416ع─\n"))


def tokens(text, estimator=CJK):
    return Message("user", (Text(text),)).tokens(estimator)


@pytest.mark.parametrize("encoding", ["o200k", "cl100k"])
@pytest.mark.parametrize("row", PROSE, ids=lambda row: row["name"])
def test_prose_is_never_below_095_of_the_true_count(row, encoding):
    assert tokens(row["text"]) >= 0.95 * row[encoding]


def test_prose_covers_the_three_languages():
    assert {row["name"][:3] for row in PROSE} == {"zh-", "ja-", "ko-"}
    assert len(PROSE) == 16


@pytest.mark.parametrize("row", PROSE, ids=lambda row: row["name"])
def test_chars_falls_short_where_cjk_does_not(row):
    """Why there is a second estimator: a quarter of the characters is less than half of the tokens."""
    assert tokens(row["text"], CHARS) < 0.5 * row["o200k"]


@given(text=st.text(alphabet=st.characters(max_codepoint=127)))
def test_equal_to_chars_on_ascii(text):
    assert tokens(text) == tokens(text, CHARS) == math.ceil(len(text) / 4)


@given(parts=st.lists(TEXTS, max_size=5))
def test_a_whole_is_the_sum_of_its_parts(parts):
    assert cjk_quarters("".join(parts)) == sum(map(cjk_quarters, parts))


@given(text=TEXTS)
def test_never_below_chars(text):
    assert cjk_quarters(text) >= utf16_length(text)
    assert tokens(text) >= tokens(text, CHARS)


@pytest.mark.parametrize("row", SAMPLES, ids=lambda row: row["name"])
def test_never_below_chars_on_any_sample(row):
    assert tokens(row["text"]) >= tokens(row["text"], CHARS)


@pytest.mark.parametrize(("text", "quarters"), [
    ("", 0), ("abcd", 4), ("─", 1), ("中", 4), ("の", 4), ("，", 4), ("龘", 10), ("쀏", 10),
    ("😀", 10), ("é", 6), ("ж", 2), ("ع", 3),
])  # fmt: skip
def test_weights(text, quarters):
    assert cjk_quarters(text) == quarters


def test_it_is_the_default():
    assert CompactionSettings().estimator is CJK is ESTIMATORS["cjk"]
