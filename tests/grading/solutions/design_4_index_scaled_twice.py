"""float4, but the index counts floats already: three quarters of the accesses are past the end."""

from common import RELU, build, relu_module

SOURCE = r"""
__global__ void relu_kernel(const float* x, float* out, int n) {
  int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) {
    float4 v = reinterpret_cast<const float4*>(x)[i];
    v.x = fmaxf(v.x, 0.0f);
    v.y = fmaxf(v.y, 0.0f);
    v.z = fmaxf(v.z, 0.0f);
    v.w = fmaxf(v.w, 0.0f);
    reinterpret_cast<float4*>(out)[i] = v;
  }
}

torch::Tensor relu_forward(torch::Tensor x) {
  auto out = torch::empty_like(x);
  int n = x.numel();
  relu_kernel<<<(n / 4 + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), n);
  return out;
}
"""
ModelNew = relu_module(build("design_4", SOURCE, RELU).relu_forward)
