// Matrices in the registers of a warp: copies from and to shared memory, and tensor-core products.
// One wrapper for each PTX instruction.

#pragma once

#include <cstdint>

namespace kernels::ptx {

// ------------------------------------------------------------- between shared memory and registers

// ldmatrix.x4: loads four 8 x 8 matrices of 16-bit elements into the registers of a warp, matrix i
// into r_i. `shared` of lane l is the address of row l % 8 of matrix l / 8. Lane l gets elements
// 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each matrix:
//
//            columns   0 1     2 3     4 5     6 7
//   row 0            lane 0  lane 1  lane 2  lane 3
//   row 1            lane 4  lane 5  lane 6  lane 7
//   ...
//   row 7            lane 28 lane 29 lane 30 lane 31
__device__ inline void load_matrices(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3,
                                     uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(shared)
               : "memory");
}

// stmatrix.x4: stores four such matrices from the registers of a warp, matrix i from v[i]. Lanes
// have the elements and the addresses that they have in load_matrices.
__device__ inline void store_matrices(uint32_t shared, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// stmatrix.x4.trans: stores the transposes of four such matrices. Lanes have the same elements, but
// `shared` of lane l is the place of column l % 8 of matrix l / 8, whose elements become adjacent.
__device__ inline void store_matrices_transposed(uint32_t shared, const uint32_t (&v)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
      : "memory");
}

// ---------------------------------------------------------------------------------------- products

// mma: the tensor-core product of one warp, d [16, 8] += a [16, 16] b [8, 16]^T, of fp16 elements
// with float accumulators d. For GPUs from sm_80 on; Hopper's faster form is in wgmma.cuh. Each
// lane has the elements of a, b and d that the PTX manual lists for mma.m16n8k16.
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace kernels::ptx
