"""Prints lines and progress, and ends the program with one line after Ctrl-C or a full disk.

Ctrl-C ends the process at once, with one exception: the first one while `run` calls main raises
KeyboardInterrupt, so that main can clean up.

This module imports nothing heavy, so that a program can call `end_on_interrupt` before it imports
torch, which takes seconds.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NoReturn, TextIO

from referee.message_lines import printable

INTERRUPTED_STATUS = 128 + signal.SIGINT  # the exit status that shells give
TERMINAL_INTERVAL = 0.1  # s between two updates of the progress line on a terminal
FILE_INTERVAL = 10.0  # the same where stderr is a file or a pipe
# The name with which messages begin. A program with another name sets it.
program = "referee"


class Progress:
    """Shows on stderr what the program does now.

    On a terminal it is one line, which is overwritten. Elsewhere each stage gets a line, and a new
    detail of the same stage gets one at most every FILE_INTERVAL. It can be called as often as the
    caller likes: most calls print nothing.
    """

    def __init__(self) -> None:
        self._erase = _erase_line()  # "" if stderr is no terminal
        self._stage = ""
        self._printed_at = 0.0

    def __call__(self, stage: str, detail: str = "") -> None:
        """Show what the program does now, and how far it is."""
        now = monotonic()
        interval = TERMINAL_INTERVAL if self._erase else FILE_INTERVAL
        if stage == self._stage and now - self._printed_at < interval:
            return
        self._stage = stage
        self._printed_at = now
        text = printable(f"{stage} {detail}".rstrip())
        if self._erase:
            # A line that wraps could not be erased as a whole.
            width = shutil.get_terminal_size().columns - 1
            _write(f"{self._erase}{text[:width]}")
        else:
            _write(f"{text}\n")

    def clear(self) -> None:
        """Erase the progress line from a terminal, before other lines are printed."""
        if self._erase and self._stage:
            _write(self._erase)
            self._stage = ""


def end_on_interrupt() -> None:
    """Make Ctrl-C end the process at once, until `run` calls main.

    A program that was started by nohup, or by a script with `&`, ignores Ctrl-C; that stays so.
    """
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, _end)


def run(main: Callable[[], int]) -> int:
    """Call main, and return the exit status: what main returns, or that of its SystemExit.

    After Ctrl-C it prints "interrupted" and returns INTERRUPTED_STATUS.
    """
    # Python sets a stream to None if its descriptor is closed.
    if sys.stdout is None:
        sys.stdout = _open_null()
    if sys.stderr is None:
        sys.stderr = _open_null()
    # stdout's encoding may lack a character of a path. Like stderr, stdout then escapes it.
    sys.stdout.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise_interrupt)
    try:
        status = main()
    except SystemExit as exit_request:
        status = exit_request.code
    except KeyboardInterrupt:
        status = INTERRUPTED_STATUS
        say("interrupted")
    end_on_interrupt()
    # Flushes stderr. If that fails here, Python's own flush at its end does not fail.
    _write_or_discard("", sys.stderr)
    return status


def say(text: str, name: str = "") -> None:
    """Print "NAME: TEXT" as a line on stderr; on a terminal it replaces the progress line.

    Args:
        text: the message.
        name: what it begins with; "" for the program's name.
    """
    _write(f"{_erase_line()}{name or program}: {printable(text)}\n")


def show(text: str) -> None:
    """Print a line on stdout at once; if that fails, end the program with status 1."""
    if reason := _write_or_discard(f"{text}\n", sys.stdout):
        say(f"cannot write to stdout: {reason}")
        sys.exit(1)


def _write(text: str) -> None:
    """Write to stderr. If that fails, the program goes on without the text."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _write_or_discard(text: str, stream: TextIO) -> str:
    """Write a text, and all that is in the stream's buffer; return "", or why it failed.

    After a failure the stream leads to /dev/null. Python flushes the buffer again at its end, and
    would otherwise fail again.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        with _open_null() as null:
            os.dup2(null.fileno(), stream.fileno())
        return error.strerror
    return ""


def _open_null() -> TextIO:
    """Return a stream that discards what is written."""
    return Path(os.devnull).open("w")


def _erase_line() -> str:
    """Return the characters that erase a terminal's line; "" if stderr is no such terminal."""
    can_erase = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return "\r\x1b[K" if can_erase else ""


def _end(*_: object) -> NoReturn:
    """End the process at once, as a handler of SIGINT."""
    # os.write and not sys.stderr.write: the signal may have come while sys.stderr was writing.
    with suppress(OSError):
        os.write(2, f"{_erase_line()}{program}: interrupted\n".encode())
    os._exit(INTERRUPTED_STATUS)


def _raise_interrupt(*_: object) -> NoReturn:
    """Raise KeyboardInterrupt, as a handler of SIGINT; the next SIGINT ends the process at once."""
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt
