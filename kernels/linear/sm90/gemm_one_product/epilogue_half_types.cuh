// How gemm_one_product_kernel stores half types (float16 and bfloat16): the fast epilogue, and
// gradients, which have no epilogue. epilogue.cuh explains the notation, and which thread has which
// result.

#pragma once

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/tma.cuh"
#include "linear/epilogue.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/epilogue.cuh"

namespace kernels::sm90::gemm_one_product {

// ----- the mask of the fast epilogue
//
// The mask of a pair of row blocks, in shared memory, has one 16-bit word for each of the pair's 16
// rows and each warp: bit n is the warp's column n. A thread has bits of four rows, and only two of
// each. Three steps make whole words of them:
//
//   PairMaskBits         collects the thread's own bits
//   combine_mask_words   exchanges bits among the eight lanes with the same c, which have the same
//                        four rows: first with the lane of g ^ 4, then with those of g ^ 2 and g ^ 1
//   stage_mask_word      stores a word
//
// The way of lane 27 (c = 3, g = 6) through these steps. Its rows are 2 c = 6 and 7 of both row
// blocks, and its columns are g = 6 and g + 8 = 14.
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
// The lanes 19, 27 and 31 do the same with their partners, so row block 1 is left to the lanes with
// g >= 4, and row block 0 to the others.

// The mask bits of a thread's results in a pair of row blocks. A word has the results of one row
// block:
//
//                        row 2 c    row 2 c + 1
//   column g             bit 0      bit 16
//   column g + 8         bit 8      bit 24
//
// Shifted up by g, each bit is at its column's place in two 16-bit words, one for each row. Bit n
// of a 16-bit word is the warp's column n.
struct PairMaskBits {
  uint32_t bits[2] = {};  // [row block of the pair]

  // Adds the bits of z[0] and z[1], the results in rows 2 c and 2 c + 1 of a row block.
  __device__ __forceinline__ void add(int row_block, int column_block, const float (&z)[2]) {
    const uint32_t first_bit = mask_bit(z[0]) ? 1u : 0u;
    const uint32_t second_bit = mask_bit(z[1]) ? 1u : 0u;
    bits[row_block] |= (first_bit | second_bit << 16) << (column_block * 8);
  }
};

// Combines the mask bits of a warp. Returns the two complete words of rows 2 c and 2 c + 1: row 2 c
// in bits 0 - 15, row 2 c + 1 in bits 16 - 31. They are of the pair's second row block if
// is_in_second, which is true in the lanes with g >= 4, and else of the first. All lanes call it.
__device__ __forceinline__ uint32_t combine_mask_words(const PairMaskBits& mask_bits,
                                                       bool is_in_second, int g) {
  constexpr int kLanesOfG = 4;  // so lanes of g and g ^ i differ in 4 * i
  const uint32_t kept = is_in_second ? mask_bits.bits[1] : mask_bits.bits[0];
  const uint32_t given = is_in_second ? mask_bits.bits[0] : mask_bits.bits[1];
  uint32_t words = kept << g;
  words |= __shfl_xor_sync(0xffffffff, given << g, 4 * kLanesOfG);
  words |= __shfl_xor_sync(0xffffffff, words, 2 * kLanesOfG);
  words |= __shfl_xor_sync(0xffffffff, words, 1 * kLanesOfG);
  return words;
}

// The place of a thread in its warpgroup: it is thread 32 * warp + 4 * g + c.
struct ThreadPlace {
  int warp;
  int g;
  int c;
};

// Stores words that combine_mask_words has returned to the mask in shared memory. The pair of row
// blocks begins at row first_row of the epilogue subtile. Four lanes with the same c have the same
// two words. Two of these lanes store a word each:
//
//   g              0        1        2            3        4        5        6            7
//   row block      0                 0                     1                 1
//   stores row     2 c      nothing  2 c + 1      nothing  2 c      nothing  2 c + 1      nothing
__device__ __forceinline__ void stage_mask_word(uint32_t two_words, bool is_in_second,
                                                int first_row, const ThreadPlace& place,
                                                StagedMask& mask) {
  const int row_block = is_in_second ? 1 : 0;
  const int row_of_two = place.g / 2 % 2;  // 0 for row 2 c, 1 for row 2 c + 1
  const int row = first_row + row_block * 8 + 2 * place.c + row_of_two;
  const bool stores_word = place.g % 2 == 0;
  if (stores_word) mask[row][place.warp] = static_cast<uint16_t>(two_words >> (row_of_two * 16));
}

// ----- the fast epilogue

// Makes a thread's results in a pair of row blocks, which begins with first_row_block. The
// results go to `words`, the registers of an stmatrix. A word has two rows of column block h and
// of row block b of the pair:
//
//   word   0        1        2        3
//   h, b   0, 0     0, 1     1, 0     1, 1
template <bool kMask, typename T>
__device__ __forceinline__ void make_results_of_pair(
    const float (&accumulators)[OneProductConfig::kAccumulators], int first_row_block,
    float inverse_divisor, const float (&bias)[2], uint32_t (&words)[4], PairMaskBits* mask_bits) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int block_of_pair = word % 2;
    const int column_block = word / 2;
    const float* const two_rows =
        accumulators + accumulator_index(first_row_block + block_of_pair, column_block);
    const float z[2] = {fmaf(two_rows[0], inverse_divisor, bias[column_block]),
                        fmaf(two_rows[1], inverse_divisor, bias[column_block])};
    words[word] = ptx::pack<T, /*kRelu=*/true>(z[0], z[1]);
    if constexpr (kMask) mask_bits->add(block_of_pair, column_block, z);
  }
}

// Stores the mask of an epilogue subtile. Thread t stores the 8 bytes of row t, if there is such a
// row: 64 columns. With a mask, call_is_fast implies that n is a multiple of 64
// (launch_half_in_mode, launch.cuh).
template <typename T>
__device__ __forceinline__ void store_mask_rows(const Epilogue<T>& epilogue, int first_row,
                                                int first_column, int thread,
                                                const StagedMask& mask) {
  const int row = first_row + thread;
  if (thread < OneProductConfig::kHalfTypeSubtileRows && row < epilogue.m &&
      first_column < epilogue.n) {
    const int64_t byte = (static_cast<int64_t>(row) * epilogue.n + first_column) / 8;
    *reinterpret_cast<uint2*>(epilogue.mask + byte) = *reinterpret_cast<const uint2*>(mask[thread]);
  }
}

// An epilogue subtile in shared memory has 64 rows of x, each with 64 columns, which are 128 bytes
// or eight vectors of 16 bytes. Vectors are swizzled: vector v of row r is at place v ^ (r % 8). So
// the same vector of eight successive rows is in different banks, and so are the eight vectors of a
// row.
constexpr int kStagedRowBytes = 128;

// Copies results from the epilogue subtiles in shared memory to out. Thread t copies vector t % 8
// (eight columns) of row t / 8 of a subtile, and of every kRowsAtATime-th row after it.
template <typename T>
struct StagedRowsReader {
  static constexpr int kRowsAtATime = BlockConfig::kWarpgroupThreads / 8;
  static_assert(kRowsAtATime % 8 == 0, "a thread's vectors have the same place in all its rows");

  uint32_t source;  // address of the thread's first vector in the first buffer
  int row;          // the thread's first row of out, in the tile
  int column;       // the first column of out of its vectors
  T* target;        // the element of out at `row` and `column`

  __device__ StagedRowsReader(const Epilogue<T>& epilogue, const WarpgroupTile& warpgroup_tile,
                              uint32_t staging, int thread) {
    const int read_place = thread % 8 ^ thread / 8 % 8;
    source = staging + thread / 8 * kStagedRowBytes + read_place * 16;
    row = warpgroup_tile.first_row + thread / 8;
    column = warpgroup_tile.first_column + thread % 8 * 8;
    target = epilogue.out_at(row, column);
  }

  // Copies the subtile that begins at row subtile_row of the tile.
  __device__ __forceinline__ void copy(const Epilogue<T>& epilogue, int subtile_row,
                                       int buffer_offset) const {
#pragma unroll
    for (int i = 0; i < OneProductConfig::kHalfTypeSubtileRows / kRowsAtATime; ++i) {
      const int offset = buffer_offset + i * kRowsAtATime * kStagedRowBytes;
      const float4 v = ptx::load_shared_float4(source + offset);
      const int row_offset = subtile_row + i * kRowsAtATime;
      const bool exists = row + row_offset < epilogue.m && column < epilogue.n;
      T* const out = target + row_offset * static_cast<int64_t>(epilogue.n);
      if (exists) __stcs(reinterpret_cast<float4*>(out), v);
    }
  }
};

// The fast epilogue of half types, which applies ReLU. The caller has checked
// epilogue.call_is_fast, which implies ReLU here (launch_half_in_mode, launch.cuh). The caller
// has also divided the bias in `inputs`, so that one fma divides the product and adds the bias.
// 1 / divisor is a power of two here.
//
// The results go through shared memory, an epilogue subtile at a time. stmatrix with .trans writes
// four 8 x 8 matrices at a time, and transposes them: a register that it reads has two rows of one
// column, and a vector that it writes has eight columns of one row.
template <bool kMask, typename T>
__device__ void store_fast(const Epilogue<T>& epilogue, const WarpgroupTile& warpgroup_tile,
                           const float (&accumulators)[OneProductConfig::kAccumulators],
                           const EpilogueMemory<T>& memory) {
  constexpr int kSubtileRows = OneProductConfig::kHalfTypeSubtileRows;
  static_assert(kStagedRowBytes == OneProductConfig::kWarpgroupColumns * sizeof(T),
                "a row has eight vectors of 16 bytes");
  constexpr int kPairRows = 16;  // a pair of row blocks has 16 rows
  const int thread = threadIdx.x % BlockConfig::kWarpgroupThreads;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const float inverse_divisor = epilogue.divisor.inverse_power;
  const float* const bias_of_warp = memory.inputs.bias + warp * OneProductConfig::kWarpColumns;
  const float bias[2] = {bias_of_warp[g], bias_of_warp[g + 8]};

  // The address for stmatrix: lane l gives the address of row l % 8 of matrix l / 8. The matrices
  // of a pair of row blocks:
  //
  //                       warp's columns 0 - 7      warp's columns 8 - 15
  //   first row block     matrix 0 (lanes 0 - 7)    matrix 2 (lanes 16 - 23)
  //   second row block    matrix 1 (lanes 8 - 15)   matrix 3 (lanes 24 - 31)
  const uint32_t staging = ptx::shared_address(&memory.staging);
  const int matrix_place = (warp * 2 + lane / 16) ^ lane % 8;
  const uint32_t matrix_address = staging + lane % 16 * kStagedRowBytes + matrix_place * 16;
  const StagedRowsReader<T> reader(epilogue, warpgroup_tile, staging, thread);

#pragma unroll
  for (int subtile = 0; subtile < OneProductConfig::kTileRows / kSubtileRows; ++subtile) {
    auto& staged = memory.staging.subtiles[subtile % 2];
    const int buffer_offset = subtile % 2 * sizeof(staged);
    const int subtile_row = subtile * kSubtileRows;
#pragma unroll
    for (int pair = 0; pair < kSubtileRows / kPairRows; ++pair) {
      const int first_row_block = (subtile_row + pair * kPairRows) / 8;
      uint32_t words[4];
      PairMaskBits mask_bits;
      make_results_of_pair<kMask, T>(accumulators, first_row_block, inverse_divisor, bias, words,
                                     &mask_bits);
      const int offset = buffer_offset + pair * kPairRows * kStagedRowBytes;
      ptx::store_matrices_transposed(matrix_address + offset, words);
      if constexpr (kMask) {
        const bool is_in_second = g / 4 != 0;
        const uint32_t two_words = combine_mask_words(mask_bits, is_in_second, g);
        stage_mask_word(two_words, is_in_second, pair * kPairRows, {warp, g, c}, staged.mask);
      }
    }
    // When all threads are here, they have stored this subtile to shared memory, and have read the
    // previous subtile, whose buffer the next one overwrites. So one barrier a subtile is enough.
    ptx::barrier_sync(memory.barrier, BlockConfig::kWarpgroupThreads);
    if constexpr (kMask) {
      store_mask_rows(epilogue, warpgroup_tile.first_row + subtile_row, warpgroup_tile.first_column,
                      thread, staged.mask);
    }
    reader.copy(epilogue, subtile_row, buffer_offset);
  }
}

// ----- gradients

// A thread's results in a tile of a gradient. The caller packs them to T when the tile's
// accumulators are complete, and stores them a box at a time while the next tile is multiplied.
// For K = 1024, that takes 5% less time on an H200 than storing them at once (docs/EXPERIMENTS.md,
// "The gradient of the weight in half types").
//
// out is [N, M], so it has a line in memory for each column, with the results of all rows of x. Two
// neighbouring rows of x, of which a thread has results, are neighbours in such a line, and nothing
// is transposed. A box is a warp's 16 columns x 64 rows of x. As each warp has its own boxes, the
// warpgroup needs no barrier.
template <typename T>
struct PackedGradient {
  static constexpr int kBoxes = OneProductConfig::kTileRows / OneProductConfig::kGradientBoxRows;
  static constexpr int kPairsPerBox =
      OneProductConfig::kGradientBoxRows / 16;  // pairs of row blocks
  // [box][pair][word]: word 2 h + b has column block h, and two rows of row block b of the pair.
  uint32_t words[kBoxes][kPairsPerBox][4];
  // The number of stored boxes of the packed tile. At first no tile is packed, so no box is left.
  int stored = kBoxes;

  // Rounds the accumulators of a complete tile to T, in pairs.
  __device__ void pack(const float (&accumulators)[OneProductConfig::kAccumulators]) {
    stored = 0;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int pair = 0; pair < kPairsPerBox; ++pair) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int row_block = (box * kPairsPerBox + pair) * 2 + word % 2;
          const int column_block = word / 2;
          const float* const two_rows = accumulators + accumulator_index(row_block, column_block);
          words[box][pair][word] = ptx::pack<T>(two_rows[0], two_rows[1]);
        }
      }
    }
  }

  // Stores the next box of a warpgroup's tile. Registers cannot be indexed at run time, so there is
  // one copy of `store` for each box.
  __device__ void store_next(const CUtensorMap& map, const WarpgroupTile& warpgroup_tile,
                             Staging<T>& staging) {
    static_assert(kBoxes == 4, "each box has a line here");
    const int box = stored;
    ++stored;
    if (box == 0) {
      store<0>(map, warpgroup_tile, staging);
    } else if (box == 1) {
      store<1>(map, warpgroup_tile, staging);
    } else if (box == 2) {
      store<2>(map, warpgroup_tile, staging);
    } else if (box == 3) {
      store<3>(map, warpgroup_tile, staging);
    }
  }

  // Stores a box of the tile, by stmatrix to shared memory and by TMA from there. All lanes of a
  // warp call it.
  template <int kBox>
  __device__ void store(const CUtensorMap& map, const WarpgroupTile& warpgroup_tile,
                        Staging<T>& staging) const {
    static_assert(kBox < kBoxes);
    constexpr int kLineBytes = OneProductConfig::kGradientBoxRows * sizeof(T);
    static_assert(kLineBytes == 128, "lines have the length of TMA's widest swizzle");
    const int warp = threadIdx.x % BlockConfig::kWarpgroupThreads / 32;
    const int lane = threadIdx.x % 32;
    const uint32_t box = ptx::shared_address(
        staging.gradient_boxes[warp][kBox % OneProductConfig::kGradientBuffers]);
    // stmatrix: lane l gives the address of line l % 8 of matrix l / 8. Matrix 2 h + b has the
    // lines of column block h, and row block b of the pair.
    const int line = lane / 16 * 8 + lane % 8;
    const int block_of_pair = lane / 8 % 2;
    // Waits until TMA has read the box that was in this buffer before.
    if (lane == 0) ptx::wait_stores_read<OneProductConfig::kGradientBuffers - 1>();
    __syncwarp();
#pragma unroll
    for (int pair = 0; pair < kPairsPerBox; ++pair) {
      // TMA's swizzle: vector v of a line is at v ^ (line % 8), and line % 8 is lane % 8.
      const int vector = (pair * 2 + block_of_pair) ^ lane % 8;
      ptx::store_matrices(box + line * kLineBytes + vector * 16, words[kBox][pair]);
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) {
      // The row comes first, because it is contiguous in out.
      ptx::store_tensor(&map, warpgroup_tile.first_row + kBox * OneProductConfig::kGradientBoxRows,
                        warpgroup_tile.first_column + warp * OneProductConfig::kWarpColumns, box);
      ptx::commit_stores();
    }
  }
};

}  // namespace kernels::sm90::gemm_one_product
