// For both Hopper products: the pipeline's stages and barriers, and the staging of results.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"

namespace kernels::sm90 {

constexpr int kConsumers = 2;  // warpgroups that multiply
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kClusterSize = 2;
constexpr int kBothBlocks = (1 << kClusterSize) - 1;  // of a cluster, a bit each
// Compilers for older GPUs, for which the kernels are empty, know no clusters.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define KERNELS_CLUSTER
#else
#define KERNELS_CLUSTER __cluster_dims__(kClusterSize, 1, 1)
#endif
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 168 * (kConsumers + 1),
              "a block is launched with 168 registers a thread");
// Scales of such exponents can be multiplied with each other and with a divisor's, down to 2^-32.
[[maybe_unused]] constexpr int kMaxFastExponent = 40;

// The next stage of a pipeline, and the parity of its barrier's phase.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ Ring next() const {
    Ring other = *this;
    other.advance();
    return other;
  }
  __device__ int previous() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

// Of each stage: its bytes are there; the consumer warps of both blocks have read it.
template <int kStages>
struct Barriers {
  uint64_t full[kStages], empty[kStages];
};

template <int kStages>
__device__ void init_barriers(uint32_t full, uint32_t empty) {
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, 4 * kConsumers * kClusterSize);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();
}

// Stages a slab of a thread's sums, kSlabBlocks blocks of 8 columns, in slots kPitch apart.
template <int kSlabBlocks, int kPitch, int kSums>
__device__ void stage_blocks(float4* slot, const float (&sums)[kSums], int slab) {
#pragma unroll
  for (int j = 0; j < kSlabBlocks; ++j) {
    const float* const sum = sums + 4 * (slab * kSlabBlocks + j);
    slot[j * kPitch] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
}

// The same for a slab among kFirst to kLast - 1 that is known at run time: a loop over registers
// would have to be unrolled, and so much code is late from memory whenever L2 has lost it.
template <int kFirst, int kLast, int kSlabBlocks, int kPitch, int kSums>
__device__ void stage_slab(float4* slot, const float (&sums)[kSums], int slab) {
  if constexpr (kLast - kFirst > 1) {
    constexpr int kMiddle = (kFirst + kLast) / 2;
    if (slab < kMiddle) {
      stage_slab<kFirst, kMiddle, kSlabBlocks, kPitch>(slot, sums, slab);
    } else {
      stage_slab<kMiddle, kLast, kSlabBlocks, kPitch>(slot, sums, slab);
    }
  } else {
    stage_blocks<kSlabBlocks, kPitch>(slot, sums, kFirst);
  }
}

// This warp has read the barrier's stage: for the producers of both blocks.
__device__ inline void release(uint32_t empty) {
  const int lane = threadIdx.x % 32;
  if (lane < kClusterSize) ptx::mbarrier_arrive_mapped(ptx::map_shared(empty, lane));
}

}  // namespace kernels::sm90
