"""The reports of a run: tables, JSON, Markdown, pictures. They need no torch."""

import json
from pathlib import Path

SCHEMA = 1
SCALE = {"GB/s": 1e9, "TFLOP/s": 1e12}  # units of speeds in work a second


def load(path: Path) -> dict:
    """Return what `--json` wrote.

    Raises:
        ValueError: the file holds something else, or is of another version.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is no JSON") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not what run.py --json of this version writes")
    return content


def machine(about: dict) -> str:
    """Return the device of an environment, and how many threads a CPU's calls have."""
    return about["device"] + (f" ({about['threads']} threads)" if about["threads"] else "")


def by_role(summary: list[dict], role: str) -> dict:
    """Return the row with this role, the fastest if there are several; empty if there is none."""
    rows = (row for row in summary if row["role"] == role)
    return min(rows, key=lambda row: row["median_ms"], default={})
