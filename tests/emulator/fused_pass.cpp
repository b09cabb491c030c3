// The passes beside torch's product, on random operands: `linear_epilogue SEED CASES`. Compares
// every element, every bit of a mask and every column's sum, and what lies around results. Prints
// the kernels that ran, a line each.

#include "linear/fused_pass.cu"

#include "operands.h"

namespace {

// A matrix of one dtype's numbers, of which each fourth is 0, in memory as the kernels take it.
template <typename T>
struct Matrix : Buffer {
  Matrix(int64_t m, int64_t n) : Buffer(m * n * sizeof(T), misalignment(sizeof(T))) {
    std::normal_distribution<float> normal;
    T* const to = reinterpret_cast<T*>(data);
    for (int64_t i = 0; i < m * n; ++i) to[i] = static_cast<T>(one_in(4) ? 0 : normal(generator));
    before = memory;
  }
  T at(int64_t i) const { return reinterpret_cast<const T*>(data)[i]; }
  T at_before(int64_t i) const {
    return reinterpret_cast<const T*>(before.data() + (data - memory.data()))[i];
  }
};

template <typename T>
void check(DType dtype) {
  using Wide = fused_pass::Compute<T>;
  constexpr double kDivisors[] = {2, -0.5, 3, -7.1, 1e-3};
  const double divisor = kDivisors[draw(0, 4)];
  const int64_t m = draw(1, one_in(2) ? 9 : 700), most = std::max<int64_t>(60000 / m, 1);
  const int64_t n = draw(1, one_in(2) ? std::min<int64_t>(most, 70) : most), size = m * n;
  const int64_t row_bytes = divide_up(n, 8);

  // forward
  Matrix<T> out(m, n);
  Buffer mask(m * row_bytes, 0);
  const bool has_mask = !one_in(3);
  note_launch(cuda::linear_epilogue(dtype, out.data, divisor, has_mask ? mask.data : nullptr, m, n,
                                    nullptr));
  for (int64_t i = 0; i < size; ++i) {
    const Wide z = static_cast<Wide>(out.at_before(i));
    const T expected = static_cast<T>((z < 0 ? 0 : z) / static_cast<Wide>(divisor));
    require(static_cast<Wide>(out.at(i)) == static_cast<Wide>(expected), "out", dtype, size, i);
  }
  for (int64_t i = 0; has_mask && i < 8 * m * row_bytes; ++i) {
    const int64_t row = i / 8 / row_bytes, column = i - 8 * row * row_bytes;
    const bool expected = column < n && static_cast<Wide>(out.at_before(row * n + column)) > 0;
    require((mask.data[i / 8] >> i % 8 & 1) == expected, "mask", dtype, size, i);
  }
  require(out.has_guards() && mask.has_guards(), "written beyond the result", dtype, size);
  if (!has_mask) return;

  // backward
  Matrix<T> grad_output(m, n), grad_z(m, n), grad_bias(1, n);
  Buffer workspace(cuda::linear_epilogue_backward_workspace(dtype, m, n), 0);
  const bool has_bias = !one_in(3);
  note_launch(cuda::linear_epilogue_backward(dtype, grad_output.data, mask.data, divisor,
                                             grad_z.data, has_bias ? grad_bias.data : nullptr,
                                             workspace.data, m, n, nullptr));
  for (int64_t j = 0; j < n; ++j) {
    double sum = 0, magnitudes = 0;
    for (int64_t row = 0; row < m; ++row) {
      const int64_t i = row * n + j;
      const bool keeps = mask.data[row * row_bytes + j / 8] >> j % 8 & 1;
      const Wide quotient = static_cast<Wide>(grad_output.at(i)) / static_cast<Wide>(divisor);
      const Wide expected = static_cast<Wide>(static_cast<T>(keeps ? quotient : 0));
      require(static_cast<Wide>(grad_z.at(i)) == expected, "grad_z", dtype, size, i);
      sum += expected, magnitudes += std::abs(expected);
    }
    const double got = static_cast<double>(static_cast<Wide>(grad_bias.at(j)));
    // The sums in float, and one rounding to T.
    const double unit = sizeof(T) == 2 ? 0x1p-8 : sizeof(T) == 4 ? 0x1p-23 : 0x1p-52;
    const double bound =
        80 * 0x1p-24 * magnitudes * (sizeof(T) == 8 ? 0x1p-29 : 1) + unit * std::abs(sum) + 1e-30;
    if (has_bias) require(std::abs(got - sum) <= bound, "grad_bias", dtype, size, j);
  }
  require(grad_z.has_guards() && grad_bias.has_guards() && workspace.has_guards(),
          "written beyond the gradients", dtype, size);
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
