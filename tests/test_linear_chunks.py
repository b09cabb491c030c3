"""Chunks of rows, in which a GEMM processes x: linear/chunks.h, compiled and run without a GPU."""

import pytest

from tests.support.processes import compiled

MIB = 1 << 20
MAX_WORKSPACE = 254 * MIB  # the README promises 256; torch's allocator may add 2
MIN_FOR_ROWS = 64 * MIB  # kMinWorkspaceForRows of chunks.h

# The tiles of fp16x3: their rows of x, and the program's number for a Tiling without tiles_of_wave.
TILE_ROWS = 176
NO_WAVES = 0

# Addresses of the whole x, out and mask in the program. It never reads what they point to.
X = 1 << 40
OUT = 1 << 41
MASK = 1 << 42

# Prints the rows of a chunk; then for each chunk where its x, out and mask begin, its rows, and
# whether it is the first. A workspace has `fixed` bytes, and `per_row` bytes for each row of x, in
# two slices.
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
  kernels::Tiling tiling{number(7), number(8)};
  if (number(9) > 0) tiling.tiles_of_wave = number(9);
  call.x = reinterpret_cast<const void*>(number(10));
  call.out = reinterpret_cast<void*>(number(11));
  call.mask = reinterpret_cast<uint8_t*>(number(12));
  const int64_t rows = kernels::choose_rows_of_chunk(call.m, tiling, [&](int64_t m) {
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


@pytest.fixture(scope="module")
def chunks_of(tmp_path_factory):
    """Return a function that returns the rows of a chunk, and what is printed for each chunk."""
    program = compiled(tmp_path_factory.mktemp("chunks"), CHUNKS_PROGRAM)

    def call(*arguments, mask=MASK):
        rows, *rest = map(int, program(*arguments, X, OUT, mask))
        return rows, [rest[i : i + 5] for i in range(0, len(rest), 5)]

    return call


def test_slices_are_aligned_and_measured_without_memory(tmp_path):
    *places, size, pointers, measured = map(int, compiled(tmp_path, SLICES_PROGRAM)())
    begins = [0, 256, 512, 1024, 1024]  # slices of 4, 256, 260, 0 and 12 bytes
    assert places[::2] == begins
    assert places[1::2] == [begin + 8 for begin in begins]
    assert size == measured == 1280
    assert pointers == 0


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("fixed", [0, 13 * MIB, 600 * MIB])
@pytest.mark.parametrize("k", [64, 1024, 8192, 100_000])
@pytest.mark.parametrize("m", [1, 5000, 65_536, 1_000_003])
def test_chunks_cover_all_rows_and_keep_the_limit_of_memory(
    chunks_of, m, k, fixed, element_size, has_mask
):
    n = 1001
    stride = k + 3
    per_row = 4 + 4 * k
    mask_of_all = MASK if has_mask else 0
    rows, chunks = chunks_of(
        element_size, m, n, stride, fixed, per_row, TILE_ROWS, 1, NO_WAVES, mask=mask_of_all
    )
    begin = 0
    for x, out, mask, count, is_first in chunks:
        assert x == X + begin * stride * element_size
        assert out == OUT + begin * n * element_size
        expected_mask = MASK + begin * ((n + 7) // 8) if has_mask else 0
        assert mask == expected_mask
        assert is_first == (begin == 0)
        assert count == min(rows, m - begin)
        begin += count
    assert begin == m
    assert rows == m or rows % TILE_ROWS == 0

    limit = max(MAX_WORKSPACE, fixed + MIN_FOR_ROWS)
    least = fixed + per_row * TILE_ROWS  # the memory of a chunk of one tile
    alignment_of_two_slices = 512
    assert fixed + per_row * rows <= max(limit, least) + alignment_of_two_slices
    # There are as few chunks as possible, and their sizes differ by at most a tile for each chunk.
    tiles_of_chunk = max((limit - fixed) // (per_row * TILE_ROWS), 1)
    assert len(chunks) == divide_up(divide_up(m, TILE_ROWS), tiles_of_chunk)
    assert chunks[0][3] - chunks[-1][3] < TILE_ROWS * len(chunks)


# The tiles of gemm_one_product on an H200. From N = 8192 on, the weight's slices leave too little
# memory for a chunk of whole waves.
@pytest.mark.parametrize("m", [65_536, 100_000])
@pytest.mark.parametrize("n", [512, 1024, 1536, 4096])
def test_chunks_have_few_more_waves_than_a_gemm_of_all_rows(chunks_of, m, n):
    """All chunks together have at most 1%, and one wave, more."""
    k = 8192
    tile = 256
    tiles_of_a_wave = 66
    weight_tiles = divide_up(n, tile)
    # weight as fp16; and for each row of x its fp16 and 12 bytes more.
    fixed = 2 * n * k
    per_row = 2 * k + 12
    _, chunks = chunks_of(4, m, n, k, fixed, per_row, tile, weight_tiles, tiles_of_a_wave, mask=0)

    def waves_of(rows):
        return divide_up(divide_up(rows, tile) * weight_tiles, tiles_of_a_wave)

    assert len(chunks) > 1
    waves = sum(waves_of(count) for *_, count, _ in chunks)
    assert waves <= waves_of(m) * 1.01 + 1


def test_the_example_in_the_headers_comment_is_right(chunks_of):
    rows, chunks = chunks_of(4, 100_000, 1536, 8192, 24 * MIB, 16396, 256, 6, 66)
    assert (rows, len(chunks)) == (55 * 256, 8)
