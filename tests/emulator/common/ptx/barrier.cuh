// Stands in for kernels/common/ptx/barrier.cuh, as far as emulated kernels use it in clusters of
// one block.

#pragma once

#include "common/launch.cuh"

namespace kernels::ptx {

inline void mbarrier_init(uint32_t, uint32_t) {}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_expect_tx(uint32_t, uint32_t) {}
inline void mbarrier_wait(uint32_t, uint32_t) {}

}  // namespace kernels::ptx
