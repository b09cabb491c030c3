"""Yardsticks: functions that are timed like a module and show what the device can do.

They run in eager's first process. A yardstick is a copy, the module under torch.compile, or a
function that the problem defines.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from referee.call_names import COMPILED, COPY, COPY_FRESH
from referee.contestants.forms import flat_bytes

Callables = dict[str, Callable[..., object]]


@dataclass(frozen=True)
class YardstickMaker:
    """Makes the yardsticks of a forward.

    Attributes:
        module: eager's module.
        inputs: the arguments of the forward.
        copied_bytes: bytes that a copy reads; it writes as many.
        problems_yardsticks: the problem's own, a Python module with
            `yardstick(name, module, inputs)`; None if it has none.
    """

    module: nn.Module
    inputs: list
    copied_bytes: int
    problems_yardsticks: ModuleType | None

    def make_all(self, names: list[str]) -> tuple[Callables, list[str]]:
        """Return what is called for yardsticks, by name, and notes on those that fail."""
        callables: Callables = {}
        notes = []
        for name in names:
            try:
                callables |= self._make(name)
            except Exception as error:  # for example, Triton is not installed
                first_line = str(error).strip().partition("\n")[0]
                notes.append(f"{name} is left out: {first_line or type(error).__name__}")
        return callables, notes

    def _make(self, name: str) -> Callables:
        """Return what is called for a yardstick, by name; nothing if it does not support the dtype.

        A compiled or a problem's own yardstick is called once, without autograd, as in timed
        forwards. There it compiles nothing more.

        Args:
            name: a constant of `referee.call_names`, or a name that `problems_yardsticks` knows.
        """
        if name == COPY:
            return _copies(self.copied_bytes, self.inputs)
        if name == COMPILED:
            function = _compile(self.module)
        else:
            function = self.problems_yardsticks.yardstick(name, self.module, self.inputs)
        if function is None:
            return {}
        with torch.no_grad():
            function(*self.inputs)
        return {name: function}


def warm_compiler(device: torch.device) -> None:
    """Have torch.compile make a small program."""
    _compile(torch.relu)(torch.ones(8, device=device))


def _compile(module: Callable) -> Callable[..., object]:
    """Return a module under torch.compile, which compiles when it is first called."""
    # Without the reset, torch.compile would make one program for all shapes at the second shape
    # and fall back to eager after the eighth.
    torch.compiler.reset()
    from torch._inductor import config  # takes seconds

    # Else the compiler would start processes, which would be stopped and woken in each request.
    config.compile_threads = 1
    return torch.compile(module)


def _copies(size: int, inputs: list) -> Callables:
    """Return a copy of `size` bytes; on a CPU also one that pays the page faults of new memory."""
    tensors = [flat_bytes(x) for x in inputs if isinstance(x, torch.Tensor)]
    # The largest input is the source if it is large enough: memory may have no room for another.
    source = max(tensors, key=len)[:size]
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
