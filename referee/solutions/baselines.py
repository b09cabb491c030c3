"""Eager in processes of its own, beside which a solution is timed."""

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from referee.error_line import LONGEST_LINE
from referee.remote import EndedError, ForgedError, RaisedError, Remote, Server, restore, standing
from referee.solutions.verdict import ERROR, FoundError, Task


class Asked(NamedTuple):
    """A process to be prepared: `Remote.ask` and `Remote.put`."""

    ask: Callable[..., dict]
    put: Callable[..., None]


class Baselines:
    """Eager, and eager again, each in a process of its own; on a GPU, whose memory they share,
    in one. They start before the first solution does, which might change what they read; and so
    does the server, which forks them and the solutions' processes.

    Args:
        worker: of `child`.
        prepare: gives a new process the module, inputs and yardsticks, if it is not the one for
            "again"; the names of the yardsticks.
    """

    def __init__(
        self, task: Task, worker: str, prepare: Callable[[Task, "Asked", bool], list[str]]
    ) -> None:
        self._task, self._remotes, self._worker, self._prepare = task, [], worker, prepare
        self.server: Server | None = None
        self.names: list[str] = []
        self._standing: list[tuple] = []
        self.is_spent = False  # by timed steps, which leave too little for the next file

    def start(self) -> set[int]:
        """Starts and fills them, if they are not there; their process ids, and the server's."""
        if self.is_spent:
            self.close()
        self.server = self.server or Server()
        for turn in range(0 if self._remotes else 2 if self._task.device.type == "cpu" else 1):
            self._remotes.append(Remote(self.server, self._task.device, self._worker))
            asked = Asked(partial(self.ask, bool(turn)), self._remotes[-1].put)
            names = self._prepare(self._task, asked, bool(turn))
            self.names = self.names or names
        torch.zeros(1 << 18)  # where OpenMP's settings say so, it binds this thread now
        self._standing = self._standing or self._stand()
        return {self.server.pid, *(remote.pid for remote in self._remotes)}

    def ask(self, again: bool, op: str, **arguments: object) -> dict:
        """`Remote.ask` of one of the two.

        Raises:
            FoundError: it failed; it is torch's own code, so that the solution is not judged.
        """
        try:
            return self._remotes[-1 if again else 0].ask(op, **arguments)
        except (EndedError, ForgedError, RaisedError) as error:
            self.close()
            said = " ".join(map(str, error.args))
            reason = f"eager itself could not be timed: {type(error).__name__} {said}"
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
        for process in (*self._remotes, *filter(None, [self.server])):
            process.close()
        self._remotes, self._standing, self.server, self.is_spent = [], [], None, False

    def disturbed(self) -> str:
        """What somebody did to them, to the server or to this process, in words.

        Then they are of no use any more.
        """
        pairs = zip(self._stand(), self._standing, strict=False)
        found = ""
        if self.server and self.server.has_ended():
            found = "ended a process of the referee's"
        elif any(now != was for now, was in pairs if now):
            found = "changed the priority, CPUs or limits of other processes"
        if found:
            for was in self._standing[:1]:
                restore(was)
            self.close()
        return found

    def _stand(self) -> list[tuple]:
        processes = (*filter(None, [self.server]), *self._remotes)
        return [standing(pid) for pid in (os.getpid(), *(process.pid for process in processes))]
