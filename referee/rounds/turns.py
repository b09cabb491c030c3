"""Functions that rounds of forwards and rounds of training steps share.

In a round, all timed calls take turns: the solution's, eager's (twice), the yardsticks and the
empty call. The order is random so that nobody profits from who was timed before.

The memory that the referee shares is written and filled in a round as follows. "Again" means that
the round's values are written once more. The state is parameters and buffers. Only training
steps have gradients of outputs.

                                                                        state of
    when                           function              inputs  gradients  solution   eager
    the round begins               (in the checks)       new     new        new        new
    before each turn, if small     rewrite_small_memory  again              again      again
    the solution has replied       fill_with_nan         NaN                NaN
    its results have been freed    rewrite_inputs        again   again

Then eager's processes map the pages of all this memory again, see `map_eagers_pages`.
"""

import random
from collections.abc import Callable, Iterator
from typing import TypeVar

from referee.call_names import COMPILED, MODULE
from referee.grading import Grading
from referee.rounds.timed_requests import TimedCall
from referee.times.round_limit import run_rounds

Samples = TypeVar("Samples")  # the timed calls' samples of one round, by their names
# Inputs of at most this many bytes are written before every request, so that all processes find the
# same part of them in the caches. Larger inputs are written once a round. The same limit applies to
# parameters.
CACHED_BYTES = 1 << 26


def timed_calls_of(grading: Grading, yardsticks: list[str]) -> list[TimedCall]:
    """Return the solution, eager, the control, and the yardsticks.

    On a CPU eager has two processes, and the second one is the control. On a GPU there is one
    process, which is timed twice.
    """
    names, eager = grading.problem.names, grading.resources.eager.members
    first, last = eager[0].contestant, eager[-1].contestant
    timed_calls = [
        TimedCall(names.solution, grading.solution, MODULE),
        TimedCall(names.eager, first, MODULE),
        TimedCall(names.control, last, MODULE),
    ]
    return timed_calls + [TimedCall(name, first, name) for name in yardsticks]


def in_random_order(timed_calls: list[TimedCall]) -> list[TimedCall]:
    """Return the timed calls in the order of their turns."""
    return random.SystemRandom().sample(timed_calls, len(timed_calls))


def timed_rounds(
    grading: Grading, run_round: Callable[[], Samples], name: str
) -> Iterator[Samples]:
    """Run the warm-up and the timed rounds; yield what each timed round returns.

    Args:
        grading: the file under grading.
        run_round: runs one round.
        name: what is timed, for the progress line: "the forward".
    """
    setting = grading.problem.setting
    return run_rounds(
        run_round,
        grading.options.round_limit,
        grading.device,
        f"{name} at {setting}" if setting else name,
        grading.progress,
    )


def only_compiled(yardsticks: list[str]) -> list[str]:
    """Return the yardsticks that training steps have, too: only torch.compile's program."""
    return [name for name in yardsticks if name == COMPILED]


def write_state_for_all(grading: Grading) -> None:
    """Write the reference's parameters and buffers for the solution and for eager."""
    values = grading.reference.values()
    grading.state.write(values)
    for process in grading.resources.eager.members:
        process.state.write(values)


def fill_with_nan(grading: Grading, call_count: int) -> None:
    """Fill inputs and the solution's parameters with NaN, before its results are read.

    `rewrite_inputs` restores the inputs for those who take their turns later. The parameters need
    not be restored: only the solution uses them, and the next round or check writes new ones.

    A result must not be in their memory. `checks.returned_results` sees that by the result's
    address, but not if the process has mapped the memory a second time. Such a result is then NaN,
    and so wrong. Nothing is filled if the reference itself returns such memory.

    Args:
        grading: the file under grading.
        call_count: how many calls the request had.
    """
    if grading.problem.may_share_memory:
        return
    for region in grading.resources.memory.inputs[:call_count]:
        region.fill_with_nan()
    grading.state.fill_with_nan()


def rewrite_inputs(grading: Grading) -> None:
    """Write inputs and outputs' gradients again after the solution's turn.

    `fill_with_nan` has filled the inputs. Outputs' gradients may have changed after the
    comparison, when the solution's results were freed: their finalizers run its code.
    """
    memory = grading.resources.memory
    for region in (*memory.inputs, *memory.output_gradients):
        region.rewrite()


def map_eagers_pages(grading: Grading) -> None:
    """Have eager's processes map the shared memory again, after the solution's turn.

    The solution can remove pages of that memory. After `rewrite_inputs`, or if it writes eager's
    parameters again itself, all values are right, but in new pages: each costs a page fault when
    eager touches it first. Without this, a copy of eager with 48 MiB of parameters was 1.4 times as
    fast as eager. It is not done on a GPU, whose memory a solution cannot remove, and not for the
    solution, which would compute ahead in such a request.
    """
    if grading.device.type != "cpu":
        return
    memory = grading.resources.memory
    regions = [region.location for region in (*memory.inputs, *memory.output_gradients)]
    for process in grading.resources.eager.members:
        locations = [location for location in (*regions, process.state.location) if location]
        process.contestant.ask("map_pages", locations=locations)


def rewrite_small_memory(grading: Grading) -> None:
    """Write small inputs and parameters again so that all processes find them in the caches.

    Buffers that the previous forward has changed are thereby restored, too.
    """
    problem = grading.problem
    if problem.input_bytes <= CACHED_BYTES:
        for region in grading.resources.memory.inputs:
            region.rewrite()
    if problem.parameter_bytes <= CACHED_BYTES:
        grading.state.rewrite()
        for process in grading.resources.eager.members:
            process.state.rewrite()
