// ReLU of operands x, out [n] that lie in memory in one order: forward, with the mask of backward,
// and backward.

#pragma once

#include <type_traits>

#include "common/vectors.cuh"

namespace kernels::elementwise {

// The dense forward compares floats as what they are: one instruction for two half types. All other
// kernels wait for memory longer, and go by bits.

// x < 0 is false for NaN and for -0, which ReLU therefore keeps as they are.
template <typename T>
__device__ T relu_of(T x) {
  if constexpr (std::is_unsigned_v<T>) {
    return x;
  } else {
    const T zero{};
    return x < zero ? zero : x;
  }
}

// True for NaN: torch lets the gradient through there.
template <typename T>
__device__ bool keeps_gradient(T x) {
  return !(x <= T{});
}

constexpr int kBlock = 256;
// Elements of a block whose threads have a vector each.
template <typename T>
constexpr int kBlockElements = kBlock * Vector<T>::kSize;

// The element that a thread of a one-shot grid starts at.
template <typename T>
__device__ int64_t first_element() {
  return (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * Vector<T>::kSize;
}

// A block handles kVectors times its number of threads, each kVectors vectors that far apart.
template <typename T, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads)
    relu_kernel(const T* x, T* out, int64_t n, bool aligned, bool evict_last) {
  constexpr int kSize = Vector<T>::kSize;
  const uint64_t policy = l2_policy(evict_last);
  const int64_t start =
      (static_cast<int64_t>(blockIdx.x) * (kThreads * kVectors) + threadIdx.x) * kSize;
  constexpr int kStep = kThreads * kSize;
  if (aligned && start + (kVectors - 1) * kStep + kSize <= n) {
    Vector<T> v[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) v[u] = load_vector(x + start + u * kStep, policy);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (T& value : v[u].value) value = relu_of(value);
      store_vector(out + start + u * kStep, v[u]);
    }
  } else {
    for (int64_t i = start; i < n && i < start + kVectors * kStep; i += kStep) {
      for (int64_t j = i; j < min(i + kSize, n); ++j) out[j] = relu_of(x[j]);
    }
  }
}

// Stores a thread's bits, those of elements i and following. Neighbouring threads have the rest of
// the byte. All threads of a warp get here, unless they have exited with all those neighbours.
template <int kSize>
__device__ void store_bits(uint8_t* mask, int64_t i, int64_t n, uint32_t bits, uint64_t policy) {
  constexpr int kThreadsPerByte = 8 / kSize;
  static_assert(kThreadsPerByte >= 1, "a thread has at most the bits of one byte");
  const int place = threadIdx.x % kThreadsPerByte;
  bits <<= place * kSize;
#pragma unroll
  for (int lane = 1; lane < kThreadsPerByte; lane *= 2) {
    bits |= __shfl_xor_sync(0xffffffff, bits, lane);
  }
  if (place == 0 && i < n) store_mask(mask + i / 8, bits, policy);
}

template <typename T>
__global__ void __launch_bounds__(kBlock)
    relu_with_mask_kernel(const T* x, T* out, uint8_t* mask, int64_t n, bool aligned,
                          bool evict_last) {
  constexpr int kSize = Vector<T>::kSize;
  const int64_t i = first_element<T>();
  const int64_t end = min(i + kSize, n);
  const uint64_t policy = l2_policy(evict_last);
  uint32_t bits = 0;
  if (aligned && end - i == kSize) {
    Vector<T> v = load_vector(x + i, policy);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      bits |= static_cast<uint32_t>(keeps_gradient(v.value[j])) << j;
      v.value[j] = relu_of(v.value[j]);
    }
    store_vector(out + i, v);
  } else {
    for (int64_t j = i; j < end; ++j) {
      bits |= static_cast<uint32_t>(keeps_gradient(x[j])) << (j - i);
      out[j] = relu_of(x[j]);
    }
  }
  store_bits<kSize>(mask, i, n, bits, policy);
}

template <typename Bits>
__global__ void __launch_bounds__(kBlock)
    relu_backward_kernel(const Bits* grad_output, const uint8_t* mask, Bits* grad_input, int64_t n,
                         bool aligned, bool evict_last) {
  constexpr int kSize = Vector<Bits>::kSize;
  const int64_t i = first_element<Bits>();
  if (i >= n) return;
  const int64_t end = min(i + kSize, n);
  const uint64_t policy = l2_policy(evict_last);
  if (aligned && end - i == kSize) {
    // The gradient first: a use of the mask before it would keep this load waiting for that one.
    Vector<Bits> v = load_vector(grad_output + i, policy);
    const uint32_t bits = load_mask(mask + i / 8, policy) >> (i % 8);
#pragma unroll
    for (int j = 0; j < kSize; ++j) v.value[j] = bits >> j & 1 ? v.value[j] : Bits{0};
    store_vector(grad_input + i, v);
  } else {
    const uint32_t bits = mask[i / 8] >> (i % 8);
    for (int64_t j = i; j < end; ++j) {
      grad_input[j] = bits >> (j - i) & 1 ? grad_output[j] : Bits{0};
    }
  }
}

}  // namespace kernels::elementwise
