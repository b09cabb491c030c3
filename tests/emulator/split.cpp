// Rows of float32 split into scaled fp16 (kernels/linear/SPLIT.md), on random operands:
// `split SEED CASES`. Compares every piece, every exponent and state. Prints the kernel that ran.

#include <cmath>

#include "linear/split/pieces.cuh"
#include "operands.h"

namespace {

template <bool kIsPair>
__global__ void split_row_kernel(split::Operand operand, int64_t k) {
  split::split_row<kIsPair>(operand, blockIdx.x, k);
}

// Numbers of some range, zeros among them, some infinite or NaN.
void fill(float* x, int64_t n) {
  std::normal_distribution<float> normal;
  const float spread = one_in(3) ? 12 : 1, middle = one_in(4) ? -120 : one_in(4) ? 100 : 0;
  const int64_t zeros = one_in(2) ? 2 : 1000;
  for (int64_t i = 0; i < n; ++i) {
    const float power = std::exp2(middle + spread * normal(generator));
    x[i] = one_in(zeros) ? 0 : normal(generator) * power;
  }
  if (one_in(5)) x[draw(0, n - 1)] = one_in(2) ? INFINITY : NAN;
  if (one_in(9)) std::fill(x, x + n, 0.0f);
}

// The place of element i among its row's high pieces; low ones are half a step behind.
int64_t place_of(int64_t row, int64_t rows, int64_t i, int64_t padded_k, bool is_pair,
                 bool is_stepwise) {
  constexpr int kOrder[] = {0, 4, 1, 5, 2, 6, 3, 7};  // of the pairs 0 to 7 of each 16
  if (!is_stepwise) return row * padded_k + i;
  if (!is_pair) return (i / 64 * rows + row) * 64 + i % 64;
  return (i / 32 * rows + row) * 64 + i % 32 / 16 * 16 + kOrder[i % 16 / 2] * 2 + i % 2;
}

void check(bool is_pair) {
  const int64_t k = draw(1, one_in(3) ? 20000 : one_in(2) ? 2500 : 300), rows = draw(1, 4);
  const int64_t stride = k + draw(0, 4), padded_k = split::padded(k);
  const bool is_stepwise = !one_in(4);
  Buffer memory(rows * stride * 4, draw(0, 3) * 4);
  Buffer pieces((is_pair ? 2 : 1) * rows * padded_k * 2, 0);
  Buffer exponents(rows * 4, 0), states(rows * 4, 0);
  float* const x = reinterpret_cast<float*>(memory.data);
  __half* const high = reinterpret_cast<__half*>(pieces.data);
  __half* const low = high + (is_stepwise ? split::kStepwise / 2 : rows * padded_k);
  for (int64_t row = 0; row < rows; ++row) fill(x + row * stride, k);
  memory.before = memory.memory;
  split::Operand operand{x, rows, stride};
  operand.high = high, operand.low = is_pair ? low : nullptr;
  operand.exponent = reinterpret_cast<int*>(exponents.data);
  operand.state = reinterpret_cast<int*>(states.data);
  operand.is_stepwise = is_stepwise;
  const int threads = split::threads_of_row(k);
  note_launch(is_pair ? launch<split_row_kernel<true>>(rows, threads, nullptr, operand, k)
                      : launch<split_row_kernel<false>>(rows, threads, nullptr, operand, k));

  for (int64_t row = 0; row < rows; ++row) {
    float largest = 0;
    bool is_finite = true;
    for (int64_t i = 0; i < k; ++i) {
      const float v = x[row * stride + i];
      is_finite &= std::isfinite(v), largest = std::max(largest, std::abs(v));
    }
    const int needed = is_finite && largest > 0 ? 14 - std::ilogb(largest) : 0;
    const bool is_carried = is_finite && (is_pair || needed <= 126);
    const int exponent = is_carried ? needed : 0;
    int64_t nonzeros = 0, subnormals = 0;
    for (int64_t i = 0; i < padded_k; ++i) {
      const float v = i < k && is_carried ? x[row * stride + i] : 0;
      const float scaled = std::ldexp(v, exponent);
      nonzeros += v != 0, subnormals += v != 0 && std::abs(scaled) < 0x1p-14f;
      const __half of_high = __float2half_rn(scaled);
      const __half of_low = __float2half_rn((scaled - __half2float(of_high)) * 2048);
      const int64_t place = place_of(row, rows, i, padded_k, is_pair, is_stepwise);
      const auto is_same = [](__half a, __half b) { return memcmp(&a, &b, sizeof(a)) == 0; };
      require(is_same(high[place], of_high), "high", DType::kFloat32, k, i);
      if (is_pair) require(is_same(low[place], of_low), "low", DType::kFloat32, k, i);
    }
    const bool is_lost = !is_pair && (!is_carried || subnormals * 32 > nonzeros);
    require(operand.exponent[row] == (is_lost ? split::kUncarried : exponent), "exponent",
            DType::kFloat32, k, row);
    const int state = is_carried ? split::kCarried : split::kNonfinite;
    if (is_pair) require(operand.state[row] == state, "state", DType::kFloat32, k, row);
  }
  require(pieces.has_guards() && exponents.has_guards() && states.has_guards(), "written beyond",
          DType::kFloat32, k);
}

}  // namespace

int main(int, char** arguments) {
  generator.seed(atoi(arguments[1]));
  for (int cases = atoi(arguments[2]); cases > 0; --cases) check(/*is_pair=*/one_in(2));
  print_launched();
}
