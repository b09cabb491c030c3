"""Finds out whether a solution has slowed eager's processes.

Eager's times beside the solution are compared with its times before any solution started. If they
are longer, another program may be the reason. To tell, eager's old process, which the solution may
have slowed, is timed beside a new one.
"""

from collections.abc import Callable
from statistics import median

from referee.bench import Bench, Plan
from referee.eager import EagerProcess
from referee.grading import Grading
from referee.names import MODULE
from referee.rounds.samples import RoundSamples
from referee.rounds.timed_requests import TimedCall, make_flush, time_and_free
from referee.times import timing
from referee.times.two_clocks import LATENESS_OF_IDLE_GPU
from referee.verdict import NotCorrectError
from referee.words import ERROR

SLOW = 1.5  # a process is slow if it takes more than this many times the seconds of another
TURNS = 9  # of each process whose times are compared


def check_eager_speed(grading: Grading, plan: Plan, samples: RoundSamples) -> None:
    """Check that eager was not slower beside the solution than before any solution started.

    Args:
        grading: the file under grading.
        plan: has eager's times before any solution started.
        samples: the samples of all rounds.

    Raises:
        NotCorrectError: the solution has slowed eager, or eager's times on a GPU are too long for
            another reason.
    """
    names, timings = grading.problem.names, grading.findings.times.timings
    beside = timings.seconds[names.eager] + timings.seconds[names.control]
    has_enough_times = len(beside) >= 2 * timing.LEAST_JUDGED
    if not has_enough_times or not _is_slower(beside, plan.seconds_alone):
        return
    is_on_gpu = grading.device.type == "cuda"
    if is_on_gpu and not _is_slower(_fast_calls(grading, samples), plan.seconds_alone):
        return  # other calls were launched too late, which the noise of the ratio includes
    alone = median(plan.seconds_alone) * 1e3
    times = f"{median(beside) * 1e3:.3f} ms beside it, {alone:.3f} ms before it started"
    if _is_new_process_faster(grading.bench, plan.calls):
        raise NotCorrectError(ERROR, f"it has slowed eager: {times}")
    # If eager waits for launches, the host is slow, and not the GPU.
    if is_on_gpu and samples.lateness() < LATENESS_OF_IDLE_GPU:
        if _is_faster_alone(grading, beside, plan.calls):
            raise NotCorrectError(ERROR, f"it has slowed eager: {times}")
        reason = "the GPU has become slower since eager was timed alone: grade the file again"
        raise NotCorrectError(ERROR, reason)
    note = "the machine has become slower since eager was timed alone"
    if note not in grading.verdict.notes:
        grading.verdict.notes.append(note)


def _is_slower(seconds: list[float], others: list[float]) -> bool:
    """Return whether the 10th percentile of times is slow beside the 90th of other times."""
    fast, _ = timing.spread(seconds)
    _, slow_other = timing.spread(others)
    return fast > SLOW * slow_other


def _fast_calls(grading: Grading, samples: RoundSamples) -> list[float]:
    """Return the seconds of eager's fast calls in each request, see `Sample.fast_call`."""
    names = grading.problem.names
    eagers = samples.by_name[names.eager] + samples.by_name[names.control]
    return [sample.fast_call for sample in eagers]


def _is_new_process_faster(bench: Bench, calls: int) -> bool:
    """Return whether a new process of eager is faster than the old one in every turn.

    If the solution has changed the old process's priority, CPUs or limits, that process stays slow,
    and the new one is not. Other programs slow both in turn.

    Args:
        bench: the bench of the problem; its old processes for eager are replaced by new ones.
        calls: the number of calls of a request.
    """
    old = bench.eager.take()
    try:
        bench.eager.start()
        flush = make_flush(bench)
        is_old_slower = []
        for _ in range(TURNS):
            old_seconds = _seconds_of_call(bench, old[0], calls, flush)
            new_seconds = _seconds_of_call(bench, bench.eager.processes[0], calls, flush)
            is_old_slower.append(old_seconds > SLOW * new_seconds)
    finally:
        for eager in old:
            eager.close()
    return all(is_old_slower)


def _is_faster_alone(grading: Grading, beside: list[float], calls: int) -> bool:
    """End the solution's process; return whether eager is faster without it.

    Work that the process has queued on a GPU runs on while the process is stopped, and slows eager.

    Args:
        grading: the file under grading.
        beside: eager's seconds beside the solution.
        calls: the number of calls of a request.
    """
    bench = grading.bench
    grading.solution.close()
    flush = make_flush(bench)
    after = [_seconds_of_call(bench, bench.eager.processes[0], calls, flush) for _ in range(TURNS)]
    return _is_slower(beside, after)


def _seconds_of_call(
    bench: Bench, eager: EagerProcess, calls: int, flush: Callable[[], None]
) -> float:
    """Time one request of eager's; return the mean seconds of a call by the process's clock."""
    sample = time_and_free(bench, TimedCall("eager", eager.contestant, MODULE), calls, flush)
    return sample.mean_call
