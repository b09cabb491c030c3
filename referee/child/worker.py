"""The requests that a contestant's process answers, one method each.

Whatever a method returns goes to the referee as JSON, and is believed by nobody.
"""

import base64
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from referee.child import yardsticks
from referee.child.clock import CpuClock, CudaClock
from referee.execute import execute
from referee.gradients_of import differentiate, recorded, sources_of
from referee.names import MODULE, NOTHING
from referee.results import describe, flatten, plain
from referee.shared import Mapping, unpack

# The C library maps blocks afresh, at a page fault each 4 KiB, from a size on that grows with what
# was freed, to 32 MiB: all processes are to have the same.
LARGEST_UNMAPPED = 31 << 20

PIECE = 1 << 24  # elements that are looked at at a time


class Worker:
    """One contestant's module, and the results of its calls until they are released.

    Args:
        mapping: the memory that the referee shares.
        device: on which the module computes.
    """

    def __init__(self, mapping: Mapping, device: torch.device) -> None:
        self.file = ""
        self._mapping = mapping
        self._device = device
        self._kind: Callable | None = None
        self._module: nn.Module | None = None
        self._calls: dict[str, Callable] = {}
        self._results: list = []
        self._clock = CudaClock() if device.type == "cuda" else CpuClock()
        torch.empty(LARGEST_UNMAPPED, dtype=torch.uint8)
        self._awake = torch.empty(1 << 18, device=device)  # large enough for all threads
        nothing = torch.zeros(1, device=device)
        self._calls[NOTHING] = lambda *inputs: nothing

    def import_file(self, text: str, path: str, names: list[str], folders: list[str]) -> dict:
        """Execute a file's text, which the referee read before any solution ran.

        Args:
            text: in base64.
            path: of the file, for messages and for what lies beside it.
            names: of the class; the first that the file defines counts.
            folders: from which the file may import, beside its own.
        """
        self.file = path
        sys.path.insert(0, str(Path(path).parent))
        sys.path.extend(folders)
        data = base64.b64decode(text)
        start = perf_counter()
        module = execute("solution", path, data)
        classes = [getattr(module, name, None) for name in names]
        defined = [found for found in classes if callable(found)]
        if not defined:
            raise AttributeError(f"the file defines no {names[-1]}")
        self._kind = defined[0]
        return {"seconds": perf_counter() - start}

    def set_precision(self, setting: str) -> None:
        """Set the precision of float32 products for all that follows."""
        torch.set_float32_matmul_precision(setting)

    def construct(self, arguments: str, seed: int, dtype: str) -> dict:
        """Make the module under a seed, in its own dtype if none is named; describe its state."""
        torch.manual_seed(seed)
        self._results = []
        module = self._kind(*unpack(arguments))
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            name = getattr(self._kind, "__name__", "ModelNew")
            raise TypeError(f"{name} made a {kind}, not a module")
        module.to(self._device, getattr(torch, dtype) if dtype else None)
        self._module = self._calls[MODULE] = module
        state = [{"name": name, **_of_state(x)} for name, x in self._state().items()]
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return {"state": state}

    def adopt(self, names: list[str], form: dict) -> None:
        """Have parameters and buffers lie in the referee's memory from now on.

        They change owners as `Module.to` has them: the objects stay.
        """
        state = self._state()
        for name, x in zip(names, self._mapping.tensors(form), strict=True):
            state[name].data = x

    def call(
        self,
        name: str,
        inputs: list[dict],
        fill: bool = False,
        poison: int = 0,
        outputs: list[dict] | None = None,
    ) -> dict:
        """Call something once with each of the arguments; describe the results.

        Args:
            name: what is called: the module, the empty call, or a yardstick.
            inputs: a form for each call.
            fill: torch fills new memory with NaN.
            poison: bytes of free memory that are filled with NaN before.
            outputs: room for copies of each call's results, where these cannot be read in place.
        """
        arguments = [self._mapping.tensors(form) for form in inputs]
        _poison(poison, self._device)
        call = self._calls[name]
        self._awake.fill_(0)
        self._clock.get_ahead()
        with _filled_memory() if fill else torch.no_grad():
            returned = [self._clock.time(partial(call, *some)) for some in arguments]
        seconds = self._clock.seconds()
        return {"seconds": seconds, "calls": self._keep_all(returned, outputs)}

    def step(  # noqa: PLR0913, PLR0917 - the parts of a request, by keyword
        self,
        name: str,
        inputs: list[dict],
        output_gradients: list[dict],
        parameters: list[str],
        poison: int = 0,
        outputs: list[dict] | None = None,
    ) -> dict:
        """Do a training step with each of the arguments; describe its results.

        A step is a forward that autograd records, and its backward. Its results are those of the
        forward, then the gradients of inputs and parameters.

        Args:
            name: what is called, as in `call`.
            inputs: a form for each step.
            output_gradients: a form for each step, of the outputs' gradients.
            parameters: names of those whose gradients are wanted.
            poison: bytes of free memory that are filled with NaN before.
            outputs: room for copies of each step's results, as in `call`.
        """
        _poison(poison, self._device)
        state = self._state() if self._module else {}
        call = self._calls[name]
        returned = []
        self._awake.fill_(0)
        for form, gradients_form in zip(inputs, output_gradients, strict=True):
            arguments = recorded(self._mapping.tensors(form))
            gradients = self._mapping.tensors(gradients_form)
            with torch.enable_grad():
                self._clock.get_ahead()
                result = self._clock.time(partial(call, *arguments))
                if name == NOTHING:
                    self._clock.get_ahead()
                    self._clock.time(lambda: None)
                    returned.append(result)
                    continue
                _, leaves = flatten(result)
                sources = sources_of(arguments, state, parameters)
                self._clock.get_ahead()
                found = self._clock.time(partial(differentiate, leaves, sources, gradients))
            returned.append([*leaves, *found])
        seconds = self._clock.seconds()
        halves = {"forward": seconds[::2], "backward": seconds[1::2]}
        return {"seconds": halves, "calls": self._keep_all(returned, outputs)}

    def release(self, empty_cache: bool = False) -> None:
        """Free the results of the last request, which the referee has read.

        Args:
            empty_cache: give the memory back to the device, too.
        """
        self._results = []
        if empty_cache and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def finite(self, inputs: list[dict]) -> dict:
        """Return whether the module's results for inputs are finite."""
        _, leaves = flatten(self._module(*self._mapping.tensors(inputs[0])))
        floats = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
        return {"finite": all(map(_is_finite, floats))}

    def kept(self, inputs: list[dict], parameters: list[str]) -> dict:
        """Return the bytes that autograd keeps for the backward, beyond inputs and parameters."""
        arguments = recorded(self._mapping.tensors(inputs[0]))
        kept: dict[int, int] = {}

        def pack(saved: torch.Tensor) -> torch.Tensor:
            kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            return saved

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda saved: saved):
            self._module(*arguments)
        for there in (*arguments, *self._module.parameters()):
            if isinstance(there, torch.Tensor):
                kept.pop(there.untyped_storage().data_ptr(), None)
        return {"bytes": sum(kept.values())}

    def prepare_yardsticks(
        self, wanted: list[str], inputs: list[dict], copied_bytes: int, more: list[str]
    ) -> dict:
        """Set up calls that are timed beside the module; say which there are, and why others not.

        Args:
            wanted: names.
            inputs: a form of arguments.
            copied_bytes: that a copy moves.
            more: path and text of the file of the problem's own yardsticks, or nothing.
        """
        self._calls = {n: call for n, call in self._calls.items() if n in (MODULE, NOTHING)}
        own = execute("yardsticks", more[0], base64.b64decode(more[1])) if more else None
        arguments = self._mapping.tensors(inputs[0])
        notes = []
        for name in wanted:
            try:
                self._calls |= yardsticks.make(name, self._module, arguments, copied_bytes, own)
            except Exception as error:  # no Triton, no such function: a yardstick is missing
                reason = str(error).strip().splitlines() or [type(error).__name__]
                notes.append(f"{name} is left out: {reason[0]}")
        names = [name for name in self._calls if name not in (MODULE, NOTHING)]
        return {"names": names, "notes": notes}

    def _state(self) -> dict[str, torch.Tensor]:
        return self._module.state_dict(keep_vars=True)

    def _keep_all(self, returned: list, outputs: list[dict] | None) -> list[dict]:
        """Keep what each call returned, see `_keep`."""
        rooms = outputs or [None] * len(returned)
        return [self._keep(*pair) for pair in zip(returned, rooms, strict=True)]

    def _keep(self, returned: object, room: dict | None) -> dict:
        """Keep a result alive until `release`; describe it, or copy it where there is room."""
        structure, leaves = flatten(returned)
        descriptions = []
        for leaf in leaves:
            in_memory = plain(leaf)
            self._results += [leaf, in_memory]
            descriptions.append(describe(leaf if in_memory is None else in_memory))
        if room is not None:
            _copy_into(self._mapping.tensors(room), leaves)
            if self._device.type == "cuda":
                torch.cuda.synchronize()
        return {"structure": structure, "results": descriptions}


def _is_finite(x: torch.Tensor) -> bool:
    """Return whether all elements are finite; large tensors are looked at in pieces."""
    return all(bool(part.isfinite().all()) for part in x.reshape(-1).split(PIECE))


def _of_state(x: object) -> dict:
    """Describe a part of a state, and the storage that it is in.

    A solution's own sparse buffers, and what `get_extra_state` gives, are in no storage.
    """
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
        return describe(x)
    storage = x.untyped_storage()
    about = {"offset": x.storage_offset(), "storage": storage.data_ptr(), "bytes": storage.nbytes()}
    return describe(x) | about


def _copy_into(room: list, leaves: list) -> None:
    """Copy results to where the referee finds them; of another form they are wrong anyway."""
    for there, x in zip(room, leaves, strict=False):
        is_tensor = isinstance(x, torch.Tensor) and isinstance(there, torch.Tensor)
        if is_tensor and x.shape == there.shape and x.dtype == there.dtype:
            there.copy_(x.detach())


def _poison(size: int, device: torch.device) -> None:
    """Leave free blocks full of 0xff, a NaN in every float dtype, for the output to land in.

    There are several of about the size in bytes, since the C library hands small ones out as it
    likes, and those below 32 MiB it does not map afresh.
    """
    if not size:
        return
    if size < 1 << 20:
        sizes = list(range(size, size + 1024, 64))
    elif size < 1 << 25:
        sizes = [size] * 4
    else:
        sizes = [size]
    blocks = [torch.empty(n, dtype=torch.uint8, device=device).fill_(0xFF) for n in sizes]
    del blocks


@contextmanager
def _filled_memory() -> Iterator[None]:
    """Within it, torch.empty fills: part of torch's deterministic mode, which only warns.

    `torch.use_deterministic_algorithms` does the same, and imports torch's compiler first.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
