// The epilogue of the fp16x3 GEMM (kernel.cuh): what happens to its sums after the mainloop. If
// clusters share the tile, partial sums are stored or added. The cluster that finishes the tile
// then computes the epilogue (linear/epilogue.cuh) with
//
//   z = sum * 2^-(exponent of the row of x + exponent of the row of weight) + bias
//
// m_in_tile is counted from the tile's first row of out, and n_in_block from the first of the
// block's 128 columns.
//
// Lane 4 * g + c of a warp has two columns, in two rows of each row block of 8 (fragment.cuh). The
// columns are neighbours (weight_row_order.cuh): g = 0 has columns 0 and 1 of the warp's 16, g = 1
// columns 4 and 5, g = 2 columns 2 and 3. The fast epilogue stores these two columns at a time
// straight from registers. The general one first collects four neighbouring columns of a row.

#pragma once

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/math.cuh"
#include "common/ptx/memory.cuh"
#include "linear/epilogue.cuh"
#include "linear/sm90/copy_subtile.cuh"
#include "linear/sm90/fragment.cuh"
#include "linear/sm90/gemm_fp16x3/arguments.cuh"
#include "linear/sm90/gemm_fp16x3/config.cuh"
#include "linear/sm90/gemm_fp16x3/tiles.cuh"
#include "linear/sm90/gemm_fp16x3/weight_row_order.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90::gemm_fp16x3 {

// ----- partial sums of shared tiles

// Stores the sums of a work tile, for the cluster that finishes the tile. Consumer warps call it.
__device__ inline void store_partial_sums(const Fp16x3Arguments& args, int rows,
                                          const float (&sums)[Fp16x3Config::kSums]) {
  const int cluster = blockIdx.x / BlockConfig::kClusterSize;
  const int rank = ptx::cluster_ctarank();
#pragma unroll
  for (int j = 0; j < Fp16x3Config::kRowBlocks; ++j) {
    if (FragmentConfig::kRowBlockRows * j == rows) break;
    args.partials.sums[cluster][rank][j][threadIdx.x] = row_block_of(sums, j);
  }
  // Lane 0's release then covers the stores of all lanes. The flag becomes 1: the host clears all
  // flags before each chunk, and the second launch has flags of its own.
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    ptx::add_release(&args.partials.are_stored[cluster][rank][threadIdx.x / 32], 1);
  }
}

// Adds the partial sums of a tile that other clusters, with the numbers just below this cluster's,
// have stored. The consumer warps of the cluster that finishes the tile call it. A warp spins until
// the warp of the same number in each of them has stored its sums; stream_k.cuh says why this ends.
__device__ inline void add_partial_sums(const Fp16x3Arguments& args, int tile, int rows,
                                        float (&sums)[Fp16x3Config::kSums]) {
  const int rank = ptx::cluster_ctarank();
  const int own_cluster = blockIdx.x / BlockConfig::kClusterSize;
#pragma unroll 1
  for (int cluster = own_cluster; args.schedule.shares_with_previous(cluster, tile); --cluster) {
    const int previous_cluster = cluster - 1;
    const unsigned* const is_stored =
        &args.partials.are_stored[previous_cluster][rank][threadIdx.x / 32];
    // The vote shows the compiler that all lanes leave this loop together. Otherwise it would make
    // the lanes of the warp converge again before each wgmma, which takes longer.
    while (!__all_sync(0xffffffff, ptx::load_acquire(is_stored) != 0)) {
    }
#pragma unroll
    for (int j = 0; j < Fp16x3Config::kRowBlocks; ++j) {
      if (FragmentConfig::kRowBlockRows * j == rows) break;
      const float4 partial = __ldcg(&args.partials.sums[previous_cluster][rank][j][threadIdx.x]);
      float* const sum = sums + fragment_index(j, 0, 0);
      sum[0] += partial.x;
      sum[1] += partial.y;
      sum[2] += partial.z;
      sum[3] += partial.w;
    }
  }
}

// ----- the loader warp: what the epilogue reads besides the sums

// The loader warp and the consumer warpgroups meet once in each work tile, between mainloop and
// epilogue. Then the consumers may read the inputs of this work tile, and the loader may overwrite
// those of the previous one.
//
// Each warpgroup has a named barrier of its own with the loader, so that the first one need not
// wait for the second. compute-sanitizer's racecheck (2025.3) does not follow a warp that meets two
// barriers in turn, so for racecheck there is one barrier for all.
#ifdef KERNELS_RACECHECK
__device__ inline void sync_with_loader(int) {
  ptx::barrier_sync(Fp16x3Config::kFirstEpilogueBarrier, BlockConfig::kConsumerThreads + 32);
}

__device__ inline void sync_with_consumers() {
  ptx::barrier_sync(Fp16x3Config::kFirstEpilogueBarrier, BlockConfig::kConsumerThreads + 32);
}
#else
__device__ inline void sync_with_loader(int warpgroup) {
  ptx::barrier_sync(Fp16x3Config::kFirstEpilogueBarrier + warpgroup,
                    BlockConfig::kWarpgroupThreads + 32);
}

__device__ inline void sync_with_consumers() {
  for (int w = 0; w < BlockConfig::kConsumerWarpgroups; ++w) {
    ptx::barrier_sync(Fp16x3Config::kFirstEpilogueBarrier + w, BlockConfig::kWarpgroupThreads + 32);
  }
}
#endif

// The loader warp: loads the inputs of one work tile after the other, into two buffers in turn. It
// also reports whether a row of x holds infinity or NaN.
__device__ inline void load_epilogue_inputs(const Fp16x3Arguments& args,
                                            EpilogueInputs (&buffers)[2]) {
  const int lane = threadIdx.x % 32;
  int work_tiles = 0;  // loaded so far; odd and even ones use different buffers
  for_each_work_tile(args, [&](const WorkTile&, const TilePosition& tile) {
    EpilogueInputs& inputs = buffers[work_tiles % 2];
    const TilePartition::RowRange rows = args.tiles.rows_of(tile);
    const int end_m = min(rows.begin + rows.size, args.epilogue.m);
    const int first_n = first_n_of_block(tile, ptx::cluster_ctarank());
    bool lane_allows_fast_epilogue = args.epilogue.allows_fast_epilogue;
    bool has_nonfinite = false;
    for (int i = lane; i < Fp16x3Config::kLargestRows; i += 32) {
      const int m = rows.begin + i;
      const int exponent = m < end_m ? __ldg(args.x.exponent + m) : 0;
      has_nonfinite |= m < end_m && __ldg(args.x.row_state + m) == split::kNonfinite;
      lane_allows_fast_epilogue &= abs(exponent) <= FastEpilogueConfig::kMaxExponent;
      inputs.x_exponent[i] = exponent;
    }
    for (int i = lane; i < Fp16x3Config::kBlockWeightRows; i += 32) {
      const int n = first_n + i;
      // Not __ldg, whose data must not change during the kernel: in the second launch, this block
      // has written some of these exponents itself (rescale_overflowed_rows).
      const int exponent = n < args.epilogue.n ? __ldcg(args.weight.exponent + n) : 0;
      lane_allows_fast_epilogue &= abs(exponent) <= FastEpilogueConfig::kMaxExponent;
      const bool has_bias = n < args.epilogue.n && args.epilogue.bias != nullptr;
      const float bias = has_bias ? __ldg(args.epilogue.bias + n) : 0.0f;
      inputs.columns[i] = {exponent, bias};
    }
    const bool tile_allows_fast_epilogue = __all_sync(0xffffffff, lane_allows_fast_epilogue);
    if (has_nonfinite) *args.has_nonfinite = 1;
    if (lane == 0) {
      inputs.first_m = rows.begin;
      inputs.end_m = end_m;
      inputs.first_n = first_n;
      inputs.allows_fast_epilogue = tile_allows_fast_epilogue;
    }
    sync_with_consumers();
    ++work_tiles;
  });
}

// ----- the epilogues

// Lanes 4 * g + c with the same c have the same rows. Two of them whose numbers differ only in
// kLaneBitOfTwoColumns have columns that are two apart, and in kLaneBitOfFourColumns four.
constexpr int kLaneBitOfTwoColumns = 8;   // bit 1 of g
constexpr int kLaneBitOfFourColumns = 4;  // bit 0 of g
static_assert(weight_row_at_operand_row(2) == weight_row_at_operand_row(0) + 2 &&
                  weight_row_at_operand_row(1) == weight_row_at_operand_row(0) + 4,
              "g = 2 has the columns two further than g = 0, and g = 1 those four further");

// Marks row n of the weight for the second launch: a sum of column n is not finite. The cause is
// not x, whose rows with infinity or NaN are split as zeros (RowState).
__device__ inline void mark_overflow(const Fp16x3Arguments& args, int n) {
  if (args.is_second_launch || n >= args.epilogue.n) return;
  args.weight.row_state[n] = split::kOverflowed;
  *args.has_overflowed = 1;
}

// The fast epilogue takes a pair of row blocks at a time. A thread has four rows of the pair:
//
//   i                        0       1           2           3
//   row of the pair          2 * c   2 * c + 1   2 * c + 8   2 * c + 9
//   row block of the pair    0       0           1           1
constexpr int kThreadRows = 4;  // of a pair
static_assert(Fp16x3Config::kSubtileRows % FragmentConfig::kPairRows == 0,
              "tiles, which are whole subtiles, are whole pairs");

__device__ __forceinline__ int first_row_of_thread() {
  return 2 * FragmentLane(threadIdx.x % 32).c;
}

__device__ constexpr int rows_from_first(int i) {
  return FragmentConfig::kRowBlockRows * (i / 2) + i % 2;
}

// Returns the index of the sum in the thread's row i of a pair, and in its first (0) or second (1)
// column. Example: i = 2 of pair 1 is in row block 3, so its sums are sums[12] and sums[14].
__device__ constexpr int sum_index(int pair, int i, int column) {
  return fragment_index(2 * pair + i / 2, column, i % 2);
}

// Combines the bits of the mask of a pair of row blocks, j and j + 1. All lanes of a warp call it.
//
// Eight neighbouring columns of a row share a byte of the mask. They are in four lanes: the warp's
// columns 0 to 7 in lanes c, c + 4, c + 8 and c + 12, and columns 8 to 15 in these lanes + 16. The
// four lanes have four rows, which makes four bytes. A lane has its own bits of all four bytes in a
// word, those of its row i in byte i. Two exchanges combine the words of the four lanes, and each
// lane then stores one byte. A digit below is the bit of the column with this number:
//
//                        byte 0      byte 1        byte 2        byte 3
//   row of the tile      8j + 2c     8j + 2c + 1   8j + 2c + 8   8j + 2c + 9
//   lane c       has     ......10    ......10      ......10      ......10
//   lane c + 8   has     ....32..    ....32..      ....32..      ....32..
//   lane c + 4   has     ..54....    ..54....      ..54....      ..54....
//   lane c + 12  has     76......    76......      76......      76......
//   all have then        76543210    76543210      76543210      76543210
//   stored by lane       c           c + 4         c + 8         c + 12
__device__ __forceinline__ uint32_t combine_mask_bytes(uint32_t bits) {
  bits |= __shfl_xor_sync(0xffffffff, bits, kLaneBitOfFourColumns);
  bits |= __shfl_xor_sync(0xffffffff, bits, kLaneBitOfTwoColumns);
  return bits;
}

// Stores one of the mask's bytes of a pair of row blocks. `bits` are the lane's own. m is the first
// of the thread's rows in the pair, and n its first column.
__device__ __forceinline__ void store_mask_byte(const Epilogue<float>& epilogue, int end_m, int m,
                                                int n, uint32_t bits) {
  const uint32_t bytes = combine_mask_bytes(bits);
  const int row_of_four = threadIdx.x / 4 % 4;  // the one whose byte this lane stores
  const int first_bit_of_row = 8 * row_of_four;
  const int m_of_byte = m + rows_from_first(row_of_four);
  const int first_n_of_byte = n / 8 * 8;
  const bool byte_exists = m_of_byte < end_m && first_n_of_byte < epilogue.n;
  if (byte_exists) {
    *epilogue.mask_at(m_of_byte, n) = static_cast<uint8_t>(bytes >> first_bit_of_row);
  }
}

// The two neighbouring columns of out that a thread has in the fast epilogue.
struct TwoColumns {
  bool exist;
  int first_bit;  // the first column's bit in a byte of the mask
  float weight_unscale[2];
  float bias[2];
  float largest[2] = {};  // the largest magnitude of each column's sums so far, or NaN

  __device__ TwoColumns(const EpilogueInputs& inputs, int n_in_block, bool exist)
      : exist(exist), first_bit(n_in_block % 8) {
    const EpilogueInputs::Column columns[2] = {inputs.columns[n_in_block],
                                               inputs.columns[n_in_block + 1]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      weight_unscale[i] = split::power_of_two(-columns[i].exponent);
      bias[i] = columns[i].bias;
    }
  }

  // Makes the results of a row from its two sums. With kMask, also sets their bits of the mask in
  // byte row_of_four of *bits.
  template <bool kMask>
  __device__ __forceinline__ float2 make_results(const Epilogue<float>& epilogue,
                                                 const float (&sum)[2], float x_unscale,
                                                 int row_of_four, uint32_t* bits) {
    const int first_bit_of_row = 8 * row_of_four;
    float out[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = ptx::max_nan(largest[i], fabsf(sum[i]));
      // The general epilogue gets the same z: multiplication by a power of two is exact, unless
      // the product is subnormal or overflows.
      const float z = fmaf(sum[i], x_unscale * weight_unscale[i], bias[i]);
      if constexpr (kMask) {
        const bool passes = exist && mask_bit(z);
        *bits |= (passes ? 1u : 0u) << (first_bit_of_row + first_bit + i);
      }
      out[i] = epilogue.finish_fast(z);
    }
    return make_float2(out[0], out[1]);
  }

  // Marks each column that has a sum that is not finite. n is the first column.
  __device__ __forceinline__ void mark_overflows(const Fp16x3Arguments& args, int n) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool is_finite = largest[i] < INFINITY;  // false for NaN, too
      if (!is_finite) mark_overflow(args, n + i);
    }
  }
};

// Returns the rule of the fast epilogue: N is even, because store_pair stores two neighbouring
// columns at once.
inline FastEpilogueRule fast_epilogue_rule() { return {/*alignment=*/2}; }

// Stores the thread's results of a pair of row blocks. `out` points to the first column, in the
// thread's row 0 of the pair. Returns the thread's bits of the mask, a byte for each row
// (combine_mask_bytes); 0 without kMask.
template <bool kMask>
__device__ __forceinline__ uint32_t store_pair(const Epilogue<float>& epilogue,
                                               const EpilogueInputs& inputs,
                                               const float (&sums)[Fp16x3Config::kSums], int pair,
                                               TwoColumns& columns, float* out) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int m_in_tile =
        FragmentConfig::kPairRows * pair + first_row_of_thread() + rows_from_first(i);
    const float x_unscale = split::power_of_two(-inputs.x_exponent[m_in_tile]);
    const float sums_of_row[2] = {sums[sum_index(pair, i, 0)], sums[sum_index(pair, i, 1)]};
    const float2 results =
        columns.make_results<kMask>(epilogue, sums_of_row, x_unscale, /*row_of_four=*/i, &bits);
    const bool exists = columns.exist && inputs.first_m + m_in_tile < inputs.end_m;
    if (exists) {
      float* const out_of_row = out + rows_from_first(i) * static_cast<int64_t>(epilogue.n);
      *reinterpret_cast<float2*>(out_of_row) = results;
    }
  }
  return bits;
}

// The fast epilogue. The thread stores two columns, n_in_block and the next one, of all its rows.
template <bool kMask>
__device__ void run_fast_epilogue(const Fp16x3Arguments& args, const EpilogueInputs& inputs,
                                  int n_in_block, const float (&sums)[Fp16x3Config::kSums]) {
  const Epilogue<float>& epilogue = args.epilogue;
  const int n = inputs.first_n + n_in_block;
  // Both of them exist or neither, as N is even (fast_epilogue_rule).
  const bool columns_exist = n < epilogue.n;
  // With a mask, lanes without columns stay, for the exchange.
  if (!kMask && !columns_exist) return;
  TwoColumns columns(inputs, n_in_block, columns_exist);
  float* out = epilogue.out_at(inputs.first_m + first_row_of_thread(), n);
#pragma unroll
  for (int pair = 0; pair < Fp16x3Config::kLargestRows / FragmentConfig::kPairRows; ++pair) {
    const int first_m_of_pair = inputs.first_m + FragmentConfig::kPairRows * pair;
    if (first_m_of_pair >= inputs.end_m) break;
    const uint32_t bits = store_pair<kMask>(epilogue, inputs, sums, pair, columns, out);
    out += FragmentConfig::kPairRows * static_cast<int64_t>(epilogue.n);
    if constexpr (kMask) {
      store_mask_byte(epilogue, inputs.end_m, first_m_of_pair + first_row_of_thread(), n, bits);
    }
  }
  columns.mark_overflows(args, n);
}

// The sums of four neighbouring columns of a row: the thread's own two, and two from another lane
// (exchange_columns).
struct FourSums {
  float own[2];
  float received[2];
  bool own_are_last_two;

  __device__ __forceinline__ float operator[](int i) const {
    const bool is_own_column = own_are_last_two ? i >= 2 : i < 2;
    return is_own_column ? own[i % 2] : received[i % 2];
  }
};

// Exchanges sums of a row block between two lanes that differ in kLaneBitOfTwoColumns. Each has two
// of four neighbouring columns in the same two rows, and afterwards all four columns of one row.
// All lanes of a warp call it.
//
//                             before                                 after
//   lane, the bit is clear    columns 0, 1 of rows 2c and 2c + 1     columns 0 - 3 of row 2c
//   lane + 8                  columns 2, 3 of rows 2c and 2c + 1     columns 0 - 3 of row 2c + 1
//
// sums.x and .y are the thread's first column of rows 2c and 2c + 1, .z and .w its second column.
// gets_second_row is true in the lane with the bit.
__device__ __forceinline__ FourSums exchange_columns(float4 sums, bool gets_second_row) {
  const float first_row[2] = {sums.x, sums.z};   // both columns of row 2c
  const float second_row[2] = {sums.y, sums.w};  // both columns of row 2c + 1
  FourSums four;
  four.own_are_last_two = gets_second_row;  // the lane with the bit has columns 2 and 3
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    four.own[i] = gets_second_row ? second_row[i] : first_row[i];
    const float given = gets_second_row ? first_row[i] : second_row[i];
    four.received[i] = __shfl_xor_sync(0xffffffff, given, kLaneBitOfTwoColumns);
  }
  return four;
}

// The general epilogue. It stores four neighbouring columns of a row at once, from first_of_four
// on. The loop over subtiles is not unrolled, to keep the code small. Because registers cannot be
// indexed at run time, the thread copies the sums of a subtile to its own slots of `staging`. No
// other thread uses these slots, so there is no barrier.
__device__ __forceinline__ void run_general_epilogue(
    const Fp16x3Arguments& args, const EpilogueInputs& inputs, int first_of_four,
    float4 (&staging)[Fp16x3Config::kSubtileRowBlocks][BlockConfig::kWarpgroupThreads],
    const float (&sums)[Fp16x3Config::kSums]) {
  const int lane = threadIdx.x % 32;
  const bool gets_second_row = (lane & kLaneBitOfTwoColumns) != 0;
  const int row_in_row_block = 2 * FragmentLane(lane).c + (gets_second_row ? 1 : 0);
  float4* const slot = &staging[0][threadIdx.x % BlockConfig::kWarpgroupThreads];
#pragma unroll 1
  for (int subtile = 0; subtile < Fp16x3Config::kSubtiles; ++subtile) {
    const int first_m_in_tile = subtile * Fp16x3Config::kSubtileRows;
    if (inputs.first_m + first_m_in_tile >= inputs.end_m) break;
    copy_any_subtile</*kFirst=*/0, /*kEnd=*/Fp16x3Config::kSubtiles,
                     Fp16x3Config::kSubtileRowBlocks, BlockConfig::kWarpgroupThreads>(slot, sums,
                                                                                      subtile);
#pragma unroll
    for (int j = 0; j < Fp16x3Config::kSubtileRowBlocks; ++j) {
      const FourSums four_sums =
          exchange_columns(slot[j * BlockConfig::kWarpgroupThreads], gets_second_row);
      const int m_in_tile = first_m_in_tile + FragmentConfig::kRowBlockRows * j + row_in_row_block;
      float z[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const EpilogueInputs::Column column = inputs.columns[first_of_four + i];
        const float sum = four_sums[i];
        if (!isfinite(sum)) mark_overflow(args, inputs.first_n + first_of_four + i);
        const int exponent = inputs.x_exponent[m_in_tile] + column.exponent;
        z[i] = split::unscale(sum, exponent) + column.bias;
      }
      const int m = inputs.first_m + m_in_tile;
      store_four_results<kLaneBitOfFourColumns>(args.epilogue, m < inputs.end_m, m,
                                                inputs.first_n + first_of_four, z);
    }
  }
}

// The epilogue of a tile. n_in_block is the first of the thread's two columns.
__device__ inline void run_epilogue(
    const Fp16x3Arguments& args, const EpilogueInputs& inputs, int n_in_block,
    float4 (&staging)[Fp16x3Config::kSubtileRowBlocks][BlockConfig::kWarpgroupThreads],
    const float (&sums)[Fp16x3Config::kSums]) {
  if (!inputs.allows_fast_epilogue) {
    const int first_of_four = n_in_block / 4 * 4;
    run_general_epilogue(args, inputs, first_of_four, staging, sums);
  } else if (args.epilogue.mask == nullptr) {
    run_fast_epilogue<false>(args, inputs, n_in_block, sums);
  } else {
    run_fast_epilogue<true>(args, inputs, n_in_block, sums);
  }
}

}  // namespace kernels::sm90::gemm_fp16x3
