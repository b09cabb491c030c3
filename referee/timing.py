"""Side-by-side timing: interleaved, on inputs that change before every call, with a cold L2."""

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
# On a CPU as many rounds as fit in the time: all of run.py takes 76 s on two cores.
CPU_SECONDS, CPU_LEAST = 16.0, 3
GRAIN = 50e-6  # s; a launch and the clock's own cost, within which nothing is judged
UNSEEN = 0.1  # the part of a call that device events may miss before they are called wrong
LEAST_JUDGED = 3  # rounds, below which chance decides between a median and a fastest time
RESAMPLES = 2000

Samples = dict[str, tuple[float, float]]  # seconds of one round, by the device and by the host


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
    margin: dict[str, float]  # times the yardstick's speed, which no honest call reaches, by device


class Rounds(NamedTuple):
    """How many rounds are timed: `trials`, or on a CPU what fits in `cpu_seconds`."""

    trials: int | None = None
    cpu_seconds: float = CPU_SECONDS


# Other programs can delay the few calls that decide a median: incredible times are taken again, and
# count if they are incredible again.
CONFIRMATION = Rounds()


@dataclass
class Timings:
    """Seconds of every timed call by name, in the order of the rounds."""

    device: str  # "cpu" or "cuda"
    names: Names
    rate: Rate
    work: int  # of one call, in the units of the rate
    # By the device's clock, and by the host's, until the device was idle.
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what was left out, and why
    moved: int = 0  # bytes that a call reads and writes at least, 0 where nobody asks
    floor: float = 0.0  # s that the work takes at the highest rate measured

    def start(self, names: Iterable[str]) -> None:
        """Makes room for the times of these contestants, in this order; there are none yet."""
        for name in names:
            self.seconds[name], self.wall[name] = [], []

    def add(self, samples: Samples) -> None:
        """Appends the times of one round."""
        for name, (seconds, wall) in samples.items():
            self.seconds[name].append(seconds)
            self.wall[name].append(wall)


def trim(*parts: Timings) -> int:
    """Drops the round that an interrupt came within, of timings whose rounds are the same; how
    many are left.
    """
    every = [times for part in parts for times in (*part.seconds.values(), *part.wall.values())]
    whole = min(map(len, every), default=0)
    for times in every:
        del times[whole:]
    return whole


def rounds(
    one_round: Callable, wanted: Rounds, device: torch.device, what: str, progress: Progress
) -> Iterator:
    """The results of the rounds after the warm-up."""
    for done in range(WARM_UP[device.type]):
        progress(f"warming up {what}", f"{done + 1} of {WARM_UP[device.type]} rounds")
        one_round()
    most = wanted.trials or MOST[device.type]
    limit = wanted.cpu_seconds if device.type == "cpu" and not wanted.trials else math.inf
    started = perf_counter()
    for done in range(most):
        seconds = perf_counter() - started
        if done >= CPU_LEAST and seconds >= limit:
            return
        progress(f"timing {what}", f"round {done + 1}{_time_left(done, seconds, most, limit)}")
        yield one_round()


def _time_left(done: int, seconds: float, most: int, limit: float) -> str:
    """For the progress, from the rounds that are done in so many seconds of the limit."""
    each, total = seconds / max(done, 1), f" of {most}" if limit == math.inf else ""
    left = min(each * (most - done), max(limit - seconds, each))
    return f"{total}, {left:.0f} s left" if done else total


def spread(times: list[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    return tenths[0], tenths[-1]


def speed_up(baseline: list[float], times: list[float]) -> tuple[float, float, float]:
    """How many times faster than the baseline: the median over rounds, and its 95% interval.

    Both lists hold one time a round, so that what slows a whole round cancels in the pair. The
    interval is a percentile bootstrap of the median.
    """
    ratios = torch.tensor([b / t for b, t in zip(baseline, times, strict=True)], dtype=torch.double)
    draw = torch.Generator().manual_seed(0)  # the same report for the same times
    drawn = ratios[torch.randint(len(ratios), (RESAMPLES, len(ratios)), generator=draw)]
    medians = drawn.quantile(0.5, dim=1)
    parts = ratios.quantile(0.5), medians.quantile(0.025), medians.quantile(0.975)
    return tuple(part.item() for part in parts)


def judge(timings: Timings, fastest: float, what: str) -> tuple[list[str], list[str]]:
    """Times of the solution that no honest run gives, in words, and why that cannot be told.

    They are faster than the device, of which `fastest` is what the work of a call takes at the
    highest rate measured, or mostly outside the timed stream. Baselines are torch's own code: their
    times are never wrong, and show what the device can do. But a busy host delays some calls and
    not others, and it may do to any two contestants as it does to eager, timed twice: where that
    breaks the floor of its own slow calls, there is no floor.
    """
    timings.floor, names, name = fastest, timings.names, timings.names.solution
    too_noisy, done = f"too noisy to judge the times of {what}", len(timings.seconds[name])
    if done < LEAST_JUDGED:
        return [], [f"{too_noisy}: {done} of at least {LEAST_JUDGED} rounds"]
    problems, notes = [], []
    low, high = spread(timings.seconds[names.eager] + timings.seconds[names.again])
    margin = timings.rate.margin[timings.device]
    if low < high / margin - GRAIN:
        times = f"{low * 1e3:.3f} to {high * 1e3:.3f} ms"
        notes.append(f"{too_noisy}: {names.eager} itself took {times}")
        fastest = 0.0
    baselines = (times for other, times in timings.seconds.items() if other != name)
    fastest = min(fastest, *map(min, baselines))
    typical = median(timings.seconds[name])
    if typical < fastest / margin - GRAIN:
        times = f"{typical * 1e3:.3f} ms, and {timings.rate.floor} takes {fastest * 1e3:.3f} ms"
        problems.append(f"{name} took {times}: not credible")
    beyond = {}
    for who, seconds in timings.seconds.items():
        beyond[who] = [w - s for s, w in zip(seconds, timings.wall[who], strict=True)]
    calls = list(zip(timings.seconds[name], beyond[name], strict=True))
    hidden = concealed(calls, typical, beyond[names.eager] + beyond[names.again])
    if hidden > 4 * GRAIN + UNSEEN * typical:  # never on a CPU, which has one clock
        times = (
            f"{typical * 1e3:.3f} ms by device events, but the device was busy {hidden * 1e3:.3f}"
        )
        reason = "ms longer than after eager: work on another stream, or a changed timer"
        problems.append(f"{name} took {times} {reason}")
    return problems, notes


def concealed(calls: list[tuple[float, float]], typical: float, usual: list[float]) -> float:
    """The seconds that another clock saw of the solution's calls beyond those that they report.

    `calls` has both of each call; `typical` is the reported median, `usual` has the seconds beyond
    those that eager's calls report.

    The reported median depends on the calls that are not slower than it: these alone are looked at,
    and all but a quarter of them must conceal something. A clock that is wrong in fewer is wrong in
    three of eight of all calls at most, which leaves the median above a fifth of the honest times.

    Where other programs have the device or the CPU, calls wait, those of eager too: the lower
    quartile is compared with the upper one of eager's. That is no less than nothing: where a thread
    waited within a call, the wait is in the seconds, but may be taken off those beyond.
    """
    deciding = sorted(hidden for seconds, hidden in calls if seconds <= typical)
    *_, upper = quantiles(usual, n=4, method="inclusive")
    return deciding[(len(deciding) - 1) // 4] - max(upper, 0.0)


@dataclass
class Step:
    """Both halves' times, and the bytes kept from one to the other by name."""

    forward: Timings
    backward: Timings
    kept: dict[str, int] = field(default_factory=dict)
