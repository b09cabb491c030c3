"""Design 4 with the index scaled once, the tail, NaN, any alignment and a checked launch."""

from common import RELU, build, relu_module

SOURCE = r"""
__device__ float relu(float x) { return x < 0 ? 0 : x; }

__global__ void relu_kernel(const float* x, float* out, int64_t n) {
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (4 * i + 3 < n) {
    float4 v = reinterpret_cast<const float4*>(x)[i];
    reinterpret_cast<float4*>(out)[i] = {relu(v.x), relu(v.y), relu(v.z), relu(v.w)};
  } else {
    for (int64_t j = 4 * i; j < n; ++j) out[j] = relu(x[j]);
  }
}

torch::Tensor relu_forward(torch::Tensor input) {
  TORCH_CHECK(input.is_cuda() && input.scalar_type() == at::kFloat, "float32 on a GPU alone");
  auto x = input.contiguous();
  if (reinterpret_cast<uintptr_t>(x.data_ptr()) % 16) x = x.clone();
  auto out = torch::empty_like(x);
  int64_t n = x.numel();
  if (n == 0) return out;
  relu_kernel<<<((n + 3) / 4 + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), n);
  TORCH_CHECK(cudaGetLastError() == cudaSuccess, "the launch failed");
  return out;
}
"""
ModelNew = relu_module(build("repair_4", SOURCE, RELU).relu_forward)
