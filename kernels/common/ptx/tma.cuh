// Bulk tensor copies (TMA), one wrapper for each PTX instruction.

#pragma once

#include <cuda.h>

#include <cstdint>

namespace kernels::ptx {

__device__ inline void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a tensor to the same place in each of `blocks`, whose own `barrier` counts the bytes.
__device__ inline void copy_tensor_multicast(uint32_t to, const CUtensorMap* map, int column,
                                             int row, uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// The same of one of many such tensors.
__device__ inline void copy_tensor_multicast(uint32_t to, const CUtensorMap* map, int column,
                                             int row, int tensor, uint32_t barrier,
                                             uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(tensor), "r"(barrier), "h"(blocks)
      : "memory");
}

// Both into this block alone.
__device__ inline void copy_tensor(uint32_t to, const CUtensorMap* map, int column, int row,
                                   uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

__device__ inline void copy_tensor(uint32_t to, const CUtensorMap* map, int column, int row,
                                   int tensor, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(tensor), "r"(barrier)
      : "memory");
}

// A box out of this block's shared memory. Its elements outside of the tensor are not written.
__device__ inline void store_tensor(const CUtensorMap* map, int column, int row, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}

__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but kPending of this thread's committed groups have read their boxes.
template <int kPending>
__device__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders ordinary writes of shared memory before bulk copies that read it.
__device__ inline void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders ordinary writes of global memory before bulk copies that read it, in the threads of both.
__device__ inline void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace kernels::ptx
