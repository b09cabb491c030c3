// GELU on a GPU: one element a thread.

#include <cuda_runtime.h>

#include "gelu/launchers.h"

namespace kernels {
namespace {

constexpr int kGeluThreads = 256;

// x and out [n].
__global__ void gelu_kernel(const float* x, float* out, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * kGeluThreads + threadIdx.x;
  if (i < n) out[i] = x[i] * normcdff(x[i]);
}

}  // namespace

namespace cuda {

int gelu(const float* x, float* out, int64_t n, CUstream_st* stream) {
  const auto blocks = static_cast<unsigned>((n + kGeluThreads - 1) / kGeluThreads);
  gelu_kernel<<<blocks, kGeluThreads, 0, stream>>>(x, out, n);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace kernels
