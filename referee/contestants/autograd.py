"""A forward that autograd records, and its backward.

Both sides use this module: a process for the solution, the referee for its reference.
"""

import torch
from torch.autograd import grad


def is_differentiable(x: object) -> bool:
    """Return whether x can have a gradient."""
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 0


def with_gradient_leaves(inputs: list) -> list:
    """Return the inputs, each floating tensor replaced by a leaf that requires a gradient."""
    return [x.detach().requires_grad_() if is_differentiable(x) else x for x in inputs]


def sources_of(arguments: list, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors whose gradients are computed: floating arguments, then parameters.

    Args:
        arguments: the forward's arguments, as `with_gradient_leaves` returns them.
        parameters: those of the module's that have a gradient.
    """
    return [*filter(is_differentiable, arguments), *parameters]


def differentiate(
    outputs: list[torch.Tensor], sources: list[torch.Tensor], output_gradients: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the gradients of the source tensors; None for one on which no output depends.

    Args:
        outputs: the results of a recorded forward.
        sources: the tensors that `sources_of` returns.
        output_gradients: the gradients of those outputs that hold floats, in order.
    """
    floats = [y for y in outputs if y.is_floating_point()]
    pairs = [(y, g) for y, g in zip(floats, output_gradients, strict=True) if y.requires_grad]
    leaves = [x for x in sources if x.requires_grad]
    if not pairs or not leaves:
        return [None for _ in sources]
    recorded_outputs, their_gradients = zip(*pairs, strict=True)
    gradients = iter(grad(recorded_outputs, leaves, their_gradients, allow_unused=True))
    return [next(gradients) if x.requires_grad else None for x in sources]
