// Arithmetic that CUDA C++ has no name for, one wrapper for each PTX instruction.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kernels::ptx {

// The larger of two, or NaN if one is NaN.
__device__ inline float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Two numbers, or relu of them, rounded to a pair of T, the first in the low half.
template <typename T, bool kRelu = false>
__device__ uint32_t pack(float first, float second) {
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  uint32_t pair;
  if constexpr (kIsHalf && kRelu) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else if constexpr (kIsHalf) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else if constexpr (kRelu) {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

}  // namespace kernels::ptx
