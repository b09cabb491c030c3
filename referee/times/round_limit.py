"""How many rounds are timed, and the loop that runs them."""

import math
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import NamedTuple

import torch

WARM_UP_ROUNDS = {"cpu": 1, "cuda": 2}  # before the timed ones
MAX_ROUNDS = {"cpu": 50, "cuda": 10}  # timed rounds, unless a number is asked for
# On a CPU, rounds of forwards are timed for this many seconds, and rounds of steps for as many.
CPU_SECONDS = 2.5
FULL_CPU_SECONDS = 16.0  # with --full
MIN_CPU_ROUNDS = 4  # even if they take longer: an interval of fewer rounds says little


class RoundLimit(NamedTuple):
    """How many rounds are timed: a number, or as many as a time allows.

    Attributes:
        trials: the number of rounds; None for as many as MAX_ROUNDS, or as fit in `cpu_seconds`.
        cpu_seconds: how long all rounds may take on a CPU; it is ignored if `trials` is a number.
    """

    trials: int | None = None
    cpu_seconds: float = CPU_SECONDS


def run_rounds(
    run_round: Callable,
    limit: RoundLimit,
    device: torch.device,
    name: str,
    progress: Callable[..., None],
) -> Iterator:
    """Run the warm-up and then the timed rounds; yield what each timed round returns.

    Args:
        run_round: runs a round.
        limit: how many rounds are timed.
        device: the device on which solutions compute.
        name: the name of the timed calls in the progress line: "the forward".
        progress: shows the progress line: its arguments are what is done and `how_far`.
    """
    warm_up = WARM_UP_ROUNDS[device.type]
    for done in range(warm_up):
        progress(f"warming up {name}", how_far=f"{done + 1} of {warm_up} rounds")
        run_round()
    most_rounds = MAX_ROUNDS[device.type]
    most_seconds = math.inf
    if limit.trials:
        most_rounds = limit.trials
    elif device.type == "cpu":
        most_seconds = limit.cpu_seconds
    start = perf_counter()
    for done in range(most_rounds):
        passed = perf_counter() - start
        if done >= MIN_CPU_ROUNDS and passed >= most_seconds:
            return
        how_far = f"round {done + 1}{_time_left(done, passed, most_rounds, most_seconds)}"
        progress(f"timing {name}", how_far=how_far)
        yield run_round()


def _time_left(done: int, passed: float, most_rounds: int, most_seconds: float) -> str:
    """Return the number of rounds and the seconds left, for the progress line: " of 50, 3 s left".

    Args:
        done: how many rounds are done.
        passed: the seconds that they took.
        most_rounds: how many rounds there are at most.
        most_seconds: the seconds after which no further round begins, or inf.
    """
    total = f" of {most_rounds}" if most_seconds == math.inf else ""
    if not done:
        return total
    seconds_of_round = passed / done
    seconds_of_rounds = seconds_of_round * (most_rounds - done)
    seconds_to_limit = max(most_seconds - passed, seconds_of_round)
    return f"{total}, {min(seconds_of_rounds, seconds_to_limit):.0f} s left"
