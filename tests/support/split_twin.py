"""The split float32 product (docs/SPLIT.md), emulated on the CPU.

Scaling, splitting, tensor cores that truncate, promotion, and what is made again. float64 stands
for exact numbers.

    PYTHONPATH=. python tests/support/split_twin.py [M K N]    prints the errors on every named case
"""

import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from itertools import pairwise

import torch
from families import CASES, named, sampled
from ranges import FEW_TERMS, SLACK, Reference, broken_promises
from torch import Tensor

STEP = 16  # of k, in one tensor-core instruction
TF32_STEP = 8  # of k, in one instruction
COUNTED = 64  # of k, of which the subnormal elements are counted at once


@dataclass(frozen=True)
class Cores:
    """Tensor cores.

    Attributes:
        terms: products that are added to the accumulator at a time.
        alignment: bits that stay below the last place of the largest term; None if all do.
    """

    terms: int
    alignment: int | None


AMPERE = Cores(8, 1)
HOPPER = Cores(16, 2)


@dataclass(frozen=True)
class Split:
    """A kernel's constants, and what it runs on.

    Attributes:
        products: 3 for float32 accuracy, 1 for TF32's.
        segment: length of k between promotions; None for what `segment_length` says.
        ahead: of each 2 * ahead of k, the first half has its high products before the low ones.
        compensates: what a promotion rounds off is where the next segment begins.
        x_top, weight_top: the maximum of a row is scaled to [2^(top - 1), 2^top).
        sampled: the maximum of a weight row is that of a sample.
        low_top: low pieces are scaled by 2^low_top.
        piece: the dtype of the pieces.
        tile: rows of x, and of weight, whose results one product makes again together.
        promotes, redoes: False leaves that out.
    """

    products: int = 3
    segment: int | None = None
    ahead: int = 0
    compensates: bool = False
    x_top: int = 15
    weight_top: int = 15
    sampled: bool = False
    low_top: int = 11
    cores: Cores = HOPPER
    piece: torch.dtype = torch.float16
    tile: int = 256
    promotes: bool = True
    redoes: bool = True


SM80 = Split(compensates=True, cores=AMPERE)
SM90 = Split(ahead=64, weight_top=10, sampled=True)
SM80_ON_HOPPER = replace(SM80, cores=HOPPER)
KERNELS = {SM80: "sm80", SM80_ON_HOPPER: "sm80 on Hopper", SM90: "sm90"}


def one_product(split: Split) -> Split:
    """sm_90's kernel with TF32's accuracy."""
    return replace(split, products=1, weight_top=3)


def segment_length(k: int, split: Split) -> int:
    """The length of K after which a sum is promoted."""
    if not split.promotes:
        return k + -k % STEP
    if split.segment:
        return split.segment
    return 32 if split.compensates or k < 2048 else 64 if k < 4096 else 128


def exponents(maximum: Tensor, top: int) -> Tensor:
    """e such that maximum * 2^e lies in [2^(top - 1), 2^top); 0 for 0, inf and NaN."""
    usable = torch.isfinite(maximum) & (maximum > 0)
    return torch.where(usable, top - torch.frexp(maximum).exponent, 0)


def maxima(rows: Tensor) -> Tensor:
    return rows.abs().amax(1)


def sampled_maxima(rows: Tensor) -> Tensor:
    """The maximum of a sample of each row; of all of the row where the sample is zero."""
    seen = maxima(rows[:, sampled(rows.shape[1])])
    return torch.where(seen == 0, maxima(rows), seen)


def scale(rows: Tensor, exponent: Tensor) -> Tensor:
    """rows * 2^exponent, exact, as float64."""
    return torch.ldexp(rows.double(), exponent[:, None].double())


def split_pieces(
    scaled: Tensor, low_top: int = 11, piece: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    """high and low as float64: scaled is nearly high + low / 2^low_top."""
    high = scaled.to(piece).double()
    return high, ((scaled - high) * 2.0**low_top).to(piece).double()


def truncate(x: Tensor) -> Tensor:
    """float64 toward zero to the 24 significant bits of float32."""
    return (x.view(torch.int64) & ~((1 << 29) - 1)).view(torch.float64)


def accumulate(total: Tensor, x: Tensor, weight: Tensor, alignment: int | None) -> Tensor:
    """total [m, n] + x [m, terms] weight [n, terms]^T as a tensor core adds them.

    The products and the total are truncated to multiples of ulp / 2^alignment, ulp being that of a
    float32 with the largest of their exponents, and their sum to a float32. The exponent of a
    product is the sum of its factors'. With alignment None, only the sum is truncated.
    """
    if alignment is None:
        return truncate(total + x @ weight.mT)
    x_exponent, weight_exponent, total_exponent = (
        torch.where(t == 0, -1000, torch.frexp(t).exponent) for t in (x, weight, total)
    )
    exponent = (x_exponent[:, None] + weight_exponent).amax(-1) - 1
    exponent = torch.maximum(exponent, total_exponent).clamp(min=-900) - 24 - alignment
    unit = torch.ldexp(torch.ones_like(total), exponent)
    terms = x[:, None] * weight
    terms.mul_(1 / unit[..., None]).trunc_()
    return truncate(((total / unit).trunc() + terms.sum(-1)) * unit)


def segments(k: int, split: Split) -> Iterator[tuple[range, range]]:
    """The steps along k of each segment's low products, which come first, and of its high ones."""
    length = segment_length(k, split)
    ahead = split.ahead if split.promotes else 0
    low_length = max(length, 2 * ahead)
    end = k + -k % low_length
    for first, last in pairwise([0, *range(min(length, ahead or length), end, length), end]):
        low = range(0)
        if split.products == 3 and first % low_length == ahead:
            low = range(first - ahead, min(first - ahead + low_length, k), STEP)
        yield low, range(first, min(last, k), STEP)


def tensor_core_sum(
    x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], split: Split
) -> Tensor:
    """[m, n] of float32 values: the products of high and low pieces [m, k] and [n, k]."""
    (x_high, x_low), (weight_high, weight_low) = x, weight
    total = x_high.new_zeros(len(x_high), len(weight_high))
    rounded_off = torch.zeros_like(total)

    def add(partial: Tensor, a: Tensor, b: Tensor, step: int) -> Tensor:
        a, b = (rows[:, step : step + STEP].split(split.cores.terms, 1) for rows in (a, b))
        for terms in zip(a, b, strict=True):
            partial = accumulate(partial, *terms, split.cores.alignment)
        return partial

    for low, high in segments(x_high.shape[1], split):
        partial = rounded_off * 2.0**split.low_top
        for step in low:
            partial = add(partial, x_high, weight_low, step)
            partial = add(partial, x_low, weight_high, step)
        partial *= 2.0**-split.low_top
        for step in high:
            partial = add(partial, x_high, weight_high, step)
        before, total = total, (total + partial).float().double()
        if split.compensates:
            rounded_off = ((before - total).float().double() + partial).float().double()
    return total


def fma_sum(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T by float32 FMA, one after the other."""
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for a, b in zip(x.double().t(), weight.double().t(), strict=True):
        total = torch.addcmul(total, a[:, None], b).float().double()
    return total.float()


def scaled_sum(x: Tensor, weight: Tensor, e_x: Tensor, e_weight: Tensor, split: Split) -> Tensor:
    """x weight^T * 2^(e_x + e_weight), in float32 values."""
    pieces = [
        split_pieces(scale(rows, exponent), split.low_top, split.piece)
        for rows, exponent in ((x, e_x), (weight, e_weight))
    ]
    return tensor_core_sum(*pieces, split)


def has_wide_range(rows: Tensor, exponent: Tensor) -> Tensor:
    """Rows of which one product loses too much: 1 in 32 nonzero elements is subnormal in fp16."""
    tiny = (rows != 0) & (scale(rows, exponent).abs() < 2.0**-14)
    return tiny.sum(1) > (rows != 0).sum(1) / 32


def mean_exponents(weight: Tensor, top: int) -> Tensor:
    """e such that the geometric mean of a row's sampled maxima * 2^e lies in [2^(top - 1), 2^top).

    Each maximum is that of a piece of 16 elements; zeros are left out. Where all are zero, that of
    the row takes their place.
    """
    k = weight.shape[1]
    column = (torch.arange(8) * k // 8 // 4 * 4)[:, None] + torch.arange(16)
    exists = column // 4 * 4 + 4 <= k  # four are read at once
    inf = float("inf")
    pieces = weight.abs()[:, column.clamp(max=k - 1)].nan_to_num(0, inf)  # NaN is passed over
    pieces = torch.where(exists, pieces, 0).amax(2)
    of_row = maxima(weight).nan_to_num(inf, inf)[:, None]
    pieces = torch.where((pieces == 0).all(1, keepdim=True), of_row, pieces)
    exponent = torch.where(pieces > 0, pieces.view(torch.int32) >> 23, 0).sum(1)
    count = (pieces > 0).sum(1)
    mean = torch.where(count > 0, exponent // count.clamp(min=1) - 127, 0)
    return (top - 1 - mean).clamp(max=126)


def has_many_subnormals(high: Tensor) -> Tensor:
    """Rows of fp16 of whose nonzero elements, in the mean of each 64, 1 in 32 is subnormal."""
    rows, k = high.shape
    magnitude = torch.nn.functional.pad(high, (0, -k % COUNTED)).view(rows, -1, COUNTED).abs()
    small = ((magnitude > 0) & (magnitude < 2.0**-14)).sum(2)
    share = small * COUNTED // (magnitude > 0).sum(2).clamp(min=1)
    return share.sum(1) * 32 > k


def whole_sum(x: Tensor, weight: Tensor, step: int, split: Split) -> Tensor:
    """x weight^T in one accumulator of a tensor core that takes `step` of k at a time."""
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for a, b in zip(x.double().split(step, 1), weight.double().split(step, 1), strict=True):
        total = accumulate(total, a, b, split.cores.alignment)
    return total


def tf32_product(x: Tensor, weight: Tensor, split: Split) -> Tensor:
    """x weight^T as TF32."""
    return whole_sum(tf32(x), tf32(weight), TF32_STEP, split).float()


def round_x(x: Tensor, split: Split) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled and rounded, the exponents, and the rows of which that carries too little."""
    exponent = exponents(maxima(x), split.x_top)
    has_no_scale = ~torch.isfinite(x).all(1) | (exponent > 126)
    high = scale(x.masked_fill(has_no_scale[:, None], 0), exponent).to(split.piece)
    return high, exponent, has_no_scale | has_wide_range(x, exponent)


def round_weight(weight: Tensor, split: Split) -> tuple[Tensor, Tensor, Tensor]:
    """The same of the weight."""
    exponent = mean_exponents(weight, split.weight_top)
    high = scale(weight, exponent).to(split.piece)
    return high, exponent, ~torch.isfinite(high).all(1) | has_many_subnormals(high)


def rounded_product(x: Tensor, weight: Tensor, split: Split) -> Tensor:
    """x weight^T by one product of fp16; tiles with rows that it does not carry as TF32."""
    high_x, e_x, wide_x = round_x(x, split)
    high_weight, e_weight, wide_weight = round_weight(weight, split)
    total = whole_sum(high_x, high_weight, STEP, split)
    out = torch.ldexp(total, -(e_x[:, None] + e_weight).double()).float()
    wide = wide_x[:, None] | wide_weight
    if not wide.any():
        return out
    for tile in (t for rows in wide.split(split.tile) for t in rows.split(split.tile, 1)):
        tile[:] = tile.any()
    return torch.where(wide, tf32_product(x, weight, split), out)


def special_sum(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T where it is not finite: of inf, NaN and, of all else, the signs."""
    x, weight = (torch.where(torch.isfinite(rows), rows.sign(), rows) for rows in (x, weight))
    return x @ weight.t()


def product(x: Tensor, weight: Tensor, split: Split) -> Tensor:
    """x weight^T in float32."""
    if split.products == 1:
        return rounded_product(x, weight, split)
    special = [~torch.isfinite(rows).all(1) for rows in (x, weight)]
    e_x = exponents(maxima(x), split.x_top)
    e_weight = exponents((sampled_maxima if split.sampled else maxima)(weight), split.weight_top)
    # An inf in x would make every row of the weight look as if it had to be made again.
    finite_x = x.masked_fill(special[0][:, None], 0)
    total = scaled_sum(finite_x, weight, e_x, e_weight, split)
    again = ~torch.isfinite(total).all(0)
    if split.redoes and again.any():
        e_weight[again] = exponents(maxima(weight[again]), split.x_top)
        total[:, again] = scaled_sum(finite_x, weight[again], e_x, e_weight[again], split)
    out = torch.ldexp(total, -(e_x[:, None] + e_weight).double()).float()
    if split.redoes:
        out = torch.where(special[0][:, None] | special[1], special_sum(x, weight), out)
    return out


def epilogue(product: Tensor, bias: Tensor, divisor: float) -> Tensor:
    return torch.relu(product + bias) / divisor


def linear(x: Tensor, weight: Tensor, bias: Tensor, divisor: float, split: Split) -> Tensor:
    """relu(x weight^T + bias) / divisor as a kernel with these constants computes it."""
    return epilogue(product(x, weight, split), bias, divisor)


def cublas(x: Tensor, weight: Tensor, bias: Tensor, divisor: float) -> Tensor:
    """The same in float32 as cuBLAS sums it: one accumulator an element, along all of k."""
    return epilogue(fma_sum(x, weight), bias, divisor)


def tf32(rows: Tensor) -> Tensor:
    """Rounded to the 11 significant bits of TF32."""
    rounded = (rows.view(torch.int32) + 0x1000) & ~0x1FFF
    return torch.where(torch.isfinite(rows), rounded.view(torch.float32), rows)


def main(m: int = 32, k: int = 8192, n: int = 48) -> None:
    lengths = " and ".join(str(segment_length(k, split)) for split in (SM80, SM90))
    print(f"x [{m}, {k}], weight [{n}, {k}], promoted every {lengths}: relative error in 2^-24")
    print("of the float32 sum; then, of each twin, the ratios of its maximum, mean and relative")
    print("error to those of the sum, and its relative error; ! where a promise is broken\n")
    print(f"{'':37} float32 | {'sm_80':25} | sm_90")
    for name in CASES:
        x, weight, bias = named(name, m, k, n)
        reference = Reference(x, weight, bias, 2.0)
        trusted = cublas(x, weight, bias, 2.0)
        allowed = reference.errors(trusted)
        line = f"{name:37} {allowed.relative * 2**24:7.1f}"
        for split in (SM80, SM90):
            out = linear(x, weight, bias, 2.0, split)
            got = reference.errors(out)
            pairs = zip(astuple(got), astuple(allowed), strict=True)
            ratios = (a / b if b else 0 if a == 0 else float("inf") for a, b in pairs)
            mark = "!" if broken_promises(out, trusted, reference, SLACK, FEW_TERMS) else " "
            line += " | " + " ".join(f"{ratio:5.2f}" for ratio in ratios)
            line += f" {got.relative * 2**24:6.1f}{mark}"
        print(line)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
