"""Tests of references: their seeds, and their training steps without memory."""

import pytest
import torch
from texts import IMPORTS, reference

from referee.reference_file import load
from referee.reference_step import step_or_none


def test_a_reference_without_memory_is_not_one_without_gradients():
    def raise_error(error):
        raise error

    assert step_or_none(lambda: raise_error(RuntimeError("no derivative"))) is None
    with pytest.raises(torch.OutOfMemoryError):
        step_or_none(lambda: raise_error(torch.OutOfMemoryError("none")))


def test_what_is_drawn_later_does_not_follow_from_a_constructors_seed(device, tmp_path):
    """A solution knows the seed. So the generators get the states back that they had before."""
    path = tmp_path / "problem.py"
    drawing = "self.drawn = torch.rand(4)"
    path.write_text(IMPORTS + reference("return x", "[torch.rand(4)]", drawing))
    file = load(path)
    torch.rand(1, device=device)  # makes the GPU's generator
    states = generator_states(device)
    file.construct([], 5, torch.device(device))
    assert all(map(torch.equal, states, generator_states(device)))


def generator_states(device):
    on_gpus = torch.cuda.get_rng_state_all() if device == "cuda" else []
    return [torch.get_rng_state(), *on_gpus]
