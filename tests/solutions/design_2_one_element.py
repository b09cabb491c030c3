"""One element a thread: right but for NaN, which becomes 0, and slower than torch's."""

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

if not torch.cuda.is_available():
    raise RuntimeError("needs a GPU")

SOURCE = r"""
#include <torch/extension.h>

__global__ void relu_kernel(const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] > 0 ? x[i] : 0;
}

torch::Tensor relu_forward(torch::Tensor x) {
  auto out = torch::empty_like(x);
  int n = x.numel();
  relu_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), n);
  return out;
}
"""
extension = load_inline(
    "design_2", "torch::Tensor relu_forward(torch::Tensor x);", SOURCE, functions=["relu_forward"]
)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return extension.relu_forward(x)
