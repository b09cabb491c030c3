"""The import of the solution's file, which must define the solution's class."""

from referee.grading import Grading


def import_file(grading: Grading) -> None:
    """Have the solution's process import the file; keep how long that took."""
    grading.verdict.import_seconds = grading.import_file()
