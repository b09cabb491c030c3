"""Chunks of rows, in which a GEMM processes x: linear/chunks.h, compiled and run without a GPU."""

from dataclasses import astuple, dataclass
from typing import NamedTuple

import pytest

from tests.support.processes import compiled

MIB = 1 << 20
MAX_WORKSPACE = 254 * MIB  # the README promises 256; torch's allocator may add 2
MIN_FOR_ROWS = 64 * MIB  # kMinWorkspaceForRows of chunks.h

# The tiles of fp16x3: their rows of x, and kAllTiles of chunks.h.
TILE_ROWS = 176
ALL_TILES = (1 << 63) - 1

# Addresses of the whole x, out and mask in the program. It never reads what they point to.
X = 1 << 40
OUT = 1 << 41
MASK = 1 << 42

# Reads the attributes of a `Call`. Prints the rows of a chunk, then the attributes of each `Chunk`.
CHUNKS_PROGRAM = r"""
#include <cstdio>
#include <cstdlib>

#include "linear/chunks.h"

int main(int, char** arguments) {
  const auto number = [&](int i) { return atoll(arguments[i]); };
  kernels::LinearArguments call{};
  call.dtype = number(1) == 4 ? kernels::DType::kFloat32 : kernels::DType::kFloat16;
  call.m = number(2);
  call.n = number(3);
  call.x_stride = number(4);
  const int64_t fixed = number(5);
  const int64_t per_row = number(6);
  const kernels::TileGrid grid{number(7), number(8), number(9)};
  call.x = reinterpret_cast<const void*>(number(10));
  call.out = reinterpret_cast<void*>(number(11));
  call.mask = reinterpret_cast<uint8_t*>(number(12));
  const int64_t rows = kernels::choose_rows_of_chunk(call.m, grid, [&](int64_t m) {
    kernels::WorkspaceSlices slices(nullptr);
    slices.add<float>(m);
    slices.add<char>((per_row - 4) * m);
    return fixed + static_cast<int64_t>(slices.bytes());
  });
  printf("%lld", static_cast<long long>(rows));
  const auto address = [](const void* pointer) { return reinterpret_cast<long long>(pointer); };
  kernels::for_each_chunk(call, rows, [&](const kernels::LinearArguments& chunk, bool is_first) {
    printf(" %lld %lld %lld %lld %d", address(chunk.x), address(chunk.out), address(chunk.mask),
           static_cast<long long>(chunk.m), is_first);
  });
}
"""

# Makes slices of a workspace, and the same slices without a workspace. Prints where each slice, and
# its element 2, begin in the workspace, and the bytes of all. Then it prints how many pointers are
# not null without a workspace, and again the bytes of all.
SLICES_PROGRAM = r"""
#include <cstdio>
#include <vector>

#include "linear/chunks.h"

int main() {
  std::vector<char> memory(4096);
  kernels::WorkspaceSlices slices(memory.data());
  const auto print = [&](const void* pointer) {
    printf("%lld ", static_cast<long long>(static_cast<const char*>(pointer) - memory.data()));
  };
  kernels::WorkspaceSlices measured(nullptr);
  int pointers = 0;
  for (const int count : {1, 64, 65, 0, 3}) {
    int* const slice = slices.add<int>(count);
    print(slice);
    print(slices.pointer_into(slice, 2));
    int* const none = measured.add<int>(count);
    if (none != nullptr) ++pointers;
    if (measured.pointer_into(none, 2) != nullptr) ++pointers;
  }
  printf("%zu %d %zu", slices.bytes(), pointers, measured.bytes());
}
"""


def divide_up(a, b):
    return -(-a // b)


@dataclass(frozen=True)
class Call:
    """A call of a GEMM, and how it is divided into tiles.

    Attributes:
        element_size: the bytes of an element.
        m, n, x_stride: as in launchers.h.
        fixed, per_row: the bytes of the workspace: `fixed`, and `per_row` for each row of x.
        rows_of_tile, weight_tiles, tiles_of_wave: as in `TileGrid` of chunks.h.
        x, out, mask: where they begin.
    """

    element_size: int
    m: int
    n: int
    x_stride: int
    fixed: int
    per_row: int
    rows_of_tile: int
    weight_tiles: int
    tiles_of_wave: int
    x: int = X
    out: int = OUT
    mask: int = MASK


class Chunk(NamedTuple):
    """A chunk: where its parts of x, out and mask begin, its rows, and 1 if it is the first."""

    x: int
    out: int
    mask: int
    rows: int
    is_first: int


@pytest.fixture(scope="module")
def chunks_of(tmp_path_factory):
    """Return a function that returns the rows of a call's chunks, and the chunks."""
    program = compiled(tmp_path_factory.mktemp("chunks"), CHUNKS_PROGRAM)

    def chunks_of_call(call):
        rows, *rest = map(int, program(*astuple(call)))
        return rows, [Chunk(*rest[i : i + 5]) for i in range(0, len(rest), 5)]

    return chunks_of_call


def test_slices_are_aligned_and_measured_without_memory(tmp_path):
    *places, size, pointers, measured = map(int, compiled(tmp_path, SLICES_PROGRAM)())
    begins = [0, 256, 512, 1024, 1024]  # slices of 4, 256, 260, 0 and 12 bytes
    assert places[::2] == begins
    assert places[1::2] == [begin + 8 for begin in begins]
    assert size == measured == 1280
    assert pointers == 0


def call_of(m, k, fixed, element_size=4, mask=MASK):
    """Return a call of one wave for each chunk, whose rows of x and of out are not aligned."""
    return Call(
        element_size,
        m=m,
        n=1001,
        x_stride=k + 3,
        fixed=fixed,
        per_row=4 + 4 * k,
        rows_of_tile=TILE_ROWS,
        weight_tiles=1,
        tiles_of_wave=ALL_TILES,
        mask=mask,
    )


EACH_M = pytest.mark.parametrize("m", [1, 5000, 65_536, 1_000_003])
EACH_K = pytest.mark.parametrize("k", [64, 1024, 8192, 100_000])
EACH_FIXED = pytest.mark.parametrize("fixed", [0, 13 * MIB, 600 * MIB])


@EACH_M
@EACH_K
@EACH_FIXED
@pytest.mark.parametrize("element_size", [2, 4])
def test_chunks_cover_all_rows_once(chunks_of, m, k, fixed, element_size):
    call = call_of(m, k, fixed, element_size)
    rows, chunks = chunks_of(call)
    assert rows == m or rows % TILE_ROWS == 0
    begin = 0
    for chunk in chunks:
        assert chunk.x == X + begin * call.x_stride * element_size
        assert chunk.out == OUT + begin * call.n * element_size
        assert chunk.mask == MASK + begin * divide_up(call.n, 8)
        assert chunk.rows == min(rows, m - begin)
        assert chunk.is_first == (begin == 0)
        begin += chunk.rows
    assert begin == m


def test_chunks_of_a_call_without_a_mask_have_none(chunks_of):
    _, chunks = chunks_of(call_of(m=65_536, k=8192, fixed=0, mask=0))
    assert len(chunks) > 1
    assert [chunk.mask for chunk in chunks] == [0] * len(chunks)


@EACH_M
@EACH_K
@EACH_FIXED
def test_chunks_are_few_and_keep_the_limit_of_memory(chunks_of, m, k, fixed):
    """Their sizes differ by at most a tile for each chunk."""
    call = call_of(m, k, fixed)
    rows, chunks = chunks_of(call)
    tile_bytes = call.per_row * TILE_ROWS
    bytes_for_rows = max(MAX_WORKSPACE - fixed, MIN_FOR_ROWS)
    alignment_of_two_slices = 512
    assert call.per_row * rows <= max(bytes_for_rows, tile_bytes) + alignment_of_two_slices
    tiles_of_chunk = max(bytes_for_rows // tile_bytes, 1)
    assert len(chunks) == divide_up(divide_up(m, TILE_ROWS), tiles_of_chunk)
    assert chunks[0].rows - chunks[-1].rows < TILE_ROWS * len(chunks)


def one_product_call(m, n):
    """Return a call of gemm_one_product in float32, K = 8192, on an H200.

    Its workspace has the weight as fp16, and for each row of x its fp16 and 12 bytes more.
    """
    k = 8192
    return Call(
        element_size=4,
        m=m,
        n=n,
        x_stride=k,
        fixed=2 * n * k,
        per_row=2 * k + 12,
        rows_of_tile=256,
        weight_tiles=divide_up(n, 256),
        tiles_of_wave=66,
    )


# From N = 8192 on, the weight's slices leave too little memory for a chunk of whole waves.
@pytest.mark.parametrize("m", [65_536, 100_000])
@pytest.mark.parametrize("n", [512, 1024, 1536, 4096])
def test_chunks_have_few_more_waves_than_a_gemm_of_all_rows(chunks_of, m, n):
    """All chunks together have at most 1%, and one wave, more."""
    call = one_product_call(m, n)
    _, chunks = chunks_of(call)

    def waves_of(rows):
        tiles = divide_up(rows, call.rows_of_tile) * call.weight_tiles
        return divide_up(tiles, call.tiles_of_wave)

    assert len(chunks) > 1
    assert sum(waves_of(chunk.rows) for chunk in chunks) <= waves_of(m) * 1.01 + 1


def test_the_example_in_the_headers_comment_is_right(chunks_of):
    call = one_product_call(m=100_000, n=1536)
    assert (call.fixed, call.weight_tiles) == (24 * MIB, 6)
    rows, chunks = chunks_of(call)
    assert (rows, len(chunks)) == (55 * 256, 8)
