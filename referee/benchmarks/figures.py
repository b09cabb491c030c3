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
from pathlib import Path
from typing import NamedTuple

from referee.report import files, markdown, plot
from referee.report.schema import load

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- (?P<device>\w+): (?P<command>.+?) -->\n).*?(?=<!-- end -->)", re.DOTALL)


class Pages(NamedTuple):
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
        ValueError: there is no such block, matplotlib is missing, or README's results are wrong.
    """
    of_readme, of_benchmarks = (
        [m["command"] for m in BLOCK.finditer(page.read_text()) if m["device"] == device]
        for page in (pages.readme, pages.benchmarks)
    )
    commands = [text for text in dict.fromkeys(of_readme + of_benchmarks) if only in text]
    if not commands:
        raise ValueError(f"no block is for {device} and has a command that contains {only!r}")
    if set(commands) & set(of_readme):
        plot.check(pages.picture)
    failed = []
    for command in commands:
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder, "results.json")
            more = ["--json", str(results)] if command in of_readme else []
            run = [sys.executable, *shlex.split(command)[1:], *more]
            done = subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            print(f"{command}: status {done.returncode}", flush=True)
            if done.returncode != 0:
                failed.append(command)
                continue
            if more:
                content = {**load(results), "command": command}
                files.write(pages.picture, plot.draw(content, ".svg"))
                replace(pages.readme, device, command, markdown.tables(content))
        replace(pages.benchmarks, device, command, f"```\n{done.stdout.strip()}\n```\n")
    return failed


def replace(page: Path, device: str, command: str, content: str) -> None:
    """Gives the block of a command new content."""

    def of_block(match: re.Match) -> str:
        is_meant = (match["device"], match["command"]) == (device, command)
        return match[1] + content if is_meant else match[0]

    files.write(page, BLOCK.sub(of_block, page.read_text()))
