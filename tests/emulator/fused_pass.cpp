// Tests the CUDA kernels of the fused pass, forward and backward, on random operands, on a CPU:
// `fused_pass SEED CASES`. Compares every element, every bit of a mask, every column's sum, and the
// memory around the results. Prints the kernels that ran, a line each.

#include "linear/fused_pass/fused_pass.cu"

#include "operands.h"

namespace {

// Returns by how many bytes an operand's address exceeds a multiple of 16. Mostly it is 0, and
// always a multiple of the size of an element.
int64_t draw_misalignment(int size) { return one_in(3) ? draw(0, 15) / size * size : 0; }

// A random matrix of numbers of type T, a fourth of which are 0, at any address that is a multiple
// of their size.
template <typename T>
struct Matrix : Buffer {
  static constexpr int64_t kSize = sizeof(T);

  Matrix(int64_t m, int64_t n) : Buffer(m * n * kSize, draw_misalignment(kSize)) {
    std::normal_distribution<float> normal;
    T* const to = reinterpret_cast<T*>(data);
    for (int64_t i = 0; i < m * n; ++i) to[i] = static_cast<T>(one_in(4) ? 0 : normal(generator));
    before = memory;
  }

  // Element i, now and before a kernel ran.
  T at(int64_t i) const { return reinterpret_cast<const T*>(data)[i]; }
  T at_before(int64_t i) const {
    return reinterpret_cast<const T*>(before.data() + (data - memory.data()))[i];
  }
};

// Runs the kernels for matrices [m, n] of type T, and checks their results.
template <typename T>
struct Checks {
  using Wide = fused_pass::Compute<T>;

  DType dtype;
  double divisor;
  int64_t m;
  int64_t n;
  int64_t size = m * n;
  int64_t mask_row_bytes = divide_up(n, 8);

  // The value of x, exactly.
  static double wide(T x) { return static_cast<double>(static_cast<Wide>(x)); }

  // x / divisor as the kernels compute it, in Wide, and then rounded to T.
  T divided(Wide x) const { return static_cast<T>(x / static_cast<Wide>(divisor)); }

  // An element's bit of the mask. The columns from n on are unused bits.
  bool bit(const Buffer& mask, int64_t row, int64_t column) const {
    return ((mask.data[row * mask_row_bytes + column / 8] >> (column % 8)) & 1) != 0;
  }

  // Runs and checks the forward kernel. It writes the mask if has_mask.
  void forward(Buffer& mask, bool has_mask) const {
    Matrix<T> out(m, n);
    FusedPassArguments call{};
    call.dtype = dtype;
    call.divisor = divisor;
    call.m = m;
    call.n = n;
    call.out = out.data;
    call.mask = has_mask ? mask.data : nullptr;
    note_launch(cuda::linear_fused_pass(call, nullptr));
    for (int64_t i = 0; i < size; ++i) {
      const Wide z = static_cast<Wide>(out.at_before(i));
      const T expected = divided(z < 0 ? Wide{0} : z);
      require(wide(out.at(i)) == wide(expected), "out", dtype, size, i);
    }
    if (has_mask) check_mask(mask, out);
    require(out.has_intact_guards() && mask.has_intact_guards(), "written beyond the result", dtype,
            size);
  }

  // Checks all bits of the mask, also the unused ones. Before the kernel ran, out was z.
  void check_mask(const Buffer& mask, const Matrix<T>& out) const {
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t column = 0; column < 8 * mask_row_bytes; ++column) {
        const int64_t i = row * n + column;
        const bool is_unused = column >= n;
        const bool expected = !is_unused && wide(out.at_before(i)) > 0;
        require(bit(mask, row, column) == expected, "mask", dtype, size, i);
      }
    }
  }

  // Runs and checks the backward kernels on a mask that `forward` has filled in.
  void backward(const Buffer& mask) const {
    Matrix<T> grad_output(m, n);
    Matrix<T> grad_z(m, n);
    Matrix<T> grad_bias(1, n);
    const bool has_bias = !one_in(3);
    FusedPassBackwardArguments call{};
    call.dtype = dtype;
    call.divisor = divisor;
    call.m = m;
    call.n = n;
    call.grad_output = grad_output.data;
    call.mask = mask.data;
    call.grad_z = grad_z.data;
    call.grad_bias = has_bias ? grad_bias.data : nullptr;
    Buffer workspace(cuda::linear_fused_pass_backward_workspace_bytes(call), 0);
    call.workspace = workspace.data;
    note_launch(cuda::linear_fused_pass_backward(call, nullptr));
    for (int64_t i = 0; i < size; ++i) {
      const T quotient = divided(static_cast<Wide>(grad_output.at(i)));
      const double expected = bit(mask, i / n, i % n) ? wide(quotient) : 0;
      require(wide(grad_z.at(i)) == expected, "grad_z", dtype, size, i);
    }
    if (has_bias) check_column_sums(grad_z, grad_bias);
    require(grad_z.has_intact_guards() && grad_bias.has_intact_guards() &&
                workspace.has_intact_guards(),
            "written beyond the gradients", dtype, size);
  }

  // Checks that grad_bias has the sums of the columns of grad_z.
  void check_column_sums(const Matrix<T>& grad_z, const Matrix<T>& grad_bias) const {
    for (int64_t column = 0; column < n; ++column) {
      double sum = 0;
      double magnitudes = 0;
      for (int64_t row = 0; row < m; ++row) {
        const double term = wide(grad_z.at(row * n + column));
        sum += term;
        magnitudes += std::abs(term);
      }
      const double error = std::abs(wide(grad_bias.at(column)) - sum);
      const bool is_right = error <= error_bound(sum, magnitudes);
      require(is_right, "grad_bias", dtype, size, column);
    }
  }

  // The largest error that the sum of a column may have. The terms are added in Wide, where each
  // goes through at most 80 roundings, and the sum is then rounded to T. `magnitudes` is the sum of
  // |term|.
  static double error_bound(double sum, double magnitudes) {
    const double rounding_in_wide = sizeof(Wide) == 8 ? 0x1p-53 : 0x1p-24;
    return 80 * rounding_in_wide * magnitudes + rounding_to_t() * std::abs(sum);
  }

  // Twice the largest relative error of rounding to T. For both half types it is bfloat16's.
  static double rounding_to_t() {
    if (sizeof(T) == 8) return 0x1p-52;
    if (sizeof(T) == 4) return 0x1p-23;
    return 0x1p-8;
  }
};

// Checks a random case: few or many rows, few or many columns, and one of some divisors.
template <typename T>
void check(DType dtype) {
  constexpr double kDivisors[] = {2, -0.5, 3, -7.1, 1e-3};
  const double divisor = kDivisors[draw(0, 4)];
  const int64_t m = draw(1, one_in(2) ? 9 : 700);
  const int64_t widest = std::max<int64_t>(60000 / m, 1);
  const int64_t n = draw(1, one_in(2) ? std::min<int64_t>(widest, 70) : widest);
  const Checks<T> checks{dtype, divisor, m, n};
  Buffer mask(m * checks.mask_row_bytes, 0);
  const bool has_mask = !one_in(3);
  checks.forward(mask, has_mask);
  if (has_mask) checks.backward(mask);
}

}  // namespace

int main(int, char** arguments) {
  generator.seed(atoi(arguments[1]));
  for (int cases = atoi(arguments[2]); cases > 0; --cases) {
    const DType dtype = static_cast<DType>(draw(0, static_cast<int>(DType::kBFloat16)));
    if (dtype == DType::kFloat32) check<float>(dtype);
    if (dtype == DType::kFloat64) check<double>(dtype);
    if (dtype == DType::kFloat16) check<__half>(dtype);
    if (dtype == DType::kBFloat16) check<__nv_bfloat16>(dtype);
  }
  print_launched();
}
