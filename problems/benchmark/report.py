"""`report`: runs the commands whose results are in docs/benchmarks/.

It leaves out `paths` and `path-grid`, which write their files themselves. Each command of
`COMMANDS` writes its results as JSON, which become a file of docs/benchmarks/.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from problems.benchmark import pages, tree
from referee.records import as_json
from referee.report import files

# The command behind each file that `report` renews, by the kind of device that it measures.
COMMANDS = {
    "cuda": {
        pages.HEADLINE: "python run.py --full --dtype float32,float16,bfloat16",
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
    commit = tree.commit()
    failed = []
    for name, command in commands.items():
        results = _run(command)
        if results is None:
            failed.append(command)
        else:
            # The command that ran had --json in addition. run.py writes no commit.
            content = {**results, "command": command, "commit": commit}
            files.write(pages.RESULTS / name, as_json(content))
    return failed


def _run(command: str) -> dict | None:
    """Run a command of this project, by this Python. Return its results; None if it fails."""
    _python, *arguments = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "results.json")
        run = [sys.executable, *arguments, "--json", str(path)]
        status = subprocess.run(run, cwd=tree.ROOT, check=False).returncode
        print(f"{command}: status {status}", flush=True)
        return json.loads(path.read_text()) if status == 0 else None
