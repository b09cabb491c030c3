"""The samples of all timed rounds, and what they say about the solution's clock."""

from statistics import median

from referee.grading import Grading
from referee.rounds.timed_requests import TimedCall
from referee.times.gain import compare_times
from referee.times.timing import Names, p10_and_p90
from referee.times.two_clocks import Overhead, Sample, measure_overhead
from referee.verdict_words import FASTER

FALSE_CLOCK = "its clock is false: the referee's counts"
# If less than this part of a call's time can be hidden, nothing is said.
HIDDEN_PART = 0.1
UNCONFIRMED = "only its own clock says that it is faster: the referee's was not exact enough"
# How long a GPU waits by `clock.WAIT_CYCLES`. Work on another stream that runs during the wait
# takes no time by either clock.
SECONDS_OF_A_WAIT = 0.15e-3


class RoundSamples:
    """The samples that all timed calls have in the rounds so far.

    Args:
        names: the names of the solution, of eager and of the control.
        timed_calls: all but the empty call.

    Attributes:
        by_name: each timed call's samples in the timed rounds.
        empty_samples: samples of empty requests; those before the timed rounds count, too.
    """

    def __init__(self, names: Names, timed_calls: list[TimedCall]) -> None:
        self._names = names
        self.by_name: dict[str, list[Sample]] = {timed_call.name: [] for timed_call in timed_calls}
        self.empty_samples: list[Sample] = []

    def add(self, samples: dict[str, Sample]) -> None:
        """Add the samples of a timed round, by the timed calls' names."""
        for name, sample in samples.items():
            self.by_name[name].append(sample)

    def overhead(self) -> Overhead:
        """Return the overhead of a request, as eager's and the empty requests tell it."""
        eager_samples = self.by_name[self._names.eager] + self.by_name[self._names.control]
        return measure_overhead(self.empty_samples, eager_samples)

    def lateness(self) -> float:
        """Return the 90th percentile of the lateness of eager's requests; 1 without a round."""
        eager_samples = self.by_name[self._names.eager] + self.by_name[self._names.control]
        if not eager_samples:
            return 1.0
        _, p90 = p10_and_p90([sample.lateness for sample in eager_samples])
        return p90


def note_clock(grading: Grading, samples: RoundSamples, wait_count: int) -> None:
    """Add a note if the solution's clock is false or if that clock alone says "faster".

    Args:
        grading: the file under grading.
        samples: the samples of all rounds.
        wait_count: how often a GPU waits in a request, see `CudaClock.get_ahead`.
    """
    is_gpu = grading.device.type == "cuda"
    waiting_seconds = wait_count * SECONDS_OF_A_WAIT if is_gpu else 0.0
    note = _clock_note(grading.problem.names, grading.device.type, samples, waiting_seconds)
    if note and note not in grading.verdict.notes:
        grading.verdict.notes.append(note)


def _clock_note(names: Names, device: str, samples: RoundSamples, waiting_seconds: float) -> str:
    """Return FALSE_CLOCK, UNCONFIRMED or "".

    A false clock can hide a large part of a short call, and so can work on another stream while the
    GPU waits. So all that may be hidden is added to the solution's times. If the solution is no
    longer faster then, its gain is UNCONFIRMED.

    Args:
        names: the names of the solution, of eager and of the control.
        device: "cpu" or "cuda".
        samples: the samples of all rounds.
        waiting_seconds: the seconds of a request in which a GPU waits.
    """
    overhead = samples.overhead()
    solution_samples = samples.by_name[names.solution]
    if overhead.is_false(solution_samples):
        return FALSE_CLOCK
    solution = overhead.seconds_of_calls(solution_samples)
    eager = overhead.seconds_of_calls(samples.by_name[names.eager])
    control = overhead.seconds_of_calls(samples.by_name[names.control])
    lateness = samples.lateness()
    if compare_times(eager, control, solution, device, lateness) != FASTER:
        return ""
    call_count = len(solution_samples[0].call_seconds)
    hideable = overhead.hideable_seconds(call_count) + waiting_seconds / call_count
    if hideable < HIDDEN_PART * median(solution):
        return ""
    longest_seconds = [seconds + hideable for seconds in solution]
    is_confirmed = compare_times(eager, control, longest_seconds, device, lateness) == FASTER
    return "" if is_confirmed else UNCONFIRMED
