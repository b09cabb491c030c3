"""Side-by-side timing: interleaved, on inputs that change before every call, with a cold L2."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch
from torch import nn
from torch.autograd import grad

from referee.cases import refill
from referee.clock import CpuClock, CudaClock
from referee.compare import first_mismatch
from referee.progress import Progress

SOLUTION = "ModelNew"
EAGER = "torch.relu"
AGAIN = "torch.relu (again)"  # the A/A control: what it differs by from EAGER is noise
COMPILED = "torch.compile"
COPY = "copy"
COPY_REUSED = "copy, reused memory"

WARM_UP = {"cpu": 2, "cuda": 10}
GPU_ROUNDS = 50
CPU_SECONDS, CPU_LEAST, CPU_MOST = 25.0, 5, 50  # as many rounds as fit in the time
# Times the copy's bandwidth, out of reach for what reads and writes as much. A CPU's copy may fetch
# the lines that it overwrites, three transfers for two: streaming stores beat it by up to 1.5.
FASTER_THAN_COPY = {"cpu": 1.9, "cuda": 1.25}
GRAIN = 50e-6  # s; a launch and the clock's own cost, within which nothing is judged
UNSEEN = 0.1  # the part of a call that device events may miss before they are called wrong

T = TypeVar("T")
Samples = dict[str, tuple[float, float]]  # seconds of one round, by the device and by the host


class Inputs:
    """A ring of inputs `[rows, ...]`; one random row is rewritten before every call.

    A result that was kept from an earlier call is then wrong in that row, which `wrong` looks at.
    """

    def __init__(
        self, ring: list[torch.Tensor], reference: nn.Module, generator: torch.Generator
    ) -> None:
        self.ring, self._reference, self._generator = ring, reference, generator
        self._turn = 0
        self._row = 0

    def next(self) -> torch.Tensor:
        """The next input of the ring, freshly altered."""
        self._turn = (self._turn + 1) % len(self.ring)
        x = self.ring[self._turn]
        self._row = random.randrange(len(x))
        refill(x[self._row], self._generator)
        return x

    def wrong(self, output: torch.Tensor) -> str | None:
        """Compares the altered row, the first, the last and a random one with the reference."""
        x, rows = self.ring[self._turn], self._suspects()
        mismatch = first_mismatch(output[rows], self._reference(x[rows]))
        return f"a timed call was wrong in rows {rows}: {mismatch}" if mismatch else None

    def wrong_gradient(self, gradient: torch.Tensor, grad_output: torch.Tensor) -> str | None:
        """Compares the same rows of the input's gradient with the reference's."""
        rows = self._suspects()
        x = self.ring[self._turn][rows].requires_grad_()
        [expected] = grad(self._reference(x), x, grad_output[rows])
        mismatch = first_mismatch(gradient[rows], expected)
        return f"a timed gradient was wrong in rows {rows}: {mismatch}" if mismatch else None

    def _suspects(self) -> list[int]:
        last = len(self.ring[self._turn]) - 1
        return [self._row, 0, last, random.randint(0, last)]


@dataclass
class Timings:
    """Seconds of every timed call by name, in the order of the rounds, and what went wrong.

    Attributes:
        seconds: by the device's clock.
        wall: by the host's clock, until the device was idle.
        device: "cpu" or "cuda".
        moved_bytes: read and written by one call.
        problems: wrong outputs and times that cannot be believed, in words.
        notes: what was left out, and why.
    """

    device: str
    moved_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def start(self, names: Iterable[str]) -> None:
        """Makes room for the times of these contestants, in this order."""
        for name in names:
            self.seconds[name], self.wall[name] = [], []

    def add(self, samples: Samples) -> None:
        """Appends the times of one round."""
        for name, (seconds, wall) in samples.items():
            self.seconds[name].append(seconds)
            self.wall[name].append(wall)


@torch.no_grad()
def measure(
    reference: nn.Module,
    solution: nn.Module,
    inputs: Inputs,
    trials: int | None,
    progress: Progress,
) -> Timings:
    """Times everything once a round, in random order, `trials` rounds or the default number."""
    x = inputs.ring[0]
    device = x.device
    timings = Timings(device.type, 2 * x.numel() * x.element_size())
    calls = _contestants(reference, solution, x, timings)
    clock = CudaClock(device) if device.type == "cuda" else CpuClock()
    timings.start(calls)
    one_round = partial(_round, calls, inputs, clock)
    for samples, problem in rounds(one_round, trials, device, "the forward", progress):
        timings.add(samples)
        timings.problems += [problem] if problem else []
    timings.problems += incredible(timings, fastest_copy(timings))
    return timings


def rounds(
    one_round: Callable[[], tuple[T, str | None]],
    trials: int | None,
    device: torch.device,
    what: str,
    progress: Progress,
) -> Iterator[tuple[T, str | None]]:
    """What the rounds after the warm-up give, `trials` or the default number, until a problem."""
    for done in range(WARM_UP[device.type]):
        progress(f"warming up {what}", f"{done + 1} of {WARM_UP[device.type]} rounds")
        one_round()
    started, done, problem = perf_counter(), 0, None
    while not problem and _goes_on(done, perf_counter() - started, trials, device):
        progress(f"timing {what}", f"round {done + 1}, {perf_counter() - started:.0f} s")
        samples, problem = one_round()
        yield samples, problem
        done += 1


def fastest_copy(timings: Timings) -> float:
    """Seconds of the fastest copy of one input into memory that is there."""
    return min(timings.seconds[COPY_REUSED if COPY_REUSED in timings.seconds else COPY])


def incredible(timings: Timings, fastest: float) -> list[str]:
    """Times that no honest run gives: faster than memory, or mostly outside the timed stream.

    Args:
        timings: of calls that read and write at least as much as a copy of the input.
        fastest: seconds of the fastest copy.
    """
    problems = []
    floor = fastest / FASTER_THAN_COPY[timings.device] - GRAIN
    for name, seconds in timings.seconds.items():
        typical = median(seconds)
        if typical < floor:
            problems.append(
                f"{name} took {typical * 1e3:.3f} ms, and moving its bytes once as fast as a copy "
                f"takes {fastest * 1e3:.3f} ms: not credible"
            )
        hidden = median(w - s for w, s in zip(timings.wall[name], seconds, strict=True))
        if hidden > 4 * GRAIN + UNSEEN * typical:
            problems.append(
                f"{name} took {typical * 1e3:.3f} ms by device events, but the device was busy "
                f"{hidden * 1e3:.3f} ms longer: work on another stream, or a changed timer"
            )
    return problems


def _contestants(
    reference: nn.Module, solution: nn.Module, x: torch.Tensor, timings: Timings
) -> dict[str, Callable]:
    target = torch.empty_like(x).fill_(0)  # written once, so that its pages exist
    calls = {SOLUTION: solution, EAGER: reference, AGAIN: reference}
    if not x.is_cuda:  # a CPU output is fresh memory, whose page faults the copy should pay too
        return {**calls, COPY: torch.clone, COPY_REUSED: target.copy_}
    calls |= compiled(reference, lambda module: module(x), timings.notes)
    return {**calls, COPY: target.copy_}  # cudaMemcpy from device to device


def compiled(
    reference: nn.Module, attempt: Callable[[Callable], object], notes: list[str]
) -> dict[str, Callable]:
    """The compiled reference by its name; empty, with a note, if an attempt to use it fails."""
    module = torch.compile(reference)
    try:
        attempt(module)
    except Exception as error:  # no Triton, no compiler: the baseline is missing, nothing is wrong
        reason = str(error).strip().splitlines() or [type(error).__name__]
        notes.append(f"{COMPILED} is left out: {reason[0]}")
        return {}
    return {COMPILED: module}


def _round(
    calls: dict[str, Callable], inputs: Inputs, clock: CpuClock | CudaClock
) -> tuple[Samples, str | None]:
    samples, problem = {}, None
    for name in random.sample(list(calls), len(calls)):
        output, *samples[name] = clock.time(calls[name], inputs.next())
        if name == SOLUTION:
            problem = inputs.wrong(output)
        del output  # the next call finds this memory free again
    return samples, problem


def _goes_on(done: int, seconds: float, trials: int | None, device: torch.device) -> bool:
    if trials is not None:
        return done < trials
    if device.type == "cuda":
        return done < GPU_ROUNDS
    return done < CPU_LEAST or (done < CPU_MOST and seconds < CPU_SECONDS)
