"""From files to verdicts."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import torch

from referee import linear_relu_divide, relu
from referee.judge.baselines import Baselines
from referee.judge.problem import Reference
from referee.judge.verdict import (
    CORRECT,
    ERROR,
    INTERRUPTED,
    LATE,
    FoundError,
    Task,
    Verdict,
    outcome,
)
from referee.processes import reaping
from referee.reference_file import BadReferenceError
from referee.remote import EndedError, ForgedError, LateError, RaisedError, Remote
from referee.timing import trim

# Problems with cases of their own; others are graded as a reference file is.
PROBLEMS = {"relu": relu.Judge, "linear_relu_divide": linear_relu_divide.Judge}

Report = Callable[[Task, Verdict], None]


def grade_files(
    files: list[Path], tasks: Callable[[], Iterable[Task]], baselines: Baselines, report: Report
) -> None:
    """Grades files one after the other on all tasks; reports a verdict as soon as it is known."""
    before = torch.get_float32_matmul_precision()
    try:
        for file in files:
            todo = iter(tasks())
            while _grade_file(file, todo, baselines, report):
                pass
    finally:
        torch.set_float32_matmul_precision(before)


def build(names: list[str], baselines: Baselines) -> float:
    """Builds this project's kernels of several problems at the same time; the seconds it took.

    Raises:
        FoundError: why they cannot be built.
    """
    start = monotonic()
    with reaping() as spared:
        spared |= baselines.start()
        baselines.warm_compiler()
        remote = Remote(baselines.server, torch.device("cpu"))
        try:
            remote.ask("build", names=names)
        except (EndedError, RaisedError) as error:
            raise FoundError(*outcome(error, "building the kernels")) from None
        finally:
            remote.close()
    return monotonic() - start


def _grade_file(file: Path, todo: Iterator[Task], baselines: Baselines, report: Report) -> bool:
    """Grades it on tasks in one process, as long as all goes well; whether that has ended early."""
    with reaping() as spared, ExitStack() as stack:
        remotes: list[Remote] = []  # one, once it has started
        stack.callback(lambda: [remote.close() for remote in remotes])
        for task in todo:
            verdict, stopped = Verdict(file), None
            try:
                _grade(task, verdict, baselines, spared, remotes)
            except KeyboardInterrupt as interrupt:  # what there is counts
                verdict.word, stopped = INTERRUPTED, interrupt
            task.progress.clear()
            for run in verdict.runs:
                if run.step and not trim(run.step.forward, run.step.backward):
                    run.step = None
            is_fine = verdict.word in (CORRECT, INTERRUPTED)  # others' times mean nothing
            verdict.runs = [run for run in verdict.runs if is_fine and trim(run.timings)]
            report(task, verdict)
            if stopped:
                raise stopped
            if verdict.word != CORRECT:
                return True
    return False


def _grade(
    task: Task, verdict: Verdict, baselines: Baselines, spared: set[int], remotes: list[Remote]
) -> None:
    """Sets the verdict, whatever the file does; its process is the one of `remotes`."""
    file, stage = verdict.file, "starting"

    def progress(what: str, detail: str = "") -> None:
        nonlocal stage
        stage = f"{what} {detail}".rstrip()
        task.progress(f"{file.name}: {what}", detail)

    known = task.oracle.file.is_ours and PROBLEMS.get(task.name)
    kind, is_new = known or Reference, not remotes
    try:
        progress("starting eager")
        baselines.disturbed()  # by an earlier file
        spared |= baselines.start()
        if is_new:
            deadline = monotonic() + task.timeout
            remotes.append(Remote(baselines.server, task.oracle.device, deadline))
        judge = kind(remotes[0], task, verdict, progress, baselines, spared)
        judge.prepare_baselines()
        remotes[0].deadline = monotonic() + task.timeout
        judge.grade(file if is_new else None)
    except FoundError as found:
        verdict.word, verdict.reason = found.args
    except BadReferenceError as bad:  # for some seeds alone
        verdict.word, verdict.reason = ERROR, str(bad)
    except LateError:
        verdict.word, verdict.reason = LATE, f"{task.timeout:g} s, while {stage}"
    except (EndedError, ForgedError, RaisedError) as error:
        verdict.word, verdict.reason = outcome(error, stage)
