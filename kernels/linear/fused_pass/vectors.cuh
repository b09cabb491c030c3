// How the kernels of the fused pass see a matrix and its mask.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/memory.cuh"
#include "common/sizes.h"
#include "common/vectors.cuh"

namespace kernels::fused_pass {

// The type in which elements of type T are computed and summed.
template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Each row of the mask, n bits, is padded to bytes_of_bits(n) bytes.
struct MaskLayout {
  static constexpr int kColumns = 8;  // a byte has the bits of 8 columns
};

// The neighbouring elements of a row that a thread handles: one 16-byte vector, fewer elements at
// the end of the row, or none past it. If rows are not aligned to 16 bytes, the elements are
// accessed one by one.
template <typename T>
struct RowVector {
  static constexpr int kSize = Vector<T>::kSize;
  int64_t first_column;
  int count;       // 0 to kSize
  bool is_vector;  // one 16-byte access moves the elements

  // The elements from first_column on. The row ends before column `end`.
  __device__ RowVector(int64_t first_column, int64_t end, bool is_aligned)
      : first_column(first_column),
        count(static_cast<int>(min(max(end - first_column, int64_t{0}), int64_t{kSize}))),
        is_vector(is_aligned && count == kSize) {}

  // `source` is the address of the first element. Elements past the end of the row are 0.
  __device__ Vector<T> load(const T* source) const {
    // nvcc would split some ordinary accesses of 16 bytes into smaller ones, but not asm
    // statements, as load_vector with a policy and store_global_uint4 are.
    if (is_vector) return load_vector(source, evict_normal_policy());
    Vector<T> v;
#pragma unroll
    for (int j = 0; j < kSize; ++j) v.value[j] = j < count ? source[j] : T{};
    return v;
  }

  __device__ void store(T* target, const Vector<T>& v) const {
    if (is_vector) {
      uint4 bits;
      memcpy(&bits, &v, sizeof(bits));
      ptx::store_global_uint4(target, bits);
      return;
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if (j < count) target[j] = v.value[j];
    }
  }
};

}  // namespace kernels::fused_pass
