"""What run.py prints, and how it ends when it is interrupted or cannot: with one line.

Nothing heavy is imported here, for an interrupt may come while torch is being imported.
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

INTERRUPTED = 128 + signal.SIGINT  # the status that shells give
_name = ["run.py"]  # what messages begin with


def name_program(name: str) -> None:
    """Set the name that messages begin with."""
    _name[0] = name


def program() -> str:
    """Return the name that messages begin with."""
    return _name[0]


class Progress:
    """Progress on stderr: one line in place on a terminal, a plain line a stage elsewhere.

    Call it as often as you like, with what is being done, and how far: it prints at most ten times
    a second, and where stderr is no terminal, what is new in the latter every ten seconds.
    """

    def __init__(self) -> None:
        self._start = _line_start()  # "" where stderr is no terminal
        self._stage, self._last = "", 0.0

    def __call__(self, stage: str, detail: str = "") -> None:
        """Show what is being done, and how far it is."""
        now, every = monotonic(), 0.1 if self._start else 10.0
        if stage == self._stage and now - self._last < every:
            return
        self._stage, self._last = stage, now
        text = f"{stage} {detail}".rstrip()
        width = shutil.get_terminal_size().columns - 1  # a line that wraps is not removed whole
        _write(f"{self._start}{text[:width]}" if self._start else f"{text}\n")

    def clear(self) -> None:
        """Removes the line from a terminal, so that the report starts on a clean one."""
        if self._start and self._stage:
            _write(self._start)
            self._stage = ""


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
        status = main()
    except SystemExit as stopped:
        status = stopped.code
    except KeyboardInterrupt:
        status = INTERRUPTED
        say("interrupted")
    end_on_interrupt()
    _put("", sys.stderr)
    return status


def say(text: str, name: str = "") -> None:
    """Print a line on stderr, if it takes one; on a terminal in the place of the progress."""
    _write(f"{_line_start()}{name or program()}: {text}\n")


def _write(text: str) -> None:
    with suppress(OSError):  # a closed pipe, a full disk: the work goes on
        sys.stderr.write(text)
        sys.stderr.flush()


def show(text: str) -> None:
    """Prints to stdout at once; where the disk is full or the pipe closed, run.py ends."""
    if reason := _put(f"{text}\n", sys.stdout):
        say(f"cannot write to stdout: {reason}")
        sys.exit(1)


def _put(text: str, stream: TextIO) -> str:
    """Writes a text and all that the stream holds; why that was not possible, or ""."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:  # what is left in its buffer would fail again as Python ends
        with _nowhere() as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        return error.strerror
    return ""


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w")


def _line_start() -> str:
    """What removes a line from stderr, if that is a terminal that can."""
    return "\r\x1b[K" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else ""


def _end(*_: object) -> NoReturn:
    with suppress(OSError):  # past sys.stderr, whose writing this may have interrupted
        os.write(2, f"{_line_start()}{program()}: interrupted\n".encode())
    os._exit(INTERRUPTED)


def _unwind(*_: object) -> NoReturn:
    """The first interrupt lets what is under way clean up; a second one ends at once."""
    signal.signal(signal.SIGINT, _end)
    raise KeyboardInterrupt
