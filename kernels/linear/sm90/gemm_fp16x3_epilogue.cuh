// What happens to the sums of the fp16x3 GEMM (gemm_fp16x3.cuh) after the mainloop: adding the
// partial sums of tiles that clusters share, and the epilogue, which undoes the scaling of rows,
// adds the bias, applies ReLU, divides, and stores results and mask:
//
//   z = sum / 2^(exponent of the row of x + exponent of the row of weight) + bias
//   out [M, N] = relu(z) / divisor;  mask [M, (N + 7) / 8]: one bit for each z
//
// Who holds what. A consumer warp has 16 features of the tile, in wgmma's layout: lane 4 * g + c
// (g = 0 .. 7, c = 0 .. 3) has rows g and g + 8 of the warp's fragment of the weight, and of every
// column block of 8 rows of x it has rows 2 * c and 2 * c + 1. So sums[4 * j .. 4 * j + 3] of
// column block j are
//
//                                   row of x 8 * j + 2 * c   row of x 8 * j + 2 * c + 1
//   r = 0: fragment row g                sums[4 * j]              sums[4 * j + 1]
//   r = 1: fragment row g + 8            sums[4 * j + 2]          sums[4 * j + 3]
//
// Fragment rows are assigned to features such that r = 0 and r = 1 of a lane are neighbours
// (fragment_row). A lane's results of one row of x are then two neighbours of a row of out.
//
//   lane          0      4      8      12     16     20     24     28      (c = 0; lanes + 1, + 2,
//   + 3 g             0      1      2      3      4      5      6      7        have other rows of
//   x) features     0, 1   4, 5   2, 3   6, 7   8, 9  12, 13  10, 11  14, 15
//
// There are two epilogues. The fast one stores two features at a time straight from registers. It
// needs an exact reciprocal of the divisor, even N, and exponents near 0. The general one is for
// all other tiles: it first collects four neighbouring features of one row.

#pragma once

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/memory.cuh"
#include "linear/epilogue.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/sm90/gemm_fp16x3_arguments.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90 {

// The warp's feature, 0 .. 15, that is in row g (r = 0) or g + 8 (r = 1) of its fragments.
//
//   g              0  1  2  3  4   5   6   7
//   r = 0          0  4  2  6  8  12  10  14      the bits of the feature are g2 g0 g1 r,
//   r = 1          1  5  3  7  9  13  11  15      where g2 g1 g0 are the bits of g
//
// The last bit is r, so that a lane has two neighbours. Bits g0 and g1 are swapped so that the
// weight is read from shared memory without bank conflicts: a wavefront of a 16-byte load is 8
// lanes, with two values of g that differ in g0. Their features, 4 apart, have their vectors in
// different halves of the 128-byte row, for TMA's swizzle flips the half where the row number has
// bit 2 set.
__device__ inline int fragment_row(int g, int r) {
  return (g & 4) << 1 | (g & 1) << 2 | (g & 2) | r;  // g2 to bit 3, g0 to bit 2, g1 stays in bit 1
}

// --------------------------------------------------------------------------- shared tiles:
// partials

// Stores the sums of a work tile with `rows` rows of x, for the cluster that finishes the tile.
// Called by the consumer warps.
__device__ inline void store_partial_sums(const GemmArguments& p, int rows,
                                          const float (&sums)[GemmFp16x3Config::kSums]) {
  const int cluster = blockIdx.x / BlockConfig::kClusterSize;
  const int rank = ptx::cluster_ctarank();
#pragma unroll
  for (int j = 0; j < GemmFp16x3Config::kSums / 4; ++j) {
    if (8 * j == rows) break;
    const float* const sum = sums + 4 * j;
    p.partials.sums[cluster][rank][j][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  // The warp's stores come before lane 0's release.
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    ptx::add_release(&p.partials.counts[cluster][rank][threadIdx.x / 32], 1);
  }
}

// Adds to `sums` the partial sums that the clusters before this one have stored of a tile. Called
// by the consumer warps of the cluster that finishes the tile. Each warp waits for the warp of its
// number in the other clusters.
//
// Why this does not deadlock. A cluster only waits for clusters with smaller numbers, and it stores
// its own partial sums, if it has any, before it waits for anything (stream_k.cuh). So a wait ends
// as long as the awaited clusters run at some time while this one occupies its multiprocessors. Two
// facts ensure it, and either one suffices:
//
//   1. The whole grid fits on the GPU. Its clusters are no more than cudaOccupancyMaxActiveClusters
//      says (count_clusters in launch.cu). So all clusters run at once, as soon as other kernels
//      have left. The next kernel of the stream cannot take the place of a cluster: programmatic
//      dependent launch starts it after all blocks of this grid have started.
//   2. Blocks start in the order of their numbers. This is an assumption: CUDA does not guarantee
//   it,
//      but it holds on every GPU and driver seen. Then the started clusters are always the first
//      ones. The first of them that has not ended waits only for clusters that have ended, so it
//      proceeds.
//
// The order matters only where fact 1 does not hold: where something else keeps multiprocessors
// occupied and does not end before this kernel. Examples are a second launch of this kernel in
// another stream, with each launch holding a part of the GPU, and a GPU of which this stream may
// use only a part that cudaOccupancyMaxActiveClusters does not know (a green context). If blocks
// then started in another order, all multiprocessors could be occupied by clusters that wait for
// clusters that have not started, and the kernel would hang.
__device__ inline void add_partial_sums(const GemmArguments& p, int tile, int rows,
                                        float (&sums)[GemmFp16x3Config::kSums]) {
  const int rank = ptx::cluster_ctarank();
  const int own_cluster = blockIdx.x / BlockConfig::kClusterSize;
#pragma unroll 1
  for (int c = own_cluster; p.schedule.begins_inside(c, tile); --c) {
    const int other = c - 1;
    const unsigned* const count = &p.partials.counts[other][rank][threadIdx.x / 32];
    // All lanes leave the loop at the same time anyhow. The vote shows it to the compiler, which
    // then does not make the warp's lanes converge before each wgmma: 3% of an H200's time.
    while (!__all_sync(0xffffffff, ptx::load_acquire(count) != 0)) {
    }
#pragma unroll
    for (int j = 0; j < GemmFp16x3Config::kSums / 4; ++j) {
      if (8 * j == rows) break;
      const float4 partial = __ldcg(&p.partials.sums[other][rank][j][threadIdx.x]);
      float* const sum = sums + 4 * j;
      sum[0] += partial.x;
      sum[1] += partial.y;
      sum[2] += partial.z;
      sum[3] += partial.w;
    }
  }
}

// ---------------------------------------------------------------------- the epilogue's input data

// What the epilogue of a tile reads besides the sums, in shared memory. One warp loads it while the
// consumers multiply the tile.
struct EpilogueInputs {
  int x_exponent[GemmFp16x3Config::kWideRows];
  struct alignas(8) Feature {
    int exponent;
    float bias;
  } features[GemmFp16x3Config::kWeightRows];
  int row;      // the tile's first row of x
  int end;      // one past its last row of x that exists
  int column;   // the block's first feature
  int is_fast;  // whether the tile may take the fast epilogue
};

// The named barriers between the loader warp and each consumer warpgroup, once a work tile. After
// it, the consumers may read the inputs of this work tile, and the loader may overwrite those of
// the one before. compute-sanitizer's racecheck (2025.3) does not follow two barriers that one warp
// meets in turn. It gets one barrier of the warp and both warpgroups.
#ifdef KERNELS_RACECHECK
__device__ inline void sync_with_loader(int) {
  ptx::barrier_sync(GemmFp16x3Config::kFirstEpilogueBarrier, BlockConfig::kConsumerThreads + 32);
}

__device__ inline void sync_with_consumers() {
  ptx::barrier_sync(GemmFp16x3Config::kFirstEpilogueBarrier, BlockConfig::kConsumerThreads + 32);
}
#else
__device__ inline void sync_with_loader(int warpgroup) {
  ptx::barrier_sync(GemmFp16x3Config::kFirstEpilogueBarrier + warpgroup, 128 + 32);
}

__device__ inline void sync_with_consumers() {
  for (int w = 0; w < BlockConfig::kConsumerWarpgroups; ++w) {
    ptx::barrier_sync(GemmFp16x3Config::kFirstEpilogueBarrier + w, 128 + 32);
  }
}
#endif

// The loader warp: loads the epilogue inputs of one work tile after the other into two buffers, in
// turn. It also reports rows of x that hold infinity or NaN.
__device__ inline void load_epilogue_inputs(const GemmArguments& p, EpilogueInputs (&buffers)[2]) {
  using Config = GemmFp16x3Config;
  const int lane = threadIdx.x % 32;
  int work_tiles = 0;
  for_each_work_tile(p, [&](const WorkTile&, const Tile& tile) {
    EpilogueInputs& inputs = buffers[work_tiles++ % 2];
    const GemmTiles::Rows rows = p.tiles.rows_of(tile);
    const int end = min(rows.begin + rows.size, p.epilogue.m);
    const int column = first_feature(tile, ptx::cluster_ctarank());
    bool is_fast = p.epilogue.is_fast;
    bool has_nonfinite = false;
    for (int i = lane; i < Config::kWideRows; i += 32) {
      const int row = rows.begin + i;
      const int exponent = row < end ? __ldg(p.x.exponent + row) : 0;
      has_nonfinite |= row < end && __ldg(p.x.state + row) == fp16x3::kNonfinite;
      is_fast &= abs(exponent) <= FastEpilogueConfig::kMaxExponent;
      inputs.x_exponent[i] = exponent;
    }
    for (int i = lane; i < Config::kWeightRows; i += 32) {
      const int feature = column + i;
      const int exponent = feature < p.epilogue.n ? __ldcg(p.weight.exponent + feature) : 0;
      is_fast &= abs(exponent) <= FastEpilogueConfig::kMaxExponent;
      const bool has_bias = feature < p.epilogue.n && p.epilogue.bias != nullptr;
      inputs.features[i] = {exponent, has_bias ? __ldg(p.epilogue.bias + feature) : 0.0f};
    }
    is_fast = __all_sync(0xffffffff, is_fast);
    if (has_nonfinite) *p.has_nonfinite = 1;
    if (lane == 0) {
      inputs.row = rows.begin;
      inputs.end = end;
      inputs.column = column;
      inputs.is_fast = is_fast;
    }
    // The consumers arrive here after they have read the other buffer, for the work tile before. So
    // that one may be overwritten next.
    sync_with_consumers();
  });
}

// ------------------------------------------------------------------------------------- epilogues

// Marks a feature with a sum that is not finite, so that the second run computes it again. The row
// of weight has overflowed fp16, or holds infinity or NaN. (x is finite: rows of x with infinity or
// NaN were split as zeros.)
__device__ inline void mark_overflow(const GemmArguments& p, int column) {
  if (p.is_second_run || column >= p.epilogue.n) return;
  p.weight.state[column] = fp16x3::kOverflowed;
  *p.has_overflowed = 1;
}

// The fast epilogue: a thread stores the features `feature` and `feature + 1` of the block, for its
// rows of x.
//
// The mask. Eight neighbouring features of a row are one byte; they are in four threads, whose
// lanes differ in bits 2 and 3. The threads pack four bytes at a time, of the four rows of x that
// each has in two column blocks j and j + 1, and exchange them:
//
//   bits of a thread       byte 0            byte 1            byte 2            byte 3
//   row of x               8 j + 2 c         8 j + 2 c + 1     8 j + 8 + 2 c     8 j + 8 + 2 c + 1
//   lane c (features 0, 1)       ......10          ......10          ......10          ......10
//   lane c + 8 (2, 3)            ....32..          ....32..          ....32..          ....32..
//   lane c + 4 (4, 5)            ..54....          ..54....          ..54....          ..54....
//   lane c + 12 (6, 7)           76......          76......          76......          76......
//   or of all four               76543210          76543210          76543210          76543210
//   stored by lane               c                 c + 4             c + 8             c + 12
template <bool kMask, int kSums>
__device__ void store_fast(const GemmArguments& p, const EpilogueInputs& inputs, int feature,
                           const float (&sums)[kSums]) {
  const Epilogue<float>& epilogue = p.epilogue;
  const int column = inputs.column + feature;
  const bool exists = column < epilogue.n;  // and so does column + 1, as N is even
  // With a mask, all lanes stay for the exchange.
  if (!kMask && !exists) return;
  const EpilogueInputs::Feature features[2] = {inputs.features[feature],
                                               inputs.features[feature + 1]};
  const float scale[2] = {fp16x3::power_of_two(-features[0].exponent),
                          fp16x3::power_of_two(-features[1].exponent)};
  float largest[2] = {};  // magnitude of each feature's sums; NaN if one is NaN
  const int first = threadIdx.x % 4 * 2;
  int row = inputs.row + first;  // of column block j: the first of the thread's two rows
  float* to = epilogue.out_at(row, column);
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j, row += 8, to += 8 * static_cast<int64_t>(epilogue.n)) {
    const bool is_first_of_two = j % 2 == 0;
    if (is_first_of_two && inputs.row + 8 * j >= inputs.end) break;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // the thread's rows of the column block
      const float x_scale = fp16x3::power_of_two(-inputs.x_exponent[8 * j + first + i]);
      float out[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // the thread's features
        const float sum = sums[4 * j + 2 * r + i];
        largest[r] = ptx::max_nan(largest[r], fabsf(sum));
        // These are the general epilogue's bits, too, as multiplying by a power of two is exact.
        const float z = fmaf(sum, x_scale * scale[r], features[r].bias);
        if constexpr (kMask) {
          const bool bit = exists && mask_bit(z);
          const int byte = j % 2 * 2 + i;
          bits |= static_cast<uint32_t>(bit) << (byte * 8 + feature % 8 + r);
        }
        out[r] = epilogue.finish_fast(z);
      }
      if (exists && row + i < inputs.end) {
        *reinterpret_cast<float2*>(to + i * static_cast<int64_t>(epilogue.n)) =
            make_float2(out[0], out[1]);
      }
    }
    if (kMask && !is_first_of_two) {
      bits |= __shfl_xor_sync(0xffffffff, bits, 4);
      bits |= __shfl_xor_sync(0xffffffff, bits, 8);
      const int byte = threadIdx.x / 4 % 4;
      const int byte_row = row - 8 + byte / 2 * 8 + byte % 2;
      if (byte_row < inputs.end && column / 8 * 8 < epilogue.n) {
        *epilogue.mask_at(byte_row, column) = static_cast<uint8_t>(bits >> (8 * byte));
      }
      bits = 0;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool is_finite = largest[r] < INFINITY;  // false for NaN, too
    if (!is_finite) mark_overflow(p, column + r);
  }
}

// The epilogue of a tile, for the sums of a thread of a consumer warpgroup: the fast one, or the
// general one, which is the rest of this function.
//
// In the general epilogue, two lanes that differ in bit 3 have two neighbouring features each, of
// the same two rows of x. They exchange sums so that each gets four neighbouring features of one
// row:
//
//                          row 2 c              row 2 c + 1
//   lane (bit 3 clear)     features 0, 1        features 0, 1
//   lane + 8 (bit 3 set)   features 2, 3        features 2, 3
//
//   afterwards: the lane has features 0 to 3 of row 2 c, lane + 8 those of row 2 c + 1
//
// The loop over subtiles is not unrolled, and registers cannot be indexed at run time. So the
// thread copies a subtile's sums to its own slots of `staging` and reads them back. No other thread
// reads them, so no barrier is needed.
__device__ inline void store_results(const GemmArguments& p, const EpilogueInputs& inputs,
                                     float4 (&staging)[GemmFp16x3Config::kSubtileBlocks][128],
                                     const float (&sums)[GemmFp16x3Config::kSums]) {
  using Config = GemmFp16x3Config;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int first_of_warp = threadIdx.x / 32 * Config::kWarpWeightRows;
  if (inputs.is_fast) {
    const int feature = first_of_warp + fragment_row(g, 0);
    if (p.epilogue.mask == nullptr) {
      store_fast<false>(p, inputs, feature, sums);
    } else {
      store_fast<true>(p, inputs, feature, sums);
    }
    return;
  }

  const int feature = first_of_warp + fragment_row(g & ~2, 0);  // the first of the pair of lanes
  const bool has_second_row = lane & 8;
  float4* const slot = &staging[0][threadIdx.x % 128];
#pragma unroll 1
  for (int subtile = 0; subtile < Config::kSubtiles; ++subtile) {
    const int first_row = subtile * Config::kSubtileRows;
    if (inputs.row + first_row >= inputs.end) break;
    copy_any_subtile<0, Config::kSubtiles, Config::kSubtileBlocks, 128>(slot, sums, subtile);
#pragma unroll
    for (int j = 0; j < Config::kSubtileBlocks; ++j) {
      // x and y are the first feature's, of rows 2 c and 2 c + 1; z and w the second feature's.
      const float4 own = slot[j * 128];
      const float kept[2] = {has_second_row ? own.y : own.x, has_second_row ? own.w : own.z};
      const float received[2] = {
          __shfl_xor_sync(0xffffffff, has_second_row ? own.x : own.y, 8),
          __shfl_xor_sync(0xffffffff, has_second_row ? own.z : own.w, 8),
      };
      const int row = first_row + 8 * j + 2 * (lane % 4) + static_cast<int>(has_second_row);
      float z[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const EpilogueInputs::Feature column = inputs.features[feature + i];
        // Features 0 and 1 belong to the lane that gets the first row.
        const bool is_of_first_lane = i < 2;
        const bool is_received = is_of_first_lane == has_second_row;
        const float sum = is_received ? received[i % 2] : kept[i % 2];
        if (!isfinite(sum)) mark_overflow(p, inputs.column + feature + i);
        z[i] = fp16x3::unscale(sum, inputs.x_exponent[row] + column.exponent) + column.bias;
      }
      constexpr int kMaskPartner = 4;  // the lane bit of the thread with the mask byte's other half
      finish_four<kMaskPartner>(p.epilogue, inputs.row + row < inputs.end, inputs.row + row,
                                inputs.column + feature, z);
    }
  }
}

}  // namespace kernels::sm90
