// ReLU's backward where the gradient has its neighbours across: along other dimensions than the
// result, whose neighbours are along dimension 0 and, where that is short, along the next ones. A
// block makes a tile: it reads the gradient along one side, turns it in shared memory, and writes
// along the other.
//
//   grad_output of any strides; mask and grad_input [n] dense, in one order

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "common/launch.cuh"
#include "relu/dense.cuh"
#include "relu/strided.cuh"

namespace kernels::elementwise {

// A tile is 2^log_size[0] neighbours in the result by 2^log_size[1] in the gradient. Its sides are
// made of the walk's first dimensions: those of side 0, then those of side 1.
struct Tiles {
  static constexpr int kLogElements = 12, kElements = 1 << kLogElements;
  static constexpr int kMostLog = 8;  // of a side: a block's threads
  static_assert(1 << kMostLog == kBlock, "threads go along a side in whole rounds");
  static constexpr int kMostLines = (1 << kMostLog) + (kElements >> kMostLog);  // of both sides
  int dims[2] = {0, 0};       // of the sides; 0 where there are no tiles
  int log_size[2];            // of a tile
  uint32_t size[2];           // of a side's dimensions together
  uint32_t count[2];          // of tiles, along them
  uint32_t stride[kMaxDims];  // in the result, of the walk's dimensions

  int64_t blocks(int64_t n) const { return n / size[0] / size[1] * count[0] * count[1]; }
};

// Tiles, and the layout whose dimensions are in their order.
struct TiledLayout {
  Tiles tiles;
  Layout layout;

  TiledLayout() = default;
  // Side 0 is the first `inner` dimensions of a layout, side 1 those of `side`.
  TiledLayout(const Layout& from, int inner, const int* side, int across, int log) {
    uint32_t dense = 1, stride[kMaxDims];
    for (int d = 0; d < from.ndim; dense *= from.size[d++]) stride[d] = dense;
    const auto add = [&](int d) {
      const int to = layout.ndim++;
      layout.size[to] = from.size[d];
      layout.stride[to] = from.stride[d];
      tiles.stride[to] = stride[d];
    };
    for (int d = 0; d < inner; ++d) add(d);
    for (int i = 0; i < across; ++i) add(side[i]);
    for (int d = inner; d < from.ndim; ++d) {
      if (std::count(side, side + across, d) == 0) add(d);
    }
    tiles.dims[0] = inner, tiles.dims[1] = across;
    tiles.log_size[0] = log, tiles.log_size[1] = Tiles::kLogElements - log;
    for (int s = 0, d = 0; s < 2; ++s) {
      tiles.size[s] = 1;
      for (const int end = d + tiles.dims[s]; d < end; ++d) tiles.size[s] *= layout.size[d];
      tiles.count[s] = blocks_of(tiles.size[s], 1 << tiles.log_size[s]);
    }
  }

  // The tiles that touch the fewest sectors of memory for an element, if those are less than half
  // of what vectors along the result touch.
  template <typename Bits>
  static TiledLayout choose(const Layout& layout) {
    const int64_t *const size = layout.size, *const stride = layout.stride;
    // Sectors of 32 bytes for each of `count` elements, `stride` apart.
    const auto sectors = [](int64_t stride, double count) {
      return std::min(1.0, stride * (sizeof(Bits) / 32.0) + 1 / count);
    };
    // A block's vectors share sectors along a dimension that comes soon enough, and that a walk
    // takes by a step. Where the dimensions before have 52 elements, vectors are as fast as tiles;
    // where they have 167, tiles take a quarter less time (float16, H200).
    constexpr int kWindow = 512;
    double by_vectors = 1;
    int64_t before = 1;
    for (int d = 0; d < std::min(layout.ndim, Walk::kSteps); before *= size[d++]) {
      const double count = static_cast<double>(std::min(size[d], kWindow / before));
      if (count >= 1) by_vectors = std::min(by_vectors, sectors(stride[d], count));
    }
    // The elements of a tile's side of 2^log in the mean.
    const auto filled = [](int64_t size, int log) {
      return static_cast<double>(size) / ((size + (1 << log) - 1) >> log);
    };
    int order[kMaxDims];  // of the dimensions in the gradient
    std::iota(order, order + layout.ndim, 0);
    std::stable_sort(order, order + layout.ndim,
                     [&](int a, int b) { return stride[a] < stride[b]; });
    double least = (sectors(1, Tiles::kElements) + by_vectors) / 2;
    struct {
      int inner = 0, across, log, side[kMaxDims];
    } best;
    int64_t along = 1;
    for (int inner = 1; inner < layout.ndim; ++inner) {
      along *= size[inner - 1];
      // The other dimensions that are one run in the gradient, the first, the first two, and so on.
      int side[kMaxDims], across = 0;
      int64_t run = 1;
      for (int i = 0; i < layout.ndim; ++i) {
        const int d = order[i];
        if (d < inner) continue;
        if (across > 0 && stride[d] != run * stride[side[0]]) break;
        side[across++] = d, run *= size[d];
        for (int log = Tiles::kLogElements - Tiles::kMostLog; log <= Tiles::kMostLog; ++log) {
          const double of_result = filled(along, log),
                       of_gradient = filled(run, Tiles::kLogElements - log);
          const double needed = (sectors(1, of_result) + sectors(stride[side[0]], of_gradient)) *
                                Tiles::kElements / (of_result * of_gradient);
          if (needed >= least) continue;
          least = needed;
          best.inner = inner, best.across = across, best.log = log;
          std::copy(side, side + across, best.side);
        }
      }
    }
    if (best.inner == 0) return {};
    return {layout, best.inner, best.side, best.across, best.log};
  }
};

template <typename Bits>
__global__ void __launch_bounds__(kBlock)
    relu_backward_tiles_kernel(const Bits* grad_output, const uint8_t* mask, uint64_t first_bit,
                               Bits* grad_input, const __grid_constant__ Tiles tiles,
                               const __grid_constant__ Walk walk) {
  // In shared memory, a tile's rows along side 0 are one longer, against bank conflicts.
  constexpr int kRounds = 8, kBatches = Tiles::kElements / kBlock / kRounds;
  __shared__ Bits gradients[Tiles::kElements + (1 << Tiles::kMostLog)];
  // Where the elements along side 0, and then those along side 1, are in the gradient, and in the
  // result.
  __shared__ int64_t offset[Tiles::kMostLines];
  __shared__ uint32_t index[Tiles::kMostLines];

  // The coordinates of `i` in `dims` dimensions from d on, added up.
  const auto add_place = [&](int d, int dims, uint32_t i, int64_t* offset, uint32_t* index) {
    for (const int end = d + dims; d < end; ++d) {
      const uint32_t coordinate = take_coordinate(&i, d, walk);
      *offset += coordinate * walk.stride[d];
      *index += coordinate * tiles.stride[d];
    }
  };
  uint32_t block = blockIdx.x, first[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    first[side] = block % tiles.count[side] << tiles.log_size[side];
    block /= tiles.count[side];
  }
  const int lines = 1 << tiles.log_size[0], all_lines = lines + (1 << tiles.log_size[1]);
  for (int line = threadIdx.x; line < all_lines; line += kBlock) {
    int64_t own_offset = 0;
    uint32_t own_index = 0;
    const int side = line >= lines, before = tiles.dims[0];
    add_place(side * before, tiles.dims[side], first[side] + line - side * lines, &own_offset,
              &own_index);
    if (side == 0) {  // the tile's own place
      const int sides = before + tiles.dims[1];
      add_place(sides, walk.ndim - sides, block, &own_offset, &own_index);
    }
    offset[line] = own_offset, index[line] = own_index;
  }
  __syncthreads();

  // A batch of a thread's elements: neighbouring threads have neighbours along one side, and the
  // rounds go along the other. body(round, the element's line of each side).
  const auto for_batch = [&](int side, int batch, const auto& body) {
    const int log = tiles.log_size[side];
    uint32_t at[2];
    at[side] = threadIdx.x % (1 << log);
    at[1 - side] = (threadIdx.x >> log) + batch * kRounds * (kBlock >> log);
    if (first[side] + at[side] >= tiles.size[side]) return;
#pragma unroll
    for (int r = 0; r < kRounds; ++r, at[1 - side] += kBlock >> log) {
      if (first[1 - side] + at[1 - side] >= tiles.size[1 - side]) return;
      body(r, at[0], at[1]);
    }
  };
  const auto slot = [&](uint32_t along, uint32_t across) { return across * (lines + 1) + along; };
  Bits gradient[kRounds];
#pragma unroll 1
  for (int batch = 0; batch < kBatches; ++batch) {
    for_batch(1, batch, [&](int r, uint32_t along, uint32_t across) {
      gradient[r] = grad_output[offset[along] + offset[lines + across]];
    });
    for_batch(1, batch, [&](int r, uint32_t along, uint32_t across) {
      gradients[slot(along, across)] = gradient[r];
    });
  }
  __syncthreads();

  uint32_t place[kRounds];
  uint8_t byte[kRounds];
#pragma unroll 1
  for (int batch = 0; batch < kBatches; ++batch) {
    for_batch(0, batch, [&](int r, uint32_t along, uint32_t across) {
      place[r] = index[along] + index[lines + across];
      byte[r] = mask[(first_bit + place[r]) / 8];
    });
    for_batch(0, batch, [&](int r, uint32_t along, uint32_t across) {
      const bool keeps = byte[r] >> (first_bit + place[r]) % 8 & 1;
      grad_input[place[r]] = keeps ? gradients[slot(along, across)] : Bits{0};
    });
  }
}

}  // namespace kernels::elementwise
