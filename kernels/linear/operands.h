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

// Returns the sizes with the last one replaced by `last`.
template <typename Size>
c10::SmallVector<Size, 5> with_last(c10::ArrayRef<Size> sizes, const Size& last) {
  if (sizes.empty()) fail("expected a tensor of at least one dimension");
  c10::SmallVector<Size, 5> result(sizes.begin(), sizes.end());
  result.back() = last;
  return result;
}

// The lines of a matrix: its rows, or its columns.
struct Lines {
  int64_t length;          // elements of a line
  int64_t element_stride;  // from one element of a line to the next
  int64_t line_stride;     // from one line to the next
};

// Returns true if a kernel can read the matrix in place, line by line: the elements of a line are
// adjacent, lines do not overlap, and each begins at a multiple of `alignment` bytes.
inline bool has_readable_lines(const Tensor& matrix, const Lines& lines, int64_t alignment) {
  const bool is_adjacent = lines.element_stride == 1;
  const bool overlaps = lines.line_stride < lines.length;
  const bool is_aligned_everywhere =
      is_aligned(matrix, alignment) && lines.line_stride * matrix.element_size() % alignment == 0;
  return is_adjacent && !overlaps && is_aligned_everywhere;
}

// Returns true if the matrix is row-major with aligned rows, so that a kernel can read it in place.
inline bool is_row_major(const Tensor& matrix, int64_t alignment) {
  Lines rows{};
  rows.length = matrix.size(1);
  rows.element_stride = matrix.stride(1);
  rows.line_stride = matrix.stride(0);
  return has_readable_lines(matrix, rows, alignment);
}

// Returns the same for the transpose: column-major with aligned columns.
inline bool is_column_major(const Tensor& matrix, int64_t alignment) {
  Lines columns{};
  columns.length = matrix.size(0);
  columns.element_stride = matrix.stride(0);
  columns.line_stride = matrix.stride(1);
  return has_readable_lines(matrix, columns, alignment);
}

}  // namespace kernels
