"""Compares the replacements with their references: first the outputs, then the time.

Without a problem's name it does so for all of them, one after the other.

Exit status: 0 if everything is right, 1 if something is wrong or could not be written, 2 for a
request that makes no sense, 130 after an interrupt.
"""

from referee import ending  # first: the imports that follow take seconds

if __name__ == "__main__":
    ending.end_on_interrupt()

# isort: split
import argparse
import importlib
import json
import stat
import sys
from pathlib import Path
from time import perf_counter
from typing import NoReturn

from referee import correctness, files, report  # before torch, of whose warnings it silences one

# isort: split
import torch

from model import PROBLEMS
from referee import linear, ranking, relu, solutions
from referee.cases import DTYPES
from referee.memory import RING
from referee.outcome import Task
from referee.progress import Progress
from referee.reference_file import BadReferenceError
from referee.timing import CPU_SECONDS, Rounds

# Not of the docstring, which `python -OO` removes.
DESCRIPTION = "Compares the replacements with their references: first the outputs, then the time."
GRADERS = {"relu": relu, "linear_relu_divide": linear}
LARGEST_SOLUTION = 64 << 20  # bytes
TIMEOUT = 300  # s for a solution
MOST_SHARES = 4  # of a CPU's seconds that several files share


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def print_help(self, file: object = None) -> None:
        ending.show(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        ending.say(message)
        self.exit(2)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.bundle and args.solution:
        parser.error("--bundle writes this project's solution, --solution grades files: which?")
    if args.reference:
        return _reference(args, parser)
    if args.timeout and not args.solution:
        parser.error("--timeout is for --solution")
    if args.bundle:
        if not args.problem:
            parser.error("--bundle writes one problem: which?")
        return _bundle(args.problem, args.bundle)
    if args.solution and not args.problem:
        parser.error("--solution grades files for one problem: which?")
    names = [args.problem] if args.problem else list(PROBLEMS)
    dtype = DTYPES[args.dtype]
    try:
        device, why = _device(args.device)
        buffers = solutions.BUFFERS[device.type] if args.solution else None
        shapes = {
            name: GRADERS[name].choose_shape(PROBLEMS[name], args.rows, dtype, device, buffers)
            for name in names
        }
    except ValueError as error:
        parser.error(str(error))

    progress = Progress()
    if args.solution:
        [(name, (shape, note))] = shapes.items()
        seconds = CPU_SECONDS / min(len(args.solution), MOST_SHARES)
        wanted = Rounds(args.trials, seconds)
        task = solutions.Task(
            name, PROBLEMS[name], shape, dtype, device, wanted, args.timeout or TIMEOUT, progress
        )
        return _solutions(args, task, why, note)
    wanted = Rounds(args.trials, CPU_SECONDS / len(names))
    about = report.environment(device)
    wrong, records = False, {}
    for name, (shape, note) in shapes.items():
        state = correctness.global_state()
        try:
            solution, seconds = _solution(name, progress)
        except Exception as error:  # whatever the solution raises
            progress.clear()
            ending.say(f"the solution cannot be imported: {type(error).__name__}: {error}")
            return 1
        task = Task(PROBLEMS[name], solution, shape, dtype, device, wanted, progress)
        outcome = GRADERS[name].grade(task)
        now = correctness.global_state()
        outcome.checks.failures += [
            f"the solution changed {what}" for what in now if now[what] != state[what]
        ]
        progress.clear()

        start = "\n" * bool(records) + f"{name}: " * (len(names) > 1)
        lines = [f"{start}{report.headline(about, device, why, shape, args.dtype)}"]
        lines += [note] if note else []
        lines.append(f"kernels ready in {seconds:.1f} s; {report.outcome(outcome)}")
        ending.show("\n".join(lines))
        wrong |= bool(outcome.problems)
        facts = {"environment": about, "shape": shape, "dtype": args.dtype}
        records[name] = report.record(facts, outcome)
    if args.json:
        whole = records if len(names) > 1 else records[names[0]]
        wrong |= not _write(args.json, json.dumps(whole, indent=1) + "\n")
    return 1 if wrong else 0


def _parser() -> Parser:
    parser = Parser(prog="run.py", description=DESCRIPTION)
    parser.add_argument("problem", nargs="?", choices=list(PROBLEMS), help="default: all")
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: the best)")
    parser.add_argument(
        "--dtype", default="float32", choices=list(DTYPES), metavar="T", help=", ".join(DTYPES)
    )
    parser.add_argument(
        "--rows", type=_positive, metavar="N", help="rows of the input (default: what fits)"
    )
    parser.add_argument(
        "--trials", type=_positive, metavar="N", help="timed rounds (default: 50, on a CPU 3 to 50)"
    )
    parser.add_argument(
        "--json", type=_writable, metavar="FILE", help="write everything as JSON too"
    )
    parser.add_argument(
        "--bundle", type=_writable, metavar="FILE", help="write the solution as one file, and stop"
    )
    parser.add_argument(
        "--solution",
        type=_solution_file,
        nargs="+",
        metavar="FILE",
        help="grade these files, each of which defines ModelNew, instead of this project's",
    )
    parser.add_argument(
        "--reference",
        type=_solution_file,
        metavar="FILE",
        help="grade them against this file's Model, get_inputs and get_init_inputs",
    )
    parser.add_argument(
        "--timeout",
        type=_positive,
        metavar="S",
        help=f"seconds for each of them, its compilation included (default: {TIMEOUT})",
    )
    return parser


def _solution_file(text: str) -> Path:
    path = Path(text)
    try:
        there = path.stat()
        if stat.S_ISREG(there.st_mode):  # a FIFO's opening would wait
            path.open("rb").close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise argparse.ArgumentTypeError(f"cannot read {path}: {reason}") from None
    if not stat.S_ISREG(there.st_mode):
        raise argparse.ArgumentTypeError(f"{path} is no file")
    if there.st_size > LARGEST_SOLUTION:
        raise argparse.ArgumentTypeError(f"{path} has {there.st_size:,} bytes: no program")
    return path


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


def _writable(text: str) -> Path:
    path = Path(text)
    try:
        files.check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    return path


def _device(name: str | None) -> tuple[torch.device, str]:
    """The device asked for, or the best there is, and why that is no GPU; it becomes current."""
    why = "" if name else _no_gpu()
    try:
        device = torch.device(name or ("cpu" if why else "cuda"))
    except RuntimeError:
        raise ValueError(f"{name} is no device: cpu, cuda or cuda:N is meant") from None
    if device.type not in RING:
        raise ValueError(f"device {name} is neither a CPU nor a CUDA GPU")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"device {device} is not there: torch sees no such GPU")
        torch.cuda.set_device(device)
        return device, why
    return torch.device("cpu"), why


def _no_gpu() -> str:
    """Why the best device is no GPU; "" where it is one."""
    if torch.cuda.is_available():
        return ""
    if not torch.backends.cuda.is_built():
        return "no GPU: torch is a CPU build"
    reason = "no reason given"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]
    return f"no GPU: torch.cuda.is_available() is false ({reason})"


def _solution(name: str, progress: Progress) -> tuple[type[torch.nn.Module], float]:
    """The solution, and the seconds that its import, which builds the kernels, took."""
    progress("building the kernels")
    start = perf_counter()
    solutions = importlib.import_module("model_new").SOLUTIONS
    if name not in solutions:
        raise ImportError(f"it has none for {name}")
    return solutions[name], perf_counter() - start


def _solutions(args: argparse.Namespace, task: solutions.Task, why: str, note: str) -> int:
    """Grades files; the exit status."""
    about = report.environment(task.device)
    head = report.headline(about, task.device, why, task.shape, args.dtype)
    ending.show(f"{task.name}: {head}" + f"\n{note}" * bool(note))
    verdicts = solutions.grade_files(
        args.solution, task, lambda verdict: ending.show(ranking.line(verdict))
    )
    if len(verdicts) > 1:
        ending.show(f"\n{ranking.ranking(verdicts)}")
    fine = all(verdict.word == solutions.CORRECT for verdict in verdicts)
    if args.json:
        facts = {"environment": about, "shape": task.shape, "dtype": args.dtype}
        whole = {**facts, "problem": task.name, "solutions": [*map(ranking.record, verdicts)]}
        fine &= _write(args.json, json.dumps(whole, indent=1) + "\n")
    return 0 if fine else 1


def _reference(args: argparse.Namespace, parser: Parser) -> int:
    """Grades files against a reference file; the exit status."""
    if args.problem or not args.solution or args.bundle:
        parser.error("--reference goes with --solution, and without the name of a problem")
    if args.rows or args.dtype != parser.get_default("dtype"):
        parser.error("--rows and --dtype are for this project's problems, not for --reference")
    progress = Progress()
    try:
        device, why = _device(args.device)
        progress("running the reference")
        oracle = solutions.Oracle(args.reference, device)
        wanted = Rounds(args.trials, CPU_SECONDS / min(len(args.solution), MOST_SHARES))
        timeout, args.dtype = args.timeout or TIMEOUT, str(oracle.dtype).removeprefix("torch.")
        task = solutions.Task(
            oracle.name, None, oracle.shape, oracle.dtype, device, wanted, timeout, progress, oracle
        )
        return _solutions(args, task, why, "")
    except (BadReferenceError, ValueError) as error:
        progress.clear()
        parser.error(str(error))


def _bundle(problem: str, path: Path) -> int:
    text = importlib.import_module("kernels.bundle").bundle(problem)
    if not _write(path, text):
        return 1
    ending.show(f"wrote {path}: {problem} in one file of {len(text.splitlines()):,} lines")
    return 0


def _write(path: Path, text: str) -> bool:
    """Whether it could be written; says on stderr how it could not."""
    try:
        note = files.write(path, text)
    except OSError as error:
        ending.say(f"cannot write {path}: {error.strerror}")
        return False
    if note:
        ending.say(note)
    return True


if __name__ == "__main__":
    sys.exit(ending.run(main))
