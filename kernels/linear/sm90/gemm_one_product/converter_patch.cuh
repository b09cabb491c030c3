// Converts one patch of the float32 weight to scaled fp16: 32 rows x 4 k-tiles
// (converter_layouts.cuh). A converter warp of gemm_one_product_kernel calls convert_patch for each
// patch that it takes (converter.cuh).
//
//   source     [N, K] float32, row-major, or its transpose [K, N]
//   exponent   [N] int, of each row of the weight
//   hi         [k-tile][N][64] fp16
//
// All three are members of WeightConversion::weight. For each n and each k < K,
//
//   hi[k / 64][n][k % 64] = source[n][k] * 2^exponent[n], rounded to nearest
//
// and hi is 0 for k >= K. The previous kernel, split_x_kernel, has found the exponents from a
// sample of each row.
//
// Rows that need TF32. fp16 has 11 significant bits, as TF32 has, but only from 2^-14 on: a smaller
// element is subnormal and has lost bits. In each k-tile of a row, count_subnormals takes the share
// of subnormals among the nonzero elements. If the mean of the k-tiles' shares exceeds 1/32, a
// converter warp puts an infinity into the row, so that its tiles are computed again (kernel.cuh).
//
// The call tree:
//
//   convert_patch
//     convert_whole_patch      a patch inside the weight, piece by piece through shared memory
//       load_scales
//       convert_piece
//         round_octet
//       count_found_pieces     after the conversion, if pieces have subnormals
//         count_pieces
//           count_subnormals
//     convert_edge_patch       a patch at the edge of the weight, octet by octet
//       load_edge_octet
//       round_octet
//       count_subnormals
//     mark_row_for_tf32        puts an infinity into rows with too many subnormals

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/memory.cuh"
#include "common/vectors.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/converter_layouts.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90::gemm_one_product {

// 32 rows x 4 k-tiles of the weight.
struct Patch {
  int64_t row;    // the first one
  int k_tile;     // the first one
  int first_use;  // a cluster multiplies at least this many k-tiles before it needs the patch
};

// Notices whether elements of hi are subnormal. It holds two unsigned 16-bit numbers, one for
// elements with even and one for elements with odd index. They begin as 0x03ff. Each element lowers
// its number to its own magnitude bits - 1, if these are smaller. Only subnormals are:
//
//   element     magnitude bits    - 1               lowers the number
//   zero        0x0000            0xffff (wraps)    no
//   subnormal   0x0001 - 0x03ff   0x0000 - 0x03fe   yes
//   normal      0x0400 - ...      0x03ff - ...      no
struct SubnormalProbe {
  static constexpr uint32_t kNoneFound = 0x03ff03ff;
  uint32_t numbers = kNoneFound;

  // Looks at two elements, which are packed in one word.
  __device__ void add(uint32_t pair) {
    constexpr uint32_t kMagnitudeBits = 0x7fff7fff;
    constexpr uint32_t kMinusOne = 0xffffffff;  // in both numbers
    // Adds kMinusOne to the bits, and takes the minimum of the sum and `numbers`.
    numbers = __viaddmin_u16x2(pair & kMagnitudeBits, kMinusOne, numbers);
  }

  __device__ bool has_found() const { return numbers != kNoneFound; }
};

// Scales eight neighbours along K, rounds them to fp16, and shows them to the probe.
__device__ inline uint4 round_octet(const float (&v)[split::kOctet], float scale,
                                    SubnormalProbe* probe) {
  uint32_t hi[split::kOctet / 2];
#pragma unroll
  for (int j = 0; j < split::kOctet / 2; ++j) {
    const __half2 pair = __floats2half2_rn(v[2 * j] * scale, v[2 * j + 1] * scale);
    hi[j] = *reinterpret_cast<const uint32_t*>(&pair);
    probe->add(hi[j]);
  }
  return make_uint4(hi[0], hi[1], hi[2], hi[3]);
}

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

// Counts the subnormals of a row in one k-tile, and adds the scaled count to subnormals[row]. Eight
// lanes have a row, with an octet each.
//
// The limit is one subnormal for 32 nonzero elements (has_many_subnormals). Nobody counts the
// nonzero elements of the whole row: its subnormals are compared with K / 32. So the count of a
// k-tile with zeros is scaled by 64 / nonzeros, and rounded down.
//
// Example: of 64 elements, 32 are zeros, 28 normal and 4 subnormal. It adds 4 * 64 / 32 = 8.
__device__ inline void count_subnormals(const WeightConversion& conversion, int64_t row,
                                        const uint4& octet) {
  const ElementCounts own = count_elements(octet);
  // Both counts in one pair, nonzeros in .x and normals in .y: those of the lane's elements with
  // even and with odd index, then of the lane, then of all eight lanes.
  const __half2 even = __lows2half2(own.nonzeros, own.normals);
  const __half2 odd = __highs2half2(own.nonzeros, own.normals);
  __half2 counts = __hadd2(even, odd);
  for (int bit = 1; bit < 8; bit *= 2) {
    counts = __hadd2(counts, __shfl_xor_sync(0xffffffff, counts, bit));
  }
  const unsigned nonzeros = __half2int_rz(__low2half(counts));
  const unsigned normals = __half2int_rz(__high2half(counts));
  const unsigned subnormals = nonzeros - normals;
  const bool is_first_lane = threadIdx.x % 8 == 0;
  if (is_first_lane && subnormals != 0) {
    const unsigned scaled = subnormals * ConverterConfig::kKTileDepth / nonzeros;
    atomicAdd(conversion.row_subnormals + row, scaled);
  }
}

// Counts the subnormals of some pieces of a patch, which it reads back from hi. `pieces` has a bit
// for each. They are pieces of 8 rows x 64 of K, also if the weight is transposed.
//
// Eight lanes have a row, so a warp reads four rows at a time:
//
//   lanes            0 - 7   8 - 15   16 - 23   24 - 31
//   rows of a piece  0, 4    1, 5     2, 6      3, 7
//
// Counting is a second pass over the patch, as counting in every piece would slow the conversion
// down.
__device__ __forceinline__ void count_pieces(const WeightConversion& conversion, const Patch& patch,
                                             uint32_t pieces) {
  constexpr int kRowsAtATime = 4;
  const int lane = threadIdx.x % 32;
  const split::ScaledMatrix& weight = conversion.weight;
  const int64_t k_tile_elements = weight.rows * split::kKTileRowNumbers;
  const __half* const hi_k_tile = weight.hi + patch.k_tile * k_tile_elements;  // the patch's first
#pragma unroll 1
  for (; pieces != 0; pieces &= pieces - 1) {  // clears the lowest bit
    const int piece = __ffs(pieces) - 1;
    const int k_tile = piece / ConverterConfig::kPiecesPerKTile;
    const int piece_row = piece % ConverterConfig::kPiecesPerKTile *
                          ConverterConfig::kRowMajorPieceRows;  // a row of the patch
    const int64_t row = patch.row + piece_row + lane / 8;
    const int k = lane % 8 * split::kOctet;  // in the k-tile
    const __half* const source =
        hi_k_tile + k_tile * k_tile_elements + row * split::kKTileRowNumbers + k;
    uint4 octets[ConverterConfig::kOctetsPerPiece];
#pragma unroll
    for (int i = 0; i < ConverterConfig::kOctetsPerPiece; ++i) {
      const int row_offset = kRowsAtATime * i * split::kKTileRowNumbers;
      octets[i] = *reinterpret_cast<const uint4*>(source + row_offset);
    }
#pragma unroll
    for (int i = 0; i < ConverterConfig::kOctetsPerPiece; ++i) {
      count_subnormals(conversion, row + kRowsAtATime * i, octets[i]);
    }
  }
}

// Counts the subnormals of the pieces in which one of the lanes has found some. `found_pieces` are
// the pieces that this lane has found, as in count_pieces. Returns whether it has counted any. All
// lanes of a warp call it.
template <typename Layout>
__device__ __forceinline__ bool count_found_pieces(const WeightConversion& conversion,
                                                   const Patch& patch, uint32_t found_pieces) {
  const uint32_t pieces = __reduce_or_sync(0xffffffff, found_pieces);
  const bool has_found = pieces != 0;
  // Other lanes may have written what count_pieces reads.
  if (!Layout::kCountsOwnOctets && has_found) __syncwarp();
  count_pieces(conversion, patch, pieces);
  return has_found;
}

// Waits until the oldest piece in flight has arrived in shared memory, for all lanes. After that
// the buffer of the piece before it is free, as all lanes have read it.
__device__ __forceinline__ void wait_for_piece(int barrier) {
  ptx::wait_copies<ConverterConfig::kBuffers - 2>();
  ptx::barrier_sync(barrier, 32);
}

// Converts the lane's octets of a piece, and stores them to hi. Returns whether an element is
// subnormal.
//
//   buffer            the piece in shared memory
//   piece_in_k_tile   0 to 3
//   scale[i]          the factor of row Layout::row(lane, i)
//   target            where the lane's first octet of the k-tile goes (octet 0 of piece 0)
//
// The distance from `target` to the lane's other octets is the same in all lanes, so it is computed
// for lane 0, whose first octet is at row 0 and k 0.
template <typename Layout>
__device__ __forceinline__ bool convert_piece(const PieceBuffer& buffer, int lane,
                                              int piece_in_k_tile,
                                              const float (&scale)[Layout::kRows], __half* target) {
  SubnormalProbe probe;
#pragma unroll
  for (int octet = 0; octet < ConverterConfig::kOctetsPerPiece; ++octet) {
    alignas(16) float v[split::kOctet];
    Layout::read(buffer, lane, octet, v);
    const int i = Layout::row_index(piece_in_k_tile, octet);
    const int distance =
        Layout::row(0, i) * split::kKTileRowNumbers + Layout::first_k(0, piece_in_k_tile);
    *reinterpret_cast<uint4*>(target + distance) = round_octet(v, scale[i], &probe);
  }
  return probe.has_found();
}

// Loads the factors of the lane's rows of a patch: scale[i] is for row Layout::row(lane, i).
template <typename Layout>
__device__ __forceinline__ void load_scales(const split::ScaledMatrix& weight, int64_t first_row,
                                            int lane, float (&scale)[Layout::kRows]) {
#pragma unroll
  for (int i = 0; i < Layout::kRows; ++i) {
    const int64_t row = first_row + Layout::row(lane, i);
    scale[i] = split::power_of_two(__ldg(weight.exponent + row));
  }
}

// Converts a patch that is inside the weight. Returns whether it has counted subnormals. Layout is
// RowMajor or Transposed. All lanes of a warp call it, and meet at `barrier`.
//
// The warp has a ring of four buffers in shared memory. It converts the piece in one of them while
// the next three pieces are loaded.
template <typename Layout>
__device__ __forceinline__ bool convert_whole_patch(const WeightConversion& conversion,
                                                    const Patch& patch, PieceRing& ring,
                                                    int barrier) {
  constexpr int kInFlight = ConverterConfig::kBuffers - 1;
  const split::ScaledMatrix& weight = conversion.weight;
  const int lane = threadIdx.x % 32;
  const int64_t k_tile_elements = weight.rows * split::kKTileRowNumbers;
  const int64_t k = int64_t{patch.k_tile} * ConverterConfig::kKTileDepth;
  // Where the lane's first octet of a k-tile goes.
  __half* target = weight.hi + patch.k_tile * k_tile_elements +
                   (patch.row + Layout::row(lane, 0)) * split::kKTileRowNumbers +
                   Layout::first_k(lane, 0);
  const LaneSource source = Layout::source_of(weight, patch.row, k, lane);
  const auto load = [&](int piece) {
    Layout::load(ring[piece % ConverterConfig::kBuffers], source, piece, lane);
  };

  float scale[Layout::kRows];
  load_scales<Layout>(weight, patch.row, lane, scale);

  // Load the first three pieces. Then wait for each piece, load the one three later, and convert.
#pragma unroll
  for (int piece = 0; piece < kInFlight; ++piece) {
    load(piece);
    ptx::commit_copies();
  }
  uint32_t found_pieces = 0;  // pieces in which this lane has found subnormals: see count_pieces
#pragma unroll 1
  for (int first_piece = 0; first_piece < ConverterConfig::kPiecesPerPatch;
       first_piece += ConverterConfig::kPiecesPerKTile) {
#pragma unroll
    for (int piece_in_k_tile = 0; piece_in_k_tile < ConverterConfig::kPiecesPerKTile;
         ++piece_in_k_tile) {
      const int piece = first_piece + piece_in_k_tile;
      wait_for_piece(barrier);
      const int later_piece = piece + kInFlight;
      if (later_piece < ConverterConfig::kPiecesPerPatch) load(later_piece);
      ptx::commit_copies();
      const bool has_subnormal = convert_piece<Layout>(ring[piece % ConverterConfig::kBuffers],
                                                       lane, piece_in_k_tile, scale, target);
      if (has_subnormal) {
        found_pieces |= Layout::pieces_to_count(first_piece, piece_in_k_tile);
      }
    }
    target += k_tile_elements;
  }
  return count_found_pieces<Layout>(conversion, patch, found_pieces);
}

// Loads the octet of a row that begins at first_k. Elements past K, which is `k`, are 0.
template <typename Layout>
__device__ __forceinline__ void load_edge_octet(const split::ScaledMatrix& weight, int64_t row,
                                                int64_t first_k, int64_t k,
                                                float (&v)[split::kOctet]) {
  if constexpr (Layout::kIsTransposed) {
    for (int j = 0; j < split::kOctet; ++j) {
      const bool exists = first_k + j < k;
      v[j] = exists ? weight.source[(first_k + j) * weight.row_stride + row] : 0;
    }
  } else {
    load_floats(v, weight.source + row * weight.row_stride, first_k, k, /*is_aligned=*/true);
  }
}

// Converts a patch at the edge of the weight, where some rows or some of K do not exist. Uses no
// shared memory. Eight lanes share a row, with an octet each, so the warp converts four rows of one
// k-tile at a time. lane_row is the lane's first row. Returns whether it has counted subnormals.
// All lanes of a warp call it.
template <typename Layout>
__device__ bool convert_edge_patch(const WeightConversion& conversion, int64_t k, int64_t lane_row,
                                   int k_tile) {
  constexpr int kRowsAtATime = 4;
  constexpr int kRowsPerLane = ConverterConfig::kPatchRows / kRowsAtATime;
  const split::ScaledMatrix& weight = conversion.weight;
  bool any_counted = false;
#pragma unroll 1
  for (int i = 0; i < ConverterConfig::kPatchKTiles * kRowsPerLane; ++i) {
    const int row_number = i % kRowsPerLane;  // the row's number among those of the lane
    const int k_tile_number = i / kRowsPerLane;
    const int64_t own_row = lane_row + row_number * kRowsAtATime;
    const int own_k_tile = k_tile + k_tile_number;
    const int64_t own_k =
        int64_t{own_k_tile} * ConverterConfig::kKTileDepth + threadIdx.x % 8 * split::kOctet;
    SubnormalProbe probe;
    uint4 octet = {};
    const bool exists = own_row < weight.rows && own_k < split::padded(k);
    if (exists) {
      float v[split::kOctet];
      load_edge_octet<Layout>(weight, own_row, own_k, k, v);
      const float scale = split::power_of_two(__ldg(weight.exponent + own_row));
      octet = round_octet(v, scale, &probe);
      __half* const row_of_k_tile = weight.hi + weight.k_tiled_index(own_k_tile, own_row);
      *reinterpret_cast<uint4*>(row_of_k_tile + own_k % ConverterConfig::kKTileDepth) = octet;
    }
    if (__any_sync(0xffffffff, probe.has_found())) {
      count_subnormals(conversion, own_row, octet);
      any_counted = true;
    }
  }
  return any_counted;
}

// Puts an infinity into the patch's part of a row if too many subnormals have been counted in the
// row so far. No row is missed, because the patch that is the last to add its count sees the whole
// count. Each lane calls it for a row of its own. The load is an acquire, as an ordinary load might
// find an old count in L1.
__device__ __forceinline__ void mark_row_for_tf32(const WeightConversion& conversion, int64_t k,
                                                  int64_t row, int k_tile) {
  const split::ScaledMatrix& weight = conversion.weight;
  if (row >= weight.rows) return;
  const unsigned subnormals = ptx::load_acquire(conversion.row_subnormals + row);
  if (split::has_many_subnormals(subnormals, /*elements=*/k)) {
    weight.hi[weight.k_tiled_index(k_tile, row)] = __float2half(INFINITY);
  }
}

// Converts a patch, and marks its rows that have too many subnormals. `k` is K. All lanes of a warp
// call it, and meet at `barrier`.
template <typename Layout>
__device__ __forceinline__ void convert_patch(const WeightConversion& conversion, int64_t k,
                                              const Patch& patch, PieceRing& ring, int barrier) {
  const int lane = threadIdx.x % 32;
  const bool is_whole =
      patch.row + ConverterConfig::kPatchRows <= conversion.weight.rows &&
      int64_t{patch.k_tile + ConverterConfig::kPatchKTiles} * ConverterConfig::kKTileDepth <= k;
  bool any_counted;
  if (is_whole) {
    any_counted = convert_whole_patch<Layout>(conversion, patch, ring, barrier);
  } else {
    any_counted = convert_edge_patch<Layout>(conversion, k, patch.row + lane / 8, patch.k_tile);
  }
  if (any_counted) {
    __syncwarp();  // all lanes have added their counts of subnormals
    mark_row_for_tf32(conversion, k, patch.row + lane, patch.k_tile);
  }
}

}  // namespace kernels::sm90::gemm_one_product
