// Chunks of rows: how a GEMM limits its workspace for every M.
//
// The workspace of a GEMM for float32 holds the split x. At `highest` that takes 4 bytes an
// element, so the workspace would be as large as x itself. The GEMM is therefore launched for one
// chunk of rows of x after the other. All chunks use the same workspace, of at most 254 MiB:
//
//   x [m, k]         out [m, n]
//   rows 0 .. r-1    rows 0 .. r-1    chunk 0: split x, multiply
//   rows r .. 2r-1   rows r .. 2r-1   chunk 1: the same memory again
//   ...
//
// Most calls fit the limit and are one chunk. A workspace can exceed the limit only if the weight
// needs much of it (see kMinWorkspaceForRows), or if a single tile of x needs more.
//
// Host code without CUDA, used by the launches of sm80/ and sm90/.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "common/sizes.h"
#include "launchers.h"

namespace kernels {

// The limit of a workspace, in bytes. torch's allocator may add 2 MiB.
constexpr int64_t kMaxWorkspace = int64_t{254} << 20;

// Bytes that x may always use, as smaller chunks would not fill a GPU. If the weight leaves less
// than this of kMaxWorkspace, the workspace exceeds that limit.
constexpr int64_t kMinWorkspaceForRows = int64_t{64} << 20;

// How a kernel divides its result into tiles.
struct Tiling {
  int64_t rows_of_tile;
  int64_t weight_tiles;   // along N
  int64_t tiles_of_wave;  // as many as the GPU computes at once
};

// Divides a workspace into slices, each aligned to kSliceBytes. Without a workspace (null) it only
// measures: the slices are null, and bytes() is the size that a workspace needs.
//
//   WorkspaceSlices slices(workspace);
//   int* exponents = slices.add<int>(rows);
//   __half* hi = slices.add<__half>(rows * k);
//   size_t bytes = slices.bytes();
class WorkspaceSlices {
 public:
  static constexpr int64_t kSliceBytes = 256;  // a slice's address and size are multiples of it

  explicit WorkspaceSlices(void* workspace) : start_(static_cast<std::byte*>(workspace)) {}

  // Returns the next slice, for `count` elements.
  template <typename T>
  T* add(int64_t count) {
    const size_t offset = bytes_;
    bytes_ += divide_up(count * sizeof(T), kSliceBytes) * kSliceBytes;
    if (start_ == nullptr) return nullptr;
    return reinterpret_cast<T*>(start_ + offset);
  }

  // Returns the part of a slice from element `first` on; null if the slice is.
  template <typename T>
  T* part(T* slice, int64_t first) const {
    if (slice == nullptr) return nullptr;
    return slice + first;
  }

  // Returns the size of all slices so far.
  size_t bytes() const { return bytes_; }

 private:
  std::byte* start_;
  size_t bytes_ = 0;
};

// Returns the rows of each chunk but the last, which may have fewer: a multiple of
// tiling.rows_of_tile, or m if one chunk is enough. workspace_of(rows) returns the bytes of a
// workspace for `rows` rows of x.
//
// It prefers, in this order: few waves of tiles in all chunks, few chunks, and chunks of equal
// size.
//
//   Example: gemm_one_product with x [100000, 8192], N = 1536, tiles of 256 x 256, 66 of them in a
//   wave. The workspace has 24 MiB for the weight, and 16 KiB and a few bytes for each row of x.
//
//   Tiles            391 along M, 6 along N: 2346 tiles, which would be 36 waves without chunks.
//
//   The limit        (254 - 24) MiB are enough for 57 tiles along M: 57 * 256 rows.
//
//   Chunks of 57     57 * 6 = 342 tiles are 6 waves, in each of six chunks. The seventh has the
//                    other 49 * 6 = 294 tiles, 5 waves. In all 41 waves.
//
//   Chunks of 55     55 * 6 = 330 tiles are exactly 5 waves, in each of seven chunks. The eighth
//                    has the other 6 * 6 = 36 tiles, 1 wave. In all 36 waves, as many as without
//                    chunks.
//
//   So a chunk has 55 * 256 rows.
template <typename WorkspaceOf>
int64_t rows_of_chunk(int64_t m, const Tiling& tiling, const WorkspaceOf& workspace_of) {
  if (static_cast<int64_t>(workspace_of(m)) <= kMaxWorkspace) return m;

  // A workspace has `fixed_bytes`, and `bytes_per_row` for each row. Slices are rounded up to
  // kSliceBytes; over kMeasuredRows rows that adds next to nothing to bytes_per_row.
  constexpr int64_t kMeasuredRows = 1024;
  const int64_t fixed_bytes = workspace_of(0);
  const int64_t bytes_per_row = divide_up(workspace_of(kMeasuredRows) - fixed_bytes, kMeasuredRows);

  // Below, tiles are counted along M.
  const int64_t bytes_for_rows = std::max(kMaxWorkspace - fixed_bytes, kMinWorkspaceForRows);
  const int64_t max_tiles =
      std::max(bytes_for_rows / (bytes_per_row * tiling.rows_of_tile), int64_t{1});
  const int64_t tiles = divide_up(m, tiling.rows_of_tile);
  if (tiles <= max_tiles) return m;

  const auto waves_of = [&](int64_t count) {
    return divide_up(count * tiling.weight_tiles, tiling.tiles_of_wave);
  };
  // The waves of all chunks, the number of chunks, and the tiles of a chunk. The least tuple is the
  // best. So among sizes with equally many waves and chunks, the smallest is taken. It leaves the
  // most tiles for the last chunk, so the chunks are as equal as possible.
  using Choice = std::tuple<int64_t, int64_t, int64_t>;
  Choice best{INT64_MAX, 0, 0};
  // Chunks of less than half of max_tiles would be about twice as many.
  for (int64_t chunk_tiles = max_tiles / 2 + 1; chunk_tiles <= max_tiles; ++chunk_tiles) {
    const int64_t whole_chunks = tiles / chunk_tiles;
    const int64_t waves = whole_chunks * waves_of(chunk_tiles) + waves_of(tiles % chunk_tiles);
    const int64_t chunks = divide_up(tiles, chunk_tiles);
    best = std::min(best, Choice{waves, chunks, chunk_tiles});
  }
  const int64_t best_chunk_tiles = std::get<2>(best);
  return best_chunk_tiles * tiling.rows_of_tile;
}

// Calls launch(chunk, is_first) for each chunk of `rows` rows, in order. A chunk is `call` with
// its own rows of x, out and mask. A transposed x must be one chunk.
template <typename Launch>
void for_each_chunk(const LinearArguments& call, int64_t rows, const Launch& launch) {
  const int64_t element_bytes = bytes_of_element(call.dtype);
  const int64_t mask_row_bytes = bytes_of_bits(call.n);
  for (int64_t begin = 0; begin < call.m; begin += rows) {
    LinearArguments chunk = call;
    chunk.m = std::min(rows, call.m - begin);
    chunk.x = static_cast<const char*>(call.x) + begin * call.x_stride * element_bytes;
    chunk.out = static_cast<char*>(call.out) + begin * call.n * element_bytes;
    if (call.mask != nullptr) chunk.mask = call.mask + begin * mask_row_bytes;
    launch(chunk, begin == 0);
  }
}

}  // namespace kernels
