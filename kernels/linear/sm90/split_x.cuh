// Before both kernels for float32: splits x [m, k], and samples the weight [n, k] for exponents.

#pragma once

#include <cstdint>

#include "common/launch.cuh"
#include "linear/fp16x3/split.cuh"

namespace kernels::sm90 {

constexpr int64_t kMostK = 1 << 24;  // so that the count of a row, times 32, is an int

// The weight is to be read once, so its rows are scaled by eight samples of 16 elements, evenly
// spread; or by all of a row where the samples are zero.
constexpr int kSamples = 8, kSampleLanes = 32 / kSamples;
// Pairs scale the samples' largest into [2^9, 2^10): they keep 22 bits of elements 2^23 times
// smaller, and other elements may be 64 times as large before they overflow fp16.
constexpr int kSampledPairs = 9;
// With these exponents the limits of fp16, 2^-14 and 2^16 above the scaled unit, are normal floats.
constexpr int kLeastExponent = -111, kMostOfPairs = 127;
// A lone hi scales the geometric mean of the samples' largest into [2^2, 2^3): a row may have a
// few elements that are subnormal in fp16, and none that overflows.
constexpr int kSampledHi = 2, kMostOfHi = 126;
constexpr int kSampledRows = 4;  // of a warp, which reads them together

// The largest magnitude, infinity where there is infinity or NaN: one warp. It is rarely called,
// and inlined, it would make the kernel so large that fetching its code takes 6 us.
__device__ __noinline__ float largest_of_row(const float* row, int64_t k, int64_t stride) {
  uint32_t largest = 0;  // the bits of floats without sign are in the order of the floats
  const auto compare = [&](float v) { largest = max(largest, __float_as_uint(fabsf(v))); };
  const int64_t lane = threadIdx.x % 32, whole = stride == 1 ? k / 4 * 4 : 0;
#pragma unroll 8
  for (int64_t i = lane * 4; i < whole; i += 32 * 4) {
    const float4 v = *reinterpret_cast<const float4*>(row + i);
    compare(v.x), compare(v.y), compare(v.z), compare(v.w);
  }
#pragma unroll 8
  for (int64_t i = whole + lane; i < k; i += 32) compare(row[i * stride]);
  largest = fp16x3::reduce_warp(largest, [](uint32_t a, uint32_t b) { return max(a, b); });
  return __uint_as_float(min(largest, 0x7f800000u));
}

// A warp's samples of kSampledRows rows of the weight: four elements of each a lane.
struct Samples {
  const fp16x3::SplitMatrix& weight;
  bool is_transposed;
  int64_t first_row, k;
  float largest_of_lane[kSampledRows] = {};

  __device__ Samples(const fp16x3::SplitMatrix& weight, bool is_transposed, int64_t first_row,
                     int64_t k)
      : weight(weight), is_transposed(is_transposed), first_row(first_row), k(k) {
    const int lane = threadIdx.x % 32;
    const int64_t at = lane / kSampleLanes * k / kSamples / 4 * 4 + lane % kSampleLanes * 4;
    if (at + 4 > k) return;
    // In memory: lines, each with four neighbours.
    int64_t first_line = first_row, column = at, lines = weight.rows, columns = k;
    if (is_transposed) first_line = at, column = first_row, lines = k, columns = weight.rows;
    float v[4][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first_line + i >= lines) break;
      load_floats(v[i], weight.from + (first_line + i) * weight.row_stride, column, columns,
                  /*is_aligned=*/true);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& largest = largest_of_lane[i / 4];
      largest = fmaxf(largest, fabsf(is_transposed ? v[i % 4][i / 4] : v[i / 4][i % 4]));
    }
  }

  __device__ float largest_of_all(int i) const {
    const int64_t row = first_row + i, stride = weight.row_stride;
    return largest_of_row(weight.from + (is_transposed ? row : row * stride), k,
                          is_transposed ? stride : 1);
  }
};

// The exponent of a warp's row i of the weight.
__device__ inline int exponent_of_pairs(const Samples& samples, int i) {
  float largest = fp16x3::reduce_warp(samples.largest_of_lane[i], fmaxf);
  if (largest == 0) largest = samples.largest_of_all(i);
  const int needed = largest > 0 && largest < INFINITY ? kSampledPairs - ilogbf(largest) : 0;
  return max(kLeastExponent, min(kMostOfPairs, needed));
}

// The same for a lone hi.
__device__ inline int exponent_of_hi(const Samples& samples, int i) {
  // A sample's exponent in the high half and 1, its number, in the low; then the sums of both.
  const auto exponent_of = [](float largest) {
    return largest > 0 ? __float_as_uint(largest) >> 23 << 16 | 1 : 0;
  };
  float largest = samples.largest_of_lane[i];
  for (int bit = 1; bit < kSampleLanes; bit *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, bit));
  }
  uint32_t sum = exponent_of(largest);
  for (int bit = kSampleLanes; bit < 32; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
  if (sum == 0) sum = exponent_of(samples.largest_of_all(i));
  const int mean = sum != 0 ? static_cast<int>((sum >> 16) / (sum & 0xffff)) - 127 : 0;
  return min(kMostOfHi, kSampledHi - mean);
}

// The first `sampling` blocks sample the weight, the others split x.
__global__ void __launch_bounds__(fp16x3::SplitConfig::kThreads)
    split_x_kernel(const __grid_constant__ fp16x3::SplitMatrix x,
                   const __grid_constant__ fp16x3::SplitMatrix weight, bool weight_is_transposed,
                   int64_t k, int sampling, fp16x3::Splitter splitter, unsigned* zeros,
                   int64_t zeros_size) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  start_next_kernel();
  wait_for_previous_kernel();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < zeros_size;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    zeros[i] = 0;
  }
  const bool has_lo = x.lo != nullptr;
  const int x_block = static_cast<int>(blockIdx.x) - sampling;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (x_block >= 0) {
    const bool is_warp = splitter == fp16x3::Splitter::kWarp;
    const int64_t row = is_warp ? warp - sampling * (blockDim.x / 32) : x_block;
    if (row < x.rows) fp16x3::split_row(x, row, k, splitter, has_lo);
    return;
  }
  const Samples samples(weight, weight_is_transposed, warp * kSampledRows, k);
#pragma unroll
  for (int i = 0; i < kSampledRows; ++i) {
    const int64_t row = samples.first_row + i;
    if (row >= weight.rows) break;
    const int exponent = has_lo ? exponent_of_pairs(samples, i) : exponent_of_hi(samples, i);
    if (threadIdx.x % 32 != 0) continue;
    weight.exponent[row] = exponent;
    if (has_lo) weight.state[row] = fp16x3::kExact;
  }
#endif
}

}  // namespace kernels::sm90
