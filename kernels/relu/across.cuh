// ReLU's backward where the gradient or the mask has its neighbours across: along another dimension
// than the result's, which is dimension 0. A block makes a tile of both dimensions. What lies
// across is read along the other dimension, and turned in shared memory.
//
//   grad_output, mask of any strides; grad_input [n] dense

#pragma once

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "relu/dense.cuh"
#include "relu/strided.cuh"

namespace kernels::elementwise {

// A tile has 2^log_size[0] elements of dimension 0 by 2^log_size[1] of another.
struct Tiles {
  static constexpr int kLogElements = 12, kElements = 1 << kLogElements;
  static constexpr int kMostLog = 8;  // of a side: a block's threads
  static_assert(1 << kMostLog == kBlock, "threads go along a side in whole rounds");
  int across = 0;     // the other dimension, or 0 where there are no tiles
  bool is_across[2];  // gradient, and mask
  int log_size[2];    // of a tile
  uint32_t size[2];   // of the dimensions
  uint32_t count[2];  // of tiles, along them
  uint32_t between;   // elements of the dimensions between the two

  // The tiles that touch the fewest sectors of memory for an element, if those are less than half
  // of what vectors along dimension 0 touch.
  template <typename Bits>
  static Tiles choose(const Layout& layout) {
    // Sectors of 32 bytes for each of `count` elements, `stride` apart. A mask's count a third:
    // most of it stays in L2.
    const auto sectors = [](int operand, int64_t stride, double count) {
      const double bytes = operand == 0 ? sizeof(Bits) : 0.125;
      return std::min(1.0, stride * bytes / 32 + 1 / count) * (operand == 0 ? 1 : 0.33);
    };
    Tiles best;
    double row = std::min<double>(layout.size[0], kElements), least = sectors(0, 1, row) / 2;
    for (int k = 0; k < 2; ++k) least += sectors(k, layout.stride[k][0], row) / 2;
    int64_t between = 1;
    for (int d = 1; d < layout.ndim; between *= layout.size[d++]) {
      for (int log = kLogElements - kMostLog; log <= kMostLog; ++log) {
        Tiles tiles;
        tiles.across = d, tiles.between = static_cast<uint32_t>(between);
        double filled[2];  // elements of a tile's sides, in the mean
        for (int side = 0; side < 2; ++side) {
          tiles.log_size[side] = side == 0 ? log : kLogElements - log;
          tiles.size[side] = static_cast<uint32_t>(layout.size[side * d]);
          tiles.count[side] = blocks_of(tiles.size[side], 1 << tiles.log_size[side]);
          filled[side] = static_cast<double>(tiles.size[side]) / tiles.count[side];
        }
        double sum = sectors(0, 1, filled[0]);  // of the result
        for (int k = 0; k < 2; ++k) {
          const double along = sectors(k, layout.stride[k][0], filled[0]);
          const double across = sectors(k, layout.stride[k][d], filled[1]);
          tiles.is_across[k] = across < along;
          sum += std::min(across, along);
        }
        sum *= kElements / (filled[0] * filled[1]);
        if (sum < least) least = sum, best = tiles;
      }
    }
    return best;
  }

  int64_t blocks(int64_t n) const { return n / size[0] / size[1] * count[0] * count[1]; }
};

template <typename Bits>
__global__ void __launch_bounds__(kBlock)
    relu_backward_tiles_kernel(const Bits* grad_output, const uint8_t* mask, int64_t first_bit,
                               Bits* grad_input, const __grid_constant__ Tiles tiles,
                               const __grid_constant__ Walk walk) {
  // In shared memory, a tile's rows along dimension 0 are one longer, against bank conflicts.
  constexpr int kRounds = 8, kBatches = Tiles::kElements / kBlock / kRounds;
  constexpr int kSlots = Tiles::kElements + (1 << Tiles::kMostLog);
  __shared__ Bits gradients[kSlots];
  __shared__ bool kept[kSlots];
  uint32_t block = blockIdx.x, first[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    first[side] = block % tiles.count[side] << tiles.log_size[side];
    block /= tiles.count[side];
  }
  const uint32_t between = block % tiles.between, outer = block / tiles.between;
  const uint32_t rows = tiles.size[0] * tiles.between;  // from an element to the next across
  const uint32_t start =
      first[0] + tiles.size[0] * between + rows * (first[1] + tiles.size[1] * outer);
  const Place<2> place(start, walk);

  // A batch of a thread's elements: neighbouring threads have neighbours along one side, and the
  // rounds go along the other. body(round, place in shared memory, index in the result, offsets in
  // the operands).
  const auto for_batch = [&](int side, int batch, const auto& body) {
    const int dimension[2] = {0, tiles.across};
    const int fast = dimension[side], slow = dimension[1 - side], log = tiles.log_size[side];
    const uint32_t apart = kBlock >> log;
    uint32_t at[2];  // in the tile, along both sides
    at[side] = threadIdx.x % (1 << log);
    at[1 - side] = (threadIdx.x >> log) + batch * kRounds * apart;
    int64_t offset[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      offset[k] =
          place.offset[k] + at[side] * walk.stride[k][fast] + at[1 - side] * walk.stride[k][slow];
    }
    if (first[side] + at[side] >= tiles.size[side]) return;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (first[1 - side] + at[1 - side] >= tiles.size[1 - side]) return;
      body(r, (at[1] << tiles.log_size[0]) + at[1] + at[0], start + at[0] + rows * at[1], offset);
      at[1 - side] += apart;
#pragma unroll
      for (int k = 0; k < 2; ++k) offset[k] += apart * walk.stride[k][slow];
    }
  };
  Bits gradient[kRounds];
  uint8_t byte[kRounds], bit[kRounds];
  // Loads of what has its neighbours along this side.
  const auto load = [&](int side, int batch) {
    for_batch(side, batch, [&](int r, int, uint32_t, const int64_t (&offset)[2]) {
      if (tiles.is_across[0] == side) gradient[r] = grad_output[offset[0]];
      const uint64_t of_mask = first_bit + offset[1];
      if (tiles.is_across[1] == side) byte[r] = mask[of_mask / 8], bit[r] = of_mask % 8;
    });
  };
  // stage what lies across
#pragma unroll 1
  for (int batch = 0; batch < kBatches; ++batch) {
    load(1, batch);
    for_batch(1, batch, [&](int r, int slot, uint32_t, const auto&) {
      if (tiles.is_across[0]) gradients[slot] = gradient[r];
      if (tiles.is_across[1]) kept[slot] = byte[r] >> bit[r] & 1;
    });
  }
  __syncthreads();

  // load what lies along, select, store
#pragma unroll 1
  for (int batch = 0; batch < kBatches; ++batch) {
    load(0, batch);
    for_batch(0, batch, [&](int r, int slot, uint32_t i, const auto&) {
      const bool keeps = tiles.is_across[1] ? kept[slot] : byte[r] >> bit[r] & 1;
      const Bits passed = tiles.is_across[0] ? gradients[slot] : gradient[r];
      grad_input[i] = keeps ? passed : Bits{0};
    });
  }
}

}  // namespace kernels::elementwise
