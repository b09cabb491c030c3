"""Does a replacement of relu(x weight^T + bias) / divisor answer as the reference does?"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from referee.cases import DTYPES, random, refill
from referee.compare import first_mismatch, layout_mismatch, share_memory
from referee.correctness import (
    Checks,
    Watch,
    call_watched,
    check_error,
    form_mismatch,
    nan_in_new_memory,
)
from referee.errors import Comparison
from referee.linear_errors import (
    clear_of_zero,
    compare_gradients,
    compare_output,
    differentiate,
)
from referee.progress import Progress

FLOATS = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point}
SIZES = [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129]  # around the widths of tiles and vectors
# Rows, out_features, in_features: long sums, several tiles, and no terms at all.
SHAPES = [(5, 9, 4097), (257, 130, 1000), (1, 300, 2049), (300, 1, 513), (4, 5, 0)]
DIVISORS = [2.0, 3.0, -1.5, 1.0]
SPECIAL_DIVISORS = [2.0, 3.0, -1.5, 0.0, -0.0, math.inf, math.nan]

View = Callable[[torch.Tensor], torch.Tensor]

# For 33 features: the shape of the dense tensor underneath, and the view taken of it.
X_LAYOUTS: list[tuple[str, tuple[int, ...], View]] = [
    ("x[:, 1:]", (9, 34), lambda x: x[:, 1:]),
    ("x[:, ::2]", (9, 66), lambda x: x[:, ::2]),
    ("x[::2]", (18, 33), lambda x: x[::2]),
    ("x transposed", (33, 9), lambda x: x.t()),
    ("x transposed, large", (33, 300), lambda x: x.t()),
    ("x expanded rows", (1, 33), lambda x: x.expand(9, 33)),
    ("x expanded columns", (9, 1), lambda x: x.expand(9, 33)),
    ("x with storage offset 1", (1 + 9 * 33,), lambda x: x[1:].view(9, 33)),
    ("x 1-d", (33,), lambda x: x),
    ("x 1-d, strided", (66,), lambda x: x[::2]),
    ("x 3-d", (2, 5, 33), lambda x: x),
    ("x 3-d, permuted", (33, 5, 4), lambda x: x.permute(1, 2, 0)),
    ("x 3-d, slice", (3, 7, 33), lambda x: x[:, 1:6]),
    ("x 4-d", (2, 3, 2, 33), lambda x: x),
    ("no rows", (0, 33), lambda x: x),
    ("no rows, 3-d", (3, 0, 33), lambda x: x),
]
WEIGHT_LAYOUTS: list[tuple[str, tuple[int, ...], View]] = [
    ("weight transposed", (33, 17), lambda w: w.t()),
    ("weight[:, ::2]", (17, 66), lambda w: w[:, ::2]),
    ("weight[:, 1:]", (17, 34), lambda w: w[:, 1:]),
    ("weight[::2]", (34, 33), lambda w: w[::2]),
    ("weight expanded", (1, 33), lambda w: w.expand(17, 33)),
]
# Views of a dense [48, 48] tensor as the output's gradient.
GRADIENT_LAYOUTS: list[tuple[str, View]] = [
    ("transposed", lambda g: g.t()),
    ("strided", lambda g: g.repeat_interleave(2, dim=1)[:, ::2]),
    ("expanded rows", lambda g: g[:1].expand(48, 48)),
    ("expanded scalar", lambda g: g[0, 0].expand(48, 48)),
]


@dataclass(frozen=True)
class Contender:
    """Makes a reference and a solution with the same parameters.

    The solution is constructed first and gets them by `load_state_dict`, so that what it computed
    from its own at construction is out of date.
    """

    reference: type[nn.Module]
    solution: type[nn.Module]
    device: torch.device
    generator: torch.Generator

    def pair(
        self, n: int, k: int, dtype: torch.dtype, divisor: float = 2.0, bias: bool = True
    ) -> tuple[nn.Module, nn.Module]:
        """Both modules, with parameters uniform in -1..1."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            solution, reference = (kind(k, n, divisor) for kind in (self.solution, self.reference))
        for module in (solution, reference):
            if not bias:
                module.linear.bias = None
            module.to(self.device, dtype)
        for parameter in reference.parameters():
            refill(parameter.data, self.generator)
        solution.load_state_dict(reference.state_dict())
        return reference, solution

    def draw(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A dense tensor, uniform in -1..1."""
        return random(shape, dtype, self.device, self.generator)


def check_small(contender: Contender, settings: list[str], seed: int, progress: Progress) -> Checks:
    """Every small case, under each of torch's precision settings for float32."""
    checks = Checks()
    for setting in settings:
        torch.set_float32_matmul_precision(setting)
        dtypes = FLOATS if setting == settings[0] else {f"{setting} float32": torch.float32}
        for name, dtype in dtypes.items():
            for case, check in _cases(contender, dtype):
                progress("checking small cases:", f"{name}, {case}")
                checks.record(f"{name}, {case}", check)
    torch.set_float32_matmul_precision(settings[0])
    for case, check in _behaviour(contender, seed):
        progress("checking small cases:", case)
        checks.record(case, check)
    return checks


@torch.no_grad()
def check_output(
    reference: nn.Module, solution: nn.Module, x: torch.Tensor, strict: bool = False
) -> tuple[Comparison | None, str | None]:
    """One forward: form and values of the output, fresh memory, nothing changed.

    As in `correctness.check_case`, the reference comes last.
    """
    tensors = {"input": x, **dict(solution.named_parameters())}
    size = x.numel() // max(x.shape[-1], 1) * reference.linear.out_features * x.element_size()
    output, problem = call_watched(solution, x, tensors, size)
    expected = reference(x)
    problem = problem or form_mismatch(output, expected, tensors)
    if problem:
        return None, problem
    comparison = compare_output("output", output, expected, x, reference)
    return comparison, comparison.problem(strict)


def check_gradient(
    reference: nn.Module,
    solution: nn.Module,
    x: torch.Tensor,
    grad_output: torch.Tensor,
    direction: torch.Tensor | None,
    strict: bool = False,
) -> tuple[dict[str, Comparison], str | None]:
    """One backward and, given a direction, the backward of that: as `check_output`."""
    watched = {"input": x, "output's gradient": grad_output, **dict(solution.named_parameters())}
    watch = Watch(watched)
    ours = differentiate(solution, x, grad_output, direction)
    if problem := watch.problem():
        return {}, problem
    eager = differentiate(reference, x, grad_output, direction)
    for name, got in ours.items():
        # Strides of gradients are the engine's business: they go with those of the leaves.
        want = eager[name].contiguous()
        if problem := layout_mismatch(got.contiguous(), want, f"gradient of {name}"):
            return {}, problem
        for other, tensor in watched.items():
            if share_memory(got, tensor):
                return {}, f"{name}: shares memory with the {other}"
    compared = compare_gradients(ours, eager, x, reference, grad_output, direction)
    outputs = compare_output("output", ours["output"], eager["output"], x, reference)
    problems = {"output": outputs.problem(strict)}
    for name, comparison in compared.items():
        # Eager's error in a plain sum is its order's, and no measure for another's.
        problems[f"gradient of {name}"] = comparison.problem(strict and name != "linear.bias")
    wrong = [f"{name}: {problem}" for name, problem in problems.items() if problem]
    return compared, "; ".join(wrong) or None


def _cases(
    contender: Contender, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """A name and a check for every case of one dtype under the precision setting in effect."""
    draw = partial(contender.draw, dtype=dtype)

    def forward(
        x_shape: tuple[int, ...], n: int, divisor: float = 2.0, bias: bool = True
    ) -> str | None:
        pair = contender.pair(n, x_shape[-1], dtype, divisor, bias)
        return check_output(*pair, draw(x_shape))[1]

    for turn in range(3):
        for i, m in enumerate(SIZES):
            n = SIZES[(5 * i + 4 * turn + 1) % len(SIZES)]
            k = SIZES[(8 * i + 3 * turn + 2) % len(SIZES)]
            divisor = DIVISORS[(i + turn) % len(DIVISORS)]
            bias = (i + turn) % 3 != 0
            yield (
                f"[{m}, {k}] -> {n}, divisor {divisor}{'' if bias else ', no bias'}",
                partial(forward, (m, k), n, divisor, bias),
            )
    for m, n, k in SHAPES:
        yield f"[{m}, {k}] -> {n}", partial(forward, (m, k), n)
    for repeat in range(3):
        yield f"random, {repeat + 1}", partial(forward, (65, 127), 129, 3.0)
    for name, shape, view in X_LAYOUTS:
        yield name, partial(_check_x_layout, contender, dtype, shape, view)
    for name, shape, view in WEIGHT_LAYOUTS:
        yield name, partial(_check_weight_layout, contender, dtype, shape, view)
    for divisor in SPECIAL_DIVISORS:
        yield (
            f"special values, divisor {divisor}",
            partial(_check_special, contender, dtype, divisor),
        )
    if dtype in (torch.float32, torch.float64):  # float16 has no such range
        for name, scale_x, scale_weight in _ranges():
            yield name, partial(_check_range, contender, dtype, scale_x, scale_weight)
    yield from _gradient_cases(contender, dtype)


def _check_x_layout(
    contender: Contender, dtype: torch.dtype, shape: tuple[int, ...], view: View
) -> str | None:
    x = view(contender.draw(shape, dtype))
    return check_output(*contender.pair(17, 33, dtype), x)[1]


def _check_weight_layout(
    contender: Contender, dtype: torch.dtype, shape: tuple[int, ...], view: View
) -> str | None:
    pair = contender.pair(17, 33, dtype)
    dense = contender.draw(shape, dtype)
    for module in pair:
        module.linear.weight = nn.Parameter(view(dense.clone()))
    return check_output(*pair, contender.draw((9, 33), dtype))[1]


def _check_special(contender: Contender, dtype: torch.dtype, divisor: float) -> str | None:
    """Infinities and NaN among small integers, whose sums no precision rounds."""
    reference, solution = contender.pair(19, 17, dtype, divisor)
    x = contender.draw((23, 17), dtype).mul_(3).round_()
    weight, bias = (p.data.mul_(2).round_() for p in reference.parameters())
    x[0, 0] = weight[0, 3] = bias[2] = torch.inf
    x[1, 1] = weight[5, 2] = bias[6] = -torch.inf
    x[2, 2] = weight[1, 4] = bias[3] = torch.nan
    x[3, 0], x[3, 1] = torch.inf, -torch.inf
    weight[4] = 0  # what an infinity multiplies to NaN
    x[4] = 0
    solution.load_state_dict(reference.state_dict())
    return check_output(reference, solution, x)[1]


def _ranges() -> Iterator[tuple[str, View, View]]:
    """Ways to scale the rows and columns of x and weight: powers of two, far apart."""

    def rows(x: torch.Tensor, exponent: int) -> torch.Tensor:
        steps = torch.arange(len(x), device=x.device) % 3 - 1
        return x * torch.exp2(exponent * steps.to(x.dtype))[:, None]

    def columns(x: torch.Tensor, exponent: int) -> torch.Tensor:
        steps = torch.linspace(-1, 1, x.shape[1], device=x.device).mul(exponent).round()
        return x * torch.exp2(steps.to(x.dtype))

    yield "rows of x scaled", lambda x: rows(x, 40), lambda w: w
    yield "rows of weight scaled", lambda x: x, lambda w: rows(w, 40)
    yield "columns of x graded", lambda x: columns(x, 20), lambda w: w
    yield "columns graded inversely", lambda x: columns(x, 20), lambda w: columns(w, -20)


def _check_range(
    contender: Contender, dtype: torch.dtype, scale_x: View, scale_weight: View
) -> str | None:
    reference, solution = contender.pair(65, 129, dtype)
    weight = reference.linear.weight.data
    weight.copy_(scale_weight(weight))
    solution.load_state_dict(reference.state_dict())
    return check_output(reference, solution, scale_x(contender.draw((33, 129), dtype)))[1]


def _gradient_cases(
    contender: Contender, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    # A 16-bit type would round grad_output / 3, once more than the result.
    divisors = DIVISORS if dtype.itemsize > 2 else [2.0, -1.0]
    for i, m in enumerate(SIZES):
        n, k = SIZES[(5 * i + 2) % len(SIZES)], SIZES[(8 * i + 7) % len(SIZES)]
        divisor, bias = divisors[i % len(divisors)], i % 3 != 0
        pair = partial(contender.pair, n, k, dtype, divisor, bias)
        yield (
            f"gradient, [{m}, {k}] -> {n}, divisor {divisor}{'' if bias else ', no bias'}",
            partial(_check_gradient, contender, pair, dtype, (m, k), lambda x: x),
        )
    pair = partial(contender.pair, 17, 33, dtype)
    for name, shape, view in X_LAYOUTS:
        yield (
            f"gradient, {name}",
            partial(_check_gradient, contender, pair, dtype, shape, view),
        )
    for name, g_view in GRADIENT_LAYOUTS:
        yield f"gradient {name}", partial(_check_gradient_layout, contender, dtype, g_view)


def _check_gradient(
    contender: Contender,
    pair: Callable[[], tuple[nn.Module, nn.Module]],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    view: View,
) -> str | None:
    reference, solution = pair()
    x = view(contender.draw(shape, dtype))
    clear = clear_of_zero(x, reference)
    grad_output = contender.draw(tuple(clear.shape), dtype) * clear
    direction = contender.draw(tuple(x.shape), dtype)
    return check_gradient(reference, solution, x, grad_output, direction)[1]


def _check_gradient_layout(contender: Contender, dtype: torch.dtype, g_view: View) -> str | None:
    """Layouts of the output's gradient, where every sum is exact and so ReLU's side certain."""
    reference, solution = contender.pair(48, 33, dtype)
    for parameter in reference.parameters():
        parameter.data.mul_(2).round_()
    solution.load_state_dict(reference.state_dict())
    x, direction = (contender.draw((48, 33), dtype).mul_(3).round_() for _ in range(2))
    grad_output = g_view(contender.draw((48, 48), dtype))
    return check_gradient(reference, solution, x, grad_output, direction)[1]


def _behaviour(contender: Contender, seed: int) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Checks that do not depend on the values: construction, state, new memory, errors."""
    yield "construction", partial(_check_construction, contender, seed)
    yield "calls in a row", partial(_check_calls, contender)
    yield "divisor assigned", partial(_check_divisor, contender)
    yield "tails", partial(_check_tails, contender)
    reference, solution = contender.pair(5, 3, torch.float32)
    shapes = {"0-d x": (), "too few features": (4, 2), "too many features": (4, 4)}
    for name, shape in shapes.items():
        x = contender.draw(shape, torch.float32)
        yield f"{name} is refused", partial(check_error, reference, solution, x)
    for name, dtype in DTYPES.items():
        if dtype != torch.float32:
            x = torch.zeros(4, 3, dtype=dtype, device=contender.device)
            yield f"{name} x is refused", partial(check_error, reference, solution, x)
    for other in ([[1.0] * 3], 1.0, None):
        yield f"{other!r} is refused", partial(check_error, reference, solution, other)


def _check_construction(contender: Contender, seed: int) -> str | None:
    """The same parameters, drawn with the same random numbers."""
    states, after = [], []
    with torch.random.fork_rng(devices=[]):
        for kind in (contender.solution, contender.reference):
            torch.manual_seed(seed)
            states.append(kind(33, 17, 2.0).state_dict())
            after.append(torch.get_rng_state())
    got, expected = states
    if list(got) != list(expected):
        return f"the state is {list(got)}, expected {list(expected)}"
    for name, value in expected.items():
        problem = layout_mismatch(got[name], value, name)
        problem = problem or first_mismatch(got[name], value, exact=True)
        if problem:
            return f"{name}: {problem}"
    return None if torch.equal(*after) else "other random numbers were drawn"


@torch.no_grad()
def _check_calls(contender: Contender) -> str | None:
    """Calls at the same addresses with other values: nothing is replayed, no output is reused.

    .data leaves the version as it was.
    """
    reference, solution = contender.pair(65, 33, torch.float32)
    x = contender.draw((129, 33), torch.float32)
    earlier = solution(x)
    kept = earlier.clone()
    for name in ("input", "linear.weight", "linear.bias", "state"):
        if name == "input":
            refill(x.data, contender.generator)
        elif name == "state":
            reference, _ = contender.pair(65, 33, torch.float32)
            solution.load_state_dict(reference.state_dict())
        else:
            values = refill(reference.get_parameter(name).data, contender.generator)
            solution.get_parameter(name).data.copy_(values)
        output = solution(x)
        if share_memory(output, earlier):
            return "two outputs share memory"
        if changed := first_mismatch(earlier, kept, exact=True):
            return f"an earlier output was changed: {changed}"
        if problem := compare_output("output", output, reference(x), x, reference).problem():
            return f"after a new {name}: {problem}"
    return None


def _check_divisor(contender: Contender) -> str | None:
    reference, solution = contender.pair(17, 33, torch.float32)
    x = contender.draw((9, 33), torch.float32)
    for divisor in (3.0, -0.5, 2):
        reference.divisor = solution.divisor = divisor
        if problem := check_output(reference, solution, x)[1]:
            return f"{divisor}: {problem}"
    return None


@torch.no_grad()
def _check_tails(contender: Contender) -> str | None:
    """Short rows and columns while torch fills new memory with NaN, so that gaps show."""
    # cuBLAS has no deterministic mode without a variable set before torch starts; it only warns.
    with nan_in_new_memory(warn_only=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for m in range(1, 19):
            for n in range(1, 67, 5):
                reference, solution = contender.pair(n, 9, torch.float32)
                x = contender.draw((m, 9), torch.float32)
                got, want = solution(x), reference(x)
                problem = form_mismatch(got, want, {"input": x})
                problem = problem or compare_output("output", got, want, x, reference).problem()
                if problem:
                    return f"[{m}, 9] -> {n}: {problem}"
    return None
