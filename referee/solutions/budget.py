"""How far a result may be from the reference's: relative to eager's own error.

The reference in float64 gives eager's error. In float32 a result may be FACTOR times as far off,
for a plain sum in order, or a fast exponential, is less accurate than torch's; TF32's products are
1,000 times as far off, and float16's no less. Where eager's own error is that of a lower precision,
as that of half types is, LOW_FACTOR holds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from referee.compare import first_mismatch

FACTOR, LOW_FACTOR = 32, 4
ROUNDINGS = 8  # of the result, that are allowed where eager's is exact
# Relative and absolute, where there is no result of higher precision; KernelBench's own.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
HALF_TOLERANCE = 1e-2
BLOCK = 1 << 24  # elements whose errors are in memory at a time
# The Frobenius norm of the errors over that of the results, at most, by class. A deep network's
# float32 reaches 1e-5; TF32 begins at 3e-4 and bfloat16 at 2.3e-3 a product.
CLASSES = {"float32-grade": 1e-4, "TF32-grade": 1.2e-3, "bf16-grade": 1e-2}
WORST = "worse than bf16"


@dataclass
class Found:
    """A result beside the reference's.

    Attributes:
        problem: what is wrong with it, in words.
        relative: the Frobenius norm of its errors over that of the reference.
        equal: it has eager's bits.
    """

    problem: str | None
    relative: float
    equal: bool


class Output:
    """One output of the reference.

    Args:
        eager: as the reference computes it.
        exact: in float64; None where that cannot be had.
    """

    def __init__(self, eager: torch.Tensor, exact: torch.Tensor | None) -> None:
        self.shape, self.dtype = list(eager.shape), eager.dtype
        self.eager = eager.detach().contiguous().view(-1)
        is_float = self.dtype.is_floating_point
        higher = is_float and self.dtype != torch.float64 and exact is not None
        self.exact = exact.detach().contiguous().view(-1) if higher else None
        self.slack, self.mean_slack, self.parts = 0.0, math.inf, 0.0
        if is_float:
            self._set_budget()

    def _set_budget(self) -> None:
        eps, count = torch.finfo(self.dtype).eps, max(self.eager.numel(), 1)
        if self.exact is None:
            self.slack = self.parts = TOLERANCES.get(self.dtype, HALF_TOLERANCE)
            return
        largest = total = sizes = squares = off = 0.0
        for start in range(0, self.eager.numel(), BLOCK):
            want = self._wanted(start, start + BLOCK)
            error = (self.eager[start : start + BLOCK].double() - want).abs_()
            error, size = error.nan_to_num_(0, 0, 0), want.abs().nan_to_num_(0, 0, 0)
            largest = max(largest, error.max().item())
            total, sizes = total + error.sum().item(), sizes + size.sum().item()
            off += error.square_().sum().item()
            squares += size.square_().sum().item()
        is_low = off > CLASSES["float32-grade"] ** 2 * squares
        factor, roundings = (LOW_FACTOR, 1) if is_low else (FACTOR, ROUNDINGS)
        self.parts = roundings * eps
        self.slack = factor * largest + eps * math.sqrt(squares / count)
        self.mean_slack = (factor * total + self.parts * sizes) / count

    def forget(self) -> None:
        """Keeps the budget alone."""
        self.eager = self.exact = None

    def compare(self, pieces: Iterable[tuple[int, torch.Tensor]]) -> Found:
        """A result that arrives in flat pieces, each with the place where it begins."""
        beyond, first, count, total, squares, norm, equal = 0, "", 0, 0.0, 0.0, 0.0, True
        for begin, piece in pieces:
            for at in range(0, len(piece), BLOCK):
                got, start = piece[at : at + BLOCK], begin + at
                eager = self.eager[start : start + len(got)]
                mismatch = first_mismatch(got, eager)
                equal = equal and mismatch is None
                if not self.dtype.is_floating_point:
                    if mismatch and not beyond:
                        first = f"got {mismatch.got}, expected {mismatch.expected}"
                    beyond += mismatch.count if mismatch else 0
                    continue
                want = self._wanted(start, start + len(got))
                error = self._errors(got, eager, want)
                bad = error > self._allowed(want)
                if found := int(bad.sum()):
                    where = bad.to(torch.uint8).argmax().item()
                    first = first or f"got {got[where]:.9g}, expected {want[where]:.9g}"
                    beyond += found
                total, count = total + error.sum().item(), count + len(got)
                squares += error.square_().sum().item()
                norm += want.nan_to_num(0, 0, 0).square_().sum().item()
        relative = math.sqrt(squares / norm) if norm else (math.inf if squares else 0.0)
        return Found(self._problem(beyond, first, total / max(count, 1)), relative, equal)

    def compare_some(self, got: torch.Tensor, eager: torch.Tensor) -> str | None:
        """The fault of elements of another result, compared with eager's, by this budget."""
        if not self.dtype.is_floating_point:
            mismatch = first_mismatch(got, eager)
            return str(mismatch) if mismatch else None
        want = eager.double()
        bad = self._errors(got, eager, want) > self._allowed(want)
        if not bad.any():
            return None
        where = bad.to(torch.uint8).argmax().item()
        values = f"got {got[where]:.9g}, expected {eager[where]:.9g}"
        return f"{int(bad.sum())} of {len(got)} elements, the first: {values}"

    def _problem(self, beyond: int, first: str, mean: float) -> str | None:
        total = self.eager.numel()
        if beyond:
            return f"{beyond:,} of {total:,} elements beyond the error budget, the first: {first}"
        if mean > self.mean_slack:
            return f"mean error {mean:.3g}, at most {self.mean_slack:.3g}, by eager's, is right"
        return None

    def _wanted(self, start: int, stop: int) -> torch.Tensor:
        """In float64: the exact result, and eager's where that is not finite, or overflows."""
        eager = self.eager[start:stop].double()
        if self.exact is None:
            return eager
        exact = self.exact[start:stop]
        return torch.where(eager.isfinite() & exact.isfinite(), exact, eager)

    def _allowed(self, want: torch.Tensor) -> torch.Tensor:
        return want.abs().mul_(self.parts).nan_to_num_(0, 0, 0).add_(self.slack)

    @staticmethod
    def _errors(got: torch.Tensor, eager: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        """|got - want|; where either is not finite, 0 if it has eager's value, else infinite."""
        error = (got.double() - want).abs_()
        if error.sum().isfinite():
            return error
        same = (got == eager) | (got.isnan() & eager.isnan())
        return error.nan_to_num_(math.inf, math.inf).masked_fill_(same, 0)


def grade(relative: float) -> str:
    """The accuracy class of relative errors."""
    return next((name for name, most in CLASSES.items() if relative <= most), WORST)
