"""Random values for inputs, parameters and gradients, under seeds that no solution can foresee.

`draw_into` and `random_tensor` draw values that depend on no earlier ones. `vary`, `vary_into` and
`vary_module` change earlier values, because the sizes and signs of parameters matter.
"""

import random
import secrets
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import nn

from referee.comparison.compare import INTEGERS
from referee.contestants.forms import without_repeats
from referee.contestants.seeding import seed_generators

SEEDS = 1 << 30
# A number that masks by being added to others, such as -1e9 before a softmax, is larger than this.
MAX_WITH_NEW_SIGN = 1e4
# Large tensors are drawn and varied in parts of this many elements. On a CPU, a part fits into the
# caches, and several threads draw parts, because torch draws with one thread.
PART_LENGTH = {"cpu": 1 << 17, "cuda": 1 << 24}


def new_seed() -> int:
    """Return a seed that no solution can foresee."""
    return secrets.randbelow(SEEDS)


def reseed() -> None:
    """Give the global generators of torch, Python and NumPy a seed that no solution can foresee."""
    seed_generators(new_seed())


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators for a `with` block; then they get their old states back."""
    gpus = range(torch.cuda.device_count()) if device.type == "cuda" else []
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=gpus):
        seed_generators(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def draw_into(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Overwrite x with random values, and return it.

    Floats are uniform in -1..1; for floats in 0..1, as KernelBench draws them, ReLU would be the
    identity. Integers are uniform over their whole range.
    """
    if x.is_floating_point():
        if x.device.type == "cpu" and x.is_contiguous():
            _draw_parts(x.view(-1).split(PART_LENGTH["cpu"]), generator)
            return x
        return x.uniform_(-1, 1, generator=generator)
    bits = x.view(INTEGERS[x.dtype.itemsize])  # torch cannot draw uint64
    limits = torch.iinfo(bits.dtype)
    end = limits.max + 1  # exclusive
    if bits.dtype == torch.int64:
        end = None  # stands for 2**63, which is no int64
    bits.random_(limits.min, end, generator=generator)
    return x


def _draw_parts(parts: tuple[torch.Tensor, ...], generator: torch.Generator | None) -> None:
    """Overwrite tensors of a CPU with random floats in -1..1, each under a seed of its own.

    Args:
        parts: the tensors.
        generator: draws the seeds, or the values if there is only one tensor; None for torch's.
    """
    if len(parts) == 1:
        parts[0].uniform_(-1, 1, generator=generator)
        return
    seeds = torch.randint(SEEDS, (len(parts),), generator=generator).tolist()

    def draw(part: torch.Tensor, seed: int) -> None:
        part.uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(draw, parts, seeds))


def random_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Return a dense tensor of random values, as `draw_into` draws them."""
    # `zeros` touches the pages of new memory with all threads. A single thread draws the values,
    # and would take much longer if it also had to touch the pages.
    return draw_into(torch.zeros(shape, dtype=dtype, device=device), generator)


def vary(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a contiguous tensor of other values, as `vary_into` makes them."""
    varied = torch.empty_like(values, memory_format=torch.contiguous_format)
    vary_into(varied, values, seed)
    return varied


def vary_into(target: torch.Tensor, values: torch.Tensor, seed: int) -> None:
    """Overwrite a tensor with others than these values: README.md, "Parameters", has the rules.

    Each value has a random factor of its own, so that none follows from others. A complex value is
    two: its real and its imaginary part.

    Args:
        target: a tensor of the same shape and dtype, in other memory.
        values: the old values.
        seed: the seed of the factors.
    """
    if target.is_complex():
        parts = torch.view_as_real(values.resolve_conj())
        target.copy_(torch.view_as_complex(vary(parts, seed)))
        return
    if not target.is_contiguous():
        target.copy_(vary(values, seed))
        return
    generator = torch.Generator(device=values.device).manual_seed(seed)
    part_length = PART_LENGTH[values.device.type]
    old_parts = values.reshape(-1).split(part_length)
    if not any(part.any() for part in old_parts):
        target.normal_(generator=generator).mul_(0.1)
        return
    draw_into(target, generator)
    have_both_signs = _have_both_signs(old_parts)
    for old, factors in zip(old_parts, target.view(-1).split(part_length), strict=True):
        if have_both_signs:
            _make_signed_factors(factors)
            _multiply_by_values(factors, old)
        else:
            factors.mul_(0.5).add_(1).mul_(old)  # 0.5 to 1.5 times the old values


def _make_signed_factors(drawn: torch.Tensor) -> None:
    """Turn numbers from -1 to 1 into factors of sizes from 0.5 to 1.5, half of them negative.

    A number is moved by 0.5 away from zero: -0.3 becomes -0.8, and 0.3 becomes 0.8.
    """
    half = torch.tensor(0.5, dtype=drawn.dtype, device=drawn.device)
    drawn.add_(torch.copysign(half, drawn))


def _multiply_by_values(factors: torch.Tensor, values: torch.Tensor) -> None:
    """Multiply factors by flat values; those beyond MAX_WITH_NEW_SIGN keep their signs."""
    factors.mul_(values)
    least, most = values.aminmax()
    if least > -MAX_WITH_NEW_SIGN and most < MAX_WITH_NEW_SIGN:
        return
    keeps_sign = values.abs() >= MAX_WITH_NEW_SIGN
    torch.where(keeps_sign, torch.copysign(factors, values), factors, out=factors)


def _have_both_signs(parts: tuple[torch.Tensor, ...]) -> bool:
    """Return whether some of the values that may get a new sign are positive, and some negative."""
    limit = MAX_WITH_NEW_SIGN
    has_positive = any(((part > 0) & (part < limit)).any() for part in parts)
    return has_positive and any(((part < 0) & (part > -limit)).any() for part in parts)


def vary_module(module: nn.Module) -> None:
    """Overwrite the parameters and buffers in `changing_names`; see `vary`."""
    state = module.state_dict()
    for name in changing_names(module):
        x = without_repeats(state[name])
        x.copy_(vary(x, new_seed()))


def changing_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that get new values before every round.

    These are the tensors of floats and of complex numbers. Integers and booleans may be indices, of
    which others could be invalid. Where several names share memory, as those of tied weights do,
    only the first is returned.
    """
    known = set()
    names = []
    for name, x in module.state_dict().items():
        memory = x.data_ptr(), x.shape, x.stride()
        can_change = x.is_floating_point() or x.is_complex()
        if can_change and x.numel() and memory not in known:
            known.add(memory)
            names.append(name)
    return names
