"""Buffers that the reference's forward changes, such as the running statistics of a BatchNorm.

A user of the module sees them in its `state_dict()`. So the solution's must be the same after a
forward and after a training step, within the usual error budget. Other buffers are not compared.
"""

from referee.call_names import MODULE
from referee.checks.copied_results import room_for_copies
from referee.checks.intact import check_intact
from referee.checks.returned_results import check_description, read_result
from referee.comparison.compare import flat_reals
from referee.comparison.reference_tensor import ReferenceTensor
from referee.contestants.descriptions import ResultIndex
from referee.grading import Grading
from referee.message_lines import MAX_LINE_LENGTH
from referee.verdict import NotCorrectError
from referee.verdict_words import WRONG


def check_buffers(grading: Grading) -> None:
    """Compare the buffers after a forward, if the reference's forward changes any."""
    if not grading.problem.changed_buffers:
        return
    grading.progress("checking", "the buffers")
    inputs = grading.draw_inputs()
    grading.latest_inputs = inputs
    reference_buffers = grading.reference.buffers_after(inputs)
    grading.write_inputs([inputs])
    prepare_buffers(grading)
    locations = grading.resources.memory.input_locations(1)
    grading.solution.ask("run_forwards", call_name=MODULE, inputs=locations)
    grading.verdict.case_count += 1
    check_intact(grading, "a forward")
    compare_buffers(grading, reference_buffers, "a forward")
    grading.resources.free_results(grading.solution)


def prepare_buffers(grading: Grading) -> None:
    """Write the state where the solution reads it, before a call whose buffers are compared."""
    grading.state.move_back()
    grading.write_state()


def compare_buffers(
    grading: Grading, reference_buffers: dict[str, ReferenceTensor], case_name: str
) -> None:
    """Compare the solution's buffers, as its latest call has left them, with the reference's.

    Args:
        grading: the file under grading.
        reference_buffers: the reference's, by its names, as `ReferenceModule.buffers_after` makes
            them.
        case_name: the case in messages.
    """
    names = [name for name in reference_buffers if _is_surely_matched(grading, name)]
    specs = [reference_buffers[name].spec for name in names]
    reply = grading.solution.ask(
        "describe_buffers",
        names=[grading.state.own_name_of[name] for name in names],
        outputs=room_for_copies(grading, specs),
    )
    for i, (name, description) in enumerate(zip(names, reply["buffers"], strict=True)):
        buffer = f"{case_name}: its buffer {name}"
        check_description(grading, description, specs[i], buffer)
        got = read_result(grading, description, buffer, ResultIndex(0, i))
        mistake = reference_buffers[name].compare(flat_reals(got)).mistake
        if mistake:
            reason = f"{buffer} is not what the reference's forward makes of it: {mistake}"
            raise NotCorrectError(WRONG, reason[:MAX_LINE_LENGTH])


def _is_surely_matched(grading: Grading, name: str) -> bool:
    """Return whether a buffer of the solution was found by its name, or at least by its value.

    Where the referee cannot read the solution's memory, a buffer of another name was found by its
    shape alone, and may be another one.
    """
    return grading.solution.is_readable or grading.state.own_name_of[name] == name
