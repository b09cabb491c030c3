"""Tells torch's FLOP counter how much arithmetic our operators do."""

import math
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

import torch

COUNTER = "torch.utils.flop_counter"


class CounterFinder:
    """Registers our formulas as soon as somebody imports torch's FLOP counter.

    Importing the counter here would import Triton, which takes longer than all else in an import of
    kernels that are built already.
    """

    def __init__(self, namespaces: Sequence[str]) -> None:
        self.namespaces = namespaces

    def find_spec(
        self, name: str, path: list | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the counter as Python would, and register the formulas after it is executed."""
        if name != COUNTER:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(self.namespaces)

            spec.loader.exec_module = execute_and_register
        return spec


def register_flops(*namespaces: str) -> None:
    """Register the formulas of the operators in `torch.ops.<namespace>`, now or when they matter.

    They matter as soon as `torch.utils.flop_counter` is imported.
    """
    if COUNTER in sys.modules:
        _register(namespaces)
    else:
        sys.meta_path.insert(0, CounterFinder(namespaces))


def _register(namespaces: Sequence[str]) -> None:
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for namespace in namespaces:
        operators = getattr(torch.ops, namespace)
        if operators.linear_relu_divide in flop_registry:  # this module was executed twice
            continue
        forwards = [operators.linear_relu_divide, operators.linear_relu_divide_with_mask]
        register_flop_formula(forwards)(_forward_flops)
        register_flop_formula(operators.linear_relu_divide_gradients)(_backward_flops)


def _forward_flops(x: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    """Count 2 M N K, from the shapes of x `[..., K]` and weight `[N, K]`."""
    return 2 * math.prod(x) * weight[0]


def _backward_flops(
    grad_output: Sequence[int],
    mask: Sequence[int],
    x: Sequence[int] | None,
    weight: Sequence[int] | None,
    *_: object,
    **__: object,
) -> int:
    """Count 2 M N K for the gradient of weight, which needs x, and for that of x."""
    flops = 0
    for operand in (x, weight):
        if operand:
            flops += 2 * math.prod(grad_output) * operand[-1]
    return flops
