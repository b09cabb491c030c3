"""The steps of a grading, in order.

Each step is a function in a file of this folder. It takes a `Grading`, asks the solution's process
for something, compares the answer with the reference's, and raises `NotCorrectError` as soon as
something is wrong. To add a check, write such a function and name it in one of the lists. A check
that calls the module comes after `check_values`, which constructs it.
"""

from referee.steps.gradients import check_gradients, check_own_gradients
from referee.steps.import_file import import_file
from referee.steps.other_inputs import check_other_inputs
from referee.steps.own_cases import check_own_cases
from referee.steps.timed_forwards import time_forwards
from referee.steps.timed_training_steps import time_training_steps
from referee.steps.values import check_values

STEPS_ONCE = (
    import_file,  # the file is executed and must define the solution's class
    check_own_cases,  # small inputs of the problem's own: shapes, layouts, special values
    check_own_gradients,  # gradients for other small inputs of the problem's own
)
# These steps are done for each precision setting of the problem; most problems have one.
STEPS_PER_SETTING = (
    check_values,  # whole results at the timed size, for several inputs and parameters
    check_other_inputs,  # inputs that get_inputs would not draw
    time_forwards,  # beside eager; inputs and parameters are new, and all results compared
    check_gradients,  # gradients of inputs and parameters
    time_training_steps,  # a forward and its backward, likewise, if the gradients were right
)
# The steps of a sweep, at each size.
STEPS_ONCE_OF_A_SWEEP = (import_file,)
STEPS_OF_A_SWEEP = (check_values, time_forwards)
