// ReLU on CUDA, forward and backward. relu_op.cpp calls this file through launchers.h, which says
// what the functions compute. The file launches these kernels:
//
//   forward.cuh            relu_kernel: out = relu(x) and, in training, the mask
//   backward.cuh           relu_backward_kernel, for a grad_output that is dense and aligned to 16
//                          bytes, or constant
//   backward_strided.cuh   relu_backward_strided_kernel, for a grad_output of any strides, at any
//                          address
//
// config.cuh says how the threads of the first two share the elements.
//
// Why no kernel can be much faster: memory is the limit, and each element is read once and written
// once, as in a copy of x. docs/BENCHMARKS.md has the times of both. The mask adds little to that
// traffic: in float32, 1/32 of the bytes of x.
//
// For large tensors the simplest form is the fastest: each thread has one vector of 16 bytes, and
// each block ends when its elements are done (docs/EXPERIMENTS.md, "ReLU on a GPU").

#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "launchers.h"
#include "relu/backward.cuh"
#include "relu/backward_strided.cuh"
#include "relu/config.cuh"
#include "relu/forward.cuh"

namespace kernels::relu {

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

inline int launch_backward_strided(const ReluBackwardArguments& call, CUstream_st* stream) {
  const int elements_of_thread = call.layout.strides[0] == 1 ? StridedConfig::kElements : 1;
  return launch<relu_backward_strided_kernel>(
      divide_up_to_int(call.n, StridedConfig::kThreads * elements_of_thread),
      StridedConfig::kThreads, stream, call.grad_output, call.layout, call.mask, call.grad_input,
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
