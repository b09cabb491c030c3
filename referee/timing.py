"""Times of contestants side by side: rounds, samples, and what they tell."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter
from typing import NamedTuple

import torch

from referee.console import Progress

WARM_UP = {"cpu": 1, "cuda": 2}
MOST = {"cpu": 50, "cuda": 10}  # rounds
QUICK = 5  # rounds of the quick comparison on a GPU
# Bytes of parameters up to which the quick comparison on a CPU takes gradients at the timed size.
# For a weight of 256 MiB a CPU would need seven seconds to compare them, and some more for each
# round of training steps.
QUICK_PARAMETERS = 1 << 26
# On a CPU as many rounds are timed as fit into these seconds, of forwards and of steps each.
CPU_SECONDS = 2.5  # of the quick comparison
FULL_CPU_SECONDS = 16.0  # of --full, for README's table
CPU_LEAST = 4  # rounds, even if they take longer: an interval of fewer says little
LEAST_JUDGED = 3  # rounds, below which nothing is told from noise
RESAMPLES = 2000
# These quantiles are subtracted from the referee's clock: one of ten requests costs more.
EMPTY_QUANTILE = 0.9  # of empty requests
EAGER_QUANTILE = 0.9  # of eager's requests


class Names(NamedTuple):
    """The names of the contestants that every comparison has."""

    solution: str
    eager: str

    @property
    def again(self) -> str:
        """The A/A control: what it differs by from eager is noise."""
        return f"{self.eager} (again)"


class Rate(NamedTuple):
    """The speed that limits a problem."""

    unit: str  # one of `report.SCALE`
    work: str  # what the work of a call is called in the JSON file
    yardstick: str  # the contestant that shows what the device can do
    floor: str  # what takes as long as the fastest yardstick, as part of a sentence


class Rounds(NamedTuple):
    """How many rounds are timed: `trials`; if None, on a CPU as many as fit in `cpu_seconds`."""

    trials: int | None = None
    cpu_seconds: float = CPU_SECONDS


class Sample(NamedTuple):
    """The times of one request, by both clocks.

    Attributes:
        own: seconds of each call by the process's own clock.
        outer: seconds of the whole request by the referee's.
    """

    own: list[float]
    outer: float


class Fastest(NamedTuple):
    """The fastest of all empty calls and requests, which our own code makes.

    Attributes:
        own: seconds of a call by the process's own clock.
        outer: seconds of a request by the referee's.
    """

    own: float
    outer: float


NO_LIMIT = Fastest(0.0, 0.0)


def fastest_empty(empties: list[Sample]) -> Fastest:
    """Return the fastest empty call and request: calls that do something take longer."""
    own = min(min(sample.own) for sample in empties)
    return Fastest(own, min(sample.outer for sample in empties))


def is_clock_false(samples: list[Sample], limit: Fastest) -> bool:
    """Return whether a process's clock gives its median call less than the fastest empty one."""
    return median(median(sample.own) for sample in samples) < limit.own


def hideable_seconds(eagers: list[Sample], empty: float) -> float:
    """Return how many seconds of each call a false clock can hide from the referee's.

    It is what is subtracted from the referee's clock beyond the overhead of eager's median request.

    Args:
        eagers: samples of eager's requests.
        empty: seconds of an empty request.
    """
    usual = median(sample.outer - sum(sample.own) for sample in eagers)
    return max(empty - usual, 0.0) / len(eagers[0].own)


def seconds_of_calls(samples: list[Sample], empty: float, limit: Fastest = NO_LIMIT) -> list[float]:
    """Return the seconds of one call, for each of a contestant's requests.

    The process's own clock gives the figures, unless the referee's clock, less the cost of an empty
    request, says more in the median request. Then the larger of both counts in every request, so
    that a false clock gains nothing.

    For calls of some microseconds the cost of an empty request varies by more than the calls take.
    But a clock that is faster than an empty call is false for certain. Then the referee's clock
    counts alone, and less is subtracted: the cost of the fastest empty request.

    Args:
        samples: of a contestant's requests.
        empty: seconds of a request whose calls do nothing, by the referee's clock.
        limit: what no request of an honest process stays below.
    """
    if is_clock_false(samples, limit):
        return [max(seconds, limit.own) for seconds in _seconds_by_referee(samples, limit.outer)]
    own = [max(median(sample.own), 1e-9) for sample in samples]
    least = _seconds_by_referee(samples, empty)
    if median(least) <= median(own):
        return own
    return [max(pair) for pair in zip(own, least, strict=True)]


def _seconds_by_referee(samples: list[Sample], empty: float) -> list[float]:
    """Return the seconds of a call by the referee's clock, less an empty request, by requests."""
    return [(sample.outer - empty) / len(sample.own) for sample in samples]


def empty_request_seconds(empties: list[float]) -> float:
    """Return the 90th percentile of the seconds of empty requests."""
    ordered = sorted(empties)
    return ordered[int(EMPTY_QUANTILE * (len(ordered) - 1))]


def overhead(empties: list[float], eagers: list[Sample]) -> float:
    """Return the seconds that a request costs beyond its calls.

    Nine of ten empty requests cost no more. Eager's requests may cost more than empty ones, since
    they return new results: then nine of ten of eager's requests cost no more. Their cost is the
    referee's time less eager's own.

    Args:
        empties: seconds of empty requests.
        eagers: samples of eager's requests, whose own clock is our code's.
    """
    beyond = sorted(sample.outer - sum(sample.own) for sample in eagers)
    most = beyond[int(EAGER_QUANTILE * (len(beyond) - 1))] if beyond else 0.0
    return max(empty_request_seconds(empties), most)


@dataclass
class Timings:
    """Seconds of every timed call by name, in the order of the rounds."""

    device: str  # "cpu" or "cuda"
    names: Names
    rate: Rate
    work: int  # of one call, in the units of the rate
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)  # by the referee's clock
    notes: list[str] = field(default_factory=list)  # what was left out, and why
    moved: int = 0  # bytes that a call reads and writes at least, 0 where nobody asks
    floor: float = 0.0  # s that the work takes at the highest rate measured

    def start(self, names: Iterable[str]) -> None:
        """Make room for the times of these contestants, in this order; there are none yet."""
        for name in names:
            self.seconds[name], self.wall[name] = [], []

    def set(self, name: str, seconds: list[float], wall: list[float]) -> None:
        """Set a contestant's times in all rounds so far."""
        self.seconds[name] = seconds
        self.wall[name] = wall


def drop_unfinished_round(*parts: Timings) -> int:
    """Drop the unfinished round after an interrupt; return how many rounds are left.

    Args:
        parts: timings of the same rounds.
    """
    every = [times for part in parts for times in (*part.seconds.values(), *part.wall.values())]
    whole = min(map(len, every), default=0)
    for times in every:
        del times[whole:]
    return whole


def run_rounds(
    one_round: Callable, length: Rounds, device: torch.device, what: str, progress: Progress
) -> Iterator:
    """Run the warm-up and then the timed rounds; yield what each timed round returns.

    Args:
        one_round: runs a round.
        length: how many rounds.
        device: where solutions compute.
        what: is timed, for the progress line.
        progress: says what is being done.
    """
    for done in range(WARM_UP[device.type]):
        progress(f"warming up {what}", f"{done + 1} of {WARM_UP[device.type]} rounds")
        one_round()
    most = length.trials or MOST[device.type]
    limit = length.cpu_seconds if device.type == "cpu" and not length.trials else math.inf
    started = perf_counter()
    for done in range(most):
        seconds = perf_counter() - started
        if done >= CPU_LEAST and seconds >= limit:
            return
        progress(f"timing {what}", f"round {done + 1}{_time_left(done, seconds, most, limit)}")
        yield one_round()


def _time_left(done: int, seconds: float, most: int, limit: float) -> str:
    """Return how many rounds there are and the seconds left, in words, for the progress line."""
    each, total = seconds / max(done, 1), f" of {most}" if limit == math.inf else ""
    left = min(each * (most - done), max(limit - seconds, each))
    return f"{total}, {left:.0f} s left" if done else total


def spread(times: list[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile."""
    tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    return tenths[0], tenths[-1]


def speed_up(baseline: list[float], times: list[float]) -> tuple[float, float, float]:
    """Return how many times faster than the baseline: the median over rounds, its 95% interval.

    Both lists hold one time a round, so that what slows a whole round cancels in the pair. The
    interval is a percentile bootstrap of the median.
    """
    ratios = torch.tensor([b / t for b, t in zip(baseline, times, strict=True)], dtype=torch.double)
    draw = torch.Generator().manual_seed(0)  # the same report for the same times
    drawn = ratios[torch.randint(len(ratios), (RESAMPLES, len(ratios)), generator=draw)]
    medians = drawn.quantile(0.5, dim=1)
    parts = ratios.quantile(0.5), medians.quantile(0.025), medians.quantile(0.975)
    return tuple(part.item() for part in parts)


@dataclass
class Step:
    """Both halves' times, and the bytes kept from one to the other by name."""

    forward: Timings
    backward: Timings
    kept: dict[str, int] = field(default_factory=dict)
