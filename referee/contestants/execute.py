"""Executes the text of a Python file as a module.

The referee does so with reference files, a contestant's process with the solution's file.
"""

import importlib.util
import linecache
import sys
from collections.abc import Collection
from types import ModuleType


def execute(name: str, path: str, text: bytes) -> ModuleType:
    """Execute the text of a file as a module, and return the module.

    The file itself is not read: it may have changed since `text` was read.

    Args:
        name: the module's name in sys.modules.
        path: the file's path, for tracebacks and `__file__`.
        text: the file's text.
    """
    code = compile(text, path, "exec")
    # Triton and TorchScript look up a function's source in this cache. Its entries are (size,
    # modification time, lines, path); with the time None, linecache does not read the file again.
    lines = importlib.util.decode_source(text).splitlines(keepends=True)
    linecache.cache[path] = len(text), None, lines, path
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(code, module.__dict__)
    return module


def forget_modules(folder: str, kept: Collection[str]) -> None:
    """Forget modules that were imported from a folder: another may have modules of the same names.

    Args:
        folder: the folder.
        kept: names of modules that stay. The referee's own stay, too.
    """
    for name, module in list(sys.modules.items()):
        is_from_folder = str(getattr(module, "__file__", None) or "").startswith(f"{folder}/")
        is_own = name.partition(".")[0] == "referee"
        if is_from_folder and not is_own and name not in kept:
            del sys.modules[name]
