"""Eager in processes of its own, beside which a solution is timed."""

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from referee.error_line import LONGEST_LINE
from referee.remote import EndedError, ForgedError, RaisedError, Remote, restore, standing
from referee.solutions.verdict import ERROR, FoundError, Task


class Asked(NamedTuple):
    """A process to be prepared: `Remote.ask` and `Remote.put`."""

    ask: Callable[..., dict]
    put: Callable[..., None]


class Baselines:
    """Eager, and eager again, each in a process of its own; on a GPU, whose memory they share,
    in one. They start before the first solution does, which might change what they read.

    Args:
        worker: of `child`.
        prepare: gives a new process the module, inputs and yardsticks, if it is not the one for
            "again"; the names of the yardsticks.
    """

    def __init__(
        self, task: Task, worker: str, prepare: Callable[[Task, "Asked", bool], list[str]]
    ) -> None:
        self._task, self._remotes, self._worker, self._prepare = task, [], worker, prepare
        self.names: list[str] = []
        self._standing: list[tuple] = []

    def start(self) -> set[int]:
        """Starts and fills them, if they are not there; their process ids."""
        for turn in range(0 if self._remotes else 2 if self._task.device.type == "cpu" else 1):
            self._remotes.append(Remote(self._task.device, self._worker))
            asked = Asked(partial(self.ask, bool(turn)), self._remotes[-1].put)
            names = self._prepare(self._task, asked, bool(turn))
            self.names = self.names or names
        torch.zeros(1 << 18)  # where OpenMP's settings say so, it binds this thread now
        self._standing = self._standing or self._stand()
        return {remote.pid for remote in self._remotes}

    def ask(self, again: bool, op: str, **arguments: object) -> dict:
        """`Remote.ask` of one of the two.

        Raises:
            FoundError: it failed; it is torch's own code, so that the solution is not judged.
        """
        try:
            return self._remotes[-1 if again else 0].ask(op, **arguments)
        except (EndedError, ForgedError, RaisedError) as error:
            self.close()
            reason = f"eager itself could not be timed: {type(error).__name__} {error}"
            raise FoundError(ERROR, reason[:LONGEST_LINE]) from None

    def waited(self, again: bool) -> float:
        """`Remote.waited` of one of the two."""
        return self._remotes[-1 if again else 0].waited()

    def put(self, again: bool, *tensors: torch.Tensor) -> None:
        """`Remote.put` of one of the two."""
        self._remotes[-1 if again else 0].put(*tensors)

    def take(self, again: bool, *place: object) -> torch.Tensor:
        """`Remote.take` of one of the two."""
        return self._remotes[-1 if again else 0].take(*place)

    def close(self) -> None:
        """Ends them."""
        for remote in self._remotes:
            remote.close()
        self._remotes, self._standing = [], []

    def disturbed(self) -> bool:
        """Whether somebody changed how they, or this process, are scheduled and limited.

        Then they are of no use any more.
        """
        pairs = zip(self._stand(), self._standing, strict=False)
        changed = any(now != was for now, was in pairs if now)
        if changed:
            restore(self._standing[0])
            self.close()
        return changed

    def _stand(self) -> list[tuple]:
        return [standing(pid) for pid in (os.getpid(), *(remote.pid for remote in self._remotes))]
