"""Some elements of a request's results, read before the clock stops."""

import math
import random
from contextlib import suppress
from typing import NamedTuple

import torch

from referee.bench import Bench
from referee.contestants.contestant import Contestant
from referee.contestants.descriptions import ResultIndex
from referee.contestants.reading import (
    MAX_NUMBER,
    BadDescriptionError,
    UnreadableError,
    as_indexable,
    memory_offset,
    validated,
)

READ_ELEMENTS = 32  # of a request's results, in all
# The reason of a verdict if an element differs.
CHANGES_LATE = (
    "result is not complete when its clock stops; finish all streams and threads before returning"
)


class _Elements(NamedTuple):
    """Some elements of a result.

    Attributes:
        indices: their indices in the flattened result.
        values: the elements.
    """

    indices: torch.Tensor
    values: torch.Tensor


class EarlyElements:
    """Elements of results that are read after the reply and before the clock stops.

    They are chosen when the reply has arrived, and must be the same when the whole results are
    read: see README.md, "Why is a lazy result no gain?".

    Where a process copies its results, the elements are those of the copies, which are in the
    referee's memory. The process runs the copies, so it may queue them as well.

    On a CPU nothing is read in place, because a stopped process computes nothing.

    Args:
        bench: the bench of the problem that is timed.
        contestant: the process whose results are read.
    """

    def __init__(self, bench: Bench, contestant: Contestant) -> None:
        self._bench = bench
        self._is_on_gpu = bench.problem.device.type == "cuda"
        self._reader = contestant.reader
        self._elements: dict[ResultIndex, _Elements] = {}

    def read(self, reply: dict) -> None:
        """Read some elements of one result of each call, chosen at random."""
        returned = reply["returned"]
        count = max(1, READ_ELEMENTS // max(len(returned), 1))
        if self._bench.memory.are_results_copied:
            # Empty calls and yardsticks copy nothing: old copies are read, which takes as long.
            for call_index, region in enumerate(self._bench.memory.outputs[: len(returned)]):
                self._read_copy(call_index, region.tensors, count)
        elif self._is_on_gpu:
            for call_index, returned_by_call in enumerate(returned):
                with suppress(BadDescriptionError, UnreadableError):  # the comparison reports it
                    self._read_in_place(call_index, returned_by_call["results"], count)

    def _read_copy(self, call_index: int, copies: list[torch.Tensor], count: int) -> None:
        """Read some elements of the copy of one of a call's results."""
        readable = [i for i, copy in enumerate(copies) if copy.numel()]
        if not readable:
            return
        result_index = random.choice(readable)
        copy = copies[result_index]
        indices = torch.randint(copy.numel(), (count,))
        offsets = [memory_offset(i, copy.shape, copy.stride()) for i in indices.tolist()]
        # A view of the memory from the first element on: `reshape` might copy the whole tensor.
        flat = as_indexable(copy.as_strided((max(offsets) + 1,), (1,)))
        values = flat[torch.tensor(offsets, device=copy.device)].cpu()
        self._elements[ResultIndex(call_index, result_index)] = _Elements(indices, values)

    def _read_in_place(self, call_index: int, descriptions: list[dict], count: int) -> None:
        """Read some elements of one of a call's results in the process's memory."""
        readable = [i for i, description in enumerate(descriptions) if description.get("handle")]
        if not readable:
            return
        result_index = random.choice(readable)
        size = math.prod(validated(descriptions[result_index])["shape"])
        if 0 < size < MAX_NUMBER:
            indices = torch.randint(size, (count,))
            values = self._reader.read_elements(descriptions[result_index], indices).cpu()
            self._elements[ResultIndex(call_index, result_index)] = _Elements(indices, values)

    def differs(self, index: ResultIndex, late_result: torch.Tensor) -> bool:
        """Return whether the elements that were read early have other bits in the whole result.

        Args:
            index: the result's index in the reply.
            late_result: the result as it was read after the clock had stopped.
        """
        early = self._elements.get(index)
        if early is None:
            return False
        flat = as_indexable(late_result).reshape(-1)
        late_values = flat[early.indices.to(flat.device)].cpu()
        return not torch.equal(late_values.view(torch.uint8), early.values.view(torch.uint8))
