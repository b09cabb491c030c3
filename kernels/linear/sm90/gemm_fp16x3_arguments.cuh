// The constants, the tiles and the arguments of the fp16x3 GEMM (gemm_fp16x3.cuh).
//
// Words: x is [M, K], the weight [N, K], out [M, N]. A "row" is a row of x, which is a row of out,
// or is called a row of the weight. A row of the weight makes a column of out: a "feature".

#pragma once

#include <cstdint>

#include "common/ptx/cluster.cuh"
#include "linear/epilogue.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/stream_k.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90 {

struct GemmFp16x3Config {
  // ----- The tile of a block: 128 features, and 176, 160, 128 or 64 rows of x.
  //
  // wgmma multiplies A [64, 16] by B [16, rows of x]. A is the weight, from registers; B is x, from
  // shared memory. So each consumer warpgroup has 64 features, and all rows of x of the tile.
  static constexpr int kWarpWeightRows = 16;
  static constexpr int kWeightRows = 64 * BlockConfig::kConsumerWarpgroups;

  // Rows of x in a tile.
  //   176  The most for which the accumulators and the sums (88 registers each, for each thread)
  //   fit
  //        into the registers.
  //   160  Mixed with tiles of 176, so that no tile multiplies many rows past M: 1024 rows are 4
  //        tiles of 176 and 2 of 160 (2% of an H200's time). Only for K from kLongK on.
  //   128  For all tiles, where that takes less time because there are few tiles (choose_tiles.h).
  //    64  The same, for still fewer.
  static constexpr int kWideRows = 176;
  static constexpr int kNarrowRows = 160;
  static constexpr int kMediumRows = 128;
  static constexpr int kSmallRows = 64;
  static_assert(kWideRows % 8 == 0 && kNarrowRows % 8 == 0, "wgmma takes multiples of 8 columns");

  // Accumulators of a thread, for the widest tile: 64 features * 176 rows / 128 threads.
  static constexpr int kSums = 64 * kWideRows / 128;

  // ----- The pipeline.
  //
  // K in a stage (the k-tile): 32 floats of the weight, or 32 hi and 32 lo halves of x, are 128
  // bytes, the widest row that TMA swizzles.
  static constexpr int kKTile = 32;
  static constexpr int kRowBytes = 128;
  static_assert(kRowBytes == kKTile * sizeof(float), "a k-tile of a row of weight");
  static_assert(kRowBytes == kKTile * 2 * sizeof(__half), "hi and lo of a k-tile of a row of x");
  static_assert(kKTile * 2 == fp16x3::kKTileWidth, "x is split into k-tiles of this width");
  // In shared memory a row of x has its 32 hi halves first, then its 32 lo halves. wgmma
  // descriptors count in units of 16 bytes: the descriptor of lo is this much larger than that of
  // hi.
  static constexpr uint64_t kDescriptorLo = kRowBytes / 2 >> 4;
  // wgmma instructions along the K of a k-tile: each takes 16.
  static constexpr int kK16PerTile = kKTile / 16;

  // Bytes of a stage: 16 KiB of weight and at most 22 KiB of x.
  static constexpr int kWeightBytes = kWeightRows * kRowBytes;
  static constexpr int kXBytes = kWideRows * kRowBytes;
  // Five stages are 190 KiB. Six do not fit into the 227 KiB that a block may have.
  static constexpr int kStages = 5;

  // k-tiles in a k-group, the unit in which the mainloop and the stream-K schedule count K.
  static constexpr int kTilesPerGroup = 4;
  // k-groups of a K, rounded up. TMA writes zeros for the elements past K.
  static __host__ __device__ int k_groups(int k) {
    constexpr int kGroup = kTilesPerGroup * kKTile;
    return (k + kGroup - 1) / kGroup;
  }

  // ----- Promotion intervals: the accumulators are added to the float32 sums after every 32 of K
  // for K below kShortK, every 64 below kLongK, and every 128 from there on. Tensor cores truncate,
  // so short intervals err less. The longer K, the more float32 summation errs itself, and the
  // longer intervals may be (docs/SPLIT.md has the bound).
  static constexpr int kShortK = 2048;
  static constexpr int kLongK = 4096;

  // ----- Registers of a thread. A consumer has 88 accumulators, 88 sums and 32 of the weight's
  // fragments; 24 remain for addresses and loop counters.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static_assert(BlockConfig::fits(kProducerRegisters, kConsumerRegisters),
                "setmaxnreg only moves registers within the block");

  // ----- The epilogue's subtile: 2 column blocks of 8 rows of x at a time (general epilogue).
  static constexpr int kSubtileBlocks = 2;
  static constexpr int kSubtileRows = 8 * kSubtileBlocks;
  static constexpr int kSubtiles = kWideRows / kSubtileRows;
  static_assert(kWideRows % kSubtileRows == 0 && kNarrowRows % kSubtileRows == 0 &&
                    kMediumRows % kSubtileRows == 0 && kSmallRows % kSubtileRows == 0,
                "tiles are whole subtiles");

  // ----- Named barriers. 0 is that of __syncthreads, which the kernel does not use.
  static constexpr int kFirstEpilogueBarrier = 1;  // one for each consumer warpgroup: 1 and 2
  static constexpr int kSecondStartsBarrier =
      kFirstEpilogueBarrier + BlockConfig::kConsumerWarpgroups;
};

// The tiles of out. A tile is computed by a cluster: its blocks share the tile's rows of x, and
// have 128 features each. TileOrder numbers the tiles; this struct also knows their rows of x.
//
// Either all tiles have kMediumRows or kSmallRows rows (`wide` is 0), or `wide` of the x_tiles
// tiles along M have kWideRows rows, and the others `rows`, which is kNarrowRows.
//
// Which of them are wide depends on the tile of weight. Example: M = 1024, x_tiles = 6, wide = 4 (W
// has 176 rows, n has 160), so that 4 * 176 + 2 * 160 = 1024.
//
//                    x tile   0  1  2  3  4  5
//   weight tile 0             W  W  W  W  n  n     shift 0
//   weight tile 1             n  n  W  W  W  W     shift 4
//   weight tile 2             W  W  n  n  W  W     shift 8 % 6 = 2
//   weight tile 3             W  W  W  W  n  n     shift 12 % 6 = 0
//
// The pattern W W W W n n is rotated by `shift` places, which is weight * wide % x_tiles. Without
// the rotation, some clusters would have wide tiles only: with 66 clusters, cluster c has tiles c,
// c + 66, c + 132 and so on, which are all x tile c % 6, as 66 is a multiple of 6.
struct GemmTiles : TileOrder {
  int wide;  // tiles along M that have kWideRows rows
  int rows;  // rows of the others

  // Rows of x in the widest tile, for which a stage has room and which TMA loads for every tile.
  __host__ __device__ int max_rows() const {
    return rows == GemmFp16x3Config::kNarrowRows ? GemmFp16x3Config::kWideRows : rows;
  }

  struct Rows {
    int begin;
    int size;
  };

  // The rows of x of a tile. In the example, weight tile 2, x tile 4 is at place 2 + 4 = 6 of the
  // pattern, repeated: W W W W n n W W W W ... There are 4 wide tiles before place 6, and 2 before
  // place 2, where x tile 0 is; so 2 of the 4 tiles before this one are wide. It begins at row
  // 4 * 160 + 2 * 16 = 672, and has 176 rows, as place 6 is place 0 of the pattern.
  __host__ __device__ Rows rows_of(const Tile& tile) const {
    const unsigned pattern = x_tiles;
    const unsigned wide_of_pattern = wide;
    const auto wide_tiles_before = [&](unsigned place) {
      return place / pattern * wide_of_pattern + min(place % pattern, wide_of_pattern);
    };
    const unsigned shift = tile.weight * wide_of_pattern % pattern;
    const unsigned place = shift + tile.x;
    const unsigned wide_before = wide_tiles_before(place) - wide_tiles_before(shift);
    const int begin = tile.x * rows + wide_before * (GemmFp16x3Config::kWideRows - rows);
    const bool is_wide = place % pattern < wide_of_pattern;
    return {begin, is_wide ? GemmFp16x3Config::kWideRows : rows};
  }
};

// Memory for the partial sums of tiles that clusters share (stream_k.cuh). A cluster stores partial
// sums of one tile at most.
struct PartialSums {
  // [block of the cluster][column block of 8 rows of x][consumer thread]: four sums
  using Sums =
      float4[BlockConfig::kClusterSize][GemmFp16x3Config::kSums / 4][BlockConfig::kConsumerThreads];
  // [block of the cluster][consumer warp]: 1 when the warp has stored all its sums
  using Counts = unsigned[BlockConfig::kClusterSize][BlockConfig::kConsumerWarps];

  Sums* sums;      // [clusters]
  Counts* counts;  // [clusters], zeros when the kernel starts
};

// The kernel's arguments. The kernel is launched twice for each product.
//
// The first run scales each row of the weight by a power of two that was chosen from a sample of
// its elements. If an element is so large that it overflows fp16 anyhow, the sums of its row are
// not finite, and the first run marks the row as kOverflowed. The second run scales the marked rows
// by their largest elements, and computes their tiles again. If no row is marked, it ends at once.
struct GemmArguments {
  Epilogue<float> epilogue;
  fp16x3::SplitMatrix x;       // split
  fp16x3::SplitMatrix weight;  // float32, with an exponent and a state for each row
  int k;
  unsigned* has_overflowed;  // whether a row is kOverflowed; 0 when the first run starts
  unsigned* has_nonfinite;   // whether a row is kNonfinite; 0 when the first run starts
  bool is_second_run;
  GemmTiles tiles;
  Schedule schedule;
  PartialSums partials;
};

// The first feature of a tile in the block with this rank in its cluster.
__device__ inline int first_feature(const Tile& tile, int rank) {
  return (tile.weight * BlockConfig::kClusterSize + rank) * GemmFp16x3Config::kWeightRows;
}

// Whether this run computes the tiles of a weight tile: the first run computes all, the second
// those with a row of weight that is not kExact. All lanes of a warp call it and get the same
// answer. All warps and all clusters do, too, for a row that is not kExact never becomes kExact in
// that run.
__device__ inline bool is_computed(const GemmArguments& p, int weight_tile) {
  if (!p.is_second_run) return true;
  constexpr int kRows = BlockConfig::kClusterSize * GemmFp16x3Config::kWeightRows;
  bool is_found = false;
  for (int i = threadIdx.x % 32; i < kRows; i += 32) {
    const int row = weight_tile * kRows + i;
    is_found |= row < p.epilogue.n && __ldcg(p.weight.state + row) != fp16x3::kExact;
  }
  return ptx::uniform(__any_sync(0xffffffff, is_found)) != 0;
}

// Calls body(work, tile) for each of the cluster's work tiles that this run computes, in order. All
// lanes of a warp call it.
template <typename Body>
__device__ __forceinline__ void for_each_work_tile(const GemmArguments& p, const Body& body) {
  for (int i = 0;; ++i) {
    const WorkTile work = p.schedule.work_tile(i);
    if (!work.exists()) break;
    const Tile tile = p.tiles.find(work.tile);
    if (is_computed(p, tile.weight)) body(work, tile);
  }
}

}  // namespace kernels::sm90
