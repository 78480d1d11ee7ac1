"""python drive.py codex|claude HARNESS OUT FILE...: resumes each file with the whole client, two at a time.

HARNESS is a copy of the harness's folder (it writes beside itself). Writes to OUT, as JSON {file: result}, what
the harness found and `input`, what the model received.
"""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

AT_ONCE = 2


def codex(file):
    import codex_resume

    kept = f"{file}.kept"
    found = codex_resume.resume(file, keep=kept, timeout=180)
    bodies = (json.loads(p.read_text())["body"] for p in sorted(Path(kept).glob("requests/*.json")))
    found["input"] = next((b["input"] for b in bodies if isinstance(b, dict) and "input" in b), [])
    shutil.rmtree(kept, ignore_errors=True)
    return found


def claude(file):
    import claude_resume

    found = claude_resume.resume(file, timeout=180)
    found["input"] = found.pop("_raw")
    found.pop("_after")
    return found


def main(client, harness, out, *files):
    sys.path.insert(0, harness)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(files, pool.map({"codex": codex, "claude": claude}[client], files), strict=True))
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
