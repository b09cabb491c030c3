"""Progress on stderr: one line in place on a terminal, a plain line a stage elsewhere."""

import shutil
import sys
from contextlib import suppress
from time import monotonic

from referee import ending


class Progress:
    """Call it as often as you like; it prints at most ten times a second.

    Args of a call:
        stage: what is being done.
        detail: how far it is; where stderr is no terminal it is shown only every ten seconds.
    """

    def __init__(self) -> None:
        self._terminal = ending.is_terminal()
        self._stage, self._last = "", 0.0

    def __call__(self, stage: str, detail: str = "") -> None:
        now, every = monotonic(), 0.1 if self._terminal else 10.0
        if stage == self._stage and now - self._last < every:
            return
        self._stage, self._last = stage, now
        text = f"{stage} {detail}".rstrip()
        # A longer line would wrap, and not be removed whole.
        width = shutil.get_terminal_size().columns - 1
        self._write(f"\r\x1b[K{text[:width]}" if self._terminal else f"{text}\n")

    def clear(self) -> None:
        """Removes the line from a terminal, so that the report starts on a clean one."""
        if self._terminal and self._stage:
            self._write("\r\x1b[K")
            self._stage = ""

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):  # a closed pipe, a full disk: the work goes on
            sys.stderr.write(text)
            sys.stderr.flush()
