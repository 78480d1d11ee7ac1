"""`compact --to openai`: every session, in any format, becomes a chat that OpenAI's API takes; nothing said is lost."""

import json
from collections import Counter

import pytest
from conftest import CORPUS, ROOT, transcripts

from haocompact.cli import main
from haocompact.compaction import COMPACTION_SUMMARY, CompactionSettings, Shell, Text, ToolCall, ToolResult
from haocompact.convert import NO_IMAGE, NO_RESULT
from haocompact.errors import TranscriptError, UsageError
from haocompact.files import Source, open_source
from haocompact.formats import FORMATS, READ_ONLY, detect
from haocompact.formats.session import ReadOptions
from haocompact.pipeline import (
    Compacted,
    Request,
    compact,
    compact_in_place,
    compact_to,
    directory,
    restore,
    segment_messages,
    store,
)
from haocompact.records import read
from haocompact.summarize import shell_text

FILES = transcripts(ROOT / "samples", CORPUS)
KEEPS = (400, 4000, 20000)


def format_of(path):
    try:
        with open_source(str(path)) as source:
            found = detect(source.records)
            FORMATS[found.name].read(source.records, ReadOptions())
            return None if found.others else found.name
    except TranscriptError:
        return None


FORMAT = {name: format_of(path) for name, path in FILES.items()}
CONVERTED = [name for name, form in FORMAT.items() if form not in (None, "openai")]


def request(folder, keep, **more):
    settings = CompactionSettings(keep_recent_tokens=keep)
    return Request(settings, archive=folder / "archive.db", log=folder / "log", to="openai", **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("converted")


# ------------------------------------------------------------------- what the API takes, by itself
def faults(lines):
    """What OpenAI's chat API refuses, from its reference alone."""
    waiting, used = {}, set()
    for number, line in enumerate(lines):
        role = line.get("role")
        if set(line) - {"role", "content", "tool_calls", "tool_call_id"}:
            yield f"{number}: unknown keys"
        if role == "tool":
            if line["tool_call_id"] not in waiting:
                yield f"{number}: a result without its call"
            waiting.pop(line["tool_call_id"], None)
            yield from (f"{number}: {t} in a result" for t in types(line["content"]) if t != "text")
            continue
        if waiting:
            yield f"{number}: calls {list(waiting)} have no result"
        calls = line.get("tool_calls", [])
        waiting = {call["id"]: call for call in calls}
        if len(waiting) < len(calls) or used & waiting.keys():
            yield f"{number}: an id twice"
        used |= waiting.keys()
        if role not in ("system", "user", "assistant") or (calls and role != "assistant"):
            yield f"{number}: role {role}"
        if role == "assistant" and not isinstance(line["content"], str | None):
            yield f"{number}: parts in an answer"
        if not line["content"] and not calls:
            yield f"{number}: empty"
        for call in calls:
            if call["type"] != "function" or not isinstance(call["function"]["arguments"], str):
                yield f"{number}: a call of another shape"


def types(content):
    return [] if content is None or isinstance(content, str) else [part["type"] for part in content]


def said(messages):
    """Lines of texts, calls and results, in no order."""
    for message in messages:
        for part in message.parts:
            if isinstance(part, Text) and part.text:
                yield from filter(None, part.text.split("\n"))
            elif isinstance(part, ToolResult):
                yield from (line for text in part.texts for line in text.split("\n") if line)
            elif isinstance(part, ToolCall) and message.role == "assistant":
                yield part.name, json.dumps(value_of(part.arguments) or {}, sort_keys=True)


def value_of(arguments):
    """Arguments that are no object are a text in a chat."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


@pytest.mark.parametrize("name", CONVERTED)
def test_every_session_becomes_a_chat(name, folder):
    for keep in KEEPS:
        asked = request(folder, keep)
        with open_source(str(FILES[name])) as source:
            result, data = compact(source, asked), source.data[:]
        done = isinstance(result, Compacted)
        output = result.output if done else result.converted
        lines = [json.loads(line) for line in output.splitlines()]
        assert list(faults(lines)) == []
        assert detect(read(output)).name == "openai"
        session = result.planned.session
        again = FORMATS["openai"].read(read(output), ReadOptions()).messages
        led = done or session.messages[0].kind == COMPACTION_SUMMARY
        assert (again[0].kind == COMPACTION_SUMMARY) == led
        kept = result.plan.kept if done else session.messages[led:]
        before, after = (Counter(said(m for m in ms if m.told)) for ms in (kept, again[led:]))
        added = after - before
        assert not before - after, f"lost: {list(before - after)[:3]}"
        assert set(added) <= {NO_RESULT, NO_IMAGE} | shell_texts(kept)
        if done:
            assert same_again(result, source, asked)
            check_archive(result, data, asked)


def shell_texts(messages):
    """What pi and Codex tell the model of a user's own command."""
    texts = (shell_text(p) for m in messages for p in m.parts if isinstance(p, Shell))
    return {line for text in texts for line in text.split("\n")}


def same_again(result, source, asked):
    return compact(Source(source.path, source.data), asked).output == result.output


def check_archive(result, data, asked):
    """The marker leads to what was removed, and the output to the original."""
    segment = store(result)
    output = Source("converted.jsonl", result.output)
    assert b"".join(restore(output, asked)) == data
    assert directory(output, asked).segments[-1] == segment
    assert f"<<ccr:{segment.hash}>>".encode() in result.output
    if result.planned.session.format in READ_ONLY:
        told = [m for m in result.plan.removed if m.told]
        found = segment_messages(segment.hash, asked)
        assert [(m.role, m.parts) for m in found] == [(m.role, m.parts) for m in told]


SAMPLES = [n for n in CONVERTED if FILES[n].parent.parent.name == "samples"]


@pytest.mark.parametrize(
    "name", [n for n in SAMPLES if FORMAT[n] != "berry"]
)  # berry's cuts are at turns' ends only
def test_the_output_again_is_a_no_op(name, tmp_path):
    asked = request(tmp_path, 400)
    with open_source(str(FILES[name])) as source:
        result = compact(source, asked)
    output = result.output if isinstance(result, Compacted) else result.converted
    done = compact_to(Source("o", output), asked, tmp_path / "again.jsonl")
    assert done.skip is not None
    assert (tmp_path / "again.jsonl").read_bytes() == output


# ---------------------------------------------------------------------------------------- pieces
def converted(text, name, keep=20000, **more):
    result = compact(Source("s", text.encode()), Request(CompactionSettings(keep_recent_tokens=keep), format=name,
                                                         to="openai", **more))  # fmt: skip
    output = result.output if isinstance(result, Compacted) else result.converted
    return [json.loads(line) for line in output.splitlines()]


def anthropic(*blocks):
    return "\n".join(json.dumps({"role": role, "content": content}) for role, content in blocks)


def use(id, name="look"):
    return {"type": "tool_use", "id": id, "name": name, "input": {"at": id}}


def answer(id, content):
    return {"type": "tool_result", "tool_use_id": id, "content": content}


PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}


def test_images_are_parts_and_those_of_results_stand_behind_them():
    lines = converted(anthropic(("user", [{"type": "text", "text": "see"}, PNG]), ("assistant", [use("a"), use("b")]),
                                ("user", [answer("a", [{"type": "text", "text": "x"}, PNG]), answer("b", "y")]),
                                ("assistant", "done")), "anthropic")  # fmt: skip
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
    assert lines[0]["content"] == [{"type": "text", "text": "see"}, image]
    assert [line["role"] for line in lines] == ["user", "assistant", "tool", "tool", "user", "assistant"]
    assert lines[4]["content"] == [image]


WITH_IMAGES = ("pi/every-record.jsonl", "pi/pimono-before-compaction.jsonl", "claude/every-record.jsonl",
               "claude/parallel-and-subagent.jsonl")  # fmt: skip


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_images_of_every_client_are_found(name, folder):
    if name not in FILES:
        pytest.skip("no corpus")
    with open_source(str(FILES[name])) as source:
        result = compact(source, request(folder, 10**6))
    assert NO_IMAGE not in json.dumps([json.loads(line) for line in result.converted.splitlines()])


def test_calls_without_result_and_results_without_call():
    lines = converted(anthropic(("user", "go"), ("assistant", [use("a")]), ("user", "never mind"),
                                ("user", [answer("z", "of nothing")]), ("assistant", [use("b")])),
                      "anthropic")  # fmt: skip
    assert lines[2] == {"role": "tool", "tool_call_id": "a", "content": NO_RESULT}
    assert lines[4] == {"role": "user", "content": "of nothing"}
    assert lines[-1]["tool_calls"][0]["id"] == "b"  # still to be answered
    assert list(faults(lines)) == []


def test_an_id_that_returns_gets_a_name_of_its_own():
    turns = [t for n in "12" for t in (("assistant", [use("call_0", n)]), ("user", [answer("call_0", n)]))]
    lines = converted(anthropic(("user", "go"), *turns), "anthropic")
    assert [line["tool_call_id"] for line in lines if line["role"] == "tool"] == ["call_0", "call_0_2"]
    assert [line["content"] for line in lines if line["role"] == "tool"] == ["1", "2"]


def test_lone_surrogates_and_huge_numbers():
    text = '{"role":"user","content":"a\\ud83d"}\n{"role":"assistant","content":[{"type":"tool_use","id":"a",' \
           '"name":"n","input":{"v":12345678901234567890123}}]}'  # fmt: skip
    lines = converted(text, "anthropic")
    assert lines[0]["content"] == "a\ufffd"
    assert lines[1]["tool_calls"][0]["function"]["arguments"].startswith('{"v":1')


def test_a_session_that_is_openai_chat_already_stays_byte_for_byte():
    data = (ROOT / "samples/openai/parallel-tools.jsonl").read_bytes()
    settings = CompactionSettings(keep_recent_tokens=400)
    assert compact(Source("s", data), Request(settings, to="openai")).output == compact(
        Source("s", data), Request(settings)).output  # fmt: skip


# --------------------------------------------------------------------------------------- commands
def run(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["haocompact", *map(str, words)])
    with pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code


def test_to_goes_with_neither_in_place_nor_append(monkeypatch, capsys, tmp_path):
    path = tmp_path / "s.traj"
    path.write_bytes((ROOT / "samples/swe-agent/parallel-tools.traj").read_bytes())
    before = path.read_bytes()
    for option in ("--in-place", "--append"):
        assert run(monkeypatch, "compact", path, "--to", "openai", option) == 2
        assert option in capsys.readouterr().err
    with pytest.raises(UsageError):
        compact_in_place(str(path), Request(to="openai"))
    assert path.read_bytes() == before


def test_results_in_a_folder_are_named_jsonl_and_never_meet(monkeypatch, capsys, tmp_path):
    for name in ("a.traj", "a.json", "b.jsonl"):
        (tmp_path / name).write_bytes((ROOT / "samples/swe-agent/parallel-tools.traj").read_bytes())
    out = tmp_path / "out"
    words = ("compact", *sorted(tmp_path.glob("[ab].*")), "--to", "openai", "--output-dir", out)
    assert run(monkeypatch, *words, "--keep-recent", 300, "--archive", tmp_path / "x.db") == 0
    assert sorted(p.name for p in out.iterdir()) == ["a.json.jsonl", "a.traj.jsonl", "b.jsonl"]
    assert all(detect(read(p.read_bytes())).name == "openai" for p in out.iterdir())
    capsys.readouterr()
    (tmp_path / "a.traj.jsonl").write_bytes(b"")
    assert run(monkeypatch, *words[:2], tmp_path / "a.traj", tmp_path / "a.traj.jsonl", *words[4:]) == 2
    assert "would both become" in capsys.readouterr().err


def test_a_skip_is_converted_whole_and_logged(monkeypatch, capfdbinary, tmp_path):
    path = ROOT / "samples/gemini/native-compaction.jsonl"
    assert run(monkeypatch, "compact", path, "--to", "openai", "--log", tmp_path / "log") == 0
    out, err = capfdbinary.readouterr()
    assert list(faults(lines := [json.loads(line) for line in out.splitlines()])) == []
    assert lines[0]["content"].startswith("[haocompact] Summary of the conversation so far")
    assert b"[COMPACT_NONE]" in err
    assert (tmp_path / "log").read_text().count("[COMPACT_NONE]") == 1


def test_several_conversations_a_file_are_refused(monkeypatch, capsys):
    path = ROOT / "samples/sharegpt/two-a-line.jsonl"
    assert run(monkeypatch, "compact", path, "--to", "openai") == 4
    assert "--to takes one at a time" in capsys.readouterr().err


# ------------------------------------------------------------------------------- the system prompt
PROMPTED = {
    "anthropic-requests/tools.jsonl": "You repair instruments of a small weather service.",
    "anthropic-requests/compaction-and-parallel.jsonl": "You work for a seed bank. Say which row shows it.",
    "responses-requests/chinese.jsonl": "你是渡船公司的助手。数字要注明单位。",
    "openai-requests/summary-first.jsonl": "You keep the register of a neighbourhood's tool library. Read cards with "
    "read_card, change rows with set_row.",
}


@pytest.mark.parametrize("keep", [500, 100_000])
@pytest.mark.parametrize("name", PROMPTED)
def test_a_requests_system_prompt_is_the_first_message(name, keep, folder):
    with open_source(str(ROOT / "samples" / name)) as source:
        made = compact(source, request(folder, keep))
    first, *rest = map(
        json.loads, (made.output if isinstance(made, Compacted) else made.converted).splitlines()
    )
    assert first == {"role": "system", "content": PROMPTED[name]}
    assert "system" not in [line["role"] for line in rest]


@pytest.mark.parametrize("frame", ["", "body", "request"])
def test_a_system_prompt_is_found_inside_a_frame(frame, folder):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weigh it."}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weigh", "input": {}}]},
    ]
    asked = {"system": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], "messages": turns}
    data = json.dumps({frame: asked} if frame else asked).encode()
    made = compact(Source("x", data), request(folder, 500))
    first, *rest = map(json.loads, made.converted.splitlines())
    assert first["role"] == "system"
    assert [part["text"] for part in first["content"]] == ["A", "B"]
    assert [line["role"] for line in rest] == ["user", "assistant"]
