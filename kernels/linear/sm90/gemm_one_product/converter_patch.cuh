// Converts one patch of the float32 weight to scaled fp16. A converter warp calls convert_patch for
// each patch that it takes. The picture in converter.cuh explains the parts of the weight.
//
//   source     [N, K] float32, row-major, or its transpose [K, N]
//   exponent   [N] int, of each row of the weight, from split_x_kernel
//   hi         [k-tile][N][64] fp16
//
// All three are members of WeightConversion::weight. For each n and each k < K,
//
//   hi[k / 64][n][k % 64] = source[n][k] * 2^exponent[n], rounded to nearest
//
// and hi is 0 for k >= K. The warp also counts elements that are subnormal in fp16, and marks rows
// with too many (converter_subnormals.cuh).
//
// The call tree:
//
//   convert_patch
//     convert_whole_patch      a patch inside the weight, piece by piece through shared memory
//       load_scales
//       PieceLoader
//       convert_piece
//         round_octet
//       count_found_pieces     (converter_subnormals.cuh)
//     convert_edge_patch       a patch at the edge of the weight, octet by octet
//       load_edge_octet
//       round_octet
//       count_subnormals       (converter_subnormals.cuh)
//     mark_row_for_tf32        (converter_subnormals.cuh)

#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/memory.cuh"
#include "common/vectors.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/converter_layouts.cuh"
#include "linear/sm90/gemm_one_product/converter_subnormals.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90::gemm_one_product {

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

// Loads the pieces of a patch to the warp's ring of four buffers in shared memory. While the warp
// converts the piece in one buffer, the next three pieces are in flight:
//
//   start(0), start(1), start(2)
//   for each piece:   buffer = wait(number), start(number + 3), then convert the buffer
template <typename Layout>
struct PieceLoader {
  static constexpr int kInFlight = ConverterConfig::kBuffers - 1;

  LaneSource source;
  PieceRing& ring;
  int lane;
  // A named barrier where the warp's lanes meet. With __syncwarp in its place, compute-sanitizer's
  // racecheck reports hazards between copies and reads.
  int barrier;

  // Starts to load a piece. Past the last one, only commits, because wait counts the commits.
  __device__ __forceinline__ void start(int number) const {
    if (number < ConverterConfig::kPiecesPerPatch) {
      Layout::load(ring[number % ConverterConfig::kBuffers], source, number, lane);
    }
    ptx::commit_copies();
  }

  // Waits until the piece with this number, the oldest in flight, has arrived for all lanes.
  // Returns its buffer. The buffer of the piece before it is then free, as all lanes have read it.
  __device__ __forceinline__ const PieceBuffer& wait(int number) const {
    ptx::wait_copies<kInFlight - 1>();
    ptx::barrier_sync(barrier, 32);
    return ring[number % ConverterConfig::kBuffers];
  }
};

// Converts the lane's octets of a piece, and stores them to hi. Returns whether an element is
// subnormal. `scale` is from load_scales. `target` is the place in hi of the lane's octet 0 of the
// k-tile's first piece (p0, p4, p8 or p12).
template <typename Layout>
__device__ __forceinline__ bool convert_piece(const PieceBuffer& buffer, int lane, int quarter,
                                              const float (&scale)[Layout::kScales],
                                              __half* target) {
  SubnormalProbe probe;
#pragma unroll
  for (int octet = 0; octet < ConverterConfig::kOctetsPerLane; ++octet) {
    alignas(16) float v[split::kOctet];
    Layout::read(buffer, lane, octet, v);
    const OctetPlace place = Layout::place(lane, quarter, octet);
    // The distance from `target` is equal for all lanes. It is computed for lane 0, whose first
    // octet has the offset 0, so that it is a constant for the compiler.
    const int distance = Layout::place(/*lane=*/0, quarter, octet).offset();
    *reinterpret_cast<uint4*>(target + distance) = round_octet(v, scale[place.scale_index], &probe);
  }
  return probe.has_found();
}

// Loads the lane's scales: 2^exponent of each row in which it has octets. The lane's first
// kScales octets are in these rows, one in each.
template <typename Layout>
__device__ __forceinline__ void load_scales(const split::ScaledMatrix& weight, int64_t first_n,
                                            int lane, float (&scale)[Layout::kScales]) {
#pragma unroll
  for (int i = 0; i < Layout::kScales; ++i) {
    const int quarter = i / ConverterConfig::kOctetsPerLane;
    const int octet = i % ConverterConfig::kOctetsPerLane;
    const OctetPlace place = Layout::place(lane, quarter, octet);
    scale[place.scale_index] = split::power_of_two(__ldg(weight.exponent + first_n + place.row));
  }
}

// Converts a patch that is inside the weight. Returns whether it has counted subnormals. All lanes
// of a warp call it, and meet at `barrier`.
template <typename Layout>
__device__ __forceinline__ bool convert_whole_patch(const WeightConversion& conversion,
                                                    const Patch& patch, PieceRing& ring,
                                                    int barrier) {
  using Loader = PieceLoader<Layout>;
  const split::ScaledMatrix& weight = conversion.weight;
  const int lane = threadIdx.x % 32;
  const int64_t k_tile_elements = weight.rows * split::kKTileRowNumbers;
  const int64_t first_k = int64_t{patch.first_k_tile} * ConverterConfig::kKTileDepth;
  const Loader loader{Layout::source_of(weight, patch.first_n, first_k, lane), ring, lane, barrier};
  const OctetPlace first = Layout::place(lane, /*quarter=*/0, /*octet=*/0);
  __half* target = weight.hi + patch.first_k_tile * k_tile_elements +
                   (patch.first_n + first.row) * split::kKTileRowNumbers + first.k;

  float scale[Layout::kScales];
  load_scales<Layout>(weight, patch.first_n, lane, scale);

#pragma unroll
  for (int number = 0; number < Loader::kInFlight; ++number) loader.start(number);
  // The pieces to count, by the subnormals that this lane has found.
  uint32_t found_pieces = 0;
#pragma unroll 1
  for (int first_of_k_tile = 0; first_of_k_tile < ConverterConfig::kPiecesPerPatch;
       first_of_k_tile += ConverterConfig::kPiecesPerKTile) {
#pragma unroll
    for (int quarter = 0; quarter < ConverterConfig::kPiecesPerKTile; ++quarter) {
      const Piece piece{first_of_k_tile, quarter};
      const PieceBuffer& buffer = loader.wait(piece.number());
      loader.start(piece.number() + Loader::kInFlight);
      const bool has_subnormal = convert_piece<Layout>(buffer, lane, quarter, scale, target);
      found_pieces |= has_subnormal ? Layout::pieces_to_count(piece) : 0;
    }
    target += k_tile_elements;
  }
  return count_found_pieces<Layout>(conversion, patch, found_pieces);
}

// Loads the octet of row n that begins at first_k. Elements past K, which is `k`, are 0.
template <typename Layout>
__device__ __forceinline__ void load_edge_octet(const split::Float32Matrix& weight, int64_t n,
                                                int64_t first_k, int64_t k,
                                                float (&v)[split::kOctet]) {
  if constexpr (Layout::kIsTransposed) {
    for (int j = 0; j < split::kOctet; ++j) {
      const bool exists = first_k + j < k;
      v[j] = exists ? weight.source_row(first_k + j)[n] : 0;
    }
  } else {
    // Rows are aligned to 16 bytes in every call of this kernel (linear_sm90_supports).
    load_floats(v, weight.source_row(n), first_k, k, /*is_aligned=*/true);
  }
}

// Converts a patch at the edge of the weight, where some rows or some of K do not exist. Eight
// lanes share a row, with an octet each, so the warp converts four rows of one k-tile at a time.
// lane_first_n is the lane's first row. `k` is K. Returns whether it has counted subnormals. All
// lanes of a warp call it.
template <typename Layout>
__device__ bool convert_edge_patch(const WeightConversion& conversion, int64_t k,
                                   int64_t lane_first_n, int first_k_tile) {
  constexpr int kRowsAtATime = 4;
  constexpr int kRowsPerLane = ConverterConfig::kRowsPerPatch / kRowsAtATime;
  const split::ScaledMatrix& weight = conversion.weight;
  bool any_counted = false;
#pragma unroll 1
  for (int i = 0; i < ConverterConfig::kKTilesPerPatch * kRowsPerLane; ++i) {
    const int64_t n = lane_first_n + i % kRowsPerLane * kRowsAtATime;
    const int k_tile = first_k_tile + i / kRowsPerLane;
    const int64_t octet_k =
        int64_t{k_tile} * ConverterConfig::kKTileDepth + threadIdx.x % 8 * split::kOctet;
    SubnormalProbe probe;
    uint4 octet = {};
    const bool exists = n < weight.rows && octet_k < split::padded(k);
    if (exists) {
      float v[split::kOctet];
      load_edge_octet<Layout>(weight, n, octet_k, k, v);
      const float scale = split::power_of_two(__ldg(weight.exponent + n));
      octet = round_octet(v, scale, &probe);
      __half* const row_of_k_tile = weight.hi + weight.k_tiled_index(k_tile, n);
      *reinterpret_cast<uint4*>(row_of_k_tile + octet_k % ConverterConfig::kKTileDepth) = octet;
    }
    if (__any_sync(0xffffffff, probe.has_found())) {
      count_subnormals(conversion, n, octet);
      any_counted = true;
    }
  }
  return any_counted;
}

// Converts a patch, and marks its rows that have too many subnormals. All lanes of a warp call it,
// and meet at `barrier`.
template <typename Layout>
__device__ __forceinline__ void convert_patch(const WeightConversion& conversion, int64_t k,
                                              const Patch& patch, PieceRing& ring, int barrier) {
  const int lane = threadIdx.x % 32;
  const int64_t end_n = patch.first_n + ConverterConfig::kRowsPerPatch;
  const int end_k_tile = patch.first_k_tile + ConverterConfig::kKTilesPerPatch;
  const bool is_whole =
      end_n <= conversion.weight.rows && int64_t{end_k_tile} * ConverterConfig::kKTileDepth <= k;
  bool any_counted;
  if (is_whole) {
    any_counted = convert_whole_patch<Layout>(conversion, patch, ring, barrier);
  } else {
    any_counted =
        convert_edge_patch<Layout>(conversion, k, patch.first_n + lane / 8, patch.first_k_tile);
  }
  if (any_counted) {
    __syncwarp();  // all lanes have added their counts of subnormals
    mark_row_for_tf32(conversion, k, patch.first_n + lane, patch.first_k_tile);
  }
}

}  // namespace kernels::sm90::gemm_one_product
