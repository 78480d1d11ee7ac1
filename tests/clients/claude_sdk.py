"""python claude_sdk.py FOLDER FILE...: the chain that the SDK's reader builds for each file, as JSON {file: lines}."""

import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from claude_agent_sdk._internal import sessions

found = {}
for file in sys.argv[2:]:
    entries = sessions._parse_transcript_entries(Path(file).read_text("utf-8", "replace"))
    if all(e.get("isSidechain") for e in entries if e["type"] in ("user", "assistant")):
        entries = [
            e | {"isSidechain": False} for e in entries
        ]  # a subagent's file, with parallel calls put back
    found[file] = [m.uuid for m in sessions._entries_to_session_messages(entries, None, 0)]
json.dump(found, sys.stdout)
