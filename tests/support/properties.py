"""The property-based tests draw these: tensors of any layout, described by a few numbers."""

from dataclasses import dataclass
from functools import cache
from itertools import permutations

import pytest
import torch
from compare import BITS

from referee.cases import random, special_values
from referee.compare import first_mismatch

hypothesis = pytest.importorskip("hypothesis")  # without it, whoever imports this is skipped
assume, given, settings = hypothesis.assume, hypothesis.given, hypothesis.settings
st = hypothesis.strategies

# Around the widths of vectors, masks, blocks and strips.
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 513, 1000, 4097)
MOST = 1 << 13  # elements of a view and under it: an example takes a few milliseconds
# For several threads, and for outputs of 32 MiB, from which on a CPU's are stored past the caches.
LARGE_SIZES = (1, 2, 3, 5, 64, 1000, 70001, (1 << 20) + 5, (1 << 23) + 77)
LARGE_MOST = 9 << 20
LARGE = {"sizes": LARGE_SIZES, "most": LARGE_MOST, "most_dims": 3}


@dataclass(frozen=True)
class Layout:
    """A view of flat memory; `stride` and `offset` are in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def extent(self) -> int:
        """Elements from the first one of the memory to the last one of the view."""
        if 0 in self.shape:
            return self.offset
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in steps)


@dataclass(frozen=True)
class Drawn:
    """A tensor that is made when it is asked for, the same every time.

    Attributes:
        values: "bits" are random ones, NaN payloads and subnormals among them; "special" the values
            at the edges of the dtype; "normal"; "integers" -3 to 3, of which floating dtypes make
            exact sums; "sprinkled" the same with some infinities and NaN.
    """

    layout: Layout
    dtype: torch.dtype
    values: str
    seed: int

    def make_memory(self, device: str) -> torch.Tensor:
        """The memory under the view, and after it some elements that must stay untouched."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.layout.extent + 9,)
        if self.values == "bits":
            integer = BITS[self.dtype.itemsize]
            memory = random(shape, integer, torch.device("cpu"), generator).view(self.dtype)
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
        """The view of its memory."""
        return memory.as_strided(self.layout.shape, self.layout.stride, self.layout.offset)

    def make(self, device: str) -> torch.Tensor:
        """The view of new memory."""
        return self.view(self.make_memory(device))


# How a dimension lies in memory, those that are further in being laid out. The simplest is first.
ARRANGEMENTS = ("dense", "dense", "dense", "gaps", "padded", "expanded", "overlapping")

# One object for each choice: hypothesis looks into a new one for longer than it draws from it.
one_of = cache(st.sampled_from)
integers = cache(st.integers)
booleans = st.booleans()


@cache
def orders(dims: int) -> tuple[tuple[int, ...], ...]:
    """The orders that so many dimensions may have in memory."""
    return tuple(permutations(range(dims)))


def draw_shape(draw, sizes=SIZES, most=MOST, most_dims=5) -> tuple[int, ...]:
    """A shape out of `sizes`, of at most `most` elements, and now and then of none."""
    shape, count = [], 1
    for _ in range(draw(integers(0, most_dims))):
        size = draw(one_of(sizes))
        shape.append(size if size * count <= most else 1)
        count *= shape[-1]
    if shape and draw(integers(0, 29)) == 29:
        shape[draw(integers(0, len(shape) - 1))] = 0
    return tuple(shape)


def draw_layout(draw, shape: tuple[int, ...], most=MOST) -> Layout:
    """Any order of dimensions, overlaps, expansions, and gaps up to `most` elements of memory."""
    stride, step = [0] * len(shape), 1
    for d in draw(one_of(orders(len(shape)))):
        arrangement = draw(one_of(ARRANGEMENTS))
        if arrangement == "expanded":
            continue
        if arrangement == "gaps" and step * shape[d] <= most:
            step *= draw(integers(2, 3))
        stride[d] = draw(integers(1, 7)) if arrangement == "overlapping" else step
        step *= max(shape[d], 1)
        if arrangement == "padded" and step <= most:
            step += draw(integers(1, 5))
    return Layout(shape, tuple(stride), draw(integers(0, 17)))


def draw_tensor(draw, dtypes, values, layout: Layout) -> Drawn:
    """A tensor of one of the dtypes and of one kind of values."""
    return Drawn(layout, draw(one_of(dtypes)), draw(one_of(values)), draw(integers(0, 2**31)))


@cache
@st.composite
def layouts(draw, **limits) -> Layout:
    """Layouts of any shape."""
    return draw_layout(draw, draw_shape(draw, **limits), limits.get("most", MOST))


@cache
@st.composite
def tensors(draw, dtypes, values, **limits) -> Drawn:
    """Tensors of any shape."""
    return draw_tensor(draw, dtypes, values, draw(layouts(**limits)))


def assert_same_layout(got, want):
    """In type, dtype, device, shape and strides."""
    assert type(got) is type(want)
    forms = [(x.dtype, x.device, x.shape, x.stride()) for x in (got, want)]
    assert forms[0] == forms[1]


def assert_same(got, want):
    """Equal outcomes: tensors by what they are and by bits, else errors."""
    if isinstance(want, torch.Tensor):
        assert_same_layout(got, want)
        problem = first_mismatch(got, want)
        assert problem is None, problem
    else:
        assert got == want
