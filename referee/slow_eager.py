"""Finds out if a solution has slowed eager's processes.

Eager's times beside the solution are compared with those before any solution had started. Where
they are longer, the reason may be another program: so eager's old process is timed beside a new
one.
"""

from statistics import median

from referee import timing
from referee.bench import Bench
from referee.grading import Grading
from referee.names import MODULE
from referee.timed_requests import Entrant, Plan, make_flush, time_alone
from referee.verdict import ERROR, FoundError

# Eager may be this many times slower beside a solution than alone, beyond its own variation.
SLOWER = 1.5
COMPARED_TURNS = 9  # of eager's old process and a new one


def check_eager_speed(grading: Grading, chosen: Plan) -> None:
    """Check that eager was not slower beside the solution than before any had started.

    Other programs slow eager, too, so that this alone blames nobody: see `_is_harmed`.
    """
    names, timings = grading.problem.names, grading.run.timings
    beside = timings.seconds[names.eager] + timings.seconds[names.again]
    if len(beside) < 2 * timing.LEAST_JUDGED or not _is_slower(beside, chosen.alone):
        return
    is_harmed = _is_harmed(grading.bench, chosen.calls)
    if not is_harmed and grading.device.type == "cuda":
        is_harmed = _is_faster_without(grading, beside, chosen.calls)
        if not is_harmed:
            reason = "the GPU has become slower since eager was timed alone: grade it again"
            raise FoundError(ERROR, reason)
    if not is_harmed:
        timings.notes.append("the machine has become slower since eager was timed alone")
        return
    times = f"{median(beside) * 1e3:.3f} ms, {median(chosen.alone) * 1e3:.3f} ms before it started"
    raise FoundError(ERROR, f"eager was slower beside it: {times}")


def _is_slower(beside: list[float], alone: list[float]) -> bool:
    """Return whether the 10th percentile of some times is above SLOWER times the 90th of others."""
    return timing.spread(beside)[0] > SLOWER * timing.spread(alone)[1]


def _is_harmed(bench: Bench, calls: int) -> bool:
    """Return whether eager's process is slower than a new one, in every one of several turns.

    What one process does to another, by its priority, its CPUs or its limits, stays with the old
    process, and what other programs do meets both in turn.
    """
    old = bench.eager
    bench.eager = []
    try:
        bench.start_eager()
        flush = make_flush(bench)
        turns = []
        for _ in range(COMPARED_TURNS):
            pair = [
                time_alone(bench, Entrant("eager", eager[0].contestant, MODULE), calls, flush)
                for eager in (old, bench.eager)
            ]
            turns.append(median(pair[0].own) > SLOWER * median(pair[1].own))
    finally:
        for eager in old:
            eager.close()
        bench.forget_yardsticks()
    return all(turns)


def _is_faster_without(grading: Grading, beside: list[float], calls: int) -> bool:
    """Return whether eager is as fast as before once the solution's process has ended.

    What a stopped process has queued on a GPU runs on. Nothing can be asked of it after this.
    """
    bench = grading.bench
    grading.solution.close()
    flush = make_flush(bench)
    eager = Entrant("eager", bench.eager[0].contestant, MODULE)
    after = [time_alone(bench, eager, calls, flush) for _ in range(COMPARED_TURNS)]
    return _is_slower(beside, [median(sample.own) for sample in after])
