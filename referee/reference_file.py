"""Problem files as KernelBench has them: `Model`, `get_inputs`, `get_init_inputs`."""

import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from torch import nn

from model import Problem
from referee import cases

T = TypeVar("T")
CPU = torch.device("cpu")
NAMES = ("Model", "get_inputs", "get_init_inputs")
MOST_LEAVES = 1000  # of an output's nesting
LONGEST_LINE = 200
COMPILER_ERROR = re.compile(r"(?:^|[\s:)])(?:fatal )?error\s*:|undefined (?:reference|symbol)")

_manual_seed = torch.manual_seed


class BadReferenceError(Exception):
    """The file is no problem that can be graded; the message says why, in one line."""


@dataclass(frozen=True)
class ReferenceFile:
    """The file's names; each method raises `BadReferenceError` where the file raises."""

    path: Path
    model: Callable[..., nn.Module]
    get_inputs: Callable[[], list]
    get_init_inputs: Callable[[], list]
    dtype: torch.dtype | None = None  # of a problem of this project's, whose inputs are new

    @property
    def is_ours(self) -> bool:
        """Whether it is a problem of this project's."""
        return self.dtype is not None

    def draw(self, seed: int, device: torch.device = CPU) -> list:
        """Arguments of a forward under a seed: dense tensors on a device, and what else there is.

        On a GPU other values are drawn than on a CPU.
        """
        with seeded(seed, device), device:
            found = self.called("get_inputs")
        for value in found:
            if type(value) not in (torch.Tensor, nn.Parameter, int, float, bool, str, type(None)):
                raise self.bad(f"get_inputs gives a {type(value).__name__}")
        if self.is_ours:
            return found
        for i, x in enumerate(found):
            if isinstance(x, torch.Tensor):  # without gaps and overlaps, which the copy has not
                found[i] = torch.empty_like(x, device=device).copy_(x.detach())
        return found

    def construct(self, args: list, seed: int, device: torch.device) -> nn.Module:
        """The module under a seed, on the device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.attempt("Model", lambda: self.model(*args).to(device))
        if not isinstance(module, nn.Module):
            raise self.bad(f"Model makes a {type(module).__name__}, not a module")
        return module

    def attempt(self, what: str, call: Callable[[], T]) -> T:
        """Calls what the file defines."""
        try:
            return call()
        except (Exception, SystemExit) as error:
            line = first_error_line(f"{type(error).__name__}: {error}")
            raise self.bad(f"{what} raises {line}") from None

    def bad(self, reason: str) -> BadReferenceError:
        """The error for a reason."""
        return BadReferenceError(f"{self.path}: {reason}")

    def called(self, name: str) -> list:
        """What one of its functions without arguments gives: a list, or a tuple."""
        found = self.attempt(name, getattr(self, name))
        if not isinstance(found, (list, tuple)):
            raise self.bad(f"{name} gives a {type(found).__name__}, not a list")
        return list(found)


def load(path: Path) -> ReferenceFile:
    """Imports the file.

    Raises:
        BadReferenceError: it does not import, or a name is missing.
    """
    sys.path.append(str(path.resolve().parent))
    file = ReferenceFile(path, *[None] * 3)
    module = file.attempt("the import", lambda: import_file("reference", str(path)))
    if missing := [name for name in NAMES if not callable(getattr(module, name, None))]:
        raise file.bad(f"defines no {', no '.join(missing)}")
    return ReferenceFile(path, *(getattr(module, name) for name in NAMES))


def import_file(name: str, path: str) -> ModuleType:
    """Imports a file, whatever it is called, as a module of this name."""
    loader = SourceFileLoader(name, path)
    module = sys.modules[name] = module_from_spec(spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


def of_problem(problem: Problem, shape: tuple[int, ...], dtype: torch.dtype) -> ReferenceFile:
    """A problem of this project's as if a file defined it, with one input of both signs."""

    def get_inputs() -> list[torch.Tensor]:
        return [cases.refill(torch.empty(tuple(shape), dtype=dtype))]

    functions = problem.reference, get_inputs, problem.get_init_inputs
    return ReferenceFile(Path("model.py"), *functions, dtype)


def flatten(value: object) -> tuple[str, list]:
    """The nesting of an output as text, in which tuples and lists are the same, and what lies in
    it, in order.

    Raises:
        RecursionError: a list holds itself.
        ValueError: more than MOST_LEAVES lie in it.
    """
    if not isinstance(value, (list, tuple)):
        return "*", [value]
    shapes, leaves = [], []
    for part in value:
        shape, found = flatten(part)
        shapes.append(shape)
        leaves += found
        if len(leaves) > MOST_LEAVES:
            raise ValueError(f"more than {MOST_LEAVES} outputs")
    return f"[{', '.join(shapes)}]", leaves


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within it, torch, Python and NumPy draw random numbers from a seed."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        _manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
            if numpy:
                numpy.random.set_state(numpy_state)


def first_error_line(text: str) -> str:
    """The first error of a compiler in a message, else its first line; printable, and short."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    line = next((line for line in lines if COMPILER_ERROR.search(line)), lines[0])
    line = re.sub(r"(?<![\w.])/(?:[^\s/:()'\"]+/)+", "", line)  # folders
    return "".join(c if c.isprintable() else "?" for c in line)[:LONGEST_LINE]
