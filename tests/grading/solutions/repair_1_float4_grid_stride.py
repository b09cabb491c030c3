"""Design 1 with the header, const, the tail, NaN, 64-bit sizes and a checked launch."""

from common import register, relu_module

SOURCE = r"""
#include <cuda_runtime.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

__device__ float relu(float x) { return x < 0 ? 0 : x; }

__global__ void relu_kernel(const float* x, float* out, int64_t n) {
  int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = first; i < n / 4; i += step) {
    float4 v = reinterpret_cast<const float4*>(x)[i];
    reinterpret_cast<float4*>(out)[i] = {relu(v.x), relu(v.y), relu(v.z), relu(v.w)};
  }
  for (int64_t i = n / 4 * 4 + first; i < n; i += step) out[i] = relu(x[i]);
}

at::Tensor relu_forward(const at::Tensor& input) {
  TORCH_CHECK(input.is_cuda() && input.scalar_type() == at::kFloat, "float32 on a GPU alone");
  at::Tensor x = input.contiguous();
  const float* from = x.const_data_ptr<float>();
  if (reinterpret_cast<uintptr_t>(from) % 16) {
    x = x.clone();
    from = x.const_data_ptr<float>();
  }
  at::Tensor out = at::empty_like(x);
  relu_kernel<<<1024, 256>>>(from, out.mutable_data_ptr<float>(), x.numel());
  TORCH_CHECK(cudaGetLastError() == cudaSuccess, "the launch failed");
  return out;
}

TORCH_LIBRARY(repair_1, m) { m.def("relu_forward(Tensor x) -> Tensor", &relu_forward); }
"""
ModelNew = relu_module(register("repair_1", SOURCE))
