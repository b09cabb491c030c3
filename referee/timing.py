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
        wall: seconds of the whole request by the referee's.
    """

    own: list[float]
    wall: float


@dataclass(frozen=True)
class Overhead:
    """The seconds of a request that are not its calls', and what follows for a call's time.

    README, "Two clocks", has the rules and an example.

    Attributes:
        most: seconds that nine of ten requests do not exceed; they are subtracted from the wall.
        usual: seconds of eager's median request.
        fastest_request: seconds of the fastest empty request, whose wall is all overhead.
        fastest_call: seconds of the fastest empty call, by the process's own clock.
    """

    most: float
    usual: float
    fastest_request: float
    fastest_call: float

    def is_false(self, samples: list[Sample]) -> bool:
        """Return whether a process's clock is false: it says less than an empty call takes."""
        return median(median(sample.own) for sample in samples) < self.fastest_call

    def hideable_seconds(self, calls: int) -> float:
        """Return the seconds of each call that a false clock can hide, of so many in a request."""
        return max(self.most - self.usual, 0.0) / calls

    def seconds_of_calls(self, samples: list[Sample]) -> list[float]:
        """Return the seconds of one call, for each of a contestant's requests.

        Args:
            samples: of the requests.
        """
        if self.is_false(samples):
            by_wall = _seconds_by_wall(samples, self.fastest_request)
            return [max(seconds, self.fastest_call) for seconds in by_wall]
        own = [max(median(sample.own), 1e-9) for sample in samples]
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
        eagers: samples of eager's requests. They may cost more than empty ones, since they return
            new results. Without any, the empty ones count alone.
    """
    walls = [sample.wall for sample in empties]
    beyond = [sample.wall - sum(sample.own) for sample in eagers] or walls
    return Overhead(
        most=max(_percentile_90(walls), _percentile_90(beyond)),
        usual=median(beyond),
        fastest_request=min(walls),
        fastest_call=min(min(sample.own) for sample in empties),
    )


def _percentile_90(values: list[float]) -> float:
    """Return the value that nine of ten do not exceed; one of ten requests costs more."""
    return sorted(values)[int(0.9 * (len(values) - 1))]


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
