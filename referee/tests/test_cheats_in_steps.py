"""Cheats in training steps: gradients that are right once, and memory that is not new."""

import math

import pytest
import torch

from referee.checks import other_gradients
from referee.testing.graded import grade, quick_and_slow
from referee.testing.texts import (
    IS_TIMED,
    LINEAR,
    LINEAR_INIT,
    RELU,
    correct,
    module,
    own_linear_relu,
    reference,
    wrong,
)

# ------------------------------------------------------------------ gradients that are right once

FORWARD = "return Own.apply(x, self.fc.weight, self.fc.bias) * self.scale"
# Is right in the first untimed step, wrong in the second one, and raises in timed ones.
RIGHT_ONCE = IS_TIMED + "calls = []\n" + own_linear_relu("""
calls.append(0)
if len(calls) > 1:
    gradients = [torch.rand_like(gradient) for gradient in gradients]
if is_timed():
    raise torch.OutOfMemoryError("no memory")
""") + module(FORWARD, LINEAR_INIT)  # fmt: skip
AT_LINEAR = {
    "right_once": wrong(RIGHT_ONCE, "^gradient of "),
    "right": correct(own_linear_relu() + module(FORWARD, LINEAR_INIT), "training step"),
}


@pytest.mark.parametrize("table", quick_and_slow(AT_LINEAR, "right_once", "right"))
def test_gradients_that_are_right_in_one_step_alone_are_wrong(table, device, tmp_path):
    grade(LINEAR, table, tmp_path, device=device)


# ------------------------------------------------- gradients that are right for drawn inputs alone
#
# All inputs that `get_inputs` draws are positive.

OWN_RELU = """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return RESULT

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        assert x.min() >= LEAST
        return GRADIENT

"""


def own_relu(gradient: str, result: str = "torch.relu(x)", least: float = -math.inf) -> str:
    """Return the text of an autograd function, `Own`, whose backward refuses x below `least`."""
    text = OWN_RELU.replace("GRADIENT", gradient).replace("RESULT", result)
    return text.replace("LEAST", f"float('{least}')")


USE = module("return Own.apply(x)")
MASKED = "g * (x > 0)"
COPIES = "return x.clone() if torch.is_grad_enabled() else torch.relu(x)"
BOTH_SIGNS = "^training step for inputs of both signs, "
AT_POSITIVE_RELU = {
    "gradient_passes": wrong(own_relu("g") + USE, f"{BOTH_SIGNS}gradient of x: "),
    "copies_when_recorded": wrong(module(COPIES), f"{BOTH_SIGNS}result 0: "),
    "no_gradient": wrong(own_relu("g if x.min() >= 0 else None") + USE, "^lacks a gradient"),
    "right": correct(own_relu(MASKED) + USE, "^exact; training step$"),
    "refuses": correct(own_relu(MASKED, least=0) + USE, "^exact; training step$"),
    "another_function": correct(own_relu("g", "x.abs()") + USE, "^differs .*; training step$"),
}


@pytest.mark.parametrize(
    "table", quick_and_slow(AT_POSITIVE_RELU, "gradient_passes", "right", "refuses")
)
def test_gradients_are_compared_for_inputs_of_both_signs(table, device, tmp_path):
    records = grade(RELU, table, tmp_path, device=device)
    for name, record in records.items():
        assert record["refused"] == (["inputs of both signs"] if name == "refuses" else [])


# The reference's gradients for inputs of both signs are NaN, or its backward raises.
ROOTS = reference("return torch.relu(x).sqrt()", "[torch.rand(64, 256) + 0.1]")
FINITE = own_relu("g * (x > 0) / x.clamp(min=0.1).sqrt() / 2", "torch.relu(x).sqrt()") + USE
REFUSING = own_relu(MASKED, least=0) + reference("return Own.apply(x)", "[torch.rand(64, 256)]")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "solution"), [(ROOTS, FINITE), (REFUSING, own_relu("g") + USE)]
)
def test_gradients_that_the_reference_lacks_for_both_signs_are_not_compared(
    problem, solution, device, tmp_path
):
    grade(problem, {"honest": correct(solution, "training step")}, tmp_path, device=device)


@pytest.mark.slow
def test_without_memory_for_both_signs_training_steps_are_timed_all_the_same(tmp_path, monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(other_gradients, "unusual_inputs", fail)
    table = {"right": correct(own_relu(MASKED) + USE, f"{other_gradients.NO_ROOM}.*training step$")}
    grade(RELU, table, tmp_path)


# ---------------------------------------------------------- no gradients, and other results

# Right without autograd, as a timed forward is. HERE runs when autograd records the forward.
RECORDED = """
if torch.is_grad_enabled():
    HERE
return torch.relu(x)
"""
# Has no right backward, but may have right results.
RAISES_IN_BACKWARD = """
class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError("later")

"""
ZEROS = "^returns zeros: a forward that autograd records$"
RAISES = "^forward only: its training step raises NotImplementedError: later"


def when_recorded(here: str) -> str:
    """Return the text of a module that runs the line `here` when autograd records it."""
    return RAISES_IN_BACKWARD + module(RECORDED.replace("HERE", here))


AT_RELU = {
    "zeros": wrong(when_recorded("return torch.zeros_like(x)"), ZEROS),
    "zeros_then_raises": wrong(when_recorded("return Own.apply(0 * x)"), ZEROS),
    "no_graph": correct(when_recorded("return torch.relu(x).detach()"), "^forward only;"),
    "raises_in_backward": correct(when_recorded("return Own.apply(torch.relu(x))"), RAISES),
    "raises_in_forward": correct(when_recorded('raise NotImplementedError("later")'), RAISES),
}


@pytest.mark.parametrize("table", quick_and_slow(AT_RELU, "zeros", "no_graph", "raises_in_forward"))
def test_results_without_gradients_are_compared_when_autograd_records(table, device, tmp_path):
    grade(RELU, table, tmp_path, device=device)


# --------------------------------------------------------------------- memory that is not new

DOUBLED = reference("return 2 * x", "[torch.randn(64, 256)]")
# Keeps the memory of the first NAME, which is the output or the gradient of a step, and writes all
# later ones there.
OWN = """
kept = {}

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return place("output", 2 * x)

    @staticmethod
    def backward(ctx, g):
        return place("gradient", 2 * g)

def place(kind, value):
    if kind != KIND:
        return value
    return kept.setdefault(kind, torch.empty_like(value)).copy_(value)

"""
# Has gradients in the steps that are compared before later steps run, and in timed ones.
NO_GRADIENT_LATER = IS_TIMED + """
steps = []

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        steps.append(0)
        return 2 * g if len(steps) <= 3 or is_timed() else None

""" + module("return Own.apply(x)")  # fmt: skip
OWN_DOUBLED = OWN + module("return Own.apply(x) if torch.is_grad_enabled() else 2 * x")
OVERWRITES = "^a later step overwrites an earlier step's"
AT_DOUBLED = {
    "one_output": wrong(OWN_DOUBLED.replace("KIND", "'output'"), f"{OVERWRITES} result 0"),
    "one_gradient": wrong(OWN_DOUBLED.replace("KIND", "'gradient'"), f"{OVERWRITES} gradient of x"),
    "no_gradient_later": wrong(NO_GRADIENT_LATER, "^a later step has no gradient of x"),
    "new_memory": correct(OWN_DOUBLED.replace("KIND", "None"), "training step"),
}


@pytest.mark.parametrize("table", quick_and_slow(AT_DOUBLED, "one_output", "one_gradient"))
def test_results_and_gradients_of_steps_are_new_memory(table, device, tmp_path):
    grade(DOUBLED, table, tmp_path, device=device)


# From the fifth untimed step on, which is one of check_step_memory, the process says that it has
# read another first element of result 0, as if another stream had still been computing it.
INCOMPLETE = """
from referee.child.request_handler import RequestHandler

run, calls = RequestHandler.run_checked_step, []
def run_checked_step(self, *args, **options):
    reply = run(self, *args, **options)
    calls.append(0)
    if len(calls) > 4:
        reply["elements"] = {"result": 0, "indices": [0], "bytes": "00"}
    return reply
RequestHandler.run_checked_step = run_checked_step
"""


def test_later_steps_are_complete_when_they_have_returned(tmp_path):
    table = {"late": wrong(INCOMPLETE + module("return 2 * x"), "^result 0: .* is not complete")}
    grade(DOUBLED, table, tmp_path)


# The reference returns a view of its input beside a new result.
WITH_VIEW = reference("return 2 * x, x[:1]", "[torch.randn(64, 256)]")
OWN_WITH_VIEW = OWN + module("return (Own.apply(x) if torch.is_grad_enabled() else 2 * x), x[:1]")


def test_a_view_beside_it_excuses_no_other_result(device, tmp_path):
    table = {"one_output": wrong(OWN_WITH_VIEW.replace("KIND", "'output'"), OVERWRITES)}
    grade(WITH_VIEW, table, tmp_path, device=device)
