// Operands of any strides on the device, as Layout of launchers.h describes them.

#ifndef KERNELS_COMMON_STRIDED_CUH_
#define KERNELS_COMMON_STRIDED_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "launchers.h"

namespace kernels {

// A Layout of at most kMaxSize elements, for kernels. Division is a loop of some 20 instructions,
// so it becomes a multiplication: floor(i / size) is the high half of i ceil(2^64 / size), for all
// i below 2^32 and sizes from 2 on (Lemire, Kaser, Kurz, Softw. Pract. Exp. 49(6), 2019).
struct DeviceLayout {
  static constexpr int64_t kMaxSize = int64_t{1} << 31;  // the last vector may end beyond it
  int ndim;
  uint32_t size[kMaxDims];
  uint64_t reciprocal[kMaxDims];
  int64_t stride[2][kMaxDims];

  explicit DeviceLayout(const Layout& layout) : ndim(layout.ndim) {
    for (int d = 0; d < ndim; ++d) {
      size[d] = static_cast<uint32_t>(layout.size[d]);
      reciprocal[d] = UINT64_MAX / size[d] + 1;
      for (int k = 0; k < 2; ++k) stride[k][d] = layout.stride[k][d];
    }
  }
};

// The offsets of element i in the operands, and the number of elements from it on that lie along
// dimension 0.
template <int kOperands>
struct Position {
  int64_t offset[kOperands] = {};
  uint32_t run = 0;

  __device__ Position(uint32_t i, const DeviceLayout& layout) {
#pragma unroll 1
    for (int d = 0; d < layout.ndim; ++d) {
      uint32_t coordinate = i;
      if (d < layout.ndim - 1) {
        const uint64_t high = layout.reciprocal[d] >> 32;
        const uint32_t low = static_cast<uint32_t>(layout.reciprocal[d]);
        i = static_cast<uint32_t>((i * high + __umulhi(i, low)) >> 32);
        coordinate -= i * layout.size[d];
      }
      if (d == 0) run = layout.size[0] - coordinate;
#pragma unroll
      for (int k = 0; k < kOperands; ++k) offset[k] += coordinate * layout.stride[k][d];
    }
  }

  // Moves to the next element, which is element i.
  __device__ void advance(uint32_t i, const DeviceLayout& layout) {
    if (--run == 0) {
      *this = Position(i, layout);
    } else {
#pragma unroll
      for (int k = 0; k < kOperands; ++k) offset[k] += layout.stride[k][0];
    }
  }
};

}  // namespace kernels

#endif  // KERNELS_COMMON_STRIDED_CUH_
