"""A process's own clock, by which a call's time is printed.

It decides nothing alone: the referee's clock around the whole request is the least that a call's
time can be.
"""

from collections.abc import Callable
from time import perf_counter

import torch

# Cycles that a GPU waits before the first call: 0.15 ms or so, in which the host gets ahead, so
# that the events measure the device and not the launch. The empty call waits as long.
AHEAD_CYCLES = 250_000


class CpuClock:
    """Wall-clock time of calls, one after the other."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def get_ahead(self) -> None:
        """Do nothing: a CPU's calls are not queued."""

    def time(self, call: Callable[[], object]) -> object:
        """Call, and return what the call returns."""
        start = perf_counter()
        result = call()
        self._ends.append(perf_counter())
        self._starts.append(start)
        return result

    def seconds(self) -> list[float]:
        """Return the seconds of the calls since the last time that this was asked."""
        found = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
        self._starts, self._ends = [], []
        return found


class CudaClock:
    """Device time of calls on the current stream."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def get_ahead(self) -> None:
        """Keep the device waiting while the host launches."""
        torch.cuda._sleep(AHEAD_CYCLES)

    def time(self, call: Callable[[], object]) -> object:
        """Call, and return what the call returns."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        end.record()
        self._events.append((start, end))
        return result

    def seconds(self) -> list[float]:
        """Wait for the calls; return the seconds of those since this was asked last.

        Work on a stream that the current one does not wait for is not waited for: its caller could
        not rely on it either.
        """
        for _, end in self._events:
            end.synchronize()
        found = [start.elapsed_time(end) * 1e-3 for start, end in self._events]
        self._events = []
        return found
