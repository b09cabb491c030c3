"""Training steps beside eager's: a forward that autograd records, and its backward.

The rounds are those of `timed_forwards`. In addition the outputs' gradients are new in every step,
and all results and gradients are compared.
"""

import math
from functools import cache
from typing import NamedTuple

import torch

from referee.call_names import MODULE
from referee.checks.gradients import OUT_OF_MEMORY
from referee.checks.intact import check_intact
from referee.checks.solution_step import (
    check_results_of_step_apart,
    prepare_step,
    read_quantity,
)
from referee.checks.turn_memory import reading_results, turn, write_state_for_all
from referee.comparison.quantity import Quantity
from referee.contestants.descriptions import ResultIndex
from referee.contestants.errors import RaisedError
from referee.eager_processes import EagerOutOfMemoryError
from referee.grading import Grading
from referee.reference.file import NoRoomError
from referee.reference.problem import StepArguments
from referee.rounds.early_elements import CHANGES_LATE, EarlyElements
from referee.rounds.round_memory import RoundMemory
from referee.rounds.samples import RoundSamples, note_clock
from referee.rounds.step_samples import set_step_times
from referee.rounds.timed_requests import (
    EMPTY_REQUESTS,
    TimedCall,
    empty_call,
    make_flush,
)
from referee.rounds.timed_steps import count_kept_bytes, time_steps
from referee.rounds.turns import in_random_order, only_compiled, timed_calls_of, timed_rounds
from referee.times.timings import StepTimings, Timings
from referee.times.two_clocks import Sample
from referee.verdict import NotCorrectError
from referee.verdict_words import WRONG

FORWARDS_OF_A_STEP = 3  # this many forwards take about as long as a training step


class DrawnStep(NamedTuple):
    """The arguments of a training step and what the reference makes of them.

    Attributes:
        arguments: the module, the inputs and the outputs' gradients.
        eager_results: the reference's results and gradients.
    """

    arguments: StepArguments
    eager_results: list[torch.Tensor | None]


class ChangingShapeError(Exception):
    """The shape of a result or gradient depends on the inputs' values."""


def time_training_steps(grading: Grading) -> None:
    """Time training steps if the gradients were right; a note says why they could not be timed."""
    if grading.findings.quantities and (note := _time_if_possible(grading)):
        grading.findings.times.steps = None
        grading.verdict.notes.append(note)


def _time_if_possible(grading: Grading) -> str:
    """Time training steps; return why they cannot be timed, or ""."""
    try:
        _time_rounds(grading)
    except ChangingShapeError:  # draws before this one had equal shapes by chance
        return "the training step is not timed: shapes of its results depend on the inputs' values"
    except (NoRoomError, torch.OutOfMemoryError, EagerOutOfMemoryError):
        return "no memory for the training step"
    except RaisedError as error:  # the solution's: what eager raises is never a RaisedError
        if not error.is_lack_of_memory:
            raise
        return OUT_OF_MEMORY
    return ""


def _time_rounds(grading: Grading) -> None:
    """Time training steps; set `grading.findings.times.steps`."""
    resources = grading.resources
    timed_calls = timed_calls_of(grading, only_compiled(resources.eager.yardsticks))
    step = _start_step(grading, timed_calls)
    step_count = math.ceil(resources.plan.call_count / FORWARDS_OF_A_STEP)
    runner = _StepRunner(grading, timed_calls, step_count)
    runner.prepare()
    for samples in timed_rounds(grading, runner.run_round, "the training step"):
        runner.samples.add(samples)
        set_step_times(step, runner.samples)
    note_clock(grading, runner.samples)
    for quantity in runner.quantities:
        if mistake := quantity.find_mistake():
            raise NotCorrectError(WRONG, f"in timed steps, {mistake}")


def _start_step(grading: Grading, timed_calls: list[TimedCall]) -> StepTimings:
    """Add the times of training steps to those of the setting, at first empty; return them."""
    problem = grading.problem
    forward = Timings(problem.device.type, problem.names, problem.limiting_rate, work=0)
    backward = Timings(problem.device.type, problem.names, problem.limiting_rate, work=0)
    for half in (forward, backward):
        half.start(timed_call.name for timed_call in timed_calls)
    grading.findings.times.steps = StepTimings(forward, backward)
    return grading.findings.times.steps


class _StepRunner:
    """Runs the rounds of training steps.

    Args:
        grading: the file under grading.
        timed_calls: those that take turns, besides the empty call.
        step_count: the number of training steps of a request.

    Attributes:
        samples: the samples of the timed rounds so far, and of all empty requests.
        quantities: results and gradients of a step; they take in how far off the solution's are.
    """

    def __init__(self, grading: Grading, timed_calls: list[TimedCall], step_count: int) -> None:
        self._grading = grading
        self._step_count = step_count
        self.quantities = [quantity.without_steps() for quantity in grading.findings.quantities]
        self._nothing = empty_call(grading.resources)
        self._timed_calls = [*timed_calls, self._nothing]
        self.samples = RoundSamples(grading.problem.names, timed_calls)
        self._flush = make_flush(grading.resources)
        self._memory = RoundMemory(
            grading.resources, [timed_call.contestant for timed_call in timed_calls]
        )

    def prepare(self) -> None:
        """Count the bytes that autograd keeps and time some empty requests."""
        _draw_round(self._grading, self._step_count)
        self._grading.findings.times.steps.kept = count_kept_bytes(self._grading)
        check_intact(self._grading, "a forward whose kept bytes are counted")
        for _ in range(EMPTY_REQUESTS):
            self._flush()
            timed = time_steps(self._grading, self._nothing, self._step_count)
            self.samples.empty_samples.append(timed.sample)
        self._memory.begin()

    def run_round(self) -> dict[str, Sample]:
        """Run a round; return the timed calls' samples by name."""
        drawn_steps = _draw_round(self._grading, self._step_count)
        samples = {}
        for timed_call in in_random_order(self._timed_calls):
            samples[timed_call.name] = self._take_turn(timed_call, drawn_steps)
        self._memory.end_round()
        self.samples.empty_samples.append(samples.pop(self._nothing.name))
        return samples

    def _take_turn(self, timed_call: TimedCall, drawn_steps: list[DrawnStep]) -> Sample:
        """Time a request; compare the results and gradients if they are the solution's."""
        grading = self._grading
        templates_of_steps = None
        # Modules, eager's too, may have to copy their results. Nobody reads those of yardsticks.
        if timed_call.call == MODULE:
            templates_of_steps = [drawn.eager_results for drawn in drawn_steps]
        with turn(grading, timed_call.contestant, self._memory.end_turn):
            self._flush()
            self._memory.begin_turn()
            timed = time_steps(grading, timed_call, self._step_count, templates_of_steps)
            if timed_call.contestant is grading.solution:
                self._compare_request(timed.reply["returned"], drawn_steps, timed.early_elements)
        return timed.sample

    def _compare_request(
        self, returned: list[dict], drawn_steps: list[DrawnStep], early_elements: EarlyElements
    ) -> None:
        """Compare all results and gradients of a timed request.

        Args:
            returned: the reply's description of what each step has returned.
            drawn_steps: the steps' arguments, and the reference's results and gradients.
            early_elements: the elements that were read before the clock stopped.

        Raises:
            NotCorrectError: something is wrong.
            ChangingShapeError: the reference's results have other shapes than in other draws.
        """
        with reading_results(self._grading, "a timed step", len(returned), with_gradients=True):
            for call_index, (returned_by_step, drawn) in enumerate(
                zip(returned, drawn_steps, strict=True)
            ):
                self._compare_step(call_index, returned_by_step["results"], drawn, early_elements)
        for quantity in self.quantities:
            if quantity.is_wrong_in_one_step:
                raise NotCorrectError(WRONG, f"a timed step's {quantity.find_mistake()}")

    def _compare_step(
        self,
        call_index: int,
        descriptions: list[dict],
        drawn: DrawnStep,
        early_elements: EarlyElements,
    ) -> None:
        """Compare all results and gradients of one step; `quantities` record how far off they are.

        Args:
            call_index: the index of the step in the request.
            descriptions: the reply's, one for each quantity.
            drawn: the step's arguments, and the reference's results and gradients.
            early_elements: as for `_compare_request`.
        """
        reference = self._grading.reference
        if len(descriptions) != len(self.quantities):
            raise NotCorrectError(WRONG, "a timed step gives another kind of result than before")
        check_results_of_step_apart(
            self._grading, self.quantities, descriptions, "a timed step's forward"
        )
        # Other roundings are computed only if a tensor is beyond its limits, and those of gradients
        # then once for all of them.
        errors_of_other_roundings = cache(lambda: reference.errors_of_other_roundings(*drawn))
        for result_index, quantity in enumerate(self.quantities):
            eager_result = drawn.eager_results[result_index]
            if quantity.spec is None or eager_result is None:
                continue
            if quantity.spec.shape != list(eager_result.shape):
                raise ChangingShapeError
            description = descriptions[result_index]
            got = self._read(
                quantity, description, ResultIndex(call_index, result_index), early_elements
            )
            quantity.judge_timed(
                got,
                eager_result,
                reference.rounded_otherwise(drawn.arguments.inputs, result_index),
                lambda i=result_index: errors_of_other_roundings()[i],
            )

    def _read(
        self,
        quantity: Quantity,
        description: dict,
        index: ResultIndex,
        early_elements: EarlyElements,
    ) -> torch.Tensor:
        """Return the solution's result or gradient, which must not change late.

        Args:
            quantity: the result or gradient.
            description: describes the solution's.
            index: its index in the reply.
            early_elements: as for `_compare_request`.
        """
        case_name = f"a timed step's {quantity.name}"
        got = read_quantity(self._grading, quantity, description, case_name, index)
        if early_elements.differs(index, got):
            raise NotCorrectError(WRONG, f"a timed step's {CHANGES_LATE}")
        return got


def _draw_round(grading: Grading, step_count: int) -> list[DrawnStep]:
    """Draw inputs, outputs' gradients and parameters, and write them."""
    problem, resources = grading.problem, grading.resources
    grading.forget_round()
    grading.reference.redraw_values()
    inputs_of_steps = [problem.draw() for _ in range(step_count)]
    grading.latest_inputs = inputs_of_steps[0]
    drawn_steps = [_draw_step(grading, inputs) for inputs in inputs_of_steps]
    grading.write_inputs(inputs_of_steps)
    gradients_of_steps = [drawn.arguments.output_gradients for drawn in drawn_steps]
    resources.memory.write_output_gradients(gradients_of_steps)
    write_state_for_all(grading)
    return drawn_steps


def _draw_step(grading: Grading, inputs: list) -> DrawnStep:
    """Draw the outputs' gradients of a training step, and run the reference's."""
    arguments = prepare_step(grading, inputs)
    return DrawnStep(arguments, grading.reference.eager_results_of_step(arguments))
