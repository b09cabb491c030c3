// Products of a warpgroup (wgmma), one wrapper for each PTX instruction.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kernels::ptx {

struct Tf32 {
  float value;  // which the copy engine rounds to 11 bits
};

// Which dimension of an operand is adjacent in memory, k or its rows. The values are wgmma's.
enum class Major { kK = 0, kMN = 1 };

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Describes a tile in lines of kRowBytes, swizzled as the copy engine writes them, from a multiple
// of eight lines on. A line of a K-major operand has adjacent k of one row; of an MN-major one,
// adjacent rows of one k, and the lines of the next rows begin kBlockBytes later.
template <int kRowBytes, Major kMajor = Major::kK, int kBlockBytes = 0>
__device__ uint64_t matrix_descriptor(uint32_t tile) {
  static_assert(kRowBytes == 128, "rows are as long as the widest swizzle");
  constexpr uint64_t kEightRows = 8 * kRowBytes >> 4, kSwizzle = 1;
  constexpr uint64_t kBlock = kMajor == Major::kK ? 1 : kBlockBytes >> 4;
  return (tile & 0x3ffff) >> 4 | kBlock << 16 | kEightRows << 32 | kSwizzle << 62;
}

// The step from one descriptor to that of the next 16 of k, 8 of TF32: along a line of a K-major
// operand, and over 16 lines of 128 bytes of an MN-major one.
constexpr uint64_t kDescriptorK16 = 16 * sizeof(__half) >> 4;
constexpr uint64_t kDescriptorLines16 = 16 * 128 >> 4;

// The accumulators of a thread as operands of an asm statement: their registers, and their numbers.
#define KERNELS_REGISTERS_8(d, i)                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define KERNELS_REGISTERS_16(d, i) KERNELS_REGISTERS_8(d, i), KERNELS_REGISTERS_8(d, i + 8)
#define KERNELS_REGISTERS_32(d) KERNELS_REGISTERS_16(d, 0), KERNELS_REGISTERS_16(d, 16)
#define KERNELS_REGISTERS_64(d) \
  KERNELS_REGISTERS_32(d), KERNELS_REGISTERS_16(d, 32), KERNELS_REGISTERS_16(d, 48)
#define KERNELS_REGISTERS_80(d) KERNELS_REGISTERS_64(d), KERNELS_REGISTERS_16(d, 64)
#define KERNELS_REGISTERS_88(d) KERNELS_REGISTERS_80(d), KERNELS_REGISTERS_8(d, 80)
#define KERNELS_REGISTERS_128(d)                                                     \
  KERNELS_REGISTERS_80(d), KERNELS_REGISTERS_16(d, 80), KERNELS_REGISTERS_16(d, 96), \
      KERNELS_REGISTERS_16(d, 112)
#define KERNELS_NUMBERS_32                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KERNELS_NUMBERS_64                                                                  \
  KERNELS_NUMBERS_32                                                                        \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KERNELS_NUMBERS_80 \
  KERNELS_NUMBERS_64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define KERNELS_NUMBERS_88 KERNELS_NUMBERS_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define KERNELS_NUMBERS_128                                                                    \
  KERNELS_NUMBERS_88                                                                           \
  ", %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, "     \
  "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, " \
  "%119, %120, %121, %122, %123, %124, %125, %126, %127"

// d [64, n] = a [64, 16] b [n, 16]^T + (accumulates ? d : 0), a in registers, b in shared memory.
#define KERNELS_WGMMA(n, half, a0, a1, a2, a3, b, p)                                              \
  template <int kSums>                                                                            \
  __device__ void wgmma(std::integral_constant<int, n>, float (&d)[kSums], const uint32_t* a,     \
                        uint64_t b_tile, bool accumulates) {                                      \
    static_assert(kSums >= half, "n / 2 registers");                                              \
    asm volatile("{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %" p                       \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                                     \
                 "k16.f32.f16.f16 {" KERNELS_NUMBERS_##half "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 \
                                                            "}, %" b ", accumulates, 1, 1, 0;\n}" \
                 : KERNELS_REGISTERS_##half(d)                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile),                       \
                   "r"(static_cast<uint32_t>(accumulates)));                                      \
  }
KERNELS_WGMMA(64, 32, "32", "33", "34", "35", "36", "37")
KERNELS_WGMMA(128, 64, "64", "65", "66", "67", "68", "69")
KERNELS_WGMMA(160, 80, "80", "81", "82", "83", "84", "85")
KERNELS_WGMMA(176, 88, "88", "89", "90", "91", "92", "93")
#undef KERNELS_WGMMA

// The same with a in shared memory; [64, 8] and [n, 8]^T in TF32, which is K-major.
#define KERNELS_WGMMA_SHARED(T, shape, majors)                                                 \
  template <Major kA, Major kB>                                                                \
  __device__ inline void wgmma(T, float (&d)[128], uint64_t a, uint64_t b, bool accumulates) { \
    asm volatile(                                                                              \
        "{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %130, 0;\n"                      \
        "wgmma.mma_async.sync.aligned.m64n256" shape " {" KERNELS_NUMBERS_128                  \
        "}, %128, %129, accumulates, 1, 1" majors ";\n}"                                       \
        : KERNELS_REGISTERS_128(d)                                                             \
        : "l"(a), "l"(b), "r"(static_cast<uint32_t>(accumulates)), "n"(static_cast<int>(kA)),  \
          "n"(static_cast<int>(kB)));                                                          \
  }
KERNELS_WGMMA_SHARED(__half, "k16.f32.f16.f16", ", %131, %132")
KERNELS_WGMMA_SHARED(__nv_bfloat16, "k16.f32.bf16.bf16", ", %131, %132")
KERNELS_WGMMA_SHARED(Tf32, "k8.f32.tf32.tf32", "")
#undef KERNELS_WGMMA_SHARED

}  // namespace kernels::ptx
