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
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from model import PROBLEMS
from referee import devices, sweep
from referee.cases import DTYPES, dtype_name
from referee.judge import grade
from referee.judge.oracle import Oracle
from referee.judge.problem import OfProject
from referee.progress import Progress
from referee.records import Document
from referee.reference_file import BadReferenceError, load
from referee.report import files, outputs, plot
from referee.session import TIMEOUT, Session, Subject

# Not of the docstring, which `python -OO` removes.
DESCRIPTION = "Compares the replacements with their references: first the outputs, then the time."
OURS = Path(__file__).resolve().parent / "model_new.py"
LARGEST_SOLUTION = 64 << 20  # bytes


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
    _check(args, parser)
    if args.bundle:
        return _bundle(args.problem, args.bundle)
    progress, oracle = Progress(), None
    try:
        device, why = devices.choose(args.device)
        if args.reference:
            progress("running the reference")
            oracle = Oracle(load(args.reference), device)
            dtype = dtype_name(oracle.dtype)
            subjects = [Subject(args.reference.stem, dtype, oracle.shape)]
        else:
            subjects = _subjects(args, device)
    except (BadReferenceError, ValueError) as error:
        progress.clear()
        parser.error(str(error))
    progress.clear()
    kind = "sweep" if args.sweep else "grading" if args.solution else "comparison"
    document = Document.start(arguments, kind, device)
    session = Session(args, OURS, device, why, document, progress)
    return _finish(args, document, partial(session.run, subjects, oracle))


def _subjects(args: argparse.Namespace, device: torch.device) -> list[Subject]:
    """Of this project's problems.

    Raises:
        ValueError: the shape does not fit, or the dtype is none of the problem's.
    """
    dtypes = args.dtype or (sweep.DTYPES if args.sweep else ["float32"])
    subjects = []
    every = grade.PROBLEMS if args.sweep else PROBLEMS
    for name in [args.problem] if args.problem else every:
        own = grade.PROBLEMS.get(name, OfProject)
        for dtype in dtypes:
            chosen = own.choose_shape(PROBLEMS[name], args.rows, DTYPES[dtype], device)
            subjects.append(Subject(name, dtype, *chosen))
    return subjects


def _finish(args: argparse.Namespace, document: Document, work: Callable[[], bool]) -> int:
    """Does the work and writes what was measured, after an interrupt too; the exit status."""
    results = partial(outputs.write_results, document, args.json, args.markdown, args.plot)
    try:
        fine = work()
    except KeyboardInterrupt:
        document.complete = False
        if document.records:
            results()
        raise
    return 0 if results() and fine else 1


def _check(args: argparse.Namespace, parser: Parser) -> None:
    """Ends with status 2 where options contradict each other."""
    args.sweep |= args.plot is not None
    for option, value in (("--bundle", args.bundle), ("--solution", args.solution)):
        if value and args.sweep:
            parser.error(f"--sweep and --plot are not for {option}")
        if value and not args.problem and not args.reference:
            parser.error(f"{option} is for one problem: which?")
    if args.bundle and args.solution:
        parser.error("--bundle writes this project's solution, --solution grades files: which?")
    if args.timeout and not args.solution:
        parser.error("--timeout is for --solution")
    if args.sweep and args.problem and args.problem not in grade.PROBLEMS:
        parser.error(f"{args.problem} has no sweep")
    if args.rows and args.sweep:
        parser.error("--rows is for one size, --sweep takes many: which?")
    if args.solution and args.dtype and len(args.dtype) > 1:
        parser.error("--solution grades files in one dtype: which?")
    if args.reference and (args.problem or not args.solution or args.bundle):
        parser.error("--reference goes with --solution, and without the name of a problem")
    if args.reference and (args.rows or args.dtype):
        parser.error("--rows and --dtype are for this project's problems, not for --reference")


def _parser() -> Parser:
    parser = Parser(prog="run.py", description=DESCRIPTION)
    parser.add_argument("problem", nargs="?", choices=list(PROBLEMS), help="default: all")
    parser.add_argument("--device", metavar="D", help="cpu, cuda or cuda:N (default: the best)")
    parser.add_argument(
        "--dtype",
        type=_dtypes,
        metavar="T[,T]",
        help=f"one or more of {', '.join(DTYPES)} (default: float32)",
    )
    parser.add_argument(
        "--rows", type=_positive, metavar="N", help="rows of the input (default: what fits)"
    )
    parser.add_argument(
        "--trials", type=_positive, metavar="N", help="timed rounds (default: 50, on a CPU 3 to 50)"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="time many sizes and dtypes, forwards alone"
    )
    parser.add_argument(
        "--json", type=_writable, metavar="FILE", help="write everything as JSON too"
    )
    parser.add_argument(
        "--markdown", type=_writable, metavar="FILE", help="write tables for a README too"
    )
    parser.add_argument(
        "--plot",
        type=_drawable,
        metavar="FILE",
        help="draw what --sweep measures as .svg or .png; needs matplotlib",
    )
    parser.add_argument(
        "--bundle", type=_writable, metavar="FILE", help="write the solution as one file, and stop"
    )
    parser.add_argument(
        "--solution",
        type=_solution_file,
        nargs="+",
        metavar="FILE",
        help="grade these files, each of which defines ModelNew, instead of this project's; the "
        "dimensions of results may lie in memory in any order",
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


def _dtypes(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(DTYPES)}")
    return names


def _drawable(text: str) -> Path:
    try:
        plot.check(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return _writable(text)


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


def _bundle(problem: str, path: Path) -> int:
    text = importlib.import_module("kernels.build.bundle").bundle(problem)
    if not outputs.write(path, text):
        return 1
    ending.show(f"wrote {path}: {problem} in one file of {len(text.splitlines()):,} lines")
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
