// ReLU on CUDA, forward and backward.
//
// The three kernels, which relu_op.cpp calls through launchers.h:
//
//   relu_kernel                    out = x < 0 ? 0 : x. In training it also packs the mask: one bit
//                                  an element, which tells backward where the gradient passes.
//   relu_backward_kernel           grad_input = grad_output where the mask's bit is 1, else 0.
//   relu_backward_strided_kernel   The same for a grad_output that is not dense in memory, such as
//                                  the one that out.sum(dim=1) or torch.cat([out, y], dim=1) sends
//                                  back.
//
// Shapes: x, out, grad_output and grad_input have n elements of one dtype. The kernels see them as
// flat arrays that begin at multiples of 16 bytes; only a strided grad_output may begin anywhere.
// The mask has (n + 7) / 8 bytes. Bit i % 8 of byte i / 8 belongs to element i.
//
// Why this is the limit: ReLU does one comparison an element, which costs nothing beside the memory
// traffic. Every element of x is read once, and every element of out is written once. For [4096,
// 393216] float32 that is 6.44 GB each way, so the practical limit is a copy of x. On an H200:
//
//   torch.relu     3.029 ms   4253 GB/s
//   copy           2.994 ms   4303 GB/s
//   relu_kernel    2.949 ms   4370 GB/s
//
// relu_kernel beats the copy because of a hint to L2, which SizeLimits explains. In training, the
// mask adds 1/32 of the bytes of x, and forward takes 3.007 ms. Backward takes 2.995 ms and torch's
// backward 4.426 ms: torch reads the saved output, and this backward reads bits.
//
// For large tensors the best form is the simplest: each thread makes one 16-byte access, and each
// block ends when its elements are done. Loops, more accesses a thread, and bulk copies through
// shared memory are all slower on an H200.

#include <cstring>
#include <type_traits>

#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "launchers.h"

namespace kernels::elementwise {

// -------------------------------------------------------------------------- how threads share work

// How the threads of a launch share the elements. A "vector" is the elements of one 16-byte access.
// A block handles kThreads * kVectors adjacent vectors. The vectors of one thread are kThreads
// vectors apart, so that the threads of a warp always access adjacent vectors. With kVectors = 2,
// the vectors of a block belong to these threads:
//
//   thread   0  1  2  ...  kThreads-1   0  1  2  ...  kThreads-1
//            `---- their vector 0 ---'  `---- their vector 1 ---'
template <int kThreadsOfBlock, int kVectorsOfThread, bool kIsLargeTensor>
struct ReluConfig {
  static constexpr int kThreads = kThreadsOfBlock;   // of a block
  static constexpr int kVectors = kVectorsOfThread;  // of a thread
  // Large tensors have 64-bit indices, and their loads ask L2 to evict the lines last (SizeLimits
  // says why). The hint takes a few instructions to make, which small tensors do not repay.
  static constexpr bool kIsLarge = kIsLargeTensor;
  using Index = std::conditional_t<kIsLarge, int64_t, uint32_t>;
};
// Blocks of 128 to 384 threads are equally fast for large tensors on an H200. Blocks of 32 or 64
// threads are slower.
using Large = ReluConfig</*kThreads=*/256, /*kVectors=*/1, /*kIsLarge=*/true>;
using Small = ReluConfig</*kThreads=*/256, /*kVectors=*/1, /*kIsLarge=*/false>;
using SmallByFour = ReluConfig</*kThreads=*/256, /*kVectors=*/4, /*kIsLarge=*/false>;
// This takes 7 to 9% less time than Small for 8 MiB with a mask on an H200.
using SmallWithMask = ReluConfig</*kThreads=*/128, /*kVectors=*/2, /*kIsLarge=*/false>;

// The sizes of x, in bytes, by which choose_config (below) chooses among these.
struct SizeLimits {
  // x is large from these sizes on. L2 evicts the lines of a large x last. That is faster, probably
  // because the lines of results then go to memory in longer runs. For a smaller tensor the hint
  // does harm: a loop over the same tensor finds more of it in L2 without the hint. For 64 MiB,
  // without a mask, it then takes 45.1 instead of 48.0 us on an H100.
  static constexpr int64_t kLarge = 256 << 20;         // without a mask
  static constexpr int64_t kLargeWithMask = 64 << 20;  // with a mask, and in backward
  // Between these sizes, without a mask, a thread has four vectors. For fewer bytes, one vector
  // wins because its code is shorter. For more bytes, one vector wins as well. docs/EXPERIMENTS.md,
  // "ReLU on a GPU", has the times.
  static constexpr int64_t kFourVectorsBegin = 512 << 10;
  static constexpr int64_t kFourVectorsEnd = 20 << 20;
};

// The elements of a thread. Vector u begins at element first + u * kStride. The functions below
// take `first` and u * kStride as two arguments. The second is a compile-time constant, so that all
// accesses of a thread share one base register.
template <typename Config, int kSize>
struct ThreadElements {
  using Index = typename Config::Index;
  static constexpr int kStride = Config::kThreads * kSize;   // elements between vectors
  static constexpr int kBlock = kStride * Config::kVectors;  // elements of a block
  const Index block_first = static_cast<Index>(blockIdx.x) * kBlock;
  const Index first = block_first + threadIdx.x * kSize;

  // Returns whether all vectors of all threads of the block exist, as in each block but the last.
  __device__ bool block_is_full(Index n) const { return block_first + kBlock <= n; }
};

// ---------------------------------------------------------------------------------------- the mask

// Stores the mask bits of the kSize elements of a thread, of which element i is the first. Bit j of
// `bits` belongs to element i + j. All threads of a warp must call this function, because they
// exchange bits; a thread whose elements do not exist passes exists = false and stores nothing.
//
// A byte of the mask has the bits of 8 elements, and a thread has kSize of them. The 8 / kSize
// neighbouring threads of a byte combine their bits, and the first of them stores the byte. For
// float32, where kSize is 4, with a letter for the bit of each element:
//
//   lane            0         1         2         3      ...
//   elements      0..3      4..7      8..11    12..15
//   bits         ....dcba  ....hgfe  ....lkji  ....ponm       lowest bit on the right
//   shifted      ....dcba  hgfe....  ....lkji  ponm....       by 4 * (lane % 2)
//   combined     hgfedcba  hgfedcba  ponmlkji  ponmlkji       OR with the word of lane ^ 1
//   stores       byte 0              byte 1
//
// In a half type a vector has 8 elements, and each thread stores a byte without an exchange. In
// float64 a vector has 2 elements, and the four threads of a byte make two exchanges, with lane ^ 1
// and then with lane ^ 2. If a thread has a single element (kSize = 1), one ballot gives the bits
// of all 32 lanes, and lanes 0, 8, 16 and 24 store a byte each.
template <typename Config, int kSize>
__device__ void store_bits(uint8_t* mask, int64_t i, uint32_t bits, bool exists, uint64_t policy) {
  constexpr int kThreadsPerByte = 8 / kSize;
  static_assert(kThreadsPerByte >= 1, "a thread has at most the bits of one byte");
  const int place = threadIdx.x % kThreadsPerByte;  // of this thread among those of the byte
  if constexpr (kSize == 1) {
    bits = __ballot_sync(0xffffffff, bits) >> threadIdx.x % 32;
  } else {
    bits <<= place * kSize;
#pragma unroll
    for (int distance = 1; distance < kThreadsPerByte; distance *= 2) {
      bits |= __shfl_xor_sync(0xffffffff, bits, distance);
    }
  }
  if (place != 0 || !exists) return;
  if constexpr (Config::kIsLarge) {
    store_mask(mask + i / 8, bits, policy);
  } else {
    mask[i / 8] = static_cast<uint8_t>(bits);
  }
}

// ----------------------------------------------------------------------------------------- forward

// Loads a vector of x as four 32-bit words. nvcc would take a vector of 16-bit elements apart
// between the load and the use, which costs instructions.
template <typename Config, typename T>
__device__ Vector<uint32_t> load_words(const T* source, uint64_t policy) {
  const auto* const words = reinterpret_cast<const uint32_t*>(source);
  if constexpr (Config::kIsLarge) return load_vector(words, policy);
  return load_vector(words);
}

// Applies ReLU to the vector of x whose first element is first + offset. Stores the results and, if
// kMask, the mask bits. If kMask, all threads of a warp must call it, as store_bits demands; a
// thread whose vector does not exist passes exists = false.
template <typename Config, bool kMask, typename T>
__device__ void finish_vector(const Vector<uint32_t>& words, T* out, uint8_t* mask,
                              typename Config::Index first, int offset, bool exists,
                              uint64_t policy) {
  constexpr int kSize = Vector<T>::kSize;
  if (!kMask && !exists) return;
  Vector<T> v;
  memcpy(&v, &words, sizeof(v));
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    // These are comparisons of numbers, not of their bits: the GPU then compares two elements of a
    // half type in one instruction.
    bits |= uint32_t{mask_bit(v.value[j])} << j;
    v.value[j] = relu_of(v.value[j]);
  }
  if constexpr (kMask) store_bits<Config, kSize>(mask, first + offset, bits, exists, policy);
  if (exists) store_vector(out + first + offset, v);
}

// out[i] = x[i] < 0 ? 0 : x[i], for i < n. mask has (n + 7) / 8 bytes if kMask, and is null
// otherwise.
template <typename T, typename Config, bool kMask>
__global__ void __launch_bounds__(Config::kThreads)
    relu_kernel(const T* x, T* out, uint8_t* mask, typename Config::Index n) {
  using Index = typename Config::Index;
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kVectors = Config::kVectors;
  using Elements = ThreadElements<Config, kSize>;
  const Elements elements;
  const uint64_t policy = Config::kIsLarge ? evict_last_policy() : 0;
  Vector<uint32_t> words[kVectors];

  // A full block does not test which vectors exist. Its code is short and comes first: if the
  // kernel's code is no longer in L2, it is read from memory, and its first instructions arrive
  // earliest. That saves 4% of the time of 1 MiB.
  if (elements.block_is_full(n)) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int offset = u * Elements::kStride;
      words[u] = load_words<Config>(x + elements.first + offset, policy);
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int offset = u * Elements::kStride;
      finish_vector<Config, kMask>(words[u], out, mask, elements.first, offset, /*exists=*/true,
                                   policy);
    }
    return;
  }

  // The last block. The elements before `whole` are handled as vectors. Each of the rest, fewer
  // than 8 elements, has a thread of its own. With a mask, `whole` is a multiple of 8: the rest
  // then shares no byte of the mask with a vector. Threads without elements take part in the
  // exchange of bits, with zeros.
  constexpr int kDivisorOfWhole = kMask ? 8 : kSize;
  const Index whole = n - n % kDivisorOfWhole;
  const Index rest_index = whole + threadIdx.x;
  T rest_value;
  if constexpr (kMask) {
    memset(words, 0, sizeof(words));
    rest_value = T{};
  }
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int offset = u * Elements::kStride;
    if (elements.first + offset < whole) {
      words[u] = load_words<Config>(x + elements.first + offset, policy);
    }
  }
  if (rest_index < n) rest_value = x[rest_index];
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int offset = u * Elements::kStride;
    const bool exists = elements.first + offset < whole;
    finish_vector<Config, kMask>(words[u], out, mask, elements.first, offset, exists, policy);
  }
  if (rest_index < n) out[rest_index] = relu_of(rest_value);
  if constexpr (kMask) {
    store_bits<Config, 1>(mask, rest_index, mask_bit(rest_value), rest_index < n, policy);
  }
}

// ---------------------------------------------------------------------------------------- backward

// Loads the byte of the mask that has the bit of element i.
template <typename Config>
__device__ uint32_t load_mask_byte(const uint8_t* mask, typename Config::Index i, uint64_t policy) {
  if constexpr (Config::kIsLarge) return load_mask(mask + i / 8, policy);
  return mask[i / 8];
}

// Loads v from grad_output + first + offset. For a constant gradient, fills v with the single
// element of grad_output.
template <typename Config, typename Bits>
__device__ void load_gradient(Vector<Bits>& v, const Bits* grad_output, bool is_constant,
                              typename Config::Index first, int offset, uint64_t policy) {
  if (is_constant) {
    for (Bits& value : v.value) value = *grad_output;
  } else {
    const Bits* const source = grad_output + first + offset;
    v = Config::kIsLarge ? load_vector(source, policy) : load_vector(source);
  }
}

// Sets the elements of v whose mask bit is 0 to 0, and stores v at grad_input + first + offset.
// `byte` is the byte of the mask that has the bits of these elements. If v has fewer than 8
// elements, the byte has bits of their neighbours, too.
template <typename Index, typename Bits>
__device__ void store_masked(Bits* grad_input, Index first, int offset, Vector<Bits>& v,
                             uint32_t byte) {
  const uint32_t bits = byte >> (first + offset) % 8;
#pragma unroll
  for (int j = 0; j < Vector<Bits>::kSize; ++j) {
    const bool passes = bits >> j & 1;
    v.value[j] = passes ? v.value[j] : Bits{0};
  }
  store_vector(grad_input + first + offset, v);
}

// grad_input[i] = mask bit i ? grad_output[i] : 0, for i < n. If is_constant, grad_output is one
// element, which is used for every i; out.sum() sends such a gradient back. The kernel selects
// elements and never computes with them. It therefore handles them as unsigned integers of their
// size, Bits, so that float16 and bfloat16 share a kernel.
template <typename Bits, typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    relu_backward_kernel(const Bits* grad_output, bool is_constant, const uint8_t* mask,
                         Bits* grad_input, typename Config::Index n) {
  using Index = typename Config::Index;
  constexpr int kSize = Vector<Bits>::kSize;
  constexpr int kVectors = Config::kVectors;
  using Elements = ThreadElements<Config, kSize>;
  const Elements elements;
  const uint64_t policy = Config::kIsLarge ? evict_last_policy() : 0;
  Vector<Bits> v[kVectors];
  uint32_t byte[kVectors];

  if (elements.block_is_full(n)) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int offset = u * Elements::kStride;
      load_gradient<Config>(v[u], grad_output, is_constant, elements.first, offset, policy);
      byte[u] = load_mask_byte<Config>(mask, elements.first + offset, policy);
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      store_masked(grad_input, elements.first, u * Elements::kStride, v[u], byte[u]);
    }
    return;
  }

  // The last block: whole vectors, and then a thread for each of the elements that are left.
  const Index whole = n - n % kSize;
  const Index rest_index = whole + threadIdx.x;
  Bits rest_value;
  uint32_t rest_byte;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int offset = u * Elements::kStride;
    if (elements.first + offset < whole) {
      load_gradient<Config>(v[u], grad_output, is_constant, elements.first, offset, policy);
      byte[u] = load_mask_byte<Config>(mask, elements.first + offset, policy);
    }
  }
  if (rest_index < n) {
    rest_value = grad_output[is_constant ? 0 : rest_index];
    rest_byte = load_mask_byte<Config>(mask, rest_index, policy);
  }
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int offset = u * Elements::kStride;
    if (elements.first + offset < whole) {
      store_masked(grad_input, elements.first, offset, v[u], byte[u]);
    }
  }
  if (rest_index < n) {
    const bool passes = rest_byte >> rest_index % 8 & 1;
    grad_input[rest_index] = passes ? rest_value : Bits{0};
  }
}

// ---------------------------------------------------------------- backward, for a strided gradient

// The constants of relu_backward_strided_kernel.
struct StridedConfig {
  static constexpr int kThreads = 256;  // of a block
  // Elements of a thread, kThreads apart, if the innermost dimension of grad_output has stride 1.
  // For any other stride one element is faster, and a thread has one (docs/EXPERIMENTS.md, "ReLU on
  // a GPU").
  static constexpr int kElements = 4;
};

// Returns where element i of the gradient is: its distance from grad_output, in elements. i counts
// in the order of grad_input's memory, where dimension 0 of the layout is the innermost. For
// example, with sizes (3, 5) and strides (5, 1), element 4 has the coordinates (4 % 3, 4 / 3) =
// (1, 1), and its distance is 1 * 5 + 1 * 1 = 6.
__device__ inline int64_t strided_offset(const GradientLayout& layout, uint32_t i) {
  int64_t offset = 0;
  // The loop over all dimensions but the outermost. It is unrolled to a constant number of steps,
  // so that d is a constant where it indexes the layout.
#pragma unroll
  for (int d = 0; d < GradientLayout::kMaxDimensions - 1; ++d) {
    if (d + 1 >= layout.dimensions) continue;
    const uint32_t size = static_cast<uint32_t>(layout.sizes[d]);
    const uint32_t outer = i / size;
    const uint32_t coordinate = i - outer * size;
    offset += coordinate * layout.strides[d];
    i = outer;
  }
  return offset + i * layout.strides[layout.dimensions - 1];
}

// Returns whether the gradient of element i passes.
__device__ inline bool gradient_passes(const uint8_t* mask, uint32_t i) {
  return mask[i / 8] >> i % 8 & 1;
}

// Computes grad_input[i]. Reads the gradient only where it passes: a typical mask saves half of the
// scattered reads.
template <typename Bits>
__device__ void select_one(const Bits* grad_output, const GradientLayout& layout,
                           const uint8_t* mask, Bits* grad_input, uint32_t n, uint32_t i) {
  if (i >= n) return;
  grad_input[i] = gradient_passes(mask, i) ? grad_output[strided_offset(layout, i)] : Bits{0};
}

// Computes kElements elements of grad_input, kThreads apart, from `first` on. All are loaded before
// any is stored, so that the loads overlap. Past the end, the last element is loaded again, and
// nothing is stored.
template <typename Bits>
__device__ void select_several(const Bits* grad_output, const GradientLayout& layout,
                               const uint8_t* mask, Bits* grad_input, uint32_t n, uint32_t first) {
  constexpr int kElements = StridedConfig::kElements;
  Bits v[kElements];
  bool passes[kElements];
#pragma unroll
  for (int u = 0; u < kElements; ++u) {
    const uint32_t i = min(first + u * StridedConfig::kThreads, n - 1);
    v[u] = grad_output[strided_offset(layout, i)];
    passes[u] = gradient_passes(mask, i);
  }
#pragma unroll
  for (int u = 0; u < kElements; ++u) {
    const uint32_t i = first + u * StridedConfig::kThreads;
    if (i < n) grad_input[i] = passes[u] ? v[u] : Bits{0};
  }
}

// Computes the elements of a thread, 1 or kElements, as unsigned integers of their size.
template <typename Bits>
__device__ void select_elements(const void* grad_output, const GradientLayout& layout,
                                const uint8_t* mask, void* grad_input, uint32_t n,
                                int elements_of_thread, uint32_t first) {
  const auto source = static_cast<const Bits*>(grad_output);
  const auto target = static_cast<Bits*>(grad_input);
  if (elements_of_thread == 1) {
    select_one(source, layout, mask, target, n, first);
  } else {
    select_several(source, layout, mask, target, n, first);
  }
}

// Backward for a gradient with arbitrary strides, at any address. grad_input [n] is dense. Each
// thread handles `elements_of_thread` elements, 1 or kElements. An element has 2, 4 or 8 bytes. n
// is below 2^31, so that no index overflows.
__global__ void __launch_bounds__(StridedConfig::kThreads)
    relu_backward_strided_kernel(const void* grad_output,
                                 const __grid_constant__ GradientLayout layout, const uint8_t* mask,
                                 void* grad_input, uint32_t n, int elements_of_thread,
                                 int element_bytes) {
  const uint32_t first = blockIdx.x * (StridedConfig::kThreads * elements_of_thread) + threadIdx.x;
  if (element_bytes == 2) {
    select_elements<uint16_t>(grad_output, layout, mask, grad_input, n, elements_of_thread, first);
  } else if (element_bytes == 4) {
    select_elements<uint32_t>(grad_output, layout, mask, grad_input, n, elements_of_thread, first);
  } else {
    select_elements<uint64_t>(grad_output, layout, mask, grad_input, n, elements_of_thread, first);
  }
}

// ---------------------------------------------------------------------------------------- launches

// Calls body(config) with the ReluConfig for n elements of type T, and returns the body's status.
// float64, which few use, has only the kernels of Large, so that fewer kernels are compiled.
template <typename T, bool kMask, typename Body>
int choose_config(int64_t n, const Body& body) {
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  if constexpr (sizeof(T) < 8 && kMask) {
    if (bytes < SizeLimits::kLargeWithMask) return body(SmallWithMask{});
  }
  if constexpr (sizeof(T) < 8 && !kMask) {
    if (SizeLimits::kFourVectorsBegin <= bytes && bytes < SizeLimits::kFourVectorsEnd) {
      return body(SmallByFour{});
    }
    if (bytes < SizeLimits::kLarge) return body(Small{});
  }
  return body(Large{});
}

// How many blocks n elements of type T need.
template <typename T, typename Config>
int count_blocks(int64_t n) {
  return blocks_of(n, ThreadElements<Config, Vector<T>::kSize>::kBlock);
}

// Launches forward, with or without a mask. This and the functions below return a cudaError_t.
template <bool kMask>
int launch_relu(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n,
                CUstream_st* stream) {
  return dispatch_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    return choose_config<T, kMask>(n, [&](auto config) {
      using Config = decltype(config);
      return launch<relu_kernel<T, Config, kMask>>(
          count_blocks<T, Config>(n), Config::kThreads, stream, static_cast<const T*>(x),
          static_cast<T*>(out), mask, static_cast<typename Config::Index>(n));
    });
  });
}

// UnsignedOf<kBytes>::Type is the unsigned integer of kBytes bytes.
template <int kBytes>
struct UnsignedOf;
template <>
struct UnsignedOf<2> {
  using Type = uint16_t;
};
template <>
struct UnsignedOf<4> {
  using Type = uint32_t;
};
template <>
struct UnsignedOf<8> {
  using Type = uint64_t;
};

// Launches backward for a gradient that is dense and aligned, or constant.
template <typename Bits>
int launch_backward(const void* grad_output, bool is_constant, const uint8_t* mask,
                    void* grad_input, int64_t n, CUstream_st* stream) {
  // Backward reads a mask, and takes the configurations of a forward that writes one.
  return choose_config<Bits, /*kMask=*/true>(n, [&](auto config) {
    using Config = decltype(config);
    return launch<relu_backward_kernel<Bits, Config>>(
        count_blocks<Bits, Config>(n), Config::kThreads, stream,
        static_cast<const Bits*>(grad_output), is_constant, mask, static_cast<Bits*>(grad_input),
        static_cast<typename Config::Index>(n));
  });
}

// Launches backward for any other gradient.
inline int launch_backward_strided(const void* grad_output, const GradientLayout& layout,
                                   const uint8_t* mask, void* grad_input, int64_t n,
                                   int element_bytes, CUstream_st* stream) {
  const int elements_of_thread = layout.strides[0] == 1 ? StridedConfig::kElements : 1;
  return launch<relu_backward_strided_kernel>(
      blocks_of(n, StridedConfig::kThreads * elements_of_thread), StridedConfig::kThreads, stream,
      grad_output, layout, mask, grad_input, static_cast<uint32_t>(n), elements_of_thread,
      element_bytes);
}

}  // namespace kernels::elementwise

namespace kernels::cuda {

int relu(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n, CUstream_st* stream) {
  if (mask != nullptr) {
    return elementwise::launch_relu</*kMask=*/true>(dtype, x, out, mask, n, stream);
  }
  return elementwise::launch_relu</*kMask=*/false>(dtype, x, out, mask, n, stream);
}

int relu_backward(DType dtype, const void* grad_output, const GradientLayout& layout,
                  const uint8_t* mask, void* grad_input, int64_t n, CUstream_st* stream) {
  const bool is_constant = layout.is_constant();
  const bool is_dense = layout.is_dense() && has_aligned_rows(grad_output);
  return dispatch_dtype(dtype, [&](auto zero) {
    constexpr int kBytes = sizeof(zero);
    if (!is_constant && !is_dense) {
      return elementwise::launch_backward_strided(grad_output, layout, mask, grad_input, n, kBytes,
                                                  stream);
    }
    using Bits = typename elementwise::UnsignedOf<kBytes>::Type;
    return elementwise::launch_backward<Bits>(grad_output, is_constant, mask, grad_input, n,
                                              stream);
  });
}

}  // namespace kernels::cuda
