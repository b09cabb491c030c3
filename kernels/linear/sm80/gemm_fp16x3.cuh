// float32 as three products of fp16 pairs from sm_80 on: cp.async, ldmatrix, mma.sync.
//
//   x [m, k], weight [n, k] as pairs, k padded to a multiple of 64; out [m, n] float32
//
// A block makes a tile of 128 x 128 results; 2 x 4 warps make 64 x 32 each, in steps of 32 of K.
// The tensor cores truncate when they accumulate, so that they sum up one step alone: lo products,
// then hi ones on top. The float32 units add up (promote) these sums, and the next sum begins at
// the rounding error of the last addition.

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/ptx/math.cuh"
#include "common/ptx/memory.cuh"
#include "linear/epilogue.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm80 {

constexpr int kThreads = 256, kWarpsN = 4;  // 2 x 4 warps along M and N
constexpr int kBlockM = 128, kBlockN = 128;
constexpr int kBlockK = 32, kRowBytes = kBlockK * sizeof(__half);  // four vectors of 16 bytes
constexpr int kFragmentsM = kBlockM / 2 / 16;                      // of a warp, 16 rows each
constexpr int kFragmentsN = kBlockN / kWarpsN / 8;                 // of a warp, 8 columns each
static_assert(kFragmentsM == 4, "a stage is copied, and fragments of weight loaded, in quarters");
constexpr int kTileBytes = kBlockM * kRowBytes;  // of one operand's hi or lo pieces
static_assert(kBlockM == kBlockN, "the tiles of x and of weight are alike");
constexpr int kStageBytes = 4 * kTileBytes;                 // x hi, x lo, weight hi, weight lo
constexpr int kStages = 4, kBytes = kStages * kStageBytes;  // sm_86, sm_89 and sm_120 have less
// Fragments whose sums are staged at once. 8 floats more than a row has avoid bank conflicts.
constexpr int kStagedFragments = 2;
constexpr int kPitch = kFragmentsN * 8 + 8;
constexpr int kStagedFloats = kStagedFragments * 16 * kPitch;
static_assert(kThreads / 32 * kStagedFloats * 4 <= kBytes, "it is of stages");

// Where a tile has a vector: ldmatrix reads eight rows' of one column, in different banks.
__device__ inline uint32_t vector_offset(int row, int vector) {
  return row * kRowBytes + (vector ^ (row / 2 % 4)) * 16;
}

__device__ inline uint32_t next_stage(uint32_t stage) {
  return stage == kBytes - kStageBytes ? 0 : stage + kStageBytes;
}

// The stages' copies: a thread copies a vector of every 64th row, zeros past the last row and K.
struct Copies {
  static constexpr int kRowsApart = kThreads / 4, kEach = kBlockM / kRowsApart;

  int64_t stride, lo_x, lo_weight;
  int rows_x, rows_weight, k_left;
  const __half *x, *weight;
  uint32_t to, stage = 0;

  __device__ Copies(const fp16x3::SplitMatrix& operand_x, const fp16x3::SplitMatrix& operand_weight,
                    int first_m, int first_n, int k, uint32_t shared) {
    stride = k;
    lo_x = operand_x.lo - operand_x.hi;
    lo_weight = operand_weight.lo - operand_weight.hi;
    const int row = threadIdx.x / 4, vector = threadIdx.x % 4;
    rows_x = operand_x.rows - first_m - row;
    rows_weight = operand_weight.rows - first_n - row;
    x = operand_x.hi + stride * (first_m + row) + vector * 8;
    weight = operand_weight.hi + stride * (first_n + row) + vector * 8;
    to = shared + vector_offset(row, vector);
    k_left = k - vector * 8;
  }

  // A quarter of the next stage's copies, so that they can be spread over the products.
  __device__ void copy(int quarter) {
#pragma unroll
    for (int i = 0; i < 2 * kEach; ++i) {
      if (i * 4 / (2 * kEach) != quarter) continue;
      const bool is_x = i < kEach;
      const int row = (is_x ? i : i - kEach) * kRowsApart;
      const __half* const from = (is_x ? x : weight) + stride * row;
      const bool valid = k_left > 0 && row < (is_x ? rows_x : rows_weight);
      const uint32_t at = to + stage + (is_x ? 0 : 2 * kTileBytes) + row * kRowBytes;
      ptx::copy_async(at, from, valid);
      ptx::copy_async(at + kTileBytes, from + (is_x ? lo_x : lo_weight), valid);
    }
    if (quarter < 3) return;
    ptx::commit_copies();
    x += kBlockK, weight += kBlockK, k_left -= kBlockK;
    stage = next_stage(stage);
  }
};

// A warp's operands of half a step, 16 of K: of x by half, fragment and piece (hi, lo), loaded a
// fragment ahead of their use; of weight by half and piece, half a step ahead. The hi ones stay
// until the lo products of the whole step are made.
struct Fragments {
  uint32_t a[2][kFragmentsM][2][4];
  uint32_t b[2][2][kFragmentsN][2];
  uint32_t a_from, b_from;

  __device__ Fragments(uint32_t shared, int warp_m, int warp_n) {
    const int lane = threadIdx.x % 32;
    a_from = shared + vector_offset(warp_m + lane % 16, lane / 16);
    b_from =
        shared + 2 * kTileBytes + vector_offset(warp_n + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }

  // The second half is two vectors on, and the swizzle turns + 2 into ^ 2.
  __device__ void load_a(uint32_t stage, int half, int fragment) {
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      uint32_t (&to)[4] = a[half][fragment][piece];
      ptx::load_matrices(
          to[0], to[1], to[2], to[3],
          (a_from ^ half * 32) + stage + piece * kTileBytes + fragment * (16 * kRowBytes));
    }
  }

  __device__ void load_b(uint32_t stage, int half, int quarter) {
    constexpr int kPairs = kFragmentsN / 2, kLoads = 2 * kPairs / 4;
#pragma unroll
    for (int i = quarter * kLoads; i < (quarter + 1) * kLoads; ++i) {
      const int piece = i / kPairs, j = i % kPairs * 2;
      uint32_t (&to)[kFragmentsN][2] = b[half][piece];
      ptx::load_matrices(to[j][0], to[j][1], to[j + 1][0], to[j + 1][1],
                         (b_from ^ half * 32) + stage + piece * kTileBytes + j * (8 * kRowBytes));
    }
  }
};

// A warp's results: `sums` of one step, and `total`, 2^11 times as large, as lo products are.
struct Accumulators {
  float total[kFragmentsM][kFragmentsN][4] = {};
  float sums[kFragmentsM][kFragmentsN][4] = {};

  __device__ void promote(int fragment) {
#pragma unroll
    for (int j = 0; j < kFragmentsN * 4; ++j) {
      float &sum = sums[fragment][j / 4][j % 4], &of_all = total[fragment][j / 4][j % 4];
      const float after = fmaf(sum, fp16x3::kLoScale, of_all);
      sum = fmaf(sum, fp16x3::kLoScale, of_all - after);  // the rounding error
      of_all = after;
    }
  }

  __device__ static void unscale(float (&fragments)[kFragmentsN][4]) {
#pragma unroll
    for (int j = 0; j < kFragmentsN * 4; ++j) fragments[j / 4][j % 4] *= 1 / fp16x3::kLoScale;
  }

  __device__ void multiply(const Fragments& f, int half, int fragment, int piece_a, int piece_b) {
#pragma unroll
    for (int j = 0; j < kFragmentsN; ++j) {
      ptx::mma(sums[fragment][j], f.a[half][fragment][piece_a], f.b[half][piece_b][j]);
    }
  }
};

// The products of a step: two passes make the lo ones of each half, two more the hi ones. The
// last one copies a stage and loads fragments for the next step.
__device__ __forceinline__ void multiply_step(Copies& copies, Fragments& fragments,
                                              Accumulators& accumulators, uint32_t& stage) {
#pragma unroll
  for (int phase = 0; phase < 4; ++phase) {
    const int half = phase % 2;
    const bool is_lo = phase < 2, is_last = phase == 3;
    uint32_t next = stage;
    if (is_last) {
      next = next_stage(stage);
      // The next stage is there, and nobody reads the one before, which is written now.
      ptx::wait_copies<kStages - 3>();
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
      // load
      if (is_last) copies.copy(i);
      if (phase == 0 || is_last) fragments.load_b(next, 1 - half, i);
      if (is_lo && i + 1 < kFragmentsM) fragments.load_a(stage, half, i + 1);
      if ((phase == 0 || is_last) && i + 1 == kFragmentsM) fragments.load_a(next, 1 - half, 0);
      if (is_lo) {
        // promote
        if (phase == 0) accumulators.promote(i);
        // multiply
        accumulators.multiply(fragments, half, i, 0, 1);
        accumulators.multiply(fragments, half, i, 1, 0);
      } else {
        if (phase == 2) Accumulators::unscale(accumulators.sums[i]);
        accumulators.multiply(fragments, half, i, 0, 0);
      }
    }
    stage = next;
  }
}

// The sums go through the warp's shared memory. In registers, lane 4 g + t has columns 2 t and 2 t
// + 1 of rows g and g + 8 of a fragment; it reads four neighbours of a row.
__device__ __forceinline__ void store_results(const float (&total)[kFragmentsM][kFragmentsN][4],
                                              float* staged, const Epilogue<float>& epilogue,
                                              const int* x_exponent, const int* weight_exponent,
                                              int first_m, int first_n) {
  constexpr int kLanes = kFragmentsN * 8 / 4;  // of a row
  const int lane = threadIdx.x % 32, staged_column = lane % kLanes * 4;
  const int column = first_n + staged_column;
  float bias[4];
  int exponent[4];  // of the rows of the weight
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool exists = column + i < epilogue.n;
    // -0 added to anything is that.
    bias[i] = exists && epilogue.bias != nullptr ? epilogue.bias[column + i] : -0.0f;
    exponent[i] = exists ? weight_exponent[column + i] : 0;
  }
#pragma unroll
  for (int first = 0; first < kFragmentsM; first += kStagedFragments) {
#pragma unroll
    for (int i = 0; i < kStagedFragments * 2 * kFragmentsN; ++i) {
      const int fragment = i / (2 * kFragmentsN), half = i / kFragmentsN % 2, j = i % kFragmentsN;
      const float* const sum = &total[first + fragment][j][half * 2];
      const int row = fragment * 16 + half * 8 + lane / 4;
      *reinterpret_cast<float2*>(staged + row * kPitch + j * 8 + lane % 4 * 2) =
          make_float2(sum[0], sum[1]);
    }
    __syncwarp();
#pragma unroll 1
    for (int row = lane / kLanes; row < kStagedFragments * 16; row += 32 / kLanes) {
      const int at = first_m + first * 16 + row;
      const float* const sums = staged + row * kPitch + staged_column;
      const int of_x = at < epilogue.m ? x_exponent[at] : 0;
      float z[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) z[i] = fp16x3::unscale(sums[i], of_x + exponent[i]) + bias[i];
      finish_four<1>(epilogue, at < epilogue.m, at, column, z);
    }
    __syncwarp();
  }
}

template <typename Matrix>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_fp16x3_kernel(const __grid_constant__ Matrix x, const __grid_constant__ Matrix weight,
                       int k, const TileOrder tiles,
                       const __grid_constant__ Epilogue<float> epilogue) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t shared_start = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int warp = threadIdx.x / 32;
  const int warp_m = warp / kWarpsN * (kFragmentsM * 16);
  const int warp_n = warp % kWarpsN * (kFragmentsN * 8);
  const Tile tile = tiles.find(blockIdx.x);
  const int first_m = tile.x * kBlockM, first_n = tile.weight * kBlockN;
  Copies copies(x, weight, first_m, first_n, k, shared_start);
  Fragments fragments(shared_start, warp_m, warp_n);
  Accumulators accumulators;

  // load
  for (int i = 0; i < kStages - 1; ++i) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) copies.copy(quarter);
  }
  ptx::wait_copies<1>();
  __syncthreads();
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) fragments.load_b(0, 0, quarter);
  fragments.load_a(0, 0, 0);

  // multiply
  uint32_t stage = 0;
  const int steps = (k + kBlockK - 1) / kBlockK;
  for (int step = 0; step < steps; ++step) multiply_step(copies, fragments, accumulators, stage);

  // promote
#pragma unroll
  for (int i = 0; i < kFragmentsM; ++i) {
    accumulators.promote(i);
    Accumulators::unscale(accumulators.total[i]);
  }

  // epilogue
  ptx::wait_copies<0>();
  __syncthreads();
  store_results(accumulators.total, reinterpret_cast<float*>(shared) + warp * kStagedFloats,
                epilogue, x.exponent, weight.exponent, first_m + warp_m, first_n + warp_n);
#endif
}

}  // namespace kernels::sm80
