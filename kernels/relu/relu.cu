// ReLU on CUDA: forward, forward that also packs the mask for backward, backward. x, out,
// grad_output and grad_input hold n elements, mask (n + 7) / 8 bytes; see launchers.h.
//
// Memory is the limit: every byte is read once and written once. A thread moves one vector of 16
// bytes, or two, and a block runs once. Elements are compared by their bits (order.h), so that a
// kernel serves all dtypes of a width.

#include "common/driver_launch.cuh"
#include "common/strided.cuh"
#include "common/vectors.cuh"
#include "launchers.h"
#include "relu/order.h"

namespace kernels {
namespace {

constexpr int kThreads = 256;  // of a block

unsigned blocks_of(int64_t n, int64_t n_a_block) {
  return static_cast<unsigned>((n + n_a_block - 1) / n_a_block);
}

// Order, for vectors too: of narrow elements, a 32-bit word at a time. A magnitude is all bits but
// the sign. Each addend carries the magnitudes that it is to find into the sign bit, which is free.
template <typename Bits>
struct VectorOrder : Order<Bits> {
  static constexpr uint32_t kEach = sizeof(Bits) == 1 ? 0x01010101 : 0x00010001;
  static constexpr uint32_t kSigns = kEach << (sizeof(Bits) == 1 ? 7 : 15);
  uint32_t find_offset;  // finds magnitudes from Order::offset on
  uint32_t find_nan;     // finds magnitudes above infinity; of unsigned integers, all

  explicit VectorOrder(const Order<Bits>& order)
      : Order<Bits>(order),
        find_offset(kSigns - static_cast<uint32_t>(order.offset) * kEach),
        find_nan(static_cast<Bits>(-order.limit - order.offset) * kEach) {}

  using Order<Bits>::relu;
  using Order<Bits>::keeps_gradient;

  __device__ Vector<Bits> relu(Vector<Bits> v) const {
    if constexpr (sizeof(Bits) >= 4) {
#pragma unroll
      for (Bits& value : v.value) value = relu(value);
      return v;
    }
    auto words = bit_cast<Vector<uint32_t>>(v);
#pragma unroll
    for (uint32_t& word : words.value) {
      const uint32_t magnitude = word & ~kSigns;
      const uint32_t is_negative = word & (magnitude + find_offset) & ~(magnitude + find_nan);
      uint32_t negative;  // every byte is the sign bit of its element
      asm("prmt.b32 %0, %1, 0, %2;"
          : "=r"(negative)
          : "r"(is_negative), "n"(sizeof(Bits) == 1 ? 0xba98 : 0xbb99));
      word &= ~negative;
    }
    return bit_cast<Vector<Bits>>(words);
  }

  // Bit j is that of element j.
  __device__ uint32_t keeps_gradient(const Vector<Bits>& v) const {
    static_assert(sizeof(Bits) > 1, "integers of 8 bits have no mask");
    uint32_t bits = 0;
    if constexpr (sizeof(Bits) >= 4) {
#pragma unroll
      for (int j = 0; j < v.kSize; ++j) bits |= uint32_t{keeps_gradient(v.value[j])} << j;
      return bits;
    }
    const auto words = bit_cast<Vector<uint32_t>>(v);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t word = words.value[k], magnitude = word & ~kSigns;
      const uint32_t is_nan = magnitude + find_nan, is_not_zero = magnitude + find_offset;
      const uint32_t keeps = ((word & is_nan) | (~word & is_not_zero)) & kSigns;
      bits |= keeps >> (15 - 2 * k);  // even elements in the low half, odd ones in the high half
    }
    return (bits | bits >> 15) & 0xff;
  }
};

template <typename Bits>
__device__ Vector<Bits> select(Vector<Bits> v, uint32_t bits) {
#pragma unroll
  for (int j = 0; j < v.kSize; ++j) v.value[j] = bits >> j & 1 ? v.value[j] : Bits{0};
  return v;
}

// ----------------------------------------------------------------------------------- dense memory

// A dense result of n elements as the blocks share it out: vectors that begin at 16 bytes, and the
// elements before and after them, the rest, which the last block makes.
template <typename Bits>
struct DenseResult {
  static constexpr int kSize = Vector<Bits>::kSize;

  Bits* body;              // the first vector
  int64_t before;          // elements before it
  int64_t vectors;         // a multiple of 4: up to 4 vectors share a byte of a mask
  int64_t rest;            // elements in no vector
  unsigned vector_blocks;  // blocks that make vectors

  // Where an operand or the result is not aligned, the vectors begin with a line of memory, and
  // keep so far inside that no load leaves an operand: it begins up to 15 bytes before a vector,
  // and ends 7 elements, those of the mask's bits, and 16 bytes after one.
  DenseResult(Bits* out, int64_t n, bool is_aligned, int vectors_a_block) {
    constexpr int kLine = 128;
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out));
    before = is_aligned ? 0 : (16 + (-(address + 16) & (kLine - 1))) / int64_t{sizeof(Bits)};
    const int64_t inside = is_aligned ? n : n - before - kSize - 7;
    body = out + before;
    vectors = inside > 0 ? inside / (4 * kSize) * 4 : 0;
    rest = n - vectors * kSize;
    vector_blocks = blocks_of(vectors, vectors_a_block);
  }

  unsigned blocks() const { return vector_blocks + (rest > 0); }

  // make(i, j) for the rest, whose element i is body[j]. The block's threads stay together.
  template <typename Make>
  __device__ void for_rest(const Make& make) const {
#pragma unroll 1
    for (int64_t first = 0; first < rest; first += blockDim.x) {
      const int64_t i = first + threadIdx.x, j = i - before;
      make(i, j < 0 ? j : j + vectors * kSize);
    }
  }
};

// A dense operand. Where its vectors do not begin at 16 bytes, a thread loads the two aligned
// vectors that overlap its own, and shifts. L1 has the second: the next thread's first.
template <typename Bits, bool kShifted>
struct DenseOperand {
  static constexpr bool kShifts = kShifted;
  const Bits* body;  // the first vector

  struct Loaded {
    Vector<uint32_t> vector[kShifted ? 2 : 1];
  };

  template <typename... Policy>
  __device__ Loaded load(int64_t vector, Policy... policy) const {
    const auto aligned = reinterpret_cast<const char*>(body) - shift();
    const auto from = reinterpret_cast<const uint32_t*>(aligned) + vector * 4;
    if constexpr (kShifted) {
      return {load_vector(from, policy...), load_vector(from + 4, policy...)};
    } else {
      return {load_vector(from, policy...)};
    }
  }

  __device__ Vector<Bits> value(const Loaded& loaded) const {
    uint32_t word[8];
    memcpy(word, &loaded, sizeof(loaded));
#pragma unroll
    for (int i = 0; i < 6 && kShifted; ++i) word[i] = shift() & 8 ? word[i + 2] : word[i];
#pragma unroll
    for (int i = 0; i < 5 && kShifted && sizeof(Bits) < 8; ++i) {
      word[i] = shift() & 4 ? word[i + 1] : word[i];
    }
#pragma unroll
    for (int i = 0; i < 4 && kShifted && sizeof(Bits) < 4; ++i) {
      word[i] = __funnelshift_r(word[i], word[i + 1], shift() % 4 * 8);
    }
    Vector<Bits> v;
    memcpy(&v, word, sizeof(v));
    return v;
  }

 private:
  __device__ int shift() const {
    return kShifted ? static_cast<int>(reinterpret_cast<uintptr_t>(body) % 16) : 0;
  }
};

// x may be the result's memory. A thread makes kVectors vectors, kThreads apart: neighbouring
// threads have neighbouring vectors. It makes two of small tensors, whose loads need no policy.
template <typename Bits, bool kShifted, int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads)
    relu_kernel(VectorOrder<Bits> order, DenseOperand<Bits, kShifted> x, DenseResult<Bits> out,
                bool evict_last) {
  if (blockIdx.x == out.vector_blocks) {
    return out.for_rest([&](int64_t i, int64_t j) {
      if (i < out.rest) out.body[j] = order.relu(x.body[j]);
    });
  }
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kVectors) + threadIdx.x;
  typename DenseOperand<Bits, kShifted>::Loaded loaded[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int64_t vector = first + u * kThreads;
    if (vector >= out.vectors) continue;
    if constexpr (kVectors > 1) {
      loaded[u] = x.load(vector);
    } else {
      loaded[u] = x.load(vector, l2_policy(evict_last));
    }
  }
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int64_t vector = first + u * kThreads;
    if (vector >= out.vectors) return;
    store_vector(out.body + vector * out.kSize, order.relu(x.value(loaded[u])));
  }
}

// Stores a thread's bits, those of elements i and following. Neighbouring threads have the rest of
// the byte. All threads of a warp get here, unless they have exited with all those neighbours.
template <int kSize>
__device__ void store_bits(uint8_t* mask, uint64_t i, bool is_inside, uint32_t bits,
                           uint64_t policy) {
  constexpr int kThreadsPerByte = 8 / kSize;
  static_assert(kThreadsPerByte >= 1, "a thread has at most the bits of one byte");
  const int place = threadIdx.x % kThreadsPerByte;
  bits <<= place * kSize;
#pragma unroll
  for (int lane = 1; lane < kThreadsPerByte; lane *= 2) {
    bits |= __shfl_xor_sync(0xffffffff, bits, lane);
  }
  if (place == 0 && is_inside) store_mask(mask + i / 8, bits, policy);
}

// The mask's bytes begin at multiples of 8 elements. Where the vectors do not, a thread packs the
// bits of the elements `lead` after its vector's. Other threads may have stored some of these
// already, if x is the result's memory; a result has the bit of its operand.
template <typename Bits, bool kShifted>
__global__ void __launch_bounds__(kThreads)
    relu_with_mask_kernel(VectorOrder<Bits> order, DenseOperand<Bits, kShifted> x,
                          DenseResult<Bits> out, uint8_t* mask, bool evict_last) {
  const uint64_t policy = l2_policy(evict_last);
  const int lead = static_cast<int>(-out.before & 7);
  const int64_t first_bit = out.before + lead;
  if (blockIdx.x == out.vector_blocks) {
    return out.for_rest([&](int64_t i, int64_t j) {
      const int64_t n = out.rest + out.vectors * out.kSize;
      const int64_t bit = i < first_bit ? i : i + out.vectors * out.kSize;
      const bool keeps = bit < n && order.keeps_gradient(x.body[bit - out.before]);
      if (i < out.rest) out.body[j] = order.relu(x.body[j]);
      store_bits<1>(mask, bit, bit < n, keeps, policy);
    });
  }
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (vector >= out.vectors) return;
  const Vector<Bits> v = x.value(x.load(vector, policy));
  uint32_t bits = order.keeps_gradient(v);
  if (lead != 0) {
    const DenseOperand<Bits, true> packed{x.body + lead};
    bits = order.keeps_gradient(packed.value(packed.load(vector, policy)));
  }
  store_bits<out.kSize>(mask, first_bit + vector * out.kSize, true, bits, policy);
  store_vector(out.body + vector * out.kSize, order.relu(v));
}

template <typename Bits, bool kShifted>
__global__ void __launch_bounds__(kThreads)
    relu_backward_kernel(DenseOperand<Bits, kShifted> grad_output, const uint8_t* mask,
                         DenseResult<Bits> grad_input, bool evict_last) {
  constexpr int kSize = Vector<Bits>::kSize;
  if (blockIdx.x == grad_input.vector_blocks) {
    return grad_input.for_rest([&](int64_t i, int64_t j) {
      if (i >= grad_input.rest) return;
      const uint64_t bit = grad_input.before + j;
      const bool keeps = mask[bit / 8] >> (bit % 8) & 1;
      grad_input.body[j] = keeps ? grad_output.body[j] : Bits{0};
    });
  }
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (vector >= grad_input.vectors) return;
  const uint64_t policy = l2_policy(evict_last);
  // The gradient first: a use of the mask before it would keep this load waiting for that one.
  const auto loaded = grad_output.load(vector, policy);
  const uint64_t bit = grad_input.before + vector * kSize;
  uint32_t bits = load_mask(mask + bit / 8, policy);
  if (grad_input.before % 8 != 0) bits |= load_mask(mask + (bit + kSize - 1) / 8, policy) << 8;
  store_vector(grad_input.body + vector * kSize,
               select(grad_output.value(loaded), bits >> (bit % 8)));
}

// --------------------------------------------------------------------------------- strided memory

// An element of the result, by its offsets in the operands.
template <typename Bits>
struct ReluAt {
  static constexpr int kOperands = 1;
  Order<Bits> order;
  const Bits* x;

  __device__ Bits operator()(const int64_t (&offset)[1]) const { return order.relu(x[offset[0]]); }
};

template <typename Bits>
struct GradientAt {
  static constexpr int kOperands = 2;
  const Bits* grad_output;
  const uint8_t* mask;
  int64_t first_bit;

  __device__ Bits operator()(const int64_t (&offset)[2]) const {
    const int64_t bit = first_bit + offset[1];
    return mask[bit / 8] >> (bit % 8) & 1 ? grad_output[offset[0]] : Bits{0};
  }
};

// A thread makes one vector of the dense result out [n]. It divides once for all elements that
// follow along dimension 0.
template <typename Bits, typename ElementAt>
__global__ void __launch_bounds__(kThreads)
    strided_kernel(ElementAt element_at, Bits* out, uint32_t n,
                   const __grid_constant__ DeviceLayout layout) {
  constexpr int kSize = Vector<Bits>::kSize, kOperands = ElementAt::kOperands;
  const int64_t start = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kSize;
  if (start >= n) return;
  const uint32_t first = static_cast<uint32_t>(start), count = n - first;
  Vector<Bits> v;
  Position<kOperands> position(first, layout);
  if (position.run >= kSize) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      int64_t offset[kOperands];
#pragma unroll
      for (int k = 0; k < kOperands; ++k) {
        offset[k] = position.offset[k] + j * layout.stride[k][0];
      }
      v.value[j] = element_at(offset);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (j >= count) break;
      v.value[j] = element_at(position.offset);
      position.advance(first + j + 1, layout);
    }
  }
  // A part of a layout may begin anywhere in the result.
  Bits* const to = out + first;
  if (count >= kSize && reinterpret_cast<uintptr_t>(to) % sizeof(v) == 0) {
    return store_vector(to, v);
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    if (j < count) to[j] = v.value[j];
  }
}

// The same in place, where there are no vectors to store, and where dimension 0 is shorter than a
// vector: neighbouring threads have neighbouring elements, and each thread kLoads, for as many
// loads in flight.
constexpr int kLoads = 4;

template <typename Bits>
__global__ void __launch_bounds__(kThreads)
    relu_elements_kernel(Order<Bits> order, const Bits* x, Bits* out, uint32_t n,
                         const __grid_constant__ DeviceLayout layout) {
  const uint32_t start = blockIdx.x * (kThreads * kLoads) + threadIdx.x;
  int64_t offset[kLoads];
  Bits value[kLoads];
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    if (start + u * kThreads >= n) break;
    offset[u] = Position<1>(start + u * kThreads, layout).offset[0];
    value[u] = x[offset[u]];
  }
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    if (start + u * kThreads >= n) break;
    out[x == out ? offset[u] : start + u * kThreads] = order.relu(value[u]);
  }
}

// --------------------------------------------------------------------------------------- launches

// Tensors below this size are made by smaller blocks with two vectors a thread: half as many
// blocks, and less of a last wave.
constexpr int64_t kTwoVectorsBytes = 32 << 20;

// From this size on, loads ask L2 to evict their lines last, so that the lines to be written go to
// memory in longer runs. Smaller tensors fit in L2.
constexpr int64_t kEvictLastBytes = 64 << 20;

// launch(operand, result, evict_last) for a dense operand and result of n elements.
template <typename Bits, typename Launch>
int launch_dense(const void* x, void* out, int64_t n, int vectors_a_block, const Launch& launch) {
  const DenseResult<Bits> result(static_cast<Bits*>(out), n, is_vector_aligned(x, out),
                                 vectors_a_block);
  const Bits* const body = static_cast<const Bits*>(x) + result.before;
  const bool evict_last = n * static_cast<int64_t>(sizeof(Bits)) >= kEvictLastBytes;
  return is_vector_aligned(body, nullptr)
             ? launch(DenseOperand<Bits, false>{body}, result, evict_last)
             : launch(DenseOperand<Bits, true>{body}, result, evict_last);
}

template <int kThreads, int kVectors, typename Bits>
int launch_relu(Order<Bits> order, const void* x, void* out, int64_t n, CUstream_st* stream) {
  const auto launch_one = [=](auto operand, const auto& result, bool evict_last) {
    return launch<relu_kernel<Bits, operand.kShifts, kThreads, kVectors>>(
        result.blocks(), kThreads, stream, VectorOrder<Bits>(order), operand, result, evict_last);
  };
  return launch_dense<Bits>(x, out, n, kThreads * kVectors, launch_one);
}

// `size` elements of a strided result from `first` on, and where they begin in both operands.
struct Part {
  Layout layout;
  int64_t size;
  int64_t first = 0;
  int64_t offset[2] = {0, 0};
};

// launch_part(part) for the whole, or part by part where a kernel's layout can't hold it.
template <typename LaunchPart>
int for_parts(const Part& whole, const LaunchPart& launch_part) {
  if (whole.size <= DeviceLayout::kMaxSize) return launch_part(whole);
  // Halves of the outermost dimension that is longer than 1.
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

template <typename Bits, typename ElementAt>
int launch_strided(ElementAt element_at, Bits* out, const Part& part, CUstream_st* stream) {
  return launch<strided_kernel<Bits, ElementAt>>(
      blocks_of(part.size, kThreads * Vector<Bits>::kSize), kThreads, stream, element_at,
      out + part.first, static_cast<uint32_t>(part.size), DeviceLayout(part.layout));
}

}  // namespace

namespace cuda {

int relu(DType dtype, const void* x, void* out, int64_t n, CUstream_st* stream) {
  return for_bits(dtype, [=](auto order) {
    return n * static_cast<int64_t>(sizeof(order.offset)) < kTwoVectorsBytes
               ? launch_relu<kThreads / 2, 2>(order, x, out, n, stream)
               : launch_relu<kThreads, 1>(order, x, out, n, stream);
  });
}

int relu_strided(DType dtype, const void* x, void* out, int64_t n, const Layout& layout,
                 CUstream_st* stream) {
  return for_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    return for_parts({layout, n}, [&](const Part& part) {
      const Bits* const from = static_cast<const Bits*>(x) + part.offset[0];
      Bits* const to = static_cast<Bits*>(out);
      if (x != out && part.layout.size[0] >= Vector<Bits>::kSize) {
        return launch_strided(ReluAt<Bits>{order, from}, to, part, stream);
      }
      return launch<relu_elements_kernel<Bits>>(
          blocks_of(part.size, kThreads * kLoads), kThreads, stream, order, from,
          to + (x == out ? part.offset[0] : part.first), static_cast<uint32_t>(part.size),
          DeviceLayout(part.layout));
    });
  });
}

int relu_with_mask(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n,
                   CUstream_st* stream) {
  return for_floating_bits(dtype, [=](auto order) {
    using Bits = decltype(order.offset);
    const auto launch_one = [=](auto operand, const auto& result, bool evict_last) {
      return launch<relu_with_mask_kernel<Bits, operand.kShifts>>(result.blocks(), kThreads, stream,
                                                                  VectorOrder<Bits>(order), operand,
                                                                  result, mask, evict_last);
    };
    return launch_dense<Bits>(x, out, n, kThreads, launch_one);
  });
}

int relu_backward(DType dtype, const void* grad_output, const uint8_t* mask, void* grad_input,
                  int64_t n, CUstream_st* stream) {
  return for_floating_bits(dtype, [=](auto order) {
    using Bits = decltype(order.offset);
    const auto launch_one = [=](auto operand, const auto& result, bool evict_last) {
      return launch<relu_backward_kernel<Bits, operand.kShifts>>(result.blocks(), kThreads, stream,
                                                                 operand, mask, result, evict_last);
    };
    return launch_dense<Bits>(grad_output, grad_input, n, kThreads, launch_one);
  });
}

int relu_backward_strided(DType dtype, const void* grad_output, const uint8_t* mask,
                          void* grad_input, int64_t n, const Layout& layout, CUstream_st* stream) {
  return for_floating_bits(dtype, [&](auto order) {
    using Bits = decltype(order.offset);
    return for_parts({layout, n}, [&](const Part& part) {
      const GradientAt<Bits> gradient_at{static_cast<const Bits*>(grad_output) + part.offset[0],
                                         mask, part.offset[1]};
      return launch_strided(gradient_at, static_cast<Bits*>(grad_input), part, stream);
    });
  });
}

}  // namespace cuda
}  // namespace kernels
