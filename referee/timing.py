"""Side-by-side timing: interleaved, on inputs that change before every call, with a cold L2."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch

from referee.progress import Progress
from referee.stats import spread

WARM_UP = {"cpu": 1, "cuda": 3}
GPU_ROUNDS = 20
# As many rounds as fit in the time. On two slow cores, where a round of ReLU's steps takes 3.4 s,
# all of run.py is then done in two minutes.
CPU_SECONDS, CPU_LEAST, CPU_MOST = 16.0, 3, 50
GRAIN = 50e-6  # s; a launch and the clock's own cost, within which nothing is judged
UNSEEN = 0.1  # the part of a call that device events may miss before they are called wrong
LEAST_JUDGED = 3  # rounds, below which chance decides between a median and a fastest time

T = TypeVar("T")
Samples = dict[str, tuple[float, float]]  # seconds of one round, by the device and by the host


@dataclass(frozen=True)
class Names:
    """The names of the contestants that every comparison has."""

    solution: str
    eager: str

    @property
    def again(self) -> str:
        """The A/A control: what it differs by from eager is noise."""
        return f"{self.eager} (again)"


@dataclass(frozen=True)
class Rate:
    """The speed that limits a problem.

    Attributes:
        unit: of the speed.
        scale: the unit in work a second.
        digits: that the report shows behind the point.
        work: what the work of a call is called in the JSON file.
        yardstick: the contestant that shows what the device can do.
        floor: what takes as long as the fastest yardstick, as part of a sentence.
        margin: times the yardstick's speed, which no honest call reaches, by device.
    """

    unit: str
    scale: float
    digits: int
    work: str
    yardstick: str
    floor: str
    margin: dict[str, float]


@dataclass(frozen=True)
class Rounds:
    """How many rounds are timed: `trials`, or on a CPU what fits in `cpu_seconds`."""

    trials: int | None = None
    cpu_seconds: float = CPU_SECONDS


# Other programs can delay the few calls that decide a median: incredible times are taken again, and
# count if they are incredible again.
CONFIRMATION = Rounds()


class Findings(NamedTuple):
    """Times that cannot be believed, in words, and notes on what could not be told."""

    problems: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass
class Timings:
    """Seconds of every timed call by name, in the order of the rounds, and what went wrong.

    Attributes:
        seconds: by the device's clock.
        wall: by the host's clock, until the device was idle.
        device: "cpu" or "cuda".
        names: of the contestants that are always there.
        rate: what limits a call.
        work: of one call, in the units of the rate.
        moved: bytes that a call reads and writes at least, 0 where nobody asks.
        floor: seconds that the work takes at the highest rate measured.
        notes: what was left out, and why.
    """

    device: str
    names: Names
    rate: Rate
    work: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    moved: int = 0
    floor: float = 0.0

    @property
    def rounds(self) -> int:
        """How many were timed whole; an interrupt may come within one."""
        lists = [*self.seconds.values(), *self.wall.values()]
        return min(map(len, lists), default=0)

    def trim(self, rounds: int) -> None:
        """Drops later rounds."""
        for times in (*self.seconds.values(), *self.wall.values()):
            del times[rounds:]

    def calls(self, name: str) -> list[tuple[float, float]]:
        """Each call's seconds by the device's clock, and those that the host saw beyond."""
        pairs = zip(self.seconds[name], self.wall[name], strict=True)
        return [(seconds, wall - seconds) for seconds, wall in pairs]

    def start(self, names: Iterable[str]) -> None:
        """Makes room for the times of these contestants, in this order; there are none yet."""
        for name in names:
            self.seconds[name], self.wall[name] = [], []

    def add(self, samples: Samples) -> None:
        """Appends the times of one round."""
        for name, (seconds, wall) in samples.items():
            self.seconds[name].append(seconds)
            self.wall[name].append(wall)


def rounds(
    one_round: Callable[[], tuple[T, str | None]],
    wanted: Rounds,
    device: torch.device,
    what: str,
    progress: Progress,
) -> Iterator[tuple[T, str | None]]:
    """The results of the rounds after the warm-up, until a problem."""
    for done in range(WARM_UP[device.type]):
        progress(f"warming up {what}", f"{done + 1} of {WARM_UP[device.type]} rounds")
        one_round()
    started, done, problem = perf_counter(), 0, None
    while not problem and _goes_on(done, seconds := perf_counter() - started, wanted, device):
        progress(f"timing {what}", f"round {done + 1}{_time_left(done, seconds, wanted, device)}")
        samples, problem = one_round()
        yield samples, problem
        done += 1


def judge(timings: Timings, fastest: float, what: str) -> Findings:
    """The times that are `incredible`, or a note why that cannot be told.

    A busy host delays some calls and not others, and it may do to any two contestants as it does
    to the eager reference, timed twice: where the control breaks the floor of its own slow calls,
    there is no floor.
    """
    timings.floor, notes = fastest, []
    names, too_noisy = timings.names, f"too noisy to judge the times of {what}"
    control = timings.seconds[names.eager] + timings.seconds[names.again]
    done = len(timings.seconds[names.eager])
    if done < LEAST_JUDGED:
        return Findings(notes=[f"{too_noisy}: {done} of at least {LEAST_JUDGED} rounds"])
    low, high = spread(control)
    if _too_fast(timings, low, high):
        times = f"{low * 1e3:.3f} to {high * 1e3:.3f} ms"
        notes.append(f"{too_noisy}: {names.eager} itself took {times}")
        fastest = 0.0
    return Findings(incredible(timings, fastest), notes)


def incredible(timings: Timings, fastest: float) -> list[str]:
    """Times of the solution that no honest run gives, in words.

    They are faster than the device, or mostly outside the timed stream. The baselines are torch's
    own code: their times are never wrong, and show what the device can do.

    Args:
        fastest: seconds that the work of a call takes at the highest rate measured.
    """
    problems, name = [], timings.names.solution
    baselines = (times for other, times in timings.seconds.items() if other != name)
    fastest = min(fastest, *map(min, baselines))
    typical = median(timings.seconds[name])
    if _too_fast(timings, typical, fastest):
        problems.append(
            f"{name} took {typical * 1e3:.3f} ms, and {timings.rate.floor} "
            f"takes {fastest * 1e3:.3f} ms: not credible"
        )
    calls, usual = timings.calls(name), []
    for other in (timings.names.eager, timings.names.again):
        usual += [hidden for _, hidden in timings.calls(other)]
    hidden = concealed(calls, typical, usual)
    if hidden > 4 * GRAIN + UNSEEN * typical:  # never on a CPU, which has one clock
        problems.append(
            f"{name} took {typical * 1e3:.3f} ms by device events, but the device was busy "
            f"{hidden * 1e3:.3f} ms longer than after eager: work on another stream, or a changed "
            "timer"
        )
    return problems


def concealed(calls: list[tuple[float, float]], typical: float, usual: list[float]) -> float:
    """The seconds that another clock saw of the solution's calls beyond those that they report.

    The reported median depends on the calls that are not slower than it, so that these alone are
    looked at. All but a quarter of them must conceal something to be caught. A clock that is wrong
    in fewer is wrong in three of eight of all calls at most, which leaves the median among the
    honest times, above a fifth of them.

    Where other programs have the device or the CPU, calls wait, those of eager too: the lower
    quartile is compared with the upper one of eager's. That is no less than nothing: where a thread
    waited within a call, the wait is in the seconds, but may be taken off those beyond.

    Args:
        calls: the seconds that each reports, and those beyond them.
        typical: the reported median.
        usual: the latter, of eager.
    """
    deciding = sorted(hidden for seconds, hidden in calls if seconds <= typical)
    *_, upper = quantiles(usual, n=4, method="inclusive")
    return deciding[(len(deciding) - 1) // 4] - max(upper, 0.0)


def _too_fast(timings: Timings, seconds: float, fastest: float) -> bool:
    return seconds < fastest / timings.rate.margin[timings.device] - GRAIN


def _goes_on(done: int, seconds: float, wanted: Rounds, device: torch.device) -> bool:
    return done < _most(wanted, device) and (
        wanted.trials is not None
        or device.type == "cuda"
        or done < CPU_LEAST
        or seconds < wanted.cpu_seconds
    )


def _most(wanted: Rounds, device: torch.device) -> int:
    """The number of rounds, unless a CPU's time is over before."""
    return wanted.trials or (GPU_ROUNDS if device.type == "cuda" else CPU_MOST)


def _time_left(done: int, seconds: float, wanted: Rounds, device: torch.device) -> str:
    """For the progress, from the rounds that are done."""
    most, each = _most(wanted, device), seconds / max(done, 1)
    left, total = each * (most - done), f" of {most}"
    if wanted.trials is None and device.type == "cpu":
        left, total = min(left, max(wanted.cpu_seconds - seconds, each)), ""
    return f"{total}, {left:.0f} s left" if done else total


@dataclass
class Step:
    """The times of the two halves of a step, and the bytes kept from one to the other by name."""

    forward: Timings
    backward: Timings
    kept: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(device: str, names: Names, rate: Rate) -> "Step":
        """Without times yet."""
        return Step(*(Timings(device, names, rate, 0) for _ in ("forward", "backward")))

    def trim(self) -> None:
        """Keeps the rounds of which both halves are whole."""
        for half in (self.forward, self.backward):
            half.trim(self.rounds)

    @property
    def rounds(self) -> int:
        """How many were timed whole."""
        return min(self.forward.rounds, self.backward.rounds)

    def seconds(self) -> dict[str, dict[str, list[float]]]:
        """Seconds by half and name; the whole step is the sum of the two in the same round."""
        forward, backward = self.forward.seconds, self.backward.seconds
        step = {
            name: [f + b for f, b in zip(forward[name], backward[name], strict=True)]
            for name in forward
        }
        return {"forward": forward, "backward": backward, "step": step}

    @property
    def notes(self) -> list[str]:
        """Notes on what was left out of either half, and why."""
        return self.forward.notes + self.backward.notes
