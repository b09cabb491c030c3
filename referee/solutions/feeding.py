"""Tensors on their way to a process, through the mapped file, and altered in part."""

import random
from collections.abc import Iterator

import torch

from referee.child.inputs import flat_bytes
from referee.remote import HALF
from referee.solutions.baselines import Asked
from referee.solutions.verdict import Task

PART = 16  # an alteration is a sixteenth of an input, or as much as fits in
LARGEST_PART = 1 << 22  # bytes


def pieces(x: torch.Tensor, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The bytes of a dense tensor in the order of its memory, so many at a time."""
    flat = flat_bytes(x)
    for start in range(0, len(flat), size):
        yield start, flat[start : start + size]


def place_of(shape: list[int]) -> list[list[int]]:
    """A random element of an input, as `ranges_of` has it; of square matrices on the diagonal."""
    place = [random.randrange(side) for side in shape]
    if len(shape) > 1 and shape[-1] == shape[-2]:
        place[-1] = place[-2]
    return [[at, at + 1] for at in place]


def ranges_of(shape: list[int], itemsize: int) -> list[list[list[int]]]:
    """Where an input of a shape is altered: the range in each dimension, once or twice."""
    ranges, left = [], itemsize
    for side in shape:
        left *= side
    for side in shape:
        left //= side
        most = max(1, min(side // PART, LARGEST_PART // left))
        start = random.randrange(side - most + 1)
        ranges.append([start, start + most])
        if side > 1 and left * most <= LARGEST_PART:
            break
    if len(shape) == 2 and shape[0] == shape[1] and len(ranges) == 1:
        return [ranges, [[0, shape[0]], *ranges]]
    return [ranges]


def send(process: Asked, slot: int | None, values: list) -> None:
    """Lays tensors into a process: into a slot of its ring, or among what is staged."""
    for i, x in enumerate(values):
        if not isinstance(x, torch.Tensor):
            continue
        for start, piece in pieces(x, HALF):
            process.put(piece)
            process.ask("feed", slot=slot, index=i, start=start, size=len(piece))


def fill_ring(process: Asked, task: Task) -> None:
    """Gives a process the inputs of the timed calls."""
    oracle = task.oracle
    process.ask("allocate", slots=oracle.slots, inputs=oracle.specs)
    for slot in range(oracle.slots):
        send(process, slot, oracle.draws[slot % len(oracle.draws)])
