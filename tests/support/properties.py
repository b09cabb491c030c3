"""Strategies of the property-based tests: tensors of any layout, described by a few numbers.

Hypothesis draws descriptions, not tensors: it makes one that fails simpler, and prints it.
"""

from dataclasses import dataclass
from functools import cache
from itertools import permutations

import pytest
import torch

from problems.elementwise import special_values
from referee.comparison.compare import first_mismatch
from referee.reference.random_values import random_tensor
from tests.support.compare import BITS

hypothesis = pytest.importorskip("hypothesis")  # without it, tests that import this are skipped
assume = hypothesis.assume
given = hypothesis.given
settings = hypothesis.settings
st = hypothesis.strategies

# Sizes around the widths of vectors, masks and blocks, and around 512, the run of a CPU's pass.
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 513, 1000, 4097)
# Limits the elements of a view, and roughly the memory under it. An example then takes a few
# milliseconds.
MAX_ELEMENTS = 1 << 13
# Sizes for several threads, and for outputs of 32 MiB, which a CPU's kernels store past the caches.
LARGE_SIZES = (1, 2, 3, 5, 64, 1000, 70001, (1 << 20) + 5, (1 << 23) + 77)
LARGE_MAX_ELEMENTS = 9 << 20
LARGE = {"sizes": LARGE_SIZES, "max_elements": LARGE_MAX_ELEMENTS, "max_dims": 3}


@dataclass(frozen=True)
class Layout:
    """A view of flat memory; `stride` and `offset` are in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def extent(self) -> int:
        """The number of elements from the first one of the memory to the last one of the view."""
        if 0 in self.shape:
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in steps)


@dataclass(frozen=True)
class TensorDescription:
    """The description of a tensor. `make` makes the same tensor every time.

    Attributes:
        layout: shape, strides and offset.
        dtype: the dtype.
        values: the kind of values, one of
            "bits": random bits, among them NaN payloads and subnormals;
            "special": values at the edges of the dtype;
            "normal": normal numbers;
            "integers": -3 to 3, whose sums are exact in floating dtypes;
            "sprinkled": such integers, and at up to four places infinities, NaN and 0.
        seed: the seed of the values.
    """

    layout: Layout
    dtype: torch.dtype
    values: str
    seed: int

    def make_memory(self, device: str) -> torch.Tensor:
        """Make the memory under the view, and after it some elements that must stay untouched."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.layout.extent + 9,)
        if self.values == "bits":
            integer = BITS[self.dtype.itemsize]
            memory = random_tensor(shape, integer, torch.device("cpu"), generator).view(self.dtype)
        elif self.values == "special":
            choices = special_values(self.dtype)
            memory = choices[torch.randint(len(choices), shape, generator=generator)]
        elif self.values == "normal":
            memory = torch.randn(shape, generator=generator).to(self.dtype)
        else:
            memory = torch.randint(-3, 4, shape, generator=generator).to(self.dtype)
            if self.values == "sprinkled":
                where = torch.randint(*shape, (4,), generator=generator)
                memory[where] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0]).to(self.dtype)
        return memory.to(device)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the view of its memory."""
        return memory.as_strided(self.layout.shape, self.layout.stride, self.layout.offset)

    def make(self, device: str) -> torch.Tensor:
        """Make new memory and return the view of it."""
        return self.view(self.make_memory(device))


# The stride of a dimension, relative to the dimensions inside it. Hypothesis makes a failing
# example simpler by moving towards the first arrangement, "dense". That is listed three times so
# that it is drawn more often.
#
#   dense         the stride is the size of everything inside
#   gaps          two or three times that
#   padded        dense, and a few unused elements follow the whole dimension
#   expanded      the stride is 0
#   overlapping   the stride is 1 to 7, so elements may share memory
ARRANGEMENTS = ("dense", "dense", "dense", "gaps", "padded", "expanded", "overlapping")

# Strategies are cached: hypothesis takes longer to inspect a new one than to draw from it.
choice_of = cache(st.sampled_from)
integers = cache(st.integers)
booleans = st.booleans()


@cache
def orders(dims: int) -> tuple[tuple[int, ...], ...]:
    """Return the orders that so many dimensions may have in memory."""
    return tuple(permutations(range(dims)))


def draw_shape(draw, sizes=SIZES, max_elements=MAX_ELEMENTS, max_dims=5) -> tuple[int, ...]:
    """Draw a shape. One in 30 shapes has a size of 0.

    Args:
        draw: hypothesis's function.
        sizes: the sizes of which each dimension gets one.
        max_elements: the most elements; where a size would exceed it, 1 takes its place.
        max_dims: the most dimensions.
    """
    shape = []
    count = 1
    for _ in range(draw(integers(0, max_dims))):
        size = draw(choice_of(sizes))
        shape.append(size if size * count <= max_elements else 1)
        count *= shape[-1]
    if shape and draw(integers(0, 29)) == 29:
        shape[draw(integers(0, len(shape) - 1))] = 0
    return tuple(shape)


def draw_layout(draw, shape: tuple[int, ...], max_elements=MAX_ELEMENTS) -> Layout:
    """Draw a layout of a shape: dimensions in any order, each with one of ARRANGEMENTS.

    No gap is added where the memory has `max_elements` elements already.
    """
    stride = [0] * len(shape)
    step = 1
    for d in draw(choice_of(orders(len(shape)))):
        arrangement = draw(choice_of(ARRANGEMENTS))
        if arrangement == "expanded":
            continue
        if arrangement == "gaps" and step * shape[d] <= max_elements:
            step *= draw(integers(2, 3))
        stride[d] = draw(integers(1, 7)) if arrangement == "overlapping" else step
        step *= max(shape[d], 1)
        if arrangement == "padded" and step <= max_elements:
            step += draw(integers(1, 5))
    return Layout(shape, tuple(stride), draw(integers(0, 17)))


def draw_tensor(draw, dtypes, values, layout: Layout) -> TensorDescription:
    """Draw the description of a tensor with one of the dtypes and one of the kinds of values."""
    return TensorDescription(
        layout, draw(choice_of(dtypes)), draw(choice_of(values)), draw(integers(0, 2**31))
    )


@cache
@st.composite
def layouts(draw, **limits) -> Layout:
    """Draw layouts of any shape; the limits are those of `draw_shape`."""
    return draw_layout(draw, draw_shape(draw, **limits), limits.get("max_elements", MAX_ELEMENTS))


@cache
@st.composite
def tensors(draw, dtypes, values, **limits) -> TensorDescription:
    """Draw descriptions of tensors of any shape; the limits are those of `draw_shape`."""
    return draw_tensor(draw, dtypes, values, draw(layouts(**limits)))


def assert_same_layout(got, want):
    """Assert that two tensors have the same type, dtype, device, shape and strides."""
    assert type(got) is type(want)
    forms = [(x.dtype, x.device, x.shape, x.stride()) for x in (got, want)]
    assert forms[0] == forms[1]


def assert_same_outcome(got, want):
    """Assert that two results of `outcome` are the same.

    They are tensors of the same layout and bits, or errors with the same type and message.
    """
    if isinstance(want, torch.Tensor):
        assert_same_layout(got, want)
        problem = first_mismatch(got, want)
        assert problem is None, problem
    else:
        assert got == want
