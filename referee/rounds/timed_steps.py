"""Timed requests of training steps, and the bytes that autograd keeps in a step."""

from referee.contestants.reading import MAX_NUMBER
from referee.grading import Grading
from referee.request_memory import Templates
from referee.rounds.early_elements import EarlyElements
from referee.rounds.step_samples import make_step_sample
from referee.rounds.timed_requests import RequestOutcome, TimedCall


def time_steps(
    grading: Grading,
    timed_call: TimedCall,
    step_count: int,
    templates_of_steps: list[Templates] | None = None,
) -> RequestOutcome:
    """Time the training steps of one request of a timed call.

    Args:
        grading: the file under grading.
        timed_call: the call, with the contestant that is asked for it.
        step_count: the number of training steps of the request.
        templates_of_steps: as `templates_of_calls` for `timed_requests.time_request`.
    """
    resources = grading.resources
    contestant = timed_call.contestant
    parameters = grading.reference.parameter_names()
    if contestant is grading.solution:  # its file may give them other names
        parameters = [grading.state.own_name_of[name] for name in parameters]
    early_elements = EarlyElements(resources, contestant)
    outputs = None
    if templates_of_steps is not None:
        outputs = resources.memory.room_for(templates_of_steps)
    reply = contestant.ask(
        "run_steps",
        early_elements.read,
        call_name=timed_call.call,
        inputs=resources.memory.input_locations(step_count),
        output_gradients=resources.memory.output_gradient_locations(step_count),
        parameters=parameters,
        outputs=outputs,
    )
    sample = make_step_sample(reply, contestant.seconds, step_count)
    return RequestOutcome(sample, reply, early_elements)


def count_kept_bytes(grading: Grading) -> dict[str, int]:
    """Return the bytes that autograd keeps from a forward to its backward, by timed call.

    Hooks count the bytes. A program that raises because of the hooks is left out. Eager comes
    first, because the solution may change the inputs: the caller checks that afterwards.
    """
    names, resources = grading.problem.names, grading.resources
    kept_bytes = {}
    for name, process in (
        (names.eager, resources.eager.members[0]),
        (names.solution, grading.solution),
    ):
        reply = process.ask("count_saved_bytes", inputs=resources.memory.input_locations(1))
        is_number = type(reply["bytes"]) is int  # isinstance would accept True, too
        if is_number and 0 <= reply["bytes"] < MAX_NUMBER:
            kept_bytes[name] = reply["bytes"]
    return kept_bytes
