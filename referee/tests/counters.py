"""Processes that count in shared memory, by which a test sees whether they run."""

import mmap
import time
from collections.abc import Callable
from typing import NoReturn


class Counter:
    """A number that one process increases and another one reads. Make it before the fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def count(self) -> NoReturn:
        """Increase the number, modulo 256, for ever."""
        while True:
            self._memory[0] = (self._memory[0] + 1) % 256

    def is_still(self) -> bool:
        """Return whether the number stays the same for 20 ms, in which a process counts far on."""
        before = self._memory[0]
        time.sleep(0.02)
        return self._memory[0] == before

    def goes_on(self) -> bool:
        """Return whether the number changes within 10 s."""
        before = self._memory[0]
        return until(lambda: self._memory[0] != before)


def until(condition: Callable[[], object]) -> bool:
    """Wait at most 10 s until a condition holds; return whether it does."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.001)
    return False
