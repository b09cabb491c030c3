// One product on a GPU by the GEMM kernels of linear/: out [M, N] = x [M, K] times weight [N, K]
// transposed, with or without an epilogue (bias, ReLU, division, mask).

#pragma once

#include <optional>
#include <string>

#include "common/sizes.h"
#include "linear/operator/choose_path.h"
#include "linear/operator/float32_precision.h"
#include "linear/operator/operands.h"
#include "torch_support/tensor.h"

namespace kernels {

// The path that the operator set_linear_path forces on all calls of run_gemm, so that tests can run
// every kernel on every size.
inline std::optional<Path> forced_path;

#ifdef KERNELS_WITH_CUDA

// A matrix as a kernel reads it: row-major, or column-major if is_transposed.
struct MatrixView {
  Tensor tensor;
  int64_t stride;  // from one row to the next, or from one column to the next if is_transposed
  bool is_transposed = false;
};

// Copies a matrix so that its rows begin at multiples of `alignment` bytes. Nobody reads the
// padding between the rows.
inline MatrixView copy_with_aligned_rows(const Tensor& matrix, int64_t alignment) {
  const int64_t rows = matrix.size(0);
  const int64_t columns = matrix.size(1);
  const int64_t element_bytes = matrix.element_size();
  const int64_t row_bytes = divide_up(columns * element_bytes, alignment) * alignment;
  const int64_t stride = row_bytes / element_bytes;
  const Tensor copy = allocate(matrix, {rows, stride}, matrix.scalar_type()).narrow(1, 0, columns);
  if (matrix.scalar_type() != at::kFloat || !is_column_major(matrix, element_bytes)) {
    copy.copy_(matrix);
    return {copy, stride};
  }
  // Our kernel takes less time than torch's copy_ (docs/DESIGN.md, "Memory").
  Transposition transposition{};
  transposition.source = matrix.const_data_ptr<float>();
  transposition.source_stride = matrix.stride(1);
  transposition.target = copy.mutable_data_ptr<float>();
  transposition.target_stride = stride;
  transposition.rows = rows;
  transposition.columns = columns;
  run_on_gpu_only(matrix, [&](CUstream_st* stream) {
    return cuda::transpose(transposition, /*is_needed=*/nullptr, stream);
  });
  return {copy, stride};
}

// The layouts of an operand that a path's kernel can read in place.
struct OperandRule {
  int64_t alignment;  // in bytes; each row has to begin at a multiple of it
  bool takes_transposed = false;
};

// Returns the matrix itself if the kernel can read it in place, otherwise a copy.
inline MatrixView make_readable(const Tensor& matrix, const OperandRule& rule) {
  if (is_row_major(matrix, rule.alignment)) return {matrix, matrix.stride(0)};
  if (rule.takes_transposed && is_column_major(matrix, rule.alignment)) {
    return {matrix, matrix.stride(1), /*is_transposed=*/true};
  }
  return copy_with_aligned_rows(matrix, rule.alignment);
}

inline Gpu gpu_of(const Tensor& x) {
  const auto attribute = [device = x.get_device()](cudaDeviceAttr name) {
    int value;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
    return value;
  };
  const int major = attribute(cudaDevAttrComputeCapabilityMajor);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor);
  return {10 * major + minor, attribute(cudaDevAttrMultiProcessorCount)};
}

struct OperandRules {
  OperandRule x, weight;
};

// Returns the rules of a path, which is not torch's, for this product.
inline OperandRules rules_of(Path path, const Product& product) {
  // TMA and vector loads need aligned rows.
  const OperandRule vector_rows{kVectorBytes};
  const OperandRule vector_rows_or_transposed{kVectorBytes, /*takes_transposed=*/true};
  // fp16x3's split of x, and in sm80/ of the weight, reads rows at any address.
  const OperandRule any_rows{bytes_of_element(product.dtype)};

  if (path == Path::kSkinny) return {vector_rows, vector_rows};
  if (path == Path::kSm80) return {any_rows, any_rows};
  // The path sm90: gemm_fp16x3 at `highest`, otherwise gemm_one_product.
  if (product.is_highest()) return {any_rows, vector_rows};
  if (product.is_float32()) return {vector_rows, vector_rows_or_transposed};
  return {vector_rows_or_transposed, vector_rows_or_transposed};
}

struct ReadableOperands {
  MatrixView x, weight;
  Tensor bias;  // undefined for none
};

inline ReadableOperands make_operands_readable(const LinearInputs& inputs,
                                               const OperandRules& rules) {
  return {make_readable(inputs.x, rules.x), make_readable(inputs.weight, rules.weight),
          inputs.bias ? inputs.bias->contiguous() : Tensor()};
}

// The functions of launchers.h that compute a product by one path.
struct GemmKernel {
  bool (*supports)(const LinearArguments& call);
  size_t (*workspace_bytes)(const LinearArguments& call);
  int (*launch)(const LinearArguments& call, CUstream_st* stream);
};

inline GemmKernel kernel_of(Path path) {
  const auto no_bytes = [](const LinearArguments&) -> size_t { return 0; };
  switch (path) {
    case Path::kSkinny:
      return {cuda::linear_skinny_supports, no_bytes, cuda::linear_skinny};
    case Path::kSm90:
      return {cuda::linear_sm90_supports, cuda::linear_sm90_workspace_bytes, cuda::linear_sm90};
    case Path::kSm80:
      return {cuda::linear_sm80_supports, cuda::linear_sm80_workspace_bytes, cuda::linear_sm80};
    case Path::kTorch:
      break;
  }
  fail("no kernel of ours computes torch's product");
}

inline bool has_code_for(const Gpu& gpu, Path path) {
  return path == Path::kSm80 ? gpu.capability >= 80 : gpu.capability == 90;
}

inline Product product_of(const LinearInputs& inputs, bool is_forward) {
  Product product{};
  product.dtype = *kernel_dtype(inputs.x.scalar_type());
  const bool is_float32 = product.dtype == DType::kFloat32;
  product.precision = is_float32 ? float32_precision() : Precision::kOfDtype;
  product.is_forward = is_forward;
  product.m = inputs.x.size(0);
  product.n = inputs.weight.size(0);
  product.k = inputs.weight.size(1);
  product.x_is_transposed =
      !is_row_major(inputs.x, /*alignment=*/1) && is_column_major(inputs.x, /*alignment=*/1);
  product.weight_has_vector_rows = is_row_major(inputs.weight, kVectorBytes);
  return product;
}

// Returns the arguments of a kernel, but for out and workspace. mask may be undefined.
inline LinearArguments arguments_of(const Product& product, const ReadableOperands& operands,
                                    double divisor, const Tensor& mask) {
  const auto& [x, weight, bias] = operands;
  LinearArguments call{};
  call.dtype = product.dtype;
  call.precision = product.precision;
  call.m = product.m;
  call.n = product.n;
  call.k = product.k;
  call.x = x.tensor.const_data_ptr();
  call.x_stride = x.stride;
  call.x_is_transposed = x.is_transposed;
  call.weight = weight.tensor.const_data_ptr();
  call.weight_stride = weight.stride;
  call.weight_is_transposed = weight.is_transposed;
  call.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  call.divisor = static_cast<float>(divisor);
  call.has_relu = product.is_forward;
  call.mask = mask.defined() ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  return call;
}

[[noreturn]] inline void fail_for_forced_path(Path path, const Gpu& gpu, const Tensor& x,
                                              const Tensor& weight) {
  const std::string capability =
      std::to_string(gpu.capability / 10) + "." + std::to_string(gpu.capability % 10);
  fail(std::string("the path ") + name_of(path) +
       ", which set_linear_path chose, does not support x " + describe(x) + " times weight " +
       describe(weight) + " on compute capability " + capability +
       ": launchers.h says what each path supports");
}

// Returns out [M, N] in x's dtype, computed on the current stream; an undefined tensor where
// torch's product is to be used instead.
//
// x [M, K] and weight [N, K] are matrices of any strides, on the current device. The forward
// applies ReLU. A gradient, with is_forward = false, is the product alone. mask [M, (N + 7) / 8] is
// written unless it is undefined.
inline Tensor run_gemm(const LinearInputs& inputs, bool is_forward, const Tensor& mask) {
  if (!inputs.x.is_cuda()) return {};

  const Product product = product_of(inputs, is_forward);
  const Gpu gpu = gpu_of(inputs.x);
  const Path path = forced_path ? *forced_path : choose_path(product, gpu);
  if (path == Path::kTorch) return {};

  // Ask the kernel. If it does not support the call, torch multiplies the original operands.
  const ReadableOperands operands = make_operands_readable(inputs, rules_of(path, product));
  const GemmKernel kernel = kernel_of(path);
  LinearArguments call = arguments_of(product, operands, inputs.divisor, mask);
  if (!has_code_for(gpu, path) || !kernel.supports(call)) {
    if (forced_path) fail_for_forced_path(path, gpu, inputs.x, inputs.weight);
    return {};
  }

  const Tensor out = allocate(inputs.x, {call.m, call.n}, inputs.x.scalar_type());
  call.out = out.mutable_data_ptr();
  const int64_t bytes = static_cast<int64_t>(kernel.workspace_bytes(call));
  const Tensor workspace = allocate(inputs.x, {bytes}, at::kByte);
  call.workspace = workspace.mutable_data_ptr();
  run_on_gpu_only(inputs.x, [&](CUstream_st* stream) { return kernel.launch(call, stream); });
  return out;
}

#else  // A build without CUDA: torch computes every product.

inline Tensor run_gemm(const LinearInputs&, bool, const Tensor&) { return {}; }

#endif

}  // namespace kernels
