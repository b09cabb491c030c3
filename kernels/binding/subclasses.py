"""Tensors with a Python type of their own, as every binding sees them."""

import sys
from types import ModuleType

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._device import DeviceContext

PLAIN = (torch.Tensor, torch.nn.Parameter)


def serve_subclasses(extension: ModuleType) -> None:
    """Gives the extension the operators, and what it asks of such tensors."""
    extension.operators = torch.ops.relu_divide_kernels
    extension.subclass_of = subclass_of
    extension.device_context = DeviceContext


def is_dtensor(x: object) -> bool:
    # Importing DTensor takes a second; where nobody has, there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(x) is module.DTensor


def subclass_of(x: torch.Tensor) -> int:
    """The place of a tensor's type in the `Subclass` of `binding/dispatch.h`."""
    if type(x) in (FakeTensor, FunctionalTensor):  # stand for plain tensors while torch traces
        return 1
    return 2 if is_dtensor(x) else 3
