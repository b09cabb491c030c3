// ReLU on CUDA: forward, forward that also packs the mask for backward, and backward, as
// launchers.h describes them.
//
// Every byte is read once and written once, so the limit is device memory. For large tensors, one
// 16-byte access a thread and one-shot blocks reach what cudaMemcpy reaches; loops, more accesses a
// thread and bulk copies through shared memory all do worse on an H200.
//
//   x, out, grad_output, grad_input [n], aligned to 16 bytes; mask [(n + 7) / 8]

#include <cstring>
#include <type_traits>

#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "launchers.h"

namespace kernels::elementwise {

constexpr int kBlock = 256;

// Threads of a block, and vectors of a thread. Kernels for small tensors have a 32-bit index, and
// loads without a policy, which takes instructions to make.
template <int kBlockThreads, int kThreadVectors, bool kForLarge>
struct Shape {
  static constexpr int kThreads = kBlockThreads, kVectors = kThreadVectors;
  static constexpr bool kIsLarge = kForLarge;
  using Index = std::conditional_t<kIsLarge, int64_t, uint32_t>;
};

// Loads and then stores a thread's vectors u. They are a constant `before` elements after `start`,
// so that all accesses are off one address. Only the last block tests them: the shorter code comes
// earlier from memory, as L2 may have lost it (4% of the time of 1 MiB). There, elements after the
// last whole kVector have a thread each. All threads store, for they exchange bits.
template <typename S, int kSize, int kVector, typename Load, typename Store, typename LoadRest,
          typename StoreRest>
__device__ void for_elements(typename S::Index n, const Load& load, const Store& store,
                             const LoadRest& load_rest, const StoreRest& store_rest) {
  using Index = typename S::Index;
  constexpr int kVectors = S::kVectors, kStep = S::kThreads * kSize;
  const Index first = static_cast<Index>(blockIdx.x) * (kStep * kVectors);
  const Index start = first + threadIdx.x * kSize;
  if (first + kStep * kVectors <= n) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) load(u, start, u * kStep);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) store(u, start, u * kStep, true);
    return;
  }
  const Index whole = n - n % kVector, last = whole + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    if (start + u * kStep < whole) load(u, start, u * kStep);
  }
  if (last < n) load_rest(last);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) store(u, start, u * kStep, start + u * kStep < whole);
  store_rest(last, last < n);
}

// Stores a thread's kSize bits, of which the first is bit i of the mask. Neighbouring threads have
// the rest of the byte. By all threads of a warp.
template <typename S, int kSize>
__device__ void store_bits(uint8_t* mask, int64_t i, uint32_t bits, bool is_there,
                           uint64_t policy) {
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
  if (place != 0 || !is_there) return;
  if constexpr (S::kIsLarge) return store_mask(mask + i / 8, bits, policy);
  mask[i / 8] = static_cast<uint8_t>(bits);
}

// Stores the mask, too, if kMask; it is null otherwise.
template <typename T, typename S, bool kMask>
__global__ void __launch_bounds__(S::kThreads)
    relu_kernel(const T* x, T* out, uint8_t* mask, typename S::Index n) {
  constexpr int kSize = Vector<T>::kSize;
  const uint64_t policy = S::kIsLarge ? l2_policy(/*evict_last=*/true) : 0;
  // As vectors of narrow elements, they would be taken apart between load and store.
  Vector<uint32_t> words[S::kVectors];
  T rest;
  // Threads without elements exchange bits, too.
  if constexpr (kMask) memset(words, 0, sizeof(words)), rest = T{};
  for_elements<S, kSize, kMask ? 8 : kSize>(
      n,
      [&](int u, auto start, int before) {
        const auto* const from = reinterpret_cast<const uint32_t*>(x + start + before);
        words[u] = S::kIsLarge ? load_vector(from, policy) : load_vector(from);
      },
      [&](int u, auto start, int before, bool is_there) {
        if (!kMask && !is_there) return;
        Vector<T> v;
        memcpy(&v, &words[u], sizeof(v));
        uint32_t bits = 0;
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          // Floats are compared, not their bits: one instruction serves two half types.
          bits |= uint32_t{mask_bit(v.value[j])} << j;
          v.value[j] = relu_of(v.value[j]);
        }
        if constexpr (kMask) store_bits<S, kSize>(mask, start + before, bits, is_there, policy);
        if (is_there) store_vector(out + start + before, v);
      },
      [&](auto last) { rest = x[last]; },
      [&](auto last, bool is_there) {
        if (is_there) out[last] = relu_of(rest);
        if constexpr (kMask) store_bits<S, 1>(mask, last, mask_bit(rest), is_there, policy);
      });
}

// Selects by bits, so that one kernel serves all dtypes of a width. Where is_constant, grad_output
// is one element.
template <typename Bits, typename S>
__global__ void __launch_bounds__(S::kThreads)
    relu_backward_kernel(const Bits* grad_output, bool is_constant, const uint8_t* mask,
                         Bits* grad_input, typename S::Index n) {
  constexpr int kSize = Vector<Bits>::kSize;
  const uint64_t policy = S::kIsLarge ? l2_policy(/*evict_last=*/true) : 0;
  const auto load_byte = [&](auto i) {
    return S::kIsLarge ? load_mask(mask + i / 8, policy) : mask[i / 8];
  };
  Vector<Bits> v[S::kVectors];
  uint32_t byte[S::kVectors], rest_byte;
  Bits rest;
  for_elements<S, kSize, kSize>(
      n,
      [&](int u, auto start, int before) {
        if (is_constant) {
          for (Bits& value : v[u].value) value = *grad_output;
        } else {
          const Bits* const from = grad_output + start + before;
          v[u] = S::kIsLarge ? load_vector(from, policy) : load_vector(from);
        }
        byte[u] = load_byte(start + before);
      },
      [&](int u, auto start, int before, bool is_there) {
        if (!is_there) return;
        const uint32_t bits = byte[u] >> (start + before) % 8;
#pragma unroll
        for (int j = 0; j < kSize; ++j) v[u].value[j] = bits >> j & 1 ? v[u].value[j] : Bits{0};
        store_vector(grad_input + start + before, v[u]);
      },
      [&](auto last) { rest = grad_output[is_constant ? 0 : last], rest_byte = load_byte(last); },
      [&](auto last, bool is_there) {
        if (is_there) grad_input[last] = rest_byte >> last % 8 & 1 ? rest : Bits{0};
      });
}

// Of a gradient that lies anyhow: a thread has `each` elements of 2, 4 or 8 bytes, kBlock apart,
// one or kEach. A lone one is read only where it is kept: half of the scattered reads.
constexpr int kEach = 4;
__global__ void __launch_bounds__(kBlock)
    relu_backward_strided_kernel(const void* grad_output,
                                 const __grid_constant__ GradientLayout layout, const uint8_t* mask,
                                 void* grad_input, uint32_t n, int each, int bytes) {
  const uint32_t first = blockIdx.x * (kBlock * each) + threadIdx.x;
  const auto place_of = [&](uint32_t i) {
    int64_t place = 0;
#pragma unroll
    for (int d = 0; d < GradientLayout::kMost - 1; ++d) {
      if (d + 1 >= layout.dimensions) continue;
      const uint32_t size = static_cast<uint32_t>(layout.sizes[d]), outer = i / size;
      place += (i - outer * size) * layout.strides[d];
      i = outer;
    }
    return place + i * layout.strides[layout.dimensions - 1];
  };
  const auto is_kept = [&](uint32_t i) { return mask[i / 8] >> i % 8 & 1; };
  const auto select = [&](auto zero) {
    using Bits = decltype(zero);
    const auto from = static_cast<const Bits*>(grad_output);
    const auto to = static_cast<Bits*>(grad_input);
    if (each == 1) {
      if (first < n) to[first] = is_kept(first) ? from[place_of(first)] : zero;
      return;
    }
    Bits v[kEach];
    bool kept[kEach];
#pragma unroll
    for (int u = 0; u < kEach; ++u) {
      const uint32_t i = min(first + u * kBlock, n - 1);
      v[u] = from[place_of(i)], kept[u] = is_kept(i);
    }
#pragma unroll
    for (int u = 0; u < kEach; ++u) {
      const uint32_t i = first + u * kBlock;
      if (i < n) to[i] = kept[u] ? v[u] : zero;
    }
  };
  if (bytes == 2) return select(uint16_t{});
  if (bytes == 4) return select(uint32_t{});
  select(uint64_t{});
}

// From this size on, loads ask L2 to evict their lines last, so that the lines to be written go to
// memory in longer runs. Below, a loop over the same tensor finds more of it in L2 without: 45.1
// instead of 48.0 us for 64 MiB on an H100. With a mask the size is smaller.
constexpr int64_t kLargeBytes = 256 << 20, kLargeBytesWithMask = 64 << 20;
using Large = Shape<kBlock, 1, true>;
using Small = Shape<kBlock, 1, false>;
// Between these sizes four vectors a thread take 9.6 instead of 10.3 us for 12 MiB on an H200. One
// is the shorter code for fewer bytes, and 2% better for more.
constexpr int64_t kFourVectorsFrom = 512 << 10, kFourVectorsTo = 20 << 20;
using SmallByFour = Shape<kBlock, 4, false>;
// 7 to 9% less time for 8 MiB on an H200 than Small.
using SmallWithMask = Shape<128, 2, false>;

template <typename T, typename S>
int blocks_for(int64_t n) {
  return blocks_of(n, int64_t{S::kThreads} * S::kVectors * Vector<T>::kSize);
}

// body(shape) for n elements. float64, which few use, has the large kernels alone.
template <typename T, bool kMask, typename Body>
int for_shape(int64_t n, const Body& body) {
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  if constexpr (sizeof(T) < 8 && kMask) {
    if (bytes < kLargeBytesWithMask) return body(SmallWithMask{});
  } else if constexpr (sizeof(T) < 8) {
    if (bytes >= kFourVectorsFrom && bytes < kFourVectorsTo) return body(SmallByFour{});
    if (bytes < kLargeBytes) return body(Small{});
  }
  return body(Large{});
}

template <bool kMask>
int launch_relu(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n,
                CUstream_st* stream) {
  return for_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    return for_shape<T, kMask>(n, [&](auto shape) {
      using S = decltype(shape);
      return launch<relu_kernel<T, S, kMask>>(blocks_for<T, S>(n), S::kThreads, stream,
                                              static_cast<const T*>(x), static_cast<T*>(out), mask,
                                              static_cast<typename S::Index>(n));
    });
  });
}

}  // namespace kernels::elementwise

namespace kernels::cuda {

using namespace elementwise;

int relu(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n, CUstream_st* stream) {
  return (mask != nullptr ? launch_relu<true> : launch_relu<false>)(dtype, x, out, mask, n, stream);
}

int relu_backward(DType dtype, const void* grad_output, const GradientLayout& layout,
                  const uint8_t* mask, void* grad_input, int64_t n, CUstream_st* stream) {
  const bool is_constant = layout.is_constant();
  return for_floating(dtype, [&](auto zero) {
    constexpr int kBytes = sizeof(zero);
    if (!is_constant && !(layout.is_dense() && has_aligned_rows(grad_output))) {
      // One element a thread where neighbours lie apart: 0.75 of four's time (float16, H100).
      const int each = layout.strides[0] == 1 ? kEach : 1;
      return launch<relu_backward_strided_kernel>(blocks_of(n, kBlock * each), kBlock, stream,
                                                  grad_output, layout, mask, grad_input,
                                                  static_cast<uint32_t>(n), each, kBytes);
    }
    using Bits = std::conditional_t<kBytes == 8, uint64_t,
                                    std::conditional_t<kBytes == 4, uint32_t, uint16_t>>;
    return for_shape<Bits, true>(n, [&](auto shape) {
      using S = decltype(shape);
      return launch<relu_backward_kernel<Bits, S>>(
          blocks_for<Bits, S>(n), S::kThreads, stream, static_cast<const Bits*>(grad_output),
          is_constant, mask, static_cast<Bits*>(grad_input), static_cast<typename S::Index>(n));
    });
  });
}

}  // namespace kernels::cuda
