"""A solution and its reference in turn: times, and what a table shows of them.

Both are a dict of two modules or calls by their names, the solution first.
"""

import random
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch.autograd import grad

from referee.clock import CudaClock

ROUNDS, LEAST, SECONDS = 101, 9, 3.0  # fewer rounds, but not below LEAST, if they take longer
CPU_SAMPLE = 500e-6  # s; short calls are repeated to fill a sample

Both = dict[str, Callable[[torch.Tensor], object]]
Samplers = dict[str, Callable[[], float]]  # of seconds


def samplers_of(both: Both, x: torch.Tensor) -> Samplers:
    """Seconds of a call on x: on a GPU with a cold L2, on a CPU the mean of some calls."""
    if not x.is_cuda:
        return {name: _repeated(call, x) for name, call in both.items()}
    clock = CudaClock(x.device)
    return {name: lambda call=call: clock.time(call, x)[1] for name, call in both.items()}


def steps_of(both: Both, grad_output: torch.Tensor) -> Both:
    """Calls of the modules, and the gradients of the input and the parameters."""
    calls: Both = {}
    for name, f in both.items():
        leaves = list(f.parameters())
        calls[name] = lambda x, f=f, leaves=leaves: grad(f(x), [x, *leaves], grad_output)
    return calls


def alternate(
    samplers: Samplers, longest: float = SECONDS, rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Samples in random order within every round; one round more, unrecorded, comes first."""
    times: dict[str, list[float]] = {name: [] for name in samplers}
    started = perf_counter()
    for done in range(rounds + 1):
        if done > LEAST and perf_counter() - started > longest:
            break
        for name in random.sample(list(samplers), len(samplers)):
            times[name].append(samplers[name]())
    return {name: taken[1:] for name, taken in times.items()}


def titles(both: Both, unit: str) -> list[str]:
    """The titles of `columns`."""
    ours, eager = both
    return [f"{ours} {unit}", f"{eager} {unit}", f"{eager} / {ours}"]


def columns(times: dict[str, list[float]], unit: float) -> list[str]:
    """The medians of both, and of eager's time in parts of the other's."""
    ours, eager = times.values()
    ratio = median(e / o for e, o in zip(eager, ours, strict=True))
    return [f"{median(ours) * unit:.2f}", f"{median(eager) * unit:.2f}", f"{ratio:.3f}"]


def mean_of(call: Callable, x: torch.Tensor, calls: int) -> float:
    """The mean seconds of a call on the host, launches not waited for."""
    if x.is_cuda:
        torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(calls):
        call(x)
    return (perf_counter() - start) / calls


def _repeated(call: Callable, x: torch.Tensor) -> Callable[[], float]:
    # The fastest, for the first ones touch fresh memory: of two modules one would be called less
    # often a sample, and caches that another has filled would weigh more.
    fastest = min(mean_of(call, x, 1) for _ in range(5))
    return partial(mean_of, call, x, max(1, int(CPU_SAMPLE / fastest)))
