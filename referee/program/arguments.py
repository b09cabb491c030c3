"""The arguments and options of the command: a parser for them, and checks of their combinations."""

import argparse
from pathlib import Path
from typing import NoReturn

from referee import console
from referee.grading import TIMEOUT
from referee.program import folders
from referee.program.project import Project
from referee.reference.dtypes import DTYPES
from referee.report import files, plot
from referee.times.timing import LEAST_CPU_ROUNDS, MOST_ROUNDS, QUICK_ROUNDS

DESCRIPTION = "Compares solutions with a reference: first the results, then the time."
MAX_PROGRAM_BYTES = 64 << 20  # of a solution or reference


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def print_help(self, file: object = None) -> None:
        """Print the help to stdout."""
        console.show(self.format_help().rstrip())

    def error(self, message: str) -> NoReturn:
        """Print an error, and end the program with status 2."""
        console.say(message)
        self.exit(2)


def make_parser(project: Project | None) -> Parser:
    """Return the parser of the command.

    With a project, the command takes the name of a problem and the project's options; without, it
    takes a reference and solutions.
    """
    parser = Parser(
        prog=console.program, description=project.description if project else DESCRIPTION
    )
    add = parser.add_argument
    if project:
        _add_project_options(parser, project)
    else:
        # The options that only a project has are read without one, too.
        parser.set_defaults(
            problem=None, dtype=None, rows=None, sweep=False, plot=None, bundle=None
        )
        add("reference", type=_readable, metavar="REFERENCE", help="a problem file, or a folder")
        add("solution", type=_readable, nargs="+", metavar="SOLUTION", help="files, or a folder")
    add("--device", metavar="D", help="cpu, cuda or cuda:N (default: the best)")
    add("--devices", metavar="D,D", type=_devices, help="of folders: a worker for each device")
    quick = f"{QUICK_ROUNDS}, with --full or --solution " if project else ""
    on_gpu = f"{quick}{MOST_ROUNDS['cuda']}"
    on_cpu = f"{LEAST_CPU_ROUNDS} to {MOST_ROUNDS['cpu']}"
    rounds = f"timed rounds (default: {on_gpu}; on a CPU {on_cpu})"
    add("--trials", type=_positive, metavar="N", help=rounds)
    add("--full", action="store_true", help="more rounds, as for a table that is published")
    verbose = "print tracebacks, and what graded files print; has no effect on folders"
    add("--verbose", action="store_true", help=verbose)
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
    solution = "grade these files, each of which defines ModelNew, instead of this project's; "
    solution += "results may have other strides, but elements of a result may not share memory"
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
            raise argparse.ArgumentTypeError(
                f"{path} is neither a file nor a folder with Python files"
            )
        path.open("rb").close()
    except OSError as error:
        hint = ""
        # In "run.py --solution a.py relu" the problem's name is taken for a second file.
        if not path.suffix and isinstance(error, FileNotFoundError):
            hint = " (if it is the name of a problem, write it first)"
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}{hint}") from None
    except ValueError:  # the name contains a NUL
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file") from None
    if size > MAX_PROGRAM_BYTES:
        raise argparse.ArgumentTypeError(
            f"{path} has {size:,} bytes; a program has at most {MAX_PROGRAM_BYTES:,}"
        )
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


def check_options(args: argparse.Namespace, parser: Parser, project: Project | None) -> None:
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
            parser.error(f"{option} is for one problem: name the problem first")
    if args.bundle and args.solution:
        parser.error("--bundle writes this project's solution, --solution grades files: choose one")
    if args.timeout and not args.solution:
        parser.error("--timeout is for --solution")
    if args.reference and (args.problem or not args.solution or args.bundle):
        parser.error("--reference goes with --solution, and without the name of a problem")


def _check_folders(args: argparse.Namespace, parser: Parser) -> None:
    """Check that options for folders come with folders, and other options without."""
    if folders.are_named(args):
        if args.device and args.devices:
            parser.error("--device is for one device, --devices for several: choose one")
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
        parser.error("--rows is for one size, --sweep takes many: choose one")
    if args.solution and args.dtype and len(args.dtype) > 1:
        parser.error("--solution grades files in one dtype: give one to --dtype")
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
