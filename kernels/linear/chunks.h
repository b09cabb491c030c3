// Chunks of rows: how a GEMM limits its workspace for every M.
//
// The workspace of a GEMM for float32 holds split x (split/split.cuh), which at `highest` is as
// large as x itself. The GEMM is therefore launched for one chunk of rows of x after the other. All
// chunks use the same workspace, of at most 254 MiB:
//
//   x [m, k]         out [m, n]
//   rows 0 .. r-1    rows 0 .. r-1    chunk 0: split x, multiply
//   rows r .. 2r-1   rows r .. 2r-1   chunk 1: the same memory again
//   ...
//
// A workspace can exceed the limit only if the weight needs much of it (kMinWorkspaceForRows), or
// if a single tile of x needs more. (The copy of a transposed weight does not count: rows_of_chunk
// in sm90/linear_sm90.cu.) Most calls are one chunk.
//
// Host code without CUDA, used by the launches of sm80/ and sm90/.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/sizes.h"
#include "launchers.h"

namespace kernels {

// The limit of a workspace, in bytes. torch's allocator may add 2 MiB.
constexpr int64_t kMaxWorkspace = int64_t{254} << 20;

// Bytes that x may always use, even if the workspace then exceeds kMaxWorkspace, as smaller chunks
// would not fill a GPU.
constexpr int64_t kMinWorkspaceForRows = int64_t{64} << 20;

// How a kernel divides its result into tiles.
struct TileGrid {
  // A tiles_of_wave that exceeds the tiles of every product.
  static constexpr int64_t kAllTiles = INT64_MAX;

  int64_t rows_of_tile;
  int64_t weight_tiles;  // along N
  // Tiles that the GPU computes at once. kAllTiles with stream-K, where an incomplete last wave
  // costs little, so every chunk counts as one wave.
  int64_t tiles_of_wave;

  // Returns the waves of a product with this many tiles along M (at least one).
  int64_t count_waves(int64_t tiles_along_m) const {
    const int64_t tiles = tiles_along_m * weight_tiles;
    if (tiles <= tiles_of_wave) return 1;  // divide_up would overflow with kAllTiles
    return divide_up(tiles, tiles_of_wave);
  }
};

// Divides a workspace into slices, each aligned to kSliceBytes. Without a workspace (null) it only
// measures: the slices are null, and bytes() is the size that a workspace needs.
class WorkspaceSlices {
 public:
  static constexpr int64_t kSliceBytes = 256;  // a slice's address and size are multiples of it

  explicit WorkspaceSlices(void* workspace) : start_(static_cast<std::byte*>(workspace)) {}

  template <typename T>
  T* add(int64_t count) {
    const size_t offset = bytes_;
    bytes_ += divide_up(count * sizeof(T), kSliceBytes) * kSliceBytes;
    if (start_ == nullptr) return nullptr;
    return reinterpret_cast<T*>(start_ + offset);
  }

  // Returns a pointer to an element of a slice; null if the slice is null.
  template <typename T>
  T* pointer_into(T* slice, int64_t element) const {
    if (slice == nullptr) return nullptr;
    return slice + element;
  }

  size_t bytes() const { return bytes_; }

 private:
  std::byte* start_;
  size_t bytes_ = 0;
};

// Returns the most tiles along M for which a chunk's workspace keeps to the limit, but at least 1,
// and at least as many as fit into kMinWorkspaceForRows. workspace_of(rows) returns the bytes of a
// workspace for `rows` rows of x.
template <typename WorkspaceOf>
int64_t max_tiles_of_chunk(const TileGrid& grid, const WorkspaceOf& workspace_of) {
  // Slices are rounded up to kSliceBytes; over kMeasuredRows rows that adds next to nothing to
  // bytes_per_row.
  constexpr int64_t kMeasuredRows = 1024;
  const int64_t fixed_bytes = workspace_of(0);
  const int64_t bytes_per_row = divide_up(workspace_of(kMeasuredRows) - fixed_bytes, kMeasuredRows);
  const int64_t bytes_for_rows = std::max(kMaxWorkspace - fixed_bytes, kMinWorkspaceForRows);
  const int64_t max_tiles = bytes_for_rows / (bytes_per_row * grid.rows_of_tile);
  return std::max(max_tiles, int64_t{1});
}

// Chunks of `tiles` tiles along M each; the last may have fewer.
struct Chunks {
  int64_t tiles;
  int64_t count;
  int64_t waves;  // the sum over all chunks

  Chunks(int64_t all_tiles, int64_t tiles, const TileGrid& grid)
      : tiles(tiles), count(all_tiles / tiles), waves(count * grid.count_waves(tiles)) {
    const int64_t tiles_of_rest = all_tiles % tiles;
    if (tiles_of_rest > 0) {
      ++count;
      waves += grid.count_waves(tiles_of_rest);
    }
  }

  bool is_better_than(const Chunks& other) const {
    if (waves != other.waves) return waves < other.waves;
    return count < other.count;
  }
};

// Returns the rows of each chunk but the last, which may have fewer: a multiple of
// grid.rows_of_tile, or m if one chunk is enough. This function prefers, in this order: few waves
// of tiles in all chunks, few chunks, and chunks of equal size.
//
//   Example: gemm_one_product with x [100000, 8192], N = 1536, tiles of 256 x 256, 66 of them in a
//   wave. The workspace has 24 MiB for the weight, and 16 KiB and a few bytes for each row of x.
//
//   Tiles            391 along M, 6 along N: 2346 tiles, which would be 36 waves without chunks.
//   The limit        (254 - 24) MiB are enough for 57 tiles along M: 57 * 256 rows.
//   Chunks of 57     57 * 6 = 342 tiles are 6 waves, in each of six chunks. The seventh has the
//                    other 49 * 6 = 294 tiles, 5 waves. In all 41 waves.
//   Chunks of 55     55 * 6 = 330 tiles are exactly 5 waves, in each of seven chunks. The eighth
//                    has the other 6 * 6 = 36 tiles, 1 wave. In all 36 waves. This is best.
template <typename WorkspaceOf>
int64_t choose_rows_of_chunk(int64_t m, const TileGrid& grid, const WorkspaceOf& workspace_of) {
  if (static_cast<int64_t>(workspace_of(m)) <= kMaxWorkspace) return m;
  const int64_t max_tiles = max_tiles_of_chunk(grid, workspace_of);
  const int64_t all_tiles = divide_up(m, grid.rows_of_tile);
  if (all_tiles <= max_tiles) return m;

  // The search begins above half of max_tiles: smaller chunks would be at least about twice as many
  // as chunks of max_tiles. Among sizes with equally many waves and chunks, the smallest is taken,
  // because it leaves the most tiles for the last chunk.
  Chunks best(all_tiles, max_tiles / 2 + 1, grid);
  for (int64_t tiles = best.tiles + 1; tiles <= max_tiles; ++tiles) {
    const Chunks chunks(all_tiles, tiles, grid);
    if (chunks.is_better_than(best)) best = chunks;
  }
  return best.tiles * grid.rows_of_tile;
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
