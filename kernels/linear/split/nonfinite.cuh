// Results that infinity or NaN in an operand decides: of a pair of rows of which one holds them.
//
// Each such result is +inf, -inf or NaN, whatever the finite elements are. So every element is
// replaced by its class: itself where it is not finite, else its sign (-1, 0 or 1). One product of
// the classes, in fp16 on tensor cores, is not finite where float32's is, and of the same sign.
// Only those parts of K count in which a row of the tile holds infinity or NaN.
//
//   x [m, k], weight [n, k] float32; out [m, n], of which only those results are written

#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/mma.cuh"
#include "linear/epilogue.cuh"
#include "linear/split/pieces.cuh"

namespace kernels::nonfinite {

constexpr int kThreads = 128;   // 2 x 2 warps, 32 x 32 results each
constexpr int kTile = 64;       // rows of x, and of weight
constexpr int kK = 32;          // of K a step
constexpr int kPitch = kK + 8;  // halves; ldmatrix then reads without bank conflicts
constexpr int kGroups = kTile * kK / split::kGroup / kThreads;  // of 8 elements, a thread
constexpr int kWindow = kThreads * kK;  // of K, in which each thread looks through a step

__device__ inline __half class_of(float v) {
  return __float2half_rn(isfinite(v) ? static_cast<float>((v > 0) - (v < 0)) : v);
}

// A thread's share of a tile in one step.
struct Groups {
  float v[kGroups][split::kGroup];

  __device__ static int row(int i) { return (threadIdx.x + i * kThreads) / (kK / split::kGroup); }
  __device__ static int column() { return threadIdx.x % (kK / split::kGroup) * split::kGroup; }

  __device__ void load(const split::Operand& operand, int64_t first_row, int64_t first_k,
                       int64_t k) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int64_t r = min(first_row + row(i), operand.rows - 1);
      split::load_group(v[i], operand, r, first_k + column(), k);
    }
  }

  __device__ void store(__half (&tile)[kTile][kPitch]) const {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      alignas(16) __half classes[split::kGroup];
#pragma unroll
      for (int j = 0; j < split::kGroup; ++j) classes[j] = class_of(v[i][j]);
      *reinterpret_cast<uint4*>(&tile[row(i)][column()]) = *reinterpret_cast<const uint4*>(classes);
    }
  }
};

// A block's shared memory.
struct Memory {
  alignas(16) __half x[kTile][kPitch];
  alignas(16) __half weight[kTile][kPitch];
  bool is_x[kTile], is_weight[kTile];  // whether a row is kNonfinite
  uint32_t steps[kThreads / 32];       // of a window, those that count, a bit each

  // The next of them after `step`, kThreads if there is none.
  __device__ int next(int step) const {
    while (++step < kThreads) {
      const uint32_t left = steps[step / 32] >> step % 32;
      if (left != 0) return step + __ffs(left) - 1;
      step |= 31;
    }
    return kThreads;
  }
};

// Whether a row that is kNonfinite holds infinity or NaN in the thread's step.
__device__ inline bool counts(const bool (&is_nonfinite)[kTile], const split::Operand& operand,
                              int64_t first_row, int64_t first_k, int64_t k) {
  for (int i = 0; i < kTile; ++i) {
    if (!is_nonfinite[i]) continue;
    bool is_found = false;
#pragma unroll
    for (int j = 0; j < kK; j += split::kGroup) {
      float v[split::kGroup];
      split::load_group(v, operand, first_row + i, first_k + j, k);
#pragma unroll
      for (const float element : v) is_found |= !isfinite(element);
    }
    if (is_found) return true;
  }
  return false;
}

// sums += x tile times weight tile, of the warp's 32 rows and 32 features.
__device__ inline void multiply_step(const Memory& shared, float (&sums)[2][4][4]) {
#if __CUDA_ARCH__ >= 800
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const __half* const x = &shared.x[warp / 2 * 32 + lane % 16][lane / 16 * 8];
  const __half* const weight =
      &shared.weight[warp % 2 * 32 + lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8];
#pragma unroll
  for (int k = 0; k < kK; k += 16) {
    uint32_t a[2][4], b[4][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::load_matrices(a[i][0], a[i][1], a[i][2], a[i][3],
                         __cvta_generic_to_shared(x + i * 16 * kPitch + k));
      ptx::load_matrices(b[2 * i][0], b[2 * i][1], b[2 * i + 1][0], b[2 * i + 1][1],
                         __cvta_generic_to_shared(weight + i * 16 * kPitch + k));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      ptx::mma(sums[i / 4][i % 4], a[i / 4], b[i % 4]);
    }
  }
#endif
}

// Stores the results whose row or feature is not finite, and their bits of the mask.
__device__ inline void store_results(const Memory& shared, const Epilogue<float>& p,
                                     int64_t first_m, int64_t first_n,
                                     const float (&sums)[2][4][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int fragment = i / 8, block = i / 2 % 4, half = i % 2;
    const int in_m = warp / 2 * 32 + fragment * 16 + half * 8 + lane / 4;
    const int in_n = warp % 2 * 32 + block * 8 + lane % 4 * 2;
    const int64_t row = first_m + in_m;
    uint32_t bits = 0, written = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t column = first_n + in_n + j;
      if (row >= p.m || column >= p.n || !(shared.is_x[in_m] || shared.is_weight[in_n + j]))
        continue;
      float z = sums[fragment][block][half * 2 + j];
      if (p.bias != nullptr) z += p.bias[column];
      *p.out_at(row, column) = p.finish(z);
      bits |= static_cast<uint32_t>(mask_bit(z)) << (lane % 4 * 2 + j);
      written |= 1u << (lane % 4 * 2 + j);
    }
    if (p.mask == nullptr) continue;
    for (int other = 1; other < 4; other *= 2) {  // the four threads that share a byte
      bits |= __shfl_xor_sync(0xffffffff, bits, other);
      written |= __shfl_xor_sync(0xffffffff, written, other);
    }
    if (lane % 4 == 0 && written != 0) {
      uint8_t* const byte = p.mask_at(row, first_n + in_n);
      *byte = static_cast<uint8_t>((*byte & ~written) | bits);
    }
  }
}

// Finds the tile's rows that are kNonfinite. Returns whether there are any.
__device__ inline bool find_rows(Memory& shared, const split::Operand& x,
                                 const split::Operand& weight, int64_t first_m, int64_t first_n) {
  static_assert(kThreads == 2 * kTile, "a thread reads one state");
  const bool is_x = threadIdx.x < kTile;
  const split::Operand& operand = is_x ? x : weight;
  const int i = threadIdx.x % kTile;
  const int64_t row = (is_x ? first_m : first_n) + i;
  const bool is_nonfinite = row < operand.rows && operand.state[row] == split::kNonfinite;
  (is_x ? shared.is_x : shared.is_weight)[i] = is_nonfinite;
  return __syncthreads_or(is_nonfinite);
}

// Adds the products of a window of K, in those of its steps that count.
__device__ inline void multiply_window(Memory& shared, const split::Operand& x,
                                       const split::Operand& weight, int64_t first_m,
                                       int64_t first_n, int64_t window, int64_t k,
                                       float (&sums)[2][4][4]) {
  const int64_t own = window + threadIdx.x * kK;
  const bool is_wanted = own < k && (counts(shared.is_x, x, first_m, own, k) ||
                                     counts(shared.is_weight, weight, first_n, own, k));
  const uint32_t steps = __ballot_sync(0xffffffff, is_wanted);
  __syncthreads();  // all have read the steps of the window before
  if (threadIdx.x % 32 == 0) shared.steps[threadIdx.x / 32] = steps;
  __syncthreads();
  Groups next_x, next_weight;
  const auto load = [&](int step) {
    next_x.load(x, first_m, window + step * kK, k);
    next_weight.load(weight, first_n, window + step * kK, k);
  };
  int step = shared.next(-1);
  if (step < kThreads) load(step);
  while (step < kThreads) {
    next_x.store(shared.x);
    next_weight.store(shared.weight);
    __syncthreads();
    step = shared.next(step);
    if (step < kThreads) load(step);
    multiply_step(shared, sums);
    __syncthreads();
  }
}

// Runs after the product. has_nonfinite, if not null, tells whether any row is kNonfinite.
__global__ void __launch_bounds__(kThreads)
    nonfinite_kernel(const __grid_constant__ split::Operand x,
                     const __grid_constant__ split::Operand weight, int64_t k,
                     const __grid_constant__ Epilogue<float> epilogue,
                     const unsigned* has_nonfinite) {
  wait_for_previous_kernel();
  if (has_nonfinite != nullptr && *has_nonfinite == 0) return;
  __shared__ Memory shared;
  const int64_t tiles_n = divide_up(weight.rows, kTile);
  const int64_t tiles = divide_up(x.rows, kTile) * tiles_n;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    // The tiles of one row of x go to different blocks.
    const int64_t first_m = tile / tiles_n * kTile, first_n = tile % tiles_n * kTile;
    if (!find_rows(shared, x, weight, first_m, first_n)) continue;
    float sums[2][4][4] = {};
    for (int64_t window = 0; window < k; window += kWindow) {
      multiply_window(shared, x, weight, first_m, first_n, window, k, sums);
    }
    store_results(shared, epilogue, first_m, first_n, sums);
    __syncthreads();  // before the next tile's states
  }
}

inline void multiply(const split::Operand& x, const split::Operand& weight, int64_t k,
                     const Epilogue<float>& epilogue, const unsigned* has_nonfinite,
                     cudaStream_t stream) {
  int multiprocessors;
  check(device_attribute(cudaDevAttrMultiProcessorCount, &multiprocessors));
  constexpr int64_t kBlocksEach = 4;  // on a multiprocessor
  const int64_t tiles = divide_up(x.rows, kTile) * divide_up(weight.rows, kTile);
  const int blocks = static_cast<int>(std::min(tiles, kBlocksEach * multiprocessors));
  launch_grid({blocks, kThreads, 0, stream, has_pdl(nonfinite_kernel)}, nonfinite_kernel, x, weight,
              k, epilogue, has_nonfinite);
}

}  // namespace kernels::nonfinite
