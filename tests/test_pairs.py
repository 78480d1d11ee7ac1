"""Calls and results in Responses items and in requests, told from the APIs' references alone (the rest: test_replay).

Every kept result has its call before it, and every kept call that had a result has it.
"""

import json
from collections import Counter

import pytest
from judged import FILES, FORMAT, data_of, run
from replay import READERS, anthropic, chat, codex_atoms, objects, unpaired

from haocompact.formats import WRITABLE

FRAMES = ("body", "request", "request_params")
ARRAYS = {"openai-requests": ("messages",), "anthropic-requests": ("messages",),
          "responses-requests": ("input", "output")}  # fmt: skip
OTHERS = ("computer_call", "shell_call", "local_shell_call", "apply_patch_call")
KEEPS = (40, 400, 2000)


def responses(data):
    """Items in order, as the API pairs them: by call_id, whatever stands between."""
    for item in objects(data):
        kind = str(item.get("type"))
        if kind in OTHERS:
            yield ("call", item.get("call_id"), kind)
        elif kind.removesuffix("_output") in OTHERS:
            yield ("result", item.get("call_id"), "")
        else:
            yield from codex_atoms(item)


INNER = {"openai-requests": chat, "anthropic-requests": anthropic, "responses-requests": responses}


def conversations(form, data):
    """One list of atoms a conversation of the file."""
    if form == "responses":
        return [list(responses(data))]
    return [list(INNER[form](b"\n".join(json.dumps(m).encode() for m in _array(form, line))))
            for line in objects(data)]  # fmt: skip


def _array(form, line):
    held = next((line[f] for f in FRAMES if isinstance(line.get(f), dict)), line)
    return next((held[key] for key in ARRAYS[form] if isinstance(held.get(key), list)), [])


NAMES = [n for n, form in FORMAT.items() if form in (*INNER, "responses")]


def compacted(name, keep, folder):
    """Bytes of the compacted file, None where there is nothing to compact or writing is refused."""
    out = folder / f"{keep}.jsonl"
    words = ("--keep-recent", str(keep), "--estimator", "chars", "--archive", str(folder / "a.db"))
    code = run("compact", *words, "--log", str(folder / "log"), "--quiet", "-o", str(out), str(FILES[name]))
    assert code in (0, 4), code
    made = out.read_bytes() if code == 0 else None
    return None if made in (None, data_of(FILES[name])) else made


def faults(before, after):
    """Ids that a compaction left without their other half."""
    (orphans, unanswered), (had_orphans, had_unanswered) = unpaired(after), unpaired(before)
    return (Counter(orphans) - Counter(had_orphans)) + (Counter(unanswered) - Counter(had_unanswered))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_keeps_its_other_half(name, tmp_path):
    form, old = FORMAT[name], data_of(FILES[name])
    for keep in KEEPS:
        new = compacted(name, keep, tmp_path)
        if new is not None:
            told = list(zip(conversations(form, old), conversations(form, new), strict=True))
            assert [faults(before, after) for before, after in told] == [Counter()] * len(told)


@pytest.mark.parametrize("form", [*INNER, "responses"])
def test_the_checker_sees_a_lost_half(form, tmp_path):
    """Of one compacted sample, each call and each result taken away in turn."""
    names = [n for n in NAMES if FORMAT[n] == form and FILES[n].parent.parent.name == "samples"]
    found = [compacted(n, keep, tmp_path) for n in names for keep in KEEPS]
    atoms = max((c for made in found if made for c in conversations(form, made)), key=len)
    halves = [i for i, atom in enumerate(atoms) if atom[0] in ("call", "result") and atom[1]]
    paired = [i for i in halves if atoms[i][1] not in [*unpaired(atoms)[0], *unpaired(atoms)[1]]]
    assert paired
    assert all(faults(atoms, atoms[:i] + atoms[i + 1 :]) for i in paired)


def test_every_writable_format_has_a_judge():
    assert {*READERS, *INNER, "responses"} == set(WRITABLE)
