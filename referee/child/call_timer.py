"""The calls of a request: they are run, each is timed, and what they return is kept."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from referee.child.clock import CpuClock, CudaClock
from referee.child.kept_results import KeptResults, read_at_once
from referee.child.nan_memory import fill_free_memory_with_nan, fill_new_tensors_with_nan
from referee.contestants.autograd import differentiate
from referee.contestants.described_results import flatten


class CallTimer:
    """Runs and times the calls of one request after the other.

    `prepare` comes first, then the calls, then `make_reply`.

    Args:
        results: keeps what the calls return.
        device: where they compute.
    """

    def __init__(self, results: KeptResults, device: torch.device) -> None:
        self._results = results
        self._device = device
        self._clock = CudaClock() if device.type == "cuda" else CpuClock()
        self._random = random.Random()  # torch's and Python's generators are the solution's
        # torch fills this tensor with all of its threads. So they are awake before the first call.
        self._thread_waker = torch.empty(1 << 18, device=device)

    def prepare(self, nan_bytes: int) -> None:
        """Fill so many bytes of free memory with NaN, 0 for none; wake torch's threads."""
        fill_free_memory_with_nan(nan_bytes, self._device)
        self._thread_waker.fill_(0)

    def run_forwards(
        self, call: Callable, arguments_of_calls: list[list], fill_new_tensors: bool
    ) -> list:
        """Time forwards that autograd does not record; return what each returns.

        Args:
            call: the forward.
            arguments_of_calls: the arguments of each call.
            fill_new_tensors: whether torch fills every new tensor with NaN meanwhile.
        """
        self._clock.get_ahead()
        mode = fill_new_tensors_with_nan() if fill_new_tensors else nullcontext()
        with torch.no_grad(), mode:
            return [self._clock.time(partial(call, *arguments)) for arguments in arguments_of_calls]

    def run_step(self, call: Callable, arguments: list, sources: list, gradients: list) -> list:
        """Time a forward and its backward; return the outputs and the computed gradients.

        Args:
            call: the forward.
            arguments: its arguments.
            sources: the tensors whose gradients the backward computes.
            gradients: the gradients of the outputs.
        """
        with torch.enable_grad():
            self._clock.get_ahead()
            result = self._clock.time(partial(call, *arguments))
            _, leaves = flatten(result)
            self._clock.get_ahead()
            computed = self._clock.time(partial(differentiate, leaves, sources, gradients))
        return [*leaves, *computed]

    def run_empty_step(self, empty_call: Callable, arguments: list) -> object:
        """Time the empty call as a forward, and nothing as its backward; return its result."""
        with torch.enable_grad():
            self._clock.get_ahead()
            result = self._clock.time(partial(empty_call, *arguments))
            self._clock.get_ahead()
            self._clock.time(lambda: None)
        return result

    def make_reply(self, returned: list, nan_bytes: int, outputs: list[dict] | None) -> dict:
        """Keep what the calls have returned; return the seconds, and descriptions of the results.

        Args:
            returned: what each call has returned.
            nan_bytes: as in `prepare`. If it is not 0, the reply also has some elements of the last
                call's results, see `kept_results.read_at_once`.
            outputs: a location for each call, to which its results are copied; None if the referee
                can read results where they are.
        """
        elements = {}
        if nan_bytes:  # before `wait`, which waits for all streams
            elements = read_at_once(returned[-1], self._device, self._random)
        backlog = self._clock.wait()
        seconds = self._clock.seconds()
        return {
            "seconds": seconds,
            "backlog": backlog,
            "returned": self._results.keep_all(returned, outputs),
            "elements": elements,
        }
