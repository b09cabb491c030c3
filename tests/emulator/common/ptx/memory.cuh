// Replaces kernels/common/ptx/memory.cuh: the functions of it that emulated kernels call, in
// C++ instead of PTX instructions.

#pragma once

#include "common/launch.cuh"

namespace kernels::ptx {

inline float4 load_global_float4_if(bool condition, const float* from) {
  float4 v{};
  if (condition) memcpy(&v, from, sizeof(v));
  return v;
}

inline void store_global_uint4(void* to, const uint4& v) { memcpy(to, &v, sizeof(v)); }

}  // namespace kernels::ptx
