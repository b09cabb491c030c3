"""From files to verdicts."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

from referee.remote import EndedError, ForgedError, LateError, RaisedError, Remote, reaping
from referee.solutions.baselines import Baselines
from referee.solutions.judge import Judge
from referee.solutions.linear import Linear
from referee.solutions.reference import Reference
from referee.solutions.relu import Relu
from referee.solutions.verdict import (
    CHEATING,
    LATE,
    FoundError,
    Task,
    Verdict,
    of_crash,
    of_exception,
)

# Those of problems with checks of their own; others are graded as a reference file is.
JUDGES = {"relu": Relu, "linear_relu_divide": Linear}


def grade_files(files: list[Path], task: Task, report: Callable[[Verdict], None]) -> list[Verdict]:
    """Grades one file after the other, and reports each as soon as it is known."""
    kind, verdicts = _judge_of(task), []
    baselines = Baselines(task, kind.worker, kind.prepare_eager)
    try:
        for file in files:
            verdicts.append(grade_file(file, task, baselines))
            report(verdicts[-1])
    finally:
        baselines.close()
    return verdicts


def grade_file(file: Path, task: Task, baselines: Baselines) -> Verdict:
    """Its verdict, whatever the file does."""
    verdict, stage = Verdict(file), "starting"

    def progress(what: str, detail: str = "") -> None:
        nonlocal stage
        stage = f"{what} {detail}".rstrip()
        task.progress(f"{file.name}: {what}", detail)

    kind = _judge_of(task)
    with reaping() as spared, ExitStack() as stack:
        try:
            progress("starting eager")
            baselines.disturbed()  # by an earlier file
            spared |= baselines.start()
            remote = Remote(baselines.server, task.device, kind.worker, monotonic() + task.timeout)
            stack.callback(remote.close)
            kind(remote, task, verdict, progress, baselines, spared).grade(file)
        except FoundError as found:
            verdict.word, verdict.reason = found.args
        except LateError:
            verdict.word, verdict.reason = LATE, f"{task.timeout:g} s, while {stage}"
        except ForgedError:
            verdict.word = CHEATING
            verdict.reason = f"forged a reply to the referee, while {stage}"
        except EndedError as ended:
            verdict.word, verdict.reason = of_crash(*ended.args, stage)
        except RaisedError as raised:
            verdict.word, verdict.reason = of_exception(raised, stage)
    task.progress.clear()
    return verdict


def _judge_of(task: Task) -> type[Judge]:
    return Reference if task.oracle else JUDGES[task.name]
