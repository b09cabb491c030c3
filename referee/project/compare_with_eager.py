"""Compares a project's own solution with eager on the project's problems.

A *quick check* is a comparison that takes a newcomer less than a minute (`Options.is_quick`). On a
GPU it has fewer rounds. On a CPU it compares gradients at small sizes only if parameters are large.
"""

from contextlib import closing
from time import monotonic

from referee import console, records
from referee.contestants.server import Server
from referee.eager_processes import Reserve
from referee.engine import referee_at_work
from referee.program.session import Session
from referee.project.project import Project
from referee.records import Subject
from referee.report import comparison_tables, tables
from referee.verdict import NotCorrectError, Verdict
from referee.words import CORRECT, ERROR


class UnimportableError(Exception):
    """The project's own solution cannot be imported; the message says why."""


class ComparisonWithEager:
    """Grades the project's solution on every subject and prints tables for each.

    Args:
        session: its only file is the project's solution.
        project: the project.
        is_full: whether the user asked for --full.
    """

    def __init__(self, session: Session, project: Project, is_full: bool) -> None:
        self._session = session
        self._project = project
        self._is_full = is_full
        self._records = session.document["records"]

    def run(self) -> bool:
        """Grade the solution; return whether it is correct on all subjects."""
        session = self._session
        start = monotonic()
        try:
            # The solution's own build is kept for the next time, so `separate_builds` is false.
            with referee_at_work(separate_builds=False) as server, closing(Reserve()) as reserve:
                if session.options.is_quick:
                    self._announce_quick_check()
                for index, subject in enumerate(session.subjects):
                    stage = "building the kernels" if index == 0 else "starting"
                    session.show_progress(index, stage)
                    self._grade(subject, server, reserve)
        except UnimportableError as error:
            console.say(f"the solution cannot be imported: {error}")
            return False
        finally:  # after an interrupt, too
            session.progress.clear()
        seconds = monotonic() - start
        documents = self._project.documents
        last_lines = comparison_tables.last_lines(self._records, seconds, self._is_full, documents)
        console.show(f"\n{last_lines}")
        return all(record["verdict"] == CORRECT for record in self._records)

    def _announce_quick_check(self) -> None:
        """Print what the quick check grades and how long that takes."""
        session = self._session
        names = ", ".join(dict.fromkeys(subject.problem for subject in session.subjects))
        seconds = self._project.quick_seconds[session.device.type] * len(session.subjects)
        built = "once the first run has built the kernels (up to a minute)"
        console.say(f"a quick check of {names}: about {seconds} s, {built}; --full times longer")

    def _grade(self, subject: Subject, server: Server, reserve: Reserve) -> None:
        """Grade the solution on a subject.

        Raises:
            UnimportableError: the solution cannot be imported.
        """

        def report(verdict: Verdict) -> None:
            if verdict.word == ERROR and verdict.import_seconds == 0:  # the import has failed
                raise UnimportableError(verdict.reason)
            self._show(subject, verdict)

        session = self._session
        try:
            session.grade(subject, session.options, report, server, reserve)
        except NotCorrectError as error:  # the problem cannot be graded
            self._show(subject, Verdict(session.files[0].path, error.word, error.reason))

    def _show(self, subject: Subject, verdict: Verdict) -> None:
        """Record a verdict and print it in full."""
        is_first = not self._records
        record = records.make_record(subject, verdict, None)
        self._records.append(record)
        headline = self._session.headline_of(subject)
        ready = f"kernels ready in {verdict.import_seconds:.1f} s; " if is_first else ""
        console.show(headline if is_first else f"\n{headline}")
        console.show(f"{ready}{comparison_tables.details(record)}")
        if verdict.details and self._session.is_verbose:
            console.show(tables.indented(verdict.details))
