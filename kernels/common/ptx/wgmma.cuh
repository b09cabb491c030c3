// Tensor-core products of a warpgroup, the 128 threads of four warps (wgmma, on Hopper): one
// wrapper for each PTX instruction.
//
//   d [64, n] += a [64, 16] b [n, 16]^T        of fp16 or bf16 elements
//   d [64, n] += a [64, 8] b [n, 8]^T          of TF32 elements
//
// d, a and b are PTX's names. d are the accumulators, which are floats.
//
// Products run asynchronously. A thread issues them in this order:
//
//   wgmma_fence();               registers of d and a are ready
//   wgmma(...); wgmma(...);      any number of products
//   wgmma_commit_group();        makes a group of them
//   wgmma_wait_group<0>();       d is complete
//
// b, and a if it is not in registers, are in shared memory, where a matrix descriptor finds them.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kernels::ptx {

// The element type of TF32 products: a float that TMA has rounded to 11 significant bits.
struct Tf32 {
  float value;
};

// The dimension along which neighbouring elements of an operand are adjacent in memory: K, or the
// other one, which is M for a and N for b. The values are the instruction's.
enum class Major { kK = 0, kMN = 1 };

// wgmma.fence: orders this thread's accesses to the registers of d and a before later products.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group: makes a group of the products issued since the last group.
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group: waits until all but the latest kPending groups are complete.
template <int kPending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// ------------------------------------------------------------------------------ matrix descriptors

// Converts bytes to 16 bytes, the unit of a descriptor's addresses and distances.
__host__ __device__ constexpr int descriptor_units(int bytes) { return bytes / 16; }

// Returns wgmma's 64-bit description of an operand in shared memory. The operand is stored in
// swizzle lines: 128 adjacent bytes each, as TMA writes them with the 128-byte swizzle.
// kSwizzleLineBytes is a parameter so that the caller's constant is checked. `tile` is the address
// of the first line, a multiple of 1024 bytes.
//
//   K-major     A swizzle line has adjacent elements of K of one row. The next one has those of the
//               next row.
//   MN-major    Only in half types. A swizzle line has one element of each of 64 adjacent rows, all
//               at one k. The next line has their elements at k + 1. The lines of the next 64 rows
//               begin kBlockBytes later.
//
// The address and all distances are in descriptor_units:
//
//   bits  0..13   address
//   bits 16..29   from one block of 64 rows to the next, if MN-major. K-major operands with a
//                 swizzle do not use it, and have 1 there by convention.
//   bits 32..45   from eight swizzle lines to the next eight
//   bits 62..63   swizzle: 1 means 128 bytes
template <int kSwizzleLineBytes, Major kMajor = Major::kK, int kBlockBytes = 0>
__device__ uint64_t matrix_descriptor(uint32_t tile) {
  static_assert(kSwizzleLineBytes == 128, "the widest swizzle has lines of 128 bytes");
  constexpr uint64_t kEightLines = descriptor_units(8 * kSwizzleLineBytes);
  constexpr uint64_t kSwizzle = 1;
  constexpr uint64_t kBlock = kMajor == Major::kK ? 1 : descriptor_units(kBlockBytes);
  constexpr uint32_t kAddressBits = 0x3ffff;  // 18 bits in bytes, 14 bits in units
  return descriptor_units(tile & kAddressBits) | kBlock << 16 | kEightLines << 32 | kSwizzle << 62;
}

// The steps from an operand's descriptor for one product to that for the next product, which takes
// the next 16 elements of K in a half type, 8 in TF32. These elements are 32 bytes further along
// the swizzle line of a K-major operand, and 16 swizzle lines further in an MN-major one.
constexpr uint64_t kDescriptorStepK = descriptor_units(32);
constexpr uint64_t kDescriptorStepMN = descriptor_units(16 * 128);

// ---------------------------------------------------------------------------------------- products

// A thread has n / 2 of the accumulators d, each of which is an operand of the asm statement. These
// macros list them: KERNELS_REGISTERS_32(d) is "+f"(d[0]), ..., "+f"(d[31]), and KERNELS_NUMBERS_32
// is "%0, ..., %31". KERNELS_REGISTERS_8(d, i) and KERNELS_REGISTERS_16(d, i) begin at d[i].
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

// wgmma.mma_async: d [64, n] = a [64, 16] b [n, 16]^T + (accumulates ? d : 0), where a and b are
// fp16. `a` is in registers, four words a thread; b_tile is the descriptor of b, K-major. The type
// of the first argument chooses n. d may have more registers than the n / 2 of this n.
//
// KERNELS_WGMMA defines the function for one n. `count` is n / 2. a0 to p are the numbers of the
// operands after the accumulators: the four words of a, the descriptor, and the predicate. At the
// end of the instruction, "1, 1" means that a and b are not negated, and "0" that b is K-major.
#define KERNELS_WGMMA(n, count, a0, a1, a2, a3, b, p)                                              \
  template <int kAccumulators>                                                                     \
  __device__ void wgmma(std::integral_constant<int, n>, float (&d)[kAccumulators],                 \
                        const uint32_t* a, uint64_t b_tile, bool accumulates) {                    \
    static_assert(kAccumulators >= count, "d has a register for each of n / 2 accumulators");      \
    asm volatile("{\n.reg .pred accumulates;\nsetp.ne.b32 accumulates, %" p                        \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                                      \
                 "k16.f32.f16.f16 {" KERNELS_NUMBERS_##count "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 \
                                                             "}, %" b ", accumulates, 1, 1, 0;\n}" \
                 : KERNELS_REGISTERS_##count(d)                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile),                        \
                   "r"(static_cast<uint32_t>(accumulates)));                                       \
  }
KERNELS_WGMMA(64, 32, "32", "33", "34", "35", "36", "37")
KERNELS_WGMMA(128, 64, "64", "65", "66", "67", "68", "69")
KERNELS_WGMMA(160, 80, "80", "81", "82", "83", "84", "85")
KERNELS_WGMMA(176, 88, "88", "89", "90", "91", "92", "93")
#undef KERNELS_WGMMA

// wgmma with a in shared memory, for n = 256: d [64, 256] = a b^T + (accumulates ? d : 0), where a
// and b are descriptors. The type of the first argument chooses the element type. Half types have
// 16 elements of K, K-major or MN-major (kA, kB). TF32 has 8, K-major.
//
// `shape` is the end of the instruction's name. The operands after the accumulators are the
// descriptors of a and b, the predicate, and kA and kB. `majors` lists the last two for half types;
// TF32's instruction has no such operands.
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
