// The set bits of a word, one after the other.

#pragma once

#include <cstdint>

#include "common/launch.cuh"

namespace kernels {

// Returns the number of the lowest set bit of a word that is not 0, in the type of an index.
__device__ __forceinline__ int64_t lowest_bit(uint32_t word) { return int64_t{__ffs(word)} - 1; }

__device__ __forceinline__ uint32_t without_lowest_bit(uint32_t word) { return word & (word - 1); }

}  // namespace kernels
