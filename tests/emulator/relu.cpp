// ReLU's CUDA kernels on random operands: `relu SEED CASES`. Compares every element and every bit
// of a mask, and what lies around results. Prints the kernels that ran, a line each.

#include "relu/relu.cu"

#include "operands.h"

namespace {

bool is_floating(DType dtype) { return dtype <= DType::kBFloat16; }

// relu of an element's bits, and whether its gradient passes, by what the dtypes' bits mean.
struct Expected {
  uint64_t relu;
  bool keeps;

  Expected(DType dtype, uint64_t x) {
    const uint64_t sign = uint64_t{1} << (8 * size_of(dtype) - 1), magnitude = x & ~sign;
    if (!is_floating(dtype)) {
      relu = dtype != DType::kUInt8 && x & sign ? 0 : x;
      return;
    }
    const uint64_t infinity = dtype == DType::kFloat32   ? 0x7f800000
                              : dtype == DType::kFloat64 ? 0x7ff0000000000000
                              : dtype == DType::kFloat16 ? 0x7c00
                                                         : 0x7f80;
    const bool is_nan = magnitude > infinity;
    relu = x & sign && magnitude != 0 && !is_nan ? 0 : x;
    keeps = is_nan || (!(x & sign) && magnitude != 0);
  }
};

void check_dense(DType dtype) {
  const int size = size_of(dtype);
  // Misaligned operands go by scalar accesses up to 2^16 elements.
  const int64_t n = one_in(4) ? draw(1, 300) : one_in(4) ? draw(1 << 16, 80000) : draw(1, 20000);
  Buffer x(n * size, misalignment(size)), out(n * size, misalignment(size));
  Mask mask(n);
  const bool has_mask = is_floating(dtype) && one_in(2), is_in_place = one_in(4);
  Buffer& result = is_in_place ? x : out;
  note_launch(has_mask ? cuda::relu_with_mask(dtype, x.data, result.data, mask.data, n, nullptr)
                       : cuda::relu(dtype, x.data, result.data, n, nullptr));
  for (int64_t i = 0; i < n; ++i) {
    const Expected expected(dtype, x.element_before(i, size));
    require(result.element(i, size) == expected.relu, "relu", dtype, n, i);
    if (has_mask) require(mask.bit(i) == expected.keeps, "mask", dtype, n, i);
  }
  require(result.has_guards() && mask.has_guards(), "written beyond the result", dtype, n);
  if (!has_mask) return;
  require(mask.has_zeros_after(), "bits after the last", dtype, n);

  for (int places = 0; places < 3; ++places) {
    Buffer grad_output(n * size, misalignment(size)), grad_input(n * size, misalignment(size));
    note_launch(
        cuda::relu_backward(dtype, grad_output.data, mask.data, grad_input.data, n, nullptr));
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t expected = mask.bit(i) ? grad_output.element(i, size) : 0;
      require(grad_input.element(i, size) == expected, "backward", dtype, n, i);
    }
    require(grad_input.has_guards(), "written beyond the gradient", dtype, n);
  }
}

// Sizes, and strides in any order, with gaps and repeated elements or without.
struct RandomLayout : Layout {
  int64_t n = 1, span;

  RandomLayout() {
    const int64_t most = one_in(5) ? 300000 : 20000;
    if (one_in(4)) {  // a long dimension first, so that what lies across often goes by tiles
      size[ndim++] = draw(200, 700);
      n = size[0];
    }
    for (const int64_t wanted = draw(1, 5); ndim < wanted && n <= most / 2; ++ndim) {
      size[ndim] = draw(2, one_in(2) ? 9 : std::max<int64_t>(most / n, 2));
      if (n * size[ndim] > most) size[ndim] = 2;
      n *= size[ndim];
    }
    draw_strides();
  }

  void draw_strides() {
    int order[kMaxDims];
    for (int d = 0; d < ndim; ++d) order[d] = d;
    if (one_in(2)) std::shuffle(order, order + ndim, generator);
    int64_t next = one_in(3) ? draw(2, 9) : 1;
    for (int i = 0; i < ndim; ++i) {
      const int d = order[i];
      stride[d] = one_in(5) ? 0 : next;
      if (stride[d] == 0) continue;
      next = next * size[d] + (one_in(3) ? draw(1, 5) : 0);
    }
    span = next;
  }

  int64_t place(int64_t i) const {
    int64_t offset = 0;
    for (int d = 0; d < ndim; ++d) {
      offset += i % size[d] * stride[d];
      i /= size[d];
    }
    return offset;
  }
  bool has_repetitions() const { return std::count(stride, stride + ndim, 0) > 0; }
};

void check_strided(DType dtype) {
  RandomLayout layout;
  const int size = size_of(dtype);
  const int64_t n = layout.n;
  Buffer x(layout.span * size, misalignment(size)), out(n * size, 0);
  Mask mask(n);
  const bool is_in_place = !layout.has_repetitions() && one_in(3);
  const bool has_mask = is_floating(dtype) && !is_in_place && one_in(2);
  void* const to = is_in_place ? x.data : out.data;
  note_launch(has_mask
                  ? cuda::relu_with_mask_strided(dtype, x.data, to, mask.data, n, layout, nullptr)
                  : cuda::relu_strided(dtype, x.data, to, n, layout, nullptr));
  std::vector<bool> is_element(layout.span);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t place = layout.place(i);
    is_element[place] = true;
    const Expected expected(dtype, x.element_before(place, size));
    const uint64_t got = is_in_place ? x.element(place, size) : out.element(i, size);
    require(got == expected.relu, "strided relu", dtype, n, i);
    if (has_mask) require(mask.bit(i) == expected.keeps, "strided mask", dtype, n, i);
  }
  for (int64_t i = 0; i < layout.span; ++i) {
    const bool is_same = is_element[i] || x.element(i, size) == x.element_before(i, size);
    require(is_same, "written between the elements", dtype, n, i);
  }
  require(out.has_guards() && x.has_guards() && mask.has_guards(), "written beyond", dtype, n);
  if (has_mask) require(mask.has_zeros_after(), "bits after the last", dtype, n);
}

void check_strided_backward(DType dtype) {
  RandomLayout layout;
  const int size = size_of(dtype);
  const int64_t n = layout.n;
  Buffer grad_output(layout.span * size, misalignment(size));
  Buffer grad_input(n * size, misalignment(size));
  Mask mask(n);
  note_launch(cuda::relu_backward_strided(dtype, grad_output.data, mask.data, grad_input.data, n,
                                          layout, nullptr));
  for (int64_t i = 0; i < n; ++i) {
    const bool keeps = mask.bit(i);
    const uint64_t expected = keeps ? grad_output.element(layout.place(i), size) : 0;
    require(grad_input.element(i, size) == expected, "strided backward", dtype, n, i);
  }
  require(grad_input.has_guards(), "written beyond the gradient", dtype, n);
}

}  // namespace

int main(int, char** arguments) {
  generator.seed(atoi(arguments[1]));
  for (int cases = atoi(arguments[2]); cases > 0; --cases) {
    const DType dtype = static_cast<DType>(draw(0, static_cast<int>(DType::kUInt8)));
    const int64_t kind = draw(0, 2);
    if (kind == 0) check_dense(dtype);
    if (kind == 1) check_strided(dtype);
    if (kind == 2 && is_floating(dtype)) check_strided_backward(dtype);
  }
  print_launched();
}
