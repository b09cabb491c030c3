"""The second look: which wrong elements other roundings of the reference explain."""

from types import SimpleNamespace

import pytest
import torch

from referee.comparison.budget import Budget
from referee.comparison.gradient_rules import Step, Steps, wrong_in_every_step
from referee.comparison.quantity import Kind, Quantity
from referee.comparison.reference_tensor import ReferenceTensor
from referee.comparison.second_look import find_excused
from referee.reference.other_roundings import OtherRoundings
from referee.testing.graded import grade
from referee.testing.texts import correct, module, own_linear_relu, reference, wrong

CPU = torch.device("cpu")
TERMS = 512
PROBLEM = SimpleNamespace(terms=TERMS, device=CPU, operators_in_tf32=lambda: ())
# Discontinuous functions of a sum.
STEPS = {
    "sign": torch.sign,
    "round": lambda y: torch.round(y + 0.5),
    "floor": torch.floor,
    "remainder": lambda y: torch.remainder(y, 1),
    "comparison": lambda y: y > 0,
    "argmax": lambda y: torch.stack([y, -y]).argmax(0),
}


def draw():
    """Return operands whose first product is near 0 in one element, where rounding decides."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(128, TERMS, generator=generator)
    w = torch.randn(TERMS, 64, generator=generator)
    y = x[0].double() @ w[:, 0].double()
    x[0, 0] -= (y / w[0, 0]).float()
    x[5], w[:, 1] = x[0], w[:, 0]
    return x, w


def rounded_otherwise_of(function):
    """Return a function that yields a reference's results with other roundings."""

    def rounded_otherwise():
        for _ in range(16):
            with OtherRoundings(PROBLEM):
                result = function()
            yield result

    return rounded_otherwise


@pytest.mark.parametrize("name", STEPS)
def test_elements_that_rounding_decides_are_excused(name):
    x, w = draw()
    step = STEPS[name]
    eager = step(x @ w)
    output = ReferenceTensor(eager, None, TERMS)
    rounded_otherwise = rounded_otherwise_of(lambda: step(x @ w))
    near_zero = torch.zeros(128, 64)
    near_zero[0, :2] = near_zero[5, :2] = 1e-5
    honest = [step(x @ w + sign * near_zero) for sign in (-1, 1)]
    assert any(output.compare(got).mistake for got in honest)
    for got in honest:
        assert output.compare(got, rounded_otherwise).mistake is None
        assert output.spec.find_mistake(got, eager, rounded_otherwise) is None


@pytest.mark.parametrize("name", STEPS)
def test_elements_that_rounding_does_not_decide_stay_wrong(name):
    x, w = draw()
    step = STEPS[name]
    eager = step(x @ w)
    output = ReferenceTensor(eager, None, TERMS)
    rounded_otherwise = rounded_otherwise_of(lambda: step(x @ w))
    one_wrong = eager.clone()
    one_wrong[77, 33] = ~eager[77, 33] if name == "comparison" else eager[77, 33] + 1
    for got in (one_wrong, torch.zeros_like(eager), step(x.flip(0) @ w)):
        assert output.compare(got, rounded_otherwise).mistake
        assert output.spec.find_mistake(got, eager, rounded_otherwise)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x == 1).float(),  # has no roundings
        lambda x: torch.floor(x / 2),  # other roundings move half of the elements
    ],
)
def test_nothing_is_excused_where_rounding_moves_nothing_or_much(function):
    x = torch.arange(1024.0) % 4
    eager = function(x)
    got = eager.clone()
    got[6] -= 1  # another rounding of 2 / 2 gives that, too
    output = ReferenceTensor(eager, None)
    assert output.compare(got, rounded_otherwise_of(lambda: function(x))).mistake


@pytest.mark.parametrize(
    ("count", "wrong_count", "are_excused"),
    [(399, 4, True), (399, 5, False), (1000, 10, True), (1000, 11, False)],
)
def test_at_most_a_hundredth_or_four_wrong_elements_are_excused(count, wrong_count, are_excused):
    """Another rounding of the reference has the solution's values in all wrong elements."""
    eager = torch.ones(count)
    is_wrong = torch.arange(count) < wrong_count
    got = eager + is_wrong.float()
    excused = find_excused(is_wrong, got, eager, Budget(atol=0.1), lambda: iter([got]))
    assert (excused is not None) == are_excused
    assert not are_excused or torch.equal(excused, is_wrong)


def test_other_roundings_change_no_operands_and_no_exact_results():
    x, w = draw()
    kept_x, kept_w = x.clone(), w.clone()
    with OtherRoundings(PROBLEM):
        exact = torch.relu_(x.t().clone()), x.sort(1)[0], x.sign(), x.half().float(), x.split(8)[1]
        product = x @ w
        scaled = x.clone().mul_(3)
    expected = kept_x.t().relu(), kept_x.sort(1)[0], kept_x.sign(), kept_x.half().float(), x[8:16]
    assert all(map(torch.equal, exact, expected))
    assert torch.equal(x, kept_x)
    assert torch.equal(w, kept_w)
    for noisy, right in ((product, x @ w), (scaled, 3 * x)):
        error = (noisy - right).norm() / right.norm()
        assert 1e-8 < error < 1e-5


# The sums are spread around 256. Rounding decides the comparison of those that are very near it.
W = "self.w = nn.Parameter(torch.rand(1024, 256))"
COMPARES = reference("return x @ self.w > 256.0", "[torch.rand(256, 1024)]", W)
# Decides by sums in float64, which rounding hardly changes.
IN_FLOAT64 = "y = (x.double() @ self.w.double() > 256.0)\n"
# Inverts one element, anywhere.
ONE_IN_MANY = IN_FLOAT64 + "y.view(-1)[int(torch.randint(y.numel(), ()))] ^= True\nreturn y"
# Keeps its first result.
STALE = IN_FLOAT64 + "self.y = y if self.y is None else self.y\nreturn self.y.clone()"


@pytest.mark.slow
def test_elements_of_a_comparison_may_differ_only_where_rounding_decides(device, tmp_path):
    table = {
        "same": correct(module("return x @ self.w > 256.0", W)),
        "in_float64": correct(module(IN_FLOAT64 + "return y", W)),
        "one_in_many": wrong(module(ONE_IN_MANY, W), ": 1 of 65,536 elements differ"),
        "zeros": wrong(
            module("return torch.zeros(256, 256, device=x.device).bool()", W), "returns zeros"
        ),
        "stale": wrong(
            module(STALE, W + "\nself.y = None"),
            "^(answers with old parameters: )?other parameters",
        ),
    }
    grade(COMPARES, table, tmp_path, device=device)


# ------------------------------------------------------------------- gradients of training steps

MLP_INIT = "self.a, self.b, self.c = nn.Linear(256, 512), nn.Linear(512, 512), nn.Linear(512, 64)"
MLP = "return self.c(torch.relu(self.b(torch.relu(self.a(x)))))"
# Adds products in another order than torch.
OTHER_ORDER = """
def linear(layer, x):
    weight = layer.weight
    parts = [x[:, i::8].flip(1) @ weight[:, i::8].flip(1).t() for i in range(8)]
    return sum(parts) + layer.bias

"""
MLP_IN_OTHER_ORDER = OTHER_ORDER + module(
    "return linear(self.c, torch.relu(linear(self.b, torch.relu(linear(self.a, x)))))", MLP_INIT
)
LAYER_INIT = "self.fc = nn.Linear(256, 192)"
NEVER = 10**9  # more backwards than there are
OWN = "return Own.apply(x, self.fc.weight, self.fc.bias)"
LAYER = reference("return torch.relu(self.fc(x))", "[torch.randn(64, 256)]", LAYER_INIT)


def rounds_later(first: int, each: int) -> str:
    """Return the text of a solution of LAYER that rounds its gradients to bfloat16.

    Args:
        first: how many backwards come before that, with right gradients.
        each: each backward whose number is a multiple of this is right later, too.
    """
    lines = f"""
calls.append(0)
if len(calls) > {first} and len(calls) % {each}:
    gradients = [gradient.bfloat16().float() for gradient in gradients]
"""
    return "calls = []\n" + own_linear_relu(lines) + module(OWN, LAYER_INIT)


@pytest.mark.slow
def test_gradients_that_are_rounded_in_timed_steps_are_wrong(device, tmp_path):
    """All of them are right in the two steps that are compared before the times."""
    in_timed_steps = "in timed steps, gradient of"
    table = {
        "never": correct(rounds_later(first=NEVER, each=NEVER), "training step"),
        "at_once": wrong(rounds_later(first=3, each=NEVER), in_timed_steps),
        "after_some_steps": wrong(rounds_later(first=8, each=NEVER), in_timed_steps),
        "every_other_time": wrong(rounds_later(first=3, each=2), in_timed_steps),
    }
    grade(LAYER, table, tmp_path, device=device, trials=8)


POOL = "return nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)"
CONV = "self.conv = nn.Conv2d(8, 16, 3)"
UNFOLDED = """
columns = nn.functional.unfold(x, 3)
weight = self.conv.weight.reshape(16, -1)
y = sum(weight[:, i::8] @ columns[:, i::8] for i in range(8))
y = torch.relu(y + self.conv.bias[:, None]).view(x.shape[0], 16, x.shape[2] - 2, x.shape[3] - 2)
return nn.functional.max_pool2d(y, 2)
"""
SORTS = "return torch.sort(self.fc(x), 1)[0]"
NORMALIZED = "return torch.relu(self.norm(self.fc(x)))"
BATCH_NORM = "self.fc = nn.Linear(256, 192)"
BATCH_NORM += "\nself.norm = nn.BatchNorm1d(192, track_running_stats=False)"
LAYER_NORM = "self.fc, self.norm = nn.Linear(256, 192), nn.LayerNorm(192)"
NORMALIZED_IN_OTHER_ORDER = """
z = linear(self.fc, x)
z = z - z.flip(DIM).mean(DIM, keepdim=True)
variance = z.square().flip(DIM).mean(DIM, keepdim=True)
z = z * torch.rsqrt(variance + self.norm.eps)
return torch.relu(z * self.norm.weight + self.norm.bias)
"""
HONEST = {
    "batch_norm": (
        NORMALIZED,
        BATCH_NORM,
        "[torch.randn(4096, 256)]",
        OTHER_ORDER + module(NORMALIZED_IN_OTHER_ORDER.replace("DIM", "0"), BATCH_NORM),
    ),
    "layer_norm": (
        NORMALIZED,
        LAYER_NORM,
        "[torch.randn(4096, 256)]",
        OTHER_ORDER + module(NORMALIZED_IN_OTHER_ORDER.replace("DIM", "1"), LAYER_NORM),
    ),
    "mlp": (MLP, MLP_INIT, "[torch.randn(128, 256)]", MLP_IN_OTHER_ORDER),
    "pool": (POOL, CONV, "[torch.randn(8, 8, 34, 34)]", module(UNFOLDED, CONV)),
    "sort": (
        SORTS,
        LAYER_INIT,
        "[torch.randn(256, 256)]",
        OTHER_ORDER + module("return torch.sort(linear(self.fc, x), 1)[0]", LAYER_INIT),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_another_order_of_sums_in_training_steps_is_correct(name, device, tmp_path):
    forward, init, inputs, text = HONEST[name]
    table = {"other_order": correct(text, "float32-grade.*training step")}
    grade(reference(forward, inputs, init), table, tmp_path, device=device, trials=8)


def test_the_typical_error_does_not_depend_on_few_elements():
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(100, 100, generator=generator).double()
    eager = exact.float()
    few_rows_differ = torch.cat([1.01 * eager[:2], eager[2:]])
    rounded = eager.bfloat16().float()
    for got, error_of_other_roundings, is_right in (
        (few_rows_differ, 0.0, True),
        (rounded, 0.0, False),
        (rounded, 1e-2, True),
    ):
        quantity = Quantity("gradient of x", Kind.INPUT_GRADIENT)
        quantity.begin_step(ReferenceTensor(eager, exact))
        quantity.judge_timed(eager, eager)  # a right draw
        for _ in range(8):
            quantity.judge_timed(
                got, eager, error_of_other_roundings=lambda error=error_of_other_roundings: error
            )
        assert (quantity.find_mistake() is None) == is_right


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_is_wrong_if_small_elements_are_not_finite_in_timed_steps(value):
    """They are too few to change the typical error, and too small to change the norm."""
    exact = torch.randn(100, 100, generator=torch.Generator().manual_seed(1)).double()
    eager = exact.float()
    wrong = eager.where(eager.abs() > 0.05, value)
    gradient = Quantity("gradient of x", Kind.INPUT_GRADIENT)
    gradient.begin_step(ReferenceTensor(eager, exact))
    gradient.judge_timed(eager, eager)  # a right step switches "wrong in every step" off
    gradient.judge_timed(wrong, eager)
    assert gradient.is_wrong_in_one_step
    assert "elements beyond the error budget" in gradient.find_mistake()


def test_a_gradient_may_be_finite_where_eagers_is_not():
    """In a half type, rounding decides which sums overflow."""
    exact = torch.ones(1000).double()
    finite = exact.float()
    eager = finite.index_fill(0, torch.arange(2), torch.inf)
    gradient = Quantity("gradient of x", Kind.INPUT_GRADIENT)
    gradient.begin_step(ReferenceTensor(finite, exact))
    gradient.judge_timed(eager, eager)
    gradient.judge_timed(finite, eager)
    assert gradient.find_mistake() is None


@pytest.mark.parametrize(
    ("size", "wrong_in_steps", "is_mistake"),
    [
        (1000, [[0, 1, 2], [0, 1, 2]], True),
        (1000, [[0, 1, 2], [0, 3, 4]], False),  # chance is 0.9%
        (1000, [[0]] * 2, False),  # 0.1%
        (1000, [[0]] * 400, True),
        (1000, [[0], [0], []], False),  # the last step is right
        # As README's solution: 70 of 524,288 elements are wrong, and one of them in both steps.
        (524_288, [range(70), range(69, 139)], False),
        (524_288, [range(70), range(66, 136)], True),
    ],
)
def test_elements_are_wrong_in_every_step_more_often_than_chance_explains(
    size, wrong_in_steps, is_mistake
):
    steps = Steps()
    for indices in wrong_in_steps:
        if not indices:
            steps.add_right()
            continue
        wrong = torch.zeros(size, dtype=torch.bool)
        wrong[list(indices)] = True
        steps.add_wrong(Step(relative_error=1e-6), wrong)
    assert wrong_in_every_step(steps) is is_mistake
