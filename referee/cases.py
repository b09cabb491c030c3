"""Inputs for an elementwise function: values, shapes and layouts that kernels get wrong."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial

import torch

from referee.compare import INTEGERS
from referee.shared import dtype_name  # noqa: F401 - for those who take dtypes from here

# torch.relu takes the last three from torch 2.15 on, see `served`.
NAMES = "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in NAMES.split()}

# Around the widths of vectors, warps and blocks; the last ones span several blocks or threads.
SHAPES = [
    (), (0,), (3, 0, 5), (1,), (2,), (3,), (7,), (15,), (16,), (17,), (31,), (32,), (33,),
    (127,), (128,), (129,), (1000,), (4097,), (1, 1), (5, 7), (2, 3, 4, 5, 6), (64, 257),
    (3, 4097), (300_007,),
]  # fmt: skip

Make = Callable[[], torch.Tensor]  # an input, new each time
# A name, the shape of the dense tensor underneath, and the view taken of it.
LAYOUTS: list[tuple[str, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = [
    ("x[::2]", (257,), lambda x: x[::2]),
    ("x[::3, 1::2]", (33, 65), lambda x: x[::3, 1::2]),
    ("x[:, 1:]", (33, 65), lambda x: x[:, 1:]),
    ("x[:, 1:], large", (300, 401), lambda x: x[:, 1:]),
    ("x[:, :1]", (33, 65), lambda x: x[:, :1]),
    ("x[:, 5:5]", (33, 65), lambda x: x[:, 5:5]),
    ("x[1]", (3, 129), lambda x: x[1]),
    ("x[7], 0-d", (9,), lambda x: x[7]),
    ("transposed", (17, 129), lambda x: x.t()),
    ("transposed, large", (301, 401), lambda x: x.t()),
    ("transposed slice", (33, 65), lambda x: x[:, 1:].t()),
    ("permuted", (5, 6, 7), lambda x: x.permute(2, 0, 1)),
    ("permuted slice", (5, 6, 7), lambda x: x.permute(1, 2, 0)[1:, ::2]),
    ("channels_last", (2, 3, 5, 7), lambda x: x.to(memory_format=torch.channels_last)),
    ("channels_last, one channel", (2, 1, 5, 7),
     lambda x: x.to(memory_format=torch.channels_last)),
    ("channels_last_3d", (2, 3, 4, 5, 3), lambda x: x.to(memory_format=torch.channels_last_3d)),
    ("expanded rows", (1, 33), lambda x: x.expand(5, 33)),
    ("expanded columns", (33, 1), lambda x: x.expand(33, 5)),
    ("expanded scalar", (), lambda x: x.expand(3, 4)),
    ("overlapping", (40,), lambda x: x.unfold(0, 5, 2)),
    *((f"storage offset {k}", (1024 + k,), lambda x, k=k: x[k:]) for k in (1, 2, 3, 4, 5, 8, 15)),
    ("storage offset 1, 2-d", (1 + 12 * 33,), lambda x: x[1:].view(12, 33)),
]  # fmt: skip


@cache
def served(device: torch.device) -> dict[str, torch.dtype]:
    """Return those of DTYPES that torch.relu takes on the device, by name."""
    taken = {}
    for name, dtype in DTYPES.items():
        with suppress(NotImplementedError):
            torch.relu(torch.zeros(1, dtype=dtype, device=device))
            taken[name] = dtype
    return taken


def elementwise(device: torch.device, seed: int) -> Iterator[tuple[str, Make]]:
    """Yield small inputs of every dtype, shape and layout, for a function of one tensor."""
    views = [(f"shape {list(shape)}", shape, lambda x: x) for shape in SHAPES] + LAYOUTS
    for name, dtype in served(device).items():
        for k in range(3):
            generator = torch.Generator().manual_seed(seed + k)
            make = partial(random, (64, 257), dtype, torch.device("cpu"), generator)
            yield f"{name}, random, seed {seed + k}", lambda make=make: make().to(device)
        # A prime number of repetitions, so that every value visits every lane, and the tail.
        values = special_values(dtype).repeat(127)
        yield f"{name}, special values", partial(values.to, device, copy=True)
        generator = torch.Generator(device=device).manual_seed(seed)
        yield f"{name}, bit patterns", partial(bit_patterns, dtype, device, generator)
        for what, shape, view in views:
            make = partial(random, shape, dtype, device, generator)
            yield f"{name}, {what}", lambda make=make, view=view: view(make())


def refill(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Overwrite x: floats uniform in -1..1, integers uniform over their whole range.

    For floats in 0..1, as KernelBench draws them, ReLU would be the identity.
    """
    if x.is_floating_point():
        return x.uniform_(-1, 1, generator=generator)
    bits = x.view(INTEGERS[x.dtype.itemsize])  # torch draws no 64 unsigned bits
    limits = torch.iinfo(bits.dtype)
    end = None if bits.dtype == torch.int64 else limits.max + 1  # None: 2**63 is no int64
    bits.random_(limits.min, end, generator=generator)
    return x


def draw(x: torch.Tensor, seed: int, unit: bool = False) -> torch.Tensor:
    """Refill x under a seed; if `unit`, with floats uniform in 0..1, as KernelBench draws them."""
    generator = torch.Generator(device=x.device).manual_seed(seed)
    if unit and x.is_floating_point():
        return x.uniform_(0, 1, generator=generator)
    return refill(x, generator)


def redraw(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return other values of the same signs, each 0.5 to 1.5 times as large.

    Zeros stay zeros where other values are beside them, as in a mask; where all are zero, as in a
    bias at first, they become small random numbers.
    """
    generator = torch.Generator(device=values.device).manual_seed(seed)
    if not values.any():
        return torch.empty_like(values).normal_(generator=generator).mul_(0.1)
    return torch.empty_like(values).uniform_(0.5, 1.5, generator=generator).mul_(values)


def random(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Return a dense tensor filled by `refill`."""
    # Zeros touch its pages with all threads: drawn by one thread into untouched ones, 1.2 GB took
    # 5.1 instead of 2.1 s on a virtual machine whose host was busy.
    return refill(torch.zeros(shape, dtype=dtype, device=device), generator)


def special_values(dtype: torch.dtype) -> torch.Tensor:
    """Return the values at the edges of a dtype, each with its negative, on the CPU, `[n]`."""
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        low = [limits.min, limits.min + 1, -1] if limits.min else [limits.max // 2 + 1]
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
    """Return every pattern of an 8- or 16-bit dtype, else 100,003 random ones, NaNs too."""
    integer, half = INTEGERS[dtype.itemsize], 1 << 8 * dtype.itemsize - 1
    if dtype.itemsize <= 2:
        return torch.arange(-half, half, device=device).to(integer).view(dtype)
    return random((100_003,), integer, device, generator).view(dtype)


def sprinkle(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Overwrite up to 4,096 random elements of a contiguous x with the special values."""
    values = special_values(x.dtype).to(x.device).repeat(4096 // 7)[:4096]
    where = torch.randint(x.numel(), values.shape, device=x.device, generator=generator)
    bits = INTEGERS[x.dtype.itemsize]  # torch has no index_put for some unsigned dtypes
    x.view(-1).view(bits)[where] = values.view(bits)
    return x
