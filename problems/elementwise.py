"""Inputs for an elementwise function: values, shapes and layouts that kernels get wrong."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial

import torch

from problems.small_cases import Layout
from referee.comparison.compare import INTEGERS
from referee.reference.dtypes import DTYPES
from referee.reference.random_values import random_tensor

# Sizes around the widths of vectors, warps and blocks. The last shapes span several blocks or
# threads.
SHAPES = [
    (), (0,), (3, 0, 5), (1,), (2,), (3,), (7,), (15,), (16,), (17,), (31,), (32,), (33,),
    (127,), (128,), (129,), (1000,), (4097,), (1, 1), (5, 7), (2, 3, 4, 5, 6), (64, 257),
    (3, 4097), (300_007,),
]  # fmt: skip

MakeInput = Callable[[], torch.Tensor]  # returns a new tensor each time
# How often the special values are repeated. A dtype has 5, 7 or 18 of them. Repeated an odd number
# of times, they are no multiple of 4 elements, so the last block of most kernels is not whole.
REPETITIONS = 127
RANDOM_DRAWS = 3  # how many larger tensors of each dtype are drawn, each from a seed of its own
RANDOM_SHAPE = (64, 257)  # their shape
RANDOM_PATTERNS = 100_003  # bit patterns of a dtype that has too many to try them all
SPRINKLED = 4096  # elements that `sprinkle` overwrites at most

DENSE_LAYOUTS = [Layout(f"shape {list(shape)}", shape, lambda x: x) for shape in SHAPES]
LAYOUTS = [
    Layout("x[::2]", (257,), lambda x: x[::2]),
    Layout("x[::3, 1::2]", (33, 65), lambda x: x[::3, 1::2]),
    Layout("x[:, 1:]", (33, 65), lambda x: x[:, 1:]),
    Layout("x[:, 1:], large", (300, 401), lambda x: x[:, 1:]),
    Layout("x[:, :1]", (33, 65), lambda x: x[:, :1]),
    Layout("x[:, 5:5]", (33, 65), lambda x: x[:, 5:5]),
    Layout("x[1]", (3, 129), lambda x: x[1]),
    Layout("x[7], 0-d", (9,), lambda x: x[7]),
    Layout("transposed", (17, 129), lambda x: x.t()),
    Layout("transposed, large", (301, 401), lambda x: x.t()),
    Layout("transposed slice", (33, 65), lambda x: x[:, 1:].t()),
    Layout("permuted", (5, 6, 7), lambda x: x.permute(2, 0, 1)),
    Layout("permuted slice", (5, 6, 7), lambda x: x.permute(1, 2, 0)[1:, ::2]),
    Layout("channels_last", (2, 3, 5, 7), lambda x: x.to(memory_format=torch.channels_last)),
    Layout(
        "channels_last, one channel",
        (2, 1, 5, 7),
        lambda x: x.to(memory_format=torch.channels_last),
    ),
    Layout(
        "channels_last_3d", (2, 3, 4, 5, 3), lambda x: x.to(memory_format=torch.channels_last_3d)
    ),
    Layout("expanded rows", (1, 33), lambda x: x.expand(5, 33)),
    Layout("expanded columns", (33, 1), lambda x: x.expand(33, 5)),
    Layout("expanded scalar", (), lambda x: x.expand(3, 4)),
    Layout("overlapping", (40,), lambda x: x.unfold(0, 5, 2)),
    *(
        Layout(f"storage offset {k}", (1024 + k,), lambda x, k=k: x[k:])
        for k in (1, 2, 3, 4, 5, 8, 15)
    ),
    Layout("storage offset 1, 2-d", (1 + 12 * 33,), lambda x: x[1:].view(12, 33)),
]


@cache
def dtypes_of_relu(device: torch.device) -> dict[str, torch.dtype]:
    """Return those of DTYPES that torch.relu takes on the device, by name.

    It takes uint16, uint32 and uint64 only from torch 2.15 on.
    """
    dtypes = {}
    for name, dtype in DTYPES.items():
        with suppress(NotImplementedError):
            torch.relu(torch.zeros(1, dtype=dtype, device=device))
            dtypes[name] = dtype
    return dtypes


def small_inputs(device: torch.device, seed: int) -> Iterator[tuple[str, MakeInput]]:
    """Yield small inputs of every dtype, shape and layout, for a function of one tensor.

    Args:
        device: the device of the inputs.
        seed: the seed of the random inputs.

    Yields:
        A name, which begins with the dtype's name, and a function that returns the input.
    """
    for name, dtype in dtypes_of_relu(device).items():
        for kind, make in _inputs_of_dtype(dtype, device, seed):
            yield f"{name}, {kind}", make


def _inputs_of_dtype(
    dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[tuple[str, MakeInput]]:
    """Yield what `small_inputs` yields for one dtype; the names are without that of the dtype."""
    for k in range(RANDOM_DRAWS):
        generator = torch.Generator().manual_seed(seed + k)
        yield f"random, seed {seed + k}", partial(_draw_on_cpu, dtype, device, generator)
    values = special_values(dtype).repeat(REPETITIONS)
    yield "special values", partial(values.to, device, copy=True)
    generator = torch.Generator(device=device).manual_seed(seed)
    yield "bit patterns", partial(bit_patterns, dtype, device, generator)
    for layout in [*DENSE_LAYOUTS, *LAYOUTS]:
        yield layout.name, partial(_draw_in_layout, layout, dtype, device, generator)


def _draw_on_cpu(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Return random values that a seed gives on every device: they are drawn on the CPU."""
    return random_tensor(RANDOM_SHAPE, dtype, torch.device("cpu"), generator).to(device)


def _draw_in_layout(
    layout: Layout, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Return random values in a layout."""
    return layout.view(random_tensor(layout.shape, dtype, device, generator))


def special_values(dtype: torch.dtype) -> torch.Tensor:
    """Return the values at the edges of a dtype, on the CPU, `[n]`; floats of both signs."""
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        is_signed = limits.min < 0
        # Half of an unsigned dtype's range: only the highest bit is set.
        low = [limits.min, limits.min + 1, -1] if is_signed else [limits.max // 2 + 1]
        return torch.tensor([*low, 0, 1, limits.max - 1, limits.max], dtype=dtype)
    limits = torch.finfo(dtype)
    normal = limits.smallest_normal
    smallest = normal * limits.eps  # the smallest subnormal
    values = [0.0, smallest, normal - smallest, normal, limits.eps, 1.0, limits.max]
    values += [torch.inf, torch.nan]
    return torch.tensor([*values, *(-v for v in values)], dtype=dtype)


def bit_patterns(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Return all bit patterns of an 8- or 16-bit dtype, or many random ones of another.

    NaNs are among them.
    """
    integer = INTEGERS[dtype.itemsize]
    if dtype.itemsize <= 2:
        limits = torch.iinfo(integer)
        patterns = torch.arange(limits.min, limits.max + 1, device=device)
        return patterns.to(integer).view(dtype)
    return random_tensor((RANDOM_PATTERNS,), integer, device, generator).view(dtype)


def sprinkle(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Overwrite random elements of a contiguous x with special values, and return it.

    At most SPRINKLED elements are overwritten.
    """
    # This gives about SPRINKLED values; fewer for unsigned integers, which have only 5 to repeat.
    repetitions = SPRINKLED // 7
    values = special_values(x.dtype).to(x.device).repeat(repetitions)[:SPRINKLED]
    indices = torch.randint(x.numel(), values.shape, device=x.device, generator=generator)
    integer = INTEGERS[x.dtype.itemsize]  # torch cannot assign to elements of some unsigned dtypes
    x.view(-1).view(integer)[indices] = values.view(integer)
    return x
