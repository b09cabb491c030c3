"""A mode in which the reference rounds otherwise, as another correct program would.

Another order of sums moves a sum by a few roundings. Where a reference is discontinuous, as `sign`
is at 0, that changes an element entirely. Results under this mode show which elements these are.
"""

import math
from enum import Enum

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from referee.contestants.forms import is_float8
from referee.reference.in_parts import change_in_parts
from referee.reference.problem import Problem
from referee.reference.random_values import new_seed
from referee.reference.tf32 import TF32_BITS

NOISE = 4  # in each operand and result, in units of eps
# In float32, sqrt(n) eps is added for the problem's longest sum of n terms, but at most this.
MAX_NOISE_OF_SUMS = 5e-5
# Operators that do not round: those that choose, compare or copy elements. Views are not listed.
EXACT_NAMES = (
    "relu threshold hardtanh clamp clamp_min clamp_max abs neg sign sgn floor ceil round "
    "trunc eq ne lt le gt ge isnan isinf isfinite signbit logical_not logical_and logical_or "
    "any all max min amax amin maximum minimum fmax fmin argmax argmin aminmax cummax cummin "
    "where masked_fill masked_select masked_scatter nonzero gather scatter index index_put "
    "index_select index_fill index_copy take embedding sort argsort topk kthvalue median "
    "nanmedian mode unique bucketize searchsorted clone copy _to_copy lift_fresh "
    "lift_fresh_copy cat stack flip roll repeat constant_pad_nd reflection_pad1d "
    "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d "
    "tril triu diag_embed fill zero zeros_like ones_like full_like empty_like _unsafe_view "
    "_reshape_copy max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d "
    "adaptive_max_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "pixel_shuffle pixel_unshuffle channel_shuffle"
)
EXACT_OPERATORS = frozenset(EXACT_NAMES.split())


class OperatorKind(Enum):
    """The kinds of operators, by where they round."""

    EXACT = "does not round: it chooses, compares or copies elements, or makes a view"
    IN_PLACE = "rounds, and writes the result into an operand"
    NEW_RESULT = "rounds, and returns new tensors"


class OtherRoundings(TorchDispatchMode):
    """Adds random noise, as large as roundings, to operands and results while the mode is on.

    Operators that do not round get none. So a function of the inputs that has no roundings, such as
    `sign(x)`, stays the same.

    Args:
        problem: says how many terms sums have, and whether products may be in TF32.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self._terms = problem.terms
        self._is_in_tf32 = bool(problem.operators_in_tf32())
        self._generator = torch.Generator(device=problem.device).manual_seed(new_seed())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, for the reason that `operators.Operators` gives."""
        return False

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Call the operator, with noise in its operands and in its result if it rounds."""
        kwargs = kwargs or {}
        kind = _kind_of(func)
        if kind is OperatorKind.EXACT or not self._any_gets_noise(args):
            return func(*args, **kwargs)
        if kind is OperatorKind.IN_PLACE:  # it would write into noisy copies of its operands
            result = func(*args, **kwargs)
            if self._gets_noise(result):
                self._add_noise(result)
            return result
        return self._with_noise(func(*self._with_noise(args), **kwargs))

    def _with_noise(self, value: object) -> object:
        """Return a copy of a tensor of floats, with noise.

        The tensors in a list or tuple get noise, too. Any other value is returned unchanged.
        """
        if isinstance(value, (list, tuple)):
            return type(value)(self._with_noise(part) for part in value)
        if not self._gets_noise(value):
            return value
        return self._add_noise(value.clone())

    def _any_gets_noise(self, value: object) -> bool:
        """Return whether noise can be added to an argument, or to a part of a list or tuple."""
        if isinstance(value, (list, tuple)):
            return any(map(self._any_gets_noise, value))
        return self._gets_noise(value)

    def _gets_noise(self, x: object) -> bool:
        """Return whether x is a tensor of floats on the device; torch cannot draw float8."""
        if not isinstance(x, torch.Tensor) or x.device != self._generator.device:
            return False
        return x.is_floating_point() and not is_float8(x) and x.numel() > 0

    def _add_noise(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply each element by a random factor near 1, in place; return the tensor."""
        largest = self._relative_noise(x.dtype)

        def add_noise(part: torch.Tensor) -> None:
            noise = torch.empty_like(part).uniform_(-largest, largest, generator=self._generator)
            part.addcmul_(part, noise)

        change_in_parts(x, add_noise)
        return x

    def _relative_noise(self, dtype: torch.dtype) -> float:
        """Return by how much noise changes an element at most, relative to its size."""
        eps = torch.finfo(dtype).eps
        noise = NOISE * eps
        if dtype == torch.float32:
            noise += min(math.sqrt(self._terms) * eps, MAX_NOISE_OF_SUMS)
            if self._is_in_tf32:
                noise += 2.0**-TF32_BITS
        return noise


def _kind_of(func: object) -> OperatorKind:
    """Return the kind of an operator, by its name and by its schema."""
    name = func._schema.name.removeprefix("aten::").rstrip("_").removesuffix("_backward")
    if name in EXACT_OPERATORS:
        return OperatorKind.EXACT
    # A result that shares memory with an operand has an alias: a view of it, or it itself.
    aliases = [x.alias_info for x in func._schema.returns if x.alias_info is not None]
    if not aliases:
        return OperatorKind.NEW_RESULT
    is_view = any(not alias.is_write for alias in aliases)
    return OperatorKind.EXACT if is_view else OperatorKind.IN_PLACE
