// Stands in for kernels/common/ptx/memory.cuh, as far as emulated kernels use it.

#pragma once

#include "common/launch.cuh"

namespace kernels::ptx {

inline float4 load_global_four_if(bool condition, const float* from) {
  float4 v{};
  if (condition) memcpy(&v, from, sizeof(v));
  return v;
}

// Shared memory is static, and so within 2 GiB of this.
inline char shared_memory_origin;
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - &shared_memory_origin);
}

template <typename T>
void copy_or_clear(uint32_t shared, const void* global, bool valid) {
  const auto origin = reinterpret_cast<uintptr_t>(&shared_memory_origin);
  void* const to = reinterpret_cast<void*>(origin + static_cast<int32_t>(shared));
  if (valid) {
    memcpy(to, global, sizeof(T));
  } else {
    memset(to, 0, sizeof(T));
  }
}
inline void copy_async(uint32_t shared, const void* global, bool valid) {
  copy_or_clear<float4>(shared, global, valid);
}
inline void copy_async_one(uint32_t shared, const float* global, bool valid) {
  copy_or_clear<float>(shared, global, valid);
}
inline void commit_copies() {}
template <int kPending>
void wait_copies() {}

inline void store_global_four(void* to, const uint4& v) { memcpy(to, &v, sizeof(v)); }

}  // namespace kernels::ptx
