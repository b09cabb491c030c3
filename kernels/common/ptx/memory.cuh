// Loads, stores, asynchronous copies and atomics: one wrapper for each PTX instruction. Addresses
// in shared memory are 32 bits wide, but copy_async_with_policy takes a pointer.

#pragma once

#include <cstdint>

namespace kernels::ptx {

// ----------------------------------------------------------------------------------- shared memory

// mov: returns the 32-bit address of `pointer`, which points into shared memory. The asm is
// volatile because nvcc might otherwise compute the address again at every use.
__device__ inline uint32_t shared_address(const void* pointer) {
  uint32_t address;
  asm volatile("mov.b32 %0, %1;"
               : "=r"(address)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(pointer))));
  return address;
}

// ld.shared.v4: loads four floats. The address is a multiple of 16.
__device__ inline float4 load_shared_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address));
  return v;
}

// ld.shared.v2: loads two doubles. The address is a multiple of 16.
__device__ inline double2 load_shared_double2(uint32_t address) {
  double2 v;
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(v.x), "=d"(v.y) : "r"(address));
  return v;
}

// ----------------------------------------------------------------------------------- global memory

// ld.global.cs.v4: loads four floats if the condition is true, and otherwise returns zeros. The
// hint .cs (streaming) says that the floats are probably not read again. The compiler does not move
// this load across other accesses to memory.
__device__ inline float4 load_global_float4_if(bool condition, const float* source) {
  float4 v;
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.cs.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
      : "l"(source), "r"(static_cast<uint32_t>(condition))
      : "memory");
  return v;
}

// st.global.v4: stores 16 bytes at once. The compiler may split an ordinary store of a uint4, or
// merge it with another store to the same place, but leaves this one alone.
__device__ inline void store_global_uint4(void* target, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// prefetch.global.L2: loads the cache line of an address into L2.
__device__ inline void prefetch_l2(const void* source) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(source));
}

// createpolicy: the L2 policy "evict these lines first", for data that is read once.
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ----------------------------------------- asynchronous copies from global memory to shared memory

// cp.async.cg: starts a copy of 16 bytes that bypasses L1. If `valid` is false, 16 zeros are
// written instead, and `source` is not read. This thread sees the bytes after wait_copies.
__device__ inline void copy_async(uint32_t target, const void* source, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target),
               "l"(__cvta_generic_to_global(source)), "r"(valid ? 16 : 0)
               : "memory");
}

// cp.async.cg with a cache hint: starts a copy of 16 bytes with an L2 policy (evict_first_policy).
__device__ inline void copy_async_with_policy(void* target, const void* source, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(target))),
               "l"(source), "l"(policy)
               : "memory");
}

// cp.async.commit_group: makes a group of this thread's copies since its last group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: waits for all but the latest kPending of this thread's groups.
template <int kPending>
__device__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --------------------------------------------------------------- synchronisation through a counter

// red.release.add: adds to a counter in global memory. Threads of the GPU that see the sum with
// load_acquire also see everything that this thread has written before.
__device__ inline void add_release(unsigned* target, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

// ld.acquire: loads a counter; see add_release.
__device__ inline unsigned load_acquire(const unsigned* source) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

}  // namespace kernels::ptx
