"""The figures of README and docs/BENCHMARKS.md: `python -m referee.benchmark report` measures them.

A block of these files begins with a comment that names a kind of device and a command, and ends
with `<!-- end -->`:

    <!-- cuda: python -m referee.benchmark host -->

What the command prints takes the place of the block's content. README's command is one of
BENCHMARKS too: its block gets the tables that run.py's `--markdown` writes, docs/figures.svg the
picture of the same run. Files are written after each command; an interrupted report keeps those.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from referee.report import files, markdown, plot
from referee.report.schema import load

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS, README = ROOT / "docs" / "BENCHMARKS.md", ROOT / "README.md"
PICTURE = ROOT / "docs" / "figures.svg"
BLOCK = re.compile(r"(<!-- (\w+): (.+?) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def measure(device: str, only: str) -> list[str]:
    """Runs the commands for a kind of device that contain a text; returns those that failed.

    Raises:
        ValueError: there is no such command, matplotlib is missing, or README's results are wrong.
    """
    failed, of_readme = [], [match[3] for match in BLOCK.finditer(README.read_text())]
    blocks = BLOCK.findall(BENCHMARKS.read_text())
    commands = [text for _, kind, text in blocks if kind == device and only in text]
    if not commands:
        raise ValueError(f"no block is for {device} and has a command that contains {only!r}")
    for command in commands:
        with tempfile.TemporaryDirectory() as folder:
            results, run = Path(folder, "results.json"), [sys.executable, *shlex.split(command)[1:]]
            if command in of_readme:
                plot.check(PICTURE)
                run += ["--json", str(results)]
            done = subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            print(f"{command}: status {done.returncode}", flush=True)
            if done.returncode:
                failed.append(command)
                continue
            if command in of_readme:
                content = {**load(results), "command": command}
                files.write(PICTURE, plot.draw(content, ".svg"))
                _replace(README, device, command, markdown.tables(content))
        _replace(BENCHMARKS, device, command, f"```\n{done.stdout.strip()}\n```\n")
    return failed


def _replace(page: Path, device: str, command: str, content: str) -> None:
    head = f"<!-- {device}: {command} -->\n"
    new = BLOCK.sub(lambda m: head + content if m[1] == head else m[0], page.read_text())
    files.write(page, new)
