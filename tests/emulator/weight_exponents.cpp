// Runs sample_weight (linear/sm90/sample_weight.cuh) on rows of a weight. test_emulator.py compares
// the exponents with those of a program for the CPU, tests/support/split_twin.py.
//
// `weight_exponents K` reads rows of K floats from standard input. It prints two lines with the
// exponents of all rows: those for hi and lo, and those for hi alone.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/launch.cuh"
#include "linear/sm90/sample_weight.cuh"

namespace {

using namespace kernels;

// Each block is one warp, which samples kRows rows.
__global__ void sample_weight_kernel(split::ScaledMatrix weight, split::Form form, int64_t k) {
  const int64_t first_row = blockIdx.x * sm90::SampleConfig::kRows;
  sm90::sample_weight(weight, form, /*is_transposed=*/false, first_row, k);
}

// Returns the floats of standard input.
std::vector<float> read_floats() {
  std::vector<float> floats;
  float element;
  while (fread(&element, sizeof(element), 1, stdin) == 1) floats.push_back(element);
  return floats;
}

}  // namespace

int main(int, char** arguments) {
  const int64_t k = atoi(arguments[1]);
  const std::vector<float> elements = read_floats();
  const int64_t rows = static_cast<int64_t>(elements.size()) / k;

  // The kernel reads aligned float4, so rows are padded to whole ones.
  const int64_t fours = (k + 3) / 4;
  std::vector<float4> source(rows * fours);
  for (int64_t row = 0; row < rows; ++row) {
    memcpy(&source[row * fours], &elements[row * k], k * sizeof(float));
  }
  std::vector<int> exponents(rows);
  std::vector<int> states(rows);
  split::ScaledMatrix weight{};
  weight.source = reinterpret_cast<const float*>(source.data());
  weight.rows = rows;
  weight.row_stride = fours * 4;
  weight.exponent = exponents.data();
  weight.row_state = states.data();

  for (const auto form : {split::Form::kWithLo, split::Form::kWithoutLo}) {
    launch<sample_weight_kernel>(divide_up_to_int(rows, sm90::SampleConfig::kRows), 32, nullptr,
                                 weight, form, k);
    for (const int exponent : exponents) printf("%d ", exponent);
    printf("\n");
  }
}
