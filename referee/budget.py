"""The error budget: how far a result may be from the reference's, relative to eager's error.

The reference in float64 gives eager's error. In float32 a result may be FACTOR times as far off,
for a fast exponential is less accurate than torch's. It may also be as far off as the roundings of
a plain sum of all terms add up to. TF32's products are 1,000 times as far off, and float16's no
less. Where eager's own error is that of a lower precision, as for half types, the factor is
LOW_FACTOR.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from referee.compare import INTEGERS, first_mismatch

FACTOR, LOW_FACTOR = 32, 4
# A plain sum of n positive terms in order is sqrt(n) / 4 roundings off, in standard deviations.
SPREADS = 16
ROUNDINGS = 8  # roundings of the result that are allowed even where eager's is exact
# Relative and absolute, where there is no result of higher precision; KernelBench's own.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
HALF_TOLERANCE = 1e-2
# Two results of the same accuracy differ in their errors as two samples do. The mean of many is
# sharp; the maximum of n has a standard deviation of 4% at n = 10^7, and more below.
NOISE = {"max": 1.15, "mean": 1.02}
BLOCK = 1 << 24  # elements whose errors are in memory at a time
# The Frobenius norm of the errors over that of the results, at most, by class. A deep network's
# float32 reaches 1e-5; TF32 begins at 3e-4 and bfloat16 at 2.3e-3 a product.
CLASSES = {"float32-grade": 1e-4, "TF32-grade": 1.2e-3, "bf16-grade": 1e-2}
WORST = "worse than bf16"
GROSS = 2.0**-6  # of the largest result: errors that no precision explains

# Operators that sum: over the dimension in their second argument; over the last dimension of the
# operand with this index; over all that a reduction leaves out.
CUMULATIVE = ("cumsum", "cumprod", "logcumsumexp", "_softmax", "_log_softmax")
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0, "addmv": 1, "dot": 0}
REDUCTIONS = ("sum", "mean", "prod", "var", "std", "norm", "logsumexp", "pool", "loss", "dist")

Maybe = torch.Tensor | None


@dataclass
class Found:
    """A result beside the reference's: its errors, and what is wrong with it, in words."""

    problem: str | None
    max: float  # error of an element
    mean: float  # error
    relative: float  # the Frobenius norm of the errors over that of the reference
    size: float  # the root of the reference's mean square
    mean_size: float
    equal: bool  # it has eager's bits
    gross: bool  # it is another result, not a less accurate one
    beyond: torch.Tensor  # the elements off by too much; of an exact result, of blocks that differ


@dataclass
class _Totals:
    """Errors and sizes of the elements that were compared so far."""

    largest_size: float = 0.0
    largest_error: float = 0.0
    sum_of_errors: float = 0.0
    squared_errors: float = 0.0
    sum_of_sizes: float = 0.0
    squared_sizes: float = 0.0

    def add(self, error: torch.Tensor, size: torch.Tensor) -> None:
        """Add elements; both tensors are overwritten."""
        self.largest_size = max(self.largest_size, size.max().item())
        self.largest_error = max(self.largest_error, error.max().item())
        self.sum_of_errors += error.sum().item()
        self.sum_of_sizes += size.sum().item()
        self.squared_errors += error.square_().sum().item()
        self.squared_sizes += size.square_().sum().item()

    @property
    def relative(self) -> float:
        """The Frobenius norm of the errors over that of the sizes."""
        if self.squared_sizes:
            return math.sqrt(self.squared_errors / self.squared_sizes)
        return math.inf if self.squared_errors else 0.0


class Output:
    """One output of the reference, and how far another may be off: its error budget.

    An element may be off by `slack` plus `relative_slack` times its size. The mean error is at most
    `mean_slack`.

    Args:
        eager: as the reference computes it.
        exact: in float64; None where that cannot be had.
        terms: of the longest sum; 0 for what must have eager's values.
        limit: the most that each element may be off, where the problem knows.
        allowed: another result that torch's settings allow, where eager may take TF32.

    Attributes:
        shape, dtype, numel: of the output, whose memory `forget` gives back.
        is_exact: only eager's values are right.
        size: the root of the exact result's mean square.
        errors: eager's own: max, mean and relative, as in `Found`.
    """

    def __init__(
        self,
        eager: torch.Tensor,
        exact: Maybe,
        terms: int = 1,
        limit: Maybe = None,
        allowed: Maybe = None,
    ) -> None:
        self.shape = list(eager.shape)
        self.dtype = eager.dtype
        self.numel = eager.numel()
        self.eager = _flat(eager)
        self.limit = _flat(limit)
        self.is_exact = terms == 0 or not self.dtype.is_floating_point
        self.exact = None if self.is_exact or self.dtype == torch.float64 else _flat(exact)
        self.slack = 0.0
        self.mean_slack = math.inf
        self.relative_slack = 0.0
        self.size = 0.0
        self.errors = (0.0, 0.0, 0.0)
        if self.exact is not None:
            self._set_budget(terms, _flat(allowed))
        elif not self.is_exact:
            self.slack = self.relative_slack = TOLERANCES.get(self.dtype, HALF_TOLERANCE)

    def _set_budget(self, terms: int, allowed: Maybe) -> None:
        """Set the budget from eager's errors, or from those of `allowed`, if they are larger."""
        eps = torch.finfo(self.dtype).eps
        own = self.compare([(0, self.eager)])  # without a budget yet: for the errors alone
        if allowed is not None:
            other = self.compare([(0, allowed.to(self.eager))])
            if other.mean > own.mean:
                own = other
        is_low = own.relative > CLASSES["float32-grade"]
        factor = LOW_FACTOR if is_low else FACTOR
        roundings = 1 if is_low else ROUNDINGS
        self.size = own.size
        self.errors = (own.max, own.mean, own.relative)
        self.relative_slack = roundings * eps
        self.slack = factor * own.max + eps * self.size
        self.mean_slack = factor * own.mean + self.relative_slack * own.mean_size
        if self.dtype == torch.float32 and not is_low:
            sums = min(math.sqrt(terms) / 4 * eps / 2, CLASSES["float32-grade"] / SPREADS)
            self.relative_slack = max(self.relative_slack, SPREADS * sums)
            self.slack = max(self.slack, SPREADS * sums * self.size)
            self.mean_slack = max(self.mean_slack, 4 * sums * self.size)

    def forget_exact(self) -> None:
        """Free the exact result; `compare` then uses eager's. The budget stays."""
        self.exact = None

    def forget(self) -> None:
        """Free the results; the budget stays."""
        self.eager = self.exact = self.limit = None

    def compare(self, pieces: Iterable[tuple[int, torch.Tensor]]) -> Found:
        """Compare a result that arrives in flat pieces, each with the place where it begins."""
        totals = _Totals()
        wrong = []
        first = ""
        is_equal = True
        for begin, piece in pieces:
            for offset in range(0, len(piece), BLOCK):
                got = piece[offset : offset + BLOCK]
                start = begin + offset
                eager = self.eager[start : start + len(got)]
                is_same = first_mismatch(got, eager) is None
                is_equal = is_equal and is_same
                if is_same and self.is_exact:
                    continue
                expected = self._expected(start, len(got))
                error = errors(got, eager, expected)
                allowed = self._allowed(expected)
                if self.limit is not None:
                    allowed = self.limit[start : start + len(got)].nan_to_num(0, 0, 0)
                wrong.append(error > allowed)
                first = first or _first(wrong[-1], got, expected)
                totals.add(error, expected.abs().nan_to_num_(0, 0, 0))
        beyond = torch.cat(wrong) if wrong else torch.zeros(0, dtype=torch.bool)
        count = max(self.numel, 1)
        mean = totals.sum_of_errors / count
        reached = accuracy_class(totals.relative)
        is_far = totals.largest_error > GROSS * totals.largest_size or reached == WORST
        return Found(
            problem=self._problem(count_true(beyond), first, totals.largest_error, mean),
            max=totals.largest_error,
            mean=mean,
            relative=totals.relative,
            size=math.sqrt(totals.squared_sizes / count),
            mean_size=totals.sum_of_sizes / count,
            equal=is_equal,
            gross=self.is_exact or is_far,
            beyond=beyond,
        )

    def _problem(self, beyond: int, first: str, furthest: float, mean: float) -> str | None:
        """Return what is wrong with a result, in words; None if nothing is.

        Args:
            beyond: how many elements are off by too much.
            first: the first of them, in words.
            furthest: the largest error.
            mean: the mean error.
        """
        eagers_max, eagers_mean, _ = self.errors
        if self.limit is not None:  # errors no larger than eager's, but for chance, are right too
            if furthest <= NOISE["max"] * eagers_max and mean <= NOISE["mean"] * eagers_mean:
                return None
        elif not beyond and mean > self.mean_slack:
            return f"mean error {mean:.3g}; eager's own error allows {self.mean_slack:.3g}"
        what = "elements differ" if self.is_exact else "elements beyond the error budget"
        return f"{beyond:,} of {self.numel:,} {what}, the first: {first}" if beyond else None

    def allows(self, got: torch.Tensor, eager: torch.Tensor) -> bool:
        """Return whether a tensor is right where another is eager's."""
        is_alike = got.dtype == eager.dtype and got.numel() == eager.numel()
        return is_alike and self.compare_some(got.reshape(-1), eager.reshape(-1)) is None

    def compare_some(self, got: torch.Tensor, eager: torch.Tensor) -> str | None:
        """Compare another result with eager's; return what is wrong, None if nothing is."""
        if self.is_exact:
            return first_mismatch(got, eager)
        bad = self.beyond(got, eager)
        first = _first(bad, got.reshape(-1), eager.reshape(-1))
        count = f"{count_true(bad):,} of {got.numel():,} elements"
        return f"{count}, the first: {first}" if first else None

    def beyond(self, got: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
        """Return a flat mask of the elements of `got` that are too far from `eager`."""
        got, eager = got.reshape(-1), eager.reshape(-1)
        if self._is_surely_near(got, eager):
            return torch.zeros(len(got), dtype=torch.bool, device=got.device)
        size = _root_mean_square(eager)
        growth = max(1.0, size / self.size) if self.size else 1.0
        found = []
        for start in range(0, len(got), BLOCK):
            mine, theirs = got[start : start + BLOCK], eager[start : start + BLOCK]
            expected = theirs.double()
            found.append(errors(mine, theirs, expected) > self._allowed(expected, growth))
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)

    def _is_surely_near(self, got: torch.Tensor, eager: torch.Tensor) -> bool:
        """Return whether all errors are within half of the budget, computed in float32.

        This is quick, and nearly always true. It is false for NaN and infinities.
        """
        if not got.is_floating_point() or got.dtype == torch.float64:
            return False
        for start in range(0, len(got), BLOCK):
            mine, theirs = (t[start : start + BLOCK].float() for t in (got, eager))
            allowed = theirs.abs().mul_(0.5 * self.relative_slack).add_(0.5 * self.slack)
            if not bool(((mine - theirs).abs_() <= allowed).all()):
                return False
        return True

    def _expected(self, start: int, count: int) -> torch.Tensor:
        """Return the exact result in float64; eager's elements where either is not finite."""
        eager = self.eager[start : start + count].double()
        if self.exact is None:
            return eager
        exact = self.exact[start : start + count]
        return torch.where(eager.isfinite() & exact.isfinite(), exact, eager)

    def _allowed(self, expected: torch.Tensor, growth: float = 1.0) -> torch.Tensor:
        """Return how far off each element may be; `growth` scales `slack` for larger results."""
        relative = expected.abs().mul_(self.relative_slack).nan_to_num_(0, 0, 0)
        return relative.add_(growth * self.slack)


def errors(got: torch.Tensor, eager: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return |got - expected|; where not finite, 0 if got has eager's value, else infinity."""
    if not got.is_floating_point():
        signed = INTEGERS[got.element_size()]
        return (got.view(signed) != eager.view(signed)).double()
    error = (got.double() - expected).abs_()
    if error.sum().isfinite():
        return error
    same = ((got == eager) | (got.isnan() & eager.isnan())) & ~error.isfinite()
    return error.nan_to_num_(math.inf, math.inf).masked_fill_(same, 0)


def accuracy_class(relative: float) -> str:
    """Return the accuracy class of a relative error."""
    return next((name for name, most in CLASSES.items() if relative <= most), WORST)


def count_true(mask: torch.Tensor) -> int:
    """Return how many elements of a flat mask are true.

    They are counted in pieces: on a GPU the sum of a mask needs eight times its memory.
    """
    count = 0
    for start in range(0, len(mask), BLOCK):
        count += int(mask[start : start + BLOCK].sum())
    return count


def _root_mean_square(x: torch.Tensor) -> float:
    squares = 0.0
    for start in range(0, len(x), BLOCK):
        squares += x[start : start + BLOCK].double().nan_to_num(0, 0, 0).square_().sum().item()
    return math.sqrt(squares / max(len(x), 1))


def _flat(x: Maybe) -> Maybe:
    return None if x is None else x.detach().contiguous().view(-1)


def _first(bad: torch.Tensor, got: torch.Tensor, expected: torch.Tensor) -> str:
    """Return the first of the bad elements in words, "" if there is none."""
    if not bad.any():
        return ""
    where = bad.to(torch.uint8).argmax().item()
    return f"got {got[where]:.9g}, expected {expected[where]:.9g}"


class Operators(TorchDispatchMode):
    """Within it, notes the operators that are called, and the terms of their longest sum.

    Attributes:
        names: of the operators.
        most_terms: of a sum that gives one element.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.most_terms = 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: to skip Dynamo, torch would import it first, which takes two seconds.

        Compiled frames are left out while a mode is on in any case.
        """
        return False

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Call the operator and note it."""
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.names.add(name)
        self.most_terms = max(self.most_terms, _terms(name, args, out))
        return out


class RoundedOperands(TorchDispatchMode):
    """Within it, operators that torch may compute in TF32 get operands rounded to TF32's bits.

    A float64 result under this mode shows how far off a result is that torch's settings allow,
    whichever algorithm a process happens to take.
    """

    def __init__(self, allowed: tuple[str, ...]) -> None:
        super().__init__()
        self._allowed = allowed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as `Operators` does."""
        return False

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Call the operator, with rounded operands where it is one of the allowed."""
        if any(word in func._schema.name for word in self._allowed):
            args = tuple(_rounded(x) for x in args)
        return func(*args, **(kwargs or {}))


def _rounded(x: object) -> object:
    """Return x with TF32's 11 significant bits, if it is a tensor of float64, or a list of them."""
    if isinstance(x, (list, tuple)):
        return type(x)(_rounded(part) for part in x)
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float64:
        return x
    fraction, exponent = torch.frexp(x)
    return torch.ldexp((fraction * 2**11).round() / 2**11, exponent)


def _terms(name: str, args: tuple, out: object) -> int:
    """Return how many terms the sum has that gives one element of an operator's result.

    Args:
        name: the operator's, without "aten::".
        args: its arguments.
        out: what it returned.
    """
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if not tensors or not tensors[0].dim():
        return 1
    if name in CUMULATIVE:
        return tensors[0].shape[args[1]]
    if name in PRODUCTS:
        return tensors[PRODUCTS[name]].shape[-1]
    if name in LAYERS:
        return LAYERS[name](args)
    if "attention" in name:
        return max(x.shape[-1] for x in tensors) + tensors[1].shape[-2]
    return _terms_of_reduction(name, tensors[0], out)


def _terms_of_convolution(args: tuple) -> int:
    weight, is_transposed = args[1], args[6]
    outputs = weight.shape[1] if is_transposed else weight.shape[0]
    return weight.numel() // max(outputs, 1)


def _terms_of_layer_norm(args: tuple) -> int:
    normalized_shape = args[1]
    return math.prod(normalized_shape)


def _terms_of_channels(args: tuple) -> int:
    """Return how many elements a channel of x has, `[batch, channels, ...]`."""
    x = args[0]
    return x.numel() // max(x.shape[1], 1)


LAYERS = {
    "convolution": _terms_of_convolution,
    "native_layer_norm": _terms_of_layer_norm,
    "native_batch_norm": _terms_of_channels,
    "native_group_norm": _terms_of_channels,
}


def _terms_of_reduction(name: str, x: torch.Tensor, out: object) -> int:
    """Return how many elements of x give one of the result; 1 for what is no reduction."""
    result = out[0] if isinstance(out, tuple) else out
    if not isinstance(result, torch.Tensor) or not any(word in name for word in REDUCTIONS):
        return 1
    return max(1, x.numel() // max(result.numel(), 1))
