// ReLU on CUDA: forward, forward that also packs the mask for backward, backward; of operands that
// are dense and aligned (dense.cuh), dense (misaligned.cuh), or neither (strided.cuh).
//
// Every byte is read once and written once, so the limit is device memory. One 16-byte access a
// thread and one-shot blocks reach what cudaMemcpy reaches; loops, more accesses a thread and bulk
// copies through shared memory all do worse on an H200.

#include <type_traits>

#include "common/launch.cuh"
#include "launchers.h"
#include "relu/dense.cuh"
#include "relu/misaligned.cuh"
#include "relu/order.h"
#include "relu/strided.cuh"

namespace kernels::elementwise {

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
      if constexpr (sizeof(Bits) < 4 && !with_mask) {
        const bool has_words =
            (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(out)) % 4 == 0;
        if (has_words && x != out && n * sizeof(Bits) < kWordBytes) {
          return launch<relu_words_kernel<Bits>>(
              blocks_of(n * sizeof(Bits), 4 * kScalarBlock * kUnroll), kScalarBlock, stream, order,
              static_cast<const Bits*>(x), static_cast<Bits*>(out), static_cast<uint32_t>(n));
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

}  // namespace kernels::elementwise

namespace kernels::cuda {

using namespace elementwise;

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

}  // namespace kernels::cuda
