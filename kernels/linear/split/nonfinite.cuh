// Results that infinity or NaN in an operand decides: of a pair of rows of which one holds them.
//
// Each such result is +inf, -inf or NaN, whatever the finite elements are. So every element is
// replaced by its class: itself where it is not finite, else its sign (-1, 0 or 1). One product of
// the classes, in fp16 on tensor cores, is not finite where float32's is, and of the same sign.
// Only those parts of K count in which a row of the tile holds infinity or NaN.
//
//   x [m, k], weight [n, k] float32; out [m, n], of which only those results are written

#ifndef KERNELS_LINEAR_SPLIT_NONFINITE_CUH_
#define KERNELS_LINEAR_SPLIT_NONFINITE_CUH_

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/pdl.cuh"
#include "common/ptx/sm80.cuh"
#include "linear/epilogue.cuh"
#include "linear/split/pieces.cuh"

namespace kernels {
namespace nonfinite {

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
      const int64_t r = first_row + row(i);
      const float* const from = operand.from + min(r, operand.rows - 1) * operand.row_stride;
      const bool aligned = reinterpret_cast<uintptr_t>(from) % sizeof(float4) == 0;
      split::load_group(v[i], from, operand.column_stride, first_k + column(), k, aligned);
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

struct Tiles {
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
    const float* const from = operand.from + (first_row + i) * operand.row_stride;
    const bool aligned = reinterpret_cast<uintptr_t>(from) % sizeof(float4) == 0;
    bool found = false;
#pragma unroll
    for (int j = 0; j < kK; j += split::kGroup) {
      float v[split::kGroup];
      split::load_group(v, from, operand.column_stride, first_k + j, k, aligned);
#pragma unroll
      for (const float element : v) found |= !isfinite(element);
    }
    if (found) return true;
  }
  return false;
}

// sums += x tile times weight tile, of the warp's 32 rows and 32 features.
__device__ inline void multiply_step(const Tiles& tiles, float (&sums)[2][4][4]) {
#if __CUDA_ARCH__ >= 800
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const __half* const x = &tiles.x[warp / 2 * 32 + lane % 16][lane / 16 * 8];
  const __half* const weight =
      &tiles.weight[warp % 2 * 32 + lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8];
#pragma unroll
  for (int k = 0; k < kK; k += 16) {
    uint32_t a[2][4], b[4][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sm80::load_matrices(a[i][0], a[i][1], a[i][2], a[i][3],
                          __cvta_generic_to_shared(x + i * 16 * kPitch + k));
      sm80::load_matrices(b[2 * i][0], b[2 * i][1], b[2 * i + 1][0], b[2 * i + 1][1],
                          __cvta_generic_to_shared(weight + i * 16 * kPitch + k));
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sm80::multiply_add<__half>(sums[i / 4][i % 4], a[i / 4], b[i % 4], sums[i / 4][i % 4]);
    }
  }
#endif
}

// Writes a result whose row or feature is not finite, and its bit of the mask.
__device__ inline void store_results(const Tiles& tiles, const split::Result& result, int64_t m,
                                     int64_t n, int64_t first_m, int64_t first_n,
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
      if (row >= m || column >= n || !(tiles.is_x[in_m] || tiles.is_weight[in_n + j])) continue;
      float z = sums[fragment][block][half * 2 + j];
      if (result.bias != nullptr) z += result.bias[column];
      result.out[row * n + column] = result.divisor.quotient(z < result.floor ? 0.0f : z);
      bits |= static_cast<uint32_t>(mask_bit(z)) << (lane % 4 * 2 + j);
      written |= 1u << (lane % 4 * 2 + j);
    }
    if (result.mask == nullptr) continue;
    for (int other = 1; other < 4; other *= 2) {  // the four threads that share a byte
      bits |= __shfl_xor_sync(0xffffffff, bits, other);
      written |= __shfl_xor_sync(0xffffffff, written, other);
    }
    if (lane % 4 == 0 && written != 0) {
      uint8_t* const byte = result.mask + row * ((n + 7) / 8) + (first_n + in_n) / 8;
      *byte = static_cast<uint8_t>((*byte & ~written) | bits);
    }
  }
}

// Runs after the product. `found`, if not null, tells whether any row is kNonfinite.
__global__ void __launch_bounds__(kThreads)
    nonfinite_kernel(const __grid_constant__ split::Operand x,
                     const __grid_constant__ split::Operand weight, int64_t k,
                     const split::Result result, const unsigned* found) {
  wait_for_previous_kernel();
  if (found != nullptr && *found == 0) return;
  __shared__ Tiles tiles;
  const int64_t tiles_m = (x.rows + kTile - 1) / kTile;
  const int64_t tiles_n = (weight.rows + kTile - 1) / kTile;
  for (int64_t tile = blockIdx.x; tile < tiles_m * tiles_n; tile += gridDim.x) {
    // The tiles of one row of x go to different blocks.
    const int64_t first_m = tile / tiles_n * kTile, first_n = tile % tiles_n * kTile;
    {
      static_assert(kThreads == 2 * kTile, "a thread reads one state");
      const bool of_x = threadIdx.x < kTile;
      const split::Operand& operand = of_x ? x : weight;
      const int i = threadIdx.x % kTile;
      const int64_t row = (of_x ? first_m : first_n) + i;
      const bool is = row < operand.rows && operand.state[row] == split::kNonfinite;
      (of_x ? tiles.is_x : tiles.is_weight)[i] = is;
      if (!__syncthreads_or(is)) continue;
    }
    float sums[2][4][4] = {};
    for (int64_t window = 0; window < k; window += kWindow) {
      const int64_t own = window + threadIdx.x * kK;
      const bool is_wanted = own < k && (counts(tiles.is_x, x, first_m, own, k) ||
                                         counts(tiles.is_weight, weight, first_n, own, k));
      const uint32_t steps = __ballot_sync(0xffffffff, is_wanted);
      __syncthreads();  // all have left the window before
      if (threadIdx.x % 32 == 0) tiles.steps[threadIdx.x / 32] = steps;
      __syncthreads();
      Groups next_x, next_weight;
      const auto load = [&](int step) {
        next_x.load(x, first_m, window + step * kK, k);
        next_weight.load(weight, first_n, window + step * kK, k);
      };
      int step = tiles.next(-1);
      if (step < kThreads) load(step);
      while (step < kThreads) {
        next_x.store(tiles.x);
        next_weight.store(tiles.weight);
        __syncthreads();
        step = tiles.next(step);
        if (step < kThreads) load(step);
        multiply_step(tiles, sums);
        __syncthreads();
      }
    }
    store_results(tiles, result, x.rows, weight.rows, first_m, first_n, sums);
    __syncthreads();  // before the next tile's states
  }
}

inline int multiply(const split::Operand& x, const split::Operand& weight, int64_t k,
                    const split::Result& result, const unsigned* found, cudaStream_t stream) {
  int device, multiprocessors;
  int status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  constexpr int64_t kBlocksEach = 4;  // on a multiprocessor
  const int64_t tiles = ((x.rows + kTile - 1) / kTile) * ((weight.rows + kTile - 1) / kTile);
  const int64_t most = kBlocksEach * multiprocessors;
  return launch_early(nonfinite_kernel, static_cast<unsigned>(tiles < most ? tiles : most),
                      kThreads, 0, stream, x, weight, k, result, found);
}

}  // namespace nonfinite
}  // namespace kernels

#endif  // KERNELS_LINEAR_SPLIT_NONFINITE_CUH_
