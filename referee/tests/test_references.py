"""Tests of references: their seeds, and their training steps without memory."""

import pytest
import torch
from graded import grade
from texts import IMPORTS, correct, module, reference

from referee.checks import timed_training_steps
from referee.contestants.results import elements_share_memory
from referee.reference.file import load
from referee.reference.problem import Problem
from referee.reference.training_step import step_or_none
from referee.reference.trivial_results import describe_trivial_results


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


# Its float64 result would have dtype float32. So the budget is an absolute tolerance of 1e-4, and
# all results are within it.
TINY = "return x.float() * 1e-6"


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        ("return torch.zeros_like(x) + 1", "the same for all inputs and parameters that were"),
        (TINY, "cannot tell the reference's result for other inputs and parameters apart"),
        ("return x * 3", ""),
    ],
)
def test_a_result_that_the_budget_allows_is_not_called_the_same(tmp_path, forward, words):
    path = tmp_path / "problem.py"
    path.write_text(IMPORTS + reference(forward, "[torch.rand(64, 64)]"))
    problem = Problem("problem", load(path), torch.device("cpu"))
    lines = describe_trivial_results(problem, [])
    assert words in "; ".join(lines)
    assert bool(lines) == bool(words)


@pytest.mark.parametrize(
    ("shape", "strides", "is_shared"),
    [
        ([3, 4], [4, 1], False),
        ([3, 4], [1, 3], False),
        ([3, 4], [9, 2], False),
        ([3, 4], [1, 0], True),
        ([3, 4], [2, 1], True),
        ([3, 1, 4], [4, 0, 1], False),
        ([1, 1], [0, 0], False),
        ([3, 0], [0, 0], False),
        ([], [], False),
        ([2, 2, 2], [4, 0, 1], True),
    ],
)
def test_strides_with_which_elements_share_memory(shape, strides, is_shared):
    assert elements_share_memory(shape, strides) == is_shared


def test_a_shape_that_changes_only_in_timed_steps_ends_them(tmp_path, monkeypatch):
    draw_round = timed_training_steps._draw_round

    def draw_a_negative_element(*arguments):
        monkeypatch.setenv("NEGATIVE", "1")
        return draw_round(*arguments)

    monkeypatch.setattr(timed_training_steps, "_draw_round", draw_a_negative_element)
    last = "torch.tensor([-1.0 if 'NEGATIVE' in os.environ else 1.0])"
    problem = "import os\n" + reference("return x[x > 0]", f"[torch.cat([torch.rand(63), {last}])]")
    table = {"same": correct(module("return x[x > 0]"), "not timed: shapes of its results depend")}
    grade(problem, table, tmp_path)
