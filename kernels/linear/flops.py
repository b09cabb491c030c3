"""Tells torch's FLOP counter how much arithmetic our operators do."""

import math
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

COUNTER = "torch.utils.flop_counter"


class CounterFinder:
    """An import hook for `sys.meta_path`: registers our formulas when the FLOP counter is imported.

    Importing the counter ourselves would import Triton too. If the kernels are built already, that
    would take longer than the rest of the import of `model_new.py`.
    """

    def __init__(self, namespaces: Sequence[str]) -> None:
        self.namespaces = namespaces

    def find_spec(
        self, name: str, path: list | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the counter as Python does, and make its loader register our formulas at the end."""
        if name != COUNTER:
            return None
        spec = self._spec_of_later_finders(name, path, target)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(self.namespaces)

        spec.loader.exec_module = execute_and_register
        return spec

    def _spec_of_later_finders(
        self, name: str, path: list | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Ask the finders after this one, as Python does. One may be that of another version."""
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


def register_flops(*namespaces: str) -> None:
    """Register the formulas for the operators in `torch.ops.<namespace>` with the FLOP counter.

    If the counter is not imported yet, they are registered as soon as somebody imports it.
    """
    if COUNTER in sys.modules:
        _register(namespaces)
    else:
        sys.meta_path.insert(0, CounterFinder(namespaces))


def _register(namespaces: Sequence[str]) -> None:
    """Register the formulas with the FLOP counter, which is imported by now."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for namespace in namespaces:
        operators = getattr(torch.ops, namespace)
        # model_new.py may be executed twice, for example under two names.
        if operators.linear_relu_divide in flop_registry:
            continue
        forwards = [operators.linear_relu_divide, operators.linear_relu_divide_with_mask]
        register_flop_formula(forwards)(_forward_flops)
        register_flop_formula(operators.linear_relu_divide_gradients)(_backward_flops)


# The counter calls a formula with the operator's arguments, but gives it shapes instead of tensors.


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
    """Count 2 M N K for each product of the backward; grad_output is `[..., N]`.

    The operator gets x if the gradient of weight is asked for, and weight if that of x is. The last
    size of both is K.
    """
    flops = 0
    for operand in (x, weight):
        if operand:
            flops += 2 * math.prod(grad_output) * operand[-1]
    return flops
