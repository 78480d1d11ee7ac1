"""Codex rollouts: what is read, what is written, and what the client makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from haocompact.compaction import (
    CHARS,
    CompactionPreparation,
    CompactionSettings,
    Message,
    NoCompaction,
    Shell,
    prepare_compaction,
)
from haocompact.errors import TranscriptError
from haocompact.files import Source
from haocompact.formats import codex
from haocompact.formats.session import Checkpoint, ReadOptions, Session
from haocompact.pipeline import Compacted, Request, compact
from haocompact.records import Records, read

ROOT = Path(__file__).parents[1]
SAMPLES = sorted((ROOT / "samples/codex").glob("*.jsonl"))
SHARED = ROOT.parent / "shared"
CASES = sorted(
    path.with_suffix("").with_suffix(".jsonl")
    for path in (ROOT / "tests/cases").glob("*.expect.md")
    if '"format": "codex"' in path.read_text()
)
OLD = SHARED / "corpus/codex/openai-ci-2025-08-06-oldformat.jsonl"
FORK = SHARED / "clients/codex/ground/paginated-fork"
REFUSED = [OLD, *(p for p in FORK.glob("*.jsonl") if b'"history_base"' in p.read_bytes())]
FOUND = [
    *CASES,
    *sorted((SHARED / "corpus/codex").glob("*.jsonl")),
    *sorted((SHARED / "clients/codex/ground").rglob("*.jsonl")),
]
SESSIONS = [*SAMPLES, *(path for path in FOUND if path not in REFUSED)]
SUMMARY = "## Goal\nGo on.\n\n<modified-files>\nsrc/ü.py\n</modified-files>\n\n<<ccr:0123456789abcdef>>"


def named(paths: Iterable[Path]) -> list[Any]:
    return [pytest.param(p, id=f"{p.parent.name}-{p.stem}"[-40:]) for p in paths]


# ------------------------------------------------------------------------------ making sessions
def line(kind: str, payload: dict[str, Any], second: int = 0, **more: Any) -> bytes:
    stamp = f"2026-05-01T08:{second // 60:02d}:{second % 60:02d}.000Z"
    return json.dumps({"timestamp": stamp, **more, "type": kind, "payload": payload}).encode() + b"\n"


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **more}


def answer(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "name": "run", "arguments": arguments, "call_id": name}


def output(name: str, text: str = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": text}


def token_count(total: int, *, input_tokens: int | None = None, window: int = 258_400) -> dict[str, Any]:
    last = {"input_tokens": total - 10 if input_tokens is None else input_tokens, "cached_input_tokens": 5,
            "output_tokens": 0 if input_tokens == 0 else 10, "reasoning_output_tokens": 4}  # fmt: skip
    last["total_tokens"] = total
    info = {"total_token_usage": {**last, "total_tokens": 9 * total}, "last_token_usage": last,
            "model_context_window": window}  # fmt: skip
    return {"type": "token_count", "info": info, "rate_limits": None}


HEADER = {"id": "019b0000-0000-7000-8000-000000000001", "timestamp": "2026-05-01T08:00:00.000Z", "cwd": "/w"}


def rollout(*payloads: dict[str, Any] | tuple[str, dict[str, Any]], head: dict[str, Any] = HEADER) -> bytes:
    """A file of these items, events and (type, payload) pairs, one a second."""
    lines = [line("session_meta", head)]
    for second, payload in enumerate(payloads, 1):
        kind, body = payload if isinstance(payload, tuple) else (_kind(payload), payload)
        ordinal = {"ordinal": second} if head.get("history_mode") == "paginated" else {}
        lines.append(line(kind, body, second, **ordinal))
    return b"".join(lines)


def _kind(payload: dict[str, Any]) -> str:
    return "response_item" if f"response_item/{payload['type']}" in codex.KINDS and (
        payload["type"] != "agent_message") else "event_msg"  # fmt: skip


def load(data: bytes) -> Session:
    return codex.read(read(data), ReadOptions())


def plan_of(session: Session, keep: int) -> CompactionPreparation | NoCompaction:
    return prepare_compaction(session.messages, CompactionSettings(keep_recent_tokens=keep, estimator=CHARS))


def checkpoint_of(plan: CompactionPreparation, summary: str = SUMMARY) -> Checkpoint:
    after = plan.tokens_kept + len(summary) // 4 + 100
    return Checkpoint(summary, [], ["src/ü.py"], plan.tokens_before, after, "0123456789abcdef")


def shrink(session: Session, plan: CompactionPreparation) -> bytes:
    kept = codex.select(session, plan)
    assert kept == sorted(set(kept))
    pieces = list(codex.rebuild(session, plan, kept, checkpoint_of(plan)))
    indexes = [p if isinstance(p, int) else p[0] for p in pieces if not isinstance(p, bytes)]
    assert indexes == kept
    return b"".join(
        session.records.raw(p) if isinstance(p, int) else p if isinstance(p, bytes) else p[1] for p in pieces
    )


def shrunk(data: bytes, keep: int) -> bytes:
    session = load(data)
    plan = plan_of(session, keep)
    assert isinstance(plan, CompactionPreparation)
    return shrink(session, plan)


def appended(session: Session, plan: CompactionPreparation) -> bytes:
    return bytes(session.records.data) + codex.append(session, plan, checkpoint_of(plan))


def same(a: Sequence[Message], b: Sequence[Message]) -> bool:
    return [(m.role, m.parts) for m in a] == [(m.role, m.parts) for m in b]


# ------------------------------------------------- the client's resume, written from its description
SENT = {"message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "compaction",
        "custom_tool_call_output", "local_shell_call", "tool_search_call", "tool_search_output",
        "web_search_call", "image_generation_call", "agent_message", "compaction_summary",
        "context_compaction"}  # fmt: skip
SEALED = {"compaction", "compaction_summary", "context_compaction"}


def resume(data: bytes) -> list[dict[str, Any]]:
    """What a client has in its history after it loaded the file; developer and context items left out."""
    lines = []
    for raw in data.split(b"\n"):
        try:
            lines.append(json.loads(raw.decode()))
        except ValueError:
            continue
    start = max(
        (i for i, o in enumerate(lines) if o["payload"].get("replacement_history") is not None), default=-1
    )
    history = list(lines[start]["payload"]["replacement_history"]) if start >= 0 else []
    for entry in lines[start + 1 :]:
        payload = entry["payload"]
        if entry["type"] == "response_item" and payload["type"] in SENT:
            history.append(payload)
        if entry["type"] == "inter_agent_communication":
            history.append(agent_message(payload))
        if payload.get("type") == "thread_rolled_back":
            opening = [i for i, item in enumerate(history) if _speech(item)]
            del history[opening[-payload["num_turns"] :][0] :]
    return [item for item in history if item["type"] != "message" or item["role"] == "assistant" or
            not _context(item)]  # fmt: skip


def agent_message(payload: dict[str, Any]) -> dict[str, Any]:
    """What the client makes of a message between agents."""
    content = [{"type": "input_text", "text": payload["content"]}]
    names = {"author": payload["author"], "recipient": payload["recipient"]}
    return {"type": "agent_message", **names, "content": content}


def _text(item: dict[str, Any]) -> str:
    return "".join(block.get("text", "") for block in item["content"])


def _aborted(item: dict[str, Any]) -> bool:
    return item["type"] == "message" and "<turn_aborted>" in _text(item)


def _context(item: dict[str, Any]) -> bool:
    kinds = item.get("internal_chat_message_metadata_passthrough", {}).get("content_item_kinds")
    if kinds:
        return not any(k.startswith(("user.", "compaction.")) for k in kinds)
    return item["role"] != "user" or _text(item).startswith(("# AGENTS.md", "<environment_context>"))


def _speech(item: dict[str, Any]) -> bool:
    user_message = item["type"] == "message" and item["role"] == "user" and not _context(item)
    return user_message and not _text(item).startswith("Another language model started")


def source(session: Session, message: Message) -> dict[str, Any]:
    """The item that a message was read from."""
    line = session.records[message.line - 1].dict
    payload = line["payload"]
    if line["type"] == "inter_agent_communication":
        return agent_message(payload)
    if "replacement_history" in payload:
        return dict(payload["replacement_history"][int(str(message.id).rpartition(".")[2]) - 1])
    return dict(payload)


def orphans(items: Sequence[dict[str, Any]]) -> set[tuple[str, bool]]:
    calls = {i["call_id"] for i in items if i["type"].endswith("_call") and "call_id" in i}
    outputs = {i["call_id"] for i in items if i["type"].endswith("_output")}
    return {(c, True) for c in calls - outputs} | {(c, False) for c in outputs - calls}


# ------------------------------------------------------------------------------------------ laws
@pytest.mark.parametrize("keep", [40, 400, 2000, 20000])
@pytest.mark.parametrize("path", named(SESSIONS))
def test_laws(path: Path, keep: int) -> None:
    session = load(path.read_bytes())
    plan = plan_of(session, keep)
    if isinstance(plan, NoCompaction):
        return
    for result in (shrink(session, plan), appended(session, plan)):
        check_result(session, plan, result)
    assert shrink(session, plan) == shrunk(path.read_bytes(), keep)


def check_result(session: Session, plan: CompactionPreparation, result: bytes) -> None:
    """The adapter and the client's own algorithm both find the summary and exactly the kept messages."""
    again = load(result)
    assert again.messages[0].kind == "compaction_summary"
    assert again.messages[0].text == SUMMARY
    assert again.messages[0].files is not None
    assert again.messages[0].files.edited == {"src/ü.py"}
    assert same(again.messages[1:], plan.retained_tail)
    assert isinstance(prepare_compaction(again.messages, plan.settings), NoCompaction)
    history = [item for item in resume(result) if item["type"] not in SEALED]
    assert _text(history[0]) == f"{codex.SUMMARY_PREFIX}\n{SUMMARY}"
    kept = [item for item in history[1:] if not _aborted(item)]
    assert kept == [source(session, m) for m in plan.retained_tail]
    assert orphans(history) <= orphans(resume(bytes(session.records.data)))
    last = json.loads(result.splitlines()[-1])
    assert result.endswith(b"\n")
    assert last["payload"]["type"] in ("token_count", "task_complete")


@pytest.mark.parametrize("path", named(SESSIONS))
def test_reader_agrees_with_the_client(path: Path) -> None:
    session = load(path.read_bytes())
    history = [i for i in resume(path.read_bytes()) if i["type"] not in SEALED and not _aborted(i)]
    told = [m for m in session.messages if m.kind != "compaction_summary"]
    items = [source(session, m) for m in told]
    assert items == [i for i in history if i in items]
    assert len(history) - len(items) == len(session.messages) - len(told)


@pytest.mark.parametrize("path", named(SAMPLES))
def test_samples(path: Path) -> None:
    session = load(path.read_bytes())
    assert isinstance(plan_of(session, 400), CompactionPreparation)
    assert not session.warnings
    assert {codex.kind_of(record.dict) for record in session.records} <= codex.KINDS.keys()
    assert all(codex.sniff(record.dict, False) == 2 for record in session.records)
    assert session.context_window == 258_400


def facts(path: Path) -> dict[str, Any]:
    text = path.with_suffix(".expect.md").read_text()
    return dict(json.loads(text.rpartition("```json")[2].partition("```")[0]))


@pytest.mark.parametrize("path", named(CASES))
def test_cases(path: Path) -> None:
    fact, session = facts(path), load(path.read_bytes())
    settings = CompactionSettings(**fact["settings"], estimator=CHARS)
    plan = prepare_compaction(session.messages, settings)
    if "tokens_before" in fact:
        wanted = fact["tokens_before"]
        low, high = (wanted["min"], wanted["max"]) if isinstance(wanted, dict) else (wanted, wanted)
        assert low <= plan.estimate.tokens <= high
    if isinstance(plan, NoCompaction):
        assert not fact.keys() & {"first_kept_line", "allowed"}
        return
    first = plan.retained_tail[0].line
    assert first in fact.get("allowed", [fact.get("first_kept_line", first)])
    assert plan.is_split_turn == fact.get("split_turn", plan.is_split_turn)
    assert len(session.messages) == fact.get("message_count", len(session.messages))
    assert session.session_id == fact.get("session_id", session.session_id)
    assert {w.line for w in session.warnings} >= set(fact.get("warn_lines", ()))
    output_lines = shrink(session, plan).splitlines(keepends=True)
    assert all(session.records.raw(n - 1) in output_lines for n in fact.get("kept_bytes", ()))
    told = "\n".join(str(m.parts) for m in session.messages if m not in plan.retained_tail)
    assert all(text in told for text in fact.get("in_prompt", ()))
    assert not any(text in told for text in fact.get("not_in_prompt", ()))


# --------------------------------------------------------------------------------------- reading
def test_pending_call_is_named() -> None:
    session = load(rollout(user("a"), call("c0"), answer("done"), call("c1"), output("c9")))
    assert [(w.line, w.text.partition(":")[0]) for w in session.warnings] == [
        (3, "call c0 is without output"),
        (5, "call c1 is pending"),
        (6, "output without call (c9)"),
    ]


def test_arguments_that_are_no_object_stay_text() -> None:
    session = load(
        rollout(user("a"), call("c1", '{"cmd": "cut'), output("c1"), call("c2", '{"n": 1}'), output("c2"))
    )
    arguments = [part.arguments for m in session.messages for part in m.parts if hasattr(part, "arguments")]
    assert arguments == ['{"cmd": "cut', {"n": 1}]
    assert [w.line for w in session.warnings] == [3]
    assert "run (c1)" in session.warnings[0].text


def test_context_is_no_message() -> None:
    kinds = {"internal_chat_message_metadata_passthrough": {"content_item_kinds": ["user.text"]}}
    frame = "<environment_context>\n<cwd>/w</cwd>\n</environment_context>"
    session = load(rollout(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        user(frame), user(frame + " what is this?"), user(frame, **kinds),
        user("<turn_aborted>\nstopped\n</turn_aborted>"), {"type": "ghost_snapshot", "ghost_commit": {}},
    ))  # fmt: skip
    assert [m.line for m in session.messages] == [4, 5]


def test_shell_command_of_the_user() -> None:
    text = ("<user_shell_command>\n<command>\nls\n</command>\n<result>\nExit code: 0\nDuration: 0.1 seconds\n"
            "Output:\na.py\n\n</result>\n</user_shell_command>")  # fmt: skip
    session = load(rollout(user(text), answer("seen")))
    assert session.messages[0].role == "bashExecution"
    assert session.messages[0].parts == (Shell("ls", "a.py\n", "Exit code: 0\nDuration: 0.1 seconds"),)


def test_lines_that_the_client_cannot_read_are_no_messages() -> None:
    bad = line("response_item", user("half \ud83d"), 5)
    broken = line("response_item", {"type": "message", "role": "user"}, 6)
    session = load(rollout(user("a"), answer("b")) + bad + broken + line("response_item", user("c"), 7))
    assert [m.text for m in session.messages] == ["a", "b", "c"]
    assert [w.line for w in session.warnings] == [4, 5]


def test_patched_files() -> None:
    patch = "*** Begin Patch\n*** Add File: new.py\n+x\n*** Update File: a b.py\n@@\n*** End Patch\n"
    shell = json.dumps({"command": ["apply_patch", patch]})
    custom = {"type": "custom_tool_call", "name": "apply_patch", "input": patch, "call_id": "c2"}
    session = load(rollout(user("a"), call("c1", shell), output("c1"), custom))
    for message in session.messages[1::2]:
        assert message.files is not None
        assert (message.files.written, message.files.edited) == ({"new.py"}, {"a b.py"})


def test_usage() -> None:
    def usage(*payloads: dict[str, Any] | tuple[str, dict[str, Any]]) -> list[int | float | None]:
        return [m.usage for m in load(rollout(*payloads)).messages]

    talk = [user("a"), answer("b"), user("c")]
    assert usage(*talk, token_count(7000)) == [None, 7000, None]
    assert usage(*talk, token_count(300_000)) == [None, None, None]
    assert usage(*talk, {"type": "token_count", "info": None, "rate_limits": {}}) == [None, None, None]
    compacted = ("compacted", {"message": "s", "replacement_history": [user("a"), user("s")]})
    assert usage(*talk, token_count(7000), compacted) == [None, None]
    assert usage(*talk, compacted, token_count(7000)) == [None, None]
    assert usage(*talk, compacted, token_count(900, input_tokens=0)) == [None, 900]
    session = load(rollout(*talk, token_count(300_000)))
    assert "above the window" in session.messages[1].usage_note


def test_rollback_takes_turns_back() -> None:
    undo = {"type": "thread_rolled_back", "num_turns": 1}
    started = {"type": "task_started", "turn_id": "t"}
    data = rollout(
        user("1"), answer("1."), started, user("2"), answer("2."), undo, user("3" * 900), answer("3.")
    )
    session = load(data)
    assert [m.text[:2] for m in session.messages] == ["1", "1.", "33", "3."]
    plan = prepare_compaction(session.messages, CompactionSettings(keep_recent_tokens=200, estimator=CHARS))
    assert isinstance(plan, CompactionPreparation)
    assert codex.select(session, plan) == [0, 7, 8]
    kept_too = rollout(user("x" * 900), answer("1."), started, user("2"), answer("2."), undo, answer("3."))
    session = load(kept_too)
    plan = prepare_compaction(session.messages, CompactionSettings(keep_recent_tokens=1, estimator=CHARS))
    assert isinstance(plan, CompactionPreparation)
    assert codex.select(session, plan) == [0, 7]


def test_rollback_reaches_into_a_replacement_history() -> None:
    history = [user("1"), user("2"), user("Another: s")]
    undo = {"type": "thread_rolled_back", "num_turns": 2}
    session = load(
        rollout(("compacted", {"message": "Another: s", "replacement_history": history}), user("3"), undo)
    )
    assert [(m.text, m.kind) for m in session.messages] == [("1", "")]


def test_old_compaction_keeps_user_messages() -> None:
    data = rollout(
        user("old" * 30_000), user("1"), answer("1."), ("compacted", {"message": "told"}), user("2")
    )
    session = load(data)
    assert [m.kind for m in session.messages] == ["compaction_summary", "", "", ""]
    assert [m.text[:4] for m in session.messages] == ["told", "oldo", "1", "2"]
    assert [m.line for m in session.messages] == [5, 2, 3, 6]


def test_summary_as_a_plain_message() -> None:
    session = load(rollout(user(f"{codex.SUMMARY_PREFIX}\ntold"), user("a"), answer("b")))
    assert [(m.kind, m.text) for m in session.messages] == [
        ("compaction_summary", "told"),
        ("", "a"),
        ("", "b"),
    ]


def test_reasoning_stays_with_its_items() -> None:
    think = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    session = load(
        rollout(user("a"), think, call("1"), call("2"), output("1"), output("2"), think, answer("b"))
    )
    groups = [m.group for m in session.messages]
    assert groups[0] is groups[4] is groups[5] is None
    assert groups[1] == groups[2] == groups[3] != groups[6] == groups[7]
    assert session.messages[1].tokens(CHARS) == 0


# --------------------------------------------------------------------------------------- writing
LONG = "word " * 400
PAGINATED = {**HEADER, "session_id": HEADER["id"], "history_mode": "paginated",
             "context_window": {"window_id": "019b0000-1111-7000-8000-000000000002"}}  # fmt: skip


def parsed(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(raw) for raw in data.splitlines()]


def test_shrunk_legacy_file() -> None:
    started = {"type": "task_started", "turn_id": "t2", "model_context_window": 272_000}
    world = ("world_state", {"full": True, "state": {}})
    context = ("turn_context", {"cwd": "/w", "model": "m"})
    data = rollout(user("1"), answer(LONG), token_count(5000), started, context, world,
                   user("<environment_context>x</environment_context>"), user(LONG),
                   {"type": "user_message", "message": LONG}, answer("2."), token_count(250_000))  # fmt: skip
    out = parsed(shrunk(data, 300))
    kinds = [o["type"] + "/" + str(o["payload"].get("type")) for o in out]
    assert kinds == ["session_meta/None", "compacted/None", "event_msg/task_started", "response_item/message",
                     "event_msg/user_message", "response_item/message", "event_msg/token_count",
                     "event_msg/token_count"]  # fmt: skip
    info = out[-1]["payload"]["info"]
    assert info["last_token_usage"]["total_tokens"] < 1000
    assert info["total_token_usage"]["total_tokens"] == 9 * 250_000
    assert info["model_context_window"] == 258_400
    assert [o["timestamp"][14:] for o in out[-2:]] == ["00:11.000Z", "00:11.002Z"]
    assert load(shrunk(data, 300)).messages[-1].usage == info["last_token_usage"]["total_tokens"]


def test_shrunk_paginated_file_is_a_new_session() -> None:
    data = rollout(user("1"), answer(LONG), user(LONG), answer("2."), head=PAGINATED)
    data = data.replace(b'"type": "session_meta"', b'"ordinal": 7, "type": "session_meta"')
    session = load(data)
    plan = plan_of(session, 300)
    assert isinstance(plan, CompactionPreparation)
    out = parsed(shrink(session, plan))
    new = out[0]["payload"]["id"]
    assert new != HEADER["id"]
    assert new[14] == "7"
    assert out[0]["payload"]["session_id"] == new
    assert [o["ordinal"] for o in out] == [0, 1, 2, 3, 4]
    assert codex.file_name(session, checkpoint_of(plan)) == f"rollout-2026-05-01T08-00-00-{new}.jsonl"
    window = out[1]["payload"]
    assert window["window_number"] == 1
    assert window["first_window_id"] == window["previous_window_id"] == "019b0000-1111-7000-8000-000000000002"
    again = load(shrink(session, plan) + line("response_item", user(LONG * 2), 90, ordinal=5))
    second_plan = plan_of(again, 300)
    assert isinstance(second_plan, CompactionPreparation)
    second = parsed(shrink(again, second_plan))[1]["payload"]
    assert (second["window_number"], second["previous_window_id"]) == (2, window["window_id"])
    assert second["first_window_id"] == window["first_window_id"]


def test_only_a_paginated_file_may_not_be_shortened_in_place() -> None:
    assert codex.in_place_refusal(load(rollout(user("a")))) is None
    assert "--append" in str(codex.in_place_refusal(load(rollout(user("a"), head=PAGINATED))))


def test_appended_block() -> None:
    data = rollout(user("1"), answer(LONG), user(LONG), answer("2."), head=PAGINATED).rstrip(b"\n")
    session = load(data)
    plan = plan_of(session, 300)
    assert isinstance(plan, CompactionPreparation)
    result = appended(session, plan)
    assert result.startswith(data + b"\n")
    block = parsed(result)[5:]
    assert [o["ordinal"] for o in block] == [5, 6, 7, 8, 9]
    assert block[3]["payload"]["item"]["type"] == "ContextCompaction"
    assert block[1]["payload"]["replacement_history"][1:] == [user(LONG), answer("2.")]


def test_cut_inside_a_replacement_history() -> None:
    history = [
        user("1"),
        answer(LONG),
        user("2" * 900),
        {"type": "ghost_snapshot"},
        user(codex.SUMMARY_PREFIX + "\ns"),
    ]
    data = rollout(("compacted", {"message": "x", "replacement_history": history}), answer("3"))
    session = load(data)
    assert [m.id for m in session.messages] == ["L2.5", "L2.1", "L2.2", "L2.3", "L3"]
    plan = plan_of(session, 200)
    assert isinstance(plan, CompactionPreparation)
    assert [m.id for m in plan.retained_tail] == ["L2.3", "L3"]
    check_result(session, plan, shrink(session, plan))
    check_result(session, plan, appended(session, plan))


def test_sealed_compaction_stays_behind_the_summary() -> None:
    sealed = {"type": "compaction", "encrypted_content": "b64"}
    data = rollout(("compacted", {"message": "", "replacement_history": [user("1"), sealed]}), answer(LONG),
                   user("2"), answer(LONG))  # fmt: skip
    session = load(data)
    assert [w.line for w in session.warnings] == [2]
    plan = plan_of(session, 300)
    assert isinstance(plan, CompactionPreparation)
    for result in (shrink(session, plan), appended(session, plan)):
        check_result(session, plan, result)
        assert resume(result)[1] == sealed


def test_aborted_note_stays_in_the_tail_and_events_of_removed_calls_go() -> None:
    note = user("<turn_aborted>\nstopped\n</turn_aborted>")
    late = {"type": "exec_command_end", "call_id": "c1"}
    data = rollout(user("1"), call("c1"), output("c1", LONG), user("2" * 900), late, note, answer("3"))
    kept = [o["payload"] for o in parsed(shrunk(data, 200))]
    assert note in kept
    assert late not in kept


def test_mirror_of_the_first_kept_message_stays() -> None:
    mirror = {"type": "agent_message", "message": "2"}
    data = rollout(user("1"), answer(LONG), ("event_msg", mirror), answer("2" * 900))
    assert [o["payload"] for o in parsed(shrunk(data, 200))][2] == mirror


def test_bytes_are_kept() -> None:
    data = b"\xef\xbb\xbf" + rollout(user("1"), answer(LONG)).replace(b"\n", b"\r\n")
    tail = (b'{"timestamp": "2026-05-01T08:01:00Z",  "type":"response_item","payload":' +
            json.dumps(user("2" * 900)).encode() + b" }\r\n")  # fmt: skip
    bad = b'{"timestamp":"2026-05-01T08:01:01Z","type":"event_msg","payload":{"x":"\xe5\xae"}}\r\n'
    torn = b'{"timestamp":"2026-05-01T08:01:02Z","type":"resp'
    result = shrunk(data + tail + bad + torn, 200)
    lines = result.split(b"\r\n")
    assert tail + bad in result
    assert torn not in result
    assert lines[0] + b"\r\n" == load(data).records.raw(0)[3:]
    assert len(lines) == 6
    assert {1, 5, 6} == {w.line for w in load(data + tail + bad + torn).warnings}


def test_unterminated_last_line_gets_its_newline() -> None:
    data = rollout(user("1"), answer(LONG), user("2" * 900)).rstrip(b"\n")
    assert len(parsed(shrunk(data, 200))) == 4


def test_lone_surrogates_are_not_written() -> None:
    session = load(rollout(user("1"), answer(LONG), user("2" * 900)))
    plan = plan_of(session, 200)
    assert isinstance(plan, CompactionPreparation)
    pieces = codex.rebuild(session, plan, codex.select(session, plan), checkpoint_of(plan, "half \ud83d"))
    new = next(p for p in pieces if isinstance(p, bytes))
    assert b"half \xef\xbf\xbd" in new


# --------------------------------------------------------------------------------- what is refused
def test_detection() -> None:
    bare = [{"type": "message", "role": "user", "content": []}, {"type": "reasoning", "summary": []}]
    assert [codex.sniff(item, False) for item in bare] == [0, 0]
    assert codex.sniff({"record_type": "state"}, False) == 2
    assert codex.sniff({"timestamp": "x", "type": "something_new", "payload": {}}, False) == 1
    assert codex.sniff({"type": "session", "id": "x", "timestamp": "x"}, True) == 0


@pytest.mark.skipif(not OLD.exists(), reason="corpus not there")
def test_first_rollouts_are_refused() -> None:
    with pytest.raises(TranscriptError, match="bare items"):
        load(OLD.read_bytes())


@pytest.mark.parametrize("states", [0, 3])
def test_a_rollout_of_bare_items_is_told_and_refused_with_the_way_out(states: int, tmp_path: Path) -> None:
    header = {
        "id": "05997ac9-0e06-4251-8576-0000000000aa",
        "timestamp": "2025-08-06T18:02:11.653Z",
        "instructions": None,
    }
    items = [user("a"), answer(LONG), user("b"), *[{"record_type": "state"}] * states, answer("c" * 4000)]
    source = Source("old.jsonl", b"".join(json.dumps(o).encode() + b"\n" for o in (header, *items)))
    request = Request(CompactionSettings(keep_recent_tokens=20), archive=tmp_path / "a.db")
    with pytest.raises(TranscriptError, match=r"bare items.*--format responses") as refused:
        compact(source, request)
    assert refused.value.exit_code == 4
    with pytest.raises(TranscriptError, match="bare items"):
        load(source.data[:])
    made = compact(source, replace(request, format="responses"))
    assert isinstance(made, Compacted)
    assert made.output.startswith(source.data[: source.data.index(b"\n")])


def test_fork_without_its_own_base_is_refused() -> None:
    base = {"thread_id": "019b0000-0000-7000-8000-00000000000a", "end_ordinal_exclusive": 9}
    head = {**PAGINATED, "history_base": base}
    with pytest.raises(TranscriptError, match="00000000000a"):
        load(rollout(user("a"), head=head))
    compacted = ("compacted", {"message": "s", "replacement_history": [user("s")]})
    out = parsed(shrunk(rollout(compacted, user("1"), answer(LONG), user("2" * 900), head=head), 200))
    assert out[0]["payload"]["history_base"] is None


def test_no_message_is_refused() -> None:
    for data in (b"", b"\n\n", rollout(), b'{"type":"session","id":"x"}\n'):
        with pytest.raises(TranscriptError, match="no usable message"):
            load(data)


def test_message_of() -> None:
    data = rollout(user("a"), ("compacted", {"message": f"{codex.SUMMARY_PREFIX}\ns"}), token_count(5))
    found = [codex.message_of(record) for record in Records(data)]
    assert [m and (m.kind, m.text) for m in found] == [None, ("", "a"), ("compaction_summary", "s"), None]


TOP = "/root"  # the agent that a user talks to


@pytest.mark.parametrize(("changed", "counts"), [
    ({}, True), ({"author": f"{TOP}/a1_b/c"}, True), ({"author": "/morpheus"}, True),
    ({"other_recipients": [f"{TOP}/a"]}, True), ({"author": "/lead"}, False), ({"recipient": "checker"}, False),
    ({"author": f"{TOP}/A"}, False), ({"author": f"{TOP}/a-b"}, False), ({"author": f"{TOP}/"}, False),
    ({"author": f"{TOP}/root"}, False), ({"author": None}, False), ({"other_recipients": ["/lead"]}, False),
    ({"other_recipients": "x"}, False), ({"trigger_turn": "no"}, False), ({"content": []}, False)])  # fmt: skip
def test_a_message_between_agents_counts_where_the_client_reads_it(changed, counts):
    """Each of these was shown to client 0.171.0, or dropped by it."""
    said = {"author": TOP, "recipient": TOP, "content": "No conflicts.", "trigger_turn": False}
    session = load(rollout(user("1"), answer("2"), ("inter_agent_communication", said | changed)))
    assert [m.text for m in session.messages] == ["1", "2", *["No conflicts."] * counts]
    assert ("between agents" in " ".join(w.text for w in session.warnings)) != counts
