// The inputs of gemm_one_product_kernel's epilogue (epilogue.cuh) besides the accumulators. Each
// thread of a consumer warpgroup loads a part of them to registers before the mainloop, which hides
// the latency, and stores it to shared memory at the mainloop's end. Their contents:
//
//   mode          epilogue           bias[n]           x_unscale[m]          weight_exponent[n]
//
//   HalfMode      store_fast         bias / divisor    -                     -
//   HalfMode      store_general      bias              -                     -
//   ConvertMode   either             bias              2^-(exponent of m)    exponent of n
//   RedoMode      store_general      bias              1                     0
//
// For rows and columns that do not exist, the bias and the exponents are 0.

#pragma once

#include <cstdint>
#include <type_traits>

#include "common/ptx/barrier.cuh"
#include "linear/epilogue.cuh"
#include "linear/sm90/gemm_one_product/arguments.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90::gemm_one_product {

// The inputs in shared memory; m and n count from the first ones of the warpgroup's tile. The
// weight has exponents instead of powers of two, because ConvertMode has no shared memory left for
// as many floats. In half types, the two last arrays have one element, which is not used.
template <typename Out>
struct alignas(16) EpilogueInputs {
  static constexpr bool kIsScaled = std::is_same_v<Out, float>;
  float bias[OneProductConfig::kWarpgroupWeightRows];
  float x_unscale[kIsScaled ? OneProductConfig::kTileRows : 1];
  int8_t weight_exponent[kIsScaled ? OneProductConfig::kWarpgroupWeightRows : 1];
};

// The inputs that one thread loads: the bias and the exponent of one n (in the first 64 threads),
// and the exponents of two m (in half types, of none).
template <typename Mode>
struct PrefetchedInputs {
  using Out = typename Mode::Out;
  static constexpr bool kIsScaled = EpilogueInputs<Out>::kIsScaled;
  static constexpr int kXRowsPerThread =
      kIsScaled ? OneProductConfig::kTileRows / BlockConfig::kWarpgroupThreads : 0;
  float bias = 0;
  int weight_exponent = 0;
  // The exponents of m = thread + 128 i, and one element more, because C++ has no empty arrays.
  int x_exponent[kXRowsPerThread + 1] = {};
  bool allows_fast_epilogue;  // whether the call and the thread's exponents do

  __device__ PrefetchedInputs(const OneProductArguments<Mode>& args,
                              const WarpgroupTile& warpgroup_tile)
      : allows_fast_epilogue(args.epilogue.allows_fast_epilogue) {
    const Epilogue<Out>& epilogue = args.epilogue;
    const int thread = threadIdx.x % BlockConfig::kWarpgroupThreads;
    const int n = warpgroup_tile.first_n + thread;
    if (thread < OneProductConfig::kWarpgroupWeightRows && n < epilogue.n) {
      if (epilogue.bias != nullptr) bias = static_cast<float>(__ldg(epilogue.bias + n));
      if (Mode::kConvertsWeight) weight_exponent = __ldg(args.conversion.weight.exponent + n);
    }
    allows_fast_epilogue &= abs(weight_exponent) <= FastEpilogueConfig::kMaxExponent;
#pragma unroll
    for (int i = 0; i < kXRowsPerThread; ++i) {
      const int m = warpgroup_tile.first_m + i * BlockConfig::kWarpgroupThreads + thread;
      if (Mode::kConvertsWeight && m < epilogue.m) x_exponent[i] = __ldg(args.x_exponent + m);
      allows_fast_epilogue &= abs(x_exponent[i]) <= FastEpilogueConfig::kMaxExponent;
    }
  }

  // Returns whether all threads of the warpgroup allow the fast epilogue. All of them call it,
  // after they have read the previous tile's inputs in shared memory, which store_and_sync may
  // overwrite after this barrier.
  __device__ bool sync_and_vote_fast(int barrier) const {
    return ptx::barrier_and(barrier, BlockConfig::kWarpgroupThreads, allows_fast_epilogue);
  }

  // Stores the thread's inputs. All threads of the warpgroup call it, after sync_and_vote_fast,
  // and it returns when all of them are stored.
  __device__ void store_and_sync(const Epilogue<Out>& epilogue, bool tile_allows_fast_epilogue,
                                 EpilogueInputs<Out>& inputs, int barrier) const {
    const int thread = threadIdx.x % BlockConfig::kWarpgroupThreads;
    if (thread < OneProductConfig::kWarpgroupWeightRows) {
      // Half types' fast epilogue divides the product before it adds the bias.
      const bool divides_first = tile_allows_fast_epilogue && !kIsScaled;
      inputs.bias[thread] = bias * (divides_first ? epilogue.divisor.inverse_power : 1.0f);
      if constexpr (kIsScaled) {
        inputs.weight_exponent[thread] = static_cast<int8_t>(weight_exponent);
      }
    }
#pragma unroll
    for (int i = 0; i < kXRowsPerThread; ++i) {
      inputs.x_unscale[i * BlockConfig::kWarpgroupThreads + thread] =
          split::power_of_two(-x_exponent[i]);
    }
    ptx::barrier_sync(barrier, BlockConfig::kWarpgroupThreads);
  }
};

}  // namespace kernels::sm90::gemm_one_product
