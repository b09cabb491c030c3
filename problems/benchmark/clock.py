"""The time of one call.

The referee has a clock of its own (referee/child/clock.py), which times many calls in a row, in a
process that may falsify it. Here all code is trusted, so each call is timed in this process, and
alone, except by WarmCudaClock.
"""

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor
from torch.cuda import CUDAGraph, Event, synchronize

FLUSH_BYTES = 1 << 30  # several times the largest L2
# Flushes before each call. They take an H200 1.2 ms, in which even a slow host launches the whole
# call.
FLUSHES = 4
# The calls in a CUDA graph, and how often the graph is timed.
GRAPH_CALLS = 6
REPLAYS = 4


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


class WarmCudaClock:
    """Device time of one call with a warm L2.

    The L2 holds what the call before left there: the same operands, as far as they fit. This is
    how a layer of a network finds the output of the layer before.
    """

    def __init__(self) -> None:
        self._start = Event(enable_timing=True)
        self._end = Event(enable_timing=True)

    def time(self, call: Callable[[Tensor], object], x: Tensor) -> float:
        """Return the seconds of `call(x)`, the least of `REPLAYS` replays of a CUDA graph.

        The graph has `GRAPH_CALLS` calls, so that the host launches all of them at once.
        """
        call(x)  # a first call may do what a graph cannot capture
        graph = CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                call(x)
        return min(self._seconds_of_replay(graph) for _ in range(REPLAYS)) / GRAPH_CALLS

    def _seconds_of_replay(self, graph: CUDAGraph) -> float:
        """Return the seconds of a replay after another one.

        The replay before fills the L2. While it runs, the host launches the one that is timed.
        """
        synchronize()
        graph.replay()
        self._start.record()
        graph.replay()
        self._end.record()
        synchronize()
        return self._start.elapsed_time(self._end) * 1e-3
