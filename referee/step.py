"""The training step side by side: a forward that saves for the backward, then the backward."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks

from referee.clock import CpuClock, CudaClock
from referee.progress import Progress
from referee.timing import (
    AGAIN,
    EAGER,
    SOLUTION,
    Inputs,
    Samples,
    Timings,
    compiled,
    incredible,
    rounds,
)


@dataclass
class Step:
    """The times of the two halves of a step, and the bytes kept from one to the other by name."""

    forward: Timings
    backward: Timings
    kept: dict[str, int]

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
        """What went wrong in either half, in words."""
        halves = {"forward": self.forward, "backward": self.backward}
        return [f"step, {half}: {p}" for half, timings in halves.items() for p in timings.problems]


@torch.enable_grad()
def measure_step(
    reference: nn.Module,
    solution: nn.Module,
    inputs: Inputs,
    grad_output: torch.Tensor,
    trials: int | None,
    fastest_copy: float,
    progress: Progress,
) -> Step:
    """Times forward and backward of everything once a round, as `timing.measure` does.

    Args:
        grad_output: the output's gradient, of the input's shape.
        fastest_copy: seconds in which a copy of the input can be made.
    """
    x = inputs.ring[0]
    moved = 2 * x.numel() * x.element_size()
    halves = Timings(x.device.type, moved), Timings(x.device.type, moved)
    calls = {SOLUTION: solution, EAGER: reference, AGAIN: reference}
    kept = {name: kept_bytes(calls[name], x) for name in (SOLUTION, EAGER)}
    if x.is_cuda:

        def attempt(module: Callable) -> None:
            leaf = x.detach().requires_grad_()
            grad(module(leaf), leaf, grad_output)

        calls |= compiled(reference, attempt, halves[0].notes)
    clock = CudaClock(x.device) if x.is_cuda else CpuClock()
    for half in halves:
        half.start(calls)
    one_round = partial(_round, calls, inputs, grad_output, clock)
    for samples, problem in rounds(one_round, trials, x.device, "the training step", progress):
        for half, part in zip(halves, samples, strict=True):
            half.add(part)
        halves[1].problems += [problem] if problem else []
    for half in halves:
        half.problems += incredible(half, fastest_copy)
    return Step(*halves, kept)


def kept_bytes(module: Callable, x: torch.Tensor) -> int:
    """Bytes that autograd keeps from the forward for the backward, beyond the input's own."""
    kept: dict[int, int] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        module(x.detach().requires_grad_())
    kept.pop(x.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def _round(
    calls: dict[str, Callable],
    inputs: Inputs,
    grad_output: torch.Tensor,
    clock: CpuClock | CudaClock,
) -> tuple[tuple[Samples, Samples], str | None]:
    forward, backward, problem = {}, {}, None
    for name in random.sample(list(calls), len(calls)):
        x = inputs.next().detach().requires_grad_()
        output, *forward[name] = clock.time(calls[name], x)
        gradient, *backward[name] = clock.time(
            lambda output, x=x: grad(output, x, grad_output)[0], output
        )
        if name == SOLUTION:
            problem = inputs.wrong(output.detach())
            problem = problem or inputs.wrong_gradient(gradient, grad_output)
        del output, gradient  # the next call finds this memory free again
    return (forward, backward), problem
