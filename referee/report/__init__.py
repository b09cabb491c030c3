"""Reports on results: tables, Markdown and pictures, made from the content of a JSON file.

Nothing here imports torch. `load` reads a JSON file; `referee.records` makes its content.
"""

import json
from pathlib import Path

SCHEMA = 1  # version of the JSON file's form
SCALE = {"GB/s": 1e9, "TFLOP/s": 1e12}  # units of speed: bytes or flops a second


def load(path: Path) -> dict:
    """Return the content of a file that `--json` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds something else, or is of another version.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is no JSON; expected a file that --json wrote") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not what --json of this version writes; make it again")
    return content


def machine(environment: dict) -> str:
    """Return the device of an environment in words, with the number of a CPU's threads."""
    threads = f" ({environment['threads']} threads)" if environment["threads"] else ""
    return environment["device"] + threads


def machine_and_versions(environment: dict) -> str:
    """Return the device and the versions: "NVIDIA H200, torch 2.11.0, CUDA 13.0", for example."""
    cuda = f", CUDA {environment['cuda']}" if environment["cuda"] else ""
    return f"{machine(environment)}, torch {environment['torch']}{cuda}"


def by_role(summary: list[dict], role: str) -> dict:
    """Return the row of a summary with this role; the fastest of several; {} if there is none.

    Args:
        summary: a row for each timed call, see `records`.
        role: "solution", "eager", "control", "compiled" or "yardstick".
    """
    rows = (row for row in summary if row["role"] == role)
    return min(rows, key=lambda row: row["median_ms"], default={})
