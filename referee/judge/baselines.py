"""Eager in processes of its own, beside which a solution is timed."""

import os
from collections.abc import Callable

import torch

from referee.judge.verdict import ERROR, FoundError, outcome
from referee.processes import restore, standing
from referee.remote import EndedError, ForgedError, RaisedError, Remote, Server


class Eager(Remote):
    """A process of eager's, which is torch's own code: if it fails, no solution is judged, and
    `fail` ends all of them.
    """

    has: object = None  # what its module and its parameters are

    def __init__(self, server: Server, device: torch.device, fail: Callable[[], None]) -> None:
        super().__init__(server, device)
        self._fail = fail

    def ask(self, op: str, **arguments: object) -> dict:
        try:
            return super().ask(op, **arguments)
        except (EndedError, ForgedError, RaisedError) as error:
            self._fail()
            _, why = outcome(error, "being timed")
            raise FoundError(ERROR, f"eager itself could not be timed: {why}") from None


class Baselines:
    """Eager, and eager again, each in a process of its own; on a GPU, whose memory they share,
    in one. They start before the first solution does, which might change what they read; and so
    does the server, which forks them and the solutions' processes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.remotes: list[Eager] = []  # the first for eager, the last for eager again
        self.server: Server | None = None
        self.names: list[str] = []  # of the yardsticks
        self.notes: list[str] = []
        self._standing: list[tuple] = []
        self.prepared: object = None

    def start(self) -> set[int]:
        """Starts them, if they are not there; their process ids, and the server's."""
        self.server = self.server or Server()
        for _ in range(0 if self.remotes else 2 if self._device.type == "cpu" else 1):
            self.remotes.append(Eager(self.server, self._device, self.close))
            self.remotes[-1].ask("left_on")  # it has set its own limits then
        torch.zeros(1 << 18)  # where OpenMP's settings say so, it binds this thread now
        self._standing = self._standing or self._stand()
        return {process.pid for process in self._processes()}

    def warm_compiler(self) -> None:
        """Has torch.compile get ready, where it is a yardstick, while others are asked."""
        if self._device.type == "cuda":
            self.remotes[0].begin("warm_compiler")

    def prepare(self, what: object, prepare: Callable[[Remote, bool], dict]) -> None:
        """Gives them what is timed, unless they have it: `prepare` gives it to a process, the
        yardsticks only if it is not the one for "again".
        """
        if what == self.prepared:
            return
        made = [prepare(remote, turn > 0) for turn, remote in enumerate(self.remotes)]
        self.names, self.notes = made[0]["names"], made[0]["notes"]
        self.prepared = what

    def close(self) -> None:
        """Ends them."""
        for process in reversed(self._processes()):
            process.close()
        self.remotes, self._standing, self.server, self.prepared = [], [], None, None

    def disturbed(self) -> str:
        """What somebody did to them, to the server or to this process, in words; ends them then."""
        pairs, found = zip(self._stand(), self._standing, strict=False), ""
        if self.server and self.server.poll() is not None:
            found = "ended a process of the referee's"
        elif any(now != was for now, was in pairs if now):
            found = "changed the priority, CPUs or limits of other processes"
        if found:
            for was in self._standing[:1]:
                restore(was)
            self.close()
        return found

    def _processes(self) -> list[Remote | Server]:
        return [*filter(None, [self.server]), *self.remotes]

    def _stand(self) -> list[tuple]:
        return [standing(pid) for pid in (os.getpid(), *(p.pid for p in self._processes()))]
