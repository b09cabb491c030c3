"""The times: what the clocks measure, and which differences are more than noise."""

import random
from functools import partial

import pytest
import torch

from problems import clock, relu
from referee.names import COPY
from referee.times import timing
from referee.times.two_clocks import Overhead, Sample, measure_overhead
from referee.verdict import Run, compare_times

NAMES = relu.ReluProblem.names


@pytest.mark.gpu
def test_a_call_that_works_during_the_flush_reads_old_values():
    x = torch.zeros(1000, device="cuda")
    side = torch.cuda.Stream()

    def early(x):
        with torch.cuda.stream(side):
            out = x.clone()
        torch.cuda.current_stream().wait_stream(side)
        return out

    timer = clock.CudaClock(x.device)
    timer.time(early, x)
    output, *_ = timer.time(early, x, partial(x.fill_, 1.0))
    assert not output.any()
    assert x.all()


def times_of(device, eager, control, ours=1e-3) -> timing.Timings:
    """Return timings in seconds. Solution and copy take the time `ours` in each round."""
    times = {NAMES.eager: eager, NAMES.control: control}
    times |= {NAMES.solution: [ours] * len(eager), COPY: [ours] * len(eager)}
    return timing.Timings(device, NAMES, relu.ReluProblem.rate, 1, times, dict(times))


def test_a_false_clock_gains_nothing():
    """A call takes as long as its own process says, or as the referee's clock says if that is more.

    The overhead of a request is subtracted from the referee's time.
    """
    honest = Sample([1e-3, 1.1e-3, 1.2e-3], 3.5e-3)
    slow_reply = Sample([1e-3, 1.1e-3, 1.2e-3], 9e-3)
    false = Sample([1e-9] * 3, 3.6e-3)
    overhead = Overhead(0.3e-3, 0.3e-3, 0.0, 0.0)
    assert overhead.seconds_of_calls([honest, slow_reply, honest]) == [1.1e-3] * 3
    assert overhead.seconds_of_calls([false, false, honest]) == pytest.approx([1.1e-3] * 3)
    assert overhead.seconds_of_calls([Sample([0.0], 0.1e-3)])[0] > 0


def test_a_clock_that_is_faster_than_an_empty_call_is_false():
    """Only the referee's clock counts then, even if empty requests vary by more than the call."""
    empties = [Sample([2e-7, 1e-7], wall) for wall in (290e-6, 310e-6, 600e-6)]
    overhead = measure_overhead(empties, [Sample([1e-7, 1e-7], 600e-6)])
    assert overhead.fastest_call == 1e-7
    assert overhead.fastest_request == 290e-6
    honest = Sample([3e-6] * 2, 316e-6)
    false = Sample([1e-9] * 2, 316e-6)
    assert not overhead.is_false([honest])
    assert overhead.is_false([false])
    assert overhead.seconds_of_calls([honest] * 3) == [3e-6] * 3
    assert overhead.seconds_of_calls([false] * 3) == pytest.approx([13e-6] * 3)
    assert overhead.seconds_of_calls([Sample([0.0] * 2, 100e-6)]) == [1e-7]


def test_a_false_clock_can_hide_the_largest_overhead_less_the_usual_one():
    eagers = [Sample([3e-6] * 2, beyond + 6e-6) for beyond in (290e-6, 310e-6, 600e-6)]
    slow = measure_overhead([Sample([0.0] * 2, 600e-6)], eagers)
    assert slow.hideable_seconds(2) == pytest.approx(145e-6)
    even = measure_overhead([Sample([0.0] * 2, 300e-6)], [Sample([3e-6] * 2, 306e-6)])
    assert even.hideable_seconds(2) == pytest.approx(0)


def test_the_overhead_is_that_of_eager_if_that_is_more():
    eagers = [Sample([1.0, 1.0], 2.0 + beyond) for beyond in (0.1, 0.2, 0.3, 0.4, 9.0)]
    for wall, most in ((0.2, 0.4), (0.5, 0.5)):
        assert measure_overhead([Sample([0.1], wall)], eagers).estimate == pytest.approx(most)
    assert measure_overhead([Sample([0.1], 0.5)], []).estimate == 0.5


def test_nine_of_ten_empty_requests_have_no_more_overhead():
    empties = [Sample([0.0], float(i)) for i in range(11)]
    assert measure_overhead(empties, []).estimate == 9.0


def run_of(ours: list[float], eager: list[float], control: list[float] | None = None) -> Run:
    timings = times_of("cpu", eager, control or eager)
    timings.seconds[NAMES.solution] = ours
    return Run("", timings)


def test_a_run_is_faster_slower_a_tie_or_too_noisy():
    eager = [1.0, 1.01, 0.99, 1.0, 1.0]
    twice = run_of([s / 2 for s in eager], eager)
    assert twice.word == "faster"
    assert run_of([2 * s for s in eager], eager).word == "slower"
    assert run_of([0.97, 1.0, 0.98, 1.01, 0.99], eager).word == "a tie"
    noisy = run_of([0.5] * 5, eager, [2.0, 0.4, 1.7, 3.0, 2.5])
    assert noisy.word == "too noisy"
    assert run_of([0.5] * 2, [1.0] * 2).word == "too noisy"


# Times of the same code in ms, measured on an H100: eager, eager again, and the solution. The first
# two are recurrent networks, the last is a training step. Once the referee called these solutions
# slower, faster and slower.
LAUNCH_BOUND = {
    "slower": ([52.2, 45.4, 47.7], [64.5, 46.2, 45.9], [64.9, 66.9, 67.3]),
    "faster": ([63.5, 55.4, 51.7], [62.4, 61.7, 48.4], [49.7, 52.6, 49.2]),
    "a step": ([170.1, 168.9, 160.8], [164.4, 168.1, 171.1], [174.1, 239.5, 167.4]),
}


@pytest.mark.parametrize("times", LAUNCH_BOUND.values(), ids=LAUNCH_BOUND)
def test_the_same_code_is_a_tie_although_its_launches_vary_on_a_gpu(times):
    assert compare_times(*times, "cuda") == "a tie"


def test_small_differences_count_if_eager_hardly_varies():
    """Eager varies by 1.002 here. On a CPU it may also drift, as that slows all contestants."""
    eager = [1.0, 1.001, 1.002]
    control = [1.001, 1.0, 1.002]
    assert compare_times(eager, control, [0.97] * 3, "cuda") == "faster"
    assert compare_times(eager, control, [1.03] * 3, "cuda") == "slower"
    drifting = [1.0, 1.5, 2.0, 2.5]
    halves = [s / 1.2 for s in drifting]
    assert compare_times(drifting, drifting, halves, "cpu") == "faster"
    assert compare_times(drifting, drifting, halves, "cuda") == "a tie"


def test_the_speed_up_has_an_interval_and_times_have_a_spread():
    draw = random.Random(1)
    base = [draw.uniform(1, 2) for _ in range(50)]
    assert timing.speed_up(base, [t / 2 for t in base]) == (2, 2, 2)
    ratio, low, high = timing.speed_up(base, [t * draw.uniform(0.9, 1.1) for t in base])
    assert low < ratio < high
    assert timing.speed_up([1.0], [2.0]) == (0.5, 0.5, 0.5)
    assert timing.spread([1.0]) == (1.0, 1.0)
    assert timing.spread([float(i) for i in range(11)]) == (1.0, 9.0)
