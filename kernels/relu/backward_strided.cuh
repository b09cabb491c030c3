// relu_backward_strided_kernel, ReLU's backward for a gradient with arbitrary strides, such as the
// one that out.sum(dim=1) or torch.cat([out, y], dim=1) sends back. relu.cu launches it.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launchers.h"

namespace kernels::relu {

struct StridedConfig {
  static constexpr int kThreads = 256;
  // Elements of a thread, kThreads apart, if grad_output has stride 1 in dimension 0 of its layout.
  // For any other stride, a thread has one, which is then faster (docs/EXPERIMENTS.md, "ReLU on a
  // GPU").
  static constexpr int kElements = 4;
};

// Returns where element i of the gradient is: its distance from grad_output, in elements. i counts
// in the order of grad_input's memory, where dimension 0 of the layout is the innermost. With sizes
// (3, 5) and strides (5, 1), for example, element 4 has the coordinates 4 % 3 = 1 and 4 / 3 = 1,
// and its distance is 1 * 5 + 1 * 1 = 6.
__device__ inline int64_t strided_offset(const GradientLayout& layout, uint32_t i) {
  int64_t offset = 0;
  // Divides by the sizes of all dimensions but the outermost. The number of steps is a constant, so
  // that the unrolled loop indexes the layout by constants; steps beyond the layout do nothing.
#pragma unroll
  for (int d = 0; d < GradientLayout::kMaxDimensions - 1; ++d) {
    if (d + 1 >= layout.dimensions) continue;
    const uint32_t size = static_cast<uint32_t>(layout.sizes[d]);
    const uint32_t outer = i / size;
    const uint32_t coordinate = i - outer * size;
    offset += coordinate * layout.strides[d];
    i = outer;
  }
  return offset + i * layout.strides[layout.dimensions - 1];
}

// The arrays of relu_backward_strided_kernel, of unsigned integers as in relu_backward_kernel.
template <typename Bits>
struct StridedBackward {
  const Bits* grad_output;
  const GradientLayout& layout;  // of grad_output
  const uint8_t* mask;
  Bits* grad_input;  // [n], dense
  uint32_t n;

  __device__ bool passes(uint32_t i) const { return (mask[i / 8] >> (i % 8)) & 1; }

  __device__ Bits load_gradient(uint32_t i) const { return grad_output[strided_offset(layout, i)]; }

  // Reads the gradient only where it passes: a typical mask saves half of the scattered reads.
  __device__ void select_one(uint32_t i) const {
    if (i >= n) return;
    grad_input[i] = passes(i) ? load_gradient(i) : Bits{0};
  }

  // Computes kElements elements, kThreads apart, from `first` on. All are loaded before any is
  // stored, so that the loads overlap. Past the end, the last element is loaded again, and nothing
  // is stored.
  __device__ void select_several(uint32_t first) const {
    constexpr int kElements = StridedConfig::kElements;
    Bits gradient[kElements];
    bool gradient_passes[kElements];
#pragma unroll
    for (int u = 0; u < kElements; ++u) {
      const uint32_t i = min(first + u * StridedConfig::kThreads, n - 1);
      gradient[u] = load_gradient(i);
      gradient_passes[u] = passes(i);
    }
#pragma unroll
    for (int u = 0; u < kElements; ++u) {
      const uint32_t i = first + u * StridedConfig::kThreads;
      if (i < n) grad_input[i] = gradient_passes[u] ? gradient[u] : Bits{0};
    }
  }

  __device__ void select_elements(uint32_t first, int elements_of_thread) const {
    if (elements_of_thread == 1) {
      select_one(first);
    } else {
      select_several(first);
    }
  }
};

// Backward for a gradient with arbitrary strides, at any address. grad_input [n] is dense. Each
// thread handles `elements_of_thread` elements, 1 or kElements. An element has 2, 4 or 8 bytes. n
// is below 2^31, so that no index overflows.
__global__ void __launch_bounds__(StridedConfig::kThreads)
    relu_backward_strided_kernel(const void* grad_output,
                                 const __grid_constant__ GradientLayout layout, const uint8_t* mask,
                                 void* grad_input, uint32_t n, int elements_of_thread,
                                 int element_bytes) {
  const uint32_t first = blockIdx.x * (StridedConfig::kThreads * elements_of_thread) + threadIdx.x;
  const auto select = [&](auto zero) {
    using Bits = decltype(zero);
    const StridedBackward<Bits> work{static_cast<const Bits*>(grad_output), layout, mask,
                                     static_cast<Bits*>(grad_input), n};
    work.select_elements(first, elements_of_thread);
  };
  if (element_bytes == 2) {
    select(uint16_t{});
  } else if (element_bytes == 4) {
    select(uint32_t{});
  } else {
    select(uint64_t{});
  }
}

}  // namespace kernels::relu
