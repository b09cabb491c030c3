"""The times of a graded file, as reports take them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from referee.times.gain import compare_times


class ReportNames(NamedTuple):
    """The names in reports of the solution, of eager and of the control."""

    solution: str
    eager: str

    @property
    def control(self) -> str:
        """The control: the second timing of eager in a round. A difference from eager is noise."""
        return f"{self.eager} (again)"


class LimitingRate(NamedTuple):
    """The kind of speed that limits a problem: bytes or flops in a second.

    Attributes:
        unit: the unit of the rate, one of `report.SCALE`.
        work_unit: what a call's work counts: "flops" or "moved_bytes".
        yardstick: the timed call that shows which rate the device reaches.
    """

    unit: str
    work_unit: str
    yardstick: str


@dataclass
class Timings:
    """The times of all timed calls: a list for each, with one time a round.

    Attributes:
        device: "cpu" or "cuda".
        names: the names of the solution, of eager and of the control.
        limiting_rate: the problem's.
        work: the work of one call, in the unit `work_unit` of that rate.
        seconds: the seconds of a call in each round, by the timed call's name.
        wall_seconds: the same by the referee's clock, with the overhead.
        notes: which timed calls were left out, and why.
        moved_bytes: the bytes of inputs and outputs, see `Problem.moved_bytes`; 0 for steps.
        floor: an estimate of a call's least seconds, see `Problem.floor_seconds`; 0 if unknown.
        lateness: of eager's requests, see `RoundSamples.lateness`.
    """

    device: str
    names: ReportNames
    limiting_rate: LimitingRate
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


@dataclass
class TimesOfSetting:
    """The times under one precision setting.

    Attributes:
        setting: the precision of float32 products; "" where there is only one.
        forwards: the times of forwards.
        steps: the times of training steps; None where none is timed.
    """

    setting: str
    forwards: Timings
    steps: StepTimings | None = None

    @property
    def speed_word(self) -> str:
        """The solution's time beside eager's, in a word: see `compare_times`."""
        names, seconds = self.forwards.names, self.forwards.seconds
        return compare_times(
            eager=seconds[names.eager],
            control=seconds[names.control],
            solution=seconds[names.solution],
            device=self.forwards.device,
            lateness=self.forwards.lateness,
        )


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
