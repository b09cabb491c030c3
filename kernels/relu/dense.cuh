// ReLU of operands x, out [n] that lie in memory in one order and begin at multiples of 16 bytes:
// forward, with the mask of backward, and backward.

#pragma once

#include <cstring>
#include <type_traits>

#include "common/ptx/math.cuh"
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

// A vector as it was loaded. As a vector of narrow elements, it would be taken apart where a
// condition comes between load and store.
using Words = Vector<uint32_t>;

template <typename T>
__device__ Words relu_of_words(Words words) {
  if constexpr (std::is_same_v<T, int8_t> || std::is_same_v<T, int16_t>) {
#pragma unroll
    for (uint32_t& word : words.value) word &= ~ptx::signs_of<T>(word);
  } else {
    Vector<T> v;
    memcpy(&v, &words, sizeof(v));
#pragma unroll
    for (T& value : v.value) value = relu_of(value);
    memcpy(&words, &v, sizeof(v));
  }
  return words;
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

// A thread handles kVectors vectors, kBlock vectors apart. Of the elements after the last whole
// vector, threads of the last block have one each, by the same code: that of a branch would come
// late from memory, as L2 may have lost it.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kBlock)
    relu_kernel(const T* x, T* out, int64_t n, bool evict_last) {
  constexpr int kSize = Vector<T>::kSize, kStep = kBlock * kSize;
  const uint64_t policy = l2_policy(evict_last);
  const int64_t start = static_cast<int64_t>(blockIdx.x) * (kStep * kVectors) + threadIdx.x * kSize;
  const int64_t whole = n - n % kSize, last = whole + threadIdx.x;
  const bool has_last = blockIdx.x == gridDim.x - 1 && last < n;
  Words v[kVectors];
  T rest;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const T* const from = x + start + u * kStep;
    if (start + u * kStep < whole) {
      v[u] = load_vector(reinterpret_cast<const uint32_t*>(from), policy);
    }
  }
  if (has_last) rest = x[last];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    T* const to = out + start + u * kStep;
    if (start + u * kStep < whole) {
      store_vector(reinterpret_cast<uint32_t*>(to), relu_of_words<T>(v[u]));
    }
  }
  if (has_last) out[last] = relu_of(rest);
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

// The same where a warp's threads have an element each, and the first of them a multiple of 32.
__device__ inline void store_ballot(uint8_t* mask, uint32_t i, uint32_t n, bool keeps) {
  const uint32_t bits = __ballot_sync(0xffffffff, i < n && keeps) >> threadIdx.x % 32;
  if (i % 8 == 0 && i < n) mask[i / 8] = static_cast<uint8_t>(bits);
}

template <typename T>
__global__ void __launch_bounds__(kBlock)
    relu_with_mask_kernel(const T* x, T* out, uint8_t* mask, int64_t n, bool evict_last) {
  constexpr int kSize = Vector<T>::kSize;
  const int64_t i = first_element<T>();
  const uint64_t policy = l2_policy(evict_last);
  uint32_t bits = 0;
  const auto relu = [&](Vector<T> v) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      bits |= static_cast<uint32_t>(keeps_gradient(v.value[j])) << j;
      v.value[j] = relu_of(v.value[j]);
    }
    return v;
  };
  if (i + kSize <= n) {
    store_vector(out + i, relu(load_vector(x + i, policy)));
  } else {
    store_elements(out + i, relu(load_elements(x + i, n - i)), n - i);
  }
  store_bits<kSize>(mask, i, n, bits, policy);
}

template <typename Bits>
__global__ void __launch_bounds__(kBlock)
    relu_backward_kernel(const Bits* grad_output, const uint8_t* mask, Bits* grad_input, int64_t n,
                         bool evict_last) {
  const int64_t i = first_element<Bits>();
  if (i >= n) return;
  const uint64_t policy = l2_policy(evict_last);
  const auto select = [&](Vector<Bits> v) {
    // After the gradient: a use of the mask before it would keep that load waiting for this one.
    const uint32_t bits = load_mask(mask + i / 8, policy) >> (i % 8);
#pragma unroll
    for (int j = 0; j < Vector<Bits>::kSize; ++j) {
      v.value[j] = bits >> j & 1 ? v.value[j] : Bits{0};
    }
    return v;
  };
  if (i + Vector<Bits>::kSize <= n) {
    store_vector(grad_input + i, select(load_vector(grad_output + i, policy)));
  } else {
    store_elements(grad_input + i, select(load_elements(grad_output + i, n - i)), n - i);
  }
}

}  // namespace kernels::elementwise
