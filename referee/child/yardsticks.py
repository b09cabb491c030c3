"""Calls that are timed beside a module, by name: they show what the device can do."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn

from referee.names import COMPILED, COPY, COPY_FRESH
from referee.shared import flat_bytes

Calls = dict[str, Callable[..., object]]


def make(
    name: str, module: nn.Module, inputs: list, copied_bytes: int, more: ModuleType | None
) -> Calls:
    """Return the calls of a yardstick; none where it is not for the dtype.

    Args:
        name: one of `referee.names`, or one that `more` knows.
        module: eager.
        inputs: arguments of a forward.
        copied_bytes: that a copy moves.
        more: the problem's own yardsticks, a module with `yardstick(name, module, inputs)`.
    """
    if name == COPY:
        return _copies(copied_bytes, inputs)
    if name == COMPILED:
        # The compiler forgets what it has seen, or it would make one program for all shapes, and
        # none after the eighth.
        torch.compiler.reset()
        call = torch.compile(module)
    else:
        call = more.yardstick(name, module, inputs)
    if call is None:
        return {}
    call(*inputs)
    return {name: call}


def _copies(size: int, inputs: list) -> Calls:
    """On a CPU also a copy that pays the page faults of fresh memory."""
    tensors = [flat_bytes(x) for x in inputs if isinstance(x, torch.Tensor)]
    source = max(tensors, key=len)[:size]  # of the headline's input there is no room for another
    device = source.device
    if len(source) < size:
        source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    if device.type == "cuda":
        return {COPY: lambda *inputs: target.copy_(source)}
    return {
        COPY: lambda *inputs: target.copy_(source),
        COPY_FRESH: lambda *inputs: source.clone(),
    }
