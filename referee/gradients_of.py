"""A forward that autograd records, and its backward.

Both sides use this module: a process for the solution, the referee for its reference.
"""

import torch
from torch.autograd import grad


def is_differentiable(x: object) -> bool:
    """Return whether x can have a gradient."""
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 0


def recorded(inputs: list) -> list:
    """Return the arguments; floating tensors are replaced by leaves that require gradients."""
    return [x.detach().requires_grad_() if is_differentiable(x) else x for x in inputs]


def sources_of(arguments: list, state: dict, names: list[str]) -> list[torch.Tensor]:
    """Return the tensors whose gradients are asked for: recorded arguments, then parameters.

    Args:
        arguments: of the forward, see `recorded`.
        state: of the module, with parameters that autograd knows.
        names: of the parameters.
    """
    recorded_arguments = [x for x in arguments if is_differentiable(x)]
    return recorded_arguments + [state[name] for name in names]


def differentiate(
    outputs: list[torch.Tensor], sources: list[torch.Tensor], output_gradients: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the gradients of the source tensors; None where no output depends on one.

    Args:
        outputs: of a recorded forward.
        sources: see `sources_of`.
        output_gradients: the gradients of those outputs that hold floats, in order.
    """
    floats = [y for y in outputs if y.is_floating_point()]
    pairs = [pair for pair in zip(floats, output_gradients, strict=True) if pair[0].requires_grad]
    asked = [x for x in sources if x.requires_grad]
    if not pairs or not asked:
        return [None for _ in sources]
    differentiated, gradients = zip(*pairs, strict=True)
    found = iter(grad(differentiated, asked, gradients, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in sources]
