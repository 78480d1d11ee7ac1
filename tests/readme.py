"""Fill the generated parts of README.md: `python tests/readme.py` writes them, `--check` only compares.

    <!-- run: COMMAND -->        the command and what it prints; {hash} is the marker in compacted.jsonl
    <!-- generated: NAME -->     a table or an object, made by the function of that name in BLOCKS
    ...
    <!-- end -->

All commands of one pass run in order in one temporary folder that holds a copy of samples/, with their own
archive and log. Times and that folder's name are masked, so that the result is the same everywhere.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
WIDTH = 100
KEEP = 2000
KEEP_SMALL = 500  # for the table of all samples: most are short
SAMPLE = "samples/pi/weather-station.jsonl"
LONG_AGO = 1_760_000_000  # when the copied samples were last written, so that no file counts as busy

BLOCK = re.compile(r"(<!-- (run|generated): (.+?) -->\n).*?(<!-- end -->)", re.S)
RUNNABLE = re.compile(r"<!-- runs(?:: (?P<tools>[\w ]+))? -->\n```sh\n(?P<script>.*?)```", re.S)
MOMENT = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?P<ms>\.\d{3})?\+00:00|\d{4}-\d\d-\d\dT[\d:.+]*(?=…)"
)
MARKER = re.compile(r"<<ccr:([0-9a-f]{16})>>")


class Stage:
    """A folder with the samples, and `haocompact` on the path of every command that runs there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("samples", "sessions"):
            shutil.copytree(ROOT / "samples", folder / name)
            for path in (folder / name).rglob("*"):
                os.utime(path, (LONG_AGO, LONG_AGO))
        tools = folder / ".bin"
        tools.mkdir()
        program = tools / "haocompact"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m haocompact "$@"\n', "utf-8")
        program.chmod(0o755)
        home = folder / ".home"
        self.config = home / ".config/haocompact/config.toml"
        self.config.parent.mkdir(parents=True)
        self.config.touch()
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HAOCOMPACT_", "XDG_"))}
        self.environment = kept | {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(home),
            "HAOCOMPACT_ARCHIVE": str(home / ".local/share/haocompact/archive.db"),
            "HAOCOMPACT_LOG": str(home / ".local/state/haocompact/log/compaction_diag.log"),
            "HAOCOMPACT_CONFIG": str(self.config),
            "COLUMNS": str(WIDTH),
            "NO_COLOR": "1",
            "PYTHONUTF8": "1",
            "TZ": "UTC",
        }

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Both streams in one, as a terminal shows them."""
        return subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
        )

    def shown(self, script: str, *, may_fail: bool = False) -> str:
        """What it prints, without what changes from run to run. Raises SystemExit when it fails."""
        done = self.run(script)
        if "Traceback (most recent call last)" in done.stdout or (done.returncode and not may_fail):
            raise SystemExit(f"{script}\nexit {done.returncode}\n{done.stdout}")
        return self.masked(done.stdout)

    def masked(self, text: str) -> str:
        text = text.replace(str(self.folder / ".home"), "~").replace(f"{self.folder}{os.sep}", "")
        text = MOMENT.sub(_same_moment, text)
        return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))

    def filled(self, script: str) -> str:
        if "{hash}" not in script:
            return script
        markers = MARKER.findall((self.folder / "compacted.jsonl").read_text("utf-8"))
        return script.replace("{hash}", markers[-1])

    def objects(self, script: str) -> list[dict[str, Any]]:
        """The JSON lines that a command prints."""
        lines = self.shown(script, may_fail=True).split("\n")
        return [json.loads(line) for line in lines if line.startswith("{")]


def _same_moment(match: re.Match[str]) -> str:
    if " " in match[0]:
        return "2026-05-11 06:30:00"
    return f"2026-05-11T06:30:00{'.000' if match['ms'] else ''}+00:00"[: len(match[0])]


@contextmanager
def stage() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="haocompact-readme-") as folder:
        yield Stage(Path(folder).resolve())


# ---------------------------------------------------------------------------------------- blocks
def _fenced(text: str, language: str = "") -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text}\n{fence}\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def command_block(stage: Stage, script: str) -> str:
    script = stage.filled(script)
    return _fenced(f"$ {script}\n{stage.shown(script)}".rstrip(), "console")


def formats(stage: Stage) -> str:
    from haocompact.formats import FORMATS

    return _table(("`--format`", "what it is"), [(f"`{name}`", form.TITLE) for name, form in FORMATS.items()])


def samples(stage: Stage) -> str:
    """What each sample does at the small keep-recent; for a skip, why."""
    settings = f"--json --quiet --keep-recent {KEEP_SMALL} samples"
    plans = {o["path"].removesuffix(":1"): o for o in stage.objects(f"haocompact plan {settings}")}
    rows = []
    for done in stage.objects(f"haocompact compact --dry-run --no-archive {settings}"):
        result = f"nothing to compact: `{done.get('sub') or done.get('branch')}`"
        if done["result"] == "error":
            result = done["message"]
        elif done["result"] == "ok":
            result = f"{done['summarize'] + done['prefix']} summarised, {done['kept']} kept"
            result += ", splits a turn" if done["is_split_turn"] else ""
        rows.append((f"`{done['path']}`", str(plans[done["path"]].get("messages", "")), result))
    return _table(("sample", "messages", f"at `--keep-recent {KEEP_SMALL}`"), rows)


def exit_codes(stage: Stage) -> str:
    from haocompact import errors

    rows = [("0", "", "Done. A skipped compaction counts as done."), ("1", "", "A bug: please report it.")]
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.HaoError)]
    for found in sorted(classes, key=lambda c: c.exit_code):
        if found is not errors.HaoError:
            text = " ".join((found.__doc__ or "").split())
            rows.append((str(found.exit_code), f"`{found.code}`", text))
    return _table(("exit", "`code` in JSON", "meaning"), rows)


def causes(stage: Stage) -> str:
    from haocompact.diag import TITLES

    return _table(("`cause`", "meaning"), [(f"`{name}`", title) for name, title in TITLES.items()])


def estimates(stage: Stage) -> str:
    """The first table of the calibration, as measured with tiktoken's own encodings."""
    text = (ROOT / "tests" / "golden" / "cjk-table.md").read_text("utf-8")
    return text.split("\n\n")[0]


def _object(found: dict[str, Any]) -> str:
    """One JSON object a reader can read: a line a field, long lists cut."""
    lines = []
    for key, value in found.items():
        if isinstance(value, list) and len(value) > 1 and isinstance(value[0], dict):
            first = json.dumps(value[0], ensure_ascii=False)
            text = f"[\n    {first},\n    ... {len(value) - 1} more\n  ]"
        else:
            text = json.dumps(value, ensure_ascii=False)
        lines.append(f"  {json.dumps(key)}: {text}")
    return _fenced("{\n" + ",\n".join(lines) + "\n}", "js")


def json_plan(stage: Stage) -> str:
    return _object(stage.objects(f"haocompact plan --json --keep-recent {KEEP} {SAMPLE}")[0])


def json_compact(stage: Stage) -> str:
    return _object(
        stage.objects(f"haocompact compact --json --keep-recent {KEEP} {SAMPLE} -o compacted.jsonl")[0]
    )


def json_diag(stage: Stage) -> str:
    return _object(stage.objects(f"haocompact diag --json {SAMPLE}")[0])


def json_retrieve(stage: Stage) -> str:
    return _object(stage.objects("haocompact retrieve --json compacted.jsonl")[0])


def json_error(stage: Stage) -> str:
    return _object(stage.objects("haocompact plan --json missing.jsonl")[0])


BLOCKS: dict[str, Callable[[Stage], str]] = {
    "estimates": estimates,
    "formats": formats,
    "samples": samples,
    "exit codes": exit_codes,
    "causes": causes,
    "json plan": json_plan,
    "json compact": json_compact,
    "json diag": json_diag,
    "json retrieve": json_retrieve,
    "json error": json_error,
}


# ------------------------------------------------------------------------------------- the page
def render(text: str) -> str:
    """The page with every generated part made anew."""
    with stage() as on:

        def filled(match: re.Match[str]) -> str:
            head, kind, what, tail = match.groups()
            if kind == "generated" and what not in BLOCKS:
                raise SystemExit(f"README.md: no such block: {what} (known: {', '.join(BLOCKS)})")
            return head + (command_block(on, what) if kind == "run" else BLOCKS[what](on)) + tail

        return BLOCK.sub(filled, text)


def main(arguments: list[str]) -> int:
    old = README.read_text("utf-8")
    new = render(old)
    if "--check" in arguments:
        sys.stdout.writelines(
            difflib.unified_diff(old.splitlines(True), new.splitlines(True), "README.md", "now")
        )
    elif new != old:
        README.write_text(new, "utf-8")
        print("README.md has changed")
    return int(new != old and "--check" in arguments)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main(sys.argv[1:]))
