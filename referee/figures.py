"""The figures in docs/BENCHMARKS.md: `python -m referee.benchmark report` measures them anew.

A block of that file begins with a comment that names a kind of device and a command, and ends with
`<!-- end -->`:

    <!-- cuda: python -m referee.benchmark views --dtype int8 -->

Every command for this machine's kind of device is run, and what it prints takes the place of the
block's content. The file is written after each, so that an interrupted report keeps what it has.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from referee import files

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "docs" / "BENCHMARKS.md"
BLOCK = re.compile(r"(<!-- (?P<device>\w+): (?P<command>.+?) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def measure(path: Path, device: str, only: str = "") -> list[str]:
    """Replaces the content of the blocks for `device`.

    Args:
        path: the file with the blocks.
        device: "cpu" or "cuda".
        only: the commands that contain this text; by default all.

    Returns:
        The commands that failed, whose blocks stay as they are.

    Raises:
        ValueError: the file has no such block.
    """
    blocks = [match for match in BLOCK.finditer(path.read_text()) if match["device"] == device]
    commands = [match["command"] for match in blocks if only in match["command"]]
    if not commands:
        raise ValueError(f"{path} has no block for {device} whose command contains {only!r}")
    failed = []
    for command in commands:
        start = perf_counter()
        python, *arguments = shlex.split(command)
        if python != "python":
            raise ValueError(f"expected a command that begins with python, got {command!r}")
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        print(f"{command}: {perf_counter() - start:.0f} s, status {done.returncode}", flush=True)
        if done.returncode != 0:
            failed.append(command)
            continue
        files.write(path, replaced(path.read_text(), device, command, done.stdout))
    return failed


def replaced(text: str, device: str, command: str, output: str) -> str:
    """`text` with the output as the content of the block of a command."""

    def content(match: re.Match) -> str:
        is_meant = (match["device"], match["command"]) == (device, command)
        return f"{match[1]}```\n{output.strip()}\n```\n" if is_meant else match[0]

    return BLOCK.sub(content, text)
