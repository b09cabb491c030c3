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

// Between these sizes a thread has four vectors: 9.6 instead of 10.3 us for 12 MiB on an H200. One
// is the shorter code for fewer bytes, and 2% better for more.
constexpr uint32_t kFourVectorsFrom = 512 << 10, kFourVectorsTo = 20 << 20;

// The vectors of a thread where there is a mask, in blocks of kScalarBlock: 7 to 9% less time for 8
// MiB on an H200 than one vector a thread takes.
constexpr int kVectorsWithMask = 2;

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

// The operands begin at multiples of kBytes. x may be out.
template <int kBytes, int kVectors, typename T>
int relu_with_mask_small(const T* x, T* out, uint8_t* mask, int64_t n, CUstream_st* stream) {
  return launch<relu_with_mask_kernel<T, kBytes, kScalarBlock, kVectors, false>>(
      blocks_of(n * sizeof(T), kScalarBlock * kVectors * kBytes), kScalarBlock, stream, x, out,
      mask, static_cast<uint32_t>(n));
}

template <int kBytes, int kVectors, typename Bits>
int relu_backward_small(const Bits* grad_output, const uint8_t* mask, Bits* grad_input, int64_t n,
                        CUstream_st* stream) {
  return launch<relu_backward_kernel<Bits, kBytes, kScalarBlock, kVectors, false>>(
      blocks_of(n * sizeof(Bits), kScalarBlock * kVectors * kBytes), kScalarBlock, stream,
      grad_output, mask, grad_input, static_cast<uint32_t>(n));
}

// x may be out.
template <typename Bits>
int relu_misaligned(Order<Bits> order, const Bits* x, Bits* out, int64_t n, CUstream_st* stream) {
  return for_words<Bits>(x, out, n, /*has_mask=*/false, [&](auto bytes, auto each) {
    constexpr int kBytes = bytes;
    if constexpr (kBytes == 0) {
      const AlignedVectors<Bits> vectors(out, n);
      return launch<relu_shifted_kernel<Bits, false>>(vectors.blocks(), kBlock, stream, order, x,
                                                      out, static_cast<uint8_t*>(nullptr), vectors,
                                                      evicts_last<Bits>(n));
    } else {
      const auto launch_words = [&](auto count) {
        constexpr int kEach = count;
        return launch<relu_words_kernel<Bits, kBytes, kEach>>(
            blocks_of(n * sizeof(Bits), kScalarBlock * kEach * kBytes), kScalarBlock, stream, order,
            x, out, static_cast<uint32_t>(n));
      };
      if constexpr (each == kUnroll) {
        const int64_t words = n * sizeof(Bits) / kBytes;
        if (kWordsOfWave < words && words <= 2 * kWordsOfWave) {
          return launch_words(std::integral_constant<int, 2 * kUnroll>{});
        }
      }
      return launch_words(each);
    }
  });
}

int relu_with_mask_shifted(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n,
                           CUstream_st* stream) {
  return for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    const AlignedVectors<Bits> vectors(out, n);
    return launch<relu_shifted_kernel<Bits, true>>(
        vectors.blocks(), kBlock, stream, order, static_cast<const Bits*>(x),
        static_cast<Bits*>(out), mask, vectors, evicts_last<Bits>(n));
  });
}

// relu_misaligned, and the mask.
template <typename T>
int relu_with_mask_misaligned(DType dtype, const T* x, T* out, uint8_t* mask, int64_t n,
                              CUstream_st* stream) {
  return for_words<T>(x, out, n, /*has_mask=*/true, [&](auto bytes, auto each) {
    constexpr int kBytes = bytes, kEach = each;
    if constexpr (kBytes == 0) {
      return relu_with_mask_shifted(dtype, x, out, mask, n, stream);
    } else {
      return relu_with_mask_small<kBytes, kEach>(x, out, mask, n, stream);
    }
  });
}

template <typename Bits>
int relu_backward_misaligned(const Bits* grad_output, const uint8_t* mask, Bits* grad_input,
                             int64_t n, CUstream_st* stream) {
  return for_words<Bits>(grad_output, grad_input, n, /*has_mask=*/true, [&](auto bytes, auto each) {
    constexpr int kBytes = bytes, kEach = each;
    if constexpr (kBytes == 0) {
      const AlignedVectors<Bits> vectors(grad_input, n);
      return launch<relu_backward_shifted_kernel<Bits>>(vectors.blocks(), kBlock, stream,
                                                        grad_output, mask, grad_input, vectors,
                                                        evicts_last<Bits>(n));
    } else {
      return relu_backward_small<kBytes, kEach>(grad_output, mask, grad_input, n, stream);
    }
  });
}

// A part of a result whose x is strided. x may be out, and mask null where there is none.
template <bool kMask, typename Bits>
int relu_part(Order<Bits> order, const void* x, void* out, uint8_t* mask, const Part& part,
              CUstream_st* stream) {
  const bool is_in_place = x == out;
  const Bits* from = static_cast<const Bits*>(x) + part.offset;
  Bits* to = static_cast<Bits*>(out) + (is_in_place ? part.offset : part.first);
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
  if (!is_vector_aligned(x, out)) {
    return for_bits(dtype, [&](auto order) {
      using Bits = decltype(order.offset);
      return relu_misaligned(order, static_cast<const Bits*>(x), static_cast<Bits*>(out), n,
                             stream);
    });
  }
  return for_any(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    if (evicts_last<T>(n)) {
      return launch<relu_kernel<T, 1, true>>(blocks_of(n, kBlockElements<T>), kBlock, stream, from,
                                             to, n);
    }
    const uint32_t size = static_cast<uint32_t>(n), bytes = size * sizeof(T);
    if (bytes >= kFourVectorsFrom && bytes < kFourVectorsTo) {
      return launch<relu_kernel<T, 4, false>>(blocks_of(n, 4 * kBlockElements<T>), kBlock, stream,
                                              from, to, size);
    }
    return launch<relu_kernel<T, 1, false>>(blocks_of(n, kBlockElements<T>), kBlock, stream, from,
                                            to, size);
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
  return for_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    if (!is_vector_aligned(x, out)) {
      return relu_with_mask_misaligned(dtype, from, to, mask, n, stream);
    }
    if (evicts_last<T>(n)) {
      return launch<relu_with_mask_kernel<T, 16, kBlock, 1, true>>(
          blocks_of(n, kBlockElements<T>), kBlock, stream, from, to, mask, n);
    }
    return relu_with_mask_small<16, kVectorsWithMask>(from, to, mask, n, stream);
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
      return relu_backward_misaligned(from, mask, to, n, stream);
    }
    if (evicts_last<Bits>(n)) {
      return launch<relu_backward_kernel<Bits, 16, kBlock, 1, true>>(
          blocks_of(n, kBlockElements<Bits>), kBlock, stream, from, mask, to, n);
    }
    return relu_backward_small<16, kVectorsWithMask>(from, mask, to, n, stream);
  });
}

int relu_backward_strided(DType dtype, const void* grad_output, const uint8_t* mask,
                          void* grad_input, int64_t n, const Layout& layout, CUstream_st* stream) {
  return for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    return for_parts({layout, n}, [&](const Part& part) {
      const Bits* from = static_cast<const Bits*>(grad_output) + part.offset;
      Bits* to = static_cast<Bits*>(grad_input) + part.first;
      const uint64_t first_bit = part.first;
      const TiledLayout tiled = TiledLayout::choose<Bits>(part.layout);
      if (tiled.tiles.dims[0] > 0) {
        return launch<relu_backward_tiles_kernel<Bits>>(
            static_cast<unsigned>(tiled.tiles.blocks(part.size)), kBlock, stream, from, mask,
            first_bit, to, tiled.tiles, Walk(tiled.layout));
      }
      return launch<relu_backward_strided_kernel<Bits>>(
          blocks_of(part.size, kBlockElements<Bits>), kBlock, stream, from, mask, first_bit, to,
          static_cast<uint32_t>(part.size), Walk(part.layout));
    });
  });
}

}  // namespace kernels::cuda
