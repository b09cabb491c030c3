// One product on a GPU by the kernels of this folder: operands, precision, path, launch.

#pragma once

#include <ATen/Context.h>
#include <torch/version.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "linear/choose_path.h"
#include "torch_support/tensor.h"

namespace kernels {

// x [..., k], weight [n, k], bias [n] if there is one.
struct LinearInputs {
  const Tensor& x;
  const Tensor& weight;
  const std::optional<Tensor>& bias;
  double divisor;
};

// A float32 product on a GPU has the accuracy of TF32 where cuBLAS would round the operands of
// torch's to TF32, or else that of float32. By the first that fits:
//
//   fp32_precision "bfx9": torch makes nine products of bfloat16   kHighest
//   NVIDIA_TF32_OVERRIDE 0, which cuBLAS reads once                kHighest
//   NVIDIA_TF32_OVERRIDE 1, or fp32_precision "tf32"               kHigh
//   fp32_precision "ieee" or "none"                                kHighest
//
// fp32_precision is that of torch.backends.cuda.matmul, or else cudnn's, or else that of
// torch.backends. The older setters write the first of these. Context::allowTF32CuBLAS raises an
// error where old and new setters were mixed.
inline Precision float32_precision() {
  static const char tf32_override = [] {
    const char* const value = std::getenv("NVIDIA_TF32_OVERRIDE");
    return value != nullptr && strlen(value) == 1 ? value[0] : '\0';
  }();
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 10
  const std::string setting = at::globalContext().float32Precision("cuda", "matmul");
  const bool is_tf32 = setting == "tf32", is_float32 = setting == "ieee" || setting == "none";
#else
  using at::Float32Precision;
  const Float32Precision setting =
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
  const bool is_tf32 = setting == Float32Precision::TF32;
  const bool is_float32 = setting == Float32Precision::IEEE || setting == Float32Precision::NONE;
#endif
  const bool rounds = tf32_override != '0' && (is_tf32 || (tf32_override == '1' && is_float32));
  return rounds ? Precision::kHigh : Precision::kHighest;
}

// The path that the operator set_linear_path, which is there for tests, demands.
inline std::optional<Path> demanded_path;

// x as a matrix of these rows; what autograd records of it is a view, or a copy where there is no
// view.
inline Tensor as_matrix(const Tensor& x) {
  return x.dim() == 2 ? x : x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

// The sizes of a tensor with another last one.
template <typename Size>
c10::SmallVector<Size, 5> with_last(c10::ArrayRef<Size> sizes, const Size& last) {
  if (sizes.empty()) fail("expected a tensor of at least one dimension");
  c10::SmallVector<Size, 5> result(sizes.begin(), sizes.end());
  result.back() = last;
  return result;
}

// Whether the lines of a matrix, along one dimension, are adjacent elements, do not overlap, and
// begin at multiples of `alignment` bytes.
inline bool has_lines(const Tensor& matrix, int64_t alignment, int along, int across) {
  const int64_t stride = matrix.stride(across);
  return matrix.stride(along) == 1 && stride >= matrix.size(along) &&
         is_aligned(matrix, alignment) && stride * matrix.element_size() % alignment == 0;
}
inline bool has_rows(const Tensor& matrix, int64_t alignment) {
  return has_lines(matrix, alignment, /*along=*/1, /*across=*/0);
}
inline bool has_columns(const Tensor& matrix, int64_t alignment) {
  return has_lines(matrix, alignment, /*along=*/0, /*across=*/1);
}

#ifdef KERNELS_WITH_CUDA
// A matrix as the kernels read it: its rows, or those of its transpose, are lines as above.
struct MatrixView {
  Tensor tensor;
  int64_t stride;
  bool is_transposed = false;
};

// A matrix [rows, columns] as it lies, transposed or not, or a copy, with padding that nobody
// reads.
inline MatrixView readable(const Tensor& matrix, int64_t alignment, bool takes_transposed) {
  if (has_rows(matrix, alignment)) return {matrix, matrix.stride(0)};
  if (takes_transposed && has_columns(matrix, alignment)) return {matrix, matrix.stride(1), true};
  const int64_t rows = matrix.size(0), columns = matrix.size(1), size = matrix.element_size();
  const int64_t stride = (columns * size + alignment - 1) / alignment * alignment / size;
  const Tensor copy = allocate(matrix, {rows, stride}, matrix.scalar_type()).narrow(1, 0, columns);
  if (matrix.scalar_type() == at::kFloat && has_columns(matrix, size)) {
    // 163 us where torch's copy takes 466: [8192, 8192], H200
    const Transposition transposition{matrix.const_data_ptr<float>(),
                                      matrix.stride(1),
                                      copy.mutable_data_ptr<float>(),
                                      stride,
                                      rows,
                                      columns};
    run_on_device(
        matrix, [&](auto stream) { return cuda::transpose(transposition, nullptr, stream); },
        [] {});
  } else {
    copy.copy_(matrix);
  }
  return {copy, stride};
}

inline Gpu gpu_of(const Tensor& x) {
  const auto attribute = [device = x.get_device()](cudaDeviceAttr name) {
    int value;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
    return value;
  };
  return {10 * attribute(cudaDevAttrComputeCapabilityMajor) +
              attribute(cudaDevAttrComputeCapabilityMinor),
          attribute(cudaDevAttrMultiProcessorCount)};
}

// Writes out and mask, if there is one, by the path of choice, on the current device, which is x's.
// x is [m, k]. Without relu, out is the product, with bias and division, as it is. Undefined where
// the path is torch's product.
inline Tensor launch_linear(const LinearInputs& in, bool relu, const Tensor& mask) {
  if (!in.x.is_cuda()) return {};
  LinearArguments linear{};
  linear.dtype = *kernel_dtype(in.x.scalar_type());
  const bool is_float32 = linear.dtype == DType::kFloat32;
  linear.precision = is_float32 ? float32_precision() : Precision::kHigh;
  linear.m = in.x.size(0);
  linear.n = in.weight.size(0);
  linear.k = in.weight.size(1);
  linear.x_is_transposed = !has_rows(in.x, 1) && has_columns(in.x, 1);
  linear.relu = relu;
  const Gpu gpu = gpu_of(in.x);
  const Path path =
      demanded_path ? *demanded_path : choose_path(linear, gpu, has_rows(in.weight, 16));
  if (path == Path::kTorch) return {};

  // sm90's copy engine takes rows that begin at multiples of 16 bytes, as the skinny kernel does.
  // An x for three products is split first, wherever its rows begin.
  const int64_t size = in.x.element_size(), alignment = path == Path::kSm80 ? size : 16;
  const bool is_sm90 = path == Path::kSm90;
  const bool is_fp16x3 = linear.precision == Precision::kHighest && path != Path::kSkinny;
  const MatrixView x = readable(in.x, is_fp16x3 ? size : alignment, is_sm90 && !is_float32);
  const MatrixView weight = readable(in.weight, alignment, is_sm90 && !is_fp16x3);
  const Tensor bias = in.bias ? in.bias->contiguous() : Tensor();
  linear.x = x.tensor.const_data_ptr();
  linear.x_stride = x.stride;
  linear.x_is_transposed = x.is_transposed;
  linear.weight = weight.tensor.const_data_ptr();
  linear.weight_stride = weight.stride;
  linear.weight_is_transposed = weight.is_transposed;
  linear.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  linear.divisor = static_cast<float>(in.divisor);
  linear.mask = mask.defined() ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  const bool serves =
      path == Path::kSm80
          ? gpu.capability >= 80 && cuda::linear_sm80_supports(linear)
          : gpu.capability == 90 && (is_sm90 ? cuda::linear_sm90_supports(linear)
                                             : cuda::linear_skinny_supports(linear));
  if (!serves) {
    if (demanded_path) fail("the path that set_linear_path chose does not serve this problem");
    return {};
  }

  const Tensor out = allocate(in.x, {linear.m, linear.n}, in.x.scalar_type());
  linear.out = out.mutable_data_ptr();
  const size_t bytes = path == Path::kSm90   ? cuda::linear_sm90_workspace(linear)
                       : path == Path::kSm80 ? cuda::linear_sm80_workspace(linear)
                                             : 0;
  const Tensor workspace = allocate(in.x, {static_cast<int64_t>(bytes)}, at::kByte);
  linear.workspace = workspace.mutable_data_ptr();
  run_on_device(
      in.x,
      [&](auto stream) {
        return path == Path::kSm90   ? cuda::linear_sm90(linear, stream)
               : path == Path::kSm80 ? cuda::linear_sm80(linear, stream)
                                     : cuda::linear_skinny(linear, stream);
      },
      [] {});
  return out;
}
#else
inline Tensor launch_linear(const LinearInputs&, bool, const Tensor&) { return {}; }
#endif

}  // namespace kernels
