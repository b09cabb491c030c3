"""The time of one call, for problems/benchmark.py.

The referee's timings do not use it.
"""

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.cuda import Event, synchronize

FLUSH_BYTES = 1 << 30  # several times the largest L2
# Flushes before each call. They take an H200 1.2 ms, in which even a slow host launches the whole
# call. One flush would be too short for a call on DTensors or a compiled training step.
FLUSHES = 4


class Timed(NamedTuple):
    """A call's output and its time.

    Attributes:
        output: what the call returned.
        seconds: on a GPU the device's time, on a CPU the wall-clock time.
        wall_seconds: the wall-clock time.
    """

    output: Tensor
    seconds: float
    wall_seconds: float


class CpuClock:
    """Wall-clock time of one call."""

    def time(
        self, call: Callable[[Tensor], Tensor], x: Tensor, prepare: Callable | None = None
    ) -> Timed:
        """Call `prepare`, then time `call(x)`."""
        if prepare is not None:
            prepare()
        start = perf_counter()
        output = call(x)
        seconds = perf_counter() - start
        return Timed(output, seconds, seconds)


class CudaClock:
    """Device time of one call with a cold L2, and the wall-clock time until the GPU is idle."""

    def __init__(self, device: torch.device) -> None:
        self._flush_memory = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._flush_start = Event(enable_timing=True)
        self._call_start = Event(enable_timing=True)
        self._call_end = Event(enable_timing=True)

    def time(
        self, call: Callable[[Tensor], Tensor], x: Tensor, prepare: Callable | None = None
    ) -> Timed:
        """Flush the L2, call `prepare`, then time `call(x)` by two events.

        The host launches the call while the GPU flushes the L2. So the time between the events is
        the device's, without the host's time for the launch. The wall-clock time does not include
        the flush.

        `prepare` may write new values to x; the GPU does that after the flush. A call that computes
        on another stream, without waiting for this one, begins during the flush. Its time is too
        short, and its output shows that, because it read the old values.
        """
        synchronize()
        start = perf_counter()
        self._flush_start.record()
        for _ in range(FLUSHES):
            self._flush_memory.zero_()
        if prepare is not None:
            prepare()
        self._call_start.record()
        output = call(x)
        self._call_end.record()
        synchronize()
        seconds_with_flush = perf_counter() - start
        flush_seconds = self._flush_start.elapsed_time(self._call_start) * 1e-3
        call_seconds = self._call_start.elapsed_time(self._call_end) * 1e-3
        return Timed(output, call_seconds, seconds_with_flush - flush_seconds)
