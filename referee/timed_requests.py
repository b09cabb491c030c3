"""Timed requests: who is asked, how many calls a request has, what its clocks say."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from referee.bench import Bench, write_all
from referee.contestant import Contestant
from referee.early_elements import EarlyElements
from referee.names import MODULE, NOTHING
from referee.timing import Sample, measure_overhead

# Seconds of a request, so long that the spread of an empty one is a small part of it.
LEAST_SECONDS = {"cpu": 4e-3, "cuda": 24e-3}
MOST_CALLS = 32  # of a request
LARGEST_REQUEST = {"cpu": 1 << 27, "cuda": 1 << 32}  # bytes of inputs and outputs
FLUSH_BYTES = 1 << 29  # several times the largest L2
EMPTY_FIRST = 3  # empty requests, before it is known how many calls a request has
EMPTY_REQUESTS = 12  # before the first round
ALONE_REQUESTS = 5  # of eager, before any solution has started


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
    bench.prepare_yardsticks(())
    process = bench.eager[0].contestant
    eager = Entrant("eager", process, MODULE)
    flush = make_flush(bench)
    overhead = measure_overhead(time_empty(bench, 1, flush, EMPTY_FIRST), [])
    first = overhead.seconds_of_calls([time_alone(bench, eager, 1, flush) for _ in range(2)])[-1]
    kind = problem.device.type
    count = min(MOST_CALLS, math.ceil(LEAST_SECONDS[kind] / first))
    each = max(problem.input_bytes + problem.output_bytes, 1)
    count = max(1, min(count, LARGEST_REQUEST[kind] // each))
    write_all(bench.inputs, bench.pool, [problem.draw() for _ in range(count)])
    overhead = measure_overhead(time_empty(bench, count, flush), [])
    samples = [time_alone(bench, eager, count, flush) for _ in range(ALONE_REQUESTS)]
    bench.release(process)
    return Plan(count, overhead.seconds_of_calls(samples))


def time_alone(bench: Bench, entrant: Entrant, count: int, flush: Callable[[], None]) -> Sample:
    """Time one request whose results are not compared."""
    sample, _, _ = time_request(bench, entrant, count, flush)
    entrant.process.ask("release")
    return sample


def time_empty(
    bench: Bench, count: int, flush: Callable[[], None], requests: int = EMPTY_REQUESTS
) -> list[Sample]:
    """Time requests whose calls do nothing."""
    nothing = Entrant("nothing", bench.eager[0].contestant, NOTHING)
    return [time_alone(bench, nothing, count, flush) for _ in range(requests)]


def make_flush(bench: Bench) -> Callable[[], None]:
    """Return a function that empties a GPU's L2.

    On a CPU it does nothing: the caches hold what was written last, the same for all contestants.
    """
    if bench.problem.device.type == "cpu":
        return lambda: None
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=bench.problem.device)

    def flush() -> None:
        buffer.zero_()
        torch.cuda.synchronize(bench.problem.device)

    return flush


def time_request(
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
        results: the reference's results of one call, which are as large as the copies will be.
    """
    room = None
    if bench.copies and results:
        room = bench.room_for(results, count)
    flush()
    process = entrant.process
    early = EarlyElements(bench, process)
    reply = process.ask(
        "call", early.read, name=entrant.call, inputs=bench.forms(count), outputs=room
    )
    own = checked_seconds(reply["seconds"], count)
    return Sample(own, process.seconds), reply, early


def checked_seconds(seconds: object, count: int) -> list[float]:
    """Return the seconds of each call by the process's clock; zeros if its reply has no such list.

    The referee's clock then counts alone.
    """
    is_list = isinstance(seconds, list) and len(seconds) == count
    if not is_list or not all(type(s) is float and 0 <= s < math.inf for s in seconds):
        return [0.0] * count
    return seconds
