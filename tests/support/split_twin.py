"""A twin of the float32 GEMMs on the CPU: the arithmetic of docs/SPLIT.md, step by step.

The twin scales rows, splits them into hi and lo, and multiplies as tensor cores do, which truncate
sums. It promotes the sums, and computes again what overflowed. Numbers between these steps are
float64, which represents them exactly.

    python -m tests.support.split_twin [M K N]    prints the errors on every named case
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from problems.operands import INF
from tests.support.named_operands import CASES, draw_case, sampled_spans
from tests.support.promises import FEW_TERMS_ERROR, FP16X3_SLACK, Reference, broken_promises

# The length of K that one tensor-core instruction multiplies.
FP16_INSTRUCTION_K = 16
TF32_INSTRUCTION_K = 8
# The sm90 kernel of fp16x3 sums the lo products of this length of K in one accumulation.
K_GROUP = 128
# The one-product kernel counts subnormal elements for each k-tile.
K_TILE = 64


@dataclass(frozen=True)
class Cores:
    """Tensor cores.

    Attributes:
        terms: the number of products that are added to the accumulator at a time.
        alignment: the number of bits that are kept below the last place of the largest term; None
            if all bits are kept.
    """

    terms: int
    alignment: int | None


AMPERE = Cores(8, 1)
HOPPER = Cores(16, 2)


@dataclass(frozen=True)
class Kernel:
    """A GEMM's constants, and the tensor cores on which it runs.

    Attributes:
        products: 3 for fp16x3, 1 for the kernel with TF32's accuracy.
        interval: the promotion interval; None for the one that `promotion_interval` chooses.
        has_k_group_order: lo products of a whole k-group are one accumulation's. False: each
            accumulation begins with the lo products of its interval.
        compensates: an accumulation starts with the rounding error of the promotion before it.
        x_target, weight_target: the largest element of a row is scaled to this exponent, that is,
            into [2^target, 2^(target + 1)).
        samples_weight: the scale of a weight row comes from a sample of its elements.
        min_exponent, max_exponent: the limits of a weight row's exponent. With one product, the
            maximum is also that of a row of x.
        lo_exponent: lo is scaled by 2^lo_exponent.
        half: the dtype of hi and lo.
        tile: the rows of x, and of weight, of the results that are computed again at a time.
        promotes, recomputes: False leaves out that step.
    """

    products: int = 3
    interval: int | None = None
    has_k_group_order: bool = False
    compensates: bool = False
    x_target: int = 14
    weight_target: int = 14
    samples_weight: bool = False
    min_exponent: int = -1000  # no row of float32 has a smaller one, or a larger one than 1000
    max_exponent: int = 1000
    lo_exponent: int = 11
    cores: Cores = HOPPER
    half: torch.dtype = torch.float16
    tile: int = 256
    promotes: bool = True
    recomputes: bool = True


SM80 = Kernel(compensates=True, cores=AMPERE)
SM90 = Kernel(
    has_k_group_order=True,
    weight_target=9,
    samples_weight=True,
    min_exponent=-111,
    max_exponent=127,
)
SM80_ON_HOPPER = replace(SM80, cores=HOPPER)
# sm90's kernel with TF32's accuracy
ONE_PRODUCT = Kernel(products=1, weight_target=2, samples_weight=True, max_exponent=126)
# The kernels of fp16x3, with their names.
FP16X3_KERNELS = {SM80: "sm80", SM80_ON_HOPPER: "sm80 on Hopper", SM90: "sm90"}


def promotion_interval(k: int, kernel: Kernel) -> int:
    """Return the length of K between two promotions."""
    if not kernel.promotes:
        return k + -k % FP16_INSTRUCTION_K
    if kernel.interval:
        return kernel.interval
    if kernel.compensates or k < 2048:
        return 32
    return 64 if k < 4096 else 128


def floor_log2(x: Tensor) -> Tensor:
    """Return e with the magnitude of x in [2^e, 2^(e + 1)); -1000 for 0."""
    exponent = torch.frexp(x).exponent - 1  # frexp's mantissas are in [1/2, 1)
    return torch.where(x == 0, -1000, exponent)


def exponents(maximum: Tensor, target: int) -> Tensor:
    """Return e with maximum * 2^e in [2^target, 2^(target + 1)).

    For a maximum of 0, inf or NaN, e is 0.
    """
    usable = torch.isfinite(maximum) & (maximum > 0)
    return torch.where(usable, target - floor_log2(maximum), 0)


def maxima(rows: Tensor) -> Tensor:
    """Return the largest magnitude of each row; NaN for a row that holds NaN."""
    return rows.abs().amax(1)


def span_maxima(weight: Tensor) -> Tensor:
    """Return the largest magnitude of each of a row's sampled spans, [rows, 8].

    A NaN in a span is ignored. If all spans of a row are zero, they get the maximum of the row
    instead, which is infinite if the row holds NaN.
    """
    magnitudes = weight.abs().nan_to_num(0, INF)
    zero = weight.new_zeros(len(weight), 1)  # the maximum of a span that has no elements
    spans = [
        torch.cat([zero, magnitudes[:, span]], 1).amax(1) for span in sampled_spans(weight.shape[1])
    ]
    of_spans = torch.stack(spans, 1)
    is_zero = (of_spans == 0).all(1, keepdim=True)
    return torch.where(is_zero, maxima(weight).nan_to_num(INF, INF)[:, None], of_spans)


def weight_exponents(weight: Tensor, kernel: Kernel) -> Tensor:
    """Return the exponents of the rows of weight for hi and lo."""
    maximum = span_maxima(weight).amax(1) if kernel.samples_weight else maxima(weight)
    needed = exponents(maximum, kernel.weight_target)
    return needed.clamp(kernel.min_exponent, kernel.max_exponent)


def scale(rows: Tensor, exponent: Tensor) -> Tensor:
    """Return rows * 2^exponent in float64, which is exact."""
    return torch.ldexp(rows.double(), exponent[:, None].double())


def split(
    scaled: Tensor, lo_exponent: int = 11, half: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    """Return hi and lo, as float64: scaled is nearly hi + lo / 2^lo_exponent."""
    hi = scaled.to(half).double()
    lo = ((scaled - hi) * 2.0**lo_exponent).to(half).double()
    return hi, lo


def truncate(x: Tensor) -> Tensor:
    """Truncate float64 toward zero to the 24 significant bits of float32."""
    return (x.view(torch.int64) & ~((1 << 29) - 1)).view(torch.float64)


def factor_exponents(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the exponents of factors for `accumulate`; -1000 for 0.

    All subnormals of a dtype have the exponent of its smallest normal number, for fp16 -14.
    """
    least = floor_log2(torch.tensor(torch.finfo(dtype).smallest_normal)).item()
    return torch.where(x == 0, -1000, floor_log2(x).clamp(min=least))


def accumulate(
    total: Tensor,
    x: Tensor,
    weight: Tensor,
    alignment: int | None,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """Return total [m, n] + x [m, terms] weight [n, terms]^T, as a tensor core adds them.

    Let ulp be the last place of a float32 that has the largest exponent among the total and the
    products; the exponent of a product is the sum of its factors' exponents. The total and each
    product are truncated to multiples of ulp / 2^alignment, and their sum to a float32. With
    alignment None, only the sum is truncated.

    Args:
        total: the accumulator.
        x: values of `dtype`.
        weight: the same.
        alignment: as in `Cores`.
        dtype: of the operands; float32 for TF32, which has the same range.
    """
    if alignment is None:
        return truncate(total + x @ weight.mT)
    products = x[:, None] * weight  # [m, n, terms]
    product_exponents = factor_exponents(x, dtype)[:, None] + factor_exponents(weight, dtype)
    largest = torch.maximum(product_exponents.amax(-1), floor_log2(total))
    ulp_exponent = largest.clamp(min=-900) - 23  # 2^-900: the inverse of `unit` is finite
    unit = torch.ldexp(torch.ones_like(total), ulp_exponent - alignment)
    units_of_products = products.mul_(1 / unit[..., None]).trunc_()
    units = (total / unit).trunc() + units_of_products.sum(-1)
    return truncate(units * unit)


def accumulations(k: int, kernel: Kernel) -> Iterator[tuple[range, range]]:
    """Yield what is summed between two promotions: where lo products begin, and where hi ones do.

    Each number is the beginning of one instruction's part of K. With one product there are no lo
    products.
    """
    interval = promotion_interval(k, kernel)
    if kernel.has_k_group_order and kernel.promotes:
        order = k_group_order(k, interval)
    else:
        order = interval_order(k, interval)
    for lo, hi in order:
        yield (range(0) if kernel.products == 1 else lo), hi


def interval_order(k: int, interval: int) -> Iterator[tuple[range, range]]:
    """Yield the accumulations of a kernel in which each interval begins with its lo products."""
    for begin in range(0, k, interval):
        part = range(begin, min(begin + interval, k), FP16_INSTRUCTION_K)
        yield part, part


def k_group_order(k: int, interval: int) -> Iterator[tuple[range, range]]:
    """Yield the accumulations of sm90, which the picture in docs/SPLIT.md, step 4, shows.

    With intervals of 64, the first two are

        lo: nothing                hi: 0, 16, 32, 48
        lo: 0, 16, 32, ..., 112    hi: 64, 80, 96, 112
    """
    half = K_GROUP // 2
    end = k + -k % K_GROUP
    begins = [0, *range(min(interval, half), end, interval)]
    for begin, after in pairwise([*begins, end]):
        lo = range(0)
        if begin % K_GROUP == half:
            k_group = begin - half
            lo = range(k_group, min(k_group + K_GROUP, k), FP16_INSTRUCTION_K)
        yield lo, range(begin, min(after, k), FP16_INSTRUCTION_K)


def tensor_core_sum(
    x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], kernel: Kernel
) -> Tensor:
    """Return x weight^T [m, n] in float32 values, from the hi and lo of x [m, k] and weight [n, k].

    The three products are added and promoted in the kernel's order.
    """
    x_hi, x_lo = x
    weight_hi, weight_lo = weight
    total = x_hi.new_zeros(len(x_hi), len(weight_hi))
    rounding_error = torch.zeros_like(total)

    def add(partial: Tensor, a: Tensor, b: Tensor, begin: int) -> Tensor:
        columns = slice(begin, begin + FP16_INSTRUCTION_K)
        a_parts = a[:, columns].split(kernel.cores.terms, 1)
        b_parts = b[:, columns].split(kernel.cores.terms, 1)
        for a_part, b_part in zip(a_parts, b_parts, strict=True):
            partial = accumulate(partial, a_part, b_part, kernel.cores.alignment, kernel.half)
        return partial

    for lo, hi in accumulations(x_hi.shape[1], kernel):
        partial = rounding_error * 2.0**kernel.lo_exponent
        for begin in lo:
            partial = add(partial, x_hi, weight_lo, begin)
            partial = add(partial, x_lo, weight_hi, begin)
        partial *= 2.0**-kernel.lo_exponent
        for begin in hi:
            partial = add(partial, x_hi, weight_hi, begin)
        before = total
        total = (total + partial).float().double()
        if kernel.compensates:
            rounding_error = ((before - total).float().double() + partial).float().double()
    return total


def fma_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T by float32 FMA, one after the other along K."""
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for a, b in zip(x.double().t(), weight.double().t(), strict=True):
        total = torch.addcmul(total, a[:, None], b).float().double()
    return total.float()


def scaled_sum(x: Tensor, weight: Tensor, e_x: Tensor, e_weight: Tensor, kernel: Kernel) -> Tensor:
    """Return x weight^T * 2^(e_x + e_weight) in float32 values, from the scaled and split rows."""
    split_x = split(scale(x, e_x), kernel.lo_exponent, kernel.half)
    split_weight = split(scale(weight, e_weight), kernel.lo_exponent, kernel.half)
    return tensor_core_sum(split_x, split_weight, kernel)


def has_wide_range(rows: Tensor, exponent: Tensor) -> Tensor:
    """Return whether more than 1 in 32 nonzero elements of a scaled row is subnormal in fp16.

    One product of such rows is less accurate than TF32's.
    """
    tiny = (rows != 0) & (scale(rows, exponent).abs() < 2.0**-14)
    return tiny.sum(1) > (rows != 0).sum(1) / 32


def mean_exponents(weight: Tensor, kernel: Kernel) -> Tensor:
    """Return the exponents of the rows of weight for hi alone.

    They scale the mean of each row's span maxima to the target. The mean is the geometric one,
    without zeros.
    """
    maximum = span_maxima(weight)
    biased_exponents = maximum.view(torch.int32) >> 23
    exponent_sum = torch.where(maximum > 0, biased_exponents, 0).sum(1)
    count = (maximum > 0).sum(1)
    mean = torch.where(count > 0, exponent_sum // count.clamp(min=1) - 127, 0)
    return (kernel.weight_target - mean).clamp(max=kernel.max_exponent)


def has_many_subnormals(hi: Tensor) -> Tensor:
    """Return whether, on average over the k-tiles of an fp16 row, 1 in 32 nonzeros is subnormal."""
    rows, k = hi.shape
    magnitude = torch.nn.functional.pad(hi, (0, -k % K_TILE)).view(rows, -1, K_TILE).abs()
    subnormals = ((magnitude > 0) & (magnitude < 2.0**-14)).sum(2)
    share = subnormals * K_TILE // (magnitude > 0).sum(2).clamp(min=1)
    return share.sum(1) * 32 > k


def unpromoted_sum(x: Tensor, weight: Tensor, instruction_k: int, kernel: Kernel) -> Tensor:
    """Return x weight^T from one accumulator along K, with instructions of `instruction_k` of K.

    x and weight have the dtype of the operands, see `accumulate`.
    """
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    x_parts = x.double().split(instruction_k, 1)
    weight_parts = weight.double().split(instruction_k, 1)
    for a, b in zip(x_parts, weight_parts, strict=True):
        total = accumulate(total, a, b, kernel.cores.alignment, x.dtype)
    return total


def tf32_product(x: Tensor, weight: Tensor, kernel: Kernel) -> Tensor:
    """Return x weight^T as TF32."""
    return unpromoted_sum(tf32(x), tf32(weight), TF32_INSTRUCTION_K, kernel).float()


def x_as_fp16(x: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
    """Return x scaled and rounded, the exponents, and which rows need TF32."""
    exponent = exponents(maxima(x), kernel.x_target)
    has_no_scale = ~torch.isfinite(x).all(1) | (exponent > kernel.max_exponent)
    hi = scale(x.masked_fill(has_no_scale[:, None], 0), exponent).to(kernel.half)
    return hi, exponent, has_no_scale | has_wide_range(x, exponent)


def weight_as_fp16(weight: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight scaled and rounded, the exponents, and which rows need TF32."""
    exponent = mean_exponents(weight, kernel)
    hi = scale(weight, exponent).to(kernel.half)
    return hi, exponent, ~torch.isfinite(hi).all(1) | has_many_subnormals(hi)


def fp16_product(x: Tensor, weight: Tensor, kernel: Kernel) -> Tensor:
    """Return x weight^T by one product of fp16; tiles with rows that need TF32 are TF32's."""
    x_hi, e_x, x_needs_tf32 = x_as_fp16(x, kernel)
    weight_hi, e_weight, weight_needs_tf32 = weight_as_fp16(weight, kernel)
    total = unpromoted_sum(x_hi, weight_hi, FP16_INSTRUCTION_K, kernel)
    out = torch.ldexp(total, -(e_x[:, None] + e_weight).double()).float()
    needs_tf32 = x_needs_tf32[:, None] | weight_needs_tf32
    if not needs_tf32.any():
        return out
    for rows in needs_tf32.split(kernel.tile):
        for tile in rows.split(kernel.tile, 1):
            tile[:] = tile.any()
    return torch.where(needs_tf32, tf32_product(x, weight, kernel), out)


def fp16x3_product(x: Tensor, weight: Tensor, kernel: Kernel) -> Tensor:
    """Return x weight^T by three products of fp16, for a finite x.

    Rows of weight that overflow are computed again.
    """
    e_x = exponents(maxima(x), kernel.x_target)
    e_weight = weight_exponents(weight, kernel)
    total = scaled_sum(x, weight, e_x, e_weight, kernel)
    overflowed = ~torch.isfinite(total).all(0)
    if kernel.recomputes and overflowed.any():
        # The largest element of the whole row decides its scale, as for x.
        rows = weight[overflowed]
        e_rows = exponents(maxima(rows), kernel.x_target).clamp(max=kernel.max_exponent)
        total[:, overflowed] = scaled_sum(x, rows, e_x, e_rows, kernel)
        e_weight[overflowed] = e_rows
    return torch.ldexp(total, -(e_x[:, None] + e_weight).double()).float()


def nonfinite_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T where it is not finite: finite elements count by their signs alone."""
    x, weight = (torch.where(torch.isfinite(rows), rows.sign(), rows) for rows in (x, weight))
    return x @ weight.t()


def product(x: Tensor, weight: Tensor, kernel: Kernel) -> Tensor:
    """Return x weight^T in float32, as the kernel computes it."""
    if kernel.products == 1:
        return fp16_product(x, weight, kernel)
    x_is_nonfinite = ~torch.isfinite(x).all(1)[:, None]
    weight_is_nonfinite = ~torch.isfinite(weight).all(1)
    # With an inf in x, each row of the weight would look as if it had overflowed.
    out = fp16x3_product(x.masked_fill(x_is_nonfinite, 0), weight, kernel)
    if not kernel.recomputes:
        return out
    return torch.where(x_is_nonfinite | weight_is_nonfinite, nonfinite_product(x, weight), out)


def epilogue(product: Tensor, bias: Tensor, divisor: float) -> Tensor:
    return torch.relu(product + bias) / divisor


def linear(x: Tensor, weight: Tensor, bias: Tensor, divisor: float, kernel: Kernel) -> Tensor:
    """Return relu(x weight^T + bias) / divisor, as the kernel computes it."""
    return epilogue(product(x, weight, kernel), bias, divisor)


def cublas(x: Tensor, weight: Tensor, bias: Tensor, divisor: float) -> Tensor:
    """Return the same as cuBLAS computes it in float32: each output is one sum along all of K."""
    return epilogue(fma_sum(x, weight), bias, divisor)


def tf32(rows: Tensor) -> Tensor:
    """Round to the 11 significant bits of TF32, which drops the last 13 bits of a float32."""
    half = 1 << 12
    rounded = (rows.view(torch.int32) + half) & -(1 << 13)
    return torch.where(torch.isfinite(rows), rounded.view(torch.float32), rows)


def ratio(error: float, allowed: float) -> float:
    """Return error / allowed; 0 for 0 / 0."""
    if allowed:
        return error / allowed
    return float("inf") if error else 0


def table_columns(out: Tensor, torch_out: Tensor, reference: Reference) -> str:
    """Return the columns of one twin's result in the table that `main` prints."""
    errors = reference.errors(out)
    allowed = reference.errors(torch_out)
    ratios = [
        ratio(errors.max, allowed.max),
        ratio(errors.mean, allowed.mean),
        ratio(errors.relative, allowed.relative),
    ]
    broken = broken_promises(out, torch_out, reference, FP16X3_SLACK, FEW_TERMS_ERROR)
    mark = "!" if broken else " "
    return " ".join(f"{r:5.2f}" for r in ratios) + f" {errors.relative * 2**24:6.1f}{mark}"


def main(m: int = 32, k: int = 8192, n: int = 48) -> None:
    """Print the errors of a float32 sum and of both kernels on every named case."""
    intervals = " and ".join(str(promotion_interval(k, kernel)) for kernel in (SM80, SM90))
    print(f"x [{m}, {k}], weight [{n}, {k}], promoted every {intervals}: relative error in 2^-24")
    print("of the float32 sum; then, of each twin, the ratios of its maximum, mean and relative")
    print("error to those of the sum, and its relative error; ! where a promise is broken\n")
    print(f"{'':37} float32 | {'sm_80':25} | sm_90")
    for name in CASES:
        x, weight, bias = draw_case(name, m, k, n)
        reference = Reference(x, weight, bias, 2.0)
        torch_out = cublas(x, weight, bias, 2.0)
        line = f"{name:37} {reference.errors(torch_out).relative * 2**24:7.1f}"
        for kernel in (SM80, SM90):
            out = linear(x, weight, bias, 2.0, kernel)
            line += f" | {table_columns(out, torch_out, reference)}"
        print(line)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
