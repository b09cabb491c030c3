"""Runs the steps of a grading; turns what they raise into a verdict."""

import importlib
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from referee import processes
from referee.bench import Bench
from referee.contestant import EndedError, ForgedError, LateError, RaisedError, Server
from referee.grading import GradedFile, Grading, Options
from referee.problem import Problem
from referee.reference_file import BadReferenceError
from referee.steps import (
    STEPS_OF_A_SWEEP,
    STEPS_ONCE,
    STEPS_ONCE_OF_A_SWEEP,
    STEPS_PER_SETTING,
)
from referee.timed_requests import is_planned, plan
from referee.timing import drop_unfinished_round
from referee.verdict import (
    CORRECT,
    ERROR,
    INTERRUPTED,
    LATE,
    FoundError,
    Verdict,
    outcome,
)

Progress = Callable[..., None]
PACKAGE = Path(__file__).resolve().parent
COMPILER = "torch._inductor.compile_fx"  # takes many seconds to import
LONGEST_DETAILS = 1 << 14  # characters of a traceback


def read_files(paths: list[Path]) -> list[GradedFile]:
    """Read the files that are to be graded, before any of them runs."""
    return [GradedFile(path, path.read_bytes()) for path in paths]


@contextmanager
def referee_at_work(own_builds: bool, compiled: bool = False) -> Iterator[Server]:
    """Yield the server that forks all processes; end all of them afterwards.

    Args:
        own_builds: graded files build extensions in a temporary folder of this run. A killed build
            leaves its lock there, where no other run waits for it.
        compiled: torch.compile's programs will be timed.
    """
    before = torch.get_float32_matmul_precision()
    with processes.reaping(), tempfile.TemporaryDirectory(prefix="referee-") as folder:
        server = Server(folder if own_builds else "", (COMPILER,) if compiled else ())
        # The server takes some seconds to start, which are enough for what a first backward needs.
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
        try:
            yield server
        finally:
            server.close()
            processes.end_orphans()
            torch.set_float32_matmul_precision(before)


class Engine:
    """Grades files on one problem.

    Args:
        problem: what they are graded against.
        server: forks processes.
        options: the conditions.
        progress: is called with what is being done, and how far.
    """

    def __init__(
        self, problem: Problem, server: Server, options: Options, progress: Progress
    ) -> None:
        self.problem = problem
        self._options = options
        self._progress = progress
        self._bench = Bench(problem, server)

    def prepare(self) -> None:
        """Start eager and time it alone, before any solution has started.

        Raises:
            FoundError: eager cannot be timed.
        """
        for setting in self.problem.settings:
            self.problem.setting = setting
            torch.set_float32_matmul_precision(self.problem.precision)
            if not is_planned(self._bench):
                self._progress(f"{self.problem.name}: timing eager alone", setting)
            plan(self._bench)

    def grade(self, file: GradedFile) -> Verdict:
        """Return the verdict on a file, whatever it does.

        An interrupt is raised again when the verdict has its word, as an attribute `verdict`.
        """
        verdict = Verdict(file.path)
        stopped = None
        try:
            self._grade(file, verdict)
        except KeyboardInterrupt as interrupt:  # the rounds so far count
            verdict.word = INTERRUPTED
            stopped = interrupt
        for run in verdict.runs:
            if run.step and not drop_unfinished_round(run.step.forward, run.step.backward):
                run.step = None
        has_times = verdict.word in (CORRECT, INTERRUPTED)
        verdict.runs = [
            run for run in verdict.runs if has_times and drop_unfinished_round(run.timings)
        ]
        if stopped:
            stopped.verdict = verdict
            raise stopped
        return verdict

    def close(self) -> None:
        """End eager's processes."""
        self._bench.close()

    def _grade(self, file: GradedFile, verdict: Verdict) -> None:
        """Grade a file; turn what a step raises into the verdict's word and reason."""
        stage = ["starting"]

        def progress(what: str, detail: str = "") -> None:
            stage[0] = f"{what} {detail}".rstrip()
            self._progress(f"{file.path.name}: {what}", detail)

        grading = None
        try:
            self.prepare()
            grading = Grading(self._bench, file, self._options, verdict, progress)
            self._run_steps(grading)
        except FoundError as found:
            verdict.word, verdict.reason = found.args
        except BadReferenceError as bad:  # for some inputs alone
            verdict.word, verdict.reason = ERROR, str(bad)
        except torch.OutOfMemoryError as error:  # the referee's own
            reason = f"no memory to grade it, while {stage[0]}: {str(error).partition('. ')[0]}"
            verdict.word, verdict.reason = ERROR, reason
        except LateError:
            seconds = f"{self._options.timeout:g} s"
            verdict.word, verdict.reason = LATE, f"{seconds}, while {stage[0]}"
        except (EndedError, ForgedError, RaisedError) as error:
            verdict.word, verdict.reason = outcome(error, stage[0])
            verdict.details = _traceback(error)
        finally:
            if grading:
                verdict.details += grading.solution.printed()
                grading.close()
                processes.end_orphans()

    def _run_steps(self, grading: Grading) -> None:
        """Run the steps that the options ask for, in order."""
        once, per_setting = STEPS_ONCE, STEPS_PER_SETTING
        if self._options.only_times:
            once, per_setting = STEPS_ONCE_OF_A_SWEEP, STEPS_OF_A_SWEEP
        for step in once:
            step(grading)
        for setting in self.problem.settings:
            grading.set_precision(setting)
            for step in per_setting:
                step(grading)


def _traceback(error: Exception) -> str:
    """Return the traceback of an exception that the file's code raised, or "".

    The referee's own frames, from which the file was called, are left out.
    """
    if not isinstance(error, RaisedError):
        return ""
    text = str(error.args[0].get("traceback", ""))[-LONGEST_DETAILS:].rstrip()
    *frames, last = re.split(r'^(?=  File ")', text, flags=re.MULTILINE)
    theirs = [frame for frame in frames if not frame.startswith(f'  File "{PACKAGE}/')]
    return f"{''.join(theirs)}{last}\n" if text else ""
