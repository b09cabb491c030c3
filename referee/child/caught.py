"""The exceptions that a solution catches, and whether its results come from what it does then.

Honest files catch exceptions too: of a probe, of an option that is not set, of a module that is
missing. A fallback follows a failed attempt to build, or to compute from tensors.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType

from referee.child.results import PLAIN

# An exception that passes through one of these is that of a build.
BUILDERS = (
    "torch.utils.cpp_extension", "torch._inductor", "torch._dynamo", "torch._ops", "triton",
    "subprocess", "numba", "cupy",
)  # fmt: skip


class Caught:
    """What the exceptions of a file's own code tell."""

    def __init__(self, file: str) -> None:
        self._file = file
        # Of a build that failed at import: the exception, and the names that depend on it.
        self._builds: list[tuple[str, set[str] | None]] = []
        self._attempts: list[str] = []
        self._used: set[str] = set()

    @contextmanager
    def tracing(self, note: Callable) -> Iterator[None]:
        """Within it, exceptions that arrive in the file's own code are noted, by a method below."""

        def local(frame: FrameType, event: str, arg: tuple) -> Callable:
            if event == "exception":
                note(frame, arg[0], arg[2])
            return local

        def of_call(frame: FrameType, event: str, arg: object) -> Callable | None:
            if frame.f_code.co_filename != self._file:
                return None
            self._used |= {*frame.f_code.co_names}
            return local

        self._attempts, self._used = [], set()
        sys.settrace(of_call)
        try:
            yield
        finally:
            sys.settrace(None)

    def note_import(self, frame: FrameType, kind: type, trace: TracebackType) -> None:
        """A build that failed; a missing module or file is asked for in honest ways too."""
        if issubclass(kind, (RuntimeError, subprocess.SubprocessError)) and _is_of_a_build(trace):
            names = None
            if frame.f_code.co_name == "<module>":
                found = [x for block in self._around(frame) for x in _walk(block, ast.Name)]
                names = {name.id for name in found if isinstance(name.ctx, ast.Store)}
            self._builds.append((f"{kind.__name__} at import", names))

    def note_call(self, frame: FrameType, kind: type, trace: TracebackType) -> None:
        """An attempt to build, or to call something with a tensor."""
        if not issubclass(kind, Exception) or issubclass(kind, StopIteration):
            return
        known = {**frame.f_globals, **frame.f_locals}
        parts = [part for block in self._around(frame) for part in block.body]
        calls = [call for part in parts for call in _walk(part, ast.Call)]
        if _is_of_a_build(trace) or any(_takes_a_tensor(call, known) for call in calls):
            self._attempts.append(kind.__name__)

    def behind_calls(self) -> list[str]:
        """The exceptions on which what the last traced calls did depends."""
        builds = [kind for kind, names in self._builds if names is None or names & self._used]
        return builds + self._attempts

    @cached_property
    def _blocks(self) -> list[ast.AST]:
        return _walk(ast.parse(Path(self._file).read_bytes()), (ast.Try, ast.With))

    def _around(self, frame: FrameType) -> list[ast.AST]:
        """The statements that may catch what is raised in a frame where it is now."""
        line, start = frame.f_lineno, frame.f_code.co_firstlineno
        return [
            block
            for block in self._blocks
            if start <= block.lineno and block.body[0].lineno <= line <= block.body[-1].end_lineno
        ]


def _walk(node: ast.AST, kinds: type | tuple[type, ...]) -> list[ast.AST]:
    return [part for part in ast.walk(node) if isinstance(part, kinds)]


def _is_of_a_build(trace: TracebackType | None) -> bool:
    frames = (frame for frame, _ in walk_tb(trace))
    return any(str(frame.f_globals.get("__name__")).startswith(BUILDERS) for frame in frames)


def _takes_a_tensor(call: ast.Call, known: dict[str, object]) -> bool:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    values = [known.get(name.id) for part in given for name in _walk(part, ast.Name)]
    return any(type(x[0] if type(x) is tuple and x else x) in PLAIN for x in values)
