"""Small inputs that the problem knows, each with a module and parameters of its own if need be."""

import random

from referee.forward import check
from referee.grading import Grading
from referee.problem import SEEDS


def check_own_cases(grading: Grading) -> None:
    """Compare a forward for each of the problem's own cases."""
    problem = grading.problem
    for case in problem.cases(random.randrange(SEEDS)):
        if case.setting != problem.setting:
            grading.set_precision(case.setting)
        if grading.module is None or case.arguments is not None:
            grading.construct(case.arguments, compare=True)
        if case.state == "other":
            grading.new_state()
        elif case.state is not None:
            grading.set_state(case.state)
        check(grading, case)
    grading.relative, grading.is_equal = 0.0, True
