"""Lines of messages: short, printable, and without the folders of paths."""

import re

MAX_LINE_LENGTH = 200  # characters of a message
COMPILER_ERROR = re.compile(r"(?:^|[\s:)])(?:fatal )?error\s*:|undefined (?:reference|symbol)")
# An absolute path's folders, up to the file's name.
FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:()'\"]+/)+")


def printable(text: str) -> str:
    r"""Return a text as one line, with escapes for what moves a terminal's cursor or ends the line.

    A solution chooses the names of its types, and its author that of the file. For example,
    "a\nb.py: correct" must not become two lines: it becomes "a\\nb.py: correct".
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def first_error_line(text: str) -> str:
    """Return a message's most telling line, short and printable, without the folders of paths.

    That is the first line with a compiler's error, or else the first line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    line = next((line for line in lines if COMPILER_ERROR.search(line)), lines[0])
    line = FOLDERS.sub("", line)
    return "".join(c if c.isprintable() else "?" for c in line)[:MAX_LINE_LENGTH]
