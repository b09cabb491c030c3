"""How a product takes x in chunks of rows: host code, compiled and run alone."""

import pytest
from processes import compiled

LIMIT, LEAST = 254 << 20, 64 << 20  # as in chunks.h

# Prints the rows of a chunk; then of each chunk where its x, out and mask begin, its rows, and
# whether it is the first. A workspace has `fixed` bytes, and `row` bytes a row of x in two slices.
PROGRAM = r"""
#include <cstdio>
#include <cstdlib>

#include "linear/chunks.h"

int main(int, char** arguments) {
  const auto number = [&](int i) { return atoll(arguments[i]); };
  kernels::LinearArguments linear{};
  linear.dtype = number(1) == 4 ? kernels::DType::kFloat32 : kernels::DType::kFloat16;
  linear.m = number(2), linear.n = number(3), linear.x_stride = number(4);
  const int64_t fixed = number(5), row = number(6);
  if (number(7) != 0) linear.mask = reinterpret_cast<uint8_t*>(1 << 20);
  const kernels::Tiling tiling{number(8), number(9), number(10)};
  const auto padded = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const int64_t rows = kernels::rows_of_chunk(linear.m, tiling, [&](int64_t m) {
    return fixed + padded(4 * m) + padded((row - 4) * m);
  });
  printf("%lld", static_cast<long long>(rows));
  const auto place = [](const void* pointer) { return reinterpret_cast<long long>(pointer); };
  kernels::for_chunks(linear, rows, [&](const kernels::LinearArguments& chunk, bool is_first) {
    printf(" %lld %lld %lld %lld %d", place(chunk.x), place(chunk.out), place(chunk.mask),
           static_cast<long long>(chunk.m), is_first);
  });
}
"""


def divide_up(a, b):
    return -(-a // b)


@pytest.fixture(scope="module")
def chunks_of(tmp_path_factory):
    program = compiled(tmp_path_factory.mktemp("chunks"), PROGRAM)

    def call(*arguments):
        rows, *rest = map(int, program(*arguments))
        return rows, [rest[i : i + 5] for i in range(0, len(rest), 5)]

    return call


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fixed", [0, 13 << 20, 600 << 20])
@pytest.mark.parametrize("k", [64, 1024, 8192, 100_000])
@pytest.mark.parametrize("m", [1, 5000, 65_536, 1_000_003])
def test_chunks_are_all_rows_within_the_limit(chunks_of, m, k, fixed, size, has_mask):
    n, stride, row = 1001, k + 3, 4 + 4 * k
    rows, chunks = chunks_of(size, m, n, stride, fixed, row, has_mask, 176, 1, 1)
    begin = 0
    for x, out, mask, count, is_first in chunks:
        assert (x, out) == (begin * stride * size, begin * n * size)
        assert mask == has_mask * ((1 << 20) + begin * ((n + 7) // 8))
        assert is_first == (begin == 0)
        assert count == min(rows, m - begin)
        begin += count
    assert begin == m
    assert rows == m or rows % 176 == 0

    most = max(LIMIT, fixed + LEAST) if fixed > LIMIT - LEAST else LIMIT
    assert fixed + row * rows <= max(most, fixed + row * 176) + 512
    # Chunks are large, and alike but for a tile of each.
    assert len(chunks) == divide_up(divide_up(m, 176), max((most - fixed) // (row * 176), 1))
    assert chunks[0][3] - chunks[-1][3] < 176 * len(chunks)


# One product on an H200. From N = 8192 on, the weight's slices leave no chunk of whole waves.
@pytest.mark.parametrize("m", [65_536, 100_000])
@pytest.mark.parametrize("n", [512, 1024, 1536, 4096])
def test_chunks_are_whole_waves_of_tiles(chunks_of, m, n):
    k, tile, at_once = 8192, 256, 66
    side_by_side = divide_up(n, tile)
    arguments = (4, m, n, k, 2 * n * k, 2 * k + 12, False, tile)
    _, chunks = chunks_of(*arguments, side_by_side, at_once)

    def waves_of(rows):
        return divide_up(divide_up(rows, tile) * side_by_side, at_once)

    assert len(chunks) > 1
    waves = sum(waves_of(count) for *_, count, _ in chunks)
    assert waves <= waves_of(m) * 1.01 + 1
