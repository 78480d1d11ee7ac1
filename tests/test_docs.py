"""README.md, the samples and the help texts say what the code does."""

import json
import re
import shlex
import shutil
import sys
import tomllib

import pytest
import readme
import typer

from haocompact import errors
from haocompact.cli import app
from haocompact.compaction import CompactionSettings
from haocompact.files import open_source
from haocompact.formats import FORMATS, READ_ONLY
from haocompact.pipeline import Compacted, Request, compact, conversations

TEXT = readme.README.read_text("utf-8")
COMMANDS = typer.main.get_command(app).commands
SAMPLES = {
    p.relative_to(readme.ROOT / "samples").as_posix(): p for p in sorted(readme.ROOT.glob("samples/*/*"))
}
SKIPPED = {"openai/plain-chat.jsonl": "total_below_keep_recent"}  # a chat so short that nothing can be gained
HELP = re.compile(r"(?<=<!-- run: haocompact )(\w*) ?--help -->\n(.*?)<!-- end -->", re.S)


@pytest.fixture(scope="module")
def page():
    return readme.render(TEXT)


@pytest.fixture
def stage():
    with readme.stage() as on:
        yield on


def without_help(text):
    """Help texts are compared by content: their layout is that of whichever Typer is installed."""
    return HELP.sub(lambda m: f"{m[1]} --help", text)


def test_the_generated_parts_are_current(page):
    assert without_help(page) == without_help(TEXT), "make readme refreshes them"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented(name):
    shown = " ".join(dict(HELP.findall(TEXT))[name].split())
    params = [p for p in COMMANDS[name].params if not getattr(p, "hidden", False)]
    for param in params:
        assert param.help, f"{param.name} has no help text"
        assert " ".join(param.help.split()) in shown
    options = {o for p in params for o in p.opts if o.startswith("--")}
    assert options <= set(re.findall(r"--[a-z][a-z-]*", shown))
    assert set(
        re.findall(r"^ +(?:-\w, )?(--[a-z][a-z-]*)", dict(HELP.findall(TEXT))[name], re.M)
    ) <= options | {"--help"}


def test_options_named_in_the_text_exist():
    params = [p for c in COMMANDS.values() for p in c.params]
    known = {o for p in params for o in (*p.opts, *p.secondary_opts)} | {"--version", "--help"}
    known |= {"--install-completion", "--show-completion"}
    named = set(
        re.findall(
            r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"^.*\b(?:fzf|xargs|pi|claude) .*$", "", TEXT, flags=re.M)
        )
    )
    assert named <= known


def test_every_exit_code_is_in_the_table():
    table = TEXT.split("## Exit codes")[1].split("\n## ")[0]
    for found in vars(errors).values():
        if isinstance(found, type) and issubclass(found, errors.HaoError) and found is not errors.HaoError:
            assert f"| {found.exit_code} | `{found.code}` |" in table


@pytest.mark.parametrize("block", [name for name in readme.BLOCKS if name.startswith("json ")])
def test_every_json_field_is_documented(block, stage):
    if block == "json retrieve":
        readme.json_compact(stage)
    fields = re.findall(r'^  "(\w+)":', readme.BLOCKS[block](stage), re.M)
    section = TEXT.split("\n## JSON")[1].split("\n## ")[0]
    assert fields
    assert [f for f in fields if not re.search(rf"^\|.*`{f}`.*\|", section, re.M)] == []


@pytest.mark.parametrize(
    "match", list(readme.RUNNABLE.finditer(TEXT)), ids=lambda m: m["script"].split("\n")[0][:40]
)
def test_runnable_blocks_run(match, stage):
    missing = [tool for tool in (match["tools"] or "").split() if not shutil.which(tool)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    done = stage.run(f"set -euo pipefail\n{match['script']}")
    assert done.returncode == 0, done.stdout
    assert done.stdout.strip() or "--quiet" in match["script"]


def test_the_hook_of_claude_code_runs(stage):
    if not shutil.which("jq"):
        pytest.skip("jq is not installed")
    (block,) = re.findall(r"```json\n(.*?)```", TEXT, re.S)
    (hook,) = json.loads(block)["hooks"]["PreCompact"][0]["hooks"]
    told = {"session_id": "s", "transcript_path": f"{stage.folder}/sessions/claude/chinese.jsonl", "cwd": "/",
            "permission_mode": "default", "hook_event_name": "PreCompact", "trigger": "auto",
            "custom_instructions": None}  # fmt: skip
    done = stage.run(
        f"printf %s {shlex.quote(json.dumps(told))} | HAOCOMPACT_KEEP_RECENT=500 sh -c {shlex.quote(hook['command'])}"
    )
    assert (done.returncode, done.stdout) == (0, "")
    (made,) = (stage.folder / ".home/.claude/compacted").iterdir()
    assert made.stat().st_size < (stage.folder / "sessions/claude/chinese.jsonl").stat().st_size


def test_the_extension_for_pi_runs(stage):
    if not shutil.which("node"):
        pytest.skip("node is not installed")
    (block,) = (b for b in re.findall(r"```js\n(.*?)```", TEXT, re.S) if "session_before_compact" in b)
    (stage.folder / "extension.mjs").write_text(block, "utf-8")
    (stage.folder / "run.mjs").write_text(
        'import extension from "./extension.mjs";\n'
        'const file = "sessions/pi/weather-station.jsonl";\n'
        'const ctx = { sessionManager: { getSessionFile: () => file, getLeafId: () => "b065c66f" } };\n'
        "const event = { preparation: { settings: { keepRecentTokens: Number(process.argv[2]) } } };\n"
        "extension({ on: (name, hook) => console.log(JSON.stringify([name, hook(event, ctx) ?? null])) });\n",
        "utf-8",
    )
    done = stage.run("node run.mjs 2000 && node run.mjs 20000")
    assert done.returncode == 0, done.stdout
    (name, made), (_, skipped) = map(json.loads, done.stdout.splitlines())
    assert name == "session_before_compact"
    assert made["compaction"]["summary"].startswith("## Goal")
    kept = next(x for x in (stage.folder / "sessions/pi/weather-station.jsonl").read_text().splitlines()
                if json.loads(x)["id"] == made["compaction"]["firstKeptEntryId"])  # fmt: skip
    assert kept
    assert skipped is None


def test_the_python_example_runs(stage):
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    (stage.folder / "example.py").write_text(block, "utf-8")
    done = stage.run(f"{shlex.quote(sys.executable)} -W ignore example.py")
    assert done.returncode == 0, done.stdout
    assert "39 messages are behind 57f7406cdac1a345 now: ## Goal" in done.stdout


def test_the_settings_example_is_accepted(stage):
    (example,) = re.findall(r"```toml\n(.*?)```", TEXT, re.S)
    assert tomllib.loads(example)
    stage.config.write_text(example, "utf-8")
    (plan,) = stage.objects(f"haocompact plan --json {readme.SAMPLE}")
    assert (plan["keep_recent_tokens"], plan["window"]) == (12_000, 1_000_000)


def test_every_sample_folder_is_a_known_format_and_each_format_has_samples():
    assert {name.split("/")[0] for name in SAMPLES} == set(FORMATS)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample_compacts_or_has_a_reason(name):
    settings, form = CompactionSettings(keep_recent_tokens=readme.KEEP_SMALL), name.split("/")[0]
    with open_source(str(SAMPLES[name])) as source:
        request = Request(settings=settings, to="openai" if form in READ_ONLY else "")
        results = [compact(part, request) for part in conversations(source, request)]
        result = next((r for r in results if isinstance(r, Compacted)), results[0])
    assert result.planned.session.format == form
    if form in READ_ONLY:
        assert result.output if isinstance(result, Compacted) else result.converted
    elif name in SKIPPED:
        assert result.skip.sub == SKIPPED[name]
    else:
        assert isinstance(result, Compacted)
        assert not result.planned.session.warnings


def test_the_demo_splits_a_turn():
    settings = CompactionSettings(keep_recent_tokens=readme.KEEP)
    with open_source(str(readme.ROOT / readme.SAMPLE)) as source:
        result = compact(source, Request(settings=settings))
    assert result.plan.is_split_turn


def test_links_within_the_page_lead_somewhere():
    heads = re.findall(r"^#+ (.*)$", TEXT, re.M)
    anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    links = re.findall(r"\]\(#([^)]*)\)", TEXT)
    assert len(links) > 10
    assert set(links) <= anchors
