"""Every speed figure beside the headline: `python -m problems.benchmark what [options]`.

linear    LinearReluDivideNew against eager over rows and features
operands  the same on operands of many kinds, with errors
host      what a forward, and a training step, cost the host: 1,024 elements, and [1, 64] -> 64
import    seconds to import the solution, beyond torch's
report    the figures of README and docs/BENCHMARKS.md for this device; --only takes some

`report` runs the command of each file in docs/benchmarks/ that is for this kind of device, writes
what it prints to that file, and makes the tables of docs/BENCHMARKS.md from these files
(problems/pages.py). README's table has the command in a comment above it, say
`<!-- cuda: python run.py -->`, and ends with `<!-- end -->`. When `report` runs that command, the
table gets run.py's `--markdown`, and docs/figures.svg the picture. Files are written after each
command.
"""

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from timeit import timeit

import torch
from torch.autograd import grad

from model import PROBLEMS
from problems import pages
from problems.clock import CpuClock, CudaClock
from problems.linear_relu_divide import U32, exact_sums
from problems.operands import draw_case
from referee.budget import errors
from referee.records import environment
from referee.report import files, load, plot, tables

ROUNDS = 31
ROWS = {"cpu": (1, 16, 64), "cuda": (1, 16, 64, 128, 512, 1024, 4096, 8192)}
FEATURES = (1024, 4096, 8192)
SIZE = {"cpu": (128, 128, 128), "cuda": (1024, 8192, 8192)}  # M, K and N of `operands`
OPERANDS = ["uniform", "wide lognormal", "two wide rows of x", "128 wide rows of the weight"]
OPERANDS += ["inf in one row of x", "inf in all rows of x"]
HIGHEST = ["last column large", "one-hot x", "outliers in the weight"]
HIGH = ["int8 weight", "zero weight", "2:4 sparse weight", "inf in every 64th row of x"]
HOST_CALLS = 250  # a GPU's queue holds about 1,000 launches; a step has 2
SMALL = {  # of `host`: a problem, arguments of the modules, the shape of x and of the output
    "ReLU of 1,024": ("relu", (), (1024,)),
    "[1, 64] -> 64": ("linear_relu_divide", (64, 64, 2.0), (1, 64)),
}
IMPORTS = {"both problems": "import model_new"}

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS, README = ROOT / "docs" / "BENCHMARKS.md", ROOT / "README.md"
RESULTS = ROOT / "docs" / "benchmarks"  # what each command printed, as JSON
PICTURE = ROOT / "docs" / "figures.svg"
BLOCK = re.compile(r"(<!-- (\w+): (.+?) -->\n).*?(?=<!-- end -->)", re.DOTALL)

Calls = dict[str, Callable]  # ours, then eager's
Rows = Iterable[list[str]]  # of a table


def modules(problem: str, device: str, dtype: torch.dtype, *arguments: object) -> Calls:
    """Return this project's module and the reference's, with the same parameters."""
    from model_new import SOLUTIONS  # builds the kernels

    with torch.device(device):
        both = [kind(*arguments) for kind in (SOLUTIONS[problem], PROBLEMS[problem].reference)]
    ours, eager = (module.to(dtype) for module in both)
    ours.load_state_dict(eager.state_dict())
    return {"ours": ours, "eager": eager}


def alternate(calls: Calls, x: torch.Tensor, on_host: bool = False) -> dict[str, list[float]]:
    """Return seconds of calls on x, in random order within each round: L2 cold, or of the host."""
    clock = CudaClock(x.device) if x.is_cuda and not on_host else CpuClock()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 1):  # the first is not recorded
        for name, call in random.sample(list(calls.items()), len(calls)):
            times[name].append(_host_time(call, x) if on_host else clock.time(call, x)[1])
    return {name: taken[1:] for name, taken in times.items()}


def compare(calls: Calls, x: torch.Tensor, on_host: bool = False) -> list[str]:
    """Return the medians of ours, of eager's (us; of the host ns) and of eager's time / ours."""
    (ours, eager), unit = alternate(calls, x, on_host).values(), 1e9 if on_host else 1e6
    ratio = median(e / o for e, o in zip(eager, ours, strict=True))
    return [f"{median(ours) * unit:.2f}", f"{median(eager) * unit:.2f}", f"{ratio:.3f}"]


@torch.no_grad()
def linear(device: str, dtype: torch.dtype) -> Rows:
    """Yield a row for each size of the weight: eager's time / ours, and ours in microseconds."""
    yield ["eager / LinearReluDivideNew (us)", *(f"M {m}" for m in ROWS[device])]
    for k, n in product(FEATURES, FEATURES):
        both, cells = modules("linear_relu_divide", device, dtype, k, n, 2.0), []
        for m in ROWS[device]:
            x = torch.empty(m, k, dtype=dtype, device=device).uniform_(-1, 1)
            ours, _, ratio = compare(both, x)
            cells.append(f"{ratio} ({float(ours):.0f})")
        yield [f"K {k}, N {n}", *cells]


@torch.no_grad()
def operands(device: str, dtype: torch.dtype) -> Rows:
    """Yield a row for each kind of operands: times, and errors against float64.

    The unit u of an error is 2^-24 of (|x| |weight|^T + |bias|).
    """
    yield ["operands", "eager us", "ours us", "ratio", "u", "eager's u"]
    m, k, n = SIZE[device]
    both = modules("linear_relu_divide", device, dtype, k, n, 2.0)
    is_highest = torch.get_float32_matmul_precision() == "highest"
    for name in OPERANDS + (HIGHEST if is_highest else HIGH):
        x, weight, bias = (tensor.to(dtype) for tensor in draw_case(name, m, k, n, device))
        for module in both.values():
            module.load_state_dict({"linear.weight": weight, "linear.bias": bias})
        eager = both["eager"]
        z, magnitude = exact_sums(eager.linear, x)
        exact = torch.relu(z) / eager.divisor
        size = magnitude.nan_to_num_(0, 0).div_(abs(eager.divisor)).clamp_min_(sys.float_info.min)
        off = [errors(module(x), exact.to(dtype), exact) / size for module in both.values()]
        units = [f"{parts.max().item() / U32:.3g}" for parts in off]
        del z, magnitude, exact, size, off
        ours, eager, ratio = compare(both, x)
        yield [name, eager, ours, ratio, *units]


def host(device: str, dtype: torch.dtype) -> Rows:
    """Yield a row for each small call: the host's time, which does not wait for launches."""
    yield ["host time", "ours ns", "eager ns", "eager / ours"]
    for (title, small), where in product(SMALL.items(), dict.fromkeys(("cpu", device))):
        problem, arguments, shape = small
        forwards, steps = modules(problem, where, dtype, *arguments), {}
        ones = torch.ones(shape, dtype=dtype, device=where)
        x = ones.clone().requires_grad_()
        for name, f in forwards.items():
            leaves = [x, *f.parameters()]
            steps[name] = lambda x, f=f, leaves=leaves, ones=ones: grad(f(x), leaves, ones)
        for what, calls in (("forward", forwards), ("forward + backward", steps)):
            with torch.set_grad_enabled(calls is steps):
                times = compare(calls, x, on_host=True)
            yield [f"{title}, {what}, {where}", *times]


def _host_time(call: Callable, x: torch.Tensor) -> float:
    """Return the host's seconds for a call, the mean of HOST_CALLS that are not waited for."""
    setup = torch.cuda.synchronize if x.is_cuda else "pass"
    return timeit(partial(call, x), setup, number=HOST_CALLS) / HOST_CALLS


def imports(*_: object) -> Rows:
    """Yield the seconds of a first import, which builds, and the median of three later ones.

    Each import is in a process of its own.
    """
    yield ["import beyond torch", "cold s", "warm s"]
    for name, statement in IMPORTS.items():
        code = f"import torch, time; start = time.perf_counter(); {statement}; "
        code += "print(time.perf_counter() - start)"
        command = [sys.executable, "-c", code]
        with tempfile.TemporaryDirectory() as folder:
            env = os.environ | {"TORCH_EXTENSIONS_DIR": folder}
            first, *later = (float(subprocess.check_output(command, env=env)) for _ in range(4))
        yield [name, f"{first:.2f}", f"{median(later):.2f}"]


TABLES = {"linear": linear, "operands": operands, "host": host, "import": imports}


def measure(device: str, only: str) -> list[str]:
    """Run the commands for a kind of device that contain a text; return those that failed."""
    failed = []
    found = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    wanted = {
        path: old["command"]
        for path, old in found.items()
        if old["device"] == device and only in old["command"]
    }
    if not wanted:
        raise ValueError(f"no results are for {device} and have a command that contains {only!r}")
    for path, command in wanted.items():
        head = f"<!-- {device}: {command} -->\n"
        with tempfile.TemporaryDirectory() as folder:
            samples, is_readmes = Path(folder, "results.json"), head in README.read_text()
            run = [sys.executable, *shlex.split(command)[1:]]
            if is_readmes:
                plot.check(PICTURE)
                run += ["--json", str(samples)]
            done = subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
            print(f"{command}: status {done.returncode}", flush=True)
            if done.returncode:
                failed.append(command)
                continue
            if is_readmes:
                content = {**load(samples), "command": command}
                files.write(PICTURE, plot.draw(content, ".svg"))
                _replace(README, head, tables.markdown(content))
        results = {"device": device, "command": command, "output": pages.parse(done.stdout)}
        files.write(path, pages.dump(results))
        files.write(BENCHMARKS, pages.fill(BENCHMARKS.read_text(), RESULTS))
    return failed


def _replace(page: Path, head: str, content: str) -> None:
    """Put content below a comment of a page, in the place of what is there."""
    new = BLOCK.sub(lambda m: head + content if m[1] == head else m[0], page.read_text())
    files.write(page, new)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's options; a wrong one ends the process with status 2."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("what", choices=[*TABLES, "report"])
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=best)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument("--only", default="", metavar="TEXT", help="commands that contain this")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = parse(arguments)
    if args.what == "report":
        return 1 if measure(args.device, args.only) else 0
    torch.set_float32_matmul_precision(args.precision)
    print("{device}, torch {torch}, CUDA {cuda}\n".format(**environment(torch.device(args.device))))
    if args.what != "import":
        precision = f", precision {args.precision}" if args.dtype == "float32" else ""
        print(f"{args.dtype}{precision}\n")
    print(tables.table(list(TABLES[args.what](args.device, getattr(torch, args.dtype)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
