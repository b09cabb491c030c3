"""The requests that a contestant's process answers: one method of `Worker` for each.

The referee names the method and its arguments; what the method returns goes back as JSON, so both
are made of JSON's types. Tensors are sent as forms of shared memory (see `shared`), results as
descriptions of where they are in this process's memory (see `results.describe`).

The referee believes none of these replies: the solution can change all that is in this process.
"""

import base64
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from referee.child import yardsticks
from referee.child.clock import CpuClock, CudaClock
from referee.contestants.autograd import differentiate, recorded, sources_of
from referee.contestants.execute import execute
from referee.contestants.reading import memory_offset
from referee.contestants.results import describe, flatten, plain
from referee.contestants.shared import Mapping, unpack
from referee.names import MODULE, NOTHING

# glibc's malloc takes a large block from the kernel anew, at a page fault for each 4 KiB, if it is
# larger than a threshold. The threshold grows with the largest block that was freed, up to 32 MiB.
# Every process frees a block of this size first so that all have the same threshold.
FREED_FIRST_BYTES = 31 << 20

CHECKED_AT_ONCE = 1 << 24  # elements
READ_AT_ONCE = 4  # elements, see `Worker._read_at_once`


class Worker:
    """Holds one contestant's module and the results of its calls until they are released.

    Args:
        mapping: the memory that the referee shares.
        device: where the module computes.

    Attributes:
        file: the path of the imported file, "" before.
    """

    def __init__(self, mapping: Mapping, device: torch.device) -> None:
        self.file = ""
        self._mapping = mapping
        self._device = device
        self._class: Callable | None = None  # the file's ModelNew or Model
        self._module: nn.Module | None = None
        self._calls: dict[str, Callable] = {}  # what can be called: see `referee.names`
        self._results: list = []  # keeps results alive while the referee reads them
        self._clock = CudaClock() if device.type == "cuda" else CpuClock()
        self._random = random.Random()  # torch's and Python's generators are the solution's
        torch.empty(FREED_FIRST_BYTES, dtype=torch.uint8)  # freed at once
        # Filling this tensor before calls wakes all threads; it is large enough to use them all.
        self._wakes_threads = torch.empty(1 << 18, device=device)
        ready_result = torch.zeros(1, device=device)
        self._calls[NOTHING] = lambda *inputs: ready_result

    def import_file(self, text: str, path: str, names: list[str], folders: list[str]) -> dict:
        """Execute a file's text, which the referee has read before any solution ran.

        Args:
            text: the file's text, in base64.
            path: the file's path, for messages and for imports from its folder.
            names: names that the class may have; the first that the file defines is taken.
            folders: other folders from which the file may import.

        Raises:
            AttributeError: the file defines none of the names.
        """
        self.file = path
        sys.path.insert(0, str(Path(path).parent))
        sys.path.extend(folders)
        data = base64.b64decode(text)
        start = perf_counter()
        module = execute("solution", path, data)
        candidates = [getattr(module, name, None) for name in names]
        classes = [candidate for candidate in candidates if callable(candidate)]
        if not classes:
            raise AttributeError(f"the file defines no {names[-1]}")
        self._class = classes[0]
        return {"seconds": perf_counter() - start}

    def set_precision(self, setting: str) -> None:
        """Set torch's precision of float32 products for all later requests."""
        torch.set_float32_matmul_precision(setting)

    def construct(self, arguments: str, seed: int, dtype: str) -> dict:
        """Construct the module; return a description of its state.

        Args:
            arguments: the constructor's arguments, packed.
            seed: torch's seed when the constructor runs.
            dtype: the dtype to which the module is moved; "" keeps its own.

        Raises:
            TypeError: the class makes no `nn.Module`.
        """
        torch.manual_seed(seed)
        self._results = []
        module = self._class(*unpack(arguments))
        if not isinstance(module, nn.Module):
            type_name = type(module).__name__
            class_name = getattr(self._class, "__name__", "ModelNew")
            raise TypeError(f"{class_name} makes a {type_name}, not an nn.Module")
        module.to(self._device, getattr(torch, dtype) if dtype else None)
        self._module = self._calls[MODULE] = module
        state = [{"name": name, **_describe_state(x)} for name, x in self._state().items()]
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return {"state": state}

    def adopt(self, names: list[str], form: dict) -> None:
        """Move parameters and buffers into the referee's memory.

        As in `Module.to`, the Parameter objects stay the same, and their data changes.

        Args:
            names: the names of the parameters and buffers.
            form: the form of their new memory, in the same order.
        """
        state = self._state()
        for name, shared in zip(names, self._mapping.tensors(form), strict=True):
            state[name].data = shared

    def call(
        self,
        name: str,
        inputs: list[dict],
        fill: bool = False,
        poison: int = 0,
        outputs: list[dict] | None = None,
    ) -> dict:
        """Run one forward for each form of inputs; return its seconds and descriptions of results.

        Args:
            name: the call's name: MODULE, NOTHING or a yardstick, see `referee.names`.
            inputs: a form of the arguments for each call.
            fill: torch fills every new tensor with NaN.
            poison: size in bytes of free memory that is filled with NaN before the calls. If it is
                not 0, the reply has some elements of the last call's results, see `_read_at_once`.
            outputs: a form for each call, into which its results are copied; None if the referee
                can read results where they are.
        """
        arguments_of_calls = [self._mapping.tensors(form) for form in inputs]
        _poison(poison, self._device)
        call = self._calls[name]
        self._wakes_threads.fill_(0)
        self._clock.get_ahead(len(inputs))
        nan_in_new_tensors = _nan_in_new_tensors() if fill else nullcontext()
        with torch.no_grad(), nan_in_new_tensors:
            returned = [
                self._clock.time(partial(call, *arguments)) for arguments in arguments_of_calls
            ]
        elements = self._read_at_once(returned[-1]) if poison else {}
        seconds = self._clock.seconds()
        calls = self._keep_all(returned, outputs)
        return {"seconds": seconds, "calls": calls, "elements": elements}

    def step(  # noqa: PLR0913, PLR0917 - the parts of a request, by keyword
        self,
        name: str,
        inputs: list[dict],
        output_gradients: list[dict],
        parameters: list[str],
        poison: int = 0,
        outputs: list[dict] | None = None,
    ) -> dict:
        """Run one training step for each form of inputs; return seconds and descriptions.

        A step is a forward that autograd records, and its backward. Its results are the outputs of
        the forward, then the gradients of inputs and parameters.

        Args:
            name: the call's name, as in `call`.
            inputs: a form of the arguments for each step.
            output_gradients: a form of the outputs' gradients for each step.
            parameters: names of the parameters whose gradients are computed.
            poison: size in bytes of free memory that is filled with NaN before the steps. If it is
                not 0, the reply has some elements, as in `call`.
            outputs: forms for copies of each step's results, as in `call`.
        """
        _poison(poison, self._device)
        state = self._state()
        returned = []
        self._wakes_threads.fill_(0)
        for form, gradients_form in zip(inputs, output_gradients, strict=True):
            arguments = recorded(self._mapping.tensors(form))
            gradients = self._mapping.tensors(gradients_form)
            if name == NOTHING:
                returned.append(self._empty_step(arguments))
            else:
                sources = sources_of(arguments, state, parameters)
                returned.append(self._one_step(name, arguments, sources, gradients))
        elements = self._read_at_once(returned[-1]) if poison else {}
        # The clock has timed a forward, its backward, the next forward, ...
        seconds = self._clock.seconds()
        halves = {"forward": seconds[::2], "backward": seconds[1::2]}
        calls = self._keep_all(returned, outputs)
        return {"seconds": halves, "calls": calls, "elements": elements}

    def _empty_step(self, arguments: list) -> object:
        """Time the empty call as a forward, and nothing as its backward; return the result."""
        with torch.enable_grad():
            self._clock.get_ahead(1)
            result = self._clock.time(partial(self._calls[NOTHING], *arguments))
            self._clock.get_ahead(1)
            self._clock.time(lambda: None)
        return result

    def _one_step(self, name: str, arguments: list, sources: list, gradients: list) -> list:
        """Time a forward and its backward; return the outputs and the computed gradients.

        Args:
            name: the call's name.
            arguments: the forward's arguments.
            sources: the tensors whose gradients the backward computes.
            gradients: the gradients of the outputs.
        """
        with torch.enable_grad():
            self._clock.get_ahead(1)
            result = self._clock.time(partial(self._calls[name], *arguments))
            _, leaves = flatten(result)
            self._clock.get_ahead(1)
            computed = self._clock.time(partial(differentiate, leaves, sources, gradients))
        return [*leaves, *computed]

    def release(self, empty_cache: bool = False) -> None:
        """Free the results of the last request.

        Args:
            empty_cache: also give unused memory back to the GPU.
        """
        self._results = []
        if empty_cache and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def reset(self) -> None:
        """Forget the module and all that belongs to it so that another can be constructed.

        On a GPU no memory of the referee's stays open.
        """
        self._class = None
        self._module = None
        self._calls = {NOTHING: self._calls[NOTHING]}
        self._results = []
        if "torch._dynamo" in sys.modules:
            # Frees compiled modules. If no compiler is imported, there are none.
            torch.compiler.reset()
        gc.collect()
        self._mapping.forget()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def is_finite(self, inputs: list[dict]) -> dict:
        """Return whether all floats in the module's results for the first of the inputs are finite.

        Args:
            inputs: forms of arguments; the first alone is used.
        """
        _, leaves = flatten(self._module(*self._mapping.tensors(inputs[0])))
        floats = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
        return {"finite": all(map(_has_finite_elements, floats))}

    def count_saved_bytes(self, inputs: list[dict]) -> dict:
        """Return how many bytes a forward saves for its backward.

        Inputs and parameters do not count, for they are in memory anyway.

        Args:
            inputs: forms of arguments; the first alone is used.
        """
        arguments = recorded(self._mapping.tensors(inputs[0]))
        bytes_of: dict[int, int] = {}  # from a storage's address to its size

        def count(saved: torch.Tensor) -> torch.Tensor:
            storage = saved.untyped_storage()
            bytes_of[storage.data_ptr()] = storage.nbytes()
            return saved

        with torch.enable_grad(), saved_tensors_hooks(count, lambda saved: saved):
            self._module(*arguments)
        for x in (*arguments, *self._module.parameters()):
            if isinstance(x, torch.Tensor):
                bytes_of.pop(x.untyped_storage().data_ptr(), None)
        return {"bytes": sum(bytes_of.values())}

    def prepare_yardsticks(
        self, names: list[str], inputs: list[dict], copied_bytes: int, own_file: list[str]
    ) -> dict:
        """Set up the yardsticks; return their names and notes on those that are not possible.

        Args:
            names: the yardsticks to set up.
            inputs: forms of arguments; the first alone is used.
            copied_bytes: bytes that a copy reads; it writes as many.
            own_file: path and text (in base64) of the file with the problem's own yardsticks; empty
                if it has none.
        """
        # The yardsticks of an earlier request go first: new ones may need their memory.
        self._calls = {name: self._calls[name] for name in (MODULE, NOTHING)}
        own_yardsticks = None
        if own_file:
            path, text = own_file
            own_yardsticks = execute("yardsticks", path, base64.b64decode(text))
        arguments = self._mapping.tensors(inputs[0])
        calls: dict[str, Callable] = {}
        notes = []
        for name in names:
            try:
                calls |= yardsticks.make(
                    name, self._module, arguments, copied_bytes, own_yardsticks
                )
            except Exception as error:  # for example, Triton is not installed
                first_line = str(error).strip().partition("\n")[0]
                notes.append(f"{name} is left out: {first_line or type(error).__name__}")
        self._calls |= calls
        return {"names": list(calls), "notes": notes}

    def _state(self) -> dict[str, torch.Tensor]:
        """Return the module's parameters and buffers by name, the objects themselves."""
        return self._module.state_dict(keep_vars=True)

    def _read_at_once(self, returned: object) -> dict:
        """Read some elements of a call's results on the current stream, as its caller may do.

        If another stream still has to write the elements, and the call has not made the current
        stream wait for it, old values are read.

        Returns:
            The index of a result among the leaves, the elements' indices in the flattened result,
            and their bytes; an empty dictionary on a CPU, and if no result is a dense tensor.
        """
        if self._device.type == "cpu":
            return {}
        tensors = {}
        for result_index, leaf in enumerate(flatten(returned)[1]):
            x = plain(leaf)
            if x is not None and x.is_cuda and x.numel():
                tensors[result_index] = x
        if not tensors:
            return {}
        result_index, x = self._random.choice(list(tensors.items()))
        indices = [self._random.randrange(x.numel()) for _ in range(READ_AT_ONCE)]
        data: list[int] = []
        for index in indices:
            offset = x.storage_offset() + memory_offset(index, x.shape, x.stride())
            # A copy of one element. A kernel could start only when the other stream is nearly done.
            data += x.as_strided((1,), (1,), offset).view(torch.uint8).tolist()
        return {"result": result_index, "indices": indices, "bytes": bytes(data).hex()}

    def _keep_all(self, returned: list, outputs: list[dict] | None) -> list[dict]:
        """Keep and describe what each call has returned, see `_keep`."""
        output_forms = [None] * len(returned) if outputs is None else outputs
        return [self._keep(value, form) for value, form in zip(returned, output_forms, strict=True)]

    def _keep(self, returned: object, output_form: dict | None) -> dict:
        """Keep what a call has returned alive until `release`; return a description.

        Args:
            returned: a tensor, or nested lists and tuples.
            output_form: shared memory, into which the results are copied; or None.
        """
        structure, leaves = flatten(returned)
        descriptions = []
        for leaf in leaves:
            plain_tensor = plain(leaf)
            self._results += [leaf, plain_tensor]
            description = describe(leaf if plain_tensor is None else plain_tensor)
            if description.get("handle", "") is None:  # it may be in memory of the referee's
                description |= self._mapping.place_of(description["address"])
            descriptions.append(description)
        if output_form is not None:
            _copy_results(leaves, self._mapping.tensors(output_form))
            if self._device.type == "cuda":
                torch.cuda.synchronize()
        return {"structure": structure, "results": descriptions}


def _has_finite_elements(x: torch.Tensor) -> bool:
    """Return whether all elements are finite. A large tensor is checked part by part."""
    return all(bool(part.isfinite().all()) for part in x.reshape(-1).split(CHECKED_AT_ONCE))


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


def _copy_results(leaves: list, targets: list) -> None:
    """Copy results into shared memory.

    Results with another shape or dtype than their target are not copied: they are wrong anyway.
    """
    for leaf, target in zip(leaves, targets, strict=False):
        are_tensors = isinstance(leaf, torch.Tensor) and isinstance(target, torch.Tensor)
        if are_tensors and leaf.shape == target.shape and leaf.dtype == target.dtype:
            target.copy_(leaf.detach())


def _poison(size: int, device: torch.device) -> None:
    """Fill free memory with bytes 0xff, a NaN in every float dtype.

    The allocator probably uses this memory for a result of `size` bytes next. If the solution does
    not write its whole result, NaN stays in it.
    """
    if not size:
        return
    sizes = [size]
    if size < 1 << 20:  # malloc may take a free block that is somewhat larger
        sizes = list(range(size, size + 1024, 64))
    elif size < 1 << 25:  # malloc may take any of several free blocks, see FREED_FIRST_BYTES
        sizes = [size] * 4
    blocks = [torch.empty(n, dtype=torch.uint8, device=device).fill_(0xFF) for n in sizes]
    del blocks  # the memory is free again


@contextmanager
def _nan_in_new_tensors() -> Iterator[None]:
    """Make torch.empty fill its tensors with NaN, for the time of a `with` block.

    That is part of torch's deterministic mode. Its debug mode "warn" allows nondeterministic
    functions. `torch.use_deterministic_algorithms` would do the same, but imports torch's compiler.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
