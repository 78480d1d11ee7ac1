"""Raw lines and records: nothing is lost, nothing is split wrongly, odd JSON has a defined answer."""

import json
import os
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haocompact.errors import SourceChanged
from haocompact.records import (
    BOM,
    FileBytes,
    Record,
    Records,
    chunks_of,
    dump,
    elements,
    members,
    read,
    splice,
    value_span,
    write,
)

LINE_ENDS = st.sampled_from(
    [b"\n", b"\r\n", b"\r", b"\0", BOM, "\u2028".encode(), b"{", b"}", b'"', b"\\", b"\xff", b"{}"]
)
ANY_BYTES = st.one_of(
    st.binary(), st.lists(st.one_of(LINE_ENDS, st.binary(max_size=3)), max_size=30).map(b"".join)
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
SPACES = st.sampled_from(["", " ", "\t", " \r\n"])


def objects_of(data):
    return [r.obj for r in read(data)]


# ---------------------------------------------------------------------------------------- bytes
@given(ANY_BYTES)
def test_written_is_what_was_read(data):
    assert write(read(data)) == data


@given(ANY_BYTES)
def test_lines_end_at_line_feeds_only(data):
    lines = [r.raw for r in read(data)]
    assert b"".join(lines) == data
    assert all(line.index(b"\n") == len(line) - 1 for line in lines[:-1])
    assert len(lines) == data.count(b"\n") + (not data.endswith(b"\n") and data != b"")


@given(st.lists(st.binary(max_size=9).filter(lambda b: b"\n" not in b), min_size=1, max_size=9))
def test_any_line_is_read_without_an_exception(lines):
    for record in read(b"\n".join(lines)):
        assert record.obj is None or record.fault is None
        assert record.blank == (
            not record.raw.strip(b" \t\r\n")
            .removeprefix(BOM if record.number == 1 else b"")
            .strip(b" \t\r\n")
        )


def test_record_numbers_and_slices():
    records = read(b'{"a":1}\n\n{"a":3}')
    assert [r.number for r in records] == [1, 2, 3]
    assert [r.raw for r in records[1:]] == [b"\n", b'{"a":3}']
    assert records[-1].obj == {"a": 3}
    assert records[1].blank
    assert records[1].obj is None
    with pytest.raises(IndexError):
        records[3]


@pytest.mark.parametrize("text", ["\u2028", "\u2029", "\x85", "\v", "\f", "\x1c", "\r"])
def test_other_separators_are_text(text):
    line = json.dumps({"a": f"x{text}y"}, ensure_ascii=text == "\r" or ord(text) < 32).encode()
    (record,) = read(line + b"\n")
    assert record.obj == {"a": f"x{text}y"}
    assert record.fault is None


def test_byte_order_mark_is_read_past_on_the_first_line_only():
    first, second = read(BOM + b'{"a":1}\n' + BOM + b'{"a":2}\n')
    assert first.obj == {"a": 1}
    assert first.raw == BOM + b'{"a":1}\n'
    assert second.obj is None
    assert second.fault.startswith("not JSON")


@pytest.mark.parametrize(
    ("data", "end"), [(b"{}\r\n{}\r\n", b"\r\n"), (b"{}\n{}\r\n", b"\n"), (b"{}", b"\n"), (b"", b"\n")]
)
def test_new_lines_end_as_the_file_does(data, end):
    assert read(data).newline == end
    assert objects_of(data) == [{}] * data.count(b"{}")


# ------------------------------------------------------------------------------------- odd JSON
@pytest.mark.parametrize(
    ("line", "obj", "note"),
    [
        (b'{"a":"\\ud83d"}', {"a": "\ud83d"}, "lone surrogate"),
        (b'{"\\udc00":1}', {"\udc00": 1}, "lone surrogate"),
        (b'{"a":1e400}', {"a": float("inf")}, None),
        (b'{"a":"x\xffy"}', {"a": "x\ufffdy"}, "invalid UTF-8, read with replacement characters"),
        (b'\0\0{"a":1}\0', {"a": 1}, "NUL bytes around the record"),
        (b'{"a":1,"a":2}', {"a": 2}, None),
        (b"  [1]  ", [1], None),
        (b"7", 7, None),
        (b"null", None, None),
    ],
)
def test_unusual_json_is_read(line, obj, note):
    record = Record(2, line)
    assert record.obj == obj
    assert (record.note, record.fault) == (note, None)
    assert record.raw == line


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"a":NaN}', "not JSON (NaN is not JSON)"),
        (b"-Infinity", "not JSON (-Infinity is not JSON)"),
        (b'{"a":', "not JSON (unexpected end of data)"),
        (b'{"a":1}{"a":2}', "not JSON (unexpected content after document)"),
        (b"\0" * 5000, "NUL bytes"),
        (b"\xff\xfe\xfd", "invalid UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b"{'a':1}", None),
    ],
)
def test_what_is_no_json_is_opaque(line, fault):
    record = Record(2, line)
    assert record.obj is None
    assert record.dict == {}
    assert record.exact() is None
    assert record.fault == fault or (fault is None and record.fault.startswith("not JSON ("))
    assert write(read(line)) == line


@pytest.mark.parametrize("number", [2**63 - 1, 2**64, -(2**63) - 1, 9007199254740993123, 10**40])
def test_integers_of_any_size(number):
    record = Record(1, b'{"n":%d}' % number)
    assert record.exact() == {"n": number}
    assert record.obj["n"] == pytest.approx(number)


def test_exact_reads_what_obj_reads():
    record = Record(1, b'\0{"n":18446744073709551617,"t":"\\ud83d"}')
    assert record.exact() == {"n": 2**64 + 1, "t": "\ud83d"}
    assert Record(1, b"{").exact() is None


@pytest.mark.parametrize("value", [7, "x", [], None])
def test_dict_of_another_value_is_empty(value):
    assert Record(1, json.dumps(value).encode()).dict == {}


# -------------------------------------------------------------------------------------- writing
@given(VALUES)
def test_dump_is_one_line_of_utf8_json(value):
    line = dump(value)
    assert not any(c in line.decode() for c in "\n\u2028\u2029")
    assert json.loads(line) == value


def test_dump_replaces_lone_surrogates():
    assert dump({"a": "x\ud800y\u2028"}) == '{"a":"x\ufffdy\\u2028"}'.encode()


# ------------------------------------------------------------------ splice, members, elements
@st.composite
def loose_objects(draw):
    """An object as text, with white space wherever JSON allows it, escapes and repeated keys."""
    pairs = draw(st.lists(st.tuples(st.text(max_size=4), VALUES), max_size=5))
    space = [draw(SPACES) for _ in range(4)]
    ascii = draw(st.booleans())
    texts = (
        f"{space[0]}{json.dumps(k, ensure_ascii=ascii)}{space[1]}:{space[2]}{loosely(v, space[3], ascii)}"
        for k, v in pairs
    )
    return pairs, (space[2] + "{" + f"{space[3]},".join(texts) + space[1] + "}" + space[0]).encode()


def loosely(value, space, ascii):
    return json.dumps(value, ensure_ascii=ascii, indent=1 if space else None)


@given(loose_objects())
def test_members_are_the_pairs_of_the_object(case):
    pairs, raw = case
    assert [(k, json.loads(raw[a:b])) for k, a, b in members(raw)] == pairs
    for _, a, b in members(raw):
        assert raw[a:b] == raw[a:b].strip()


@given(loose_objects(), VALUES, st.data())
def test_splice_changes_one_value_and_no_other_byte(case, value, data):
    pairs, raw = case
    key = data.draw(st.sampled_from([k for k, _ in pairs]) if pairs else st.just("a"))
    new = json.dumps(value).encode()
    spliced = splice(raw, (key,), new)
    if not pairs:
        assert spliced == raw
        return
    assert json.loads(spliced) == {**dict(pairs), key: value}
    start, end = value_span(raw, (key,))
    assert spliced == raw[:start] + new + raw[end:]
    assert value_span(raw, (key,)) == [(a, b) for k, a, b in members(raw) if k == key][-1]


@given(loose_objects(), VALUES)
def test_splice_reaches_into_objects(case, value):
    _, inner = case
    raw = b'{"z": [{"b":0}], "a" :' + inner + b' , "b":"}"}'
    wanted = json.loads(raw)
    for key in wanted["a"]:
        wanted["a"][key] = value
        raw = splice(raw, ("a", key), json.dumps(value).encode())
    assert json.loads(raw) == wanted
    assert raw.startswith(b'{"z": [{"b":0}], "a" :')
    assert raw.endswith(b' , "b":"}"}')


@given(loose_objects())
def test_splicing_the_same_value_is_nothing(case):
    _, raw = case
    for key, a, b in members(raw):
        if value_span(raw, (key,)) == (a, b):
            assert splice(raw, (key,), raw[a:b]) == raw


@given(st.lists(VALUES, max_size=6), SPACES)
def test_elements_are_the_values_of_the_array(values, space):
    array = f"{space}[{space}{f'{space},{space}'.join(map(json.dumps, values))}{space}]{space}".encode()
    raw = b'{"a":' + array + b"}"
    start, end = value_span(raw, ("a",)) if not space else (5, 5 + len(array))
    assert [json.loads(raw[a:b]) for a, b in elements(raw, start, end)] == values


def test_splice_worked_example():
    assert splice(b'{"a": {"b":1}}', ("a", "b"), b"2") == b'{"a": {"b":2}}'
    assert splice(b'{"a": {"b":1}}', ("a", "c"), b"2") == b'{"a": {"b":1}}'
    assert splice(b'{"a": [{"b":1}]}', ("a", "b"), b"2") == b'{"a": [{"b":1}]}'
    assert splice(b'{"a\\u0062": 1}\r\n', ("ab",), b"2") == b'{"a\\u0062": 2}\r\n'
    assert splice(BOM + b'{"a": "}\\"{"}', ("a",), b"0") == BOM + b'{"a": 0}'


# ----------------------------------------------------------------------------------- FileBytes
@pytest.fixture
def small_window(monkeypatch):
    monkeypatch.setattr(FileBytes, "WINDOW", 7)


@given(ANY_BYTES, st.lists(st.slices(40), max_size=8))
def test_file_bytes_are_the_bytes(data, spans):
    for window in (1, 7, 1 << 20):
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            held = FileBytes(file.fileno(), len(data))
            held.WINDOW = window
            assert len(held) == len(data)
            for span in spans:
                plain = slice(span.start, span.stop)
                assert held[plain] == data[plain]
            assert b"".join(chunks_of(held)) == data
            assert [r.raw for r in Records(held)] == [r.raw for r in Records(data)]


def test_a_file_that_shrinks_meanwhile_is_an_error(tmp_path, small_window):
    path = tmp_path / "s"
    path.write_bytes(b"0123456789" * 3)
    with path.open("rb") as file:
        held = FileBytes(file.fileno(), 30)
        assert held[0:3] == b"012"
        os.truncate(path, 12)
        with pytest.raises(SourceChanged):
            held[20:25]
