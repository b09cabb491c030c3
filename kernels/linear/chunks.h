// Products make the rows of x in chunks, so that the workspace has a limit, whatever M is.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "launchers.h"

namespace kernels {

// torch's allocator may add 2 MiB. Where a weight's slices leave less than kLeastForRows, x gets so
// much past the limit: small chunks would not fill a GPU.
constexpr int64_t kMostWorkspace = int64_t{254} << 20, kLeastForRows = int64_t{64} << 20;

// The tiles of a kernel's result: rows of one, tiles side by side along N, and tiles of a wave; 1
// where no multiprocessor waits for the tiles of the last wave.
struct Tiling {
  int64_t rows, side_by_side, at_once;
};

// The slices of a workspace, each aligned to 256 bytes, or without memory their size so far.
class WorkspaceSlices {
 public:
  explicit WorkspaceSlices(void* workspace) : start_(reinterpret_cast<uintptr_t>(workspace)) {}

  template <typename T>
  T* add(int64_t count) {
    T* const slice = reinterpret_cast<T*>(start_ + bytes_);
    bytes_ += (count * sizeof(T) + 255) / 256 * 256;
    return slice;
  }
  size_t bytes() const { return bytes_; }

 private:
  uintptr_t start_;
  size_t bytes_ = 0;
};

inline LinearArguments with_rows(LinearArguments linear, int64_t m) {
  linear.m = m;
  return linear;
}

// Rows of a chunk, whose workspace has workspace_of(rows) bytes: as many waves of tiles together
// as without chunks, as far as the limit lets them be; then few chunks, then even ones.
template <typename WorkspaceOf>
int64_t rows_of_chunk(int64_t m, const Tiling& tiling, const WorkspaceOf& workspace_of) {
  if (static_cast<int64_t>(workspace_of(m)) <= kMostWorkspace) return m;
  const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  constexpr int64_t kMany = 1024;  // a workspace's slices then end at multiples of 256 bytes
  const int64_t fixed = workspace_of(0), row = divide_up(workspace_of(kMany) - fixed, kMany);
  const int64_t room = std::max(kMostWorkspace - fixed, kLeastForRows);
  const int64_t tiles = divide_up(m, tiling.rows);
  const int64_t most = std::max(room / (row * tiling.rows), int64_t{1});
  if (tiles <= most) return m;
  const auto waves_of = [&](int64_t tiles_of_x) {
    return divide_up(tiles_of_x * tiling.side_by_side, tiling.at_once);
  };
  int64_t best = 0, fewest_waves = INT64_MAX, fewest_chunks = INT64_MAX;
  for (int64_t size = most; size > most / 2; --size) {
    const int64_t waves = tiles / size * waves_of(size) + waves_of(tiles % size);
    const int64_t chunks = divide_up(tiles, size);
    if (waves > fewest_waves || (waves == fewest_waves && chunks > fewest_chunks)) continue;
    best = size, fewest_waves = waves, fewest_chunks = chunks;
  }
  return best * tiling.rows;
}

// launch(chunk, is_first) on each chunk of so many rows.
template <typename Launch>
void for_chunks(const LinearArguments& linear, int64_t rows, const Launch& launch) {
  const int64_t size = linear.dtype == DType::kFloat32 ? 4 : 2;
  for (int64_t begin = 0; begin < linear.m; begin += rows) {
    LinearArguments chunk = with_rows(linear, std::min(rows, linear.m - begin));
    chunk.x = static_cast<const char*>(linear.x) + begin * linear.x_stride * size;
    chunk.out = static_cast<char*>(linear.out) + begin * linear.n * size;
    if (linear.mask != nullptr) chunk.mask = linear.mask + begin * ((linear.n + 7) / 8);
    launch(chunk, begin == 0);
  }
}

}  // namespace kernels
