"""This project's folder, and its commit."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The benchmarks write only here. A change of these files is no change of the measured code.
WRITTEN = ["README.md", "docs"]


def commit() -> str:
    """Return the commit of this tree, with "-dirty" if code has changed; "unknown" without git."""
    # A copy of the tree without .git may be inside the repository of another project.
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return "unknown"
    try:
        head = _git("rev-parse", "--short", "HEAD")
        paths = [".", *(f":!{path}" for path in WRITTEN)]
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", *paths)
    except subprocess.CalledProcessError:  # for example, if the tree belongs to another user
        return "unknown"
    return f"{head}-dirty" if changes else head


def _git(*arguments: str) -> str:
    """Return what a git command prints about this tree."""
    command = ["git", *arguments]
    return subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()
