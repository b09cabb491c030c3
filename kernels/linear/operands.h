// The operands of Linear -> ReLU -> divide as torch's tensors: their shapes, and which layouts a
// kernel can read in place.

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

// Returns x [..., K] as a matrix [rows, K]: a view, or a copy where no view is possible. The ops
// that it calls work under autograd, traces and both kinds of vmap.
inline Tensor view_as_matrix(const Tensor& x) {
  if (x.dim() == 2) return x;
  if (x.dim() == 1) return x.unsqueeze(0);
  if (!x.key_set().has(at::DispatchKey::Batched)) return x.flatten(0, -2);
  // The older vmap has no rule for flatten(). In traces reshape() would compare sizes that data
  // decide.
  c10::SymInt rows = 1;
  for (int64_t d = 0; d < x.dim() - 1; ++d) rows = rows * x.sym_size(d);
  return x.reshape_symint({rows, x.sym_size(-1)});
}

// Returns the sizes with the last one replaced by `last`.
template <typename Size>
c10::SmallVector<Size, 5> replace_last(c10::ArrayRef<Size> sizes, const Size& last) {
  if (sizes.empty()) fail("expected a tensor of at least one dimension");
  c10::SmallVector<Size, 5> result(sizes.begin(), sizes.end());
  result.back() = last;
  return result;
}

// Returns true if a kernel can read the matrix in place, line by line. A line runs along dimension
// line_dimension: lines are the rows if that is 1 and other_dimension 0, and the columns if that is
// 0 and other_dimension 1.
//
// The elements of a line have to be adjacent. Lines must not overlap, and each has to begin at a
// multiple of `alignment` bytes.
inline bool has_readable_lines(const Tensor& matrix, int64_t alignment, int line_dimension,
                               int other_dimension) {
  const int64_t line_stride = matrix.stride(other_dimension);
  const bool is_adjacent = matrix.stride(line_dimension) == 1;
  const bool overlaps = line_stride < matrix.size(line_dimension);
  const bool is_aligned_everywhere =
      is_aligned(matrix, alignment) && line_stride * matrix.element_size() % alignment == 0;
  return is_adjacent && !overlaps && is_aligned_everywhere;
}

// Returns true if the matrix is row-major with aligned rows, so that a kernel can read it in place.
inline bool is_row_major(const Tensor& matrix, int64_t alignment) {
  return has_readable_lines(matrix, alignment, /*line_dimension=*/1, /*other_dimension=*/0);
}

// Returns the same for the transpose: column-major with aligned columns.
inline bool is_column_major(const Tensor& matrix, int64_t alignment) {
  return has_readable_lines(matrix, alignment, /*line_dimension=*/0, /*other_dimension=*/1);
}

}  // namespace kernels
