"""One element a thread: right but for NaN, which becomes 0, and slower than torch's."""

from common import RELU, build, relu_module

SOURCE = r"""
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
ModelNew = relu_module(build("design_2", SOURCE, RELU).relu_forward)
