// Subnormal hi numbers. fp16 has 11 significant bits, as TF32 has, but only from 2^-14 on. A
// smaller hi has fewer bits, and the GEMM with one product (float32 at `high`) has no lo, which
// would have the others. A row with many such hi is therefore multiplied as TF32 (docs/DESIGN.md).
//
// This file has the limit, and counts the subnormals of x for split_row.
// sm90/gemm_one_product/converter_subnormals.cuh counts those of the weight.

#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "linear/split/split.cuh"

namespace kernels::split {

// The least magnitude of a normal fp16 number.
constexpr float kLeastNormalHi = 0x1p-14f;

// The limit: returns whether more than one in 32 elements is subnormal. Zeros do not count as
// elements, because hi represents them exactly. So the arguments are
//
//                       subnormals                                      elements
//
//   a row of x          its subnormals                                  its nonzeros
//   a row of weight     the scaled count of converter_subnormals.cuh,   K
//                       which makes up for zeros
__host__ __device__ inline bool exceeds_subnormal_limit(int64_t subnormals, int64_t elements) {
  constexpr int64_t kElementsPerSubnormal = 32;
  return subnormals * kElementsPerSubnormal > elements;
}

// Counts a thread's nonzero elements, and how many of them are subnormal when they are scaled.
struct SubnormalCounter {
  uint32_t nonzeros = 0;
  uint32_t subnormals = 0;

  // Counts the elements of an octet: `v` before and `scaled` after the scaling. Most octets have
  // neither zeros nor subnormals, so the first loop only looks for the smallest magnitude.
  __device__ void add(const float (&v)[kOctet], const float (&scaled)[kOctet]) {
    float smallest = fabsf(scaled[0]);
#pragma unroll
    for (const float element : scaled) smallest = fminf(smallest, fabsf(element));
    nonzeros += kOctet;
    if (smallest >= kLeastNormalHi) return;
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      nonzeros -= v[j] == 0.0f ? 1u : 0u;
      const bool is_subnormal = v[j] != 0.0f && fabsf(scaled[j]) < kLeastNormalHi;
      subnormals += is_subnormal ? 1u : 0u;
    }
  }

  // Both counts in one number, the nonzeros in its upper word. A sum of such numbers has both sums.
  __device__ uint64_t packed() const { return static_cast<uint64_t>(nonzeros) << 32 | subnormals; }
};

// Returns whether a row of x has too many subnormals. packed_counts is the sum of all threads.
__device__ inline bool has_many_subnormals(uint64_t packed_counts) {
  const uint32_t nonzeros = packed_counts >> 32;
  const uint32_t subnormals = static_cast<uint32_t>(packed_counts);
  return exceeds_subnormal_limit(subnormals, /*elements=*/nonzeros);
}

}  // namespace kernels::split
