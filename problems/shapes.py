"""Records of the shapes at which problems are measured."""

from typing import NamedTuple


class RowNeeds(NamedTuple):
    """A row of x, and the memory that a forward needs.

    Attributes:
        row_shape: the sizes of x without the first one, which is the number of rows.
        row_bytes: the memory for each row, in each of the tensors that `BUFFERS` of
            referee/contestants/free_memory.py counts.
        fixed_bytes: the memory that does not depend on the rows, such as that of the weight.
    """

    row_shape: tuple[int, ...]
    row_bytes: int
    fixed_bytes: int


class SweepShape(NamedTuple):
    """One shape of x in a sweep.

    Attributes:
        shape: of x.
        elements: how many elements the largest tensor of a call has.
    """

    shape: tuple[int, ...]
    elements: int
