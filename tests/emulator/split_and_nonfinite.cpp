// Tests two device functions of the fp16x3 GEMMs on random operands, on a CPU:
//
//   split_row (split/split_row.cuh)          Every hi and lo, every exponent and state.
//   nonfinite_kernel (split/nonfinite.cuh)   The results and mask bits of rows that hold infinity
//                                            or NaN, and that no others are written.
//
// `split_and_nonfinite SEED CASES` prints the kernels that ran, a line each; or the first
// difference, and exits with 1.

#include <cmath>

#include "linear/split/nonfinite.cuh"
#include "linear/split/split_row.cuh"
#include "operands.h"

namespace {

// The kernels of this program. test_emulator.py demands that all of them run.

__global__ void split_row_kernel(split::SplitMatrix matrix, int64_t k, split::Splitter splitter) {
  const bool is_warp = splitter == split::Splitter::kWarp;
  const int64_t row = is_warp ? (blockIdx.x * blockDim.x + threadIdx.x) / 32 : blockIdx.x;
  const auto form = matrix.lo != nullptr ? split::Form::kHiAndLo : split::Form::kHiAlone;
  if (row < matrix.rows) split::split_row(matrix, form, row, k, splitter);
}

__global__ void nonfinite_rows_kernel(split::SplitMatrix x, split::SplitMatrix weight, int64_t k,
                                      Epilogue<float> epilogue, const unsigned* has_nonfinite) {
  nonfinite::nonfinite_kernel(x, weight, k, epilogue, has_nonfinite);
}

// Draws n numbers of some range, with zeros among them, and at times infinity or NaN.
std::vector<float> draw_row(int64_t n) {
  std::vector<float> row(n);
  std::normal_distribution<float> normal;
  const float spread = one_in(3) ? 12 : 1;
  float middle = 0;  // of the exponents
  if (one_in(4)) {
    middle = -120;
  } else if (one_in(4)) {
    middle = 100;
  }
  const int64_t zeros = one_in(2) ? 2 : 1000;
  for (float& element : row) {
    const float power = std::exp2(middle + spread * normal(generator));
    element = one_in(zeros) ? 0 : normal(generator) * power;
  }
  if (one_in(5)) row[draw(0, n - 1)] = one_in(2) ? INFINITY : NAN;
  if (one_in(9)) std::fill(row.begin(), row.end(), 0.0f);
  return row;
}

// Launches split_row_kernel for all rows of the matrix, and returns the status.
int split_rows(split::Splitter splitter, const split::SplitMatrix& matrix, int64_t k) {
  const int rows = static_cast<int>(matrix.rows);
  const int threads = split::threads_of_row(k);
  const int blocks = splitter == split::Splitter::kWarp ? blocks_of(rows, threads / 32) : rows;
  return launch<split_row_kernel>(blocks, threads, nullptr, matrix, k, splitter);
}

// Returns where the hi of element i of a row is, in the layouts of SplitMatrix (split/split.cuh).
// Its lo is in the same place of the lo matrix.
int64_t place_of(int64_t row, int64_t rows, int64_t i, int64_t padded_k, bool has_lo,
                 bool is_k_tiled) {
  // 16 elements are eight pairs. Pair p is stored at place kPlaceOfPair[p] of the eight (K order).
  constexpr int kPlaceOfPair[] = {0, 4, 1, 5, 2, 6, 3, 7};
  if (!is_k_tiled) return row * padded_k + i;
  if (!has_lo) return (i / 64 * rows + row) * 64 + i % 64;
  const int64_t row_of_tile = (i / 32 * rows + row) * 64;
  const int64_t first_of_16 = i % 32 / 16 * 16;
  return row_of_tile + first_of_16 + kPlaceOfPair[i % 16 / 2] * 2 + i % 2;
}

// A number of elements that the splitter may have in a row: mostly few, at times very many.
int64_t draw_k(split::Splitter splitter) {
  const bool is_warp = splitter == split::Splitter::kWarp;
  const int64_t longest = is_warp ? split::SplitConfig::kKeptByWarp : 20000;
  int64_t most = 300;
  if (one_in(3)) {
    most = longest;
  } else if (one_in(2)) {
    most = std::min(longest, int64_t{2500});
  }
  return draw(1, most);
}

// How a row has to be scaled, from its elements alone.
struct ExpectedScale {
  bool can_split = true;  // otherwise the row is split as zeros
  int exponent = 0;

  ExpectedScale(const std::vector<float>& row, bool has_lo) {
    float largest = 0;
    for (const float element : row) {
      can_split &= std::isfinite(element);
      largest = std::max(largest, std::abs(element));
    }
    if (!can_split || largest == 0) return;
    const int needed = 14 - std::ilogb(largest);  // moves the largest into [2^14, 2^15)
    can_split = has_lo || needed <= 126;          // the largest exponent of a row with hi alone
    if (can_split) exponent = needed;
  }
};

// Checks all that has been written for one row, whose elements are `elements`.
void check_split_row(const split::SplitMatrix& matrix, int64_t row,
                     const std::vector<float>& elements) {
  const int64_t k = elements.size();
  const int64_t padded_k = split::padded(k);
  const bool has_lo = matrix.lo != nullptr;
  const ExpectedScale scale(elements, has_lo);
  int64_t nonzeros = 0;
  int64_t subnormals = 0;
  for (int64_t i = 0; i < padded_k; ++i) {
    const float v = i < k && scale.can_split ? elements[i] : 0;
    const float scaled = std::ldexp(v, scale.exponent);
    if (v != 0) ++nonzeros;
    if (v != 0 && std::abs(scaled) < 0x1p-14f) ++subnormals;
    const __half hi = __float2half_rn(scaled);
    const __half lo = __float2half_rn((scaled - __half2float(hi)) * 0x1p11f);
    const int64_t place = place_of(row, matrix.rows, i, padded_k, has_lo, matrix.is_k_tiled);
    const auto is_same = [](__half a, __half b) { return memcmp(&a, &b, sizeof(a)) == 0; };
    require(is_same(matrix.hi[place], hi), "hi", DType::kFloat32, k, i);
    if (has_lo) require(is_same(matrix.lo[place], lo), "lo", DType::kFloat32, k, i);
  }
  const bool has_many_subnormals = subnormals * 32 > nonzeros;
  const bool needs_tf32 = !has_lo && (!scale.can_split || has_many_subnormals);
  const int exponent = needs_tf32 ? split::kNeedsTf32 : scale.exponent;
  require(matrix.exponent[row] == exponent, "exponent", DType::kFloat32, k, row);
  const int state = scale.can_split ? split::kExact : split::kNonfinite;
  if (has_lo) require(matrix.row_state[row] == state, "state", DType::kFloat32, k, row);
}

// Splits a random matrix, into hi and lo or into hi alone, and checks the results.
void check_split(bool has_lo) {
  const auto splitter = one_in(2) ? split::Splitter::kWarp : split::Splitter::kBlock;
  const int64_t k = draw_k(splitter);
  const int64_t rows = draw(1, 9);
  const int64_t stride = one_in(2) ? (k + 3) / 4 * 4 : k + draw(0, 4);
  const int64_t padded_k = split::padded(k);
  const bool is_k_tiled = !one_in(4);
  Buffer memory(rows * stride * 4, one_in(2) ? 0 : draw(0, 3) * 4);
  Buffer numbers((has_lo ? 2 : 1) * rows * padded_k * 2, 0);
  Buffer exponents(rows * 4, 0);
  Buffer states(rows * 4, 0);
  float* const x = reinterpret_cast<float*>(memory.data);
  std::vector<std::vector<float>> elements;
  for (int64_t row = 0; row < rows; ++row) {
    elements.push_back(draw_row(k));
    std::copy(elements[row].begin(), elements[row].end(), x + row * stride);
  }
  split::SplitMatrix matrix{x, rows, stride};
  matrix.hi = reinterpret_cast<__half*>(numbers.data);
  const int64_t lo_offset = is_k_tiled ? split::kKTileNumbers / 2 : rows * padded_k;
  matrix.lo = has_lo ? matrix.hi + lo_offset : nullptr;
  matrix.exponent = reinterpret_cast<int*>(exponents.data);
  matrix.row_state = reinterpret_cast<int*>(states.data);
  matrix.is_k_tiled = is_k_tiled;
  note_launch(split_rows(splitter, matrix, k));
  for (int64_t row = 0; row < rows; ++row) check_split_row(matrix, row, elements[row]);
  require(numbers.has_guards() && exponents.has_guards() && states.has_guards(), "written beyond",
          DType::kFloat32, k);
}

// A random matrix whose rows' states tell which of them hold infinity or NaN.
struct Rows {
  int64_t rows;
  int64_t k;
  int64_t stride;
  Buffer memory;
  Buffer states;

  Rows(int64_t rows, int64_t k)
      : rows(rows),
        k(k),
        stride(k + draw(0, 2)),
        memory(rows * stride * 4, 0),
        states(rows * 4, 0) {
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<float> drawn = draw_row(k);
      std::copy(drawn.begin(), drawn.end(), elements() + row * stride);
      const bool is_finite = std::all_of(drawn.begin(), drawn.end(),
                                         [](float element) { return std::isfinite(element); });
      matrix().row_state[row] = is_finite ? split::kExact : split::kNonfinite;
    }
  }
  float* elements() const { return reinterpret_cast<float*>(memory.data); }
  split::SplitMatrix matrix() const {
    split::SplitMatrix matrix{elements(), rows, stride};
    matrix.row_state = reinterpret_cast<int*>(states.data);
    return matrix;
  }
  bool is_marked(int64_t row) const { return matrix().row_state[row] == split::kNonfinite; }
};

// The sum of the products of a row of x and a row of weight, added from the last one to the first.
double sum_of_products(const Rows& x, int64_t x_row, const Rows& weight, int64_t weight_row) {
  const float* const a = x.elements() + x_row * x.stride;
  const float* const b = weight.elements() + weight_row * weight.stride;
  double sum = 0;
  for (int64_t i = x.k - 1; i >= 0; --i) sum += double{a[i]} * b[i];
  return sum;
}

// Checks that only the results of marked rows are written, and that these are infinite or NaN as
// their elements demand.
void check_nonfinite() {
  const int64_t m = draw(1, 20);
  const int64_t n = draw(1, 40);
  const int64_t k = draw(1, one_in(9) ? 600 : 20);
  const Rows x(m, k);
  const Rows weight(n, k);
  const int64_t mask_bytes = (n + 7) / 8;
  Buffer out(m * n * 4, 0);
  Buffer mask(m * mask_bytes, 0);
  Buffer bias(n * 4, 0);
  for (int64_t i = 0; i < n; ++i) reinterpret_cast<float*>(bias.data)[i] = draw(-9, 9);
  LinearArguments linear{};
  linear.m = m;
  linear.n = n;
  linear.k = k;
  linear.divisor = -2;
  linear.has_relu = one_in(2);
  linear.bias = one_in(2) ? bias.data : nullptr;
  linear.out = out.data;
  linear.mask = one_in(2) ? mask.data : nullptr;
  const unsigned flag = one_in(5) ? 0 : 1;
  const unsigned* const has_nonfinite = one_in(3) ? nullptr : &flag;
  note_launch(launch<nonfinite_rows_kernel>(
      static_cast<int>(draw(1, 5)), nonfinite::NonfiniteConfig::kThreads, nullptr, x.matrix(),
      weight.matrix(), k, Epilogue<float>(linear), has_nonfinite));
  for (int64_t i = 0; i < m * n; ++i) {
    const int64_t row = i / n;
    const int64_t column = i % n;
    const bool is_marked = x.is_marked(row) || weight.is_marked(column);
    const bool is_made = is_marked && (has_nonfinite == nullptr || flag != 0);
    double z = sum_of_products(x, row, weight, column);
    if (linear.bias != nullptr) z += reinterpret_cast<float*>(bias.data)[column];
    const double expected = (linear.has_relu && z < 0 ? 0 : z) / linear.divisor;
    const float result = reinterpret_cast<float*>(out.data)[i];
    const bool is_equal =
        std::isnan(expected) ? std::isnan(result) : result == static_cast<float>(expected);
    const bool is_unchanged = out.element(i, 4) == out.element_before(i, 4);
    require(is_made ? is_equal : is_unchanged, "nonfinite", DType::kFloat32, k, i);
    const int64_t byte = row * mask_bytes + column / 8;
    const bool bit = mask.element(byte, 1) >> column % 8 & 1;
    const bool bit_before = mask.element_before(byte, 1) >> column % 8 & 1;
    const bool passes = z > 0 || std::isnan(z);  // the gradient of NaN passes, as in torch
    const bool expected_bit = is_made && linear.mask != nullptr ? passes : bit_before;
    require(bit == expected_bit, "mask", DType::kFloat32, k, i);
  }
  require(out.has_guards() && mask.has_guards(), "written beyond", DType::kFloat32, k);
}

}  // namespace

int main(int, char** arguments) {
  generator.seed(atoi(arguments[1]));
  for (int cases = atoi(arguments[2]); cases > 0; --cases) {
    check_split(/*has_lo=*/one_in(2));
    if (one_in(4)) check_nonfinite();
  }
  print_launched();
}
