"""Grades files on one problem after the other.

Three modules use a `FileGrader`. Each does one kind of work, and prints verdicts in its own way:

    program/grade_files           solutions that the user names, on one problem
    project/compare_with_eager    a project's own solution, on the project's problems
    project/sweep                 a project's own solution, at many sizes
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from referee import console
from referee.contestants.server import Server
from referee.eager_processes import KeptEagerProcess
from referee.engine import Engine
from referee.grading import GradedFile, Options
from referee.message_lines import first_error_line, printable
from referee.records import Subject
from referee.reference.file import BadReferenceError
from referee.reference.problem import Problem
from referee.verdict import Verdict
from referee.verdict_words import ERROR, LEFT_OUT

Report = Callable[[Verdict], None]


@dataclass(frozen=True)
class FileGrader:
    """Grades the files of a command on its problems.

    Attributes:
        files: the files to grade.
        subjects: the problems, dtypes and sizes on which they are graded, in order.
        make_problem: makes the problem of a subject.
        device: where solutions compute.
        options: how files are graded.
        headline: the device and versions, printed above results.
        document: the content of the JSON file; every verdict adds to its "records".
        progress: shows what is done now.
        is_verbose: whether tracebacks and what the files print are shown.
    """

    files: list[GradedFile]
    subjects: list[Subject]
    make_problem: Callable[[Subject, torch.device], Problem]
    device: torch.device
    options: Options
    headline: str
    document: dict
    progress: console.Progress
    is_verbose: bool

    def grade(
        self,
        subject: Subject,
        options: Options,
        report: Report,
        server: Server,
        kept_process: KeptEagerProcess | None = None,
    ) -> None:
        """Grade all files on a subject.

        If it cannot be graded, all files get the verdict that says why.

        Args:
            subject: the problem, dtype and size.
            options: how files are graded on it.
            report: is called with the verdict on each file, as soon as there is one.
            server: forks contestants.
            kept_process: keeps eager's process for the next subject.
        """
        try:
            problem = self.make_problem(subject, self.device)
        except (BadReferenceError, torch.OutOfMemoryError) as error:
            word = LEFT_OUT if options.is_sweep else ERROR
            self._report_for_all(word, first_error_line(str(error)), report)
            return
        engine = Engine(problem, server, options, self.progress, kept_process)
        try:
            if reason := engine.try_to_prepare():  # it times eager alone
                self._report_for_all(ERROR, reason, report)
            else:
                for file in self.files:
                    self._grade_file(file, engine, report)
            engine.keep_eager()  # not after an interrupt, which may have come during a request
        finally:
            engine.close()

    def _report_for_all(self, word: str, reason: str, report: Report) -> None:
        """Report the same verdict on all files."""
        self.progress.clear()
        for file in self.files:
            report(Verdict(file.path, word, reason))

    def _grade_file(self, file: GradedFile, engine: Engine, report: Report) -> None:
        """Grade a file and report the verdict; after an interrupt, report the verdict so far."""
        try:
            verdict = engine.grade(file)
        except KeyboardInterrupt as interrupt:
            # `grade` sets the attribute, unless the interrupt came at its very start or end.
            if hasattr(interrupt, "verdict"):
                self.progress.clear()
                report(interrupt.verdict)
            raise
        self.progress.clear()
        report(verdict)

    def show_progress(self, index: int, stage: str) -> None:
        """Show in the progress line that a stage of a subject begins.

        Args:
            index: the subject's index in `subjects`.
            stage: the stage, "starting" for example.
        """
        position = f" ({index + 1} of {len(self.subjects)})" if len(self.subjects) > 1 else ""
        self.progress(f"{self.subjects[index].problem}{position}: {stage}")

    def headline_of(self, subject: Subject, walls: str = "") -> str:
        """Return the headline of results: problem, device, versions, shape, dtype and any note.

        Args:
            subject: the problem, with its shape and dtype.
            walls: the end of the line: "; no walls" for example.
        """
        note = f"\n{subject.note}" if subject.note else ""
        shape = f"{list(subject.shape)} {subject.dtype}"
        return f"{printable(subject.problem)}: {self.headline}; {shape}{walls}{note}"
