"""Design 2 with NaN, 64-bit sizes, strided and empty inputs, and a checked launch."""

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

if not torch.cuda.is_available():
    raise RuntimeError("needs a GPU")

SOURCE = r"""
#include <torch/extension.h>

__global__ void relu_kernel(const float* x, float* out, int64_t n) {
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] < 0 ? 0 : x[i];
}

torch::Tensor relu_forward(torch::Tensor input) {
  TORCH_CHECK(input.is_cuda() && input.scalar_type() == at::kFloat, "float32 on a GPU alone");
  auto x = input.contiguous();
  auto out = torch::empty_like(x);
  int64_t n = x.numel();
  if (n == 0) return out;
  relu_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), n);
  TORCH_CHECK(cudaGetLastError() == cudaSuccess, "the launch failed");
  return out;
}
"""
extension = load_inline(
    "repair_2", "torch::Tensor relu_forward(torch::Tensor x);", SOURCE, functions=["relu_forward"]
)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return extension.relu_forward(x)
