// The functions that run GELU's kernels: out[i] = x[i] Phi(x[i]), where Phi is the cumulative
// distribution function of the normal distribution. x and out have n floats and do not overlap.

#pragma once

#include <cstdint>

struct CUstream_st;  // cudaStream_t points to it

namespace kernels {

namespace cuda {
// Launches on `stream` of the current device and returns the launch's cudaError_t.
int gelu(const float* x, float* out, int64_t n, CUstream_st* stream);
}  // namespace cuda

namespace cpu {
// The elements begin <= i < end, on the calling thread.
void gelu(const float* x, float* out, int64_t begin, int64_t end);
}  // namespace cpu

}  // namespace kernels
