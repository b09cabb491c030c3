"""Does other Python code want to see a call that a kernel would make invisible?

A kernel computes several of torch's functions at once, and torch's Python functions are not called.
Most callers do not care. Some do, and for them a module must call what its reference calls:

* a tensor subclass, or an active mode (`torch.overrides.TorchFunctionMode`), sees every call of a
  torch function, and may change what the call returns;
* hooks on a module, or on all modules, run when the module is called;
* profilers, tracers and test tools replace `torch.relu`, `nn.Linear.forward` or
  `nn.Module.__call__` by functions of their own, for a while or for good.

The functions below find all of these in each call, at no cost that a small call would notice.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import Linear, functional
from torch.overrides import _get_current_function_mode_stack, has_torch_function_variadic

PLAIN_TYPES = (Tensor, nn.Parameter)

# These modes see no call that a kernel would hide. `torch.device`, used as a context, changes where
# new tensors are made. `make_fx` and `torch.export` record our operators as they record torch's.
DEVICE_MODES = ("torch.utils._device",)
TRACER_MODES = ("torch.fx.", "torch._export.")

# torch's own functions, which other code may have replaced before this module was imported.
TORCH_RELU = torch._C._VariableFunctions.relu
TORCH_LINEAR = torch._C._nn.linear
TORCH_DIVIDE = torch._C.TensorBase.__truediv__

# `nn.Linear`'s forward, __call__ and _call_impl, once they were found to be torch's own.
_torchs_own_methods: tuple[Callable, ...] = ()


def is_plain(x: object) -> bool:
    """Return whether x is a tensor of torch's own type, or one by which torch itself traces."""
    return type(x) in PLAIN_TYPES or type(x).__module__.startswith("torch._subclasses.")


def is_dtensor(x: object) -> bool:
    """Return whether x is a `DTensor`, without importing DTensor, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(x) is module.DTensor


def is_watched(*operands: object, unconcerned: tuple[str, ...] = DEVICE_MODES) -> bool:
    """Return whether a tensor subclass or a function mode wants to see calls with these operands.

    A `DTensor` is no watcher here: the modules handle it themselves.

    Args:
        *operands: tensors, or None where an optional operand is missing.
        unconcerned: beginnings of the names of Python modules whose modes need not see the call.
    """
    if not has_torch_function_variadic(*operands):
        return False
    for operand in operands:
        if operand is not None and not is_plain(operand) and not is_dtensor(operand):
            return True
    for mode in _get_current_function_mode_stack():
        if not type(mode).__module__.startswith(unconcerned):
            return True
    return False


def is_linear_replaced() -> bool:
    """Return whether other code has replaced a function by which `nn.Linear` and ReLU are called.

    It does not matter whether that happened before or after this module was imported, and a
    function that was put back is torch's own again. While `torch.export` or `make_fx` traces, it
    calls modules through a function of its own, which need not see the call.
    """
    global _torchs_own_methods
    if (
        torch.relu is not TORCH_RELU
        or functional.linear is not TORCH_LINEAR
        or Tensor.__truediv__ is not TORCH_DIVIDE
    ):
        return True
    methods = (Linear.forward, Linear.__call__, Linear._call_impl)
    if methods == _torchs_own_methods:
        return False
    forward, call, call_impl = methods
    is_torchs_own = (
        _is_defined_in(forward, "torch.nn.modules.linear")
        and _is_defined_in(call, "torch.nn.modules.module", "torch.fx._symbolic_trace")
        and _is_defined_in(call_impl, "torch.nn.modules.module")
    )
    if is_torchs_own and not is_dynamo_compiling():  # a graph should have no side effects
        _torchs_own_methods = methods
    return not is_torchs_own


def _is_defined_in(function: Callable, *modules: str) -> bool:
    """Return whether the text of a Python function is in the file of one of these modules.

    A wrapper made by `functools.wraps` has the name of what it wraps, but not its global variables.
    """
    return getattr(function, "__globals__", {}).get("__name__") in modules


def without_python_frame(operator: Callable) -> Callable:
    """Return an operator of `torch.ops` as a built-in function: a tenth of a small call's time."""
    return getattr(operator, "_op", operator)
