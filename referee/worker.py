"""The process in which a solution runs: it does what `remote` asks for, and judges nothing.

Requests and replies are lines of JSON; tensors travel through a mapped file, the first half of
which holds what comes in, the second what goes out. Whatever the solution may want to replace is
bound, or its identity noted, before the solution is loaded.
"""

import builtins
import ctypes
import importlib.util
import json
import mmap
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from inspect import getattr_static
from pathlib import Path
from types import FrameType, FunctionType

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import model
from referee import cases, clock, compare, correctness, linear, relu

PR_SET_PDEATHSIG = 1
LONGEST = 1 << 14  # characters of an error message; the whole of a compiler's first errors
CUDA_LIMIT_PERSISTING_L2 = 6  # cudaLimitPersistingL2CacheSize
# The functions of these that have public names must stay what they were.
NAMESPACES = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": nn.functional,
    "torch.cuda": torch.cuda,
    "torch.testing": torch.testing,
    "torch.autograd": torch.autograd,
    "torch.nn.Module": nn.Module,
    "time": time,
    "statistics": statistics,
    "os": os,
    "json": json,
    "builtins": builtins,
}
# Functions that importing torch._dynamo wraps.
WRAPPED_LATER = ("torch.manual_seed",)
# The types that an output may have.
PLAIN = (torch.Tensor, nn.Parameter)
# By which a solution may fall back on the reference's own ReLU.
LIBRARY = ("aten::relu", "aten::relu_", "aten::clamp", "aten::clamp_min", "aten::threshold")

_perf_counter, _sleep, _exit = time.perf_counter, time.sleep, os._exit
_dumps, _loads = json.dumps, json.loads
_share_memory, _synchronize = compare.share_memory, torch.cuda.synchronize
_system_random = random.SystemRandom()


class Worker:
    """What a request's `op` names is a method here; what it returns is the reply.

    Args:
        arena: the mapped file as bytes.
    """

    def __init__(self, arena: torch.Tensor, device: torch.device) -> None:
        half = len(arena) // 2
        self.incoming, self.outgoing, self.device = arena[:half], arena[half:], device
        self.kind: type[nn.Module] | None = None
        self.file = ""
        self.swallowed: list[str] = []
        self.module: nn.Module | None = None
        self.x = self.output = self.earlier = None
        self.ring: list[torch.Tensor] = []
        self.calls: dict[str, Callable] = {}
        self.clock = None
        # The C library maps blocks afresh, at a page fault each 4 KiB, from a size on that grows
        # with what was freed, to 32 MiB: all processes are to have the same.
        torch.empty(31 << 20, dtype=torch.uint8)
        self.awake = torch.empty(1 << 18, device=device)  # enough for all threads
        self.before: dict[str, object] = {}

    def load(self, path: str | None, problem: str) -> dict:
        """Imports the solution, or without a path takes the reference, and notes what is set."""
        if path is None:
            self.kind = model.PROBLEMS[problem].reference
            return {"seconds": 0.0}
        self.before = _state()
        self.file = path
        sys.path.insert(0, str(Path(path).parent))
        start = _perf_counter()
        with self._watched(self._note_import):
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

    def new(self, args: list, seed: int, dtype: str) -> dict:
        """Constructs the module under a seed; its state by name."""
        torch.manual_seed(seed)
        self.module = self.kind(*args)
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"ModelNew made a {type(self.module).__name__}, not a module")
        dtype = getattr(torch, dtype)
        self.module.to(self.device, dtype if dtype.is_floating_point else None)
        state = self.module.state_dict()
        return {"state": [[name, list(value.shape)] for name, value in state.items()]}

    def state(self, names: list[str], shapes: list[list[int]], dtype: str, how: str) -> dict:
        """Gives the state new values: by `load_state_dict`, or beneath it, by `data`."""
        values, start, dtype = [], 0, getattr(torch, dtype)
        for shape in shapes:
            end = start + _bytes(shape, dtype)
            values.append(self.incoming[start:end].view(dtype).view(shape).clone())
            start = end
        if how == "load_state_dict":
            self.module.load_state_dict(dict(zip(names, values, strict=True)))
        else:
            there = self.module.state_dict()
            for name, value in zip(names, values, strict=True):
                there[name].data.copy_(value)
        return {}

    def attribute(self, name: str, value: float) -> dict:
        """Assigns an attribute that the module has; whether it has."""
        there = hasattr(self.module, name)
        if there:
            setattr(self.module, name, value)
        return {"there": there}

    def call(self, spec: dict, bait: list | None, size: int, again: bool, fill: bool) -> dict:
        """One forward on an input that comes in.

        Args:
            spec: the input's dtype, bytes of storage, shape, strides and offset.
            bait: shape and seed of what a program finds that looks for the expected result.
            size: bytes of the output, where poison is to lie.
            again: in the memory of the input before, with values that no version tells of.
            fill: while torch fills new memory.
        """
        dtype = getattr(torch, spec["dtype"])
        came = self.incoming[: spec["bytes"]]
        if again:
            storage = self.x.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            flat.data.copy_(came)
        else:
            flat = came.to(self.device, copy=True)
            place = spec["shape"], spec["strides"], spec["offset"]
            self.x = flat.view(dtype).as_strided(*place)
        self.earlier, x = self.output, self.x
        self.output = expected = None
        if bait:
            expected = torch.empty(bait[0], dtype=dtype, device=self.device)
            cases.draw_rows(expected, bait[1], unit=True)
        correctness.poison(size, self.device)
        if fill:
            with correctness.nan_in_new_memory(warn_only=True):
                output = self._forward(x, expected)
        else:
            output = self._forward(x, expected)
        return self._hand_over(output, x, flat, spec)

    def _forward(self, x: torch.Tensor, expected: torch.Tensor | None) -> object:
        # `expected` is there to be found in this frame; it is random.
        output = self.module(x)
        if self.device.type == "cuda":
            _synchronize(self.device)
        return output

    def _hand_over(self, output: object, x: torch.Tensor, flat: torch.Tensor, spec: dict) -> dict:
        kind = type(output)
        lazy = issubclass(kind, torch.Tensor) and kind not in PLAIN
        reply: dict = {"type": kind.__name__, "subclass": lazy}
        moved = x.data_ptr() != flat.data_ptr() + spec["offset"] * x.element_size()
        shape, strides = list(x.shape), list(x.stride())
        reply["moved"] = (moved and x.numel() > 0) or [shape, strides] != [
            spec["shape"],
            spec["strides"],
        ]
        if kind not in PLAIN or output.layout != torch.strided:
            return reply
        output = output.detach()
        reply |= {
            "dtype": str(output.dtype).removeprefix("torch."),
            "device": str(output.device),
            "shape": list(output.shape),
            "strides": list(output.stride()),
            "shares_input": _share_memory(output, x),
            "shares_earlier": self.earlier is not None and _share_memory(output, self.earlier),
        }
        self.output = output
        reply["bytes"] = self._send(output, 0)
        self._send(flat, reply["bytes"])
        return reply

    def recall(self, seconds: float) -> dict:
        """The last output once more, some time later."""
        _sleep(seconds)
        return {"bytes": self._send(self.output, 0)}

    def library(self) -> dict:
        """Which of LIBRARY a forward of the last input calls, and what it raised and caught."""
        self.swallowed, seen = list(self.swallowed), _Seen()
        with seen, self._watched(self._note_call):
            self.module(self.x.clone())
        return {"library": [op for op in LIBRARY if op in seen.names], "swallowed": self.swallowed}

    def changes(self) -> dict:
        """The names of what the solution changed that is not its own."""
        now = _state()
        changed = [n for n, was in self.before.items() if n in now and _differs(was, now[n])]
        if self.device.type == "cuda" and (size := _persisting_l2()):
            changed.append(f"the L2's persisting part ({size} bytes)")
        return {"changed": changed[:5]}

    def fill(self, slots: int, shape: list[int], dtype: str, seed: int, unit: bool) -> dict:
        """A ring of inputs, drawn row by row."""
        self.output = self.earlier = self.x = None
        if len(self.ring) != slots or list(self.ring[0].shape) != shape:
            self.ring = []
            for _ in range(slots):
                blank = torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)
                self.ring.append(blank)
        for slot, x in enumerate(self.ring):
            cases.draw_rows(x, seed + slot * len(x), unit)
        return {}

    def fill_state(self, seed: int, names: list[str], scale: float) -> dict:
        """The parameters, drawn row by row."""
        there = self.module.state_dict()
        for turn, name in enumerate(names):
            cases.draw_rows(there[name].data, seed + (turn << 32)).mul_(scale)
        return {}

    def prepare(self, yardstick: str) -> dict:
        """Sets what can be timed: the module; for "copy" and "product" the yardsticks so named."""
        self.calls = {"module": self.module}
        x = self.ring[0]
        if yardstick == "copy":
            target = torch.empty_like(x).fill_(0)
            self.calls |= relu.copies(target)
        elif yardstick == "product":
            weight = self.module.get_parameter("linear.weight").data
            self.calls[linear.PRODUCT] = lambda x: x @ weight.T
            if x.is_cuda and x.dtype == torch.float32:
                self.calls[linear.THREE] = linear.three_products(self.module, x)
        is_cuda = self.device.type == "cuda"
        self.clock = clock.CudaClock(self.device) if is_cuda else clock.CpuClock()
        return {"names": [name for name in self.calls if name != "module"]}

    def run(self, slot: int) -> dict:
        """One forward on an input of the ring."""
        self.output = None
        self.output = self._forward(self.ring[slot], None)
        output = self.output
        if type(output) not in PLAIN:
            return {"type": type(output).__name__}
        return {
            "type": "Tensor",
            "dtype": str(output.dtype).removeprefix("torch."),
            "device": str(output.device),
            "shape": list(output.shape),
            "strides": list(output.stride()),
            "shares_input": _share_memory(output, self.ring[slot]),
        }

    def rows(self, slot: int, start: int, stop: int) -> dict:
        """These rows of the last output and of its input."""
        size = self._send(self.output[start:stop], 0)
        self._send(self.ring[slot][start:stop], size)
        return {"bytes": size}

    def alter(self, slot: int, row: int, seed: int, column: int | None, scale: float) -> dict:
        """Draws a row of an input anew, and a row of the weight."""
        cases.draw_rows(self.ring[slot].data[row : row + 1], seed)
        if column is not None:
            weight = next(iter(self.module.state_dict().values())).data
            cases.draw_rows(weight[column : column + 1], seed + 1).mul_(scale)
        if self.device.type == "cuda":
            _synchronize(self.device)
        return {}

    def time(self, slot: int, name: str) -> dict:
        """Times one call, with a CPU's threads awake."""
        self.output = None
        self.awake.fill_(0)
        self.output, seconds, wall = self.clock.time(self.calls[name], self.ring[slot])
        return {"seconds": seconds, "wall": wall}

    def suspects(self, slot: int, row: int, count: int) -> dict:
        """That row, the first, the last and random ones of the last output and of its input."""
        output, x = self.output, self.ring[slot]
        if type(output) not in PLAIN or len(output) != len(x):
            return {"type": type(output).__name__, "rows": []}
        rows = [row, 0, len(x) - 1]
        rows += (_system_random.randrange(len(x)) for _ in range(count))
        size = self._send(output.detach()[rows], 0)
        self._send(x[rows], size)
        self.output = None
        return {"type": "Tensor", "rows": rows, "bytes": size}

    def _send(self, x: torch.Tensor, start: int) -> int:
        """Writes the elements in order to the outgoing half; how many bytes."""
        flat = x.contiguous().view(-1)
        flat = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
        self.outgoing[start : start + len(flat)].copy_(flat)
        return len(flat)

    @contextmanager
    def _watched(self, note: Callable[[type[BaseException]], None]) -> Iterator[None]:
        """Within it, exceptions that arrive in the solution's own code are noted."""

        def local(frame: FrameType, event: str, arg: tuple) -> Callable:
            if event == "exception":
                note(arg[0])
            return local

        def of_call(frame: FrameType, event: str, arg: object) -> Callable | None:
            return local if frame.f_code.co_filename == self.file else None

        sys.settrace(of_call)
        try:
            yield
        finally:
            sys.settrace(None)

    def _note_import(self, kind: type[BaseException]) -> None:
        # A missing module, file or attribute is asked for in honest ways too.
        if issubclass(kind, (RuntimeError, subprocess.SubprocessError)):
            self.swallowed.append(f"{kind.__name__} at import")

    def _note_call(self, kind: type[BaseException]) -> None:
        if issubclass(kind, Exception) and not issubclass(kind, StopIteration):
            self.swallowed.append(kind.__name__)


class _Seen(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def main(requests: int, replies: int, arena: int, limits: dict) -> None:
    """Answers until the requests end.

    Args:
        requests, replies, arena: file descriptors.
        limits: the device, and the most bytes of memory.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if most := limits["bytes"]:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    mapped = mmap.mmap(arena, 0)
    os.close(arena)
    device = torch.device(limits["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with os.fdopen(requests, "rb") as lines, torch.no_grad():
        worker = Worker(torch.frombuffer(mapped, dtype=torch.uint8), device)
        for line in lines:
            request = _loads(line)
            reply = _answer(worker, request)
            _write(replies, _dumps(reply | {"token": request["token"]}).encode() + b"\n")
    _exit(0)


def _answer(worker: Worker, request: dict) -> dict:
    try:
        return getattr(worker, request["op"])(**request["arguments"])
    except BaseException as error:  # the solution's, SystemExit too
        return {"raised": _describe(error, worker.file)}


def _describe(error: BaseException, file: str) -> dict:
    """An exception in words: its type, its message, the line of the solution that it left."""
    try:
        text = str(error)
    except Exception:  # a __str__ of the solution's
        text = ""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return {
        "type": type(error).__name__[:100],
        "text": text[:LONGEST],
        "line": lines[-1] if lines else None,
        "exits": isinstance(error, SystemExit) and not error.code,
    }


def _write(descriptor: int, data: bytes, write: Callable = os.write) -> None:
    while data:
        data = data[write(descriptor, data) :]


def _state() -> dict[str, object]:
    """All that no solution may change: settings, functions, and all that the referee has named."""
    found = correctness.global_state()
    for space, holder in NAMESPACES.items():
        for name in [name for name in dir(holder) if not name.startswith("_")]:
            value = getattr_static(holder, name)
            if callable(value) and f"{space}.{name}" not in WRAPPED_LATER:
                found[f"{space}.{name}"] = value
    found["torch.nn.Module.__call__"] = nn.Module.__call__
    for name, module in list(sys.modules.items()):
        if name == "model" or name.split(".")[0] == "referee":
            for own, value in list(vars(module).items()):
                if not own.startswith("__"):
                    found[f"{name}.{own}"] = value
                    if isinstance(value, FunctionType):
                        found[f"{name}.{own}'s code"] = value.__code__
    return found


def _differs(was: object, now: object) -> bool:
    if was is now:
        return False
    return not (type(was) is type(now) and isinstance(was, (bool, int, float, str)) and was == now)


def _persisting_l2() -> int:
    """Bytes of the L2 that are set apart."""
    size = ctypes.c_size_t()
    for name in (f"libcudart.so.{torch.version.cuda.partition('.')[0]}", "libcudart.so"):
        try:
            ctypes.CDLL(name).cudaDeviceGetLimit(ctypes.byref(size), CUDA_LIMIT_PERSISTING_L2)
        except (OSError, AttributeError):
            continue
        return size.value
    return 0


def _bytes(shape: list[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for side in shape:
        count *= side
    return count
