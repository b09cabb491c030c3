// forward_kernel of the fused pass, which fused_pass.cu launches.

#pragma once

#include <cstdint>

#include "common/reduce_warp.cuh"
#include "common/vectors.cuh"
#include "linear/epilogue.cuh"
#include "linear/fused_pass/vectors.cuh"

namespace kernels::fused_pass {

struct ForwardConfig {
  static constexpr int kThreads = 256;

  // Returns how many vectors a row has, with padding: a row is padded to whole bytes of the mask,
  // so that all threads that share a byte are in one warp. A padding vector has no elements.
  template <typename T>
  static int64_t padded_row_vectors(int64_t n) {
    constexpr int kVectorsPerByte = MaskLayout::kColumns / Vector<T>::kSize;
    return bytes_of_bits(n) * kVectorsPerByte;
  }
};

// Returns the row that vector number `vector` belongs to, in a matrix of all_vectors vectors. A
// division of 32 bits, where the numbers fit, is several times as fast as one of 64 bits.
__device__ inline int64_t row_of(int64_t vector, int64_t padded_row_vectors, int64_t all_vectors) {
  if (padded_row_vectors == all_vectors) return 0;
  if (all_vectors <= UINT32_MAX) {
    return static_cast<uint32_t>(vector) / static_cast<uint32_t>(padded_row_vectors);
  }
  return vector / padded_row_vectors;
}

// In place: out [m, n] = relu(out) / divisor. mask [m, (n + 7) / 8], or null.
//
// Each thread handles one vector. With two vectors side by side, each of a warp's two loads would
// read half of every 32-byte sector, so that all sectors are read twice (docs/EXPERIMENTS.md, "The
// fused pass").
//
// Example: n = 11 in float32. A vector has 4 elements, and a row is padded to 4 vectors. The first
// thread of a byte of the mask stores it: threads 0, 2 and 4.
//
//   thread        0       1       2       3    |    4       5     ...
//   row           0       0       0       0    |    1       1
//   columns      0..3    4..7    8..10   none  |   0..3    4..7
//   mask byte     0       0       1       1    |    2       2
template <typename T>
__global__ void __launch_bounds__(ForwardConfig::kThreads)
    forward_kernel(T* out, const Divisor<Compute<T>> divisor, uint8_t* mask, int64_t n,
                   int64_t padded_row_vectors, int64_t all_vectors, bool is_aligned) {
  constexpr int kSize = Vector<T>::kSize;
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * ForwardConfig::kThreads + threadIdx.x;
  const int64_t row = row_of(vector, padded_row_vectors, all_vectors);
  const int64_t first_column = (vector - row * padded_row_vectors) * kSize;
  // Threads after the last vector take part in the exchange of bits, as if their row were empty.
  const int64_t row_end = vector < all_vectors ? n : 0;
  const RowVector<T> elements(first_column, row_end, is_aligned);
  out += row * n + first_column;
  Vector<T> z = elements.load(out);
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const auto element = static_cast<Compute<T>>(z.value[j]);
    const uint32_t bit = mask_bit(element) ? 1 : 0;  // 0 past the row, where z is 0
    bits |= bit << j;
    z.value[j] = static_cast<T>(divisor.quotient(relu_of(element)));
  }
  elements.store(out, z);
  if (mask == nullptr) return;
  constexpr int kThreadsOfByte = MaskLayout::kColumns / kSize;
  const int first_bit = static_cast<int>(first_column % MaskLayout::kColumns);
  bits = or_over_lanes<kThreadsOfByte>(bits << first_bit);
  if (first_bit != 0 || elements.count == 0) return;
  mask[row * bytes_of_bits(n) + first_column / MaskLayout::kColumns] = static_cast<uint8_t>(bits);
}

}  // namespace kernels::fused_pass
