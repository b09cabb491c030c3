// Building blocks that several kernels share: the arithmetic of ReLU and its mask for one element
// (launchers.h says what they are), vector loads and stores, cache hints for L2, and the choice of
// a C++ type by a dtype.
//
// A GPU moves memory fastest when each thread accesses 16 bytes at once: a warp's 32 accesses then
// cover 512 adjacent bytes, which are four whole cache lines.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/ptx/math.cuh"
#include "common/sizes.h"
#include "launchers.h"

namespace kernels {

// ------------------------------------------------------------------------------- ReLU, one element

template <typename T>
__device__ T relu_of(T x) {
  const T zero{};
  return x < zero ? zero : x;
}

// The mask bit of an element, where z is the input of ReLU.
template <typename T>
__device__ bool mask_bit(T z) {
  return !(z <= T{});
}

// ------------------------------------------------------------------------- vector loads and stores

// The elements that one 16-byte access moves: 8 of a half type, 4 floats or 2 doubles.
template <typename T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kSize = kVectorBytes / sizeof(T);
  T value[kSize];
};

// Loads the vector that begins at `address`, a multiple of 16 bytes.
template <typename T>
__device__ Vector<T> load_vector(const T* address) {
  const uint4 bits = *reinterpret_cast<const uint4*>(address);
  Vector<T> vector;
  memcpy(&vector, &bits, sizeof(vector));
  return vector;
}

// Stores a vector at `address`, a multiple of 16 bytes.
template <typename T>
__device__ void store_vector(T* address, const Vector<T>& vector) {
  uint4 bits;
  memcpy(&bits, &vector, sizeof(bits));
  *reinterpret_cast<uint4*>(address) = bits;
}

// Loads v[j] = row[i + j] for j < kCount from a row of k floats. Elements past the end of the row
// are 0 and their memory is not read. `is_aligned` says that row + i is a multiple of 16 bytes;
// elements are then loaded four at a time, unless the row ends among them.
template <int kCount>
__device__ void load_floats(float (&v)[kCount], const float* row, int64_t i, int64_t k,
                            bool is_aligned) {
  static_assert(kCount % 4 == 0, "the elements are loaded as whole float4 vectors");
  if (is_aligned && i + kCount <= k) {
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(row + i + j);
      v[j] = four.x;
      v[j + 1] = four.y;
      v[j + 2] = four.z;
      v[j + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) v[j] = i + j < k ? row[i + j] : 0.0f;
  }
}

// Stores four neighbouring elements of a row. `is_whole_vector` says that all four exist and that
// `target` is aligned to their size: one instruction then stores them, and `count` is not used.
// Otherwise only target[i] with i < count exist, and they are stored one by one.
template <typename T>
__device__ void store_four(T* target, const float (&v)[4], int64_t count, bool is_whole_vector) {
  if (is_whole_vector) {
    if constexpr (std::is_same_v<T, float>) {
      *reinterpret_cast<float4*>(target) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      *reinterpret_cast<uint2*>(target) =
          make_uint2(ptx::pack<T>(v[0], v[1]), ptx::pack<T>(v[2], v[3]));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) target[i] = static_cast<T>(v[i]);
  }
}

// ------------------------------------------------------------- loads and stores with a hint for L2

// An L2 policy is a 64-bit value that a load or a store takes as an operand. It tells L2 how long
// to keep the cache line. Policies exist on sm_80 and newer; on older GPUs, the functions below
// ignore them. The policy "evict first" is in ptx/memory.cuh, beside the copies that use it.
__device__ inline uint64_t evict_last_policy() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// The policy that ordinary loads have. A caller passes it to load_vector not for L2, but because
// load_vector with a policy is an asm statement: the compiler leaves it alone, while it may split
// an ordinary load or merge it with another.
__device__ inline uint64_t evict_normal_policy() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Loads the vector that begins at `address`, a multiple of 16 bytes, with an L2 policy.
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

// Loads one byte of a mask. Callers pass the policy with which they load the values that the mask
// belongs to, so that L2 treats the lines of both alike.
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

// Stores the low 8 of `bits` as one byte of a mask.
__device__ inline void store_mask(uint8_t* address, uint32_t bits, uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  asm volatile("st.global.L2::cache_hint.u8 [%0], %1, %2;" ::"l"(__cvta_generic_to_global(address)),
               "r"(bits), "l"(policy)
               : "memory");
#else
  *address = static_cast<uint8_t>(bits);
#endif
}

// ------------------------------------------------------------------------------------------ dtypes

// Calls `body` with a zero of the dtype's element type and returns what `body` returns. The body
// gets the type by decltype, as in
//   dispatch_dtype(dtype, [&](auto zero) { using T = decltype(zero); ... });
template <typename Body>
int dispatch_dtype(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(float{});
  if (dtype == DType::kFloat64) return body(double{});
  if (dtype == DType::kFloat16) return body(__half{});
  if (dtype == DType::kBFloat16) return body(__nv_bfloat16{});
  return cudaErrorInvalidValue;
}

}  // namespace kernels
