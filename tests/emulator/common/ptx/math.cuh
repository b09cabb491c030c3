// Stands in for kernels/common/ptx/math.cuh, as far as ReLU uses it.

#pragma once

#include "common/launch.cuh"

namespace kernels::ptx {

template <typename T>
uint32_t signs_of(uint32_t word) {
  return emulator::map_words<T>(word, 0, [](int x, int) { return x < 0 ? -1 : 0; });
}

}  // namespace kernels::ptx
