"""The times of training steps, and how each step is divided into its forward and its backward.

A step's seconds follow from both clocks, as a call's do. The process's own clock alone says which
part of them is the forward's.
"""

from referee.rounds.samples import RoundSamples
from referee.rounds.timed_requests import checked_backlog, checked_seconds
from referee.times.timings import StepTimings
from referee.times.two_clocks import Sample


def set_step_times(step: StepTimings, samples: RoundSamples) -> None:
    """Set the times of forwards and backwards in all rounds so far."""
    overhead = samples.overhead()
    step.forward.lateness = step.backward.lateness = samples.lateness()
    for name, its_samples in samples.by_name.items():
        seconds = overhead.seconds_of_calls(its_samples)
        wall_seconds = [sample.mean_call_by_referee for sample in its_samples]
        of_forwards = [sample.part_of_forwards for sample in its_samples]
        of_backwards = [1 - part for part in of_forwards]
        for half, parts in ((step.forward, of_forwards), (step.backward, of_backwards)):
            half.set(name, _multiply(seconds, parts), _multiply(wall_seconds, parts))


def make_step_sample(reply: dict, request_seconds: float, step_count: int) -> Sample:
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
    return Sample(step_seconds, request_seconds, checked_backlog(reply), part_of_forwards)


def _multiply(seconds: list[float], parts: list[float]) -> list[float]:
    """Return these parts of each step's seconds."""
    return [whole * part for whole, part in zip(seconds, parts, strict=True)]
