// The mask in the fast epilogue of half types (epilogue_half_types.cuh): from the bits of threads
// to words in shared memory, for a pair of row blocks at a time, and from there to the mask.
//
// A word is a row's 16 columns of one warp: bit n is the warp's column n. Lane 4 g + c has rows 2 c
// and 2 c + 1 of both row blocks of the pair, but only columns g and g + 8 (sm90/fragment.cuh). So
// the eight lanes with the same c have the same four rows, and exchange bits. Three steps:
//
//   PairMaskBits         A lane collects its own bits: two of each of its four rows.
//   combine_mask_words   Three exchanges, with the lanes of g ^ 4, g ^ 2 and g ^ 1. Afterwards,
//                        lanes with g < 4 have both rows of row block 0 complete, and lanes with
//                        g >= 4 both rows of row block 1.
//   stage_mask_word      Each lane with an even g stores one of its two words.
//
// The word of a row of row block 1. A hexadecimal digit stands for the bit of the column with this
// number, from column f (15) to column 0:
//
//   g    own bits            after g ^ 4         after g ^ 2         after g ^ 1
//
//   0    .......8.......0    gives it away to g = 4
//   1    ......9.......1.    gives it away to g = 5
//   2    .....a.......2..    gives it away to g = 6
//   3    ....b.......3...    gives it away to g = 7
//   4    ...c.......4....    ...c...8...4...0    .e.c.a.8.6.4.2.0    fedcba9876543210
//   5    ..d.......5.....    ..d...9...5...1.    f.d.b.9.7.5.3.1.    fedcba9876543210
//   6    .e.......6......    .e...a...6...2..    .e.c.a.8.6.4.2.0    fedcba9876543210
//   7    f.......7.......    f...b...7...3...    f.d.b.9.7.5.3.1.    fedcba9876543210
//
// For row block 0 it is the other way round: g = 4 to 7 give their bits away to g = 0 to 3.

#pragma once

#include <cstdint>

#include "common/ptx/math.cuh"
#include "linear/epilogue.cuh"
#include "linear/sm90/fragment.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/shared_memory.cuh"

namespace kernels::sm90::gemm_one_product {

// The mask bits of a thread's results in a pair of row blocks. bits[b] is for row block b:
//
//                        row 2 c    row 2 c + 1
//   column g             bit 0      bit 16
//   column g + 8         bit 8      bit 24
//
// Shifted up by g, each bit is at its column's place in two 16-bit words, one for each row.
struct PairMaskBits {
  uint32_t bits[2] = {};

  // Adds the bits of z[0] and z[1], the results in rows 2 c and 2 c + 1 of a row block.
  __device__ __forceinline__ void add(int row_block, int column_block, const float (&z)[2]) {
    const uint32_t first_bit = mask_bit(z[0]) ? 1u : 0u;
    const uint32_t second_bit = mask_bit(z[1]) ? 1u : 0u;
    bits[row_block] |= (first_bit | second_bit << 16) << (column_block * 8);
  }
};

// Combines the mask bits of a warp (see the picture at the top). Returns the complete words of two
// rows: row 2 c in bits 0 - 15, row 2 c + 1 in bits 16 - 31. A lane with keeps_second (g >= 4) gets
// the pair's second row block, the others the first. All lanes call it.
__device__ __forceinline__ uint32_t combine_mask_words(const PairMaskBits& mask_bits,
                                                       bool keeps_second, int g) {
  constexpr int kLanesOfG = 4;  // so lanes of g and g ^ i differ in 4 * i
  const uint32_t kept = keeps_second ? mask_bits.bits[1] : mask_bits.bits[0];
  const uint32_t given = keeps_second ? mask_bits.bits[0] : mask_bits.bits[1];
  uint32_t words = kept << g;
  words |= __shfl_xor_sync(0xffffffff, given << g, 4 * kLanesOfG);
  words |= __shfl_xor_sync(0xffffffff, words, 2 * kLanesOfG);
  words |= __shfl_xor_sync(0xffffffff, words, 1 * kLanesOfG);
  return words;
}

// Stores the two words of combine_mask_words to the mask in shared memory. The pair of row blocks
// begins at row first_row of StagedRows. Four lanes with the same c have the same two words:
//
//   g              0        1        2            3        4        5        6            7
//   row block      0                 0                     1                 1
//   stores row     2 c      nothing  2 c + 1      nothing  2 c      nothing  2 c + 1      nothing
__device__ __forceinline__ void stage_mask_word(uint32_t two_words, bool keeps_second,
                                                int first_row, int warp, const FragmentLane& lane,
                                                StagedMask& mask) {
  const int row_block = keeps_second ? 1 : 0;
  const int row_of_two = lane.g / 2 % 2;  // 0 for row 2 c, 1 for row 2 c + 1
  const int row = first_row + row_block * FragmentConfig::kRowBlockRows + 2 * lane.c + row_of_two;
  const bool stores_word = lane.g % 2 == 0;
  if (stores_word) mask[row][warp] = static_cast<uint16_t>(two_words >> (row_of_two * 16));
}

// The two steps after PairMaskBits. All lanes of a warp call it.
__device__ __forceinline__ void stage_mask_of_pair(const PairMaskBits& mask_bits, bool keeps_second,
                                                   int first_row, int warp,
                                                   const FragmentLane& lane, StagedMask& mask) {
  const uint32_t two_words = combine_mask_words(mask_bits, keeps_second, lane.g);
  stage_mask_word(two_words, keeps_second, first_row, warp, lane, mask);
}

// Copies the mask of StagedRows to memory. It has the rows from first_m on, and the 64 columns from
// first_n on. Thread t copies the 8 bytes of row t. (N is a multiple of 64:
// fast_epilogue_rule_of_half_types.)
template <typename T>
__device__ __forceinline__ void store_mask_rows(const Epilogue<T>& epilogue, int first_m,
                                                int first_n, int thread, const StagedMask& mask) {
  const int m = first_m + thread;
  if (thread < OneProductConfig::kStagedRows && m < epilogue.m && first_n < epilogue.n) {
    const int64_t byte = (static_cast<int64_t>(m) * epilogue.n + first_n) / 8;
    *reinterpret_cast<uint2*>(epilogue.mask + byte) = *reinterpret_cast<const uint2*>(mask[thread]);
  }
}

}  // namespace kernels::sm90::gemm_one_product
