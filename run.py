"""Compares ModelNew with its reference: first the outputs, then the time.

Exit status: 0 if everything is right, 1 if something is wrong, 2 for a request that makes no sense.
"""

import argparse
import importlib
import sys
from pathlib import Path
from time import perf_counter
from typing import NoReturn

from referee import correctness, report  # before torch, of whose warnings it silences one

# isort: split
import torch

from model import PROBLEMS, Problem
from referee.cases import DTYPES, random
from referee.memory import RING, choose_rows
from referee.progress import Progress
from referee.step import Step, measure_step
from referee.timing import Inputs, Timings, fastest_copy, measure


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"run.py: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.bundle:
        return _bundle(args.problem, args.bundle)
    try:
        device = _device(args.device)
        shape, note = _shape(PROBLEMS[args.problem], args.rows, DTYPES[args.dtype], device)
    except ValueError as error:
        parser.error(str(error))

    progress = Progress()
    state = correctness.global_state()
    try:
        solution_type, seconds = _solution(args.problem, progress)
    except (ImportError, RuntimeError) as error:
        progress.clear()
        print(f"run.py: the solution cannot be imported: {error}", file=sys.stderr)
        return 1
    checks, timings, step = _compare(args, solution_type, shape, device, progress)
    now = correctness.global_state()
    checks.failures += [f"the solution changed {name}" for name in now if now[name] != state[name]]
    progress.clear()

    about = report.environment(device)
    print(report.headline(about, shape, args.dtype))
    if note:
        print(note)
    print(
        f"kernels ready in {seconds:.1f} s; {checks.count} cases compared with the reference, "
        f"{len(checks.failures) or 'none'} wrong"
    )
    problems = checks.failures + [p for timed in (timings, step) if timed for p in timed.problems]
    print(f"\n{report.results(timings)}" if timings else "nothing was timed")
    if step:
        print(f"\n{report.step_results(step)}")
    for problem in problems:
        print(f"WRONG  {problem}")
    if args.json:
        facts = {"environment": about, "shape": shape, "dtype": args.dtype, "checks": vars(checks)}
        report.write(args.json, report.json_text(facts, timings, step))
    return 1 if problems else 0


def _compare(
    args: argparse.Namespace,
    solution_type: type[torch.nn.Module],
    shape: tuple[int, ...],
    device: torch.device,
    progress: Progress,
) -> tuple[correctness.Checks, Timings | None, Step | None]:
    """Checks outputs and gradients; if all are right, takes the times: integers have no step."""
    problem = PROBLEMS[args.problem]
    reference = problem.reference(*problem.get_init_inputs()).to(device)
    solution = solution_type(*problem.get_init_inputs()).to(device)
    generator = torch.Generator(device=device)
    seed = generator.seed() % 2**31  # new in every run
    checks = correctness.check_small(reference, solution, device, seed, progress)
    if checks.failures:
        return checks, None, None
    progress("drawing the input")
    x = random(shape, DTYPES[args.dtype], device, generator)
    full = correctness.check_headline(reference, solution, x, generator, progress)
    checks.count += full.count
    checks.failures += full.failures
    if checks.failures:
        return checks, None, None
    ring = [x, *(x.clone() for _ in range(RING[device.type] - 1))]
    inputs = Inputs(ring, reference, generator)
    timings = measure(reference, solution, inputs, args.trials, progress)
    if timings.problems or not x.is_floating_point():
        return checks, timings, None
    progress("drawing the output's gradient")
    grad_output = random(shape, x.dtype, device, generator)
    step = measure_step(
        reference, solution, inputs, grad_output, args.trials, fastest_copy(timings), progress
    )
    return checks, timings, step


def _parser() -> Parser:
    parser = Parser(prog="run.py", description=__doc__.splitlines()[0])
    parser.add_argument("problem", nargs="?", default="relu", choices=list(PROBLEMS))
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: the best)")
    parser.add_argument(
        "--dtype", default="float32", choices=list(DTYPES), metavar="T", help=", ".join(DTYPES)
    )
    parser.add_argument(
        "--rows", type=_positive, metavar="N", help="rows of the input (default: what fits)"
    )
    parser.add_argument(
        "--trials", type=_positive, metavar="N", help="timed rounds (default: 50, on a CPU 5 to 50)"
    )
    parser.add_argument(
        "--json", type=_writable, metavar="FILE", help="write everything as JSON too"
    )
    parser.add_argument(
        "--bundle", type=_writable, metavar="FILE", help="write the solution as one file, and stop"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def _writable(text: str) -> Path:
    path = Path(text)
    try:
        report.check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    return path


def _device(name: str | None) -> torch.device:
    """The device asked for, or the best there is; it becomes the current one."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name or best)
    except RuntimeError:
        raise ValueError(f"{name} is no device: cpu, cuda or cuda:N is meant") from None
    if device.type not in RING:
        raise ValueError(f"device {name} is neither a CPU nor a CUDA GPU")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"device {device} is not there: torch sees no such GPU")
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _shape(
    problem: Problem, rows: int | None, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, ...], str]:
    with torch.device("meta"):
        [row] = problem.get_inputs_at(1)
    count, note = choose_rows(rows, problem.rows, row.numel() * dtype.itemsize, device)
    return (count, *row.shape[1:]), note


def _solution(name: str, progress: Progress) -> tuple[type[torch.nn.Module], float]:
    """The solution, and the seconds that its import, which builds the kernels, took."""
    progress("building the kernels")
    start = perf_counter()
    solution = importlib.import_module("model_new").SOLUTIONS[name]
    return solution, perf_counter() - start


def _bundle(problem: str, path: Path) -> int:
    text = importlib.import_module("kernels.bundle").bundle(problem)
    report.write(path, text)
    print(f"wrote {path}: {problem} in one file of {len(text.splitlines()):,} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
