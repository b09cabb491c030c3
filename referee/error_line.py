"""The line that counts in a long message."""

import re

LONGEST_LINE = 200
COMPILER_ERROR = re.compile(r"(?:^|[\s:)])(?:fatal )?error\s*:|undefined (?:reference|symbol)")


def first_error_line(text: str) -> str:
    """The first error of a compiler in a message, else its first line; printable, and short."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    line = next((line for line in lines if COMPILER_ERROR.search(line)), lines[0])
    line = re.sub(r"(?<![\w.])/(?:[^\s/:()'\"]+/)+", "", line)  # folders
    return "".join(c if c.isprintable() else "?" for c in line)[:LONGEST_LINE]
