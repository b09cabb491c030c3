"""How clusters share the tiles of Hopper's split product: its host code, compiled and run alone."""

import math
from itertools import pairwise

import pytest
from processes import KERNELS, compiled

WIDE, NARROW = 176, 160
LEAST, SLIVER, WORTH, OVERHEAD, ADDING = 2, 2, 3, 80, 2  # as in linear/sm90/stream_k.cuh

# Prints how many clusters have work, the whole waves, and where each cluster's range begins.
PROGRAM = r"""
#include <cstdio>
#include <cstdlib>

#include "linear/sm90/stream_k.cuh"

int main(int, char** arguments) {
  const int tiles = atoi(arguments[1]), rounds = atoi(arguments[2]), clusters = atoi(arguments[3]);
  kernels::sm90::Schedule schedule;
  const int used = schedule.plan(tiles, rounds, clusters, 176,
                                 [](int tile) { return tile % 3 < 2 ? 176 : 160; });
  printf("%d %d", used, schedule.waves);
  for (int i = 0; i <= clusters; ++i) printf(" %d", schedule.begin[i]);
}
"""


def rows_of(tile):
    return WIDE if tile % 3 < 2 else NARROW


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    program = compiled(tmp_path_factory.mktemp("schedule"), PROGRAM, "nvcc")

    def call(*arguments):
        used, waves, *begin = map(int, program(*arguments))
        return used, waves, begin

    return call


# Results of one tile and of many, short sums and long ones, and GPUs of other sizes.
@pytest.mark.parametrize("clusters", [1, 2, 57, 66, 72])
@pytest.mark.parametrize("rounds", [1, 2, 16, 17, 128, 1024])
@pytest.mark.parametrize("tiles", [1, 2, 5, 16, 24, 65, 66, 67, 96, 192, 1504])
def test_every_round_is_someones_and_loads_are_even(plan, tiles, rounds, clusters):
    used, waves, begin = plan(tiles, rounds, clusters)
    first = waves * clusters
    assert waves == tiles // clusters
    assert begin[0] == 0
    assert begin[-1] == (tiles - first) * rounds
    assert all(a <= b for a, b in pairwise(begin))
    assert 0 < used <= clusters
    assert begin[used] == begin[-1]
    assert waves > 0 or begin[used - 1] < begin[used]

    # A cluster takes what the one before it leaves of a tile, so that one must have some of it.
    assert all(a < b or a % rounds == 0 for a, b in pairwise(begin))

    # Few clusters share a tile: its sums are added one after the other.
    least = max(LEAST, math.isqrt(rounds * ADDING * WIDE // (WIDE + OVERHEAD)))
    for tile in range(tiles - first):
        ranges = [
            (a, b) for a, b in pairwise(begin) if a < (tile + 1) * rounds and b > tile * rounds
        ]
        assert len(ranges) <= rounds / least + 2

    # Tiles of the last wave are cut where that pays, and not near their ends.
    cuts = {b % rounds for b in begin} - {0}
    assert all(SLIVER <= cut <= rounds - SLIVER for cut in cuts)

    def rows_times_rounds(cluster):
        mine = sum(rows_of(tile) for tile in range(cluster, first, clusters))
        rounds_of_range = range(begin[cluster], begin[cluster + 1])
        return mine * rounds + sum(rows_of(first + round_ // rounds) for round_ in rounds_of_range)

    loads = [rows_times_rounds(cluster) for cluster in range(clusters)]
    total = sum(map(rows_of, range(tiles))) * rounds
    assert sum(loads) == total
    uncut = max(sum(map(rows_of, range(c, tiles, clusters))) for c in range(clusters)) * rounds
    fair = total / clusters
    whole = max(sum(map(rows_of, range(c, first, clusters))) for c in range(clusters)) * rounds
    if cuts:
        assert max(loads) <= max(fair, whole + least * WIDE) + (SLIVER + LEAST) * WIDE
    else:
        assert max(loads) <= uncut
    if waves == 0 and rounds >= 16 and uncut - fair >= WORTH * WIDE:
        assert cuts


# Prints the rows of a tile, how many tiles there are, and how many clusters have work.
TILES = r"""
#include <cstdio>
#include <cstdlib>

#include "linear/sm90/launch.cu"

using namespace kernels::sm90;

int main(int, char** arguments) {
  const int m = atoi(arguments[1]), n = atoi(arguments[2]), k = atoi(arguments[3]), clusters = 66;
  const GemmTiles tiles = choose_tiles(m, n, k, clusters);
  const int rows = tiles.wide > 0 ? GemmFp16x3Config::kXRows : tiles.rows;
  Schedule schedule;
  const int used = schedule.plan(tiles.count(), GemmFp16x3Config::rounds(k), clusters, rows,
                                 [=](int) { return rows; });
  printf("%d %d %d", rows, tiles.count(), used);
}
"""


@pytest.mark.slow  # compiles Hopper's kernels
def test_few_tiles_are_small_and_shared_by_few(tmp_path):
    flags = ["-O0", "-arch=sm_80", KERNELS / "linear" / "transpose.cu"]
    program = compiled(tmp_path, TILES, "nvcc", *flags)

    def tiles_of(*sizes):
        return tuple(map(int, program(*sizes)))

    # One tile of 160 rows, shared by 53 clusters: 230 us on an H200, torch 118.
    rows, count, used = tiles_of(160, 256, 13592)
    assert (rows, count) == (64, 3)
    assert used <= 13 * count
    # As many as the GPU has where each has many rounds.
    assert tiles_of(128, 8192, 8192) == (128, 32, 66)
    assert tiles_of(1024, 8192, 8192) == (176, 192, 66)
    assert tiles_of(8192, 28672, 8192)[2] == 66
