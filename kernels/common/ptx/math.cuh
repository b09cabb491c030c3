// Arithmetic: one wrapper for each PTX instruction.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kernels::ptx {

// max.NaN: the larger of two numbers, or NaN if one of them is NaN. CUDA's fmaxf would return the
// other number instead.
__device__ inline float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// cvt.rn: rounds two floats to the half type T, __half or __nv_bfloat16, and packs them into one
// word, `first` in the low 16 bits. With kRelu (cvt.rn.relu) negative results become 0; NaN stays
// NaN.
template <typename T, bool kRelu = false>
__device__ uint32_t pack(float first, float second) {
  constexpr bool kIsFloat16 = std::is_same_v<T, __half>;
  uint32_t pair;
  // The instruction's first source operand is the high 16 bits.
  if constexpr (kIsFloat16 && kRelu) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else if constexpr (kIsFloat16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else if constexpr (kRelu) {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}

}  // namespace kernels::ptx
