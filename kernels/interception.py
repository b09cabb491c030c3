"""Detects other Python code that must see the calls of torch's functions.

Our operators take the place of torch functions that the reference calls. Three kinds of code expect
to see the calls of those functions:

* a tensor subclass, or an active mode (`torch.overrides.TorchFunctionMode`), sees every call of a
  torch function, and may change what the call returns;
* hooks on a module, or on all modules, run when the module is called;
* profilers, tracers and test tools replace `torch.relu`, `nn.Linear.forward` or
  `nn.Module.__call__` by functions of their own, temporarily or for good.

Where such code is active, our modules call torch's functions. The functions below, and the
`dispatch.py` of each problem, look for it in every call. Small calls are faster than torch's in
spite of that, except those of ReLU on a CPU (docs/BENCHMARKS.md, "What does a call cost the
host?").
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import Linear, functional
from torch.overrides import _get_current_function_mode_stack, has_torch_function_variadic

PLAIN_TYPES = (Tensor, nn.Parameter)

# A mode is ignored if the name of the Python module that defines its class begins with one of these
# prefixes. `with torch.device(...)` sets a mode that changes only functions that make tensors.
DEVICE_MODE_PREFIXES = ("torch.utils._device",)
# For Linear, the modes of `make_fx` and `torch.export` are ignored too, because they record our
# operator as they record torch's.
TRACER_MODE_PREFIXES = ("torch.fx.", "torch._export.")

# torch's own functions. They are taken from the C++ bindings because other code may have replaced
# `torch.relu` and the others before this module was imported.
TORCH_RELU = torch._C._VariableFunctions.relu
TORCH_LINEAR = torch._C._nn.linear
TORCH_DIVIDE = torch._C.TensorBase.__truediv__


def is_plain_or_fake(x: object) -> bool:
    """Return whether x is a `Tensor`, a `Parameter`, or a type with which torch itself traces.

    The types for tracing are `FakeTensor` and `FunctionalTensor`.
    """
    return type(x) in PLAIN_TYPES or type(x).__module__.startswith("torch._subclasses.")


def is_dtensor(x: object) -> bool:
    """Return whether x is a `DTensor`, without importing DTensor, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(x) is module.DTensor


def is_intercepted(
    *operands: object, ignored_modes: tuple[str, ...] = DEVICE_MODE_PREFIXES
) -> bool:
    """Return whether a tensor subclass or a function mode intercepts calls with these operands.

    `DTensor` does not count as such a subclass, because the callers handle it.

    Args:
        *operands: tensors, or None where an optional operand is missing.
        ignored_modes: prefixes of the names of Python modules. Modes whose classes are defined
            there do not count.
    """
    # torch's function returns true if any operand is of a subclass, and also if any mode is active.
    if not has_torch_function_variadic(*operands):
        return False
    for operand in operands:
        if operand is not None and not is_plain_or_fake(operand) and not is_dtensor(operand):
            return True
    for mode in _get_current_function_mode_stack():
        if not type(mode).__module__.startswith(ignored_modes):
            return True
    return False


def _is_defined_in(function: Callable, *modules: str) -> bool:
    """Return whether a Python function is defined in one of these modules.

    A function's global variables are those of the module that defines it, so `__name__` among them
    is the name of that module. The function's `__module__` would not do: `functools.wraps` gives a
    wrapper the `__module__` of the function that it wraps.
    """
    global_variables = getattr(function, "__globals__", {})
    return global_variables.get("__name__") in modules


def _unreplaced_methods() -> tuple[Callable, ...] | None:
    """Return `nn.Linear`'s forward, __call__ and _call_impl; None if other code replaced one.

    While `torch.export` or `make_fx` traces, torch replaces `nn.Module.__call__` by a function of
    `torch.fx`. That one is allowed: such a tracer records the call of our operator, and does not
    need to see the call of `linear`.
    """
    are_unreplaced = (
        _is_defined_in(Linear.forward, "torch.nn.modules.linear")
        and _is_defined_in(Linear.__call__, "torch.nn.modules.module", "torch.fx._symbolic_trace")
        and _is_defined_in(Linear._call_impl, "torch.nn.modules.module")
    )
    if not are_unreplaced:
        return None
    return Linear.forward, Linear.__call__, Linear._call_impl


# The cache of `is_reference_function_replaced`: the three methods of the last call that found all
# of them to be torch's own.
_verified_methods = _unreplaced_methods()


def is_reference_function_replaced() -> bool:
    """Return whether other code has replaced a function that `LinearReluDivide.forward` calls.

    It makes no difference whether the replacement came before or after this module was imported.
    A function that was put back counts as torch's own again.
    """
    global _verified_methods  # noqa: PLW0603 - the fastest cache of one value
    if (
        torch.relu is not TORCH_RELU
        or functional.linear is not TORCH_LINEAR
        or Tensor.__truediv__ is not TORCH_DIVIDE
    ):
        return True
    if (Linear.forward, Linear.__call__, Linear._call_impl) == _verified_methods:
        return False
    methods = _unreplaced_methods()
    if methods is None:
        return True
    # Dynamo would make the compiled code repeat this assignment in each call.
    if not is_dynamo_compiling():
        _verified_methods = methods
    return False


def as_builtin(operator: Callable) -> Callable:
    """Return an operator of `torch.ops` as a built-in function, which runs no Python frame.

    That saves a tenth of the time of a small call. If torch's private attribute `_op` is missing,
    the operator itself is returned.
    """
    return getattr(operator, "_op", operator)
