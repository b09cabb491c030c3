"""Forwards beside eager's: new inputs and parameters in every round, every result compared.

A round is:

    1. While all processes are stopped, the referee draws inputs and parameters, and computes the
       reference's results for them.
    2. The solution, eager, the control (eager again), the yardsticks and the empty call take turns,
       in random order. Each process goes on, calls, replies and is stopped; `contestant` describes
       the clock.
    3. In the solution's turn its whole results are compared, and its inputs and parameters.

Short calls share a request: each has inputs and a result of its own. A `ResultSpec` judges each
result; `comparison/__init__` has a picture.
"""

from time import sleep
from typing import NamedTuple

import torch

from referee.call_names import COMPILED, MODULE
from referee.checks.returned_results import check_results, read_result
from referee.checks.turn_memory import reading_results, turn, write_state_for_all
from referee.contestants.contestant import Contestant
from referee.contestants.descriptions import ResultIndex
from referee.grading import Grading
from referee.message_lines import MAX_LINE_LENGTH
from referee.rounds.early_elements import CHANGES_LATE, EarlyElements
from referee.rounds.samples import RoundSamples, note_clock
from referee.rounds.slow_eager import check_eager_speed
from referee.rounds.timed_requests import (
    TimedCall,
    empty_call,
    make_flush,
    time_empty,
    time_request,
)
from referee.rounds.turns import in_random_order, timed_calls_of, timed_rounds
from referee.times.timings import TimesOfSetting, Timings
from referee.times.two_clocks import Sample
from referee.verdict import NotCorrectError
from referee.verdict_words import WRONG

# The driver clears the memory that the checks of a large problem have given back. Calls are slower
# meanwhile.
SECONDS_TO_SETTLE = 1.0


def time_forwards(grading: Grading) -> None:
    """Time forwards under the current precision setting; add their times to the verdict."""
    resources, problem = grading.resources, grading.problem
    plan = resources.plan
    _prepare_eager(grading)
    timed_calls = timed_calls_of(grading, resources.eager.yardsticks)
    timings = _start_timings(grading, timed_calls)
    if problem.gives_memory_back:
        sleep(SECONDS_TO_SETTLE)
    runner = _ForwardRunner(grading, timed_calls, plan.call_count)
    runner.time_empty_requests()
    for samples in timed_rounds(grading, runner.run_round, "the forward"):
        runner.samples.add(samples)
        _set_times(timings, runner.samples)
    for timed_call in timed_calls:
        resources.free_results(timed_call.contestant)
    timings.floor = problem.floor_seconds(timings)
    note_clock(grading, runner.samples)
    check_eager_speed(grading, plan, runner.samples)


def _prepare_eager(grading: Grading) -> None:
    """Start eager's processes and have them set up the yardsticks."""
    grading.resources.eager.start()
    grading.write_inputs([grading.problem.draw()])
    grading.resources.eager.prepare_yardsticks(_yardsticks_to_time(grading))


def _yardsticks_to_time(grading: Grading) -> tuple[str, ...]:
    """Return the names of the yardsticks that the options ask for."""
    yardsticks = grading.problem.yardsticks[grading.device.type]
    if grading.options.is_quick:
        slow = grading.problem.slow_yardsticks
        yardsticks = tuple(name for name in yardsticks if name not in slow)
    if grading.options.compiled:
        yardsticks += (COMPILED,)
    return yardsticks


def _start_timings(grading: Grading, timed_calls: list[TimedCall]) -> Timings:
    """Add the times of this setting to the verdict, at first empty; return those of forwards."""
    problem = grading.problem
    timings = Timings(
        problem.device.type,
        problem.names,
        problem.limiting_rate,
        problem.work,
        moved_bytes=problem.moved_bytes,
    )
    timings.notes += grading.resources.eager.notes
    timings.start(timed_call.name for timed_call in timed_calls)
    times = TimesOfSetting(problem.setting, timings)
    grading.findings.times = times
    grading.verdict.times.append(times)
    return timings


class DrawnCall(NamedTuple):
    """The arguments of a call and what the reference makes of them.

    Attributes:
        inputs: the arguments.
        eager_results: the reference's results.
    """

    inputs: list
    eager_results: list[torch.Tensor]


class _ForwardRunner:
    """Runs the rounds of forwards.

    Args:
        grading: the file under grading.
        timed_calls: those that take turns, besides the empty call.
        call_count: the number of calls of a request.

    Attributes:
        samples: the samples of the timed rounds so far, and of all empty requests.
    """

    def __init__(self, grading: Grading, timed_calls: list[TimedCall], call_count: int) -> None:
        self._grading = grading
        self._nothing = empty_call(grading.resources)
        self._timed_calls = [*timed_calls, self._nothing]
        self._call_count = call_count
        self._flush = make_flush(grading.resources)
        self.samples = RoundSamples(grading.problem.names, timed_calls)

    def time_empty_requests(self) -> None:
        """Time some empty requests before the first round."""
        grading = self._grading
        grading.write_inputs([grading.problem.draw() for _ in range(self._call_count)])
        self.samples.empty_samples += time_empty(grading.resources, self._call_count, self._flush)

    def run_round(self) -> dict[str, Sample]:
        """Run a round; return the timed calls' samples by name."""
        drawn_calls = _draw_round(self._grading, self._call_count)
        samples = {}
        for timed_call in in_random_order(self._timed_calls):
            samples[timed_call.name] = self._take_turn(timed_call, drawn_calls)
        self.samples.empty_samples.append(samples.pop(self._nothing.name))
        return samples

    def _take_turn(self, timed_call: TimedCall, drawn_calls: list[DrawnCall]) -> Sample:
        """Time a request; compare the results if they are the solution's."""
        grading = self._grading
        templates_of_calls = None
        # Modules, eager's too, may have to copy their results. Nobody reads those of yardsticks.
        if timed_call.call == MODULE:
            templates_of_calls = [drawn.eager_results for drawn in drawn_calls]
        with turn(grading, timed_call.contestant, _free_results):
            timed = time_request(
                grading.resources, timed_call, self._call_count, self._flush, templates_of_calls
            )
            if timed_call.contestant is grading.solution:
                _compare_calls(grading, timed.reply["returned"], drawn_calls, timed.early_elements)
        return timed.sample


def _free_results(contestant: Contestant) -> None:
    """Have a contestant free its results. It keeps the memory, which its next calls need."""
    contestant.ask("release")


def _draw_round(grading: Grading, call_count: int) -> list[DrawnCall]:
    """Draw inputs and parameters and write them; run the reference for them."""
    problem = grading.problem
    grading.forget_round()
    grading.reference.redraw_values()
    inputs_of_calls = [problem.draw() for _ in range(call_count)]
    grading.latest_inputs = inputs_of_calls[0]
    drawn_calls = [
        DrawnCall(inputs, grading.reference.eager_results(inputs)) for inputs in inputs_of_calls
    ]
    grading.write_inputs(inputs_of_calls)
    write_state_for_all(grading)
    return drawn_calls


def _set_times(timings: Timings, samples: RoundSamples) -> None:
    """Set the times of all timed calls in the rounds so far."""
    overhead = samples.overhead()
    for name, its_samples in samples.by_name.items():
        wall_seconds = [sample.mean_call_by_referee for sample in its_samples]
        timings.set(name, overhead.seconds_of_calls(its_samples), wall_seconds)
    timings.lateness = samples.lateness()


def _compare_calls(
    grading: Grading,
    returned: list[dict],
    drawn_calls: list[DrawnCall],
    early_elements: EarlyElements,
) -> None:
    """Compare the whole results of a timed request and its inputs and parameters.

    Args:
        grading: the file under grading.
        returned: the reply's description of what each call has returned.
        drawn_calls: the calls' inputs and the reference's results.
        early_elements: the elements that were read before the clock stopped.
    """
    with reading_results(grading, "a timed call", len(returned)):
        for call_index, drawn in enumerate(drawn_calls):
            descriptions = check_results(
                grading, "a timed call", returned[call_index], drawn.eager_results
            )
            for result_index, description in enumerate(descriptions):
                index = ResultIndex(call_index, result_index)
                got = read_result(grading, description, "a timed call", index)
                if early_elements.differs(index, got):
                    raise NotCorrectError(WRONG, f"a timed call's {CHANGES_LATE}")
                _compare_result(grading, got, drawn_calls, index)


def _compare_result(
    grading: Grading, got: torch.Tensor, drawn_calls: list[DrawnCall], index: ResultIndex
) -> None:
    """Compare one result of a timed call.

    Args:
        grading: the file under grading.
        got: the solution's result.
        drawn_calls: the calls' inputs and the reference's results.
        index: the result's index in the reply.
    """
    drawn = drawn_calls[index.call_index]
    i = index.result_index
    spec = grading.findings.result_specs[i]
    rounded_otherwise = grading.reference.rounded_otherwise(drawn.inputs, i)
    mistake = spec.find_mistake(got, drawn.eager_results[i], rounded_otherwise)
    if not mistake:
        return
    others = [call for call in drawn_calls if call is not drawn]
    if any(spec.allows(got, other.eager_results[i]) for other in others):
        raise NotCorrectError(WRONG, "a timed call's result is that of another call")
    raise NotCorrectError(WRONG, f"a timed call was wrong: {mistake}"[:MAX_LINE_LENGTH])
