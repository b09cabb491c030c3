"""The fp16x3 GEMM's schedule and tiles: which cluster multiplies which part of the output.

The host code of stream_k.cuh and choose_tiles.h in linear/sm90/gemm_fp16x3 is compiled and run
alone, without a GPU.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import pytest

from tests.support.processes import compiled

# The rows of x in a tile.
LARGEST = 176
LARGE = 160

# Prints how many clusters have work, the whole waves, `StreamKConfig::min_range` of tiles of 176
# rows, and where each cluster's range begins. Without arguments it prints two constants.
PLAN = r"""
#include <cstdio>
#include <cstdlib>

#include "linear/sm90/gemm_fp16x3/stream_k.cuh"

int main(int count, char** arguments) {
  using Config = kernels::sm90::gemm_fp16x3::StreamKConfig;
  if (count == 1) {
    printf("%d %d", Config::kMinPiece, Config::kMinSaving);
    return 0;
  }
  const int tiles = atoi(arguments[1]);
  const int k_groups = atoi(arguments[2]);
  const int clusters = atoi(arguments[3]);
  const int rows_of_third = atoi(arguments[4]);
  const auto rows_of = [=](int tile) { return tile % 3 < 2 ? 176 : rows_of_third; };
  kernels::sm90::gemm_fp16x3::Schedule schedule;
  const int used = schedule.plan(tiles, k_groups, clusters, /*max_rows=*/176, rows_of);
  printf("%d %d %d", used, schedule.whole_waves, Config::min_range(k_groups, /*rows=*/176));
  for (int i = 0; i <= clusters; ++i) printf(" %d", schedule.range_begins[i]);
}
"""


def rows_of(tile):
    """Return the number of rows of x of a tile: every third tile has 160."""
    return LARGEST if tile % 3 < 2 else LARGE


@dataclass
class Plan:
    """A plan that `Schedule::plan` made.

    Attributes:
        tiles, k_groups, clusters: the arguments; `k_groups` is that of one tile.
        used: clusters that have work.
        waves: whole waves, in each of which every cluster computes one whole tile.
        min_range: the fewest k-groups that a range should have if tiles are cut.
        begins: where each cluster's range of the last wave's k-groups begins, then where all end.
    """

    tiles: int
    k_groups: int
    clusters: int
    used: int
    waves: int
    min_range: int
    begins: list[int]

    @property
    def first_of_last_wave(self):
        """Return the number of the last wave's first tile."""
        return self.waves * self.clusters

    @property
    def cuts(self):
        """Return where tiles are cut, in k-groups from the beginning of their tile."""
        return {begin % self.k_groups for begin in self.begins} - {0}

    def load(self, cluster):
        """Return the rows times k-groups that a cluster multiplies."""
        whole_tiles = range(cluster, self.first_of_last_wave, self.clusters)
        of_range = range(self.begins[cluster], self.begins[cluster + 1])
        tiles_of_range = (self.first_of_last_wave + group // self.k_groups for group in of_range)
        return sum(map(rows_of, whole_tiles)) * self.k_groups + sum(map(rows_of, tiles_of_range))

    def longest_load(self, end):
        """Return the longest load of a cluster if the tiles before `end` are dealt out uncut."""
        loads = [sum(map(rows_of, range(c, end, self.clusters))) for c in range(self.clusters)]
        return max(loads) * self.k_groups

    def sharers(self, tile):
        """Return how many clusters have k-groups of a tile; tile 0 is the last wave's first one."""
        first = tile * self.k_groups
        end = (tile + 1) * self.k_groups
        return sum(a < end and b > first for a, b in pairwise(self.begins))


class Constants(NamedTuple):
    """Constants of StreamKConfig: linear/sm90/gemm_fp16x3/stream_k.cuh says what they are."""

    min_piece: int
    min_saving: int


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("plan"), PLAN, "nvcc")


@pytest.fixture(scope="module")
def constants(program):
    return Constants(*map(int, program()))


@pytest.fixture(scope="module")
def plan(program):
    def call(tiles, k_groups, clusters, rows_of_third=LARGE):
        numbers = map(int, program(tiles, k_groups, clusters, rows_of_third))
        used, waves, min_range, *begins = numbers
        return Plan(tiles, k_groups, clusters, used, waves, min_range, begins)

    return call


def test_the_example_in_the_headers_comment_is_right(plan):
    planned = plan(tiles=5, k_groups=9, clusters=3, rows_of_third=LARGEST)
    assert (planned.used, planned.waves, planned.begins) == (3, 1, [0, 6, 12, 18])


def test_no_tile_is_shared_if_the_environment_forbids_it(plan, monkeypatch):
    monkeypatch.setenv("KERNELS_STREAM_K", "0")
    planned = plan(tiles=5, k_groups=9, clusters=3, rows_of_third=LARGEST)
    assert (planned.used, planned.waves, planned.begins) == (3, 1, [0, 9, 18, 18])


# Results of one tile and of many, short sums and long ones, and GPUs of other sizes.
@pytest.mark.parametrize("clusters", [1, 2, 57, 66, 72])
@pytest.mark.parametrize("k_groups", [1, 2, 16, 17, 128, 1024])
@pytest.mark.parametrize("tiles", [1, 2, 5, 16, 24, 65, 66, 67, 96, 192, 1504])
def test_every_k_group_has_one_cluster_and_loads_are_even(
    plan, constants, tiles, k_groups, clusters
):
    planned = plan(tiles, k_groups, clusters)
    begins = planned.begins
    tiles_of_last_wave = tiles - planned.first_of_last_wave

    # Ranges are in order and cover the last wave; the clusters that have work are the first ones.
    assert planned.waves == tiles // clusters
    assert begins[0] == 0
    assert begins[-1] == tiles_of_last_wave * k_groups
    assert all(a <= b for a, b in pairwise(begins))
    assert 0 < planned.used <= clusters
    assert begins[planned.used] == begins[-1]
    assert planned.waves > 0 or begins[planned.used - 1] < begins[planned.used]

    # No range inside a tile is empty: the next cluster would wait for partial sums of a cluster
    # that stores none.
    assert all(a < b or a % k_groups == 0 for a, b in pairwise(begins))

    # Few clusters share a tile, as one of them adds the partial sums of the others. The first and
    # the last one may have only a part of their range in the tile.
    for tile in range(tiles_of_last_wave):
        assert planned.sharers(tile) <= k_groups / planned.min_range + 2

    # Tiles are not cut near their ends.
    assert all(constants.min_piece <= cut <= k_groups - constants.min_piece for cut in planned.cuts)

    # If tiles are cut, clusters have about the same load. If none is cut, no load is longer than
    # that of tiles dealt out whole.
    loads = [planned.load(cluster) for cluster in range(clusters)]
    total = sum(map(rows_of, range(tiles))) * k_groups
    assert sum(loads) == total
    fair = total / clusters
    uncut = planned.longest_load(tiles)
    whole_waves = planned.longest_load(planned.first_of_last_wave)
    if planned.cuts:
        # A cluster gets min_range k-groups even if its whole tiles are more than a fair load. Cuts
        # are rounded: to whole k-groups, and away from the min_piece k-groups at a tile's ends.
        most = max(fair, whole_waves + planned.min_range * LARGEST)
        rounding = constants.min_piece * LARGEST
        assert max(loads) <= most + rounding
    else:
        assert max(loads) <= uncut

    # Tiles are cut where that pays.
    if planned.waves == 0 and k_groups >= 16 and uncut - fair >= constants.min_saving * LARGEST:
        assert planned.cuts


# Prints the rows of x of the largest tile, how many tiles there are, and how many clusters of 66
# have work.
TILES = r"""
#include <cstdio>
#include <cstdlib>

#include "linear/sm90/gemm_fp16x3/choose_tiles.h"

using namespace kernels::sm90::gemm_fp16x3;

int main(int, char** arguments) {
  const int m = atoi(arguments[1]);
  const int n = atoi(arguments[2]);
  const int k = atoi(arguments[3]);
  const int clusters = 66;
  const Tiles tiles = choose_tiles(m, n, k, clusters);
  const int rows = tiles.largest_x_tiles > 0 ? Config::kLargestRows : tiles.other_rows;
  Schedule schedule;
  const int used = schedule.plan(tiles.count(), Config::k_groups(k), clusters, rows,
                                 [=](int) { return rows; });
  printf("%d %d %d", rows, tiles.count(), used);
}
"""


@pytest.fixture(scope="module")
def chosen_tiles(tmp_path_factory):
    program = compiled(tmp_path_factory.mktemp("tiles"), TILES, "nvcc")

    def call(m, n, k):
        return tuple(map(int, program(m, n, k)))

    return call


def test_few_tiles_are_small_and_shared_by_few_clusters(chosen_tiles):
    """So no cluster adds the partial sums of many others."""
    # If 53 clusters share one tile of 160 rows, this product takes 230 us on an H200; torch's 118.
    rows, count, used = chosen_tiles(160, 256, 13592)
    assert (rows, count) == (64, 3)
    assert used <= 13 * count


def test_all_clusters_have_work_if_tiles_are_many_or_k_is_long(chosen_tiles):
    assert chosen_tiles(128, 8192, 8192) == (128, 32, 66)
    assert chosen_tiles(1024, 8192, 8192) == (176, 192, 66)
    assert chosen_tiles(8192, 28672, 8192)[2] == 66


# Prints where each tile of x begins and its rows, for weight tiles 0, 1 and 2, of M = 1024.
ROWS = r"""
#include <cstdio>

#include "linear/sm90/gemm_fp16x3/choose_tiles.h"

int main() {
  const auto tiles = kernels::sm90::gemm_fp16x3::choose_tiles(1024, 8192, 8192, 66);
  for (int weight = 0; weight < 3; ++weight) {
    for (int x = 0; x < tiles.order.x_tiles; ++x) {
      const auto rows = tiles.rows_of({x, weight});
      printf("%d %d ", rows.begin, rows.size);
    }
  }
}
"""


def test_tiles_of_176_and_160_rows_cover_all_rows_in_turn(tmp_path):
    """1024 rows are four tiles of 176 and two of 160: 4 * 176 + 2 * 160."""
    numbers = list(map(int, compiled(tmp_path, ROWS, "nvcc")()))
    tiles = list(zip(numbers[::2], numbers[1::2], strict=True))
    x_tiles = [tiles[:6], tiles[6:12], tiles[12:]]  # for weight tiles 0, 1 and 2
    # The pattern of both sizes moves on from one tile of weight to the next.
    assert [size for _, size in x_tiles[0]] == [LARGEST] * 4 + [LARGE] * 2
    assert [size for _, size in x_tiles[1]] == [LARGE] * 2 + [LARGEST] * 4
    assert [size for _, size in x_tiles[2]] == [LARGEST] * 2 + [LARGE] * 2 + [LARGEST] * 2
    for row_tiles in x_tiles:
        assert row_tiles[0][0] == 0
        assert all(begin + size == after for (begin, size), (after, _) in pairwise(row_tiles))
        assert sum(size for _, size in row_tiles) == 1024
