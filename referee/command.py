"""The command line of `python -m referee REFERENCE SOLUTION...`, and of a project's own program.

A project with problems of its own calls `main` with a `Project`, as this repository's `run.py`
does. The command then also grades the project's own solution, and writes it as one file.

`main` parses and checks the options, and starts one of three kinds of work:

    --bundle             writes the project's solution as one file, see `_bundle`
    folders              see `folders`
    everything else      see `session.Session`

Exit status: 0 if everything is correct; 1 if something is not, or a file could not be written; 2 if
the options make no sense; 130 after Ctrl-C.
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
TIMEOUT = 300  # s that a solution may run, in each dtype
MAX_FILE_BYTES = 64 << 20  # of a solution or reference
# Several files share a CPU's seconds of timing, but each gets at least a quarter of them.
MAX_SHARES = 4


@dataclass(frozen=True)
class Project:
    """What a project adds to the command.

    Attributes:
        description: the first line of --help.
        problems: the names of its problems.
        sweep_problems: the problems that --sweep can measure.
        own_solution: the file that is graded if the user names none.
        choose_subjects: returns what to grade on, for the options and a device.
        make_problem: makes the problem of a subject.
        bundle: returns the text of the project's solution of a problem as one file.
    """

    description: str
    problems: list[str]
    sweep_problems: list[str]
    own_solution: Path
    choose_subjects: Callable[[argparse.Namespace, torch.device], list[Subject]]
    make_problem: Callable[[Subject, torch.device], Problem]
    bundle: Callable[[str], str]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def print_help(self, file: object = None) -> None:
        """Print the help to stdout."""
        console.show(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        """Print an error, and end the program with status 2."""
        console.say(message)
        self.exit(2)


def main(arguments: list[str] | None = None, project: Project | None = None) -> int:
    """Run the command line; return the exit status.

    Args:
        arguments: the command's; None for those of this process.
        project: whose problems and options the command has, if any.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    parser = _make_parser(project)
    args = parser.parse_args(arguments)
    if args.plot:
        args.sweep = True
    _check(args, parser, project)
    if args.bundle:
        return _bundle(args, project)
    command_line = _command_line(arguments, project)
    progress = console.Progress()
    try:
        device, why_no_gpu = choose_device(args.device)
        if folders.are_named(args):
            return _grade_folders(args, command_line, device, why_no_gpu, progress)
        subjects, make_problem = _choose_subjects(args, device, project, progress)
    except (BadReferenceError, ValueError) as error:
        parser.error(str(error))
    except torch.OutOfMemoryError as error:
        parser.error(f"no memory to prepare the problem: {first_error_line(str(error))}")
    progress.clear()
    try:
        graded_files = read_files(args.solution or [project.own_solution])
    except OSError as error:
        console.say(f"the solution cannot be imported: {error.strerror}: {error.filename}")
        return 1
    document = records.document(command_line, _kind(args), records.environment(device))
    session = Session(
        args=args,
        files=graded_files,
        subjects=subjects,
        make_problem=make_problem,
        device=device,
        headline=tables.headline(document["environment"], device, why_no_gpu),
        document=document,
        options=_make_options(args, device, is_ours=not args.solution),
        progress=progress,
    )
    return _run_session(session)


def _run_session(session: Session) -> int:
    """Run a session, and write its results into files; return the exit status."""
    args, document = session.args, session.document
    try:
        is_success = session.run()
    except KeyboardInterrupt:
        document["complete"] = False
        if document["records"]:
            _write_results(args, document)
        raise
    is_written = _write_results(args, document)
    return 0 if is_written and is_success else 1


def _grade_folders(
    args: argparse.Namespace,
    command_line: str,
    device: torch.device,
    why_no_gpu: str,
    progress: console.Progress,
) -> int:
    """Grade folders; return the exit status.

    Args:
        args: the options.
        command_line: as it was typed, for the JSON file.
        device: where solutions compute, unless `--devices` names several.
        why_no_gpu: the reason for the headline, see `choose_device`.
        progress: shows what is done now.
    """
    devices = [device]
    if args.devices:
        devices = [choose_device(name)[0] for name in args.devices]
    document = records.document(command_line, "grading", records.environment(devices[0]))
    job = folders.find_work(args)
    names = ", ".join(map(str, devices))
    console.show(tables.headline(document["environment"], names, why_no_gpu))
    options = _make_options(args, devices[0], is_ours=False)
    return folders.grade(job, devices, options, document, progress)


def _command_line(arguments: list[str], project: Project | None) -> str:
    """Return the command line as a user can type it again in a shell."""
    program = ["python", "run.py"] if project else ["python", "-m", "referee"]
    return shlex.join([*program, *arguments])


def _kind(args: argparse.Namespace) -> str:
    """Return the kind of the JSON file, see `records.document`."""
    if args.sweep:
        return "sweep"
    return "grading" if args.solution else "comparison"


def _bundle(args: argparse.Namespace, project: Project) -> int:
    """Write the project's solution of a problem as one file; return the exit status."""
    text = project.bundle(args.problem)
    if not files.try_to_write(args.bundle, text):
        return 1
    lines = len(text.splitlines())
    console.show(f"wrote {args.bundle}: {args.problem} in one file of {lines:,} lines")
    return 0


def choose_device(name: str | None) -> tuple[torch.device, str]:
    """Return a device; if it is the CPU only for lack of a GPU, also why there is none.

    A GPU becomes torch's current device. The reason is written for `tables.headline`: "; no GPU:
    torch is a CPU build" for example. It is "" if there is a GPU, or if the user names a device.

    Args:
        name: "cpu", "cuda" or "cuda:N"; None for a GPU, or the CPU if there is none.

    Raises:
        ValueError: there is no such device.
    """
    why_no_gpu = ""
    if not name:
        name = "cuda"
        if not torch.cuda.is_available():
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
    """Return the reason why torch sees no GPU."""
    if not torch.backends.cuda.is_built():
        return "torch is a CPU build"
    reason = "no reason given"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]
    return f"torch.cuda.is_available() is false ({reason})"


def _choose_subjects(
    args: argparse.Namespace,
    device: torch.device,
    project: Project | None,
    progress: console.Progress,
) -> tuple[list[Subject], Callable[[Subject, torch.device], Problem]]:
    """Return the subjects to grade on, and a function that makes the problem of a subject.

    They come from the reference file if the options name one, else from the project.
    """
    if not args.reference:
        return project.choose_subjects(args, device), project.make_problem
    progress("running the reference")
    problem = Problem(args.reference.stem, load(args.reference), device)
    subject = Subject(problem.name, dtype_name(problem.dtype), problem.shape)

    def the_problem(_subject: Subject, _device: torch.device) -> Problem:
        return problem

    return [subject], the_problem


def is_quick_check(args: argparse.Namespace) -> bool:
    """Return whether this is a newcomer's first run: no option asks for more or other work."""
    return not (args.solution or args.full or args.sweep or args.trials)


def _make_options(args: argparse.Namespace, device: torch.device, is_ours: bool) -> Options:
    """Return how files are graded.

    Args:
        args: the command's options.
        device: where solutions compute.
        is_ours: whether the project's own solution is graded.
    """
    seconds = FULL_CPU_SECONDS if args.full else CPU_SECONDS
    if args.solution:
        seconds /= min(len(args.solution), MAX_SHARES)
    trials = args.trials
    largest_gradients = math.inf  # bytes of parameters up to which gradients are computed
    is_quick = is_quick_check(args)
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
    """Write the files that the options name; return whether all of them could be written."""
    are_written = []
    if args.json:
        are_written.append(files.try_to_write(args.json, records.as_json(document)))
    if args.markdown:
        are_written.append(files.try_to_write(args.markdown, tables.markdown(document)))
    if args.plot:
        are_written.append(_draw(args.plot, document))
    return all(are_written)


def _draw(path: Path, document: dict) -> bool:
    """Write the picture of a document; return whether that was possible."""
    if not any(record["runs"] for record in document["records"]):
        console.say(f"{path} is not drawn: nothing was timed")
        return False
    return files.try_to_write(path, plot.draw(document, path.suffix))


def _check(args: argparse.Namespace, parser: Parser, project: Project | None) -> None:
    """End the program with status 2 if options contradict each other."""
    _check_kind_of_work(args, parser)
    _check_folders(args, parser)
    _check_sizes(args, parser, project)
    _check_files(args, parser, project)


def _check_kind_of_work(args: argparse.Namespace, parser: Parser) -> None:
    """Check that the options ask for one kind of work."""
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
    """Check that options for folders come with folders, and other options without."""
    if folders.are_named(args):
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
    """Check the options for sizes and dtypes."""
    if args.sweep and args.problem and project and args.problem not in project.sweep_problems:
        parser.error(f"{args.problem} has no sweep")
    if args.rows and args.sweep:
        parser.error("--rows is for one size, --sweep takes many: which?")
    if args.solution and args.dtype and len(args.dtype) > 1:
        parser.error("--solution grades files in one dtype: which?")
    if args.reference and (args.rows or args.dtype):
        parser.error("--rows and --dtype are for this project's problems, not for --reference")


def _check_files(args: argparse.Namespace, parser: Parser, project: Project | None) -> None:
    """Check that no file is both read and written, and that a picture can be drawn."""
    read_paths = {path.resolve() for path in args.solution or ()}
    if args.reference:
        read_paths.add(args.reference.resolve())
    elif project:
        read_paths.add(project.own_solution.resolve())
    written_paths = (args.json, args.markdown, args.plot, args.bundle, args.out, args.csv)
    for path in filter(None, written_paths):
        if path.resolve() in read_paths:
            parser.error(f"{path} is read: the results need another file")
    if args.plot:
        try:
            plot.check(args.plot)
        except ValueError as error:
            parser.error(f"argument --plot: {error}")


def _make_parser(project: Project | None) -> Parser:
    """Return the parser of the command.

    With a project, the command takes the name of a problem and the project's options; without, it
    takes a reference and solutions.
    """
    parser = Parser(
        prog=console.program(), description=project.description if project else DESCRIPTION
    )
    add = parser.add_argument
    # The values of the options of `_add_project_options`, for a command that has none of them.
    project_options = ("problem", "dtype", "rows", "plot", "bundle", "reference")
    parser.set_defaults(**dict.fromkeys(project_options), sweep=False)
    if project:
        _add_project_options(parser, project)
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


def _add_project_options(parser: Parser, project: Project) -> None:
    """Add the arguments and options that only a project has."""
    add = parser.add_argument
    add("problem", nargs="?", choices=project.problems, help="default: all")
    dtypes = f"one or more of {', '.join(DTYPES)} (default: float32)"
    add("--dtype", type=_dtypes, metavar="T[,T]", help=dtypes)
    add("--rows", type=_positive, metavar="N", help="rows of the input (default: what fits)")
    add("--sweep", action="store_true", help="time many sizes and dtypes, forwards alone")
    file = {"type": _writable, "metavar": "FILE"}
    add("--plot", **file, help="draw what --sweep measures as .svg or .png; needs matplotlib")
    add("--bundle", **file, help="write the solution as one file, and stop")
    solution = "grade these files, each of which defines ModelNew, instead of this project's; the "
    solution += "strides of results are free"
    add("--solution", type=_readable, nargs="+", metavar="FILE", help=solution)
    reference = "grade them against this file's Model, get_inputs and get_init_inputs"
    add("--reference", type=_readable, metavar="FILE", help=reference)


def _readable(text: str) -> Path:
    """Return the path of a file that can be read, or of a folder with Python files.

    Raises:
        argparse.ArgumentTypeError: there is no such file or folder.
    """
    path = Path(text)
    try:
        size = path.stat().st_size
        if path.is_dir() and any(path.glob("**/*.py")):
            return path
        if not path.is_file():  # the open below would wait for a FIFO's writer
            raise argparse.ArgumentTypeError(f"{path} is no file, nor a folder with Python files")
        path.open("rb").close()
    except OSError as error:
        hint = ""
        # In "--solution a.py relu" the name of the problem is taken for a second file.
        if not path.suffix and isinstance(error, FileNotFoundError):
            hint = "; a problem's name comes before --solution"
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}{hint}") from None
    except ValueError:  # the name contains a NUL
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file") from None
    if size > MAX_FILE_BYTES:
        raise argparse.ArgumentTypeError(f"{path} has {size:,} bytes: no program")
    return path


def _devices(text: str) -> list[str]:
    """Return the names in "cuda:0,cuda:1", each once."""
    return list(dict.fromkeys(text.split(",")))


def _dtypes(text: str) -> list[str]:
    """Return the names in "float32,float16", each once; raise ArgumentTypeError for others."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(DTYPES)}")
    return names


def _positive(text: str) -> int:
    """Return a positive number; raise ArgumentTypeError for anything else."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]} is not a whole number from 1 to 999999999")
    return int(text)


def _writable(text: str) -> Path:
    """Return the path of a file that can be written; raise ArgumentTypeError if it cannot."""
    path = Path(text)
    try:
        files.check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    return path
