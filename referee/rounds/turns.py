"""Functions that rounds of forwards and rounds of training steps share.

In a round, all timed calls take turns: the solution's, eager's (twice), the yardsticks and the
empty call. The order is random so that nobody profits from who was timed before.
"""

import random
from collections.abc import Callable, Iterator
from statistics import median
from typing import TypeVar

from referee.grading import Grading
from referee.names import COMPILED, MODULE
from referee.rounds.timed_requests import TimedCall
from referee.times import timing
from referee.times.timing import Names
from referee.times.two_clocks import Overhead, Sample, measure_overhead
from referee.verdict import compare_times
from referee.words import FASTER

Round = TypeVar("Round")  # what a function that runs one round returns
# Inputs of at most so many bytes are written before every request, so that all processes find the
# same part of them in the caches. Larger inputs are written once a round. The same limit applies to
# parameters.
CACHED_BYTES = 1 << 26
CHANGES_LATE = (
    "result is not complete when its clock stops; finish all streams and threads before returning"
)
FALSE_CLOCK = "its clock is false: the referee's counts"
# A clock that can hide less than this part of a call's time is not mentioned.
HIDDEN_PART = 0.1
UNCONFIRMED = "only its own clock says that it is faster: the calls are too short for the referee's"


class RoundSamples:
    """The samples that all timed calls have in the rounds so far.

    Args:
        names: the names of the solution, of eager and of eager again.
        timed_calls: all but the empty call.

    Attributes:
        by_name: each timed call's samples in the timed rounds.
        empties: samples of empty requests; those before the timed rounds count, too.
    """

    def __init__(self, names: Names, timed_calls: list[TimedCall]) -> None:
        self._names = names
        self.by_name: dict[str, list[Sample]] = {timed_call.name: [] for timed_call in timed_calls}
        self.empties: list[Sample] = []

    def add(self, samples: dict[str, Sample]) -> None:
        """Add the samples of a timed round, by the timed calls' names."""
        for name, sample in samples.items():
            self.by_name[name].append(sample)

    def overhead(self) -> Overhead:
        """Return the overhead of a request, as eager's and the empty requests tell it."""
        eagers = self.by_name[self._names.eager] + self.by_name[self._names.control]
        return measure_overhead(self.empties, eagers)


def timed_calls_of(grading: Grading, yardsticks: list[str]) -> list[TimedCall]:
    """Return the solution, eager, eager again, and the yardsticks."""
    names, eager = grading.problem.names, grading.bench.eager
    first, last = eager[0].contestant, eager[-1].contestant
    timed_calls = [
        TimedCall(names.solution, grading.solution, MODULE),
        TimedCall(names.eager, first, MODULE),
        TimedCall(names.control, last, MODULE),
    ]
    return timed_calls + [TimedCall(name, first, name) for name in yardsticks]


def in_random_order(timed_calls: list[TimedCall]) -> list[TimedCall]:
    """Return the timed calls in the order of their turns."""
    return random.sample(timed_calls, len(timed_calls))


def timed_rounds(grading: Grading, run: Callable[[], Round], name: str) -> Iterator[Round]:
    """Run the warm-up and the timed rounds; yield what each timed round returns.

    Args:
        grading: the file under grading.
        run: runs one round.
        name: what is timed, for the progress line: "the forward".
    """
    setting = grading.problem.setting
    return timing.run_rounds(
        run,
        grading.options.rounds,
        grading.device,
        f"{name} at {setting}" if setting else name,
        grading.progress,
    )


def only_compiled(yardsticks: list[str]) -> list[str]:
    """Return the yardsticks that training steps have, too: torch.compile's program alone."""
    return [name for name in yardsticks if name == COMPILED]


def write_state_for_all(grading: Grading) -> None:
    """Write the reference's parameters and buffers for the solution and for eager."""
    values = list(grading.module.state_dict().values())
    grading.state.write(values)
    for eager in grading.bench.eager:
        eager.state.write(values)


def rewrite_small_memory(grading: Grading) -> None:
    """Write small inputs and parameters again so that all processes find them in the caches.

    That also restores the buffers that the forward before has changed.
    """
    problem = grading.problem
    if problem.input_bytes <= CACHED_BYTES:
        for region in grading.bench.inputs:
            region.rewrite()
    if problem.parameter_bytes <= CACHED_BYTES:
        grading.state.rewrite()
        for eager in grading.bench.eager:
            eager.state.rewrite()


def note_clock(grading: Grading, samples: RoundSamples) -> None:
    """Add a note if the solution's clock is false or if that clock alone says "faster"."""
    note = _clock_note(grading.problem.names, grading.device.type, samples)
    if note and note not in grading.verdict.notes:
        grading.verdict.notes.append(note)


def _clock_note(names: Names, device: str, samples: RoundSamples) -> str:
    """Return FALSE_CLOCK, UNCONFIRMED or "".

    A false clock can hide a large part of a short call. So all that it can hide is added to the
    solution's times. If the solution is no longer faster then, its gain is UNCONFIRMED.

    Args:
        names: the names of the solution, of eager and of eager again.
        device: "cpu" or "cuda".
        samples: the samples of all rounds.
    """
    overhead = samples.overhead()
    solution_samples = samples.by_name[names.solution]
    if overhead.is_false(solution_samples):
        return FALSE_CLOCK
    solution = overhead.seconds_of_calls(solution_samples)
    eager = overhead.seconds_of_calls(samples.by_name[names.eager])
    control = overhead.seconds_of_calls(samples.by_name[names.control])
    if compare_times(eager, control, solution, device) != FASTER:
        return ""
    calls = len(solution_samples[0].call_seconds)
    hideable = overhead.hideable_seconds(calls)
    if hideable < HIDDEN_PART * median(solution):
        return ""
    longest = [seconds + hideable for seconds in solution]
    is_confirmed = compare_times(eager, control, longest, device) == FASTER
    return "" if is_confirmed else UNCONFIRMED
