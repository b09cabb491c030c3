// 16-byte accesses with an L2 policy, the walk over a strided operand, and element types.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "launchers.h"

namespace kernels {

// The elements of one 16-byte access.
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

// Not ld.global.nc: the operand may be the result (in-place).
template <typename T>
__device__ Vector<T> load_vector(const T* address, uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  uint4 bits;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(__cvta_generic_to_global(address)), "l"(policy)
               : "memory");
#else
  const uint4 bits = *reinterpret_cast<const uint4*>(address);
#endif
  Vector<T> vector;
  static_assert(sizeof(vector) == sizeof(bits), "a vector is one 16-byte access");
  memcpy(&vector, &bits, sizeof(vector));
  return vector;
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

inline bool is_vector_aligned(const void* a, const void* b) {
  return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) % 16 == 0;
}

// A layout of at most kMaxSize elements, for kernels. Division is a loop of some 20 instructions,
// so it becomes a multiplication: floor(i / size) is the high half of i ceil(2^64 / size), for all
// i below 2^32 and sizes from 2 on (Lemire, Kaser, Kurz, Softw. Pract. Exp. 49(6), 2019).
struct Walk {
  static constexpr int64_t kMaxSize = int64_t{1} << 31;  // the last vector may end behind it
  int ndim;
  uint32_t size[kMaxDims];
  uint64_t reciprocal[kMaxDims];
  int64_t stride[2][kMaxDims];
  // Offsets to the next element where it is the next of dimension d, and the dimensions before are
  // at their ends.
  static constexpr int kSteps = 3;
  int64_t step[2][kSteps] = {};

  explicit Walk(const Layout& layout) : ndim(layout.ndim) {
    for (int d = 0; d < ndim; ++d) {
      size[d] = static_cast<uint32_t>(layout.size[d]);
      reciprocal[d] = UINT64_MAX / size[d] + 1;
      for (int k = 0; k < 2; ++k) stride[k][d] = layout.stride[k][d];
    }
    for (int k = 0; k < 2; ++k) {
      int64_t back = 0;
      for (int d = 0; d < std::min(ndim, kSteps); ++d) {
        step[k][d] = stride[k][d] - back;
        back += (layout.size[d] - 1) * stride[k][d];
      }
    }
  }
};

// Where the operands have an element, and how many lie along each dimension from it on.
template <int kOperands>
struct Place {
  int64_t offset[kOperands] = {};
  uint32_t left[Walk::kSteps] = {1, 1, 1};

  __device__ Place(uint32_t i, const Walk& walk) {
#pragma unroll 1
    for (int d = 0; d < walk.ndim; ++d) {
      uint32_t coordinate = i;
      if (d < walk.ndim - 1) {
        const uint64_t high = walk.reciprocal[d] >> 32;
        const uint32_t low = static_cast<uint32_t>(walk.reciprocal[d]);
        i = static_cast<uint32_t>((i * high + __umulhi(i, low)) >> 32);
        coordinate -= i * walk.size[d];
      }
#pragma unroll
      for (int e = 0; e < Walk::kSteps; ++e) {
        if (d == e) left[e] = walk.size[e] - coordinate;
      }
#pragma unroll
      for (int k = 0; k < kOperands; ++k) offset[k] += coordinate * walk.stride[k][d];
    }
  }

  // To the next element, which is element i.
  __device__ void advance(uint32_t i, const Walk& walk) {
    int d = 0;
    if (--left[0] == 0) {
      d = 1, left[0] = walk.size[0];
      if (--left[1] == 0) {
        d = 2, left[1] = walk.size[1];
        if (--left[2] == 0) {
          *this = Place(i, walk);
          return;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offset[k] += walk.step[k][d];
  }
};

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
