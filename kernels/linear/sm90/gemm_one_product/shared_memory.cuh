// The shared memory of a block of gemm_one_product_kernel (kernel.cuh). Mainloop and epilogue use
// it.

#pragma once

#include <cstdint>
#include <type_traits>

#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/converter.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_one_product {

// An epilogue subtile of accumulators in shared memory: [row block][warp][lane], each lane with its
// four results of the row block. The 33rd float4 is padding: see StagedAccumulatorsReader.
using StagedAccumulators =
    float4[OneProductConfig::kSubtileRowBlocks][4][OneProductConfig::kStagedLanes];

// The mask of an epilogue subtile of half types in shared memory: [row][warp], a word with a bit
// for each of the warp's 16 columns.
using StagedMask =
    uint16_t[OneProductConfig::kHalfTypeSubtileRows][OneProductConfig::kWarpgroupColumns / 16];

// The shared memory of a consumer warpgroup's epilogue: a member for each way to store.
template <typename T>
union alignas(1024) Staging {
  StagedAccumulators accumulators;  // store_general
  // PackedGradient: [warp][buffer][column][bytes of 64 rows of x]. TMA's swizzle requires that
  // boxes are aligned to 1024 bytes.
  uint8_t gradient_boxes[4][OneProductConfig::kGradientBuffers][OneProductConfig::kWarpColumns]
                        [OneProductConfig::kGradientBoxRows * sizeof(T)];
  // store_fast of half types: two epilogue subtiles, used in turn.
  struct {
    uint8_t rows[OneProductConfig::kHalfTypeSubtileRows]
                [OneProductConfig::kWarpgroupColumns * sizeof(T)];
    StagedMask mask;
  } subtiles[2];
};

// Both epilogues of float32 stage accumulators.
template <>
union alignas(16) Staging<float> {
  StagedAccumulators accumulators;
};

// The bias and the exponents of a consumer warpgroup's results, in shared memory. Its epilogue
// reads nothing else besides the accumulators. In float32, the accumulator of row m and column n is
// 2^(x_exponent[m] + weight_exponent[n]) times too large. The weight has exponents instead of
// powers of two, because ConvertMode has no shared memory left for as many floats. Half types are
// not scaled: their arrays have one element, which is not used.
template <typename T>
struct alignas(16) EpilogueInputs {
  static constexpr bool kIsScaled = std::is_same_v<T, float>;
  float bias[OneProductConfig::kWarpgroupColumns];
  float x_unscale[kIsScaled ? OneProductConfig::kTileRows : 1];                 // 2^-x_exponent
  int8_t weight_exponent[kIsScaled ? OneProductConfig::kWarpgroupColumns : 1];  // scaled by 2^this
};

// A consumer warpgroup's part of shared memory in the epilogue, and the named barrier of its
// threads.
template <typename T>
struct EpilogueMemory {
  EpilogueInputs<T>& inputs;
  Staging<T>& staging;
  int barrier;
};

// A block's shared memory.
template <typename Mode>
struct OneProductSharedMemory {
  uint8_t x[OneProductConfig::kStages][OneProductConfig::kXBytes];
  uint8_t weight[OneProductConfig::kStages][OneProductConfig::kWeightBytes];
  Staging<typename Mode::Out> staging[BlockConfig::kConsumerWarpgroups];
  EpilogueInputs<typename Mode::Out> epilogue_inputs[BlockConfig::kConsumerWarpgroups];
  // Other modes have no converters, and an int in their place.
  std::conditional_t<Mode::kConvertsWeight, ConverterMemory, int> converters;
  Barriers<OneProductConfig::kStages> barriers;
  int producer_k_tile;  // the latest k-tile that the producer has begun; see converter.cuh
};

}  // namespace kernels::sm90::gemm_one_product
