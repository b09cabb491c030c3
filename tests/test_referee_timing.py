"""The times: every round is taken, what no honest run gives is noticed, noise accuses nobody."""

import random
import statistics
import subprocess
import sys
from functools import partial
from time import sleep

import documents
import pytest
import torch
from candidates import GradientCheat
from torch import nn

from model import Model
from referee import cases, clock, relu, stats, step, timing
from referee.outcome import Run
from referee.progress import Progress
from referee.report import tables


class Forgetful(nn.Module):
    """Computes its first few answers, then repeats the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.kept = None

    def forward(self, x):
        self.calls += 1
        if self.calls < 4:
            self.kept = torch.relu(x)
        return self.kept.clone()


FIVE = timing.Rounds(trials=5)


def draw_inputs() -> relu.Inputs:
    generator = torch.Generator().manual_seed(1)
    ring = [cases.random((4, 64), torch.float32, generator.device, generator)]
    return relu.Inputs(ring, Model(), generator)


class Slow(Model):
    """The reference, and 50 ms."""

    def forward(self, x):
        sleep(0.05)
        return super().forward(x)


def timings_of(device: str, **seconds: float) -> timing.Timings:
    times = {name: [value] * 3 for name, value in seconds.items()}
    return timing.Timings(device, relu.NAMES, relu.RATE, 1, times, dict(times))


def timed(candidate: nn.Module) -> timing.Timings:
    inputs = draw_inputs()
    x = inputs.ring[0]
    timings = timing.Timings("cpu", relu.NAMES, relu.RATE, 2 * x.nbytes)
    calls = relu.contestants(Model(), candidate, x, timings.notes)
    return timing.measure(calls, inputs, timings, relu.fastest_copy, FIVE, Progress())


def timed_step(
    candidate: nn.Module, pace: step.Pace | None = None, reference: nn.Module | None = None
) -> step.Step:
    inputs = draw_inputs()
    grad_output = torch.rand(inputs.ring[0].shape)
    pace = pace or step.Pace(torch.clone, 0.0, backward=1)
    reference = reference or Model()
    return step.measure_step(
        reference, candidate, inputs, grad_output, step.Step.of("cpu", relu.NAMES, relu.RATE),
        pace, FIVE, Progress(),
    )  # fmt: skip


def test_timing_takes_every_round():
    timings = timed(Model())
    assert timings.problems == []
    assert {len(times) for times in timings.seconds.values()} == {5}
    assert timings.work == 2 * 4 * 64 * 4
    assert relu.NAMES.again in tables.results(Run("", timings))


@pytest.mark.parametrize(("ratio", "noise", "is_tie"), [(2.0, 0.0, False), (1.001, 0.2, True)])
def test_ties_are_printed(ratio, noise, is_tie):
    """Eager's second time is one always, the solution where it is as fast."""
    text = tables.results(Run("", documents.timings(relu, ratio, noise=noise)))
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert rows[relu.NAMES.again].endswith("a tie")
    assert rows[relu.NAMES.solution].endswith("a tie") == is_tie
    assert not rows[relu.NAMES.eager].endswith("a tie")


def test_replay_is_caught_while_timing():
    assert "a timed call was wrong in rows" in timed(Forgetful()).problems[0]


def test_inputs_change_when_they_are_written():
    inputs = draw_inputs()
    before = inputs.ring[0].clone()
    x = inputs.next()
    assert torch.equal(x, before)
    inputs.write()
    changed = (x != before).any(1).nonzero().flatten()
    assert changed.tolist() == [inputs.row]


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


def test_step_takes_every_round():
    timings = timed_step(Model())
    assert timings.problems == []
    seconds = timings.seconds()
    assert list(seconds) == ["forward", "backward", "step"]
    for half in seconds.values():
        assert list(half) == ["ModelNew", "torch.relu", "torch.relu (again)"]
        assert {len(times) for times in half.values()} == {5}
    assert seconds["step"]["torch.relu"][4] == sum(
        seconds[half]["torch.relu"][4] for half in ("forward", "backward")
    )
    text = tables.results(Run("", timed(Model()), timings))
    assert "backward, torch.relu (again)" in text
    assert "kept for backward: ModelNew 1,024 bytes, torch.relu 1,024 bytes (1/1)" in text


@pytest.mark.slow
def test_the_pace_is_taken_during_the_step():
    """A machine that has become faster since the forward was timed makes no time incredible."""
    assert timed_step(Model(), step.Pace(torch.clone, 1.0, backward=1)).problems == []
    slow = step.Pace(lambda x: sleep(0.05), 1.0, backward=1)
    problem = timed_step(Model(), slow, reference=Slow()).problems[0]
    assert problem.startswith("step, forward: ModelNew took ")
    assert "as fast as a copy takes 5" in problem


def test_what_eager_does_is_credible():
    """A copy that was delayed in every round is no floor: eager went below it."""
    assert timed_step(Model(), step.Pace(lambda x: sleep(0.05), 1.0, backward=1)).problems == []


def test_wrong_gradient_is_caught_while_timing():
    half = timed_step(GradientCheat(lambda x, g: g / 2))
    assert half.problems[0].startswith("step, backward: a timed gradient was wrong in rows")
    assert len(half.forward.seconds["ModelNew"]) == 1


def test_kept_bytes():
    x = torch.rand(8, 16, requires_grad=True)
    halves = nn.Sequential(nn.ReLU(), nn.Softplus())  # Softplus saves its input, ReLU's output
    assert step.kept_bytes(nn.ReLU(), x) == x.nbytes
    assert step.kept_bytes(nn.Softplus(), x) == 0  # the input is there anyway
    assert step.kept_bytes(halves, x) == x.nbytes
    assert step.kept_bytes(nn.Linear(16, 4), x) == 0  # and so are the parameters


def test_incredible_times():
    eager = {"torch.relu": 3e-3, "torch.relu (again)": 3e-3}
    honest = timings_of("cuda", ModelNew=2.9e-3, copy=3e-3, **eager)
    assert timing.incredible(honest, 3e-3) == []
    fast = timings_of("cuda", ModelNew=1e-3, copy=3e-3, **eager)
    fast.wall = honest.wall
    [fast, hidden] = timing.incredible(fast, 3e-3)
    assert "moving its bytes once as fast as a copy takes 3.000 ms: not credible" in fast
    assert "another stream" in hidden


def control(device: str, eager: list[float], again: list[float], **late: float) -> timing.Timings:
    """Times in seconds of eager, twice, and of a solution and a copy that cannot both be true.

    `late`: seconds by which the host's clock is behind the device's, by name.
    """
    rounds = len(eager)
    names = relu.NAMES
    times = {names.eager: eager, names.again: again}
    times |= {names.solution: [1e-3] * rounds, relu.COPY_REUSED: [3e-3] * rounds}
    wall = {name: [t + late.get(name, 0) for t in some] for name, some in times.items()}
    return timing.Timings(device, names, relu.RATE, 1, times, wall)


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
    timings = control(device, eager, again)
    problems, notes = timing.judge(timings, relu.fastest_copy(timings), "the forward")
    if note:
        assert notes == [f"too noisy to judge the times of the forward: {note}"]
        assert not problems
    else:
        [problem] = problems
        assert problem.startswith("ModelNew took 1.000 ms, and moving its bytes")
        assert notes == []


@pytest.mark.parametrize("again", [3e-3, 8e-3])
def test_noise_hides_no_work(again):
    timings = control("cuda", [3e-3] * 3, [again] * 3, ModelNew=2e-3)
    [problem] = timing.judge(timings, 1e-3, "the forward").problems
    assert "busy 2.000 ms longer than after eager: work on another stream" in problem


def test_calls_wait_where_others_have_the_device():
    names = relu.NAMES
    late = {names.solution: 4e-3, names.eager: 4e-3, names.again: 4e-3}
    timings = control("cuda", [3e-3] * 5, [3e-3] * 5, **late)
    assert timing.judge(timings, 1e-3, "the forward").problems == []
    for wait in (0, 1):  # eager did not wait in the other rounds
        timings.wall[names.eager][wait] = timings.wall[names.again][wait] = 3e-3
    assert timing.judge(timings, 1e-3, "the forward").problems == []


@pytest.mark.parametrize("measured", [timed, timed_step])
@pytest.mark.parametrize(("late", "count"), [(0, 0), (1, 0), (5, 0), (20, 1)])
def test_incredible_times_are_taken_again(late, count, measured, monkeypatch):
    """Another program can delay what decides a median: it counts if it is so again.

    `late`: calls of the solution that the host sees last longer. `count`: of the problems.
    """
    candidate, calls = Model(), []

    class Clock:
        def time(self, call, x, write):
            output = call(x)
            calls.extend([call] * (call is candidate))
            slow = call is candidate and len(calls) <= late
            return output, 1e-3, 1.0 if slow else 1e-3

    for module in (timing, step):
        monkeypatch.setattr(module, "CpuClock", Clock)
        monkeypatch.setattr(module, "CONFIRMATION", FIVE)
    monkeypatch.setitem(timing.WARM_UP, "cpu", 0)
    timings = measured(candidate)
    assert len(timings.problems) == count
    assert len(calls) == (10 if late >= 5 else 5)
    assert timings.rounds == 5


HONEST = [1e-3 + i * 1e-6 for i in range(50)]


@pytest.mark.parametrize("false", range(51))
def test_the_calls_that_decide_the_median(false):
    """Those with a false time are caught, or the median is above a fifth of the honest ones."""
    calls = [(0.5e-3, 0.5e-3)] * false + [(seconds, 0.0) for seconds in HONEST[false:]]
    median = statistics.median(seconds for seconds, _ in calls)
    found = timing.concealed(calls, median, [0.0] * 8)
    assert found in (0.0, 0.5e-3)
    honest = [seconds for seconds, hidden in calls if not hidden]
    caught = found > 0
    assert caught or sum(seconds < median for seconds in honest) >= len(honest) / 5
    assert not caught or false >= 18


def test_calls_that_decide_nothing_are_not_looked_at():
    calls = [(1e-3, 0.0)] * 4 + [(2e-3, 9e-3)] * 4  # delayed, and slow
    assert timing.concealed(calls, 1.5e-3, [0.0, 1e-4, 0.0, 0.0, 3e-3]) == -1e-4
    assert timing.concealed(calls, 1.5e-3, [-9e-3] * 5) == 0.0  # eager's thread waited


def test_baselines_are_never_wrong():
    timings = control("cpu", [3e-3] * 5, [3e-3] * 5)
    timings.seconds |= {relu.NAMES.solution: [3e-3] * 5, relu.COPY: [0.1e-3] * 5}
    assert timing.judge(timings, 3e-3, "the forward") == ([], [])


def test_no_honest_call_is_accused_beside_busy_loops():
    """Threads are preempted for milliseconds in calls of 0.02."""
    inputs = relu.Inputs(
        [torch.zeros(1, 393216, dtype=torch.int8)], Model(), torch.Generator().manual_seed(1)
    )
    x, once = inputs.ring[0], timing.Rounds(trials=1)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for _ in range(20):
            timings = timing.Timings("cpu", relu.NAMES, relu.RATE, 2 * x.nbytes)
            calls = relu.contestants(Model(), Model(), x, timings.notes)
            timing.measure(calls, inputs, timings, relu.fastest_copy, once, Progress())
            assert timings.problems == []
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_speed_up():
    draw = random.Random(1)
    base = [draw.uniform(1, 2) for _ in range(50)]
    ratio, low, high = stats.speed_up(base, [t / 2 for t in base])
    assert ratio == low == high == 2
    ratio, low, high = stats.speed_up(base, [t * draw.uniform(0.9, 1.1) for t in base])
    assert low < ratio < high
    assert stats.speed_up([1.0], [2.0]) == (0.5, 0.5, 0.5)
    assert stats.spread([1.0]) == (1.0, 1.0)
    assert stats.spread([float(i) for i in range(11)]) == (1.0, 9.0)
