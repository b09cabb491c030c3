// Tests ReLU's CUDA kernels, forward and backward, on random operands, on a CPU: `relu SEED CASES`.
// Compares every element, every bit of a mask, and the memory around the results. Prints the
// kernels that ran, a line each.

#include "relu/relu.cu"

#include "operands.h"

namespace {

// The bits of infinity. The bits of a NaN, without its sign, are a larger number.
uint64_t infinity_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0x7f800000;
    case DType::kFloat64:
      return 0x7ff0000000000000;
    case DType::kFloat16:
      return 0x7c00;
    case DType::kBFloat16:
      return 0x7f80;
  }
  return 0;  // not reached
}

// The results that are expected for an element x of `size` bytes. They follow from the bits of x.
struct Expected {
  uint64_t relu;         // as the bits of the result
  bool gradient_passes;  // the bit of the mask

  Expected(DType dtype, uint64_t x, int size) {
    const uint64_t sign = uint64_t{1} << (8 * size - 1);
    const bool has_sign = (x & sign) != 0;
    const uint64_t magnitude = x & ~sign;
    const bool is_nan = magnitude > infinity_of(dtype);
    const bool is_zero = magnitude == 0;  // or -0
    const bool is_negative = has_sign && !is_zero && !is_nan;
    relu = is_negative ? 0 : x;
    gradient_passes = !is_negative && !is_zero;
  }
};

int size_of(DType dtype) {
  if (dtype == DType::kFloat64) return 8;
  return dtype == DType::kFloat32 ? 4 : 2;
}

// Returns a number of elements. One in six is a little below or above the size from which a thread
// handles four vectors. No size is large, because float64 takes the kernels for large tensors at
// every size.
int64_t draw_size(int size) {
  if (one_in(6)) return relu::SizeLimits::kFourVectorsBegin / size + draw(-300, 9000);
  return one_in(3) ? draw(1, 300) : draw(1, 20000);
}

// Returns where the layout puts element i of the gradient: its index in the buffer.
int64_t index_of(const GradientLayout& layout, int64_t i) {
  if (layout.dimensions == 1) return i * layout.strides[0];
  const int64_t inner = i % layout.sizes[0];
  const int64_t outer = i / layout.sizes[0];
  return inner * layout.strides[0] + outer * layout.strides[1];
}

// Runs and checks the backward kernels, with the mask that the forward kernel has written.
void check_backward(DType dtype, const Mask& mask, int64_t n) {
  const int size = size_of(dtype);
  const int64_t rows = (n + 2) / 3;
  const GradientLayout layouts[] = {
      {1, {n}, {1}},              // dense
      {1, {n}, {0}},              // constant
      {2, {3, rows}, {1, 4}},     // rows of three elements, with a gap after each
      {2, {3, rows}, {rows, 1}},  // transposed
  };
  for (const GradientLayout& layout : layouts) {
    Buffer grad_output(4 * rows * size, 0);
    Buffer grad_input(n * size, 0);
    const ReluBackwardArguments call{dtype,  n,         grad_output.data,
                                     layout, mask.data, grad_input.data};
    note_launch(cuda::relu_backward(call, nullptr));
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t gradient = grad_output.element(index_of(layout, i), size);
      const uint64_t expected = mask.bit(i) ? gradient : 0;
      require(grad_input.element(i, size) == expected, "backward", dtype, n, i);
    }
    require(grad_input.has_intact_guards(), "written beyond the gradient", dtype, n);
  }
}

// Runs and checks the forward kernel on random elements, and the backward kernels if it has a mask.
void check(DType dtype) {
  const int size = size_of(dtype);
  const int64_t n = draw_size(size);
  Buffer x(n * size, 0);
  Buffer out(n * size, 0);
  Mask mask(n);
  const bool has_mask = one_in(2);
  const ReluArguments call{dtype, n, x.data, out.data, has_mask ? mask.data : nullptr};
  note_launch(cuda::relu(call, nullptr));
  for (int64_t i = 0; i < n; ++i) {
    const Expected expected(dtype, x.element(i, size), size);
    require(out.element(i, size) == expected.relu, "relu", dtype, n, i);
    if (has_mask) require(mask.bit(i) == expected.gradient_passes, "mask", dtype, n, i);
  }
  require(out.has_intact_guards() && mask.has_intact_guards(), "written beyond the result", dtype,
          n);
  if (!has_mask) return;
  require(mask.unused_bits_are_zero(), "bits after the last", dtype, n);
  check_backward(dtype, mask, n);
}

}  // namespace

int main(int, char** arguments) {
  generator.seed(atoi(arguments[1]));
  for (int cases = atoi(arguments[2]); cases > 0; --cases) {
    check(static_cast<DType>(draw(0, static_cast<int>(DType::kBFloat16))));
  }
  print_launched();
}
