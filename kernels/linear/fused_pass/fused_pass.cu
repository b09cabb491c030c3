// The fused pass on a GPU: the elementwise work of Linear -> ReLU -> divide outside of GEMM
// kernels. operator/forward.h and operator/backward.h call it through launchers.h, which says what
// the functions compute. This file launches the kernels of forward.cuh and backward.cuh, which see
// rows as vectors.cuh says. fused_pass_cpu.cpp is the pass on a CPU, with cpu_mask.h and
// cpu_blocks.h.
//
// Why it is fast: one pass over memory takes the place of torch's two or three elementwise kernels
// and of its column sum. Each element is read at most once and written at most once, by 16-byte
// accesses if rows are aligned.

#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "launchers.h"
#include "linear/epilogue.cuh"
#include "linear/fused_pass/backward.cuh"
#include "linear/fused_pass/forward.cuh"
#include "linear/fused_pass/vectors.cuh"

namespace kernels::cuda {

int linear_fused_pass(const FusedPassArguments& call, CUstream_st* stream) {
  using namespace fused_pass;
  return dispatch_dtype(call.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t padded_row_vectors = ForwardConfig::padded_row_vectors<T>(call.n);
    const int64_t all_vectors = call.m * padded_row_vectors;
    // In bytes. has_aligned_rows takes 0 for a single row.
    const int64_t row_stride = call.m == 1 ? 0 : call.n * sizeof(T);
    return launch<forward_kernel<T>>(
        divide_up_to_int(all_vectors, ForwardConfig::kThreads), ForwardConfig::kThreads, stream,
        static_cast<T*>(call.out), Divisor<Compute<T>>(call.divisor), call.mask, call.n,
        padded_row_vectors, all_vectors, has_aligned_rows(call.out, row_stride));
  });
}

// The bytes of BackwardArguments::sums [grid.blocks_of_strip, n].
size_t linear_fused_pass_backward_workspace_bytes(const FusedPassBackwardArguments& call) {
  if (call.grad_bias == nullptr) return 0;
  const fused_pass::BlockGrid grid(call.m, call.n, bytes_of_element(call.dtype));
  const int sum_bytes = call.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return grid.blocks_of_strip * call.n * sum_bytes;
}

int linear_fused_pass_backward(const FusedPassBackwardArguments& call, CUstream_st* stream) {
  using namespace fused_pass;
  return dispatch_dtype(call.dtype, [&](auto zero) {
    using T = decltype(zero);
    const BlockGrid grid(call.m, call.n, sizeof(T));
    const BackwardArguments<T> arguments(call, grid);
    const dim3 blocks(static_cast<unsigned>(grid.strips),
                      static_cast<unsigned>(grid.blocks_of_strip));
    const int status =
        launch<backward_kernel<T>>(blocks, BackwardConfig::kThreads, stream, arguments);
    if (status != cudaSuccess || call.grad_bias == nullptr) return status;
    return launch<grad_bias_kernel<T>>(
        divide_up_to_int(call.n, GradBiasConfig::kColumns), GradBiasConfig::kThreads, stream,
        static_cast<const Compute<T>*>(arguments.sums), grid.blocks_of_strip, call.n,
        static_cast<T*>(call.grad_bias));
  });
}

}  // namespace kernels::cuda
