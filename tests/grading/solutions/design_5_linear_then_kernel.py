"""torch's Linear, then one kernel for ReLU and the division: right, and as fast as eager."""

import torch
from common import build
from torch import nn

SOURCE = r"""
__global__ void relu_divide_kernel(const float* z, float* out, float divisor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = fmaxf(z[i], 0.0f) / divisor;
}

torch::Tensor relu_divide(torch::Tensor z, double divisor) {
  auto out = torch::empty_like(z);
  int n = z.numel();
  relu_divide_kernel<<<(n + 255) / 256, 256>>>(
      z.data_ptr<float>(), out.data_ptr<float>(), divisor, n);
  return out;
}
"""
FUNCTION = "torch::Tensor relu_divide(torch::Tensor z, double divisor)"
extension = build("design_5", SOURCE, FUNCTION)


class ModelNew(nn.Module):
    def __init__(self, in_features: int, out_features: int, divisor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.divisor = divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return extension.relu_divide(self.linear(x), self.divisor)
