"""Run a file's text as a module.

Both sides use this module: the referee for reference files, a process for the solution's file.
"""

import importlib.util
import linecache
import sys
from types import ModuleType


def execute(name: str, path: str, text: bytes) -> ModuleType:
    """Run a file's text as a module of this name; Triton and TorchScript can look up its lines."""
    code = compile(text, path, "exec")
    lines = importlib.util.decode_source(text).splitlines(keepends=True)
    linecache.cache[path] = len(text), None, lines, path
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    exec(code, module.__dict__)
    return module
