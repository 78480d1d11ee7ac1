"""The archive in its owner's hands: figures, all originals as files, pruning, several archives, three answers."""

import json
import os
import re
import shutil
import sqlite3
from hashlib import sha256
from pathlib import Path

import pytest
from test_batch import numbered
from test_cli import CHAT, KEEP, SMALL, put, run  # noqa: F401

from haocompact import upkeep
from haocompact.archive import Archive, Run

HASH = re.compile(r"<<ccr:([0-9a-f]{16})>>")


def compacted(run, path, data=CHAT, archive="a.db"):
    """Compact a new transcript in place; the hash of what went."""
    put(path, data)
    (done,) = run("compact", path, "--in-place", "--json", "--archive", archive, *KEEP).json
    assert done["result"] == "ok"
    return done["hash"]


def segments(path="a.db"):
    with Archive.open(path) as archive:
        return {s.hash for s in archive.segments()}


# ------------------------------------------------------------------------------------- three answers
def test_unknown_damaged_and_elsewhere_are_three_answers(run):
    hash = compacted(run, "s.jsonl")
    compacted(run, "other.jsonl", numbered(1), "b.db")
    for words in ([hash], [hash, "--raw"], [hash, "--restore"], ["--restore"]):
        found = run("retrieve", "s.jsonl", *words, "--archive", "b.db", "--json")
        assert (found.code, len(found.lines)) == (6, 1)
        assert "archived elsewhere" in found.err
        assert "b.db" in found.err
        assert "--archive" in found.err
        assert hash in found.err
    for words in (["f" * 16], ["s.jsonl", "f" * 16], ["other.jsonl", "f" * 16]):
        found = run("retrieve", *words, "--archive", "a.db")
        assert (found.code, "not found" in found.err, "elsewhere" in found.err) == (6, True, False)
    with sqlite3.connect("a.db") as db:
        db.execute("UPDATE parts SET data = X'00'")
    db.close()
    for words in ([hash], [hash, "--raw"], ["--restore"], ["--verify"]):
        found = run("retrieve", "s.jsonl", *words, "--archive", "a.db")
        assert (found.code, "elsewhere" in found.err, "not found" in found.err) == (6, False, False)


def test_several_archives_are_read_as_one(run, monkeypatch):
    one = compacted(run, "one.jsonl", numbered(1), "store/one.db")
    two = compacted(run, "two.jsonl", numbered(2), "store/two.db")
    named = ["--archive", "store/one.db", "--archive", "store/two.db"]
    for words in (named, ["--archive", "store"]):
        assert run("retrieve", "one.jsonl", "--restore", *words).out == numbered(1)
        assert run("retrieve", "two.jsonl", "--restore", *words).out == numbered(2)
        assert run("retrieve", two, "--raw", *words).out in numbered(2)
        assert run("retrieve", "--verify", *words).code == 0
        assert [o["originals"] for o in run("retrieve", "--stats", "--json", *words).json] == [1, 1]
        assert len(run("retrieve", "--export", "out", *words).out.splitlines()) == 2
    monkeypatch.setenv("HAOCOMPACT_ARCHIVE", f"store/one.db{os.pathsep}store/two.db")
    assert run("retrieve", one, "--raw").code == run("retrieve", two, "--raw").code == 0
    assert run("retrieve", one, "--archive", "elsewhere").code == 6
    os.mkdir("empty")
    assert run("retrieve", one, "--archive", "empty").code == 6


def test_a_single_archive_in_the_settings_file(run, monkeypatch):
    hash = compacted(run, "s.jsonl")
    put("settings.toml", b'archive = "a.db"\nexclude = ["*.bak.jsonl"]\n')
    monkeypatch.setenv("HAOCOMPACT_CONFIG", "settings.toml")
    assert run("retrieve", hash, "--raw").code == 0


# ------------------------------------------------------------------------------------ stats, export
def test_stats(run):
    compacted(run, "s.jsonl")
    (found,) = run("retrieve", "--stats", "--archive", "a.db", "--json").json
    assert (found["segments"], found["originals"], found["raw_bytes"]) == (1, 1, len(CHAT))
    assert 0 < found["stored_bytes"] <= Path("a.db").stat().st_size
    text = run("retrieve", "--stats", "--archive", "a.db").out.decode()
    assert f"originals  1, {len(CHAT):,} bytes" in text


def test_every_original_is_exported_once_under_a_harmless_name(run):
    names = {
        "x/s.jsonl": 1,
        "y/s.jsonl": 2,
        "x/../-rf \x1b]0;x\x07 ü.jsonl": 3,
        "x/....jsonl": 4,
        "z/s.jsonl": 1,
    }
    for name, number in names.items():
        compacted(run, name, numbered(number))
    found = run("retrieve", "--export", "out", "--archive", "a.db")
    assert found.code == 0
    files = {p.name: p.read_bytes() for p in Path("out").iterdir()}
    assert sorted(files.values()) == sorted(numbered(n) for n in (1, 2, 3, 4))
    for name, data in files.items():
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*-[0-9a-f]{16}\.jsonl", name)
        assert sha256(data).hexdigest()[:16] in name
        assert (Path("out") / name).stat().st_mode & 0o777 == 0o600
    assert Path("out").stat().st_mode & 0o777 == 0o700
    assert run("retrieve", "--export", "out", "--archive", "a.db").out == found.out


def test_export_writes_over_nothing_and_names_what_does_not_come_back(run):
    compacted(run, "one.jsonl", numbered(1))
    compacted(run, "two.jsonl", numbered(2))
    run("retrieve", "--export", "out", "--archive", "a.db")
    (one,) = Path("out").glob("one-*")
    one.write_bytes(b"mine")
    found = run("retrieve", "--export", "out", "--archive", "a.db")
    assert (found.code, one.read_bytes()) == (6, b"mine")
    assert "there is another file of this name" in found.err
    one.unlink()
    one.symlink_to("/nowhere/at/all")
    assert run("retrieve", "--export", "out", "--archive", "a.db").code == 6
    with sqlite3.connect("a.db") as db:
        db.execute("DELETE FROM pieces WHERE stream = 1")
    db.close()
    shutil.rmtree("out")
    found = run("retrieve", "--export", "out", "--archive", "a.db", "--json")
    assert (found.code, [o["result"] for o in found.json]) == (6, ["error", "ok"])
    assert [p.name[:3] for p in Path("out").iterdir()] == ["two"]


@pytest.mark.parametrize(
    "source", ["../../etc/cron.d/x", "/a/b/\n\x1b[2J.jsonl", "-", "", "a" * 300, "..", "con", "."]
)
def test_no_name_of_a_transcript_chooses_a_path(source):
    run = Run("0" * 16, source, "pi", "", "ab" * 32, 1, "cd" * 32, 1, (1,))
    assert re.fullmatch(r"[A-Za-z0-9][\w-]{0,79}-(?:ab){8}\.jsonl", upkeep.file_name(run), re.A)


# -------------------------------------------------------------------------------------------- prune
NOW = ("--archive", "a.db", "--older-than", "0")


def listed(found):
    return [o["hash"] for o in found.json]


def test_only_what_has_no_transcript_any_more_is_pruned_and_only_after_yes(run):
    gone, there = compacted(run, "x/gone.jsonl", numbered(1)), compacted(run, "x/there.jsonl", numbered(2))
    assert listed(run("retrieve", "--prune", *NOW, "--json")) == []
    os.remove("x/gone.jsonl")
    (line,) = run("retrieve", "--prune", *NOW, "--json").json
    assert (line["hash"], line["source"], line["removed"]) == (gone, os.path.abspath("x/gone.jsonl"), False)
    text = run("retrieve", "--prune", *NOW).out.decode()
    assert (gone in text, "x/gone.jsonl" in text, "--yes removes them" in text) == (True, True, True)
    assert segments() == {gone, there}
    (line,) = run("retrieve", "--prune", "--yes", *NOW, "--json").json
    assert (line["hash"], line["removed"]) == (gone, True)
    assert segments() == {there}
    assert run("retrieve", "x/there.jsonl", "--restore", "--archive", "a.db").out == numbered(2)
    assert run("retrieve", "--verify", "--archive", "a.db").code == 0
    assert run("retrieve", "--yes", "--archive", "a.db").code == 2


def test_what_one_transcript_still_names_stays_for_all_that_removed_the_same(run):
    hash = compacted(run, "x/gone.jsonl")
    assert compacted(run, "x/there.jsonl", CHAT + b"\n") == hash
    os.remove("x/gone.jsonl")
    assert listed(run("retrieve", "--prune", *NOW, "--json")) == []


def test_what_is_young_is_left_unless_asked(run):
    compacted(run, "x/s.jsonl")
    os.remove("x/s.jsonl")
    assert listed(run("retrieve", "--prune", "--yes", "--archive", "a.db", "--json")) == []
    assert listed(run("retrieve", "--prune", "--older-than", "1h", "--archive", "a.db", "--json")) == []
    assert len(listed(run("retrieve", "--prune", *NOW, "--json"))) == 1


def test_a_result_that_was_written_elsewhere_counts_as_its_transcript(run):
    for name, words in (("file", ["-o", "y/out.jsonl"]), ("stream", []), ("folder", ["--output-dir", "z"])):
        put(f"x/{name}.jsonl", numbered(name))
        os.makedirs("y", exist_ok=True)
        assert run("compact", f"x/{name}.jsonl", *words, "--archive", "a.db", *KEEP).code == 0
        os.remove(f"x/{name}.jsonl")
    assert listed(run("retrieve", "--prune", *NOW, "--json")) == []
    os.remove("y/out.jsonl")
    assert len(listed(run("retrieve", "--prune", *NOW, "--json"))) == 1
    os.remove("z/folder.jsonl")
    assert len(listed(run("retrieve", "--prune", *NOW, "--json"))) == 2  # a stream may have gone anywhere


def test_a_marker_in_any_transcript_at_hand_keeps_what_it_stands_for(run):
    first = compacted(run, "x/s.jsonl")
    os.makedirs("moved")
    shutil.move("x/s.jsonl", "moved/t.jsonl")
    assert listed(run("retrieve", "--prune", *NOW, "--json")) == [first]
    assert listed(run("retrieve", "moved", "--prune", *NOW, "--json")) == []
    with open("moved/t.jsonl", "ab") as file:
        file.write(numbered(7))
    second = json.loads(
        run("compact", "moved/t.jsonl", "--in-place", "--json", "--archive", "a.db", *KEEP).out
    )["hash"]
    assert segments() == {first, second}
    assert listed(run("retrieve", "--prune", "--yes", *NOW, "--json")) == []  # the new result names both
    assert run("retrieve", "moved/t.jsonl", "--restore", "--archive", "a.db").out.startswith(CHAT)


def test_a_folder_that_is_not_there_may_be_a_disk_that_is_not_mounted(run):
    hash = compacted(run, "disk/sessions/s.jsonl")
    shutil.rmtree("disk")
    assert listed(run("retrieve", "--prune", *NOW, "--json")) == []
    os.mkdir("disk")
    assert listed(run("retrieve", "disk", "--prune", *NOW, "--json")) == [hash]
    assert run("retrieve", "nowhere", "--prune", *NOW).code == 2


def test_a_run_that_begins_between_listing_and_removing_is_kept(run, monkeypatch):
    compacted(run, "x/s.jsonl")
    os.remove("x/s.jsonl")
    real = upkeep._prunable

    def late(*words):
        found = real(*words)
        put("x/s.jsonl", SMALL)
        return found

    monkeypatch.setattr(upkeep, "_prunable", late)
    assert listed(run("retrieve", "--prune", "--yes", *NOW, "--json")) == []
    assert len(segments()) == 1


def test_prune_takes_one_archive(run):
    compacted(run, "s.jsonl")
    assert run("retrieve", "--prune", "--archive", "a.db", "--archive", "b.db").code == 2
    assert run("retrieve", "--prune", "--archive", "missing.db").code == 6
    assert not os.path.exists("missing.db")


def test_markers_are_found_across_chunks(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"x" * ((1 << 20) - 10) + b"<<ccr:0123456789abcdef>>" + b"y" * 100)
    assert upkeep.markers_in([str(path), "missing"]) == {"0123456789abcdef"}
