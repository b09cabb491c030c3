// The four modes of gemm_single_kernel (gemm_single.cuh), each a struct of traits; the kernel's
// shared memory; and its arguments, which launch.cu fills in.

#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/sm90/convert_weight.cuh"
#include "linear/sm90/gemm_single_config.cuh"
#include "linear/sm90/gemm_single_epilogue.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/tile_order.cuh"

namespace kernels::sm90::gemm_single {

// Computes out = relu(x weight^T + bias) / divisor in T, float16 or bfloat16. Each operand may be
// transposed: x is [M, K] or [K, M], weight [N, K] or [K, N]. The layouts are chosen at run time: a
// kernel for each layout would save 0.5% of an H100's time, but take twice as long to compile. Two
// warpgroups multiply, one warp loads, three warps are idle.
template <typename T>
struct HalfTraits {
  using Element = T;  // of the operands in shared memory
  using Out = T;
  static constexpr bool kIsHalf = true;
  static constexpr bool kIsGradient = false;
  static constexpr bool kConvertsWeight = false;
  static constexpr bool kIsRedo = false;
};

// Computes the product alone, without bias, ReLU or division, for gradients in float16 or bfloat16:
// out [N, M] = weight x^T. (launch.cu swaps the caller's operands and sizes, so this is the
// caller's [M, N].) The layouts of the operands and the work of the warps are those of HalfTraits,
// but the consumers store a tile's results by TMA while they multiply the next tile.
template <typename T>
struct GradientTraits {
  using Element = T;
  using Out = T;
  static constexpr bool kIsHalf = true;
  static constexpr bool kIsGradient = true;
  static constexpr bool kConvertsWeight = false;
  static constexpr bool kIsRedo = false;
};

// Computes out = relu(x weight^T + bias) / divisor in float32, from fp16 operands in k-tiled layout
// whose rows are scaled by powers of two. split_x.cuh has made the fp16 x. Three converter warps
// make the fp16 weight, from float32 [N, K] or [K, N], while one warp loads and two warpgroups
// multiply.
struct ConvertTraits {
  using Element = __half;
  using Out = float;
  static constexpr bool kIsHalf = false;
  static constexpr bool kIsGradient = false;
  static constexpr bool kConvertsWeight = true;
  static constexpr bool kIsRedo = false;
};

// Computes the tiles that ConvertTraits has listed, from row-major float32 x [M, K] and weight [N,
// K], which TMA rounds to TF32. TF32 has float32's range, so nothing is scaled. Two warpgroups
// multiply, one warp loads, three warps are idle.
struct RedoTraits {
  using Element = ptx::Tf32;
  using Out = float;
  static constexpr bool kIsHalf = false;
  static constexpr bool kIsGradient = false;
  static constexpr bool kConvertsWeight = false;
  static constexpr bool kIsRedo = true;
};

template <typename Traits>
struct SharedMemory {
  uint8_t x[Config::kStages][Config::kXBytes];
  uint8_t weight[Config::kStages][Config::kWeightBytes];
  Staging<typename Traits::Out> staging[BlockConfig::kConsumerWarpgroups];
  Scales<typename Traits::Out> scales[BlockConfig::kConsumerWarpgroups];
  std::conditional_t<Traits::kConvertsWeight, ConverterMemory, int> converters;
  Barriers<Config::kStages> barriers;
  int progress;  // the producer's latest k-tile; see convert_weight.cuh
};

// The tiles to be computed again, by their numbers in TileOrder. ConvertTraits writes the list, and
// RedoTraits, the next kernel, reads it.
struct RedoList {
  unsigned* count;      // 0 at first
  unsigned* is_listed;  // [all tiles], 0 at first
  int* tiles;           // [count]

  // Lists a tile once, even if several warps of both blocks add it.
  __device__ void add(int tile) const {
    const bool is_new = atomicExch(is_listed + tile, 1u) == 0;
    if (is_new) tiles[atomicAdd(count, 1u)] = tile;
  }
};

template <typename Traits>
struct Arguments {
  // Elements of K in a k-tile: 64 of 16-bit types, 32 of TF32.
  static constexpr int kK = Config::kKTileBytes / sizeof(typename Traits::Element);

  Epilogue<typename Traits::Out> epilogue;
  int k;
  TileOrder tiles;
  bool x_is_transposed;
  bool weight_is_transposed;
  RedoList redo;                // ConvertTraits and RedoTraits
  WeightConversion conversion;  // ConvertTraits
  const int* x_exponent;        // ConvertTraits: [M], rows of x were scaled by 2^x_exponent

  __device__ int k_tiles() const { return (k + kK - 1) / kK; }

  // How many tiles the kernel computes. Cluster c of C takes the indices c, c + C, c + 2 C, ...
  __device__ int tile_count() const {
    return Traits::kIsRedo ? static_cast<int>(*redo.count) : tiles.count();
  }

  // The tile with this index. ConvertTraits uses TileOrder (tile_order.cuh), in which neighbouring
  // clusters share a tile of the weight; the converters use the same order. Half types use the
  // order of the transposed problem, in which neighbouring clusters share a tile of x. That saves
  // 0.3% of an H200's time.
  __device__ Tile tile_at(int index) const {
    if constexpr (Traits::kIsRedo) {
      return tiles.find(redo.tiles[index]);
    } else if constexpr (Traits::kConvertsWeight) {
      return tiles.find(index);
    } else {
      const TileOrder transposed_order{tiles.weight_tiles, tiles.x_tiles};
      const Tile transposed = transposed_order.find(index);
      return {transposed.weight, transposed.x};
    }
  }
};

}  // namespace kernels::sm90::gemm_single
