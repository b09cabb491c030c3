// A reduction over the lanes of a warp.

#pragma once

#include <cuda_runtime.h>

namespace kernels {

// Combines the values of a warp's lanes by op; every lane gets the result.
template <typename T, typename Op>
__device__ T reduce_warp(T value, const Op& op) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffff, value, distance));
  }
  return value;
}

}  // namespace kernels
