"""The version of the JSON that `run.py` writes, and its reading, which needs no torch."""

import json
from pathlib import Path

SCHEMA = 1


def load(path: Path) -> dict:
    """What `run.py --json` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else, or of another version.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"{path} is no JSON") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not what run.py --json of this version writes")
    return content
