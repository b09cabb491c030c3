// How the converter warps of gemm_one_product_kernel (converter.cuh) divide the weight, and how a
// warp loads and reads its part. There is one struct for each layout of the weight in memory,
// RowMajor and Transposed. converter_patch.cuh is the same for both.
//
// A warp copies a piece of the weight, 512 floats, to a buffer in shared memory. The floats of a
// piece are numbered in the order in which the weight has them in memory. Copy i of lane l copies
// the four floats from 128 i + 4 l on, so a warp copies 128 successive floats at a time. A lane
// then converts two octets of the piece.

#pragma once

#include <cstdint>

#include "common/ptx/memory.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90::gemm_one_product {

// How the weight is divided:
//
//   panel   128 rows of the weight: what one block multiplies
//   patch   32 rows x 256 of K (4 k-tiles): what a warp converts at a time
//   piece   a sixteenth of a patch, 2 KiB of float32: what a warp loads to shared memory at a time
//
// The 16 pieces p0 - p15 of a patch, in the order in which a warp converts them. The pieces of
// a row-major weight have 8 rows x 64 of K:
//
//                 k-tile 0   k-tile 1   k-tile 2   k-tile 3
//   rows  0 -  7     p0         p4         p8        p12
//   rows  8 - 15     p1         p5         p9        p13
//   rows 16 - 23     p2         p6        p10        p14
//   rows 24 - 31     p3         p7        p11        p15
//
// The pieces of a transposed weight have 32 rows x 16 of K:
//
//                 k-tile 0      k-tile 1      k-tile 2        k-tile 3
//   rows  0 - 31  p0 p1 p2 p3   p4 p5 p6 p7   p8 p9 p10 p11   p12 p13 p14 p15
struct ConverterConfig {
  static constexpr int kWarps = 3;  // converter warps of a block
  static constexpr int kKTileDepth = split::k_tile_depth(split::Form::kWithoutLo);  // 64 of K
  static constexpr int kPatchKTiles = 4;
  static constexpr int kPatchRows = 32;
  static constexpr int kPatchesPerPanel = Config::kBlockWeightRows / kPatchRows;

  static constexpr int kPiecesPerKTile = 4;
  static constexpr int kPiecesPerPatch = kPatchKTiles * kPiecesPerKTile;
  // Pieces of 16 rows x 64 of K leave shared memory for only three stages of the mainloop, which
  // takes 1% more time (docs/EXPERIMENTS.md, "Hopper's products", at `high`).
  static constexpr int kRowMajorPieceRows = 8;      // x 64 of K
  static constexpr int kTransposedPieceDepth = 16;  // of K, x 32 rows
  static constexpr int kBuffers = 4;  // pieces of a warp in shared memory: 1 in use, 3 in flight
  // A lane copies 16 bytes at a time, so a warp copies a piece in 4 steps.
  static constexpr int kCopiesPerPiece = 4;
  // A lane's share of a piece, in octets: 8 neighbours along K.
  static constexpr int kOctetsPerPiece = 2;

  // The number of k-tiles that a conversion may run ahead of the producer of its block. Further
  // ahead, L2 might evict hi before TMA reads it: with 48 k-tiles the kernel takes 1% longer
  // (docs/EXPERIMENTS.md, "Hopper's products", at `high`).
  static constexpr int kLead = 24;

  // The value of round_octet's `least` if no element is subnormal. Both 16-bit numbers are 1 less
  // than 0x0400, the bits of fp16's least normal number.
  static constexpr uint32_t kNoSubnormal = 0x03ff03ff;

  static_assert(kPiecesPerKTile * kRowMajorPieceRows == kPatchRows,
                "four pieces of a row-major weight make a k-tile of a patch");
  static_assert(kPiecesPerKTile * kTransposedPieceDepth == kKTileDepth,
                "four pieces of a transposed weight make a k-tile of a patch");
  static_assert(kRowMajorPieceRows * kKTileDepth == kCopiesPerPiece * 32 * 4,
                "the copies of a warp make a piece of a row-major weight");
  static_assert(kPatchRows * kTransposedPieceDepth == kCopiesPerPiece * 32 * 4,
                "the copies of a warp make a piece of a transposed weight");
  static_assert(kOctetsPerPiece * split::kOctet * 32 == kCopiesPerPiece * 32 * 4,
                "a warp converts all elements of a piece");
  static_assert(kPiecesPerPatch <= 32, "a 32-bit word has a bit for each piece of a patch");
};

// The shared memory of a converter warp: a ring of buffers for one piece each. A buffer has a
// float4 for each copy of each lane.
using PieceBuffer = float4[ConverterConfig::kCopiesPerPiece][32];
using PieceRing = PieceBuffer[ConverterConfig::kBuffers];
using ConverterMemory = PieceRing[ConverterConfig::kWarps];

// A row-major weight. A buffer is [8 rows][64 of K]. The lanes that load and convert it:
//
//   load                                      convert
//
//   k       0 - 3  4 - 7  ...  60 - 63        k       0 - 7  8 - 15  ...  56 - 63
//   row 0       0      1  ...       15        row 0       0       1  ...        7    octet 0
//   row 1      16     17  ...       31        row 1       8       9  ...       15    octet 0
//   row 2       0      1  ...       15        row 2      16      17  ...       23    octet 0
//   row 3      16     17  ...       31        row 3      24      25  ...       31    octet 0
//   row 4       0      1  ...       15        row 4       0       1  ...        7    octet 1
//   ...                                       ...
struct RowMajor {
  using C = ConverterConfig;
  static constexpr bool kIsTransposed = false;

  // In the examples below, `piece` is a number in the k-tile, 0 to 3, and `octet` is 0 or 1. The
  // assertions after the struct check the examples.

  // The number of rows of the patch of which a lane converts octets: one for each of the lane's
  // octets in a k-tile, two in each of four pieces.
  static constexpr int kRows = C::kOctetsPerPiece * C::kPiecesPerKTile;
  // Row i of the lane's kRows rows, as a row of the patch. Lane 27 has rows 3, 7, 11 ... 31.
  __host__ __device__ static constexpr int row(int lane, int i) { return 4 * i + lane / 8; }
  // The i for which row(lane, i) is the row of this octet. Piece 3 begins with row 24 of the patch,
  // and its octet 1 of lane 27 is row 31, which is the lane's row 7.
  __host__ __device__ static constexpr int row_index(int piece, int octet) {
    return C::kOctetsPerPiece * piece + octet;
  }
  // The first k, in the k-tile, of the lane's octets in a piece. Lane 27 has k = 24 to 31.
  __host__ __device__ static constexpr int first_k(int lane, int /*piece*/) { return lane % 8 * 8; }

  // The float of a buffer that has this row and k of the piece. Row 7, k = 24 is float 472.
  __host__ __device__ static constexpr int buffer_float(int row, int k) {
    return row * C::kKTileDepth + k;
  }
  // The copy, 0 to 3, that loads this octet of the lane. A copy loads 16 octets. Octet 1 of lane 27
  // begins with float 472, so it is octet 59 of the buffer, and copy 3 loads octets 48 to 63.
  __host__ __device__ static constexpr int copy_of(int lane, int octet) {
    return 2 * octet + lane / 16;
  }
  // The octet's place among the 16 of that copy. Octet 59 is at place 11 of copy 3.
  __host__ __device__ static constexpr int place_in_copy(int lane) { return lane % 16; }

  // The lane's first four floats of the first piece of a patch that begins at (first_row, k).
  __device__ static const float* first_source(const split::ScaledMatrix& weight, int64_t first_row,
                                              int64_t k, int lane) {
    const int64_t row = first_row + lane / 16;
    return weight.source + row * weight.row_stride + k + lane % 16 * 4;
  }

  // Loads a piece of the patch. `source` is what first_source has returned.
  __device__ static void load(PieceBuffer& buffer, const float* source, int64_t row_stride,
                              int piece, int lane, uint64_t policy) {
    const int piece_k = piece / C::kPiecesPerKTile * C::kKTileDepth;
    const int piece_row = piece % C::kPiecesPerKTile * C::kRowMajorPieceRows;
    const float* address = source + (piece_k + piece_row * row_stride);
#pragma unroll
    for (int i = 0; i < C::kCopiesPerPiece; ++i) {
      ptx::copy_async_with_policy(&buffer[i][lane], address, policy);
      address += 2 * row_stride;  // the warp has copied two rows of 64
    }
  }

  // Reads one of the lane's octets of a piece.
  __device__ static void read(const PieceBuffer& buffer, int lane, int octet,
                              float (&v)[split::kOctet]) {
    const float4* const halves = &buffer[copy_of(lane, octet)][2 * place_in_copy(lane)];
    *reinterpret_cast<float4*>(v) = halves[0];
    *reinterpret_cast<float4*>(v + 4) = halves[1];
  }

  // Returns, as bits, the pieces that count_pieces has to read if this piece has subnormals. (It
  // reads pieces of 8 rows x 64 of K.) first_piece is the k-tile's piece 0, as a number in the
  // patch.
  __host__ __device__ static constexpr uint32_t pieces_to_count(int first_piece,
                                                                int piece_in_k_tile) {
    return 1u << (first_piece + piece_in_k_tile);
  }
  // True if a lane counts only octets that it has written itself. If not, the warp needs a
  // __syncwarp between writing and counting.
  static constexpr bool kCountsOwnOctets = true;
};
static_assert(RowMajor::row(27, 0) == 3 && RowMajor::row(27, 1) == 7 &&
                  RowMajor::first_k(27, 0) == 24,
              "octets 0 and 1 of lane 27 in piece 0 are rows 3 and 7, k = 24 to 31");
static_assert(RowMajor::row_index(3, 1) == 7 && RowMajor::row(27, 7) == 24 + 7,
              "octet 1 of lane 27 in piece 3 is row 31, the lane's row 7");
static_assert(RowMajor::buffer_float(7, 24) == 472, "a row of a buffer is 64 floats");
static_assert(RowMajor::copy_of(27, 1) == 3 && RowMajor::place_in_copy(27) == 11 &&
                  (3 * 16 + 11) * split::kOctet == 472,
              "octet 59 of a buffer begins with float 472");
static_assert(RowMajor::pieces_to_count(8, 1) == 1 << 9, "piece 1 of k-tile 2 is p9 of the patch");
constexpr bool row_major_reads_as_pictured() {
  for (int lane = 0; lane < 32; ++lane) {
    for (int octet = 0; octet < ConverterConfig::kOctetsPerPiece; ++octet) {
      const int octet_read = RowMajor::copy_of(lane, octet) * 16 + RowMajor::place_in_copy(lane);
      const int first_read = octet_read * split::kOctet;  // in floats
      const int row = RowMajor::row(lane, octet);
      if (first_read != RowMajor::buffer_float(row, RowMajor::first_k(lane, 0))) return false;
    }
  }
  return true;
}
static_assert(row_major_reads_as_pictured(), "each lane reads its octets");

// A transposed weight [K, N]. A buffer is [16 of K][32 rows]. The lanes that load and convert it:
//
//   load                                      convert
//
//   row    0 - 3  4 - 7  ...  28 - 31         row    0  1 ...  15 | 16 17 ...  31
//   k 0        0      1  ...        7         k 0    0  1 ...  15 |  0  1 ...  15
//   k 1        8      9  ...       15         ...    down the columns, eight k each
//   k 2       16     17  ...       23         k 8   16 17 ...  31 | 16 17 ...  31
//   k 3       24     25  ...       31         ...
//   k 4        0      1  ...        7              octet 0          octet 1
//   ...
//
// Bank conflicts. The half warps read the same 16 rows, of a k and of k + 8. These would be 8 * 32
// floats apart, in the same 16 of the 32 banks. So from k = 8 on, the two halves of the 32 rows are
// swapped in the buffer.
struct Transposed {
  using C = ConverterConfig;
  static constexpr bool kIsTransposed = true;

  // These members mean what RowMajor's members of the same names mean. The examples are checked
  // after the struct, too.
  static constexpr int kRows = C::kOctetsPerPiece;
  // Lane 27 has rows 11 and 27 of the patch.
  __host__ __device__ static constexpr int row(int lane, int i) { return 16 * i + lane % 16; }
  // Octet 1 of lane 27 is row 27, the lane's row 1, in every piece.
  __host__ __device__ static constexpr int row_index(int /*piece*/, int octet) { return octet; }
  // Lane 27 has k = 8 to 15 in piece 0, and k = 40 to 47 in piece 2.
  __host__ __device__ static constexpr int first_k(int lane, int piece) {
    return piece * C::kTransposedPieceDepth + lane / 16 * 8;
  }

  // Row 27, k = 0 is float 27. Row 27, k = 8 is float 8 * 32 + 11, as rows 27 and 11 are swapped.
  __host__ __device__ static constexpr int buffer_float(int row, int k) {
    const int swap = k < 8 ? 0 : 16;
    return k * C::kPatchRows + (row ^ swap);
  }

  __device__ static const float* first_source(const split::ScaledMatrix& weight, int64_t first_row,
                                              int64_t k, int lane) {
    const int64_t line = k + lane / 8;
    return weight.source + line * weight.row_stride + first_row + lane % 8 * 4;
  }

  __device__ static void load(PieceBuffer& buffer, const float* source, int64_t row_stride,
                              int piece, int lane, uint64_t policy) {
    const float* address = source + piece * C::kTransposedPieceDepth * row_stride;
#pragma unroll
    for (int i = 0; i < C::kCopiesPerPiece; ++i) {
      const bool is_swapped = i >= C::kCopiesPerPiece / 2;  // from k = 8 on
      const int buffer_lane = is_swapped ? lane ^ 4 : lane;
      ptx::copy_async_with_policy(&buffer[i][buffer_lane], address, policy);
      address += 4 * row_stride;  // the warp has copied 32 rows of 4 k
    }
  }

  // The buffer's float with which an octet of the lane begins. Lanes 0 to 15 have k = 0 to 7, the
  // others k = 8 to 15. Octet 1 of lane 27, which is row 27, k = 8 to 15, begins with float
  // 8 * 32 + 11.
  __host__ __device__ static constexpr int first_float(int lane, int octet) {
    const int half_warp = lane / 16;
    const int half_of_rows = octet ^ half_warp;  // swapped from k = 8 on
    return half_warp * 8 * C::kPatchRows + half_of_rows * 16 + lane % 16;
  }

  __device__ static void read(const PieceBuffer& buffer, int lane, int octet,
                              float (&v)[split::kOctet]) {
    const float* const column = &buffer[0][0].x + first_float(lane, octet);
#pragma unroll
    for (int i = 0; i < split::kOctet; ++i) v[i] = column[i * C::kPatchRows];
  }

  // A transposed piece has elements of all 32 rows, so count_pieces reads all of the k-tile: four
  // pieces of 8 rows.
  __host__ __device__ static constexpr uint32_t pieces_to_count(int first_piece,
                                                                int /*piece_in_k_tile*/) {
    constexpr uint32_t kWholeKTile = (1u << C::kPiecesPerKTile) - 1;
    return kWholeKTile << first_piece;
  }
  static constexpr bool kCountsOwnOctets = false;
};
static_assert(Transposed::row(27, 0) == 11 && Transposed::row(27, 1) == 27 &&
                  Transposed::first_k(27, 0) == 8,
              "octets 0 and 1 of lane 27 in piece 0 are rows 11 and 27, k = 8 to 15");
static_assert(Transposed::row_index(2, 1) == 1 && Transposed::first_k(27, 2) == 40,
              "octet 1 of lane 27 in piece 2 is the lane's row 1, k = 40 to 47 of the k-tile");
static_assert(Transposed::pieces_to_count(8, 1) == 0b1111 << 8,
              "p8 to p11, all of k-tile 2, for piece 1 of the k-tile");
static_assert(Transposed::buffer_float(27, 0) == 27 &&
                  Transposed::buffer_float(27, 8) == 8 * 32 + 11 &&
                  Transposed::buffer_float(11, 8) == 8 * 32 + 27 &&
                  Transposed::first_float(27, 1) == 8 * 32 + 11,
              "from k = 8 on, rows 27 and 11 have each other's places");
constexpr bool transposed_reads_as_pictured() {
  for (int lane = 0; lane < 32; ++lane) {
    for (int octet = 0; octet < ConverterConfig::kOctetsPerPiece; ++octet) {
      const int row = Transposed::row(lane, octet);
      const int k = Transposed::first_k(lane, 0);
      if (Transposed::first_float(lane, octet) != Transposed::buffer_float(row, k)) return false;
    }
  }
  return true;
}
static_assert(transposed_reads_as_pictured(), "each lane reads its octets");

}  // namespace kernels::sm90::gemm_one_product
