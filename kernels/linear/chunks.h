// Chunks of rows: how a GEMM limits its workspace, whatever M is.
//
// The workspace of a GEMM for float32 holds the split x, 4 bytes for each element at `highest`, so
// without a limit it would be as large as x itself. The GEMM is therefore launched for some rows of
// x after the other, and all these chunks use the same workspace, of at most 254 MiB:
//
//   x [m, k]         out [m, n]
//   rows 0 .. r-1    rows 0 .. r-1    chunk 0: split x, multiply
//   rows r .. 2r-1   rows r .. 2r-1   chunk 1: the same memory again
//   ...
//
// Most calls fit the limit and are one chunk. The limit covers x and what belongs to it. Slices
// that belong to the weight come on top where they are large (see kMinWorkspaceForRows).
//
// Host code without CUDA, used by both launch.cu files.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "launchers.h"

namespace kernels {

// Bytes of a workspace. torch's allocator may add 2 MiB.
constexpr int64_t kMaxWorkspace = int64_t{254} << 20;

// Bytes that x may use in any case. Where the weight's slices leave less than this of
// kMaxWorkspace, the workspace exceeds that limit: smaller chunks would not fill a GPU.
constexpr int64_t kMinWorkspaceForRows = int64_t{64} << 20;

// How a kernel divides its result into tiles.
struct Tiling {
  int64_t rows;          // of x in a tile
  int64_t side_by_side;  // tiles along N
  int64_t at_once;  // tiles of a wave: as many as the GPU computes at once. 1 where the last wave
                    // is shared out evenly (stream-K), so that no multiprocessor is idle in it
};

// Divides a workspace into slices, each aligned to 256 bytes. With a null workspace it only
// measures them: the slices are null, and bytes() is what a real workspace needs.
//
//   WorkspaceSlices slices(workspace);
//   int* exponents = slices.add<int>(rows);
//   __half* hi = slices.add<__half>(rows * k);
class WorkspaceSlices {
 public:
  explicit WorkspaceSlices(void* workspace) : start_(static_cast<std::byte*>(workspace)) {}

  // Returns the next slice, for `count` elements.
  template <typename T>
  T* add(int64_t count) {
    const size_t offset = bytes_;
    bytes_ += (count * sizeof(T) + 255) / 256 * 256;
    if (start_ == nullptr) return nullptr;
    return reinterpret_cast<T*>(start_ + offset);
  }

  // Returns the part of a slice from element `first` on.
  template <typename T>
  T* part(T* slice, int64_t first) const {
    if (slice == nullptr) return nullptr;
    return slice + first;
  }

  // Returns the size of all slices so far, each rounded up to 256 bytes.
  size_t bytes() const { return bytes_; }

 private:
  std::byte* start_;
  size_t bytes_ = 0;
};

// Returns the same problem with m rows of x.
inline LinearArguments with_rows(LinearArguments linear, int64_t m) {
  linear.m = m;
  return linear;
}

// Returns how many rows a chunk has, all chunks but the last: a multiple of tiling.rows, or m where
// one chunk is enough. workspace_of(rows) is the size of a workspace for so many rows.
//
// It prefers, in this order: few waves of tiles in all chunks, few chunks, and chunks of equal
// size.
//
//   Example: x [100000, 8192], N = 1536, tiles of 256 x 256, 66 of them at once. A row needs 16396
//   bytes of workspace, the weight 24 MiB.
//   All of x         391 tiles of x, 6 side by side: 2346 tiles, 36 waves.
//   The limit        (254 - 24) MiB are enough for 14709 rows: 57 tiles of x.
//   Chunks of 57     57 * 6 = 342 tiles are 6 waves, in each of six chunks. The last chunk has the
//                    other 49 * 6 = 294 tiles, 5 waves. In all 41 waves.
//   Chunks of 55     55 * 6 = 330 tiles are exactly 5 waves, in each of seven chunks. The last
//   chunk
//                    has 6 * 6 = 36 tiles, 1 wave. In all 36 waves, as without chunks.
//   So a chunk has 55 * 256 rows.
template <typename WorkspaceOf>
int64_t rows_of_chunk(int64_t m, const Tiling& tiling, const WorkspaceOf& workspace_of) {
  if (static_cast<int64_t>(workspace_of(m)) <= kMaxWorkspace) return m;
  const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };

  // A workspace has `fixed` bytes and `per_row` bytes for each row. These are measured with so many
  // rows that all slices end at multiples of 256 bytes.
  constexpr int64_t kMeasuredRows = 1024;
  const int64_t fixed = workspace_of(0);
  const int64_t per_row = divide_up(workspace_of(kMeasuredRows) - fixed, kMeasuredRows);

  // The most tiles of x in a chunk.
  const int64_t for_rows = std::max(kMaxWorkspace - fixed, kMinWorkspaceForRows);
  const int64_t most = std::max(for_rows / (per_row * tiling.rows), int64_t{1});
  const int64_t tiles = divide_up(m, tiling.rows);
  if (tiles <= most) return m;

  const auto waves_of = [&](int64_t tiles_of_x) {
    return divide_up(tiles_of_x * tiling.side_by_side, tiling.at_once);
  };
  int64_t best = 0;
  int64_t fewest_waves = INT64_MAX;
  int64_t fewest_chunks = INT64_MAX;
  for (int64_t size = most; size > most / 2; --size) {
    const int64_t whole_chunks = tiles / size;
    const int64_t waves = whole_chunks * waves_of(size) + waves_of(tiles % size);
    const int64_t chunks = divide_up(tiles, size);
    // Of equally good sizes the last, the smallest, is taken: its chunks are the most equal.
    const bool is_worse = waves > fewest_waves || (waves == fewest_waves && chunks > fewest_chunks);
    if (is_worse) continue;
    best = size;
    fewest_waves = waves;
    fewest_chunks = chunks;
  }
  return best * tiling.rows;
}

// Calls launch(chunk, is_first) for each chunk of so many rows, in order. A chunk is the same
// problem with its rows of x, out and mask.
template <typename Launch>
void for_chunks(const LinearArguments& linear, int64_t rows, const Launch& launch) {
  const int64_t element_size = linear.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t mask_row = (linear.n + 7) / 8;  // bytes
  for (int64_t begin = 0; begin < linear.m; begin += rows) {
    LinearArguments chunk = with_rows(linear, std::min(rows, linear.m - begin));
    chunk.x = static_cast<const char*>(linear.x) + begin * linear.x_stride * element_size;
    chunk.out = static_cast<char*>(linear.out) + begin * linear.n * element_size;
    if (linear.mask != nullptr) chunk.mask = linear.mask + begin * mask_row;
    launch(chunk, begin == 0);
  }
}

}  // namespace kernels
