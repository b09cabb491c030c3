"""Forwards beside eager's: new inputs and parameters in every round, every result compared.

A round is:

    1. While all processes are stopped, inputs and parameters are drawn, and the referee computes
       the reference's results for them.
    2. The solution, eager twice, the yardsticks and the empty call take turns, in random order.
       Each goes on, calls, replies and is stopped; the clock is described in `contestant`.
    3. After the solution's turn its results are compared, whole; its inputs and parameters, too.

Short calls share a request: each has inputs and a result of its own.
"""

import random
from statistics import median
from time import sleep

import torch

from referee import timing
from referee.early_elements import EarlyElements
from referee.forward import check_eager_intact, check_intact, check_results, read
from referee.grading import Grading
from referee.names import COMPILED, MODULE, NOTHING
from referee.reference_file import LONGEST_LINE
from referee.slow_eager import check_eager_speed
from referee.timed_requests import Entrant, make_flush, plan, time_empty, time_request
from referee.timing import Overhead, Sample, Timings, measure_overhead
from referee.verdict import FASTER, WRONG, FoundError, Run, compare_times

# Memory up to so many bytes is written before every request, so that all contestants find the same
# part of it in the caches. Larger memory is written once a round.
CACHED_BYTES = 1 << 26
# The driver clears the memory that large checks have given back, which slows who is timed then.
SECONDS_TO_SETTLE = 1.0
CHANGES_LATE = "result is not complete when its clock stops"
FALSE_CLOCK = "its clock is false: the referee's counts"
HIDDEN_PART = 0.1  # of a call's time: if a clock can hide less, the line does not mention it
UNCONFIRMED = "only its own clock says that it is faster: the calls are too short for the referee's"


def time_forwards(grading: Grading) -> None:
    """Time forwards under the current precision setting; set `grading.run`."""
    bench, problem = grading.bench, grading.problem
    chosen = plan(bench)
    bench.start_eager()
    grading.write_inputs([problem.draw()])
    bench.prepare_yardsticks(_yardsticks_to_time(grading))
    names = problem.names
    timings = Timings(problem.device.type, names, problem.rate, problem.work, moved=problem.moved)
    timings.notes += bench.notes
    grading.run = Run(problem.setting, timings)
    grading.verdict.runs.append(grading.run)
    entrants = entrants_of(grading, bench.yardsticks)
    timings.start(entrant.name for entrant in entrants)
    if problem.is_large:
        sleep(SECONDS_TO_SETTLE)
    flush = make_flush(bench)
    nothing = Entrant("nothing", bench.eager[0].contestant, NOTHING)
    grading.write_inputs([problem.draw() for _ in range(chosen.calls)])
    empties = time_empty(bench, chosen.calls, flush)

    def one_round() -> dict[str, Sample]:
        new_round(grading, chosen.calls)
        samples = {}
        for entrant in random.sample([*entrants, nothing], len(entrants) + 1):
            rewrite_small_memory(grading)
            is_solution = entrant.process is grading.solution
            results = grading.results if is_solution or entrant.call == MODULE else None
            sample, reply, early = time_request(bench, entrant, chosen.calls, flush, results)
            samples[entrant.name] = sample
            if is_solution:
                compare_calls(grading, reply["calls"], early)
            entrant.process.ask("release")
        empties.append(samples.pop("nothing"))
        return samples

    what = f"the forward{problem.setting and f' at {problem.setting}'}"
    every: dict[str, list[Sample]] = {entrant.name: [] for entrant in entrants}
    for samples in timing.run_rounds(
        one_round, grading.options.rounds, problem.device, what, grading.progress
    ):
        for name, sample in samples.items():
            every[name].append(sample)
        overhead = measure_overhead(empties, every[names.eager] + every[names.again])
        for name, theirs in every.items():
            wall = [sample.wall / len(sample.own) for sample in theirs]
            timings.set(name, overhead.seconds_of_calls(theirs), wall)
    for entrant in entrants:
        bench.release(entrant.process)
    timings.floor = problem.floor_seconds(timings)
    note_clock(grading, every, overhead)
    check_eager_speed(grading, chosen)


def note_clock(grading: Grading, every: dict[str, list[Sample]], overhead: Overhead) -> None:
    """Note that the solution's clock is false, or that it alone says "faster".

    Short calls leave room for a false clock. The note says so where the solution would not be
    faster if its clock hid as much as it can.

    Args:
        grading: the file under grading.
        every: samples by name.
        overhead: of the requests.
    """
    names, kind = grading.problem.names, grading.device.type
    samples = every[names.solution]
    solution = overhead.seconds_of_calls(samples)
    eager = overhead.seconds_of_calls(every[names.eager])
    again = overhead.seconds_of_calls(every[names.again])
    hideable = overhead.hideable_seconds(len(samples[0].own))
    note = ""
    if overhead.is_false(samples):
        note = FALSE_CLOCK
    elif compare_times(eager, again, solution, kind) == FASTER:
        longest = [seconds + hideable for seconds in solution]
        is_confirmed = compare_times(eager, again, longest, kind) == FASTER
        if not is_confirmed and hideable >= HIDDEN_PART * median(solution):
            note = UNCONFIRMED
    if note and note not in grading.verdict.notes:
        grading.verdict.notes.append(note)


def _yardsticks_to_time(grading: Grading) -> tuple[str, ...]:
    wanted = grading.problem.yardsticks[grading.device.type]
    if grading.options.is_quick:
        wanted = tuple(name for name in wanted if name not in grading.problem.slow_yardsticks)
    if grading.options.compiled:
        wanted += (COMPILED,)
    return wanted


def entrants_of(grading: Grading, yardsticks: list[str]) -> list[Entrant]:
    """Return the participants of a round: the solution, eager, eager again, and the yardsticks."""
    names, eager = grading.problem.names, grading.bench.eager
    first, last = eager[0].contestant, eager[-1].contestant
    found = [
        Entrant(names.solution, grading.solution, MODULE),
        Entrant(names.eager, first, MODULE),
        Entrant(names.again, last, MODULE),
    ]
    return found + [Entrant(name, first, name) for name in yardsticks]


def new_round(grading: Grading, calls: int) -> None:
    """Draw inputs and parameters, write them, and compute the reference's results."""
    problem = grading.problem
    grading.forget_round()
    grading.new_state()
    drawn = [problem.draw() for _ in range(calls)]
    grading.inputs = drawn[0]
    grading.expected_calls = [grading.run_reference(inputs) for inputs in drawn]
    grading.results = grading.expected_calls[0]
    grading.write_inputs(drawn)
    values = list(grading.module.state_dict().values())
    grading.state.write(values)
    for eager in grading.bench.eager:
        eager.state.write(values)


def rewrite_small_memory(grading: Grading) -> None:
    """Write small inputs and parameters again, so that all contestants find them in the caches.

    This also restores the buffers that the forward before has changed.
    """
    problem = grading.problem
    if problem.input_bytes <= CACHED_BYTES:
        for region in grading.bench.inputs:
            region.rewrite()
    if problem.parameter_bytes <= CACHED_BYTES:
        grading.state.rewrite()
        for eager in grading.bench.eager:
            eager.state.rewrite()


def compare_calls(grading: Grading, calls: list, early: EarlyElements) -> None:
    """Compare the whole results of a timed request, and the inputs and parameters."""
    check_intact(grading, "a timed call", len(calls))
    check_eager_intact(grading)
    for call_index, (call, eager) in enumerate(zip(calls, grading.expected_calls, strict=True)):
        descriptions = check_results(grading, "a timed call", call, eager)
        for result_index, (description, expected, budget) in enumerate(
            zip(descriptions, eager, grading.budgets, strict=True)
        ):
            got = read(grading, description, "a timed call", (call_index, result_index))
            if early.differs(call_index, result_index, got):
                raise FoundError(WRONG, f"a timed call's {CHANGES_LATE}")
            found = budget.compare_some(got.reshape(-1), expected.reshape(-1))
            if not found:
                continue
            if _is_of_another_call(grading, call_index, result_index, budget, got):
                reason = "a timed call's result is that of another call"
                raise FoundError(WRONG, reason)
            raise FoundError(WRONG, f"a timed call was wrong: {found}"[:LONGEST_LINE])


def _is_of_another_call(
    grading: Grading, call_index: int, result_index: int, budget: object, got: torch.Tensor
) -> bool:
    """Return whether a wrong result is right for another call of the request."""
    others = [call for i, call in enumerate(grading.expected_calls) if i != call_index]
    return any(
        budget.compare_some(got.reshape(-1), c[result_index].reshape(-1)) is None for c in others
    )


def compiled_alone(yardsticks: list[str]) -> list[str]:
    """Return the yardsticks that training steps have, too."""
    return [name for name in yardsticks if name == COMPILED]
