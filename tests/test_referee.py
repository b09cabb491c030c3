"""The referee accepts the reference and fails every cheat; the comparison misses no bit."""

import os
import random
import signal
import statistics
import subprocess
import sys
from time import sleep

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from model import Model
from referee import (
    benchmark,
    cases,
    clock,
    compare,
    correctness,
    gradients,
    relu,
    remote,
    report,
    stats,
    step,
    timing,
)
from referee.child import watch
from referee.child.rows import RowsWorker
from referee.outcome import Run
from referee.progress import Progress
from referee.solutions import feeding

CPU = torch.device("cpu")


class Cheat(nn.Module):
    """A candidate that refuses what it must, and otherwise does as the function does."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        served = isinstance(x, torch.Tensor) and x.dtype in cases.served(CPU).values()
        return self.function(x) if served else torch.relu(x)


def zero_nan(x):
    return torch.where(x > 0, x, torch.zeros_like(x))


def skip_tail(x):
    output = torch.relu(x)
    if output.is_contiguous() and (tail := output.numel() % 4):
        output.view(-1)[-tail:] = x.reshape(-1)[-tail:]
    return output


def leave_tail_unwritten(x):
    output = torch.empty_like(x)
    if not x.is_contiguous():
        return torch.relu(x)
    body = x.numel() // 4 * 4
    output.view(-1)[:body] = torch.relu(x.reshape(-1)[:body])
    return output


def change_input(x):
    output = torch.relu(x)
    if x.numel() > 1000:
        x[(-1,) * x.dim()] += 1
    return output


def change_hidden_memory(x):
    output = torch.relu(x)
    if x.storage_offset():
        x.as_strided((1,), (1,), 0).zero_()
    return output


def flush_subnormals(x):
    if not x.is_floating_point():
        return torch.relu(x)
    return torch.relu(torch.where(x.abs() < torch.finfo(x.dtype).smallest_normal, 0, x))


def first_row_only(x):
    output = torch.relu(x)
    if x.dim() > 1 and len(x) > 1:
        output[1:] = output[:1]
    return output


class Replay:
    """Answers from memory when address, layout and version are known."""

    def __init__(self) -> None:
        self.seen = {}

    def __call__(self, x):
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)
        if key not in self.seen:
            self.seen[key] = x, torch.relu(x)  # x is kept, so that its address stays its own
        return self.seen[key][1].clone()


class OneBuffer:
    """Returns the same memory for every input of one layout."""

    def __init__(self) -> None:
        self.buffers = {}

    def __call__(self, x):
        expected = torch.relu(x)
        key = (x.shape, x.stride(), x.dtype)
        return self.buffers.setdefault(key, expected).copy_(expected)


# Each cheat, and the words that the first failure must hold.
CHEATS = {
    "identity": (lambda x: x, "random, seed 5: the output shares memory with the input"),
    "clone": (torch.clone, "random, seed 5: 8,"),
    "zeros": (torch.zeros_like, "random, seed 5: 8,"),
    "in place": (torch.relu_, "random, seed 5: the input's memory was changed"),
    "nan becomes 0": (zero_nan, "special values"),
    "tail skipped": (skip_tail, "special values: 1 of"),
    # The first failure depends on the memory's content.
    "tail unwritten": (leave_tail_unwritten, "elements differ, the first at"),
    "contiguous strides": (
        lambda x: torch.relu(x).contiguous(),
        "transposed: the output's strides",
    ),
    "input changed": (change_input, "random, seed 5: the input's memory was changed"),
    "hidden memory changed": (change_hidden_memory, "the input's memory was changed: 1 of"),
    "input resized": (lambda x: torch.relu(x.resize_(x.numel())), "shape, strides or address"),
    "subnormals flushed": (flush_subnormals, "special values"),
    "first row only": (first_row_only, "random, seed 5"),
    "half precision": (lambda x: torch.relu(x.half().to(x.dtype)), "random, seed 5"),
    "through float32": (lambda x: torch.relu(x.float()).to(x.dtype), "float64, random"),
    "another dtype": (lambda x: torch.relu(x).double(), "the output's dtype is torch.float64"),
    "no tensor": (lambda x: torch.relu(x).tolist(), "the output is a list"),
    "a crash": (lambda x: x / [], "TypeError"),
    "replay": (Replay(), "calls in a row"),
    "one buffer": (OneBuffer(), "calls in a row: two outputs share memory"),
}


def small(candidate: nn.Module) -> correctness.Checks:
    return correctness.check_small(Model(), candidate, CPU, 5, Progress())


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_fail(name):
    function, reason = CHEATS[name]
    assert reason in small(Cheat(function)).failures[0]


def by_multiplication(x, g):
    return g * (x > 0)


def change_gradient(x, g):
    g.data.mul_(2)
    return torch.where(x <= 0, 0, g)


# The gradient of the input that each gives, and the words that the first failure must hold.
GRADIENT_CHEATS = {
    "by multiplication": (by_multiplication, "special values: gradient"),
    "passes at 0": (lambda x, g: torch.where(x < 0, 0, g), "special values: gradient"),
    "stops at nan": (lambda x, g: torch.where(x > 0, g, 0), "special values: gradient"),
    "identity": (lambda x, g: g, "shares memory with the output's gradient"),
    "contiguous strides": (
        lambda x, g: torch.where(x <= 0, 0, g).contiguous(),
        "input transposed: the gradient's strides",
    ),
    "gradient changed": (change_gradient, "the output's gradient was changed"),
    "another dtype": (
        lambda x, g: torch.where(x <= 0, 0, g.half()).to(g.dtype),
        "special values: gradient",
    ),
}


class GradientCheat(Model):
    """The right output and another gradient; the double backward is that of its expression."""

    def __init__(self, function) -> None:
        super().__init__()

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return torch.relu(x)

            @staticmethod
            def backward(ctx, g):
                return function(ctx.saved_tensors[0], g)

        self.apply_function = Function.apply

    def forward(self, x):
        return self.apply_function(x) if isinstance(x, torch.Tensor) else torch.relu(x)


@pytest.mark.parametrize("name", GRADIENT_CHEATS)
def test_gradient_cheats_fail(name):
    function, reason = GRADIENT_CHEATS[name]
    failures = small(GradientCheat(function)).failures
    assert failures[0].startswith("float32, ")
    assert reason in failures[0]


def test_double_backward_is_checked():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.relu(x)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return torch.where(ctx.saved_tensors[0] <= 0, 0, g)

    x = torch.tensor([-1.0, 2.0])
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        gradients.check_gradient(Model(), Once.apply, x, x)


class Lenient(Model):
    """Takes what torch refuses."""

    def forward(self, x):
        return super().forward(torch.as_tensor(x).float())


def test_errors_must_match():
    assert correctness.check_error(Model(), Model(), [1.0]) is None
    assert (
        correctness.check_error(Model(), Lenient(), [1.0]) == "raised nothing, expected TypeError"
    )


def test_reference_passes():
    checks = small(Model())
    assert checks.failures == []
    assert checks.count > 400


def test_unwritten_tail_shows():
    generator = torch.Generator().manual_seed(1)
    cheat = Cheat(leave_tail_unwritten)
    problem = correctness.check_tails(Model(), cheat, CPU, generator)
    assert problem.startswith("length 1: 1 of 1 elements differ, the first at [0]: got nan")
    assert correctness.check_tails(Model(), Model(), CPU, generator) is None
    assert not torch.are_deterministic_algorithms_enabled()


def test_headline():
    def check(candidate):
        generator = torch.Generator().manual_seed(1)
        x = cases.random((3, 5001), torch.float32, CPU, generator)
        return correctness.check_headline(Model(), candidate, x, generator, Progress()).failures

    assert check(Model()) == []
    assert "nan" in check(Cheat(zero_nan))[0]
    assert check(Cheat(skip_tail))


def test_failures_are_described():
    [first, *_] = small(Cheat(torch.clone)).failures
    assert "elements differ, the first at [" in first
    assert "got -0." in first
    assert "expected 0.0" in first


def test_changed_torch_is_noticed(monkeypatch):
    before = correctness.global_state()
    assert correctness.global_state() == before
    monkeypatch.setattr(torch, "relu", torch.clone)
    assert correctness.global_state() != before


def test_the_persisting_l2_is_what_it_was(monkeypatch):
    """A change is named, not the default of a driver."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(watch, "persisting_l2", lambda: 1 << 20)
    before = watch.state(gpu)
    assert not any(watch.differs(was, watch.state(gpu)[name]) for name, was in before.items())
    monkeypatch.setattr(watch, "persisting_l2", lambda: 2 << 20)
    after = watch.state(gpu)
    changed = [name for name, was in before.items() if watch.differs(was, after[name])]
    assert "the L2's persisting part" in changed
    assert "the L2's persisting part" not in watch.state(CPU)


class Mode(TorchFunctionMode):
    pass


def test_what_is_left_on_is_noticed():
    assert watch.left_on() == []
    with torch.device("cpu"):  # the default device is such a mode
        assert watch.left_on() == []
    with Mode():
        assert watch.left_on() == ["the function mode Mode"]
    with watch.Seen():
        assert watch.left_on() == ["a dispatch mode"]
    sys.setprofile(lambda *event: None)
    try:
        assert watch.left_on() == ["a profile function"]
    finally:
        sys.setprofile(None)
    signal.setitimer(signal.ITIMER_VIRTUAL, 600)
    try:
        assert watch.left_on() == ["a timer"]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def test_changed_operators_and_methods_are_noticed(monkeypatch):
    before = watch.state(torch.device("cpu"))
    library = torch.library.Library("aten", "IMPL")
    library.impl("index.Tensor", lambda x, places: x, "CPU")
    monkeypatch.setattr(clock.CpuClock, "time", lambda self, call, x: (call(x), 0.0, 0.0))
    now = watch.state(torch.device("cpu"))
    library._destroy()
    changed = [name for name, was in before.items() if watch.differs(was, now[name])]
    assert changed == [
        "referee.clock.CpuClock.time",
        "referee.clock.CpuClock.time's code",
        "aten::index.Tensor",
    ]


def test_a_timed_result_is_taken_away():
    worker = RowsWorker(torch.empty(64, dtype=torch.uint8), torch.device("cpu"))
    worker.called = "module"
    kept = torch.ones(3, 3)
    worker.take_away(kept[1:], [])
    assert kept.untyped_storage().nbytes() == 0
    with torch.inference_mode():
        foreign = torch.frombuffer(bytearray(8), dtype=torch.float32)
    worker.take_away(foreign, [])
    assert foreign.tolist() == [77, 77]
    x = torch.ones(9)
    worker.take_away(x[1:], [x])
    assert x.untyped_storage().nbytes() == 36


@pytest.mark.parametrize("shape", [[], [7], [3, 5], [4, 4], [3, 5, 5]])
def test_an_element_of_square_matrices_is_on_the_diagonal(shape):
    for _ in range(20):
        place = [start for start, stop in feeding.place_of(shape) if stop == start + 1]
        assert all(0 <= at < side for at, side in zip(place, shape, strict=True))
        assert shape[-2:] not in ([4, 4], [5, 5]) or place[-2] == place[-1]


def test_changed_priorities_are_noticed():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        before = remote.standing(process.pid)
        assert remote.standing(process.pid) == before
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
        assert remote.standing(process.pid) != before
        process.kill()
    assert remote.standing(process.pid) == ()


def test_dtypes_are_those_that_torch_takes():
    served = cases.served(CPU)
    for name, dtype in cases.DTYPES.items():
        if name in served:
            assert torch.relu(torch.ones(1, dtype=dtype)).item() == 1
        else:
            with pytest.raises(NotImplementedError):
                torch.relu(torch.ones(1, dtype=dtype))
    names = [case.name.partition(",")[0] for case in cases.elementwise(CPU, 5)]
    assert list(dict.fromkeys(names)) == list(served)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_values(dtype):
    largest = torch.iinfo(dtype).max
    values = cases.special_values(dtype).tolist()
    assert values == [largest // 2 + 1, 0, 1, largest - 1, largest]
    generator = torch.Generator().manual_seed(1)
    x = cases.random((3, 5001), dtype, CPU, generator)
    assert x.dtype == dtype
    halves = sum(value > largest // 2 for value in x.view(-1).tolist()) / x.numel()
    assert 0.45 < halves < 0.55
    before = x.tolist()
    cases.refill(x.t()[7], generator)
    assert [b[7] for b in before] != x.t()[7].tolist()
    cases.sprinkle(x, generator)
    assert {*values} <= {*x.view(-1).tolist()}
    patterns = cases.bit_patterns(dtype, CPU, generator)
    assert patterns.dtype == dtype
    assert len(set(patterns.tolist())) >= min(largest + 1, 99_000)


@pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=str)
def test_equal_tensors(dtype):
    x = cases.special_values(dtype)
    assert compare.first_mismatch(x, x.clone()) is None
    assert compare.first_mismatch(x, x.clone(), exact=True) is None


@pytest.mark.parametrize("dtype", [d for d in cases.DTYPES.values() if d.is_floating_point])
def test_what_counts_as_equal(dtype):
    def differ(got, expected):
        return compare.first_mismatch(*(torch.tensor([v], dtype=dtype) for v in (got, expected)))

    zero, nan, inf = 0.0, torch.nan, torch.inf
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4
    for got, expected in [(zero, -zero), (nan, -nan), (inf, inf)]:
        assert differ(got, expected) is None
    for got, expected in [(nan, inf), (zero, nan), (inf, -inf), (largest, inf), (smallest, zero)]:
        assert differ(got, expected)
        assert differ(expected, got)


def test_exact_sees_signs_and_payloads():
    x = torch.tensor([0.0, torch.nan])
    assert compare.first_mismatch(x, -x) is None
    assert compare.first_mismatch(x, -x, exact=True).count == 2


@pytest.mark.parametrize("shape", [(7, 101), (7 * 101,)])
def test_one_wrong_bit_in_the_last_chunk(monkeypatch, shape):
    monkeypatch.setattr(compare, "CHUNK", 100)
    x = torch.rand(shape)
    x.view(-1)[3] = torch.nan
    y = x.clone()
    y.view(torch.int32).view(-1)[-1] ^= 1
    mismatch = compare.first_mismatch(y, x)
    assert (mismatch.count, mismatch.total) == (1, 707)
    assert mismatch.index == tuple(size - 1 for size in shape)
    assert mismatch.got == y.view(-1)[-1].item()
    y.view(-1)[[50, 250]] = -1
    mismatch = compare.first_mismatch(y.t() if x.dim() == 2 else y, x.t() if x.dim() == 2 else x)
    assert mismatch.count == 3


def test_shapes_without_elements_or_dimensions():
    assert compare.first_mismatch(torch.empty(0, 3), torch.empty(0, 3)) is None
    assert compare.first_mismatch(torch.tensor(1.0), torch.tensor(2.0)).index == ()


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (None, "NoneType"),
        (nn.Parameter(torch.zeros(2, 3)), "Parameter"),
        (torch.zeros(2, 3, dtype=torch.float64), "dtype"),
        (torch.zeros(2, 3, device="meta"), "device"),
        (torch.zeros(6), "shape"),
        (torch.zeros(3, 2).t(), "strides"),
    ],
)
def test_layout(other, word):
    assert word in compare.layout_mismatch(other, torch.zeros(2, 3))
    assert compare.layout_mismatch(torch.ones(2, 3), torch.zeros(2, 3)) is None


def test_shared_memory():
    x = torch.zeros(10)
    assert compare.share_memory(x[:2], x[5:])
    assert not compare.share_memory(x, x.clone())
    assert not compare.share_memory(torch.empty(0), torch.empty(0))


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
    ring = [cases.random((4, 64), torch.float32, CPU, generator)]
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
    assert relu.NAMES.again in report.results(Run("", timings))


def test_replay_is_caught_while_timing():
    assert "a timed call was wrong in rows" in timed(Forgetful()).problems[0]


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
    text = report.results(Run("", timed(Model()), timings))
    assert "backward, torch.relu (again)" in text
    assert "kept for backward: ModelNew 1,024 bytes, torch.relu 1,024 bytes (1/1)" in text


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
    x = torch.rand(8, 16)
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
        def time(self, call, x):
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


@pytest.mark.parametrize(("dtype", "offsets", "columns"), [("float32", 3, 4), ("int64", 1, 2)])
def test_benchmark_of_offsets(dtype, offsets, columns, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "OFFSET_SIZES", {"cpu": (4, 9)})
    monkeypatch.setitem(benchmark.CELL_SECONDS, "cpu", 0.0)
    benchmark.main(["offsets", "--device", "cpu", "--dtype", dtype])
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("2^")]
    assert len(rows) == 2 * offsets
    assert all(row.count("(") == columns for row in rows)
