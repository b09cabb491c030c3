"""Design 2 with a backward of its own; NaN becomes 0 in the same way."""

import torch
from common import RELU, build, relu_module

SOURCE = r"""
__global__ void forward_kernel(const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = fmaxf(x[i], 0.0f);
}

__global__ void backward_kernel(const float* grad, const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i] > 0 ? grad[i] : 0;
}

torch::Tensor relu_forward(torch::Tensor x) {
  auto out = torch::empty_like(x);
  int n = x.numel();
  forward_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), n);
  return out;
}

torch::Tensor relu_backward(torch::Tensor grad, torch::Tensor x) {
  auto out = torch::empty_like(x);
  int n = x.numel();
  backward_kernel<<<(n + 255) / 256, 256>>>(
      grad.data_ptr<float>(), x.data_ptr<float>(), out.data_ptr<float>(), n);
  return out;
}
"""
BACKWARD = "torch::Tensor relu_backward(torch::Tensor grad, torch::Tensor x)"
extension = build("design_3", SOURCE, RELU, BACKWARD)


class Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return extension.relu_forward(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        [x] = ctx.saved_tensors
        return extension.relu_backward(grad.contiguous(), x)


ModelNew = relu_module(Relu.apply)
