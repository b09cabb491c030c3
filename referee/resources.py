"""The resources of a problem: shared memory, eager's processes, and the plan for timing."""

from typing import NamedTuple

from referee.contestants import processes, wall_trial
from referee.contestants.contestant import Contestant
from referee.contestants.server import Server
from referee.eager_processes import EagerProcesses, KeptEagerProcess
from referee.reference.problem import Problem
from referee.request_memory import RequestMemory
from referee.verdict import NotCorrectError
from referee.verdict_words import ERROR

# If the inputs of a call have at most this many bytes, as in small cases, a process keeps its
# unused memory even if the problem is large: the other processes have enough without it.
SMALL_REQUEST = 1 << 28


class Plan(NamedTuple):
    """How a problem is timed.

    Attributes:
        call_count: the number of calls of one request.
        seconds_alone: eager's mean seconds of a call, one number for each of some requests before
            any solution had started.
    """

    call_count: int
    seconds_alone: list[float]


class Resources:
    """The resources that all gradings of one problem share.

    The problem and the server are attributes, too.

    Args:
        problem: the problem that is graded.
        server: the process from which all others are forked.
        kept_process: see `EagerProcesses`.

    Attributes:
        memory: the shared memory that requests use.
        eager: eager's processes.
        plans: how the problem is timed, by setting; `Engine.prepare` makes them.
    """

    def __init__(
        self, problem: Problem, server: Server, kept_process: KeptEagerProcess | None = None
    ) -> None:
        self.problem = problem
        self.server = server
        self.memory = RequestMemory(problem.device)
        self.eager = EagerProcesses(problem, server, self.memory, kept_process)
        self.plans: dict[str, Plan] = {}

    @property
    def plan(self) -> Plan:
        """How the problem is timed under its present setting."""
        return self.plans[self.problem.setting]

    def check_system(self) -> None:
        """Raise NotCorrectError if the kernel does not say which processes a process has started.

        Then a solution's helper processes could not be stopped together with the solution.
        """
        if not processes.lists_children():
            reason = "the kernel does not list children in /proc: it needs CONFIG_PROC_CHILDREN"
            raise NotCorrectError(ERROR, reason)

    def try_walls(self) -> None:
        """Try whether contestants on a GPU can have walls; if not, this server gives them none.

        A wall is a PID namespace of the process's own. Walls are impossible where CUDA IPC does not
        work through them. The trial must come before eager and all solutions start. It is made once
        for each GPU: `find_obstacle` remembers.
        """
        device = self.problem.device
        if self.server.gives_walls and device.type == "cuda":
            self.server.gives_walls = wall_trial.find_obstacle(self.server, device) is None

    def free_results(self, contestant: Contestant) -> None:
        """Have a process free the results of its last request, which have been read.

        If problem and request are large, the process also gives its unused memory back to the GPU.
        """
        # A region has all inputs of a call.
        if self.problem.gives_memory_back and self.memory.inputs[0].size > SMALL_REQUEST:
            self.free_all_unused(contestant)
        else:
            contestant.ask("release")

    def free_all_unused(self, contestant: Contestant) -> None:
        """Have a process free its results and give all its unused memory back to the GPU."""
        contestant.reader.forget()  # what the referee's process still maps cannot be given back
        contestant.ask("release", empty_cache=True)

    def close(self) -> None:
        """End eager's processes and free the shared memory."""
        self.eager.close()
        self.memory.close()
