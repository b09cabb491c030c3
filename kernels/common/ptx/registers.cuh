// The registers of a warp or a warpgroup: one wrapper for each PTX instruction.

#pragma once

namespace kernels::ptx {

// shfl.sync: returns lane 0's value in all lanes of the warp. Callers use it for a value that is
// equal in all lanes, so that the compiler knows this and keeps it in a uniform register.
__device__ inline int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// setmaxnreg.inc: raises the registers of each thread of this warpgroup to kRegisters, and waits
// until other warpgroups of the block have given up enough. All threads of the warpgroup call it.
template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// setmaxnreg.dec: lowers that number to kRegisters. All threads of the warpgroup call it.
template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace kernels::ptx
