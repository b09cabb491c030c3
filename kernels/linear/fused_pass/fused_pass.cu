// The fused pass: the elementwise part of Linear -> ReLU -> divide that no GEMM kernel computes.
// operator/forward.h and operator/backward.h call it through launchers.h.
//
//   linear_fused_pass            Forward, after torch's product has written z = x weight^T + bias
//                                to out: out = relu(out) / divisor in place, and the mask for
//                                backward (forward.cuh).
//   linear_fused_pass_backward   Backward, before the products of the other gradients: grad_z =
//                                grad_output / divisor where the mask's bit is 1, else 0. Also
//                                grad_bias, the sum of each column of grad_z (backward.cuh).
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

int linear_fused_pass(DType dtype, void* out, double divisor, uint8_t* mask, int64_t m, int64_t n,
                      CUstream_st* stream) {
  using namespace fused_pass;
  return dispatch_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t row_vectors = ForwardConfig::row_vectors<T>(n);
    const int64_t all_vectors = m * row_vectors;
    const int64_t out_stride = m == 1 ? 0 : n * sizeof(T);  // in bytes, for has_aligned_rows
    return launch<forward_kernel<T>>(blocks_of(all_vectors, ForwardConfig::kThreads),
                                     ForwardConfig::kThreads, stream, static_cast<T*>(out),
                                     Divisor<Compute<T>>(divisor), mask, n, row_vectors,
                                     all_vectors, has_aligned_rows(out, out_stride));
  });
}

// The bytes of sums [gridDim.y, n], in float, or in double for float64.
size_t linear_fused_pass_backward_workspace_bytes(DType dtype, int64_t m, int64_t n) {
  const fused_pass::BlockGrid grid(m, n, bytes_of_element(dtype));
  const int sum_bytes = dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return grid.blocks_of_strip * n * sum_bytes;
}

int linear_fused_pass_backward(DType dtype, const void* grad_output, const uint8_t* mask,
                               double divisor, void* grad_z, void* grad_bias, void* workspace,
                               int64_t m, int64_t n, CUstream_st* stream) {
  using namespace fused_pass;
  return dispatch_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    using Sum = Compute<T>;
    const bool has_bias = grad_bias != nullptr;
    Sum* const sums = has_bias ? static_cast<Sum*>(workspace) : nullptr;
    const int64_t grad_row_bytes = n * sizeof(T);
    const bool is_aligned =
        has_aligned_rows(grad_output, grad_row_bytes) && has_aligned_rows(grad_z, grad_row_bytes);
    const BlockGrid grid(m, n, sizeof(T));
    const dim3 blocks(static_cast<unsigned>(grid.strips),
                      static_cast<unsigned>(grid.blocks_of_strip));
    const int status = launch<backward_kernel<T>>(
        blocks, BackwardConfig::kThreads, stream, static_cast<const T*>(grad_output), mask,
        Divisor<Sum>(divisor), static_cast<T*>(grad_z), sums, m, n, grid.rows_of_block,
        grid.strip_width, is_aligned);
    if (status != cudaSuccess || !has_bias) return status;
    return launch<add_partials_kernel<T>>(
        blocks_of(n, AddPartialsConfig::kColumns), AddPartialsConfig::kThreads, stream,
        static_cast<const Sum*>(sums), grid.blocks_of_strip, n, static_cast<T*>(grad_bias));
  });
}

}  // namespace kernels::cuda
