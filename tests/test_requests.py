"""Files whose lines are requests of an API, each a conversation of its own."""

import json

import pytest
from conftest import CORPUS, ROOT

from haocompact.cli import main
from haocompact.errors import TranscriptError
from haocompact.formats import FORMATS, detect
from haocompact.formats.session import ReadOptions
from haocompact.records import Elements, read, write

SAMPLES = ROOT / "samples"
BATCH = SAMPLES / "openai-requests" / "batch.jsonl"
KEEP = ("--keep-recent", "400", "--estimator", "chars")


def run(*args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["haocompact", *map(str, args)])
        with pytest.raises(SystemExit) as exit:
            main()
    return exit.value.code or 0


@pytest.fixture
def archive(tmp_path, monkeypatch):
    monkeypatch.setenv("HAOCOMPACT_ARCHIVE", str(tmp_path / "archive.db"))
    monkeypatch.setenv("HAOCOMPACT_LOG", str(tmp_path / "log"))


@pytest.mark.parametrize(
    "format", ["openai-requests", "anthropic-requests", "responses-requests", "responses"]
)
def test_the_shapes_are_told_by_their_content(format):
    for path in (SAMPLES / format).glob("*.jsonl"):
        assert detect(read(path.read_bytes())).name == format


@pytest.mark.parametrize("text", [b"[]", b"[{}]", b'{"a": [1, 2 , {"b":[3]}], "c": 4}\n', b'{"a":[]}',
                                  b'{"a" : [\n {"x":"[,]"},\n{"y":1}\n]\n}'])  # fmt: skip
def test_the_elements_and_what_is_around_them_are_the_document(text):
    records = Elements(text, ("a",))
    assert write(records) == text
    inner = [record.obj for record in records[1:-1]]
    assert inner == (json.loads(text)["a"] if text.startswith(b"{") else [])


def test_every_line_of_a_batch_is_planned_by_itself(capfd):
    assert run("plan", "--json", *KEEP, BATCH) == 0
    plans = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [p["path"].rpartition(":")[2] for p in plans] == ["1", "2", "3"]
    assert {p["format"] for p in plans} == {"openai-requests"}


def test_each_request_keeps_everything_but_its_old_messages_and_comes_back(archive, tmp_path, capfd):
    output = tmp_path / "small.jsonl"
    assert run("compact", *KEEP, BATCH, "-o", output) == 0
    old = [json.loads(line) for line in BATCH.read_bytes().splitlines()]
    new = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert len(old) == len(new) == 3
    for before, after in zip(old, new, strict=True):
        messages, made = before["body"].pop("messages"), after["body"].pop("messages")
        assert before == after
        if made != messages:
            tail = made[1 + sum(m["role"] in ("system", "developer") for m in messages[:1]) :]
            assert tail == messages[len(messages) - len(tail) :]
            assert any(str(m["content"]).startswith("[haocompact] Summary") for m in made[:3])
    assert len(output.read_bytes()) < len(BATCH.read_bytes())
    restored = tmp_path / "restored.jsonl"
    assert run("retrieve", "--restore", output, "-o", restored) == 0
    assert restored.read_bytes() == BATCH.read_bytes()
    capfd.readouterr()
    assert run("compact", *KEEP, output) == 0
    assert capfd.readouterr().out.encode() == output.read_bytes()


def test_a_kept_message_stands_in_its_own_bytes(archive, tmp_path):
    path, output = tmp_path / "one.jsonl", tmp_path / "small.jsonl"
    odd = b'{"role" :"user", "content":"\\u0061nd then?" , "n": 1.0}'
    messages = [json.dumps({"role": r, "content": r * 900}).encode() for r in ("user", "assistant") * 4]
    path.write_bytes(b'{"seed":7, "messages" : [' + b" , ".join([*messages, odd]) + b' ],"model":"x"}')
    assert run("compact", *KEEP, path, "-o", output) == 0
    made = output.read_bytes()
    assert made.startswith(b'{"seed":7, "messages" : [')
    assert made.rstrip(b"\n").endswith(odd + b' ],"model":"x"}')


def test_in_place_is_refused_for_several_conversations(archive, tmp_path, capfd):
    path = tmp_path / "batch.jsonl"
    path.write_bytes(BATCH.read_bytes())
    assert run("compact", *KEEP, "--in-place", path) != 0
    assert "write it with -o" in capfd.readouterr().err
    assert path.read_bytes() == BATCH.read_bytes()


def test_several_conversations_are_never_read_as_one():
    with pytest.raises(TranscriptError, match="3 conversations"):
        FORMATS["openai-requests"].read(read(BATCH.read_bytes()), ReadOptions())


def test_a_servers_own_compaction_stays_in_front_and_hides_what_is_before_it(archive, tmp_path, capfd):
    path = SAMPLES / "responses" / "server-compaction.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    sealed = next(line for line in lines if b'"type": "compaction"' in line)
    assert run("compact", *KEEP, path) == 0
    told = capfd.readouterr()
    made = told.out.encode().splitlines(keepends=True)
    assert made[0] == sealed
    assert b"[haocompact] Summary" in made[1]
    assert "Draw up a list of the pear trees" not in told.out


def test_reasoning_stays_with_the_item_that_it_led_to():
    path = SAMPLES / "responses" / "tools.jsonl"
    session = FORMATS["responses"].read(read(path.read_bytes()), ReadOptions())
    grouped = [m for m in session.messages if m.kind == "reasoning"]
    assert grouped
    for message in grouped:
        follower = session.messages[session.messages.index(message) + 1]
        assert follower.role != "assistant" or follower.group == message.group


@pytest.mark.skipif(not CORPUS.is_dir(), reason="no corpus beside the project")
def test_logs_of_requests_in_the_corpus_come_back(archive, tmp_path):
    for path in (CORPUS / "openai-chat").glob("*.jsonl"):
        output, restored = tmp_path / path.name, tmp_path / f"restored-{path.name}"
        assert run("compact", "--keep-recent", "300", path, "-o", output) == 0
        if output.read_bytes() != path.read_bytes():
            assert run("retrieve", "--restore", output, "-o", restored) == 0
            assert restored.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("other", [b'{"torn": ', b'{"messages": 1}\n', b"\n"])
@pytest.mark.parametrize("first", [True, False])
def test_a_conversation_beside_a_line_that_is_none_is_never_read_out_of_that_line(other, first):
    """What reads a file as one transcript refuses it; the commands take each line by itself."""
    line = BATCH.read_bytes().splitlines(keepends=True)[0]
    data = other.rstrip(b"\n") + b"\n" + line if first else line + other
    with pytest.raises(TranscriptError, match="one of its own"):
        FORMATS["openai-requests"].read(read(data), ReadOptions())
