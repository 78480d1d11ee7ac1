"""Every kind of record in every format, with what becomes of it in a new file. Nothing falls through unseen.

An adapter's own table (KINDS) says it in words; this one in words that a machine checks, over every
transcript at hand. Each record is looked at by where it stands: before the last removed message, or behind
the first kept one.
"""

import json
import re

import pytest
from judged import FILES, FORMAT, data_of, keeps
from replay import is_context, pi_path

from haocompact.compaction import CHARS, CompactionSettings, ToolCall
from haocompact.errors import TranscriptError
from haocompact.files import Source
from haocompact.formats import FORMATS, detect
from haocompact.formats.session import ReadOptions
from haocompact.pipeline import Compacted, Request, compact, conversations, figures
from haocompact.records import read

TAIL = "archived before the cut, kept behind it"
BETWEEN = "archived before the cut, kept between the kept messages"
LATEST = "the last one before the cut is kept, and all behind it"
NEVER = "archived: the client writes it anew, or the new compaction stands for it"
FIRST = "the first one is kept, for the new file to be a session"
ALWAYS = "kept wherever it stands"
CARRIED = "no client can read it: carried behind the summary, its line kept behind the cut"
LEADING = "kept in front of the conversation; later ones as the messages around them"
NEWEST = "the newest is kept in front of everything, what is before it goes"
APPLIED = "applied to its target; archived before the cut, kept behind it"


def kinds(fate, names, prefix=""):
    return dict.fromkeys((prefix + name for name in names.split()), fate)


TABLE = {
    "pi": {
        "session": FIRST,
        **kinds(TAIL, "message custom_message branch_summary label leaf usage"),
        "context_edit": APPLIED,
        "compaction": NEVER,
        **kinds(LATEST, "model_change thinking_level_change active_tools_change session_info custom"),
    },
    "claude": {
        **kinds(BETWEEN, "system attachment"),
        **kinds(TAIL, "user assistant system/local_command summary file-history-snapshot "
                      "file-history-delta queue-operation content-replacement attribution-snapshot started result "
                      "tools-used api-request api-request-shape api-request-blob"),
        **kinds(NEVER, "progress system/compact_boundary"),
        "pr-link": ALWAYS,
        **kinds(LATEST, "ai-title custom-title tag agent-name agent-color agent-setting mode permission-mode "
                        "worktree-state last-prompt agent_metadata cost-state atis-latch"),
    },
    "codex": {
        "session_meta": FIRST,
        **kinds(NEVER, "compacted retained_context turn_context world_state response_item/message(context) "
                       "response_item/additional_tools response_item/ghost_snapshot event_msg/context_compacted "
                       "event_msg/thread_rolled_back"),
        **kinds(CARRIED, "response_item/compaction response_item/compaction_summary "
                         "response_item/context_compaction"),
        **kinds(TAIL, "inter_agent_communication inter_agent_communication_metadata token_usage_record "
                      "security_risk_score realtime_item rollout_reference"),
        **kinds(TAIL, "message reasoning function_call function_call_output custom_tool_call "
                      "custom_tool_call_output local_shell_call tool_search_call tool_search_output "
                      "web_search_call image_generation_call agent_message", "response_item/"),
        **kinds(TAIL, "task_started turn_started task_complete turn_complete turn_aborted token_count "
                      "user_message agent_message agent_reasoning agent_reasoning_raw_content item_completed "
                      "thread_settings_applied thread_goal_updated patch_apply_begin patch_apply_end "
                      "mcp_tool_call_begin mcp_tool_call_end web_search_begin web_search_end "
                      "image_generation_end exec_command_begin exec_command_end view_image_tool_call "
                      "entered_review_mode exited_review_mode sub_agent_activity error", "event_msg/"),
    },
    "berry": kinds(ALWAYS, "berry-agent/session user/message assistant/message tool/call tool/result turn/start "
                           "turn/end compaction/surface llm/retry compaction/start compaction/end "
                           "compaction/fallback compaction/skip llm/usage request/header todo/write "
                           "session/end-seed session/thinking-level session/paused sandbox/mode gate/decision "
                           "approval/asked approval/decided preset/applied hook/registered kv/written "
                           "doors/updated capability/used credentials/changed plugin/installed "
                           "plugin/uninstalled plugin/mounted plugin/unmounted plugin/toggled plugin/updated "
                           "plugin/opens"),
    "openai": {**kinds(LEADING, "system developer"), **kinds(TAIL, "user assistant tool function")},
    "anthropic": {"system": LEADING, **kinds(TAIL, "user assistant")},
    "haocode": {"system": LEADING, **kinds(TAIL, "user assistant toolResult")},
    "responses": {
        "message(context)": LEADING,
        "compaction": NEWEST,
        **kinds(TAIL, "message reasoning item_reference function_call custom_tool_call web_search_call "
                      "file_search_call computer_call code_interpreter_call image_generation_call "
                      "local_shell_call shell_call apply_patch_call mcp_call tool_search_call "
                      "function_call_output custom_tool_call_output computer_call_output shell_call_output "
                      "local_shell_call_output apply_patch_call_output tool_search_output"),
    },
}  # fmt: skip


def kind_of(form, obj):
    kind = str(obj.get("type"))
    if form == "claude":
        sub = obj.get("subtype")
        return f"system/{sub}" if kind == "system" and sub in ("local_command", "compact_boundary") else kind
    if form == "codex":
        return _codex_kind(kind, obj.get("payload"))
    if form == "berry":
        return str(obj.get("format") or kind)
    if form == "responses":
        return (
            "message(context)"
            if obj.get("role") in ("system", "developer")
            else str(obj.get("type") or ("message" if "role" in obj else "no role"))
        )
    return kind if form == "pi" else str(obj.get("role"))


def _codex_kind(kind, payload):
    if kind not in ("response_item", "event_msg") or not isinstance(payload, dict):
        return kind
    name = f"{kind}/{payload.get('type')}"
    again = payload.get("role") == "developer" or (payload.get("role") == "user" and is_context(payload))
    aborted = "<turn_aborted>" in json.dumps(payload)
    return f"{name}(context)" if name == "response_item/message" and again and not aborted else name


def is_read(name):
    try:
        FORMATS[FORMAT[name]].read(read(data_of(FILES[name])), ReadOptions())
    except TranscriptError:
        return False
    return True


READABLE = [name for name, form in FORMAT.items() if form in TABLE and is_read(name)]


@pytest.mark.parametrize("form", TABLE)
def test_the_adapters_table_has_the_same_kinds(form):
    assert {kind.removesuffix("(context)") for kind in TABLE[form]} == set(FORMATS[form].KINDS)


@pytest.mark.parametrize("form", TABLE)
def test_the_samples_have_every_kind(form):
    files = [
        path for name, path in FILES.items() if path.parent.parent.name == "samples" and FORMAT[name] == form
    ]
    assert {kind_of(form, r.dict) for path in files for r in read(data_of(path)) if r.dict} == set(
        TABLE[form]
    )


@pytest.mark.parametrize("name", READABLE)
def test_every_kind_is_in_the_table(name):
    found = {kind_of(FORMAT[name], r.dict) for r in read(data_of(FILES[name])) if r.dict}
    unknown = found - TABLE[FORMAT[name]].keys()
    session = FORMATS[FORMAT[name]].read(read(data_of(FILES[name])), ReadOptions())
    assert unknown == set(session.unknown)


# ------------------------------------------------------------------------------------ what is true
class Fates:
    """Where each record of one file stands and whether the new file has it."""

    def __init__(self, form, result):
        self.form, plan = form, result.plan
        records = result.planned.session.records
        kept = [m.line for m in plan.kept]
        self.last_removed, self.first_kept = max(m.line for m in plan.removed), min(kept)
        self.last_kept = max(kept)
        gone = set() if form == "berry" else set(result.gone)
        aside = off_the_path(form, records)
        self.rows = [(r.number, kind_of(form, r.dict), r.number - 1 not in gone, key_of(form, r.dict))
                     for r in records if r.dict and r.number not in aside]  # fmt: skip

    def before(self, number):
        return number <= self.last_removed and number < self.first_kept

    def behind(self, number):
        return number >= self.first_kept and number > self.last_removed

    def wrong(self):
        for index, (number, kind, kept, key) in enumerate(self.rows):
            fate = TABLE[self.form].get(kind, TAIL)
            right = getattr(self, RULES[fate])(index, number, kept, key)
            if not right:
                yield f"line {number}, {kind}: {'kept' if kept else 'archived'}, but {fate}"

    def tail(self, index, number, kept, key):
        return not (self.before(number) and kept) and not (self.behind(number) and not kept)

    def between(self, index, number, kept, key):
        return number > self.last_kept or self.tail(index, number, kept, key)

    def never(self, index, number, kept, key):
        return not kept

    def always(self, index, number, kept, key):
        return kept

    def first(self, index, number, kept, key):
        return kept or any(row[1] == self.rows[index][1] for row in self.rows[:index])

    def latest(self, index, number, kept, key):
        later = [row for row in self.rows[index + 1 :] if row[3] == key]
        if self.behind(number):
            return kept
        return not (kept and any(self.before(row[0]) for row in later)) and (kept or bool(later))

    def newest(self, index, number, kept, key):
        return kept == (key not in [row[3] for row in self.rows[index + 1 :]])

    def leading(self, index, number, kept, key):
        talk = ("user", "assistant", "tool", "toolResult", "function", "message")
        in_front = not any(row[1] in talk for row in self.rows[:index])
        return kept if in_front else self.tail(index, number, kept, key)


RULES = {
    **dict.fromkeys((TAIL, APPLIED, CARRIED), "tail"),
    BETWEEN: "between",
    NEVER: "never",
    ALWAYS: "always",
    FIRST: "first",
    LATEST: "latest",
    LEADING: "leading",
    NEWEST: "newest",
}


def key_of(form, obj):
    """What two records must share for the later one to stand for both."""
    return kind_of(form, obj), obj.get("customType") if form == "pi" else None


def off_the_path(form, records):
    """Lines that hang on nothing that is kept: other branches, sidechains, turns that were taken back."""
    if form == "pi":
        entries = [r.dict for r in records if r.dict][1:]
        on = {id(e) for e in pi_path(entries)}
        return {r.number for r in records if r.dict and r.number > 1 and id(r.dict) not in on}
    if form == "codex":
        return taken_back([(r.number, r.dict.get("payload") or {}) for r in records])
    return {r.number for r in records if form == "claude" and r.dict.get("isSidechain")}


def taken_back(lines):
    starts, found = [], set()
    for number, payload in lines:
        if payload.get("type") in ("task_started", "turn_started"):
            starts.append(number)
        elif payload.get("type") == "thread_rolled_back" and starts:
            del starts[-payload["num_turns"] + 1 or len(starts) :]
            found |= set(range(starts.pop(), number))
    return found


@pytest.mark.parametrize("name", READABLE)
def test_the_table_is_true(name):
    for keep in keeps(FILES[name]):
        settings = CompactionSettings(keep_recent_tokens=keep, estimator=CHARS)
        try:
            result = compact(Source(name, data_of(FILES[name])), Request(settings))
        except TranscriptError:
            return
        if isinstance(result, Compacted):
            assert list(Fates(FORMAT[name], result).wrong()) == []


# ------------------------------------------------------------------------------------ unknown kinds
STRANGE = {
    "pi": {"type": "mood", "id": "feedc0de", "value": "glad"},
    "claude": {"type": "mood", "value": "glad"},
    "codex": {"type": "mood", "payload": {"value": "glad"}},
    "berry": {"type": "mood/noted", "data": {"value": "glad"}},
    "openai": {"mood": "glad"},
    "anthropic": {"mood": "glad"},
    "haocode": {"mood": "glad"},
    "responses": {"type": "mood", "value": "glad"},
}
CALLED = {
    "berry": "mood/noted",
    "openai": "no role",
    "anthropic": "no role",
    "haocode": "no role",
}


def with_strange_lines(form, data):
    """A line of an unknown kind behind each of the session's last two lines."""
    lines = data.splitlines(keepends=True)
    found = [dict(json.loads(line)) for line in lines[-2:]]
    strange = []
    for number, obj in enumerate(found):
        own = {"timestamp": obj.get("timestamp")} if "timestamp" in obj else {}
        if form == "pi":
            own |= {"id": f"feedc0d{number}", "parentId": obj["id"]}
        elif form == "berry":
            own |= {"seq": len(lines) - 1 + number, "time": obj["time"]}
        elif form == "claude":
            own |= {"sessionId": obj["sessionId"]}
        strange.append(json.dumps(STRANGE[form] | own).encode() + b"\n")
    if form == "pi":  # a node of the tree as any other
        lines[-1] = json.dumps(found[1] | {"parentId": "feedc0d0"}).encode() + b"\n"
        return b"".join([*lines[:-1], strange[0], lines[-1], strange[1]]), strange
    return b"".join([*lines, *strange]), strange


@pytest.mark.parametrize("form", TABLE)
def test_unknown_kinds_are_carried_through_and_counted(form):
    path = next(p for n, p in FILES.items() if FORMAT[n] == form and p.stem == "chinese")
    data, strange = with_strange_lines(form, path.read_bytes())
    request = Request(CompactionSettings(keep_recent_tokens=400, estimator=CHARS), archive=None)
    result = compact(Source("s", data), request)
    told = figures(result.planned)
    assert told["unknown_kinds"] == {CALLED.get(form, "mood"): 2}
    assert any("unknown kind" in warning["text"] for warning in told["warnings"])
    assert all(line in result.output for line in strange)


# --------------------------------------------------------------------------------------- the samples
NATIVE = {  # formats with a compaction of their client's or API's own, or with our summary in front: its mark
    "pi": b'"type":"compaction"', "claude": b'"compact_boundary"', "codex": b'"compacted"',
    "berry": b"compaction/surface", "haocode": b"compaction_summary", "anthropic": b'"type":"compaction"',
    "anthropic-requests": b'"type": "compaction"', "responses": b'"type": "compaction"',
    "responses-requests": b'"type": "compaction"', "openai": b"[haocompact] Summary of",
    "openai-requests": b"[haocompact] Summary of", "openhands": b"Condensation", "gemini": b'"$set"',
}  # fmt: skip
ONE_CALL = ("sharegpt",)  # a turn of it holds one call
CJK = re.compile("[\u4e00-\u9fff]{4}")


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_has_samples_of_every_sort(form):
    """At least three: one in Chinese, one with parallel calls, one that was compacted before."""
    paths = [p for n, p in FILES.items() if FORMAT[n] == form and p.parent.parent.name == "samples"]
    assert len(paths) >= 3
    assert any(CJK.search(p.read_text("utf-8")) for p in paths)
    assert form in ONE_CALL or any(map(has_parallel_calls, paths))
    assert form not in NATIVE or any(NATIVE[form] in p.read_bytes() for p in paths)


def has_parallel_calls(path):
    """Whether a second call follows a call that has no result yet."""
    waiting = 0
    for message in (
        m for part in conversations(Source(path.name, data_of(path)), Request()) for m in talk(part)
    ):
        calls = sum(isinstance(part, ToolCall) for part in message.parts)
        if waiting + calls > 1:
            return True
        waiting = waiting + calls if calls or message.role == "assistant" else 0
    return False


def talk(source):
    return FORMATS[detect(source.records).name].read(source.records, ReadOptions()).messages
