// The operands of Linear -> ReLU -> divide as torch's tensors, and the layouts that a kernel can
// read in place.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "torch_support/tensor.h"

namespace kernels {

// The arguments of relu(x weight^T + bias) / divisor. The struct only refers to the tensors.
struct LinearInputs {
  const Tensor& x;                    // [..., K]
  const Tensor& weight;               // [N, K]
  const std::optional<Tensor>& bias;  // [N], or none
  double divisor;
};

// Returns x [..., K] as a matrix [M, K]: a view, or a copy where no view is possible. The ops that
// it calls work under autograd, traces and both kinds of vmap.
inline Tensor as_matrix(const Tensor& x) {
  if (x.dim() == 2) return x;
  if (x.dim() == 1) return x.unsqueeze(0);
  if (!x.key_set().has(at::DispatchKey::Batched)) return x.flatten(0, -2);
  // The older vmap has no rule for flatten(). Elsewhere flatten() is better: reshape() compares
  // sizes, which raises an error in traces whose sizes depend on data.
  c10::SymInt m = 1;
  for (int64_t d = 0; d < x.dim() - 1; ++d) m = m * x.sym_size(d);
  return x.reshape_symint({m, x.sym_size(-1)});
}

template <typename Size>
c10::SmallVector<Size, 5> with_last(c10::ArrayRef<Size> sizes, const Size& last) {
  if (sizes.empty()) fail("expected a tensor of at least one dimension");
  c10::SmallVector<Size, 5> result(sizes.begin(), sizes.end());
  result.back() = last;
  return result;
}

// The rows of a matrix, or of its transpose.
struct Rows {
  int64_t length;          // elements of a row
  int64_t element_stride;  // from one element of a row to the next
  int64_t row_stride;      // from one row to the next
};

// Returns true if a kernel can read the matrix in place, row by row: the elements of a row are
// adjacent, rows do not overlap, and each begins at a multiple of `alignment` bytes.
inline bool has_readable_rows(const Tensor& matrix, const Rows& rows, int64_t alignment) {
  const bool is_adjacent = rows.element_stride == 1;
  const bool overlaps = rows.row_stride < rows.length;
  const bool is_aligned_everywhere =
      is_aligned(matrix, alignment) && rows.row_stride * matrix.element_size() % alignment == 0;
  return is_adjacent && !overlaps && is_aligned_everywhere;
}

// Returns true if the matrix is row-major with aligned rows, so that a kernel can read it in place.
inline bool is_row_major(const Tensor& matrix, int64_t alignment) {
  Rows rows{};
  rows.length = matrix.size(1);
  rows.element_stride = matrix.stride(1);
  rows.row_stride = matrix.stride(0);
  return has_readable_rows(matrix, rows, alignment);
}

// As is_row_major, for the transpose of the matrix.
inline bool is_column_major(const Tensor& matrix, int64_t alignment) {
  Rows rows_of_transpose{};
  rows_of_transpose.length = matrix.size(0);
  rows_of_transpose.element_stride = matrix.stride(0);
  rows_of_transpose.row_stride = matrix.stride(1);
  return has_readable_rows(matrix, rows_of_transpose, alignment);
}

}  // namespace kernels
