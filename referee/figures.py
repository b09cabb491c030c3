"""The figures of README and docs/BENCHMARKS.md: `python -m referee.benchmark report` measures them.

A block of these files begins with a comment that names a kind of device and a command, and ends
with `<!-- end -->`:

    <!-- cuda: python -m referee.benchmark views --dtype int8 -->

Every command for this machine's kind of device is run, and what it prints takes the place of the
block's content. README's block gets the tables that run.py's `--markdown` writes, docs/figures.svg
the picture of the same run. Files are written after each command, so that an interrupted report
keeps what it has.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from referee import files, markdown, picture
from referee.schema import load

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- (?P<device>\w+): (?P<command>.+?) -->\n).*?(?=<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Pages:
    """The files with figures."""

    benchmarks: Path = ROOT / "docs" / "BENCHMARKS.md"
    readme: Path = ROOT / "README.md"
    picture: Path = ROOT / "docs" / "figures.svg"


def measure(pages: Pages, device: str, only: str = "") -> list[str]:
    """Replaces the content of the blocks for `device`.

    Args:
        pages: the files with the blocks.
        device: "cpu" or "cuda".
        only: the commands that contain this text; by default all.

    Returns:
        The commands that failed, whose blocks stay as they are.

    Raises:
        ValueError: there is no such block, or README's results are not all there and right.
    """
    of_readme = commands_of(pages.readme, device)
    every = dict.fromkeys(of_readme + commands_of(pages.benchmarks, device))
    commands = [command for command in every if only in command]
    if not commands:
        raise ValueError(f"no block is for {device} and has a command that contains {only!r}")
    failed = []
    for command in commands:
        start = perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results.json") if command in of_readme else None
            done = run(command, results)
            print(
                f"{command}: {perf_counter() - start:.0f} s, status {done.returncode}", flush=True
            )
            if done.returncode != 0:
                failed.append(command)
                continue
            if results:
                content = {**load(results), "command": command}
                files.write(pages.picture, picture.draw([content]))
                replace(pages.readme, device, command, markdown.tables(content))
        replace(pages.benchmarks, device, command, f"```\n{done.stdout.strip()}\n```\n")
    return failed


def commands_of(page: Path, device: str) -> list[str]:
    """The commands of a file's blocks for a kind of device."""
    return [m["command"] for m in BLOCK.finditer(page.read_text()) if m["device"] == device]


def run(command: str, results: Path | None) -> subprocess.CompletedProcess:
    """Runs a command of a block, which writes its results as JSON too where a path is given."""
    python, *arguments = shlex.split(command)
    if python != "python":
        raise ValueError(f"expected a command that begins with python, got {command!r}")
    more = ["--json", str(results)] if results else []
    return subprocess.run(
        [sys.executable, *arguments, *more], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def replace(page: Path, device: str, command: str, content: str) -> None:
    """Gives the block of a command new content."""

    def of_block(match: re.Match) -> str:
        is_meant = (match["device"], match["command"]) == (device, command)
        return match[1] + content if is_meant else match[0]

    files.write(page, BLOCK.sub(of_block, page.read_text()))
