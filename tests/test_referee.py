"""The referee accepts the reference and fails every cheat; the comparison misses no bit."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from candidates import GradientCheat
from torch import nn
from torch.overrides import TorchFunctionMode

from model import Model
from referee import (
    cases,
    clock,
    compare,
    correctness,
    gradients,
    remote,
)
from referee.child import results, watch
from referee.child.inputs import InputsWorker
from referee.child.rows import RowsWorker
from referee.progress import Progress

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

    def changed():
        after = watch.state(gpu)
        return [name for name, was in before.items() if watch.differs(was, after[name])]

    assert changed() == []
    monkeypatch.setattr(watch, "persisting_l2", lambda: 2 << 20)
    assert "the L2's persisting part" in changed()
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
    monkeypatch.setattr(clock.CpuClock, "time", lambda self, call, x, write: (call(x), 0.0, 0.0))
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


def test_a_part_of_an_input_is_written_last():
    worker = InputsWorker(torch.empty(64, dtype=torch.uint8), torch.device("cpu"))
    worker.ring = [[torch.zeros(8, 16).T, 1.5]]
    worker.staged = [torch.arange(1.0, 129).view(8, 16).T, 1.5]
    worker.module, worker.base = torch.nn.Linear(3, 2), {"weight": torch.ones(2, 3)}
    x, weight = worker.ring[0][0], worker.module.weight
    versions = x._version, weight._version
    worker.renew(slot=0, draw=None, names=[["weight", 5]], seed=7, at=0.5, is_timed=True)
    assert (x == 0).sum() == 8
    worker.write()
    assert torch.equal(x.T.reshape(-1), torch.arange(1.0, 129))
    assert torch.equal(weight, cases.redraw(torch.ones(2, 3), 12))
    assert (x._version, weight._version) == versions


@pytest.mark.parametrize("shape", [(9, 8), (7,), (3, 5, 2)])
def test_rows_are_drawn_again(shape, monkeypatch):
    monkeypatch.setattr(cases, "OF_A_SEED", 16)
    x = cases.draw_rows(torch.empty(shape), 3)
    if len(shape) > 1:
        rows = [0, len(x) - 1, 1, 1]
        assert torch.equal(cases.draw_some(x[rows], rows, len(x), 3), x[rows])
    assert not torch.equal(cases.draw_rows(torch.empty(shape), 4), x)


def test_other_values_have_the_same_signs():
    values = torch.tensor([1.0, -2.0, 0.0])
    other = cases.redraw(values, 3)
    assert torch.equal(other, cases.redraw(values, 3))
    assert torch.equal(other[:2].sign(), values[:2].sign())
    assert 0 < other[2].abs() < 2
    assert (other != values).all()


class Pair(tuple):
    """Somebody's own."""


def with_attribute(x: torch.Tensor, name: str) -> torch.Tensor:
    setattr(x, name, {1})
    return x


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda x: x, ""),
        (lambda x: torch.nn.Parameter(x), ""),
        (lambda x: x.to_sparse(), ""),
        (lambda x: [x.T, (x, x)], ""),
        (lambda x: torch.max(x, 0), ""),
        (lambda x: with_attribute(x, "_dynamo_propagated_dynamic_indices"), ""),
        (lambda x: with_attribute(x, "detach"), "an attribute of its own, detach"),
        (lambda x: Pair((x,)), "a subclass of tuple, Pair"),
        (lambda x: x.as_subclass(type("Late", (torch.Tensor,), {})), "a tensor subclass, Late"),
        (lambda x: torch._neg_view(x), "not in memory yet"),
        (lambda x: torch._efficientzerotensor(3), "not in memory yet"),
        (lambda x: torch._lazy_clone(x), "not in memory yet"),
        (lambda x: torch._to_functional_tensor(x), "not in memory yet"),
    ],
)
def test_results_are_what_they_seem(make, fault):
    _, facts, tensors = results.take_apart(make(torch.ones(3, 3)))
    assert len(tensors) == len(facts)
    assert facts[0]["fault"].startswith("returns ") if fault else not facts[0]["fault"]
    assert fault in facts[0]["fault"]


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
