"""What Claude Code tells a PreCompact hook, by its own program: the README's hook reads `transcript_path`.

What such a hook prints goes into the summary's instructions, so that the README's prints nothing (tests/test_docs.py).
"""

import re

from installed import FOLDER, needs


@needs("claude-2.0.76")
def test_the_hook_gets_the_path_and_is_matched_by_its_trigger():
    package = FOLDER / "claude-2.0.76" / "node_modules" / "@anthropic-ai" / "claude-code"
    source = (package / "cli.js").read_text("utf-8", "replace")
    made = re.search(
        r'\{\.\.\.([\w$]+)\([^()]*\),hook_event_name:"PreCompact",trigger:([\w$]+)\.trigger,', source
    )
    assert f"matchQuery:{made[2]}.trigger" in source[made.end() : made.end() + 200]
    shared = source[source.index(f"function {made[1]}(") :][:300]
    assert re.search(r"return\{session_id:[^}]*transcript_path:[^}]*cwd:", shared)
