// ReLU's CUDA kernels on random operands: `relu SEED CASES`. Compares every element and every bit
// of a mask, and what lies around results. Prints the kernels that ran, a line each.

#include "relu/relu.cu"

#include "operands.h"

namespace {

// relu of an element's bits, and whether its gradient passes, by what the dtypes' bits mean.
struct Expected {
  uint64_t relu;
  bool keeps;

  Expected(DType dtype, uint64_t x, int size) {
    const uint64_t sign = uint64_t{1} << (8 * size - 1), magnitude = x & ~sign;
    const uint64_t infinity = dtype == DType::kFloat32   ? 0x7f800000
                              : dtype == DType::kFloat64 ? 0x7ff0000000000000
                              : dtype == DType::kFloat16 ? 0x7c00
                                                         : 0x7f80;
    const bool is_nan = magnitude > infinity;
    relu = x & sign && magnitude != 0 && !is_nan ? 0 : x;
    keeps = is_nan || (!(x & sign) && magnitude != 0);
  }
};

// Sizes on both sides of that from which a thread has four vectors. The large kernels run for
// float64.
int64_t draw_size(int size) {
  if (one_in(6)) return elementwise::SizeLimits::kFourVectorsFrom / size + draw(-300, 9000);
  return one_in(3) ? draw(1, 300) : draw(1, 20000);
}

void check(DType dtype) {
  const int size = dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
  const int64_t n = draw_size(size);
  Buffer x(n * size, 0), out(n * size, 0);
  Mask mask(n);
  const bool has_mask = one_in(2);
  note_launch(cuda::relu(dtype, x.data, out.data, has_mask ? mask.data : nullptr, n, nullptr));
  for (int64_t i = 0; i < n; ++i) {
    const Expected expected(dtype, x.element(i, size), size);
    require(out.element(i, size) == expected.relu, "relu", dtype, n, i);
    if (has_mask) require(mask.bit(i) == expected.keeps, "mask", dtype, n, i);
  }
  require(out.has_guards() && mask.has_guards(), "written beyond the result", dtype, n);
  if (!has_mask) return;
  require(mask.has_zeros_after(), "bits after the last", dtype, n);

  // Dense, constant, in rows of three with gaps, in columns.
  const int64_t rows = (n + 2) / 3;
  for (const GradientLayout& layout :
       {GradientLayout{1, {n}, {1}}, GradientLayout{1, {n}, {0}},
        GradientLayout{2, {3, rows}, {1, 4}}, GradientLayout{2, {3, rows}, {rows, 1}}}) {
    Buffer grad_output(4 * rows * size, 0), grad_input(n * size, 0);
    note_launch(cuda::relu_backward(dtype, grad_output.data, layout, mask.data, grad_input.data, n,
                                    nullptr));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t outer = layout.dimensions == 1 ? 0 : i / 3;
      const int64_t from = (i - 3 * outer) * layout.strides[0] + outer * layout.strides[1];
      const uint64_t expected = mask.bit(i) ? grad_output.element(from, size) : 0;
      require(grad_input.element(i, size) == expected, "backward", dtype, n, i);
    }
    require(grad_input.has_guards(), "written beyond the gradient", dtype, n);
  }
}

}  // namespace

int main(int, char** arguments) {
  generator.seed(atoi(arguments[1]));
  for (int cases = atoi(arguments[2]); cases > 0; --cases) {
    check(static_cast<DType>(draw(0, static_cast<int>(DType::kBFloat16))));
  }
  print_launched();
}
