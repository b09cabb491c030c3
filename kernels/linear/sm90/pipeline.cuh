// The shape of a block and the shared-memory pipeline that both Hopper GEMM kernels have in common
// (gemm_fp16x3.cuh and gemm_single.cuh).
//
// The pipeline is a ring of stages in shared memory. A stage holds one k-tile of the weight and one
// k-tile of x. Each stage has two mbarriers, `full` and `empty`:
//
//   producer warp                              consumer warpgroups
//   waits for `empty` of the stage             wait for `full` of the stage
//   starts TMA copies into the stage           read the stage
//   TMA arrives at `full` when all bytes       each warp arrives at `empty`, in both blocks of the
//   have come                                  cluster
//
// A consumer warp arrives in both blocks because each block loads half of the x tile and multicasts
// it to both: neither block may overwrite a stage that the other one still reads.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"

namespace kernels::sm90 {

// The shape of a block and of a cluster, in both GEMM kernels.
struct BlockConfig {
  // Warpgroups of 128 threads that multiply. One more warpgroup holds the producer warp.
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kConsumerWarps = 4 * kConsumerWarpgroups;
  static constexpr int kConsumerThreads = 128 * kConsumerWarpgroups;
  static constexpr int kThreads = kConsumerThreads + 128;
  // Registers of a thread at launch: 65536 registers of a multiprocessor / 384 threads, rounded
  // down to a multiple of 8. `setmaxnreg` then moves registers from the producer to the consumers.
  static constexpr int kRegistersAtLaunch = 168;
  // Blocks of a cluster. They compute neighbouring tiles along N, and share their tile of x.
  static constexpr int kClusterSize = 2;
  // The blocks that a multicast copy writes to: one bit a block.
  static constexpr int kBothBlocks = (1 << kClusterSize) - 1;

  // Whether a block has enough registers for so many in each thread of the producer's warpgroup and
  // of the consumers'.
  static constexpr bool fits(int producer_registers, int consumer_registers) {
    return producer_registers + kConsumerWarpgroups * consumer_registers <=
           kRegistersAtLaunch * (kConsumerWarpgroups + 1);
  }
};

// Compilers for older GPUs do not know clusters. The kernels are empty there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define KERNELS_CLUSTER
#else
#define KERNELS_CLUSTER __cluster_dims__(::kernels::sm90::BlockConfig::kClusterSize, 1, 1)
#endif

// When a tile of float32 may take the fast epilogue.
struct FastEpilogueConfig {
  // The exponents of all rows of x and weight in the tile are within -40 .. 40. The fast epilogue
  // multiplies three powers of two: 2^-exponent of the row of x, 2^-exponent of the row of weight,
  // and 1 / divisor, which is at least 2^-32. Their product is then at least 2^-112 and at most
  // 2^80: a normal float32, so that the multiplications are exact.
  static constexpr int kMaxExponent = 40;
};

// A position in the ring of stages: CUTLASS's PipelineState. Producer and consumers each keep their
// own, and advance it once a k-tile.
template <int kStages>
struct PipelineState {
  int stage = 0;
  // An mbarrier's phases alternate between parity 0 and 1. The consumer waits for the phase of this
  // parity of `full`; the producer for the opposite parity of `empty`, which is complete at once in
  // its first turn around the ring.
  uint32_t parity = 0;

  __device__ void advance() {
    ++stage;
    if (stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  // The state one k-tile later.
  __device__ PipelineState next() const {
    PipelineState later = *this;
    later.advance();
    return later;
  }

  // The number of the stage one k-tile earlier.
  __device__ int previous() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

// The mbarriers of all stages, 8 bytes each, in shared memory.
template <int kStages>
struct Barriers {
  uint64_t full[kStages];   // completes when all bytes of the stage have arrived
  uint64_t empty[kStages];  // completes when the consumer warps of both blocks have read the stage
};

// Initialises the barriers at the shared-memory addresses `full` and `empty`, then waits until the
// barriers of both blocks are initialised. All threads of the cluster call it.
template <int kStages>
__device__ void init_barriers(uint32_t full, uint32_t empty) {
  constexpr int kProducers = 1;
  constexpr int kReaders = BlockConfig::kConsumerWarps * BlockConfig::kClusterSize;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(full + 8 * s, kProducers);
      ptx::mbarrier_init(empty + 8 * s, kReaders);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();
}

// Tells the producers of both blocks that this warp has read a stage. `empty` is the address of the
// stage's barrier in this block. Lane i arrives at the barrier of block i. All lanes call it.
__device__ inline void release_stage(uint32_t empty) {
  const int lane = threadIdx.x % 32;
  if (lane < BlockConfig::kClusterSize) {
    ptx::mbarrier_arrive_mapped(ptx::map_shared(empty, lane));
  }
}

// The epilogue works on a subtile at a time: kBlocks column blocks, of 8 rows of x each. A thread's
// accumulators `sums` hold four values of each column block (wgmma's layout):
//
//   sums   | block 0: 4 values | block 1: 4 values | block 2: 4 values | ...
//          |<----- subtile 0, if kBlocks = 2 ----->|<----- subtile 1 ------
//
// This function copies one subtile, known at compile time or in an unrolled loop, from registers to
// shared memory: block j goes to slot[j * kPitch], a float4.
template <int kBlocks, int kPitch, int kSums>
__device__ void copy_subtile(float4* slot, const float (&sums)[kSums], int subtile) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const float* const sum = sums + 4 * (subtile * kBlocks + j);
    slot[j * kPitch] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
}

// The same for a subtile that is known only at run time, kFirst <= subtile < kEnd. Registers cannot
// be indexed at run time, so this function finds the number by bisection, and each leaf copies
// fixed registers. The caller's loop over subtiles need not be unrolled then. Unrolled, its body
// would be so much code that instructions arrive late from memory whenever L2 has evicted them.
template <int kFirst, int kEnd, int kBlocks, int kPitch, int kSums>
__device__ void copy_any_subtile(float4* slot, const float (&sums)[kSums], int subtile) {
  if constexpr (kEnd - kFirst > 1) {
    constexpr int kMiddle = (kFirst + kEnd) / 2;
    if (subtile < kMiddle) {
      copy_any_subtile<kFirst, kMiddle, kBlocks, kPitch>(slot, sums, subtile);
    } else {
      copy_any_subtile<kMiddle, kEnd, kBlocks, kPitch>(slot, sums, subtile);
    }
  } else {
    copy_subtile<kBlocks, kPitch>(slot, sums, kFirst);
  }
}

}  // namespace kernels::sm90
