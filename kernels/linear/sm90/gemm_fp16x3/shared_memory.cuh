// The shared memory of a block of the fp16x3 GEMM (kernel.cuh). Mainloop and epilogue use it.

#pragma once

#include <cstdint>

#include "linear/sm90/gemm_fp16x3/arguments.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_fp16x3 {

// A tile's exponents and biases, in shared memory. The loader warp loads them while the consumers
// multiply the tile.
struct EpilogueInputs {
  int x_exponent[Config::kLargestRows];
  struct alignas(8) Column {
    int exponent;
    float bias;
  } columns[Config::kBlockColumns];
  int first_row;     // of the tile
  int end_row;       // one past the tile's last row that exists
  int first_column;  // of the block
  int tile_is_fast;  // 1 if the tile may take the fast epilogue
};

// A block's shared memory.
struct SharedMemory {
  uint8_t x[Config::kStages][Config::kXBytes];
  uint8_t weight[Config::kStages][Config::kWeightBytes];
  // A subtile of each thread's sums, in the general epilogue.
  float4 staging[BlockConfig::kConsumerWarpgroups][Config::kSubtileRowBlocks]
                [BlockConfig::kWarpgroupThreads];
  EpilogueInputs epilogue_inputs[2];  // of this work tile, and of the next
  Barriers<Config::kStages> barriers;
};
static_assert(sizeof(SharedMemory) <= 227 * 1024, "a block has no more shared memory");
static_assert(Config::kXBytes % 1024 == 0 && Config::kWeightBytes % 1024 == 0,
              "the 128-byte swizzle repeats every 1024 bytes, so k-tiles begin at multiples of it");

}  // namespace kernels::sm90::gemm_fp16x3
