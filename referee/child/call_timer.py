"""The calls of a request: they are run, and each is timed."""

from collections.abc import Callable
from functools import partial

import torch

from referee.child.clock import CpuClock, CudaClock
from referee.contestants.autograd import differentiate
from referee.contestants.descriptions import flatten


class CallTimer:
    """Runs and times the calls of one request after the other.

    `wake_threads` comes first, then the calls, then `finish`.

    Args:
        device: where the calls compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = CudaClock() if device.type == "cuda" else CpuClock()
        # On a CPU, torch fills this tensor with all of its threads: then they are awake before the
        # first call.
        self._thread_waker = torch.empty(1 << 18, device=device)

    def wake_threads(self) -> None:
        """Wake torch's threads."""
        self._thread_waker.fill_(0)

    def run_forwards(
        self, call: Callable, arguments_of_calls: list[list], are_recorded: bool = False
    ) -> list:
        """Time forwards; return what each returns.

        Args:
            call: the forward.
            arguments_of_calls: the arguments of each call.
            are_recorded: whether autograd records them.
        """
        self._clock.get_ahead()
        with torch.set_grad_enabled(are_recorded):
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

    def finish(self) -> dict:
        """Wait until the device has done all calls; return their times.

        Returns:
            "seconds" of each call, and the "backlog", which are the seconds of the wait.
        """
        backlog = self._clock.wait()
        return {"seconds": self._clock.seconds(), "backlog": backlog}
