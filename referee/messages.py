"""Lines of messages: short, printable, and without the folders of paths."""

import re

MAX_LINE_LENGTH = 200  # characters of a message
COMPILER_ERROR = re.compile(r"(?:^|[\s:)])(?:fatal )?error\s*:|undefined (?:reference|symbol)")
# An absolute path's folders, up to the file's name.
FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:()'\"]+/)+")


def first_error_line(text: str) -> str:
    """Return a message's most telling line, short and printable, without the folders of paths.

    That is the first line with a compiler's error, or else the first line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    line = next((line for line in lines if COMPILER_ERROR.search(line)), lines[0])
    line = FOLDERS.sub("", line)
    return "".join(c if c.isprintable() else "?" for c in line)[:MAX_LINE_LENGTH]
