"""Reference files as KernelBench has them: `Model`, `get_inputs`, `get_init_inputs`."""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from referee.contestants.descriptions import as_plain_tensor, flatten
from referee.contestants.execute import execute, forget_modules
from referee.message_lines import first_error_line
from referee.reference.random_values import reseed, seeded

T = TypeVar("T")
CPU = torch.device("cpu")
# The name in sys.modules. The caller of `Reference` may have a module "reference" of their own.
MODULE_NAME = "referee_reference_file"
NAMES = ("Model", "get_inputs", "get_init_inputs")
# The types of the arguments of a forward.
ARGUMENT_TYPES = (torch.Tensor, nn.Parameter, int, float, bool, str, type(None))

# On a CPU, torch raises a RuntimeError whose message has these words if memory is short.
NO_CPU_MEMORY = "DefaultCPUAllocator: can't allocate memory"


class BadReferenceError(Exception):
    """The file is no reference that can be graded; the message says why, in one line."""


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
        text: the file's content, from which eager's processes import it.
        solutions: names that a solution's class may have. The first one that the solution's file
            defines is graded.
        dtype: the dtype to which modules are converted; None if modules keep their own.
        has_own_cases: whether a project's `Problem.cases` tries values of all kinds and of both
            signs. A solution must then be right for any inputs, so rounding excuses no wrong
            element (`second_look`), and `get_inputs` may draw tensors with gaps. Less is tried at
            the timed size: there are fewer draws and no unusual inputs. The referee does not try
            whether float64 works, or whether inputs repeat.
        folders: folders from which a solution may import, besides the reference's own.
    """

    path: Path
    model: Callable[..., nn.Module]
    get_inputs: Callable[[], list]
    get_init_inputs: Callable[[], list]
    text: bytes = b""
    solutions: tuple[str, ...] = ("ModelNew",)
    dtype: torch.dtype | None = None
    has_own_cases: bool = False
    folders: list[str] = field(default_factory=list)

    def draw(self, device: torch.device = CPU) -> list:
        """Return new arguments of a forward.

        Tensors are on the device. They are dense, with neither gaps nor overlaps, unless the
        problem has cases of its own.

        The file may set a seed when it is imported, and `get_inputs` may set one in each call. A
        solution can read the file. So torch's, Python's and NumPy's global generators get new seeds
        before the call and after it: draws under these seeds cannot be foreseen. A generator of the
        file's own keeps its seed.
        """
        reseed()
        with device:
            inputs = self._list_from("get_inputs")
        reseed()
        for value in inputs:
            if type(value) not in ARGUMENT_TYPES:
                raise self.bad(
                    f"get_inputs gives a {type(value).__name__}; tensors, numbers, booleans, "
                    "strings and None are possible"
                )
        if self.has_own_cases:
            return inputs
        dense = []
        for x in inputs:
            if isinstance(x, torch.Tensor):
                dense.append(torch.empty_like(x, device=device).copy_(x.detach()))
            else:
                dense.append(x)
        return dense

    def arguments(self) -> list:
        """Return the arguments of the constructor."""
        return self._list_from("get_init_inputs")

    def construct(self, arguments: list, seed: int, device: torch.device) -> nn.Module:
        """Construct a module under a seed; return it on the device, in the problem's dtype.

        The generators get their old states back, those of GPUs too: a solution knows the seed, and
        must not foresee what is drawn later.
        """
        with seeded(seed, device):
            module = self.call_or_refuse("Model", lambda: self.model(*arguments))
            if not isinstance(module, nn.Module):
                raise self.bad(f"Model makes a {type(module).__name__}, not an nn.Module")
            self.call_or_refuse("Model", lambda: module.to(device))
        if self.dtype is not None and self.dtype.is_floating_point:
            module.to(self.dtype)
        return module

    def copy(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module."""
        return self.call_or_refuse("a copy of Model", lambda: copy.deepcopy(module))

    def run(self, module: nn.Module, inputs: list) -> list[torch.Tensor]:
        """Return the results of a forward that autograd does not record."""
        with torch.no_grad():
            _, outputs = self.call_or_refuse("forward", lambda: flatten(module(*inputs)))
            return [as_plain_tensor(output) for output in outputs]

    def call_or_refuse(self, name: str, call: Callable[[], T]) -> T:
        """Call code of the file, and return what it returns.

        Args:
            name: the code in messages: "{name} raises ...".
            call: runs the code.

        Raises:
            BadReferenceError: the code raises.
            NoRoomError: it raises because memory is short.
        """
        return _call_or_refuse(self.path, name, call)

    def bad(self, reason: str) -> BadReferenceError:
        """Return an error whose message is the file's path and a reason."""
        return BadReferenceError(f"{self.path}: {reason}")

    def _list_from(self, name: str) -> list:
        """Call `get_inputs` or `get_init_inputs`, and return the list or tuple as a list."""
        value = self.call_or_refuse(name, getattr(self, name))
        if not isinstance(value, (list, tuple)):
            raise self.bad(f"{name} gives a {type(value).__name__}, not a list")
        return list(value)


def load(path: Path, text: bytes | None = None) -> ReferenceFile:
    """Import a reference file. Its folder is added to `sys.path`, for its own imports.

    Args:
        path: the file.
        text: its content, which was read before a solution could change it; None to read it here.

    Raises:
        BadReferenceError: it does not import, or a name is missing.
    """
    _importable_folders.add(str(path.resolve().parent))
    if text is None:
        text = path.read_bytes()
    module = _call_or_refuse(path, "the import", lambda: execute(MODULE_NAME, str(path), text))
    missing = [name for name in NAMES if not callable(getattr(module, name, None))]
    if missing:
        all_names = ", ".join(NAMES)
        raise BadReferenceError(
            f"{path}: defines no {', no '.join(missing)} (a problem defines {all_names})"
        )
    return ReferenceFile(path, *(getattr(module, name) for name in NAMES), text=text)


class _ImportableFolders:
    """The folders of the references so far, from which these may import."""

    def __init__(self) -> None:
        self._folders: list[str] = []  # the end of `sys.path`; the latest comes first
        self._modules_before: set[str] = set()  # their names

    def add(self, folder: str) -> None:
        """Make a folder the first of these in `sys.path`, unless it is in `sys.path` anyway.

        Modules of the other folders are forgotten, so that none is taken for one of this folder.
        """
        if not self._folders:
            self._modules_before = set(sys.modules)
        for other in self._folders:
            if other != folder:
                forget_modules(other, self._modules_before)
        if folder in self._folders:
            self._folders.remove(folder)
            sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.insert(len(sys.path) - len(self._folders), folder)
            self._folders.insert(0, folder)


_importable_folders = _ImportableFolders()


def _call_or_refuse(path: Path, name: str, call: Callable[[], T]) -> T:
    """Call code of a file, as `ReferenceFile.call_or_refuse` does."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        if lack_of_memory := _lack_of_memory(error):
            line = first_error_line(lack_of_memory)
            raise NoRoomError(f"{path}: {name} needs more memory than there is: {line}") from None
        line = first_error_line(f"{type(error).__name__}: {error}")
        raise BadReferenceError(f"{path}: {name} raises {line}") from None


def _lack_of_memory(error: BaseException) -> str:
    """Return what an exception says about a lack of memory; "" if it has another cause."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return text or "OutOfMemoryError"
    if isinstance(error, MemoryError):
        return text or "MemoryError"
    if isinstance(error, RuntimeError) and NO_CPU_MEMORY in text:
        return text[text.index(NO_CPU_MEMORY) :]  # before it is the place in torch's own source
    return ""
