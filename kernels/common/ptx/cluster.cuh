// Hopper's clusters of blocks: one wrapper for each PTX instruction.

#pragma once

#include <cstdint>

namespace kernels::ptx {

// ------------------------------------------------------------------------------- special registers

// Reads a special register. The asm is volatile, so that every call reads it again. Otherwise the
// value would occupy an ordinary register from the first use to the last.
#define KERNELS_SPECIAL_REGISTER(type, function, name)     \
  __device__ inline type function() {                      \
    type value;                                            \
    asm volatile("mov.u32 %0, %%" name ";" : "=r"(value)); \
    return value;                                          \
  }
// %cluster_ctarank: the rank of this block in its cluster.
KERNELS_SPECIAL_REGISTER(uint32_t, cluster_ctarank, "cluster_ctarank")
// %cluster_nctarank: how many blocks the cluster has.
KERNELS_SPECIAL_REGISTER(int, cluster_nctarank, "cluster_nctarank")
// %clusterid.x: the number of this cluster in the grid.
KERNELS_SPECIAL_REGISTER(int, clusterid, "clusterid.x")
// %nclusterid.x: how many clusters the grid has.
KERNELS_SPECIAL_REGISTER(int, nclusterid, "nclusterid.x")
#undef KERNELS_SPECIAL_REGISTER

// ---------------------------------------------------------------------------- barrier of a cluster

// barrier.cluster.arrive: says that this thread has reached the barrier. All threads of the cluster
// call it, and all threads of a warp at the same time (`aligned`). Writes of a thread before it
// arrives are visible to the threads that wait.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}

// barrier.cluster.wait: waits until all threads of the cluster have arrived.
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Arrives and waits, as __syncthreads does for a block.
__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// ------------------------------------------------------------- shared memory of a cluster's blocks

// mapa: maps an address in this block's shared memory to the same place in the shared memory of
// block `rank` of the cluster, which may be this block itself.
__device__ inline uint32_t map_shared(uint32_t shared, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

// ld.shared::cluster: loads a double from an address that map_shared has returned.
__device__ inline double load_shared_cluster(uint32_t mapped) {
  double v;
  asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(v) : "r"(mapped) : "memory");
  return v;
}

}  // namespace kernels::ptx
