"""The solutions that wait for a worker."""

from dataclasses import dataclass, replace
from pathlib import Path

from referee.grading import GradedFile


@dataclass(frozen=True)
class Task:
    """A problem and solutions to grade on it.

    Attributes:
        name: the problem's: the path of its file in the folder of references, without ".py".
        reference: its file.
        text: the content of that file.
        solutions: the files. They and `text` are read before any solution runs.
    """

    name: str
    reference: Path
    text: bytes
    solutions: list[GradedFile]


class FileQueue:
    """Gives each worker one solution after the other.

    A worker that begins a problem first times eager. So a worker keeps its problem while that has
    solutions left, and then begins a problem that no worker has begun. If there is none, it helps
    with the problem that has the most solutions left, so that no device is idle at the end.

    Args:
        tasks: the problems, in the order in which they are begun.
    """

    def __init__(self, tasks: list[Task]) -> None:
        self._waiting = list(tasks)  # each with the solutions that no worker has taken
        self._begun: set[str] = set()  # names of problems

    def __len__(self) -> int:
        """Return the number of solutions that no worker has taken."""
        return sum(len(task.solutions) for task in self._waiting)

    def take(self, latest_problem: str) -> Task | None:
        """Return a worker's next task, which has one solution; None if no solution is left.

        Args:
            latest_problem: the name of the problem of the worker's task before; "" for its first.
        """
        if not self._waiting:
            return None
        index = self._choose(latest_problem)
        task = self._waiting[index]
        first, *others = task.solutions
        if others:
            self._waiting[index] = replace(task, solutions=others)
        else:
            del self._waiting[index]
        self._begun.add(task.name)
        return replace(task, solutions=[first])

    def _choose(self, latest_problem: str) -> int:
        """Return the index of the problem from which a worker takes its next solution."""
        for index, task in enumerate(self._waiting):
            if task.name == latest_problem:
                return index
        for index, task in enumerate(self._waiting):
            if task.name not in self._begun:
                return index
        counts = [len(task.solutions) for task in self._waiting]
        return counts.index(max(counts))
