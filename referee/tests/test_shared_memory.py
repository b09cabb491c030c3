"""The memory that the referee shares with contestants."""

import mmap
import os
import resource

import pytest
import torch

from referee.child.mapping import Mapping
from referee.contestants import cuda_ipc
from referee.contestants.contestant import Contestant
from referee.contestants.pool import POOL_BYTES, Pool
from referee.contestants.region import Region
from referee.testing.graded import grade
from referee.testing.texts import RELU, correct, module

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
    region.make_room(VALUES)
    region.write(VALUES)
    mapped = Mapping(pool.descriptor, CPU).tensors(region.location)
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


@pytest.mark.parametrize("is_mapped", [True, False])
def test_pages_that_were_removed_are_mapped_again(is_mapped):
    """Each page then costs no fault when it is touched."""
    pool = Pool(CPU)
    region = Region(pool)
    values = [torch.ones(1 << 22)]
    region.make_room(values)
    region.write(values)
    mapping = Mapping(pool.descriptor, CPU)
    [mapped] = mapping.tensors(region.location)
    mapped.sum()
    with mmap.mmap(pool.descriptor, mapped.nbytes) as others_mapping:
        others_mapping.madvise(mmap.MADV_REMOVE, 0, mapped.nbytes)
    region.write(values)
    if is_mapped:
        mapping.map_pages([region.location])
    faults_before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert mapped.sum() == mapped.numel()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults_before
    assert (faults < 32) == is_mapped  # Linux maps at most 16 pages in a fault: 256 faults
    pool.close()


def test_eager_maps_its_pages_again_after_each_turn_of_the_solution(monkeypatch, tmp_path):
    asked = []
    ask = Contestant.ask

    def remember(contestant: Contestant, method: str, *rest: object, **arguments: object) -> dict:
        asked.append((contestant.pid, method))
        return ask(contestant, method, *rest, **arguments)

    monkeypatch.setattr(Contestant, "ask", remember)
    trials = 3
    grade(RELU, {"correct": correct(module("return torch.relu(x)"))}, tmp_path, trials=trials)
    imported = [pid for pid, method in asked if method == "import_file"]
    solution = imported[-1]
    mapped = [pid for pid, method in asked if method == "map_pages"]
    assert mapped and solution not in mapped  # it would compute ahead in such a request
    for pid in set(mapped):
        assert mapped.count(pid) >= 2 * trials  # rounds of forwards, and of training steps


@pytest.mark.parametrize("size", [7, 16, 24])
def test_a_change_of_any_byte_is_found(size):
    """Storages of a multiple of eight bytes are compared by words, others by bytes."""
    pool = Pool(CPU)
    region = Region(pool)
    region.make_room([torch.zeros(size, dtype=torch.uint8)])
    region.write([torch.zeros(size, dtype=torch.uint8)])
    for index in range(size):
        region.tensors[0][index] = 1
        assert not region.is_unchanged()
        region.rewrite()
        assert region.is_unchanged()
    pool.close()


def test_values_that_another_process_has_written_can_be_kept():
    pool = Pool(CPU)
    region = Region(pool)
    region.make_room(VALUES)
    region.fill_with_nan()  # equal bits are no change, though NaN equals nothing
    region.keep_values()
    assert region.is_unchanged()
    region.tensors[1][2] = 5
    assert region.changed_values() == [1]
    pool.close()


def test_memory_that_is_shared_stays_shared():
    pool = Pool(CPU)
    base = torch.arange(10.0)
    region = Region(pool)
    region.make_room([base[:4], base[2:]])
    region.write([base[:4], base[2:]])
    first, second = Mapping(pool.descriptor, CPU).tensors(region.location)
    pool.close()
    first[3] = 77
    assert second[1] == 77


def test_memory_that_was_given_back_is_used_again():
    pool = Pool(CPU)
    first, second = Region(pool), Region(pool)
    first.make_room([torch.empty(1 << 22)])
    second.make_room([torch.empty(1 << 22)])
    start = first.location["memory"]
    assert second.location["memory"] != start
    first.close()
    first.close()  # a second time does nothing
    small, other = Region(pool), Region(pool)
    small.make_room([torch.empty(1 << 10)])  # too small for so large a block
    other.make_room([torch.empty(1 << 21)])
    assert small.location["memory"] != start
    assert other.location["memory"] == start
    pool.close()


def test_pages_that_no_block_has_taken_are_freed():
    pool = Pool(CPU)
    region = Region(pool)
    region.make_room([torch.ones(1000)])
    region.write([torch.ones(1000)])
    size = os.fstat(pool.descriptor).st_blocks
    for stray in (pool.block(1 << 20).start + (1 << 20), POOL_BYTES - 1):
        os.pwrite(pool.descriptor, b"x", stray)
    assert os.fstat(pool.descriptor).st_blocks > size
    pool.free_stray_pages()
    assert os.fstat(pool.descriptor).st_blocks == size
    assert region.is_unchanged()
    pool.close()


def test_values_with_repeated_elements_are_written():
    pool = Pool(CPU)
    region = Region(pool)
    column = torch.rand(4, 1)
    region.make_room([column.expand(4, 3)])
    region.write([column.expand(4, 3)])
    assert region.is_unchanged()
    whole = column.expand(4, 3).contiguous()  # of another layout
    region.write([whole])
    assert torch.equal(region.tensors[0], whole)
    pool.close()


@pytest.mark.parametrize(("size", "allocated"), [(1, 2), (1 << 20, 2), (2 << 20, 2), (5 << 20, 6)])
def test_allocations_on_a_gpu_share_no_block_of_the_driver(size, allocated, monkeypatch):
    """A contestant's handle would open all that is in the block."""
    sizes = []

    def record(name, *arguments):
        if name == "cuMemAlloc_v2":
            sizes.append(arguments[1].value)

    monkeypatch.setattr(cuda_ipc, "_call", record)
    assert cuda_ipc.Allocation(size, CPU).size == allocated << 20
    assert sizes == [allocated << 20]


def test_a_lack_of_memory_on_a_gpu_is_torchs_error(monkeypatch):
    def fail(name, *arguments):
        raise cuda_ipc.CudaError(f"{name} failed with status 2")

    monkeypatch.setattr(cuda_ipc, "_call", fail)
    with pytest.raises(torch.OutOfMemoryError, match="1,024 bytes"):
        cuda_ipc.Allocation(1024, CPU)
