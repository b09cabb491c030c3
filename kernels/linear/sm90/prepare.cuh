// Before both kernels for float32 on Hopper: x [m, k] is split, and the weight [n, k], which they
// read only once, is sampled for the exponents of its rows.

#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "linear/sm90/split_lines.cuh"
#include "linear/split/pieces.cuh"

namespace kernels::sm90 {

// The count of a row, times 32, is an int.
constexpr int64_t kMostK = 1 << 24;

// The weight is read once, so its rows are scaled by a sample: eight pieces of 16 elements, evenly
// spread; or by all of a row where the sample is zero.
constexpr int kSampledPieces = 8;
// Pairs scale the sample's largest into [2^9, 2^10): they keep 22 bits of elements 2^23 times
// smaller, and other elements may be 64 times as large before they overflow fp16.
constexpr int kSampledPairs = 9;
// With these exponents the limits of fp16, 2^-14 and 2^16 above the scaled unit, are normal floats.
// Smaller rows of pairs lose up to 2^-163 of |x|.
constexpr int kLeastExponent = -111, kMostOfPairs = 127;
// A lone high scales the geometric mean of the pieces' largest into [2^2, 2^3): a row may have a
// few elements that are subnormal in fp16, and none that overflows.
constexpr int kSampledHigh = 2, kMostOfHigh = 126;
constexpr int kSampledRows = 4;  // of a warp, which reads them together

// The largest magnitude in a row, infinity where it has infinity or NaN: one warp.
__device__ inline float largest_of_row(const float* row, int64_t k) {
  uint32_t largest = 0;  // the bits of floats without sign are in the order of the floats
  const auto compare = [&](float v) { largest = max(largest, __float_as_uint(fabsf(v))); };
  int64_t i = threadIdx.x % 32 * 4;
#pragma unroll 8
  for (; i + 4 <= k; i += 32 * 4) {
    const float4 v = *reinterpret_cast<const float4*>(row + i);
    compare(v.x), compare(v.y), compare(v.z), compare(v.w);
  }
  for (; i < k; ++i) compare(row[i]);
  largest = split::reduce_warp(largest, [](uint32_t a, uint32_t b) { return max(a, b); });
  return __uint_as_float(min(largest, 0x7f800000u));
}

// The same of the first kSampledRows of some columns. NaN does not count: its row of the weight is
// made again with any exponent.
__device__ inline void find_largest_of_columns(float (&largest)[kSampledRows], const float* first,
                                               int64_t stride, int64_t columns, int64_t k) {
#pragma unroll
  for (float& of_column : largest) of_column = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x % 32; i < k; i += 32) {
#pragma unroll
    for (int j = 0; j < kSampledRows; ++j) {
      if (j < columns) largest[j] = fmaxf(largest[j], fabsf(first[i * stride + j]));
    }
  }
#pragma unroll
  for (float& of_column : largest) of_column = split::reduce_warp(of_column, fmaxf);
}

__device__ inline float largest_of(const float4& v) {
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// The exponents of a warp's rows of the weight, for pairs.
__device__ inline void scale_pairs(const split::Operand& weight, int64_t first, int64_t k,
                                   const float4 (&sample)[kSampledRows]) {
#pragma unroll
  for (int i = 0; i < kSampledRows; ++i) {
    float largest = split::reduce_warp(largest_of(sample[i]), fmaxf);
    if (first + i >= weight.rows) break;
    if (largest == 0) largest = largest_of_row(weight.from + (first + i) * weight.row_stride, k);
    const int needed = largest > 0 && largest < INFINITY ? kSampledPairs - ilogbf(largest) : 0;
    if (threadIdx.x % 32 == 0) {
      weight.exponent[first + i] = max(kLeastExponent, min(kMostOfPairs, needed));
      weight.state[first + i] = split::kCarried;
    }
  }
}

// The same for a lone high.
template <bool kTransposed>
__device__ void scale_high(const split::Operand& weight, int64_t first, int64_t k,
                           const float4 (&sample)[kSampledRows]) {
  constexpr int kLanes = 32 / kSampledPieces;  // of a piece
  const float* const from = weight.from;
  float of_columns[kSampledRows] = {-1};  // not read
#pragma unroll
  for (int i = 0; i < kSampledRows; ++i) {
    // A piece's exponent in the high half and 1, its number, in the low; then the sums of both.
    const auto exponent_of = [](float largest) {
      return largest > 0 ? __float_as_uint(largest) >> 23 << 16 | 1 : 0;
    };
    float largest = largest_of(sample[i]);
    for (int bit = 1; bit < kLanes; bit *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, bit));
    }
    uint32_t sum = exponent_of(largest);
    for (int bit = kLanes; bit < 32; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
    if (first + i >= weight.rows) break;
    if (sum == 0) {
      if constexpr (kTransposed) {
        if (of_columns[0] < 0) {
          find_largest_of_columns(of_columns, from + first, weight.row_stride, weight.rows - first,
                                  k);
        }
        sum = exponent_of(of_columns[i]);
      } else {
        sum = exponent_of(largest_of_row(from + (first + i) * weight.row_stride, k));
      }
    }
    const int mean = sum != 0 ? static_cast<int>((sum >> 16) / (sum & 0xffff)) - 127 : 0;
    if (threadIdx.x % 32 == 0) {
      weight.exponent[first + i] = min(kMostOfHigh, kSampledHigh - mean);
    }
  }
}

// Who splits x: a block each row, a warp each short row, or a cluster kLineRows of a transposed x.
enum class Splitter { kBlock, kWarp, kCluster };

// The first `sampling` blocks sample the weight, whose reads are the more scattered: kSampledRows
// rows a warp. The others split x. `zeros` are set to 0.
template <bool kIsPair, Splitter kSplitter, bool kWeightIsTransposed>
__global__ void __launch_bounds__(split::kThreads)
    prepare_kernel(const __grid_constant__ split::Operand x,
                   const __grid_constant__ split::Operand weight, int64_t k, int sampling,
                   const __grid_constant__ LineShares shares, unsigned* zeros, int64_t zeros_size) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  start_next_kernel();
  wait_for_previous_kernel();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < zeros_size;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    zeros[i] = 0;
  }
  const int x_block = static_cast<int>(blockIdx.x) - sampling;
  if (x_block >= 0) {
    if constexpr (kSplitter == Splitter::kBlock) {
      split::split_row<kIsPair>(x, x_block, k);
    } else if constexpr (kSplitter == Splitter::kWarp) {
      const int64_t row = (static_cast<int64_t>(x_block) * blockDim.x + threadIdx.x) / 32;
      if (row < x.rows) split::split_row<kIsPair, /*kByWarp=*/true>(x, row, k);
    } else {
      // Dynamic, so that it leaves room for the next kernel's where there is no such x.
      extern __shared__ __align__(1024) uint8_t dynamic_memory[];
      split_lines<kIsPair>(x, x_block / shares.cluster, static_cast<int>(k), shares,
                           *reinterpret_cast<LinesMemory*>(dynamic_memory));
    }
    return;
  }
  const int lane = threadIdx.x % 32;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int64_t first = warp * kSampledRows;
  const int64_t piece = lane / (32 / kSampledPieces);
  const int64_t at = piece * k / kSampledPieces / 4 * 4 + lane % (32 / kSampledPieces) * 4;
  float4 sample[kSampledRows] = {};
  if constexpr (kWeightIsTransposed) {
    float v[4][kSampledRows];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      load_floats(v[j], weight.from + (at + j) * weight.row_stride, first,
                  at + 4 <= k ? weight.rows : 0, /*is_aligned=*/true);
    }
#pragma unroll
    for (int i = 0; i < kSampledRows; ++i) {
      sample[i] = make_float4(v[0][i], v[1][i], v[2][i], v[3][i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSampledRows; ++i) {
      const float* const row = weight.from + (first + i) * weight.row_stride;
      if (first + i < weight.rows && at + 4 <= k) {
        sample[i] = *reinterpret_cast<const float4*>(row + at);
      }
    }
  }
  if constexpr (kIsPair) {
    scale_pairs(weight, first, k, sample);
  } else {
    scale_high<kWeightIsTransposed>(weight, first, k, sample);
  }
#endif
}

}  // namespace kernels::sm90
