"""The shared memory in a round: each contestant finds the round's values there in its turn.

"What is written and compared in a round?" in PROTECTION.md has a table of it, and names what holds
for buffers alone. In quotes are the table's rows:

    write_inputs(...)                       "a round begins"
    write_state_for_all(...)
    for each timed call:
        with turn(...):                     "any process's turn begins"
            the contestant is asked
            if it is the solution:
                with reading_results(...):  "the solution has replied"
                    results are compared    "while its results are compared"
                                            "the solution's results are freed"
                                            "the solution's turn ends"
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from referee.checks.copied_results import check_copies_stay
from referee.checks.intact import check_eager_intact, check_intact
from referee.contestants.contestant import Contestant
from referee.grading import Grading

# If the inputs of one call have at most this many bytes, those of all calls of the request are
# written before every turn, so that all processes find the same part of them in the caches. Larger
# inputs are written when a round begins and when the solution's turn ends. The same limit applies
# to the parameters and buffers of one contestant.
CACHED_BYTES = 1 << 26


def write_state_for_all(grading: Grading) -> None:
    """Write the reference's parameters and buffers for the solution and for eager."""
    values = grading.reference.values()
    grading.state.write(values)
    for process in grading.resources.eager.members:
        process.state.write(values)


@contextmanager
def turn(
    grading: Grading, contestant: Contestant, free_results: Callable[[Contestant], object]
) -> Iterator[None]:
    """Make a `with` block the turn of a contestant.

    The block asks the contestant, and compares its results. Afterwards they are freed, and all that
    the solution or the comparison has changed, but for eager's buffers, gets the round's values
    again. If the block raises, nothing is restored: each check writes what its own requests need.

    Args:
        grading: the file under grading.
        contestant: whose turn it is.
        free_results: has the contestant free its results.
    """
    _rewrite_small_memory(grading)
    yield
    free_results(contestant)
    if contestant is grading.solution:
        # Not earlier: when the results are freed, their finalizers run the solution's code.
        check_eager_intact(grading)
        _rewrite_solutions_memory(grading)
        _map_eagers_pages(grading)


@contextmanager
def reading_results(
    grading: Grading, case_name: str, call_count: int, with_gradients: bool = False
) -> Iterator[None]:
    """Check the solution's inputs and parameters; fill them with NaN while a block reads results.

    A result must not be in their memory. `check_new_memory` sees that by the result's address, but
    not if the process has mapped the memory a second time. Such a result is then NaN, and so wrong.
    Nothing is filled if the reference itself returns such memory. `turn` restores the values.

    Args:
        grading: the file under grading.
        case_name: the case in messages.
        call_count: how many calls the request had.
        with_gradients: whether gradients of outputs were written.

    Raises:
        NotCorrectError: the solution has changed inputs or parameters, or its copied results change
            with them.
    """
    check_intact(grading, case_name, call_count, with_gradients)
    if not grading.problem.may_share_memory:
        for region in grading.resources.memory.inputs[:call_count]:
            region.fill_with_nan()
        grading.state.fill_with_nan()
    yield
    check_copies_stay(grading, case_name, call_count)


def _rewrite_small_memory(grading: Grading) -> None:
    """Write small inputs, parameters and buffers again: all processes find them in the caches.

    This also restores small buffers that eager's previous forward has changed.
    """
    problem = grading.problem
    if problem.input_bytes <= CACHED_BYTES:
        for region in grading.resources.memory.inputs:
            region.rewrite()
    if problem.parameter_bytes <= CACHED_BYTES:
        grading.state.rewrite()
        for process in grading.resources.eager.members:
            process.state.rewrite()


def _rewrite_solutions_memory(grading: Grading) -> None:
    """Write inputs, gradients of outputs and the solution's parameters and buffers again."""
    grading.state.rewrite()
    memory = grading.resources.memory
    for region in (*memory.inputs, *memory.output_gradients):
        region.rewrite()


def _map_eagers_pages(grading: Grading) -> None:
    """Have eager's processes map the shared memory again, after the solution's turn.

    The solution can remove pages of that memory. When the values are written again, or if it writes
    eager's parameters again itself, all values are right, but in new pages: each costs a page fault
    when eager touches it first. Without this, a copy of eager with 48 MiB of parameters was 1.4
    times as fast as eager. It is not done on a GPU, whose memory a solution cannot remove, and not
    for the solution, which would compute ahead in such a request.
    """
    if grading.device.type != "cpu":
        return
    memory = grading.resources.memory
    regions = [region.location for region in (*memory.inputs, *memory.output_gradients)]
    for process in grading.resources.eager.members:
        locations = [location for location in (*regions, process.state.location) if location]
        process.ask("map_pages", locations=locations)
