"""How run.py ends when it is interrupted or cannot print: with one line, not with a traceback.

Nothing heavy is imported here, for an interrupt may come while torch is being imported.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

INTERRUPTED = 128 + signal.SIGINT  # the status that shells give


class PrintError(Exception):
    """stdout takes nothing more; the message says why."""


def end_on_interrupt() -> None:
    """From now on an interrupt ends the process at once: nothing is under way to be undone."""
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):  # as nohup and & have it
        signal.signal(signal.SIGINT, _end)


def run(main: Callable[[], int]) -> int:
    """Calls main, which may raise SystemExit; returns the exit status."""
    sys.stdout, sys.stderr = (stream or _nowhere() for stream in (sys.stdout, sys.stderr))
    sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: a path may hold anything
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _unwind)
    try:
        try:
            status = main()
        except SystemExit as stopped:
            status = stopped.code
        _flush(sys.stdout)
    except KeyboardInterrupt:
        status = INTERRUPTED
        say("interrupted")
    except PrintError as problem:
        status = 1
        say(f"cannot write to stdout: {problem}")
    end_on_interrupt()
    with suppress(PrintError):
        _flush(sys.stderr)
    return status


def say(text: str, program: str = "run.py") -> None:
    """A line on stderr, if it takes one; on a terminal in the place of the progress."""
    with suppress(OSError):
        print(f"{_line_start()}{program}: {text}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Prints to stdout at once.

    Raises:
        PrintError: the disk is full, the pipe is closed.
    """
    try:
        print(text)
    except OSError as error:
        _discard(sys.stdout)
        raise PrintError(error.strerror) from None
    _flush(sys.stdout)


def _flush(stream: TextIO) -> None:
    try:
        stream.flush()
    except OSError as error:
        _discard(stream)
        raise PrintError(error.strerror) from None


def _discard(stream: TextIO) -> None:
    """Drops the stream's buffer, which would fail again as the interpreter ends."""
    with _nowhere() as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w")


def is_terminal() -> bool:
    """Whether stderr is a terminal that can erase a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _line_start() -> str:
    return "\r\x1b[K" if is_terminal() else ""


def _end(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):  # past sys.stderr, whose writing this may have interrupted
        os.write(2, f"{_line_start()}run.py: interrupted\n".encode())
    os._exit(INTERRUPTED)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    """The first interrupt lets what is under way clean up; a second one ends at once."""
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt
