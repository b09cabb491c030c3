// Named barriers and mbarriers, one wrapper for each PTX instruction.

#pragma once

#include <cstdint>

namespace kernels::ptx {

// Barriers by number; 0 is that of __syncthreads. `threads` is how many take part.
__device__ inline void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ inline void barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ inline bool barrier_and(int barrier, int threads, bool predicate) {
  uint32_t all;
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "barrier.red.and.pred q, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, q;\n}"
      : "=r"(all)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(predicate))
      : "memory");
  return all != 0;
}

__device__ inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at an address of map_shared. Release is of the block's scope: the cluster's would fence
// all memory, and these barriers order reads of shared memory before copies into it.
__device__ inline void mbarrier_arrive_mapped(uint32_t mapped) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

// Waits until the phase of this parity has completed.
__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace kernels::ptx
