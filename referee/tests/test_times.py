"""The functions that make a time of two clocks, and ratios and words of times: tables of numbers.

Most numbers are chosen so that each expected one can be found by hand; the unit is a second.
"""

import random
from collections.abc import Sequence
from statistics import median_low
from types import SimpleNamespace

import pytest
import torch

from referee import engine
from referee.call_names import COPY
from referee.resources import Plan
from referee.rounds import slow_eager
from referee.rounds.samples import UNCONFIRMED, RoundSamples, note_clock
from referee.rounds.slow_eager import TURNS, check_eager_speed
from referee.rounds.step_samples import make_step_sample, set_step_times
from referee.rounds.timed_requests import TimedCall
from referee.times.gain import compare_times
from referee.times.ratios import p10_and_p90, speed_up
from referee.times.timings import LimitingRate, ReportNames, StepTimings, TimesOfSetting, Timings
from referee.times.two_clocks import (
    LATENESS_OF_IDLE_GPU,
    MIN_SECONDS,
    Overhead,
    Sample,
    measure_overhead,
)
from referee.verdict import NotCorrectError

NAMES = ReportNames("ModelNew", "eager")
# Eager's two turns in each round.
TIMED_CALLS = [TimedCall(name, None, "") for name in (NAMES.eager, NAMES.control)]
# A request has 2 to 3 s of overhead, the fastest empty one 1 s. An empty call takes 0.1 s.
OVERHEAD = Overhead(estimate=3.0, low=2.0, least=1.0, fastest_empty_call=0.1)


@pytest.mark.parametrize(
    ("own", "mean"),
    [([2.0], 2.0), ([1.0, 2.0, 6.0], 3.0), ([9.0, 0.0, 0.0], 3.0), ([0.0, 0.0], 0.0)],
)
def test_the_mean_of_a_requests_calls(own, mean):
    assert Sample(own, request_seconds=20.0).mean_call == mean


@pytest.mark.parametrize(
    ("own", "lateness"),
    [
        ([2.0], 1.0),
        ([1.0, 1.0, 4.0], 2.0),
        ([5.0] * 12 + [20.0] * 20, 2.875),
        ([0.0, 0.0], 1.0),
    ],
)
def test_the_lateness_of_a_request(own, lateness):
    assert Sample(own, request_seconds=20.0).lateness == lateness


@pytest.mark.parametrize(
    ("own", "backlog", "lateness"),
    [
        # The device was idle when the last call came: even the fastest call may have been late.
        ([25.0] * 32, 5.0, LATENESS_OF_IDLE_GPU),
        ([5.0] * 12 + [20.0] * 20, 5.0, 2.875),
        # It had more than a tenth of the time still to compute.
        ([5.0] * 32, 40.0, 1.0),
        ([3000.0], 3000.0, 1.0),
    ],
)
def test_a_device_that_waits_for_launches_is_late(own, backlog, lateness):
    assert Sample(own, 2000.0, backlog).lateness == lateness


def test_a_copy_gains_nothing_if_all_of_eagers_calls_are_late():
    """These times were measured: those of eager, of the control, and of a copy of eager."""
    eager, control = [30.59e-6, 27.54e-6, 30.84e-6], [27.70e-6, 31.23e-6, 29.37e-6]
    copy = [16.65e-6, 17.14e-6, 17.05e-6]
    samples = RoundSamples(NAMES, TIMED_CALLS)
    for times in zip(eager, control, strict=True):
        requests = [Sample([time] * 32, 1.5e-3, 15e-6) for time in times]
        samples.add(dict(zip((NAMES.eager, NAMES.control), requests, strict=True)))
    assert compare_times(eager, control, copy, "cuda") == "faster"
    assert compare_times(eager, control, copy, "cuda", samples.lateness()) == "a tie"


def test_the_lateness_of_steps_counts_for_both_halves():
    samples = RoundSamples(NAMES, TIMED_CALLS)
    sample = Sample([5.0] * 12 + [20.0] * 20, 600.0, part_of_forwards=0.5)
    samples.empty_samples.append(Sample([0.1], 1.0))
    samples.add({timed_call.name: sample for timed_call in TIMED_CALLS})
    step = StepTimings(*(Timings("cuda", NAMES, None, work=0) for _ in range(2)))
    for half in (step.forward, step.backward):
        half.start(timed_call.name for timed_call in TIMED_CALLS)
    set_step_times(step, samples)
    assert (step.forward.lateness, step.backward.lateness) == (2.875, 2.875)


@pytest.mark.parametrize(
    ("backlog", "lateness"),
    [
        ({"backlog": 0.5}, LATENESS_OF_IDLE_GPU),  # the device was idle when the last half came
        ({"backlog": 3.0}, 1.0),
        ({"backlog": None}, 1.0),  # on a CPU
        ({"backlog": "soon"}, 1.0),  # forged
        ({}, 1.0),
    ],
)
def test_steps_on_a_device_that_waits_for_launches_are_late(backlog, lateness):
    reply = {"seconds": {"forward": [1.0, 1.0], "backward": [2.0, 2.0]}} | backlog
    assert make_step_sample(reply, 10.0, step_count=2).lateness == lateness


# Eight calls of eager's take 24 ms, and a request of eager's 26 to 26.5 ms. The columns are the
# time of the solution's calls by its own clock, the time of its request by the referee's (in ms),
# the device, and the notes. A copy of eager really takes 24 ms.
CLOCK_NOTES = {
    "a copy that hides 1%": (23.76, 26.0, "cuda", [UNCONFIRMED]),
    "a copy that replies faster than eager": (22.0, 24.5, "cuda", [UNCONFIRMED]),
    "a copy that replies at once, on a CPU": (21.0, 24.0, "cpu", [UNCONFIRMED]),
    "no gain": (24.0, 26.2, "cuda", []),
    "an honest gain": (16.0, 18.2, "cuda", []),
    "an honest gain on a CPU": (16.0, 18.2, "cpu", []),
    "an honest gain that is less than the overhead": (23.0, 25.2, "cuda", [UNCONFIRMED]),
}


@pytest.mark.parametrize(
    ("own_ms", "request_ms", "device", "notes"), CLOCK_NOTES.values(), ids=CLOCK_NOTES
)
def test_a_gain_that_the_referees_clock_does_not_show_is_unconfirmed(
    own_ms, request_ms, device, notes
):
    timed_calls = [*TIMED_CALLS, TimedCall(NAMES.solution, None, "")]
    samples = RoundSamples(NAMES, timed_calls)
    for eagers_request_ms in (26.0, 26.25, 26.5):
        eager = Sample([3e-3] * 8, 1e-3 * eagers_request_ms)
        solution = Sample([1e-3 * own_ms / 8] * 8, 1e-3 * request_ms)
        samples.add({NAMES.eager: eager, NAMES.control: eager, NAMES.solution: solution})
        samples.empty_samples.append(Sample([1e-6] * 8, 1.5e-3))
    verdict = SimpleNamespace(notes=[])
    problem = SimpleNamespace(names=NAMES)
    grading = SimpleNamespace(problem=problem, device=torch.device(device), verdict=verdict)
    note_clock(grading, samples)
    assert verdict.notes == notes


# The samples of a timed call, and the seconds of a call in each of its requests.
SECONDS = {
    # The process's clock shows at least what the referee's does: it counts, in every request.
    "the clocks agree": ([Sample([4.0, 4.0], 11.0)], [4.0]),
    "equal counts as at least": ([Sample([5.0, 3.0], 11.0)], [4.0]),
    # A reply may be slower by the spread of the overheads, which is 1 s.
    "one slow reply": ([Sample([4.0], 6.0), Sample([4.0], 8.0), Sample([5.0], 7.0)], [4, 4, 5]),
    "one very slow reply": (
        [Sample([4.0], 6.0), Sample([4.0], 60.0), Sample([5.0], 7.0)],
        [4.0, 56.0, 5.0],
    ),
    "all work in the first call": ([Sample([8.0, 0.0, 0.0, 0.0], 10.0)], [2.0]),
    "all work in the last call": ([Sample([0.0, 0.0, 0.0, 8.0], 10.0)], [2.0]),
    # It shows less: the larger of both counts, request by request.
    "half is hidden": ([Sample([2.0, 2.0], 11.0)], [4.0]),
    "one request says enough": (
        [Sample([1.0], 8.0), Sample([1.0], 8.0), Sample([7.0], 8.0)],
        [5.0, 5.0, 7.0],
    ),
    "hidden in one of three": (
        [Sample([0.0], 13.0), Sample([11.0], 13.0), Sample([11.0], 13.0)],
        [9.0, 11.0, 11.0],
    ),
    # The mean of the two middle times would be 10.1 s.
    "false in one of two": ([Sample([0.2], 13.0), Sample([20.0], 13.0)], [10.0, 20.0]),
    # It shows less than an empty call takes, so it is false, and the least overhead is subtracted.
    "no time at all": ([Sample([0.0, 0.0], 11.0)], [5.0]),
    "false and shorter than any request": ([Sample([0.0, 0.0], 0.5)], [0.1]),
    "false in two of three": (
        [Sample([0.01], 3.0), Sample([0.01], 4.0), Sample([5.0], 6.0)],
        [2.0, 3.0, 5.0],
    ),
}


@pytest.mark.parametrize(("samples", "seconds"), SECONDS.values(), ids=SECONDS)
def test_the_seconds_of_calls(samples, seconds):
    assert OVERHEAD.seconds_of_calls(samples) == pytest.approx(seconds)


def test_no_clock_makes_a_time_much_shorter_than_the_referees():
    """The median time is at least that of the referee's times, less the overhead.

    A single time may be shorter than the referee's, but only by the spread of the overheads. None
    is shorter than the process's clock says, unless that clock is false.
    """
    draw = random.Random(0)

    def draw_samples(call_count: int) -> list[Sample]:
        """Draw requests. The process's clock says 0 for some calls; the referee's time is any."""
        samples = []
        for _ in range(draw.randint(1, 6)):
            call_seconds = [draw.choice([0.0, draw.random()]) for _ in range(call_count)]
            samples.append(Sample(call_seconds, draw.uniform(0, 4)))
        return samples

    for _ in range(5000):
        call_count = draw.randint(1, 4)
        overhead = measure_overhead(draw_samples(call_count), draw_samples(call_count))
        samples = draw_samples(call_count)
        seconds = overhead.seconds_of_calls(samples)
        by_referee = [
            (sample.request_seconds - overhead.estimate) / call_count for sample in samples
        ]
        assert median_low(seconds) >= median_low(by_referee)
        least = [its_seconds - overhead.spread / call_count - 1e-9 for its_seconds in by_referee]
        assert all(printed >= bound for printed, bound in zip(seconds, least, strict=True))
        if not overhead.shows_false_clock(samples):
            pairs = zip(seconds, samples, strict=True)
            assert all(printed >= sample.mean_call for printed, sample in pairs)


@pytest.mark.parametrize("rounds", [4, 5, 10, 11, 50])
@pytest.mark.parametrize("false_part", [0.3, 0.4, 0.5, 0.6])
def test_a_clock_that_is_false_in_some_requests_gains_nothing(rounds, false_part):
    """Calls take 10 ms, as eager's do. Some times are 0, and the others 2.02 times the true one.

    A request has an overhead of 1.0 to 1.2 ms.
    """
    draw = random.Random(0)
    overheads = [draw.uniform(1.0e-3, 1.2e-3) for _ in range(rounds)]
    eager = [Sample([10e-3], 10e-3 + seconds) for seconds in overheads]
    overhead = measure_overhead([Sample([1e-6], seconds) for seconds in overheads], eager)
    false_requests = draw.sample(range(rounds), int(false_part * rounds))
    own = [0.0 if i in false_requests else 20.2e-3 for i in range(rounds)]
    samples = [
        Sample([seconds], 10e-3 + its_overhead)
        for seconds, its_overhead in zip(own, overheads, strict=True)
    ]
    gain = speed_up([10e-3] * rounds, overhead.seconds_of_calls(samples))
    assert gain.ratio <= 1.05
    assert gain.high <= 1.05


def test_no_time_is_zero():
    without_empty_calls = Overhead(estimate=3.0, low=2.0, least=1.0, fastest_empty_call=0.0)
    assert without_empty_calls.seconds_of_calls([Sample([0.0], 2.0)]) == [MIN_SECONDS]


@pytest.mark.parametrize(
    ("own_of_requests", "is_false_clock"),
    [
        ([[0.1]], False),
        ([[0.09]], True),
        ([[0.4, 0.0, 0.0]], False),  # one long call
        ([[0.2, 0.0, 0.0]], True),
        ([[0.0], [0.0], [5.0]], True),  # the median request counts
        ([[0.0], [0.5], [0.5]], False),
    ],
)
def test_a_false_clock_shows_less_than_an_empty_call_takes(own_of_requests, is_false_clock):
    samples = [Sample(own, 20.0) for own in own_of_requests]
    assert OVERHEAD.shows_false_clock(samples) == is_false_clock


# Empty requests take 1 to 11 s: the 10th percentile is 2 s, and the 90th 10 s.
EMPTIES = [Sample([0.5, 0.25], float(wall)) for wall in range(1, 12)]


@pytest.mark.parametrize(
    ("overheads_of_eager", "estimate", "low"),
    [
        ([], 10.0, 2.0),  # of the empty requests
        ([2.0, 3.0, 4.0], 10.0, 2.2),
        ([20.0, 30.0, 40.0], 38.0, 22.0),
    ],
)
def test_the_overhead_is_measured(overheads_of_eager, estimate, low):
    # Eager's requests have two calls of 100 and 50 s.
    eager_samples = [Sample([100.0, 50.0], 150.0 + overhead) for overhead in overheads_of_eager]
    expected = Overhead(estimate, low, least=1.0, fastest_empty_call=0.25)
    assert measure_overhead(EMPTIES, eager_samples) == expected


ONES = [1.0] * 5
JITTER = [1.0, 1.02, 0.98, 1.01, 0.99]
# The control's ratios, and its interval, go from 1 / 2 to 2.
NOISY = [0.5, 1.0, 2.0, 0.6, 1.6]
# Eager, the control and the solution; the device; the word.
WORDS = {
    "the same": (ONES, ONES, ONES, "cpu", "a tie"),
    "the same with jitter": (ONES, JITTER, JITTER[::-1], "cpu", "a tie"),
    "within what two processes differ by": (ONES, ONES, [0.92] * 5, "cpu", "a tie"),
    "twice as fast": (ONES, JITTER, [0.5] * 5, "cpu", "faster"),
    "half as fast": (ONES, JITTER, [2.0] * 5, "cpu", "slower"),
    "a little faster": (ONES, ONES, [0.9] * 5, "cpu", "faster"),
    "a little slower": (ONES, ONES, [1.12] * 5, "cpu", "slower"),
    "faster in some rounds only": (ONES, ONES, [0.5, 1.2, 0.5, 1.2, 0.5], "cpu", "a tie"),
    "the control's ratio is as large": (ONES, [0.8] * 5, [0.82] * 5, "cpu", "a tie"),
    "the control's reciprocal is as large": (ONES, [1.25] * 5, [0.82] * 5, "cpu", "a tie"),
    "too few rounds": (ONES[:2], ONES[:2], [0.03] * 2, "cpu", "too noisy"),
    "no rounds": ([], [], [], "cpu", "too noisy"),
    "noisy and the same": (ONES, NOISY, ONES, "cpu", "too noisy"),
    "noisy and faster by less than the noise": (ONES, NOISY, [0.55] * 5, "cpu", "too noisy"),
    "noisy and slower by less than the noise": (ONES, NOISY, [1.9] * 5, "cpu", "too noisy"),
    "noisy and faster by more than the noise": (ONES, NOISY, [0.4] * 5, "cpu", "faster"),
    "noisy and 33 times as fast": (ONES, NOISY, [0.03] * 5, "cpu", "faster"),
    "noisy and 33 times as slow": (ONES, NOISY, [33.0] * 5, "cpu", "slower"),
    "noisy, and the solution, too": (ONES, NOISY, [0.03, 3.0, 0.03, 3.0, 0.03], "cpu", "too noisy"),
    "the control is always twice as fast": (ONES, [0.5] * 5, [0.6] * 5, "cpu", "too noisy"),
    "a small gain on a GPU": (ONES, ONES, [0.98] * 5, "cuda", "faster"),
    "a smaller one": (ONES, ONES, [0.995] * 5, "cuda", "a tie"),
    "a short call, faster by 0.2 us": ([5e-6] * 5, [5e-6] * 5, [4.8e-6] * 5, "cuda", "a tie"),
    "a short call, faster by 0.5 us": ([5e-6] * 5, [5e-6] * 5, [4.5e-6] * 5, "cuda", "faster"),
    # All timed calls are twice as slow in the second half of the rounds.
    "drift on a CPU": ([1, 1, 2, 2], [1, 1, 2, 2], [0.6, 0.6, 1.2, 1.2], "cpu", "faster"),
    "spread on a GPU": ([1, 1, 2, 2], [1, 1, 2, 2], [0.6, 0.6, 1.2, 1.2], "cuda", "a tie"),
    "more than the spread": ([1, 1, 2, 2], [1, 1, 2, 2], [0.4, 0.4, 0.8, 0.8], "cuda", "faster"),
    # Times of the same code in ms, measured on an H100, whose launches vary: two recurrent networks
    # and a training step. Once the referee called these solutions slower, faster and slower.
    "once slower": ([52.2, 45.4, 47.7], [64.5, 46.2, 45.9], [64.9, 66.9, 67.3], "cuda", "a tie"),
    "once faster": ([63.5, 55.4, 51.7], [62.4, 61.7, 48.4], [49.7, 52.6, 49.2], "cuda", "a tie"),
    "a step, once slower": (
        [170.1, 168.9, 160.8],
        [164.4, 168.1, 171.1],
        [174.1, 239.5, 167.4],
        "cuda",
        "a tie",
    ),
}


@pytest.mark.parametrize(("eager", "again", "times", "device", "word"), WORDS.values(), ids=WORDS)
def test_the_word_for_times(eager, again, times, device, word):
    assert compare_times(eager, again, times, device) == word


def test_a_runs_word_is_that_of_its_eager_control_and_solution():
    names = ReportNames(solution="ModelNew", eager="eager")
    seconds = {"ModelNew": [0.5] * 5, "eager": ONES, "eager (again)": JITTER}
    rate = LimitingRate("GB/s", "moved_bytes", COPY)
    timings = Timings("cpu", names, rate, work=1, seconds=seconds, wall_seconds=seconds)
    assert TimesOfSetting("", timings).speed_word == "faster"
    seconds["ModelNew"] = [2.0] * 5
    assert TimesOfSetting("", timings).speed_word == "slower"


def test_the_speed_up_has_an_interval_and_times_have_a_spread():
    draw = random.Random(1)
    base = [draw.uniform(1, 2) for _ in range(50)]
    assert speed_up(base, [t / 2 for t in base]) == (2, 2, 2)
    ratio, low, high = speed_up(base, [t * draw.uniform(0.9, 1.1) for t in base])
    assert low < ratio < high
    assert speed_up([1.0], [2.0]) == (0.5, 0.5, 0.5)
    assert p10_and_p90([1.0]) == (1.0, 1.0)
    assert p10_and_p90([float(i) for i in range(11)]) == (1.0, 9.0)


class EagersProcesses:
    """Takes the place of `EagerProcesses`; its contestants know the seconds of each turn."""

    def __init__(self, seconds_of_old: list[float], seconds_of_new: list[float]) -> None:
        self.members = self._one(seconds_of_old)
        self._new = self._one(seconds_of_new)

    def _one(self, seconds_of_turns: list[float]) -> list[SimpleNamespace]:
        return [SimpleNamespace(seconds_of_turns=iter(seconds_of_turns), close=lambda: None)]

    def take(self) -> list[SimpleNamespace]:
        return self.members

    def start(self) -> None:
        self.members = self._new


def grading_with_slow_eager(device: str, seconds_of_new: Sequence[float] = ()) -> SimpleNamespace:
    """Return the parts of a grading that `check_eager_speed` uses; eager took 3 s in each turn.

    Args:
        device: "cpu" or "cuda".
        seconds_of_new: what a call takes in a new process of eager, in each turn.
    """
    timings = SimpleNamespace(seconds={NAMES.eager: [3.0] * 3, NAMES.control: [3.0] * 3})
    problem = SimpleNamespace(names=NAMES, device=torch.device(device))
    eager = EagersProcesses([3.0] * TURNS, seconds_of_new)
    return SimpleNamespace(
        problem=problem,
        device=problem.device,
        resources=SimpleNamespace(problem=problem, eager=eager),
        findings=SimpleNamespace(times=SimpleNamespace(forwards=timings)),
        verdict=SimpleNamespace(notes=[]),
    )


@pytest.mark.parametrize(
    ("seconds_of_new", "is_error"),
    [
        ([1.0] * TURNS, True),
        ([1.9] * TURNS, True),
        ([2.1] * TURNS, False),
        ([1.0] * (TURNS - 1) + [2.1], False),  # it must be faster in every turn
    ],
)
def test_a_slow_eager_on_a_cpu_is_an_error_only_if_a_new_process_is_faster(
    seconds_of_new, is_error, monkeypatch
):
    """Eager took 1 s before the solution started, and 3 s beside it: more than 1.5 times 1.9."""

    def time_and_free(_resources, timed_call, *_):
        return Sample([next(timed_call.contestant.seconds_of_turns)], 30.0)

    monkeypatch.setattr(slow_eager, "time_and_free", time_and_free)
    grading = grading_with_slow_eager("cpu", seconds_of_new)
    plan = Plan(call_count=1, seconds_alone=[1.0] * 5)
    if is_error:
        with pytest.raises(NotCorrectError, match="it has slowed eager: 3000"):
            check_eager_speed(grading, plan, samples=None)
    else:
        check_eager_speed(grading, plan, samples=None)
        [note] = grading.verdict.notes
        assert note == "the machine has become slower since eager was timed alone"


def test_nobody_is_blamed_for_late_launches_on_a_gpu():
    """In each request of eager's, one of eight calls takes 17 s and the others 1 s, as alone.

    The mean of the calls is 3 s.
    """
    request = Sample([1.0] * 7 + [17.0], 30.0)
    samples = RoundSamples(NAMES, TIMED_CALLS)
    for _ in range(3):
        samples.add({NAMES.eager: request, NAMES.control: request})
    plan = Plan(call_count=8, seconds_alone=[1.0] * 5)
    check_eager_speed(grading_with_slow_eager("cuda"), plan, samples)  # raises nothing
    assert samples.lateness() == 3.0
    faster = compare_times([3.0] * 3, [3.0] * 3, [1.1] * 3, "cuda")
    assert faster == "faster"
    assert compare_times([3.0] * 3, [3.0] * 3, [1.1] * 3, "cuda", samples.lateness()) == "a tie"


def test_a_reason_says_what_was_done_and_not_how_far_it_was():
    shown = []
    stage = engine._Stage("a.py", lambda *words: shown.append(words))
    stage.enter("timing the forward", how_far="round 3, 4 s left")
    assert stage.text == "timing the forward"
    stage.enter("checking", "zeros")
    assert stage.text == "checking zeros"
    assert shown == [
        ("a.py: timing the forward", "round 3, 4 s left"),
        ("a.py: checking", "zeros"),
    ]
