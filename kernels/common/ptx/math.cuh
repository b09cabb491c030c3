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
  // The instruction's first operand is the high 16 bits.
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

// mma: the tensor-core product of one warp, d [16, 8] += a [16, 16] b [8, 16]^T, of fp16 elements
// with float accumulators d. For GPUs from sm_80 on; Hopper's faster form is in wgmma.cuh. Each
// lane has the elements of a, b and d that the PTX manual lists for mma.m16n8k16.
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace kernels::ptx
