// What both kernels for float32 begin with on Hopper: x is split, and the weight, whose rows they
// read only once, is sampled.

#ifndef KERNELS_LINEAR_SM90_PREPARE_CUH_
#define KERNELS_LINEAR_SM90_PREPARE_CUH_

#include <cuda_fp16.h>

#include <cstdint>

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
// elements, evenly spread. The largest is put below 2^8, which leaves the others a factor of 256
// before they pass fp16's range, and 14 bits below before they count as small.
constexpr int kSampledPieces = 8;
constexpr int kSampledExponent = 7;
// Where the limits of what is carried, 2^-14 and 2^16 above the scaled unit, are normal floats.
// What lies beyond them is flagged.
constexpr int kLeastExponent = -111, kMostExponent = 112;
constexpr int kSampledRows = 4;  // of a warp, whose reads are on their way together

// A warp some rows of the weight, whose reads are the more scattered; behind those, a block a row
// of x. `nonzeros` is what the counts of the weight begin with; `zeros` are set to 0.
__global__ void __launch_bounds__(split::kThreads)
    prepare_kernel(const __grid_constant__ split::Operand x,
                   const __grid_constant__ split::Operand weight, int64_t k, int nonzeros,
                   unsigned* zeros, int64_t zeros_size) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * split::kThreads + threadIdx.x; i < zeros_size;
       i += static_cast<int64_t>(gridDim.x) * split::kThreads) {
    zeros[i] = 0;
  }
  constexpr int kRows = split::kThreads / 32 * kSampledRows;
  const int64_t x_row = blockIdx.x - (weight.rows + kRows - 1) / kRows;
  if (x_row >= 0) {
    split::split_row(x, x_row, k);
    return;
  }
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / 32 * kSampledRows;
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
    const int needed = largest > 0 ? kSampledExponent - ilogbf(largest) : 0;
    const int exponent = max(kLeastExponent, min(kMostExponent, needed));
    const float scale = split::power_of_two(exponent);
    int inexact = 0;
    float sum = 0;
    for (const float element : {v.x, v.y, v.z, v.w}) {
      inexact += __popc(__ballot_sync(0xffffffff, split::has_low(element * scale)));
      sum += fabsf(element * scale);
    }
    for (int bit = 16; bit > 0; bit /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
    if (lane == 0 && first + i < weight.rows) {
      weight.exponent[first + i] = exponent;
      weight.counts[first + i] = {0, nonzeros};
      if (weight.sample != nullptr) weight.sample[first + i] = split::sample_of(128, inexact, sum);
    }
  }
}

}  // namespace sm90
}  // namespace kernels

#endif  // KERNELS_LINEAR_SM90_PREPARE_CUH_
