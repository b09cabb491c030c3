"""The time of one call. The timers are bound here, before the solution is imported."""

from collections.abc import Callable
from time import perf_counter

import torch
from torch.cuda import Event, synchronize

FLUSH_BYTES = 256 << 20  # several times the largest L2


class CpuClock:
    """Wall-clock time of one call."""

    def time(self, call: Callable, x: torch.Tensor) -> tuple[torch.Tensor, float, float]:
        """The output, and the seconds that the call took, twice, as `CudaClock.time` does."""
        start = perf_counter()
        output = call(x)
        seconds = perf_counter() - start
        return output, seconds, seconds


class CudaClock:
    """Device time of one call with a cold L2, beside the wall-clock time until the GPU is idle."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._start, self._end = Event(enable_timing=True), Event(enable_timing=True)

    def time(self, call: Callable, x: torch.Tensor) -> tuple[torch.Tensor, float, float]:
        """The output, the seconds between two events, the wall-clock seconds around both."""
        self._flush.zero_()
        synchronize()
        began = perf_counter()
        self._start.record()
        output = call(x)
        self._end.record()
        synchronize()
        wall = perf_counter() - began
        return output, self._start.elapsed_time(self._end) * 1e-3, wall
