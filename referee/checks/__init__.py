"""The checks of a grading, in order.

A check is a function that takes a `Grading`. It has the solution's process do something, and raises
`NotCorrectError` as soon as something is wrong. The two checks whose names begin with `time` also
time the calls whose results they compare. Each of the tuples below lists checks in the order in
which they are made.

To add a check, write such a function in a new file of this folder and name it in a tuple. A check
that calls the module comes after `check_values`, which constructs it. "Where would I add a check?"
in INTERNALS.md has the other steps.

The other files of this folder have the functions that several checks use:

    forward             one forward beside the reference's
    solution_step       gradients for a training step; its results and gradients
    returned_results    the form, the memory and the values of results
    separate_results    whether two results of a call share memory
    copied_results      copies of results, where they cannot be read in place
    turn_memory         the shared memory in a round, which each contestant finds unchanged
    intact              whether inputs, parameters and gradients of outputs are what was written
    diagnosis           what a wrong result is: zeros, a copy, an earlier result
"""

from referee.checks.buffers import check_buffers
from referee.checks.gradients import check_gradients, check_own_gradients
from referee.checks.import_file import import_file
from referee.checks.other_gradients import check_other_gradients
from referee.checks.other_inputs import check_other_inputs
from referee.checks.own_cases import check_own_cases
from referee.checks.step_memory import check_step_memory
from referee.checks.timed_forwards import time_forwards
from referee.checks.timed_training_steps import time_training_steps
from referee.checks.values import check_values

# Made once for each file.
CHECKS_ONCE = (
    import_file,  # the file is executed and must define the solution's class
    check_own_cases,  # small inputs of the problem's own: shapes, layouts, special values
    check_own_gradients,  # gradients for other small inputs of the problem's own
)
# Made for each precision setting of the problem; most problems have one.
CHECKS_PER_SETTING = (
    check_values,  # whole results at the timed size, for several inputs and parameters
    check_buffers,  # buffers that the reference's forward changes
    check_other_inputs,  # inputs that get_inputs would not draw
    time_forwards,  # forwards beside eager's; inputs and parameters are new, results are compared
    check_gradients,  # gradients of inputs and parameters
    check_other_gradients,  # gradients for inputs that get_inputs would not draw
    check_step_memory,  # a later step overwrites no result or gradient
    time_training_steps,  # training steps beside eager's, if the gradients were right
)
# A sweep makes these instead, at each size.
SWEEP_CHECKS_ONCE = (import_file,)
SWEEP_CHECKS_PER_SETTING = (check_values, time_forwards)
