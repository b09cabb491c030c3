// Barriers: one wrapper for each PTX instruction.
//
// A block has 16 named barriers, which synchronise some or all of its threads. __syncthreads uses
// number 0. Mbarriers are objects in shared memory, which can also count the bytes that a bulk copy
// (tma.cuh) has delivered.

#pragma once

#include <cstdint>

namespace kernels::ptx {

// ---------------------------------------------------------------------------------- named barriers

// `barrier` is the number of a barrier, 0 to 15. `threads` counts the threads of the block that
// wait at the barrier or only arrive there. It is a multiple of 32.

// barrier.sync: waits until `threads` threads have arrived at the barrier, this one among them.
__device__ inline void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// barrier.arrive: arrives at the barrier without waiting.
__device__ inline void barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// barrier.red.and: waits like barrier_sync, and returns whether the predicate is true in all
// threads that take part.
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

// --------------------------------------------------------------------------------------- mbarriers

// An mbarrier goes through phases, numbered 0, 1, 2 and so on. A phase completes when the expected
// number of threads have arrived, and all bytes that they expect have been copied. The next phase
// then begins. `barrier` is the address of the mbarrier in this block's shared memory.

// mbarrier.init: prepares an mbarrier, each of whose phases expects `arrivals` threads.
__device__ inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes mbarriers that this thread has initialised visible to bulk copies and
// to the other blocks of the cluster.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive.expect_tx: arrives, after adding `bytes` to the bytes that the current phase
// waits for.
__device__ inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.arrive: arrives at the mbarrier of any block of the cluster. `mapped` is its address, as
// map_shared (cluster.cuh) returns it. The arrival is a release for threads of this block only,
// although threads of another block may wait for it. This is enough because this thread has only
// read the shared memory that copies overwrite after the arrival, and has no writes that must
// become visible. A release for the cluster would add a fence of all memory.
__device__ inline void mbarrier_arrive_mapped(uint32_t mapped) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

// mbarrier.try_wait.parity: waits until the phase with this parity (0 for even phases, 1 for odd
// ones) has completed. The instruction gives up after some time, and is then repeated.
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
