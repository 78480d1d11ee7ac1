"""A session as haocompact reads it and a compacted file as it writes it, in the form that judges compare."""

import inspect
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from conftest import CORPUS, ROOT, transcripts

from haocompact import cli
from haocompact.compaction import (
    CHARS,
    COMPACTION_SUMMARY,
    SYSTEM_PATCH,
    WITHDRAWN,
    CompactionSettings,
    Image,
    NoCompaction,
    Shell,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)
from haocompact.errors import TranscriptError
from haocompact.files import Source, open_source
from haocompact.formats import FORMATS, detect
from haocompact.formats.session import ReadOptions
from haocompact.pipeline import Planned, Request, plan
from haocompact.records import read

SHARED = ROOT.parent / "shared"
FILES = transcripts(
    ROOT / "samples", ROOT / "tests" / "cases", CORPUS, SHARED / "cases", SHARED / "clients" / "codex" / "ground",
    SHARED / "clients" / "claude" / "ground",
)  # fmt: skip
WAYS = ("shrink", "append")
APPENDABLE = ("pi", "claude", "codex", "berry")
CAN_APPEND = "append" in inspect.signature(cli.compact).parameters
_LONE = re.compile("[\ud800-\udfff]")


def format_of(path):
    """The name of a file's format, or None."""
    try:
        return detect(read(data_of(path))).name
    except TranscriptError:
        return None


def data_of(path):
    with open_source(str(path)) as source:
        return source.data[:]


def of_format(*names):
    """Name -> path of every file at hand that is of these formats."""
    return {name: path for name, path in FILES.items() if FORMAT[name] in names}


FORMAT = {name: format_of(path) for name, path in FILES.items()}


def keeps(path):
    """Token budgets that make a session of this size compact in different places."""
    return (40, 400) if path.stat().st_size < 100_000 else (2000, 20000)


# ------------------------------------------------------------------------------------- as atoms
def said(messages):
    """Atoms (see replay.py) of messages that reach the model."""
    sent = (m for m in messages if not m.hidden and m.kind not in (SYSTEM_PATCH, WITHDRAWN))
    return [a for m in sent if m.role != "system" or m.kind == "local_command" for a in _atoms(m)]


def _atoms(message):
    if message.kind == COMPACTION_SUMMARY:
        return [("summary", message.text)]
    speaker = "assistant" if message.role == "assistant" else "user"
    return [atom for part in message.parts for atom in _atoms_of(part, speaker)]


def _atoms_of(part, speaker):
    match part:
        case Text(text):
            return [(speaker, text)] if text else []
        case Thinking(text):
            return [("thinking", text)] if text else []
        case Image():
            return [("image",)]
        case Shell():
            return [("shell", part.command, part.output)]
        case ToolCall():
            return [("call", part.id, part.name)]
        case ToolResult():
            return [("result", part.id, "\n".join(filter(None, part.texts))), *[("image",)] * part.images]
    return []


def clean(atoms):
    """Half a surrogate pair and what was no UTF-8 look alike."""
    return [tuple(_LONE.sub("\ufffd", a) if isinstance(a, str) else a for a in atom) for atom in atoms]


def difference(ours, theirs):
    """ "" when equal (a summary may stand in a client's frame), else where they part first."""
    ours, theirs = clean(ours), clean(theirs)
    for index in range(max(len(ours), len(theirs))):
        a = ours[index] if index < len(ours) else None
        b = theirs[index] if index < len(theirs) else None
        framed = a and b and a[0] == b[0] == "summary" and a[1].strip() in b[1]
        if a != b and not framed:
            return f"at {index} of {len(ours)} and {len(theirs)}: ours {_short(a)}, theirs {_short(b)}"
    return ""


def _short(atom):
    return atom and tuple(str(a)[:90] for a in atom)


# ----------------------------------------------------------------------------------- compacting
@dataclass(frozen=True)
class Outcome:
    """One compaction: what was planned, and the file that was written."""

    planned: Planned
    path: Path
    way: str

    @property
    def expected(self):
        """What the client should show now: the summary, then the kept tail."""
        return [("summary", self.summary), *said(self.planned.outcome.retained_tail)]

    @property
    def summary(self):
        session = FORMATS[self.planned.session.format].read(read(self.path.read_bytes()), ReadOptions())
        return session.messages[0].text


def planned(path, keep):
    """The plan for one file; None when it can't be read or there is nothing to compact."""
    settings = CompactionSettings(keep_recent_tokens=keep, estimator=CHARS)
    try:
        found = plan(Source(str(path), data_of(path)), Request(settings))
    except TranscriptError:
        return None
    return None if isinstance(found.outcome, NoCompaction) else found


def compacted(path, keep, way, folder):
    """Outcome of the command line's `compact`, or None when it leaves the file alone."""
    found = planned(path, keep)
    if found is None:
        return None
    target = folder / f"{path.stem[:60]}-{keep}-{way}.jsonl"
    words = ["--keep-recent", str(keep), "--estimator", "chars", "--archive", str(folder / "archive.db")]
    words += ["--log", str(folder / "log"), "--check", "--quiet", "-o", str(target), str(path)]
    code = run("compact", *(["--append"] if way == "append" else []), *words)
    assert code in (0, 3, 4, 7), code
    return Outcome(found, target, way) if code == 0 else None


def run(*words):
    """Exit code of one command, in this process; nobody's settings count."""
    quiet = mock.patch.dict(os.environ, HAOCOMPACT_CONFIG=os.devnull)
    with quiet, mock.patch.object(sys, "argv", ["haocompact", *words]):
        try:
            cli.main()
        except SystemExit as end:
            return end.code or 0
    return 0
