// ReLU on CUDA: forward, forward that also packs the mask for backward, backward.
//
// Every byte is read once and written once, so the limit is device memory. One 16-byte access a
// thread and one-shot blocks reach what cudaMemcpy reaches; loops, more accesses a thread and bulk
// copies through shared memory all do worse on an H200.

#include <type_traits>

#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "launchers.h"
#include "relu/order.h"

namespace kernels {
namespace {

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
// Scalar accesses that a thread keeps in flight where 16-byte accesses are not possible.
constexpr int kUnroll = 4;
constexpr int kScalarBlock = 128;

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

// Dense operands that do not begin at a multiple of 16 bytes: a thread stores one aligned vector of
// the result, and shifts the operand's elements into place.

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

// Fewer elements than this, whose ends might overlap, go to the kernels of aligned operands, which
// make them one by one.
constexpr int64_t kLeastShifted = kBlock;

bool needs_shift(const void* from, const void* to, int64_t n) {
  return n >= kLeastShifted && !is_vector_aligned(from, to);
}

// order.relu of every element; of narrow elements a word at a time, which takes an int8 vector's
// thread 106 instructions instead of 167 (sm_90a).
template <typename Bits>
__device__ Vector<Bits> relu_of(const Order<Bits>& order, Vector<Bits> v) {
  if constexpr (sizeof(Bits) >= 4) {
#pragma unroll
    for (Bits& value : v.value) value = order.relu(value);
  } else {
    constexpr uint32_t kEach = sizeof(Bits) == 1 ? 0x01010101 : 0x00010001;
    const uint32_t offset = order.offset * kEach, limit = static_cast<Bits>(order.limit) * kEach;
    uint32_t words[4];
    memcpy(words, &v, sizeof(v));
#pragma unroll
    for (uint32_t& word : words) {
      word &= ~(sizeof(Bits) == 1 ? __vcmplts4(__vsub4(word, offset), limit)
                                  : __vcmplts2(__vsub2(word, offset), limit));
    }
    memcpy(&v, words, sizeof(v));
  }
  return v;
}

// x may be out; mask may be null. The mask's bytes begin at multiples of 8 elements, but the
// vectors do not: a thread packs the bits of the elements `lead` behind those of its vector. Where
// x is out, other threads may have stored some of these already, and a result has the bit of its
// operand.
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

// The same of elements of 4 or 8 bytes by scalar accesses, kUnroll a thread, a warp's side by side:
// 5% less time for 4 MiB on an H200, and 2% with a mask. Larger operands take up to 5% longer.
constexpr int64_t kScalarBytes = 64 << 20, kScalarBytesWithMask = 8 << 20;  // less than that

template <typename Bits, bool kMask>
__global__ void __launch_bounds__(kScalarBlock)
    relu_scalar_kernel(Order<Bits> order, const Bits* x, Bits* out, uint8_t* mask, uint32_t n) {
  const uint32_t start = blockIdx.x * (kScalarBlock * kUnroll) + threadIdx.x;
  Bits value[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t i = start + u * kScalarBlock;
    if (i < n) value[u] = x[i];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t i = start + u * kScalarBlock;
    if constexpr (kMask) {
      const bool keeps = i < n && order.keeps_gradient(value[u]);
      const uint32_t bits = __ballot_sync(0xffffffff, keeps) >> threadIdx.x % 32;
      if (i % 8 == 0 && i < n) mask[i / 8] = static_cast<uint8_t>(bits);
    }
    if (i < n) out[i] = order.relu(value[u]);
  }
}

template <typename Bits>
__global__ void __launch_bounds__(kScalarBlock)
    relu_backward_scalar_kernel(const Bits* grad_output, const uint8_t* mask, Bits* grad_input,
                                uint32_t n) {
  const uint32_t start = blockIdx.x * (kScalarBlock * kUnroll) + threadIdx.x;
  Bits value[kUnroll];
  uint8_t byte[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t i = start + u * kScalarBlock;
    if (i < n) value[u] = grad_output[i], byte[u] = mask[i / 8];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t i = start + u * kScalarBlock;
    if (i < n) grad_input[i] = byte[u] >> (i % 8) & 1 ? value[u] : Bits{0};
  }
}

// load(j, offsets in the operands) for the elements `first` + j of a strided result, which are a
// thread's vector of it: loads alone, so that none waits for another. One place serves as many as
// follow along dimension 0: 1.1 to 4.9 times as fast on an H200 as a division for each.
template <typename T, int kOperands, typename Load>
__device__ void for_vector(uint32_t first, uint32_t n, const Walk& walk, const Load& load) {
  constexpr int kSize = Vector<T>::kSize;
  Place<kOperands> place(first, walk);
  if (place.left[0] >= kSize) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      int64_t offset[kOperands];
#pragma unroll
      for (int k = 0; k < kOperands; ++k) offset[k] = place.offset[k] + j * walk.stride[k][0];
      load(j, offset);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (first + j >= n) break;
      load(j, place.offset);
      place.advance(first + j + 1, walk);
    }
  }
}

// The vector, or as many as there are of it. A part of a layout may begin anywhere in the result.
template <typename T>
__device__ void store_vector(T* to, const Vector<T>& v, uint32_t count) {
  const bool aligned = reinterpret_cast<uintptr_t>(to) % sizeof(v) == 0;
  if (aligned && count >= Vector<T>::kSize) return store_vector(to, v);
#pragma unroll
  for (int j = 0; j < Vector<T>::kSize; ++j) {
    if (j < count) to[j] = v.value[j];
  }
}

template <typename Bits, bool kMask>
__global__ void __launch_bounds__(kBlock)
    relu_strided_kernel(Order<Bits> order, const Bits* x, Bits* out, uint8_t* mask, uint32_t n,
                        const __grid_constant__ Walk walk) {
  constexpr int kSize = Vector<Bits>::kSize;
  const int64_t i = first_element<Bits>();
  if (!kMask && i >= n) return;
  Vector<Bits> v;
  if (i < n) {
    for_vector<Bits, 1>(i, n, walk,
                        [&](int j, const int64_t (&offset)[1]) { v.value[j] = x[offset[0]]; });
  }
  if constexpr (kMask) {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      bits |= uint32_t{i + j < n && order.keeps_gradient(v.value[j])} << j;
    }
    store_bits<kSize>(mask, i, n, bits, l2_policy(false));
  }
  if (i < n) store_vector(out + i, relu_of(order, v), n - i);
}

// The same in place, where there are no vectors to write: neighbours in neighbouring threads.
template <typename Bits>
__global__ void __launch_bounds__(kScalarBlock)
    relu_elements_kernel(Order<Bits> order, Bits* x, uint32_t n,
                         const __grid_constant__ Walk walk) {
  const uint32_t start = blockIdx.x * (kScalarBlock * kUnroll) + threadIdx.x;
  int64_t offset[kUnroll];
  Bits value[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t i = start + u * kScalarBlock;
    if (i >= n) break;
    offset[u] = Place<1>(i, walk).offset[0];
    value[u] = x[offset[u]];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (start + u * kScalarBlock < n) x[offset[u]] = order.relu(value[u]);
  }
}

// Where an operand is transposed, a block makes a tile of kTileRows rows of vectors, and
// neighbouring threads read neighbours along dimension 1.
constexpr uint32_t kTileRows = 8, kTileVectors = kBlock / kTileRows;

// The element that a thread starts at; row_vectors: of a row, along dimension 0, or 0 for no tiles.
template <typename T>
__device__ int64_t first_element_of_tile(uint32_t row_vectors) {
  if (row_vectors == 0) return first_element<T>();
  const uint32_t tiles = row_vectors / kTileVectors;  // side by side
  const uint32_t row = blockIdx.x / tiles * kTileRows + threadIdx.x % kTileRows;
  const uint32_t vector = blockIdx.x % tiles * kTileVectors + threadIdx.x / kTileRows;
  return (int64_t{row} * row_vectors + vector) * Vector<T>::kSize;
}

template <typename T>
uint32_t row_vectors_of_tiles(const Layout& layout) {
  const auto is_transposed = [&](const int64_t* stride) { return stride[0] > 1 && stride[1] == 1; };
  const int64_t row_vectors = layout.size[0] / Vector<T>::kSize;
  const bool fits = layout.ndim > 1 && layout.size[0] % (kTileVectors * Vector<T>::kSize) == 0 &&
                    layout.size[1] % kTileRows == 0;
  if (!fits || !(is_transposed(layout.stride[0]) || is_transposed(layout.stride[1]))) return 0;
  return static_cast<uint32_t>(row_vectors);
}

template <typename Bits>
__global__ void __launch_bounds__(kBlock)
    relu_backward_strided_kernel(const Bits* grad_output, const uint8_t* mask, int64_t first_bit,
                                 Bits* grad_input, uint32_t n, uint32_t row_vectors,
                                 const __grid_constant__ Walk walk) {
  const int64_t i = first_element_of_tile<Bits>(row_vectors);
  if (i >= n) return;
  constexpr int kSize = Vector<Bits>::kSize;
  Vector<Bits> v;
  uint8_t byte[kSize], place[kSize];  // of the mask, and of the bit in it
  for_vector<Bits, 2>(i, n, walk, [&](int j, const int64_t (&offset)[2]) {
    const int64_t bit = first_bit + offset[1];
    v.value[j] = grad_output[offset[0]], byte[j] = mask[bit / 8], place[j] = bit % 8;
  });
#pragma unroll
  for (int j = 0; j < kSize; ++j) v.value[j] = byte[j] >> place[j] & 1 ? v.value[j] : Bits{0};
  store_vector(grad_input + i, v, n - i);
}

// Below this size two vectors a thread in smaller blocks do better, 7.7 instead of 8.1 us for 8 MiB
// on an H200: half as many blocks, and less of a last wave. Above, one is enough, and 1% better.
constexpr int64_t kTwoVectorsBytes = 32 << 20;

// From this size on, loads ask L2 to evict their lines last, so that the lines to be written go to
// memory in longer runs. Below, the data fits in L2 and there is nothing to gain.
constexpr int64_t kEvictLastBytes = 64 << 20;

template <typename T>
bool evicts_last(int64_t n) {
  return n * static_cast<int64_t>(sizeof(T)) >= kEvictLastBytes;
}

// `size` elements of a strided result from `first` on, and where they begin in both operands.
struct Part {
  Layout layout;
  int64_t size;
  int64_t first = 0;
  int64_t offset[2] = {0, 0};
};

// launch_part(part) for the whole, or part by part where that is too much for a walk.
template <typename LaunchPart>
int for_parts(const Part& whole, const LaunchPart& launch_part) {
  if (whole.size <= Walk::kMaxSize) return launch_part(whole);
  // Halves of the outermost dimension, or of the next where that is 1 by now.
  int d = whole.layout.ndim - 1;
  while (whole.layout.size[d] == 1) --d;
  const int64_t size = whole.layout.size[d], half = size / 2;
  Part part = whole;
  part.layout.ndim = d + 1;
  part.layout.size[d] = half;
  part.size = whole.size / size * half;
  const int status = for_parts(part, launch_part);
  if (status != cudaSuccess) return status;
  part.first += part.size;
  for (int k = 0; k < 2; ++k) part.offset[k] += half * part.layout.stride[k][d];
  part.layout.size[d] = size - half;
  part.size = whole.size - part.size;
  return for_parts(part, launch_part);
}

// for_floating, for every dtype.
template <typename Body>
int for_any(DType dtype, const Body& body) {
  if (dtype == DType::kInt8) return body(int8_t{});
  if (dtype == DType::kInt16) return body(int16_t{});
  if (dtype == DType::kInt32) return body(int32_t{});
  if (dtype == DType::kInt64) return body(int64_t{});
  if (dtype == DType::kUInt8) return body(uint8_t{});
  return for_floating(dtype, body);
}

// x may be out, and mask null.
int relu_shifted(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n,
                 CUstream_st* stream) {
  return for_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    const AlignedVectors<Bits> vectors(out, n);
    const auto run = [&](auto with_mask) {
      if constexpr (sizeof(Bits) >= 4) {
        const bool is_small = n * sizeof(Bits) < (with_mask ? kScalarBytesWithMask : kScalarBytes);
        if (is_small && x != out) {
          return launch<relu_scalar_kernel<Bits, with_mask>>(
              blocks_of(n, kScalarBlock * kUnroll), kScalarBlock, stream, order,
              static_cast<const Bits*>(x), static_cast<Bits*>(out), mask, static_cast<uint32_t>(n));
        }
      }
      return launch<relu_shifted_kernel<Bits, with_mask>>(
          vectors.blocks(), kBlock, stream, order, static_cast<const Bits*>(x),
          static_cast<Bits*>(out), mask, vectors, evicts_last<Bits>(n));
    };
    if constexpr (sizeof(Bits) > 1) {  // integers of 8 bits have no mask
      if (mask != nullptr) return run(std::true_type{});
    }
    return run(std::false_type{});
  });
}

}  // namespace

namespace cuda {

int relu(DType dtype, const void* x, void* out, int64_t n, CUstream_st* stream) {
  if (needs_shift(x, out, n)) return relu_shifted(dtype, x, out, nullptr, n, stream);
  return for_any(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    const bool aligned = is_vector_aligned(x, out);
    const int blocks = blocks_of(n, kBlockElements<T>);
    if (n * static_cast<int64_t>(sizeof(T)) < kTwoVectorsBytes) {
      return launch<relu_kernel<T, kBlock / 2, 2>>(blocks, kBlock / 2, stream, from, to, n, aligned,
                                                   false);
    }
    return launch<relu_kernel<T, kBlock, 1>>(blocks, kBlock, stream, from, to, n, aligned,
                                             evicts_last<T>(n));
  });
}

int relu_strided(DType dtype, const void* x, void* out, int64_t n, const Layout& layout,
                 CUstream_st* stream) {
  uint8_t* const mask = nullptr;
  return for_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    return for_parts({layout, n}, [&](const Part& part) {
      const uint32_t size = static_cast<uint32_t>(part.size);
      if (x == out) {
        return launch<relu_elements_kernel<Bits>>(
            blocks_of(size, kUnroll * kScalarBlock), kScalarBlock, stream, order,
            static_cast<Bits*>(out) + part.offset[0], size, Walk(part.layout));
      }
      return launch<relu_strided_kernel<Bits, false>>(
          blocks_of(size, kBlockElements<Bits>), kBlock, stream, order,
          static_cast<const Bits*>(x) + part.offset[0], static_cast<Bits*>(out) + part.first, mask,
          size, Walk(part.layout));
    });
  });
}

int relu_with_mask(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n,
                   CUstream_st* stream) {
  if (needs_shift(x, out, n)) return relu_shifted(dtype, x, out, mask, n, stream);
  return for_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    return launch<relu_with_mask_kernel<T>>(blocks_of(n, kBlockElements<T>), kBlock, stream,
                                            static_cast<const T*>(x), static_cast<T*>(out), mask, n,
                                            is_vector_aligned(x, out), evicts_last<T>(n));
  });
}

int relu_with_mask_strided(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n,
                           const Layout& layout, CUstream_st* stream) {
  if (n > Walk::kMaxSize) {  // parts do not begin at bytes of the mask
    const int status = relu_strided(dtype, x, out, n, layout, stream);
    return status != cudaSuccess ? status : relu_with_mask(dtype, out, out, mask, n, stream);
  }
  return for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    return launch<relu_strided_kernel<Bits, true>>(
        blocks_of(n, kBlockElements<Bits>), kBlock, stream, order, static_cast<const Bits*>(x),
        static_cast<Bits*>(out), mask, static_cast<uint32_t>(n), Walk(layout));
  });
}

int relu_backward(DType dtype, const void* grad_output, const uint8_t* mask, void* grad_input,
                  int64_t n, CUstream_st* stream) {
  return for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    const Bits* from = static_cast<const Bits*>(grad_output);
    Bits* to = static_cast<Bits*>(grad_input);
    if (needs_shift(from, to, n)) {
      if (sizeof(Bits) >= 4 && n * sizeof(Bits) < kScalarBytesWithMask) {
        return launch<relu_backward_scalar_kernel<Bits>>(blocks_of(n, kScalarBlock * kUnroll),
                                                         kScalarBlock, stream, from, mask, to,
                                                         static_cast<uint32_t>(n));
      }
      const AlignedVectors<Bits> vectors(to, n);
      return launch<relu_backward_shifted_kernel<Bits>>(vectors.blocks(), kBlock, stream, from,
                                                        mask, to, vectors, evicts_last<Bits>(n));
    }
    return launch<relu_backward_kernel<Bits>>(blocks_of(n, kBlockElements<Bits>), kBlock, stream,
                                              from, mask, to, n, is_vector_aligned(from, to),
                                              evicts_last<Bits>(n));
  });
}

int relu_backward_strided(DType dtype, const void* grad_output, const uint8_t* mask,
                          void* grad_input, int64_t n, const Layout& layout, CUstream_st* stream) {
  return for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    return for_parts({layout, n}, [&](const Part& part) {
      return launch<relu_backward_strided_kernel<Bits>>(
          blocks_of(part.size, kBlockElements<Bits>), kBlock, stream,
          static_cast<const Bits*>(grad_output) + part.offset[0], mask, part.offset[1],
          static_cast<Bits*>(grad_input) + part.first, static_cast<uint32_t>(part.size),
          row_vectors_of_tiles<Bits>(part.layout), Walk(part.layout));
    });
  });
}

}  // namespace cuda
}  // namespace kernels
