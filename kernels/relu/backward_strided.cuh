// relu_backward_strided_kernel, ReLU's backward for a gradient with arbitrary strides, such as the
// one that out.sum(dim=1) or torch.cat([out, y], dim=1) sends back. relu.cu launches it.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launchers.h"

namespace kernels::relu {

// The constants of relu_backward_strided_kernel.
struct StridedConfig {
  static constexpr int kThreads = 256;
  // Elements of a thread, kThreads apart, if the innermost dimension of grad_output has stride 1.
  // For any other stride one element is faster, and a thread has one (docs/EXPERIMENTS.md, "ReLU on
  // a GPU").
  static constexpr int kElements = 4;
};

// Returns where element i of the gradient is: its distance from grad_output, in elements. i counts
// in the order of grad_input's memory, where dimension 0 of the layout is the innermost. For
// example, with sizes (3, 5) and strides (5, 1), element 4 has the coordinates (4 % 3, 4 / 3) =
// (1, 1), and its distance is 1 * 5 + 1 * 1 = 6.
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

// Returns whether the gradient of element i passes.
__device__ inline bool gradient_passes(const uint8_t* mask, uint32_t i) {
  return (mask[i / 8] >> (i % 8)) & 1;
}

// Computes grad_input[i]. Reads the gradient only where it passes: a typical mask saves half of the
// scattered reads.
template <typename Bits>
__device__ void select_one(const Bits* grad_output, const GradientLayout& layout,
                           const uint8_t* mask, Bits* grad_input, uint32_t n, uint32_t i) {
  if (i >= n) return;
  grad_input[i] = gradient_passes(mask, i) ? grad_output[strided_offset(layout, i)] : Bits{0};
}

// Computes kElements elements of grad_input, kThreads apart, from `first` on. All are loaded before
// any is stored, so that the loads overlap. Past the end, the last element is loaded again, and
// nothing is stored.
template <typename Bits>
__device__ void select_several(const Bits* grad_output, const GradientLayout& layout,
                               const uint8_t* mask, Bits* grad_input, uint32_t n, uint32_t first) {
  constexpr int kElements = StridedConfig::kElements;
  Bits v[kElements];
  bool passes[kElements];
#pragma unroll
  for (int u = 0; u < kElements; ++u) {
    const uint32_t i = min(first + u * StridedConfig::kThreads, n - 1);
    v[u] = grad_output[strided_offset(layout, i)];
    passes[u] = gradient_passes(mask, i);
  }
#pragma unroll
  for (int u = 0; u < kElements; ++u) {
    const uint32_t i = first + u * StridedConfig::kThreads;
    if (i < n) grad_input[i] = passes[u] ? v[u] : Bits{0};
  }
}

// Computes the elements of a thread, 1 or kElements, as unsigned integers of their size.
template <typename Bits>
__device__ void select_elements(const void* grad_output, const GradientLayout& layout,
                                const uint8_t* mask, void* grad_input, uint32_t n,
                                int elements_of_thread, uint32_t first) {
  const auto source = static_cast<const Bits*>(grad_output);
  const auto target = static_cast<Bits*>(grad_input);
  if (elements_of_thread == 1) {
    select_one(source, layout, mask, target, n, first);
  } else {
    select_several(source, layout, mask, target, n, first);
  }
}

// Backward for a gradient with arbitrary strides, at any address. grad_input [n] is dense. Each
// thread handles `elements_of_thread` elements, 1 or kElements. An element has 2, 4 or 8 bytes. n
// is below 2^31, so that no index overflows.
__global__ void __launch_bounds__(StridedConfig::kThreads)
    relu_backward_strided_kernel(const void* grad_output,
                                 const __grid_constant__ GradientLayout layout, const uint8_t* mask,
                                 void* grad_input, uint32_t n, int elements_of_thread,
                                 int element_bytes) {
  const uint32_t first = blockIdx.x * (StridedConfig::kThreads * elements_of_thread) + threadIdx.x;
  if (element_bytes == 2) {
    select_elements<uint16_t>(grad_output, layout, mask, grad_input, n, elements_of_thread, first);
  } else if (element_bytes == 4) {
    select_elements<uint32_t>(grad_output, layout, mask, grad_input, n, elements_of_thread, first);
  } else {
    select_elements<uint64_t>(grad_output, layout, mask, grad_input, n, elements_of_thread, first);
  }
}

}  // namespace kernels::relu
