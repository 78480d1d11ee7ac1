"""Archive hash, marker section, directory and windows: berry-agent's own answers, and what R8 repairs."""

import hashlib
import json

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from haocompact import ccr
from haocompact.ccr import (
    RENDER_BUDGET,
    CcrEntry,
    ccr_directory,
    ccr_entry,
    ccr_hash,
    directory_text,
    parse_ccr_section,
    render_message,
    strip_ccr_section,
    window,
    with_ccr_section,
)
from haocompact.compaction import Image, Message, Shell, Text, Thinking, ToolCall, ToolResult
from haocompact.errors import UsageError
from haocompact.formats import berry
from haocompact.jsjson import stringify, utf16_length
from haocompact.segment import plan_segment, range_of

ORACLE = ROOT.parent / "shared" / "oracle" / "berry_cases.jsonl"
ROWS = [json.loads(line) for line in ORACLE.read_text().splitlines()] if ORACLE.exists() else []
ENTRY = CcrEntry("0123456789abcdef", 12, 34567)
EN_LINE = "<<ccr:0123456789abcdef>> original archived (12 messages / 34567 characters)"
ZH_LINE = "<<ccr:0123456789abcdef>> 原文已归档（12 条消息 / 34567 字符）"


def row_name(row):
    return row["name"]


def sha256(text):
    """As node hashes a string: a lone surrogate counts as U+FFFD."""
    clean = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return hashlib.sha256(clean.encode()).hexdigest()


# ----------------------------------------------------------------------------- berry's own answers
def exact_plan(row):
    events = row["input"]["events"]
    messages = row["input"].get("messages", berry.derive(events))
    return plan_segment(events, messages, row["input"].get("tailKeep", 6), exact=True)


def section_of(row):
    plan = exact_plan(row)
    entries = [*ccr_directory(row["input"]["events"]), *([ccr_entry(plan.occluded)] if plan else [])]
    body = row["input"].get("summaryBody", "SUMMARY BODY")
    return body, with_ccr_section(body, entries, "zh")


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_hash(row):
    plan = exact_plan(row)
    assert (ccr_hash(plan.occluded) if plan else None) == row["result"]["ccr_hash"]
    if plan:
        assert ccr_entry(plan.occluded) == CcrEntry(
            ccr_hash(plan.occluded), plan.occluded_messages, plan.occluded_chars
        )
    for value, expected in zip(row["input"].get("hash", ()), row["result"].get("hashes", ()), strict=True):
        assert ccr_hash(value) == expected


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_directory(row):
    entries = [
        {"hash": e.hash, "messages": float(e.messages), "chars": float(e.chars)}
        for e in ccr_directory(row["input"]["events"])
    ]
    assert entries == row["result"]["directory"]


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_marker_section(row):
    body, text = section_of(row)
    assert text == row["result"]["with_section"]
    assert strip_ccr_section(text, repair=False) == row["result"]["strip_of_with_section"]
    if text == body:  # nothing was added
        return
    assert strip_ccr_section(text) == body
    if body != row["result"]["strip_of_with_section"]:  # R8: the body keeps every character
        assert body != body.rstrip(ccr.JS_SPACE) or "<<ccr:" in body


@pytest.mark.parametrize("row", [row for row in ROWS if "strip" in row["input"]], ids=row_name)
def test_stripping_as_the_seed(row):
    texts = row["input"]["strip"]
    assert [strip_ccr_section(text, repair=False) for text in texts] == row["result"]["strip"]


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_retrieval(row):
    for answer in row["result"]["retrieve"]:
        if "error" in answer:  # fromMessage 1.5 throws there; ours is a whole number by its type
            assert answer["ask"]["fromMessage"] == 1.5
            continue
        text = retrieve(row["input"]["events"], answer["ask"])
        assert (sha256(text), utf16_length(text)) == (answer["sha256"], answer["len"])
        assert text == answer.get("text", text)


def retrieve(events, ask):
    """`ccr_retrieve` of berry-agent out of our parts."""
    if "hash" not in ask:
        return directory_text(ccr_directory(events), "zh")
    surfaces = (e for e in events if e["type"] == "compaction/surface" and "ccrHash" in e["data"])
    hit = next((e for e in surfaces if e["data"]["ccrHash"] == ask["hash"]), None)
    if hit is None:
        return ccr.ZH.unknown_hash.format(hash=ccr.js_string(ask["hash"]))
    if range_of(hit) is None:
        return ccr.ZH.no_range
    start, end = range_of(hit)
    messages = berry.derive([e for e in events if start <= e["seq"] <= end])
    first = ask.get("fromMessage")
    first = first if isinstance(first, int) and not isinstance(first, bool) else 0
    return window(messages, first, ask.get("budget", RENDER_BUDGET), "zh", berry_text)


def berry_text(form, lang):
    return berry.render_form(form, lang, repair=False)


# -------------------------------------------------------------------------------------------- hash
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], "4f53cda18c2baa0c"),
        ({"b": 1, "a": 2}, "d3626ac30a87e6f7"),
        ({"a": 2, "b": 1}, "d3626ac30a87e6f7"),
        ({"9": 2, "a": 3, "10": 1}, "ac43de46bc6196a4"),  # 9, 10, a
        ([{"z": {"y": 1, "x": [3, {"b": 0, "a": 0}]}}], "9dbefb1abd35fa34"),
        ([1.0, 1e21, 1e-7, -0.0, 0.1, 123456789012345680000, 5e-324], "f2915000e8ec4ce1"),
        ({"\uff5e": 1, "\U0001f600": 2}, "c44a324298283d91"),  # ordered by UTF-16 unit: the emoji first
    ],
)
def test_hash_of_known_values(value, expected):
    assert ccr_hash(value) == expected


def test_hash_counts_seq_but_not_the_order_of_keys_nor_the_spelling():
    one = json.loads('[{"type":"user","seq":1,"content":"\\u00e9"}]')
    assert ccr_hash(json.loads('[{"content":"é","seq":1.0,"type":"user"}]')) == ccr_hash(one)
    assert ccr_hash([one[0] | {"seq": 2}]) != ccr_hash(one)


def test_hash_leaves_out_proto_as_assigning_it_makes_no_key_in_javascript():
    assert ccr_hash({"__proto__": {"x": 1}, "a": 1}) == ccr_hash({"a": 1})


@given(st.lists(st.dictionaries(st.text(max_size=3), st.text() | st.integers() | st.floats(allow_nan=False))))
def test_one_pass_entry_agrees_with_hash_and_lengths(forms):
    forms = [{k: v for k, v in form.items() if k != "__proto__"} for form in forms]
    chars = sum(utf16_length(stringify(form)) for form in forms)
    assert ccr_entry(iter(forms)) == CcrEntry(ccr_hash(forms), len(forms), chars)


# ---------------------------------------------------------------------------------- marker section
def test_marker_lines_in_both_languages():
    assert with_ccr_section("body", [ENTRY]) == f"body\n\n{EN_LINE}"
    assert with_ccr_section("body", [ENTRY], "zh") == f"body\n\n{ZH_LINE}"
    assert with_ccr_section("body", []) == "body"
    assert parse_ccr_section(f"body\n\n{EN_LINE}\n{ZH_LINE}\n") == [ENTRY, ENTRY]


def test_singular_is_parsed_too():
    line = "<<ccr:0123456789abcdef>> original archived (1 message / 1 character)"
    assert parse_ccr_section(line) == [CcrEntry("0123456789abcdef", 1, 1)]


@pytest.mark.parametrize(
    "text",
    [
        "no marker",
        f"{EN_LINE}\n\nthe body goes on",  # not at the end
        f"a list:\n{EN_LINE}",  # part of a paragraph
        f"  {EN_LINE}",
        "body\n\n<<CCR:0123456789abcdef>>",
        "",
    ],
)
def test_what_is_no_marker_section(text):
    assert strip_ccr_section(text) == text
    assert parse_ccr_section(text) == []


def test_only_the_last_block_is_the_section():
    body = f"quoting:\n\n{ZH_LINE}"
    text = with_ccr_section(body, [CcrEntry("f" * 16, 1, 2)])
    assert strip_ccr_section(text) == body
    assert [e.hash for e in parse_ccr_section(text)] == ["f" * 16]
    assert strip_ccr_section(text, repair=False) == "quoting:"


def test_a_malformed_line_in_the_block_is_stripped_but_names_nothing():
    text = f"body\n\n<<ccr:xyz>> whatever\n{EN_LINE}"
    assert strip_ccr_section(text) == "body"
    assert parse_ccr_section(text) == [ENTRY]


TEXTS = st.text() | st.lists(
    st.sampled_from(["a", "", " ", "\t", EN_LINE, ZH_LINE, "<<ccr:", "\r", "\u2028"])
).map("\n".join)
HASHES = st.text("0123456789abcdef", min_size=16, max_size=16)
ENTRIES = st.lists(st.builds(CcrEntry, HASHES, st.integers(0, 10**6), st.integers(0, 10**12)), min_size=1)


@given(TEXTS, ENTRIES, st.sampled_from(["en", "zh"]))
def test_stripping_undoes_adding_and_parsing_finds_what_was_added(body, entries, lang):
    text = with_ccr_section(body, entries, lang)
    assert strip_ccr_section(text) == body
    assert parse_ccr_section(text) == entries


def test_directory_text_and_languages():
    assert (
        directory_text([ENTRY]).splitlines()[1] == "<<ccr:0123456789abcdef>> 12 messages / 34567 characters"
    )
    assert "no archived segment" in directory_text([])
    with pytest.raises(UsageError, match="en"):
        directory_text([], "fr")


def test_directory_skips_surfaces_that_can_not_be_retrieved():
    data = {"ccrHash": "a", "occludedMessages": 1, "occludedChars": 2}
    broken = [data | {"ccrHash": None}, data | {"ccrHash": 5}, data | {"occludedChars": "2"}, None]
    events = [{"type": "compaction/surface", "data": d} for d in [*broken, data]]
    assert ccr_directory([*events, {"type": "compaction/end", "data": data}]) == [CcrEntry("a", 1, 2)]


# --------------------------------------------------------------------------------------- rendering
def test_rendered_messages_of_any_format():
    call = ToolCall("c1", "read", {"path": "a.py"})
    assert render_message(Message("user", (Text("one"), Image("image/png"), Text("two")))) == (
        "[user] one\n[image image/png]\ntwo"
    )
    assert render_message(Message("assistant", (Thinking("hm"), Text("t"), call))) == (
        '[assistant] [thinking] hm\nt\n  · tool call read(c1) arguments: {"path":"a.py"}'
    )
    assert render_message(Message("toolResult", (ToolResult("c1", ("x", "y"), 1, True, "read"),))) == (
        "[toolResult·error read] x\ny\n[image]"
    )
    shell = Message("bashExecution", (Shell("ls", "a", "exit 1"),))
    assert render_message(shell) == "[bashExecution] $ ls\na\nexit 1"


def test_a_user_message_may_carry_results_beside_its_text():
    message = Message("user", (ToolResult("1", ("r",)), ToolResult("2", ("s",)), Text("go on")))
    assert render_message(message, "zh") == "[toolResult ] r\n[toolResult ] s\n[user] go on"


def test_chinese_rendering_is_berrys():
    message = Message("assistant", (Text("答"), ToolCall("c1", "bash", '{"a":1}')))
    assert render_message(message, "zh") == '[assistant] 答\n  · 工具调用 bash(c1) 参数: {"a":1}'


def test_window_counts_utf16_units_and_says_how_to_go_on():
    messages = [Message("user", (Text("😀" * 10),)) for _ in range(3)]  # 7 + 20 units each
    assert window(messages, 0, 54, "zh").endswith("（已渲染 2/3 条——续取传 fromMessage=2 可取余下）")
    assert window(messages, 0, 53).endswith("(rendered 1/3 messages; the rest: --from-message 1)")
    assert window(messages, 2, 0).endswith("(rendered 3/3 messages, end of the segment)")
    assert window([], 0) == ccr.EN.no_messages
    assert window(messages, -5, 0) == window(messages, 0, 0)
    assert window(messages, 99, 0) == window(messages, 2, 0)


@given(st.lists(st.text(max_size=30), min_size=1, max_size=20), st.integers(0, 100))
def test_windows_show_every_message_exactly_once(texts, budget):
    messages = [Message("user", (Text(f"{i}:{text}"),)) for i, text in enumerate(texts)]
    shown, at = [], 0
    while at < len(messages):
        *rendered, tail = cut(messages, at, budget)
        shown += rendered
        at += len(rendered)
        assert f"{at}/{len(messages)}" in tail
    assert shown == [render_message(m) for m in messages]


def cut(messages, at, budget):
    """A window's messages and its last line, found without splitting at blank lines of the messages."""
    text, found = window(messages, at, budget), []
    while not text.startswith("(rendered "):
        line = render_message(messages[at + len(found)])
        assert text.startswith(f"{line}\n\n")
        found.append(line)
        text = text[len(line) + 2 :]
    return [*found, text]
