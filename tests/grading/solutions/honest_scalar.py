"""A plain scalar kernel for CPUs."""

import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

at::Tensor relu_forward(const at::Tensor& input) {
  TORCH_CHECK(input.scalar_type() == at::kFloat, "float32 alone");
  at::Tensor x = input.contiguous(), out = at::empty_like(x);
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] < 0 ? 0 : from[i];
  return out;
}

TORCH_LIBRARY(scalar_relu, m) { m.def("relu_forward(Tensor x) -> Tensor", &relu_forward); }
"""
load_inline("scalar_relu", SOURCE, is_python_module=False, no_implicit_headers=True)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.scalar_relu.relu_forward(x)
