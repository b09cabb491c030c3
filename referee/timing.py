"""Side-by-side timing: interleaved, on inputs that change before every call, with a cold L2.

The timers are bound here, before the solution is imported.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch
from torch import nn
from torch.cuda import Event, synchronize

from referee.cases import refill
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
CPU_SECONDS, CPU_LEAST, CPU_MOST = 40.0, 5, 50  # as many rounds as fit in the time
FLUSH_BYTES = 256 << 20  # several times the largest L2
# Times the copy's bandwidth, out of reach for what reads and writes as much. A CPU's copy may fetch
# the lines that it overwrites, three transfers for two: streaming stores beat it by up to 1.5.
FASTER_THAN_COPY = {"cpu": 1.9, "cuda": 1.25}
GRAIN = 50e-6  # s; a launch and the clock's own cost, within which nothing is judged
UNSEEN = 0.1  # the part of a call that device events may miss before they are called wrong


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
        x = self.ring[self._turn]
        rows = [self._row, 0, len(x) - 1, random.randrange(len(x))]
        mismatch = first_mismatch(output[rows], self._reference(x[rows]))
        return f"a timed call was wrong in rows {rows}: {mismatch}" if mismatch else None


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
    for done in range(WARM_UP[device.type]):
        progress("warming up", f"{done + 1} of {WARM_UP[device.type]} rounds")
        _round(calls, inputs, clock)
    timings.seconds, timings.wall = {name: [] for name in calls}, {name: [] for name in calls}
    started, done = perf_counter(), 0
    while _goes_on(done, perf_counter() - started, trials, device):
        progress("timing", f"round {done + 1}, {perf_counter() - started:.0f} s")
        samples, problem = _round(calls, inputs, clock)
        for name, (seconds, wall) in samples.items():
            timings.seconds[name].append(seconds)
            timings.wall[name].append(wall)
        done += 1
        if problem:
            timings.problems.append(problem)
            break
    timings.problems += incredible(timings)
    return timings


def incredible(timings: Timings) -> list[str]:
    """Times that no honest run gives: faster than memory, or mostly outside the timed stream."""
    problems = []
    copy = COPY_REUSED if COPY_REUSED in timings.seconds else COPY
    fastest = min(timings.seconds[copy])
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
    compiled = torch.compile(reference)
    try:
        compiled(x)
    except Exception as error:  # no Triton, no compiler: the baseline is missing, nothing is wrong
        reason = str(error).strip().splitlines() or [type(error).__name__]
        timings.notes.append(f"{COMPILED} is left out: {reason[0]}")
    else:
        calls[COMPILED] = compiled
    return {**calls, COPY: target.copy_}  # cudaMemcpy from device to device


def _round(
    calls: dict[str, Callable], inputs: Inputs, clock: CpuClock | CudaClock
) -> tuple[dict[str, tuple[float, float]], str | None]:
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
