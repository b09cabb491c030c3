// Clusters of blocks, registers of a warpgroup, and values that a warp has alike: one wrapper for
// each PTX instruction.

#pragma once

#include <cstdint>

namespace kernels::ptx {

__device__ inline uint32_t cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline int cluster_nctarank() {
  int count;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

// Read again at every use, so that nothing derived from it stays in registers.
__device__ inline int clusterid() {
  int id;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
  return id;
}

__device__ inline int nclusterid() {
  int count;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}

// A value that all lanes of a warp have alike, so that the compiler sees that they do.
__device__ inline int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// A barrier of all threads of the cluster, and its halves.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The address of this block's `shared` in another block of the cluster, or in this one.
__device__ inline uint32_t map_shared(uint32_t shared, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

// Reads an address of map_shared.
__device__ inline double load_shared_cluster(uint32_t mapped) {
  double v;
  asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(v) : "r"(mapped) : "memory");
  return v;
}

template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace kernels::ptx
