"""Problem files as KernelBench has them: `Model`, `get_inputs`, `get_init_inputs`."""

import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from referee.execute import execute

T = TypeVar("T")
CPU = torch.device("cpu")
NAMES = ("Model", "get_inputs", "get_init_inputs")
ARGUMENTS = (torch.Tensor, nn.Parameter, int, float, bool, str, type(None))
LONGEST_LINE = 200
COMPILER_ERROR = re.compile(r"(?:^|[\s:)])(?:fatal )?error\s*:|undefined (?:reference|symbol)")


class BadReferenceError(Exception):
    """The file is no problem that can be graded; the message says why, in one line."""


class NoRoomError(BadReferenceError):
    """The file's code needs more memory than there is."""


@dataclass(frozen=True)
class ReferenceFile:
    """A problem as a file defines it. Methods raise `BadReferenceError` where the file raises.

    Attributes:
        path: the file.
        model: the reference's class.
        get_inputs: returns the arguments of a forward.
        get_init_inputs: returns the arguments of the constructor.
        text: of the file, with which eager's processes start; read when the problem is loaded.
        solutions: names of a solution's class, the first that is there counts.
        dtype: to which modules are converted; None for their own.
        covers_all_values: `get_inputs` draws values of all kinds, of both signs, too; a solution
            must be right for others as well.
    """

    path: Path
    model: Callable[..., nn.Module] | None
    get_inputs: Callable[[], list] | None
    get_init_inputs: Callable[[], list] | None
    text: bytes = b""
    solutions: tuple[str, ...] = ("ModelNew",)
    dtype: torch.dtype | None = None
    covers_all_values: bool = False
    folders: list[str] = field(default_factory=list)

    def draw(self, device: torch.device = CPU) -> list:
        """Return new arguments of a forward: dense tensors on a device, and what else there is."""
        with device:
            found = self._called("get_inputs")
        for value in found:
            if type(value) not in ARGUMENTS:
                raise self.bad(f"get_inputs gives a {type(value).__name__}")
        if self.covers_all_values:
            return found
        dense = []
        for x in found:
            if isinstance(x, torch.Tensor):  # the copy has no gaps and no overlaps
                dense.append(torch.empty_like(x, device=device).copy_(x.detach()))
            else:
                dense.append(x)
        return dense

    def arguments(self) -> list:
        """Return the arguments of the constructor."""
        return self._called("get_init_inputs")

    def construct(self, args: list, seed: int, device: torch.device) -> nn.Module:
        """Return the module under a seed, on the device, in the problem's dtype."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.call_or_refuse("Model", lambda: self.model(*args).to(device))
        if not isinstance(module, nn.Module):
            raise self.bad(f"Model makes a {type(module).__name__}, not a module")
        if self.dtype is not None and self.dtype.is_floating_point:
            module.to(self.dtype)
        return module

    def call_or_refuse(self, what: str, call: Callable[[], T]) -> T:
        """Call what the file defines; an exception there means that the file is refused.

        Args:
            what: is called, in the message.
            call: calls it.
        """
        try:
            return call()
        except torch.OutOfMemoryError as error:
            line = first_error_line(str(error))
            raise NoRoomError(
                f"{self.path}: {what} needs more memory than there is: {line}"
            ) from None
        except (Exception, SystemExit) as error:
            line = first_error_line(f"{type(error).__name__}: {error}")
            raise self.bad(f"{what} raises {line}") from None

    def bad(self, reason: str) -> BadReferenceError:
        """Return the error for a reason."""
        return BadReferenceError(f"{self.path}: {reason}")

    def _called(self, name: str) -> list:
        """Return what one of the functions without arguments gives: a list, or a tuple."""
        found = self.call_or_refuse(name, getattr(self, name))
        if not isinstance(found, (list, tuple)):
            raise self.bad(f"{name} gives a {type(found).__name__}, not a list")
        return list(found)


def load(path: Path) -> ReferenceFile:
    """Import a problem file.

    Raises:
        BadReferenceError: it does not import, or a name is missing.
    """
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    text = path.read_bytes()
    file = ReferenceFile(path, None, None, None)
    module = file.call_or_refuse("the import", lambda: execute("reference", str(path), text))
    missing = [name for name in NAMES if not callable(getattr(module, name, None))]
    if missing:
        raise file.bad(f"defines no {', no '.join(missing)}")
    return ReferenceFile(path, *(getattr(module, name) for name in NAMES), text=text)


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore at its end the generators of torch, Python and NumPy."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy:
                numpy.random.set_state(numpy_state)


def generator_states(device: torch.device) -> list:
    """Return the states of the generators of torch, Python and NumPy, for comparison."""
    states: list = [torch.get_rng_state().tolist(), random.getstate()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).tolist())
    numpy = sys.modules.get("numpy")
    if numpy:
        states.append(str(numpy.random.get_state()))
    return states


def first_error_line(text: str) -> str:
    """Return the first error of a compiler in a message, else its first line; printable, short."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    line = next((line for line in lines if COMPILER_ERROR.search(line)), lines[0])
    line = re.sub(r"(?<![\w.])/(?:[^\s/:()'\"]+/)+", "", line)  # folders
    return "".join(c if c.isprintable() else "?" for c in line)[:LONGEST_LINE]
