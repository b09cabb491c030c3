"""The fp16x3 GEMM's schedule and tiles: which cluster multiplies which part of the output.

The host code of plan_schedule.h and choose_tiles.h in linear/sm90/gemm_fp16x3 is compiled and run
alone, without a GPU.
"""

from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import pytest

from tests.support.processes import compiled

# The rows of x in a tile.
LARGEST = 176
LARGE = 160

# Prints how many clusters have work, the whole waves, `PlanConfig::min_range` of tiles of 176 rows,
# where each cluster's range begins, and the rows of x of each tile. Without arguments it prints two
# constants.
PLAN = r"""
#include <cstdio>
#include <cstdlib>

#include "linear/sm90/gemm_fp16x3/plan_schedule.h"

using namespace kernels::sm90::gemm_fp16x3;

int main(int count, char** arguments) {
  if (count == 1) {
    printf("%d %d", PlanConfig::kMinPart, PlanConfig::kMinSaving);
    return 0;
  }
  const auto number = [&](int i) { return atoi(arguments[i]); };
  const int k_groups = number(4);
  const int clusters = number(5);
  const TilePartition tiles{{/*x_tiles=*/number(1), /*weight_tiles=*/number(2)},
                            /*largest_x_tiles=*/number(3),
                            /*other_rows=*/Fp16x3Config::kRows160};
  const Plan plan = plan_schedule(tiles, k_groups, clusters);
  const int min_range = PlanConfig::min_range(k_groups, Fp16x3Config::kLargestRows);
  printf("%d %d %d", plan.clusters, plan.schedule.whole_waves, min_range);
  for (int i = 0; i <= clusters; ++i) printf(" %d", plan.schedule.range_begins[i]);
  for (int i = 0; i < tiles.count(); ++i) printf(" %d", tiles.rows_of(tiles.find(i)).size);
}
"""


@dataclass
class Plan:
    """A plan that `plan_schedule` made. stream_k.cuh explains the words, and has an example.

    A load is how much a cluster multiplies: rows of x times k-groups.

    Attributes:
        k_groups, clusters: the arguments; `k_groups` is that of one tile.
        rows: the rows of x of each tile.
        used: clusters that have work.
        whole_waves: in each of them, every cluster computes one whole tile.
        min_range: the fewest k-groups that a range should have if tiles are cut.
        begins: where each cluster's range begins in the last wave's line of k-groups; then the
            line's end.
    """

    k_groups: int
    clusters: int
    rows: list[int]
    used: int
    whole_waves: int
    min_range: int
    begins: list[int]

    @property
    def tiles(self):
        """Return how many tiles there are."""
        return len(self.rows)

    @property
    def first_of_last_wave(self):
        """Return the number of the last wave's first tile."""
        return self.whole_waves * self.clusters

    @property
    def tiles_of_last_wave(self):
        """Return how many tiles the last wave has."""
        return self.tiles - self.first_of_last_wave

    @property
    def cuts(self):
        """Return where tiles are cut, in k-groups from the beginning of their tile."""
        return {begin % self.k_groups for begin in self.begins} - {0}

    @property
    def loads(self):
        """Return the load of each cluster."""
        loads = self.loads_of_uncut_tiles(self.first_of_last_wave)
        for cluster, (begin, end) in enumerate(pairwise(self.begins)):
            for k_group in range(begin, end):
                loads[cluster] += self.rows[self.first_of_last_wave + k_group // self.k_groups]
        return loads

    @property
    def total_load(self):
        """Return the load of all tiles."""
        return sum(self.rows) * self.k_groups

    def loads_of_uncut_tiles(self, end):
        """Return each cluster's load if the tiles before `end` are dealt out in turn, uncut."""
        rows_by_cluster = [self.rows[c : end : self.clusters] for c in range(self.clusters)]
        return [sum(rows) * self.k_groups for rows in rows_by_cluster]

    def sharers(self, tile_of_last_wave):
        """Return how many clusters have k-groups of a tile: 0 is the last wave's first tile."""
        tile_begin = tile_of_last_wave * self.k_groups
        tile_end = tile_begin + self.k_groups
        ranges = pairwise(self.begins)
        return sum(begin < tile_end and end > tile_begin for begin, end in ranges)


class Constants(NamedTuple):
    """Constants of PlanConfig, which plan_schedule.h explains."""

    min_part: int
    min_saving: int


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("plan"), PLAN, "nvcc")


@pytest.fixture(scope="module")
def constants(program):
    return Constants(*map(int, program()))


@pytest.fixture(scope="module")
def plan(program):
    """Return a function that makes a plan, of x_tiles times weight_tiles tiles."""

    def call(x_tiles, weight_tiles, largest_x_tiles, k_groups, clusters):
        numbers = map(int, program(x_tiles, weight_tiles, largest_x_tiles, k_groups, clusters))
        used, whole_waves, min_range, *rest = numbers
        begins = rest[: clusters + 1]
        rows = rest[clusters + 1 :]
        return Plan(k_groups, clusters, rows, used, whole_waves, min_range, begins)

    return call


# 3 clusters, and 5 tiles of 176 rows and 9 k-groups.
EXAMPLE = {
    "x_tiles": 5,
    "weight_tiles": 1,
    "largest_x_tiles": 5,
    "k_groups": 9,
    "clusters": 3,
}


def test_the_example_in_the_headers_comment_is_right(plan):
    example = plan(**EXAMPLE)
    assert (example.used, example.whole_waves, example.begins) == (3, 1, [0, 6, 12, 18])


def test_no_tile_is_shared_if_the_environment_forbids_it(plan, monkeypatch):
    monkeypatch.setenv("KERNELS_STREAM_K", "0")
    example = plan(**EXAMPLE)
    assert (example.used, example.whole_waves, example.begins) == (3, 1, [0, 9, 18, 18])


# Outputs of one tile and of many, short and long sums, and GPUs of several sizes.
# Tiles are numbers of tiles along M and N.
TILES = [
    (1, 1),
    (2, 1),
    (5, 1),
    (4, 4),
    (3, 8),
    (5, 13),
    (6, 11),
    (67, 1),
    (3, 32),
    (6, 32),
    (47, 32),
]
K_GROUPS = [1, 2, 16, 17, 128, 1024]
CLUSTERS = [1, 2, 57, 66, 72]


@pytest.fixture(scope="module", params=product(TILES, K_GROUPS, CLUSTERS), ids=str)
def planned(plan, request):
    """Return a plan; each test with this fixture checks one property of all plans."""
    (x_tiles, weight_tiles), k_groups, clusters = request.param
    largest_x_tiles = x_tiles - x_tiles // 3  # the others have 160 rows
    return plan(x_tiles, weight_tiles, largest_x_tiles, k_groups, clusters)


def test_the_ranges_cover_the_last_wave_in_order(planned):
    assert planned.whole_waves == planned.tiles // planned.clusters
    assert planned.begins[0] == 0
    assert planned.begins[-1] == planned.tiles_of_last_wave * planned.k_groups
    assert planned.begins == sorted(planned.begins)


def test_the_first_clusters_have_the_work(planned):
    if planned.whole_waves > 0:
        assert planned.used == planned.clusters
    else:
        begin, end = planned.begins[planned.used - 1 : planned.used + 1]  # the last used cluster's
        assert begin < end
        assert end == planned.begins[-1]


def test_no_range_inside_a_tile_is_empty(planned):
    """The next cluster would wait for partial sums of a cluster that stores none."""
    empty_ranges = [begin for begin, end in pairwise(planned.begins) if begin == end]
    assert all(begin % planned.k_groups == 0 for begin in empty_ranges)


def test_few_clusters_share_a_tile(planned):
    """One of them adds the partial sums of the others.

    The first and the last of them may have only a part of their range in the tile.
    """
    for tile in range(planned.tiles_of_last_wave):
        assert planned.sharers(tile) <= planned.k_groups / planned.min_range + 2


def test_tiles_are_not_cut_near_their_ends(planned, constants):
    last_cut = planned.k_groups - constants.min_part
    assert all(constants.min_part <= cut <= last_cut for cut in planned.cuts)


def test_loads_are_even_if_tiles_are_cut(planned, constants):
    loads = planned.loads
    assert sum(loads) == planned.total_load
    if planned.cuts:
        # A cluster gets min_range k-groups even if its whole tiles are more than a fair load.
        whole_tiles = max(planned.loads_of_uncut_tiles(planned.first_of_last_wave))
        fair = planned.total_load / planned.clusters
        most = max(fair, whole_tiles + planned.min_range * LARGEST)
        # Cuts are rounded: to whole k-groups, and away from the ends of a tile.
        rounding = constants.min_part * LARGEST
        assert max(loads) <= most + rounding
    else:
        assert max(loads) <= max(planned.loads_of_uncut_tiles(planned.tiles))


def test_tiles_are_cut_where_that_pays(planned, constants):
    saving = (
        max(planned.loads_of_uncut_tiles(planned.tiles)) - planned.total_load / planned.clusters
    )
    pays = saving >= constants.min_saving * LARGEST
    if planned.whole_waves == 0 and planned.k_groups >= 16 and pays:
        assert planned.cuts


# Prints the rows of x of the largest tile, how many tiles there are, and how many clusters of 66
# have work.
CHOSEN_TILES = r"""
#include <cstdio>
#include <cstdlib>

#include "linear/sm90/gemm_fp16x3/choose_tiles.h"
#include "linear/sm90/gemm_fp16x3/plan_schedule.h"

using namespace kernels::sm90::gemm_fp16x3;

int main(int, char** arguments) {
  const int m = atoi(arguments[1]);
  const int n = atoi(arguments[2]);
  const int k = atoi(arguments[3]);
  const int clusters = 66;
  const TilePartition tiles = choose_tiles(m, n, k, clusters);
  const int rows = tiles.largest_x_tiles > 0 ? Fp16x3Config::kLargestRows : tiles.other_rows;
  const Plan plan = plan_schedule(tiles, Fp16x3Config::k_groups(k), clusters);
  printf("%d %d %d", rows, tiles.count(), plan.clusters);
}
"""


@pytest.fixture(scope="module")
def chosen_tiles(tmp_path_factory):
    program = compiled(tmp_path_factory.mktemp("tiles"), CHOSEN_TILES, "nvcc")

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
