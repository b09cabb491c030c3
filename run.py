"""The command line of the referee: `python run.py --help`.

Exit status: 0 if everything is right, 1 if something is wrong or could not be written, 2 if the
options are wrong or contradict each other, 130 after an interrupt.
"""

# The other imports take seconds. This one comes first so that an interrupt during them ends the
# process with one line instead of a traceback.
from referee import console

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
    """An argument parser that reports an error in one line, without the usage."""

    def print_help(self, file: object = None) -> None:
        """Print the help to stdout; run.py ends if stdout cannot be written."""
        console.show(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        """Print one line to stderr, and exit with status 2."""
        console.say(message)
        self.exit(2)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the words after `run.py`; None takes those of this process.

    Returns:
        The exit status, 0 or 1.

    Raises:
        SystemExit: the options are wrong (status 2), help was asked for (0), or stdout cannot be
            written (1).
        KeyboardInterrupt: the user interrupted; the results so far are written.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.plot is not None:
        args.sweep = True
    _check(args, parser)
    if args.bundle:
        is_fine = _write_bundle(args.problem, args.bundle)
    else:
        is_fine = _grade(args, parser, arguments)
    return 0 if is_fine else 1


def _write_bundle(problem: str, path: Path) -> bool:
    """Write the solution of a problem as one file; return whether it could be written."""
    text = importlib.import_module("kernels.build.bundle").bundle(problem)
    is_written = _write(path, text)
    if is_written:
        lines = len(text.splitlines())
        console.show(f"wrote {path}: {problem} in one file of {lines:,} lines")
    return is_written


def _grade(args: argparse.Namespace, parser: Parser, arguments: list[str]) -> bool:
    """Grade this project's modules, or the files of `--solution`; print and write the results.

    Args:
        args: the parsed options.
        parser: reports a bad device, dtype, size or reference file.
        arguments: the words after `run.py`, which the results quote.

    Returns:
        Whether every graded file is correct and every result was written.
    """
    progress = console.Progress()
    try:
        device, why_no_gpu = _choose_device(args.device)
        if args.reference:
            progress("running the reference")
        subjects, oracle = _subjects(args, device)
    except (BadReferenceError, ValueError) as error:
        parser.error(str(error))
    progress.clear()

    command = shlex.join(["python", "run.py", *arguments])
    document = records.document(command, _kind(args), records.environment(device))
    headline = tables.headline(document["environment"], device, why_no_gpu)
    graded = args.solution or [OURS]
    session = Session(args, graded, device, headline, document, progress, subjects, oracle)
    try:
        is_right = session.run()
    except KeyboardInterrupt:
        document["complete"] = False
        if document["records"]:
            _write_results(args, document)
        raise
    is_written = _write_results(args, document)
    return is_right and is_written


def _kind(args: argparse.Namespace) -> str:
    """Return which kind of results the options ask for, as the JSON file names it."""
    if args.sweep:
        return "sweep"
    if args.solution:
        return "grading"
    return "comparison"


# ----------------------------------------------------------------------- device, problems and sizes


def _choose_device(name: str | None) -> tuple[torch.device, str]:
    """Choose the device, and make a GPU torch's current one.

    Args:
        name: the value of `--device`; None takes a GPU if there is one.

    Returns:
        The device, and text for the headline that says why it is not a GPU. The text is empty if it
        is one, or if the user named the device.

    Raises:
        ValueError: the name is not a device, or torch does not see the device.
    """
    why_no_gpu = ""
    if not name:
        if torch.cuda.is_available():
            name = "cuda"
        else:
            name = "cpu"
            why_no_gpu = f"; no GPU: {_why_no_gpu()}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name} is no device: cpu, cuda or cuda:N is meant") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name} is neither a CPU nor a CUDA GPU")
    if device.type == "cpu":
        return torch.device("cpu"), why_no_gpu
    device = torch.device("cuda", device.index or 0)
    if device.index >= torch.cuda.device_count():
        raise ValueError(f"device {device} is not there: torch sees no such GPU")
    torch.cuda.set_device(device)
    return device, why_no_gpu


def _why_no_gpu() -> str:
    """Return the reason why torch cannot use a GPU here."""
    if not torch.backends.cuda.is_built():
        return "torch is a CPU build"
    reason = "no reason given"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]
    return f"torch.cuda.is_available() is false ({reason})"


def _subjects(
    args: argparse.Namespace, device: torch.device
) -> tuple[list[records.Subject], Oracle | None]:
    """List the problems, dtypes and sizes to grade on.

    Returns:
        The subjects; and for `--reference` the oracle, which knows that file's right results. For
        this project's problems the oracle is None: the session makes one for each subject.

    Raises:
        BadReferenceError: the reference file does not work.
        ValueError: a size does not fit into memory, or a problem does not take a dtype.
    """
    if args.reference:
        oracle = Oracle(load(args.reference), device)
        dtype = dtype_name(oracle.dtype)
        return [records.Subject(args.reference.stem, dtype, oracle.shape)], oracle

    if args.problem:
        problems = [args.problem]
    elif args.sweep:
        problems = list(grade.PROBLEMS)
    else:
        problems = list(PROBLEMS)
    dtypes = args.dtype
    if not dtypes:
        dtypes = SWEEP_DTYPES if args.sweep else ["float32"]

    subjects = []
    for problem, dtype in product(problems, dtypes):
        # This also raises ValueError for a sweep in a dtype that the problem does not take.
        judge = grade.PROBLEMS.get(problem, OfProject)
        shape, note = judge.choose_shape(PROBLEMS[problem], args.rows, DTYPES[dtype], device)
        if args.sweep:
            subjects += _sweep_subjects(problem, dtype, device)
        else:
            subjects.append(records.Subject(problem, dtype, shape, note=note))
    return subjects, None


def _sweep_subjects(problem: str, dtype: str, device: torch.device) -> list[records.Subject]:
    """List all sizes of a problem in one dtype, for each of its precision settings."""
    judge = grade.PROBLEMS[problem]
    # The third setting, `medium`, is left out: the kernels treat it as `high`.
    settings = judge.settings(DTYPES[dtype], device)[:2]
    sizes = judge.sweep(PROBLEMS[problem], device)
    subjects = []
    for setting, (shape, elements) in product(settings, sizes):
        subjects.append(records.Subject(problem, dtype, shape, (setting,), elements=elements))
    return subjects


# ------------------------------------------------------------------------------------------ results


def _write_results(args: argparse.Namespace, document: dict) -> bool:
    """Write the files of `--json`, `--markdown` and `--plot`; return whether all were written."""
    is_written = True
    if args.json and not _write(args.json, json.dumps(document, indent=1) + "\n"):
        is_written = False
    if args.markdown and not _write(args.markdown, tables.markdown(document)):
        is_written = False
    if args.plot and not _write_plot(args.plot, document):
        is_written = False
    return is_written


def _write_plot(path: Path, document: dict) -> bool:
    """Draw what was timed; return whether there was something to draw and it was written."""
    if not any(record["runs"] for record in document["records"]):
        console.say(f"{path} is not drawn: nothing was timed")
        return False
    return _write(path, plot.draw(document, path.suffix))


def _write(path: Path, text: str | bytes) -> bool:
    """Write a file; return whether that worked, and say on stderr why not."""
    try:
        files.write(path, text)
    except OSError as error:
        console.say(f"cannot write {path}: {error.strerror}")
        return False
    return True


# -------------------------------------------------------------- options that contradict one another


def _check(args: argparse.Namespace, parser: Parser) -> None:
    """End with status 2 if options contradict each other."""
    _check_bundle_and_solution(args, parser)
    _check_sweep(args, parser)
    _check_reference(args, parser)
    _check_results(args, parser)


def _check_bundle_and_solution(args: argparse.Namespace, parser: Parser) -> None:
    """Refuse `--bundle` and `--solution` with each other, a sweep, or several problems."""
    for option, value in (("--bundle", args.bundle), ("--solution", args.solution)):
        if value and args.sweep:
            parser.error(f"--sweep and --plot are not for {option}")
        if value and not args.problem and not args.reference:
            parser.error(f"{option} is for one problem: which?")
    if args.bundle and args.solution:
        parser.error("--bundle writes this project's solution, --solution grades files: which?")
    if args.timeout and not args.solution:
        parser.error("--timeout is for --solution")


def _check_sweep(args: argparse.Namespace, parser: Parser) -> None:
    """Refuse several sizes or dtypes where one is meant, and a problem without a sweep."""
    if args.sweep and args.problem and args.problem not in grade.PROBLEMS:
        parser.error(f"{args.problem} has no sweep")
    if args.rows and args.sweep:
        parser.error("--rows is for one size, --sweep takes many: which?")
    if args.solution and args.dtype and len(args.dtype) > 1:
        parser.error("--solution grades files in one dtype: which?")


def _check_reference(args: argparse.Namespace, parser: Parser) -> None:
    """Refuse `--reference` without `--solution`, or with options of this project's problems."""
    if not args.reference:
        return
    if args.problem or not args.solution or args.bundle:
        parser.error("--reference goes with --solution, and without the name of a problem")
    if args.rows or args.dtype:
        parser.error("--rows and --dtype are for this project's problems, not for --reference")


def _check_results(args: argparse.Namespace, parser: Parser) -> None:
    """Refuse to overwrite a file that is graded, and a plot that cannot be drawn."""
    inputs = [args.reference or OURS]
    if args.solution:
        inputs += args.solution
    inputs = [path.resolve() for path in inputs]
    for output in (args.json, args.markdown, args.plot, args.bundle):
        if output and output.resolve() in inputs:
            parser.error(f"{output} is read: the results need another file")
    if args.plot:
        try:
            plot.check(args.plot)
        except ValueError as error:
            parser.error(f"argument --plot: {error}")


# -------------------------------------------------------------------------------------- the options


def _parser() -> Parser:
    """Return the parser of all options."""
    parser = Parser(prog="run.py", description=DESCRIPTION)
    add = parser.add_argument
    add("problem", nargs="?", choices=list(PROBLEMS), help="default: all")
    add("--device", metavar="D", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add(
        "--dtype",
        type=_dtypes,
        metavar="T[,T]",
        help=f"one or more of {', '.join(DTYPES)} (default: float32)",
    )
    add("--rows", type=_positive, metavar="N", help="rows of the input (default: what fits)")
    add(
        "--trials",
        type=_positive,
        metavar="N",
        help=f"timed rounds (default: {MOST['cuda']}, on a CPU {CPU_LEAST} to {MOST['cpu']})",
    )
    add("--sweep", action="store_true", help="time many sizes and dtypes, forwards alone")
    output = {"type": _writable_file, "metavar": "FILE"}
    add("--json", **output, help="write everything as JSON too")
    add("--markdown", **output, help="write tables for a README too")
    add("--plot", **output, help="draw what --sweep measures as .svg or .png; needs matplotlib")
    add("--bundle", **output, help="write the solution as one file, and stop")
    add(
        "--solution",
        type=_source_file,
        nargs="+",
        metavar="FILE",
        help="grade these files, each of which defines ModelNew, instead of this project's; the "
        "dimensions of results may be in any order in memory",
    )
    add(
        "--reference",
        type=_source_file,
        metavar="FILE",
        help="grade the solutions against this file's Model, get_inputs and get_init_inputs",
    )
    add(
        "--timeout",
        type=_positive,
        metavar="S",
        help=f"seconds for each solution, its compilation included (default: {TIMEOUT})",
    )
    return parser


def _source_file(text: str) -> Path:
    """Return the path of a Python file that can be read.

    Raises:
        argparse.ArgumentTypeError: it cannot be read, is not a file, or is too large for a program.
    """
    path = Path(text)
    try:
        size = path.stat().st_size
        if not path.is_file():  # so that no FIFO is opened, which would block
            raise argparse.ArgumentTypeError(f"{path} is no file")
        path.open("rb").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from None
    if size > LARGEST_SOLUTION:
        raise argparse.ArgumentTypeError(f"{path} has {size:,} bytes: no program")
    return path


def _dtypes(text: str) -> list[str]:
    """Return the names in "float32,float16", each once and in their order.

    Raises:
        argparse.ArgumentTypeError: a name is not a dtype that the referee knows.
    """
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(DTYPES)}")
    return names


def _positive(text: str) -> int:
    """Return a whole number from 1 to 999999999.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]} is not a whole number from 1 to 999999999")
    return int(text)


def _writable_file(text: str) -> Path:
    """Return the path of a file that can be written, before any work is done for it.

    Raises:
        argparse.ArgumentTypeError: it cannot be written.
    """
    path = Path(text)
    try:
        files.check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    return path


if __name__ == "__main__":
    sys.exit(console.run(main))
