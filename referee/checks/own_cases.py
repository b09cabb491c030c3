"""The problem's own small cases; some have a module and parameters of their own."""

from referee.checks.forward import check_case
from referee.grading import Grading
from referee.reference.random_values import new_seed


def check_own_cases(grading: Grading) -> None:
    """Compare a forward for each of the problem's own cases."""
    problem = grading.problem
    for case in problem.cases(new_seed()):
        if case.setting != problem.setting:
            grading.set_precision(case.setting)
        if grading.reference.module is None or case.arguments is not None:
            grading.construct(case.arguments, check_first_values=True)
        if case.state == "other":
            grading.reference.redraw_values()
        elif case.state is not None:
            grading.reference.set_values(case.state)
        check_case(grading, case)
    grading.resources.free_results(grading.solution)  # of the last case
