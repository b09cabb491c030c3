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
from types import FrameType, TracebackType

from referee.child.results import PLAIN

# An exception that passes through one of these is that of a build.
BUILDERS = (
    "torch.utils.cpp_extension", "torch._inductor", "torch._dynamo", "torch._ops", "triton",
    "subprocess", "numba", "cupy",
)  # fmt: skip
Note = Callable[[FrameType, type[BaseException], TracebackType], None]


class Caught:
    """What the exceptions of a file's own code tell."""

    def __init__(self, file: str) -> None:
        self._file = file
        # Of a build that failed at import: the exception, and the names that depend on it.
        self._builds: list[tuple[str, set[str] | None]] = []
        self._attempts: list[str] = []
        self._used: set[str] = set()

    @contextmanager
    def tracing(self, note: Note) -> Iterator[None]:
        """Within it, exceptions that arrive in the file's own code are noted."""

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

    def note_import(
        self, frame: FrameType, kind: type[BaseException], trace: TracebackType
    ) -> None:
        """A build that failed; a missing module or file is asked for in honest ways too."""
        if not issubclass(kind, (RuntimeError, subprocess.SubprocessError)):
            return
        if _passes_a_build(trace):
            names = None
            if frame.f_code.co_name == "<module>":
                nodes = (node for block in self._around(frame) for node in ast.walk(block))
                names = {node.id for node in nodes if _is_assigned(node)}
            self._builds.append((f"{kind.__name__} at import", names))

    def note_call(self, frame: FrameType, kind: type[BaseException], trace: TracebackType) -> None:
        """An attempt to build, or to call something with a tensor."""
        if not issubclass(kind, Exception) or issubclass(kind, StopIteration):
            return
        known = {**frame.f_globals, **frame.f_locals}
        calls = (
            node
            for block in self._around(frame)
            for part in block.body
            for node in ast.walk(part)
            if isinstance(node, ast.Call)
        )
        if _passes_a_build(trace) or any(_takes_a_tensor(call, known) for call in calls):
            self._attempts.append(kind.__name__)

    def behind_calls(self) -> list[str]:
        """The exceptions on which what the last traced calls did depends."""
        builds = [kind for kind, names in self._builds if names is None or names & self._used]
        return builds + self._attempts

    @cached_property
    def _blocks(self) -> list[ast.Try | ast.With]:
        tree = ast.parse(Path(self._file).read_bytes())
        return [node for node in ast.walk(tree) if isinstance(node, (ast.Try, ast.With))]

    def _around(self, frame: FrameType) -> list[ast.Try | ast.With]:
        """The statements that may catch what is raised in a frame where it is now."""
        line, start = frame.f_lineno, frame.f_code.co_firstlineno
        return [
            block
            for block in self._blocks
            if start <= block.lineno and block.body[0].lineno <= line <= block.body[-1].end_lineno
        ]


def _passes_a_build(trace: TracebackType | None) -> bool:
    while trace:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith(BUILDERS):
            return True
        trace = trace.tb_next
    return False


def _is_assigned(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _takes_a_tensor(call: ast.Call, known: dict[str, object]) -> bool:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    nodes = (node for value in given for node in ast.walk(value))
    values = (known.get(node.id) for node in nodes if isinstance(node, ast.Name))
    return any(
        type(value) in PLAIN or (type(value) is tuple and value and type(value[0]) in PLAIN)
        for value in values
    )
