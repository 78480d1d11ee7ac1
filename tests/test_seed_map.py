"""Where every function and constant of the two seeds is here, and which test shows that it does the same."""

import ast
import hashlib
import importlib
import json
import re
from pathlib import Path

import pytest

from haocompact import prompts

TESTS = Path(__file__).parent
SHARED = TESTS.parents[1] / "shared"
HAOCODE, BERRY = SHARED / "seeds" / "haocode-compaction.txt", SHARED / "seeds" / "berry-ccr.txt"
EXPECTED = SHARED / "oracle" / "pi_expected.jsonl"

# the test that shows it: {seed's name: ours}
HAOCODE_MAP = {
    "test_seed.test_default_settings": {
        "CompactionSettings": "compaction.CompactionSettings",
        "DEFAULT_COMPACTION_SETTINGS": "compaction.DEFAULT_COMPACTION_SETTINGS",
    },
    "test_seed.test_truncation": {
        "TOOL_RESULT_MAX_CHARS": "summarize.TOOL_RESULT_MAX_CHARS",
        "_truncate_for_summary": "summarize._truncate_for_summary",
    },
    "test_seed_map.test_prompts_are_the_seeds": {
        "SUMMARIZATION_SYSTEM_PROMPT": "prompts.SUMMARIZATION_SYSTEM_PROMPT",
        "SUMMARIZATION_PROMPT": "prompts.SUMMARIZATION_PROMPT",
        "UPDATE_SUMMARIZATION_PROMPT": "prompts.UPDATE_SUMMARIZATION_PROMPT",
        "TURN_PREFIX_SUMMARIZATION_PROMPT": "prompts.TURN_PREFIX_SUMMARIZATION_PROMPT",
    },
    "test_seed.test_arguments_no_file_can_hold": {
        "_safe_json": "summarize._safe_json",
    },
    "test_seed.test_serialize_conversation_by_chance": {
        "_content_text": "compaction.Message.text",
        "serialize_conversation": "summarize.serialize_conversation",
    },
    "test_seed.test_file_operations_by_chance": {
        "FileOperations": "compaction.FileOperations",
        "extract_file_ops_from_message": "compaction.extract_file_ops_from_message",
        "compute_file_lists": "compaction.compute_file_lists",
        "format_file_operations": "summarize.format_file_operations",
    },
    "test_seed.test_cuts_by_chance": {
        "CutPointResult": "compaction.CutPoint",
        "find_valid_cut_points": "compaction.find_valid_cut_points",
        "find_turn_start": "compaction.find_turn_start",
        "find_cut_point": "compaction.find_cut_point",
    },
    "test_oracle_pi.test_every_decision_equals_pi_or_is_a_named_exception": {
        "_estimate": "compaction.estimate_tokens",
    },
    "test_seed.test_prepare_compaction_by_chance": {
        "CompactionPreparation": "compaction.CompactionPreparation",
        "prepare_compaction": "compaction.prepare_compaction",
    },
    "test_seed_map.test_a_logged_line_is_stamp_and_the_seeds_line": {
        "_compaction_diag": "skiplog.append_log",
    },
    "test_seed.test_sub_branches": {
        "_nothing_to_summarize_diag": "diag.compaction_line",
    },
    "test_seed.test_summary_prompt": {
        "_build_summary_prompt": "summarize.build_summary_prompt",
    },
    "test_seed.test_requests_by_chance": {
        "generate_summary": "summarize.generate_summary",
        "generate_turn_prefix_summary": "summarize.generate_turn_prefix_summary",
    },
    "test_seed.test_compact_context_by_chance": {
        "compact_context": "summarize.compact_context",
        "_degraded_compact": "summarize.degraded_body",
    },
}
# Named in the text, but defined in modules that it leaves out (context.py, types.py).
HAOCODE_CONTEXT_MAP = {
    "test_oracle_pi.test_every_decision_equals_pi_or_is_a_named_exception": {
        "should_compact": "compaction.should_compact",
        "estimate_context_tokens": "compaction.estimate_context_tokens",
        "estimate_message_tokens": "compaction.estimate_tokens",
    },
    "test_seed.test_prepare_compaction_by_chance": {
        "AgentMessage": "formats.haocode.message_of",
    },
    "test_seed.test_compact_context_by_chance": {
        "ModelConfig": "summarize.Prompted",
    },
}
BERRY_MAP = {
    "test_ccr.test_retrieval": {
        "RENDER_BUDGET_CHARS": "ccr.RENDER_BUDGET",
        "textOf": "formats.berry.render_form",
        "renderProjected": "formats.berry.render_form",
        "directoryText": "ccr.directory_text",
        "rangeText": "ccr.window",
    },
    "test_berry.test_the_samples_own_compaction_can_be_retrieved": {
        "createCcrRetrieveTool": "pipeline.window_text",
    },
    "test_ccr.test_marker_section": {
        "CCR_MARKER_PREFIX": "ccr.CCR_MARKER_PREFIX",
        "ccrMarkerLine": "ccr.with_ccr_section",
        "withCcrSection": "ccr.with_ccr_section",
    },
    "test_ccr.test_hash": {
        "canonicalJson": "ccr.ccr_hash",
        "ccrHashOf": "ccr.ccr_hash",
    },
    "test_ccr.test_directory": {
        "ccrDirectoryOf": "ccr.ccr_directory",
    },
    "test_ccr.test_stripping_as_the_seed": {
        "stripCcrSection": "ccr.strip_ccr_section",
    },
    "test_seed_map.test_refusal_codes": {
        "COMPACTION_CONFIG_TAKEN": "segment.COMPACTION_CONFIG_TAKEN",
    },
    "test_seed_map.test_two_summarizers_are_refused": {
        "COMPACTION_SUMMARIZER_TAKEN": "segment.COMPACTION_SUMMARIZER_TAKEN",
    },
    "test_segment.test_previous_summary": {
        "SUMMARY_PREFIX": "segment.SUMMARY_PREFIX",
        "previousSummaryText": "segment.previous_summary_text",
        "plainTextOf": "segment.previous_summary_text",
    },
    "test_segment.test_threshold": {
        "evaluateThreshold": "segment.evaluate_threshold",
    },
    "test_segment.test_plan_without_repairs_is_alpha_1s": {
        "planSegment": "segment.plan_segment",
        "planFromRange": "segment.plan_from_range",
    },
    "test_segment.test_an_adjusted_range_may_only_hide_less": {
        "validateAdjustedRange": "segment.validate_adjusted_range",
    },
    "test_segment.test_budget": {
        "summaryBudgetFor": "segment.summary_budget",
    },
    "test_segment.test_prompt": {
        "buildSummaryPrompt": "segment.build_summary_prompt",
    },
    "test_segment.test_cooldown": {
        "inCooldown": "segment.in_cooldown",
    },
}
MAPS = (HAOCODE_MAP, HAOCODE_CONTEXT_MAP, BERRY_MAP)
OURS = {name: ours for table in MAPS for names in table.values() for name, ours in names.items()}
SHOWN = sorted({test for table in MAPS for test in table})
KEPT = [
    name for name in OURS if re.fullmatch("[a-z][a-z_]+|[A-Z_]+", name) and name != "estimate_message_tokens"
]


SHA256 = {
    "SUMMARIZATION_SYSTEM_PROMPT": "c464889dcfa60441e642f291445b49523f263e6fb2725d0c25075543a2ec3f8f",
    "SUMMARIZATION_PROMPT": "9b00aa68df1a64279bc36e9093367f638701d48ec82e3d08436f65092a515f9b",
    "UPDATE_SUMMARIZATION_PROMPT": "240c52982209146eae47d73c7172f6ba1dab60f44520bcb6a6ec1a883fef2ec7",
    "TURN_PREFIX_SUMMARIZATION_PROMPT": "9aeeb36ea731a8497d38abb03c2da351d81bcade4b2ae389bb6ae74300cf6ba5",
}


def names_in_haocode():
    text = HAOCODE.read_text(encoding="utf-8")
    for node in ast.parse(text[text.index('"""') :]).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield node.targets[0].id


def names_in_berry():
    text = BERRY.read_text(encoding="utf-8")
    yield from re.findall(r"^\+(?:export )?(?:function|const) (\w+)", text, re.MULTILINE)
    yield from re.findall(r"^\+ +code: '(\w+)'", text, re.MULTILINE)


@pytest.mark.skipif(not HAOCODE.exists(), reason="the seeds are not here")
def test_the_table_is_complete():
    assert sorted(names_in_haocode()) == sorted(n for names in HAOCODE_MAP.values() for n in names)
    assert sorted(names_in_berry()) == sorted(n for names in BERRY_MAP.values() for n in names)


@pytest.mark.parametrize("name", OURS)
def test_ours_exists(name):
    room, *path = OURS[name].split(".")
    found = importlib.import_module(f"haocompact.{room}")
    for step in path:
        found = getattr(found, step, None) or importlib.import_module(f"{found.__name__}.{step}")


@pytest.mark.parametrize("shown", SHOWN)
def test_the_test_exists(shown):
    file, test = shown.split(".")
    tree = ast.parse((TESTS / f"{file}.py").read_text(encoding="utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", KEPT)
def test_names_are_kept(name):
    assert OURS[name].split(".")[-1] in (name, {"RENDER_BUDGET_CHARS": "RENDER_BUDGET"}.get(name))


# ----------------------------------------------------------------------------------------- prompts
@pytest.mark.parametrize("name", SHA256)
def test_prompts_are_the_seeds(name):
    assert hashlib.sha256(getattr(prompts, name).encode()).hexdigest() == SHA256[name]


@pytest.mark.skipif(not HAOCODE.exists(), reason="the seeds are not here")
@pytest.mark.parametrize("name", SHA256)
def test_the_pinned_hashes_are_of_the_seeds_text(name):
    text = HAOCODE.read_text(encoding="utf-8")
    body = ast.parse(text[text.index('"""') :]).body
    value = next(n.value for n in body if isinstance(n, ast.Assign) and n.targets[0].id == name)
    assert hashlib.sha256(ast.literal_eval(value).encode()).hexdigest() == SHA256[name]


@pytest.mark.skipif(not EXPECTED.exists(), reason="the oracle is not here")
def test_the_system_prompt_is_pis():
    rows = (json.loads(line) for line in EXPECTED.read_text(encoding="utf-8").split("\n") if line)
    hashes = {call["system_sha256"] for row in rows for call in row["compact"].get("calls", ())}
    assert hashes == {SHA256["SUMMARIZATION_SYSTEM_PROMPT"]}


# -------------------------------------------------------------------------------- shown only here
def test_a_logged_line_is_stamp_and_the_seeds_line(tmp_path):
    from haocompact.compaction import NoCompaction
    from haocompact.diag import compaction_line
    from haocompact.skiplog import append_log, log_line, parse_log_line

    skip = NoCompaction("tail_is_summary", None, {"msgs": 3, "tail_head": "压缩\n'x'"})
    append_log(tmp_path / "deep" / "log", log_line(skip, "s.jsonl"))
    line = (tmp_path / "deep" / "log").read_text(encoding="utf-8")
    assert re.fullmatch(r"\[\S+\] " + re.escape(compaction_line(skip)) + r' source="s.jsonl"\n', line)
    assert compaction_line(skip) == "[COMPACT_NONE] branch=tail_is_summary msgs=3 tail_head=\"压缩\\n'x'\""
    seeds = parse_log_line("[12:34:56.789] [COMPACT_NONE] branch=nothing_to_summarize sub=cut_pinned_at_zero")
    assert (seeds.time, seeds.branch, seeds.sub) == (
        "12:34:56.789",
        "nothing_to_summarize",
        "cut_pinned_at_zero",
    )


def test_refusal_codes():
    from haocompact import segment

    for code in ("COMPACTION_CONFIG_TAKEN", "COMPACTION_SUMMARIZER_TAKEN"):
        assert getattr(segment, code) == code


def test_two_summarizers_are_refused(tmp_path):
    from typer.testing import CliRunner

    from haocompact.cli import app

    (tmp_path / "s.jsonl").write_text('{"role":"user","content":"x"}\n')
    words = ["compact", str(tmp_path / "s.jsonl"), "--summarizer", "extract", "--command", "cat"]
    error = CliRunner().invoke(app, words).exception
    assert (error.exit_code, error.code) == (2, "COMPACTION_SUMMARIZER_TAKEN")
