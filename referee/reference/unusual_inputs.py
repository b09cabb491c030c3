"""Inputs that `get_inputs` would not draw.

Some wrong solutions are right for all inputs that `get_inputs` draws. An example is a ReLU that
returns its input, where all inputs are positive. Another returns an earlier result for inputs that
look like earlier ones.
"""

import random

import torch

from referee.contestants.forms import flat_bytes
from referee.reference.problem import Problem
from referee.reference.random_values import new_seed, vary

# The kinds of unusual inputs; the words are for messages.
BOTH_SIGNS = "inputs of both signs"
ALTERED = "inputs altered in part"
ALTERED_SHARE = 16  # a divisor: a sixteenth of an input is altered
MAX_ALTERED_BYTES = 1 << 22
SIGNS_AT_A_TIME = 1 << 24  # whose signs are drawn, to save memory


def unusual_inputs(problem: Problem, kind: str, inputs: list) -> list:
    """Return unusual inputs, made from usual ones, which stay unchanged.

    Args:
        problem: the problem, which also draws fresh inputs.
        kind: BOTH_SIGNS or ALTERED.
        inputs: for ALTERED, inputs that the solution has seen, so that a result that it kept is
            wrong for the altered ones.
    """
    unusual = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    if kind == BOTH_SIGNS:
        for i in problem.input_source.float_indices:
            _draw_signs(_elements(unusual[i]))
        return unusual
    if problem.input_source.repeats:
        for i in problem.input_source.float_indices:
            _shuffle_a_part(_elements(unusual[i]))
        return unusual
    fresh = problem.draw()
    for i in problem.input_source.float_indices:
        _copy_a_part(_elements(unusual[i]), _elements(fresh[i]))
    return unusual


def _elements(x: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of its memory, without a copy."""
    return flat_bytes(x).view(x.dtype)


def _draw_signs(x: torch.Tensor) -> None:
    """Give the elements of a flat tensor random signs; zeros become values between -1 and 1."""
    for part in x.split(SIGNS_AT_A_TIME):
        drawn = torch.empty_like(part).uniform_(-1, 1)
        part.mul_(drawn.sign()).add_(drawn.mul_(part == 0))


def _copy_a_part(x: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a random range of one flat tensor to the same place in another."""
    part = _random_range(x)
    x[part] = source[part]


def _shuffle_a_part(x: torch.Tensor) -> None:
    """Overwrite a random range of a flat tensor with elements of random places in the tensor.

    The new values are thus values that `get_inputs` draws, and the sum of all elements changes. If
    the range stays the same, as where all elements are equal, `vary` alters it.
    """
    part = _random_range(x)
    old = x[part].clone()
    generator = torch.Generator(device=x.device).manual_seed(new_seed())
    places = torch.randint(len(x), (len(old),), device=x.device, generator=generator)
    x[part] = x[places]
    if torch.equal(x[part], old):
        x[part] = vary(old, new_seed())


def _random_range(x: torch.Tensor) -> slice:
    """Return a random range of a flat tensor's elements, which is altered.

    If it can, it leaves out the tensor's beginning, at which a guess is most likely to look.
    """
    count = max(1, min(len(x) // ALTERED_SHARE, MAX_ALTERED_BYTES // x.element_size()))
    last_start = len(x) - count
    start = random.SystemRandom().randrange(min(count, last_start), last_start + 1)
    return slice(start, start + count)
