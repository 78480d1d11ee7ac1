"""The laws of the design, over every format and every transcript at hand, with checkers of their own."""

import hashlib
import itertools
import json

import pytest
from conftest import CORPUS, ROOT, transcripts

from haocompact.cli import main
from haocompact.compaction import (
    COMPACTION_SUMMARY,
    ESTIMATORS,
    CompactionPreparation,
    CompactionSettings,
    NoCompaction,
    ToolCall,
    ToolResult,
)
from haocompact.errors import HaoError, TranscriptError
from haocompact.files import Source, open_source
from haocompact.formats import FORMATS, WRITABLE, detect
from haocompact.formats.session import ReadOptions, list_summary
from haocompact.pipeline import (
    Compacted,
    Request,
    Skipped,
    compact,
    compact_to,
    directory,
    explain,
    plan,
    raw_segment,
    restore,
    segment_messages,
    store,
)
from haocompact.records import FileBytes, read, write

FILES = transcripts(ROOT / "samples", ROOT / "tests" / "cases", CORPUS)
APPENDED = ("berry",)  # formats whose compaction is appended
SETTINGS = tuple(itertools.product((400, 2000, 20000), ("chars", "cjk")))
EDITED = {  # what each client forces to change in a kept line
    "pi": [("parentId",)],
    "claude": [
        ("parentUuid",),
        ("timestamp",),
        *(
            ("message", "usage", k)
            for k in (
                "input_tokens",
                "cache_creation_input_tokens",
                "cache_read_input_tokens",
                "output_tokens",
            )
        ),
    ],
    "codex": [("ordinal",), ("payload", "id"), ("payload", "session_id"), ("payload", "history_base")],
}
NEW_LINES = {"claude": 2, "codex": 2}


def format_of(path):
    try:
        with open_source(str(path)) as source:
            return detect(read(source.data)).name
    except TranscriptError:
        return None


DETECTED = {name: format_of(path) for name, path in FILES.items()}
KNOWN = {name: path for name, path in FILES.items() if DETECTED[name] in WRITABLE}
UNKNOWN = {name: path for name, path in FILES.items() if DETECTED[name] is None}


class Run:
    """One file under one setting: read, planned, compacted, archived, read back."""

    def __init__(self, path, keep, estimator, folder):
        self.settings = CompactionSettings(keep_recent_tokens=keep, estimator=ESTIMATORS[estimator])
        self.request = Request(self.settings, archive=folder / "archive.db", log=folder / "log")
        self.other = Request(self.settings, archive=folder / "another.db")
        self.planned = self.result = self.refused = None
        with open_source(str(path)) as source:
            self.data = source.data[:]
        self.source = Source(str(folder / "s.jsonl"), self.data)
        try:
            self.planned = plan(self.source, self.request)
            self.result = compact(self.source, self.request)
        except TranscriptError as error:
            self.refused = error
            return
        if isinstance(self.result, Skipped):
            self.result = self.result.skip
        if isinstance(self.result, Compacted):
            self.segment = store(self.result)
            self.lines = pieces_of(self.format, self.data)
            self.gone = list(self.result.gone)
            self.output = Source(str(folder / "o.jsonl"), self.result.output)

    @property
    def format(self):
        return self.planned.session.format

    @property
    def plan(self):
        return self.result.plan


def pieces_of(format, data):
    """Lines; of a request the text before its messages, each message with what follows it, and the rest."""
    if not format.endswith("requests"):
        return lines_of(data)
    text, decoder = data.decode(), json.JSONDecoder()
    key = next(k for k in ('"messages":', '"input":') if k in text)
    starts, at = [], text.index("[", text.index(key)) + 1
    while text[at:].lstrip(" ,\n")[0] == "{":
        at = text.index("{", at)
        starts.append(at)
        at = decoder.raw_decode(text, at)[1]
    edges = [0, *starts, at, len(text)]
    return [text[a:b].encode() for a, b in itertools.pairwise(edges)]


def lines_of(data):
    return [line + b"\n" for line in data.split(b"\n")[:-1]] + (
        [data[data.rfind(b"\n") + 1 :]] if data[-1:] != b"\n" else []
    )


@pytest.fixture(scope="module", params=KNOWN)
def runs(request, tmp_path_factory):
    """All settings over one file."""
    folder = tmp_path_factory.mktemp("laws")
    return [Run(KNOWN[request.param], *setting, made(folder / str(i))) for i, setting in enumerate(SETTINGS)]


def made(folder):
    folder.mkdir()
    return folder


@pytest.fixture
def compacted(runs):
    return [r for r in runs if isinstance(r.result, Compacted)]


def test_there_is_something_to_test():
    formats = {detect(read(path.read_bytes())).name for path in KNOWN.values()}
    assert formats == set(WRITABLE)


# ---------------------------------------------------------------------------------------- 1, 2, 3
@pytest.mark.parametrize("name", FILES)
def test_law_1_reading_and_writing_changes_nothing(name):
    data = FILES[name].read_bytes()
    assert write(read(data)) == data
    with FILES[name].open("rb") as file:
        assert write(read(FileBytes(file.fileno(), len(data)))) == data


def test_law_2_kept_and_removed_are_all_records_in_order(compacted):
    for run in compacted:
        hidden_only = run.format in APPENDED  # nothing leaves the file
        kept = sorted(set(range(len(run.lines))) - (set() if hidden_only else set(run.gone)))
        if hidden_only and not run.lines[-1].endswith(b"\n") and json_of(run.lines[-1]) is None:
            kept.pop()  # a torn last line
        written = iter(pieces_of(run.format, run.result.output))
        new = 0
        for index in kept:
            for line in written:
                if same_record(run.format, run.lines[index], line):
                    break
                new += 1
            else:
                pytest.fail(f"line {index + 1} is neither kept nor archived")
        most = NEW_LINES.get(run.format, 1) if not hidden_only else 3 + len(run.plan.removed)
        assert new + len(list(written)) <= most
        assert run.gone == sorted(set(run.gone))


def same_record(format, old, new):
    """Equal bytes but for an added line end; or equal outside the fields that the client forces to change."""
    if new.rstrip(b"\r\n") == old.rstrip(b"\r\n"):
        return new.startswith(old)
    if format not in EDITED:
        return False
    old, new = (json_of(line) for line in (old, new))
    if not isinstance(old, dict) or not isinstance(new, dict):
        return False
    for path in EDITED[format]:
        for obj in (old, new):
            for key in path[:-1]:
                obj = obj.get(key) if isinstance(obj, dict) else None
            if isinstance(obj, dict):
                obj.pop(path[-1], None)
    return old == new


def json_of(line):
    try:
        return json.loads(
            line.strip(b"\0\r\n\t ").removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
        )
    except (ValueError, RecursionError):
        return None


def test_law_3_a_plan_parts_nothing_that_belongs_together(runs):
    for run in runs:
        if run.planned is None or not isinstance(run.planned.outcome, CompactionPreparation):
            continue
        messages = run.planned.session.messages
        first = next(i for i, m in enumerate(messages) if m is run.planned.outcome.retained_tail[0])
        assert parted_pairs(messages, first) == []
        assert groups(messages[:first]) & groups(messages[first:]) == set()
        if run.format == "claude":
            assert responses(run, messages[:first]) & responses(run, messages[first:]) == set()


def parted_pairs(messages, first):
    """(call, result) on either side of `first`; a result answers the last call of its id before it."""
    calls, found = {}, []
    for index, message in enumerate(messages):
        for part in message.parts:
            if isinstance(part, ToolCall) and message.role == "assistant" and part.id is not None:
                calls[part.id] = index
            elif isinstance(part, ToolResult) and part.id in calls and calls[part.id] < first <= index:
                found.append((calls[part.id], index))
    return found


def groups(messages):
    return {m.group for m in messages if m.group is not None}


def responses(run, messages):
    records = read(run.data)
    objects = (records[m.line - 1].dict for m in messages if m.role == "assistant")
    return {id for o in objects if (id := o["message"].get("id"))}


def test_a_plan_partitions_the_messages(compacted):
    for run in compacted:
        messages = run.result.planned.session.messages
        start = int(messages[0].kind == COMPACTION_SUMMARY)
        parts = (run.plan.messages_to_summarize, run.plan.turn_prefix_messages, run.plan.retained_tail)
        assert [id(m) for part in parts for m in part] == [id(m) for m in messages[start:]]
        assert run.plan.retained_tail
        assert bool(run.plan.turn_prefix_messages) == run.plan.is_split_turn


def test_a_compaction_always_makes_the_conversation_smaller(compacted):
    for run in compacted:
        again = FORMATS[run.format].read(read(run.result.output), ReadOptions()).messages
        before, after = (
            sum(m.tokens(run.settings.estimator) for m in ms)
            for ms in (run.result.planned.session.messages, again)
        )
        assert after < before


# ------------------------------------------------------------------------------------------- 4
def test_law_4_retrieve_gives_exactly_what_was_removed(compacted):
    for run in compacted:
        raw = b"".join(raw_segment(run.segment.hash, run.request))
        assert raw == b"".join(run.lines[i] for i in run.gone)
        assert hashlib.sha256(raw).hexdigest() == run.segment.sha256
        listed = directory(run.output, run.request)
        assert listed.segments[-1] == run.segment
        told = [m for m in (*run.plan.messages_to_summarize, *run.plan.turn_prefix_messages) if m.told]
        found = segment_messages(run.segment.hash, run.request)
        assert len(found) == run.segment.messages == len(told) or run.format in ("codex", "berry")


def test_law_4_restore_gives_the_original(compacted):
    for run in compacted:
        assert b"".join(restore(run.output, run.request)) == run.data
        assert b"".join(restore(run.output, run.request, run.segment.hash)) == run.data


# ---------------------------------------------------------------------------------- 5, 6, 7, 8
def test_law_5_the_output_is_a_session_of_the_same_client(compacted):
    for run in compacted:
        records = read(run.result.output)
        assert detect(records).name == run.format
        session = FORMATS[run.format].read(records, ReadOptions())
        summary, *rest = session.messages
        assert summary.kind == COMPACTION_SUMMARY
        assert f"<<ccr:{run.segment.hash}>>" in summary.text
        assert signatures(rest) == signatures(run.plan.retained_tail)


def signatures(messages):
    return [(m.role, m.parts) for m in messages if m.told]


def test_law_6_the_output_again_is_a_no_op(compacted, tmp_path):
    for number, run in enumerate(compacted):
        target = tmp_path / f"{number}.jsonl"
        done = compact_to(run.output, run.request, target)
        assert done.skip is not None
        assert target.read_bytes() == run.result.output
        assert run.request.log.read_text().count("[COMPACT_NONE]") == 1


def test_law_7_plan_diag_and_compact_agree(runs):
    for run in runs:
        if run.planned is None or run.refused is not None:  # a mixed file is planned, but not written
            continue
        planned, told = run.planned.outcome, explain(run.planned).outcome
        assert told is planned
        if isinstance(planned, NoCompaction):
            assert (run.result.branch, run.result.sub, run.result.figures) == (
                planned.branch,
                planned.sub,
                planned.figures,
            )
        elif isinstance(run.result, NoCompaction):
            assert run.result.branch == "no_gain"
        else:
            assert lines_and_figures(run.plan) == lines_and_figures(planned)


def lines_and_figures(p):
    parts = (p.messages_to_summarize, p.turn_prefix_messages, p.retained_tail)
    return [[m.line for m in part] for part in parts], p.cut, p.estimate, p.file_ops, p.previous_summary


def test_law_8_same_input_same_output(compacted):
    for run in compacted:
        again = compact(Source("-", run.data), run.other)
        assert again.output == run.result.output
        segment = store(again)
        assert (segment.hash, segment.sha256) == (run.segment.hash, run.segment.sha256)


# --------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_formats_are_refused(name, monkeypatch, capsys):
    data = UNKNOWN[name].read_bytes()
    for command in ("plan", "compact", "diag", "retrieve"):
        assert code_of(monkeypatch, command, str(UNKNOWN[name])) == 4
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("haocompact: ")
        assert err.count("\n") == 1
    assert UNKNOWN[name].read_bytes() == data


def code_of(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["haocompact", *words])
    with pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code


def test_refusals_say_what_to_do(runs):
    for run in runs:
        if run.refused is not None:
            assert isinstance(run.refused, HaoError)
            assert str(run.refused).startswith(run.source.path)


# ------------------------------------------------------------------------------------- growing
GROWING = {
    n: p
    for n, p in KNOWN.items()
    if detect(read(p.read_bytes())).name in ("pi", "openai", "anthropic", "haocode")
}


def test_a_pasted_summary_is_a_message_like_any_other(tmp_path):
    """A user may quote what a compaction wrote; it stays where it is."""
    line = json.dumps({"role": "user", "content": list_summary("## Goal\nWater the beans.", 3)})
    turns = [
        json.dumps({"role": role, "content": f"{role} {i} " + "bean " * 400})
        for i in range(6)
        for role in ("user", "assistant")
    ]
    data = "\n".join([*turns, line, *turns[:2], ""]).encode()
    settings = CompactionSettings(keep_recent_tokens=1200, estimator=ESTIMATORS["chars"])
    result = compact(Source("-", data), Request(settings))
    session = FORMATS["openai"].read(read(result.output), ReadOptions())
    assert signatures(session.messages[1:]) == signatures(result.plan.retained_tail)
    assert line.encode() + b"\n" in lines_of(result.output)


@pytest.mark.parametrize("end", [b"", b'\n{"role":"user","con'])
def test_what_was_appended_is_a_line_of_its_own_after_restoring(tmp_path, end):
    turns = (
        json.dumps({"role": role, "content": f"{role} {i} " + "bean " * 400})
        for i in range(6)
        for role in ("user", "assistant")
    )
    data = "\n".join(turns).encode() + end
    request = Request(CompactionSettings(keep_recent_tokens=400), archive=tmp_path / "archive.db")
    result = compact(Source("s", data), request)
    store(result)
    more = b'{"role":"user","content":"new"}\n'
    assert b"".join(restore(Source("s", result.output), request)) == data
    assert b"".join(restore(Source("s", result.output + more), request)) == data + b"\n" + more


@pytest.mark.parametrize("name", GROWING)
def test_compact_and_grow_three_times(name, tmp_path):
    settings = CompactionSettings(keep_recent_tokens=400, estimator=ESTIMATORS["chars"])
    request = Request(settings, archive=tmp_path / "archive.db")
    data = whole = GROWING[name].read_bytes()
    hashes = []
    for round in range(3):
        source = Source(str(tmp_path / "s.jsonl"), data)
        try:
            result = compact(source, request)
        except TranscriptError:
            assert round == 0
            return
        if isinstance(result, Compacted):
            hashes.append(store(result).hash)
            data = result.output
        more = grown(whole, data, round)
        data, whole = data + more, joined(whole, more)
    source = Source(str(tmp_path / "s.jsonl"), data)
    if not hashes:
        return
    assert [s.hash for s in directory(source, request).segments] == list(dict.fromkeys(hashes))
    assert b"".join(restore(source, request)) == whole
    archived = [line for h in dict.fromkeys(hashes) for line in lines_of(b"".join(raw_segment(h, request)))]
    there = {content_of(line) for line in (*archived, *lines_of(data))}
    assert [line for line in lines_of(whole) if content_of(line) not in there] == []


def joined(data, more):
    return data + (b"" if data.endswith(b"\n") else b"\n") + more


def grown(whole, data, round):
    """The last lines of the session once more, as new ones: another turn of the same kind."""
    records = [r for r in read(whole) if r.dict and r.dict.get("type", "message") == "message"][-12:]
    leaf = next((r.dict["id"] for r in reversed(read(data)) if r.dict.get("id")), None)
    first = next((i for i, r in enumerate(records) if role_of(r.dict) == "user"), 0)
    new = []
    for number, record in enumerate(records[first:] or records):
        obj = record.dict
        if "parentId" in obj:
            obj = obj | {"id": f"new{round}-{number}", "parentId": leaf}
            leaf = obj["id"]
        new.append(json.dumps(obj).encode() + b"\n")
    return b"".join(new)


def role_of(obj):
    return obj.get("role") or obj.get("message", {}).get("role")


def content_of(line):
    obj = json_of(line)
    return (
        json.dumps({k: v for k, v in obj.items() if k != "parentId"})
        if isinstance(obj, dict)
        else line.strip()
    )
