// relu_kernel, ReLU's forward, which relu.cu launches.

#pragma once

#include <cstdint>
#include <cstring>

#include "common/reduce_warp.cuh"
#include "common/vectors.cuh"
#include "relu/config.cuh"

namespace kernels::relu {

// ---------------------------------------------------------------------------------------- the mask

// Combines the bits of the 8 / kSize threads that share a byte of the mask. A thread passes the
// bits of kSize neighbouring elements, bit j for the j-th of them. The first of these threads gets
// the byte, as the lowest byte of the returned word. (In a half type kSize is 8, and there is
// nothing to combine.) All threads of a warp must call the function.
template <int kSize>
__device__ uint32_t combine_bits(uint32_t bits) {
  if constexpr (kSize == 1) {
    // One ballot gives the bits of all 32 lanes, and each lane shifts its own bit to the lowest
    // place. Lanes 0, 8, 16 and 24 are the first of a byte.
    return __ballot_sync(0xffffffff, bits) >> (threadIdx.x % 32);
  } else {
    constexpr int kThreadsOfByte = 8 / kSize;
    static_assert(kThreadsOfByte >= 1, "a thread has at most the bits of one byte");
    const int first_bit = threadIdx.x % kThreadsOfByte * kSize;  // in the byte
    return or_over_lanes<kThreadsOfByte>(bits << first_bit);
  }
}

// -------------------------------------------------------------------------------------- the kernel

// The work of one thread of relu_kernel (ThreadElements explains `first`, kStride and `offset`).
template <typename Config, bool kMask, typename T>
struct ForwardOfThread {
  using Index = typename Config::Index;
  static constexpr int kSize = Vector<T>::kSize;
  static constexpr int kVectors = Config::kVectors;
  static constexpr int kStride = ThreadElements<Config, kSize>::kStride;

  const T* x;
  T* out;
  uint8_t* mask;
  Index n;
  Index first;
  uint64_t policy;

  // Stores the mask bits of kCount elements, bit j of `bits` for element i + j. All threads of a
  // warp must call this function, because they exchange bits; a thread whose elements do not exist
  // passes exists = false and stores nothing.
  template <int kCount>
  __device__ void store_bits(int64_t i, uint32_t bits, bool exists) const {
    bits = combine_bits<kCount>(bits);
    const bool is_first_of_byte = threadIdx.x % (8 / kCount) == 0;
    if (!is_first_of_byte || !exists) return;
    if constexpr (Config::kIsLarge) {
      store_mask(mask + i / 8, bits, policy);
    } else {
      mask[i / 8] = static_cast<uint8_t>(bits);
    }
  }

  // Loads the vector at x + first + offset as four 32-bit words. nvcc would take a vector of 16-bit
  // elements apart between the load and the use, which costs instructions.
  __device__ Vector<uint32_t> load_words(int offset) const {
    const auto* const words = reinterpret_cast<const uint32_t*>(x + first + offset);
    if constexpr (Config::kIsLarge) return load_vector(words, policy);
    return load_vector(words);
  }

  // Applies ReLU to the vector of x at first + offset. Stores the results and, if kMask, the mask
  // bits. If kMask, all threads of a warp must call it, and `exists` is as in store_bits.
  __device__ void finish_vector(const Vector<uint32_t>& words, int offset, bool exists) const {
    if (!kMask && !exists) return;
    Vector<T> v;
    memcpy(&v, &words, sizeof(v));
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      // mask_bit and relu_of compare numbers, not their bits: the GPU then compares two elements of
      // a half type in one instruction.
      const uint32_t bit = mask_bit(v.value[j]) ? 1 : 0;
      bits |= bit << j;
      v.value[j] = relu_of(v.value[j]);
    }
    if constexpr (kMask) store_bits<kSize>(first + offset, bits, exists);
    if (exists) store_vector(out + first + offset, v);
  }

  __device__ void compute_in_full_block() const {
    Vector<uint32_t> words[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) words[u] = load_words(u * kStride);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) finish_vector(words[u], u * kStride, /*exists=*/true);
  }

  // In the last block, the elements before vectors_end are handled as vectors. Each of the rest,
  // fewer than 8 elements, has a thread of its own. With a mask, vectors_end is a multiple of 8, so
  // that the rest shares no byte of the mask with a vector, and threads without elements take part
  // in the exchange of bits, with zeros.
  __device__ void compute_in_last_block() const {
    constexpr int kElementsTogether = kMask ? 8 : kSize;
    const Index vectors_end = n - n % kElementsTogether;
    const Index rest_index = vectors_end + threadIdx.x;
    Vector<uint32_t> words[kVectors];
    T rest_value;
    if constexpr (kMask) {
      memset(words, 0, sizeof(words));
      rest_value = T{};
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int offset = u * kStride;
      if (first + offset < vectors_end) words[u] = load_words(offset);
    }
    if (rest_index < n) rest_value = x[rest_index];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int offset = u * kStride;
      const bool exists = first + offset < vectors_end;
      finish_vector(words[u], offset, exists);
    }
    if (rest_index < n) out[rest_index] = relu_of(rest_value);
    if constexpr (kMask) {
      const uint32_t bit = mask_bit(rest_value) ? 1 : 0;
      store_bits<1>(rest_index, bit, rest_index < n);
    }
  }
};

// out[i] = x[i] < 0 ? 0 : x[i], for i < n. mask has (n + 7) / 8 bytes if kMask, else it is null.
template <typename T, typename Config, bool kMask>
__global__ void __launch_bounds__(Config::kThreads)
    relu_kernel(const T* x, T* out, uint8_t* mask, typename Config::Index n) {
  const ThreadElements<Config, Vector<T>::kSize> elements;
  // docs/DESIGN.md, "ReLU on a GPU", says why it is faster to evict x last.
  const uint64_t policy = Config::kIsLarge ? evict_last_policy() : 0;
  const ForwardOfThread<Config, kMask, T> work{x, out, mask, n, elements.first, policy};
  // The code for full blocks does not test which vectors exist. It is short and comes first: if the
  // kernel's code is no longer in L2, it is read from memory, and its first instructions arrive
  // earliest. That shows in the time of small tensors.
  if (elements.block_is_full(n)) {
    work.compute_in_full_block();
  } else {
    work.compute_in_last_block();
  }
}

}  // namespace kernels::relu
