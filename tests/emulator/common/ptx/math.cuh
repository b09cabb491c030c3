// Replaces kernels/common/ptx/math.cuh: the functions of it that emulated kernels call, in C++
// instead of PTX instructions.

#pragma once

#include <cmath>

#include "common/launch.cuh"

namespace kernels::ptx {

inline float max_nan(float a, float b) { return std::isnan(a) || a > b ? a : b; }

template <typename T, bool kRelu = false>
uint32_t pack(float first, float second) {
  static_assert(!kRelu, "no emulated kernel packs relu of its numbers");
  const T pair[2] = {static_cast<T>(first), static_cast<T>(second)};
  uint32_t word;
  memcpy(&word, pair, sizeof(word));
  return word;
}

}  // namespace kernels::ptx
