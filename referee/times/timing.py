"""How many rounds are timed, the times of their calls, and the ratios of these times."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import quantiles
from time import perf_counter
from typing import NamedTuple

import torch

WARM_UP_ROUNDS = {"cpu": 1, "cuda": 2}  # before the timed ones
MAX_ROUNDS = {"cpu": 50, "cuda": 10}  # timed rounds, unless a number is asked for
QUICK_ROUNDS = 5  # of a quick check on a GPU
# With more bytes of parameters than this, a quick check on a CPU leaves out gradients at the
# timed size: those of a weight of 256 MiB take seven seconds to compare.
QUICK_PARAMETERS = 1 << 26
# On a CPU, rounds of forwards are timed for this many seconds, and rounds of steps for as many.
CPU_SECONDS = 2.5
FULL_CPU_SECONDS = 16.0  # with --full
MIN_CPU_ROUNDS = 4  # even if they take longer: an interval of fewer rounds says little
MIN_JUDGED_ROUNDS = 3  # rounds: fewer do not tell a difference from noise
RESAMPLES = 2000  # of the bootstrap


class Names(NamedTuple):
    """The names of the timed calls that every comparison has."""

    solution: str
    eager: str

    @property
    def control(self) -> str:
        """The control: the second timing of eager in a round. A difference from eager is noise."""
        return f"{self.eager} (again)"


class Rate(NamedTuple):
    """The speed that limits a problem.

    Attributes:
        unit: the unit of the rate, one of `report.SCALE`.
        work_unit: what a call's work counts: "flops" or "moved_bytes".
        yardstick: the timed call that shows which rate the device reaches.
    """

    unit: str
    work_unit: str
    yardstick: str


class RoundLimit(NamedTuple):
    """How many rounds are timed: a number, or as many as a time allows.

    Attributes:
        trials: the number of rounds; None for as many as MAX_ROUNDS, or as fit in `cpu_seconds`.
        cpu_seconds: how long all rounds may take on a CPU; it is ignored if `trials` is a number.
    """

    trials: int | None = None
    cpu_seconds: float = CPU_SECONDS


@dataclass
class Timings:
    """The times of all timed calls: a list for each, with one time a round.

    Attributes:
        device: "cpu" or "cuda".
        names: the names of the solution, of eager and of the control.
        rate: the speed that limits the problem.
        work: the work of one call, in the units of the rate.
        seconds: the seconds of a call in each round, by the timed call's name.
        wall_seconds: the same by the referee's clock, with the overhead.
        notes: which timed calls were left out, and why.
        moved_bytes: the bytes that a call reads and writes at least; 0 for steps.
        floor: a lower bound on the seconds of a call, see `Problem.floor_seconds`; 0 if unknown.
        lateness: of eager's requests, see `RoundSamples.lateness`.
    """

    device: str
    names: Names
    rate: Rate
    work: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wall_seconds: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    moved_bytes: int = 0
    floor: float = 0.0
    lateness: float = 1.0

    def start(self, names: Iterable[str]) -> None:
        """Give these timed calls empty lists of times; reports keep the order."""
        for name in names:
            self.seconds[name] = []
            self.wall_seconds[name] = []

    def set(self, name: str, seconds: list[float], wall_seconds: list[float]) -> None:
        """Set a timed call's times in all rounds so far."""
        self.seconds[name] = seconds
        self.wall_seconds[name] = wall_seconds


@dataclass
class StepTimings:
    """The times of training steps.

    Attributes:
        forward: the times of the forwards, which autograd records.
        backward: the times of the backwards.
        kept: the bytes that autograd keeps from a forward to its backward, by timed call.
    """

    forward: Timings
    backward: Timings
    kept: dict[str, int] = field(default_factory=dict)


def drop_unfinished_round(*parts: Timings) -> int:
    """Drop the unfinished round after an interrupt; return how many rounds are left.

    Args:
        parts: timings of the same rounds: of forwards, or of both halves of training steps.
    """
    lists = []
    for part in parts:
        lists += [*part.seconds.values(), *part.wall_seconds.values()]
    finished_rounds = min(map(len, lists), default=0)
    for times in lists:
        del times[finished_rounds:]
    return finished_rounds


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


def p10_and_p90(times: list[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile."""
    tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    return tenths[0], tenths[-1]


class SpeedUp(NamedTuple):
    """How many times faster some times are than a baseline's.

    Attributes:
        ratio: the median over the rounds.
        low: the lower end of its 95% interval.
        high: the upper end.
    """

    ratio: float
    low: float
    high: float


def speed_up(baseline: list[float], times: list[float]) -> SpeedUp:
    """Return how many times faster some times are than the baseline's.

    Both lists have one time a round. The ratio is taken in each round, where it does not matter
    what slows the whole round.

    Args:
        baseline: the seconds of the baseline.
        times: the seconds of a timed call.

    Returns:
        The median of the ratios; the interval is a percentile bootstrap.
    """
    ratios = torch.tensor([b / t for b, t in zip(baseline, times, strict=True)], dtype=torch.double)
    generator = torch.Generator().manual_seed(0)  # the same times always give the same interval
    rounds = len(ratios)
    resampled = ratios[torch.randint(rounds, (RESAMPLES, rounds), generator=generator)]
    medians = resampled.quantile(0.5, dim=1)
    low, high = medians.quantile(0.025), medians.quantile(0.975)
    return SpeedUp(ratios.quantile(0.5).item(), low.item(), high.item())
