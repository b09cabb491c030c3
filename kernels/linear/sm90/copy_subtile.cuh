// Copies of sums from registers to shared memory, for the epilogues of both Hopper GEMM kernels.

#pragma once

#include <cuda_runtime.h>

#include "linear/sm90/fragment.cuh"

namespace kernels::sm90 {

// Copies a thread's sums of one subtile from registers to shared memory. The sums, which are
// accumulators in gemm_one_product, are a fragment (fragment.cuh), with four sums of each row
// block. kRowBlocks row blocks are a subtile. Example with kRowBlocks = 2:
//
//   sums             0 1 2 3    4 5 6 7    8 9 10 11    12 13 14 15    ...
//   row block           0          1           2             3
//   subtile                  0                        1
//
// Row block j of the subtile goes to slot[j * kPitch]. `subtile` must be a constant for the
// compiler, because registers cannot be indexed at run time.
template <int kRowBlocks, int kPitch, int kSums>
__device__ void copy_subtile(float4* slot, const float (&sums)[kSums], int subtile) {
#pragma unroll
  for (int j = 0; j < kRowBlocks; ++j) {
    slot[j * kPitch] = row_block_of(sums, subtile * kRowBlocks + j);
  }
}

// Copies a subtile that is known only at run time, kFirst <= subtile < kEnd. The function halves
// the range until one subtile is left. So the caller need not unroll its loop over subtiles, which
// would be so long that its instructions arrive late from memory whenever L2 has evicted them.
template <int kFirst, int kEnd, int kRowBlocks, int kPitch, int kSums>
__device__ void copy_any_subtile(float4* slot, const float (&sums)[kSums], int subtile) {
  if constexpr (kEnd - kFirst > 1) {
    constexpr int kMiddle = (kFirst + kEnd) / 2;
    if (subtile < kMiddle) {
      copy_any_subtile<kFirst, kMiddle, kRowBlocks, kPitch>(slot, sums, subtile);
    } else {
      copy_any_subtile<kMiddle, kEnd, kRowBlocks, kPitch>(slot, sums, subtile);
    }
  } else {
    copy_subtile<kRowBlocks, kPitch>(slot, sums, kFirst);
  }
}

}  // namespace kernels::sm90
