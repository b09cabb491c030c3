"""Results are read in a stopped process: some elements early, and later all of them."""

import mmap
import os
import random
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from referee.checks.returned_results import check_complete
from referee.contestants import processes, reading
from referee.contestants.descriptions import ResultIndex, describe, flatten
from referee.contestants.pool import Pool
from referee.contestants.reading import (
    BadDescriptionError,
    Reader,
    SomeElements,
    UnreadableError,
    layout_of,
)
from referee.contestants.region import Region
from referee.rounds.early_elements import EarlyElements, choose_elements
from referee.verdict import NotCorrectError

CPU = torch.device("cpu")
TRANSPOSED = torch.arange(12.0).view(3, 4).t()
WITH_A_STEP = torch.arange(20)[3:9:2]
ONE = torch.ones(())


@pytest.fixture
def stopped():
    """Return a function that forks and stops a child, which has this process's memory.

    The function returns the id of the child.
    """
    trees = []

    def fork() -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        tree = processes.ProcessTree(pid, is_solution=False)
        tree.stop()
        trees.append(tree)
        return pid

    yield fork
    for tree in trees:
        tree.end()


@pytest.mark.parametrize(
    "x",
    [TRANSPOSED, WITH_A_STEP, torch.rand(5).expand(3, 5)],
    ids=["transposed", "with a step", "expanded"],
)
def test_tensors_of_another_process_are_read_in_any_layout(stopped, x):
    reader = Reader(stopped(), CPU, Pool(CPU))
    description = describe(x)
    assert torch.equal(reader.read_whole(description), x)
    wanted = {
        "bad": SomeElements({**description, "shape": [-1]}, [0]),
        "first and last": SomeElements(description, [0, x.numel() - 1]),
        "unreadable": SomeElements({**description, "address": 8}, [0]),
        "at 0": SomeElements({**description, "address": 0}, [0]),
        "second": SomeElements(description, [1]),
    }
    read = reader.read_elements(wanted)
    assert set(read) == {"first and last", "second"}
    assert torch.equal(read["first and last"].view(x.dtype), x.flatten()[[0, -1]])
    assert torch.equal(read["second"].view(x.dtype), x.flatten()[[1]])


def test_a_page_that_never_comes_is_waited_for_once(monkeypatch):
    """A stopped process would have to fill it, see userfaultfd(2)."""
    release = threading.Event()
    for copy in ("copy_memory", "copy_scattered"):
        monkeypatch.setattr(reading, copy, lambda *_: release.wait())
    monkeypatch.setattr(reading, "_are_present", lambda *_: False)
    monkeypatch.setattr(reading, "MAX_READ_SECONDS", 0.5)
    reader = Reader(os.getpid(), CPU, Pool(CPU))
    description = describe(torch.rand(3))
    for least_seconds, most_seconds in ((0.5, 60), (0, 0.4)):
        start = time.monotonic()
        with pytest.raises(UnreadableError, match="does not come"):
            reader.read_whole(description)
        assert reader.read_elements({"x": SomeElements(description, [0])}) == {}
        assert least_seconds <= time.monotonic() - start <= most_seconds
    release.set()
    reader.close()


def test_a_copy_that_is_late_writes_to_no_freed_memory(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(reading, "copy_memory", lambda *_: release.wait())
    monkeypatch.setattr(reading, "MAX_READ_SECONDS", 0.1)
    reader = Reader(os.getpid(), CPU, Pool(CPU))
    with pytest.raises(UnreadableError, match="does not come"):
        reader.read_whole(describe(torch.rand(3)))
    buffer = weakref.ref(reader._buffer)
    reader.forget()
    assert buffer() is not None
    release.set()
    reader.close()


def test_a_page_that_is_not_in_memory_is_read_with_a_time_limit(stopped):
    """A page that nobody has touched is not in memory yet."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[0] = 1
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    pid = stopped()
    for offset, is_present in ((0, True), (page - 4, True), (page - 2, False), (page, False)):
        piece = reading._IoVector(start + offset, 4)
        assert reading._are_present(pid, [piece]) == is_present
    assert not reading._are_present(pid, [reading._IoVector(8, 4)])
    assert not reading._are_present(1 << 22, [reading._IoVector(start, 4)])  # no such process


def test_bad_addresses_sizes_and_descriptions_raise(stopped):
    description = describe(torch.rand(3))
    reader = Reader(stopped(), CPU, Pool(CPU))
    with pytest.raises(UnreadableError):
        reader.read_whole({**description, "address": 8})
    with pytest.raises(UnreadableError, match="more than there is memory"):
        reader.read_whole({**description, "strides": [1 << 46]})
    for wrong in ({"shape": [-1]}, {"strides": []}, {"address": "x"}, {"dtype": "Tensor"}):
        with pytest.raises(BadDescriptionError):
            layout_of({**description, **wrong})


@pytest.mark.parametrize("dtype", ["bits8", "uint4", "qint8", "float4_e2m1fn_x2", "float", [], {}])
def test_dtypes_that_torch_cannot_compute_with_are_refused(dtype):
    with pytest.raises(BadDescriptionError, match="dtype"):
        layout_of(describe(torch.rand(3)) | {"dtype": dtype})


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_all_other_dtypes_can_be_read(stopped):
    bytes_of_all = torch.randint(2, (64,), dtype=torch.uint8)
    reader = Reader(stopped(), CPU, Pool(CPU))
    for name in reading.DTYPES:
        if not hasattr(torch, name):
            continue
        x = bytes_of_all.view(getattr(torch, name))
        early = reader.read_elements({"x": SomeElements(describe(x), [0, 3])})["x"]
        whole = reader.read_whole(describe(x))
        late = reading.as_indexable(whole).reshape(-1)[torch.tensor([0, 3])]
        assert torch.equal(early, late.view(torch.uint8))


def test_gaps_between_elements_do_not_take_all_memory(stopped, monkeypatch):
    x = torch.rand(1 << 12)
    reader = Reader(stopped(), CPU, Pool(CPU))
    monkeypatch.setattr(reading, "free_bytes", lambda _: 5 * x.numel())
    with pytest.raises(UnreadableError, match="more than there is memory"):
        reader.read_whole(describe(x[:2049:4]))
    assert torch.equal(reader.read_whole(describe(x[:1025:4])), x[:1025:4])
    assert torch.equal(reader.read_whole(describe(x)), x)


def test_addresses_between_elements_are_not_read_on_a_gpu():
    gpu = torch.device("cuda")
    reader = Reader(os.getpid(), gpu, Pool(gpu))
    description = describe(torch.rand(3)) | {"handle": "00" * 64}
    for wrong in ({"byte_offset": 2}, {"byte_offset": "x"}, {"byte_offset": 0, "handle": None}):
        with pytest.raises(BadDescriptionError):
            reader.read_whole({**description, **wrong})


@pytest.mark.parametrize(
    "values",
    [torch.rand(5, 7), torch.arange(6.0).view(2, 3).t()],
    ids=["contiguous", "transposed"],
)
def test_results_that_change_after_their_clock_has_stopped_are_found(stopped, values):
    """A GPU can still write a CPU's result when the process has stopped."""
    reader = Reader(stopped(), CPU, Pool(CPU))
    problem = SimpleNamespace(device=CPU)
    memory = SimpleNamespace(are_results_copied=False, outputs=[])
    resources = SimpleNamespace(problem=problem, memory=memory)
    early = EarlyElements(resources, SimpleNamespace(reader=reader))
    results = [describe(values), {"type": "int"}, describe(ONE), describe(values[:0])]
    early.read({"returned": [{"results": results}]})
    for index in range(4):
        assert not early.differs(ResultIndex(0, index), ONE if index == 2 else values)
    assert early.differs(ResultIndex(0, 0), values + 1)
    assert early.differs(ResultIndex(0, 2), ONE + 1)


def test_elements_are_chosen_by_bytes_and_at_least_one_of_each_result():
    """Result 7 has 99% of the bytes."""
    sizes = {result_index: (10, 4) for result_index in range(100)}
    sizes[7] = (99_000, 4)
    for _ in range(100):
        chosen = choose_elements(sizes, 32, random.Random(0))
        assert set(chosen) == set(sizes)
        assert all(chosen.values())
        assert len(chosen[7]) > 20
        assert all(0 <= i < sizes[index][0] for index, its in chosen.items() for i in its)
    assert [len(its) for its in choose_elements({0: (5, 8)}, 32, random.Random(0)).values()] == [32]
    assert choose_elements({}, 32, random.Random(0)) == {}


def test_no_seed_tells_which_elements_are_chosen(stopped):
    """Each request chooses others."""
    values = torch.arange(float(1 << 20))  # before the process, which inherits them
    process = SimpleNamespace(reader=Reader(stopped(), CPU, Pool(CPU)))
    memory = SimpleNamespace(are_results_copied=False)
    chosen = []
    for _ in range(2):
        torch.manual_seed(0)
        random.seed(0)
        early = EarlyElements(SimpleNamespace(problem=None, memory=memory), process)
        early.read({"returned": [{"results": [describe(values)]}]})
        chosen.append(early._indices)
    assert chosen[0] != chosen[1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_copies_that_change_after_their_clock_has_stopped_are_found(device):
    """They are in the referee's memory, so that the reply need not say anything of them."""
    pool = Pool(CPU)
    region = Region(pool)
    results = [torch.arange(6.0).view(2, 3).t(), torch.empty(0), torch.tensor(1.5)]
    region.make_room(results)
    problem = SimpleNamespace(device=torch.device(device))
    memory = SimpleNamespace(are_results_copied=True, outputs=[region])
    resources = SimpleNamespace(problem=problem, memory=memory)
    forged = {"returned": [{"results": []}]}
    for _ in range(10):
        region.fill_with_nan()
        early = EarlyElements(resources, SimpleNamespace(reader=None))
        early.read(forged)
        for result_index in (0, 1, 2):
            assert not early.differs(ResultIndex(0, result_index), region.tensors[result_index])
        region.write(results)
        assert not early.differs(ResultIndex(0, 1), region.tensors[1])
        for result_index in (0, 2):
            assert early.differs(ResultIndex(0, result_index), region.tensors[result_index])
    pool.close()


def test_elements_that_the_process_itself_has_read_must_be_right():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()
    right = {"result": 1, "indices": [1, 3], "bytes": "0000404000008040"}  # 3.0, 4.0
    check_complete(right, 1, x, "case")
    for wrong in (
        {"bytes": "00"},
        {"bytes": 5},
        {"indices": 1},
        {"indices": []},
        {"indices": [4]},
        {"indices": [-1]},
    ):
        check_complete(right | wrong, 0, x, "case")
        with pytest.raises(NotCorrectError, match="case: its result is not complete"):
            check_complete(right | wrong, 1, x, "case")


def test_nested_results_are_flattened():
    assert flatten((1, [2, (3,)])) == ("[*, [*, [*]]]", [1, 2, 3])
    assert flatten(4) == ("*", [4])
    with pytest.raises(ValueError, match="more than"):
        flatten([0] * 1001)
