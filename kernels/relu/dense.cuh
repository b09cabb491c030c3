// ReLU of operands x, out [n] that lie in memory in one order and begin at multiples of 16 bytes:
// forward, with the mask of backward, and backward; the last two also at multiples of fewer bytes.

#pragma once

#include <cstring>
#include <type_traits>

#include "common/ptx/math.cuh"
#include "common/vectors.cuh"

namespace kernels::elementwise {

// The dense forward compares floats as what they are: one instruction for two half types, and with
// a mask half the code. All other kernels wait for memory longer, and go by bits.

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

constexpr int kBlock = 256;
// Elements of a block whose threads have a vector each.
template <typename T>
constexpr int kBlockElements = kBlock * Vector<T>::kSize;

// Loads of large tensors ask L2 to evict their lines last. Others have no policy, for it takes
// instructions to make.
template <bool kIsLarge, int kBytes = 16, typename T>
__device__ Vector<T, kBytes> load_dense(const T* address, uint64_t policy) {
  if constexpr (kIsLarge) {
    return load_vector(address, policy);
  } else {
    return load_vector<kBytes>(address);
  }
}

// body(u, elements before it) for a thread's vectors u. These elements are a constant, by which the
// kernel's loads and stores are off one address.
template <int kVectors, int kStep, typename Body>
__device__ void for_vectors(const Body& body) {
#pragma unroll
  for (int u = 0; u < kVectors; ++u) body(u, u * kStep);
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
  const Index first = static_cast<Index>(blockIdx.x) * (kStep * kVectors);
  const Index start = first + threadIdx.x * kSize;
  const auto load = [&](int before) {
    return load_dense<kIsLarge>(reinterpret_cast<const uint32_t*>(x + start + before), policy);
  };
  const auto store = [&](int before, Words v) {
    store_vector(reinterpret_cast<uint32_t*>(out + start + before), relu_of_words<T>(v));
  };
  Words v[kVectors];
  if (first + kStep * kVectors <= n) {
    for_vectors<kVectors, kStep>([&](int u, int before) { v[u] = load(before); });
    for_vectors<kVectors, kStep>([&](int u, int before) { store(before, v[u]); });
    return;
  }
  const Index whole = n - n % kSize, last = whole + threadIdx.x;
  T rest;
  for_vectors<kVectors, kStep>([&](int u, int before) {
    if (start + before < whole) v[u] = load(before);
  });
  if (last < n) rest = x[last];
  for_vectors<kVectors, kStep>([&](int u, int before) {
    if (start + before < whole) store(before, v[u]);
  });
  if (last < n) out[last] = relu_of(rest);
}

// Stores a thread's bits, those of elements i and following. Neighbouring threads have the rest of
// the byte. All threads of a warp get here, unless they have exited with all those neighbours.
template <int kSize, bool kHasPolicy = true>
__device__ void store_bits(uint8_t* mask, int64_t i, int64_t n, uint32_t bits, uint64_t policy) {
  constexpr int kThreadsPerByte = 8 / kSize;
  static_assert(kThreadsPerByte >= 1, "a thread has at most the bits of one byte");
  const int place = threadIdx.x % kThreadsPerByte;
  if constexpr (kSize == 1) {
    bits = __ballot_sync(0xffffffff, bits) >> threadIdx.x % 32;
  } else {
    bits <<= place * kSize;
#pragma unroll
    for (int lane = 1; lane < kThreadsPerByte; lane *= 2) {
      bits |= __shfl_xor_sync(0xffffffff, bits, lane);
    }
  }
  if (place != 0 || i >= n) return;
  if constexpr (kHasPolicy) {
    store_mask(mask + i / 8, bits, policy);
  } else {
    mask[i / 8] = static_cast<uint8_t>(bits);
  }
}

// relu_kernel with a mask, by vectors of kBytes, at multiples of which x and out begin. The
// elements after the mask's last whole byte have a thread of the last block each.
template <typename T, int kBytes, int kThreads, int kVectors, bool kIsLarge>
__global__ void __launch_bounds__(kThreads)
    relu_with_mask_kernel(const T* x, T* out, uint8_t* mask,
                          std::conditional_t<kIsLarge, int64_t, uint32_t> n) {
  using Index = decltype(n);
  constexpr int kSize = kBytes / sizeof(T), kStep = kThreads * kSize;
  const uint64_t policy = kIsLarge ? l2_policy(/*evict_last=*/true) : 0;
  const Index first = static_cast<Index>(blockIdx.x) * (kStep * kVectors);
  const Index start = first + threadIdx.x * kSize;
  const auto load = [&](int before) {
    return load_dense<kIsLarge, kBytes>(x + start + before, policy);
  };
  // The results of a vector, whose bits it stores, unless they are from `end` on. By whole warps.
  const auto relu = [&](int before, Vector<T, kBytes> v, Index end) {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      bits |= uint32_t{keeps_gradient(v.value[j])} << j;
      v.value[j] = relu_of(v.value[j]);
    }
    store_bits<kSize, kIsLarge>(mask, start + before, end, bits, policy);
    return v;
  };
  Vector<T, kBytes> v[kVectors] = {};
  if (first + kStep * kVectors <= n) {
    for_vectors<kVectors, kStep>([&](int u, int before) { v[u] = load(before); });
    for_vectors<kVectors, kStep>(
        [&](int u, int before) { store_vector(out + start + before, relu(before, v[u], n)); });
    return;
  }
  const Index whole = n - n % 8, last = whole + threadIdx.x;
  T rest{};
  for_vectors<kVectors, kStep>([&](int u, int before) {
    if (start + before < whole) v[u] = load(before);
  });
  if (last < n) rest = x[last];
  for_vectors<kVectors, kStep>([&](int u, int before) {
    const auto made = relu(before, v[u], whole);
    if (start + before < whole) store_vector(out + start + before, made);
  });
  if (last < n) out[last] = relu_of(rest);
  store_bits<1, kIsLarge>(mask, last, n, keeps_gradient(rest), policy);
}

// Its backward, by vectors of kBytes, at multiples of which both gradients begin.
template <typename Bits, int kBytes, int kThreads, int kVectors, bool kIsLarge>
__global__ void __launch_bounds__(kThreads)
    relu_backward_kernel(const Bits* grad_output, const uint8_t* mask, Bits* grad_input,
                         std::conditional_t<kIsLarge, int64_t, uint32_t> n) {
  using Index = decltype(n);
  constexpr int kSize = kBytes / sizeof(Bits), kStep = kThreads * kSize;
  const uint64_t policy = kIsLarge ? l2_policy(/*evict_last=*/true) : 0;
  const Index first = static_cast<Index>(blockIdx.x) * (kStep * kVectors);
  const Index start = first + threadIdx.x * kSize;
  const auto load = [&](int before) {
    return load_dense<kIsLarge, kBytes>(grad_output + start + before, policy);
  };
  const auto load_byte = [&](Index i) -> uint32_t {
    if constexpr (kIsLarge) return load_mask(mask + i / 8, policy);
    return mask[i / 8];
  };
  const auto store = [&](int before, Vector<Bits, kBytes> v, uint32_t byte) {
    const uint32_t bits = byte >> (start + before) % 8;
#pragma unroll
    for (int j = 0; j < kSize; ++j) v.value[j] = bits >> j & 1 ? v.value[j] : Bits{0};
    store_vector(grad_input + start + before, v);
  };
  Vector<Bits, kBytes> v[kVectors];
  uint32_t byte[kVectors];
  if (first + kStep * kVectors <= n) {
    // The gradient first: a use of the mask before it would keep that load waiting for this one.
    for_vectors<kVectors, kStep>([&](int u, int before) { v[u] = load(before); });
    for_vectors<kVectors, kStep>([&](int u, int before) { byte[u] = load_byte(start + before); });
    for_vectors<kVectors, kStep>([&](int u, int before) { store(before, v[u], byte[u]); });
    return;
  }
  const Index whole = n - n % kSize, last = whole + threadIdx.x;
  Bits rest;
  uint32_t rest_byte;
  for_vectors<kVectors, kStep>([&](int u, int before) {
    if (start + before < whole) v[u] = load(before), byte[u] = load_byte(start + before);
  });
  if (last < n) rest = grad_output[last], rest_byte = load_byte(last);
  for_vectors<kVectors, kStep>([&](int u, int before) {
    if (start + before < whole) store(before, v[u], byte[u]);
  });
  if (last < n) grad_input[last] = rest_byte >> last % 8 & 1 ? rest : Bits{0};
}

}  // namespace kernels::elementwise
