// Counts the subnormals of the fp16 weight, and marks the rows that have too many (why:
// split/subnormals.cuh). The converter warps do so for each patch (converter_patch.cuh).
//
// The rule: a row needs TF32 if, on average over its k-tiles, more than 1 in 32 nonzeros is
// subnormal. In integers: each k-tile adds subnormals * 64 / nonzeros, rounded down, to the row's
// count, and the row needs TF32 if count * 32 > K. Example: K = 128, so the row has two k-tiles.
//
//   k-tile   zeros   normals   subnormals   adds to the count
//   0           32        28            4   4 * 64 / 32 = 8
//   1            0        64            0   0
//
//   The count is 8. The row needs TF32, because 8 * 32 = 256 is more than 128.
//
// An element that fp16 rounds to zero counts as a zero. The average is taken over k-tiles because a
// warp knows the nonzeros of a k-tile, but not those of the row. (If K is no multiple of 64, the
// rule is slightly stricter: the last k-tile, which zeros fill up, counts as 64 elements.)
//
// The steps of a warp:
//
//   SubnormalProbe       notices, while elements are rounded, whether a piece has subnormals
//   count_found_pieces   counts those of such pieces in a second pass, because counting everywhere
//                        would slow the conversion down. (convert_edge_patch has no second pass.)
//   mark_row_for_tf32    puts an infinity into a row whose count is too large, so that the row's
//                        tiles are computed again (kernel.cuh)
//
// The second pass needs whole rows of a k-tile. So for both layouts it counts in the pieces of a
// row-major weight (see the picture in converter.cuh), in all of those that share elements with a
// piece that has subnormals:
//
//   piece that has subnormals                                     pieces to count
//   p9 of a row-major weight     8 rows x 64 of K in k-tile 2     p9
//   p9 of a transposed weight    32 rows x 16 of K in k-tile 2    p8, p9, p10 and p11

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/bits.cuh"
#include "common/ptx/memory.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/converter_layouts.cuh"
#include "linear/split/split.cuh"
#include "linear/split/subnormals.cuh"

namespace kernels::sm90::gemm_one_product {

// Notices whether elements of hi are subnormal. A probe has two unsigned 16-bit numbers, one for
// elements with even and one for those with odd index, which begin as 0x03ff. An element lowers the
// number of its parity to (its magnitude bits - 1) if that is smaller: only a subnormal does so.
//
//   element     magnitude bits    - 1               lowers the number
//   zero        0x0000            0xffff (wraps)    no
//   subnormal   0x0001 - 0x03ff   0x0000 - 0x03fe   yes, if it is smaller
//   normal      0x0400 - ...      0x03ff - ...      no
struct SubnormalProbe {
  static constexpr uint32_t kNoneFound = 0x03ff03ff;
  uint32_t numbers = kNoneFound;

  // Looks at two elements, which are packed in one word.
  __device__ void add(uint32_t pair) {
    constexpr uint32_t kMagnitudeBits = 0x7fff7fff;
    constexpr uint32_t kMinusOne = 0xffffffff;  // in both numbers
    numbers = __viaddmin_u16x2(pair & kMagnitudeBits, kMinusOne, numbers);
  }

  __device__ bool has_found() const { return numbers != kNoneFound; }
};

// How many of a lane's elements are not zero, and how many of these are normal. Both counts are
// fp16 numbers, which are exact up to 2048.
struct ElementCounts {
  __half2 nonzeros;  // elements with even index in .x, with odd index in .y
  __half2 normals;
};

// Counts the elements of an octet of hi. A comparison of pairs gives a 1 or 0 for each element.
__device__ inline ElementCounts count_elements(const uint4& octet) {
  const uint32_t pairs[] = {octet.x, octet.y, octet.z, octet.w};
  const __half2 zeros = __float2half2_rn(0);
  const __half2 least_normals = __float2half2_rn(split::kLeastNormalHi);
  ElementCounts counts{zeros, zeros};
#pragma unroll
  for (const uint32_t bits : pairs) {
    const __half2 pair = *reinterpret_cast<const __half2*>(&bits);
    counts.nonzeros = __hadd2(counts.nonzeros, __hne2(pair, zeros));
    counts.normals = __hadd2(counts.normals, __hge2(__habs2(pair), least_normals));
  }
  return counts;
}

// Returns what a k-tile adds to its row's count.
__host__ __device__ constexpr unsigned scaled_subnormals(unsigned subnormals, unsigned nonzeros) {
  return subnormals * ConverterConfig::kKTileDepth / nonzeros;
}
static_assert(scaled_subnormals(/*subnormals=*/4, /*nonzeros=*/32) == 8,
              "the example at the top of this file");

// Counts the subnormals of row n in one k-tile, and adds the scaled count to row_subnormals[n].
// Eight lanes have a row, with an octet each.
__device__ inline void count_subnormals(const WeightConversion& conversion, int64_t n,
                                        const uint4& octet) {
  const ElementCounts own = count_elements(octet);
  // The nonzeros (.x) and normals (.y) of the lane's elements with even and with odd index.
  const __half2 even = __lows2half2(own.nonzeros, own.normals);
  const __half2 odd = __highs2half2(own.nonzeros, own.normals);
  __half2 counts = __hadd2(even, odd);  // of the lane; after the loop, of all eight lanes
  for (int bit = 1; bit < 8; bit *= 2) {
    counts = __hadd2(counts, __shfl_xor_sync(0xffffffff, counts, bit));
  }
  const unsigned nonzeros = __half2int_rz(__low2half(counts));
  const unsigned normals = __half2int_rz(__high2half(counts));
  const unsigned subnormals = nonzeros - normals;
  const bool is_first_lane = threadIdx.x % 8 == 0;
  if (is_first_lane && subnormals != 0) {
    atomicAdd(conversion.row_subnormals + n, scaled_subnormals(subnormals, nonzeros));
  }
}

// Counts the subnormals of these row-major pieces of a patch, which it reads back from hi. Bit 9 of
// `pieces` is for p9. A warp reads four rows at a time:
//
//   lanes             0 - 7   8 - 15   16 - 23   24 - 31
//   rows of a piece   0, 4    1, 5     2, 6      3, 7
__device__ __forceinline__ void count_pieces(const WeightConversion& conversion, const Patch& patch,
                                             uint32_t pieces) {
  constexpr int kRowsAtATime = 4;
  const int lane = threadIdx.x % 32;
  const split::ScaledMatrix& weight = conversion.weight;
  const int64_t k_tile_elements = weight.rows * split::kKTileRowNumbers;
  // hi of the patch's first k-tile.
  const __half* const hi_k_tile = weight.hi + patch.first_k_tile * k_tile_elements;
#pragma unroll 1
  for (; pieces != 0; pieces = without_lowest_bit(pieces)) {
    const int number = lowest_bit(pieces);
    const int k_tile = number / ConverterConfig::kPiecesPerKTile;
    const int piece_row = number % ConverterConfig::kPiecesPerKTile *
                          ConverterConfig::kRowMajorPieceRows;  // a row of the patch
    const int64_t n = patch.first_n + piece_row + lane / 8;
    const int k_in_tile = lane % 8 * split::kOctet;
    const __half* const source =
        hi_k_tile + k_tile * k_tile_elements + n * split::kKTileRowNumbers + k_in_tile;
    uint4 octets[ConverterConfig::kOctetsPerLane];
#pragma unroll
    for (int i = 0; i < ConverterConfig::kOctetsPerLane; ++i) {
      const int row_offset = kRowsAtATime * i * split::kKTileRowNumbers;
      octets[i] = *reinterpret_cast<const uint4*>(source + row_offset);
    }
#pragma unroll
    for (int i = 0; i < ConverterConfig::kOctetsPerLane; ++i) {
      count_subnormals(conversion, n + kRowsAtATime * i, octets[i]);
    }
  }
}

// Counts the subnormals of the pieces that any lane has in its `found_pieces`. Returns whether it
// has counted any. All lanes of a warp call it.
template <typename Layout>
__device__ __forceinline__ bool count_found_pieces(const WeightConversion& conversion,
                                                   const Patch& patch, uint32_t found_pieces) {
  const uint32_t pieces = __reduce_or_sync(0xffffffff, found_pieces);
  const bool has_found = pieces != 0;
  // With a transposed weight, a lane reads octets in count_pieces that other lanes have written.
  if (Layout::kIsTransposed && has_found) __syncwarp();
  count_pieces(conversion, patch, pieces);
  return has_found;
}

// Puts an infinity into row n, in `k_tile`, which is any k-tile of the patch, if too many
// subnormals have been counted in the row so far. No row is missed, because the patch that is the
// last to add its count sees the whole count. Each lane calls it for a row of its own. The load is
// an acquire, as an ordinary load might find an old count in L1.
__device__ __forceinline__ void mark_row_for_tf32(const WeightConversion& conversion, int64_t k,
                                                  int64_t n, int k_tile) {
  const split::ScaledMatrix& weight = conversion.weight;
  if (n >= weight.rows) return;
  const unsigned count = ptx::load_acquire(conversion.row_subnormals + n);
  if (split::exceeds_subnormal_limit(count, /*elements=*/k)) {
    weight.hi[weight.k_tiled_index(k_tile, n)] = __float2half(INFINITY);
  }
}

}  // namespace kernels::sm90::gemm_one_product
