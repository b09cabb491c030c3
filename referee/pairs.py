"""A solution and its reference in turn: times, and what a table shows of them."""

import random
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from referee.clock import FLUSHES, CudaClock
from referee.timing import Names

ROUNDS, LEAST, SECONDS = 101, 9, 3.0  # fewer rounds, but not below LEAST, if they take longer
CPU_SAMPLE = 500e-6  # s; short calls are repeated to fill a sample

Samplers = dict[str, Callable[[], float]]


class Modules(NamedTuple):
    """A solution and its reference."""

    names: Names
    solution: torch.nn.Module
    eager: torch.nn.Module

    def by_name(self) -> dict[str, torch.nn.Module]:
        """In the order of the tables' columns."""
        return {self.names.solution: self.solution, self.names.eager: self.eager}

    def titles(self, unit: str) -> list[str]:
        """The titles of `columns`."""
        ours, eager = self.names.solution, self.names.eager
        return [f"{ours} {unit}", f"{eager} {unit}", f"{eager} / {ours}"]


def samplers_of(modules: Modules, x: torch.Tensor, flushes: int = FLUSHES) -> Samplers:
    """Seconds of a call on x: on a GPU with a cold L2, on a CPU the mean of some calls.

    Args:
        flushes: of the L2 before a call, see `CudaClock`.
    """
    if not x.is_cuda:
        return {name: _repeated(module, x) for name, module in modules.by_name().items()}
    clock = CudaClock(x.device, flushes)
    return {
        name: lambda module=module: clock.time(module, x)[1]
        for name, module in modules.by_name().items()
    }


def alternate(
    samplers: Samplers, longest: float = SECONDS, rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Samples in random order within every round; one round more, unrecorded, comes first."""
    times: dict[str, list[float]] = {name: [] for name in samplers}
    started = perf_counter()
    for done in range(-1, rounds):
        if done >= LEAST and perf_counter() - started > longest:
            break
        for name in random.sample(list(samplers), len(samplers)):
            seconds = samplers[name]()
            if done >= 0:
                times[name].append(seconds)
    return times


def columns(times: dict[str, list[float]], unit: float) -> list[str]:
    """The medians of both, and of eager's time in parts of the other's."""
    ours, eager = times.values()
    ratio = median(e / o for e, o in zip(eager, ours, strict=True))
    return [f"{median(ours) * unit:.2f}", f"{median(eager) * unit:.2f}", f"{ratio:.3f}"]


def _repeated(module: torch.nn.Module, x: torch.Tensor) -> Callable[[], float]:
    def call() -> float:
        start = perf_counter()
        module(x)
        return perf_counter() - start

    # The fastest, for the first ones touch fresh memory: of two modules one would be called less
    # often a sample, and caches that another has filled would weigh more.
    calls = max(1, int(CPU_SAMPLE / min(call() for _ in range(5))))

    def sample() -> float:
        start = perf_counter()
        for _ in range(calls):
            module(x)
        return (perf_counter() - start) / calls

    return sample
