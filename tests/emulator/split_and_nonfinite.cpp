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

// The kernels of this program, which call the two functions. test_emulator.py demands that both
// run.

__global__ void split_row_kernel(split::ScaledMatrix matrix, int64_t k, split::Splitter splitter) {
  const bool is_warp = splitter == split::Splitter::kWarp;
  const int64_t row = is_warp ? (blockIdx.x * blockDim.x + threadIdx.x) / 32 : blockIdx.x;
  const split::Form form = split::form_of(matrix.lo);
  if (row < matrix.rows) split::split_row(matrix, form, row, k, splitter);
}

__global__ void nonfinite_rows_kernel(split::ScaledMatrix x, split::ScaledMatrix weight, int64_t k,
                                      Epilogue<float> epilogue, const unsigned* has_nonfinite) {
  nonfinite::nonfinite_kernel(x, weight, k, epilogue, has_nonfinite);
}

// --------------------------------------------------------------------------------- operands

// Returns the exponent around which the numbers of a row are drawn: 0, or near an end of float's.
float draw_middle_exponent() {
  if (one_in(4)) return -120;
  if (one_in(4)) return 100;
  return 0;
}

// Returns k random numbers, some of them zeros, at times with an infinity or a NaN among them.
std::vector<float> draw_row(int64_t k) {
  std::normal_distribution<float> normal;
  const float spread = one_in(3) ? 12 : 1;  // of the exponents
  const float middle = draw_middle_exponent();
  const int64_t numbers_per_zero = one_in(2) ? 2 : 1000;
  std::vector<float> row(k);
  for (float& element : row) {
    const float power = std::exp2(middle + spread * normal(generator));
    element = one_in(numbers_per_zero) ? 0 : normal(generator) * power;
  }
  if (one_in(5)) row[draw(0, k - 1)] = one_in(2) ? INFINITY : NAN;
  if (one_in(9)) std::fill(row.begin(), row.end(), 0.0f);
  return row;
}

// A random float32 matrix [rows, k], and memory for the states of its rows.
struct FloatMatrix {
  int64_t rows;
  int64_t k;
  int64_t row_stride;
  Buffer memory;
  Buffer states;  // [rows] of int, which hold a RowState

  FloatMatrix(int64_t rows, int64_t k, int64_t row_stride, int64_t misalignment = 0)
      : rows(rows),
        k(k),
        row_stride(row_stride),
        memory(rows * row_stride * sizeof(float), misalignment),
        states(rows * sizeof(int), 0) {
    for (int64_t i = 0; i < rows; ++i) {
      const std::vector<float> drawn = draw_row(k);
      std::copy(drawn.begin(), drawn.end(), row(i));
    }
  }

  float* row(int64_t i) const { return reinterpret_cast<float*>(memory.data) + i * row_stride; }

  bool is_finite(int64_t i) const {
    return std::all_of(row(i), row(i) + k, [](float element) { return std::isfinite(element); });
  }

  // The matrix as kernels get it, without hi, lo and exponents.
  split::ScaledMatrix scaled_matrix() const {
    split::ScaledMatrix matrix{{row(0), rows, row_stride}};
    matrix.row_state = reinterpret_cast<int*>(states.data);
    return matrix;
  }
};

// -------------------------------------------------------------------------------- split_row

// Returns a number of elements that the splitter may have in a row: mostly few, at times very many.
int64_t draw_k(split::Splitter splitter) {
  const bool is_warp = splitter == split::Splitter::kWarp;
  const int64_t longest = is_warp ? split::SplitConfig::kKeptByWarp : 20000;
  if (one_in(3)) return draw(1, longest);
  if (one_in(2)) return draw(1, std::min(longest, int64_t{2500}));
  return draw(1, 300);
}

// Launches split_row_kernel for all rows of the matrix, and returns the status.
int split_rows(split::Splitter splitter, const split::ScaledMatrix& matrix, int64_t k) {
  const int rows = static_cast<int>(matrix.rows);
  const int threads = split::threads_of_row(k);
  const int blocks =
      splitter == split::Splitter::kWarp ? divide_up_to_int(rows, threads / 32) : rows;
  return launch<split_row_kernel>(blocks, threads, nullptr, matrix, k, splitter);
}

// Returns the index of element i of a row in `hi`, and also in `lo`. ScaledMatrix (split/split.cuh)
// says how the layouts look.
int64_t place_of(const split::ScaledMatrix& matrix, int64_t k, int64_t row, int64_t i) {
  if (!matrix.is_k_tiled) return row * split::padded(k) + i;
  const bool has_lo = matrix.lo != nullptr;
  const int64_t depth = has_lo ? 32 : 64;  // elements of K in a k-tile
  const int64_t k_tile = i / depth;
  const int64_t element = i % depth;                        // of the k-tile
  const int64_t begin = (k_tile * matrix.rows + row) * 64;  // of the row's part of the k-tile
  if (!has_lo) return begin + element;
  // Each 16 elements are eight pairs, in the K order of k_order.cuh: pair p is at place
  // kPlaceOfPair[p] of the eight.
  constexpr int kPlaceOfPair[] = {0, 4, 1, 5, 2, 6, 3, 7};
  const int64_t first_of_16 = element / 16 * 16;
  const int64_t pair = element % 16 / 2;
  return begin + first_of_16 + 2 * kPlaceOfPair[pair] + element % 2;
}

// The exponent by which a row has to be scaled. It follows from the row's elements.
struct ExpectedScale {
  bool can_split = true;  // otherwise the row is split as zeros
  int exponent = 0;

  ExpectedScale(const float* row, int64_t k, bool has_lo) {
    float largest = 0;
    for (int64_t i = 0; i < k; ++i) {
      can_split &= std::isfinite(row[i]);
      largest = std::max(largest, std::abs(row[i]));
    }
    if (!can_split || largest == 0) return;
    const int needed = 14 - std::ilogb(largest);  // moves the largest into [2^14, 2^15)
    can_split = has_lo || needed <= 126;          // the largest exponent of a row with hi alone
    if (can_split) exponent = needed;
  }
};

// Checks all that has been written for a row of k elements.
void check_split_row(const split::ScaledMatrix& matrix, int64_t row, int64_t k) {
  const float* const elements = matrix.source + row * matrix.row_stride;
  const bool has_lo = matrix.lo != nullptr;
  const ExpectedScale scale(elements, k, has_lo);
  const auto is_same = [](__half a, __half b) { return memcmp(&a, &b, sizeof(a)) == 0; };
  int64_t nonzeros = 0;
  int64_t subnormals = 0;
  for (int64_t i = 0; i < split::padded(k); ++i) {
    const float v = i < k && scale.can_split ? elements[i] : 0;
    const float scaled = std::ldexp(v, scale.exponent);
    if (v != 0) ++nonzeros;
    if (v != 0 && std::abs(scaled) < 0x1p-14f) ++subnormals;
    const __half hi = __float2half_rn(scaled);
    const __half lo = __float2half_rn((scaled - __half2float(hi)) * 0x1p11f);
    const int64_t place = place_of(matrix, k, row, i);
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
  const int64_t row_stride = one_in(2) ? (k + 3) / 4 * 4 : k + draw(0, 4);
  const int64_t misalignment = one_in(2) ? 0 : draw(0, 3) * sizeof(float);
  const FloatMatrix source(rows, k, row_stride, misalignment);
  const int64_t numbers = rows * split::padded(k);  // of hi, and as many of lo
  const Buffer hi_and_lo((has_lo ? 2 : 1) * numbers * sizeof(__half), 0);
  const Buffer exponents(rows * sizeof(int), 0);

  split::ScaledMatrix matrix = source.scaled_matrix();
  matrix.is_k_tiled = !one_in(4);
  matrix.hi = reinterpret_cast<__half*>(hi_and_lo.data);
  const int64_t lo_offset = matrix.is_k_tiled ? split::kKTileRowNumbers / 2 : numbers;
  if (has_lo) matrix.lo = matrix.hi + lo_offset;
  matrix.exponent = reinterpret_cast<int*>(exponents.data);
  note_launch(split_rows(splitter, matrix, k));

  for (int64_t row = 0; row < rows; ++row) check_split_row(matrix, row, k);
  const bool is_intact = hi_and_lo.has_intact_guards() && exponents.has_intact_guards() &&
                         source.states.has_intact_guards();
  require(is_intact, "written beyond", DType::kFloat32, k);
}

// ------------------------------------------------------------------------- nonfinite_kernel

// A random call of nonfinite_kernel, and the checks of its results.
struct NonfiniteCase {
  const int64_t m = draw(1, 20);
  const int64_t n = draw(1, 40);
  const int64_t k = draw(1, one_in(9) ? 600 : 20);
  const int64_t mask_row_bytes = (n + 7) / 8;
  const FloatMatrix x{m, k, k + draw(0, 2)};
  const FloatMatrix weight{n, k, k + draw(0, 2)};
  std::vector<float> bias = std::vector<float>(n);
  const Buffer out{m * n * static_cast<int64_t>(sizeof(float)), 0};
  const Buffer mask{m * mask_row_bytes, 0};
  const float divisor = -2;
  const bool has_bias = one_in(2);
  const bool has_relu = one_in(2);
  const bool has_mask = one_in(2);
  const bool has_flag = !one_in(3);
  const unsigned flag = one_in(5) ? 0 : 1;  // 0 says that no row is nonfinite, even if one is

  NonfiniteCase() {
    for (float& element : bias) element = draw(-9, 9);
    set_states(x);
    set_states(weight);
  }

  static void set_states(const FloatMatrix& matrix) {
    for (int64_t row = 0; row < matrix.rows; ++row) {
      const int state = matrix.is_finite(row) ? split::kExact : split::kNonfinite;
      matrix.scaled_matrix().row_state[row] = state;
    }
  }

  // Launches the kernel, and returns the status.
  int run() const {
    LinearArguments call{};
    call.m = m;
    call.n = n;
    call.k = k;
    call.bias = has_bias ? bias.data() : nullptr;
    call.divisor = divisor;
    call.has_relu = has_relu;
    call.out = out.data;
    call.mask = has_mask ? mask.data : nullptr;
    const int blocks = static_cast<int>(draw(1, 5));
    const unsigned* const has_nonfinite = has_flag ? &flag : nullptr;
    return launch<nonfinite_rows_kernel>(blocks, nonfinite::NonfiniteConfig::kThreads, nullptr,
                                         x.scaled_matrix(), weight.scaled_matrix(), k,
                                         Epilogue<float>(call), has_nonfinite);
  }

  // Checks that only the results of nonfinite rows are written, and that these are right.
  void check() const {
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t column = 0; column < n; ++column) {
        check_result(row, column);
        check_bit(row, column);
      }
    }
    const bool is_intact = out.has_intact_guards() && mask.has_intact_guards();
    require(is_intact, "written beyond", DType::kFloat32, k);
  }

  void check_result(int64_t row, int64_t column) const {
    const int64_t i = row * n + column;
    if (!is_written(row, column)) {
      const bool is_unchanged =
          out.element(i, sizeof(float)) == out.element_before(i, sizeof(float));
      require(is_unchanged, "other result", DType::kFloat32, k, i);
      return;
    }
    const double z = z_at(row, column);
    const double expected = (has_relu && z < 0 ? 0 : z) / divisor;
    const float result = reinterpret_cast<const float*>(out.data)[i];
    const bool is_right =
        std::isnan(expected) ? std::isnan(result) : result == static_cast<float>(expected);
    require(is_right, "nonfinite result", DType::kFloat32, k, i);
  }

  void check_bit(int64_t row, int64_t column) const {
    const int64_t byte = row * mask_row_bytes + column / 8;
    const int64_t place = column % 8;
    const bool bit = (mask.element(byte, 1) >> place) & 1;
    bool expected = (mask.element_before(byte, 1) >> place) & 1;
    if (has_mask && is_written(row, column)) {
      const double z = z_at(row, column);
      expected = z > 0 || std::isnan(z);  // the gradient of NaN passes, as in torch
    }
    require(bit == expected, "mask", DType::kFloat32, k, row * n + column);
  }

  // Returns whether the kernel has to write this result.
  bool is_written(int64_t row, int64_t column) const {
    const bool flag_says_none = has_flag && flag == 0;
    const bool is_nonfinite = !x.is_finite(row) || !weight.is_finite(column);
    return is_nonfinite && !flag_says_none;
  }

  // The result before ReLU and division. The products are added from the last one to the first.
  double z_at(int64_t row, int64_t column) const {
    double z = 0;
    for (int64_t i = k - 1; i >= 0; --i) z += double{x.row(row)[i]} * weight.row(column)[i];
    return has_bias ? z + bias[column] : z;
  }
};

void check_nonfinite() {
  const NonfiniteCase random_case;
  note_launch(random_case.run());
  random_case.check();
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
