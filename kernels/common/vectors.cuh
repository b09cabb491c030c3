// Accesses of 16 bytes, with or without an L2 policy. sm_80 and newer have policies.

#ifndef KERNELS_COMMON_VECTORS_CUH_
#define KERNELS_COMMON_VECTORS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace kernels {

// The elements of one 16-byte access.
template <typename T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T value[kSize];
};

// The bytes of a value as another type of its size.
template <typename To, typename From>
__device__ To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "every byte is used");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// How L2 is to treat the lines of an access.
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

// Loads are not ld.global.nc: the operand may be the result (in-place).
template <typename T>
__device__ Vector<T> load_vector(const T* address) {
  const uint4 bits = *reinterpret_cast<const uint4*>(address);
  return bit_cast<Vector<T>>(bits);
}

template <typename T>
__device__ Vector<T> load_vector(const T* address, uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  uint4 bits;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(__cvta_generic_to_global(address)), "l"(policy)
               : "memory");
  return bit_cast<Vector<T>>(bits);
#else
  return load_vector(address);
#endif
}

template <typename T>
__device__ void store_vector(T* address, const Vector<T>& vector) {
  *reinterpret_cast<uint4*>(address) = bit_cast<uint4>(vector);
}

// A byte of a mask has the policy of the lines that it goes with.
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

inline bool is_vector_aligned(const void* a, const void* b) {
  return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) % 16 == 0;
}

}  // namespace kernels

#endif  // KERNELS_COMMON_VECTORS_CUH_
