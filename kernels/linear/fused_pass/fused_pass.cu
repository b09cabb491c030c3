// The fused pass: the elementwise work of Linear -> ReLU -> divide outside of GEMM kernels.
// operator/forward.h and operator/backward.h call it through launchers.h.
//
//   linear_fused_pass            Forward, after torch's product has written z = x weight^T + bias
//                                to out: out = relu(out) / divisor in place, and the mask for
//                                backward (forward.cuh).
//   linear_fused_pass_backward   Backward, before the products for grad_x and grad_weight:
//                                grad_z = grad_output / divisor where the mask's bit is 1, else 0.
//                                Also grad_bias, the sum of each column of grad_z (backward.cuh).
//
// Shapes: out, grad_output and grad_z [m, n], contiguous, of any floating dtype; grad_bias [n];
// mask [m, (n + 7) / 8] bytes. Each row of the mask begins with a byte of its own, and bit j % 8 of
// byte j / 8 of a row belongs to column j. Divisor (epilogue.cuh) holds the divisor in the form
// that is fastest to divide by.
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
        blocks_of(all_vectors, ForwardConfig::kThreads), ForwardConfig::kThreads, stream,
        static_cast<T*>(call.out), Divisor<Compute<T>>(call.divisor), call.mask, call.n,
        padded_row_vectors, all_vectors, has_aligned_rows(call.out, row_stride));
  });
}

// The workspace is BackwardArguments::sums [grid.blocks_of_strip, n]: a row of column sums for each
// block of a strip, in float, or in double for float64.
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
        blocks_of(call.n, GradBiasConfig::kColumns), GradBiasConfig::kThreads, stream,
        static_cast<const Compute<T>*>(arguments.sums), grid.blocks_of_strip, call.n,
        static_cast<T*>(call.grad_bias));
  });
}

}  // namespace kernels::cuda
