// relu_backward_kernel, ReLU's backward for a gradient that is dense and aligned, or constant.
// relu.cu launches it.

#pragma once

#include <cstdint>

#include "common/vectors.cuh"
#include "relu/config.cuh"

namespace kernels::relu {

// The work of one thread of relu_backward_kernel (ThreadElements explains `first`, kStride and
// `offset`).
template <typename Config, typename Bits>
struct BackwardOfThread {
  using Index = typename Config::Index;
  static constexpr int kSize = Vector<Bits>::kSize;
  static constexpr int kVectors = Config::kVectors;
  static constexpr int kStride = ThreadElements<Config, kSize>::kStride;

  const Bits* grad_output;
  bool is_constant;
  const uint8_t* mask;
  Bits* grad_input;
  Index n;
  Index first;
  uint64_t policy;

  __device__ uint32_t load_mask_byte(Index i) const {
    if constexpr (Config::kIsLarge) return load_mask(mask + i / 8, policy);
    return mask[i / 8];
  }

  // Loads v from grad_output + first + offset, or fills v with the single element of a constant
  // gradient.
  __device__ void load_gradient(Vector<Bits>& v, int offset) const {
    if (is_constant) {
      for (Bits& value : v.value) value = *grad_output;
    } else {
      const Bits* const source = grad_output + first + offset;
      v = Config::kIsLarge ? load_vector(source, policy) : load_vector(source);
    }
  }

  // Sets the elements of v whose mask bit is 0 to 0, and stores v at grad_input + first + offset.
  // `byte` is the byte of the mask with the bits of these elements and, if v has fewer than 8, of
  // neighbours.
  __device__ void store_masked(Vector<Bits>& v, int offset, uint32_t byte) const {
    const uint32_t bits = byte >> ((first + offset) % 8);  // bit j belongs to v.value[j]
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const bool passes = (bits >> j) & 1;
      v.value[j] = passes ? v.value[j] : Bits{0};
    }
    store_vector(grad_input + first + offset, v);
  }

  __device__ void select_in_full_block() const {
    Vector<Bits> v[kVectors];
    uint32_t byte[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int offset = u * kStride;
      load_gradient(v[u], offset);
      byte[u] = load_mask_byte(first + offset);
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) store_masked(v[u], u * kStride, byte[u]);
  }

  // In the last block, threads take whole vectors, and each of the elements that are left has a
  // thread of its own.
  __device__ void select_in_last_block() const {
    const Index vectors_end = n - n % kSize;
    const Index rest_index = vectors_end + threadIdx.x;
    Vector<Bits> v[kVectors];
    uint32_t byte[kVectors];
    Bits rest_value;
    uint32_t rest_byte;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int offset = u * kStride;
      if (first + offset < vectors_end) {
        load_gradient(v[u], offset);
        byte[u] = load_mask_byte(first + offset);
      }
    }
    if (rest_index < n) {
      rest_value = grad_output[is_constant ? 0 : rest_index];
      rest_byte = load_mask_byte(rest_index);
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int offset = u * kStride;
      if (first + offset < vectors_end) store_masked(v[u], offset, byte[u]);
    }
    if (rest_index < n) {
      const bool passes = (rest_byte >> (rest_index % 8)) & 1;
      grad_input[rest_index] = passes ? rest_value : Bits{0};
    }
  }
};

// grad_input[i] = mask bit i ? grad_output[i] : 0, for i < n. If is_constant, grad_output is one
// element, which is used for every i. The kernel selects elements and never computes with them. It
// therefore handles them as unsigned integers of their size, Bits, so that float16 and bfloat16
// share a kernel.
template <typename Bits, typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    relu_backward_kernel(const Bits* grad_output, bool is_constant, const uint8_t* mask,
                         Bits* grad_input, typename Config::Index n) {
  const ThreadElements<Config, Vector<Bits>::kSize> elements;
  const uint64_t policy = Config::kIsLarge ? evict_last_policy() : 0;
  const BackwardOfThread<Config, Bits> work{grad_output, is_constant,    mask,  grad_input,
                                            n,           elements.first, policy};
  if (elements.block_is_full(n)) {
    work.select_in_full_block();
  } else {
    work.select_in_last_block();
  }
}

}  // namespace kernels::relu
