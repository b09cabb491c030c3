"""The referee of Linear -> ReLU -> divide accepts what is right and fails every cheat."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from model import LinearReluDivide
from referee import cases, linear_errors, timing
from referee import linear_relu_divide as grader
from referee.errors import Allowance, Comparison, Errors
from referee.linear_checks import Contender, check_gradient, check_output, check_small
from referee.progress import Progress

CPU = torch.device("cpu")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def contender(solution: type[nn.Module]) -> Contender:
    return Contender(LinearReluDivide, solution, CPU, torch.Generator().manual_seed(1))


def small(solution: type[nn.Module]) -> list[str]:
    return check_small(contender(solution), ["highest"], 5, Progress()).failures


def is_served(x):
    return isinstance(x, torch.Tensor) and x.dtype in FLOATS


def cheat(function):
    """A solution that refuses what it must, and otherwise gives function(x, module)."""

    class Cheat(LinearReluDivide):
        def forward(self, x):
            expected = super().forward(x)  # raises what it must
            return function(x, self, expected) if is_served(x) else expected

    return Cheat


def truncated(x, bits):
    """x with so many bits of a float32 taken off."""
    if x.dtype != torch.float32:
        return x
    return (x.detach().view(torch.int32) & -(1 << bits)).view(torch.float32)


def with_operands(rounded):
    def function(x, module, expected):
        if x.dtype != torch.float32:
            return expected
        weight, bias = module.linear.weight, module.linear.bias
        return torch.relu(linear(rounded(x), rounded(weight), bias)) / module.divisor

    return cheat(function)


def unwritten(dim):
    def function(x, module, expected):
        output = torch.empty_like(expected)
        size = expected.shape[dim] if expected.dim() > 1 else 0
        body = size // 4 * 4 if size else 0
        if not body:
            return expected
        output.narrow(dim, 0, body).copy_(expected.narrow(dim, 0, body))
        return output

    return cheat(function)


def change(tensor):
    if tensor.numel() > 100 and tensor.is_contiguous():
        tensor.data.view(-1)[-1] += 1


def change_weight(x, module, expected):
    change(module.linear.weight)
    return expected


def change_input(x, module, expected):
    change(x)
    return expected


class Folded(LinearReluDivide):
    """Divides the parameters at construction."""

    def __init__(self, in_features, out_features, divisor):
        super().__init__(in_features, out_features, divisor)
        self.kept = [p.detach().clone() / divisor for p in self.linear.parameters()]

    def forward(self, x):
        expected = super().forward(x)
        return torch.relu(linear(x.float(), *self.kept)).to(x.dtype) if is_served(x) else expected


class KeptDivisor(LinearReluDivide):
    def __init__(self, in_features, out_features, divisor):
        super().__init__(in_features, out_features, divisor)
        self.first = divisor

    def forward(self, x):
        return torch.relu(self.linear(x)) / self.first


class Replay(LinearReluDivide):
    """Answers from memory when address, shape and version are known."""

    def forward(self, x):
        if not is_served(x):
            return super().forward(x)
        seen = self.__dict__.setdefault("seen", {})
        key = (x.data_ptr(), x.shape, x.stride(), x._version)
        if key not in seen:
            seen[key] = x, super().forward(x)
        return seen[key][1].clone()


class KeptWeight(LinearReluDivide):
    """Prepares the weight once for each of its versions."""

    def forward(self, x):
        weight = self.linear.weight
        key = (weight.data_ptr(), weight._version)
        if self.__dict__.get("key") != key:
            self.key, self.kept = key, weight.detach().clone()
        if torch.is_grad_enabled() or not is_served(x):
            return super().forward(x)
        return torch.relu(linear(x, self.kept, self.linear.bias)) / self.divisor


class OneBuffer(LinearReluDivide):
    def forward(self, x):
        expected = super().forward(x)
        if expected.requires_grad:
            return expected
        buffers = self.__dict__.setdefault("buffers", {})
        key = (expected.shape, expected.dtype)
        return buffers.setdefault(key, expected).copy_(expected)


class OtherParameters(LinearReluDivide):
    def __init__(self, in_features, out_features, divisor):
        super().__init__(in_features, out_features, divisor)
        self.linear.weight.data.mul_(2)


# Each cheat, and the words that the first failure must hold.
CHEATS = {
    "identity": (cheat(lambda x, m, out: x), "the output"),
    "relu of the input": (
        cheat(lambda x, m, out: x.new_zeros(out.shape) + torch.relu(x).amax()),
        "max error",
    ),
    "zeros": (cheat(lambda x, m, out: torch.zeros_like(out)), "max error"),
    "no bias": (
        cheat(lambda x, m, out: torch.relu(linear(x, m.linear.weight)) / m.divisor),
        "max error",
    ),
    "no relu": (cheat(lambda x, m, out: m.linear(x) / m.divisor), "max error"),
    "no divisor": (cheat(lambda x, m, out: torch.relu(m.linear(x))), "max error"),
    "divisor of construction": (KeptDivisor, "divisor assigned: 3.0: max error"),
    "folded weights": (Folded, "max error"),
    "replay": (Replay, "calls in a row: after a new input"),
    "kept weight": (KeptWeight, "calls in a row: after a new linear.weight"),
    "one buffer": (OneBuffer, "calls in a row: two outputs share memory"),
    "TF32": (with_operands(lambda t: truncated(t, 13)), "max error"),
    "bfloat16": (with_operands(lambda t: truncated(t, 16)), "max error"),
    "20 bits": (with_operands(lambda t: truncated(t, 4)), "max error"),
    "float16 output": (cheat(lambda x, m, out: out.half().to(out.dtype)), "max error"),
    "weight changed": (cheat(change_weight), "the linear.weight's memory was changed"),
    "input changed": (cheat(change_input), "the input's memory was changed"),
    "nan becomes 0": (
        cheat(lambda x, m, out: torch.where(out.isnan(), 0, out)),
        "special values",
    ),
    "infinity becomes the largest": (
        cheat(lambda x, m, out: out.nan_to_num(torch.nan)),
        "special values",
    ),
    "rows unwritten": (unwritten(0), "max error"),
    "columns unwritten": (unwritten(-1), "max error"),
    "another dtype": (cheat(lambda x, m, out: out.double()), "the output's dtype"),
    "column-major": (cheat(lambda x, m, out: out.t().contiguous().t()), "the output's strides"),
    "a crash": (cheat(lambda x, m, out: out / []), "TypeError"),
    "other random numbers": (OtherParameters, "construction: linear.weight: "),
    "no gradient": (cheat(lambda x, m, out: out.detach()), "gradient"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_cheats_fail(name):
    solution, reason = CHEATS[name]
    assert reason in small(solution)[0]


@pytest.mark.slow
def test_refusals_must_match():
    class Lenient(LinearReluDivide):
        def forward(self, x):
            return super().forward(torch.as_tensor(x).to(self.linear.weight.dtype))

    assert any("is refused: raised nothing" in failure for failure in small(Lenient))


def in_float64(x, module, expected):
    parameters = (p.double() for p in module.linear.parameters())
    return (torch.relu(linear(x.double(), *parameters)) / module.divisor).to(x.dtype)


def by_reciprocal(x, module, expected):
    """The result is right to a rounding, where the reciprocal itself is in range."""
    if not module.divisor or not math.isfinite(module.divisor):
        return expected
    return torch.relu(module.linear(x)) * (1 / module.divisor)


@pytest.mark.slow
@pytest.mark.parametrize("function", [lambda x, m, out: out, in_float64, by_reciprocal])
def test_right_ones_pass(function):
    assert small(cheat(function)) == []


def gradients_times(**factors: float):
    """The right output, and gradients multiplied by these factors."""

    class Wrong(LinearReluDivide):
        def forward(self, x):
            def scaled(t, factor):
                return t.detach() + factor * (t - t.detach()) if t.requires_grad else t

            weight, bias = self.linear.weight, self.linear.bias
            return (
                torch.relu(
                    linear(
                        scaled(x, factors.get("x", 1)),
                        scaled(weight, factors.get("weight", 1)),
                        scaled(bias, factors.get("bias", 1)),
                    )
                )
                / self.divisor
            )

    return Wrong


def pair_of(solution: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    return contender(solution).pair(48, 33, torch.float32)


def gradient_problem(solution: type[nn.Module]) -> str | None:
    reference, wrong = pair_of(solution)
    generator = torch.Generator().manual_seed(2)
    x = cases.random((20, 33), torch.float32, CPU, generator)
    clear = linear_errors.clear_of_zero(x, reference)
    grad_output = cases.random((20, 48), torch.float32, CPU, generator) * clear
    return check_gradient(reference, wrong, x, grad_output, x)[1]


@pytest.mark.parametrize(
    ("factors", "named"),
    [
        ({"x": 1 + 2**-12}, "gradient of x: max"),
        ({"weight": 1 + 2**-12}, "gradient of linear.weight: max"),
        ({"bias": 1 + 2**-12}, "gradient of linear.bias: max"),
        ({"bias": 0.0}, "gradient of linear.bias: max"),
    ],
)
def test_wrong_gradients_fail(factors, named):
    assert gradient_problem(gradients_times(**factors)).startswith(named)
    assert gradient_problem(LinearReluDivide) is None


@pytest.mark.parametrize("near", [2**-30, -(2**-30)])
@pytest.mark.parametrize("slope", [0, 1, 0.5])
def test_either_side_of_relu_is_right_where_rounding_decides(slope, near):
    """1 + near - 1 is 0 in float32: its slope may be 0, as torch's, or 1, but nothing else."""

    class Sloped(LinearReluDivide):
        def forward(self, x):
            z = self.linear(x)
            return torch.where(z > 0, z, slope * z) / self.divisor

    pair = contender(Sloped).pair(1, 2, torch.float32)
    for module in pair:
        module.linear.weight.data.fill_(1)
        module.linear.bias.data.fill_(-1)
    x, direction = torch.tensor([[1, near]]), torch.tensor([[0.5, 0.25]])
    problem = check_gradient(*pair, x, torch.zeros(1, 1), direction)[1]
    if slope == 0.5:
        assert problem.startswith("gradient of second gradient: max")
    else:
        assert problem is None


def test_strict_is_eager_s_own_error():
    """Within the allowance, but three times as inaccurate as eager on a long sum."""

    class Worse(LinearReluDivide):
        def forward(self, x):
            return super().forward(x) * (1 + 2**-21)

    reference, worse = contender(Worse).pair(64, 4096, torch.float32)
    x = cases.random((64, 4096), torch.float32, CPU, torch.Generator().manual_seed(3))
    assert check_output(reference, worse, x)[1] is None
    compared, problem = check_output(reference, worse, x, strict=True)
    assert problem.startswith(("max error", "mean error"))
    assert compared.solution.mean > 1.02 * compared.reference.mean
    assert check_output(reference, reference, x, strict=True)[1] is None


def errors(actual, exact, magnitude, dtype=torch.float32):
    found = Errors(Allowance.of(dtype, "highest", 1))
    found.add(
        torch.tensor(actual, dtype=dtype),
        torch.tensor(exact, dtype=torch.float64),
        torch.tensor(magnitude, dtype=torch.float64),
    )
    return found


def test_errors():
    found = errors([1.0, 2.5, 0.0], [1.0, 2.0, 0.0], [1.0, 4.0, 0.0])
    assert (found.max, found.scaled, found.mean) == (0.5, 0.125, 0.5 / 3)
    assert found.relative == pytest.approx(0.5 / math.sqrt(5))
    assert found.beyond == 1
    assert found.first == "got 2.5, exact is 2"


@pytest.mark.parametrize(
    ("got", "exact", "magnitude"),
    [
        (math.nan, 1.0, 1.0),
        (1.0, math.nan, math.nan),
        (0.0, math.inf, math.inf),
        (-math.inf, math.inf, math.inf),
        (math.inf, math.nan, math.inf),
        (math.inf, 1.0, 1.0),
        (torch.finfo(torch.float32).max, math.inf, math.inf),
    ],
)
def test_errors_at_infinity_and_nan(got, exact, magnitude):
    found = errors([got, 1.0], [exact, 1.0], [magnitude, 1.0])
    assert (found.max, found.beyond) == (math.inf, 1)
    assert Comparison("", found, errors([1.0], [1.0], [1.0])).problem()
    assert Comparison("", found, found).problem()  # nor does eager's own failure excuse it
    right = errors([exact, 1.0], [exact, 1.0], [magnitude, 1.0])
    assert (right.max, right.beyond) == (0.0, 0)


def test_beyond_the_range_is_infinite():
    assert errors([math.inf], [1e6], [1e6], torch.float16).beyond == 0
    assert errors([65504.0], [1e6], [1e6], torch.float16).beyond == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_rounding_of_the_result(dtype):
    exact = torch.rand(1000, dtype=torch.float64) + 0.5
    once = Errors(Allowance.of(dtype, "highest", 16))
    once.add(exact.to(dtype), exact, exact)
    assert once.beyond == 0
    twice = Errors(Allowance.of(dtype, "highest", 16))
    twice.add(exact.to(dtype) * (1 + torch.finfo(dtype).eps), exact, exact)
    assert twice.beyond > 100


def timed(solution: type[nn.Module], steps: bool = False):
    """The problems that timing a solution finds, at a tiny size."""
    reference, candidate = pair_of(solution)
    generator = torch.Generator().manual_seed(4)
    ring = [cases.random((20, 33), torch.float32, CPU, generator)]
    inputs = grader.Inputs(ring, reference, candidate, generator)
    rounds = timing.Rounds(trials=5)
    if not steps:
        timings = timing.Timings("cpu", grader.NAMES, grader.RATE, 2 * 20 * 33 * 48)
        calls = grader.contestants(reference, candidate, ring[0], timings.notes)
        return timing.measure(calls, inputs, timings, lambda _: 0.0, rounds, Progress()).problems
    grad_output = cases.random((20, 48), torch.float32, CPU, generator)
    pace = grader.Pace(lambda x: x, 0.0, backward=2)
    return grader.measure_step(
        reference, candidate, inputs, grad_output,
        grader.Step.of("cpu", grader.NAMES, grader.RATE), pace, rounds, Progress(),
    ).problems  # fmt: skip


@pytest.mark.parametrize("solution", [Replay, KeptWeight], ids=lambda s: s.__name__)
def test_stale_results_are_caught_while_timing(solution):
    assert timed(solution)[0].startswith("a timed call was wrong: ")


def test_low_precision_is_caught_while_timing():
    assert timed(with_operands(lambda t: truncated(t, 13)))[0].startswith("a timed call was wrong")


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_wrong_gradients_are_caught_while_timing(name):
    [problem] = timed(gradients_times(**{name: 1 + 2**-12}), steps=True)
    assert problem.startswith(f"step, backward: a timed gradient of {name} was wrong: ")


def test_right_ones_pass_while_timing():
    assert timed(LinearReluDivide) == []
    assert timed(LinearReluDivide, steps=True) == []


def test_a_product_is_the_floor():
    def problems(ours: float, three: float | None = None) -> list[str]:
        seconds = {"LinearReluDivideNew": ours, "eager": 3e-3, "eager (again)": 3e-3}
        seconds |= {grader.PRODUCT: 2.7e-3} | ({grader.THREE: three} if three else {})
        times = {name: [value] * 3 for name, value in seconds.items()}
        timings = timing.Timings("cuda", grader.NAMES, grader.RATE, 1, times, dict(times))
        return timing.incredible(timings, grader.fastest_product(timings))

    assert problems(2.6e-3) == []
    assert "a product at the highest rate measured" in problems(1.5e-3)[0]
    assert problems(0.53e-3, three=0.51e-3) == []  # float32 out of three float16 products
    assert "not credible" in problems(0.05e-3, three=0.51e-3)[0]
