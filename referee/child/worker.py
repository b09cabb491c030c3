"""The requests for all problems."""

import base64
import importlib.util
import pickle
import sys
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path

import torch
from torch import nn

import model
from referee import clock, compare
from referee.child import watch
from referee.child.caught import Caught
from referee.child.results import PLAIN
from referee.child.step import Step

CLOCKS = (clock.CpuClock, clock.CudaClock)

_perf_counter = time.perf_counter
_unpickle, _from_base64 = pickle.loads, base64.b64decode
share_memory, synchronize = compare.share_memory, torch.cuda.synchronize


def unpack(text: str) -> object:
    """What `remote.pack` made a text of."""
    return _unpickle(_from_base64(text))


class Worker(Step):
    """Each method is a request, by its name; the dictionary that it returns is the reply.

    Args:
        arena: the mapped file as bytes.
    """

    def __init__(self, arena: torch.Tensor, device: torch.device) -> None:
        half = len(arena) // 2
        self.incoming, self.outgoing, self.device = arena[:half], arena[half:], device
        self.kind: type[nn.Module] | None = None
        self.file = ""
        self.caught = Caught("")
        self.module: nn.Module | None = None
        self.x = self.output = self.earlier = None
        self.outputs, self.found, self.given, self.seed = [], [], [], 0
        self.ring: list[torch.Tensor] = []
        self.calls: dict[str, Callable] = {}
        self.called = ""
        self.writes: list[Callable[[], object]] = []  # what is altered in the next timed call
        self.clock = None
        # The C library maps blocks afresh, at a page fault each 4 KiB, from a size on that grows
        # with what was freed, to 32 MiB: all processes are to have the same.
        torch.empty(31 << 20, dtype=torch.uint8)
        self.awake = torch.empty(1 << 18, device=device)  # enough for all threads
        self.before: dict[str, object] = {}
        self.was_on = watch.left_on()

    def load(self, path: str | None, problem: str) -> dict:
        """Imports the solution, or without a path takes the reference, and notes what is set."""
        if path is None:
            self.kind = model.PROBLEMS[problem].reference
            return {"seconds": 0.0}
        self.before = watch.state(self.device)
        self.file, self.caught = path, Caught(path)
        sys.path.insert(0, str(Path(path).parent))
        start = _perf_counter()
        with self.caught.tracing(self.caught.note_import):
            loader = SourceFileLoader("solution", path)
            spec = importlib.util.spec_from_file_location("solution", path, loader=loader)
            module = importlib.util.module_from_spec(spec)
            sys.modules["solution"] = module
            loader.exec_module(module)
        kinds = getattr(module, "SOLUTIONS", None)
        self.kind = kinds.get(problem) if isinstance(kinds, dict) else None
        self.kind = self.kind or getattr(module, "ModelNew", None)
        if not callable(self.kind):
            raise AttributeError("the file defines no ModelNew")
        return {"seconds": _perf_counter() - start}

    def new(self, args: str, seed: int, dtype: str | None) -> dict:
        """Constructs the module under a seed; its state by name.

        Args:
            args: packed.
            dtype: of its parameters; None for its own.
        """
        torch.manual_seed(seed)
        self.module = self.kind(*unpack(args))
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"ModelNew made a {type(self.module).__name__}, not a module")
        dtype = getattr(torch, dtype or "", None)
        self.module.to(self.device, dtype if dtype and dtype.is_floating_point else None)
        state = self.module.state_dict()
        for value in state.values():  # another kind may see what is altered before a timed call
            if type(value) not in PLAIN:
                raise TypeError(f"its state holds a {type(value).__name__}, not a plain tensor")
        return {"state": [[name, list(value.shape)] for name, value in state.items()]}

    def library(self, ops: list[str], all_of_them: bool) -> dict:
        """Which of the operators a forward calls, and the exceptions that led to them.

        Args:
            all_of_them: they count only if none is missing.
        """
        seen = watch.Seen()
        with seen, self.caught.tracing(self.caught.note_call):
            self.call_once()
        called = [op for op in ops if op in seen.names]
        if all_of_them and len(called) < len(ops):
            called = []
        handled = [seen.handled[op] for op in called if op in seen.handled]
        return {"library": called, "swallowed": handled + self.caught.behind_calls()}

    def call_once(self) -> None:
        """A forward on a copy of an input that was there before."""
        raise NotImplementedError

    def changes(self) -> dict:
        """The names of what the solution changed that is not its own."""
        now = watch.state(self.device)
        changed = [n for n, was in self.before.items() if n in now and watch.differs(was, now[n])]
        if self.clock and type(self.clock) not in CLOCKS:
            changed.append("the referee's clock")
        for own in filter(None, (self, self.clock)):
            kind = type(own)
            changed += [f"{kind.__name__}.{name}" for name in vars(own) if hasattr(kind, name)]
        return {"changed": changed[:5]}

    def time(self, slot: int, call: str) -> dict:
        """Times one call, with a CPU's threads awake."""
        self.output = None
        self.awake.fill_(0)
        self.called = call
        call_of, x = self.calls[call], self.ring[slot]
        self.output, seconds, wall = self.clock.time(call_of, x, self.write)
        return {"seconds": seconds, "wall": wall}

    def write(self) -> None:
        """Alters what the timed call reads."""
        for write in self.writes:
            write()
        self.writes = []

    def left_on(self) -> dict:
        """The modes, hooks and timers that a call left on: they could compute its result later.

        Nothing is called that it could intercept; and the answer comes when the call is over.
        """
        return {"names": [name for name in watch.left_on() if name not in self.was_on]}

    def send(self, x: torch.Tensor, start: int) -> int:
        """Writes the elements in order to the outgoing half; how many bytes."""
        flat = x.contiguous().view(-1)
        flat = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
        self.outgoing[start : start + len(flat)].copy_(flat)
        return len(flat)

    def take_away(self, result: torch.Tensor, inputs: list) -> None:
        """Frees the memory of a module's timed result, for a solution that kept it, too."""
        if self.called != "module" or any(share_memory(result, x) for x in inputs):
            return
        try:
            result.untyped_storage().resize_(0)
        except RuntimeError:  # not torch's memory
            with torch.inference_mode():  # where the result may be from
                result.fill_(77)
