// The epilogue of gemm_single_kernel: a consumer warpgroup scales its accumulators (float32), adds
// the bias, applies ReLU, divides, makes the mask, and stores.
//
//   accumulators  64 columns (rows of the weight) x 256 rows (of x), float32, in the registers of a
//                 warpgroup of 128 threads
//   out           [M, N]
//   mask          [M, (N + 7) / 8], or null: bit n % 8 of byte n / 8 tells whether ReLU's gradient
//                 passes at column n
//
// gemm_single.cuh calls one of these for each tile:
//
//   store_general           any divisor, exponent and alignment
//   store_fast, float       a call that is_fast (epilogue.cuh), and small exponents
//   store_fast, half types  a call that is_fast, which has ReLU
//   PackedGradient          half types without an epilogue: out [N, M] is the product transposed
//
// Which thread has which result. Eight rows are a row block (they are eight columns of wgmma's
// accumulators); a tile has row blocks j = 0 - 31. Thread 32 w + 4 g + c of the warpgroup (warp w =
// 0 - 3, g = 0 - 7, c = 0 - 3) has four results of each row block:
//
//                           row 8 j + 2 c        row 8 j + 2 c + 1
//   column 16 w + g         d[4 j]               d[4 j + 1]
//   column 16 w + g + 8     d[4 j + 2]           d[4 j + 3]
//
// The lanes of a warp that have row block j:
//
//              column 16 w +   0    1    2    3    4    5    6    7  | 8 ... 15: the same lanes
//   rows 8 j + 0, 8 j + 1      0    4    8   12   16   20   24   28  |
//   rows 8 j + 2, 8 j + 3      1    5    9   13   17   21   25   29  |
//   rows 8 j + 4, 8 j + 5      2    6   10   14   18   22   26   30  |
//   rows 8 j + 6, 8 j + 7      3    7   11   15   19   23   27   31  |
//
// So a thread's neighbouring results are in one column of out, but stores need neighbours in a row:
// the results are transposed through shared memory. (PackedGradient's out is [N, M], which needs no
// transposition.)
//
// Why it is fast: lines of out are written whole, 16 bytes a thread, and are marked as not to be
// kept in L2, which is for x and the weight. If each warp stores its own 16 columns instead of
// whole lines, half types take 5% more time and float32 2%.

#pragma once

#include <cstdint>
#include <type_traits>

#include "common/ptx/barrier.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/tma.cuh"
#include "linear/epilogue.cuh"
#include "linear/fp16x3/split.cuh"
#include "linear/sm90/gemm_single_config.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_single {

// The index of a thread's accumulator for row 2 c of a row block. That of row 2 c + 1 follows.
// `column_half` is 0 for column g and 1 for column g + 8.
__host__ __device__ constexpr int accumulator_index(int row_block, int column_half) {
  return 4 * row_block + 2 * column_half;
}

// An epilogue subtile of accumulators in shared memory: [row block][warp][lane], each lane with its
// four results of the row block. The 33rd float4 is padding: see StagedSumsReader.
using StagedSums = float4[Config::kSubtileRowBlocks][4][Config::kStagedLanes];

// The shared memory of a consumer warpgroup's epilogue: a member for each way to store.
template <typename T>
union alignas(1024) Staging {
  StagedSums sums;  // store_general
  // PackedGradient: [warp][box][column][bytes of 64 rows of x]. TMA's swizzle requires that boxes
  // are aligned to 1024 bytes.
  uint8_t gradient_boxes[4][Config::kGradientBoxes][Config::kWarpColumns]
                        [Config::kGradientBoxRows * sizeof(T)];
  // store_fast of half types: two epilogue subtiles, used in turn.
  struct {
    uint8_t rows[Config::kHalfSubtileRows][Config::kWarpgroupColumns * sizeof(T)];
    uint16_t mask[Config::kHalfSubtileRows][Config::kWarpgroupColumns / 16];
  } subtiles[2];
};

template <>
union alignas(16) Staging<float> {
  StagedSums sums;
};

// The bias and the scales of a consumer warpgroup's results, in shared memory. In float32, the
// accumulator of row m and column n is 2^(x_exponent[m] + weight_exponent[n]) times too large. Half
// types are not scaled: their arrays have one element, which is not used.
template <typename T>
struct alignas(16) Scales {
  static constexpr bool kIsScaled = std::is_same_v<T, float>;
  float bias[Config::kWarpgroupColumns];
  float x_scale[kIsScaled ? Config::kXRows : 1];                      // 2^-x_exponent
  int8_t weight_exponent[kIsScaled ? Config::kWarpgroupColumns : 1];  // of the scaled weight
};

// Where this thread writes its four results of the epilogue subtile's first row block.
__device__ inline float4* staging_slot(StagedSums& sums) {
  const int warp = threadIdx.x % 128 / 32;
  const int lane = threadIdx.x % 32;
  return &sums[0][warp][lane];
}

// Where in a staged row block the result of a column (of the warpgroup's 64) and a row (of the row
// block's 8) is: in sums[row block][staged_warp][staged_lane], as that lane's result for
// column_half_of and row % 2.
//
// Example: column 20 is number 4 of warp 1's sixteen, so g = 4, in the first column half. Row 2 is
// the first row of c = 1. The result is the first of lane 4 g + c = 17 of warp 1.
__host__ __device__ constexpr int staged_warp(int column) { return column / 16; }
__host__ __device__ constexpr int staged_lane(int column, int row) {
  return column % 8 * 4 + row / 2;
}
__host__ __device__ constexpr int column_half_of(int column) { return column / 8 % 2; }
static_assert(staged_warp(20) == 1 && staged_lane(20, 2) == 17 && column_half_of(20) == 0,
              "the example above");

// Reads StagedSums in the order of out. Thread t of the warpgroup reads row t / 16 of each row
// block, and columns 4 (t % 16) to 4 (t % 16) + 3 of it. Sixteen threads read a row of 64 columns,
// so a warp reads two rows at a time.
//
// Two measures avoid bank conflicts; reads_all_banks checks that they do.
//
//   padding   The 33rd float4 of each warp. Without it, equal lanes of all warps would be 128
//             floats apart, in the same bank.
//   swap      Even threads read their columns in the order 0 1 2 3, odd threads in the order
//             1 0 3 2. Without that, two neighbouring threads would read columns that are 4 apart,
//             which is 64 floats: the same bank. With it, they are 5 or 3 apart, which is an odd
//             multiple of 16 floats: different halves of the banks.
struct StagedSumsReader {
  int column;           // the first of this thread's four, in the warpgroup's 64
  int row;              // in each row block
  bool swaps;           // whether this thread reads column 1 before 0, and 3 before 2
  const float* first;   // points to column 0, or to column 1 if the thread swaps
  const float* second;  // points to the other one
  // From a column to the next, in floats: four lanes of four floats.
  static constexpr int kNextColumn = 16;

  __device__ explicit StagedSumsReader(const StagedSums& sums) {
    column = threadIdx.x % 16 * 4;
    row = threadIdx.x % 128 / 16;
    swaps = threadIdx.x % 2 != 0;
    const int warp = staged_warp(column);
    const int lane = staged_lane(column, row);
    const float* const source = &sums[0][warp][lane].x + column_half_of(column) * 2 + row % 2;
    const int first_read = swaps ? 1 : 0;
    const int second_read = swaps ? 0 : 1;
    first = source + first_read * kNextColumn;
    second = source + second_read * kNextColumn;
  }

  // Reads the thread's four columns of its row in a row block of the epilogue subtile.
  __device__ void read(float (&v)[4], int row_block) const {
    constexpr int kPitch = 4 * Config::kRowBlockPitch;  // in floats
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float read_first = first[row_block * kPitch + i * kNextColumn];
      const float read_second = second[row_block * kPitch + i * kNextColumn];
      v[i] = swaps ? read_second : read_first;
      v[i + 1] = swaps ? read_first : read_second;
    }
  }

  // Returns whether the first reads of the 32 threads of a warp are in 32 different banks. (The
  // further reads are the same distance away in all threads, or swapped between them.)
  static constexpr bool reads_all_banks(int warp) {
    uint32_t banks = 0;
    for (int thread = 32 * warp; thread < 32 * warp + 32; ++thread) {
      const bool swaps = thread % 2 != 0;
      const int first_column = thread % 16 * 4 + (swaps ? 1 : 0);
      const int row = thread / 16;
      const int lane =
          staged_warp(first_column) * Config::kStagedLanes + staged_lane(first_column, row);
      const int result = accumulator_index(0, column_half_of(first_column)) + row % 2;
      const int place = 4 * lane + result;  // in floats
      banks |= 1u << place % 32;
    }
    return banks == 0xffffffff;
  }
};
static_assert(StagedSumsReader::reads_all_banks(0) && StagedSumsReader::reads_all_banks(1) &&
                  StagedSumsReader::reads_all_banks(2) && StagedSumsReader::reads_all_banks(3),
              "reads have no bank conflicts");

// The general epilogue: any divisor, exponents and alignment, one epilogue subtile after the other.
// All threads of the warpgroup meet at `barrier`.
template <typename T, int kSums>
__device__ void store_general(const Epilogue<T>& epilogue, int first_row, int first_column,
                              const float (&sums)[kSums], const Scales<T>& scales,
                              StagedSums& staging, int barrier) {
  constexpr int kSubtiles = Config::kSubtiles;
  constexpr int kSubtileRowBlocks = Config::kSubtileRowBlocks;
  const StagedSumsReader reader(staging);
#pragma unroll 1
  for (int subtile = 0; subtile < kSubtiles; ++subtile) {
    copy_any_subtile<0, kSubtiles, kSubtileRowBlocks, Config::kRowBlockPitch>(staging_slot(staging),
                                                                              sums, subtile);
    ptx::barrier_sync(barrier, 128);
#pragma unroll
    for (int j = 0; j < kSubtileRowBlocks; ++j) {
      const int row_in_tile = (subtile * kSubtileRowBlocks + j) * 8 + reader.row;
      const int row = first_row + row_in_tile;
      float z[4];
      reader.read(z, j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Scales<T>::kIsScaled) {
          const float x_scale = scales.x_scale[row_in_tile];
          const float weight_scale =
              fp16x3::power_of_two(-scales.weight_exponent[reader.column + i]);
          // The product of both scales may overflow or underflow. If the smaller one comes first,
          // a multiplication overflows only if the result does.
          z[i] = z[i] * fminf(x_scale, weight_scale) * fmaxf(x_scale, weight_scale);
        }
        z[i] += scales.bias[reader.column + i];
      }
      finish_four</*kLaneBit=*/1>(epilogue, row < epilogue.m, row, first_column + reader.column, z);
    }
    ptx::barrier_sync(barrier, 128);  // before the next subtile overwrites what others still read
  }
}

// The fast epilogue of float32. The caller has checked that epilogue.is_fast, and that no exponent
// of the tile is beyond FastEpilogueConfig::kMaxExponent. So the product of the scales of x and
// weight is a normal float.
template <bool kMask, int kSums>
__device__ void store_fast(const Epilogue<float>& epilogue, int first_row, int first_column,
                           const float (&sums)[kSums], const Scales<float>& scales,
                           Staging<float>& staging, int barrier) {
  constexpr int kSubtileRowBlocks = Config::kSubtileRowBlocks;
  const StagedSumsReader reader(staging.sums);
  const int column = first_column + reader.column;
  float weight_scale[4];
  float bias[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bias[i] = scales.bias[reader.column + i];
    weight_scale[i] = fp16x3::power_of_two(-scales.weight_exponent[reader.column + i]);
  }
  const float* const x_scale = scales.x_scale + reader.row;
  // Rows of out from this thread's current row to the end. None if its columns do not exist.
  int rows_left = column < epilogue.n ? epilogue.m - first_row - reader.row : 0;
  const int64_t first = static_cast<int64_t>(first_row + reader.row) * epilogue.n + column;
  float* target = epilogue.out + first;
  uint8_t* mask = nullptr;
  // With a mask, is_fast implies that n is a multiple of 8 (float_vector_size, launch_single.cuh).
  if constexpr (kMask) mask = epilogue.mask + first / 8;
#pragma unroll
  for (int subtile = 0; subtile < Config::kSubtiles; ++subtile) {
    if (subtile > 0) ptx::barrier_sync(barrier, 128);  // all have read the subtile before
    copy_subtile<kSubtileRowBlocks, Config::kRowBlockPitch>(staging_slot(staging.sums), sums,
                                                            subtile);
    ptx::barrier_sync(barrier, 128);
    float v[kSubtileRowBlocks][4];
#pragma unroll
    for (int j = 0; j < kSubtileRowBlocks; ++j) reader.read(v[j], j);
#pragma unroll
    for (int j = 0; j < kSubtileRowBlocks; ++j) {
      const float own_x_scale = x_scale[(subtile * kSubtileRowBlocks + j) * 8];
      float (&out)[4] = v[j];  // sums at first, then results
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float z = fmaf(out[i], own_x_scale * weight_scale[i], bias[i]);
        out[i] = epilogue.finish_fast(z);
        if constexpr (kMask) bits |= uint32_t{mask_bit(z)} << i;
      }
      // The store is non-temporal, as L2 is for x and the weight. Calls take 3% less time on an
      // H200.
      if (rows_left > 0) {
        __stcs(reinterpret_cast<float4*>(target), make_float4(out[0], out[1], out[2], out[3]));
      }
      if constexpr (kMask) {
        // A byte of the mask has 8 columns: this even thread's four and its odd neighbour's.
        bits |= __shfl_xor_sync(0xffffffff, bits, 1) << 4;
        if (rows_left > 0 && column % 8 == 0) *mask = static_cast<uint8_t>(bits);
        mask += epilogue.n;  // eight rows of n / 8 bytes
      }
      target += 8 * static_cast<int64_t>(epilogue.n);
      rows_left -= 8;
    }
  }
}

// Collects a warp's mask bits of two row blocks: 16 rows x 16 columns, which are 16 words of 16
// bits, a word a row. Bit n of a word is column n of the warp's 16. All lanes call it.
//
// Before: lane 4 g + c has four bits of each row block, at these places of mask[row block]:
//
//                        row 2 c    row 2 c + 1
//   column g             bit 0      bit 16
//   column g + 8         bit 8      bit 24
//
// After: the lane has two whole words of one row block, the second one if is_in_second (g >= 4).
// Row 2 c is in bits 0 - 15, row 2 c + 1 in bits 16 - 31.
//
//   1. Each lane shifts its bits by g, to their places in the words.
//   2. Lanes of g and g ^ 4 exchange: each keeps the bits of its own row block, and gives those of
//      the other one. A lane then has the bits of 2 of the 8 values of g.
//   3. Two more exchanges, with g ^ 2 and g ^ 1, combine all 8 values of g.
//
// Four values of g then have the same two words. Two of the four store one word each:
//
//   g              0        1        2            3        4        5        6            7
//   row block      0                 0                     1                 1
//   stores row     2 c      nothing  2 c + 1      nothing  2 c      nothing  2 c + 1      nothing
__device__ __forceinline__ uint32_t collect_mask_words(const uint32_t (&mask)[2], bool is_in_second,
                                                       int g) {
  const uint32_t kept = is_in_second ? mask[1] : mask[0];
  const uint32_t given = is_in_second ? mask[0] : mask[1];
  constexpr int kLanesOfG = 4;  // so lanes of g and g ^ i differ in 4 * i
  uint32_t words = kept << g;
  words |= __shfl_xor_sync(0xffffffff, given << g, 4 * kLanesOfG);
  words |= __shfl_xor_sync(0xffffffff, words, 2 * kLanesOfG);
  words |= __shfl_xor_sync(0xffffffff, words, 1 * kLanesOfG);
  return words;
}

// Finishes a thread's results in a pair of row blocks, which begins with first_row_block. The
// results go to `words`, the registers of an stmatrix. A word has two rows of a column half h and
// of row block b of the pair:
//
//   word   0        1        2        3
//   h, b   0, 0     0, 1     1, 0     1, 1
//
// The mask bits go to mask[b], which is 0 at first, in the places that collect_mask_words shows.
template <bool kMask, typename T, int kSums>
__device__ __forceinline__ void finish_pair(const float (&sums)[kSums], int first_row_block,
                                            float scale, const float (&bias)[2],
                                            uint32_t (&words)[4], uint32_t (&mask)[2]) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int block_of_pair = word % 2;
    const int column_half = word / 2;
    const float* const sum = sums + accumulator_index(first_row_block + block_of_pair, column_half);
    const float z[2] = {fmaf(sum[0], scale, bias[column_half]),
                        fmaf(sum[1], scale, bias[column_half])};
    words[word] = ptx::pack<T, /*kRelu=*/true>(z[0], z[1]);
    if constexpr (kMask) {
      const uint32_t two_rows = uint32_t{mask_bit(z[0])} | uint32_t{mask_bit(z[1])} << 16;
      mask[block_of_pair] |= two_rows << (column_half * 8);
    }
  }
}

// The fast epilogue of half types, which applies ReLU. The caller has checked epilogue.is_fast,
// which implies ReLU here (launch_half, launch_single.cuh). The caller has also divided the bias in
// `scales`, so that one fma divides the product and adds the bias. epilogue.divisor.scale is
// 1 / divisor, a power of two.
//
// An epilogue subtile has 64 rows of x in shared memory, each with 64 columns, which are 128 bytes
// or eight vectors of 16 bytes. stmatrix with .trans writes four 8 x 8 matrices at a time, and
// transposes them: a register that it reads has two neighbours along x, and a vector that it writes
// has eight neighbours along columns. Vectors are swizzled: vector v of row r is at v ^ (r % 8). So
// the eight vectors of one matrix, which have the same v in eight rows, are in different banks, and
// so are the eight vectors of a row.
template <bool kMask, typename T, int kSums>
__device__ void store_fast(const Epilogue<T>& epilogue, int first_row, int first_column,
                           const float (&sums)[kSums], const Scales<T>& scales, Staging<T>& staging,
                           int barrier) {
  constexpr int kSubtileRows = Config::kHalfSubtileRows;
  constexpr int kRowBytes = Config::kWarpgroupColumns * sizeof(T);
  static_assert(kRowBytes == 128, "eight vectors of 16 bytes a row are swizzled");
  const int thread = threadIdx.x % 128;
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int g = lane / 4;
  const int c = lane % 4;
  const float scale = epilogue.divisor.scale;
  const float bias[2] = {scales.bias[warp * 16 + g], scales.bias[warp * 16 + g + 8]};

  // Where stmatrix writes: lane l gives the address of row l % 8 of matrix l / 8. Matrices 0 and 1
  // are columns 0 - 7 of the warp in two row blocks, matrices 2 and 3 columns 8 - 15.
  const uint32_t base = ptx::shared_address(&staging);
  const int matrix_row = lane % 16;
  const int matrix_vector = (warp * 2 + lane / 16) ^ lane % 8;
  const uint32_t write_address = base + matrix_row * kRowBytes + matrix_vector * 16;
  // Thread t reads and stores vector t % 8 (eight columns) of rows t / 8 + 16 i.
  const int vector_place = thread % 8 ^ thread / 8 % 8;
  const uint32_t read_address = base + thread / 8 * kRowBytes + vector_place * 16;
  const int column = first_column + thread % 8 * 8;
  int row = first_row + thread / 8;
  T* target = epilogue.out + static_cast<int64_t>(row) * epilogue.n + column;

#pragma unroll
  for (int subtile = 0; subtile < Config::kXRows / kSubtileRows; ++subtile) {
    auto& staged = staging.subtiles[subtile % 2];
    const int buffer_offset = subtile % 2 * sizeof(staged);
#pragma unroll
    for (int pair = 0; pair < kSubtileRows / 16; ++pair) {  // of row blocks
      uint32_t words[4];
      uint32_t mask[2] = {};
      finish_pair<kMask, T>(sums, subtile * kSubtileRows / 8 + pair * 2, scale, bias, words, mask);
      ptx::store_matrices_transposed(write_address + buffer_offset + pair * 16 * kRowBytes, words);
      if constexpr (kMask) {
        // Which word this lane stores: see the table of collect_mask_words.
        const bool is_in_second = g / 4 != 0;
        const uint32_t two_words = collect_mask_words(mask, is_in_second, g);
        const int row_block = is_in_second ? 1 : 0;  // of the pair
        const int row_of_two = g / 2 % 2;            // 0 for row 2 c, 1 for row 2 c + 1
        const int staged_row = pair * 16 + row_block * 8 + 2 * c + row_of_two;
        const bool stores_word = g % 2 == 0;
        if (stores_word) {
          staged.mask[staged_row][warp] = static_cast<uint16_t>(two_words >> (row_of_two * 16));
        }
      }
    }
    // When all threads are here, they have stored this subtile to shared memory, and have read the
    // subtile before, whose buffer is that of the next one. So one barrier a subtile is enough.
    ptx::barrier_sync(barrier, 128);
    if constexpr (kMask) {
      const int mask_row = first_row + subtile * kSubtileRows + thread;
      if (thread < kSubtileRows && mask_row < epilogue.m && first_column < epilogue.n) {
        // 64 columns are 8 bytes. With a mask, is_fast implies that n is a multiple of 64
        // (launch_half, launch_single.cuh).
        const int64_t byte = (static_cast<int64_t>(mask_row) * epilogue.n + first_column) / 8;
        *reinterpret_cast<uint2*>(epilogue.mask + byte) =
            *reinterpret_cast<const uint2*>(staged.mask[thread]);
      }
    }
#pragma unroll
    for (int i = 0; i < kSubtileRows / 16; ++i) {
      const float4 v = ptx::load_shared_four(read_address + buffer_offset + i * 16 * kRowBytes);
      if (row < epilogue.m && column < epilogue.n) __stcs(reinterpret_cast<float4*>(target), v);
      row += 16;
      target += 16 * static_cast<int64_t>(epilogue.n);
    }
  }
}

// A thread's results in a tile of a gradient. The caller packs them to T when the tile's
// accumulators are complete, and stores them a box at a time while the next tile is multiplied.
// For K = 1024, the kernel takes 5% less time on an H200 than if it stores them at once.
//
// out is [N, M]: a line of out is a column, and rows of x are neighbours in it. So two results of a
// thread that are neighbours along x are neighbours in out too, and nothing is transposed. A box is
// a warp's 16 columns x 64 rows of x. As each warp has its own boxes, the warpgroup needs no
// barrier.
template <typename T>
struct PackedGradient {
  static constexpr int kBoxes = Config::kXRows / Config::kGradientBoxRows;
  static constexpr int kPairsPerBox = Config::kGradientBoxRows / 16;  // pairs of row blocks
  // [box][pair][word]: word 2 h + b has column half h, and two rows of row block b of the pair.
  uint32_t words[kBoxes][kPairsPerBox][4];
  // How many boxes of the packed tile are stored. At first no tile is packed, so no box is left.
  int stored = kBoxes;

  // Rounds the accumulators of a complete tile to T, in pairs.
  template <int kSums>
  __device__ void pack(const float (&sums)[kSums]) {
    stored = 0;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int pair = 0; pair < kPairsPerBox; ++pair) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int row_block = (box * kPairsPerBox + pair) * 2 + word % 2;
          const int column_half = word / 2;
          const float* const two_rows = sums + accumulator_index(row_block, column_half);
          words[box][pair][word] = ptx::pack<T>(two_rows[0], two_rows[1]);
        }
      }
    }
  }

  // Stores the next box of the tile at (row, column). Registers cannot be indexed at run time, so
  // there is one copy of `store` for each box.
  __device__ void store_next(const CUtensorMap& map, int row, int column, Staging<T>& staging) {
    static_assert(kBoxes == 4, "each box has a line here");
    const int box = stored;
    ++stored;
    if (box == 0) return store<0>(map, row, column, staging);
    if (box == 1) return store<1>(map, row, column, staging);
    if (box == 2) return store<2>(map, row, column, staging);
    if (box == 3) return store<3>(map, row, column, staging);
  }

  // Stores a box of the tile, by stmatrix to shared memory and by TMA from there. `row` and
  // `column` are the first ones of the warpgroup. All lanes of a warp call it.
  template <int kBox>
  __device__ void store(const CUtensorMap& map, int row, int column, Staging<T>& staging) const {
    static_assert(kBox < kBoxes);
    constexpr int kLineBytes = Config::kGradientBoxRows * sizeof(T);
    static_assert(kLineBytes == 128, "lines have the length of TMA's widest swizzle");
    const int warp = threadIdx.x % 128 / 32;
    const int lane = threadIdx.x % 32;
    const uint32_t box =
        ptx::shared_address(staging.gradient_boxes[warp][kBox % Config::kGradientBoxes]);
    // stmatrix: lane l gives the address of line l % 8 of matrix l / 8. Matrix 2 h + b has the
    // lines of column half h, and row block b of the pair.
    const int line = lane / 16 * 8 + lane % 8;
    const int block_of_pair = lane / 8 % 2;
    // Waits until TMA has read the box that was in this buffer before.
    if (lane == 0) ptx::wait_stores_read<Config::kGradientBoxes - 1>();
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
      ptx::store_tensor(&map, row + kBox * Config::kGradientBoxRows,
                        column + warp * Config::kWarpColumns, box);
      ptx::commit_stores();
    }
  }
};

}  // namespace kernels::sm90::gemm_single
