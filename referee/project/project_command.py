"""The command line of a project's own program.

The project's program calls `main` with a `Project`. There are five kinds of work, and the options
say which:

    --bundle                writes the project's solution as one file
    --reference, --solution grade files on a reference, as `python -m referee` does
    --solution              grades files on one of the project's problems
    --sweep, --plot         times the project's solution at many sizes, see `sweep`
    none of these           compares the project's solution with eager, see `compare_with_eager`;
                            without --full and --trials it is a quick check

The exit status is that of `python -m referee`.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from referee import console, records
from referee.devices import choose_device
from referee.engine import read_files
from referee.grading import Options
from referee.message_lines import first_error_line
from referee.program import command
from referee.program.file_grader import FileGrader
from referee.program.grade_files import grade_files
from referee.project.compare_with_eager import ComparisonWithEager
from referee.project.project import Project
from referee.project.project_arguments import QUICK_ROUNDS, check_options, make_parser
from referee.project.sweep import Sweep
from referee.reference.file import BadReferenceError
from referee.report import files, plot, tables
from referee.times.round_limit import RoundLimit

# With more bytes of parameters than this, a quick check on a CPU leaves out gradients at the timed
# size: those of a weight of 256 MiB take seven seconds to compare.
QUICK_PARAMETERS = 1 << 26


def main(arguments: list[str] | None, project: Project) -> int:
    """Run the command line; return the exit status.

    Args:
        arguments: the command's; None for those of this process.
        project: the project whose problems and options the command has.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    console.program = project.program
    parser = make_parser(project)
    args = parser.parse_args(arguments)
    if args.plot:
        args.sweep = True
    check_options(args, parser, project)
    if args.bundle:
        return _bundle(args, project)
    command_line = shlex.join(["python", project.program, *arguments])
    if args.reference:
        return command.grade(args, parser, command_line)
    progress = console.Progress()
    try:
        device, why_no_gpu = choose_device(args.device)
        subjects = project.choose_subjects(args, device)
    except (BadReferenceError, ValueError) as error:
        parser.error(str(error))
    except torch.OutOfMemoryError as error:
        parser.error(f"no memory to prepare the problem: {first_error_line(str(error))}")
    try:
        solutions = read_files(args.solution or [project.own_solution])
    except OSError as error:
        console.say(f"the solution cannot be imported: {error.strerror}: {error.filename}")
        return 1
    document = records.document(command_line, _kind(args), records.environment(device))
    grader = FileGrader(
        files=solutions,
        subjects=subjects,
        make_problem=project.make_problem,
        device=device,
        options=_make_options(args, device),
        headline=tables.headline(document["environment"], device, why_no_gpu),
        document=document,
        progress=progress,
        is_verbose=args.verbose,
    )
    work = _choose_work(args, grader, project)
    return command.run(work, partial(_write_results, args), document)


def is_quick_check(args: argparse.Namespace) -> bool:
    """Return whether this is a newcomer's first check: no option asks for more or other work."""
    return not (args.solution or args.full or args.sweep or args.trials)


def _bundle(args: argparse.Namespace, project: Project) -> int:
    """Write the project's solution of a problem as one file; return the exit status."""
    text = project.bundle(args.problem)
    if not files.try_to_write(args.bundle, text):
        return 1
    lines = len(text.splitlines())
    console.show(f"wrote {args.bundle}: {args.problem} in one file of {lines:,} lines")
    return 0


def _kind(args: argparse.Namespace) -> str:
    """Return the kind of the JSON file, see `records.document`."""
    if args.sweep:
        return "sweep"
    return "grading" if args.solution else "comparison"


def _choose_work(
    args: argparse.Namespace, grader: FileGrader, project: Project
) -> Callable[[], bool]:
    """Return the function that does what the options ask for."""
    if args.sweep:
        return Sweep(grader).run
    if args.solution:
        return partial(grade_files, grader)
    return ComparisonWithEager(grader, project, is_full=args.full).run


def _make_options(args: argparse.Namespace, device: torch.device) -> Options:
    """Return how files are graded."""
    options = command.make_options(args)
    is_gpu = device.type == "cuda"
    if args.solution:
        return options
    if args.sweep:
        return replace(options, is_sweep=True, compiled=is_gpu)
    if not is_quick_check(args):
        return replace(options, compiled=is_gpu and args.full)
    if is_gpu:
        return replace(options, is_quick=True, round_limit=RoundLimit(QUICK_ROUNDS))
    return replace(options, is_quick=True, largest_gradients=QUICK_PARAMETERS)


def _write_results(args: argparse.Namespace, document: dict) -> bool:
    """Write the files that the options name; return whether all of them could be written."""
    are_written = [command.write_results(args, document)]
    if args.plot:
        are_written.append(_draw(args.plot, document))
    return all(are_written)


def _draw(path: Path, document: dict) -> bool:
    """Write the picture of a sweep; return whether that was possible."""
    if not any(record["runs"] for record in document["records"]):
        console.say(f"{path} is not drawn: nothing was timed")
        return False
    return files.try_to_write(path, plot.draw(document, path.suffix))
