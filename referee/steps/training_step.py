"""Training steps beside eager's: a forward that autograd records, and its backward.

As `times`, with new gradients of the outputs in every step, and all results and gradients compared.
"""

import random
from contextlib import suppress

import torch

from referee import timing
from referee.bench import Bench, write_all
from referee.contestant import RaisedError
from referee.early_elements import EarlyElements
from referee.forward import check_description, check_eager_intact, check_intact, read
from referee.gradients import Quantity
from referee.grading import Grading, restored_buffers
from referee.names import MODULE, NOTHING
from referee.reference_file import NoRoomError
from referee.round_memory import RoundMemory
from referee.steps.gradients import OUT_OF_MEMORY, draw_output_gradients
from referee.steps.times import (
    CHANGES_LATE,
    compiled_alone,
    entrants_of,
    note_clock,
    rewrite_small_memory,
)
from referee.timed_requests import (
    EMPTY_REQUESTS,
    Entrant,
    checked_seconds,
    make_flush,
    plan,
)
from referee.timing import Overhead, Sample, Step, Timings, measure_overhead
from referee.verdict import WRONG, FoundError

FORWARDS = 3  # that take as long as a step


def time_training_steps(grading: Grading) -> None:
    """Time training steps, where the gradients were right."""
    if not grading.quantities:
        return
    try:
        _time(grading)
        return
    except (NoRoomError, torch.OutOfMemoryError):
        pass
    except (FoundError, RaisedError) as error:
        if OUT_OF_MEMORY not in str(error):
            grading.run.step = None
            raise
    grading.run.step = None
    grading.verdict.notes.append("no memory for the training step")


def _time(grading: Grading) -> None:
    problem, bench = grading.problem, grading.bench
    names = problem.names
    about = problem.device.type, names, problem.rate
    step = grading.run.step = Step(Timings(*about, 0), Timings(*about, 0))
    calls = -(-plan(bench).calls // FORWARDS)  # a request of steps lasts as long as one of forwards
    entrants = entrants_of(grading, compiled_alone(bench.yardsticks))
    for timings in (step.forward, step.backward):
        timings.start(entrant.name for entrant in entrants)
    quantities = [quantity.again() for quantity in grading.quantities]
    nothing = Entrant("nothing", bench.eager[0].contestant, NOTHING)
    _new_round(grading, calls)
    _note_kept(grading, step)
    empties = [_request(grading, nothing, calls)[0] for _ in range(EMPTY_REQUESTS)]
    flush = make_flush(bench)
    memory = RoundMemory(bench, [entrant.process for entrant in entrants])

    def one_round() -> dict[str, tuple[Sample, dict]]:
        expected_steps = _new_round(grading, calls)
        samples = {}
        for entrant in random.sample([*entrants, nothing], len(entrants) + 1):
            rewrite_small_memory(grading)
            flush()
            memory.begin_turn()
            sample, reply, early = _request(grading, entrant, calls)
            samples[entrant.name] = sample, reply["seconds"]
            if entrant.process is grading.solution:
                _compare(grading, quantities, reply["calls"], expected_steps, early)
            memory.end_turn(entrant.process)
        memory.end_round()
        empties.append(samples.pop("nothing")[0])
        return samples

    what = f"the training step{problem.setting and f' at {problem.setting}'}"
    every: dict[str, list[tuple[Sample, tuple]]] = {entrant.name: [] for entrant in entrants}
    for samples in timing.run_rounds(
        one_round, grading.options.rounds, problem.device, what, grading.progress
    ):
        for name, found in samples.items():
            every[name].append(found)
        eagers = [sample for sample, _ in every[names.eager] + every[names.again]]
        overhead = measure_overhead(empties, eagers)
        _set_all(step, every, overhead)
    wholes = {name: [sample for sample, _ in found] for name, found in every.items()}
    note_clock(grading, wholes, overhead)
    for quantity in quantities:
        if found := quantity.mistake():
            raise FoundError(WRONG, f"in timed steps, {found}")


def _new_round(grading: Grading, calls: int) -> list[list]:
    """Draw and write everything; return the reference's results and gradients for each step."""
    problem, bench = grading.problem, grading.bench
    grading.forget_round()
    grading.new_state()
    drawn = [problem.draw() for _ in range(calls)]
    grading.inputs = drawn[0]
    expected_steps, gradients = [], []
    for inputs in drawn:
        output_gradients = draw_output_gradients(grading, inputs)[1]
        gradients.append(output_gradients)
        with restored_buffers(grading.module):
            expected_steps.append(
                problem.derive(grading.module, inputs, output_gradients, grading.parameters())
            )
    grading.write_inputs(drawn)
    write_all(bench.output_gradients, bench.pool, gradients)
    values = list(grading.module.state_dict().values())
    grading.state.write(values)
    for eager in bench.eager:
        eager.state.write(values)
    if bench.copies:
        grading.results = [x if x is not None else torch.empty(0) for x in expected_steps[0]]
    return expected_steps


def _request(grading: Grading, entrant: Entrant, calls: int) -> tuple[Sample, dict, EarlyElements]:
    """Time one request of an entrant's; return the sample, the reply, and what was read early."""
    bench, names = grading.bench, grading.parameters()
    if entrant.process is grading.solution:
        names = [grading.state.names[name] for name in names]
    is_copied = bench.copies and entrant.call == MODULE
    early = EarlyElements(bench, entrant.process)
    reply = entrant.process.ask(
        "step",
        early.read,
        name=entrant.call,
        inputs=bench.forms(calls),
        output_gradients=_output_gradient_forms(bench, calls),
        parameters=names,
        outputs=bench.room_for(grading.results, calls) if is_copied else None,
    )
    halves = _checked_halves(reply["seconds"], calls)
    own = [forward + backward for forward, backward in zip(*halves, strict=True)]
    reply["seconds"] = halves
    return Sample(own, entrant.process.seconds), reply, early


def _output_gradient_forms(bench: Bench, calls: int) -> list[dict]:
    return [region.form for region in bench.output_gradients[:calls]]


def _checked_halves(seconds: object, calls: int) -> tuple[list[float], list[float]]:
    halves = seconds if isinstance(seconds, dict) else {}
    forward, backward = halves.get("forward"), halves.get("backward")
    return checked_seconds(forward, calls), checked_seconds(backward, calls)


def _set_all(
    step: Step,
    every: dict[str, list[tuple[Sample, tuple]]],
    overhead: Overhead,
) -> None:
    """Set all times so far: each step's seconds, divided between forward and backward.

    The process's own clock gives the share of each half.

    Args:
        step: the times.
        every: by name, for each round: the sample, and the seconds of its forwards and backwards.
        overhead: of the requests.
    """
    for name, rounds in every.items():
        wholes = overhead.seconds_of_calls([sample for sample, _ in rounds])
        walls = [sample.wall / len(sample.own) for sample, _ in rounds]
        parts = [_share_of_forwards(*halves) for _, halves in rounds]
        for half, share_of_half in ((step.forward, parts), (step.backward, [1 - p for p in parts])):
            seconds = [whole * part for whole, part in zip(wholes, share_of_half, strict=True)]
            wall = [whole * part for whole, part in zip(walls, share_of_half, strict=True)]
            half.set(name, seconds, wall)


def _share_of_forwards(forwards: list[float], backwards: list[float]) -> float:
    """Return which part of a request's steps were forwards, by the process's clock."""
    total = sum(forwards) + sum(backwards)
    return sum(forwards) / total if total > 0 else 0.5


def _compare(
    grading: Grading,
    quantities: list[Quantity],
    calls: list[dict],
    expected_steps: list[list],
    early: EarlyElements,
) -> None:
    """Compare all results and gradients of a timed request.

    Args:
        grading: the file under grading.
        quantities: results and gradients of a step; they take in what is found.
        calls: the reply's, one for each step.
        expected_steps: the reference's results and gradients of each step.
        early: what was read before the clock stopped.
    """
    check_intact(grading, "a timed step", len(calls), with_gradients=True)
    check_eager_intact(grading)
    for call_index, (call, eager) in enumerate(zip(calls, expected_steps, strict=True)):
        descriptions = call["results"]
        if len(descriptions) != len(quantities):
            raise FoundError(WRONG, "a timed step gives another kind of result than before")
        for result_index, (quantity, description, expected) in enumerate(
            zip(quantities, descriptions, eager, strict=True)
        ):
            if not quantity.expected or expected is None:
                continue
            check_description(
                grading, description, quantity.expected, f"a timed step's {quantity.what}: "
            )
            got = read(grading, description, quantity.what, (call_index, result_index))
            if early.differs(call_index, result_index, got):
                raise FoundError(WRONG, f"a timed step's {CHANGES_LATE}")
            quantity.compare_timed(got, expected)
    for quantity in quantities:
        if quantity.is_wrong_at_once:
            raise FoundError(WRONG, f"a timed step's {quantity.mistake()}")


def _note_kept(grading: Grading, step: Step) -> None:
    """Note the bytes that autograd keeps, where a program admits hooks."""
    names, bench = grading.problem.names, grading.bench
    pairs = ((names.solution, grading.solution),)
    pairs += ((names.eager, bench.eager[0].contestant),)
    for name, process in pairs:
        with suppress(RaisedError):
            reply = process.ask("count_saved_bytes", inputs=bench.forms(1))
            if isinstance(reply["bytes"], int):
                step.kept[name] = reply["bytes"]
