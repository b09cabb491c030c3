// Which rows of the weight are the rows of wgmma's operand A. A warp has 16 of each.
//
// In wgmma's layout, lane 4 g + c, with g = 0 - 7 and c = 0 - 3, holds rows g and g + 8 of A. They
// get two neighbouring rows of the weight, so that the lane's results are in two neighbouring
// columns of out:
//
//   lanes                         0 - 3  4 - 7  8 - 11 12 - 15 16 - 19 20 - 23 24 - 27 28 - 31
//   g                               0      1      2       3       4       5       6       7
//   weight row at A's row g         0      4      2       6       8      12      10      14
//   weight row at A's row g + 8     1      5      3       7       9      13      11      15
//
// mainloop.cuh gives the weight to wgmma in this order (Fp16x3Consumer::convert), and
// epilogue.cuh stores the results by it.

#pragma once

#include <cuda_runtime.h>

namespace kernels::sm90::gemm_fp16x3 {

// Returns the row of the weight, among the warp's 16, that is at a row of operand A. Both are 0 to
// 15. If the row of A has the bits r3 r2 r1 r0, the row of the weight has the bits r2 r0 r1 r3.
__host__ __device__ constexpr int weight_row_at_operand_row(int row) {
  const int bit3 = (row & 4) << 1;
  const int bit2 = (row & 1) << 2;
  const int bit1 = row & 2;
  const int bit0 = row >> 3;
  return bit3 | bit2 | bit1 | bit0;
}
static_assert(weight_row_at_operand_row(3) == 6 && weight_row_at_operand_row(3 + 8) == 7,
              "g = 3 has the neighbouring rows 6 and 7");
static_assert(weight_row_at_operand_row(5) == 12 && weight_row_at_operand_row(5 + 8) == 13,
              "g = 5 has the neighbouring rows 12 and 13");

// Why not r2 r1 r0 r3, in which r0 and r1 are not swapped: with this order, loads of the weight
// from shared memory have no bank conflicts. The hardware loads for eight lanes at a time, which
// have two successive g: four vectors of 16 bytes of one row of the weight, and the vectors with
// the same numbers of another row. TMA's swizzle puts vector v of row n at place v ^ (n % 8) of the
// row's eight places, which are all 32 banks. So the two rows must differ in bit 2. Example:
// vectors 0 to 3 for g = 0 and 1, rows 0 and 4 of the weight:
//
//   place    0    1    2    3    4    5    6    7
//   row 0    v0   v1   v2   v3
//   row 4                        v0   v1   v2   v3
constexpr bool differ_in_bit_2(int row, int other_row) { return ((row ^ other_row) & 4) != 0; }
static_assert(differ_in_bit_2(weight_row_at_operand_row(0), weight_row_at_operand_row(1)) &&
                  differ_in_bit_2(weight_row_at_operand_row(2), weight_row_at_operand_row(3)) &&
                  differ_in_bit_2(weight_row_at_operand_row(4), weight_row_at_operand_row(5)) &&
                  differ_in_bit_2(weight_row_at_operand_row(6), weight_row_at_operand_row(7)),
              "two successive g load from different halves of the banks");

}  // namespace kernels::sm90::gemm_fp16x3
