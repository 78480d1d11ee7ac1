"""Installs the clients that tests/clients runs, each into a folder of its own below the one named.

    python tests/clients/install.py FOLDER

From npm and PyPI; 2.6 GB. One that is there already stays; one that can't be installed is named, left
out, and its tests are skipped.
"""

import json
import subprocess
import sys
from pathlib import Path

NODE = "node@22"  # pi and berry want it; the system's may be older
NPM = {
    "pi-1.6.0": [NODE, "@earendil-works/pi-coding-agent@1.6.0"],
    "pi-0.74.2": [NODE, "@earendil-works/pi-coding-agent@0.74.2"],
    "berry": [NODE, "berry-agent@0.1.0-alpha.15"],
    "codex": ["@openai/codex@0.171.0"],
    "claude-2.0.76": ["@anthropic-ai/claude-code@2.0.76"],
    "claude-2.1.197": ["@anthropic-ai/claude-code@2.1.197"],
    "claude-2.1.332": ["@anthropic-ai/claude-code@2.1.332"],
}
PYPI = {"claude-sdk": ["claude-agent-sdk==0.2.189"]}


def install(folder: Path, command: list[str], packages: list[str]) -> bool:
    done = folder / "installed.json"
    if done.exists() and json.loads(done.read_text()) == packages:
        return True
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = subprocess.run([*command, *packages], cwd=folder, capture_output=True, text=True)
        error = found.stderr.strip()[-300:] if found.returncode else ""
    except OSError as failed:
        error = str(failed)
    if error:
        print(f"not installed: {' '.join(packages)}: {error}", file=sys.stderr)
        return False
    done.write_text(json.dumps(packages))
    return True


def main(root: Path) -> int:
    npm = [
        "npm",
        "install",
        "--no-audit",
        "--no-fund",
        "--no-package-lock",
        "--loglevel=error",
        "--prefix",
        ".",
    ]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--target", "."]
    done = [install(root / name, npm, packages) for name, packages in NPM.items()]
    done += [install(root / name, pip, packages) for name, packages in PYPI.items()]
    return not any(done)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
