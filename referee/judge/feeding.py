"""Inputs and parameters on their way to a process."""

import random
from collections.abc import Iterator

import torch

from referee.cases import dtype_name
from referee.child.feed import flat_bytes
from referee.judge.oracle import SEEDS, Oracle, form_of
from referee.judge.verdict import Task
from referee.remote import HALF, Remote, pack


def pieces(x: object, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The bytes of a tensor's memory, so many at a time; none of other values."""
    flat = flat_bytes(x) if isinstance(x, torch.Tensor) else ()
    for start in range(0, len(flat), size):
        yield start, flat[start : start + size]


def send(process: Remote, slot: int | None, values: list) -> None:
    """Lays tensors into a process: into a slot of its ring, or among what is staged."""
    if slot is None:
        process.ask("stage", tensors=pack(form_of(values)))
    for i, x in enumerate(values):
        for start, piece in pieces(x, HALF):
            process.put(piece)
            process.ask("feed", slot=slot, index=i, start=start, size=len(piece))


def holds(process: Remote, values: list) -> bool:
    """Whether the inputs in the first slot of a process's ring are these, to the last bit."""
    for i, x in enumerate(values):
        for start, mine in pieces(x, HALF):
            process.ask("read", index=i, start=start, stop=start + len(mine), is_input=True)
            if not torch.equal(process.take(0, [len(mine)], torch.uint8), mine):
                return False
    return True


def name_source(process: Remote, task: Task) -> None:
    """Tells a process where the inputs, and the reference's module, come from."""
    oracle, file = task.oracle, task.oracle.file
    path = None if file.is_ours else str(file.path.resolve())
    about = {"shape": list(oracle.shape), "dtype": dtype_name(oracle.dtype)}
    process.ask("name_source", path=path, problem=task.name, **about)


class Renewal:
    """Values of inputs and parameters, all new, which a process and the reference get alike."""

    def __init__(self, oracle: Oracle, parameters: list[tuple[str, int]], inputs: bool) -> None:
        self._oracle, self._parameters = oracle, parameters
        self.seed = random.randrange(SEEDS)
        self.draw = random.randrange(SEEDS) if inputs else None
        self._sent = oracle.file.draw(self.draw) if inputs and not oracle.repeats else None
        self._there: list = []

    def give(self, process: Remote, slot: int, is_timed: bool) -> None:
        """To a process, for a slot of its ring."""
        if self._sent:
            send(process, None, self._sent)
        draw = None if self._sent else self.draw
        about = {"slot": slot, "draw": draw, "seed": self.seed, "at": random.random()}
        process.ask("renew", **about, names=self._parameters, is_timed=is_timed)

    def inputs(self) -> list:
        """On the device."""
        if not self._there:
            oracle = self._oracle
            self._there = oracle.there(self._sent) if self._sent else oracle.draw(self.draw)
        return self._there
