"""No two results of a call share memory, unless the same two of the reference do.

A module that returns one tensor as two results saves a copy, but whoever writes into one of them
changes the other.
"""

import math
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from referee.contestants.reading import BadDescriptionError, Layout, layout_of, memory_offset
from referee.grading import Grading
from referee.verdict import NotCorrectError
from referee.verdict_words import WRONG

# So many elements of a result are looked up in the other one, chosen at random.
LOOKED_UP = 32


class _Place(NamedTuple):
    """Where a result is in the solution's process.

    Attributes:
        result_index: which of the call's results it is.
        allocation: on a GPU, the handle of the memory that contains it; "" on a CPU.
        start, end: its first byte, and the one after its last. On a GPU they are counted from the
            start of the allocation; on a CPU they are addresses.
        item_bytes: the bytes of an element.
        shape, strides: of the result.
    """

    result_index: int
    allocation: str
    start: int
    end: int
    item_bytes: int
    shape: list[int]
    strides: list[int]

    def some_addresses(self) -> list[int]:
        """Return the first bytes of some elements."""
        numel = math.prod(self.shape)
        generator = random.SystemRandom()
        indices = [generator.randrange(numel) for _ in range(LOOKED_UP)]
        offsets = [memory_offset(index, self.shape, self.strides) for index in indices]
        return [self.start + offset * self.item_bytes for offset in offsets]

    def has_element_at(self, address: int) -> bool:
        """Return whether a byte belongs to an element, and not to a gap between elements.

        All smaller strides together reach less far than one step of a larger one, because
        `check_elements_apart` has refused other strides. (It allows them only if the reference's
        elements share memory, too; one may then be missed.) So there is one way to an element: the
        largest stride takes as many steps as fit, then the next one.

        For example, the strides [8, 1] of the shape [3, 4] leave gaps of 4 elements. An address 9
        elements after the start is row 1, column 1. One of 13 would be column 5: it is in a gap.
        """
        rest = (address - self.start) // self.item_bytes
        if rest < 0:
            return False
        for stride, side in sorted(zip(self.strides, self.shape, strict=True), reverse=True):
            if stride > 0:
                rest -= min(rest // stride, side - 1) * stride
        return rest == 0


def check_results_apart(grading: Grading, descriptions: list[dict], case_name: str) -> None:
    """Check that no two results of a call share memory, unless the same two of the reference do.

    Gradients are not checked: autograd itself returns one tensor as two of them.

    Args:
        grading: the file under grading.
        descriptions: describe the results.
        case_name: the case in messages.
    """
    for one, other in _pairs_with_common_span(_places(grading, descriptions)):
        first, second = sorted([one.result_index, other.result_index])
        may_share = (first, second) in grading.problem.sharing_pairs
        if not may_share and _share_elements(one, other):
            reason = (
                f"results {first} and {second} share memory, the reference's do not; return a copy"
            )
            raise NotCorrectError(WRONG, f"{case_name}: {reason}")


def _places(grading: Grading, descriptions: list[dict]) -> list[_Place]:
    """Return where results are.

    Empty results are left out, and descriptions that fit no tensor: such a result cannot be read
    either, and the reading says why.
    """
    places = []
    for result_index, description in enumerate(descriptions):
        with suppress(BadDescriptionError):
            place = _place_of(grading, result_index, layout_of(description))
            if place.end > place.start:
                places.append(place)
    return places


def _place_of(grading: Grading, result_index: int, layout: Layout) -> _Place:
    """Return where a result is."""
    allocation, start = "", layout.address
    handle, byte_offset = layout.handle, layout.byte_offset
    # Without a handle the referee reads a copy of the result.
    if grading.device.type == "cuda" and isinstance(handle, str) and type(byte_offset) is int:
        allocation, start = handle, byte_offset
    end = start + layout.span
    item_bytes = layout.dtype.itemsize
    return _Place(result_index, allocation, start, end, item_bytes, layout.shape, layout.strides)


def _pairs_with_common_span(places: list[_Place]) -> Iterator[tuple[_Place, _Place]]:
    """Yield the pairs of places that have a byte between their starts and ends in common."""
    in_order = sorted(places, key=lambda place: (place.allocation, place.start))
    for position, one in enumerate(in_order):
        for other in in_order[position + 1 :]:
            if other.allocation != one.allocation or other.start >= one.end:
                break
            yield one, other


def _share_elements(one: _Place, other: _Place) -> bool:
    """Return whether some elements of one result are in the memory of the other's."""
    one_is_in_other = any(other.has_element_at(address) for address in one.some_addresses())
    other_is_in_one = any(one.has_element_at(address) for address in other.some_addresses())
    return one_is_in_other or other_is_in_one
