"""The things that a solution changes and are not its own, and the operators that it calls."""

import builtins
import ctypes
import gc
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from inspect import getattr_static
from types import FunctionType

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

CUDA_LIMIT_PERSISTING_L2 = 6  # cudaLimitPersistingL2CacheSize
# The functions of these that have public names must stay what they were.
MODULES = torch, nn.functional, torch.cuda, torch.testing, torch.autograd
MODULES += builtins, json, os, statistics, time
NAMESPACES = {module.__name__: module for module in MODULES} | {
    "torch.Tensor": torch.Tensor,
    "torch.cuda.Event": torch.cuda.Event,
    "torch.nn.Module": nn.Module,
}
WRAPPED_LATER = "torch.manual_seed"  # by importing torch._dynamo
OPERATORS = [
    "_local_scalar_dense", "_reshape_alias", "_to_copy", "alias", "as_strided", "clone",
    "contiguous", "copy_", "detach", "empty", "empty_strided", "fill_", "index", "mul_", "neg_",
    "random_", "reshape", "resize_", "select", "set_", "slice", "to", "uniform_", "view", "zero_",
]  # fmt: skip
META = re.compile(r"^Meta.*\n", re.MULTILINE)

_exc_info = sys.exc_info
_getprofile, _gettrace, _getitimer = sys.getprofile, sys.gettrace, signal.getitimer
_monitoring, _callbacks = getattr(sys, "monitoring", None), gc.callbacks


def state(device: torch.device) -> dict[str, object]:
    """All that no solution may change: settings, functions, and all that the referee has named."""
    cuda = torch.backends.cuda.matmul
    found = {
        "the number of threads": torch.get_num_threads(),
        "the default dtype": torch.get_default_dtype(),
        "the matrix product's precision": torch.get_float32_matmul_precision(),
        "gradient mode": torch.is_grad_enabled(),
        "the precision of float16 sums": cuda.allow_fp16_reduced_precision_reduction,
        "the precision of bfloat16 sums": cuda.allow_bf16_reduced_precision_reduction,
    }
    if device.type == "cuda":
        found["the L2's persisting part"] = persisting_l2()
    for space, holder in NAMESPACES.items():
        for name in [name for name in dir(holder) if not name.startswith("_")]:
            value = getattr_static(holder, name)
            if callable(value) and f"{space}.{name}" != WRAPPED_LATER:
                found[f"{space}.{name}"] = value
    found["torch.nn.Module.__call__"] = nn.Module.__call__
    named: dict[str, object] = {}
    for name, module in list(sys.modules.items()):
        if name in ("model", "reference") or name.split(".")[0] == "referee":
            found[f"sys.modules[{name!r}]"] = module
            for own, value in list(vars(module).items()):
                if not own.startswith("__"):
                    named[f"{name}.{own}"] = value
                    if isinstance(value, type) and value.__module__ == name:
                        for method in vars(value):
                            named[f"{name}.{own}.{method}"] = getattr_static(value, method)
    functions = {name: value for name, value in named.items() if isinstance(value, FunctionType)}
    found |= named | {f"{name}'s code": value.__code__ for name, value in functions.items()}
    # The kernels of the operators by which the referee draws inputs and reads results, as texts.
    # Those for meta tensors, which only compute shapes, are registered when they are needed.
    for name in torch._C._dispatch_get_all_op_names():
        if name.partition(".")[0].removeprefix("aten::") in OPERATORS:
            found[name] = META.sub("", torch._C._dispatch_dump(name))
    return found


def differs(was: object, now: object) -> bool:
    """Whether a value of `state` has changed."""
    if was is now:
        return False
    return not (type(was) is type(now) and isinstance(was, (bool, int, float, str)) and was == now)


def persisting_l2() -> int:
    """Bytes of the L2 that are set apart."""
    size = ctypes.c_size_t()
    for name in (f"libcudart.so.{torch.version.cuda.partition('.')[0]}", "libcudart.so"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(name).cudaDeviceGetLimit(ctypes.byref(size), CUDA_LIMIT_PERSISTING_L2)
            break
    return size.value


def poison(size: int, device: torch.device) -> None:
    """Leaves free blocks full of 0xff, a NaN in every float dtype, for the output to land in.

    Several of about the size in bytes, since the C library hands small ones out as it likes, and
    those below 32 MiB it does not map afresh.
    """
    small = range(size, size + 1024, 64)
    sizes = small if size < 1 << 20 else [size] * (4 if size < 1 << 25 else 1)
    blocks = [torch.empty(n, dtype=torch.uint8, device=device).fill_(0xFF) for n in sizes]
    del blocks


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Within it, torch.empty fills: part of torch's deterministic mode, which only warns.

    `torch.use_deterministic_algorithms` does the same, and imports torch's compiler first.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def left_on() -> list[str]:
    """The modes, hooks and timers that are on: they could compute when a result is read."""
    modes = [type(mode) for mode in _get_current_function_mode_stack()]
    found = [f"the function mode {kind.__name__}" for kind in modes if kind is not DeviceContext]
    found += ["a dispatch mode"] * (_len_torch_dispatch_stack() > 0)
    found += ["a profile function"] * (_getprofile() is not None)
    found += ["a trace function"] * (_gettrace() is not None)
    timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    found += ["a timer"] * any(_getitimer(timer)[0] for timer in timers)
    found += ["a callback of the garbage collector"] * bool(_callbacks)
    if _monitoring:  # from Python 3.12 on
        found += ["a monitoring function"] * any(map(_monitoring.get_tool, range(6)))
    return found


class Seen(TorchDispatchMode):
    """Notes the names of the operators that are called, with the type of an exception that is
    handled meanwhile, or "".
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, str] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To skip it, torch would import it first, for two seconds; compiled frames are left out
        while a mode is on in any case."""
        return False

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        name, error = func._schema.name, _exc_info()[0]
        self.names[name] = error.__name__ if error else self.names.get(name, "")
        return func(*args, **(kwargs or {}))
