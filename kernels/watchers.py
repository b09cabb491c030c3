"""The kernels as torch sees them, and who else may want to see a call."""

import sys
from collections.abc import Callable

import torch
from torch.overrides import _get_current_function_mode_stack, has_torch_function_variadic

PLAIN = (torch.Tensor, torch.nn.Parameter)
# Modules of function modes that want to see no calls: the one of `torch.device`, which changes what
# makes tensors; and, of operators that graphs hold, those of `make_fx` and `torch.export`.
DEVICE = ("torch.utils._device",)
TRACERS = ("torch.fx.", "torch._export.")


def direct(operator: Callable) -> Callable:
    """The operator without a Python frame of torch's: a tenth of a small call."""
    return getattr(operator, "_op", operator)


def is_plain(x: object) -> bool:
    """Whether x is a tensor of torch's own, or one that it traces by."""
    return type(x) in PLAIN or type(x).__module__.startswith("torch._subclasses.")


def is_watched(*operands: object, blind: tuple[str, ...] = DEVICE) -> bool:
    """Whether Python code wants to see torch's own functions called: a subclass but DTensor, or a
    mode that is not of a blind module."""
    if not has_torch_function_variadic(*operands):
        return False
    if not all(x is None or is_plain(x) or is_dtensor(x) for x in operands):
        return True
    modes = _get_current_function_mode_stack()
    return not all(type(mode).__module__.startswith(blind) for mode in modes)


def is_dtensor(x: object) -> bool:
    # Importing DTensor takes a second; where nobody has, there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(x) is module.DTensor
