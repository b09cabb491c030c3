"""Times calls in rounds. In each round every call is timed once, in random order.

If the machine is slower for a while, all calls are affected alike.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from timeit import timeit

import torch
from torch import Tensor

from problems.benchmark.clock import CpuClock, CudaClock

ROUNDS = 31

# Calls that are timed together on the host, which does not wait for the GPU between them. They are
# so small that the GPU keeps up with the host, and its queue of launches does not fill.
HOST_CALLS = 250


def time_in_turn(calls: dict[str, Callable], x: Tensor) -> dict[str, list[float]]:
    """Return the seconds of each call on x in `ROUNDS` rounds; on a GPU, with a cold L2."""
    clock = CudaClock(x.device) if x.is_cuda else CpuClock()
    return time_rounds(calls, lambda call: clock.time(call, x), ROUNDS)


def time_host_in_turn(calls: dict[str, Callable], x: Tensor) -> dict[str, list[float]]:
    """Return the host's seconds of each call on x in `ROUNDS` rounds."""
    return time_rounds(calls, lambda call: _host_seconds(call, x), ROUNDS)


def time_rounds(
    calls: dict[str, Callable], seconds_of: Callable[[Callable], float], round_count: int
) -> dict[str, list[float]]:
    """Return what `seconds_of` returns for each call in each round, after a round as warm-up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(round_count + 1):
        is_warm_up = turn == 0
        for name, call in random.sample(list(calls.items()), len(calls)):
            seconds = seconds_of(call)
            if not is_warm_up:
                times[name].append(seconds)
    return times


def _host_seconds(call: Callable, x: Tensor) -> float:
    """Return the host's mean seconds for a call, over `HOST_CALLS` calls."""
    setup = torch.cuda.synchronize if x.is_cuda else "pass"
    return timeit(partial(call, x), setup, number=HOST_CALLS) / HOST_CALLS


@dataclass(frozen=True)
class Comparison:
    """The times of two calls, under the names that rows of results have.

    Attributes:
        ours_seconds: the median seconds of our call.
        eager_seconds: the median seconds of eager's.
        ratio: the median over the rounds of eager's time / ours.
    """

    ours_seconds: float
    eager_seconds: float
    ratio: float


def compare(times: dict[str, list[float]]) -> Comparison:
    """Compare the times "ours" and "eager" of the same rounds."""
    rounds = zip(times["ours"], times["eager"], strict=True)
    ratio = median(eager / ours for ours, eager in rounds)
    return Comparison(median(times["ours"]), median(times["eager"]), ratio)
