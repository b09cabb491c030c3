"""Grades the solutions that the user names on one problem, and prints a line on each."""

from referee import console, records
from referee.engine import referee_at_work
from referee.program.file_grader import FileGrader
from referee.report import graded_files, tables
from referee.verdict import Verdict
from referee.verdict_words import CORRECT


def grade_files(grader: FileGrader) -> bool:
    """Grade all files on the only subject; return whether all of them are correct.

    Each verdict is printed when it comes; a ranking of several files comes last.
    """
    [subject] = grader.subjects
    all_records = grader.document["records"]

    def report(verdict: Verdict) -> None:
        record = records.make_record(subject, verdict, str(verdict.file))
        if not all_records:
            walls = tables.walls_in_words(verdict.has_walls)
            console.show(grader.headline_of(subject, walls))
        all_records.append(record)
        console.show(graded_files.describe(record))
        _show_details(verdict, grader.is_verbose)

    try:
        with referee_at_work(separate_builds=True) as server:
            grader.show_progress(0, "starting")
            grader.grade(subject, grader.options, report, server)
    finally:  # after an interrupt, too
        grader.progress.clear()
        if len(all_records) > 1:
            console.show(f"\n{graded_files.ranking(all_records)}")
        for explanation in tables.explain_noise(tables.words_of_lines(all_records)):
            console.show(explanation)
    return all(record["verdict"] == CORRECT for record in all_records)


def _show_details(verdict: Verdict, is_verbose: bool) -> None:
    """Print a file's traceback and what it printed, or how to see them."""
    if not verdict.details:
        return
    if is_verbose:
        console.show(tables.indented(verdict.details))
        return
    traceback = "its traceback and " if verdict.has_traceback else ""
    console.say(f"{verdict.file}: --verbose shows {traceback}what it printed")
