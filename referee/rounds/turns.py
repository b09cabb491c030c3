"""Functions that rounds of forwards and rounds of training steps share.

In a round, all timed calls take turns: the solution's, eager's (twice), the yardsticks and the
empty call. The order is random so that nobody profits from who was timed before.
"""

import random
from collections.abc import Callable, Iterator
from typing import TypeVar

from referee.call_names import COMPILED, MODULE
from referee.grading import Grading
from referee.rounds.timed_requests import TimedCall
from referee.times.round_limit import run_rounds

Samples = TypeVar("Samples")  # the timed calls' samples of one round, by their names


def timed_calls_of(grading: Grading, yardsticks: list[str]) -> list[TimedCall]:
    """Return the solution, eager, the control, and the yardsticks.

    On a CPU eager has two processes, and the second one is the control. On a GPU there is one
    process, which is timed twice.
    """
    names, eager = grading.problem.names, grading.resources.eager.members
    first, last = eager[0], eager[-1]
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
