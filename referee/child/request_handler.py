"""The requests that a contestant's process answers: one method for each.

    import_file, set_precision, construct, adopt     make the module, before it is called
    run_forwards, run_steps                          call it, or a yardstick, and time the calls
    run_checked_forward, run_checked_step            call it once, in memory full of NaN
    is_finite, count_saved_bytes                     call it to find something out
    prepare_yardsticks                               makes yardsticks
    map_pages                                        maps the shared memory again
    copy_results                                     copies kept results as they are now
    release, reset                                   free results; forget the module

A request has the name of the method and its arguments. The reply is what the method returns. Both
are JSON. Values of the referee's are sent as locations in shared memory (see `region`), results as
descriptions of where they are in this process's memory (see `descriptions.describe`).

The referee believes none of these replies: the solution can change all that is in this process.
"""

import base64
import gc
import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from types import ModuleType

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from referee.child.call_timer import CallTimer
from referee.child.kept_results import KeptResults, read_at_once
from referee.child.nan_memory import (
    fill_free_memory_with_nan,
    fill_new_tensors_with_nan,
    set_malloc_threshold,
)
from referee.child.yardsticks import YardstickMaker
from referee.contestants.autograd import sources_of, with_gradient_leaves
from referee.contestants.descriptions import describe, flatten
from referee.contestants.execute import execute
from referee.contestants.forms import unpack
from referee.contestants.mapping import Mapping
from referee.names import MODULE, NOTHING

CHECKED_AT_ONCE = 1 << 24  # elements of a large tensor


class RequestHandler:
    """Holds one contestant's module, and answers the requests: each names a public method.

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
        self._callables: dict[str, Callable] = {}  # what can be called: see `referee.names`
        self._results = KeptResults(mapping, device)
        set_malloc_threshold()
        self._timer = CallTimer(device)
        self._random = random.Random()  # torch's and Python's generators are the solution's
        ready_result = torch.zeros(1, device=device)
        self._callables[NOTHING] = lambda *inputs: ready_result

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

        Raises:
            AttributeError: the file defines none of the names; the message has the last of them,
                which is the usual one.
        """
        self.file = path
        if builds:
            os.environ["TORCH_EXTENSIONS_DIR"] = builds
        sys.path.insert(0, str(Path(path).parent))
        sys.path.extend(folders)
        data = base64.b64decode(text)
        start = perf_counter()
        self._class = _find_class(execute("solution", path, data), class_names)
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
        self._results.free()
        module = self._class(*unpack(arguments))
        if not isinstance(module, nn.Module):
            type_name = type(module).__name__
            class_name = getattr(self._class, "__name__", "ModelNew")
            raise TypeError(f"{class_name} makes a {type_name}, not an nn.Module")
        module.to(self._device, getattr(torch, dtype) if dtype else None)
        self._module = self._callables[MODULE] = module
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

    def run_forwards(
        self, call_name: str, inputs: list[dict], outputs: list[dict] | None = None
    ) -> dict:
        """Run a forward for each of the inputs; return seconds and descriptions of the results.

        Args:
            call_name: the call's name: MODULE, NOTHING or a yardstick, see `referee.names`.
            inputs: the location of each call's arguments.
            outputs: a location for each call, to which its results are copied; None if the referee
                can read results where they are.
        """
        arguments_of_calls = [self._mapping.tensors(location) for location in inputs]
        self._timer.wake_threads()
        returned = self._timer.run_forwards(self._callables[call_name], arguments_of_calls)
        times = self._timer.finish()
        return times | {"returned": self._results.keep_all(returned, outputs)}

    def run_steps(
        self,
        call_name: str,
        inputs: list[dict],
        output_gradients: list[dict],
        parameters: list[str],
        outputs: list[dict] | None = None,
    ) -> dict:
        """Run a training step for each of the inputs; return seconds and descriptions.

        A step is a forward that autograd records, and its backward. Its results are the outputs of
        the forward, then the gradients of inputs and parameters.

        Args:
            call_name: the call's name, as in `run_forwards`.
            inputs: the location of each step's arguments.
            output_gradients: the location of the outputs' gradients for each step.
            parameters: names of the parameters whose gradients are computed.
            outputs: a location for copies of each step's results, as in `run_forwards`.
        """
        tensors = self._parameters(parameters)
        self._timer.wake_threads()
        returned = [
            self._run_step(call_name, location, gradients_location, tensors)
            for location, gradients_location in zip(inputs, output_gradients, strict=True)
        ]
        times = self._timer.finish()
        seconds = times["seconds"]  # of a forward, its backward, the next forward, ...
        times["seconds"] = {"forward": seconds[::2], "backward": seconds[1::2]}
        return times | {"returned": self._results.keep_all(returned, outputs)}

    def run_checked_forward(
        self,
        inputs: list[dict],
        result_bytes: int,
        fill_new_tensors: bool,
        outputs: list[dict] | None = None,
    ) -> dict:
        """Run one forward of the module in memory full of NaN; return a description of its results.

        The reply also has some elements of the results, see `kept_results.read_at_once`.

        Args:
            inputs: the location of the arguments, the only one of a list.
            result_bytes: the size of the results. As many bytes of free memory are filled with NaN.
            fill_new_tensors: whether torch fills every new tensor with NaN meanwhile.
            outputs: a location for a copy of the results, as in `run_forwards`.
        """
        arguments = self._mapping.tensors(inputs[0])
        fill_free_memory_with_nan(result_bytes, self._device)
        self._timer.wake_threads()
        with fill_new_tensors_with_nan() if fill_new_tensors else nullcontext():
            returned = self._timer.run_forwards(self._callables[MODULE], [arguments])
        return self._reply_to_check(returned, outputs)

    def run_checked_step(
        self,
        inputs: list[dict],
        output_gradients: list[dict],
        parameters: list[str],
        result_bytes: int,
        outputs: list[dict] | None = None,
    ) -> dict:
        """Run one training step of the module, as `run_checked_forward` runs a forward.

        Args:
            inputs: the location of the arguments, the only one of a list.
            output_gradients: the location of the outputs' gradients, the only one of a list.
            parameters: names of the parameters whose gradients are computed.
            result_bytes: the size of the largest result or gradient. As many bytes of free memory
                are filled with NaN.
            outputs: a location for a copy of the results, as in `run_forwards`.
        """
        tensors = self._parameters(parameters)
        fill_free_memory_with_nan(result_bytes, self._device)
        self._timer.wake_threads()
        returned = [self._run_step(MODULE, inputs[0], output_gradients[0], tensors)]
        return self._reply_to_check(returned, outputs)

    def _run_step(
        self,
        call_name: str,
        location: dict,
        gradients_location: dict,
        parameters: list[torch.Tensor],
    ) -> object:
        """Time a training step; return its results.

        Args:
            call_name: the call's name, as in `run_forwards`.
            location: the location of the step's arguments.
            gradients_location: the location of the outputs' gradients.
            parameters: those whose gradients are computed.
        """
        call = self._callables[call_name]
        arguments = with_gradient_leaves(self._mapping.tensors(location))
        gradients = self._mapping.tensors(gradients_location)
        if call_name == NOTHING:
            return self._timer.run_empty_step(call, arguments)
        sources = sources_of(arguments, parameters)
        return self._timer.run_step(call, arguments, sources, gradients)

    def _reply_to_check(self, returned: list, outputs: list[dict] | None) -> dict:
        """Keep what a check's one call has returned; return the reply.

        Some elements are read before `finish`, which waits for all streams: a result that another
        stream still computes is then found.
        """
        elements = read_at_once(returned[0], self._device, self._random)
        self._timer.finish()
        return {"returned": self._results.keep_all(returned, outputs), "elements": elements}

    def map_pages(self, locations: list[dict]) -> None:
        """Map all pages of the shared memory at some locations, see `Mapping.map_pages`."""
        self._mapping.map_pages(locations)

    def copy_results(self, outputs: list[dict]) -> None:
        """Copy the kept results of the first calls as they are now, see `KeptResults.copy_again`.

        Args:
            outputs: a location for each of these calls.
        """
        self._results.copy_again(outputs)

    def release(self, empty_cache: bool = False) -> None:
        """Free the results of the last request.

        Args:
            empty_cache: also give unused memory back to the GPU.
        """
        self._results.free()
        if empty_cache and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def reset(self) -> None:
        """Forget the module and all that belongs to it so that another can be constructed.

        On a GPU no memory of the referee's stays open.
        """
        self._class = None
        self._module = None
        self._callables = {NOTHING: self._callables[NOTHING]}
        self._results.free()
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
            inputs: locations of arguments; the first alone is used.
        """
        _, leaves = flatten(self._module(*self._mapping.tensors(inputs[0])))
        floats = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
        return {"finite": all(map(_has_finite_elements, floats))}

    def count_saved_bytes(self, inputs: list[dict]) -> dict:
        """Return how many bytes a forward saves for its backward.

        Inputs and parameters do not count, for they are in memory anyway.

        Args:
            inputs: locations of arguments; the first alone is used.
        """
        arguments = with_gradient_leaves(self._mapping.tensors(inputs[0]))
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
        self, names: list[str], inputs: list[dict], copied_bytes: int, yardstick_file: list[str]
    ) -> dict:
        """Set up the yardsticks; return their names and notes on those that are not possible.

        Args:
            names: the yardsticks to set up.
            inputs: locations of arguments; the first alone is used.
            copied_bytes: bytes that a copy reads; it writes as many.
            yardstick_file: path and text (in base64) of the file with the problem's own yardsticks;
                empty if it has none.
        """
        # The yardsticks of an earlier request go first: new ones may need their memory.
        self._callables = {name: self._callables[name] for name in (MODULE, NOTHING)}
        problems_yardsticks = None
        if yardstick_file:
            path, text = yardstick_file
            problems_yardsticks = execute("yardsticks", path, base64.b64decode(text))
        arguments = self._mapping.tensors(inputs[0])
        maker = YardstickMaker(self._module, arguments, copied_bytes, problems_yardsticks)
        callables: dict[str, Callable] = {}
        notes = []
        for name in names:
            try:
                callables |= maker.make(name)
            except Exception as error:  # for example, Triton is not installed
                first_line = str(error).strip().partition("\n")[0]
                notes.append(f"{name} is left out: {first_line or type(error).__name__}")
        self._callables |= callables
        return {"names": list(callables), "notes": notes}

    def _parameters(self, names: list[str]) -> list[torch.Tensor]:
        """Return the module's parameters that have these names."""
        state = self._state()
        return [state[name] for name in names]

    def _state(self) -> dict[str, torch.Tensor]:
        """Return the module's parameters and buffers by name, the objects themselves."""
        return self._module.state_dict(keep_vars=True)


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
