// The shared memory of a block of gemm_one_product_kernel (kernel.cuh).

#pragma once

#include <cstdint>
#include <type_traits>

#include "linear/sm90/gemm_one_product/accumulators.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/gemm_one_product/converter.cuh"
#include "linear/sm90/gemm_one_product/epilogue_inputs.cuh"
#include "linear/sm90/pipeline.cuh"

namespace kernels::sm90::gemm_one_product {

// The mask of StagedRows: [row][warp], a word with a bit for each of the warp's 16 columns.
using StagedMask = uint16_t[OneProductConfig::kStagedRows][OneProductConfig::kWarpgroupWeightRows /
                                                           OneProductConfig::kWarpWeightRows];

// 64 rows of a warpgroup's results in a half type, T, each with 64 columns, and their mask.
template <typename T>
struct StagedRows {
  uint8_t results[OneProductConfig::kStagedRows]
                 [OneProductConfig::kWarpgroupWeightRows * sizeof(T)];
  StagedMask mask;
};

// Boxes of a gradient: [warp][buffer][column][bytes of 64 rows of x].
template <typename T>
using GradientBoxes =
    uint8_t[4][OneProductConfig::kGradientBuffers][OneProductConfig::kWarpWeightRows]
           [OneProductConfig::kGradientBoxRows * sizeof(T)];

// The shared memory through which a consumer warpgroup stores a tile. TMA's swizzle requires that
// boxes are aligned to 1024 bytes.
template <typename Out>
union alignas(1024) Staging {
  StagedAccumulators accumulators;    // store_general
  StagedRows<Out> rows[2];            // store_fast of half types; used in turn
  GradientBoxes<Out> gradient_boxes;  // PackedGradient
};

template <>
union alignas(16) Staging<float> {
  StagedAccumulators accumulators;
};

// A consumer warpgroup's part of shared memory in the epilogue, and the named barrier of its
// threads.
template <typename Out>
struct EpilogueMemory {
  EpilogueInputs<Out>& inputs;
  Staging<Out>& staging;
  int barrier;
};

using OneProductPipeline = Pipeline<OneProductConfig::kStages>;

template <typename Mode>
struct OneProductSharedMemory {
  uint8_t x[OneProductConfig::kStages][OneProductConfig::kXBytes];
  uint8_t weight[OneProductConfig::kStages][OneProductConfig::kWeightBytes];
  Staging<typename Mode::Out> staging[BlockConfig::kConsumerWarpgroups];
  EpilogueInputs<typename Mode::Out> epilogue_inputs[BlockConfig::kConsumerWarpgroups];
  // Other modes have no converters, and an int in their place.
  std::conditional_t<Mode::kConvertsWeight, ConverterMemory, int> converters;
  OneProductPipeline::Barriers barriers;
  int producer_k_tile;  // the latest k-tile that the producer has begun; see converter.cuh
};

}  // namespace kernels::sm90::gemm_one_product
