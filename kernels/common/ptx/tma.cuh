// Bulk tensor copies (TMA): one wrapper for each PTX instruction.
//
// A single thread starts such a copy, and Hopper's copy engine performs it. A copy moves a box of
// elements between a tensor in global memory and shared memory. The tensor map, which the host
// makes with cuTensorMapEncodeTiled, says where the tensor is, its sizes, the size of the box, and
// how the box is swizzled in shared memory. Elements of the box that are outside of the tensor are
// read as 0, and are not written.

#pragma once

#include <cuda.h>

#include <cstdint>

namespace kernels::ptx {

// prefetch.tensormap: loads a tensor map into the copy engine's cache.
__device__ inline void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ------------------------------------------------------------- from global memory to shared memory

// A box comes from a matrix (2d), or from matrix number `matrix` of a tensor that has several (3d).
// It begins at element [row, column] of the matrix; the instructions take the column first. The box
// goes to address `target` in shared memory, and the mbarrier at address `barrier` counts the bytes
// as they arrive. A multicast copy goes to each block of the cluster that has its bit set in
// `blocks`, at address `target` of that block, and counts at `barrier` of that block.

// cp.async.bulk.tensor.2d with multicast: a box to several blocks.
__device__ inline void copy_tensor_multicast(uint32_t target, const CUtensorMap* map, int column,
                                             int row, uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// cp.async.bulk.tensor.3d with multicast: a box of one of several matrices to several blocks.
__device__ inline void copy_tensor_multicast(uint32_t target, const CUtensorMap* map, int column,
                                             int row, int matrix, uint32_t barrier,
                                             uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier), "h"(blocks)
      : "memory");
}

// cp.async.bulk.tensor.2d: a box to this block alone.
__device__ inline void copy_tensor(uint32_t target, const CUtensorMap* map, int column, int row,
                                   uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// cp.async.bulk.tensor.3d: a box of one of several matrices to this block alone.
__device__ inline void copy_tensor(uint32_t target, const CUtensorMap* map, int column, int row,
                                   int matrix, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier)
      : "memory");
}

// ------------------------------------------------------------- from shared memory to global memory

// cp.async.bulk.tensor.2d to global memory: a box from address `source` in this block's shared
// memory to element [row, column] of a matrix.
__device__ inline void store_tensor(const CUtensorMap* map, int column, int row, uint32_t source) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
      "r"(column), "r"(row), "r"(source)
      : "memory");
}

// cp.async.bulk.commit_group: makes a group of this thread's stores since its last group.
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: waits until all but the latest kPending of this thread's groups
// have read their boxes, which may then be overwritten in shared memory. Their writes to global
// memory may not be complete.
template <int kPending>
__device__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// ------------------------------------------------------------------------------------------ fences

// The copy engine reads and writes memory on a path of its own, the "async proxy". A proxy fence
// orders ordinary accesses before those of the copy engine.

// fence.proxy.async.shared: orders this thread's writes of shared memory before bulk copies that
// read it.
__device__ inline void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.proxy.async.global: orders writes of global memory before bulk copies that read it. Both
// the thread that writes and the thread that starts the copy need it.
__device__ inline void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace kernels::ptx
