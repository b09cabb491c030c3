"""Tests of parts without a grading: shared memory, reading results, stopping processes."""

import mmap
import os
import signal
import subprocess
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from referee import cuda_ipc, processes, reading
from referee.contestant import UnstoppableError
from referee.early_elements import EarlyElements
from referee.reading import BadDescriptionError, Reader, UnreadableError, checked
from referee.reference_step import step_or_none
from referee.results import describe, flatten
from referee.server import EndedError
from referee.shared import Mapping, Pool, Region
from referee.timed_requests import checked_seconds
from referee.verdict import ERROR, outcome

CPU = torch.device("cpu")
VALUES = [
    torch.arange(12.0).view(3, 4).t(),
    torch.arange(20)[3:9:2],
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.empty(0, 3),
    "text",
]


def test_values_arrive_in_their_form():
    pool = Pool(CPU)
    region = Region(pool)
    region.place(VALUES)
    region.write(VALUES)
    mapped = Mapping(pool.descriptor, CPU).tensors(region.form)
    pool.close()
    for copy, original in zip(mapped, VALUES, strict=True):
        if isinstance(original, torch.Tensor):
            assert torch.equal(copy, original)
            assert copy.stride() == original.stride()
            assert copy.storage_offset() == original.storage_offset()
        else:
            assert copy == original
    assert region.is_unchanged()
    mapped[0][1, 1] += 1
    assert region.changed_values() == [0]
    region.rewrite()
    assert region.is_unchanged()


def test_memory_that_is_shared_stays_shared():
    pool = Pool(CPU)
    base = torch.arange(10.0)
    region = Region(pool)
    region.place([base[:4], base[2:]])
    region.write([base[:4], base[2:]])
    first, second = Mapping(pool.descriptor, CPU).tensors(region.form)
    pool.close()
    first[3] = 77
    assert second[1] == 77


def test_memory_that_was_given_back_is_used_again():
    pool = Pool(CPU)
    first, second = Region(pool), Region(pool)
    first.place([torch.empty(1 << 22)])
    second.place([torch.empty(1 << 22)])
    start = first.form["memory"]
    assert second.form["memory"] != start
    first.close()
    first.close()  # a second time does nothing
    small, other = Region(pool), Region(pool)
    small.place([torch.empty(1 << 10)])  # too small for so large a block
    other.place([torch.empty(1 << 21)])
    assert small.form["memory"] != start
    assert other.form["memory"] == start
    pool.close()


def test_values_with_repeated_elements_are_written():
    pool = Pool(CPU)
    region = Region(pool)
    column = torch.rand(4, 1)
    region.place([column.expand(4, 3)])
    region.write([column.expand(4, 3)])
    assert region.is_unchanged()
    whole = column.expand(4, 3).contiguous()  # of another layout
    region.write([whole])
    assert torch.equal(region.tensors[0], whole)
    pool.close()


def test_a_lack_of_memory_on_a_gpu_is_torchs_error(monkeypatch):
    def fail(name, *arguments):
        raise cuda_ipc.CudaError(f"{name} failed with status 2")

    monkeypatch.setattr(cuda_ipc, "_call", fail)
    with pytest.raises(torch.OutOfMemoryError, match="1,024 bytes"):
        cuda_ipc.Allocation(1024, CPU)


def test_a_reference_without_memory_is_not_one_without_gradients():
    def raise_error(error):
        raise error

    assert step_or_none(lambda: raise_error(RuntimeError("no derivative"))) is None
    with pytest.raises(torch.OutOfMemoryError):
        step_or_none(lambda: raise_error(torch.OutOfMemoryError("none")))


@pytest.mark.parametrize("seconds", ["x", [1], [True, 0.1], [0.1], [-0.1, 0.1], [float("nan")] * 2])
def test_times_that_are_no_times(seconds):
    assert checked_seconds(seconds, 2) == [0.0, 0.0]
    assert checked_seconds([0.0, 0.5], 2) == [0.0, 0.5]


def test_signals_without_a_name():
    assert outcome(EndedError(-40, ""), "importing") == (
        ERROR,
        "crashes (signal 40) while importing",
    )
    assert "SIGSEGV" in outcome(EndedError(-signal.SIGSEGV, ""), "importing")[1]


@pytest.fixture
def stopped():
    """A stopped child process, whose memory is this one's at the time of the fork."""
    trees = []

    def fork() -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        tree = processes.Tree(pid, is_solution=False)
        tree.stop()
        trees.append(tree)
        return pid

    yield fork
    for tree in trees:
        tree.end()


@pytest.mark.parametrize(
    "x",
    [VALUES[0], VALUES[1], torch.rand(5).expand(3, 5)],
    ids=["transposed", "with a step", "expanded"],
)
def test_reading_in_another_process(stopped, x):
    reader = Reader(stopped(), CPU)
    description = describe(x)
    assert torch.equal(reader.whole(description), x)
    indices = torch.tensor([0, x.numel() - 1])
    assert torch.equal(reader.elements(description, indices), x.flatten()[indices])


def test_what_cannot_be_read(stopped):
    description = describe(torch.rand(3))
    reader = Reader(stopped(), CPU)
    with pytest.raises(UnreadableError):
        reader.whole({**description, "address": 8})
    with pytest.raises(UnreadableError, match="more than there is memory"):
        reader.whole({**description, "strides": [1 << 46]})
    for wrong in ({"shape": [-1]}, {"strides": []}, {"address": "x"}, {"dtype": "Tensor"}):
        with pytest.raises(BadDescriptionError):
            checked({**description, **wrong})


@pytest.mark.parametrize("dtype", ["bits8", "uint4", "qint8", "float4_e2m1fn_x2", "float", [], {}])
def test_dtypes_that_torch_cannot_compute_with(dtype):
    with pytest.raises(BadDescriptionError, match="dtype"):
        checked(describe(torch.rand(3)) | {"dtype": dtype})


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_all_other_dtypes_can_be_read(stopped):
    bytes_of_all = torch.randint(2, (64,), dtype=torch.uint8)
    reader = Reader(stopped(), CPU)
    for name in reading.DTYPES:
        if not hasattr(torch, name):
            continue
        x = bytes_of_all.view(getattr(torch, name))
        early = reader.elements(describe(x), torch.tensor([0, 3]))
        whole = reader.whole(describe(x))
        late = reading.as_indexable(whole).reshape(-1)[torch.tensor([0, 3])]
        assert torch.equal(early.view(torch.uint8), late.view(torch.uint8))


def test_gaps_between_elements_do_not_take_all_memory(stopped, monkeypatch):
    x = torch.rand(1 << 12)
    reader = Reader(stopped(), CPU)
    monkeypatch.setattr(reading, "free_bytes", lambda _: 5 * x.numel())
    with pytest.raises(UnreadableError, match="more than there is memory"):
        reader.whole(describe(x[:2049:4]))
    assert torch.equal(reader.whole(describe(x[:1025:4])), x[:1025:4])
    assert torch.equal(reader.whole(describe(x)), x)


def test_addresses_between_elements_are_not_read_on_a_gpu():
    reader = Reader(os.getpid(), torch.device("cuda"))
    description = describe(torch.rand(3)) | {"handle": "00" * 64}
    for wrong in ({"distance": 2}, {"distance": "x"}, {"distance": 0, "handle": None}):
        with pytest.raises(BadDescriptionError):
            reader.whole({**description, **wrong})


@pytest.mark.parametrize(
    "values",
    [torch.rand(5, 7), torch.arange(6.0).view(2, 3).t()],
    ids=["contiguous", "transposed"],
)
def test_results_that_change_after_their_clock_has_stopped(stopped, values):
    reader = Reader(stopped(), CPU)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    bench = SimpleNamespace(problem=on_gpu, are_results_copied=False, outputs=[])
    early = EarlyElements(bench, SimpleNamespace(reader=reader))
    early.read({"calls": [{"results": [describe(values) | {"handle": "one"}, {"type": "int"}]}]})
    assert not early.differs(0, 0, values)
    assert not early.differs(0, 1, values)
    assert early.differs(0, 0, values + 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_copies_that_change_after_their_clock_has_stopped(device):
    """They are in the referee's memory, so that the reply need not say anything of them."""
    pool = Pool(CPU)
    region = Region(pool)
    results = [torch.arange(6.0).view(2, 3).t(), torch.empty(0), torch.tensor(1.5)]
    region.place(results)
    problem = SimpleNamespace(device=torch.device(device))
    bench = SimpleNamespace(problem=problem, are_results_copied=True, outputs=[region])
    forged = {"calls": [{"results": []}]}
    is_late = {0: False, 2: False}
    for _ in range(100):
        region.fill()
        early = EarlyElements(bench, SimpleNamespace(reader=None))
        early.read(forged)
        for result_index in (0, 1, 2):
            assert not early.differs(0, result_index, region.tensors[result_index])
        region.write(results)
        assert not early.differs(0, 1, region.tensors[1])
        for result_index in is_late:
            is_late[result_index] |= early.differs(0, result_index, region.tensors[result_index])
    assert is_late == {0: True, 2: True}
    pool.close()


def test_a_stopped_tree_does_nothing():
    """Processes that it has started, in other sessions too, do nothing either."""
    memory = mmap.mmap(-1, 16)
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            os.setsid()
        while True:
            memory[0] = (memory[0] + 1) % 256
    tree = processes.Tree(pid, is_solution=False)
    time.sleep(0.1)
    for _ in range(5):
        tree.stop()
        count = memory[0]
        time.sleep(0.02)
        assert memory[0] == count
        tree.go_on()
        end = time.monotonic() + 10
        while memory[0] == count and time.monotonic() < end:
            time.sleep(0.001)
        assert memory[0] != count
    children = processes.children_of(pid)
    tree.end()
    os.waitpid(pid, 0)
    for child in children:
        end = time.monotonic() + 10
        while processes.state_of(child) not in "XZ" and time.monotonic() < end:
            time.sleep(0.001)
        assert processes.state_of(child) in "XZ"


@pytest.fixture
def sleeper():
    """A child process that sleeps."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    yield pid
    with suppress(ProcessLookupError, ChildProcessError):  # a test may have waited for its end
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_tree_that_starts_programs_is_stopped():
    """A thread that waits for a child of vfork(2) cannot be stopped before the child goes on."""
    pid = os.fork()
    if pid == 0:
        while True:
            subprocess.run(["/bin/true"], check=False)
    tree = processes.Tree(pid, is_solution=False)
    for index in range(200):
        assert tree.stop()
        assert processes.state_of(pid) == "T"
        tree.go_on()
        time.sleep(index % 5 * 1e-3)
    tree.end()
    os.waitpid(pid, 0)


def test_a_tree_that_never_stops_is_killed(sleeper, monkeypatch):
    monkeypatch.setattr(processes, "_is_at_rest", lambda _: False)
    monkeypatch.setattr(processes, "SECONDS_TO_STOP", 0.1)
    assert not processes.Tree(sleeper, is_solution=False).stop()
    _, status = os.waitpid(sleeper, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    error = UnstoppableError(-signal.SIGKILL, "")
    assert outcome(error, "importing") == (ERROR, "does not stop at SIGSTOP while importing")


def test_orphans_are_found_and_ended():
    with processes.subreaper():
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                signal.pause()
            os._exit(0)
        end = time.monotonic() + 10
        while not processes._orphans() and time.monotonic() < end:
            time.sleep(0.001)
        orphans = processes._orphans()
        assert orphans
    assert not any(processes.state_of(pid) in "RSDT" for pid in orphans)


def test_flatten():
    assert flatten((1, [2, (3,)])) == ("[*, [*, [*]]]", [1, 2, 3])
    assert flatten(4) == ("*", [4])
    with pytest.raises(ValueError, match="more than"):
        flatten([0] * 1001)
