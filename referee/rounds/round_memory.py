"""Decides if processes of a large problem keep unused GPU memory between the turns of a round.

A process that gives its memory back has to allocate it again in its next turn, while its clock
runs. To be fair, either all processes keep their memory, or all give it back.
"""

from collections.abc import Iterable
from time import sleep

from referee.contestants.contestant import Contestant
from referee.contestants.free_memory import SECONDS_TO_CLEAR, free_bytes
from referee.resources import Resources

SPARE_BYTES = 1 << 32  # this many bytes stay free for comparisons


class RoundMemory:
    """Decides after the first round, a warm-up, whether there is memory for all processes at once.

    In that round each process gives its memory back at the end of its turn. The referee measures
    how much memory it had taken.

    Args:
        resources: of the problem that is timed.
        contestants: the processes that take turns.
    """

    def __init__(self, resources: Resources, contestants: Iterable[Contestant]) -> None:
        self._resources = resources
        self._device = resources.problem.device
        self._all_keep = not resources.problem.gives_memory_back
        self._is_decided = self._all_keep  # otherwise the first round decides
        self._free_before_turn = 0
        self._contestants = list(contestants)
        self._taken: dict[int, int] = {}  # the most bytes in a turn, by the process's id

    def begin(self) -> None:
        """Have all processes give their unused memory back before the first round."""
        if not self._is_decided:
            for contestant in self._contestants:
                self._resources.free_all_unused(contestant)

    def begin_turn(self) -> None:
        """Note how much memory is free before a process is asked."""
        if not self._is_decided:
            self._free_before_turn = free_bytes(self._device)

    def end_turn(self, contestant: Contestant) -> None:
        """Have a process free its results, and its unused memory unless all keep theirs."""
        contestant.ask("release")
        if self._all_keep:
            return
        if not self._is_decided:
            taken = self._free_before_turn - free_bytes(self._device)
            pid = contestant.pid
            self._taken[pid] = max(taken, self._taken.get(pid, 0))
        self._resources.free_all_unused(contestant)
        sleep(SECONDS_TO_CLEAR)

    def end_round(self) -> None:
        """Decide, at the end of the first round, from what the processes have taken."""
        if self._is_decided:
            return
        needed = sum(self._taken.values()) + SPARE_BYTES
        self._all_keep = needed <= free_bytes(self._device)
        self._is_decided = True
