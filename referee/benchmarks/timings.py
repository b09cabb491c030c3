"""Times of both modules beside their references, by size, layout and device: a table each."""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from statistics import median
from typing import NamedTuple

import torch

from model import PROBLEMS
from referee import cases, relu
from referee import linear_relu_divide as linear_grader
from referee.benchmarks.pairs import (
    Both,
    alternate,
    columns,
    mean_of,
    samplers_of,
    steps_of,
    titles,
)
from referee.memory import free_bytes
from referee.report.tables import table

SIZES = {"cpu": range(4, 29), "cuda": range(10, 32)}  # exponents of two
HOST_CALLS = 250  # a GPU's queue holds about 1,000 launches; a step has 2
SIDE = {"cpu": 1024, "cuda": 8192}  # of the square of which there are views
FEATURES = (1024, 4096, 8192)
ROWS = {"cpu": (1, 16, 64), "cuda": (1, 16, 64, 128, 512, 1024, 4096, 8192)}
CELL_SECONDS = {"cpu": 1.0, "cuda": 0.25}  # for each cell of `linear`
# Rows, out_features and in_features of `layouts`, parts of them on a CPU, and how operands lie.
LAYOUT_SIZES = [(1024, 8192, 8192), (1024, 4096, 4096), (8192, 1024, 8192), (64, 8192, 8192)]
LAYOUT_PART = {"cpu": 16, "cuda": 1}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda matrix: matrix,
    "transposed": lambda matrix: matrix.t().contiguous().t(),
    "unaligned": lambda matrix: torch.nn.functional.pad(matrix, (1, 0))[:, 1:],
}
LAYOUT_PAIRS = [("rows", "rows"), ("rows", "transposed"), ("transposed", "rows")]
LAYOUT_PAIRS += [("transposed", "transposed"), ("rows", "unaligned"), ("unaligned", "rows")]
VIEWS = ["x[:, ::2]", "x[:, 1:]", "x[1:-1, 1:-1]", "x.view(-1, 64, 4)[..., 1]"]
VIEWS += ["x.view(-1, 4)[:, :3]", "x.view(64, -1, 128).permute(2, 0, 1)[::2]"]
VIEWS += ["x[:1].expand(x.shape)"]
# Arguments of the modules, the shape of x and a title, of `host`.
SMALL = {
    "relu": ((), (1024,), "ReLU of 1,024"),
    "linear_relu_divide": ((64, 64, 2.0), (1, 64), "[1, 64] -> 64"),
}
IMPORTS = {
    "ModelNew": "import model_new",
    "both, as run.py builds them": "import kernels; "
    "kernels.build_together('relu', 'linear_relu_divide'); from model_new import SOLUTIONS",
}


class Setting(NamedTuple):
    """What is measured: a device, and the dtype of operands and parameters."""

    device: torch.device
    dtype: torch.dtype

    def draw(self, *shape: int) -> torch.Tensor:
        """A dense tensor, uniform in -1..1, or whole numbers."""
        return cases.random(shape, self.dtype, self.device, torch.Generator(device=self.device))

    def both(self, problem: str, *arguments: object) -> Both:
        """This project's module and the reference, with the same parameters."""
        kinds = importlib.import_module("model_new").SOLUTIONS[problem], PROBLEMS[problem].reference
        with self.device:
            solution, eager = (kind(*arguments) for kind in kinds)
        for parameter in (*solution.parameters(), *eager.parameters()):
            parameter.data = parameter.data.to(self.dtype)
        solution.load_state_dict(eager.state_dict())
        names = {"relu": relu, "linear_relu_divide": linear_grader}[problem].NAMES
        return {names.solution: solution, names.eager: eager}


def show(rows: Iterable[list[str]]) -> None:
    """Prints a table, whose first column goes to stderr as its rows are made."""
    made = []
    for row in rows:
        made.append(row)
        print(row[0], end="; ", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"\n{table(made)}")


def sizes(setting: Setting) -> Iterable[list[str]]:
    """Time of a call by size: device time with a cold L2 on a GPU, wall-clock time on a CPU."""
    both = setting.both("relu")
    yield ["elements", *titles(both, "us")]
    for exponent in SIZES[setting.device.type]:
        if 3 * 2**exponent * setting.dtype.itemsize > free_bytes(setting.device):
            break
        times = alternate(samplers_of(both, setting.draw(2**exponent)))
        yield [f"2^{exponent}", *columns(times, 1e6)]


def views(setting: Setting) -> Iterable[list[str]]:
    """Time of a call by layout of the input, measured as by `sizes`."""
    both, side = setting.both("relu"), SIDE[setting.device.type]
    yield [f"x [{side}, {side}]", *titles(both, "us")]
    x = setting.draw(side, side)
    for view in VIEWS:
        yield [view, *columns(alternate(samplers_of(both, eval(view, {"x": x}))), 1e6)]


@torch.no_grad()
def linear(setting: Setting) -> Iterable[list[str]]:
    """Eager's time in parts of the solution's, and the latter, by rows and features."""
    every, longest = ROWS[setting.device.type], CELL_SECONDS[setting.device.type]
    names = linear_grader.NAMES
    yield [f"{names.eager} / {names.solution} (us)", *(f"M {m}" for m in every)]
    for k, n in product(FEATURES, FEATURES):
        both = setting.both("linear_relu_divide", k, n, 2.0)
        times = (alternate(samplers_of(both, setting.draw(m, k)), longest) for m in every)
        cells = (columns(of_cell, 1e6) for of_cell in times)
        yield [f"K {k}, N {n}", *(f"{ratio} ({float(us):.0f})" for us, _, ratio in cells)]


def layouts(setting: Setting) -> Iterable[list[str]]:
    """Time of a forward and of a training step by how x and the weight lie in memory.

    `of rows` is the solution's time in parts of its own with contiguous operands.
    """
    shown = ["ours us", "eager us", "ratio", "of rows"]
    yield ["M, N, K", "x", "weight", *shown, *(f"step: {title}" for title in shown)]
    for whole in LAYOUT_SIZES:
        m, n, k = (size // LAYOUT_PART[setting.device.type] for size in whole)
        of_rows: dict[bool, float] = {}  # the first line's, of forwards and of steps
        for of_x, of_weight in LAYOUT_PAIRS:
            both = setting.both("linear_relu_divide", k, n, 2.0)
            for module in both.values():
                weight = LAYOUTS[of_weight](module.linear.weight.detach())
                module.linear.weight = torch.nn.Parameter(weight)
            x, grad_output = LAYOUTS[of_x](setting.draw(m, k)), setting.draw(m, n)
            cells = []
            for is_step, calls in ((False, both), (True, steps_of(both, grad_output))):
                with torch.set_grad_enabled(is_step):
                    samplers = samplers_of(calls, x.requires_grad_(is_step))
                    times = alternate(samplers, 2 * CELL_SECONDS[setting.device.type])
                taken = median(times[linear_grader.NAMES.solution])
                cells += [*columns(times, 1e6), f"{taken / of_rows.setdefault(is_step, taken):.3f}"]
            yield [f"{m}, {n}, {k}", of_x, of_weight, *cells]


def host(setting: Setting, problem: str) -> Iterable[list[str]]:
    """Times a call on ones on the host, launches not waited for."""
    arguments, shape, title = SMALL[problem]
    both = setting.both(problem, *arguments)
    yield [f"host time, {title}", *titles(both, "ns")]
    for name in dict.fromkeys(("cpu", setting.device.type)):
        for module in both.values():
            module.to(name)
        x = torch.ones(shape, device=name, dtype=setting.dtype)
        with torch.no_grad():
            calls = {who: partial(mean_of, f, x, HOST_CALLS) for who, f in both.items()}
            times = alternate(calls)
        yield [f"forward, {name}", *columns(times, 1e9)]
        if setting.dtype.is_floating_point:
            leaf, steps = x.clone().requires_grad_(), steps_of(both, x)
            calls = {who: partial(mean_of, f, leaf, HOST_CALLS) for who, f in steps.items()}
            yield [f"forward + backward, {name}", *columns(alternate(calls), 1e9)]


def imports() -> Iterable[list[str]]:
    """First imports, which build, and the median of three later ones, in fresh processes."""
    yield ["import beyond torch", "cold s", "warm s"]
    for name, statement in IMPORTS.items():
        code = f"import torch, time; start = time.perf_counter(); {statement}; "
        code += "print(time.perf_counter() - start)"
        command = [sys.executable, "-W", "ignore:Failed to initialize NumPy", "-c", code]
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "TORCH_EXTENSIONS_DIR": folder}
            first, *later = (float(subprocess.check_output(command, env=env)) for _ in range(4))
        yield [name, f"{first:.2f}", f"{median(later):.2f}"]
