"""The clock inside a contestant's process, which times each call.

A solution can falsify it. So the referee also times the whole request and never prints less than
its own clock allows: see "Two clocks" in referee/PROTECTION.md.
"""

from collections.abc import Callable
from time import perf_counter

import torch

# Cycles for which a GPU waits before a request's first call, and before each half of a training
# step: about 0.15 ms. The host launches the calls meanwhile, so that the events measure the device
# and not the launches. Empty requests have the same wait, so it counts as overhead.
#
# A slow host may launch calls too late all the same, see `two_clocks.Sample.lateness`. A longer
# wait would prevent that, but a solution could hide more work in it: work on another stream that
# runs during the wait counts as overhead, too.
WAIT_CYCLES = 250_000


class CpuClock:
    """Times calls on a CPU, where each ends before the next begins."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def get_ahead(self) -> None:
        """Do nothing: a CPU does not queue calls."""

    def time(self, call: Callable[[], object]) -> object:
        """Time a call; return what the call returns."""
        start = perf_counter()
        result = call()
        self._ends.append(perf_counter())
        self._starts.append(start)
        return result

    def wait(self) -> None:
        """Do nothing: a CPU has done a call when the call returns."""

    def seconds(self) -> list[float]:
        """Return the seconds of each call since `seconds` was called last."""
        durations = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
        self._starts, self._ends = [], []
        return durations


class CudaClock:
    """Times calls on a GPU, by events on the current stream."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def get_ahead(self) -> None:
        """Make the device wait so that the host gets ahead of it with its launches."""
        torch.cuda._sleep(WAIT_CYCLES)

    def time(self, call: Callable[[], object]) -> object:
        """Time a call; return what the call returns."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        end.record()
        self._events.append((start, end))
        return result

    def wait(self) -> float:
        """Wait until the device has done all calls; return the seconds that this took.

        Work on a stream for which the current one does not wait is in no call's seconds. The reply
        waits for it, so the referee's clock includes it.
        """
        start = perf_counter()
        torch.cuda.synchronize()
        return perf_counter() - start

    def seconds(self) -> list[float]:
        """Return the seconds of each call since `seconds` was called last; `wait` comes before."""
        durations = [start.elapsed_time(end) * 1e-3 for start, end in self._events]
        self._events = []
        return durations
