"""Executes the text of a Python file as a module.

The referee does so with reference files, a contestant's process with the solution's file.
"""

import importlib.util
import linecache
import sys
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
