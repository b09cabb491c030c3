"""The samples of all timed rounds, and what they say about the solution's clock."""

from referee.grading import Grading
from referee.rounds.timed_requests import TimedCall
from referee.times.gain import compare_times
from referee.times.ratios import p10_and_p90
from referee.times.timings import ReportNames
from referee.times.two_clocks import Overhead, Sample, measure_overhead
from referee.verdict_words import FASTER

FALSE_CLOCK = "its clock is false: the referee's counts"
UNCONFIRMED = "only its own clock says that it is faster: the referee's was not exact enough"


class RoundSamples:
    """The samples that all timed calls have in the rounds so far.

    Args:
        names: the names of the solution, of eager and of the control.
        timed_calls: all but the empty call.

    Attributes:
        by_name: each timed call's samples in the timed rounds.
        empty_samples: samples of empty requests; those before the timed rounds count, too.
    """

    def __init__(self, names: ReportNames, timed_calls: list[TimedCall]) -> None:
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


def note_clock(grading: Grading, samples: RoundSamples) -> None:
    """Add a note if the solution's clock is false or if that clock alone says "faster".

    Args:
        grading: the file under grading.
        samples: the samples of all rounds.
    """
    note = _clock_note(grading.problem.names, grading.device.type, samples)
    if note and note not in grading.verdict.notes:
        grading.verdict.notes.append(note)


def _clock_note(names: ReportNames, device: str, samples: RoundSamples) -> str:
    """Return FALSE_CLOCK, UNCONFIRMED or "".

    The referee estimates the overhead of a request, and a solution may have less: it may reply
    faster than eager, or work on another stream while a GPU waits. Its clock can hide the
    difference. But its calls never take longer than its requests. So a gain is confirmed if even
    the requests, with all of their overhead, take less time than eager's calls.

    Args:
        names: the names of the solution, of eager and of the control.
        device: "cpu" or "cuda".
        samples: the samples of all rounds.
    """
    overhead = samples.overhead()
    solution_samples = samples.by_name[names.solution]
    if overhead.shows_false_clock(solution_samples):
        return FALSE_CLOCK
    eager = overhead.seconds_of_calls(samples.by_name[names.eager])
    control = overhead.seconds_of_calls(samples.by_name[names.control])
    lateness = samples.lateness()
    printed = overhead.seconds_of_calls(solution_samples)
    with_overhead = [sample.mean_call_by_referee for sample in solution_samples]
    is_faster = compare_times(eager, control, printed, device, lateness) == FASTER
    is_confirmed = compare_times(eager, control, with_overhead, device, lateness) == FASTER
    return UNCONFIRMED if is_faster and not is_confirmed else ""
