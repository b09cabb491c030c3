// The parts that both Hopper GEMM kernels (gemm_fp16x3/kernel.cuh and gemm_one_product/kernel.cuh)
// share: the shape of a block, and the shared-memory pipeline. (Their epilogues share
// fragment.cuh and copy_subtile.cuh.)
//
// The pipeline is a ring of stages in shared memory. A stage holds one k-tile of the weight and one
// k-tile of x. Each stage has two mbarriers, `full` and `empty`:
//
//   producer warp                                     consumer warpgroups
//
//   waits for `empty` of the stage                    wait for `full` of the stage
//   arrives at `full`, with the number of bytes       read the stage
//   starts TMA copies, which count down the bytes     each warp arrives at `empty` of both blocks
//
// `full` is complete when the producer and all bytes have arrived. A consumer warp arrives in both
// blocks of the cluster because each block loads half of the x tile and multicasts it to both:
// neither block may overwrite a stage that the other one still reads.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"

namespace kernels::sm90 {

// ----- the block

struct BlockConfig {
  static constexpr int kWarpgroupThreads = 128;
  // Warpgroups that multiply. One more warpgroup has the workers: the producer warp, and warps that
  // load or convert other data.
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kConsumerWarps = 4 * kConsumerWarpgroups;
  static constexpr int kConsumerThreads = kWarpgroupThreads * kConsumerWarpgroups;
  static constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;
  // Registers of a thread at launch: 65536 registers of a multiprocessor / 384 threads, rounded
  // down to a multiple of 8. `setmaxnreg` then moves registers from the workers to the consumers.
  static constexpr int kRegistersAtLaunch = 168;
  // Blocks of a cluster. They compute a tile of out together. Each has half of the tile's rows of
  // the weight (columns of out), and both have all of its rows of x.
  static constexpr int kClusterSize = 2;
  // The blocks that a multicast copy writes to: one bit for each block.
  static constexpr int kBothBlocks = (1 << kClusterSize) - 1;

  // Returns whether the block has enough registers if each thread of the workers' warpgroup has
  // `worker_registers` and each thread of a consumer warpgroup has `consumer_registers`.
  static constexpr bool fits(int worker_registers, int consumer_registers) {
    return worker_registers + kConsumerWarpgroups * consumer_registers <=
           kRegistersAtLaunch * (kConsumerWarpgroups + 1);
  }
};

// Code for GPUs before Hopper may not contain __cluster_dims__. The kernels are empty there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define KERNELS_CLUSTER
#else
#define KERNELS_CLUSTER __cluster_dims__(::kernels::sm90::BlockConfig::kClusterSize, 1, 1)
#endif

// ----- the pipeline

// A position in the ring: a stage, and the turn around the ring, as in CUTLASS. The producer and
// each consumer have one of their own, and advance it once a k-tile.
template <int kStages>
struct PipelineState {
  int index = 0;  // the stage's place in the ring
  // The turn around the ring, modulo 2. mbarrier_wait takes the parity of a phase:
  //
  //   turn around the ring                              0      1      2      3    mbarrier_wait's
  //                                                                               argument
  //   consumers wait for this phase of `full`           0      1      2      3    parity
  //   the producer waits for this phase of `empty`      none   0      1      2    parity ^ 1
  //
  // The producer waits until the consumers have read what it loaded one turn before. In turn 0
  // there is nothing to wait for, and it does not wait: a wait for parity 1 returns at once if no
  // phase of the mbarrier is complete yet.
  uint32_t parity = 0;

  __device__ void advance() {
    ++index;
    if (index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }

  // The state for the next k-tile.
  __device__ PipelineState next() const {
    PipelineState later = *this;
    later.advance();
    return later;
  }

  // The index of the previous k-tile's stage.
  __device__ int previous_index() const { return index == 0 ? kStages - 1 : index - 1; }
};

// The mbarriers of all stages, in shared memory.
template <int kStages>
struct Barriers {
  uint64_t full[kStages];   // complete when all bytes of the stage have arrived
  uint64_t empty[kStages];  // complete when the consumer warps of both blocks have read the stage
};

// Returns the shared-memory address of a stage's barrier. `barriers` is the address of `full` or
// `empty`, and `index` is the number of the stage in the ring.
__device__ inline uint32_t barrier_of(uint32_t barriers, int index) {
  return barriers + index * static_cast<int>(sizeof(uint64_t));
}

// Initialises the barriers at the shared-memory addresses `full` and `empty`, then waits until the
// barriers of both blocks are initialised. All threads of the cluster call it.
template <int kStages>
__device__ void init_barriers(uint32_t full, uint32_t empty) {
  constexpr int kArrivalsOfProducer = 1;
  constexpr int kArrivalsOfConsumers = BlockConfig::kConsumerWarps * BlockConfig::kClusterSize;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(barrier_of(full, s), kArrivalsOfProducer);
      ptx::mbarrier_init(barrier_of(empty, s), kArrivalsOfConsumers);
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

}  // namespace kernels::sm90
