// GELU on the CPU.

#include <cmath>

#include "gelu/launchers.h"

namespace kernels {
namespace cpu {

void gelu(const float* x, float* out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    out[i] = 0.5f * x[i] * std::erfc(-0.70710678f * x[i]);
  }
}

}  // namespace cpu
}  // namespace kernels
