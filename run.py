"""The command line of the referee: `python run.py --help`.

Exit status: 0 if everything is right, 1 if something is wrong or could not be written, 2 for a
request that makes no sense, 130 after an interrupt.
"""

from referee import console  # first: the imports that follow take seconds

if __name__ == "__main__":
    console.end_on_interrupt()

# isort: split
import argparse
import importlib
import json
import shlex
import sys
from itertools import product
from pathlib import Path
from typing import NoReturn

import torch

from model import PROBLEMS
from referee import records
from referee.cases import DTYPES, dtype_name
from referee.judge import grade
from referee.judge.oracle import Oracle
from referee.judge.problem import OfProject
from referee.reference_file import BadReferenceError, load
from referee.report import files, plot, tables
from referee.session import SWEEP_DTYPES, TIMEOUT, Session
from referee.timing import CPU_LEAST, MOST

DESCRIPTION = "Compares the replacements with their references: first the outputs, then the time."
OURS = Path(__file__).resolve().parent / "model_new.py"
LARGEST_SOLUTION = 64 << 20  # bytes


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def print_help(self, file: object = None) -> None:
        console.show(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        console.say(message)
        self.exit(2)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser, typed = _parser(), sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(typed)
    _check(args, parser)
    if args.bundle:
        text = importlib.import_module("kernels.build.bundle").bundle(args.problem)
        if is_written := _write(args.bundle, text):
            lines = len(text.splitlines())
            console.show(f"wrote {args.bundle}: {args.problem} in one file of {lines:,} lines")
        return 0 if is_written else 1
    progress = console.Progress()
    try:
        device, why = _device(args.device)
        if args.reference:
            progress("running the reference")
        subjects, oracle = _subjects(args, device)
    except (BadReferenceError, ValueError) as error:
        parser.error(str(error))
    progress.clear()
    kind = "sweep" if args.sweep else "grading" if args.solution else "comparison"
    command = shlex.join(["python", "run.py", *typed])
    document = records.document(command, kind, records.environment(device))
    headline = tables.headline(document["environment"], device, why)
    graded = args.solution or [OURS]
    try:
        fine = Session(args, graded, device, headline, document, progress, subjects, oracle).run()
    except KeyboardInterrupt:
        document["complete"] = False
        if document["records"]:
            _write_results(args, document)
        raise
    return 0 if _write_results(args, document) and fine else 1


def _device(name: str | None) -> tuple[torch.device, str]:
    """The device asked for, or the best, and why that is no GPU, for `headline`; made current."""
    why = "" if name or torch.cuda.is_available() else f"; no GPU: {_why_no_gpu()}"
    try:
        device = torch.device(name or ("cpu" if why else "cuda"))
    except RuntimeError:
        raise ValueError(f"{name} is no device: cpu, cuda or cuda:N is meant") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name} is neither a CPU nor a CUDA GPU")
    if device.type == "cpu":
        return torch.device("cpu"), why
    device = torch.device("cuda", device.index or 0)
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"device {device} is not there: torch sees no such GPU")
    torch.cuda.set_device(device)
    return device, why


def _why_no_gpu() -> str:
    if not torch.backends.cuda.is_built():
        return "torch is a CPU build"
    reason = "no reason given"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]
    return f"torch.cuda.is_available() is false ({reason})"


def _subjects(args: argparse.Namespace, device: torch.device) -> tuple[list, Oracle | None]:
    """Of the reference file, with what is right there, or of this project's problems."""
    if args.reference:
        oracle = Oracle(load(args.reference), device)
        dtype = dtype_name(oracle.dtype)
        return [records.Subject(args.reference.stem, dtype, oracle.shape)], oracle
    subjects = []
    every = grade.PROBLEMS if args.sweep else PROBLEMS
    for name in [args.problem] if args.problem else every:
        own = grade.PROBLEMS.get(name, OfProject)
        for dtype in args.dtype or (SWEEP_DTYPES if args.sweep else ["float32"]):
            shape, note = own.choose_shape(PROBLEMS[name], args.rows, DTYPES[dtype], device)
            if not args.sweep:
                subjects.append(records.Subject(name, dtype, shape, note=note))
                continue
            settings, sizes = own.settings(DTYPES[dtype], device), own.sweep(PROBLEMS[name], device)
            for setting, (shape, elements) in product(settings[:2], sizes):
                subjects.append(records.Subject(name, dtype, shape, (setting,), elements=elements))
    return subjects, None


def _write_results(args: argparse.Namespace, document: dict) -> bool:
    """Whether every file that was asked for could be written."""
    fine = not args.json or _write(args.json, json.dumps(document, indent=1) + "\n")
    fine &= not args.markdown or _write(args.markdown, tables.markdown(document))
    if args.plot and not any(record["runs"] for record in document["records"]):
        console.say(f"{args.plot} is not drawn: nothing was timed")
        return False
    return fine & (not args.plot or _write(args.plot, plot.draw(document, args.plot.suffix)))


def _write(path: Path, text: str | bytes) -> bool:
    """Whether it could be written; says on stderr why it could not."""
    try:
        files.write(path, text)
    except OSError as error:
        console.say(f"cannot write {path}: {error.strerror}")
        return False
    return True


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
    read = {path.resolve() for path in (*(args.solution or ()), args.reference or OURS)}
    for path in filter(None, (args.json, args.markdown, args.plot, args.bundle)):
        if path.resolve() in read:
            parser.error(f"{path} is read: the results need another file")
    if args.plot:
        try:
            plot.check(args.plot)
        except ValueError as error:
            parser.error(f"argument --plot: {error}")


def _parser() -> Parser:
    parser = Parser(prog="run.py", description=DESCRIPTION)
    add = parser.add_argument
    add("problem", nargs="?", choices=list(PROBLEMS), help="default: all")
    add("--device", metavar="D", help="cpu, cuda or cuda:N (default: the best)")
    known = f"one or more of {', '.join(DTYPES)} (default: float32)"
    add("--dtype", type=_dtypes, metavar="T[,T]", help=known)
    add("--rows", type=_positive, metavar="N", help="rows of the input (default: what fits)")
    rounds = f"timed rounds (default: {MOST['cuda']}, on a CPU {CPU_LEAST} to {MOST['cpu']})"
    add("--trials", type=_positive, metavar="N", help=rounds)
    add("--sweep", action="store_true", help="time many sizes and dtypes, forwards alone")
    file = {"type": _writable, "metavar": "FILE"}
    add("--json", **file, help="write everything as JSON too")
    add("--markdown", **file, help="write tables for a README too")
    add("--plot", **file, help="draw what --sweep measures as .svg or .png; needs matplotlib")
    add("--bundle", **file, help="write the solution as one file, and stop")
    graded = "grade these files, each of which defines ModelNew, instead of this project's; the "
    graded += "dimensions of results may lie in memory in any order"
    add("--solution", type=_solution_file, nargs="+", metavar="FILE", help=graded)
    against = "grade them against this file's Model, get_inputs and get_init_inputs"
    add("--reference", type=_solution_file, metavar="FILE", help=against)
    limit = f"seconds for each of them, its compilation included (default: {TIMEOUT})"
    add("--timeout", type=_positive, metavar="S", help=limit)
    return parser


def _solution_file(text: str) -> Path:
    path = Path(text)
    try:
        size = path.stat().st_size
        if not path.is_file():  # a FIFO's opening would wait
            raise argparse.ArgumentTypeError(f"{path} is no file")
        path.open("rb").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from None
    if size > LARGEST_SOLUTION:
        raise argparse.ArgumentTypeError(f"{path} has {size:,} bytes: no program")
    return path


def _dtypes(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(DTYPES)}")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]} is not a whole number from 1 to 999999999")
    return int(text)


def _writable(text: str) -> Path:
    path = Path(text)
    try:
        files.check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    return path


if __name__ == "__main__":
    sys.exit(console.run(main))
