"""What is going on, on stderr: one line in place on a terminal, a plain line a stage elsewhere."""

import sys
from time import monotonic


class Progress:
    """Call it as often as you like; it prints at most ten times a second.

    Args of a call:
        stage: what is being done.
        detail: how far it is; where stderr is no terminal it is shown only every ten seconds.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._stage = ""
        self._last = 0.0

    def __call__(self, stage: str, detail: str = "") -> None:
        now = monotonic()
        every = 0.1 if self._terminal else 10.0
        if stage == self._stage and now - self._last < every:
            return
        self._stage, self._last = stage, now
        text = f"{stage} {detail}".rstrip()
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
        else:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Removes the line from a terminal, so that the report starts on a clean one."""
        if self._terminal and self._stage:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self._stage = ""
