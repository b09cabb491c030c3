"""Design 2 with NaN, 64-bit sizes, strided and empty inputs, and a checked launch."""

from common import RELU, build, relu_module

SOURCE = r"""
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
ModelNew = relu_module(build("repair_2", SOURCE, RELU).relu_forward)
