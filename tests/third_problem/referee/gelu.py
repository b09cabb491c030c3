"""Grades GELU: as accurate as torch's, but for a few roundings, and limited by memory."""

from collections.abc import Callable

import torch
from torch import nn

from referee import cases, relu
from referee.memory import RING
from referee.outcome import Outcome, Run, Task
from referee.progress import Progress
from referee.relu import RATE, choose_shape, copies, fastest_copy
from referee.timing import Names, Rounds, Timings, measure

__all__ = ["choose_shape", "grade", "sweep"]

NAMES = Names(solution="GeluNew", eager="gelu")
SHAPES = [(), (0,), (1,), (33, 7), (300_007,)]
ROUNDINGS = 8  # of the result, or of 2^-6 where that is smaller


def mismatch(output: torch.Tensor, x: torch.Tensor) -> str | None:
    """The fault of the result for x, in words."""
    if output.shape != x.shape or output.dtype != x.dtype:
        return f"the output is {list(output.shape)} {output.dtype}"
    want = nn.functional.gelu(x.double())
    allowed = ROUNDINGS * torch.finfo(x.dtype).eps * want.abs().clamp_min(2**-6)
    beyond = int(((output.double() - want).abs() > allowed).sum())
    return f"{beyond:,} of {x.numel():,} elements are off" if beyond else None


class Inputs(relu.Inputs):
    """A ring of inputs, as ReLU's."""

    def wrong(self, output: torch.Tensor) -> str | None:
        """Looks at the altered row, the first, the last and a random one."""
        rows = self._suspects()
        return mismatch(output[rows], self.ring[self._turn][rows])


def grade(task: Task, outcome: Outcome) -> None:
    """Checks outputs; if all are right, takes the times of forwards."""
    reference, solution = (
        kind().to(task.device) for kind in (task.problem.reference, task.solution)
    )
    generator = torch.Generator(device=task.device)
    generator.seed()
    for shape in [*SHAPES, task.shape]:
        x = cases.random(shape, task.dtype, task.device, generator)
        outcome.checks.record(f"shape {list(shape)}", lambda x=x: mismatch(solution(x), x))
    if not outcome.checks.failures:
        timings = time(reference, solution, x, generator, task.wanted, task.progress)
        outcome.runs.append(Run("", timings))


def time(
    reference: nn.Module,
    solution: nn.Module,
    x: torch.Tensor,
    generator: torch.Generator,
    wanted: Rounds,
    progress: Progress,
) -> Timings:
    """The times of forwards on inputs like x, beside eager and a copy."""
    ring = [x, *(x.clone() for _ in range(RING[x.device.type] - 1))]
    inputs = Inputs(ring, reference, generator)
    timings = Timings(x.device.type, NAMES, RATE, work=2 * x.nbytes, moved=2 * x.nbytes)
    calls: dict[str, Callable] = {NAMES.solution: solution, NAMES.eager: reference}
    calls |= {NAMES.again: reference} | copies(torch.empty_like(x).fill_(0))
    return measure(calls, inputs, timings, fastest_copy, wanted, progress)


class Series(relu.Series):
    """GELU of `[rows, 1024]` in one dtype, for a sweep."""

    def time(self, shape: tuple[int, ...], wanted: Rounds, progress: Progress) -> Timings:
        """The forward's times."""
        kinds = self._task.problem.reference, self._task.solution
        reference, solution = (kind().to(self._task.device) for kind in kinds)
        generator = torch.Generator(device=self._task.device)
        generator.seed()
        x = cases.random(shape, self._task.dtype, self._task.device, generator)
        return time(reference, solution, x, generator, wanted, progress)


def sweep(task: Task) -> list[Series]:
    """The series of the task's dtype."""
    return [Series(task)]
