"""berry-agent's import gates and projection on every event log and on every compaction of it."""

from installed import copies, needs, node, outcomes, report
from judged import data_of, difference, of_format, said
from replay import plain, spoken

from haocompact.formats import berry
from haocompact.formats.session import ReadOptions
from haocompact.records import read

pytestmark = needs("berry")


def atoms(messages):
    """The projection as atoms, the newest summary first: berry shows it behind what was kept."""
    found = [atom for message in messages for atom in atoms_of(message)]
    return sorted(found, key=lambda atom: atom[0] != "summary")


def atoms_of(message):
    if message["type"] == "user" and message.get("source") == "compaction":
        yield ("summary", plain(message["content"]))
    elif message["type"] == "user":
        yield from spoken("user", message["content"])
    elif message["type"] == "toolResult":
        yield ("result", message["toolCallId"], plain(message["output"]))
    else:
        for block in message["content"]:
            thought = block["type"] == "thinking"
            yield from [("thinking", block["thinking"])] if thought else spoken("assistant", [block])
        yield from (("call", call["toolCallId"], call["toolName"]) for call in message["toolCalls"])


def read_by_berry(files, folder):
    names = copies(files, folder)
    return {names[path]: found for path, found in node("berry", "berry.mjs", *names).items()}


def test_berry_reads_the_originals_as_we_do(tmp_path):
    files = {name: data_of(path) for name, path in of_format("berry").items() if has_header(data_of(path))}
    found = {}
    for name, theirs in read_by_berry(files, tmp_path / "berry").items():
        mine = said(berry.read(read(files[name]), ReadOptions()).messages)
        found[name] = theirs.get("refused") or difference(mine, atoms(theirs["messages"]))
    report(found)


def has_header(data):
    """Without this line a log is a dump that the client itself does not import."""
    return data.startswith(b'{"format":')


def test_berry_imports_a_compacted_log_as_summary_and_tail(tmp_path):
    done = outcomes("berry", tmp_path)
    files = {k: o.path.read_bytes() for k, o in done.items() if has_header(o.path.read_bytes())}
    found = {}
    for key, theirs in read_by_berry(files, tmp_path / "berry").items():
        refused = theirs.get("refused") or against(theirs["gates"])
        found[key] = refused or difference(done[key].expected, atoms(theirs["messages"]))
    report(found)


def against(gates):
    """What the gate of a live append says. A range may not span an older event that hides others, so one has to
    begin behind it, where no turn begins: that gate does not stand in the way of an import."""
    return "; ".join(g["error"] for g in gates if g["after"] not in ("compaction/end", "llm/retry"))
