"""The requests that a contestant's process answers: one method for each.

    import_file, set_precision, construct, adopt     make the module, before it is called
    run_forwards, run_steps                          call it, or a yardstick, and time the calls
    run_checked_forward, run_checked_step            call it once, in memory full of NaN
    is_finite, count_saved_bytes                     call it to find something out
    warm_compiler                                    makes a first program with torch.compile
    prepare_yardsticks, keep_yardsticks              make yardsticks; free those of no more use
    map_pages                                        maps new pages of the shared memory
    copy_results                                     copies kept results
    describe_buffers                                 tells where buffers are
    release, reset                                   free results; forget the module

A request has the name of the method and its arguments. The reply is what the method returns. Both
are JSON. Values of the referee's are sent as locations in shared memory (see `region`), results as
descriptions of where they are in this process's memory (see `descriptions.describe`).

The solution can change all that is in this process. So the referee believes nothing in a reply that
could make a result right or a time shorter.
"""

import base64
import gc
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress

import torch

from referee.call_names import MODULE, NOTHING
from referee.child.call_timer import CallTimer
from referee.child.held_module import HeldModule
from referee.child.kept_results import KeptResults, read_at_once
from referee.child.mapping import Mapping
from referee.child.nan_memory import (
    fill_free_memory_with_nan,
    fill_new_tensors_with_nan,
    set_malloc_threshold,
)
from referee.child.probes import count_saved_bytes, has_finite_results
from referee.child.yardsticks import YardstickMaker, warm_compiler
from referee.contestants.autograd import sources_of, with_gradient_leaves
from referee.contestants.execute import execute


class RequestHandler:
    """Answers the requests to one contestant: each names a public method.

    Args:
        mapping: the memory that the referee shares.
        device: where the module computes.
    """

    def __init__(self, mapping: Mapping, device: torch.device) -> None:
        self._mapping = mapping
        self._device = device
        self._held = HeldModule(mapping, device)
        self._results = KeptResults(mapping, device)
        set_malloc_threshold()
        self._timer = CallTimer(device)
        self._random = random.Random()  # the solution may seed torch's and Python's generators
        ready_result = torch.zeros(1, device=device)
        self._empty_call = lambda *inputs: ready_result
        self._yardsticks: dict[str, Callable] = {}

    @property
    def file(self) -> str:
        """The path of the imported file, "" before."""
        return self._held.file

    def import_file(self, **arguments: object) -> dict:
        """Execute the contestant's file, see `HeldModule.import_file`."""
        return self._held.import_file(**arguments)

    def construct(self, **arguments: object) -> dict:
        """Construct the module, see `HeldModule.construct`; the results of an old one are freed."""
        self._results.free()
        return self._held.construct(**arguments)

    def adopt(self, names: list[str], location: dict) -> None:
        """Move parameters and buffers into the referee's memory, see `HeldModule.adopt`."""
        self._held.adopt(names, location)

    def set_precision(self, setting: str) -> None:
        """Set torch's precision of float32 products for all later requests."""
        torch.set_float32_matmul_precision(setting)

    def run_forwards(
        self, call_name: str, inputs: list[dict], outputs: list[dict] | None = None
    ) -> dict:
        """Run a forward for each of the inputs; return seconds and descriptions of the results.

        Args:
            call_name: the call's name: MODULE, NOTHING or a yardstick, see `referee.call_names`.
            inputs: the location of each call's arguments.
            outputs: a location for each call, to which its results are copied; None if they need
                not be copied.
        """
        arguments_of_calls = [self._mapping.tensors(location) for location in inputs]
        self._timer.wake_threads()
        returned = self._timer.run_forwards(self._callable(call_name), arguments_of_calls)
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
        tensors = self._held.tensors(parameters)
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
        is_recorded: bool,
        outputs: list[dict] | None = None,
    ) -> dict:
        """Run one forward of the module in memory full of NaN; return a description of its results.

        The results of earlier requests are freed first, which saves a request for each case.
        The reply also has some elements of the results, see `kept_results.read_at_once`.

        Args:
            inputs: the location of the arguments, the only one of a list.
            result_bytes: the size of the results. As many bytes of free memory are filled with NaN.
            fill_new_tensors: whether torch fills every new tensor with NaN meanwhile.
            is_recorded: whether autograd records the forward.
            outputs: a location for a copy of the results, as in `run_forwards`.
        """
        self._results.free()
        arguments = self._mapping.tensors(inputs[0])
        if is_recorded:
            arguments = with_gradient_leaves(arguments)
        fill_free_memory_with_nan(result_bytes, self._device)
        self._timer.wake_threads()
        with fill_new_tensors_with_nan() if fill_new_tensors else nullcontext():
            returned = self._timer.run_forwards(self._held.module, [arguments], is_recorded)
        return self._reply_to_check(returned, outputs)

    def run_checked_step(
        self,
        inputs: list[dict],
        output_gradients: list[dict],
        parameters: list[str],
        result_bytes: int,
        outputs: list[dict] | None = None,
    ) -> dict:
        """Run one training step of the module in memory full of NaN; return a description.

        Args:
            inputs: the location of the arguments, the only one of a list.
            output_gradients: the location of the outputs' gradients, the only one of a list.
            parameters: names of the parameters whose gradients are computed.
            result_bytes: the size of the largest result or gradient. As many bytes of free memory
                are filled with NaN. (A step takes more memory than a forward, so there may be no
                room for all results.)
            outputs: a location for a copy of the results, as in `run_forwards`.
        """
        tensors = self._held.tensors(parameters)
        fill_free_memory_with_nan(result_bytes, self._device)
        self._timer.wake_threads()
        returned = [self._run_step(MODULE, inputs[0], output_gradients[0], tensors)]
        return self._reply_to_check(returned, outputs)

    def _callable(self, call_name: str) -> Callable:
        """Return the callable of a name: the module, the empty call or a yardstick."""
        if call_name == MODULE:
            return self._held.module
        if call_name == NOTHING:
            return self._empty_call
        return self._yardsticks[call_name]

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
        call = self._callable(call_name)
        arguments = with_gradient_leaves(self._mapping.tensors(location))
        gradients = self._mapping.tensors(gradients_location)
        if call_name == NOTHING:
            return self._timer.run_empty_step(call, arguments)
        sources = sources_of(arguments, parameters)
        return self._timer.run_step(call, arguments, sources, gradients)

    def _reply_to_check(self, returned: list, outputs: list[dict] | None) -> dict:
        """Keep what a check's one call has returned; return the reply.

        Some elements are read before `finish`, which waits for all streams. So the referee can see
        if another stream has still computed them.
        """
        elements = read_at_once(returned[0], self._device, self._random)
        self._timer.finish()
        return {"returned": self._results.keep_all(returned, outputs), "elements": elements}

    def map_pages(self, locations: list[dict]) -> None:
        """Map all pages of the shared memory at some locations, see `Mapping.map_pages`."""
        self._mapping.map_pages(locations)

    def copy_results(self, outputs: list[dict]) -> None:
        """Copy kept results to shared memory, see `KeptResults.copy_again`.

        Args:
            outputs: a location for each of the first calls whose results are kept.
        """
        self._results.copy_again(outputs)

    def describe_buffers(self, names: list[str], outputs: list[dict] | None = None) -> dict:
        """Keep buffers as they are now, as results are kept; return their descriptions.

        Args:
            names: the buffers' names.
            outputs: a location for their copies, as in `run_checked_forward`.
        """
        [description] = self._results.keep_all([self._held.tensors(names)], outputs)
        return {"buffers": description["results"]}

    def release(self, empty_cache: bool = False) -> None:
        """Free all kept results.

        Args:
            empty_cache: also give unused memory back to the GPU.
        """
        self._results.free()
        if empty_cache and self._device.type == "cuda":
            torch.cuda.empty_cache()

    def reset(self) -> None:
        """Forget the module and all that belongs to it so that another can be constructed.

        On a GPU it also closes its handles of the referee's memory.
        """
        self._held.forget()
        self._yardsticks = {}
        self._results.free()
        if "torch._dynamo" in sys.modules:
            # Frees compiled modules. If no compiler is imported, there are none.
            torch.compiler.reset()
        gc.collect()
        self._mapping.forget()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def is_finite(self, inputs: list[dict]) -> dict:
        """Return {"finite": True} if the module's results for the first inputs are finite."""
        return {"finite": has_finite_results(self._held.module, self._mapping.tensors(inputs[0]))}

    def count_saved_bytes(self, inputs: list[dict]) -> dict:
        """Return {"bytes": n}: a forward on the first of the inputs saves n for its backward.

        n is None if the forward raises, as it may because of the hooks that count them.
        """
        saved_bytes = None
        with suppress(Exception):
            saved_bytes = count_saved_bytes(self._held.module, self._mapping.tensors(inputs[0]))
        return {"bytes": saved_bytes}

    def warm_compiler(self) -> None:
        """Have torch.compile make its first program, which takes seconds longer than later ones."""
        with suppress(Exception):  # the yardstick then has a note on it
            warm_compiler(self._device)

    def prepare_yardsticks(
        self, names: list[str], inputs: list[dict], copied_bytes: int, yardstick_file: list[str]
    ) -> dict:
        """Set up the yardsticks; return their names and notes on those that are not possible.

        Args:
            names: the yardsticks to set up.
            inputs: locations of arguments; only the first is used.
            copied_bytes: bytes that a copy reads; it writes as many.
            yardstick_file: path and text (in base64) of the file with the problem's own yardsticks;
                empty if it has none.
        """
        # The yardsticks of an earlier request go first: new ones may need their memory.
        self._yardsticks = {}
        problems_yardsticks = None
        if yardstick_file:
            path, text = yardstick_file
            problems_yardsticks = execute("yardsticks", path, base64.b64decode(text))
        arguments = self._mapping.tensors(inputs[0])
        maker = YardstickMaker(self._held.module, arguments, copied_bytes, problems_yardsticks)
        self._yardsticks, notes = maker.make_all(names)
        return {"names": list(self._yardsticks), "notes": notes}

    def keep_yardsticks(self, names: list[str]) -> None:
        """Free all yardsticks but those with these names."""
        self._yardsticks = {name: self._yardsticks[name] for name in names}
