"""The seconds of a call, from the clock of its process and the referee's own.

A process can falsify its own clock. The referee's clock includes the overhead of a request, so an
estimate of the overhead is subtracted from its time. The larger one of the two times counts. "Two
clocks" in PROTECTION.md has an example and the exceptions, a false clock and late replies.
"""

import math
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from referee.times.ratios import p10_and_p90

MIN_SECONDS = 1e-9  # a clock's zero becomes this, so that ratios are finite
# When the host has launched the last call of a request, a GPU that is kept busy has at least this
# part of the calls' time still to do.
MIN_BACKLOG = 0.1
# If a GPU waits for the launches, times depend on the host. Processes that made the same calls on a
# slow host differed by a factor of up to 1.8.
LATENESS_OF_IDLE_GPU = 2.0


class Sample(NamedTuple):
    """The times of one request, by both clocks.

    Attributes:
        call_seconds: the seconds of each call by the process's own clock.
        request_seconds: the seconds of the whole request by the referee's clock.
        backlog_seconds: on a GPU, the seconds that the device still computed when the host had
            launched all calls, by the process's own clock; infinite on a CPU.
        part_of_forwards: of training steps, the part of the calls' time that was spent in forwards,
            from 0 to 1, by the process's own clock.
    """

    call_seconds: list[float]
    request_seconds: float
    backlog_seconds: float = math.inf
    part_of_forwards: float = 1.0

    @property
    def mean_call(self) -> float:
        """The mean seconds of a call by the process's own clock.

        A median would hide the work of all calls if the first call did it.
        """
        return sum(self.call_seconds) / len(self.call_seconds)

    @property
    def mean_call_by_referee(self) -> float:
        """The mean seconds of a call by the referee's clock, with the overhead."""
        return self.request_seconds / len(self.call_seconds)

    @property
    def fast_call(self) -> float:
        """The 10th percentile of the seconds of a call, by the process's own clock."""
        fast, _ = p10_and_p90(self.call_seconds)
        return fast

    @property
    def waits_for_launches(self) -> bool:
        """True if the GPU had little to do at the last launch: it may have been idle before."""
        return self.backlog_seconds < MIN_BACKLOG * sum(self.call_seconds)

    @property
    def lateness(self) -> float:
        """The factor by which late launches may lengthen the calls; about 1 if there are none.

        It is the mean of the calls divided by the fast ones, which were launched in time: if 20 of
        32 calls take 20 us instead of 5, the mean is 14.4 us, and the lateness 2.9. If the GPU
        waits for launches, perhaps no call was in time, so the lateness is at least
        LATENESS_OF_IDLE_GPU.
        """
        least = LATENESS_OF_IDLE_GPU if self.waits_for_launches else 1.0
        if self.fast_call == 0:
            return least
        return max(self.mean_call / self.fast_call, least)


@dataclass(frozen=True)
class Overhead:
    """The overhead of a request: the referee's time of it without the time of its calls.

    For an empty request, whose calls do nothing, it is the whole time.

    Attributes:
        estimate: the 90th percentile of the overheads of empty requests or that of eager's,
            whichever is larger, in seconds.
        low: the 10th percentile of the overheads of eager's requests, or of empty ones if there are
            none of eager's, in seconds.
        least: the overhead of the fastest empty request, in seconds.
        fastest_empty_call: the seconds of the fastest empty call, by the process's own clock.
    """

    estimate: float
    low: float
    least: float
    fastest_empty_call: float

    def shows_false_clock(self, samples: list[Sample]) -> bool:
        """Return whether a process's clock is false: it shows less than an empty call takes."""
        return median_low(sample.mean_call for sample in samples) < self.fastest_empty_call

    @property
    def spread(self) -> float:
        """The seconds by which an honest request's overhead may be larger than the estimate.

        Overheads are assumed to be spread as far above the estimate as they are below it.
        """
        return max(self.estimate - self.low, 0.0)

    def seconds_of_calls(self, samples: list[Sample]) -> list[float]:
        """Return the seconds of one call, for each request.

        An example: requests have 8 calls, `estimate` is 2.0 ms, `spread` 0.4 ms, `least` 1.2 ms.

            the process says 0.10 ms, the request takes 10.0 ms    (10.0 - 2.0) / 8 = 1.00 ms
            its clock is false, it says 0 ms; also 10.0 ms         (10.0 - 1.2) / 8 = 1.10 ms
            it says 1.01 ms and is usually longer; this reply
            is 0.4 ms late, so the request takes 10.4 ms           1.01 ms; without `spread` 1.05 ms

        `spread` lets a false clock hide more in single requests. But the lower median of the
        returned times is at least that of the referee's times after the estimate is subtracted.

        Args:
            samples: the timed call's samples, one for each request.
        """
        if self.shows_false_clock(samples):
            return self._seconds_without_process(samples)
        if self._is_process_usually_longer(samples):
            # In some requests a late reply makes the referee's time longer: subtract more.
            return _longer_seconds(samples, self.estimate + self.spread)
        return _longer_seconds(samples, self.estimate)

    def _seconds_without_process(self, samples: list[Sample]) -> list[float]:
        """Return the seconds of one call if the process's clock is false, for each request."""
        by_referee = _seconds_by_referee(samples, self.least)
        return [max(seconds, self.fastest_empty_call) for seconds in by_referee]

    def _is_process_usually_longer(self, samples: list[Sample]) -> bool:
        """Return whether the process's median time is the longer one.

        It is compared with the referee's, from which the estimate of the overhead is subtracted.
        Both are lower medians, which are times that occurred. A mean of the two middle values could
        be forged: with false times of 0 s in half of the requests and of 2 s in the others it would
        be 1 s, longer than most true times.
        """
        by_referee = _seconds_by_referee(samples, self.estimate)
        return median_low(_seconds_by_process(samples)) >= median_low(by_referee)


def _longer_seconds(samples: list[Sample], overhead: float) -> list[float]:
    """Return the seconds of one call by the clock that shows more, for each request.

    Args:
        samples: a timed call's samples.
        overhead: the seconds that are subtracted from the referee's time of a request.
    """
    by_process = _seconds_by_process(samples)
    by_referee = _seconds_by_referee(samples, overhead)
    return [max(pair) for pair in zip(by_process, by_referee, strict=True)]


def _seconds_by_process(samples: list[Sample]) -> list[float]:
    """Return the seconds of one call by the process's clock only, for each request; never 0."""
    return [max(sample.mean_call, MIN_SECONDS) for sample in samples]


def _seconds_by_referee(samples: list[Sample], overhead: float) -> list[float]:
    """Return the seconds of one call by the referee's clock only, for each request."""
    return [(sample.request_seconds - overhead) / len(sample.call_seconds) for sample in samples]


def measure_overhead(empty_samples: list[Sample], eager_samples: list[Sample]) -> Overhead:
    """Return the overhead of requests, measured on processes that run our own code.

    Args:
        empty_samples: samples of requests whose calls do nothing.
        eager_samples: samples of eager's requests. Their overhead may be larger than that of empty
            ones, because they return new results. If there are none, only the empty ones count.
    """
    empty_overheads = [sample.request_seconds for sample in empty_samples]
    eager_overheads = [
        sample.request_seconds - sum(sample.call_seconds) for sample in eager_samples
    ]
    if not eager_samples:
        eager_overheads = empty_overheads
    _, empty_p90 = p10_and_p90(empty_overheads)
    eager_p10, eager_p90 = p10_and_p90(eager_overheads)
    return Overhead(
        estimate=max(empty_p90, eager_p90),
        low=eager_p10,
        least=min(empty_overheads),
        fastest_empty_call=min(min(sample.call_seconds) for sample in empty_samples),
    )
