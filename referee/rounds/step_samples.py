"""The samples of training steps, and how each step is divided into its forward and its backward.

A step's seconds follow from both clocks, as a call's do. The process's own clock alone says which
part of them is the forward's.
"""

from typing import NamedTuple

from referee.rounds.samples import RoundSamples
from referee.rounds.timed_requests import TimedCall, checked_backlog, checked_seconds
from referee.times.timings import ReportNames, StepTimings
from referee.times.two_clocks import Sample


class StepSample(NamedTuple):
    """The times of one request of training steps.

    Attributes:
        sample: the times of the whole steps.
        part_of_forwards: the part of the steps that was spent in forwards, from 0 to 1.
    """

    sample: Sample
    part_of_forwards: float


class StepSamples:
    """The samples that all timed calls have in the rounds of training steps so far.

    Args:
        names: the names of the solution, of eager and of the control.
        timed_calls: all but the empty call.

    Attributes:
        whole_steps: the samples of whole steps.
    """

    def __init__(self, names: ReportNames, timed_calls: list[TimedCall]) -> None:
        self.whole_steps = RoundSamples(names, timed_calls)
        # The part of each request that was spent in forwards, by the timed call's name.
        self._parts_of_forwards: dict[str, list[float]] = {
            timed_call.name: [] for timed_call in timed_calls
        }

    def add(self, samples: dict[str, StepSample]) -> None:
        """Add the samples of a timed round, by the timed calls' names."""
        self.whole_steps.add({name: step_sample.sample for name, step_sample in samples.items()})
        for name, step_sample in samples.items():
            self._parts_of_forwards[name].append(step_sample.part_of_forwards)

    def set_times(self, step: StepTimings) -> None:
        """Set the times of forwards and backwards in all rounds so far."""
        overhead = self.whole_steps.overhead()
        step.forward.lateness = step.backward.lateness = self.whole_steps.lateness()
        for name, samples in self.whole_steps.by_name.items():
            seconds = overhead.seconds_of_calls(samples)
            wall_seconds = [sample.mean_call_by_referee for sample in samples]
            of_forwards = self._parts_of_forwards[name]
            of_backwards = [1 - part for part in of_forwards]
            step.forward.set(
                name, _multiply(seconds, of_forwards), _multiply(wall_seconds, of_forwards)
            )
            step.backward.set(
                name, _multiply(seconds, of_backwards), _multiply(wall_seconds, of_backwards)
            )


def make_step_sample(reply: dict, request_seconds: float, step_count: int) -> StepSample:
    """Return the times of a request.

    Args:
        reply: the process's reply, whose "seconds" may be anything.
        request_seconds: the seconds of the request by the referee's clock.
        step_count: the number of training steps of the request.
    """
    halves = reply["seconds"] if isinstance(reply["seconds"], dict) else {}
    forwards = checked_seconds(halves.get("forward"), step_count)
    backwards = checked_seconds(halves.get("backward"), step_count)
    step_seconds = [
        forward + backward for forward, backward in zip(forwards, backwards, strict=True)
    ]
    total = sum(step_seconds)
    part_of_forwards = sum(forwards) / total if total > 0 else 0.5
    sample = Sample(step_seconds, request_seconds, checked_backlog(reply))
    return StepSample(sample, part_of_forwards)


def _multiply(seconds: list[float], parts: list[float]) -> list[float]:
    """Return these parts of each step's seconds."""
    return [whole * part for whole, part in zip(seconds, parts, strict=True)]
