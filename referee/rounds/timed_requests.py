"""Timed requests: who is asked, how many calls a request has, and what the two clocks say."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from referee.call_names import MODULE, NOTHING
from referee.contestants.contestant import Contestant
from referee.request_memory import Templates
from referee.resources import Plan, Resources
from referee.rounds.early_elements import EarlyElements
from referee.times.two_clocks import Sample, measure_overhead

# A request has enough calls to last this many seconds, but at most MAX_CALLS.
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
        call: the name of the call that it is asked for; see `call_names`.
    """

    name: str
    contestant: Contestant
    call: str


class RequestOutcome(NamedTuple):
    """A request and what came of it.

    Attributes:
        sample: its times.
        reply: the contestant's reply.
        early_elements: the elements that were read before the clock stopped.
    """

    sample: Sample
    reply: dict
    early_elements: EarlyElements


def make_plan(resources: Resources) -> Plan:
    """Time eager alone, before any solution starts.

    The second of two single calls says how many calls a request has; then some requests follow.
    """
    problem = resources.problem
    resources.eager.start()
    resources.memory.write_inputs([problem.draw()])
    resources.eager.set_precision()
    # The first call may be slow.
    _, seconds = _time_eager(resources, 1, 2, FIRST_EMPTY_REQUESTS)
    call_count = _calls_of_a_request(resources, seconds)
    resources.memory.write_inputs([problem.draw() for _ in range(call_count)])
    seconds_alone = _time_eager(resources, call_count, REQUESTS_ALONE, EMPTY_REQUESTS)
    resources.free_results(resources.eager.members[0])
    return Plan(call_count, seconds_alone)


def _time_eager(
    resources: Resources, call_count: int, request_count: int, empty_request_count: int
) -> list[float]:
    """Return eager's seconds of a call in each of some requests.

    Args:
        resources: of the problem, with the inputs of a request written.
        call_count: the number of calls of a request.
        request_count: the number of eager's requests.
        empty_request_count: the number of empty requests before these; they show the overhead.
    """
    eager = TimedCall("eager", resources.eager.members[0], MODULE)
    flush = make_flush(resources)
    overhead = measure_overhead(time_empty(resources, call_count, flush, empty_request_count), [])
    samples = [time_and_free(resources, eager, call_count, flush) for _ in range(request_count)]
    return overhead.seconds_of_calls(samples)


def _calls_of_a_request(resources: Resources, seconds: float) -> int:
    """Return how many calls a request has, if each takes this many seconds."""
    problem = resources.problem
    device = problem.device.type
    call_count = min(MAX_CALLS, math.ceil(MIN_REQUEST_SECONDS[device] / seconds))
    bytes_of_a_call = max(problem.input_bytes + problem.output_bytes, 1)
    return max(1, min(call_count, MAX_TENSOR_BYTES[device] // bytes_of_a_call))


def time_and_free(
    resources: Resources, timed_call: TimedCall, call_count: int, flush: Callable[[], None]
) -> Sample:
    """Time one request, whose results are freed without a comparison."""
    timed = time_request(resources, timed_call, call_count, flush)
    timed_call.contestant.ask("release")
    return timed.sample


def time_empty(
    resources: Resources,
    call_count: int,
    flush: Callable[[], None],
    request_count: int = EMPTY_REQUESTS,
) -> list[Sample]:
    """Time requests whose calls do nothing."""
    nothing = empty_call(resources)
    return [time_and_free(resources, nothing, call_count, flush) for _ in range(request_count)]


def empty_call(resources: Resources) -> TimedCall:
    """Return the timed call whose calls do nothing, in eager's first process."""
    return TimedCall("nothing", resources.eager.members[0], NOTHING)


def make_flush(resources: Resources) -> Callable[[], None]:
    """Return a function that empties a GPU's L2.

    On a CPU it does nothing: the caches hold what was written last, the same for all contestants.
    """
    if resources.problem.device.type == "cpu":
        return lambda: None
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=resources.problem.device)

    def flush() -> None:
        """Write more than the L2 holds."""
        buffer.zero_()
        torch.cuda.synchronize(resources.problem.device)

    return flush


def time_request(
    resources: Resources,
    timed_call: TimedCall,
    call_count: int,
    flush: Callable[[], None],
    templates_of_calls: list[Templates] | None = None,
) -> RequestOutcome:
    """Time one request of a timed call.

    Args:
        resources: of the problem that is timed.
        timed_call: the call, with the contestant that is asked for it.
        call_count: the number of calls of the request.
        flush: empties the caches before it.
        templates_of_calls: as for `RequestMemory.room_for`; None if nobody reads the results, as
            those of yardsticks.
    """
    room = None
    if templates_of_calls is not None:
        room = resources.memory.room_for(templates_of_calls)
    flush()
    contestant = timed_call.contestant
    early_elements = EarlyElements(resources, contestant)
    reply = contestant.ask(
        "run_forwards",
        early_elements.read,
        call_name=timed_call.call,
        inputs=resources.memory.input_locations(call_count),
        outputs=room,
    )
    call_seconds = checked_seconds(reply["seconds"], call_count)
    sample = Sample(call_seconds, contestant.seconds, checked_backlog(reply))
    return RequestOutcome(sample, reply, early_elements)


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


def checked_backlog(reply: dict) -> float:
    """Return the backlog of a reply, see `Sample`; infinite if it has none, as on a CPU."""
    backlog = reply.get("backlog")
    return backlog if _is_seconds(backlog) else math.inf


def _is_seconds(value: object) -> bool:
    """Return whether a value of a reply can be a number of seconds."""
    return type(value) is float and 0 <= value <= MAX_CALL_SECONDS
