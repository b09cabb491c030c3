"""The time of one call.

The referee's timings do not use it. The referee times many calls in a row, in a process that may
falsify its clock (referee/child/clock.py). Here both modules are trusted, so each call is timed
alone, in this process.
"""

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor
from torch.cuda import Event, synchronize

FLUSH_BYTES = 1 << 30  # several times the largest L2
# Flushes before each call. They take an H200 1.2 ms, in which even a slow host launches the whole
# call.
FLUSHES = 4


class CpuClock:
    """Wall-clock time of one call."""

    def time(self, call: Callable[[Tensor], object], x: Tensor) -> float:
        """Return the seconds that `call(x)` takes."""
        start = perf_counter()
        result = call(x)
        seconds = perf_counter() - start
        del result  # not earlier: the time does not include freeing it
        return seconds


class CudaClock:
    """Device time of one call with a cold L2."""

    def __init__(self, device: torch.device) -> None:
        self._flush_memory = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._start = Event(enable_timing=True)
        self._end = Event(enable_timing=True)

    def time(self, call: Callable[[Tensor], object], x: Tensor) -> float:
        """Flush the L2, and return the seconds of `call(x)` on the current stream, by two events.

        The host launches the call while the GPU flushes the L2. So the time between the events is
        the device's, without the host's time for the launch.
        """
        synchronize()
        for _ in range(FLUSHES):
            self._flush_memory.zero_()
        self._start.record()
        result = call(x)
        self._end.record()
        synchronize()
        del result  # not earlier: the time does not include freeing it
        return self._start.elapsed_time(self._end) * 1e-3
