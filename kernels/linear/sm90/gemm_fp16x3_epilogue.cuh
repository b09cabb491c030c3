// Three products of float32: their tiles, partial sums, and the epilogue.

#pragma once

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/memory.cuh"
#include "linear/epilogue.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/sm90/stream_k.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90 {

// With operand A in registers, its rows are those of the weight. Operand B is the split x.
struct GemmFp16x3Config {
  static constexpr int kWeightRows = 64 * kConsumers;
  // With so many rows, both the accumulators and the promoted sums fit into the registers.
  static constexpr int kXRows = 176, kSums = kXRows / 2;
  // Some tiles of x have kNarrow rows, so that none multiplies many that are not there: 1024 are 4
  // tiles of 176 and 2 of 160, 2% of an H200's time. Or all have fewer (choose_tiles).
  static constexpr int kNarrow = 160, kMiddle = 128, kSmall = 64;
  static constexpr int kK = 32, kStages = 5, kSteps16 = kK / 16;
  static constexpr int kSlabBlocks = 2;  // blocks of 8 rows that the epilogue stages at a time
  static_assert(kXRows % (kSlabBlocks * 8) == 0, "slabs are whole");
  static constexpr int kRowBytes = kK * 4;  // of the weight, and of x
  static constexpr int kWeightBytes = kWeightRows * kRowBytes, kXBytes = kXRows * kRowBytes;
  // A row of x has its hi pieces and then the lo ones, whose descriptor is so much larger.
  static constexpr uint64_t kDescriptorLo = kRowBytes / 2 >> 4;
  static_assert(2 * kK == fp16x3::kKTileWidth, "x is split stepwise");

  // Steps go in rounds. Past k the copies are zeros.
  static constexpr int kRound = 4;
  static __host__ __device__ int rounds(int k) { return (k + kRound * kK - 1) / (kRound * kK); }
};

struct TileEpilogue {
  int x_exponent[GemmFp16x3Config::kXRows];
  struct alignas(8) Feature {
    int exponent;
    float bias;
  } features[GemmFp16x3Config::kWeightRows];
  int row, end, column;  // rows of x: the first, and one past the last; the first feature
  int is_fast;           // whether store_fast serves
};

// Sums are promoted every 32 of K below kShortK, every 64 below kLongK, then every 128: the longer
// K, the more float32 errs itself (docs/SPLIT.md).
constexpr int kShortK = 2048, kLongK = 4096;

constexpr int kSecondStarts = 1 + kConsumers;  // the barrier of both consumer warpgroups

// Where consumer warpgroups and the warp of load_epilogues meet, tile by tile. compute-sanitizer's
// racecheck (2025.3) does not follow barriers that one warp meets in turn: it gets one of all.
#ifdef KERNELS_RACECHECK
__device__ inline void meet_loader(int) { ptx::barrier_sync(1, kConsumers * 128 + 32); }
__device__ inline void meet_consumers() { ptx::barrier_sync(1, kConsumers * 128 + 32); }
#else
__device__ inline void meet_loader(int warpgroup) { ptx::barrier_sync(1 + warpgroup, 128 + 32); }
__device__ inline void meet_consumers() {
  for (int w = 0; w < kConsumers; ++w) ptx::barrier_sync(1 + w, 128 + 32);
}
#endif

// The partial sums of tiles that clusters share.
struct PartialSums {
  using Sums =
      float4[kClusterSize][GemmFp16x3Config::kSums / 4][128 * kConsumers];  // of each thread
  using Counts = unsigned[kClusterSize][4 * kConsumers];  // how often each warp has stored
  Sums* sums;                                             // [clusters]
  Counts* counts;                                         // [clusters], 0 at first
};

struct GemmTiles : TileOrder {
  int wide;  // tiles of x that have kXRows rows
  int rows;  // that the other tiles have: kNarrow, or all kMiddle or kSmall

  __host__ __device__ int rows_at_once() const {
    return rows == GemmFp16x3Config::kNarrow ? GemmFp16x3Config::kXRows : rows;
  }

  struct Rows {
    int begin, size;
  };
  // The wide tiles differ between tiles of the weight, so that all clusters have as many.
  __host__ __device__ Rows rows_of(const Tile& tile) const {
    const unsigned tiles = x_tiles, all_wide = wide, shift = tile.weight * all_wide % tiles;
    const auto wide_before = [&](unsigned i) {
      return i / tiles * all_wide + min(i % tiles, all_wide);
    };
    const unsigned more = wide_before(shift + tile.x) - wide_before(shift);
    return {static_cast<int>(tile.x * rows + more * (GemmFp16x3Config::kXRows - rows)),
            (shift + tile.x) % tiles < all_wide ? GemmFp16x3Config::kXRows : rows};
  }
};

// The kernel runs twice. The second run makes again the tiles whose sums are not all finite, as a
// sample misjudged a row of the weight, and scales these rows by their largest.
struct GemmArguments {
  Epilogue<float> epilogue;
  fp16x3::SplitMatrix x, weight;
  int k;
  unsigned* has_overflowed;  // whether a state is kOverflowed; 0 at first
  unsigned* has_nonfinite;   // whether a state is kNonfinite; 0 at first
  bool is_second_run;
  GemmTiles tiles;
  Schedule schedule;
  PartialSums partials;
};

// Stores a work item's sums for the cluster that finishes the tile, of `rows` rows of x.
__device__ inline void store_partial(const GemmArguments& p, int rows,
                                     const float (&sums)[GemmFp16x3Config::kSums]) {
  const int cluster = blockIdx.x / kClusterSize, rank = ptx::cluster_ctarank();
#pragma unroll
  for (int i = 0; i < GemmFp16x3Config::kSums / 4; ++i) {
    if (8 * i == rows) break;
    const float* const sum = sums + 4 * i;
    p.partials.sums[cluster][rank][i][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    ptx::add_release(&p.partials.counts[cluster][rank][threadIdx.x / 32], 1);
}

// Adds the partial sums of a tile by the clusters before this one. They began before it, as blocks
// begin in the order of their numbers, and store before they wait for anything.
__device__ inline void add_partials(const GemmArguments& p, int tile, int rows,
                                    float (&sums)[GemmFp16x3Config::kSums]) {
  const int rank = ptx::cluster_ctarank();
#pragma unroll 1
  for (int c = blockIdx.x / kClusterSize; p.schedule.is_cut_by(c, tile); --c) {
    // By a vote the compiler sees that all lanes leave the loop together, and does not gather them
    // before each product: 3% of an H200's time.
    const unsigned* const stored = &p.partials.counts[c - 1][rank][threadIdx.x / 32];
    while (!__all_sync(0xffffffff, ptx::load_acquire(stored) != 0)) {
    }
#pragma unroll
    for (int i = 0; i < GemmFp16x3Config::kSums / 4; ++i) {
      if (8 * i == rows) break;
      const float4 more = __ldcg(&p.partials.sums[c - 1][rank][i][threadIdx.x]);
      float* const sum = sums + 4 * i;
      sum[0] += more.x, sum[1] += more.y, sum[2] += more.z, sum[3] += more.w;
    }
  }
}

// Whether a tile is to be made in this run, for all lanes of a warp.
__device__ inline bool is_wanted(const GemmArguments& p, int weight_tile) {
  if (!p.is_second_run) return true;
  bool is_found = false;
  for (int i = threadIdx.x % 32; i < kClusterSize * GemmFp16x3Config::kWeightRows; i += 32) {
    const int row = weight_tile * kClusterSize * GemmFp16x3Config::kWeightRows + i;
    is_found |= row < p.epilogue.n && __ldcg(p.weight.state + row) != fp16x3::kExact;
  }
  return ptx::uniform(__any_sync(0xffffffff, is_found)) != 0;
}

// Calls body(item, tile) on each of the cluster's work items in this run: all lanes of a warp.
template <typename Body>
__device__ __forceinline__ void for_items(const GemmArguments& p, const Body& body) {
  for (int i = 0;; ++i) {
    const Schedule::WorkItem item = p.schedule.item(i);
    if (!item.exists()) break;
    const Tile tile = p.tiles.find(item.tile);
    if (is_wanted(p, tile.weight)) body(item, tile);
  }
}

// Prefetches the epilogue's data of each tile while it is multiplied: one warp.
__device__ inline void load_epilogues(const GemmArguments& p, TileEpilogue (&epilogues)[2]) {
  using S = GemmFp16x3Config;
  const int lane = threadIdx.x % 32;
  int tiles = 0;
  for_items(p, [&](const Schedule::WorkItem&, const Tile& at) {
    TileEpilogue& tile = epilogues[tiles++ % 2];
    const GemmTiles::Rows rows = p.tiles.rows_of(at);
    const int end = min(rows.begin + rows.size, p.epilogue.m);
    const int column = (at.weight * kClusterSize + ptx::cluster_ctarank()) * S::kWeightRows;
    bool is_fast = p.epilogue.is_fast, has_nonfinite = false;
    for (int j = lane; j < S::kXRows; j += 32) {
      const int row = rows.begin + j;
      const int exponent = row < end ? __ldg(p.x.exponent + row) : 0;
      has_nonfinite |= row < end && __ldg(p.x.state + row) == fp16x3::kNonfinite;
      is_fast &= abs(exponent) <= kMaxFastExponent;
      tile.x_exponent[j] = exponent;
    }
    for (int j = lane; j < S::kWeightRows; j += 32) {
      const int row = column + j;
      const int exponent = row < p.epilogue.n ? __ldcg(p.weight.exponent + row) : 0;
      is_fast &= abs(exponent) <= kMaxFastExponent;
      const bool has_bias = row < p.epilogue.n && p.epilogue.bias != nullptr;
      tile.features[j] = {exponent, has_bias ? __ldg(p.epilogue.bias + row) : 0.0f};
    }
    is_fast = __all_sync(0xffffffff, is_fast);
    if (has_nonfinite) *p.has_nonfinite = 1;
    if (lane == 0) {
      tile.row = rows.begin, tile.end = end, tile.column = column, tile.is_fast = is_fast;
    }
    // Both warpgroups have read the one that is written next before they arrive.
    meet_consumers();
  });
}

// The row of its warp's 16 that is row g (r = 0) or g + 8 (r = 1) of the warp's fragments: two
// neighbours a thread, for the stores, and without bank conflicts in loads.
__device__ inline int fragment_row(int g, int r) {
  return (g & 4) << 1 | (g & 1) << 2 | (g & 2) | r;
}

// Marks a row of the weight of which a scaled sum is not finite, so that the second run makes it.
__device__ inline void mark_overflow(const GemmArguments& p, int column) {
  if (p.is_second_run || column >= p.epilogue.n) return;
  p.weight.state[column] = fp16x3::kOverflowed;
  *p.has_overflowed = 1;
}

// Where it is direct and all exponents are modest: `feature` and the next, of all rows.
template <bool kMask, int kSums>
__device__ void store_fast(const GemmArguments& p, const TileEpilogue& tile, int feature,
                           const float (&sums)[kSums]) {
  const Epilogue<float>& epilogue = p.epilogue;
  const int column = tile.column + feature;
  const bool exists = column < epilogue.n;
  if (!kMask && !exists) return;
  const TileEpilogue::Feature features[2] = {tile.features[feature], tile.features[feature + 1]};
  const float scale[2] = {fp16x3::power_of_two(-features[0].exponent),
                          fp16x3::power_of_two(-features[1].exponent)};
  float largest[2] = {};
  const int first = threadIdx.x % 4 * 2;
  int row = tile.row + first;
  float* to = epilogue.out_at(row, column);
  uint32_t bits = 0;  // of four rows, a byte each, of eight features of four threads
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j, row += 8, to += 8 * static_cast<int64_t>(epilogue.n)) {
    if (j % 2 == 0 && tile.row + 8 * j >= tile.end) break;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float x_scale = fp16x3::power_of_two(-tile.x_exponent[8 * j + first + i]);
      float out[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // The same bits as store_pass's: powers of two scale exactly.
        const float total = sums[4 * j + 2 * r + i];
        largest[r] = ptx::max_nan(largest[r], fabsf(total));
        const float z = fmaf(total, x_scale * scale[r], features[r].bias);
        if constexpr (kMask) {
          bits |= (exists && mask_bit(z)) << (j % 2 * 16 + i * 8 + feature % 8 + r);
        }
        out[r] = epilogue.finish_fast(z);
      }
      if (exists && row + i < tile.end) {
        *reinterpret_cast<float2*>(to + i * static_cast<int64_t>(epilogue.n)) =
            make_float2(out[0], out[1]);
      }
    }
    if (kMask && j % 2 == 1) {
      bits |= __shfl_xor_sync(0xffffffff, bits, 4);
      bits |= __shfl_xor_sync(0xffffffff, bits, 8);
      const int own = threadIdx.x / 4 % 4;
      const int own_row = row - 8 + own / 2 * 8 + own % 2;
      if (own_row < tile.end && column / 8 * 8 < epilogue.n) {
        *epilogue.mask_at(own_row, column) = static_cast<uint8_t>(bits >> (8 * own));
      }
      bits = 0;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!(largest[r] < INFINITY)) mark_overflow(p, column + r);
  }
}

// Where a tile is not direct, a thread stages two neighbouring features of rows 2c and 2c + 1 of
// every 8. A swap with the thread that has the next two makes that four features of one row.
__device__ inline void finish(const GemmArguments& p, const TileEpilogue& tile,
                              float4 (&staging)[GemmFp16x3Config::kSlabBlocks][128],
                              const float (&sums)[GemmFp16x3Config::kSums]) {
  using S = GemmFp16x3Config;
  const int lane = threadIdx.x % 32, g = lane / 4, local_row = threadIdx.x / 32 * 16;
  if (tile.is_fast) {
    const int feature = local_row + fragment_row(g, 0);
    if (p.epilogue.mask == nullptr) return store_fast<false>(p, tile, feature, sums);
    return store_fast<true>(p, tile, feature, sums);
  }
  const int first_feature = local_row + fragment_row(g & ~2, 0);
  const bool is_second = lane & 8;
  float4* const slot = &staging[0][threadIdx.x % 128];
  constexpr int kSlabRows = S::kSlabBlocks * 8, kSlabs = S::kXRows / kSlabRows;
#pragma unroll 1
  for (int slab = 0; slab < kSlabs; ++slab) {
    const int first_row = slab * kSlabRows;
    if (tile.row + first_row >= tile.end) break;
    stage_slab<0, kSlabs, S::kSlabBlocks, 128>(slot, sums, slab);
#pragma unroll
    for (int j = 0; j < S::kSlabBlocks; ++j) {
      const float4 own = slot[j * 128];
      const float keep[2] = {is_second ? own.y : own.x, is_second ? own.w : own.z};
      const float other[2] = {__shfl_xor_sync(0xffffffff, is_second ? own.x : own.y, 8),
                              __shfl_xor_sync(0xffffffff, is_second ? own.z : own.w, 8)};
      const int row = first_row + 8 * j + 2 * (lane % 4) + is_second;
      float z[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const TileEpilogue::Feature feature = tile.features[first_feature + i];
        const float total = (i < 2) == is_second ? other[i % 2] : keep[i % 2];
        if (!isfinite(total)) mark_overflow(p, tile.column + first_feature + i);
        z[i] = fp16x3::unscale(total, tile.x_exponent[row] + feature.exponent) + feature.bias;
      }
      finish_four<4>(p.epilogue, tile.row + row < tile.end, tile.row + row,
                     tile.column + first_feature, z);
    }
  }
}

}  // namespace kernels::sm90
