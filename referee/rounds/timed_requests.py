"""Timed requests: who is asked, how many calls a request has, and what the two clocks say."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from referee.bench import Bench, Plan
from referee.contestants.contestant import Contestant
from referee.names import MODULE, NOTHING
from referee.rounds.early_elements import EarlyElements
from referee.times.two_clocks import Sample, measure_overhead

# A request has enough calls to last so many seconds: many times the spread of empty requests.
MIN_REQUEST_SECONDS = {"cpu": 4e-3, "cuda": 24e-3}
MAX_CALLS = 32  # of a request
MAX_TENSOR_BYTES = {"cpu": 1 << 27, "cuda": 1 << 32}  # bytes of inputs and outputs
FLUSH_BYTES = 1 << 29  # several times the largest L2
FIRST_EMPTY_REQUESTS = 3  # before it is known how many calls a request has
MAX_CALL_SECONDS = 1e6  # a reply with a longer one is absurd
EMPTY_REQUESTS = 12  # before the first round
REQUESTS_ALONE = 5  # of eager, before any solution starts


class TimedCall(NamedTuple):
    """A call that is timed in each round: the solution's, eager's, a yardstick or the empty call.

    Several timed calls may share a contestant, as those of eager and the yardsticks do.

    Attributes:
        name: its name in reports.
        contestant: the process that is asked.
        call: the name of the call that it is asked for; see `names`.
    """

    name: str
    contestant: Contestant
    call: str


class TimedRequest(NamedTuple):
    """A request and what came of it.

    Attributes:
        sample: its times.
        reply: the contestant's reply.
        early_elements: the elements that were read before the clock stopped.
    """

    sample: Sample
    reply: dict
    early_elements: EarlyElements


def plan_of(bench: Bench) -> Plan:
    """Return the plan for the problem's setting, which follows from eager's times alone.

    The first call makes the plan and has to come before the first solution starts. Later calls
    return the same plan.
    """
    if not is_planned(bench):
        bench.plans[bench.problem.setting] = _make_plan(bench)
    return bench.plans[bench.problem.setting]


def is_planned(bench: Bench) -> bool:
    """Return whether eager has been timed alone under the problem's setting."""
    return bench.problem.setting in bench.plans


def _make_plan(bench: Bench) -> Plan:
    """Time eager alone: two single calls, which say how many a request has; then some requests."""
    problem = bench.problem
    bench.eager.start()
    bench.memory.write_inputs([problem.draw()])
    bench.eager.set_precision()
    call_count = _calls_of_a_request(bench, _seconds_of_a_warm_call(bench))
    bench.memory.write_inputs([problem.draw() for _ in range(call_count)])
    seconds_alone = _time_eager(bench, call_count, REQUESTS_ALONE, EMPTY_REQUESTS)
    bench.free_results(bench.eager.processes[0].contestant)
    return Plan(call_count, seconds_alone)


def _seconds_of_a_warm_call(bench: Bench) -> float:
    """Return eager's seconds of a single call after the first one, which may be slow."""
    seconds = _time_eager(
        bench, call_count=1, request_count=2, empty_request_count=FIRST_EMPTY_REQUESTS
    )
    return seconds[1]


def _time_eager(
    bench: Bench, call_count: int, request_count: int, empty_request_count: int
) -> list[float]:
    """Return eager's seconds of a call in each of some requests.

    Args:
        bench: the bench of the problem, with the inputs of a request written.
        call_count: the number of calls of a request.
        request_count: the number of eager's requests.
        empty_request_count: the number of empty requests before these; they show the overhead.
    """
    eager = TimedCall("eager", bench.eager.processes[0].contestant, MODULE)
    flush = make_flush(bench)
    overhead = measure_overhead(time_empty(bench, call_count, flush, empty_request_count), [])
    samples = [time_and_free(bench, eager, call_count, flush) for _ in range(request_count)]
    return overhead.seconds_of_calls(samples)


def _calls_of_a_request(bench: Bench, seconds: float) -> int:
    """Return how many calls a request has, if each takes so many seconds."""
    problem = bench.problem
    device = problem.device.type
    call_count = min(MAX_CALLS, math.ceil(MIN_REQUEST_SECONDS[device] / seconds))
    bytes_of_a_call = max(problem.input_bytes + problem.output_bytes, 1)
    return max(1, min(call_count, MAX_TENSOR_BYTES[device] // bytes_of_a_call))


def time_and_free(
    bench: Bench, timed_call: TimedCall, call_count: int, flush: Callable[[], None]
) -> Sample:
    """Time one request, whose results are freed without a comparison."""
    timed = time_request(bench, timed_call, call_count, flush)
    timed_call.contestant.ask("release")
    return timed.sample


def time_empty(
    bench: Bench, call_count: int, flush: Callable[[], None], request_count: int = EMPTY_REQUESTS
) -> list[Sample]:
    """Time requests whose calls do nothing."""
    nothing = empty_call(bench)
    return [time_and_free(bench, nothing, call_count, flush) for _ in range(request_count)]


def empty_call(bench: Bench) -> TimedCall:
    """Return the timed call whose calls do nothing, in eager's first process."""
    return TimedCall("nothing", bench.eager.processes[0].contestant, NOTHING)


def make_flush(bench: Bench) -> Callable[[], None]:
    """Return a function that empties a GPU's L2.

    On a CPU it does nothing: the caches hold what was written last, the same for all contestants.
    """
    if bench.problem.device.type == "cpu":
        return lambda: None
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=bench.problem.device)

    def flush() -> None:
        """Write more than the L2 holds."""
        buffer.zero_()
        torch.cuda.synchronize(bench.problem.device)

    return flush


def time_request(
    bench: Bench,
    timed_call: TimedCall,
    call_count: int,
    flush: Callable[[], None],
    templates: list | None = None,
) -> TimedRequest:
    """Time one request of a timed call.

    Args:
        bench: the bench of the problem that is timed.
        timed_call: the call, with the contestant that is asked for it.
        call_count: the number of calls of the request.
        flush: empties the caches before it.
        templates: tensors with the shapes and dtypes of one call's results. Where results are
            copied within the clock, room for the copies is made from them. None if nobody reads the
            results, as those of yardsticks.
    """
    room = None
    if templates is not None:
        room = bench.memory.room_for(templates, call_count)
    flush()
    contestant = timed_call.contestant
    early_elements = EarlyElements(bench, contestant)
    reply = contestant.ask(
        "run_forwards",
        early_elements.read,
        call_name=timed_call.call,
        inputs=bench.memory.input_locations(call_count),
        outputs=room,
    )
    call_seconds = checked_seconds(reply["seconds"], call_count)
    backlog = reply.get("backlog")
    if not _is_seconds(backlog):  # as on a CPU, which has none
        backlog = math.inf
    return TimedRequest(Sample(call_seconds, contestant.seconds, backlog), reply, early_elements)


def checked_seconds(seconds: object, call_count: int) -> list[float]:
    """Return the seconds of each call by the process's clock.

    If a reply has no such list, or an absurd number in it, the seconds are zeros, and only the
    referee's clock counts.

    Args:
        seconds: what the reply has.
        call_count: how many seconds there must be.
    """
    is_list = isinstance(seconds, list) and len(seconds) == call_count
    if not is_list or not all(map(_is_seconds, seconds)):
        return [0.0] * call_count
    return seconds


def _is_seconds(value: object) -> bool:
    """Return whether a value of a reply can be a number of seconds."""
    return type(value) is float and 0 <= value <= MAX_CALL_SECONDS
