"""The seconds of a call, from the clock of its process and the referee's own.

A process can falsify its own clock. The referee's clock includes the overhead of a request. "Two
clocks" in README.md has an example, and the rules by which a time follows from both.
"""

from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

SHORTEST = 1e-9  # seconds; a clock's zero becomes this, so that ratios are finite


class Sample(NamedTuple):
    """The times of one request, by both clocks.

    Attributes:
        own: the seconds of each call by the process's own clock.
        wall: the seconds of the whole request by the referee's clock.
    """

    own: list[float]
    wall: float

    @property
    def mean(self) -> float:
        """The mean seconds of a call by the process's own clock.

        A median would hide the work of all calls if the first call did it.
        """
        return sum(self.own) / len(self.own)


@dataclass(frozen=True)
class Overhead:
    """The overhead of a request: its wall without the time of its calls.

    Attributes:
        most: the overhead in seconds that nine of ten requests do not exceed. It is subtracted from
            the wall.
        usual: the overhead in seconds of eager's median request.
        fastest_request: the wall in seconds of the fastest empty request; it is all overhead.
        fastest_call: the seconds of the fastest empty call, by the process's own clock.
    """

    most: float
    usual: float
    fastest_request: float
    fastest_call: float

    def is_false(self, samples: list[Sample]) -> bool:
        """Return whether a process's clock is false: it shows less than an empty call takes."""
        return median(sample.mean for sample in samples) < self.fastest_call

    def hideable_seconds(self, calls: int) -> float:
        """Return the seconds of each call that a false clock can hide.

        The referee subtracts `most`. In a request whose overhead is only `usual`, the difference
        may be time of calls that the process's clock hides.

        Args:
            calls: the number of calls in a request.
        """
        return max(self.most - self.usual, 0.0) / calls

    def seconds_of_calls(self, samples: list[Sample]) -> list[float]:
        """Return the seconds of one call, for each of a contestant's requests.

        There are three cases:

        - The process's clock is false: only the referee's clock counts, less the overhead of the
          fastest empty request.
        - The median request by the process's clock takes at least as long as the median request by
          the referee's clock, less `most`: the process's clock counts.
        - Otherwise the larger of these two times counts in each request.

        Args:
            samples: the contestant's samples, one for each request.
        """
        if self.is_false(samples):
            by_wall = _seconds_by_wall(samples, self.fastest_request)
            return [max(seconds, self.fastest_call) for seconds in by_wall]
        own = [max(sample.mean, SHORTEST) for sample in samples]
        by_wall = _seconds_by_wall(samples, self.most)
        if median(own) >= median(by_wall):
            return own
        return [max(pair) for pair in zip(own, by_wall, strict=True)]


def _seconds_by_wall(samples: list[Sample], overhead: float) -> list[float]:
    """Return the seconds of one call by the referee's clock alone, for each request."""
    return [(sample.wall - overhead) / len(sample.own) for sample in samples]


def measure_overhead(empties: list[Sample], eagers: list[Sample]) -> Overhead:
    """Return the overhead of requests, measured on processes that run our own code.

    Args:
        empties: samples of requests whose calls do nothing.
        eagers: samples of eager's requests. Their overhead may be larger than that of empty ones,
            because they return new results. If there are none, only the empty ones count.
    """
    of_empties = [sample.wall for sample in empties]
    of_eagers = [sample.wall - sum(sample.own) for sample in eagers]
    if not eagers:
        of_eagers = of_empties
    return Overhead(
        most=max(_percentile_90(of_empties), _percentile_90(of_eagers)),
        usual=median(of_eagers),
        fastest_request=min(of_empties),
        fastest_call=min(min(sample.own) for sample in empties),
    )


def _percentile_90(values: list[float]) -> float:
    """Return the value that nine of ten values do not exceed."""
    return sorted(values)[int(0.9 * (len(values) - 1))]
