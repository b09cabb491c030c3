"""Speed figures beside the headline: `python -m problems.benchmark what [options]`.

linear    times of LinearReluDivideNew and of eager, over numbers of rows and features
operands  times and errors of LinearReluDivideNew and of eager, on operands of many kinds
host      the host's time for small forwards and training steps: ReLU of 1,024 elements, and a
          linear module of 64 features on one row
import    seconds to import model_new.py, without the seconds for torch
report    runs the commands behind the figures of README and docs/BENCHMARKS.md for this kind of
          device, and renews these documents

`report` is in problems/figures.py. With --only TEXT, it runs only the commands that contain TEXT.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from timeit import timeit

import torch
from torch import Tensor, nn
from torch.autograd import grad

from model import PROBLEMS
from problems import figures
from problems.clock import CpuClock, CudaClock
from problems.linear_relu_divide import U32, exact_sums
from problems.operands import draw_case
from referee.comparison.accuracy import element_errors
from referee.records import environment
from referee.report import tables

ROUNDS = 31

# Sizes of `linear`: rows of x by kind of device, and the features of x and of the output.
ROWS = {"cpu": (1, 16, 64), "cuda": (1, 16, 64, 128, 512, 1024, 4096, 8192)}
FEATURES = (1024, 4096, 8192)

# Cases of `operands`, from problems/operands.py, and their M, K and N by kind of device.
OPERANDS = [
    "uniform",
    "wide lognormal",
    "two wide rows of x",
    "128 wide rows of the weight",
    "inf in one row of x",
    "inf in all rows of x",
]
OPERANDS_AT_HIGHEST = ["last column large", "one-hot x", "outliers in the weight"]
OPERANDS_BELOW_HIGHEST = [
    "int8 weight",
    "zero weight",
    "2:4 sparse weight",
    "inf in every 64th row of x",
]
OPERANDS_SIZE = {"cpu": (128, 128, 128), "cuda": (1024, 8192, 8192)}

# Calls that `host` makes without waiting for the GPU. A GPU's queue holds about 1,000 launches, and
# a training step makes 2.
HOST_CALLS = 250

TableRows = Iterator[list[str]]  # rows of a printed table; the first one has the columns' titles


# ---------------------------------------------------------------------------------- measurements


def make_modules(
    problem: str, device: str, dtype: torch.dtype, arguments: list
) -> dict[str, nn.Module]:
    """Return this project's module, "ours", and the reference's, "eager", with equal parameters.

    Args:
        problem: the problem's name.
        device: "cpu" or "cuda".
        dtype: the parameters' dtype.
        arguments: of both modules' constructors.
    """
    from model_new import SOLUTIONS  # builds the kernels

    with torch.device(device):
        ours = SOLUTIONS[problem](*arguments).to(dtype)
        eager = PROBLEMS[problem].reference(*arguments).to(dtype)
    ours.load_state_dict(eager.state_dict())
    return {"ours": ours, "eager": eager}


def time_in_turn(calls: dict[str, Callable], x: Tensor) -> dict[str, list[float]]:
    """Return the seconds of each call on x in `ROUNDS` rounds, with a cold L2.

    In each round the calls come in random order.
    """
    clock = CudaClock(x.device) if x.is_cuda else CpuClock()
    return _time_rounds(calls, lambda call: clock.time(call, x).seconds)


def time_host_in_turn(calls: dict[str, Callable], x: Tensor) -> dict[str, list[float]]:
    """Return the host's seconds of each call on x in `ROUNDS` rounds, in random order."""
    return _time_rounds(calls, lambda call: _host_seconds(call, x))


def _time_rounds(
    calls: dict[str, Callable], seconds_of: Callable[[Callable], float]
) -> dict[str, list[float]]:
    """Return what `seconds_of` returns for each call in `ROUNDS` rounds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        is_warm_up = turn == 0
        for name, call in random.sample(list(calls.items()), len(calls)):
            seconds = seconds_of(call)
            if not is_warm_up:
                times[name].append(seconds)
    return times


def _host_seconds(call: Callable, x: Tensor) -> float:
    """Return the mean of the host's seconds for HOST_CALLS calls, of which it waits for none."""
    setup = torch.cuda.synchronize if x.is_cuda else "pass"
    return timeit(partial(call, x), setup, number=HOST_CALLS) / HOST_CALLS


@dataclass(frozen=True)
class Comparison:
    """The times of two calls.

    Attributes:
        ours: the median seconds of our call.
        eager: the median seconds of eager's.
        ratio: the median over the rounds of eager's time / ours.
    """

    ours: float
    eager: float
    ratio: float


def compare(times: dict[str, list[float]]) -> Comparison:
    """Compare the times "ours" and "eager" of the same rounds."""
    rounds = zip(times["ours"], times["eager"], strict=True)
    ratio = median(eager / ours for ours, eager in rounds)
    return Comparison(median(times["ours"]), median(times["eager"]), ratio)


# ---------------------------------------------------------------------------------------- tables


@torch.no_grad()
def linear_rows(device: str, dtype: torch.dtype) -> TableRows:
    """Yield a row for each size of the weight: eager's time / ours, and ours in microseconds."""
    yield ["eager / LinearReluDivideNew (us)", *(f"M {m}" for m in ROWS[device])]
    for k in FEATURES:
        for n in FEATURES:
            modules = make_modules("linear_relu_divide", device, dtype, [k, n, 2.0])
            cells = []
            for m in ROWS[device]:
                x = torch.empty(m, k, dtype=dtype, device=device).uniform_(-1, 1)
                compared = compare(time_in_turn(modules, x))
                cells.append(f"{compared.ratio:.3f} ({compared.ours * 1e6:.0f})")
            yield [f"K {k}, N {n}", *cells]


@torch.no_grad()
def operands_rows(device: str, dtype: torch.dtype) -> TableRows:
    """Yield a row for each kind of operands: times, and the largest errors against float64.

    The unit u of an error is 2^-24 of (|x| |weight|^T + |bias|).
    """
    yield ["operands", "eager us", "ours us", "ratio", "u", "eager's u"]
    m, k, n = OPERANDS_SIZE[device]
    modules = make_modules("linear_relu_divide", device, dtype, [k, n, 2.0])
    names = list(OPERANDS)
    if torch.get_float32_matmul_precision() == "highest":
        names += OPERANDS_AT_HIGHEST
    else:
        names += OPERANDS_BELOW_HIGHEST
    for name in names:
        x, weight, bias = (tensor.to(dtype) for tensor in draw_case(name, m, k, n, device))
        for module in modules.values():
            module.load_state_dict({"linear.weight": weight, "linear.bias": bias})
        largest_errors = _largest_errors(modules, x)
        compared = compare(time_in_turn(modules, x))
        yield [
            name,
            f"{compared.eager * 1e6:.2f}",
            f"{compared.ours * 1e6:.2f}",
            f"{compared.ratio:.3f}",
            f"{largest_errors['ours']:.3g}",
            f"{largest_errors['eager']:.3g}",
        ]


def _largest_errors(modules: dict[str, nn.Module], x: Tensor) -> dict[str, float]:
    """Return the largest error of each module on x, in the unit u of `operands_rows`."""
    eager = modules["eager"]
    z, magnitude = exact_sums(eager.linear, x)
    exact = torch.relu(z) / eager.divisor
    # An infinite sum counts as 0 here. Its error is 0 or infinite, in any unit.
    unit = magnitude.nan_to_num_(0, 0).div_(abs(eager.divisor)).clamp_min_(sys.float_info.min)
    found = {}
    for name, module in modules.items():
        error = element_errors(module(x), exact.to(x.dtype), exact)
        found[name] = (error / unit).max().item() / U32
    return found


@dataclass(frozen=True)
class SmallCall:
    """A module and its input, which are so small that only the host's time counts.

    Attributes:
        title: for the table.
        problem: the problem's name.
        arguments: of the module's constructor.
        shape: of x, and of the output.
    """

    title: str
    problem: str
    arguments: list
    shape: tuple[int, ...]


SMALL_CALLS = [
    SmallCall("ReLU of 1,024", "relu", [], (1024,)),
    SmallCall("[1, 64] -> 64", "linear_relu_divide", [64, 64, 2.0], (1, 64)),
]


def host_rows(device: str, dtype: torch.dtype) -> TableRows:
    """Yield a row for each small call: the host's time for it, without waiting for the GPU."""
    yield ["host time", "ours ns", "eager ns", "eager / ours"]
    places = ["cpu"] if device == "cpu" else ["cpu", device]
    for small in SMALL_CALLS:
        for place in places:
            forwards = make_modules(small.problem, place, dtype, small.arguments)
            ones = torch.ones(small.shape, dtype=dtype, device=place)
            x = ones.clone().requires_grad_()
            steps = {name: training_step(module, x, ones) for name, module in forwards.items()}
            with torch.no_grad():
                times = time_host_in_turn(forwards, x)
            yield _host_row(f"{small.title}, forward, {place}", times)
            times = time_host_in_turn(steps, x)
            yield _host_row(f"{small.title}, forward + backward, {place}", times)


def training_step(module: nn.Module, x: Tensor, grad_output: Tensor) -> Callable[[Tensor], tuple]:
    """Return a function that computes a forward on x, and the gradients of x and parameters."""
    leaves = [x, *module.parameters()]

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return grad(module(x), leaves, grad_output)

    return step


def _host_row(title: str, times: dict[str, list[float]]) -> list[str]:
    compared = compare(times)
    ours = f"{compared.ours * 1e9:.2f}"
    eager = f"{compared.eager * 1e9:.2f}"
    return [title, ours, eager, f"{compared.ratio:.3f}"]


def import_rows(device: str, dtype: torch.dtype) -> TableRows:
    """Yield the seconds of a first import, which builds, and the median of three later ones.

    Each import is in a process of its own. The arguments are those of every function of `TABLES`,
    and are not used.
    """
    yield ["import beyond torch", "cold s", "warm s"]
    code = (
        "import torch, time; start = time.perf_counter(); import model_new; "
        "print(time.perf_counter() - start)"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment_with_folder = os.environ | {"TORCH_EXTENSIONS_DIR": folder}
        seconds = []
        for _ in range(4):
            printed = subprocess.check_output(
                [sys.executable, "-c", code], env=environment_with_folder
            )
            seconds.append(float(printed))
    yield ["both problems", f"{seconds[0]:.2f}", f"{median(seconds[1:]):.2f}"]


TABLES: dict[str, Callable[[str, torch.dtype], TableRows]] = {
    "linear": linear_rows,
    "operands": operands_rows,
    "host": host_rows,
    "import": import_rows,
}


# ---------------------------------------------------------------------------------- command line


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's options; a wrong one ends the process with status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*TABLES, "report"])
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default_device)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument("--only", default="", metavar="TEXT", help="commands that contain this")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = parse_options(arguments)
    if args.what == "report":
        failed = figures.renew(args.device, args.only)
        return 1 if failed else 0
    torch.set_float32_matmul_precision(args.precision)
    print("{device}, torch {torch}, CUDA {cuda}\n".format(**environment(torch.device(args.device))))
    if args.what != "import":
        precision = f", precision {args.precision}" if args.dtype == "float32" else ""
        print(f"{args.dtype}{precision}\n")
    rows = TABLES[args.what](args.device, getattr(torch, args.dtype))
    print(tables.table(list(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
