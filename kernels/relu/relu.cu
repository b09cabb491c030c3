// ReLU on CUDA, forward and backward.
//
// The three kernels:
//
//   forward.cuh            relu_kernel: out = x < 0 ? 0 : x. In training it also packs the mask:
//                          one bit for each element, which tells backward where the gradient
//                          passes.
//   backward.cuh           relu_backward_kernel: grad_input = grad_output where the mask's bit is
//                          1, else 0.
//   backward_strided.cuh   relu_backward_strided_kernel: the same for a grad_output that is not
//                          dense in memory, or not aligned.
//
// This file launches them; relu_op.cpp calls it through launchers.h.
//
// Shapes: x, out, grad_output and grad_input have n elements of one dtype. The kernels see them as
// flat arrays that begin at multiples of 16 bytes, with two exceptions: a constant grad_output is a
// single element at any address, and relu_backward_strided_kernel reads a grad_output of any
// strides at any address.
// The mask has (n + 7) / 8 bytes. Bit i % 8 of byte i / 8 belongs to element i.
//
// Why no kernel can be much faster: ReLU does one comparison for each element, which costs nothing
// beside the memory traffic. Every element of x is read once, and every element of out is written
// once, so the practical limit is a copy of x. docs/BENCHMARKS.md has the times of both. On large
// tensors relu_kernel is even faster than the copy, because of a hint to L2 (SizeLimits in
// config.cuh). In training, forward also writes the mask, which in float32 is 1/32 of the bytes of
// x. Backward reads these bits, where torch's backward reads the saved output.
//
// For large tensors the best form is the simplest: each thread has one vector of 16 bytes, and each
// block ends when its elements are done. docs/EXPERIMENTS.md, "ReLU on a GPU", has the forms that
// are slower.

#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "launchers.h"
#include "relu/backward.cuh"
#include "relu/backward_strided.cuh"
#include "relu/config.cuh"
#include "relu/forward.cuh"

namespace kernels::relu {

// The functions of this file return a cudaError_t as an int.

// Launches forward, with or without a mask.
template <bool kMask>
int launch_relu(const ReluArguments& call, CUstream_st* stream) {
  return dispatch_dtype(call.dtype, [&](auto zero) {
    using T = decltype(zero);
    return choose_config<T, kMask>(call.n, [&](auto config) {
      using Config = decltype(config);
      return launch<relu_kernel<T, Config, kMask>>(
          count_blocks<T, Config>(call.n), Config::kThreads, stream, static_cast<const T*>(call.x),
          static_cast<T*>(call.out), call.mask, static_cast<typename Config::Index>(call.n));
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
int launch_backward(const ReluBackwardArguments& call, CUstream_st* stream) {
  // Backward reads a mask, and takes the configurations of a forward that writes one.
  return choose_config<Bits, /*kMask=*/true>(call.n, [&](auto config) {
    using Config = decltype(config);
    return launch<relu_backward_kernel<Bits, Config>>(
        count_blocks<Bits, Config>(call.n), Config::kThreads, stream,
        static_cast<const Bits*>(call.grad_output), call.layout.is_constant(), call.mask,
        static_cast<Bits*>(call.grad_input), static_cast<typename Config::Index>(call.n));
  });
}

// Launches backward for any other gradient.
inline int launch_backward_strided(const ReluBackwardArguments& call, CUstream_st* stream) {
  const int elements_of_thread = call.layout.strides[0] == 1 ? StridedConfig::kElements : 1;
  return launch<relu_backward_strided_kernel>(
      blocks_of(call.n, StridedConfig::kThreads * elements_of_thread), StridedConfig::kThreads,
      stream, call.grad_output, call.layout, call.mask, call.grad_input,
      static_cast<uint32_t>(call.n), elements_of_thread, bytes_of_element(call.dtype));
}

}  // namespace kernels::relu

namespace kernels::cuda {

int relu(const ReluArguments& call, CUstream_st* stream) {
  if (call.mask != nullptr) return relu::launch_relu</*kMask=*/true>(call, stream);
  return relu::launch_relu</*kMask=*/false>(call, stream);
}

int relu_backward(const ReluBackwardArguments& call, CUstream_st* stream) {
  const bool is_dense_and_aligned = call.layout.is_dense() && has_aligned_rows(call.grad_output);
  if (!call.layout.is_constant() && !is_dense_and_aligned) {
    return relu::launch_backward_strided(call, stream);
  }
  return dispatch_dtype(call.dtype, [&](auto zero) {
    using Bits = typename relu::UnsignedOf<sizeof(zero)>::Type;
    return relu::launch_backward<Bits>(call, stream);
  });
}

}  // namespace kernels::cuda
