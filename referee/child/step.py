"""A forward that autograd records, and its backward, of a solution and of the reference alike."""

import torch
from torch.autograd import grad

from referee import cases
from referee.child.feed import MOST_PARTS


def is_differentiable(x: object) -> bool:
    """Whether x can have a gradient."""
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 0


def record(state: dict, inputs: list, names: list[str]) -> tuple[list, list[torch.Tensor]]:
    """Arguments that autograd records, and what gradients are wanted of: these, and parameters."""
    arguments = [x.detach().requires_grad_() if is_differentiable(x) else x for x in inputs]
    wanted = [x for x in arguments if is_differentiable(x)]
    return arguments, wanted + [state[name] for name in names]


def draw_gradients(outputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """A gradient for each output of floats, whether or not it has been recorded."""
    floats = (y for y in outputs if y.is_floating_point())
    blanks = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in floats)
    return [cases.draw(x, seed + turn) for turn, x in enumerate(blanks)]


def differentiate(
    outputs: list[torch.Tensor], wanted: list[torch.Tensor], given: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients of what is wanted, from those of outputs; None where none depends on it."""
    floats = (y for y in outputs if y.is_floating_point())
    recorded = [pair for pair in zip(floats, given, strict=True) if pair[0].requires_grad]
    asked = [x for x in wanted if x.requires_grad]
    if not recorded or not asked:
        return [None for _ in wanted]
    ys, theirs = zip(*recorded, strict=True)
    found = iter(grad(ys, asked, theirs, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in wanted]


def change_late(given: list[torch.Tensor], at: float) -> None:
    """Changes the sign of a row of gradients of outputs, at a place from 0 to 1."""
    for x in given[:MOST_PARTS]:
        (x[int(at * len(x))] if x.dim() and len(x) else x).neg_()
