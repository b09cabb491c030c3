"""The time of one call. The timers are bound here, before the solution is imported."""

from collections.abc import Callable
from time import perf_counter

import torch
from torch.cuda import Event, synchronize

FLUSH_BYTES = 1 << 30  # several times the largest L2
# Before a call: 1.2 ms of work on an H200, in which the host gets ahead. In a quarter of that, a
# slow host is not done with a call on DTensors, or with a compiled training step.
FLUSHES = 4

Taken = tuple[torch.Tensor, float, float]


class CpuClock:
    """Wall-clock time of one call."""

    def time(self, call: Callable, x: torch.Tensor, write: Callable | None = None) -> Taken:
        """Return the output, and the seconds of the call twice: `CudaClock` has two clocks."""
        if write:
            write()
        start = perf_counter()
        output = call(x)
        seconds = perf_counter() - start
        return output, seconds, seconds


class CudaClock:
    """Device time of one call with a cold L2, beside the wall-clock time until the GPU is idle."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._flushing, self._start, self._end = (Event(enable_timing=True) for _ in range(3))

    def time(self, call: Callable, x: torch.Tensor, write: Callable | None = None) -> Taken:
        """Return the output, the seconds between two events, the wall-clock seconds around both.

        The L2 is flushed while the host is launching, so that the events measure the device and
        not the launch; the wall-clock seconds are without the flush. After it `write` alters what
        the call reads: one that works on another stream meanwhile reads old values.
        """
        synchronize()
        began = perf_counter()
        self._flushing.record()
        for _ in range(FLUSHES):
            self._flush.zero_()
        if write:
            write()
        self._start.record()
        output = call(x)
        self._end.record()
        synchronize()
        wall = perf_counter() - began
        flush = self._flushing.elapsed_time(self._start) * 1e-3
        return output, self._start.elapsed_time(self._end) * 1e-3, wall - flush
