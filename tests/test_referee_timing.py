"""The times: what no honest run gives is noticed, and noise accuses nobody."""

import random
from functools import partial
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from referee.judge import judge
from referee.judge.verdict import Run

from referee import clock, linear_relu_divide, relu, timing
from referee.child.yardsticks import COPY_REUSED, PRODUCT, THREE

NAMES = relu.Judge.names


@pytest.mark.gpu
def test_a_call_that_works_during_the_flush_reads_old_values():
    x, side = torch.zeros(1000, device="cuda"), torch.cuda.Stream()

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


def times_of(device, eager, again, ours=1e-3, copy=3e-3, **late) -> timing.Timings:
    """Times in seconds of eager, twice, and the solution's and a copy's in every round.

    `late`: seconds by which the host's clock is behind the device's, by name.
    """
    times = {NAMES.eager: eager, NAMES.again: again}
    times |= {NAMES.solution: [ours] * len(eager), COPY_REUSED: [copy] * len(eager)}
    wall = {name: [t + late.get(name, 0) for t in some] for name, some in times.items()}
    return timing.Timings(device, NAMES, relu.Judge.rate, 1, times, wall)


def test_incredible_times():
    fast = times_of("cuda", [3e-3] * 3, [3e-3] * 3, 2.9e-3)
    assert timing.judge(fast, 3e-3, "the forward") == ([], [])
    late = times_of("cuda", [3e-3] * 3, [3e-3] * 3, ModelNew=2e-3)
    [fast, hidden], _ = timing.judge(late, 3e-3, "the forward")
    assert fast.startswith(
        "ModelNew took 1.000 ms, and writing its outputs as fast as a copy takes"
    )
    assert fast.endswith("takes 3.000 ms: not credible")
    assert "busy 2.000 ms longer than after eager: work on another stream" in hidden
    fast_copy = times_of("cpu", [3e-3] * 5, [3e-3] * 5, 3e-3, copy=0.1e-3)  # is never wrong
    assert timing.judge(fast_copy, 3e-3, "the forward") == ([], [])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("eager", "again", "note"),
    [
        ([3e-3] * 3, [3.5e-3] * 3, None),
        ([3e-3] * 20, [3e-3] * 19 + [90e-3], None),  # one sample in forty proves nothing
        ([3e-3] * 2, [3e-3] * 2, "2 of at least 3 rounds"),
        ([3e-3], [3e-3], "1 of at least 3 rounds"),
        ([3e-3] * 3, [8e-3] * 3, "torch.relu itself took 3.000 to 8.000 ms"),
        ([3e-3, 8e-3] * 2, [3e-3, 8e-3] * 2, "torch.relu itself took 3.000 to 8.000 ms"),
    ],
)
def test_noise_is_not_judged(device, eager, again, note):
    timings = times_of(device, eager, again)
    problems, notes = timing.judge(timings, judge.fastest_copy(timings), "the forward")
    assert notes == ([f"too noisy to judge the times of the forward: {note}"] if note else [])
    assert len(problems) == (0 if note else 1)


def test_work_is_seen_beside_noise_and_calls_wait_where_others_have_the_device():
    for again in (3e-3, 8e-3):
        timings = times_of("cuda", [3e-3] * 3, [again] * 3, ModelNew=2e-3)
        [problem], _ = timing.judge(timings, 1e-3, "the forward")
        assert "work on another stream" in problem
    late = {NAMES.solution: 4e-3, NAMES.eager: 4e-3, NAMES.again: 4e-3}
    timings = times_of("cuda", [3e-3] * 5, [3e-3] * 5, **late)
    assert timing.judge(timings, 1e-3, "the forward")[0] == []
    for wait in (0, 1):  # eager did not wait in the other rounds
        timings.wall[NAMES.eager][wait] = timings.wall[NAMES.again][wait] = 3e-3
    assert timing.judge(timings, 1e-3, "the forward")[0] == []


@pytest.mark.parametrize("false", range(51))
def test_the_calls_that_decide_the_median(false):
    """Those with a false time are caught, or the median is above a fifth of the honest ones."""
    honest = [1e-3 + i * 1e-6 for i in range(false, 50)]
    calls = [(0.5e-3, 0.5e-3)] * false + [(seconds, 0.0) for seconds in honest]
    typical = median(seconds for seconds, _ in calls)
    found = timing.concealed(calls, typical, [0.0] * 8)
    assert found in (0.0, 0.5e-3)
    assert found or sum(seconds < typical for seconds in honest) >= len(honest) / 5
    assert not found or false >= 18


def test_calls_that_decide_nothing_are_not_looked_at():
    calls = [(1e-3, 0.0)] * 4 + [(2e-3, 9e-3)] * 4  # delayed, and slow
    assert timing.concealed(calls, 1.5e-3, [0.0, 1e-4, 0.0, 0.0, 3e-3]) == -1e-4
    assert timing.concealed(calls, 1.5e-3, [-9e-3] * 5) == 0.0  # eager's thread waited


def test_a_product_is_the_floor():
    kind = linear_relu_divide.Judge

    def problems(ours: float, three: float | None = None) -> list[str]:
        seconds = {kind.names.solution: ours, kind.names.eager: 3e-3, kind.names.again: 3e-3}
        seconds |= {PRODUCT: 2.7e-3} | ({THREE: three} if three else {})
        times = {name: [value] * 3 for name, value in seconds.items()}
        timings = timing.Timings("cuda", kind.names, kind.rate, 1, times, dict(times))
        fastest = kind.fastest(SimpleNamespace(names=kind.names), timings)
        return timing.judge(timings, fastest, "the forward")[0]

    assert problems(2.6e-3) == []
    assert "a product at the highest rate measured" in problems(1.5e-3)[0]
    assert problems(0.53e-3, three=0.51e-3) == []  # float32 out of three float16 products
    assert "not credible" in problems(0.05e-3, three=0.51e-3)[0]


def run_of(ours: list[float], eager: list[float], again: list[float] | None = None) -> Run:
    timings = times_of("cpu", eager, again or eager)
    timings.seconds[NAMES.solution] = ours
    return Run("", timings)


def test_ties_and_noise():
    eager = [1.0, 1.01, 0.99, 1.0, 1.0]
    twice = run_of([s / 2 for s in eager], eager)
    assert twice.word == "faster"
    assert run_of([2 * s for s in eager], eager).word == "slower"
    assert run_of([0.97, 1.0, 0.98, 1.01, 0.99], eager).word == "a tie"
    noisy = run_of([0.5] * 5, eager, [2.0, 0.4, 1.7, 3.0, 2.5])
    assert noisy.word == "too noisy"
    assert run_of([0.5] * 2, [1.0] * 2).word == "too noisy"


def test_the_referees_clock():
    def wrong(ours: list, eager: list = [(1e-4, 1e-4)] * 9) -> str | None:
        hidden = {NAMES.solution: ours, NAMES.eager: eager, NAMES.again: eager}
        return judge.wrong_clock(hidden, times_of("cpu", [1e-3] * 9, [1e-3] * 9, 1e-4))

    assert wrong([(1e-4, 1e-4)] * 9) is None
    assert wrong([(1e-4, 9e-4)] * 9, [(1e-3, 1e-4)] * 4 + [(1e-3, 9e-4)] * 5) is None
    assert wrong([(1e-4, 1.5e-3)] * 9) is None  # waits for a CPU
    assert "a changed timer" in wrong([(1e-4, 3e-3)] * 9)
    assert "a changed timer" in wrong([(1e-4, 3e-3)] * 5 + [(4e-4, 1e-4)] * 4)  # in six of ten
    assert wrong([(1e-4, 1e-4)] * 5 + [(9e-3, 3e-3)] * 4) is None  # these decide nothing


def test_speed_up():
    draw = random.Random(1)
    base = [draw.uniform(1, 2) for _ in range(50)]
    assert timing.speed_up(base, [t / 2 for t in base]) == (2, 2, 2)
    ratio, low, high = timing.speed_up(base, [t * draw.uniform(0.9, 1.1) for t in base])
    assert low < ratio < high
    assert timing.speed_up([1.0], [2.0]) == (0.5, 0.5, 0.5)
    assert timing.spread([1.0]) == (1.0, 1.0)
    assert timing.spread([float(i) for i in range(11)]) == (1.0, 9.0)
