"""The training step side by side: a forward that saves for the backward, then the backward."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks

from referee.clock import CpuClock, CudaClock
from referee.progress import Progress
from referee.timing import (
    CONFIRMATION,
    Inputs,
    Names,
    Rate,
    Rounds,
    Samples,
    Timings,
    compiled,
    judge,
    rounds,
)


@dataclass(frozen=True)
class Pace:
    """The measure for the halves of a step: the work of a forward at the highest rate.

    Attributes:
        call: does this work on an input. It is timed in every round, for the device may have become
            faster since: a virtual machine does when its neighbours rest.
        fastest: seconds that it took before.
        backward: how many times this work a backward does.
    """

    call: Callable
    fastest: float
    backward: int


@dataclass
class Step:
    """The times of the two halves of a step, and the bytes kept from one to the other by name."""

    forward: Timings
    backward: Timings
    kept: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(device: str, names: Names, rate: Rate) -> "Step":
        """Without times yet."""
        return Step(*(Timings(device, names, rate, 0) for _ in ("forward", "backward")))

    def trim(self) -> None:
        """Keeps the rounds of which both halves are whole."""
        for half in (self.forward, self.backward):
            half.trim(self.rounds)

    @property
    def rounds(self) -> int:
        """How many were timed whole."""
        return min(self.forward.rounds, self.backward.rounds)

    def seconds(self) -> dict[str, dict[str, list[float]]]:
        """Seconds by half and name; the whole step is the sum of the two in the same round."""
        forward, backward = self.forward.seconds, self.backward.seconds
        step = {
            name: [f + b for f, b in zip(forward[name], backward[name], strict=True)]
            for name in forward
        }
        return {"forward": forward, "backward": backward, "step": step}

    @property
    def problems(self) -> list[str]:
        """The faults of either half, in words."""
        halves = {"forward": self.forward, "backward": self.backward}
        return [f"step, {half}: {p}" for half, timings in halves.items() for p in timings.problems]

    @property
    def notes(self) -> list[str]:
        """Notes on what was left out of either half, and why."""
        return self.forward.notes + self.backward.notes


@torch.enable_grad()
def measure_step(
    reference: nn.Module,
    solution: nn.Module,
    inputs: Inputs,
    grad_output: torch.Tensor,
    step: Step,
    pace: Pace,
    wanted: Rounds,
    progress: Progress,
) -> Step:
    """Times forward and backward of everything once a round, as `timing.measure` does.

    Args:
        grad_output: the output's gradient; the sign of a row changes before every backward.
        step: without times yet; they are added to it.
    """
    x, names, halves = inputs.ring[0], step.forward.names, (step.forward, step.backward)
    calls = {names.solution: solution, names.eager: reference, names.again: reference}
    leaf = x.detach().requires_grad_()
    step.kept |= {name: kept_bytes(calls[name], leaf) for name in (names.solution, names.eager)}
    if x.is_cuda:

        def attempt(module: nn.Module) -> None:
            leaf = x.detach().requires_grad_()
            grad(module(leaf), _leaves(module, leaf), grad_output)

        calls |= compiled(reference, attempt, halves[0].notes)
    clock = CudaClock(x.device) if x.is_cuda else CpuClock()
    one_round = partial(_round, calls, names.solution, inputs, grad_output, pace.call, clock)
    fastest = pace.fastest
    for attempt in (wanted, CONFIRMATION):
        for half in halves:
            half.start(calls)
        for samples, problem in rounds(one_round, attempt, x.device, "the training step", progress):
            *parts, seconds = samples
            for half, part in zip(halves, parts, strict=True):
                half.add(part)
            fastest = min(fastest, seconds)
            halves[1].problems += [problem] if problem else []
        found = [
            judge(step.forward, fastest, "the step's forward"),
            judge(step.backward, pace.backward * fastest, "the step's backward"),
        ]
        if not any(half.problems for half in found):
            break
    for half, findings in zip(halves, found, strict=True):
        half.add_findings(findings)
    return step


def kept_bytes(module: nn.Module, *arguments: object) -> int:
    """Bytes that autograd keeps from a forward for its backward, beyond inputs and parameters."""
    kept: dict[int, int] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        module(*arguments)
    for there in (*arguments, *module.parameters()):
        if isinstance(there, torch.Tensor):
            kept.pop(there.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def _leaves(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [x, *module.parameters()]


def _round(
    calls: dict[str, nn.Module],
    solution: str,
    inputs: Inputs,
    grad_output: torch.Tensor,
    pace: Callable,
    clock: CpuClock | CudaClock,
) -> tuple[tuple[Samples, Samples, float], str | None]:
    forward, backward, problem = {}, {}, None
    for name in random.sample(list(calls), len(calls)):
        x = inputs.next().detach().requires_grad_()
        output, *forward[name] = clock.time(calls[name], x, inputs.write)
        leaves = _leaves(calls[name], x)
        gradients, *backward[name] = clock.time(
            lambda output, leaves=leaves: grad(output, leaves, grad_output),
            output,
            grad_output[inputs.row].neg_,
        )
        if name == solution:
            output = output.detach()
            problem = inputs.wrong(output) or inputs.wrong_gradient(output, gradients, grad_output)
        del output, gradients  # the next call finds this memory free again
    _, seconds, _ = clock.time(pace, inputs.next(), inputs.write)
    return (forward, backward, seconds), problem
