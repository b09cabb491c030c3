// Clusters of blocks, and registers of a warpgroup, one wrapper for each PTX instruction.

#pragma once

#include <cstdint>

namespace kernels::ptx {

// Special registers, read again at every use, so that nothing derived from them stays in registers.
#define KERNELS_SPECIAL_REGISTER(type, function, name)     \
  __device__ inline type function() {                      \
    type value;                                            \
    asm volatile("mov.u32 %0, %%" name ";" : "=r"(value)); \
    return value;                                          \
  }
KERNELS_SPECIAL_REGISTER(uint32_t, cluster_ctarank, "cluster_ctarank")
KERNELS_SPECIAL_REGISTER(int, cluster_nctarank, "cluster_nctarank")
KERNELS_SPECIAL_REGISTER(int, clusterid, "clusterid.x")
KERNELS_SPECIAL_REGISTER(int, nclusterid, "nclusterid.x")
#undef KERNELS_SPECIAL_REGISTER

// A value that all lanes of a warp have alike, so that the compiler sees that they do.
__device__ inline int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// A barrier of all threads of the cluster, and its halves.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ inline void cluster_sync() { cluster_arrive(), cluster_wait(); }

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
