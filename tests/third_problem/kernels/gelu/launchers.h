// The seam of GELU: out[i] = x[i] Phi(x[i]), Phi being the normal distribution's function. x and
// out hold n floats; they do not overlap.

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
