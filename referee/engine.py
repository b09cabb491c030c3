"""Grades files on a problem: makes the checks and turns what they raise into verdicts.

Use it like this:

    with referee_at_work(separate_builds=True) as server:
        engine = Engine(problem, server, options, progress)
        engine.prepare()                  # times eager alone; `grade` would do so, too
        verdict = engine.grade(file)      # for each file
        engine.close()

The checks themselves are functions in `referee/checks`.
"""

import importlib
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from referee.checks import (
    CHECKS_ONCE,
    CHECKS_PER_SETTING,
    SWEEP_CHECKS_ONCE,
    SWEEP_CHECKS_PER_SETTING,
)
from referee.contestants import processes
from referee.contestants.errors import EndedError, ForgedError, RaisedError, TimeLimitError
from referee.contestants.server import Server
from referee.eager_processes import KeptEagerProcess
from referee.grading import GradedFile, Grading, Options
from referee.message_lines import first_error_line
from referee.reference.file import BadReferenceError
from referee.reference.problem import Problem
from referee.resources import Resources
from referee.rounds.timed_requests import make_plan
from referee.times.timings import drop_unfinished_round
from referee.verdict import NotCorrectError, Verdict, outcome
from referee.verdict_words import CORRECT, ERROR, INTERRUPTED, TIME_LIMIT

ShowProgress = Callable[..., None]  # see `console.Progress`
PACKAGE = Path(__file__).resolve().parent
MAX_TRACEBACK_CHARACTERS = 1 << 14


def read_files(paths: list[Path]) -> list[GradedFile]:
    """Read the files to grade. Call this before any of them runs: it could change the others."""
    return [GradedFile(path, path.read_bytes()) for path in paths]


@contextmanager
def referee_at_work(separate_builds: bool) -> Iterator[Server]:
    """Start the server that forks contestants; end all processes after the `with` block.

    Torch's precision of float32 products is restored afterwards.

    Args:
        separate_builds: whether graded files build extensions in temporary folders, see
            `Server.builds_folder`.
    """
    precision_before = torch.get_float32_matmul_precision()
    with processes.subreaper(), tempfile.TemporaryDirectory(prefix="referee-") as folder:
        server = Server(folder if separate_builds else "")
        try:
            # The first backward needs this module. Imported here, while the server starts for some
            # seconds, it costs no time.
            importlib.import_module("torch.fx.experimental.symbolic_shapes")
            yield server
        finally:
            server.close()
            processes.end_orphans()
            torch.set_float32_matmul_precision(precision_before)


class Engine:
    """Grades files on one problem.

    Args:
        problem: the reference and all that is known of it.
        server: forks contestants.
        options: how files are graded.
        progress: is called with two texts: what is done now, and a detail, such as how far it is.
        kept_process: eager's process of an earlier problem, see `EagerProcesses`.

    `problem` is an attribute, too.
    """

    def __init__(
        self,
        problem: Problem,
        server: Server,
        options: Options,
        progress: ShowProgress,
        kept_process: KeptEagerProcess | None = None,
    ) -> None:
        self.problem = problem
        self._options = options
        self._progress = progress
        self._resources = Resources(problem, server, kept_process)

    def prepare(self) -> None:
        """Check the system, and time eager alone, before any solution has started.

        For each precision setting, these times make a `Plan`, by which the checks time a solution.
        Later calls time nothing.

        Raises:
            NotCorrectError: the system cannot be used, or eager cannot be timed.
            BadReferenceError, torch.OutOfMemoryError: the reference fails.
        """
        self._resources.check_system()
        self._resources.try_walls()
        for setting in self.problem.settings:
            self.problem.setting = setting
            torch.set_float32_matmul_precision(self.problem.precision)
            if setting not in self._resources.plans:
                self._progress(f"{self.problem.name}: timing eager alone", setting)
                self._resources.plans[setting] = make_plan(self._resources)

    def try_to_prepare(self) -> str | None:
        """Call `prepare`; return the reason if the problem cannot be prepared, else None."""
        try:
            self.prepare()
        except NotCorrectError as error:
            return first_error_line(error.reason)
        except (BadReferenceError, torch.OutOfMemoryError) as error:
            return first_error_line(str(error))
        return None

    def grade(self, file: GradedFile) -> Verdict:
        """Return the verdict on a file. No exception of the file's code leaves this method.

        Raises:
            KeyboardInterrupt: the user has interrupted. Its attribute `verdict` is the verdict so
                far, with the times of all finished rounds.
        """
        verdict = Verdict(file.path)
        try:
            self._grade(file, verdict)
        except KeyboardInterrupt as interrupt:
            verdict.word = INTERRUPTED
            _drop_unfinished_times(verdict)
            interrupt.verdict = verdict
            raise
        _drop_unfinished_times(verdict)
        return verdict

    def keep_eager(self) -> None:
        """Keep eager's process for the next problem. It must have answered all requests."""
        self._resources.eager.keep()

    def close(self) -> None:
        """End eager's processes and free the shared memory."""
        self._resources.close()

    def _grade(self, file: GradedFile, verdict: Verdict) -> None:
        """Grade a file; turn what a check raises into the verdict's word and reason."""
        stage = _Stage(file.path.name, self._progress)
        grading = None
        try:
            self.prepare()
            grading = Grading(self._resources, file, self._options, verdict, stage.enter)
            self._make_checks(grading)
        except NotCorrectError as error:
            verdict.word, verdict.reason = error.word, error.reason
        except BadReferenceError as error:  # the reference fails for some inputs
            verdict.word, verdict.reason = ERROR, str(error)
        except torch.OutOfMemoryError as error:  # in the referee's process, not the solution's
            reason = f"no memory to grade it, while {stage.text}: {str(error).partition('. ')[0]}"
            verdict.word, verdict.reason = ERROR, reason
        except TimeLimitError:
            seconds = f"{self._options.timeout:g} s"
            verdict.word, verdict.reason = TIME_LIMIT, f"{seconds}, while {stage.text}"
        except (EndedError, ForgedError, RaisedError) as error:
            verdict.word, verdict.reason = outcome(error, stage.text)
            verdict.details = _traceback(error)
            verdict.has_traceback = bool(verdict.details)
        finally:
            if grading:
                verdict.details += grading.solution.printed()
                grading.close()
                processes.end_orphans()

    def _make_checks(self, grading: Grading) -> None:
        """Make the checks of a grading or of a sweep, in order."""
        if self._options.is_sweep:
            checks_once, checks_per_setting = SWEEP_CHECKS_ONCE, SWEEP_CHECKS_PER_SETTING
        else:
            checks_once, checks_per_setting = CHECKS_ONCE, CHECKS_PER_SETTING
        for check in checks_once:
            check(grading)
        for setting in self.problem.settings:
            grading.set_precision(setting)
            for check in checks_per_setting:
                check(grading)


class _Stage:
    """Keeps what a grading does now, for the progress line and for reasons.

    Args:
        name: the file's name, for the progress line.
        progress: shows a line.

    Attributes:
        text: the stage in words, for a reason: "while {text}".
    """

    def __init__(self, name: str, progress: ShowProgress) -> None:
        self.text = "starting"
        self._name = name
        self._progress = progress

    def enter(self, what: str, detail: str = "", how_far: str = "") -> None:
        """Show what the grading does from now on; remember it without how far it is."""
        self.text = f"{what} {detail}".rstrip()
        self._progress(f"{self._name}: {what}", f"{detail} {how_far}".strip())


def _drop_unfinished_times(verdict: Verdict) -> None:
    """Drop unfinished rounds, which an interrupt leaves, and all times of a file that is wrong."""
    kept = []
    for times in verdict.times:
        steps = times.steps
        if steps and drop_unfinished_round(steps.forward, steps.backward) == 0:
            times.steps = None
        rounds_left = drop_unfinished_round(times.forwards)
        if rounds_left > 0:
            kept.append(times)
    may_have_times = verdict.word in (CORRECT, INTERRUPTED)
    verdict.times = kept if may_have_times else []


def _traceback(error: Exception) -> str:
    """Return the traceback of an exception that the file's code raised; "" if there is none.

    The frames of the referee's own functions, which called the file's code, are left out. The last
    part of the text, a frame and the exception, always stays. Example:

        Traceback (most recent call last):
          File "/.../referee/child/main.py", line 90, in _answer_all
            reply = ...
          File "solution.py", line 7, in forward
            raise ValueError("no")
        ValueError: no

    Its parts are the first line, the referee's frame (dropped), and the rest.
    """
    if not isinstance(error, RaisedError):
        return ""
    text = str(error.args[0].get("traceback", ""))[-MAX_TRACEBACK_CHARACTERS:].rstrip()
    if not text:
        return ""
    *parts, last_part = re.split(r'^(?=  File ")', text, flags=re.MULTILINE)
    kept_parts = [part for part in parts if not part.startswith(f'  File "{PACKAGE}/')]
    return f"{''.join(kept_parts)}{last_part}\n"
