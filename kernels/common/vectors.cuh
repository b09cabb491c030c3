// Accesses of 16 bytes, with an L2 policy where it pays, and element types.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "launchers.h"

namespace kernels {

// The elements of one access.
template <typename T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T value[kSize];
};

// Elements i and following of a row of k, zeros past its end.
template <int kCount>
__device__ void load_floats(float (&v)[kCount], const float* row, int64_t i, int64_t k,
                            bool is_aligned) {
  if (is_aligned && i + kCount <= k) {
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(row + i + j);
      v[j] = four.x, v[j + 1] = four.y, v[j + 2] = four.z, v[j + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) v[j] = i + j < k ? row[i + j] : 0.0f;
  }
}

// How L2 is to treat the lines of a load. sm_80 and newer; older GPUs load without a policy.
__device__ inline uint64_t l2_policy(bool evict_last) {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  if (evict_last) {
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
#endif
  return policy;
}

template <typename T>
__device__ Vector<T> load_vector(const T* address) {
  const uint4 bits = *reinterpret_cast<const uint4*>(address);
  Vector<T> vector;
  memcpy(&vector, &bits, sizeof(vector));
  return vector;
}

template <typename T>
__device__ Vector<T> load_vector(const T* address, uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  uint4 bits;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(__cvta_generic_to_global(address)), "l"(policy)
               : "memory");
  Vector<T> vector;
  memcpy(&vector, &bits, sizeof(vector));
  return vector;
#else
  return load_vector(address);
#endif
}

template <typename T>
__device__ void store_vector(T* address, const Vector<T>& vector) {
  uint4 bits;
  memcpy(&bits, &vector, sizeof(bits));
  *reinterpret_cast<uint4*>(address) = bits;
}

// A byte of a mask. It goes with lines that are to be evicted last, and is treated like them.
__device__ inline uint32_t load_mask(const uint8_t* address, uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  uint32_t bits;
  asm volatile("ld.global.L2::cache_hint.u8 %0, [%1], %2;"
               : "=r"(bits)
               : "l"(__cvta_generic_to_global(address)), "l"(policy)
               : "memory");
  return bits;
#else
  return *address;
#endif
}

__device__ inline void store_mask(uint8_t* address, uint32_t bits, uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  asm volatile("st.global.L2::cache_hint.u8 [%0], %1, %2;" ::"l"(__cvta_generic_to_global(address)),
               "r"(bits), "l"(policy)
               : "memory");
#else
  *address = static_cast<uint8_t>(bits);
#endif
}

// x < 0 is false for NaN and for -0, which ReLU therefore keeps as they are.
template <typename T>
__device__ T relu_of(T x) {
  const T zero{};
  return x < zero ? zero : x;
}

// The mask's bit: whether the gradient passes. True for NaN, as in torch.
template <typename T>
__device__ bool mask_bit(T z) {
  return !(z <= T{});
}

// Returns what body makes of a zero of the dtype's element type.
template <typename Body>
int for_floating(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(float{});
  if (dtype == DType::kFloat64) return body(double{});
  if (dtype == DType::kFloat16) return body(__half{});
  if (dtype == DType::kBFloat16) return body(__nv_bfloat16{});
  return cudaErrorInvalidValue;
}

}  // namespace kernels
