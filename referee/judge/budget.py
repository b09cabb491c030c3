"""How far a result may be from the reference's: relative to eager's own error.

The reference in float64 gives eager's error. In float32 a result may be FACTOR times as far off,
for a fast exponential is less accurate than torch's, or as far as the roundings of a plain sum of
all terms add up to; TF32's products are 1,000 times as far off, and float16's no less. Where
eager's own error is that of a lower precision, as that of half types is, LOW_FACTOR holds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from referee.compare import INTEGERS, first_mismatch
from referee.errors import NOISE

FACTOR, LOW_FACTOR = 32, 4
# A plain sum of n positive terms in order is sqrt(n) / 4 roundings off, in standard deviations.
SPREADS = 16
ROUNDINGS = 8  # of the result, that are allowed where eager's is exact
# Relative and absolute, where there is no result of higher precision; KernelBench's own.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
HALF_TOLERANCE = 1e-2
BLOCK = 1 << 24  # elements whose errors are in memory at a time
# The Frobenius norm of the errors over that of the results, at most, by class. A deep network's
# float32 reaches 1e-5; TF32 begins at 3e-4 and bfloat16 at 2.3e-3 a product.
CLASSES = {"float32-grade": 1e-4, "TF32-grade": 1.2e-3, "bf16-grade": 1e-2}
WORST = "worse than bf16"
GROSS = 2.0**-6  # of the largest result: errors that no precision explains


@dataclass
class Found:
    """A result beside the reference's.

    Attributes:
        problem: what is wrong with it, in words.
        max, mean: of its errors.
        relative: the Frobenius norm of its errors over that of the reference.
        equal: it has eager's bits.
        gross: it is another result, not a less accurate one.
        beyond: which elements are off by too much; of an exact result, of blocks that differ.
    """

    problem: str | None
    max: float
    mean: float
    relative: float
    equal: bool
    gross: bool
    beyond: torch.Tensor


class Output:
    """One output of the reference.

    Args:
        eager: as the reference computes it.
        exact: in float64; None where that cannot be had.
        terms: of the longest sum; 0 for what must have eager's values.
        limit: the most that each element may be off, where the problem knows.

    Attributes:
        errors: eager's, as of `Found`: max, mean and relative.
    """

    def __init__(
        self,
        eager: torch.Tensor,
        exact: torch.Tensor | None,
        terms: int = 1,
        limit: torch.Tensor | None = None,
    ) -> None:
        self.shape, self.dtype, self.numel = list(eager.shape), eager.dtype, eager.numel()
        self.eager = eager.detach().contiguous().view(-1)
        is_float = self.dtype.is_floating_point
        higher = is_float and self.dtype != torch.float64 and exact is not None
        self.exact = exact.detach().contiguous().view(-1) if higher else None
        self.slack, self.mean_slack, self.parts, self.size = 0.0, math.inf, 0.0, 0.0
        self.errors, self.limit = (0.0, 0.0, 0.0), None if limit is None else limit.view(-1)
        self.is_exact = terms == 0 or not is_float
        if is_float and terms:
            self._set_budget(terms)

    def _set_budget(self, terms: int) -> None:
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
        self.size = math.sqrt(squares / count)
        self.errors = largest, total / count, math.sqrt(off / squares) if squares else 0.0
        self.parts = roundings * eps
        self.slack = factor * largest + eps * self.size
        self.mean_slack = (factor * total + self.parts * sizes) / count
        if self.dtype == torch.float32 and not is_low:
            sums = min(math.sqrt(terms) / 4 * eps / 2, CLASSES["float32-grade"] / SPREADS)
            self.parts = max(self.parts, SPREADS * sums)
            self.slack = max(self.slack, SPREADS * sums * self.size)
            self.mean_slack = max(self.mean_slack, 4 * sums * self.size)

    def forget(self) -> None:
        """Keeps the budget alone."""
        self.eager = self.exact = self.limit = None

    def compare(self, pieces: Iterable[tuple[int, torch.Tensor]]) -> Found:
        """A result that arrives in flat pieces, each with the place where it begins."""
        first, total, squares, norm, equal, largest, furthest = "", 0.0, 0.0, 0.0, True, 0.0, 0.0
        wrong = []
        for begin, piece in pieces:
            for at in range(0, len(piece), BLOCK):
                got, start = piece[at : at + BLOCK], begin + at
                eager = self.eager[start : start + len(got)]
                mismatch = first_mismatch(got, eager)
                equal = equal and mismatch is None
                if mismatch is None and self.is_exact:
                    continue
                want = self._wanted(start, start + len(got))
                error = self._errors(got, eager, want)
                allowed = self._allowed(want)
                if self.limit is not None:
                    allowed = self.limit[start : start + len(got)].nan_to_num(0, 0, 0)
                wrong.append(bad := error > allowed)
                if not first and bad.any():
                    where = bad.to(torch.uint8).argmax().item()
                    first = f"got {got[where]:.9g}, expected {want[where]:.9g}"
                want = want.nan_to_num(0, 0, 0)
                largest = max(largest, want.abs().max().item())
                furthest = max(furthest, error.max().item())
                total += error.sum().item()
                squares += error.square_().sum().item()
                norm += want.square_().sum().item()
        beyond = torch.cat(wrong) if wrong else torch.zeros(0, dtype=torch.bool)
        relative = math.sqrt(squares / norm) if norm else (math.inf if squares else 0.0)
        gross = self.is_exact or furthest > GROSS * largest or grade(relative) == WORST
        mean = total / max(self.numel, 1)
        is_alike = self.limit is not None and self._is_alike(furthest, mean)
        problem = None if is_alike else self._problem(int(beyond.sum()), first, mean)
        return Found(problem, furthest, mean, relative, equal, gross, beyond)

    def allows(self, other: torch.Tensor) -> bool:
        """Whether another tensor could stand in for it."""
        same = other.dtype == self.dtype and other.numel() == self.numel
        return same and self.compare([(0, other.reshape(-1))]).problem is None

    def compare_some(self, got: torch.Tensor, eager: torch.Tensor) -> str | None:
        """The fault of elements of another result, compared with eager's, by this budget."""
        if self.is_exact:
            mismatch = first_mismatch(got, eager)
            return str(mismatch) if mismatch else None
        want = eager.double()
        size = want.nan_to_num(0, 0, 0).square().mean().sqrt().item()
        grown = max(1.0, size / self.size) if self.size else 1.0
        bad = self._errors(got, eager, want) > self._allowed(want, grown)
        if not bad.any():
            return None
        where = bad.to(torch.uint8).argmax().item()
        values = f"got {got[where]:.9g}, expected {eager[where]:.9g}"
        return f"{int(bad.sum())} of {len(got)} elements, the first: {values}"

    def _is_alike(self, furthest: float, mean: float) -> bool:
        """Whether errors are no larger than eager's, but for chance."""
        largest, average, _ = self.errors
        return furthest <= NOISE["max"] * largest and mean <= NOISE["mean"] * average

    def _problem(self, beyond: int, first: str, mean: float) -> str | None:
        if beyond:
            what = "elements differ" if self.is_exact else "elements beyond the error budget"
            return f"{beyond:,} of {self.numel:,} {what}, the first: {first}"
        if mean > self.mean_slack and self.limit is None:
            return f"mean error {mean:.3g}, at most {self.mean_slack:.3g}, by eager's, is right"
        return None

    def _wanted(self, start: int, stop: int) -> torch.Tensor:
        """In float64: the exact result, and eager's where that is not finite, or overflows."""
        eager = self.eager[start:stop].double()
        if self.exact is None:
            return eager
        exact = self.exact[start:stop]
        return torch.where(eager.isfinite() & exact.isfinite(), exact, eager)

    def _allowed(self, want: torch.Tensor, grown: float = 1.0) -> torch.Tensor:
        """The most that each element may be off; the errors grow as the results do."""
        return want.abs().mul_(self.parts).nan_to_num_(0, 0, 0).add_(grown * self.slack)

    @staticmethod
    def _errors(got: torch.Tensor, eager: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        """|got - want|; where either is not finite, 0 if it has eager's value, else infinite."""
        if not got.is_floating_point():
            signed = INTEGERS[got.element_size()]
            return (got.view(signed) != eager.view(signed)).double()
        error = (got.double() - want).abs_()
        if error.sum().isfinite():
            return error
        same = (got == eager) | (got.isnan() & eager.isnan())
        return error.nan_to_num_(math.inf, math.inf).masked_fill_(same, 0)


def grade(relative: float) -> str:
    """The accuracy class of relative errors."""
    return next((name for name, most in CLASSES.items() if relative <= most), WORST)
