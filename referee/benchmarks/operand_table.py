"""Linear -> ReLU -> divide in float32 on operands of every kind: times, errors and memory.

A line is a forward, or a training step, which is a forward and a backward.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from referee.benchmarks.draws import Draw, cross_entropy_gradient, one_hot
from referee.benchmarks.operands import CASES, Case, Operands, Side
from referee.benchmarks.pairs import alternate, columns, samplers_of, steps_of
from referee.benchmarks.timings import Setting
from referee.errors import U32, Comparison
from referee.linear_errors import clear_of_zero, compare_gradients, compare_output, differentiate

TRIALS = 31
LARGEST_SIDE = {"cpu": 128, "cuda": 1 << 20}  # of x and weight
PRODUCTS = ["x", "linear.weight"]  # whose gradients are products

LEGEND = """
ratio: eager's time in parts of ours, median of interleaved pairs; max, mean: errors in parts of
eager's, against float64; u: the largest error / (|x| |weight|^T + |bias|) in 2^-24; MiB: the most
memory beside input and result. A step shows the larger errors of the two gradients that are
products."""


class Line(NamedTuple):
    """A line of the table.

    Attributes:
        operands: draws x `[m, k]`, weight `[n, k]` and bias `[n]`, given m, k and n.
        grad_output: draws the output's gradient `[m, n]` of a training step; None for a forward.
    """

    name: str
    operands: Case
    m: int = 1024
    k: int = 8192
    n: int = 8192
    grad_output: Side | None = None


def _forwards(*names: str) -> list[Line]:
    return [Line(name, CASES[name]) for name in names]


def _uniform(rows: tuple[int, ...], *weights: tuple[int, int]) -> list[Line]:
    return [Line("uniform", CASES["uniform"], m, k, n) for k, n in weights for m in rows]


def _step(name: str, x: str, grad_output: Side) -> Line:
    """With x of a named case, and parameters as nn.Linear has them at first."""

    def draw(d: Draw, m: int, k: int, n: int) -> Operands:
        return CASES[x](d, m, k, n)[0], *CASES["uniform"](d, m, k, n)[1:]

    return Line(f"step, {name}", draw, grad_output=grad_output)


HIGHEST = [
    *_forwards("uniform", "last column large", "1/16 of the columns shared"),
    *_forwards("first quarter of x is zero", "first 7/8 of x are zero", "block-diagonal weight"),
    *_forwards("integers, larger ones in the sample", "tiny shared columns", "one-hot x"),
    *_forwards("sparse x, 1 in 10", "two wide rows of x", "128 wide rows of the weight"),
    *_forwards("outliers in the weight", "wide lognormal"),
    *_forwards("inf in one row of x", "inf in all rows of x"),
    *_uniform((1000, 4096, 16384), (768, 3072), (1000, 1000), (512, 2048)),
    *_uniform((128,), (8192, 8192)),
    *_uniform((33, 64, 128, 256), (4096, 11008), (8192, 28672), (5120, 5120)),
    *_uniform((65536,), (8192, 1024)),
    _step("normal gradient", "uniform", Draw.normal),
    _step("softmax - one-hot", "uniform", cross_entropy_gradient),
    _step("softmax - one-hot; x 1 in 10", "sparse x, 1 in 10", cross_entropy_gradient),
    _step("one-hot gradient", "uniform", one_hot),
]
# At `high` and `medium`.
HIGH = [
    *_forwards("uniform", "1% zeros in the weight", "int8 weight", "zero weight"),
    *_forwards("2:4 sparse weight", "wide lognormal", "two wide rows of x"),
    *_forwards("128 wide rows of the weight", "inf in one row of x"),
    *_forwards("inf in every 64th row of x", "inf in all rows of x"),
    *_uniform((65536,), (8192, 1024)),
    _step("normal gradient", "uniform", Draw.normal),
]


def rows(setting: Setting, precision: str, trials: int | None) -> Iterable[list[str]]:
    """The table under one of torch's precision settings; `trials` are pairs of timed calls."""
    titles = ["operands", "M", "K", "N", "eager us", "ours us", "ratio", "max", "mean", "u"]
    yield [*titles, "eager's u", "inf, NaN", "MiB", "eager's MiB"]
    for line in HIGHEST if precision == "highest" else HIGH:
        yield _measure(line, setting, trials or TRIALS)


def same_places(ours: Tensor, eager: Tensor) -> str:
    """Whether infinities and NaN of ours are where eager has them; "" where neither has any."""
    if ours.isfinite().all() and eager.isfinite().all():
        return ""
    tests = (torch.isnan, torch.isposinf, torch.isneginf)
    return "same" if all(torch.equal(test(ours), test(eager)) for test in tests) else "DIFFER"


def _measure(line: Line, setting: Setting, trials: int) -> list[str]:
    device = setting.device
    m, k, n = (min(side, LARGEST_SIDE[device.type]) for side in (line.m, line.k, line.n))
    draw = Draw(0, str(device))
    x, *parameters = line.operands(draw, m, k, n)
    both = setting.both("linear_relu_divide", k, n, 2.0)
    for module in both.values():
        module.linear.weight, module.linear.bias = map(nn.Parameter, parameters)
    modules, memory, calls = list(both.values()), ["", ""], both
    is_step = line.grad_output is not None
    if is_step:
        grad_output = line.grad_output(draw, m, n) * clear_of_zero(x, modules[1])
        found = [differentiate(module, x, grad_output, None) for module in modules]
        errors = compare_gradients(*found, x, modules[1], grad_output, None)
        compared = [errors[name] for name in PRODUCTS]
        each = [same_places(*(gradients[name] for gradients in found)) for name in PRODUCTS]
        places = max(each, key=["", "same", "DIFFER"].index)
        calls = steps_of(both, grad_output)
    else:
        with torch.no_grad():
            outputs = [module(x) for module in modules]
            compared = [compare_output(line.name, *outputs, x, modules[1])]
            places = same_places(*outputs)
            del outputs
            if x.is_cuda:
                memory = [_beside_result(module, x) for module in modules]
    with torch.set_grad_enabled(is_step):
        times = alternate(samplers_of(calls, x.requires_grad_(is_step)), math.inf, trials)
    ours, eager, ratio = columns(times, 1e6)
    sizes = map(str, (m, k, n))
    return [line.name, *sizes, eager, ours, ratio, *_errors(compared), places, *memory]


def _beside_result(module: nn.Module, x: Tensor) -> str:
    """MiB."""
    torch.cuda.reset_peak_memory_stats(x.device)
    before = torch.cuda.memory_allocated(x.device)
    output = module(x)
    bytes_beside = torch.cuda.max_memory_allocated(x.device) - before - output.nbytes
    return f"{bytes_beside / 2**20:.0f}"


def _errors(compared: list[Comparison]) -> list[str]:
    """Maximum and mean error in parts of eager's, scaled errors of both; the largest of each."""
    cells = []
    for metric in ("max", "mean"):
        pairs = [(getattr(c.solution, metric), getattr(c.reference, metric)) for c in compared]
        cells.append(max(e / eager if eager else math.inf if e else 0.0 for e, eager in pairs))
    for side in ("solution", "reference"):
        cells.append(max(getattr(c, side).scaled for c in compared) / U32)
    return [f"{cell:.3g}" for cell in cells]
