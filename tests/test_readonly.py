"""The formats that are only read: found by their content, planned, explained, and never written."""

import json

import pytest
from conftest import CORPUS, ROOT, transcripts

from haocompact.compaction import COMPACTION_SUMMARY, CompactionSettings, Image, Text, ToolCall, ToolResult
from haocompact.errors import TranscriptError
from haocompact.files import Source, open_source
from haocompact.formats import FORMATS, READ_ONLY, WRITABLE, detect
from haocompact.formats.session import ReadOptions
from haocompact.pipeline import Request, compact, compact_in_place, explain, figures, plan
from haocompact.records import Cut, read, write

FOLDERS = {"claude-code": "claude", "openai-chat": "openai-requests"}  # of the corpus, where the name differs
ODD = {
    "openai-ci-2025-08-06-oldformat.jsonl"
}  # bare items below a header: undecided, and refused for writing
FILES = {n: p for n, p in transcripts(ROOT / "samples", CORPUS).items() if p.name not in ODD}
FOLDER = {name: FOLDERS.get(path.parent.name, path.parent.name) for name, path in FILES.items()}
READ = {name: path for name, path in FILES.items() if FOLDER[name] in READ_ONLY}


def session_of(path, **options):
    records = read(path.read_bytes())
    return FORMATS[detect(records).name].read(records, ReadOptions(**options))


def made(text, name, **options):
    return FORMATS[name].read(read(text.encode()), ReadOptions(**options))


def said(session):
    return [(m.role, m.text) for m in session.messages]


# ------------------------------------------------------------------------------------- detection
@pytest.mark.parametrize("name", FILES)
def test_every_file_is_what_its_folder_says(name):
    with open_source(str(FILES[name])) as source:
        found = detect(source.records)
    assert (found.name, found.others) == (FOLDER[name], ())


NEAR = {  # what looks like one format and is another, or none
    '{"messages":[{"role":"user","content":"a"}]}': "openai-requests",
    '{"messages":[{"role":"user","content":"a"}],"trajectory_format":"mini-swe-agent-1"}': "mini-swe-agent",
    '{\n"messages": [{"role":"user","content":"a"}],\n"info": {"mini_version": "1.0.0"}\n}': "mini-swe-agent",
    '{\n"messages": [{"role":"user","content":"a"}]\n}': None,
    '[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]': "mini-swe-agent",
    '[\n{"role":"user","content":"a"},\n{"role":"assistant","content":"b"}\n]': "mini-swe-agent",
    '[{"conversations":[{"from":"human","value":"a"}]}]': "sharegpt",
    '{"conversations":[{"role":"user","content":"a"}]}': None,
    '{"conversations":[]}': None,
    '{"history":[{"role":"user","content":"a"}]}': None,
    '{"trajectory":[],"history":[{"role":"user","content":"a"}]}': "swe-agent",
    '{"schema_version":"1.0","steps":[]}': None,
    '{"schema_version":"ATIF-v1.0","steps":[{"step_id":1,"source":"user","message":"a"}]}': "atif",
    '{"id":"1","source":"agent","kind":"lamp"}': None,
    '{"id":"1","source":"agent","kind":"ActionEvent"}': "openhands",
    '{"sessionId":"a","projectHash":"b"}\n{"id":"1","timestamp":"t","type":"user","content":"a"}': "gemini",
    '{"name":"haocompact","version":"1.0.0","messages":{"a":1}}': None,
    "[1, 2]": None,
    '[{"a": 1}]': None,
    '[\n"open bracket of nothing",\n': None,
}


@pytest.mark.parametrize("text", NEAR)
def test_near_misses(text):
    try:
        found = detect(read(text.encode())).name
    except TranscriptError:
        found = None
    assert found == NEAR[text]


def test_a_torn_first_line_makes_no_document_of_a_log():
    log = b'{"role":"us\n{"role":"tool","tool_call_id":"1","content":"a"}\n{"role":"user","content":"b"}\n'
    assert read(log).document is None


@pytest.mark.parametrize("count", [150, 1000])
@pytest.mark.parametrize(
    "name", [n for n, p in FILES.items() if p.suffix == ".jsonl" and "samples" in str(p)]
)
def test_a_head_of_other_lines_hides_no_session(name, count):
    head = b"".join(b'{"note": %d}\n' % i for i in range(count))
    assert detect(read(head + FILES[name].read_bytes())).name == FOLDER[name]


# --------------------------------------------------------------------------------------- reading
@pytest.mark.parametrize("name", READ)
def test_records_of_a_document_are_its_bytes(name):
    session = session_of(READ[name])
    assert write(session.records) == READ[name].read_bytes()
    if isinstance(session.records, Cut):
        lines = READ[name].read_bytes().split(b"\n")
        for message in session.messages:
            record = session.records[message.line - 1]
            first = record.raw.split(b"\n")[0]
            assert first in lines[session.records.line(message.line) - 1]
            json.loads(record.raw)


@pytest.mark.parametrize("form", READ_ONLY)
def test_the_samples_have_every_kind_and_no_other(form):
    adapter, found = FORMATS[form], set()
    for name, path in READ.items():
        if FOLDER[name] == form and path.parent.parent.name == "samples":
            session = session_of(path)
            assert not session.unknown
            found |= kinds_in(path)
    assert set(adapter.KINDS) <= found


def kinds_in(path):
    """Every value of the field that names a kind, anywhere in a file, and the kinds of records without one."""

    def walk(value):
        if isinstance(value, dict):
            yield from (
                v for k in ("role", "source", "from", "kind", "type") if isinstance(v := value.get(k), str)
            )
            yield from (k for k in ("$set", "$rewindTo") if k in value)
            yield from (["session"] if "projectHash" in value else [])
            yield from (["header"] if "__header__" in value else [])
            value = list(value.values())
        for item in value if isinstance(value, list) else ():
            yield from walk(item)

    whole = read(path.read_bytes())
    return set(walk(whole.document if whole.document is not None else [r.dict for r in whole]))


@pytest.mark.parametrize("name", READ)
def test_calls_and_results_find_each_other(name):
    """Each result with an id has a call before it, but where the file itself lost the call."""
    lost = {"chatcmpl-tool-9051d3d10f914188"}
    calls, results = set(), set()
    for message in session_of(READ[name]).messages:
        calls |= {p.id for p in message.parts if isinstance(p, ToolCall)}
        results |= {p.id for p in message.parts if isinstance(p, ToolResult) and p.id}
    assert results - calls <= lost


def test_all_samples_of_one_conversation_say_the_same():
    """The ferry, in every format: the same texts, calls and results."""
    names = ("swe-agent/parallel-tools.traj", "mini-swe-agent/parallel-tools.traj.json", "atif/parallel-tools.json",
             "openhands/parallel-tools.jsonl", "gemini/parallel-and-rewind.jsonl")  # fmt: skip
    found = [facts(session_of(ROOT / "samples" / name)) for name in names]
    assert all(one == found[0] for one in found)
    assert len(found[0][1]) == 7


def facts(session):
    parts = [p for m in session.messages for p in m.parts]
    return ([p.text for p in parts if isinstance(p, Text)],
            [(p.id, p.name, p.arguments) for p in parts if isinstance(p, ToolCall)],
            [(p.id, p.texts) for p in parts if isinstance(p, ToolResult)])  # fmt: skip


def test_several_conversations_in_one_document_are_chosen_by_name_or_number():
    path = ROOT / "samples/atif/several.json"
    names = [name for _, name in session_of(path).leaves]
    assert names == ["ferry-2", "library-1"]
    assert session_of(path).session_id == "library-1"
    assert session_of(path, leaf="ferry-2").session_id == session_of(path, leaf="1").session_id == "ferry-2"
    with pytest.raises(TranscriptError, match="no conversation 3"):
        session_of(path, leaf="3")


def test_openhands_forgets_what_a_condensation_names():
    session = session_of(ROOT / "samples/openhands/native-compaction.jsonl")
    first, second = session.messages[:2]
    assert first.kind == COMPACTION_SUMMARY
    assert first.text.startswith("USER_CONTEXT")
    assert second.text.startswith("Yes, the harbour never changes")
    assert [m.text for m in session.system] == ["You keep the timetable of a small ferry. Use the tools; "
                                                "ask before you publish anything."]  # fmt: skip


def test_an_openhands_summary_behind_the_first_messages_is_a_message_there():
    events = [{"id": str(i), "source": "user", "kind": "MessageEvent",
               "llm_message": {"role": "user", "content": [{"type": "text", "text": f"m{i}"}]}}
              for i in range(5)]  # fmt: skip
    events.append({"id": "c", "source": "environment", "kind": "Condensation", "forgotten_event_ids": ["1", "2"],
                   "summary": "S", "summary_offset": 1})  # fmt: skip
    session = made("\n".join(map(json.dumps, events)), "openhands")
    assert [m.text for m in session.messages] == ["m0", "S", "m3", "m4"]
    assert all(not m.kind for m in session.messages)


def test_gemini_reads_updates_rewinds_and_replaced_histories():
    rewound = session_of(ROOT / "samples/gemini/parallel-and-rewind.jsonl")
    assert "Publish it now." not in [text for _, text in said(rewound)]
    ids = [p.id for m in rewound.messages for p in m.parts if isinstance(p, ToolCall)]
    assert len(ids) == len(set(ids)) == 7
    replaced = session_of(ROOT / "samples/gemini/native-compaction.jsonl")
    assert replaced.messages[0].kind == COMPACTION_SUMMARY
    assert replaced.messages[1].text == "Got it. Thanks for the additional context!"


def test_images_are_counted():
    block = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}],
    }
    swe = made(json.dumps({"trajectory": [], "history": [block]}), "swe-agent")
    assert [type(p) for p in swe.messages[0].parts] == [Text, Image]
    part = {
        "id": "1",
        "timestamp": "t",
        "type": "user",
        "content": [{"inlineData": {"mimeType": "image/png", "data": "AA"}}],
    }
    assert [type(p) for p in made(json.dumps(part), "gemini").messages[0].parts] == [Image]


ODD_VALUES = [None, 7, "x", [], {}, [None], [7], {"a": None}, True]


@pytest.mark.parametrize("form", READ_ONLY)
def test_odd_values_in_odd_places_are_no_crash(form):
    path = next(p for n, p in READ.items() if FOLDER[n] == form and p.parent.parent.name == "samples")
    records = read(path.read_bytes())
    whole = records.document is not None
    document = records.document if whole else [r.dict for r in records]
    for odd in ODD_VALUES:
        for changed in with_odd(document, odd, depth=4):
            lines = changed if isinstance(changed, list) else [changed]
            text = json.dumps(changed) if whole else "\n".join(map(json.dumps, lines))
            try:
                session = made(text, form)
            except TranscriptError:
                continue
            assert all(isinstance(m.parts, tuple) for m in session.messages)


def with_odd(value, odd, depth):
    """The document with one value replaced, in the first and the last element of each list."""
    yield odd
    if depth and isinstance(value, dict):
        for key in value:
            yield from ({**value, key: v} for v in with_odd(value[key], odd, depth - 1))
    elif depth and isinstance(value, list):
        for index in {0, len(value) - 1} if value else ():
            yield from (
                [*value[:index], v, *value[index + 1 :]] for v in with_odd(value[index], odd, depth - 1)
            )


# --------------------------------------------------------------------------------------- commands
@pytest.mark.parametrize("name", READ)
def test_plan_and_diag_work_and_compact_refuses_with_the_hint(name, tmp_path):
    data = READ[name].read_bytes()
    lines = data.count(b"\n") + 1
    for keep in (400, 20000):
        request = Request(CompactionSettings(keep_recent_tokens=keep), archive=tmp_path / "archive.db")
        for part in parts_of(Source(str(READ[name]), data), request):
            planned = plan(part, request)
            told = figures(planned)
            assert told["first_kept_line"] is None or 1 <= told["first_kept_line"] <= lines
            assert explain(planned).outcome is planned.outcome
            with pytest.raises(TranscriptError, match="only read; --to openai"):
                compact(part, request)
    copy = tmp_path / READ[name].name
    copy.write_bytes(data)
    with pytest.raises(Exception, match=r"only read|conversation of its own") as refused:
        compact_in_place(str(copy), request)
    assert refused.value.exit_code in (2, 4)
    assert copy.read_bytes() == data
    assert not (tmp_path / "archive.db").exists()


def parts_of(source, request):
    from haocompact.pipeline import conversations

    return conversations(source, request)


def test_first_kept_line_is_a_physical_line():
    source = Source("s", (ROOT / "samples/atif/parallel-tools.json").read_bytes())
    planned = plan(source, Request(CompactionSettings(keep_recent_tokens=400)))
    line = source.data.split(b"\n")[figures(planned)["first_kept_line"] - 1]
    assert line.strip() == b"{"
    text = json.dumps(planned.outcome.retained_tail[0].text)[1:-1]
    after = source.data.split(b"\n", figures(planned)["first_kept_line"])[-1]
    assert text.encode() in after[:400]


def test_a_format_is_written_or_only_read():
    assert set(WRITABLE) | set(READ_ONLY) == set(FORMATS)
    assert all(not hasattr(adapter, "rebuild") for adapter in READ_ONLY.values())
