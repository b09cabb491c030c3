"""The module that a contestant's process holds: the solution's, or eager's."""

import base64
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import ModuleType

import torch
from torch import nn

from referee.child.mapping import Mapping
from referee.contestants.descriptions import describe
from referee.contestants.execute import execute, forget_modules
from referee.contestants.forms import unpack
from referee.contestants.seeding import seed_generators


class HeldModule:
    """The module of one contestant. `import_file`, `construct` and `adopt` make it, in this order.

    Args:
        mapping: the memory that the referee shares.
        device: where the module computes.

    Attributes:
        file: the path of the imported file, "" before.
        module: the module, None before `construct`.
    """

    def __init__(self, mapping: Mapping, device: torch.device) -> None:
        self.file = ""
        self.module: nn.Module | None = None
        self._mapping = mapping
        self._device = device
        self._class: Callable | None = None  # the file's ModelNew or Model
        # Before the file's import: `sys.path`, and the names of all modules.
        self._path_before: list[str] = list(sys.path)
        self._modules_before: set[str] = set(sys.modules)

    def import_file(
        self, text: str, path: str, class_names: list[str], folders: list[str], builds: str = ""
    ) -> dict:
        """Execute a file's text, which the referee has read before any solution ran.

        Args:
            text: the file's text, in base64.
            path: the file's path, for messages and for imports from its folder.
            class_names: names that the class may have; the first that the file defines is taken.
            folders: other folders from which the file may import.
            builds: the folder in which the file builds extensions; "" for the usual one.

        Returns:
            The "seconds" that the import took.

        Raises:
            AttributeError: the file defines none of the names; the message has the last of them,
                which is the usual one.
        """
        self.file = path
        if builds:
            os.environ["TORCH_EXTENSIONS_DIR"] = builds
        self._path_before = list(sys.path)
        self._modules_before = set(sys.modules)
        sys.path.insert(0, str(Path(path).parent))
        sys.path.extend(folders)
        data = base64.b64decode(text)
        start = perf_counter()
        self._class = _find_class(execute("solution", path, data), class_names)
        return {"seconds": perf_counter() - start}

    def construct(self, arguments: str, seed: int, dtype: str) -> dict:
        """Construct the module; return a description of its "state".

        Args:
            arguments: the constructor's arguments, packed.
            seed: the seed of all global generators when the constructor runs.
            dtype: the dtype to which the module is moved; "" keeps its own.

        Raises:
            TypeError: the class makes no `nn.Module`.
        """
        seed_generators(seed)
        module = self._class(*unpack(arguments))
        if not isinstance(module, nn.Module):
            type_name = type(module).__name__
            class_name = getattr(self._class, "__name__", "ModelNew")
            raise TypeError(f"{class_name} makes a {type_name}, not an nn.Module")
        module.to(self._device, getattr(torch, dtype) if dtype else None)
        self.module = module
        state = [{"name": name, **_describe_state(x)} for name, x in self._state().items()]
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return {"state": state}

    def adopt(self, names: list[str], location: dict) -> None:
        """Move parameters and buffers into the referee's memory.

        As in `Module.to`, the Parameter objects stay the same, and their data changes.

        Args:
            names: the names of the parameters and buffers.
            location: their new memory, in the same order.
        """
        state = self._state()
        for name, shared in zip(names, self._mapping.tensors(location), strict=True):
            state[name].data = shared

    def tensors(self, names: list[str]) -> list[torch.Tensor]:
        """Return the module's parameters and buffers that have these names."""
        state = self._state()
        return [state[name] for name in names]

    def forget(self) -> None:
        """Forget the module, its class, and the modules that its file has imported."""
        self.module = None
        self._class = None
        for folder in set(sys.path) - set(self._path_before):
            forget_modules(folder, self._modules_before)
        sys.path[:] = self._path_before

    def _state(self) -> dict[str, torch.Tensor]:
        """Return the module's parameters and buffers by name, the objects themselves."""
        return self.module.state_dict(keep_vars=True)


def _find_class(module: ModuleType, class_names: list[str]) -> Callable:
    """Return the solution's class, the first of these names that the imported file defines.

    Raises:
        AttributeError: it defines none of them.
    """
    for name in class_names:
        candidate = getattr(module, name, None)
        if callable(candidate):
            return candidate
    defined = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == "solution"]
    found = ", ".join(defined) or "no class or function"
    raise AttributeError(f"the file defines no {class_names[-1]}; it defines {found}")


def _describe_state(x: object) -> dict:
    """Return a description of a value of a state dict, with its storage.

    A value without a storage is described alone: a sparse buffer of the solution's own, or what
    `get_extra_state` returns.
    """
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
        return describe(x)
    storage = x.untyped_storage()
    return describe(x) | {
        "offset": x.storage_offset(),
        "storage": storage.data_ptr(),
        "bytes": storage.nbytes(),
    }
