// The memory of large outputs on a CPU: huge pages, and a pool of free blocks.
//
// Fresh memory costs more than the arithmetic of an elementwise operator, because Linux clears each
// page when it is first touched: 50 ms to 1.5 s for 1 GiB. Huge pages, where the system has them,
// avoid most of that, and so does the pool, which keeps freed blocks for the next output of the
// same size.
//
// The pool does not take memory away from anybody: Linux may reclaim the pages of free blocks
// whenever it needs them, and the pool keeps at most an eighth of the memory of the machine or of
// the container.

#pragma once

#include <cstddef>

namespace kernels::cpu {

constexpr size_t kHugePage = 2 << 20;

// Returns an uninitialised block of at least `bytes` bytes, at a multiple of kHugePage. Returns
// null if the system has none, and always where the system is not Linux.
void* take_memory(size_t bytes);

// Gives back a block of take_memory. The block goes to the pool, whose oldest blocks go to the
// system if the pool is then too large. The block itself goes to the system if it is larger than
// the pool may be, if the environment has KERNELS_CPU_POOL=0, or if the process's address space,
// which free blocks keep, is limited (RLIMIT_AS).
void give_memory(void* data);

// Returns all free blocks of the pool to the system. Returns whether there were any.
bool release_memory();

}  // namespace kernels::cpu
