"""The course of a grading: from the import to the times."""

from pathlib import Path
from time import monotonic, sleep

from referee.error_line import LONGEST_LINE
from referee.judge.checks import LATENESS
from referee.judge.feeding import name_source
from referee.judge.timed import BUSY, Timed
from referee.judge.verdict import CHEATING, FoundError
from referee.processes import busy_seconds
from referee.remote import RaisedError

SETTLING = 15.0  # s, within which an honest program's helpers have started up


class Judge(Timed):
    """What the courses of all problems have in common.

    Attributes:
        library: the reference's operators, and whether only all of them together tell of it.
    """

    library: tuple[list[str], bool]

    def grade(self, file: Path | None) -> None:
        """The whole course.

        Args:
            file: None for one that the process has imported.

        Raises:
            FoundError: as soon as something is not right.
        """
        name_source(self.process, self.task)
        if file:
            self.progress("importing")
            loaded = self.remote.ask("load", path=str(file.resolve()), problem=self.task.name)
            self.verdict.import_seconds = float(loaded["seconds"])
            self.check_changes()
        if not self.task.only_times:
            self.check_small()
            self.check_changes()
            self.check_library()
            self.check_background()
        self.check_and_time()
        self.check_changes()

    def check_small(self) -> None:
        """Everything but the timed size."""
        raise NotImplementedError

    def check_and_time(self) -> None:
        """The timed size, and the backward."""
        raise NotImplementedError

    def check_changes(self) -> None:
        """Functions, settings and names of the referee that the solution changed."""
        if found := self.baselines.disturbed():
            raise FoundError(CHEATING, found)
        changed = self.remote.ask("changes")["changed"]
        if changed:
            raise FoundError(CHEATING, f"changed {', '.join(map(str, changed))}"[:LONGEST_LINE])

    def check_library(self) -> None:
        """Whether it swallowed an exception and then called the library's function."""
        ops, all_of_them = self.library
        try:
            found = self.remote.ask("library", ops=ops, all_of_them=all_of_them)
        except RaisedError:  # a mode that looks on is no part of the problem
            return
        library, swallowed = found["library"], found["swallowed"]
        if not library:
            return
        called = "the reference's own operators" if all_of_them else library[0]
        if swallowed:
            reason = f"falls back on {called} after {swallowed[0]}"
            raise FoundError(CHEATING, reason[:LONGEST_LINE])
        self.verdict.notes.append(f"calls {called}")

    def check_background(self) -> None:
        """Whether it computes while nothing is asked of it."""
        self.progress("waiting until it rests")
        until = monotonic() + SETTLING
        while True:
            before, start = busy_seconds(self.spared), monotonic()
            sleep(LATENESS)
            share = (busy_seconds(self.spared) - before) / (monotonic() - start)
            if share < BUSY:
                return
            if monotonic() > until:
                reason = f"background work: {share:.0%} of a CPU while it should rest"
                raise FoundError(CHEATING, reason)
