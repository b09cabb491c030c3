// Rows of float32 split into scaled fp16 (kernels/linear/SPLIT.md), on random operands:
// `split SEED CASES`. Compares every piece, every exponent and state. Prints the kernel that ran.

#include <cmath>

#include "linear/sm90/split_lines.cuh"
#include "linear/split/pieces.cuh"
#include "operands.h"

namespace {

template <bool kIsPair>
__global__ void split_row_kernel(split::Operand operand, int64_t k) {
  split::split_row<kIsPair>(operand, blockIdx.x, k);
}

template <bool kIsPair>
__global__ void split_short_row_kernel(split::Operand operand, int64_t k) {
  const int64_t row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row < operand.rows) split::split_row<kIsPair, /*kByWarp=*/true>(operand, row, k);
}

constexpr int kMostKept = 512;  // lines

template <bool kIsPair>
__global__ void split_lines_kernel(split::Operand operand, int64_t k, sm90::LineShares shares) {
  alignas(1024) static uint8_t memory[sm90::LinesMemory::bytes(kMostKept)];
  sm90::split_lines<kIsPair>(operand, blockIdx.x, static_cast<int>(k), shares,
                             *reinterpret_cast<sm90::LinesMemory*>(memory));
}

// n numbers of some range, zeros among them, some infinite or NaN.
std::vector<float> draw_row(int64_t n) {
  std::vector<float> row(n);
  std::normal_distribution<float> normal;
  const float spread = one_in(3) ? 12 : 1, middle = one_in(4) ? -120 : one_in(4) ? 100 : 0;
  const int64_t zeros = one_in(2) ? 2 : 1000;
  for (float& element : row) {
    const float power = std::exp2(middle + spread * normal(generator));
    element = one_in(zeros) ? 0 : normal(generator) * power;
  }
  if (one_in(5)) row[draw(0, n - 1)] = one_in(2) ? INFINITY : NAN;
  if (one_in(9)) std::fill(row.begin(), row.end(), 0.0f);
  return row;
}

enum Splitter { kBlock, kWarp, kCluster };  // of x's rows, of short ones, of a transposed x

template <bool kIsPair>
int split(Splitter splitter, const split::Operand& operand, int64_t k) {
  const int rows = static_cast<int>(operand.rows), threads = split::threads_of_row(k);
  if (splitter == kBlock) {
    return launch<split_row_kernel<kIsPair>>(rows, threads, nullptr, operand, k);
  }
  if (splitter == kWarp) {
    const int blocks = blocks_of(rows, threads / 32);
    return launch<split_short_row_kernel<kIsPair>>(blocks, threads, nullptr, operand, k);
  }
  sm90::LineShares shares;  // of a cluster of one block
  shares.lines = static_cast<int>(split::padded(k));
  shares.kept = static_cast<int>(split::kStepwise * draw(1, kMostKept / split::kStepwise));
  return launch<split_lines_kernel<kIsPair>>(blocks_of(rows, sm90::kLineRows), split::kThreads,
                                             nullptr, operand, k, shares);
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
  const auto splitter = static_cast<Splitter>(draw(kBlock, kCluster));
  const bool has_lines = splitter == kCluster;
  const int64_t longest = splitter == kWarp ? split::kKeptByWarp : has_lines ? 2500 : 20000;
  const int64_t k = draw(1, one_in(3)   ? longest
                            : one_in(2) ? std::min(longest, int64_t{2500})
                                        : 300);
  const int64_t rows = draw(1, has_lines ? 40 : 9), across = has_lines ? rows : k;
  const int64_t stride = one_in(2) ? (across + 3) / 4 * 4 : across + draw(0, 4);
  const int64_t padded_k = split::padded(k);
  const bool is_stepwise = has_lines || !one_in(4);
  Buffer memory((has_lines ? k : rows) * stride * 4, one_in(2) ? 0 : draw(0, 3) * 4);
  Buffer pieces((is_pair ? 2 : 1) * rows * padded_k * 2, 0);
  Buffer exponents(rows * 4, 0), states(rows * 4, 0);
  float* const x = reinterpret_cast<float*>(memory.data);
  __half* const high = reinterpret_cast<__half*>(pieces.data);
  __half* const low = high + (is_stepwise ? split::kStepwise / 2 : rows * padded_k);
  std::vector<std::vector<float>> elements;
  for (int64_t row = 0; row < rows; ++row) {
    elements.push_back(draw_row(k));
    for (int64_t i = 0; i < k; ++i) {
      x[has_lines ? i * stride + row : row * stride + i] = elements[row][i];
    }
  }
  split::Operand operand{x, rows, stride};
  operand.high = high, operand.low = is_pair ? low : nullptr;
  operand.exponent = reinterpret_cast<int*>(exponents.data);
  operand.state = reinterpret_cast<int*>(states.data);
  operand.is_stepwise = is_stepwise, operand.is_transposed = has_lines;
  note_launch(is_pair ? split<true>(splitter, operand, k) : split<false>(splitter, operand, k));

  for (int64_t row = 0; row < rows; ++row) {
    float largest = 0;
    bool is_finite = true;
    for (int64_t i = 0; i < k; ++i) {
      const float v = elements[row][i];
      is_finite &= std::isfinite(v), largest = std::max(largest, std::abs(v));
    }
    const int needed = is_finite && largest > 0 ? 14 - std::ilogb(largest) : 0;
    const bool is_carried = is_finite && (is_pair || needed <= 126);
    const int exponent = is_carried ? needed : 0;
    int64_t nonzeros = 0, subnormals = 0;
    for (int64_t i = 0; i < padded_k; ++i) {
      const float v = i < k && is_carried ? elements[row][i] : 0;
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
