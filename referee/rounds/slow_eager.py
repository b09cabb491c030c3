"""Finds out whether a solution has slowed eager's processes.

Eager's times beside the solution are compared with its times before any solution started. If they
are longer, another program may be the reason: `check_eager_speed` tells.
"""

from collections.abc import Callable
from statistics import median

from referee.call_names import MODULE
from referee.eager_processes import EagerProcess
from referee.grading import Grading
from referee.resources import Plan, Resources
from referee.rounds.samples import RoundSamples
from referee.rounds.timed_requests import TimedCall, make_flush, time_and_free
from referee.times.gain import MIN_JUDGED_ROUNDS
from referee.times.ratios import p10_and_p90
from referee.times.two_clocks import LATENESS_OF_IDLE_GPU
from referee.verdict import NotCorrectError
from referee.verdict_words import ERROR

SLOW = 1.5  # a process is slow if it takes more than this many times the seconds of another
TURNS = 9  # of each process whose times are compared
HOST_IS_SLOW = "the machine has become slower since eager was timed alone"
GPU_IS_SLOW = "the GPU has become slower since eager was timed alone: grade the file again"


def check_eager_speed(grading: Grading, plan: Plan, samples: RoundSamples) -> None:
    """Check that eager was not slower beside the solution than before any solution started.

    If it was, this decides why:

        Is a new process of eager faster than the old one?
            yes: the solution has slowed the old one                error
            no: Is it a CPU, or a GPU that waits for launches?
                yes: the host is slow                               note
                no: Is eager faster without the solution's process?
                    yes: the solution's queued work has slowed it   error
                    no: the GPU is slow                             error: grade the file again

    Args:
        grading: the file under grading.
        plan: has eager's times before any solution started.
        samples: the samples of all rounds.

    Raises:
        NotCorrectError: the solution has slowed eager, or eager's times on a GPU are too long for
            another reason.
    """
    seconds_beside = _seconds_beside(grading)
    if not _was_eager_slower(grading, plan, samples):
        return
    ms_beside, ms_alone = median(seconds_beside) * 1e3, median(plan.seconds_alone) * 1e3
    times = f"{ms_beside:.3f} ms beside it, {ms_alone:.3f} ms before it started"
    reason = f"it has slowed eager: {times}"
    if _is_new_process_faster(grading.resources, plan.call_count):
        raise NotCorrectError(ERROR, reason)
    # If a GPU waits for launches, the host is slow, and not the GPU.
    is_host_slow = grading.device.type == "cpu" or samples.lateness() >= LATENESS_OF_IDLE_GPU
    if is_host_slow:
        if HOST_IS_SLOW not in grading.verdict.notes:
            grading.verdict.notes.append(HOST_IS_SLOW)
        return
    if _is_faster_alone(grading, seconds_beside, plan.call_count):
        raise NotCorrectError(ERROR, reason)
    raise NotCorrectError(ERROR, GPU_IS_SLOW)


def _seconds_beside(grading: Grading) -> list[float]:
    """Return eager's seconds of a call beside the solution, in both of its turns in each round."""
    names, seconds = grading.problem.names, grading.findings.times.forwards.seconds
    return seconds[names.eager] + seconds[names.control]


def _was_eager_slower(grading: Grading, plan: Plan, samples: RoundSamples) -> bool:
    """Return whether eager was slower beside the solution; the arguments are `check_eager_speed`'s.

    On a GPU the fast calls of each request must be slower, too. If only other calls are, they were
    launched too late, which the noise of the ratio includes.
    """
    seconds_beside = _seconds_beside(grading)
    has_enough_times = len(seconds_beside) >= 2 * MIN_JUDGED_ROUNDS
    if not has_enough_times or not _is_slower(seconds_beside, plan.seconds_alone):
        return False
    is_on_gpu = grading.device.type == "cuda"
    return not is_on_gpu or _is_slower(_fast_calls(grading, samples), plan.seconds_alone)


def _is_slower(seconds: list[float], other_seconds: list[float]) -> bool:
    """Return whether the 10th percentile of times is slow beside the 90th of other times."""
    p10, _ = p10_and_p90(seconds)
    _, other_p90 = p10_and_p90(other_seconds)
    return p10 > SLOW * other_p90


def _fast_calls(grading: Grading, samples: RoundSamples) -> list[float]:
    """Return the seconds of eager's fast calls in each request, see `Sample.fast_call`."""
    names = grading.problem.names
    eager_samples = samples.by_name[names.eager] + samples.by_name[names.control]
    return [sample.fast_call for sample in eager_samples]


def _is_new_process_faster(resources: Resources, call_count: int) -> bool:
    """Return whether a new process of eager is faster than the old one in every turn.

    If the solution has changed the old process's priority, CPUs or limits, that process stays slow,
    and the new one is not. Other programs slow both in turn.

    Args:
        resources: of the problem; its old processes for eager are replaced by new ones.
        call_count: the number of calls of a request.
    """
    old_processes = resources.eager.take()
    try:
        resources.eager.start()
        flush = make_flush(resources)
        is_old_slower = []
        for _ in range(TURNS):
            old_seconds = _seconds_of_call(resources, old_processes[0], call_count, flush)
            new_seconds = _seconds_of_call(resources, resources.eager.members[0], call_count, flush)
            is_old_slower.append(old_seconds > SLOW * new_seconds)
    finally:
        for process in old_processes:
            process.close()
    return all(is_old_slower)


def _is_faster_alone(grading: Grading, seconds_beside: list[float], call_count: int) -> bool:
    """End the solution's process; return whether eager is faster without it.

    Work that the process has queued on a GPU runs on while the process is stopped, and slows eager.

    Args:
        grading: the file under grading.
        seconds_beside: eager's seconds beside the solution.
        call_count: the number of calls of a request.
    """
    resources = grading.resources
    grading.solution.close()
    flush = make_flush(resources)
    seconds_after = [
        _seconds_of_call(resources, resources.eager.members[0], call_count, flush)
        for _ in range(TURNS)
    ]
    return _is_slower(seconds_beside, seconds_after)


def _seconds_of_call(
    resources: Resources, process: EagerProcess, call_count: int, flush: Callable[[], None]
) -> float:
    """Time one request of eager's; return the mean seconds of a call by the process's clock."""
    sample = time_and_free(resources, TimedCall("eager", process, MODULE), call_count, flush)
    return sample.mean_call
