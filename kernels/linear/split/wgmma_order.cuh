// Two orders in which the fp16x3 GEMM of sm90/ gives its operands to wgmma:
//
//   K order        the order of the 16 elements of K of one wgmma
//   column order   the order of a warp's 16 columns of out, which are rows of the weight
//
// Both are free. A sum over K is the same in any order of K, as long as x and the weight have the
// same order. And the rows of operand A may be any rows of the weight, if the epilogue knows which.
// Each order is chosen so that a thread accesses neighbours. In wgmma's layout of operand A, each
// lane of a warp holds 2 rows x 4 places along K. Lane 4 g + c, with g = 0 - 7 and c = 0 - 3, holds
//
//   rows g and g + 8     places 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 along K
//
// Who uses the orders:
//
//   split_row.cuh                 stores x in K order, with interleave_pairs of this file
//   gemm_fp16x3/mainloop.cuh      gives the weight to wgmma in both orders
//                                 (ConsumerWarpgroup::convert)
//   gemm_fp16x3/epilogue.cuh      stores results by the column order

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "linear/split/split.cuh"

namespace kernels::split {

// ----- K order
//
// The four places of lane 4 g + c along K get the elements 4 c to 4 c + 3, which the lane loads
// from the weight by one 16-byte access:
//
//   place      0  1 |  2  3 |  4  5 |  6  7 |  8  9 | 10 11 | 12 13 | 14 15
//   lanes      c=0  |  c=1  |  c=2  |  c=3  |  c=0  |  c=1  |  c=2  |  c=3
//   element    0  1 |  4  5 |  8  9 | 12 13 |  2  3 |  6  7 | 10 11 | 14 15
//   pair         0  |   2   |   4   |   6   |   1   |   3   |   5   |   7       (element / 2)

// Returns the element, 0 to 15, that is at this place of 16 along K.
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

// ----- column order
//
// Row g and row g + 8 of operand A, which one lane holds, get two neighbouring columns:
//
//   lanes           0 - 3   4 - 7   8 - 11  12 - 15  16 - 19  20 - 23  24 - 27  28 - 31
//   g                 0       1       2        3        4        5        6        7
//   row g             0       4       2        6        8       12       10       14     (columns)
//   row g + 8         1       5       3        7        9       13       11       15

// Returns the column of the warp that is in a row of operand A. Both are 0 to 15. If the row has
// the bits r3 r2 r1 r0, the column has the bits r2 r0 r1 r3.
__host__ __device__ constexpr int column_at_operand_row(int row) {
  return (row & 4) << 1 | (row & 1) << 2 | (row & 2) | row >> 3;
}
static_assert(column_at_operand_row(3) == 6 && column_at_operand_row(3 + 8) == 7,
              "g = 3 has the neighbouring columns 6 and 7");
static_assert(column_at_operand_row(5) == 12 && column_at_operand_row(5 + 8) == 13,
              "g = 5 has the neighbouring columns 12 and 13");

// Why r0 and r1 are swapped: loads of the weight from shared memory then have no bank conflicts.
// The hardware loads for eight lanes at a time, which have two successive g. They load the same
// four vectors of two rows of the weight. TMA's swizzle puts vector v of row n at place v ^ (n % 8)
// of the row's eight places, which are all 32 banks. Example: vectors 0 to 3 for g = 0 and 1, rows
// 0 and 4 of the weight:
//
//   place    0    1    2    3    4    5    6    7
//   row 0    v0   v1   v2   v3
//   row 4                        v0   v1   v2   v3
//
// So the two rows must differ in bit 2.
constexpr bool differ_in_bit_2(int row, int other_row) { return ((row ^ other_row) & 4) != 0; }
static_assert(differ_in_bit_2(column_at_operand_row(0), column_at_operand_row(1)) &&
                  differ_in_bit_2(column_at_operand_row(2), column_at_operand_row(3)) &&
                  differ_in_bit_2(column_at_operand_row(4), column_at_operand_row(5)) &&
                  differ_in_bit_2(column_at_operand_row(6), column_at_operand_row(7)),
              "two successive g load from different halves of the banks");

}  // namespace kernels::split
