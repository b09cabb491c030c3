"""Renews the figures of README and docs/BENCHMARKS.md: `python -m problems.benchmark report`.

Each file in docs/benchmarks/ has a command, the kind of device that the command is for, and what
the command printed. The commands for one kind of device are run again, and their files written
anew. The tables of docs/BENCHMARKS.md are made from these files (problems/pages.py).

README's table has one of these commands in a comment above it, for example
`<!-- cuda: python run.py -->`, and `<!-- end -->` below it. When this command is run, the table of
run.py's --markdown takes the place of README's, and the picture of --plot that of docs/figures.svg.

Files are written after each command.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from problems import pages
from referee.report import files, load, markdown, plot

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "BENCHMARKS.md"
RESULTS = ROOT / "docs" / "benchmarks"  # what each command printed, as JSON
PICTURE = ROOT / "docs" / "figures.svg"
# README's table below its comment. The groups are the comment, the kind of device and the command.
README_TABLE = re.compile(r"(<!-- (\w+): (.+?) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def renew(device: str, only: str) -> list[str]:
    """Run the commands; write their results to docs/benchmarks/ and to the documents.

    Args:
        device: the kind of device that the commands are for.
        only: only commands that contain this text are run.

    Returns:
        The commands that failed.

    Raises:
        ValueError: there is no such command.
    """
    failed = []
    for path, command in _find_commands(device, only).items():
        comment = f"<!-- {device}: {command} -->\n"
        if comment in README.read_text():
            printed = _run_for_readme(command, comment)
        else:
            printed = _run(command)
        if printed is None:
            failed.append(command)
            continue
        results = {"device": device, "command": command, "output": pages.parse(printed)}
        files.write(path, pages.dump(results))
        files.write(BENCHMARKS, pages.fill(BENCHMARKS.read_text(), RESULTS))
    return failed


def _find_commands(device: str, text: str) -> dict[Path, str]:
    """Return the command of each results file that is for the device and contains the text."""
    commands = {}
    for path in sorted(RESULTS.glob("*.json")):
        results = json.loads(path.read_text())
        if results["device"] == device and text in results["command"]:
            commands[path] = results["command"]
    if not commands:
        raise ValueError(f"no results are for {device} and have a command that contains {text!r}")
    return commands


def _run(command: str, *options: str) -> str | None:
    """Run a command of this project, by this Python. Return what it prints; None if it fails."""
    _python, *arguments = shlex.split(command)
    run = [sys.executable, *arguments, *options]
    done = subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(f"{command}: status {done.returncode}", flush=True)
    return done.stdout if done.returncode == 0 else None


def _run_for_readme(command: str, comment: str) -> str | None:
    """Run the command of README's table as `_run` does, and replace the table and the picture."""
    plot.check(PICTURE)
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder, "results.json")
        printed = _run(command, "--json", str(samples))
        if printed is None:
            return None
        content = {**load(samples), "command": command}
    files.write(PICTURE, plot.draw(content, ".svg"))
    _replace_table(README, comment, markdown.as_markdown(content))
    return printed


def _replace_table(page: Path, comment: str, table: str) -> None:
    """Replace the table below a comment of a page."""

    def replacement(match: re.Match) -> str:
        return comment + table if match[1] == comment else match[0]

    files.write(page, README_TABLE.sub(replacement, page.read_text()))
