"""Grades any file that defines `ModelNew`: in a process of its own, judged from this one.

References, random numbers and verdicts are here, where the solution cannot reach them; eager is
timed in further processes. A verdict of `cheating` names what an honest program does not do by
accident; all else that is not right is `wrong`.

`grade` goes from files to verdicts. `judge` is the course of a grading, `rows` that of this
project's problems, `relu` and `linear` what each asks and how it compares. `reference` is the
course for a reference file, of which `oracle` knows what is right, and `budget` how nearly.
"""

from referee.solutions.grade import JUDGES, grade_files
from referee.solutions.oracle import Oracle
from referee.solutions.verdict import CHEATING, CORRECT, WRONG, Task, Verdict

__all__ = [
    "BUFFERS",
    "CHEATING",
    "CORRECT",
    "JUDGES",
    "WRONG",
    "Oracle",
    "Task",
    "Verdict",
    "grade_files",
]

BUFFERS = {"cpu": 9, "cuda": 10}  # of the input's size that all processes together hold
