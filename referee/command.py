"""The command line: `python -m referee REFERENCE SOLUTION...`, and this project's `run.py`.

Both are this program. A project passes `main` what it knows: problems by name, its own solution,
and how it writes a bundle.

Exit status: 0 if everything is right, 1 if something is wrong or could not be written, 2 for a
request that makes no sense, 130 after an interrupt.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from referee import console, folders, records
from referee.cases import DTYPES
from referee.engine import read_files
from referee.grading import Options
from referee.problem import Problem
from referee.reference_file import BadReferenceError, first_error_line, load
from referee.report import files, plot, tables
from referee.session import Session, Subject
from referee.shared import dtype_name
from referee.timing import (
    CPU_LEAST,
    CPU_SECONDS,
    FULL_CPU_SECONDS,
    MOST,
    QUICK,
    QUICK_PARAMETERS,
    Rounds,
)

DESCRIPTION = "Compares solutions with a reference: first the results, then the time."
TIMEOUT = 300  # s for a solution, in each dtype
LARGEST_SOLUTION = 64 << 20  # bytes
MOST_SHARES = 4  # into which a CPU's seconds of timing are divided for several files


@dataclass(frozen=True)
class Project:
    """The problems and options that a project adds to the command.

    Attributes:
        description: for --help.
        problems: names that the command takes in the place of a reference file.
        swept: those that have a sweep.
        ours: the file that is graded where no other is named.
        subjects: returns what is graded, from the options and the device.
        make: returns the problem of a subject.
        bundle: returns the project's solution of a problem as one file's text.
    """

    description: str
    problems: list[str]
    swept: list[str]
    ours: Path
    subjects: Callable[[argparse.Namespace, torch.device], list[Subject]]
    make: Callable[[Subject, torch.device], Problem]
    bundle: Callable[[str], str]


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def print_help(self, file: object = None) -> None:
        """Print the help to stdout."""
        console.show(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        console.say(message)
        self.exit(2)


def main(arguments: list[str] | None = None, project: Project | None = None) -> int:
    """Run the command line; return the exit status."""
    typed = sys.argv[1:] if arguments is None else arguments
    parser = _parser(project)
    args = parser.parse_args(typed)
    if args.plot:
        args.sweep = True
    _check(args, parser, project)
    if args.bundle:
        return _bundle(args, project)
    progress = console.Progress()
    try:
        device, why = choose_device(args.device)
        if folders.is_folder(args):
            return _grade_folders(args, _command(typed, project), device, why, progress)
        subjects, make_problem = _subjects(args, device, project, progress)
    except (BadReferenceError, ValueError) as error:
        parser.error(str(error))
    except torch.OutOfMemoryError as error:
        parser.error(f"no memory to prepare the problem: {first_error_line(str(error))}")
    progress.clear()
    try:
        graded = read_files(args.solution or [project.ours])
    except OSError as error:
        console.say(f"the solution cannot be imported: {error.strerror}: {error.filename}")
        return 1
    document = records.document(_command(typed, project), _kind(args), records.environment(device))
    session = Session(
        args=args,
        files=graded,
        subjects=subjects,
        make_problem=make_problem,
        device=device,
        headline=tables.headline(document["environment"], device, why),
        document=document,
        options=_options(args, device, is_ours=not args.solution),
        progress=progress,
    )
    try:
        is_fine = session.run()
    except KeyboardInterrupt:
        document["complete"] = False
        if document["records"]:
            _write_results(args, document)
        raise
    return 0 if _write_results(args, document) and is_fine else 1


def _grade_folders(
    args: argparse.Namespace,
    line: str,
    device: torch.device,
    why: str,
    progress: console.Progress,
) -> int:
    """Grade folders; return the exit status.

    Args:
        args: the options.
        line: the command line, for the JSON file.
        device: where solutions compute, unless `--devices` names several.
        why: that is no GPU, or "".
        progress: says what is being done.
    """
    devices = [device]
    if args.devices:
        devices = [choose_device(name)[0] for name in args.devices]
    document = records.document(line, "grading", records.environment(devices[0]))
    job = folders.find_work(args)
    console.show(tables.headline(document["environment"], ", ".join(map(str, devices)), why))
    options = _options(args, devices[0], is_ours=False)
    return folders.grade(job, devices, options, document, progress)


def _command(typed: list[str], project: Project | None) -> str:
    """Return the command line as it would be typed again."""
    program = ["python", "run.py"] if project else ["python", "-m", "referee"]
    return shlex.join([*program, *typed])


def _kind(args: argparse.Namespace) -> str:
    """Return the kind of the JSON file: see `records.document`."""
    if args.sweep:
        return "sweep"
    return "grading" if args.solution else "comparison"


def _bundle(args: argparse.Namespace, project: Project) -> int:
    text = project.bundle(args.problem)
    if not files.try_to_write(args.bundle, text):
        return 1
    lines = len(text.splitlines())
    console.show(f"wrote {args.bundle}: {args.problem} in one file of {lines:,} lines")
    return 0


def choose_device(name: str | None) -> tuple[torch.device, str]:
    """Return the device asked for, or the best, made current; and why that is no GPU.

    Raises:
        ValueError: there is no such device.
    """
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


def _subjects(
    args: argparse.Namespace,
    device: torch.device,
    project: Project | None,
    progress: console.Progress,
) -> tuple[list[Subject], Callable[[Subject, torch.device], Problem]]:
    """Return what is graded: a reference file, or problems of the project's."""
    if not args.reference:
        return project.subjects(args, device), project.make
    progress("running the reference")
    problem = Problem(args.reference.stem, load(args.reference), device)
    subject = Subject(problem.name, dtype_name(problem.dtype), problem.shape)
    return [subject], lambda subject, device: problem


def is_quick_check(args: argparse.Namespace) -> bool:
    """Return whether the options ask for no more than a newcomer's first run."""
    return not (args.solution or args.full or args.sweep or args.trials)


def _options(args: argparse.Namespace, device: torch.device, is_ours: bool) -> Options:
    """Return the conditions of every grading."""
    seconds = FULL_CPU_SECONDS if args.full else CPU_SECONDS
    if args.solution:  # several files share the time, so that many do not take for ever
        seconds /= min(len(args.solution), MOST_SHARES)
    trials = args.trials
    is_quick = is_quick_check(args)
    largest_gradients = math.inf
    if is_quick and device.type == "cuda":
        trials = QUICK
    elif is_quick:
        largest_gradients = QUICK_PARAMETERS
    return Options(
        rounds=Rounds(trials, seconds),
        timeout=args.timeout or TIMEOUT,
        only_times=args.sweep,
        compiled=is_ours and device.type == "cuda" and (args.full or args.sweep),
        is_quick=is_quick,
        largest_gradients=largest_gradients,
    )


def _write_results(args: argparse.Namespace, document: dict) -> bool:
    """Write the files that the options name; return whether all could be written."""
    is_written = True
    if args.json:
        is_written = files.try_to_write(args.json, records.as_json(document))
    if args.markdown:
        is_written = files.try_to_write(args.markdown, tables.markdown(document)) and is_written
    if not args.plot:
        return is_written
    if not any(record["runs"] for record in document["records"]):
        console.say(f"{args.plot} is not drawn: nothing was timed")
        return False
    return files.try_to_write(args.plot, plot.draw(document, args.plot.suffix)) and is_written


def _check(args: argparse.Namespace, parser: Parser, project: Project | None) -> None:
    """End with status 2 where options contradict each other."""
    _check_what(args, parser)
    _check_folders(args, parser)
    _check_sizes(args, parser, project)
    _check_files(args, parser, project)


def _check_what(args: argparse.Namespace, parser: Parser) -> None:
    """Check that the options name one kind of work."""
    for option, value in (("--bundle", args.bundle), ("--solution", args.solution)):
        if value and args.sweep:
            parser.error(f"--sweep and --plot are not for {option}")
        if value and not args.problem and not args.reference:
            parser.error(f"{option} is for one problem: which?")
    if args.bundle and args.solution:
        parser.error("--bundle writes this project's solution, --solution grades files: which?")
    if args.timeout and not args.solution:
        parser.error("--timeout is for --solution")
    if args.reference and (args.problem or not args.solution or args.bundle):
        parser.error("--reference goes with --solution, and without the name of a problem")


def _check_folders(args: argparse.Namespace, parser: Parser) -> None:
    """Check the options that only folders have, and those that these have not."""
    if folders.is_folder(args):
        if args.device and args.devices:
            parser.error("--device is for one device, --devices for several: which?")
        if args.markdown:
            parser.error("--markdown is not for folders: --csv writes their table")
        return
    for option, value in (("--out", args.out), ("--devices", args.devices), ("--csv", args.csv)):
        if value:
            parser.error(f"{option} is for folders of references and solutions")
    if any(path.is_dir() for path in args.solution or ()):
        parser.error("folders of solutions need a folder of references")


def _check_sizes(args: argparse.Namespace, parser: Parser, project: Project | None) -> None:
    """Check the options of sizes and dtypes."""
    if args.sweep and args.problem and project and args.problem not in project.swept:
        parser.error(f"{args.problem} has no sweep")
    if args.rows and args.sweep:
        parser.error("--rows is for one size, --sweep takes many: which?")
    if args.solution and args.dtype and len(args.dtype) > 1:
        parser.error("--solution grades files in one dtype: which?")
    if args.reference and (args.rows or args.dtype):
        parser.error("--rows and --dtype are for this project's problems, not for --reference")


def _check_files(args: argparse.Namespace, parser: Parser, project: Project | None) -> None:
    """Check that no file that is read is written, and that a picture can be drawn."""
    read = {path.resolve() for path in args.solution or ()}
    if args.reference:
        read.add(args.reference.resolve())
    elif project:
        read.add(project.ours.resolve())
    written = (args.json, args.markdown, args.plot, args.bundle, args.out, args.csv)
    for path in filter(None, written):
        if path.resolve() in read:
            parser.error(f"{path} is read: the results need another file")
    if args.plot:
        try:
            plot.check(args.plot)
        except ValueError as error:
            parser.error(f"argument --plot: {error}")


def _parser(project: Project | None) -> Parser:
    """Return the parser: with a project its problems and options, else reference and solutions."""
    parser = Parser(
        prog=console.program(), description=project.description if project else DESCRIPTION
    )
    add = parser.add_argument
    # Without a project, the options that only a project has get these values.
    absent = ("problem", "dtype", "rows", "plot", "bundle", "reference")
    parser.set_defaults(**dict.fromkeys(absent), sweep=False)
    if project:
        _add_projects_options(parser, project)
    else:
        add("reference", type=_readable, metavar="REFERENCE", help="a problem file, or a folder")
        add("solution", type=_readable, nargs="+", metavar="SOLUTION", help="files, or a folder")
    add("--device", metavar="D", help="cpu, cuda or cuda:N (default: the best)")
    add("--devices", metavar="D,D", type=_devices, help="of folders: a worker for each device")
    on_gpu = f"{QUICK}, with --full {MOST['cuda']}"
    rounds = f"timed rounds (default: {on_gpu}; on a CPU {CPU_LEAST} to {MOST['cpu']})"
    add("--trials", type=_positive, metavar="N", help=rounds)
    add("--full", action="store_true", help="time longer, as for a table that is published")
    add("--verbose", action="store_true", help="print tracebacks, and what graded files print")
    file = {"type": _writable, "metavar": "FILE"}
    add("--json", **file, help="write everything as JSON too")
    add("--markdown", **file, help="write tables for a README too")
    out = "of folders: append a line of JSON for each verdict, and go on where a run has ended"
    add("--out", **file, help=out)
    add("--csv", **file, help="of folders: write the table as CSV too")
    limit = f"seconds for each solution, its compilation included (default: {TIMEOUT})"
    add("--timeout", type=_positive, metavar="S", help=limit)
    return parser


def _add_projects_options(parser: Parser, project: Project) -> None:
    add = parser.add_argument
    add("problem", nargs="?", choices=project.problems, help="default: all")
    known = f"one or more of {', '.join(DTYPES)} (default: float32)"
    add("--dtype", type=_dtypes, metavar="T[,T]", help=known)
    add("--rows", type=_positive, metavar="N", help="rows of the input (default: what fits)")
    add("--sweep", action="store_true", help="time many sizes and dtypes, forwards alone")
    file = {"type": _writable, "metavar": "FILE"}
    add("--plot", **file, help="draw what --sweep measures as .svg or .png; needs matplotlib")
    add("--bundle", **file, help="write the solution as one file, and stop")
    graded = "grade these files, each of which defines ModelNew, instead of this project's; the "
    graded += "dimensions of results may lie in memory in any order"
    add("--solution", type=_readable, nargs="+", metavar="FILE", help=graded)
    against = "grade them against this file's Model, get_inputs and get_init_inputs"
    add("--reference", type=_readable, metavar="FILE", help=against)


def _readable(text: str) -> Path:
    """Return the path of a file that can be read, or of a folder with Python files."""
    path = Path(text)
    try:
        size = path.stat().st_size
        if path.is_dir() and any(path.glob("**/*.py")):
            return path
        if not path.is_file():  # a FIFO's opening would wait
            raise argparse.ArgumentTypeError(f"{path} is no file, nor a folder with Python files")
        path.open("rb").close()
    except OSError as error:
        hint = ""
        if not path.suffix and isinstance(error, FileNotFoundError):
            hint = "; a problem's name stands before --solution"
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}{hint}") from None
    except ValueError:  # a NUL in a name
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file") from None
    if size > LARGEST_SOLUTION:
        raise argparse.ArgumentTypeError(f"{path} has {size:,} bytes: no program")
    return path


def _devices(text: str) -> list[str]:
    return list(dict.fromkeys(text.split(",")))


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
