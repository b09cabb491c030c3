// Tensor maps and the persistent launch, for both GEMM kernels of this folder.

#pragma once

#include <cudaTypedefs.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/launch.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/sm90/pipeline.cuh"
#include "linear/split/split.cuh"

namespace kernels::sm90 {

// ------------------------------------------------------------------------------------- tensor maps
//
// A tensor map (CUtensorMap) describes to TMA (ptx/tma.cuh) a tensor in global memory, and the
// boxes that TMA copies. The host passes it to the kernel as an argument. A row of a box is as long
// as a row of a k-tile, split::kKTileRowBytes. TMA swizzles its 16-byte vectors in shared memory,
// so that wgmma reads them without bank conflicts.
template <typename T>
constexpr CUtensorMapDataType tensor_map_type() {
  if constexpr (std::is_same_v<T, float>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if constexpr (std::is_same_v<T, ptx::Tf32>) return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  if constexpr (std::is_same_v<T, __half>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Returns the driver's function that makes maps. Nothing links against the driver library, because
// it is missing where there is no GPU.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    constexpr unsigned kCudaVersion = 12000;
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kCudaVersion,
                                           cudaEnableDefault, &found));
    if (function == nullptr) check(cudaErrorSymbolNotFound);
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// Makes the map of a tensor with 2 or 3 dimensions, the innermost first. `sizes` are in elements.
// `strides` are in bytes, and leave out the innermost dimension. A box has box_rows rows. If the
// driver rejects the map, throws a std::runtime_error that names these arguments. This exception
// leaves the launcher, because status_of (common/launch.cuh) catches only cudaError_t.
template <typename T>
CUtensorMap encode_map(const T* tensor, int dimensions, const cuuint64_t* sizes,
                       const cuuint64_t* strides, uint32_t box_rows) {
  const cuuint32_t box[] = {split::kKTileRowBytes / sizeof(T), box_rows, 1};
  const cuuint32_t element_strides[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = tensor_map_encoder()(
      &map, tensor_map_type<T>(), dimensions, const_cast<T*>(tensor), sizes, strides, box,
      element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::string message = "cuTensorMapEncodeTiled returned CUresult " + std::to_string(status) +
                          " for a tensor with element size " + std::to_string(sizeof(T)) +
                          ", sizes";
    for (int i = 0; i < dimensions; ++i) message += " " + std::to_string(sizes[i]);
    message += ", strides in bytes";
    for (int i = 0; i < dimensions - 1; ++i) message += " " + std::to_string(strides[i]);
    message += ", and boxes of " + std::to_string(box_rows) + " rows";
    throw std::runtime_error(message);
  }
  return map;
}

// Makes the map of a matrix [rows, columns], rows `stride` elements apart. A box is box_rows rows
// of 128 bytes.
template <typename T>
CUtensorMap make_map(const T* matrix, uint64_t rows, uint64_t columns, uint64_t stride,
                     uint32_t box_rows) {
  const cuuint64_t sizes[] = {columns, rows};
  const cuuint64_t strides[] = {stride * sizeof(T)};
  return encode_map(matrix, 2, sizes, strides, box_rows);
}

// Makes the map of a matrix in the k-tiled layout (split/split.cuh). A box is box_rows rows of one
// k-tile.
inline CUtensorMap make_k_tiled_map(const split::ScaledMatrix& matrix, int64_t k_tiles,
                                    int box_rows) {
  constexpr cuuint64_t kNumbers = split::kKTileRowNumbers;
  const cuuint64_t rows = matrix.rows;
  const cuuint64_t sizes[] = {kNumbers, rows, static_cast<cuuint64_t>(k_tiles)};
  const cuuint64_t strides[] = {kNumbers * sizeof(__half), rows * kNumbers * sizeof(__half)};
  return encode_map(matrix.hi, 3, sizes, strides, box_rows);
}

// --------------------------------------------------------------------------- the persistent launch

// Returns how many clusters of a GEMM kernel of this folder run at once on the current GPU.
template <typename Kernel>
int count_gemm_clusters(Kernel* kernel, size_t shared_bytes) {
  Grid one_cluster{};
  one_cluster.blocks = BlockConfig::kClusterSize;
  one_cluster.threads = BlockConfig::kThreads;
  one_cluster.shared_bytes = shared_bytes;
  return count_active_clusters(kernel, one_cluster);
}

// Launches a GEMM kernel: persistent clusters, each of which computes several tiles. The caller has
// called count_gemm_clusters, which allows the kernel its shared memory.
template <typename Kernel, typename... Arguments>
void launch_gemm(Kernel* kernel, size_t shared_bytes, int clusters, cudaStream_t stream,
                 const Arguments&... arguments) {
  Grid grid{};
  grid.blocks = clusters * BlockConfig::kClusterSize;
  grid.threads = BlockConfig::kThreads;
  grid.shared_bytes = shared_bytes;
  grid.stream = stream;
  grid.has_pdl = true;
  launch_or_throw(grid, kernel, arguments...);
}

}  // namespace kernels::sm90
