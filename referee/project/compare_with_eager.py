"""Compares a project's own solution with eager on the project's problems.

A *quick check* is a comparison that takes a newcomer less than a minute (`Options.is_quick`). On a
GPU it has fewer rounds. On a CPU it compares gradients at small sizes only if parameters are large.
"""

from contextlib import closing
from time import monotonic

from referee import console, records
from referee.contestants.server import Server
from referee.eager_processes import KeptEagerProcess
from referee.engine import referee_at_work
from referee.program.file_grader import FileGrader
from referee.project.project import Project
from referee.records import Subject
from referee.report import comparison_tables, tables
from referee.verdict import Verdict
from referee.verdict_words import CORRECT, ERROR


class UnimportableError(Exception):
    """The project's own solution cannot be imported; the message says why."""


class ComparisonWithEager:
    """Grades the project's solution on every subject and prints tables for each.

    Args:
        grader: its only file is the project's solution.
        project: the project.
        is_full: whether the user asked for --full.
    """

    def __init__(self, grader: FileGrader, project: Project, is_full: bool) -> None:
        self._grader = grader
        self._project = project
        self._is_full = is_full
        self._records = grader.document["records"]

    def run(self) -> bool:
        """Grade the solution; return whether it is correct on all subjects."""
        grader = self._grader
        start = monotonic()
        try:
            # The solution's own build is kept for the next time, so `separate_builds` is false.
            with (
                referee_at_work(separate_builds=False) as server,
                closing(KeptEagerProcess()) as kept_process,
            ):
                if grader.options.is_quick:
                    self._announce_quick_check()
                for index, subject in enumerate(grader.subjects):
                    stage = "building the kernels" if index == 0 else "starting"
                    grader.show_progress(index, stage)
                    self._grade(subject, server, kept_process)
        except UnimportableError as error:
            console.say(f"the solution cannot be imported: {error}")
            return False
        finally:  # after an interrupt, too
            grader.progress.clear()
        seconds = monotonic() - start
        documents = self._project.documents
        last_lines = comparison_tables.last_lines(self._records, seconds, self._is_full, documents)
        console.show(f"\n{last_lines}")
        return all(record["verdict"] == CORRECT for record in self._records)

    def _announce_quick_check(self) -> None:
        """Print what the quick check grades and how long that takes."""
        grader = self._grader
        names = ", ".join(dict.fromkeys(subject.problem for subject in grader.subjects))
        seconds = self._project.quick_seconds[grader.device.type] * len(grader.subjects)
        built = "once the first run has built the kernels (up to a minute)"
        full = "--full measures for longer"
        console.say(f"a quick check of {names}: about {seconds} s, {built}; {full}")

    def _grade(self, subject: Subject, server: Server, kept_process: KeptEagerProcess) -> None:
        """Grade the solution on a subject.

        Raises:
            UnimportableError: the solution cannot be imported.
        """

        def report(verdict: Verdict) -> None:
            has_started = verdict.has_walls is not None  # else the problem cannot be graded
            if has_started and verdict.word == ERROR and verdict.import_seconds == 0:
                raise UnimportableError(verdict.reason)
            self._show(subject, verdict)

        grader = self._grader
        grader.grade(subject, grader.options, report, server, kept_process)

    def _show(self, subject: Subject, verdict: Verdict) -> None:
        """Record a verdict and print it in full."""
        is_first = not self._records
        record = records.make_record(subject, verdict, None)
        self._records.append(record)
        headline = self._grader.headline_of(subject)
        ready = f"kernels ready in {verdict.import_seconds:.1f} s; " if is_first else ""
        console.show(headline if is_first else f"\n{headline}")
        console.show(f"{ready}{comparison_tables.details(record)}")
        if verdict.details and self._grader.is_verbose:
            console.show(tables.indented(verdict.details))
