// The sizes of patches, pieces and octets (see the picture in converter.cuh), and which elements of
// a piece a lane of a converter warp loads and converts. There is one struct for each layout of the
// weight in memory: RowMajor and Transposed.

#pragma once

#include <cstdint>

#include "common/ptx/memory.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90::gemm_one_product {

struct ConverterConfig {
  static constexpr int kWarps = 3;  // converter warps of a block
  static constexpr int kKTileDepth = split::k_tile_depth(split::Form::kWithoutLo);  // 64 of K
  static constexpr int kKTilesPerPatch = 4;
  static constexpr int kRowsPerPatch = 32;
  static constexpr int kPatchRowsPerPanel = OneProductConfig::kBlockWeightRows / kRowsPerPatch;

  static constexpr int kPiecesPerKTile = 4;
  static constexpr int kPiecesPerPatch = kKTilesPerPatch * kPiecesPerKTile;
  // Pieces of 16 rows x 64 of K leave shared memory for only three stages of the mainloop, which
  // takes 1% more time (docs/EXPERIMENTS.md, "Hopper's products", "At `high` and in half types").
  static constexpr int kRowMajorPieceRows = 8;
  static constexpr int kTransposedPieceDepth = 16;
  static constexpr int kBuffers = 4;  // pieces of a warp in shared memory: 1 in use, 3 in flight
  static constexpr int kCopiesPerLane = 4;  // of 16 bytes each, to load a piece
  static constexpr int kOctetsPerLane = 2;  // of a piece

  // How many k-tiles a conversion may run ahead of the producer of its block. With 48 k-tiles the
  // kernel takes 1% longer (the same section of docs/EXPERIMENTS.md).
  static constexpr int kLead = 24;

  static_assert(kPiecesPerKTile * kRowMajorPieceRows == kRowsPerPatch,
                "four pieces of a row-major weight make a k-tile of a patch");
  static_assert(kPiecesPerKTile * kTransposedPieceDepth == kKTileDepth,
                "four pieces of a transposed weight make a k-tile of a patch");
  static_assert(kRowMajorPieceRows * kKTileDepth == kCopiesPerLane * 32 * 4,
                "the copies of a warp make a piece of a row-major weight");
  static_assert(kRowsPerPatch * kTransposedPieceDepth == kCopiesPerLane * 32 * 4,
                "the copies of a warp make a piece of a transposed weight");
  static_assert(kOctetsPerLane * split::kOctet * 32 == kCopiesPerLane * 32 * 4,
                "a warp converts all elements of a piece");
  static_assert(kPiecesPerPatch <= 32, "a 32-bit word has a bit for each piece of a patch");
};

struct Patch {
  int64_t first_n;
  int first_k_tile;  // along K
  int deadline;      // in k-tiles of a cluster, counted over all its tiles (PatchOrder)
};

// A piece of a patch, one of p0 - p15. Example: p9 = p(8 + 1) is quarter 1 of k-tile 2.
struct Piece {
  int first_of_k_tile;  // the number of the k-tile's first piece: 0, 4, 8 or 12
  int quarter;          // 0 to 3

  __host__ __device__ constexpr int number() const { return first_of_k_tile + quarter; }
};

// The shared memory of the converter warps. A buffer has a float4 for each copy of each lane.
using PieceBuffer = float4[ConverterConfig::kCopiesPerLane][32];
using PieceRing = PieceBuffer[ConverterConfig::kBuffers];
using ConverterMemory = PieceRing[ConverterConfig::kWarps];

// ----- which elements a lane loads and converts
//
// Most floats of the octets that a lane converts were loaded by other lanes. Callers use the same
// members of RowMajor and Transposed, and comments in RowMajor explain them.

// From where a lane loads a patch.
struct LaneSource {
  const float* first;  // the lane's first four floats of the patch's first piece
  int64_t row_stride;  // elements between two rows of the weight, or of its transpose
  uint64_t policy;     // how long L2 keeps the lines
};

// Where an octet is in its patch, and which of the lane's scales it needs: a lane keeps a scale for
// each row in which it has octets. For example, octet 1 of lane 27 in p1 has
//
//                 row   k    scale_index
//   row-major     15    24   3             the lane has octets in rows 3, 7, 11, 15, ..., 31
//   transposed    27    24   1             the lane has octets in rows 11 and 27
struct OctetPlace {
  int row;  // in the patch
  int k;    // where the octet begins in its k-tile
  int scale_index;

  // The distance in hi, in elements, from the patch's row 0, k = 0, of the same k-tile.
  __host__ __device__ constexpr int offset() const { return row * split::kKTileRowNumbers + k; }

  __host__ __device__ constexpr bool operator==(const OctetPlace& other) const {
    return row == other.row && k == other.k && scale_index == other.scale_index;
  }
};

// A row-major weight. A buffer is [8 rows][64 of K]. The lanes, 0 to 31, that load and convert it:
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
  static constexpr bool kIsTransposed = false;  // the weight in memory is [N, K], not [K, N]

  // How many scales a lane keeps for a patch.
  static constexpr int kScales = ConverterConfig::kOctetsPerLane * ConverterConfig::kPiecesPerKTile;

  // The place of the lane's octet 0 or 1 in the piece that is this quarter of its k-tile.
  __host__ __device__ static constexpr OctetPlace place(int lane, int quarter, int octet) {
    const int scale_index = quarter * ConverterConfig::kOctetsPerLane + octet;
    return {/*row=*/4 * scale_index + lane / 8, /*k=*/lane % 8 * 8, scale_index};
  }

  __device__ static LaneSource source_of(const split::Float32Matrix& weight, int64_t first_n,
                                         int64_t first_k, int lane) {
    const int64_t n = first_n + lane / 16;
    const float* const first = weight.source_row(n) + first_k + lane % 16 * 4;
    return {first, weight.row_stride, ptx::evict_first_policy()};
  }

  // Starts the lane's copies of the piece with this number to its buffer.
  __device__ static void load(PieceBuffer& buffer, const LaneSource& source, int number, int lane) {
    const int piece_k = number / ConverterConfig::kPiecesPerKTile * ConverterConfig::kKTileDepth;
    const int piece_row =
        number % ConverterConfig::kPiecesPerKTile * ConverterConfig::kRowMajorPieceRows;
    const float* address = source.first + (piece_k + piece_row * source.row_stride);
#pragma unroll
    for (int i = 0; i < ConverterConfig::kCopiesPerLane; ++i) {
      ptx::copy_async_with_policy(&buffer[i][lane], address, source.policy);
      address += 2 * source.row_stride;  // the warp has copied two rows of 64
    }
  }

  // Reads the lane's octet 0 or 1 of a piece from its buffer to v.
  __device__ static void read(const PieceBuffer& buffer, int lane, int octet,
                              float (&v)[split::kOctet]) {
    // buffer[i] has two rows, 2 i and 2 i + 1. They are 16 octets, of two float4 each.
    const float4* const halves = &buffer[2 * octet + lane / 16][lane % 16 * 2];
    *reinterpret_cast<float4*>(v) = halves[0];
    *reinterpret_cast<float4*>(v + 4) = halves[1];
  }

  // Returns the pieces in which subnormals are counted if `piece` has any
  // (converter_subnormals.cuh), as a bit mask: bit 9 is for p9. Here it is the piece itself.
  __host__ __device__ static constexpr uint32_t pieces_to_count(Piece piece) {
    return 1u << piece.number();
  }
};
static_assert(RowMajor::place(/*lane=*/27, /*quarter=*/1, /*octet=*/1) == OctetPlace{15, 24, 3},
              "the example of OctetPlace");

// A transposed weight [K, N]. A buffer is [16 of K][32 rows]. The lanes that load and convert it:
//
//   load                                      convert
//
//   row    0 - 3  4 - 7  ...  28 - 31         row         0   1  ...  15   16  17  ...  31
//   k 0        0      1  ...        7         k 0 - 7     0   1  ...  15    0   1  ...  15
//   k 1        8      9  ...       15         k 8 - 15   16  17  ...  31   16  17  ...  31
//   k 2       16     17  ...       23
//   k 3       24     25  ...       31                        octet 0          octet 1
//   k 4        0      1  ...        7
//   ...
//
// To avoid bank conflicts, the buffer has rows 16 - 31 before rows 0 - 15 from k = 8 on. While
// lanes 0 - 15 read 16 rows of one k, lanes 16 - 31 read the same rows of k + 8, which would
// otherwise be 8 * 32 floats further, in the same 16 of the 32 banks.
struct Transposed {
  static constexpr bool kIsTransposed = true;

  static constexpr int kScales = ConverterConfig::kOctetsPerLane;
  __host__ __device__ static constexpr OctetPlace place(int lane, int quarter, int octet) {
    const int piece_k = quarter * ConverterConfig::kTransposedPieceDepth;
    return {/*row=*/16 * octet + lane % 16, /*k=*/piece_k + lane / 16 * 8, /*scale_index=*/octet};
  }

  __device__ static LaneSource source_of(const split::Float32Matrix& weight, int64_t first_n,
                                         int64_t first_k, int lane) {
    const int64_t k = first_k + lane / 8;
    const float* const first = weight.source_row(k) + first_n + lane % 8 * 4;
    return {first, weight.row_stride, ptx::evict_first_policy()};
  }

  __device__ static void load(PieceBuffer& buffer, const LaneSource& source, int number, int lane) {
    const float* address =
        source.first + number * ConverterConfig::kTransposedPieceDepth * source.row_stride;
#pragma unroll
    for (int i = 0; i < ConverterConfig::kCopiesPerLane; ++i) {
      // Eight lanes have the same k: four load rows 0 - 15, and four rows 16 - 31.
      const bool is_swapped = i >= ConverterConfig::kCopiesPerLane / 2;  // from k = 8 on
      const int buffer_lane = is_swapped ? lane ^ 4 : lane;
      ptx::copy_async_with_policy(&buffer[i][buffer_lane], address, source.policy);
      address += 4 * source.row_stride;  // the warp has copied 32 rows of 4 k
    }
  }

  // The buffer's float with which an octet of the lane begins. Example: octet 1 of lane 27 is row
  // 27, k = 8 to 15. Row 27 is there at the place of row 11, because the halves are swapped.
  __host__ __device__ static constexpr int first_float(int lane, int octet) {
    const int half_warp = lane / 16;
    const int half_of_rows = octet ^ half_warp;
    return half_warp * 8 * ConverterConfig::kRowsPerPatch + half_of_rows * 16 + lane % 16;
  }

  __device__ static void read(const PieceBuffer& buffer, int lane, int octet,
                              float (&v)[split::kOctet]) {
    const float* const column = &buffer[0][0].x + first_float(lane, octet);
#pragma unroll
    for (int i = 0; i < split::kOctet; ++i) v[i] = column[i * ConverterConfig::kRowsPerPatch];
  }

  __host__ __device__ static constexpr uint32_t pieces_to_count(Piece piece) {
    constexpr uint32_t kWholeKTile = (1u << ConverterConfig::kPiecesPerKTile) - 1;
    return kWholeKTile << piece.first_of_k_tile;
  }
};
static_assert(Transposed::place(/*lane=*/27, /*quarter=*/1, /*octet=*/1) == OctetPlace{27, 24, 1},
              "the example of OctetPlace");
static_assert(Transposed::pieces_to_count({/*first_of_k_tile=*/8, /*quarter=*/1}) == 0b1111 << 8,
              "p9 shares elements with the row-major pieces p8, p9, p10 and p11");
static_assert(Transposed::first_float(11, 0) == 0 * 32 + 11 &&
                  Transposed::first_float(11, 1) == 0 * 32 + 27,
              "k = 0: rows 11 and 27 are in their own places");
static_assert(Transposed::first_float(27, 0) == 8 * 32 + 27 &&
                  Transposed::first_float(27, 1) == 8 * 32 + 11,
              "k = 8: rows 11 and 27 are in each other's places");

}  // namespace kernels::sm90::gemm_one_product
