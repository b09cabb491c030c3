// ReLU of dense operands x, out [n] that do not begin at multiples of 16 bytes: by words of which
// they begin at multiples; or a thread stores one aligned vector of the result, and shifts the
// operand's elements into place.

#pragma once

#include <cstring>

#include "common/vectors.cuh"
#include "relu/dense.cuh"
#include "relu/order.h"

namespace kernels::elementwise {

// The vector at any address, out of the two aligned vectors that it overlaps. The second comes from
// L1, because the next thread loads it as its first. For an aligned address they are the same.
template <typename T>
__device__ Vector<T> load_shifted(const T* address, uint64_t policy) {
  const uintptr_t byte = reinterpret_cast<uintptr_t>(address);
  const auto low = load_vector(reinterpret_cast<const uint32_t*>(byte / 16 * 16), policy);
  const auto high = load_vector(reinterpret_cast<const uint32_t*>((byte + 15) / 16 * 16), policy);
  uint32_t word[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) word[i] = i < 4 ? low.value[i] : high.value[i - 4];
#pragma unroll
  for (int i = 0; i < 6; ++i) word[i] = byte & 8 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) word[i] = byte & 4 ? word[i + 1] : word[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = __funnelshift_r(word[i], word[i + 1], byte % 4 * 8);
  Vector<T> v;
  memcpy(&v, word, sizeof(v));
  return v;
}

// The aligned vectors of a result of n elements, and the threads that make them. The result begins
// `lead` elements behind the beginning of vector 0. The first block makes the vectors at both ends,
// an element a thread, because there an operand's aligned vectors may reach beyond the operand.
// Every other thread makes one vector.
template <typename T>
struct AlignedVectors {
  static constexpr int kSize = Vector<T>::kSize;
  // The vectors at each end: multiples of 4, because up to 4 vectors share a byte of the mask. At
  // least 3 of the head and 4 of the tail lie inside the result, and the other blocks' loads reach
  // no further than 2 vectors into either.
  static constexpr int kHead = 4, kTail = 8;
  static_assert((kHead + kTail) * kSize <= kBlock, "the first block has a thread an element");

  int lead;
  int64_t n, tail;  // the tail's first vector

  AlignedVectors(const void* out, int64_t n)
      : lead(static_cast<int>(reinterpret_cast<uintptr_t>(out) % 16 / sizeof(T))),
        n(n),
        tail((n + lead + 4 * kSize - 1) / (4 * kSize) * 4 - kTail) {}

  int blocks() const { return 1 + blocks_of(tail - kHead, kBlock); }

  // The vector of a thread in any block but the first; there is none from `tail` on.
  __device__ int64_t vector() const {
    return static_cast<int64_t>(blockIdx.x - 1) * kBlock + threadIdx.x + kHead;
  }

  // The element of a thread in the first block, counted from vector 0.
  __device__ int64_t element() const {
    const int i = threadIdx.x;
    return i < kHead * kSize ? i : (tail - kHead) * kSize + i;
  }
};

// Fewer elements than this have a thread each: the shorter code takes up to 5% less time. The ends
// of less than kBlock elements would overlap.
constexpr int64_t kLeastShifted = 1 << 16;
static_assert(kLeastShifted >= kBlock, "both ends are of different elements");

// order.relu of the narrow elements of a word.
template <typename Bits>
__device__ uint32_t relu_of_narrow(const Order<Bits>& order, uint32_t word) {
  constexpr uint32_t kEach = sizeof(Bits) == 1 ? 0x01010101 : 0x00010001;
  const uint32_t offset = order.offset * kEach, limit = static_cast<Bits>(order.limit) * kEach;
  return word & ~(sizeof(Bits) == 1 ? __vcmplts4(__vsub4(word, offset), limit)
                                    : __vcmplts2(__vsub2(word, offset), limit));
}

// order.relu of every element of a word or a vector; of narrow elements 32 bits at a time, which
// takes an int8 vector's thread 106 instructions instead of 167 (sm_90a).
template <typename Bits, typename Word>
__device__ Word relu_of(const Order<Bits>& order, Word word) {
  if constexpr (sizeof(Word) == sizeof(Bits)) {
    return order.relu(word);
  } else {
    using Part = std::conditional_t<sizeof(Bits) < 4, uint32_t, Bits>;
    Part parts[sizeof(Word) / sizeof(Part)];
    memcpy(parts, &word, sizeof(word));
#pragma unroll
    for (Part& part : parts) {
      if constexpr (sizeof(Bits) < 4) {
        part = relu_of_narrow(order, part);
      } else {
        part = order.relu(part);
      }
    }
    memcpy(&word, parts, sizeof(word));
    return word;
  }
}

// x may be out. The mask's bytes begin at multiples of 8 elements, but the vectors do not: a thread
// packs the bits of the elements `lead` behind those of its vector. Where x is out, other threads
// may have stored some of these already, and a result has the bit of its operand.
template <typename Bits, bool kMask>
__global__ void __launch_bounds__(kBlock)
    relu_shifted_kernel(Order<Bits> order, const Bits* x, Bits* out, uint8_t* mask,
                        AlignedVectors<Bits> vectors, bool evict_last) {
  constexpr int kSize = Vector<Bits>::kSize;
  const uint64_t policy = l2_policy(evict_last);
  if (blockIdx.x == 0) {
    const int64_t bit = vectors.element(), i = bit - vectors.lead;
    const bool keeps = kMask && bit < vectors.n && order.keeps_gradient(x[bit]);
    if (i >= 0 && i < vectors.n) out[i] = order.relu(x[i]);
    if constexpr (kMask) store_bits<1>(mask, bit, vectors.n, keeps, policy);
    return;
  }
  if (vectors.vector() >= vectors.tail) return;
  const int64_t bit = vectors.vector() * kSize, i = bit - vectors.lead;
  const Vector<Bits> v = load_shifted(x + i, policy);
  if constexpr (kMask) {
    const Vector<Bits> kept = vectors.lead == 0 ? v : load_shifted(x + bit, policy);
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kSize; ++j) bits |= uint32_t{order.keeps_gradient(kept.value[j])} << j;
    store_bits<kSize>(mask, bit, vectors.n, bits, policy);
  }
  store_vector(out + i, relu_of(order, v));
}

template <typename Bits>
__global__ void __launch_bounds__(kBlock)
    relu_backward_shifted_kernel(const Bits* grad_output, const uint8_t* mask, Bits* grad_input,
                                 AlignedVectors<Bits> vectors, bool evict_last) {
  constexpr int kSize = Vector<Bits>::kSize;
  if (blockIdx.x == 0) {
    const int64_t i = vectors.element() - vectors.lead;
    if (i < 0 || i >= vectors.n) return;
    const Bits gradient = grad_output[i];
    grad_input[i] = mask[i / 8] >> (i % 8) & 1 ? gradient : Bits{0};
    return;
  }
  if (vectors.vector() >= vectors.tail) return;
  const int64_t i = vectors.vector() * kSize - vectors.lead;
  const uint64_t policy = l2_policy(evict_last);
  Vector<Bits> v = load_shifted(grad_output + i, policy);
  // The bits lie in one byte, or in two.
  const uint32_t low = load_mask(mask + i / 8, policy);
  const uint32_t high = load_mask(mask + (i + kSize - 1) / 8, policy);
  const uint32_t bits = (high << 8 | low) >> (i % 8);
#pragma unroll
  for (int j = 0; j < kSize; ++j) v.value[j] = bits >> j & 1 ? v.value[j] : Bits{0};
  store_vector(grad_input + i, v);
}

// Scalar accesses that a thread keeps in flight where 16-byte accesses are not possible.
constexpr int kUnroll = 4;
constexpr int kScalarBlock = 128;

// So many words, kUnroll a thread, are a wave of an H200's threads. Up to twice as many are one
// wave with twice the words a thread, which takes up to 6% less time than two.
constexpr int64_t kWordsOfWave = 1 << 20;

// Fewer bytes than this go by words, where both operands begin at multiples of them, kUnroll a
// thread, a warp's side by side: 5% less time for 4 MiB on an H200 than shifted vectors. Larger
// operands take up to 5% longer. With a mask, words of 4 bytes do from 8 MiB on. In place, where
// shifted vectors are aligned ones, only words of 8 bytes take less time, up to a wave of them: 3%.
constexpr int64_t kWordBytes = 64 << 20, kShortWordBytesWithMask = 8 << 20;

// Returns what body makes of the size of the words that n elements go by, and how many a thread
// has; or of 0 where they go by shifted vectors.
template <typename Bits, typename Body>
int for_words(const void* from, const void* to, int64_t n, bool has_mask, const Body& body) {
  const int64_t bytes = n * static_cast<int64_t>(sizeof(Bits));
  const uintptr_t places = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
  constexpr std::integral_constant<int, kUnroll> each{};
  if (n < kLeastShifted) {
    return body(std::integral_constant<int, sizeof(Bits)>{}, std::integral_constant<int, 1>{});
  }
  const bool is_in_place = from == to;
  if (is_in_place ? bytes <= 8 * kWordsOfWave : bytes < kWordBytes) {
    if (places % 8 == 0) return body(std::integral_constant<int, 8>{}, each);
    if constexpr (sizeof(Bits) <= 4) {
      const bool is_short = !is_in_place && (!has_mask || bytes < kShortWordBytesWithMask);
      if (places % 4 == 0 && is_short) return body(std::integral_constant<int, 4>{}, each);
    }
  }
  return body(std::integral_constant<int, 0>{}, each);
}

// body(u, i) for the elements i of a thread, of which it has kCount.
template <int kCount = kUnroll, typename Body>
__device__ void for_scalars(uint32_t n, const Body& body) {
  const uint32_t start = blockIdx.x * (kScalarBlock * kCount) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if (start + u * kScalarBlock < n) body(u, start + u * kScalarBlock);
  }
}

// relu_kernel by words of kBytes, at multiples of which x and out begin.
template <typename Bits, int kBytes, int kWords>
__global__ void __launch_bounds__(kScalarBlock)
    relu_words_kernel(Order<Bits> order, const Bits* x, Bits* out, uint32_t n) {
  using Word = Access<kBytes>;
  constexpr uint32_t kSize = sizeof(Word) / sizeof(Bits);
  const uint32_t words = n / kSize, rest = n % kSize;
  const uint32_t first = blockIdx.x * (kScalarBlock * kWords), start = first + threadIdx.x;
  const auto from = reinterpret_cast<const Word*>(x);
  const auto to = reinterpret_cast<Word*>(out);
  Word word[kWords];
  if (first + kScalarBlock * kWords <= words) {
#pragma unroll
    for (int u = 0; u < kWords; ++u) word[u] = from[start + u * kScalarBlock];
#pragma unroll
    for (int u = 0; u < kWords; ++u) to[start + u * kScalarBlock] = relu_of(order, word[u]);
    return;
  }
  for_scalars<kWords>(words, [&](int u, uint32_t i) { word[u] = from[i]; });
  for_scalars<kWords>(words, [&](int u, uint32_t i) { to[i] = relu_of(order, word[u]); });
  if (threadIdx.x < rest) out[n - rest + threadIdx.x] = order.relu(x[n - rest + threadIdx.x]);
}

}  // namespace kernels::elementwise
