"""Renews the figures of README and docs/BENCHMARKS.md: `python -m problems.benchmark report`.

Each file in docs/benchmarks/ has a command, the kind of device that the command is for, and what
the command printed. The commands for one kind of device are run again, and their files written
anew. The tables of docs/BENCHMARKS.md are made from these files (problems/pages.py).

README's table has one of these commands in a comment above it, for example
`<!-- cuda: python run.py -->`, and `<!-- end -->` below it. When this command is run, the table of
run.py's --markdown takes the place of README's, and the picture of problems/bars.py that of
docs/figures.svg.

After each command, all new texts are made before the first of them is written.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from problems import bars, pages
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
        texts: dict[Path, str | bytes] = {}
        if comment in README.read_text():
            printed = _run_for_readme(command, comment, texts)
        else:
            printed = _run(command)
        if printed is None:
            failed.append(command)
            continue
        output = pages.parse(printed)
        texts[path] = pages.dump({"device": device, "command": command, "output": output})
        texts[BENCHMARKS] = _filled_benchmarks(path.name, texts[path])
        for file, text in texts.items():
            files.write(file, text)
    return failed


def _filled_benchmarks(name: str, results: str) -> str:
    """Return the text of docs/BENCHMARKS.md, made anew with one new file of results."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(RESULTS, folder, dirs_exist_ok=True)
        Path(folder, name).write_text(results)
        return pages.fill(BENCHMARKS.read_text(), Path(folder))


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


def _run_for_readme(command: str, comment: str, texts: dict[Path, str | bytes]) -> str | None:
    """Run the command of README's table as `_run` does; add README and the picture to `texts`."""
    plot.check(PICTURE)
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder, "results.json")
        printed = _run(command, "--json", str(samples))
        if printed is None:
            return None
        content = {**load(samples), "command": command}
    texts[PICTURE] = bars.draw(content, ".svg")
    texts[README] = _with_table(README.read_text(), comment, markdown.as_markdown(content))
    return printed


def _with_table(page: str, comment: str, table: str) -> str:
    """Return a page with another table below a comment."""

    def replacement(match: re.Match) -> str:
        return comment + table if match[1] == comment else match[0]

    return README_TABLE.sub(replacement, page)
