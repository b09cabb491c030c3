// Reductions over the lanes of a warp.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

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

// Combines the words of each group of kLanes neighbouring lanes by OR; each lane of the group gets
// the result. All lanes of a warp must call the function.
//
// Its callers make bytes of a mask. A byte has the bits of 8 elements, and each of kLanes lanes
// passes some of them, already shifted to their places in the byte. Example: each lane has 4
// elements, so kLanes is 2. With a letter for the bit of each element:
//
//   lane           0         1         2         3      ...
//   elements     0..3      4..7      8..11    12..15
//   bits        ....dcba  hgfe....  ....lkji  ponm....       lowest bit on the right
//   result      hgfedcba  hgfedcba  ponmlkji  ponmlkji
template <int kLanes>
__device__ __forceinline__ uint32_t or_over_lanes(uint32_t bits) {
  static_assert(32 % kLanes == 0, "a warp consists of whole groups");
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    bits |= __shfl_xor_sync(0xffffffff, bits, distance);
  }
  return bits;
}

}  // namespace kernels
