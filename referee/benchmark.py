"""Every speed figure beside the headline: `python -m referee.benchmark [what] [options]`.

sizes     ModelNew against torch.relu over powers of two
views     the same for views that are not dense
offsets   the same, in place and a training step for dense x at every offset below 16 bytes
linear    LinearReluDivideNew against eager over rows and features, at one --precision
layouts   the same with transposed operands, forward and training step
operands  float32: the same on operands of every kind, with errors and memory, at one --precision
host      what a forward, and a training step, cost the host: 1,024 elements, and [1, 64] -> 64
import    seconds to import the solution, beyond torch's
l2        GPU: how fast an L2-resident loop runs right after each of the two ReLUs
thp       CPU: ReLU of 1 GiB in a default environment and under THP_MEM_ALLOC_ENABLE=1
all       all of them, as far as the device goes
report    the figures of README and docs for this device, in their places; --only takes some
"""

import argparse
import importlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch.cuda import Event, synchronize

from model import PROBLEMS
from referee import cases, figures, linear_checks, operand_benchmark, relu
from referee import linear_relu_divide as linear_grader
from referee.memory import free_bytes
from referee.pairs import ROUNDS, Modules, alternate, columns, samplers_of
from referee.report import environment, table

NAMES = ["sizes", "views", "offsets", "linear", "layouts", "operands"]
NAMES += ["host", "import", "l2", "thp"]
SIZES = {"cpu": range(4, 29), "cuda": range(10, 32)}  # exponents of two
HOST_ELEMENTS, HOST_CALLS = 1024, 250  # a GPU's queue holds about 1,000 launches; a step has 2
SIDE = {"cpu": 1024, "cuda": 8192}  # of the square of which there are views
OFFSET_SIZES = {"cpu": (20, 24), "cuda": (20, 24, 28)}  # exponents of two
FEATURES = (1024, 4096, 8192)
ROWS = {"cpu": (1, 16, 64), "cuda": (1, 16, 64, 128, 512, 1024, 4096, 8192)}
CELL_SECONDS = {"cpu": 1.0, "cuda": 0.25}  # for each cell of the sweep
# `offsets` draws a row's operands so often, each time behind at most so many bytes: where 4 MiB lie
# in memory can make 5% of a time.
DRAWS, LARGEST_GAP = 20, 64 << 20
# Rows, out_features and in_features of `layouts`, parts of them on a CPU, and how operands lie.
LAYOUT_SIZES = [(1024, 8192, 8192), (1024, 4096, 4096), (8192, 1024, 8192), (64, 8192, 8192)]
LAYOUT_PART = {"cpu": 16, "cuda": 1}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda matrix: matrix,
    "transposed": lambda matrix: matrix.t().contiguous().t(),
    "unaligned": lambda matrix: torch.nn.functional.pad(matrix, (1, 0))[:, 1:],
}
LAYOUT_PAIRS = [
    ("rows", "rows"),
    ("rows", "transposed"),
    ("transposed", "rows"),
    ("transposed", "transposed"),
    ("rows", "unaligned"),
    ("unaligned", "rows"),
]
LOOP_BYTES, LOOP_PASSES = 16 << 20, 20  # a tensor well inside the L2, and passes over it
GIB_ROWS = 683  # rows of the headline input in 1 GiB of float32


def sizes(modules: Modules, device: torch.device, dtype: torch.dtype) -> None:
    """Time of a call by size: device time with a cold L2 on a GPU, wall-clock time on a CPU."""
    rows = [["elements", *modules.titles("us")]]
    generator = torch.Generator(device=device)
    for exponent in SIZES[device.type]:
        if 3 * 2**exponent * dtype.itemsize > free_bytes(device):
            break
        x = cases.random((2**exponent,), dtype, device, generator)
        times = alternate(samplers_of(modules, x))
        rows.append([f"2^{exponent}", *columns(times, 1e6)])
        print(f"2^{exponent}", end=" ", file=sys.stderr, flush=True)
        del x
    print(file=sys.stderr)
    print(table(rows))


def views(modules: Modules, device: torch.device, dtype: torch.dtype) -> None:
    """Time of a call by layout of the input, measured as by `sizes`."""
    side = SIDE[device.type]
    square = cases.random((side, side), dtype, device, torch.Generator(device=device))
    layouts = {
        "x[:, ::2]": square[:, ::2],
        "x[:, 1:]": square[:, 1:],
        "x[1:-1, 1:-1]": square[1:-1, 1:-1],
        "x.view(-1, 64, 4)[..., 1]": square.view(-1, 64, 4)[..., 1],
        "x.view(-1, 4)[:, :3]": square.view(-1, 4)[:, :3],
        "x.view(64, -1, 128).permute(2, 0, 1)[::2]": square.view(64, -1, 128).permute(2, 0, 1)[::2],
        "x[:1].expand(x.shape)": square[:1].expand(square.shape),
    }
    rows = [[f"x [{side}, {side}]", *modules.titles("us")]]
    for name, x in layouts.items():
        rows.append([name, *columns(alternate(samplers_of(modules, x)), 1e6)])
    print(table(rows))


def cell(times: dict[str, list[float]]) -> str:
    """Eager's time in parts of the solution's, and the latter in microseconds."""
    microseconds, _, ratio = columns(times, 1e6)
    return f"{ratio} ({float(microseconds):.0f})"


class Step(torch.nn.Module):
    """Forward and backward of a module."""

    def __init__(self, module: torch.nn.Module, grad_output: torch.Tensor) -> None:
        super().__init__()
        self.module, self.grad_output = module, grad_output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The gradient of x."""
        (grad,) = torch.autograd.grad(self.module(x), x, self.grad_output)
        return grad


def offsets(modules: Modules, in_place: Modules, device: torch.device, dtype: torch.dtype) -> None:
    """Eager's time in parts of the solution's, and the latter, by bytes from an aligned address.

    The columns are forward, forward in place, training step with an aligned output gradient, and
    with one that has the offset of x.
    """
    names = modules.names
    titles = ["forward", "in place", *(["step", "step, gradient too"] * dtype.is_floating_point)]
    rows = [[f"{names.eager} / {names.solution} (us)", *titles]]
    generator = torch.Generator(device=device)

    def draw(size: int, offset: int) -> list[tuple[Modules, torch.Tensor]]:
        """The calls of a row and their operands, somewhere in memory."""
        x, gradient = (
            cases.random((offset + size,), dtype, device, generator)[offset:] for _ in range(2)
        )
        calls = [(modules, x), (in_place, x)]
        if dtype.is_floating_point:
            leaf = x.detach().requires_grad_()
            for grad_output in (torch.ones_like(x), gradient):
                both = (Step(module, grad_output) for module in modules.by_name().values())
                calls.append((Modules(names, *both), leaf))
        return calls

    for exponent in OFFSET_SIZES[device.type]:
        for offset in range(1, 16 // dtype.itemsize):
            times: list[dict] = [{who: [] for who in modules.by_name()} for _ in titles]
            for _ in range(DRAWS):
                skipped = random.randrange(LARGEST_GAP)
                gap = torch.empty(skipped, dtype=torch.uint8, device=device)
                for all_times, (pair, x) in zip(times, draw(2**exponent, offset), strict=True):
                    samplers = samplers_of(pair, x, flushes=1)  # more: ratios scatter by 5%
                    some = alternate(samplers, rounds=ROUNDS // DRAWS)
                    for who, taken in some.items():
                        all_times[who] += taken
                del gap
            rows.append([f"2^{exponent}, {offset * dtype.itemsize} bytes", *map(cell, times)])
            print(rows[-1][0], end="; ", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(table(rows))


def host(
    modules: Modules, title: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> None:
    """Times a call on ones of this shape on the host, launches not waited for."""

    def sampler(call: Callable, x: torch.Tensor) -> Callable[[], float]:
        def sample() -> float:
            if x.is_cuda:
                synchronize()
            start = perf_counter()
            for _ in range(HOST_CALLS):
                call(x)
            return (perf_counter() - start) / HOST_CALLS

        return sample

    rows = [[f"host time, {title}", *modules.titles("ns")]]
    for name in dict.fromkeys(("cpu", device.type)):
        both = {who: module.to(name) for who, module in modules.by_name().items()}
        x = torch.ones(shape, device=name, dtype=dtype)
        with torch.no_grad():
            times = alternate({who: sampler(module, x) for who, module in both.items()})
        rows.append([f"forward, {name}", *columns(times, 1e9)])
        if dtype.is_floating_point:
            leaf, g = x.clone().requires_grad_(), torch.ones_like(x)
            samplers = {who: sampler(_step(module, g), leaf) for who, module in both.items()}
            rows.append([f"forward + backward, {name}", *columns(alternate(samplers), 1e9)])
    print(table(rows))


@torch.no_grad()
def linear(
    kinds: tuple[type[torch.nn.Module], type[torch.nn.Module]],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Eager's time in parts of the solution's, and the latter, by rows and features."""
    names, (solution, reference) = linear_grader.NAMES, kinds
    generator = torch.Generator(device=device)
    contender = linear_checks.Contender(reference, solution, device, generator)
    every = ROWS[device.type]
    rows = [[f"{names.eager} / {names.solution} (us)", *(f"M {m}" for m in every)]]
    for k in FEATURES:
        for n in FEATURES:
            eager, ours = contender.pair(n, k, dtype)
            modules = Modules(names, ours, eager)
            cells = []
            for m in every:
                samplers = samplers_of(modules, contender.draw((m, k), dtype))
                cells.append(cell(alternate(samplers, CELL_SECONDS[device.type])))
            rows.append([f"K {k}, N {n}", *cells])
            print(rows[-1][0], end="; ", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(table(rows))


def layouts(
    kinds: tuple[type[torch.nn.Module], type[torch.nn.Module]],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Time of a forward and of a training step by how x and the weight lie in memory.

    `of rows` is the solution's time in parts of its own with contiguous operands.
    """
    names, (solution, reference) = linear_grader.NAMES, kinds
    contender = linear_checks.Contender(reference, solution, device, torch.Generator(device=device))
    titles = ["ours us", "eager us", "ratio", "of rows"]
    rows = [["M, N, K", "x", "weight", *titles, *(f"step: {title}" for title in titles)]]
    for sizes_ in LAYOUT_SIZES:
        m, n, k = (size // LAYOUT_PART[device.type] for size in sizes_)
        of_rows: dict[bool, float] = {}  # the first line's, of steps and of forwards
        for of_x, of_weight in LAYOUT_PAIRS:
            eager, ours = contender.pair(n, k, dtype)
            for module in (eager, ours):
                weight = LAYOUTS[of_weight](module.linear.weight.detach())
                module.linear.weight = torch.nn.Parameter(weight)
            x = LAYOUTS[of_x](contender.draw((m, k), dtype))
            grad_output = contender.draw((m, n), dtype)
            cells = []
            for is_step in (False, True):
                calls = [_step(f, grad_output) if is_step else f for f in (ours, eager)]
                with torch.set_grad_enabled(is_step):
                    samplers = samplers_of(Modules(names, *calls), x.requires_grad_(is_step))
                    times = alternate(samplers, 2 * CELL_SECONDS[device.type])
                taken = median(times[names.solution])
                cells += [*columns(times, 1e6), f"{taken / of_rows.setdefault(is_step, taken):.3f}"]
            rows.append([f"{m}, {n}, {k}", of_x, of_weight, *cells])
            print(" ".join(rows[-1][:3]), end="; ", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(table(rows))


def import_() -> None:
    """First imports, which build, and the median of three later ones, in fresh processes."""
    ways = {
        "ModelNew": "import model_new",
        "LinearReluDivideNew besides": "from model_new import LinearReluDivideNew",
        "both, as run.py builds them": "import kernels; "
        "kernels.build_together('relu', 'linear_relu_divide'); from model_new import SOLUTIONS",
        "bundle of relu": "exec(compile(open(bundle).read(), 'bundle', 'exec'), {})",
    }
    rows = [["import beyond torch", "cold s", "warm s"]]
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder, "bundle.py")
        bundle.write_text(importlib.import_module("kernels.build.bundle").bundle("relu"))
        env = {**os.environ}
        for name, statement in ways.items():
            if not name.endswith("besides"):
                env["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp(dir=folder)
            code = (
                f"import torch, time; bundle = {str(bundle)!r}; start = time.perf_counter(); "
                f"{statement}; print(time.perf_counter() - start)"
            )
            command = [sys.executable, "-W", "ignore:Failed to initialize NumPy", "-c", code]
            seconds = [float(subprocess.check_output(command, env=env)) for _ in range(4)]
            rows.append([name, f"{seconds[0]:.2f}", f"{median(seconds[1:]):.2f}"])
    print()
    print(table(rows))


def l2(modules: Modules, device: torch.device, dtype: torch.dtype) -> None:
    """Time of repeated passes over a small tensor that start as the headline call ends."""
    with torch.device("meta"):
        [headline] = PROBLEMS["relu"].get_inputs()
    x = cases.random(tuple(headline.shape), dtype, device, torch.Generator(device=device))
    small = torch.zeros(LOOP_BYTES // 4, device=device)
    start, end = Event(enable_timing=True), Event(enable_timing=True)

    def sampler(module: torch.nn.Module) -> Callable[[], float]:
        def sample() -> float:
            module(x)  # milliseconds, in which the host queues all that follows
            start.record()
            for _ in range(LOOP_PASSES):
                small.add_(1)
            end.record()
            synchronize()
            return start.elapsed_time(end) * 1e-3

        return sample

    both = modules.by_name()
    times = alternate({name: sampler(module) for name, module in both.items()})
    ours, eager = (median(taken) * 1e6 for taken in times.values())
    titles = ["L2-resident loop", *(f"after {name} us" for name in both), "difference us"]
    name = f"{LOOP_PASSES} passes over {LOOP_BYTES >> 20} MiB"
    print(table([titles, [name, f"{ours:.1f}", f"{eager:.1f}", f"{ours - eager:+.1f}"]]))


def thp() -> None:
    """The headline comparison at 1 GiB, without and with torch's own huge pages."""
    command = [sys.executable, "run.py", "relu", "--device", "cpu", "--rows", str(GIB_ROWS)]
    plain = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    for name, extra in (
        ("default environment", {}),
        ("THP_MEM_ALLOC_ENABLE=1", {"THP_MEM_ALLOC_ENABLE": "1"}),
    ):
        print(f"\n{name}", flush=True)
        subprocess.run(command, env={**plain, **extra}, check=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line's options; on a wrong one the process ends with status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="all", choices=[*NAMES, "all", "report"])
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=torch.device(best))
    parser.add_argument("--dtype", default="float32", metavar="NAME[,NAME]", help="of the figures")
    parser.add_argument("--precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument("--trials", type=int, help="timed pairs of each line of operands")
    parser.add_argument("--only", default="", metavar="TEXT", help="commands that contain this")
    args = parser.parse_args(arguments)
    args.dtypes = args.dtype.split(",")
    if unknown := [name for name in args.dtypes if name not in cases.served(torch.device("cpu"))]:
        known = ", ".join(cases.served(torch.device("cpu")))
        parser.error(f"--dtype: expected some of {known}, got {', '.join(unknown)}")
    skipped = "thp" if args.device.type == "cuda" else "l2"
    args.todo = [n for n in NAMES if n != skipped] if args.what == "all" else [args.what]
    if skipped in args.todo:
        parser.error(f"{skipped} is no figure of {args.device}")
    if args.dtypes != ["float32"] and "operands" in args.todo:
        if args.what != "all":
            parser.error("operands is a figure of float32")
        args.todo.remove("operands")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = parse(arguments)
    if args.what == "report":
        try:
            return 1 if figures.measure(figures.Pages(), args.device.type, args.only) else 0
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    torch.set_float32_matmul_precision(args.precision)
    device = args.device
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    about = environment(device)
    print(f"{about['device']}, torch {about['torch']}, CUDA {about['cuda']}")

    if "import" in args.todo:  # first, so that nothing else has built the kernels
        import_()
    if "thp" in args.todo:
        thp()
    todo = [name for name in args.todo if name not in ("import", "thp")]
    if todo:
        solutions = importlib.import_module("model_new").SOLUTIONS
        for dtype in args.dtypes:
            precision = f", precision {args.precision}" if dtype == "float32" else ""
            print(f"\n{dtype}{precision}")
            measure(todo, solutions, device, cases.DTYPES[dtype], args)
    return 0


def measure(
    todo: list[str],
    solutions: dict[str, type[torch.nn.Module]],
    device: torch.device,
    dtype: torch.dtype,
    args: argparse.Namespace,
) -> None:
    """Prints the tables of a dtype."""
    relus = Modules(relu.NAMES, *(kind().to(device) for kind in _kinds("relu", solutions)))
    linears = _kinds("linear_relu_divide", solutions)
    if "sizes" in todo:
        print()
        sizes(relus, device, dtype)
    if "views" in todo:
        print()
        views(relus, device, dtype)
    if "offsets" in todo:
        print()
        in_place = Modules(relu.NAMES, solutions["relu"](inplace=True), torch.nn.ReLU(inplace=True))
        offsets(relus, in_place, device, dtype)
    if "linear" in todo:
        print()
        linear(linears, device, dtype)
    if "layouts" in todo:
        print()
        layouts(linears, device, dtype)
    if "operands" in todo:
        print()
        names = linear_grader.NAMES
        kinds = dict(zip((names.solution, names.eager), linears, strict=True))
        lines = operand_benchmark.lines_of(args.precision)
        print(operand_benchmark.report(lines, kinds, device, args.trials))
    if "host" in todo:
        print()
        host(relus, f"ReLU of {HOST_ELEMENTS:,}", (HOST_ELEMENTS,), device, dtype)
    if "host" in todo and dtype.is_floating_point:
        print()
        small = Modules(linear_grader.NAMES, *(kind(64, 64, 2.0).to(dtype) for kind in linears))
        host(small, "[1, 64] -> 64", (1, 64), device, dtype)
    if "l2" in todo:
        print()
        l2(relus, device, dtype)


def _step(module: torch.nn.Module, grad_output: torch.Tensor) -> Callable:
    parameters = list(module.parameters())
    return lambda x: torch.autograd.grad(module(x), [x, *parameters], grad_output)


def _kinds(
    name: str, solutions: dict[str, type[torch.nn.Module]]
) -> tuple[type[torch.nn.Module], type[torch.nn.Module]]:
    return solutions[name], PROBLEMS[name].reference


if __name__ == "__main__":
    sys.exit(main())
