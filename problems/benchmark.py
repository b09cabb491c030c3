"""Speed figures beside the headline: `python -m problems.benchmark what [options]`.

linear    times of LinearReluDivideNew and of eager, over numbers of rows and features
operands  times and errors of LinearReluDivideNew and of eager, on operands of many kinds
host      the host's time for small forwards and training steps: ReLU of 1,024 elements, and a
          linear module of 64 features on one row
import    seconds to import model_new.py, without the seconds for torch
report    runs the commands behind the figures of README and docs/BENCHMARKS.md for this kind of
          device, and renews these documents
pages     renews these documents from the results in docs/benchmarks/, without measuring

The first four print a table of their results (problems/benchmark_tables.py), and write them to the
file that --json names. Its keys:

benchmark, command, environment, date   what was measured, how, where, and when (UTC)
dtype, precision   of the linear module's and ReLU's tensors; the precision is "" unless the dtype
                   is float32. `import` has neither.
rows               a dictionary for each row of the measurement. Times are in seconds. "ratio" is
                   the median over the rounds of eager's time / ours. Errors are in the unit u of
                   `measure_operands`.

`report` and `pages` are in problems/figures.py.
"""

import argparse
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from timeit import timeit

import torch
from torch import Tensor, nn
from torch.autograd import grad

from model import PROBLEMS
from problems import figures, pages
from problems.benchmark_tables import TABLES
from problems.clock import CpuClock, CudaClock
from problems.linear_relu_divide import U32, exact_sums
from problems.operands import draw_case
from referee.comparison.accuracy import element_errors
from referee.records import as_json, environment
from referee.report import files, machine_and_versions, tables

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

Rows = list[dict[str, str | int | float]]  # what a command measures, for --json


# ----------------------------------------------------------------------------------------- times


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
    return _time_rounds(calls, lambda call: clock.time(call, x))


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
    """The times of two calls, under the names that rows have.

    Attributes:
        ours_seconds: the median seconds of our call.
        eager_seconds: the median seconds of eager's.
        ratio: the median over the rounds of eager's time / ours.
    """

    ours_seconds: float
    eager_seconds: float
    ratio: float


def compare(times: dict[str, list[float]]) -> Comparison:
    """Compare the times "ours" and "eager" of the same rounds."""
    rounds = zip(times["ours"], times["eager"], strict=True)
    ratio = median(eager / ours for ours, eager in rounds)
    return Comparison(median(times["ours"]), median(times["eager"]), ratio)


# ---------------------------------------------------------------------------------- measurements


@torch.no_grad()
def measure_linear(device: str, dtype: torch.dtype) -> Rows:
    """Return a row for each K, N and M: the times of both modules."""
    rows: Rows = []
    for k in FEATURES:
        for n in FEATURES:
            modules = make_modules("linear_relu_divide", device, dtype, [k, n, 2.0])
            for m in ROWS[device]:
                x = torch.empty(m, k, dtype=dtype, device=device).uniform_(-1, 1)
                compared = compare(time_in_turn(modules, x))
                rows.append({"k": k, "n": n, "m": m, **asdict(compared)})
    return rows


@torch.no_grad()
def measure_operands(device: str, dtype: torch.dtype) -> Rows:
    """Return a row for each kind of operands: times, and the largest errors against float64.

    The unit u of an error is 2^-24 of (|x| |weight|^T + |bias|) / |divisor|.
    """
    rows: Rows = []
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
        row = {"operands": name, **asdict(compare(time_in_turn(modules, x)))}
        row |= {f"{owner}_error": error for owner, error in largest_errors.items()}
        rows.append(row)
    return rows


def _largest_errors(modules: dict[str, nn.Module], x: Tensor) -> dict[str, float]:
    """Return the largest error of each module on x, in the unit u of `measure_operands`."""
    eager = modules["eager"]
    z, magnitude = exact_sums(eager.linear, x)
    exact = torch.relu(z) / eager.divisor
    # Where a magnitude is infinite or NaN, the unit is the smallest normal number. The exact result
    # is infinite, NaN or 0 there, and a right result has the error 0 in any unit.
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


def measure_host(device: str, dtype: torch.dtype) -> Rows:
    """Return a row for each small call: the host's time for it, without waiting for the GPU."""
    rows: Rows = []
    places = ["cpu"] if device == "cpu" else ["cpu", device]
    for small in SMALL_CALLS:
        for place in places:
            forwards = make_modules(small.problem, place, dtype, small.arguments)
            ones = torch.ones(small.shape, dtype=dtype, device=place)
            x = ones.clone().requires_grad_()
            steps = {name: training_step(module, x, ones) for name, module in forwards.items()}
            with torch.no_grad():
                times = {"forward": time_host_in_turn(forwards, x)}
            times["forward + backward"] = time_host_in_turn(steps, x)
            for part, times_of_part in times.items():
                row = {"call": small.title, "part": part, "device": place}
                rows.append({**row, **asdict(compare(times_of_part))})
    return rows


def training_step(module: nn.Module, x: Tensor, grad_output: Tensor) -> Callable[[Tensor], tuple]:
    """Return a function that computes a forward on x, and the gradients of x and parameters."""
    leaves = [x, *module.parameters()]

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return grad(module(x), leaves, grad_output)

    return step


def measure_import(device: str, dtype: torch.dtype) -> Rows:
    """Return one row: the seconds of an import that builds, and the median of three later ones.

    Each import is in a process of its own. The arguments are those of every function of
    `MEASUREMENTS`, and are not used.
    """
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
    return [{"cold_seconds": seconds[0], "warm_seconds": median(seconds[1:])}]


MEASUREMENTS: dict[str, Callable[[str, torch.dtype], Rows]] = {
    "linear": measure_linear,
    "operands": measure_operands,
    "host": measure_host,
    "import": measure_import,
}


# ---------------------------------------------------------------------------------- command line


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's options; a wrong one ends the process with status 2.

    Args:
        arguments: the command's; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*MEASUREMENTS, "report", "pages"])
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default_device)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    only = "report: run only commands that contain this, or whose file's name does"
    parser.add_argument("--only", default="", metavar="TEXT", help=only)
    args = parser.parse_args(arguments)
    if args.json:
        try:
            files.check_writable(args.json)
        except OSError as error:
            parser.error(f"cannot write {args.json}: {error.strerror}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status.

    Args:
        arguments: the command's; None for those of this process.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    args = parse_options(arguments)
    if args.what in MEASUREMENTS:
        _measure(args, arguments)
        return 0
    failed = []
    if args.what == "report":
        failed = figures.measure(args.device, args.only)
    figures.make_pages()
    return 1 if failed else 0


def _measure(args: argparse.Namespace, arguments: list[str]) -> None:
    """Measure; print the results as a table, and write them to the file of --json.

    Args:
        args: the options.
        arguments: the command line, from which the options come.
    """
    torch.set_float32_matmul_precision(args.precision)
    results = {
        "benchmark": args.what,
        "command": shlex.join(["python", "-m", "problems.benchmark", *arguments]),
        "environment": environment(torch.device(args.device)),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    print(f"{machine_and_versions(results['environment'])}\n", flush=True)
    if args.what != "import":
        results |= {"dtype": args.dtype, "precision": ""}
        if args.dtype == "float32":
            results["precision"] = args.precision
        print(f"{pages.dtype_and_setting(args.dtype, results['precision'])}\n", flush=True)
    results["rows"] = MEASUREMENTS[args.what](args.device, getattr(torch, args.dtype))
    print(tables.table(TABLES[args.what](results["rows"])))
    if args.json:
        files.write(args.json, as_json(results))


if __name__ == "__main__":
    sys.exit(main())
