// Descriptors of matrices for the copy engine (TMA).

#pragma once

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/sm90/one_product.cuh"
#include "linear/split/pieces.cuh"

namespace kernels::sm90 {

template <typename T>
constexpr CUtensorMapDataType tensor_map_type() {
  if constexpr (std::is_same_v<T, float>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if constexpr (std::is_same_v<T, ptx::Tf32>) return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  if constexpr (std::is_same_v<T, __half>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// A matrix, or many of them, one after the other, in boxes of box_rows rows of 128 bytes. A box is
// 0 outside of its matrix. stride is in elements.
template <typename T>
CUtensorMap make_map(const T* matrix, uint64_t rows, uint64_t columns, uint64_t stride,
                     uint32_t box_rows, uint64_t matrices = 0) {
  static const auto encode =
      find_driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
  if (encode == nullptr) check(cudaErrorSymbolNotFound);
  CUtensorMap map;
  const cuuint64_t sizes[] = {columns, rows, matrices};
  const cuuint64_t strides[] = {stride * sizeof(T), rows * stride * sizeof(T)};
  const cuuint32_t box[] = {kRowBytes / sizeof(T), box_rows, 1}, steps[] = {1, 1, 1};
  const CUresult status =
      encode(&map, tensor_map_type<T>(), matrices > 0 ? 3 : 2, const_cast<T*>(matrix), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) check(cudaErrorInvalidValue);
  return map;
}

// The pieces of a matrix that was split stepwise.
inline CUtensorMap make_map(const split::SplitMatrix& matrix, int64_t steps, int box_rows) {
  return make_map(matrix.high, matrix.rows, split::kStepwise, split::kStepwise, box_rows, steps);
}

}  // namespace kernels::sm90
