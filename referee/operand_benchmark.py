"""Linear -> ReLU -> divide in float32 on operands of every kind: times, errors and memory.

A line is a forward, or a training step, which is a forward and a backward.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd import grad

from referee.clock import CpuClock, CudaClock
from referee.draws import Draw, cross_entropy_gradient, one_hot
from referee.errors import U32, Comparison
from referee.linear_errors import (
    clear_of_zero,
    compare_gradients,
    compare_output,
    differentiate,
)
from referee.operands import CASES, Operands
from referee.pairs import alternate, columns
from referee.report import table

DIVISOR = 2.0
TRIALS = 31
LARGEST_SIDE = {"cpu": 128, "cuda": 1 << 20}  # of x and weight
PRODUCTS = ["x", "linear.weight"]  # whose gradients are products

LEGEND = """\
ratio: eager's time in parts of ours, median of {rounds} pairs; max, mean: errors in parts of
eager's, against float64; u: the largest error / (|x| |weight|^T + |bias|) in 2^-24; MiB: the most
memory beside input and result. A step shows the larger errors of the two gradients that are
products."""

Gradient = Callable[[Draw, int, int], Tensor]


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        name: of the operands.
        operands: draws x `[m, k]`, weight `[n, k]` and bias `[n]`, given m, k and n.
        grad_output: draws the output's gradient `[m, n]` of a training step; None for a forward.
    """

    name: str
    operands: Callable[[Draw, int, int, int], Operands]
    m: int = 1024
    k: int = 8192
    n: int = 8192
    grad_output: Gradient | None = None


def forward(name: str, m: int = 1024, k: int = 8192, n: int = 8192) -> Line:
    """That of a named case."""
    return Line(name, CASES[name], m, k, n)


def step(name: str, x: str, grad_output: Gradient) -> Line:
    """With x of a named case, and parameters as nn.Linear has them at first."""

    def draw(d: Draw, m: int, k: int, n: int) -> Operands:
        return CASES[x](d, m, k, n)[0], *CASES["uniform"](d, m, k, n)[1:]

    return Line(f"step, {name}", draw, grad_output=grad_output)


def identity(d: Draw, m: int, n: int) -> Tensor:
    """Its weight gradient has the rows of x."""
    return d.zeros(m, n).fill_diagonal_(1)


def _small_row(d: Draw, m: int, k: int, n: int) -> Operands:
    x, weight, bias = CASES["large bias"](d, m, k, n)
    x[5] *= 1e-10
    return x, weight, bias


HEADLINE = forward("uniform")
# At `highest`.
OPERANDS = [
    "last column large",
    "1/16 of the columns shared",
    "first quarter of x is zero",
    "first 7/8 of x are zero",
    "block-diagonal weight",
    "integers, larger ones in the sample",
    "tiny shared columns",
    "one-hot x",
    "sparse x, 1 in 10",
    "two wide rows of x",
    "128 wide rows of the weight",
    "outliers in the weight",
    "wide lognormal",
    "inf in one row of x",
    "inf in all rows of x",
]
SHORT = [(768, 3072), (1000, 1000), (512, 2048)]  # K, N
WIDE = [(4096, 11008), (8192, 28672), (5120, 5120)]
STEPS = [
    step("normal gradient", "uniform", Draw.normal),
    step("softmax - one-hot", "uniform", cross_entropy_gradient),
    step("softmax - one-hot; x 1 in 10", "sparse x, 1 in 10", cross_entropy_gradient),
    step("one-hot gradient", "uniform", one_hot),
    Line("step, identity; a row of x 1e-10", _small_row, 1024, 1024, 1024, identity),
]
HIGHEST = [
    HEADLINE,
    *map(forward, OPERANDS),
    forward("dropout of relu", 2048, 1024, 4096),
    forward("relu of h - 1", 64, 4096, 4096),
    *(forward("uniform", m, k, n) for k, n in SHORT for m in (1000, 4096, 16384)),
    forward("uniform", 128),
    *(forward("uniform", m, k, n) for k, n in WIDE for m in (33, 64, 128, 256)),
    forward("uniform", 65536, 8192, 1024),
    *STEPS,
]
# At `high` and `medium`.
HIGH = [
    HEADLINE,
    *map(
        forward,
        [
            "1% zeros in the weight",
            "int8 weight",
            "zero weight",
            "2:4 sparse weight",
            "wide lognormal",
            "two wide rows of x",
            "128 wide rows of the weight",
            "inf in one row of x",
            "inf in every 64th row of x",
            "inf in all rows of x",
        ],
    ),
    forward("uniform", 65536, 8192, 1024),
    STEPS[0],
]


def lines_of(precision: str) -> list[Line]:
    """The lines under one of torch's precision settings."""
    return HIGHEST if precision == "highest" else HIGH


def report(
    lines: list[Line],
    kinds: dict[str, type[nn.Module]],
    device: torch.device,
    trials: int | None,
) -> str:
    """The table of these lines.

    Args:
        kinds: the solution's and the reference's class by name, in this order.
        trials: pairs of timed calls.
    """
    clock = CudaClock(device) if device.type == "cuda" else CpuClock()
    titles = ["operands", "M", "K", "N", "eager us", "ours us", "ratio"]
    rows = [[*titles, "max", "mean", "u", "eager's u", "inf, NaN", "MiB", "eager's MiB"]]
    rounds = trials or TRIALS
    for line in lines:
        rows.append(_measure(line, kinds, device, clock, rounds))
        print(line.name, end="; ", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return f"{table(rows)}\n\n{LEGEND.format(rounds=rounds)}"


def same_places(ours: Tensor, eager: Tensor) -> str:
    """Whether infinities and NaN of ours are where eager has them; "" where neither has any."""
    if ours.isfinite().all() and eager.isfinite().all():
        return ""
    tests = (torch.isnan, torch.isposinf, torch.isneginf)
    return "same" if all(torch.equal(test(ours), test(eager)) for test in tests) else "DIFFER"


def _measure(
    line: Line,
    kinds: dict[str, type[nn.Module]],
    device: torch.device,
    clock: CpuClock | CudaClock,
    rounds: int,
) -> list[str]:
    m, k, n = (min(side, LARGEST_SIDE[device.type]) for side in (line.m, line.k, line.n))
    draw = Draw(0, str(device))
    x, weight, bias = line.operands(draw, m, k, n)
    modules = [_module(kind, weight, bias) for kind in kinds.values()]
    if line.grad_output is None:
        compared, places = _compare_outputs(line.name, modules, x)
        grad_output, memory = None, [_beside_result(module, x) for module in modules]
    else:
        clear = clear_of_zero(x, modules[1])
        grad_output, memory = line.grad_output(draw, m, n) * clear, ["", ""]
        compared, places = _compare_gradients(modules, x, grad_output)
    samplers = {
        name: _sampler(module, x, grad_output, clock)
        for name, module in zip(kinds, modules, strict=True)
    }
    ours, eager, ratio = columns(alternate(samplers, math.inf, rounds), 1e6)
    return [
        line.name,
        *map(str, (m, k, n)),
        eager,
        ours,
        ratio,
        *_errors(compared),
        places,
        *memory,
    ]


def _module(kind: type[nn.Module], weight: Tensor, bias: Tensor) -> nn.Module:
    with torch.device("meta"):  # nothing is drawn, which takes a CPU a second
        module = kind(weight.shape[1], weight.shape[0], DIVISOR)
    module.linear.weight, module.linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    return module


@torch.no_grad()
def _compare_outputs(
    name: str, modules: list[nn.Module], x: Tensor
) -> tuple[list[Comparison], str]:
    ours, eager = (module(x) for module in modules)
    return [compare_output(name, ours, eager, x, modules[1])], same_places(ours, eager)


def _compare_gradients(
    modules: list[nn.Module], x: Tensor, grad_output: Tensor
) -> tuple[list[Comparison], str]:
    ours, eager = (differentiate(module, x, grad_output, None) for module in modules)
    compared = compare_gradients(ours, eager, x, modules[1], grad_output, None)
    places = [same_places(ours[name], eager[name]) for name in PRODUCTS]
    return [compared[name] for name in PRODUCTS], max(places, key=["", "same", "DIFFER"].index)


@torch.no_grad()
def _beside_result(module: nn.Module, x: Tensor) -> str:
    """MiB; "" on a CPU, which does not count."""
    if not x.is_cuda:
        return ""
    torch.cuda.reset_peak_memory_stats(x.device)
    before = torch.cuda.memory_allocated(x.device)
    output = module(x)
    bytes_beside = torch.cuda.max_memory_allocated(x.device) - before - output.nbytes
    return f"{bytes_beside / 2**20:.0f}"


def _sampler(
    module: nn.Module, x: Tensor, grad_output: Tensor | None, clock: CpuClock | CudaClock
) -> Callable[[], float]:
    @torch.no_grad()
    def sample() -> float:
        return clock.time(module, x)[1]

    def sample_step() -> float:
        leaf = x.detach().requires_grad_()
        output, seconds, _ = clock.time(module, leaf)
        leaves = [leaf, *module.parameters()]
        _, more, _ = clock.time(lambda output: grad(output, leaves, grad_output), output)
        return seconds + more

    return sample if grad_output is None else sample_step


def _errors(compared: list[Comparison]) -> list[str]:
    """Maximum and mean error in parts of eager's, scaled errors of both; the largest of each."""
    cells = [
        max(_quotient(getattr(c.solution, metric), getattr(c.reference, metric)) for c in compared)
        for metric in ("max", "mean")
    ]
    for side in ("solution", "reference"):
        cells.append(max(getattr(c, side).scaled for c in compared) / U32)
    return [f"{cell:.3g}" for cell in cells]


def _quotient(error: float, eager: float) -> float:
    if error == 0:
        return 0.0
    return error / eager if eager else math.inf
