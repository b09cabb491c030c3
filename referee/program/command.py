"""The command line of `python -m referee REFERENCE SOLUTION...` and of a project's own program.

A project with problems of its own calls `main` with a `Project`. The command then also grades the
project's own solution and writes it as one file.

`main` starts one of three kinds of work. The options, parsed and checked by `arguments`, say which:

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
from pathlib import Path

import torch

from referee import console, records
from referee.contestants.shared import dtype_name
from referee.devices import choose_device
from referee.engine import read_files
from referee.grading import TIMEOUT, Options
from referee.messages import first_error_line
from referee.program import folders
from referee.program.arguments import check_options, make_parser
from referee.program.project import Project
from referee.program.session import Session, Subject
from referee.reference.file import BadReferenceError, load
from referee.reference.problem import Problem
from referee.report import files, markdown, plot, tables
from referee.times.timing import (
    CPU_SECONDS,
    FULL_CPU_SECONDS,
    QUICK_PARAMETERS,
    QUICK_ROUNDS,
    Rounds,
)

# Several files share a CPU's seconds of timing, but each gets at least a quarter of them.
MAX_SHARES = 4


def main(arguments: list[str] | None = None, project: Project | None = None) -> int:
    """Run the command line; return the exit status.

    Args:
        arguments: the command's; None for those of this process.
        project: the project whose problems and options the command has; None without a project.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    if project:
        console.program = project.program
    parser = make_parser(project)
    args = parser.parse_args(arguments)
    if args.plot:
        args.sweep = True
    check_options(args, parser, project)
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
        project=project,
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
    """Run a session and write its results into files; return the exit status."""
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
    program = ["python", project.program] if project else ["python", "-m", "referee"]
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


def _choose_subjects(
    args: argparse.Namespace,
    device: torch.device,
    project: Project | None,
    progress: console.Progress,
) -> tuple[list[Subject], Callable[[Subject, torch.device], Problem]]:
    """Return the subjects to grade on and a function that makes the problem of a subject.

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
        trials = QUICK_ROUNDS
    elif is_quick:
        largest_gradients = QUICK_PARAMETERS
    return Options(
        rounds=Rounds(trials, seconds),
        timeout=args.timeout or TIMEOUT,
        is_sweep=args.sweep,
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
        are_written.append(files.try_to_write(args.markdown, markdown.as_markdown(document)))
    if args.plot:
        are_written.append(_draw(args.plot, document))
    return all(are_written)


def _draw(path: Path, document: dict) -> bool:
    """Write the picture of a document; return whether that was possible."""
    if not any(record["runs"] for record in document["records"]):
        console.say(f"{path} is not drawn: nothing was timed")
        return False
    return files.try_to_write(path, plot.draw(document, path.suffix))
