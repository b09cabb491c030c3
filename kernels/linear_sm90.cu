// Linear -> ReLU -> divide on Hopper: TMA, wgmma, and the whole epilogue on the accumulators.
//
// Both kernels are persistent, in clusters of two blocks that share what one of the operands has in
// common: a warpgroup brings the data, two multiply. float16 and bfloat16 are multiplied as they
// are. float32 is split into pairs of fp16 (split.cuh): x by a kernel before, the weight, which is
// read once, in the registers of the warps that multiply it. SPLIT.md has the arithmetic.
//
// What was slower on an H200 at [1024, 8192] x [8192, 8192]: clusters of one (3%) and of four
// (24%); float32 weights straight from L2 to registers (a load's result is waited for before the
// products that should hide it); promoted sums in shared memory, which leaves too few stages;
// barriers whose release and acquire are of the cluster's scope (33%).

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "epilogue.cuh"
#include "launchers.h"
#include "linear_sm90_common.cuh"
#include "linear_sm90_half.cuh"
#include "linear_sm90_split.cuh"
#include "split.cuh"

namespace kernels {
namespace sm90 {

// cuTensorMapEncodeTiled, found at run time so that nothing links against the driver.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &found);
    return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
  }();
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(encoder);
}

template <typename T>
constexpr CUtensorMapDataType tensor_map_type() {
  if constexpr (std::is_same_v<T, float>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if constexpr (std::is_same_v<T, __half>) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Describes a matrix to the copy engine, in boxes of box_rows rows of kBytes. What a box has
// outside of the matrix is 0. stride is in elements.
template <int kBytes, typename T>
int make_map(CUtensorMap* map, const T* matrix, int64_t rows, int64_t columns, int64_t stride,
             int box_rows) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride) * sizeof(T)};
  const cuuint32_t box[] = {kBytes / sizeof(T), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult status =
      encode(map, tensor_map_type<T>(), 2, const_cast<T*>(matrix), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             kBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

constexpr int blocks_of(int64_t size, int64_t block) {
  return static_cast<int>((size + block - 1) / block);
}

// A persistent grid: as many clusters as there is room for, or tiles. An early start lets a kernel
// set itself up while the one before it ends; it waits for that one itself.
template <typename Memory, typename... Parameters>
int launch(void (*kernel)(Parameters...), int tiles, bool starts_early, cudaStream_t stream,
           const Parameters&... parameters) {
  int device, multiprocessors;
  int status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                static_cast<int>(sizeof(Memory)));
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = multiprocessors / kClusterSize * kClusterSize;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = sizeof(Memory);
  config.stream = stream;
  // Not all multiprocessors need be where clusters of this size can be.
  int clusters;
  status = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (status != cudaSuccess) return status;
  config.gridDim = (tiles < clusters ? tiles : clusters) * kClusterSize;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = starts_early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

// Whether sums and bias can be scaled one by one: nothing overflows, and what becomes subnormal
// does so in the result too.
inline bool is_plain_scale(const Divisor<float>& divisor) {
  return divisor.is_exact && divisor.scale <= 1 && divisor.scale >= 0x1p-32f;
}

template <typename T>
int half_linear(const Linear& linear, cudaStream_t stream) {
  const int m = static_cast<int>(linear.m), n = static_cast<int>(linear.n),
            k = static_cast<int>(linear.k);
  CUtensorMap x_map, weight_map;
  int status = make_map<kRowBytes>(&x_map, static_cast<const T*>(linear.x), m, k, linear.x_stride,
                                   kHalfRows);
  if (status != cudaSuccess) return status;
  status = make_map<kRowBytes>(&weight_map, static_cast<const T*>(linear.weight), n, k,
                               linear.weight_stride, kHalfColumns / kClusterSize);
  if (status != cudaSuccess) return status;
  const Tiles tiles{blocks_of(m, kHalfRows * kClusterSize), blocks_of(n, kHalfColumns)};
  const Divisor<float> divisor(linear.divisor);
  const HalfProblem<T> problem{
      static_cast<const T*>(linear.bias),
      static_cast<T*>(linear.out),
      linear.mask,
      m,
      n,
      k,
      floor_of(linear.relu),
      divisor,
      linear.mask == nullptr && n % 8 == 0 && linear.relu && is_plain_scale(divisor),
      tiles};
  return launch<HalfMemory>(half_kernel<T>, tiles.count(), false, stream, x_map, weight_map,
                            problem);
}

// The parts of a workspace, each aligned to 256 bytes.
struct Workspace {
  size_t x_exponent, x_counts, weight_exponent, weight_counts, x, bytes;

  explicit Workspace(const Linear& linear) {
    size_t end = 0;
    const auto take = [&](size_t bytes) {
      const size_t begin = end;
      end += (bytes + 255) / 256 * 256;
      return begin;
    };
    x_exponent = take(linear.m * sizeof(int));
    x_counts = take(linear.m * sizeof(split::Counts));
    weight_exponent = take(linear.n * sizeof(int));
    weight_counts = take(linear.n * sizeof(split::Counts));
    const int64_t parts = linear.products == 3 ? 2 : 1;
    x = take(parts * linear.m * split::padded(linear.k) * sizeof(__half));
    bytes = end;
  }
};

template <int kProducts>
int split_linear(const Linear& linear, cudaStream_t stream) {
  using S = Split<kProducts>;
  const Workspace at(linear);
  char* const workspace = static_cast<char*>(linear.workspace);
  const auto ints = [&](size_t offset) { return reinterpret_cast<int*>(workspace + offset); };
  const auto counts = [&](size_t offset) {
    return reinterpret_cast<split::Counts*>(workspace + offset);
  };
  __half* const high = reinterpret_cast<__half*>(workspace + at.x);
  const int64_t padded_k = split::padded(linear.k);
  const split::Operand x{static_cast<const float*>(linear.x),
                         linear.m,
                         linear.x_stride,
                         1,
                         high,
                         kProducts == 3 ? high + linear.m * padded_k : nullptr,
                         ints(at.x_exponent),
                         counts(at.x_counts)};
  const split::Operand weight{static_cast<const float*>(linear.weight),
                              linear.n,
                              linear.weight_stride,
                              1,
                              nullptr,
                              nullptr,
                              ints(at.weight_exponent),
                              counts(at.weight_counts)};
  const Divisor<float> divisor(linear.divisor);
  const float* const bias = static_cast<const float*>(linear.bias);
  float* const out = static_cast<float*>(linear.out);
  const split::Result result{bias, floor_of(linear.relu), divisor, out, linear.mask};
  const bool heeds_few = split::heeds_few(linear);
  if (kProducts == 3 && linear.k < split::kTerms) {  // all rows would be flagged
    return split::exact(x, weight, linear.k, heeds_few, result, true, stream);
  }
  prepare_kernel<kProducts>
      <<<static_cast<int>(linear.m) + blocks_of(linear.n, kSampledRows * split::kThreads / 32),
         split::kThreads, 0, stream>>>(x, weight, linear.k);
  int status = cudaGetLastError();
  if (status != cudaSuccess) return status;

  const int m = static_cast<int>(linear.m), n = static_cast<int>(linear.n),
            k = static_cast<int>(linear.k);
  CUtensorMap x_map, weight_map;
  status = make_map<S::kXRowBytes>(&x_map, high, S::kParts * m, padded_k, padded_k,
                                   S::kXRows / kClusterSize);
  if (status != cudaSuccess) return status;
  status =
      make_map<kRowBytes>(&weight_map, weight.from, n, k, linear.weight_stride, S::kWeightRows);
  if (status != cudaSuccess) return status;
  const Tiles tiles{blocks_of(m, S::kXRows), blocks_of(n, S::kWeightRows * kClusterSize)};
  const SplitProblem problem{bias,          out,  linear.mask, x.exponent, weight.exponent,
                             weight.counts, m,    n,           k,          floor_of(linear.relu),
                             divisor,       tiles};
  status = launch<typename S::Memory>(split_kernel<kProducts>, tiles.count(), true, stream, x_map,
                                      weight_map, problem);
  if (status != cudaSuccess) return status;
  return split::exact(x, weight, linear.k, heeds_few, result, false, stream);
}

inline bool is_aligned(const void* pointer, int64_t stride, int64_t size) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride * size % 16 == 0;
}

}  // namespace sm90

namespace cuda {

// The copy engine takes rows that begin at multiples of 16 bytes.
bool linear_sm90_serves(const Linear& linear) {
  const int64_t size = linear.dtype == DType::kFloat32 ? 4 : 2;
  constexpr int64_t kMost = int64_t{1} << 30;
  return (linear.dtype == DType::kFloat32 || linear.dtype == DType::kFloat16 ||
          linear.dtype == DType::kBFloat16) &&
         (linear.dtype == DType::kFloat32 || sm90::is_aligned(linear.x, linear.x_stride, size)) &&
         sm90::is_aligned(linear.weight, linear.weight_stride, size) && linear.m < kMost &&
         linear.n < kMost && linear.k < (linear.dtype == DType::kFloat32 ? sm90::kMostK : kMost);
}

size_t linear_sm90_workspace(const Linear& linear) {
  return linear.dtype == DType::kFloat32 ? sm90::Workspace(linear).bytes : 0;
}

int linear_sm90(const Linear& linear, CUstream_st* stream) {
  switch (linear.dtype) {
    case DType::kFloat16:
      return sm90::half_linear<__half>(linear, stream);
    case DType::kBFloat16:
      return sm90::half_linear<__nv_bfloat16>(linear, stream);
    default:
      return linear.products == 3 ? sm90::split_linear<3>(linear, stream)
                                  : sm90::split_linear<1>(linear, stream);
  }
}

}  // namespace cuda
}  // namespace kernels
