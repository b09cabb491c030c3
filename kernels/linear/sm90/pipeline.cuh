// The shape of a block and the shared-memory pipeline, for both Hopper GEMM kernels.
//
// The pipeline is a ring of stages in shared memory. A stage holds one k-tile of the weight and one
// k-tile of x. Each stage has two mbarriers, `full` and `empty`:
//
//   producer warp                                     consumer warpgroups
//
//   producer_acquire: waits for `empty`               consumer_wait: wait for `full`
//   arrives at `full`, with the number of bytes       read the stage
//   starts TMA copies, which count down the bytes     consumer_release: each warp arrives at
//                                                     `empty` of both blocks
//
// `full` is complete when the producer and all bytes have arrived. A consumer warp arrives in both
// blocks of the cluster because each block loads half of the x tile and multicasts it to both:
// neither block may overwrite a stage that the other one still reads.

#pragma once

#include <cuda_runtime.h>

#include <cstddef>
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
  // Blocks of a cluster, which share a tile of out: each has half of the tile's rows of the weight
  // (columns of out), and both have all of its rows of x.
  static constexpr int kClusterSize = 2;
  // The blocks that a multicast copy writes to: one bit for each block.
  static constexpr int kBothBlocks = (1 << kClusterSize) - 1;

  // Returns whether a block has enough registers, if these are the registers of each thread.
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

// A position in the ring, as in CUTLASS. The producer and each consumer have one of their own, and
// advance it once a k-tile.
template <int kStages>
struct PipelineState {
  int index = 0;        // the stage's place in the ring
  uint32_t parity = 0;  // the turn around the ring, modulo 2

  __device__ void advance() {
    ++index;
    if (index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }

  __device__ PipelineState next() const {
    PipelineState later = *this;
    later.advance();
    return later;
  }

  __device__ PipelineState previous() const {
    PipelineState earlier = *this;
    if (index == 0) {
      earlier.index = kStages;
      earlier.parity ^= 1;
    }
    --earlier.index;
    return earlier;
  }
};

// Returns the address of an mbarrier in an array of mbarriers, which begins at address `barriers`.
__device__ inline uint32_t barrier_at(uint32_t barriers, int index) {
  return barriers + index * static_cast<int>(sizeof(uint64_t));
}

// The mbarriers of the ring. The functions are named as in CUTLASS. `state` is the calling
// thread's, and "the stage" is that of `state`.
template <int kStages>
struct Pipeline {
  using State = PipelineState<kStages>;

  struct Barriers {
    uint64_t full[kStages];   // complete when all bytes of the stage have arrived
    uint64_t empty[kStages];  // complete when the consumer warps of both blocks have read the stage
  };

  // Shared-memory addresses.
  uint32_t full_barriers;
  uint32_t empty_barriers;

  __device__ explicit Pipeline(uint32_t barriers)
      : full_barriers(barriers + offsetof(Barriers, full)),
        empty_barriers(barriers + offsetof(Barriers, empty)) {}

  // Initialises the mbarriers, then waits until those of both blocks are initialised. All threads
  // of the cluster call it.
  __device__ void init() const {
    constexpr int kArrivalsOfProducer = 1;
    constexpr int kArrivalsOfConsumers = BlockConfig::kConsumerWarps * BlockConfig::kClusterSize;
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) {
        ptx::mbarrier_init(barrier_at(full_barriers, s), kArrivalsOfProducer);
        ptx::mbarrier_init(barrier_at(empty_barriers, s), kArrivalsOfConsumers);
      }
      ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
  }

  // Returns the address of the stage's `full`.
  __device__ uint32_t full_barrier(const State& state) const {
    return barrier_at(full_barriers, state.index);
  }

  __device__ void consumer_wait(const State& state) const {
    ptx::mbarrier_wait(full_barrier(state), state.parity);
  }

  // Waits until the consumers have read what the producer loaded to the stage one turn before. In
  // turn 0 the function returns at once, because a wait for parity 1 does so if no phase of the
  // mbarrier is complete yet. The phases:
  //
  //   turn around the ring                            0      1      2      3    parity of the phase
  //
  //   consumer_wait waits for this phase of `full`    0      1      2      3    state.parity
  //   this function for this phase of `empty`         none   0      1      2    state.parity ^ 1
  __device__ void producer_acquire(const State& state) const {
    ptx::mbarrier_wait(barrier_at(empty_barriers, state.index), state.parity ^ 1);
  }

  // Tells the producers of both blocks that this warp has read the stage: lane i arrives at the
  // mbarrier of block i. All lanes call it.
  __device__ void consumer_release(const State& state) const {
    const uint32_t empty_barrier = barrier_at(empty_barriers, state.index);
    const int lane = threadIdx.x % 32;
    if (lane < BlockConfig::kClusterSize) {
      ptx::mbarrier_arrive_mapped(ptx::map_shared(empty_barrier, lane));
    }
  }
};

}  // namespace kernels::sm90
