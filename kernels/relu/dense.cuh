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

// Loads of large tensors ask L2 to evict their lines last. Others have no policy, for it takes
// instructions to make.
template <bool kIsLarge, typename T>
__device__ Vector<T> load_dense(const T* address, uint64_t policy) {
  if constexpr (kIsLarge) {
    return load_vector(address, policy);
  } else {
    return load_vector(address);
  }
}

// A thread handles kVectors vectors, kBlock vectors apart. In all blocks but the last, none is
// tested: the shorter code comes earlier from memory, as L2 may have lost it (4% of the time of
// 1 MiB). The elements after the last whole vector have a thread of the last block each.
template <typename T, int kVectors, bool kIsLarge>
__global__ void __launch_bounds__(kBlock)
    relu_kernel(const T* x, T* out, std::conditional_t<kIsLarge, int64_t, uint32_t> n) {
  using Index = decltype(n);
  constexpr int kSize = Vector<T>::kSize, kStep = kBlock * kSize;
  const uint64_t policy = kIsLarge ? l2_policy(/*evict_last=*/true) : 0;
  const auto load = [&](const T* address) {
    return load_dense<kIsLarge>(reinterpret_cast<const uint32_t*>(address), policy);
  };
  const Index first = static_cast<Index>(blockIdx.x) * (kStep * kVectors);
  const Index start = first + threadIdx.x * kSize;
  Words v[kVectors];
  if (first + kStep * kVectors <= n) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) v[u] = load(x + start + u * kStep);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      store_vector(reinterpret_cast<uint32_t*>(out + start + u * kStep), relu_of_words<T>(v[u]));
    }
    return;
  }
  const Index whole = n - n % kSize, last = whole + threadIdx.x;
  T rest;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    if (start + u * kStep < whole) v[u] = load(x + start + u * kStep);
  }
  if (last < n) rest = x[last];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    if (start + u * kStep < whole) {
      store_vector(reinterpret_cast<uint32_t*>(out + start + u * kStep), relu_of_words<T>(v[u]));
    }
  }
  if (last < n) out[last] = relu_of(rest);
}

// Stores a thread's bits, those of elements i and following. Neighbouring threads have the rest of
// the byte. All threads of a warp get here, unless they have exited with all those neighbours.
template <int kSize, bool kHasPolicy = true>
__device__ void store_bits(uint8_t* mask, int64_t i, int64_t n, uint32_t bits, uint64_t policy) {
  constexpr int kThreadsPerByte = 8 / kSize;
  static_assert(kThreadsPerByte >= 1, "a thread has at most the bits of one byte");
  const int place = threadIdx.x % kThreadsPerByte;
  bits <<= place * kSize;
#pragma unroll
  for (int lane = 1; lane < kThreadsPerByte; lane *= 2) {
    bits |= __shfl_xor_sync(0xffffffff, bits, lane);
  }
  if (place != 0 || i >= n) return;
  if constexpr (kHasPolicy) {
    store_mask(mask + i / 8, bits, policy);
  } else {
    mask[i / 8] = static_cast<uint8_t>(bits);
  }
}

// The same where a warp's threads have an element each, and the first of them a multiple of 32.
__device__ inline void store_ballot(uint8_t* mask, uint32_t i, uint32_t n, bool keeps) {
  const uint32_t bits = __ballot_sync(0xffffffff, i < n && keeps) >> threadIdx.x % 32;
  if (i % 8 == 0 && i < n) mask[i / 8] = static_cast<uint8_t>(bits);
}

// relu_kernel with a mask.
template <typename T, int kThreads, int kVectors, bool kIsLarge>
__global__ void __launch_bounds__(kThreads)
    relu_with_mask_kernel(const T* x, T* out, uint8_t* mask,
                          std::conditional_t<kIsLarge, int64_t, uint32_t> n) {
  using Index = decltype(n);
  constexpr int kSize = Vector<T>::kSize, kStep = kThreads * kSize;
  const uint64_t policy = kIsLarge ? l2_policy(/*evict_last=*/true) : 0;
  const Index first = static_cast<Index>(blockIdx.x) * (kStep * kVectors);
  const Index start = first + threadIdx.x * kSize;
  // The results of the vector of elements i and following, whose bits it stores. By whole warps.
  const auto relu = [&](Vector<T> v, Index i) {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      bits |= static_cast<uint32_t>(keeps_gradient(v.value[j])) << j;
      v.value[j] = relu_of(v.value[j]);
    }
    store_bits<kSize, kIsLarge>(mask, i, n, bits, policy);
    return v;
  };
  if (first + kStep * kVectors <= n) {
    Vector<T> v[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) v[u] = load_dense<kIsLarge>(x + start + u * kStep, policy);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      store_vector(out + start + u * kStep, relu(v[u], start + u * kStep));
    }
    return;
  }
#pragma unroll 1
  for (int u = 0; u < kVectors; ++u) {
    const Index i = start + u * kStep;
    const int64_t left = static_cast<int64_t>(n) - static_cast<int64_t>(i);
    const bool is_whole = left >= kSize;
    const Vector<T> made =
        relu(is_whole ? load_dense<kIsLarge>(x + i, policy) : load_elements(x + i, left), i);
    if (is_whole) {
      store_vector(out + i, made);
    } else {
      store_elements(out + i, made, left);
    }
  }
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
