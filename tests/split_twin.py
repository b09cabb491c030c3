"""The arithmetic of the split float32 product, emulated on the CPU: kernels/SPLIT.md as a program.

Scaling, splitting, tensor cores that truncate, promotion, compensation, flags and the exact path.
float64 stands for exact numbers.

    python tests/split_twin.py [M K N]    prints the errors on every case of ranges.py
"""

import sys
from dataclasses import dataclass, replace

import torch
from ranges import CASES, Errors, Reference, broken_promises, sampled
from torch import Tensor

STEP = 16  # of k, in one tensor-core instruction
EXACT_SEGMENT = 32  # of k, in one float32 sum of the exact path


@dataclass(frozen=True)
class Split:
    """The constants of a kernel.

    Attributes:
        products: 3 for float32 accuracy, 1 for TF32's.
        segment: length of k between promotions; None for what `segment_length` says.
        x_top, weight_top: the maximum of a row is scaled to [2^(top - 1), 2^top).
        sampled: the maximum of a weight row is that of a sample.
        tiny: the pieces carry scaled elements below it badly.
        tiny_share: a row is flagged if more of its nonzero elements are tiny.
        suspect_share: a sampled row is looked at only if more of its elements are tiny or zero.
        terms: a row is flagged if it has nonzero elements, but less than sqrt(terms * k).
        alignment: of the tensor cores, see `accumulate`.
        compensation: the share of a sum of random signs that truncation takes, per unit of segment.
        one_signed: what it takes more, in parts of that, where all terms have one sign.
        piece: the dtype of the pieces.
        promotes, flags: False leaves that out.
    """

    products: int = 3
    segment: int | None = None
    x_top: int = 15
    weight_top: int = 15
    sampled: bool = False
    tiny: float = 2.0**-6
    tiny_share: float = 1 / 32
    suspect_share: float = 1 / 64
    terms: int = 128
    alignment: int | None = 2
    compensation: float = 1.5e-6 / 512
    one_signed: float = 2.0 / 1.5
    piece: torch.dtype = torch.float16
    promotes: bool = True
    flags: bool = True


SM80 = Split()
SM90 = Split(weight_top=8, sampled=True)


def one_product(split: Split) -> Split:
    """The same kernel with TF32's accuracy."""
    return replace(split, products=1, tiny=2.0**-14, terms=0, compensation=0.0)


def segment_length(k: int) -> int:
    """What a sum of k is promoted every."""
    return 64 if k < 4096 else 128 if k < 8192 else 256


@dataclass
class Rows:
    """x or weight on its way through the kernel.

    Attributes:
        exponent: scaled = row * 2^exponent.
        pieces: high and low, `[rows, k]`.
        flagged: rows that take the exact path.
        inexact: the share of elements that have a low piece, in a sample of each row.
        mean: of the magnitudes of the scaled elements of the sample.
    """

    exponent: Tensor
    pieces: tuple[Tensor, Tensor]
    flagged: Tensor
    inexact: Tensor
    mean: Tensor


def exponents(maximum: Tensor, top: int) -> Tensor:
    """e such that maximum * 2^e lies in [2^(top - 1), 2^top); 0 for 0, inf and NaN."""
    usable = torch.isfinite(maximum) & (maximum > 0)
    return torch.where(usable, top - torch.frexp(maximum).exponent, 0)


def scale(rows: Tensor, exponent: Tensor) -> Tensor:
    """rows * 2^exponent, exact, as float64."""
    return torch.ldexp(rows.double(), exponent[:, None].double())


def split_pieces(scaled: Tensor, piece: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """high and low, whose sum is nearly scaled; as float64."""
    high = scaled.to(piece).double()
    return high, (scaled - high).to(piece).double()


def has_wide_range(scaled: Tensor, split: Split) -> Tensor:
    """Rows of which too many nonzero elements are tiny."""
    nonzero = scaled != 0
    tiny = nonzero & (scaled.abs() < split.tiny)
    return tiny.sum(1) > nonzero.sum(1) * split.tiny_share


def has_few_terms(rows: Tensor, split: Split) -> Tensor:
    nonzero = (rows != 0).sum(1)
    return (nonzero > 0) & (nonzero**2 < split.terms * rows.shape[1])


def prepare(rows: Tensor, top: int, is_sampled: bool, split: Split) -> Rows:
    k = rows.shape[1]
    seen = rows[:, sampled(k)] if is_sampled else rows
    maximum = seen.abs().amax(1)
    exponent = exponents(maximum, top)
    scaled = scale(rows, exponent)
    flagged = has_wide_range(scaled, split) | has_few_terms(rows, split)
    if is_sampled:
        flagged &= (scaled.abs() < split.tiny).sum(1) > k * split.suspect_share
        flagged |= (maximum == 0) & (rows != 0).any(1)
    else:
        flagged |= ~torch.isfinite(maximum)
        if split.flags:  # one inf in x would make infinite what every row of the weight leads to
            scaled[flagged] = 0
    pieces = split_pieces(scaled, split.piece)
    sample = sampled(k) if is_sampled else slice(0, 2048, 8)
    inexact = (pieces[1][:, sample] != 0).double().mean(1)
    return Rows(exponent, pieces, flagged, inexact, scaled[:, sample].abs().mean(1))


def truncate(x: Tensor) -> Tensor:
    """float64 toward zero to the 24 significant bits of float32."""
    return (x.view(torch.int64) & ~((1 << 29) - 1)).view(torch.float64)


def accumulate(total: Tensor, x: Tensor, weight: Tensor, alignment: int | None) -> Tensor:
    """total [..., m, n] + x [..., m, 16] weight [..., n, 16]^T as a tensor core adds them.

    The 17 terms are truncated to multiples of ulp / 2^alignment, ulp being that of a float32 with
    the largest of their exponents, and their sum to a float32. The exponent of a product is the sum
    of its factors'. With alignment None, the sum of the exact terms is truncated.
    """
    if alignment is None:
        return truncate(total + x @ weight.mT)
    x_exponent, weight_exponent, total_exponent = (
        torch.where(t == 0, -1000, torch.frexp(t).exponent) for t in (x, weight, total)
    )
    exponent = (x_exponent[..., :, None, :] + weight_exponent[..., None, :, :]).amax(-1) - 1
    exponent = torch.maximum(exponent, total_exponent).clamp(min=-900) - 24 - alignment
    unit = torch.ldexp(torch.ones_like(total), exponent)
    terms = x[..., :, None, :] * weight[..., None, :, :]
    terms.mul_(1 / unit[..., None]).trunc_()
    return truncate(((total / unit).trunc() + terms.sum(-1)) * unit)


def segments(pieces: Tensor, length: int, step: int) -> Tensor:
    """[rows, k] -> [length / step, k / length, rows, step], padded with zeros."""
    rows, k = pieces.shape
    padded = torch.nn.functional.pad(pieces, (0, -k % length))
    return padded.view(rows, -1, length // step, step).permute(2, 1, 0, 3)


def tensor_core_sum(
    x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], length: int, split: Split
) -> Tensor:
    """[m, n] of float32 values: the products of high and low pieces, promoted every length of k."""
    x, weight = ([segments(piece, length, STEP) for piece in rows] for rows in (x, weight))
    _, count, m, _ = x[0].shape
    partial = torch.zeros(count, m, weight[0].shape[2], dtype=torch.float64)
    for step in range(length // STEP):
        for i, j in [(1, 0), (0, 1), (0, 0)][-split.products :]:
            partial = accumulate(partial, x[i][step], weight[j][step], split.alignment)
    total = torch.zeros_like(partial[0])
    for p in partial:
        total = (total + p).float().double()
    return total


def fma_sums(x: Tensor, weight: Tensor, length: int) -> Tensor:
    """[k / length, m, n]: partial sums of x weight^T by float32 FMA, one after the other."""
    x, weight = (segments(rows.double(), length, 1) for rows in (x, weight))
    partial = torch.zeros(x.shape[1], x.shape[2], weight.shape[2], dtype=torch.float64)
    for step in range(length):
        partial = torch.addcmul(partial, x[step], weight[step].mT).float().double()
    return partial


def exact_path(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T as flagged rows get it: short float32 sums, added in float64."""
    return fma_sums(x, weight, EXACT_SEGMENT).sum(0).float()


def product(x: Tensor, weight: Tensor, split: Split) -> tuple[Tensor, Rows, Rows]:
    """x weight^T in float32, and what became of x and weight."""
    k = x.shape[1]
    x_rows = prepare(x, split.x_top, False, split)
    weight_rows = prepare(weight, split.weight_top, split.sampled, split)

    length = (split.segment or segment_length(k)) if split.promotes else k + -k % STEP
    total = tensor_core_sum(x_rows.pieces, weight_rows.pieces, length, split)
    # fp16 overflowed, or the weight has inf or NaN
    weight_rows.flagged |= ~torch.isfinite(total).all(0)

    # Instructions that add nothing but zeros truncate nothing. Of t terms with low pieces that an
    # instruction can expect, t / (1 + t) says how often it truncates: t is 16 times the product of
    # both shares, and the fraction is taken apart by rows, exactly so where the shares are equal.
    x_loss, weight_loss = (
        4 * rows.inexact * (1 + STEP * rows.inexact**2).rsqrt() for rows in (x_rows, weight_rows)
    )
    loss = split.compensation * min(length, k) * x_loss[:, None] * weight_loss
    # Products are truncated too, which adds up if they have one sign: if the sum is as large as
    # that of its terms' magnitudes, of which the samples' means are an estimate. A sum that is
    # larger has a few terms that the means tell nothing of.
    magnitudes = k * x_rows.mean[:, None] * weight_rows.mean
    share = torch.where(magnitudes > 0, total.abs() / magnitudes, 0)
    sign = torch.minimum(share, 2 - share).clamp(min=0)
    total = (total + total * loss * (1 + split.one_signed * sign)).float().double()

    out = torch.ldexp(total, -(x_rows.exponent[:, None] + weight_rows.exponent).double()).float()
    flagged = x_rows.flagged[:, None] | weight_rows.flagged
    if split.flags and flagged.any():
        out = torch.where(flagged, exact_path(x, weight), out)
    return out, x_rows, weight_rows


def epilogue(product: Tensor, bias: Tensor, divisor: float) -> Tensor:
    return torch.relu(product + bias) / divisor


def linear(x: Tensor, weight: Tensor, bias: Tensor, divisor: float, split: Split) -> Tensor:
    """relu(x weight^T + bias) / divisor as a kernel with these constants computes it."""
    return epilogue(product(x, weight, split)[0], bias, divisor)


def cublas(x: Tensor, weight: Tensor, bias: Tensor, divisor: float) -> Tensor:
    """The same in float32 as cuBLAS sums it: one accumulator an element, along all of k."""
    return epilogue(fma_sums(x, weight, x.shape[1])[0].float(), bias, divisor)


def tf32(rows: Tensor) -> Tensor:
    """Rounded to the 11 significant bits of TF32."""
    rounded = (rows.view(torch.int32) + 0x1000) & ~0x1FFF
    return torch.where(torch.isfinite(rows), rounded.view(torch.float32), rows)


def ratios(got: Errors, allowed: Errors) -> str:
    def ratio(a: float, b: float) -> str:
        return f"{a / b:5.2f}" if b else f"{0 if a == 0 else float('inf'):5.0f}"

    return " ".join(
        ratio(getattr(got, name), getattr(allowed, name)) for name in ("max", "mean", "relative")
    )


def main(m: int = 32, k: int = 8192, n: int = 48) -> None:
    print(f"x [{m}, {k}], weight [{n}, {k}], promoted every {segment_length(k)}: errors of the")
    print("float32 sum; for each twin the ratios of its errors to them, and how many rows of x and")
    print("weight are flagged; ! where a promise is broken\n")
    print(
        f"{'':37} {'max':7} {'mean':7} {'rel.':7}"
        + "".join(f" | {a:28}" for a in ("sm_80", "sm_90"))
    )
    for name, case in CASES.items():
        x, weight, bias = case.draw(m, k, n)
        reference = Reference(x, weight, bias, 2.0)
        trusted = cublas(x, weight, bias, 2.0)
        allowed = reference.errors(trusted)
        line = f"{name:37} {allowed.max:7.1e} {allowed.mean:7.1e} {allowed.relative:7.1e}"
        for split in (SM80, SM90):
            out, *rows = product(x, weight, split)
            out = epilogue(out, bias, 2.0)
            mark = "!" if broken_promises(out, trusted, reference) else " "
            flags = "".join(f"{r.flagged.float().mean():5.0%}" for r in rows)
            line += f" | {ratios(reference.errors(out), allowed)}{mark}{flags}"
        print(line)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
