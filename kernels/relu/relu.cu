// ReLU on CUDA: forward, forward that also packs the mask for backward, backward; of operands that
// are dense and aligned (dense.cuh), dense (misaligned.cuh), or neither (strided.cuh, across.cuh).
//
// Every byte is read once and written once, so the limit is device memory. For large tensors, one
// 16-byte access a thread and one-shot blocks reach what cudaMemcpy reaches; loops, more accesses a
// thread and bulk copies through shared memory all do worse on an H200.

#include <type_traits>

#include "common/launch.cuh"
#include "launchers.h"
#include "relu/across.cuh"
#include "relu/dense.cuh"
#include "relu/misaligned.cuh"
#include "relu/order.h"
#include "relu/strided.cuh"

namespace kernels::elementwise {

// Between these sizes a thread has four vectors: 9.6 instead of 10.3 us for 12 MiB on an H200. Of
// fewer bytes, one is the shorter code; of more, one is 1% better.
constexpr int64_t kFourVectorsFrom = 512 << 10, kFourVectorsTo = 32 << 20;

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
      if (by_scalars<Bits>(x, out, n, with_mask ? kScalarBytesWithMask : kScalarBytes)) {
        return launch<relu_scalar_kernel<Bits, with_mask>>(
            blocks_of(n, kScalarBlock * kUnroll), kScalarBlock, stream, order,
            static_cast<const Bits*>(x), static_cast<Bits*>(out), mask, static_cast<uint32_t>(n));
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

// A part of a result whose x is strided. x may be out, and mask null where there is none.
template <bool kMask, typename Bits>
int relu_part(Order<Bits> order, const void* x, void* out, uint8_t* mask, const Part& part,
              CUstream_st* stream) {
  const bool is_in_place = x == out;
  const Bits* from = static_cast<const Bits*>(x) + part.offset[0];
  Bits* to = static_cast<Bits*>(out) + (is_in_place ? part.offset[0] : part.first);
  const uint32_t size = static_cast<uint32_t>(part.size);
  const Walk walk(part.layout);
  if constexpr (sizeof(Bits) < 8) {
    if (!is_in_place && !by_elements<Bits>(part.layout, part.size)) {
      return launch<relu_strided_kernel<Bits, kMask>>(blocks_of(size, kBlockElements<Bits>), kBlock,
                                                      stream, order, from, to, mask, size, walk);
    }
  }
  const int blocks = blocks_of(size, kUnroll * kScalarBlock);
  if (walk.largest_offset() > UINT32_MAX) {
    return launch<relu_elements_kernel<Bits, kMask, uint64_t>>(blocks, kScalarBlock, stream, order,
                                                               from, to, mask, size, walk);
  }
  return launch<relu_elements_kernel<Bits, kMask, uint32_t>>(blocks, kScalarBlock, stream, order,
                                                             from, to, mask, size, walk);
}

}  // namespace kernels::elementwise

namespace kernels::cuda {

using namespace elementwise;

int relu(DType dtype, const void* x, void* out, int64_t n, CUstream_st* stream) {
  if (!is_vector_aligned(x, out)) return relu_shifted(dtype, x, out, nullptr, n, stream);
  return for_any(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
    if (bytes >= kFourVectorsFrom && bytes < kFourVectorsTo) {
      return launch<relu_kernel<T, 4>>(blocks_of(n, 4 * kBlockElements<T>), kBlock, stream, from,
                                       to, n, false);
    }
    return launch<relu_kernel<T, 1>>(blocks_of(n, kBlockElements<T>), kBlock, stream, from, to, n,
                                     evicts_last<T>(n));
  });
}

int relu_strided(DType dtype, const void* x, void* out, int64_t n, const Layout& layout,
                 CUstream_st* stream) {
  return for_bits(dtype, [&](auto order) {
    return for_parts({layout, n}, [&](const Part& part) {
      return relu_part<false>(order, x, out, nullptr, part, stream);
    });
  });
}

int relu_with_mask(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n,
                   CUstream_st* stream) {
  if (!is_vector_aligned(x, out)) return relu_shifted(dtype, x, out, mask, n, stream);
  return for_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    return launch<relu_with_mask_kernel<T>>(blocks_of(n, kBlockElements<T>), kBlock, stream,
                                            static_cast<const T*>(x), static_cast<T*>(out), mask, n,
                                            evicts_last<T>(n));
  });
}

int relu_with_mask_strided(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n,
                           const Layout& layout, CUstream_st* stream) {
  if (n > Walk::kMaxSize) {  // parts do not begin at bytes of the mask
    const int status = relu_strided(dtype, x, out, n, layout, stream);
    return status != cudaSuccess ? status : relu_with_mask(dtype, out, out, mask, n, stream);
  }
  return for_floating_bits(
      dtype, [&](auto order) { return relu_part<true>(order, x, out, mask, {layout, n}, stream); });
}

int relu_backward(DType dtype, const void* grad_output, const uint8_t* mask, void* grad_input,
                  int64_t n, CUstream_st* stream) {
  return for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    const Bits* from = static_cast<const Bits*>(grad_output);
    Bits* to = static_cast<Bits*>(grad_input);
    if (!is_vector_aligned(from, to)) {
      if (by_scalars<Bits>(from, to, n, kScalarBytesWithMask)) {
        return launch<relu_backward_scalar_kernel<Bits>>(blocks_of(n, kScalarBlock * kUnroll),
                                                         kScalarBlock, stream, from, mask, to,
                                                         static_cast<uint32_t>(n));
      }
      const AlignedVectors<Bits> vectors(to, n);
      return launch<relu_backward_shifted_kernel<Bits>>(vectors.blocks(), kBlock, stream, from,
                                                        mask, to, vectors, evicts_last<Bits>(n));
    }
    return launch<relu_backward_kernel<Bits>>(blocks_of(n, kBlockElements<Bits>), kBlock, stream,
                                              from, mask, to, n, evicts_last<Bits>(n));
  });
}

int relu_backward_strided(DType dtype, const void* grad_output, const uint8_t* mask,
                          void* grad_input, int64_t n, const Layout& layout, CUstream_st* stream) {
  return for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    return for_parts({layout, n}, [&](const Part& part) {
      const Bits* from = static_cast<const Bits*>(grad_output) + part.offset[0];
      Bits* to = static_cast<Bits*>(grad_input) + part.first;
      const Tiles tiles = Tiles::choose<Bits>(part.layout);
      if (tiles.across != 0) {
        return launch<relu_backward_tiles_kernel<Bits>>(
            static_cast<unsigned>(tiles.blocks(part.size)), kBlock, stream, from, mask,
            part.offset[1], to, tiles, Walk(part.layout));
      }
      return launch<relu_backward_strided_kernel<Bits>>(
          blocks_of(part.size, kBlockElements<Bits>), kBlock, stream, from, mask, part.offset[1],
          to, static_cast<uint32_t>(part.size), Walk(part.layout));
    });
  });
}

}  // namespace kernels::cuda
