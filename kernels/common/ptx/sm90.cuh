// One small wrapper per PTX instruction that the Hopper kernels use: barriers in shared memory,
// bulk tensor copies (TMA), warpgroup products (wgmma). The names are the PTX ISA's.

#ifndef KERNELS_COMMON_PTX_SM90_CUH_
#define KERNELS_COMMON_PTX_SM90_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kernels::ptx {

// A float32 that the copy engine rounds to TF32, 11 bits, on its way into shared memory.
struct Tf32 {
  float value;
};

// Which dimension of an operand is adjacent in memory: k, or that of its rows. The values are
// wgmma's.
enum class Major { kK = 0, kMN = 1 };

}  // namespace kernels::ptx

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace kernels::ptx {

// Addresses in shared memory are 32 bits wide here, as the instructions take them. This one is kept
// in a register: where it has to be worked out from the block's place in its cluster again and
// again, that costs a loop a hundred cycles.
__device__ inline uint32_t shared_address(const void* pointer) {
  uint32_t address;
  asm volatile("mov.b32 %0, %1;"
               : "=r"(address)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(pointer))));
  return address;
}

__device__ inline float4 load_shared_four(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address));
  return v;
}

__device__ inline double2 load_shared_two(uint32_t address) {
  double2 v;
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(v.x), "=d"(v.y) : "r"(address));
  return v;
}

// Four from memory that nobody reads again, or zeros. Not moved among other accesses to memory.
__device__ inline float4 load_global_four_if(bool condition, const float* from) {
  float4 v;
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.cs.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
      : "l"(from), "r"(static_cast<uint32_t>(condition))
      : "memory");
  return v;
}

// Four matrices of 8 columns of 16 bytes: lane l says where column l % 8 of matrix l / 8 goes, and
// has of each matrix two neighbours of row l / 4.
__device__ inline void store_matrices_turned(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
      : "memory");
}

// ------------------------------------------------------------------------------------ clusters

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

// Asked for again wherever it is used, so that nothing that follows from it stays in registers.
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

// ----------------------------------------------------------------------------------- registers

template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The larger of two, or NaN if one is NaN.
__device__ inline float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// ------------------------------------------------------------------------------------ barriers

// Barriers by number; 0 is that of __syncthreads. `threads` is how many take part.
__device__ inline void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Arrives, and does not wait.
__device__ inline void barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// barrier_sync, and whether the predicate of all is true.
__device__ inline bool barrier_and(int barrier, int threads, bool predicate) {
  uint32_t all;
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "barrier.red.and.pred q, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, q;\n}"
      : "=r"(all)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(predicate))
      : "memory");
  return all != 0;
}

__device__ inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ inline void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Where a barrier of another block of the cluster, or of this one, is to be found.
__device__ inline uint32_t map_shared(uint32_t barrier, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(barrier), "r"(rank));
  return mapped;
}

// Reads what map_shared gave the address of.
__device__ inline double load_shared_cluster(uint32_t mapped) {
  double v;
  asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(v) : "r"(mapped) : "memory");
  return v;
}

// Arrives at what map_shared gave. Release and acquire are of the block's scope: that of the
// cluster would fence all memory each time, and what these barriers order are reads of shared
// memory before copies into it.
__device__ inline void mbarrier_arrive_mapped(uint32_t mapped) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

// Waits until the phase of this parity has completed.
__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --------------------------------------------------------------------------------- bulk copies

__device__ inline void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a two-dimensional tensor into the shared memory of every block in `blocks`, at the same
// place in each; the bytes are counted at each block's own `barrier`.
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

// Between ordinary writes of global memory and copies of what they wrote, in the threads of both.
__device__ inline void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ------------------------------------------------------------------------------- global memory

__device__ inline void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// For what is read once: L2 gives it up first.
__device__ inline uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes to shared memory. The thread that asks for them sees them when it has waited.
__device__ inline void copy_async(void* to, const void* from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "l"(policy)
               : "memory");
}

__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// All that a thread wrote before it adds is seen by those that read the sum.
__device__ inline void add_release(unsigned* to, unsigned value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ inline unsigned load_acquire(const unsigned* from) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// ------------------------------------------------------------------------------------ products

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Describes a tile in lines of kRowBytes, swizzled over as many bytes as the copy engine writes
// them; the tile begins at a multiple of eight lines. A line of a K-major operand has adjacent k of
// one row. A line of an MN-major operand has adjacent rows of one k; the lines of the rows behind
// these begin kBlockBytes later.
template <int kRowBytes, Major kMajor = Major::kK, int kBlockBytes = 0>
__device__ uint64_t matrix_descriptor(uint32_t tile) {
  static_assert(kRowBytes == 128 || kRowBytes == 64, "rows are as long as a swizzle");
  constexpr uint64_t kEightRows = 8 * kRowBytes >> 4;
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2;
  constexpr uint64_t kBlock = kMajor == Major::kK ? 1 : kBlockBytes >> 4;
  return (tile & 0x3ffff) >> 4 | kBlock << 16 | kEightRows << 32 | kSwizzle << 62;
}

// The step from one descriptor to that of the next 16 of k, 8 of TF32: along a line of a K-major
// operand, and over 16 lines of 128 bytes of an MN-major one.
constexpr uint64_t kDescriptorK16 = 16 * sizeof(__half) >> 4;
constexpr uint64_t kDescriptorLines16 = 16 * 128 >> 4;

// The accumulators of a warpgroup as operands of an asm statement, by their number a thread.
#define KERNELS_8(d, i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define KERNELS_40(d, i)                                                            \
  KERNELS_8(d, i), KERNELS_8(d, i + 8), KERNELS_8(d, i + 16), KERNELS_8(d, i + 24), \
      KERNELS_8(d, i + 32)
#define KERNELS_32(d) KERNELS_8(d, 0), KERNELS_8(d, 8), KERNELS_8(d, 16), KERNELS_8(d, 24)
#define KERNELS_64(d) KERNELS_40(d, 0), KERNELS_8(d, 40), KERNELS_8(d, 48), KERNELS_8(d, 56)
#define KERNELS_80(d) KERNELS_40(d, 0), KERNELS_40(d, 40)
#define KERNELS_88(d) KERNELS_80(d), KERNELS_8(d, 80)
#define KERNELS_128(d) KERNELS_88(d), KERNELS_40(d, 88)
#define KERNELS_D32                                                         \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define KERNELS_D64                                                                   \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "  \
  "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "  \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define KERNELS_D80                                                                  \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}"
#define KERNELS_D88                                                                  \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87}"
#define KERNELS_D128                                                                             \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "   \
  "%127}"

// d [64, n] = a [64, 16] b [n, 16]^T + (accumulate ? d : 0), a in registers and b in shared memory.
// d has n / 2 registers, and maybe some more.
#define KERNELS_WGMMA(n, list, operands, a0, a1, a2, a3, b, p)                                     \
  template <int kSums>                                                                             \
  __device__ void wgmma(std::integral_constant<int, n>, float (&d)[kSums], const uint32_t* a,      \
                        uint64_t b_tile, bool accumulate) {                                        \
    static_assert(kSums >= n / 2, "n / 2 registers");                                              \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" p                          \
                 ", 0;\n"                                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 " list ", {%" a0 ", %" a1 \
                 ", %" a2 ", %" a3 "}, %" b ", accumulate, 1, 1, 0;\n}"                            \
                 : operands(d)                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile),                        \
                   "r"(static_cast<uint32_t>(accumulate)));                                        \
  }
KERNELS_WGMMA(64, KERNELS_D32, KERNELS_32, "32", "33", "34", "35", "36", "37")
KERNELS_WGMMA(128, KERNELS_D64, KERNELS_64, "64", "65", "66", "67", "68", "69")
KERNELS_WGMMA(160, KERNELS_D80, KERNELS_80, "80", "81", "82", "83", "84", "85")
KERNELS_WGMMA(176, KERNELS_D88, KERNELS_88, "88", "89", "90", "91", "92", "93")
#undef KERNELS_WGMMA

// The same with a in shared memory; [64, 8] and [n, 8]^T in TF32, which is K-major.
#define KERNELS_WGMMA_SHARED(T, shape, majors)                                                \
  template <Major kA, Major kB>                                                               \
  __device__ inline void wgmma(T, float (&d)[128], uint64_t a, uint64_t b, bool accumulate) { \
    asm volatile(                                                                             \
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %130, 0;\n"                       \
        "wgmma.mma_async.sync.aligned.m64n256" shape " " KERNELS_D128                         \
        ", %128, %129, accumulate, 1, 1" majors ";\n}"                                        \
        : KERNELS_128(d)                                                                      \
        : "l"(a), "l"(b), "r"(static_cast<uint32_t>(accumulate)), "n"(static_cast<int>(kA)),  \
          "n"(static_cast<int>(kB)));                                                         \
  }
KERNELS_WGMMA_SHARED(__half, "k16.f32.f16.f16", ", %131, %132")
KERNELS_WGMMA_SHARED(__nv_bfloat16, "k16.f32.bf16.bf16", ", %131, %132")
KERNELS_WGMMA_SHARED(Tf32, "k8.f32.tf32.tf32", "")
#undef KERNELS_WGMMA_SHARED

}  // namespace kernels::ptx

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

#endif  // KERNELS_COMMON_PTX_SM90_CUH_
