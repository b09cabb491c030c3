"""Some elements of a request's results, read before the clock stops."""

import random
import secrets

import torch

from referee.contestants.contestant import Contestant
from referee.contestants.descriptions import ResultIndex
from referee.contestants.reading import (
    MAX_NUMBER,
    BadDescriptionError,
    SomeElements,
    as_indexable,
    bytes_of_elements,
    layout_of,
    memory_offset,
)
from referee.resources import Resources

# So many elements of a request's results are read, and one in addition of each small result that
# would have none (`choose_elements`).
READ_ELEMENTS = 32
# The reason of a verdict if an element differs.
CHANGES_LATE = (
    "result is not complete when its clock stops; finish all streams and threads before returning"
)


class EarlyElements:
    """Elements of results that are read after the reply and before the clock stops.

    They are chosen when the reply has arrived, and must be the same when the whole results are
    read: see PROTECTION.md, "Elements that are read early".

    Where a process copies its results, the elements are those of the copies, which are in the
    referee's memory. The process runs the copies, so it may queue them as well.

    On a CPU they are read, too: a stopped process computes nothing, but a GPU can still write a
    result, and so can asynchronous input of the kernel.

    Args:
        resources: of the problem that is timed.
        contestant: the process whose results are read.
    """

    def __init__(self, resources: Resources, contestant: Contestant) -> None:
        self._resources = resources
        self._reader = contestant.reader
        # No solution can foresee its seed. The system's own generator would take longer, and the
        # elements are chosen while the clock runs.
        self._generator = random.Random(secrets.randbits(128))
        self._indices: dict[ResultIndex, list[int]] = {}
        # The bytes of the elements with these indices; none of a result that cannot be read.
        self._bytes: dict[ResultIndex, torch.Tensor] = {}

    def read(self, reply: dict) -> None:
        """Read some elements of the results of all calls, chosen at random."""
        returned = reply["returned"]
        count = max(1, READ_ELEMENTS // max(len(returned), 1))
        if self._resources.memory.are_results_copied:
            # Empty calls and yardsticks copy nothing: old copies are read, which takes as long.
            for call_index, region in enumerate(self._resources.memory.outputs[: len(returned)]):
                self._read_copies(call_index, region.tensors, count)
        else:
            self._read_in_place(returned, count)

    def _read_copies(self, call_index: int, copies: list[torch.Tensor], count: int) -> None:
        """Read some elements of the copies of a call's results."""
        sizes = {i: (copy.numel(), copy.itemsize) for i, copy in enumerate(copies) if copy.numel()}
        for result_index, indices in choose_elements(sizes, count, self._generator).items():
            copy = copies[result_index]
            offsets = [memory_offset(i, copy.shape, copy.stride()) for i in indices]
            # A view of the memory from the first element on: `reshape` might copy the whole tensor.
            flat = copy.as_strided((max(offsets) + 1,), (1,)).view(torch.uint8)
            index = ResultIndex(call_index, result_index)
            self._indices[index] = indices
            self._bytes[index] = torch.cat(bytes_of_elements(flat, offsets, copy.itemsize)).cpu()

    def _read_in_place(self, returned: list[dict], count: int) -> None:
        """Read some elements of the results of all calls in the process's memory."""
        wanted = {}
        for call_index, returned_by_call in enumerate(returned):
            descriptions = returned_by_call["results"]
            sizes = _sizes_of(descriptions)
            for result_index, indices in choose_elements(sizes, count, self._generator).items():
                index = ResultIndex(call_index, result_index)
                self._indices[index] = indices
                wanted[index] = SomeElements(descriptions[result_index], indices)
        # The comparison reports why a result cannot be read.
        self._bytes = self._reader.read_elements(wanted)

    def differs(self, index: ResultIndex, late_result: torch.Tensor) -> bool:
        """Return whether the elements that were read early have other bits in the whole result.

        Args:
            index: the result's index in the reply.
            late_result: the result as it was read after the clock had stopped.
        """
        if index not in self._bytes:
            return False
        flat = as_indexable(late_result).reshape(-1)
        late_values = flat[torch.tensor(self._indices[index], device=flat.device)].cpu()
        return not torch.equal(late_values.view(torch.uint8), self._bytes[index])


def choose_elements(
    sizes: dict[int, tuple[int, int]], count: int, generator: random.Random
) -> dict[int, list[int]]:
    """Choose elements of a call's results at random.

    Each byte of all results has the same chance. Of a result that would have none, one element is
    chosen in addition: the work of a small result, such as the sum of a large tensor, may be large.

    Args:
        sizes: each result's number of elements, which is not 0, and the bytes of an element.
        count: how many elements are chosen, without those that are added.
        generator: chooses them.

    Returns:
        Indices of elements in the flattened result, for each result.
    """
    if not sizes:
        return {}
    all_bytes = [numel * item_bytes for numel, item_bytes in sizes.values()]
    chosen = generator.choices(list(sizes), all_bytes, k=count)
    indices = {}
    for result_index, (numel, _) in sizes.items():
        its_count = max(1, chosen.count(result_index))
        indices[result_index] = [generator.randrange(numel) for _ in range(its_count)]
    return indices


def _sizes_of(descriptions: list[dict]) -> dict[int, tuple[int, int]]:
    """Return the number of elements and the bytes of one for each result that can be read."""
    sizes = {}
    for result_index, description in enumerate(descriptions):
        try:
            layout = layout_of(description)
        except BadDescriptionError:  # the comparison reports it
            continue
        if 0 < layout.numel < MAX_NUMBER:
            sizes[result_index] = layout.numel, layout.dtype.itemsize
    return sizes
