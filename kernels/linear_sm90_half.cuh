// float16 and bfloat16 on Hopper, multiplied as they are.

#ifndef KERNELS_LINEAR_SM90_HALF_CUH_
#define KERNELS_LINEAR_SM90_HALF_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <type_traits>

#include "epilogue.cuh"
#include "linear_sm90_common.cuh"
#include "ptx.cuh"

namespace kernels {
namespace sm90 {

constexpr int kHalfRows = 64 * kConsumers;  // rows of x of a block's tile: operand A
constexpr int kHalfColumns = 256;           // rows of weight: operand B
[[maybe_unused]] constexpr int kHalfK = kRowBytes / 2;
constexpr int kHalfStages = 4;
constexpr int kHalfTurn = 4;  // blocks of 8 columns that a quad of threads stores at once

struct HalfMemory {
  uint8_t x[kHalfStages][kHalfRows * kRowBytes];
  uint8_t weight[kHalfStages][kHalfColumns * kRowBytes];
  float4 staging[kConsumers][2][kHalfTurn][128];
  float bias[kConsumers][kHalfColumns];
  Barriers<kHalfStages> barriers;
};

template <typename T>
struct HalfProblem {
  const T* bias;
  T* out;
  uint8_t* mask;
  int m, n, k;
  float floor;  // what is smaller becomes 0
  Divisor<float> divisor;
  bool is_direct;  // whether store_tile serves
  Tiles tiles;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <typename T>
__device__ uint32_t pack_as(float first, float second) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Lane c of each four has word b of its own; afterwards it has word c of lane b.
__device__ inline void transpose_quad(uint32_t (&v)[4], int c) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = c & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t taken = __shfl_xor_sync(0xffffffff, upper ? v[i] : v[i | bit], bit);
      (upper ? v[i] : v[i | bit]) = taken;
    }
  }
}

// The byte of the mask of block c, of four blocks of 8 columns of which each of four lanes has two.
__device__ inline uint32_t mask_byte(const float (&z)[2 * kHalfTurn], int columns, int c) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 2 * kHalfTurn; ++i) {
    const int at = i / 2 * 8 + 2 * c + i % 2;
    bits |= (at < columns && mask_bit(z[i])) << at;
  }
  bits |= __shfl_xor_sync(0xffffffff, bits, 1);
  bits |= __shfl_xor_sync(0xffffffff, bits, 2);
  return bits >> (8 * c) & 0xff;
}

// Finishes four blocks of 8 columns of one row, of which each of four lanes has two, and stores
// block c, its 8 columns and its byte of the mask, from lane c.
template <bool kExact, typename T>
__device__ void store_row(const HalfProblem<T>& p, int row, int column,
                          const float (&z)[2 * kHalfTurn], int c) {
  const int first = column + 8 * c;
  const bool exists = row < p.m && first < p.n;
  if (p.mask != nullptr) {
    const uint32_t byte = mask_byte(z, p.n - column, c);
    const int64_t at = static_cast<int64_t>(row) * ((p.n + 7) / 8) + first / 8;
    if (exists) p.mask[at] = static_cast<uint8_t>(byte);
  }
  float out[2 * kHalfTurn];
#pragma unroll
  for (int i = 0; i < 2 * kHalfTurn; ++i) {
    out[i] = p.divisor.template quotient<kExact>(z[i] < p.floor ? 0.0f : z[i]);
  }
  uint32_t words[kHalfTurn];
#pragma unroll
  for (int b = 0; b < kHalfTurn; ++b) words[b] = pack_as<T>(out[2 * b], out[2 * b + 1]);
  transpose_quad(words, c);
  if (!exists) return;
  T* const to = p.out + static_cast<int64_t>(row) * p.n + first;
  if (p.n % 8 == 0) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll 1
    for (int i = 0; i < min(8, p.n - first); ++i) {
      const uint32_t word = i / 4 == 0 ? words[i / 2 % 2] : words[2 + i / 2 % 2];
      reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(word >> (i % 2 * 16));
    }
  }
}

// Two rows, eight apart, of what a turn has in memory.
template <bool kExact, typename T>
__device__ void store_turn(const HalfProblem<T>& p, int row, int column,
                           const float4 (&staging)[kHalfTurn][128], const float* bias) {
  const int c = threadIdx.x % 4;
  float upper[2 * kHalfTurn], lower[2 * kHalfTurn];
#pragma unroll
  for (int b = 0; b < kHalfTurn; ++b) {
    const float4 sum = staging[b][threadIdx.x % 128];
    const float2 own = *reinterpret_cast<const float2*>(bias + 8 * b + 2 * c);
    upper[2 * b] = sum.x + own.x, upper[2 * b + 1] = sum.y + own.y;
    lower[2 * b] = sum.z + own.x, lower[2 * b + 1] = sum.w + own.y;
  }
  store_row<kExact>(p, row, column, upper, c);
  store_row<kExact>(p, row + 8, column, lower, c);
}

// relu, rounded.
template <typename T>
__device__ uint32_t pack_relu(float first, float second) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

// The way out of the registers where nothing but the result is asked for, and the division is an
// exact multiplication: the bias is scaled too, and a warp's 16 rows go through memory of its own,
// 64 columns at a time.
template <typename T>
__device__ void store_tile(const HalfProblem<T>& p, int row, int column,
                           const float (&d)[kHalfColumns / 2], const float* bias,
                           uint32_t staging) {
  constexpr int kBytes = 16 * kRowBytes;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int turn = 0; turn < kHalfColumns / 64; ++turn) {
    const uint32_t buffer = staging + turn % 2 * kBytes;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int block = turn * 8 + pair * 2 + i;
        const float2 own = *reinterpret_cast<const float2*>(bias + 8 * block + 2 * (lane % 4));
        const float* const sum = d + 4 * block;
        const float scale = p.divisor.scale;
        words[2 * i] = pack_relu<T>(fmaf(sum[0], scale, own.x), fmaf(sum[1], scale, own.y));
        words[2 * i + 1] = pack_relu<T>(fmaf(sum[2], scale, own.x), fmaf(sum[3], scale, own.y));
      }
      ptx::store_matrices(buffer + lane % 16 * kRowBytes + ((2 * pair + lane / 16) ^ lane % 8) * 16,
                          words);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int in_rows = 4 * i + lane / 8, chunk = lane % 8;
      const float4 v =
          ptx::load_shared_four(buffer + in_rows * kRowBytes + (chunk ^ in_rows % 8) * 16);
      const int at = column + turn * 64 + chunk * 8;
      if (row + in_rows < p.m && at < p.n) {
        *reinterpret_cast<float4*>(p.out + static_cast<int64_t>(row + in_rows) * p.n + at) = v;
      }
    }
  }
}

#endif

template <typename T>
__global__ void KERNELS_CLUSTER __launch_bounds__(kThreads, 1)
    half_kernel(const __grid_constant__ CUtensorMap x_map,
                const __grid_constant__ CUtensorMap weight_map, const HalfProblem<T> p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t dynamic_memory[];
  HalfMemory& shared = *reinterpret_cast<HalfMemory*>(dynamic_memory);
  const uint32_t base = ptx::shared_address(dynamic_memory);
  const uint32_t x = base + offsetof(HalfMemory, x), weight = base + offsetof(HalfMemory, weight);
  const uint32_t full = base + offsetof(HalfMemory, barriers.full);
  const uint32_t empty = base + offsetof(HalfMemory, barriers.empty);
  const int warpgroup = threadIdx.x / 128;
  const int rank = ptx::cluster_ctarank();
  const int first = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;
  const int steps = (p.k + kHalfK - 1) / kHalfK;
  if (threadIdx.x == kConsumers * 128) {
    ptx::prefetch_tensormap(&x_map);
    ptx::prefetch_tensormap(&weight_map);
  }
  init_barriers<kHalfStages>(full, empty, 0);

  Ring<kHalfStages> ring;
  if (warpgroup == kConsumers) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int end = threadIdx.x == kConsumers * 128 ? p.tiles.count() : 0;
    for (int tile = first; tile < end; tile += clusters) {
      int x_tile, weight_tile;
      p.tiles.find(tile, &x_tile, &weight_tile);
      constexpr int kShare = kHalfColumns / kClusterSize;  // rows of weight a block brings for both
      const int row = (x_tile * kClusterSize + rank) * kHalfRows;
      const int weight_row = weight_tile * kHalfColumns + rank * kShare;
      for (int step = 0; step < steps; ++step, ring.advance()) {
        const uint32_t arrived = full + 8 * ring.stage;
        ptx::mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(arrived, (kHalfRows + kHalfColumns) * kRowBytes);
        ptx::copy_tensor(x + ring.stage * kHalfRows * kRowBytes, &x_map, step * kHalfK, row,
                         arrived);
        ptx::copy_tensor_multicast(weight + (ring.stage * kHalfColumns + rank * kShare) * kRowBytes,
                                   &weight_map, step * kHalfK, weight_row, arrived,
                                   (1 << kClusterSize) - 1);
      }
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const uint32_t own_x = x + warpgroup * 64 * kRowBytes;
    float d[kHalfColumns / 2];
    for (int tile = first; tile < p.tiles.count(); tile += clusters) {
      int x_tile, weight_tile;
      p.tiles.find(tile, &x_tile, &weight_tile);
      float own_bias[kHalfColumns / 128];  // on its way while the products are made
#pragma unroll
      for (int i = 0; i < kHalfColumns / 128; ++i) {
        const int at = weight_tile * kHalfColumns + i * 128 + thread;
        own_bias[i] = p.bias != nullptr && at < p.n ? static_cast<float>(p.bias[at]) : 0.0f;
      }
      for (int step = 0; step < steps; ++step, ring.advance()) {
        ptx::mbarrier_wait(full + 8 * ring.stage, ring.parity);
        const uint64_t a =
            ptx::matrix_descriptor<kRowBytes>(own_x + ring.stage * kHalfRows * kRowBytes);
        const uint64_t b =
            ptx::matrix_descriptor<kRowBytes>(weight + ring.stage * kHalfColumns * kRowBytes);
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < kHalfK / 16; ++s) {
          ptx::wgmma(T{}, d, a + s * ptx::kDescriptorK16, b + s * ptx::kDescriptorK16,
                     step > 0 || s > 0);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (step > 0) release(empty + 8 * ring.previous());
      }

      ptx::barrier_sync(1 + warpgroup, 128);  // all have read the bias of the tile before
#pragma unroll
      for (int i = 0; i < kHalfColumns / 128; ++i) {
        shared.bias[warpgroup][i * 128 + thread] =
            p.is_direct ? own_bias[i] * p.divisor.scale : own_bias[i];
      }
      ptx::barrier_sync(1 + warpgroup, 128);
      ptx::wgmma_wait_group<0>();
      release(empty + 8 * ring.previous());

      const int warp_row =
          (x_tile * kClusterSize + rank) * kHalfRows + warpgroup * 64 + thread / 32 * 16;
      if (p.is_direct) {
        store_tile(p, warp_row, weight_tile * kHalfColumns, d, shared.bias[warpgroup],
                   base + offsetof(HalfMemory, staging) + threadIdx.x / 32 * 2 * 16 * kRowBytes);
        continue;
      }
      const int row = warp_row + lane / 4;
      float4(&staging)[kHalfTurn][128] = shared.staging[warpgroup][0];
      constexpr int kTurns = kHalfColumns / 8 / kHalfTurn;
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn) {
        stage_turn<0, kTurns>(staging, d, turn);
        const int in_tile = turn * kHalfTurn * 8, column = weight_tile * kHalfColumns + in_tile;
        const float* const bias = &shared.bias[warpgroup][in_tile];
        if (p.divisor.is_exact) {
          store_turn<true>(p, row, column, staging, bias);
        } else {
          store_turn<false>(p, row, column, staging, bias);
        }
      }
    }
  }
  ptx::cluster_sync();  // a block that has left can't be copied to
#endif
}

}  // namespace sm90
}  // namespace kernels

#endif  // KERNELS_LINEAR_SM90_HALF_CUH_
