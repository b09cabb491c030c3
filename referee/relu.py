"""Grades ReLU: equal to the last bit, and limited by memory."""

import math
import random
from collections.abc import Callable, Container, Sequence

import torch
from torch import nn
from torch.autograd import grad

from model import Problem
from referee import cases
from referee.compare import first_mismatch
from referee.correctness import check_headline, check_small
from referee.memory import RING, choose_rows
from referee.outcome import Outcome, Run, Task
from referee.progress import Progress
from referee.step import Pace, Step, measure_step
from referee.timing import Names, Rate, Rounds, Timings, compiled, measure

NAMES = Names(solution="ModelNew", eager="torch.relu")
SWEEP = {"cpu": range(12, 27, 2), "cuda": range(12, 33, 2)}  # exponents of two, of elements
COPY = "copy"
COPY_REUSED = "copy, reused memory"
RATE = Rate(
    unit="GB/s",
    scale=1e9,
    digits=1,
    work="moved_bytes",
    yardstick=COPY,
    floor="moving its bytes once as fast as a copy",
    # A CPU's copy may fetch the lines that it overwrites, three transfers for two: streaming
    # stores beat it by up to 1.5.
    margin={"cpu": 1.9, "cuda": 1.25},
)


class Inputs:
    """A ring of inputs `[rows, ...]`; one random row is rewritten before every call.

    A result that was kept from an earlier call is then wrong in that row, which `wrong` looks at.
    See `timing.Inputs`.
    """

    def __init__(
        self, ring: list[torch.Tensor], reference: nn.Module, generator: torch.Generator
    ) -> None:
        self.ring, self._reference, self._generator = ring, reference, generator
        self._turn = self.row = 0
        self._values = torch.empty(0)

    def next(self) -> torch.Tensor:
        """The next input of the ring, which `write` is to alter."""
        self._turn = (self._turn + 1) % len(self.ring)
        x = self.ring[self._turn]
        self.row = random.randrange(len(x))
        self._values = cases.refill(torch.empty_like(x[self.row]), self._generator)
        return x

    def write(self) -> None:
        """Gives the row of that input its new values."""
        self.ring[self._turn][self.row] = self._values

    def wrong(self, output: torch.Tensor) -> str | None:
        """Compares the altered row, the first, the last and a random one with the reference."""
        x, rows = self.ring[self._turn], self._suspects()
        mismatch = first_mismatch(output[rows], self._reference(x[rows]))
        return f"a timed call was wrong in rows {rows}: {mismatch}" if mismatch else None

    def wrong_gradient(
        self, output: torch.Tensor, gradients: Sequence[torch.Tensor], grad_output: torch.Tensor
    ) -> str | None:
        """Compares the same rows of the input's gradient with the reference's."""
        [gradient] = gradients
        rows = self._suspects()
        x = self.ring[self._turn][rows].requires_grad_()
        [expected] = grad(self._reference(x), x, grad_output[rows])
        mismatch = first_mismatch(gradient[rows], expected)
        return f"a timed gradient was wrong in rows {rows}: {mismatch}" if mismatch else None

    def _suspects(self) -> list[int]:
        last = len(self.ring[self._turn]) - 1
        return [self.row, 0, last, random.randint(0, last)]


def choose_shape(
    problem: Problem,
    wanted: int | None,
    dtype: torch.dtype,
    device: torch.device,
    buffers: int | None = None,
) -> tuple[tuple[int, ...], str]:
    """The shape of x, and a sentence that says why it is not the headline's, or "".

    Raises:
        ValueError: it does not fit, or torch.relu does not take the dtype.
    """
    if dtype not in cases.served(device).values():
        raise ValueError(
            f"torch.relu of torch {torch.__version__} does not take {dtype} on {device}"
        )
    with torch.device("meta"):
        [row] = problem.get_inputs_at(1)
    count, note = choose_rows(
        wanted, problem.rows, row.numel() * dtype.itemsize, device, buffers=buffers
    )
    return (count, *row.shape[1:]), note


def grade(task: Task, outcome: Outcome) -> None:
    """Checks outputs and gradients; if all are right, takes the times: integers have no step.

    Args:
        outcome: what is found is added to it as it is found.
    """
    problem, device, progress = task.problem, task.device, task.progress
    reference = problem.reference(*problem.get_init_inputs()).to(device)
    solution = task.solution(*problem.get_init_inputs()).to(device)
    generator = torch.Generator(device=device)
    seed = generator.seed() % 2**31  # new in every run
    checks = outcome.checks
    checks.add(check_small(reference, solution, device, seed, progress))
    if checks.failures:
        return
    progress("drawing the input")
    x = cases.random(task.shape, task.dtype, device, generator)
    checks.add(check_headline(reference, solution, x, generator, progress))
    if checks.failures:
        return
    inputs, timings, calls = contest(reference, solution, x, generator)
    run = Run("", timings)
    outcome.runs.append(run)
    measure(calls, inputs, timings, fastest_copy, task.wanted, progress)
    if timings.problems or not x.is_floating_point():
        return
    progress("drawing the output's gradient")
    grad_output = cases.random(task.shape, x.dtype, device, generator)
    pace = Pace(calls[copy_of(calls)], fastest_copy(timings), backward=1)
    run.step = Step.of(device.type, NAMES, RATE)
    measure_step(reference, solution, inputs, grad_output, run.step, pace, task.wanted, progress)


def contest(
    reference: nn.Module, solution: nn.Module, x: torch.Tensor, generator: torch.Generator
) -> tuple[Inputs, Timings, dict[str, Callable]]:
    """All that `measure` needs for inputs like x, which becomes one of them."""
    ring = [x, *(x.clone() for _ in range(RING[x.device.type] - 1))]
    timings = Timings(x.device.type, NAMES, RATE, work=2 * x.nbytes, moved=2 * x.nbytes)
    calls = contestants(reference, solution, x, timings.notes)
    return Inputs(ring, reference, generator), timings, calls


class Series:
    """ReLU of `[rows, 1024]` in one dtype, for a sweep."""

    setting = ""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.shapes = [(2**e // 1024, 1024) for e in SWEEP[task.device.type]]

    def needed(self, shape: tuple[int, ...]) -> int:
        """Bytes of memory: the ring, the copy's target, outputs of two calls."""
        buffers = RING[self._task.device.type] + 3
        return buffers * math.prod(shape) * self._task.dtype.itemsize

    def time(self, shape: tuple[int, ...], wanted: Rounds, progress: Progress) -> Timings:
        """The forward's times."""
        task = self._task
        reference, solution = (
            kind(*task.problem.get_init_inputs()).to(task.device)
            for kind in (task.problem.reference, task.solution)
        )
        generator = torch.Generator(device=task.device)
        generator.seed()
        x = cases.random(shape, task.dtype, task.device, generator)
        inputs, timings, calls = contest(reference, solution, x, generator)
        return measure(calls, inputs, timings, fastest_copy, wanted, progress)

    def close(self) -> None:
        """Nothing is kept between sizes."""


def sweep(task: Task) -> list[Series]:
    """The series of the task's dtype."""
    return [Series(task)]


@torch.no_grad()
def contestants(
    reference: nn.Module, solution: nn.Module, x: torch.Tensor, notes: list[str]
) -> dict[str, Callable]:
    """The calls that are timed, by name; `notes` gets what is left out."""
    target = torch.empty_like(x).fill_(0)  # written once, so that its pages exist
    calls = {NAMES.solution: solution, NAMES.eager: reference, NAMES.again: reference}
    if x.is_cuda:
        calls |= compiled(reference, lambda module: module(x), notes)
    return calls | copies(target)


def copies(target: torch.Tensor) -> dict[str, Callable]:
    """The copies that show what the device can do, by name; the target's pages exist."""
    if not target.is_cuda:  # a CPU output is fresh memory, whose page faults a copy should pay too
        return {COPY: torch.clone, COPY_REUSED: target.copy_}
    return {COPY: target.copy_}  # cudaMemcpy from device to device


def fastest_copy(timings: Timings) -> float:
    """Seconds of the fastest copy of one input into memory that is there."""
    return min(timings.seconds[copy_of(timings.seconds)])


def copy_of(names: Container[str]) -> str:
    """The contestant that copies into memory that is there."""
    return COPY_REUSED if COPY_REUSED in names else COPY
