// What both kernels for float32 begin with on Hopper: x is split, and the weight, whose rows they
// read only once, is sampled.

#ifndef KERNELS_LINEAR_SM90_PREPARE_CUH_
#define KERNELS_LINEAR_SM90_PREPARE_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "early_start.cuh"
#include "split.cuh"

namespace kernels {
namespace sm90 {

// The counts of a row are ints.
constexpr int64_t kMostK = 1 << 24;
// A row with an element that, scaled, rounds to infinity in fp16 has so many smalls that its
// nonzeros can't make up for them.
[[maybe_unused]] constexpr float kTooLarge = 65520;
[[maybe_unused]] constexpr int kOverflow = 1 << 30;

// The weight is read once, so its rows are scaled by what a sample of them says: eight pieces of 16
// elements, evenly spread; or by all of a row where the sample is zero. The largest is put into
// [2^9, 2^10), or [2^7, 2^8) for a lone high. Pairs keep 22 bits of elements 2^23 times smaller,
// and the others have a factor of 64 before they pass fp16's range.
constexpr int kSampledPieces = 8;
constexpr int kSampledPairs = 9, kSampledHigh = 7;
// Where the limits of what is carried, 2^-14 and 2^16 above the scaled unit, are normal floats.
// Smaller rows of a lone high are flagged; those of pairs lose up to 2^-163 of |x|.
constexpr int kLeastExponent = -111, kMostExponent = 112, kMostOfPairs = 127;
constexpr int kSampledRows = 4;  // of a warp, whose reads are on their way together

// The largest magnitude in a row, infinity where it has infinity or NaN: one warp.
__device__ inline float largest_of_row(const float* row, int64_t k) {
  uint32_t largest = 0;  // the bits of floats without sign are in the order of the floats
  for (int64_t i = threadIdx.x % 32; i < k; i += 32) {
    largest = max(largest, __float_as_uint(fabsf(row[i])));
  }
  largest = split::reduce_warp(largest, [](uint32_t a, uint32_t b) { return max(a, b); });
  return __uint_as_float(min(largest, 0x7f800000u));
}

// A warp some rows of the weight, whose reads are the more scattered; behind those, a block a row
// of x. `nonzeros` is what the counts of the weight begin with; `zeros` are set to 0.
__global__ void __launch_bounds__(split::kThreads)
    prepare_kernel(const __grid_constant__ split::Operand x,
                   const __grid_constant__ split::Operand weight, int64_t k, int nonzeros,
                   unsigned* zeros, int64_t zeros_size) {
  start_next_kernel();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < zeros_size;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    zeros[i] = 0;
  }
  const int rows = blockDim.x / 32 * kSampledRows;
  const int64_t x_row = blockIdx.x - (weight.rows + rows - 1) / rows;
  if (x_row >= 0) {
    split::split_row(x, x_row, k);
    return;
  }
  const bool is_pair = x.low != nullptr;
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * rows + threadIdx.x / 32 * kSampledRows;
  const int64_t piece = lane / (32 / kSampledPieces);
  const int64_t at = piece * k / kSampledPieces / 4 * 4 + lane % (32 / kSampledPieces) * 4;
  float4 sample[kSampledRows] = {};
#pragma unroll
  for (int i = 0; i < kSampledRows; ++i) {
    const float* const row = weight.from + (first + i) * weight.row_stride;
    if (first + i < weight.rows && at + 4 <= k) {
      sample[i] = *reinterpret_cast<const float4*>(row + at);
    }
  }
#pragma unroll
  for (int i = 0; i < kSampledRows; ++i) {
    const float4 v = sample[i];
    float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    for (int bit = 16; bit > 0; bit /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, bit));
    }
    if (first + i >= weight.rows) break;
    if (largest == 0) largest = largest_of_row(weight.from + (first + i) * weight.row_stride, k);
    const int top = is_pair ? kSampledPairs : kSampledHigh;
    const int needed = largest > 0 && largest < INFINITY ? top - ilogbf(largest) : 0;
    const int most = is_pair ? kMostOfPairs : kMostExponent;
    if (lane == 0) {
      weight.exponent[first + i] = max(kLeastExponent, min(most, needed));
      if (is_pair) {
        weight.state[first + i] = split::kCarried;
      } else {
        weight.counts[first + i] = {0, nonzeros};
      }
    }
  }
}

}  // namespace sm90
}  // namespace kernels

#endif  // KERNELS_LINEAR_SM90_PREPARE_CUH_
