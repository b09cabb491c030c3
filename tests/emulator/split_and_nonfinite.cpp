// Tests two device functions of the fp16x3 GEMMs on random operands, on a CPU:
//
//   split_row (fp16x3/split.cuh)             every hi and lo, every exponent and state
//   nonfinite_kernel (fp16x3/nonfinite.cuh)  the results and mask bits of rows that hold infinity
//   or
//                                            NaN, and that no others are written
//
//   split_and_nonfinite SEED CASES
//
// Prints the kernels that ran; or the first difference, and exits with 1.

#include <cmath>

#include "linear/fp16x3/nonfinite.cuh"
#include "linear/fp16x3/split.cuh"
#include "operands.h"

namespace {

__global__ void split_row_kernel(fp16x3::SplitMatrix matrix, int64_t k, fp16x3::Splitter splitter) {
  const bool is_warp = splitter == fp16x3::Splitter::kWarp;
  const int64_t row = is_warp ? (blockIdx.x * blockDim.x + threadIdx.x) / 32 : blockIdx.x;
  if (row < matrix.rows) fp16x3::split_row(matrix, row, k, splitter, matrix.lo != nullptr);
}

__global__ void nonfinite_rows_kernel(fp16x3::SplitMatrix x, fp16x3::SplitMatrix weight, int64_t k,
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

int split(fp16x3::Splitter splitter, const fp16x3::SplitMatrix& matrix, int64_t k) {
  const int rows = static_cast<int>(matrix.rows);
  const int threads = fp16x3::threads_of_row(k);
  const int blocks = splitter == fp16x3::Splitter::kWarp ? blocks_of(rows, threads / 32) : rows;
  return launch<split_row_kernel>(blocks, threads, nullptr, matrix, k, splitter);
}

// Returns where the hi of element i of a row is. Its lo is in the same place of the lo matrix.
int64_t place_of(int64_t row, int64_t rows, int64_t i, int64_t padded_k, bool has_lo,
                 bool is_k_tiled) {
  constexpr int kPlaceOfPair[] = {0, 4, 1, 5, 2, 6, 3, 7};  // of the eight pairs of 16 elements
  if (!is_k_tiled) return row * padded_k + i;
  if (!has_lo) return (i / 64 * rows + row) * 64 + i % 64;
  const int64_t row_of_tile = (i / 32 * rows + row) * 64;
  const int64_t first_of_16 = i % 32 / 16 * 16;
  return row_of_tile + first_of_16 + kPlaceOfPair[i % 16 / 2] * 2 + i % 2;
}

void check_split(bool has_lo) {
  const auto splitter = one_in(2) ? fp16x3::Splitter::kWarp : fp16x3::Splitter::kBlock;
  const int64_t longest =
      splitter == fp16x3::Splitter::kWarp ? fp16x3::SplitConfig::kKeptByWarp : 20000;
  int64_t most = 300;
  if (one_in(3)) {
    most = longest;
  } else if (one_in(2)) {
    most = std::min(longest, int64_t{2500});
  }
  const int64_t k = draw(1, most);
  const int64_t rows = draw(1, 9);
  const int64_t stride = one_in(2) ? (k + 3) / 4 * 4 : k + draw(0, 4);
  const int64_t padded_k = fp16x3::padded(k);
  const bool is_k_tiled = !one_in(4);
  Buffer memory(rows * stride * 4, one_in(2) ? 0 : draw(0, 3) * 4);
  Buffer halves((has_lo ? 2 : 1) * rows * padded_k * 2, 0);
  Buffer exponents(rows * 4, 0);
  Buffer states(rows * 4, 0);
  float* const x = reinterpret_cast<float*>(memory.data);
  __half* const hi = reinterpret_cast<__half*>(halves.data);
  __half* const lo = hi + (is_k_tiled ? fp16x3::kKTileWidth / 2 : rows * padded_k);
  std::vector<std::vector<float>> elements;
  for (int64_t row = 0; row < rows; ++row) {
    elements.push_back(draw_row(k));
    std::copy(elements[row].begin(), elements[row].end(), x + row * stride);
  }
  fp16x3::SplitMatrix matrix{x, rows, stride};
  matrix.hi = hi;
  matrix.lo = has_lo ? lo : nullptr;
  matrix.exponent = reinterpret_cast<int*>(exponents.data);
  matrix.state = reinterpret_cast<int*>(states.data);
  matrix.is_k_tiled = is_k_tiled;
  note_launch(split(splitter, matrix, k));

  for (int64_t row = 0; row < rows; ++row) {
    float largest = 0;
    bool is_finite = true;
    for (int64_t i = 0; i < k; ++i) {
      const float v = elements[row][i];
      is_finite &= std::isfinite(v);
      largest = std::max(largest, std::abs(v));
    }
    const int needed = is_finite && largest > 0 ? 14 - std::ilogb(largest) : 0;
    const bool can_split = is_finite && (has_lo || needed <= 126);
    const int exponent = can_split ? needed : 0;
    int64_t nonzeros = 0;
    int64_t subnormals = 0;
    for (int64_t i = 0; i < padded_k; ++i) {
      const float v = i < k && can_split ? elements[row][i] : 0;
      const float scaled = std::ldexp(v, exponent);
      if (v != 0) ++nonzeros;
      if (v != 0 && std::abs(scaled) < 0x1p-14f) ++subnormals;
      const __half of_hi = __float2half_rn(scaled);
      const __half of_lo = __float2half_rn((scaled - __half2float(of_hi)) * 2048);
      const int64_t place = place_of(row, rows, i, padded_k, has_lo, is_k_tiled);
      const auto is_same = [](__half a, __half b) { return memcmp(&a, &b, sizeof(a)) == 0; };
      require(is_same(hi[place], of_hi), "hi", DType::kFloat32, k, i);
      if (has_lo) require(is_same(lo[place], of_lo), "lo", DType::kFloat32, k, i);
    }
    const bool needs_tf32 = !has_lo && (!can_split || subnormals * 32 > nonzeros);
    require(matrix.exponent[row] == (needs_tf32 ? fp16x3::kNeedsTf32 : exponent), "exponent",
            DType::kFloat32, k, row);
    const int state = can_split ? fp16x3::kExact : fp16x3::kNonfinite;
    if (has_lo) require(matrix.state[row] == state, "state", DType::kFloat32, k, row);
  }
  require(halves.has_guards() && exponents.has_guards() && states.has_guards(), "written beyond",
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
      matrix().state[row] = is_finite ? fp16x3::kExact : fp16x3::kNonfinite;
    }
  }
  float* elements() const { return reinterpret_cast<float*>(memory.data); }
  fp16x3::SplitMatrix matrix() const {
    fp16x3::SplitMatrix matrix{elements(), rows, stride};
    matrix.state = reinterpret_cast<int*>(states.data);
    return matrix;
  }
  bool is_marked(int64_t row) const { return matrix().state[row] == fp16x3::kNonfinite; }
};

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
  linear.relu = one_in(2);
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
    const bool is_made =
        (x.is_marked(row) || weight.is_marked(column)) && (has_nonfinite == nullptr || flag != 0);
    double z = linear.bias != nullptr ? reinterpret_cast<float*>(bias.data)[column] : 0;
    for (int64_t j = k - 1; j >= 0; --j) {
      z += double{x.elements()[row * x.stride + j]} * weight.elements()[column * weight.stride + j];
    }
    const double want = (linear.relu && z < 0 ? 0 : z) / linear.divisor;
    const float got = reinterpret_cast<float*>(out.data)[i];
    const bool is_right = std::isnan(want) ? std::isnan(got) : got == static_cast<float>(want);
    require(is_made ? is_right : out.element(i, 4) == out.element_before(i, 4), "nonfinite",
            DType::kFloat32, k, i);
    const int64_t byte = row * mask_bytes + column / 8;
    const uint64_t before = mask.element_before(byte, 1) >> column % 8 & 1;
    const bool is_set = is_made && linear.mask != nullptr ? !(z <= 0) : before;
    require((mask.element(byte, 1) >> column % 8 & 1) == is_set, "mask", DType::kFloat32, k, i);
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
