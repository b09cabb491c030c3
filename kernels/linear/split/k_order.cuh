// K order: the order of the 16 elements of K of one wgmma in the fp16x3 GEMM of sm90/.
//
// This order lets a lane load four neighbouring elements of the weight by one access. (Any order
// gives the same terms, as long as x and the weight have the same one.) In wgmma's layout of
// operand A, lane 4 g + c of a warp, with g = 0 - 7 and c = 0 - 3, holds the places 2 c, 2 c + 1,
// 2 c + 8 and 2 c + 9 along K. These places get the elements 4 c to 4 c + 3:
//
//   place      0  1 |  2  3 |  4  5 |  6  7 |  8  9 | 10 11 | 12 13 | 14 15
//   lanes      c=0  |  c=1  |  c=2  |  c=3  |  c=0  |  c=1  |  c=2  |  c=3
//   element    0  1 |  4  5 |  8  9 | 12 13 |  2  3 |  6  7 | 10 11 | 14 15
//   pair         0  |   2   |   4   |   6   |   1   |   3   |   5   |   7       (element / 2)
//
// split_row.cuh stores x in this order, and sm90/gemm_fp16x3/mainloop.cuh gives the weight to wgmma
// in it (Fp16x3Consumer::convert).

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "linear/split/split.cuh"

namespace kernels::split {

// Returns the element, 0 to 15, at this place of 16 along K.
__host__ __device__ constexpr int element_at_place(int place) {
  const int c = place % 8 / 2;
  const int upper = place / 8;  // 0 for places 0 to 7, 1 for places 8 to 15
  return 4 * c + 2 * upper + place % 2;
}
static_assert(element_at_place(2) == 4 && element_at_place(3) == 5 && element_at_place(10) == 6 &&
                  element_at_place(11) == 7,
              "c = 1 has elements 4 to 7 at its places 2, 3, 10 and 11");

// Returns the pair of neighbouring elements, 0 to 7, at this place of eight pairs.
__host__ __device__ constexpr int pair_at_place(int place) {
  return element_at_place(2 * place) / 2;
}
static_assert(pair_at_place(0) == 0 && pair_at_place(1) == 2 && pair_at_place(2) == 4 &&
                  pair_at_place(3) == 6,
              "the first four places have the pairs 0 2 4 6");
static_assert(pair_at_place(4) == 1 && pair_at_place(5) == 3 && pair_at_place(6) == 5 &&
                  pair_at_place(7) == 7,
              "the last four places have the pairs 1 3 5 7");

// Brings the pairs of two neighbouring threads, 16 elements, into K order. All threads of a warp
// call it.
//
//                                                       even thread   odd thread
//   before                                              0 1 2 3       4 5 6 7
//   the threads swap 1 and 4, and 3 and 6               0 4 2 6       1 5 3 7
//   each thread swaps the two pairs in its middle       0 2 4 6       1 3 5 7
__device__ inline void interleave_pairs(uint32_t (&pairs)[kOctet / 2]) {
  const bool is_odd_thread = threadIdx.x % 2 != 0;
#pragma unroll
  for (int j = 0; j < kOctet / 2; j += 2) {
    const uint32_t sent = is_odd_thread ? pairs[j] : pairs[j + 1];
    const uint32_t received = __shfl_xor_sync(0xffffffff, sent, 1);
    if (is_odd_thread) {
      pairs[j] = received;
    } else {
      pairs[j + 1] = received;
    }
  }
  const uint32_t middle = pairs[1];
  pairs[1] = pairs[2];
  pairs[2] = middle;
}

}  // namespace kernels::split
