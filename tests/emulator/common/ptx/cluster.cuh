// Stands in for kernels/common/ptx/cluster.cuh, as far as emulated kernels use it: clusters have
// one block.

#pragma once

#include <cstdlib>

#include "common/launch.cuh"

namespace kernels::ptx {

inline uint32_t cluster_ctarank() { return 0; }
inline void cluster_arrive_relaxed() {}
inline void cluster_wait() {}
inline uint32_t map_shared(uint32_t shared, uint32_t) { return shared; }

template <typename T>
void store_async(uint32_t, T, uint32_t) {
  std::abort();  // there is no other block
}

}  // namespace kernels::ptx
