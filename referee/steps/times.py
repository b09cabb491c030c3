"""Forwards beside eager's: new inputs and parameters in every round, every result compared.

A round is:

    1. While all processes are stopped, inputs and parameters are drawn, and the referee computes
       the reference's results for them.
    2. The solution, eager twice, the yardsticks and the empty call take turns, in random order.
       Each goes on, calls, replies and is stopped; the clock is described in `contestant`.
    3. After the solution's turn its results are compared, whole; its inputs and parameters, too.

Short calls share a request: each has inputs and a result of its own.
"""

import math
import random
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from time import sleep
from typing import NamedTuple

import torch

from referee import timing
from referee.bench import Bench, write_all
from referee.contestant import Contestant
from referee.forward import check_eager_intact, check_intact, check_results, read
from referee.grading import Grading
from referee.names import COMPILED, MODULE, NOTHING
from referee.reading import LARGEST_NUMBER, BadDescriptionError, UnreadableError, checked
from referee.reference_file import LONGEST_LINE
from referee.timing import (
    Fastest,
    Sample,
    Timings,
    empty_request_seconds,
    fastest_empty,
    overhead,
    seconds_of_calls,
)
from referee.verdict import ERROR, FASTER, WRONG, FoundError, Run, compared

# Seconds of a request, so long that the spread of an empty one is a small part of it.
LEAST_SECONDS = {"cpu": 4e-3, "cuda": 24e-3}
MOST_CALLS = 32  # of a request
LARGEST_REQUEST = {"cpu": 1 << 27, "cuda": 1 << 32}  # bytes of inputs and outputs
FLUSH_BYTES = 1 << 29  # several times the largest L2
# Memory up to so many bytes is written before every request, so that all contestants find the same
# part of it in the caches. Larger memory is written once a round.
CACHED_BYTES = 1 << 26
LOOKED_AT = 32  # elements of a GPU's result that are read before the clock stops
CHANGES_LATE = "result is not complete when its clock stops"
EMPTY_FIRST = 3  # empty requests, before it is known how many calls a request has
FALSE_CLOCK = "its clock is false: the referee's counts"
HIDDEN_PART = 0.1  # of a call's time: if a clock can hide less, the line does not mention it
UNCONFIRMED = "only its own clock says that it is faster: the calls are too short for the referee's"
EMPTY_REQUESTS = 12  # before the first round
ALONE_REQUESTS = 5  # of eager, before any solution has started
# Eager may be this many times slower beside a solution than alone, beyond its own variation.
SLOWER = 1.5
# The driver clears the memory that large checks have given back, which slows who is timed then.
SECONDS_TO_SETTLE = 1.0
COMPARED_TURNS = 9  # of eager's old process and a new one


class Entrant(NamedTuple):
    """A participant of a round: its name, its process, and the name of the call there."""

    name: str
    process: Contestant
    call: str


class Plan(NamedTuple):
    """How a problem is timed.

    Attributes:
        calls: of one request.
        alone: eager's seconds before any solution had started.
    """

    calls: int
    alone: list[float]


def plan(bench: Bench) -> Plan:
    """Return how the problem is timed under its setting, from eager's times alone.

    Called before the first solution starts; later calls return what was found then.
    """
    if not is_planned(bench):
        bench.plans[bench.problem.setting] = _make_plan(bench)
    return bench.plans[bench.problem.setting]


def is_planned(bench: Bench) -> bool:
    """Return whether eager has been timed alone under the problem's setting."""
    return bench.problem.setting in bench.plans


def _make_plan(bench: Bench) -> Plan:
    problem = bench.problem
    bench.start_eager()
    write_all(bench.inputs, bench.pool, [problem.draw()])
    bench.prepare(())
    process = bench.eager[0].contestant
    eager = Entrant("eager", process, MODULE)
    flush = make_flush(bench)
    empty = empty_request_seconds(outer_times(time_nothing(bench, 1, flush, EMPTY_FIRST)))
    first = seconds_of_calls([alone(bench, eager, 1, flush) for _ in range(2)], empty)[-1]
    kind = problem.device.type
    count = min(MOST_CALLS, math.ceil(LEAST_SECONDS[kind] / first))
    each = max(problem.input_bytes + problem.output_bytes, 1)
    count = max(1, min(count, LARGEST_REQUEST[kind] // each))
    write_all(bench.inputs, bench.pool, [problem.draw() for _ in range(count)])
    empty = empty_request_seconds(outer_times(time_nothing(bench, count, flush)))
    samples = [alone(bench, eager, count, flush) for _ in range(ALONE_REQUESTS)]
    bench.release(process)
    return Plan(count, seconds_of_calls(samples, empty))


def alone(bench: Bench, entrant: Entrant, count: int, flush: Callable[[], None]) -> Sample:
    """Time one request of eager's whose results nobody looks at."""
    sample, _, _ = request(bench, entrant, count, flush)
    entrant.process.ask("release")
    return sample


def time_nothing(
    bench: Bench, count: int, flush: Callable[[], None], requests: int = EMPTY_REQUESTS
) -> list[Sample]:
    """Time some empty requests."""
    nothing = Entrant("nothing", bench.eager[0].contestant, NOTHING)
    return [alone(bench, nothing, count, flush) for _ in range(requests)]


def outer_times(samples: list[Sample]) -> list[float]:
    """Return the seconds of requests by this process's clock."""
    return [sample.outer for sample in samples]


def make_flush(bench: Bench) -> Callable[[], None]:
    """Return what empties a GPU's L2; a CPU's caches hold what was written last, for all alike."""
    if bench.problem.device.type == "cpu":
        return lambda: None
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=bench.problem.device)

    def flush() -> None:
        buffer.zero_()
        torch.cuda.synchronize(bench.problem.device)

    return flush


def request(
    bench: Bench,
    entrant: Entrant,
    count: int,
    flush: Callable[[], None],
    results: list | None = None,
) -> tuple[Sample, dict, "EarlyElements"]:
    """Time one request of an entrant's; return the sample, the reply, and what was read early.

    Args:
        bench: the problem's.
        entrant: who is asked.
        count: calls of the request.
        flush: empties the caches before.
        results: the reference's of one call, for the forms of copies.
    """
    room = None
    if bench.copies and results:
        room = bench.room(results, count)
    flush()
    process = entrant.process
    early = EarlyElements(bench, process)
    reply = process.ask(
        "call", early.read, name=entrant.call, inputs=bench.forms(count), outputs=room
    )
    own = checked_seconds(reply["seconds"], count)
    return Sample(own, process.seconds), reply, early


class EarlyElements:
    """Elements of a GPU's results that are read after the reply and before the clock stops.

    Work can be queued on a GPU behind a false reply, and it runs on while the process is stopped.
    Which elements are read is chosen when the reply is there. They must be the same when the whole
    results are read: what was not computed while the clock ran differs. A process on a CPU is
    stopped, which is enough, and nothing is read.

    Args:
        bench: the problem's.
        process: whose results are read.
    """

    def __init__(self, bench: Bench, process: Contestant) -> None:
        self._is_needed = bench.problem.device.type == "cuda" and not bench.copies
        self._reader = process.reader
        # By the call and which of its results: the places in flat order, and the values there.
        self._seen: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def read(self, reply: dict) -> None:
        """Read some elements of a result of each call; which result is drawn."""
        if not self._is_needed:
            return
        calls = reply["calls"]
        count = max(1, LOOKED_AT // max(len(calls), 1))
        for call_index, call in enumerate(calls):
            with suppress(BadDescriptionError, UnreadableError):  # of which the comparison tells
                self._read_one(call_index, call["results"], count)

    def _read_one(self, call_index: int, descriptions: list[dict], count: int) -> None:
        """Read some elements of one of a call's results."""
        readable = [i for i, description in enumerate(descriptions) if description.get("handle")]
        if not readable:
            return
        place = random.choice(readable)
        size = math.prod(checked(descriptions[place])["shape"])
        if 0 < size < LARGEST_NUMBER:
            indices = torch.randint(size, (count,))
            values = self._reader.elements(descriptions[place], indices).cpu()
            self._seen[call_index, place] = indices, values

    def differs(self, call_index: int, place: int, whole: torch.Tensor) -> bool:
        """Return whether the elements that were read early have other bits in the whole result.

        Args:
            call_index: which call of the request.
            place: which of its results.
            whole: the result, read after the clock has stopped.
        """
        if (call_index, place) not in self._seen:
            return False
        indices, values = self._seen[call_index, place]
        now = whole.reshape(-1)[indices.to(whole.device)].cpu()
        return not torch.equal(now.view(torch.uint8), values.view(torch.uint8))


def checked_seconds(seconds: object, count: int) -> list[float]:
    """Return a process's own times, 0 where they are no times; its clock is not needed."""
    is_list = isinstance(seconds, list) and len(seconds) == count
    if not is_list or not all(type(s) is float and 0 <= s < math.inf for s in seconds):
        return [0.0] * count
    return seconds


def time_forwards(grading: Grading) -> None:
    """Time forwards under the setting at hand; set `grading.run`."""
    bench, problem = grading.bench, grading.problem
    chosen = plan(bench)
    bench.start_eager()
    grading.write_inputs([problem.draw()])
    bench.prepare(_yardsticks_to_time(grading))
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
    empties = time_nothing(bench, chosen.calls, flush)

    def one_round() -> dict[str, Sample]:
        new_round(grading, chosen.calls)
        samples = {}
        for entrant in random.sample([*entrants, nothing], len(entrants) + 1):
            write_what_is_small(grading)
            is_solution = entrant.process is grading.solution
            results = grading.results if is_solution or entrant.call == MODULE else None
            sample, reply, early = request(bench, entrant, chosen.calls, flush, results)
            samples[entrant.name] = sample
            if is_solution:
                compare_calls(grading, reply["calls"], early)
            entrant.process.ask("release")
        empties.append(samples.pop("nothing"))
        return samples

    what = f"the forward{problem.setting and f' at {problem.setting}'}"
    every: dict[str, list[Sample]] = {entrant.name: [] for entrant in entrants}
    for samples in timing.rounds(
        one_round, grading.options.rounds, problem.device, what, grading.progress
    ):
        for name, sample in samples.items():
            every[name].append(sample)
        empty = overhead(outer_times(empties), every[names.eager] + every[names.again])
        limit = fastest_empty(empties)
        for name, theirs in every.items():
            wall = [sample.outer / len(sample.own) for sample in theirs]
            timings.set(name, seconds_of_calls(theirs, empty, limit), wall)
    for entrant in entrants:
        bench.release(entrant.process)
    timings.floor = problem.fastest(timings)
    note_clock(grading, every, empty, limit)
    check_eager(grading, chosen)


def note_clock(
    grading: Grading, every: dict[str, list[Sample]], empty: float, limit: Fastest
) -> None:
    """Note that the solution's clock is false, or that it alone says "faster".

    It does where the calls are short, and the solution would not be faster if its clock hid all
    that it can.

    Args:
        grading: the file under grading.
        every: samples by name.
        empty: seconds of an empty request.
        limit: the fastest empty call and request.
    """
    names, kind = grading.problem.names, grading.device.type
    ours, *pair = (every[name] for name in (names.solution, names.eager, names.again))
    eager, again = (seconds_of_calls(samples, empty, limit) for samples in pair)
    times = seconds_of_calls(ours, empty, limit)
    room = timing.hideable_seconds(pair[0] + pair[1], empty)
    note = ""
    if timing.is_clock_false(ours, limit):
        note = FALSE_CLOCK
    elif compared(eager, again, times, kind) == FASTER:
        longest = [seconds + room for seconds in times]
        is_confirmed = compared(eager, again, longest, kind) == FASTER
        note = "" if is_confirmed or room < HIDDEN_PART * median(times) else UNCONFIRMED
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
    """Return who takes part: the solution, eager, eager again, and yardsticks."""
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


def write_what_is_small(grading: Grading) -> None:
    """Write anew what a call reads, and the buffers that a forward changes.

    So all contestants find the same in the caches.
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
        for place, (description, expected, budget) in enumerate(
            zip(descriptions, eager, grading.budgets, strict=True)
        ):
            got = read(grading, description, "a timed call", (call_index, place))
            if early.differs(call_index, place, got):
                raise FoundError(WRONG, f"a timed call's {CHANGES_LATE}")
            found = budget.compare_some(got.reshape(-1), expected.reshape(-1))
            if not found:
                continue
            if _is_of_another_call(grading, call_index, place, budget, got):
                reason = "a timed call's result is that of another call"
                raise FoundError(WRONG, reason)
            raise FoundError(WRONG, f"a timed call was wrong: {found}"[:LONGEST_LINE])


def _is_of_another_call(
    grading: Grading, call_index: int, place: int, budget: object, got: torch.Tensor
) -> bool:
    """Return whether a wrong result is right for another call of the request."""
    others = [c for i, c in enumerate(grading.expected_calls) if i != call_index]
    return any(budget.compare_some(got.reshape(-1), c[place].reshape(-1)) is None for c in others)


def check_eager(grading: Grading, chosen: Plan) -> None:
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
    """Return whether nine of ten times are slower by more than the noise of nine of ten others."""
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
                alone(bench, Entrant("eager", eager[0].contestant, MODULE), calls, flush)
                for eager in (old, bench.eager)
            ]
            turns.append(median(pair[0].own) > SLOWER * median(pair[1].own))
    finally:
        for eager in old:
            eager.close()
        bench.unprepare()
    return all(turns)


def _is_faster_without(grading: Grading, beside: list[float], calls: int) -> bool:
    """Return whether eager is as fast as before once the solution's process has ended.

    What a stopped process has queued on a GPU runs on. Nothing can be asked of it after this.
    """
    bench = grading.bench
    grading.solution.close()
    flush = make_flush(bench)
    eager = Entrant("eager", bench.eager[0].contestant, MODULE)
    after = [alone(bench, eager, calls, flush) for _ in range(COMPARED_TURNS)]
    return _is_slower(beside, [median(sample.own) for sample in after])


def compiled_alone(yardsticks: list[str]) -> list[str]:
    """Return the yardsticks that training steps have, too."""
    return [name for name in yardsticks if name == COMPILED]
