"""Claude Code: laws over samples, cases and the corpus, and an independent replay of the client's loader."""

import json
from pathlib import Path

import pytest

from haocompact.compaction import (
    CHARS,
    COMPACTION_SUMMARY,
    CompactionSettings,
    Image,
    NoCompaction,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    prepare_compaction,
)
from haocompact.errors import TranscriptError
from haocompact.formats import claude_code
from haocompact.formats.session import Checkpoint, ReadOptions
from haocompact.records import BOM, Record, read

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
SAMPLES = sorted((ROOT / "samples" / "claude").glob("*.jsonl"))
CORPUS = sorted((SHARED / "corpus" / "claude-code").glob("*.jsonl"))
GROUND = sorted((SHARED / "clients" / "claude" / "ground").glob("*.jsonl"))
CASES = [
    p.parent / p.name.replace(".expect.md", ".jsonl")
    for p in sorted((ROOT / "tests" / "cases").glob("*.expect.md"))
    if "format: Claude Code" in p.read_text("utf-8")
]
FILES = [(p, k) for p in SAMPLES + CASES + GROUND for k in (10, 400)]
FILES += [(p, k) for p in CORPUS for k in (2000, 20000)]
CHECKPOINT = Checkpoint("## Goal\nx", [], [], tokens_before=1, tokens_after=1, hash="0123456789abcdef")


def load(data, **options):
    return claude_code.read(read(data), ReadOptions(**options))


def plan_of(session, keep_recent):
    return prepare_compaction(
        session.messages, CompactionSettings(keep_recent_tokens=keep_recent, estimator=CHARS)
    )


def compacted(data, keep_recent, checkpoint=CHECKPOINT, **options):
    """(session, plan, kept, output bytes); the last two are None when there is nothing to compact."""
    session = load(data, **options)
    plan = plan_of(session, keep_recent)
    if isinstance(plan, NoCompaction):
        return session, plan, None, None
    kept = claude_code.select(session, plan)
    pieces = claude_code.rebuild(session, plan, kept, checkpoint)
    raw = session.records.raw
    out = b"".join(p if isinstance(p, bytes) else raw(p) if isinstance(p, int) else p[1] for p in pieces)
    return session, plan, kept, out


def lines_of(data):
    """Parsed lines; None for what is not JSON."""
    out = []
    for line in data.split(b"\n"):
        try:
            out.append(json.loads(line.decode("utf-8-sig", "replace").strip("\0 \r\t")))
        except ValueError:
            out.append(None)
    return out


def seen(messages):
    return [(m.role, m.id, m.kind, m.parts) for m in messages]


@pytest.fixture(params=FILES, ids=lambda f: f"{f[0].stem}-{f[1]}", scope="module")
def run(request):
    path, keep_recent = request.param
    session, plan, kept, out = compacted(path.read_bytes(), keep_recent)
    if out is None:
        pytest.skip(f"nothing to compact: {plan.sub}")
    return session, plan, kept, out, keep_recent


# -------------------------------------------------------------------------------------------- laws
def test_output_reads_as_summary_and_kept_messages(run):
    _, plan, _, out, _ = run
    again = load(out)
    assert (again.messages[0].kind, again.messages[0].text) == (COMPACTION_SUMMARY, CHECKPOINT.summary)
    assert seen(again.messages[1:]) == seen(plan.retained_tail)
    assert again.ends == 1


def test_output_is_not_compacted_again(run):
    *_, out, keep_recent = run
    assert isinstance(plan_of(load(out), keep_recent), NoCompaction)


def test_every_selected_record_appears_once(run):
    session, plan, kept, _, _ = run
    assert kept == sorted(set(kept))
    pieces = list(claude_code.rebuild(session, plan, kept, CHECKPOINT))
    assert [p if isinstance(p, int) else p[0] for p in pieces if not isinstance(p, bytes)] == kept


def test_same_bytes_each_time(run):
    session, *_, out, keep_recent = run
    data = b"".join(session.records.raw(i) for i in range(len(session.records)))
    assert compacted(data, keep_recent)[3] == out


def test_only_what_the_client_forces_differs(run):
    session, plan, kept, _, _ = run
    for piece in claude_code.rebuild(session, plan, kept, CHECKPOINT):
        if not isinstance(piece, tuple):
            continue
        before, after = lines_of(session.records.raw(piece[0]))[0], lines_of(piece[1])[0]
        for key in ("parentUuid", "timestamp"):
            before.pop(key, None), after.pop(key, None)
        for line in (before, after):
            for key in claude_code.USAGE_KEYS:
                line.get("message", {}).get("usage", {}).pop(key, None)
        assert list(before.items()) == list(after.items())


def test_no_orphan_that_the_input_did_not_have(run):
    session, _, _, out, _ = run
    assert orphans(load(out).messages) <= orphans(session.messages)


def orphans(messages):
    calls = {p.id for m in messages for p in m.parts if isinstance(p, ToolCall)}
    return {p.id for m in messages for p in m.parts if isinstance(p, ToolResult)} - calls


def test_a_straight_chain_in_time_and_a_final_newline(run):
    *_, out, _ = run
    chain = replay(out)
    assert [line.get("parentUuid") for line in chain] == [None, *(line["uuid"] for line in chain[:-1])]
    stamps = [line["timestamp"] for line in chain]
    assert stamps == sorted(stamps)
    assert stamps[-1] > stamps[-2]
    assert out.endswith(b"\n")


# ------------------------------------------------------------ the client's loader, told independently
def replay(data):
    """Chain lines as a client loads them: last uuid wins, newest branch end, parents, parallel calls.

    Written from the description of the client's loading rules, not from the adapter.
    """
    kinds = ("user", "assistant", "system", "attachment", "progress")
    lines = [o for o in lines_of(data) if isinstance(o, dict) and o.get("type") in kinds]
    lines = [o for o in lines if isinstance(o.get("uuid"), str)]
    by_uuid = {o["uuid"]: o for o in lines}
    place = {o["uuid"]: i for i, o in enumerate(lines)}
    parents = {o.get("parentUuid") for o in lines}
    ends = []
    for line in lines:
        if line["uuid"] in parents:
            continue
        while line is not None and line["type"] not in ("user", "assistant"):
            line = by_uuid.get(line.get("parentUuid"))
        if line is not None:
            ends.append(line)
    main = [
        o for o in ends if not o.get("isSidechain") and not o.get("teamName") and not o.get("isMeta")
    ] or ends
    line = max(main, key=lambda o: place[o["uuid"]])
    chain = []
    while line is not None and line not in chain:
        chain.insert(0, line)
        line = by_uuid.get(line.get("parentUuid"))
    return put_back_parallels(lines, chain)


def put_back_parallels(lines, chain):
    on_chain = {o["uuid"] for o in chain}
    last = {response(o): o["uuid"] for o in chain if response(o)}
    out = []
    for link in chain:
        out.append(link)
        if last.get(response(link)) != link["uuid"]:
            continue
        members = [o for o in lines if response(o) == response(link)]
        uuids = {o["uuid"] for o in members}
        results = [o for o in lines if has_result(o) and o.get("parentUuid") in uuids]
        for group in (members, results):
            out += sorted((o for o in group if o["uuid"] not in on_chain), key=lambda o: o["timestamp"])
    return out


def response(line):
    return line["message"].get("id") if line["type"] == "assistant" else None


def has_result(line):
    content = line.get("message", {}).get("content") if line["type"] == "user" else None
    return isinstance(content, list) and any(b.get("type") == "tool_result" for b in content)


def sent(chain):
    """Uuids of the lines that reach the model."""
    return [
        o["uuid"]
        for o in chain
        if o["type"] in ("user", "assistant") or o.get("subtype") == "local_command"
        if not o.get("isApiErrorMessage") and o.get("message", {}).get("model") != "<synthetic>"
    ]


def test_replay_of_the_output_is_summary_and_tail(run):
    _, plan, _, out, _ = run
    chain = replay(out)
    assert chain[0]["subtype"] == "compact_boundary"
    assert chain[1]["isCompactSummary"]
    assert CHECKPOINT.summary in chain[1]["message"]["content"]
    assert sent(chain)[1:] == [m.id for m in plan.retained_tail]


@pytest.mark.parametrize(
    "path", [p for p in SAMPLES + GROUND if "native" not in p.stem], ids=lambda p: p.stem
)
def test_replay_of_an_input_is_what_we_read(path):
    data = path.read_bytes()
    assert sent(replay(data)) == [m.id for m in load(data).messages]


# ----------------------------------------------------------------------------- small transcripts
SID = "3f0c8c1e-6b57-4a51-9a43-0d9f5d6b1f10"


class Log:
    """Writes transcript lines; each hangs on the one before unless told otherwise."""

    def __init__(self):
        self.lines, self.last, self.count = [], None, 0

    def line(self, kind, message=None, *, uuid=None, parent="", **more):
        self.count += 1
        own = uuid or f"u{self.count}"
        stamp = f"2026-05-01T10:{self.count // 60:02d}:{self.count % 60:02d}.000Z"
        obj = {"parentUuid": self.last if parent == "" else parent, "isSidechain": False, "type": kind}
        obj |= (
            ({"message": message} if message else {})
            | {"uuid": own, "timestamp": stamp, "sessionId": SID}
            | more
        )
        self.lines.append(json.dumps(obj, ensure_ascii=False).encode())
        self.last = own
        return own

    def user(self, content, **more):
        return self.line("user", {"role": "user", "content": content}, **more)

    def answer(self, *blocks, id=None, usage=None, model="m", **more):
        blocks = [{"type": "text", "text": b} if isinstance(b, str) else b for b in blocks]
        message = {"id": id or f"msg{self.count}", "role": "assistant", "model": model, "content": blocks}
        return self.line("assistant", message | ({"usage": usage} if usage else {}), **more)

    def result(self, call, text="done", **more):
        return self.user([{"type": "tool_result", "tool_use_id": call, "content": text}], **more)

    def other(self, raw):
        self.lines.append(raw if isinstance(raw, bytes) else json.dumps(raw).encode())

    @property
    def data(self):
        return b"".join(line + b"\n" for line in self.lines)


def call(id, **input):
    return {"type": "tool_use", "id": id, "name": "Bash", "input": input}


def usage(total):
    return {
        "input_tokens": 10,
        "cache_read_input_tokens": total - 30,
        "cache_creation_input_tokens": 0,
        "output_tokens": 20,
    }


def two_turns(**usage_of_answers):
    log = Log()
    log.user("first " * 200)
    log.answer("one " * 100)
    log.user("second " * 200)
    log.answer("two", **usage_of_answers)
    return log


def test_parts():
    log = Log()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}}
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "notes"}}
    log.user([{"type": "text", "text": "look"}, image, pdf, plain])
    redacted = {"type": "redacted_thinking", "data": "x"}
    log.answer({"type": "thinking", "thinking": "hm", "signature": "s"}, redacted, call("t1", command="ls"))
    content = [{"type": "text", "text": "a"}, image]
    log.user([{"type": "tool_result", "tool_use_id": "t1", "content": content, "is_error": True},
              {"type": "text", "text": "and?"}], toolUseResult={"stdout": "never read"})  # fmt: skip
    user, answer, result = load(log.data).messages
    assert user.parts == (Text("look"), Image("image/png"), Image("application/pdf"), Text("notes"))
    assert answer.parts == (Thinking("hm"), ToolCall("t1", "Bash", {"command": "ls"}))
    assert result.role == "toolResult"
    assert result.parts == (ToolResult("t1", ("a",), 1, True), Text("and?"))


def test_a_server_tool_and_its_result_stand_in_one_answer():
    log = Log()
    log.user("search")
    log.answer(
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1",
         "content": [{"type": "web_search_result", "title": "X", "url": "https://x.example"}]},
    )  # fmt: skip
    session = load(log.data)
    assert session.messages[1].parts[1] == ToolResult("s1", ("X https://x.example",))
    assert not session.warnings


def test_usage_stands_on_the_last_line_of_a_response():
    log = two_turns(id="m9", usage=usage(500))
    log.answer("three", id="m9", usage=usage(700))
    assert [m.usage for m in load(log.data).messages] == [None, None, None, None, 700]
    assert load(log.data).messages[1].usage_note == "no usage, or all zero"


def test_a_response_and_the_results_between_its_lines_are_one_group():
    log = Log()
    log.user("go")
    log.answer(call("a"), id="m1")
    log.result("a")
    log.answer(call("b"), id="m1")
    log.result("b")
    log.answer("done", id="m2")
    groups = [m.group for m in load(log.data).messages]
    assert groups[0] is None
    assert groups[1] == groups[2] == groups[3]
    assert len({groups[1], groups[4], groups[5]}) == 3


def test_a_local_command_is_one_group():
    log = two_turns()
    log.user("<local-command-caveat>Caveat: ...</local-command-caveat>", isMeta=True)
    log.user("<command-name>/status</command-name>")
    log.line("system", subtype="local_command", content="<local-command-stdout>ok</local-command-stdout>")
    log.user("next")
    messages = load(log.data).messages
    assert [(m.role, m.kind) for m in messages[4:7]] == [
        ("user", "meta"),
        ("user", ""),
        ("system", "local_command"),
    ]
    assert len({m.group for m in messages[4:7]}) == 1
    assert messages[7].group is None


def test_synthetic_lines_are_links_only():
    log = two_turns()
    log.answer("API Error", isApiErrorMessage=True)
    log.answer("No response requested.", model="<synthetic>")
    log.line("user", {"role": "user", "content": "ghost"}, isVirtual=True)
    log.line("attachment", attachment={"type": "todo"})
    log.user("still here")
    assert [m.id for m in load(log.data).messages] == ["u1", "u2", "u3", "u4", "u9"]


def test_gap_duplicate_and_circle_do_not_end_the_walk():
    log = Log()
    log.user("root")
    log.answer("a", parent="gone")
    log.line("attachment", attachment={}, uuid="hook")
    log.user("b")
    log.line("attachment", attachment={}, uuid="hook")
    log.answer("c")
    session = load(log.data)
    assert [m.text for m in session.messages] == ["root", "a", "b", "c"]
    warned = " / ".join(w.text for w in session.warnings)
    assert "1 dangling parent links (lines 2)" in warned
    assert "uuid hook is repeated" in warned


def test_branches_are_counted_and_chosen():
    log = two_turns()
    log.user("another way", parent="u2", uuid="other")
    log.answer("so", uuid="end")
    session = load(log.data)
    assert (session.ends, [m.id for m in session.messages]) == (2, ["u1", "u2", "other", "end"])
    assert [m.id for m in load(log.data, leaf="u4").messages] == ["u1", "u2", "u3", "u4"]
    with pytest.raises(TranscriptError, match="branch ends: u4, end"):
        load(log.data, leaf="nowhere")


def test_forked_parallel_calls_are_put_back_and_straightened():
    log = Log()
    log.user("old " * 200)
    log.answer("ok")
    log.user("go " * 100)
    log.answer(call("a"), id="m", uuid="A")
    log.answer(call("b"), id="m", uuid="B")
    log.result("b", parent="B", uuid="rb")
    log.result("a", parent="A", uuid="ra")
    log.answer("both", parent="rb")
    session, _, _, out = compacted(log.data, 40)
    assert [m.id for m in session.messages[3:]] == ["A", "B", "ra", "rb", "u8"]
    assert session.ends == 1
    assert not session.warnings
    chain = {o["uuid"]: o for o in replay(out)}
    assert [chain[u]["parentUuid"] for u in ("ra", "rb", "u8")] == ["B", "ra", "rb"]
    assert chain["rb"]["timestamp"] > chain["ra"]["timestamp"]


def test_pairs_that_do_not_match_are_named():
    log = Log()
    log.user("go")
    log.answer(call("lost"), call("twice"), id="m")
    log.result("twice")
    log.result("twice")
    log.result("stray")
    assert sorted(w.text for w in load(log.data).warnings) == [
        "no call for the results stray",
        "no result for the calls lost",
        "second results for the calls twice",
    ]


def test_a_sidechain_is_no_part_of_the_session_but_may_be_one():
    log = two_turns()
    log.user("sub", parent=None, isSidechain=True, agentId="x", uuid="s1")
    log.answer("sub answer " * 300, isSidechain=True, agentId="x", uuid="s2")
    assert [m.id for m in load(log.data).messages] == ["u1", "u2", "u3", "u4"]
    alone = Log()
    for text in ("one " * 300, "two " * 300, "three"):
        alone.user(text, isSidechain=True, agentId="x")
        alone.answer("yes", isSidechain=True, agentId="x")
    *_, out = compacted(alone.data, 5)
    boundary, summary = lines_of(out)[:2]
    assert boundary["isSidechain"]
    assert (summary["isSidechain"], summary["agentId"]) == (True, "x")


# -------------------------------------------------------------------------------------- compactions
NATIVE = (
    f"{claude_code.PREAMBLE}\n\nSummary:\nthe body\n\nIf you need specific details from before compaction "
    "(like exact code snippets), read the full transcript at: /x.jsonl\nPlease continue the conversation "
    "from where we left off without asking the user any further questions."
)


def boundary(log, uuid, **metadata):
    log.line("system", parent=None, uuid=uuid, subtype="compact_boundary", compactMetadata=metadata)


def summary(log, uuid, **more):
    log.user(NATIVE, uuid=uuid, isCompactSummary=True, isVisibleInTranscriptOnly=True, **more)


def test_native_summary_without_its_frame():
    log = two_turns()
    boundary(log, "B", trigger="auto", preTokens=1)
    summary(log, "S")
    log.user("on")
    first, second = load(log.data).messages
    assert (first.kind, first.text, second.id) == (COMPACTION_SUMMARY, "the body", "u7")


def test_summary_without_boundary():
    log = two_turns()
    summary(log, "S")
    log.user("on")
    assert [m.id for m in load(log.data).messages] == ["S", "u6"]


@pytest.mark.parametrize("key", ["preservedMessages", "preservedSegment"])
def test_preserved_lines_follow_the_summary(key):
    log = two_turns(usage=usage(150_000))
    lists = {"preservedMessages": {"anchorUuid": "S", "uuids": ["u3", "u4"]},
             "preservedSegment": {"anchorUuid": "S", "headUuid": "u3", "tailUuid": "u4"}}  # fmt: skip
    boundary(log, "B", **{key: lists[key]})
    summary(log, "S")
    log.user("on")
    session = load(log.data)
    assert [m.id for m in session.messages] == ["S", "u3", "u4", "u7"]
    assert session.messages[2].usage is None
    assert "before the last compaction" in session.messages[2].usage_note


def test_a_list_with_an_unknown_line_is_ignored():
    log = two_turns()
    boundary(log, "B", preservedMessages={"anchorUuid": "S", "uuids": ["u3", "nowhere"]})
    summary(log, "S")
    log.user("on")
    assert [m.id for m in load(log.data).messages] == ["S", "u7"]


def test_usage_of_lines_that_we_kept_is_stale_and_of_new_ones_is_not():
    log = two_turns(usage=usage(90_000))
    *_, out = compacted(log.data, 100)
    again = load(out)
    assert [m.usage for m in again.messages] == [None, None, None]
    last = json.loads(out.splitlines()[-1])
    message = {"id": "n", "role": "assistant", "content": "x", "usage": usage(4000)}
    stamp = "2026-05-02T00:00:00.000Z"
    new = last | {"parentUuid": last["uuid"], "uuid": "new", "timestamp": stamp, "message": message}
    assert load(out + json.dumps(new).encode() + b"\n").messages[-1].usage == 4000


# ------------------------------------------------------------------------------------------ writing
def test_native_records():
    log = two_turns()
    session, _, _, out = compacted(log.data, 100)
    first, second = lines_of(out)[:2]
    keys = "parentUuid logicalParentUuid isSidechain type subtype content isMeta timestamp uuid level"
    assert " ".join(first) == f"{keys} compactMetadata sessionId"
    assert first["compactMetadata"] == {
        "trigger": "manual",
        "preTokens": 1,
        "messagesSummarized": 2,
        "keptTailUuid": "u4",
    }
    assert (first["logicalParentUuid"], second["parentUuid"]) == ("u2", first["uuid"])
    assert [first["timestamp"], second["timestamp"]] == [
        "2026-05-01T10:00:02.998Z",
        "2026-05-01T10:00:02.999Z",
    ]
    assert second["message"]["content"] == f"{claude_code.PREAMBLE}\n\nSummary:\n{CHECKPOINT.summary}"
    assert session.session_id == SID


def test_ids_follow_the_removed_bytes_when_there_is_no_hash():
    bare = Checkpoint("s", [], [], 1, 1, "")
    first, other = two_turns(), two_turns()
    other.lines[0] = other.lines[0].replace(b"first", b"First")
    ids = [lines_of(compacted(log.data, 100, bare)[3])[0]["uuid"] for log in (first, first, other)]
    assert ids[0] == ids[1] != ids[2]


def test_figures_that_make_the_client_compact_again_are_zeroed_in_place():
    log = two_turns(usage=usage(150_000))
    *_, out = compacted(log.data, 100)
    assert out.splitlines()[-1] == log.lines[3].replace(b": 10,", b": 0,").replace(
        b": 149970", b": 0"
    ).replace(b": 20}", b": 0}")
    log = two_turns(usage=usage(90_000))
    assert compacted(log.data, 100)[3].splitlines()[-1] == log.lines[3]


def test_metadata():
    log = Log()
    meta = {
        name: {"type": kind, "sessionId": SID, "n": name}
        for name, kind in {"t1": "custom-title", "t2": "custom-title", "pr1": "pr-link", "pr2": "pr-link",
                           "p1": "last-prompt", "p2": "last-prompt", "snap": "file-history-snapshot",
                           "q": "queue-operation", "new1": "brand-new", "new2": "brand-new"}.items()
    }  # fmt: skip
    for name in ("t1", "t2", "pr1", "pr2", "p1", "snap", "new1", "new2"):
        log.other(meta[name])
    log.other(b"")
    log.user("first " * 200)
    log.other(b"not json")
    log.answer("one")
    log.user("second " * 200)
    log.other(meta["q"])
    log.other(b"{torn")
    log.line("progress", data={})
    log.answer("two")
    log.other(meta["p2"])
    session, _, _, out = compacted(log.data, 100)
    kept = [line.get("n") or line["type"] if line else line for line in lines_of(out)[:-1]]
    assert kept == ["t2", "pr1", "pr2", "new2", "system", "user", "user", "q", None, "assistant", "p2"]
    assert ["brand-new (2)" in w.text for w in session.warnings].count(True) == 1


def test_mark_line_ends_and_last_newline():
    log = two_turns()
    data = BOM + log.data.replace(b"\n", b"\r\n")[:-2]
    *_, out = compacted(data, 100)
    assert not out.startswith(BOM)
    assert out.count(b"\r\n") == out.count(b"\n") == 4
    titled = BOM + b'{"type":"ai-title","sessionId":"x"}\n' + log.data
    assert compacted(titled, 100)[3].count(BOM) == 1
    assert compacted(titled, 100)[3].startswith(BOM)


def test_a_byte_order_mark_never_moves_into_the_file():
    log = two_turns()
    boundary(log, "B", preservedMessages={"anchorUuid": "S", "uuids": ["u1", "u4"]})
    summary(log, "S")
    log.user("on " * 100)
    *_, out = compacted(BOM + log.data, 1)
    assert BOM not in out


def test_a_torn_last_line_goes_and_padding_of_nul_goes():
    log = two_turns()
    log.lines[2] = b"\0" * 8 + log.lines[2]
    session, _, kept, out = compacted(log.data + b'{"type":"user","mess', 100)
    assert kept == [2, 3]
    assert b"\0" not in out
    assert [m.id for m in load(out).messages[1:]] == ["u3", "u4"]
    assert {w.line for w in session.warnings} == {3, 5}


def test_missing_parent_key_is_inserted():
    log = two_turns()
    log.lines[2] = log.lines[2].replace(b'"parentUuid": "u2", ', b"")
    *_, out = compacted(log.data, 1, leaf="u4")
    assert all(line.get("parentUuid") for line in replay(out)[1:])
    assert load(out).messages[1].id in ("u3", "u4")


def test_time_never_runs_backwards_and_the_last_line_is_the_newest():
    log = two_turns()
    log.answer("three", id="x")
    log.lines[3] = log.lines[3].replace(b"10:00:04.000Z", b"10:00:01.000Z")
    log.lines[4] = log.lines[4].replace(b"10:00:05.000Z", b"10:00:03.001Z")
    *_, out = compacted(log.data, 100)
    assert [o["timestamp"][17:23] for o in replay(out)] == ["02.998", "02.999", "03.000", "03.001", "03.002"]


def test_a_second_compaction_replaces_the_first():
    data = SAMPLES[0].read_bytes()
    for hash in ("a" * 16, "b" * 16):
        *_, data = compacted(data, 400 if hash[0] == "a" else 30, Checkpoint(hash, [], [], 1, 1, hash))
    assert data.count(b'"compact_boundary"') == 1
    assert load(data).messages[0].text == "b" * 16


# ----------------------------------------------------------------------------------- single records
@pytest.mark.parametrize(
    ("line", "vote"),
    [
        ({"type": "user", "sessionId": "s", "parentUuid": None, "message": {}}, 2),
        ({"type": "mode", "sessionId": "s"}, 2),
        ({"type": "brand-new", "sessionId": "s"}, 1),
        ({"type": "summary", "summary": "t", "leafUuid": "u"}, 2),
        ({"type": "file-history-snapshot", "messageId": "m", "snapshot": {}}, 2),
        ({"type": "user", "sessionId": "s"}, 0),
        ({"type": "session", "id": "x"}, 0),
        ({"role": "user", "content": "x"}, 0),
    ],
)
def test_sniff(line, vote):
    assert claude_code.sniff(line, False) == vote


def test_every_kind_in_the_samples_is_in_the_table():
    kinds = {line["type"] for path in SAMPLES for line in lines_of(path.read_bytes())[:-1]}
    assert kinds <= claude_code.KINDS.keys()
    assert len(SAMPLES) >= 4


def test_message_of():
    def message(**line):
        return claude_code.message_of(Record(7, json.dumps({"uuid": "u", "sessionId": "s", **line}).encode()))

    huge = 2**70
    called = message(type="assistant", message={"content": [call("c", n=huge)], "model": "<synthetic>"})
    assert (called.role, called.line, called.parts[0].arguments) == ("assistant", 7, {"n": huge})
    assert message(type="user", message={"content": NATIVE}, isCompactSummary=True).text == "the body"
    assert message(type="user", isSidechain=True, message={"content": "x"}).text == "x"
    assert message(type="system", subtype="turn_duration") is None
    assert message(type="progress", data={}) is None
    assert message(type="mode") is None


def test_no_usable_message():
    for data in (b"", b"\n", b'{"type":"mode","sessionId":"s"}\n'):
        with pytest.raises(TranscriptError, match="no usable message"):
            load(data)
