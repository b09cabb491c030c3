// The mask in the fast epilogue of half types (epilogue_half_types.cuh): from the bits of threads
// to words in shared memory, for a pair of row blocks at a time, and from there to the mask.
//
// A word is a row's 16 columns of one warp (StagedMask, shared_memory.cuh): bit n is the warp's
// column n. accumulators.cuh explains g and c. A thread has four rows of a pair of row blocks, rows
// 2 c and 2 c + 1 of both, but only the columns g and g + 8. The eight lanes with the same c have
// the same four rows, and together all 16 columns. Three steps:
//
//   PairMaskBits         A thread collects its own eight bits.
//   combine_mask_words   The eight lanes exchange bits, until each has two complete words.
//   stage_mask_word      Every other lane stores one of its two words.
//
// Lane 27 in these steps. It has c = 3, so its rows are 6 and 7, and g = 6, so its columns are 6
// and 14. It exchanges bits with the lanes of g ^ 4 = 2, g ^ 2 = 4 and g ^ 1 = 7:
//
//                            has bits of row blocks   of rows   of columns
//
//   PairMaskBits             0 and 1                  6 and 7   6 and 14
//   exchange with lane 11    1                        6 and 7   2, 6, 10, 14
//   exchange with lane 19    1                        6 and 7   0, 2, 4, 6, 8, 10, 12, 14
//   exchange with lane 31    1                        6 and 7   0 - 15
//   stage_mask_word          1                        7         0 - 15
//
// In the first exchange, lane 27 gives its bits of row block 0, and gets lane 11's of row block 1.
// So do all lanes with g >= 4, each with a lane of g - 4. Afterwards they have bits of row block 1
// only, and the lanes with g < 4 bits of row block 0 only.

#pragma once

#include <cstdint>

#include "common/ptx/math.cuh"
#include "linear/epilogue.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/shared_memory.cuh"

namespace kernels::sm90::gemm_one_product {

// The place of a thread in its warpgroup: it is thread 32 * warp + 4 * g + c.
struct ThreadPlace {
  int warp;
  int g;
  int c;
};

// The mask bits of a thread's results in a pair of row blocks. bits[b] has the results of row block
// b:
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

// Combines the mask bits of a warp. Returns the complete words of two rows: row 2 c in bits 0 - 15,
// row 2 c + 1 in bits 16 - 31. Lanes with g >= 4 have keeps_second true, and get the rows of the
// pair's second row block. The others get those of the first. All lanes call it.
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
// begins at row first_row of StagedRows. Four lanes with the same c have the same two words. Two of
// these lanes store a word each:
//
//   g              0        1        2            3        4        5        6            7
//   row block      0                 0                     1                 1
//   stores row     2 c      nothing  2 c + 1      nothing  2 c      nothing  2 c + 1      nothing
__device__ __forceinline__ void stage_mask_word(uint32_t two_words, bool keeps_second,
                                                int first_row, const ThreadPlace& place,
                                                StagedMask& mask) {
  const int row_block = keeps_second ? 1 : 0;
  const int row_of_two = place.g / 2 % 2;  // 0 for row 2 c, 1 for row 2 c + 1
  const int row = first_row + row_block * 8 + 2 * place.c + row_of_two;
  const bool stores_word = place.g % 2 == 0;
  if (stores_word) mask[row][place.warp] = static_cast<uint16_t>(two_words >> (row_of_two * 16));
}

// The two steps after PairMaskBits. keeps_second and first_row are as above. All lanes of a warp
// call it.
__device__ __forceinline__ void stage_mask_of_pair(const PairMaskBits& mask_bits, bool keeps_second,
                                                   int first_row, const ThreadPlace& place,
                                                   StagedMask& mask) {
  const uint32_t two_words = combine_mask_words(mask_bits, keeps_second, place.g);
  stage_mask_word(two_words, keeps_second, first_row, place, mask);
}

// Copies the mask of StagedRows to memory. They are the rows from first_m on, and the 64 columns
// from first_n on. Thread t copies the 8 bytes of row t, if there is such a row. (With a mask,
// call_is_fast implies that N is a multiple of 64: launch_half_in_mode, launch.cuh.)
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
