"""Renews the figures of README and docs/BENCHMARKS.md: `python -m problems.benchmark report`.

Each command of `COMMANDS` writes its results as JSON, which become a file of docs/benchmarks/.
`python -m problems.benchmark pages` runs no command: it only makes the tables of README and
docs/BENCHMARKS.md, and README's picture, from the files that are there.
"""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from problems import bars, pages
from referee.records import as_json
from referee.report import files, load, plot

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "benchmarks"
PAGES = [ROOT / "README.md", ROOT / "docs" / "BENCHMARKS.md"]
PICTURE = ROOT / "docs" / "figures.svg"
HEADLINE = "headline.json"  # the file that the picture shows
# The command behind each file of docs/benchmarks/, by the kind of device that it measures.
COMMANDS = {
    "cuda": {
        HEADLINE: "python run.py --full --dtype float32,float16,bfloat16",
        "host.json": "python -m problems.benchmark host",
        "linear-highest.json": "python -m problems.benchmark linear",
        "linear-high.json": "python -m problems.benchmark linear --precision high",
        "linear-float16.json": "python -m problems.benchmark linear --dtype float16",
        "linear-bfloat16.json": "python -m problems.benchmark linear --dtype bfloat16",
        "operands-highest.json": "python -m problems.benchmark operands",
        "operands-high.json": "python -m problems.benchmark operands --precision high",
    },
    "cpu": {"import.json": "python -m problems.benchmark import"},
}
# `report` and `pages` write only here. A change of these files is no change of the measured code.
WRITTEN = ["README.md", "docs"]


def measure(device: str, text: str) -> list[str]:
    """Run commands and write their results to docs/benchmarks/.

    A file is written as soon as its command has ended. If that fails, the file does not change.

    Args:
        device: the kind of device that the commands measure, "cpu" or "cuda".
        text: only commands that contain it, or whose file's name does, are run.

    Returns:
        The commands that failed.

    Raises:
        ValueError: there is no such command.
    """
    commands = {
        name: command
        for name, command in COMMANDS[device].items()
        if text in name or text in command
    }
    if not commands:
        raise ValueError(f"no command for {device} contains {text!r}")
    commit = _commit()
    failed = []
    for name, command in commands.items():
        results = _run(command)
        if results is None:
            failed.append(command)
        else:
            content = {**results, "command": command, "commit": commit}
            files.write(RESULTS / name, as_json(content))
    return failed


def _run(command: str) -> dict | None:
    """Run a command of this project, by this Python. Return its results; None if it fails."""
    _python, *arguments = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        run = [sys.executable, *arguments, "--json", str(path)]
        status = subprocess.run(run, cwd=ROOT, check=False).returncode
        print(f"{command}: status {status}", flush=True)
        return json.loads(path.read_text()) if status == 0 else None


def _commit() -> str:
    """Return the commit of this tree, with "-dirty" if code has changed; "unknown" without git."""
    # A copy of the tree without .git may be inside the repository of another project.
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return "unknown"
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        paths = [".", *(f":!{path}" for path in WRITTEN)]
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", *paths)
    except subprocess.CalledProcessError:  # for example, if the tree belongs to another user
        return "unknown"
    return f"{commit}-dirty" if changes else commit


def _git(*arguments: str) -> str:
    """Return what a git command prints about this tree."""
    command = ["git", *arguments]
    return subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()


def make_pages() -> None:
    """Make README, docs/BENCHMARKS.md and the picture from the results.

    Raises:
        ValueError: the picture cannot be drawn. The pages have been written.
    """
    texts = {page: pages.fill(page.read_text(), RESULTS) for page in PAGES}
    for page, text in texts.items():
        files.write(page, text)
    plot.check(PICTURE)
    files.write(PICTURE, bars.draw(load(RESULTS / HEADLINE), PICTURE.suffix))
