// How the threads of relu_kernel and relu_backward_kernel share the elements, and how many vectors
// and threads each size of tensor gets.

#pragma once

#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/vectors.cuh"

namespace kernels::relu {

// ----------------------------------------------------------------- configurations and their sizes

// How the threads of a launch share the elements. A "vector" is the elements of one 16-byte access.
// A block handles kThreads * kVectors adjacent vectors. The vectors of one thread are kThreads
// vectors apart, so that the threads of a warp always access adjacent vectors. With kVectors = 2:
//
//   thread   0  1  2  ...  kThreads-1   0  1  2  ...  kThreads-1
//            `---- their vector 0 ---'  `---- their vector 1 ---'
template <int kThreadsOfBlock, int kVectorsOfThread, bool kIsLargeTensor>
struct ReluConfig {
  static constexpr int kThreads = kThreadsOfBlock;
  static constexpr int kVectors = kVectorsOfThread;
  // Large tensors have 64-bit indices, and their loads ask L2 to evict the lines last.
  static constexpr bool kIsLarge = kIsLargeTensor;
  using Index = std::conditional_t<kIsLarge, int64_t, uint32_t>;
};

// For large tensors on an H200, blocks of 128 to 384 threads are equally fast; 32 or 64 are slower.
using Large = ReluConfig</*kThreads=*/256, /*kVectors=*/1, /*kIsLarge=*/true>;
using Small = ReluConfig</*kThreads=*/256, /*kVectors=*/1, /*kIsLarge=*/false>;
using SmallByFour = ReluConfig</*kThreads=*/256, /*kVectors=*/4, /*kIsLarge=*/false>;
// With a mask, this is faster than one vector per thread (docs/EXPERIMENTS.md, "ReLU on a GPU").
using SmallWithMask = ReluConfig</*kThreads=*/128, /*kVectors=*/2, /*kIsLarge=*/false>;

// The limits of choose_config, in bytes of the input (x; in backward, the gradient of the output).
struct SizeLimits {
  // From these sizes on, L2 is told to evict the input's lines last. That is faster
  // (docs/DESIGN.md, "ReLU on a GPU", has the probable reason), but for a smaller x it is slower
  // (docs/EXPERIMENTS.md, "ReLU on a GPU").
  static constexpr int64_t kLarge = 256 << 20;         // without a mask
  static constexpr int64_t kLargeWithMask = 64 << 20;  // with a mask, and in backward
  // Between these sizes, without a mask, a thread has four vectors. For fewer bytes, one vector
  // wins because its code is shorter; for more bytes, one wins as well (the same tables).
  static constexpr int64_t kFourVectorsBegin = 512 << 10;
  static constexpr int64_t kFourVectorsEnd = 20 << 20;
};

// Calls body(config) with the ReluConfig for n elements of type T. Returns what body returns.
template <typename T, bool kMask, typename Body>
int choose_config(int64_t n, const Body& body) {
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  // float64, which few use, has only the kernels of Large, so that fewer kernels are compiled.
  constexpr bool kHasSmall = sizeof(T) < 8;
  if constexpr (kHasSmall && kMask) {
    if (bytes < SizeLimits::kLargeWithMask) return body(SmallWithMask{});
  }
  if constexpr (kHasSmall && !kMask) {
    const bool has_four_vectors =
        SizeLimits::kFourVectorsBegin <= bytes && bytes < SizeLimits::kFourVectorsEnd;
    if (has_four_vectors) return body(SmallByFour{});
    if (bytes < SizeLimits::kLarge) return body(Small{});
  }
  return body(Large{});
}

// ----------------------------------------------------------------------- the elements of a thread

// The elements of a thread. Vector u, of kSize elements, begins at element first + u * kStride. The
// functions of ForwardOfThread and BackwardOfThread take u * kStride as `offset`: a constant in
// unrolled loops, so that all accesses of a thread share one base register.
template <typename Config, int kSize>
struct ThreadElements {
  using Index = typename Config::Index;
  static constexpr int kStride = Config::kThreads * kSize;
  static constexpr int kBlockElements = kStride * Config::kVectors;
  const Index block_first = static_cast<Index>(blockIdx.x) * kBlockElements;
  const Index first = block_first + threadIdx.x * kSize;

  // Returns whether all vectors of all threads of the block exist, as in each block but the last.
  __device__ bool block_is_full(Index n) const { return block_first + kBlockElements <= n; }
};

template <typename T, typename Config>
int count_blocks(int64_t n) {
  return divide_up_to_int(n, ThreadElements<Config, Vector<T>::kSize>::kBlockElements);
}

}  // namespace kernels::relu
