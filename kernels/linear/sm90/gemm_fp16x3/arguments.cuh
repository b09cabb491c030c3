// The fp16x3 GEMM (kernel.cuh): its constants, its tiles, its arguments, and a block's shared
// memory.
//
//   x [M, K], weight [N, K], out [M, N] = x weight^T
//
// In all files of this folder, a variable m is the number of a row of x, which is a row of out; a
// variable n is the number of a row of the weight, which is a column of out. `row` alone means the
// former. Eight rows are a row block. (The weight is wgmma's operand A, so rows of out are columns
// of wgmma's accumulators.)
//
// launch.cuh fills in the arguments, and choose_tiles.h chooses the tiles. All parts of the kernel
// use both.

#pragma once

#include <cstdint>

#include "common/ptx/registers.cuh"
#include "common/sizes.h"
#include "linear/epilogue.cuh"
#include "linear/sm90/gemm_fp16x3/stream_k.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/split/split.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90::gemm_fp16x3 {

struct Fp16x3Config {
  // ----- The tile: 256 rows of weight, and 176, 160, 128 or 64 rows of x
  //
  // A cluster computes a tile. Each of its two blocks has 128 of the rows of weight, and all of the
  // rows of x.
  //
  // A wgmma instruction multiplies A [64, 16] by B [16, rows]. A is the weight, in registers, 16
  // rows in each warp of a warpgroup. B is x, in shared memory. So each consumer warpgroup has 64
  // of the block's rows of weight, and all of the tile's rows of x.
  static constexpr int kWarpWeightRows = 16;
  static constexpr int kBlockWeightRows = 64 * BlockConfig::kConsumerWarpgroups;
  static constexpr int kTileWeightRows = kBlockWeightRows * BlockConfig::kClusterSize;

  // Rows of x in a tile.
  //   176  The most that fit: a thread has rows / 2 accumulators and rows / 2 sums in registers.
  //   160  Mixed with tiles of 176, so that no tile has many rows past M: 1024 rows are exactly 4
  //        tiles of 176 and 2 of 160, but 6 tiles of 176 have 1056. Only from kInterval128FromK on.
  //   128  For all tiles of a product with few tiles, if this takes less time (choose_tiles.h).
  //    64  The same, for a product with even fewer tiles.
  static constexpr int kLargestRows = 176;
  static constexpr int kLargeRows = 160;
  static constexpr int kMediumRows = 128;
  static constexpr int kSmallRows = 64;
  static_assert(kLargestRows % 8 == 0 && kLargeRows % 8 == 0,
                "wgmma takes multiples of 8 rows of operand B");

  // Sums of a thread for the largest tile, and as many accumulators: 64 columns * 176 rows / 128
  // threads = 88.
  static constexpr int kSums = 64 * kLargestRows / BlockConfig::kWarpgroupThreads;

  // ----- The pipeline
  //
  // A stage holds one k-tile: 32 of K. A row of it is 32 floats of the weight, or hi and lo of 32
  // elements of x.
  static constexpr int kRowBytes = split::kKTileRowBytes;
  static constexpr int kKTileDepth = split::k_tile_depth(split::Form::kWithLo);
  static_assert(kRowBytes == kKTileDepth * sizeof(float), "a k-tile of a row of weight");
  // The distance from hi to lo in shared memory: a row of x has 32 hi first, then 32 lo.
  static constexpr int kHiBytes = kKTileDepth * sizeof(__half);
  // wgmma instructions along the K of a k-tile: each takes 16.
  static constexpr int kWgmmasPerKTile = kKTileDepth / 16;

  // Bytes of a stage: 16 KiB of weight and at most 22 KiB of x.
  static constexpr int kWeightBytes = kBlockWeightRows * kRowBytes;
  static constexpr int kXBytes = kLargestRows * kRowBytes;
  // Five stages are 190 KiB. Six do not fit into the 227 KiB that a block may have.
  static constexpr int kStages = 5;

  // k-tiles in a k-group, the unit in which the mainloop and the stream-K schedule count K.
  static constexpr int kKTilesPerKGroup = 4;
  // Returns how many k-groups cover K. TMA writes zeros for the elements past K.
  static int k_groups(int k) {
    return static_cast<int>(divide_up(k, kKTilesPerKGroup * kKTileDepth));
  }

  // ----- The promotion interval
  //
  // Hi products are added to the float32 sums after every 32 of K. From K = kInterval64FromK on,
  // that is after every 64, and from kInterval128FromK on after every 128. (Lo products are always
  // added up over a k-group: mainloop.cuh.) A short interval is more accurate, because tensor cores
  // truncate, but takes more time. Float32 sums of more terms have larger errors, so the error
  // bound grows with K, and a longer K allows a longer interval (docs/SPLIT.md).
  static constexpr int kInterval64FromK = 2048;
  static constexpr int kInterval128FromK = 4096;

  // ----- Registers of a thread
  //
  // A consumer has 88 accumulators, 88 sums, and 32 registers of split weight; 24 remain for
  // addresses and loop counters.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static_assert(BlockConfig::fits(kProducerRegisters, kConsumerRegisters),
                "setmaxnreg only moves registers within the block");

  // ----- The subtile that the general epilogue takes at a time: 2 row blocks
  static constexpr int kSubtileRowBlocks = 2;
  static constexpr int kSubtileRows = 8 * kSubtileRowBlocks;
  static constexpr int kSubtiles = kLargestRows / kSubtileRows;
  static_assert(kLargestRows % kSubtileRows == 0 && kLargeRows % kSubtileRows == 0 &&
                    kMediumRows % kSubtileRows == 0 && kSmallRows % kSubtileRows == 0,
                "tiles are whole subtiles");

  // ----- Numbers of the named barriers; __syncthreads uses 0
  static constexpr int kFirstEpilogueBarrier = 1;  // one for each consumer warpgroup: 1 and 2
  // The barrier at which the second consumer warpgroup waits until the first lets it start
  // (Fp16x3Consumer::run_mainloop).
  static constexpr int kSecondStartsBarrier =
      kFirstEpilogueBarrier + BlockConfig::kConsumerWarpgroups;
};

// The tiles of out. A cluster computes a tile: 256 columns, 128 in each of its blocks, and rows of
// x that both blocks share. TileOrder numbers the tiles; Tiles adds which rows of x each has.
//
//   rows of the tiles            largest_x_tiles     other_rows
//   all kMediumRows              0                   kMediumRows
//   all kSmallRows               0                   kSmallRows
//   kLargestRows and kLargeRows  0 to x_tiles        kLargeRows
//
// In the last case, the tile of weight decides which of the x_tiles tiles along M are the largest.
// Example: M = 1024, x_tiles = 6 and largest_x_tiles = 4, so that 4 * 176 + 2 * 160 = 1024. X is a
// tile of 176 rows, l one of 160.
//
//                    x tile   0  1  2  3  4  5
//   weight tile 0             X  X  X  X  l  l     shift 0
//   weight tile 1             l  l  X  X  X  X     shift 4
//   weight tile 2             X  X  l  l  X  X     shift 8 % 6 = 2
//   weight tile 3             X  X  X  X  l  l     shift 12 % 6 = 0
//
// The pattern X X X X l l is rotated by weight tile * largest_x_tiles % x_tiles places, the shift.
// Without the rotation, some clusters would get only tiles of 176. With 66 clusters, for instance,
// cluster c computes tiles c, c + 66, c + 132 and so on; all of these are x tile c % 6, as 66 is a
// multiple of 6.
struct Tiles {
  TileOrder order;
  int largest_x_tiles;  // how many of the x_tiles tiles along M have kLargestRows rows
  int other_rows;       // rows of the other tiles

  __host__ __device__ int count() const { return order.count(); }
  __host__ __device__ Tile find(int number) const { return order.find(number); }

  // Rows of x that TMA loads for every tile: 176 if the tiles may be of 176 and 160 rows. For a
  // tile of 160, the last 16 of them belong to the next tile, and are not multiplied.
  __host__ __device__ int max_rows() const {
    const bool may_have_largest = other_rows == Fp16x3Config::kLargeRows;
    return may_have_largest ? Fp16x3Config::kLargestRows : other_rows;
  }

  // Returns how many of the first `places` places of the repeated pattern have a tile of 176. The
  // pattern has pattern_length places, of which the first largest_in_pattern have one.
  __host__ __device__ static constexpr unsigned count_largest(unsigned places,
                                                              unsigned largest_in_pattern,
                                                              unsigned pattern_length) {
    const unsigned largest_in_whole_patterns = places / pattern_length * largest_in_pattern;
    const unsigned rest = places % pattern_length;
    return largest_in_whole_patterns + (rest < largest_in_pattern ? rest : largest_in_pattern);
  }

  struct RowRange {
    int begin;
    int size;
  };

  // The rows of x of a tile.
  //
  // Example, as above: weight tile 2, x tile 4. The shift is 2, so weight tile 2 begins at place 2
  // of the repeated pattern
  //
  //   place    0  1  2  3  4  5  6  7  8  9 10 11 ...
  //            X  X  X  X  l  l  X  X  X  X  l  l ...
  //   x tile         0  1  2  3  4  5
  //
  // x tile 4 is at place 6, which is place 0 of the pattern: a tile of 176. Of the tiles before it,
  // those at places 2 and 3 have 176. So its rows begin at 4 * 160 + 2 * 16 = 672.
  __host__ __device__ RowRange rows_of(const Tile& tile) const {
    const unsigned pattern_length = order.x_tiles;
    const unsigned largest_in_pattern = largest_x_tiles;
    const unsigned shift = tile.weight_tile * largest_in_pattern % pattern_length;
    const unsigned place = shift + tile.x_tile;
    const unsigned largest_before = count_largest(place, largest_in_pattern, pattern_length) -
                                    count_largest(shift, largest_in_pattern, pattern_length);
    const int begin =
        tile.x_tile * other_rows + largest_before * (Fp16x3Config::kLargestRows - other_rows);
    const bool is_largest = place % pattern_length < largest_in_pattern;
    return {begin, is_largest ? Fp16x3Config::kLargestRows : other_rows};
  }
};
static_assert(Tiles::count_largest(6, 4, 6) - Tiles::count_largest(2, 4, 6) == 2 &&
                  4 * Fp16x3Config::kLargeRows +
                          2 * (Fp16x3Config::kLargestRows - Fp16x3Config::kLargeRows) ==
                      672,
              "the example of rows_of: two tiles of 176 at places 2 to 5, rows from 672 on");

// Memory for the partial sums of tiles that clusters share (stream_k.cuh). Each cluster has room
// for the partial sums of one tile, and stores no more.
struct PartialSums {
  // [block of the cluster][row block][consumer thread]: four sums
  using Sums =
      float4[BlockConfig::kClusterSize][Fp16x3Config::kSums / 4][BlockConfig::kConsumerThreads];
  // [block of the cluster][consumer warp]: 1 when the warp has stored all its sums
  using Flags = unsigned[BlockConfig::kClusterSize][BlockConfig::kConsumerWarps];

  Sums* sums;         // [clusters]
  Flags* are_stored;  // [clusters], zeros when the kernel starts
};

// The kernel's arguments. The kernel is launched twice for each product. In the first launch, rows
// of the weight may overflow fp16, as their exponents come from samples (sample_weight.cuh). All
// sums of such a row are infinite or NaN, so the epilogue marks it as kOverflowed. The second
// launch scales the marked rows by their largest elements, and computes all tiles with such rows
// again. Usually no row is marked, and the second launch ends at once.
struct Fp16x3Arguments {
  Epilogue<float> epilogue;
  split::ScaledMatrix x;       // split into hi and lo
  split::ScaledMatrix weight;  // without hi and lo: the consumers split it in registers
  int k;
  unsigned* has_overflowed;  // 1 if a row is kOverflowed; 0 when the first launch starts
  unsigned* has_nonfinite;   // 1 if a row is kNonfinite; 0 when the first launch starts
  bool is_second_launch;
  Tiles tiles;
  Schedule schedule;
  PartialSums partials;
};

// ----- shared memory, for mainloop and epilogue

// A tile's exponents and biases, in shared memory. The loader warp loads them while the consumers
// multiply the tile.
struct EpilogueInputs {
  int x_exponent[Fp16x3Config::kLargestRows];
  struct alignas(8) Column {
    int exponent;
    float bias;
  } columns[Fp16x3Config::kBlockWeightRows];
  int first_m;       // the tile's first row of x
  int end_m;         // one past the tile's last row of x that exists
  int first_n;       // the block's first row of weight
  int tile_is_fast;  // 1 if the tile may take the fast epilogue
};

// A block's shared memory.
struct Fp16x3SharedMemory {
  uint8_t x[Fp16x3Config::kStages][Fp16x3Config::kXBytes];
  uint8_t weight[Fp16x3Config::kStages][Fp16x3Config::kWeightBytes];
  // A subtile of each thread's sums, in the general epilogue.
  float4 staging[BlockConfig::kConsumerWarpgroups][Fp16x3Config::kSubtileRowBlocks]
                [BlockConfig::kWarpgroupThreads];
  EpilogueInputs epilogue_inputs[2];  // this work tile's, and the next one's
  Barriers<Fp16x3Config::kStages> barriers;
};
static_assert(sizeof(Fp16x3SharedMemory) <= 227 * 1024, "a block has no more shared memory");
static_assert(Fp16x3Config::kXBytes % 1024 == 0 && Fp16x3Config::kWeightBytes % 1024 == 0,
              "the 128-byte swizzle repeats every 1024 bytes, so k-tiles begin at multiples of it");

// ----- the work tiles of a launch

// Returns the first row of the weight that a block multiplies for a tile. `rank` is the block's
// number in its cluster.
__device__ inline int first_n_of_block(const Tile& tile, int rank) {
  return (tile.weight_tile * BlockConfig::kClusterSize + rank) * Fp16x3Config::kBlockWeightRows;
}

// Returns whether this launch computes the tiles of a weight tile. The first launch computes all;
// the second launch those in which a row of the weight is not kExact. All lanes of a warp call it.
// All warps of all clusters get the same answer, whenever they ask: in the second launch, the state
// of a row may change from kOverflowed to kNonfinite, but not to or from kExact.
__device__ inline bool computes_weight_tile(const Fp16x3Arguments& args, int weight_tile) {
  if (!args.is_second_launch) return true;
  bool has_inexact = false;
  for (int i = threadIdx.x % 32; i < Fp16x3Config::kTileWeightRows; i += 32) {
    const int n = weight_tile * Fp16x3Config::kTileWeightRows + i;
    has_inexact |= n < args.epilogue.n && __ldcg(args.weight.row_state + n) != split::kExact;
  }
  return ptx::uniform(__any_sync(0xffffffff, has_inexact)) != 0;
}

// Calls body(work, tile) for each work tile of this cluster that this launch computes, in the order
// of the schedule. All lanes of a warp call it. With kIsUniform, the compiler sees that all of them
// get the same work tiles.
template <bool kIsUniform = false, typename Body>
__device__ __forceinline__ void for_each_work_tile(const Fp16x3Arguments& args, const Body& body) {
  for (int i = 0;; ++i) {
    const WorkTile work =
        kIsUniform ? args.schedule.uniform_work_tile(i) : args.schedule.work_tile(i);
    if (!work.exists()) break;
    const Tile tile = args.tiles.find(work.tile);
    if (computes_weight_tile(args, tile.weight_tile)) body(work, tile);
  }
}

}  // namespace kernels::sm90::gemm_fp16x3
