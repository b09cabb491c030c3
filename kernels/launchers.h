// Declares the functions that run the kernels. They take raw pointers, sizes and a stream, so that
// the kernels do not depend on torch. relu/relu_op.cpp and linear/operator/ check a call's tensors,
// and then call these functions.
//
// Conventions, unless a comment says otherwise:
//
//   - Sizes and strides are in elements, workspaces in bytes. No size is 0.
//   - Outputs and workspaces are uninitialised. Arrays of one call do not overlap.
//   - relu(z) is `z < 0 ? 0 : z`, which keeps NaN and -0. But Linear's kernels on a GPU may give a
//     zero another sign (Epilogue::finish and Divisor<float> in linear/epilogue.cuh).
//   - A mask packs one bit for each element of an output: !(z <= 0), which is 1 where the gradient
//     passes through the ReLU, also for NaN, as in torch. In ReLU's mask, byte i / 8 has element i
//     in bit i % 8. In Linear's mask each row begins a new byte: byte j / 8 of a row has column j
//     in bit j % 8. Example: an output [2, 12] has a mask of 3 bytes for ReLU, and one of [2, 2]
//     bytes for Linear.

#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace kernels {

enum class DType { kFloat32, kFloat64, kFloat16, kBFloat16 };

constexpr int bytes_of_element(DType dtype) {
  if (dtype == DType::kFloat64) return 8;
  if (dtype == DType::kFloat32) return 4;
  return 2;
}

// The layout of grad_output in ReLU's backward, whose strides may differ from the output's.
// Dimension 0 is the innermost dimension of the output. Neighbouring dimensions that one stride
// covers are merged into one. If the output is a contiguous [4, 6], for example, and grad_output is
// the transpose of a contiguous [6, 4], then dimensions = 2, sizes = {6, 4} and strides = {4, 1}.
struct GradientLayout {
  static constexpr int kMaxDimensions = 4;
  int dimensions;  // how many entries of the arrays are used, at least 1
  int64_t sizes[kMaxDimensions], strides[kMaxDimensions];

  // grad_output has the output's own memory order.
  bool is_dense() const { return dimensions == 1 && strides[0] == 1; }

  // Every element of grad_output is the same one, as in the gradient of a sum.
  bool is_constant() const { return dimensions == 1 && strides[0] == 0; }
};

// One call of ReLU: out[i] = relu(x[i]) for i < n. x and out are in one memory order, and begin at
// multiples of 16 bytes.
struct ReluArguments {
  DType dtype;
  int64_t n;
  const void* x;
  void* out;
  uint8_t* mask;  // [(n + 7) / 8]; null where no gradient is needed
};

// One call of its backward: grad_input[i] = mask bit i ? grad_output[i] : 0. grad_input is in the
// output's memory order, and begins at a multiple of 16 bytes.
struct ReluBackwardArguments {
  DType dtype;
  int64_t n;  // below 2^31, unless grad_output is constant, or dense and aligned to 16 bytes
  const void* grad_output;
  GradientLayout layout;  // how grad_output is stored
  const uint8_t* mask;    // [(n + 7) / 8]
  void* grad_input;
};

// The accuracy of a product. In quotes: the value of torch.set_float32_matmul_precision that asks
// for it. docs/DESIGN.md, "The names of a product", says which kernel computes each.
enum class Precision {
  kOfDtype,  // all dtypes but float32: each has one accuracy
  kHigh,     // float32 at "high" or "medium"
  kHighest,  // float32 at "highest"
};

// One call of a GEMM kernel:
//
//   out[m][n] = relu(sum over k of x[m][k] * weight[n][k], plus bias[n]) / divisor
//
// Column n of out is made from row n of the weight (docs/DESIGN.md, "Words"). In x and in the
// weight, the elements of a row are adjacent, and the stride leads from one row to the next.
struct LinearArguments {
  DType dtype;  // x, weight, bias and out are float32, float16 or bfloat16
  Precision precision;
  int64_t m, n, k;

  const void* x;  // [m, k]
  int64_t x_stride;
  const void* weight;  // [n, k]
  int64_t weight_stride;

  // True where the operand is stored as its transpose, x as [k, m] or weight as [k, n]. The stride
  // then leads from one row of the transpose to the next. Only linear_sm90 reads transposes: x and
  // weight in half types, weight alone in float32 with kHigh, neither with kHighest.
  bool x_is_transposed, weight_is_transposed;

  const void* bias;  // [n], contiguous; null for none
  float divisor;     // a normal float with a normal reciprocal
  bool has_relu;     // if false, as for a gradient, out is (product + bias) / divisor
  void* out;         // [m, n], contiguous

  // [m, (n + 7) / 8] bytes, contiguous; null for no mask. Bits beyond column n - 1 are 0.
  uint8_t* mask;

  // As large as the kernel's *_workspace_bytes function says, aligned to 256 bytes.
  void* workspace;
};

// A float32 matrix to transpose: target[r][c] = source[c][r]. In both matrices, the elements of a
// row are adjacent, and the stride leads from one row to the next.
struct Transposition {
  const float* source;  // [columns, rows]
  int64_t source_stride;
  float* target;  // [rows, columns]
  int64_t target_stride;
  int64_t rows, columns;
};

// The fused pass, in any DType: the elementwise work outside of GEMM kernels. float64 divides in
// double, all other types in float. Matrices are contiguous.

// One call of its forward, after torch's product and bias: in place, out = relu(out) / divisor.
struct FusedPassArguments {
  DType dtype;
  double divisor;
  int64_t m, n;
  void* out;      // [m, n]
  uint8_t* mask;  // [m, (n + 7) / 8] as in LinearArguments; null for no mask
};

// One call of its backward, before the products. grad_z is the gradient of z = x weight^T + bias:
//
//   grad_z[i][j] = mask bit ? grad_output[i][j] / divisor : 0
//   grad_bias[j] = the sum over i of grad_z[i][j]
struct FusedPassBackwardArguments {
  DType dtype;
  double divisor;
  int64_t m, n;
  const void* grad_output;  // [m, n]
  const uint8_t* mask;      // [m, (n + 7) / 8]
  void* grad_z;             // [m, n]
  void* grad_bias;          // [n]; null if it is not needed
  void* workspace;          // as large as *_workspace_bytes says, aligned to 8 bytes
};

// --------------------------------------------------------------------------------------------- GPU
//
// Each function that takes a stream launches kernels on it, on the current device. It returns the
// launches' cudaError_t as an int, and does not wait for the GPU. linear_sm90 throws a
// std::runtime_error if the driver rejects a tensor map.

namespace cuda {

int relu(const ReluArguments& call, CUstream_st* stream);
int relu_backward(const ReluBackwardArguments& call, CUstream_st* stream);

// The GEMM kernels. linear/operator/run_gemm.h sets all fields but out and workspace, and asks
// *_supports. It then allocates out and a workspace of *_workspace_bytes, and launches the kernel.

// linear/sm90: tensor cores of compute capability 9.0 (wgmma). float16, bfloat16, and float32
// with kHigh and with kHighest.
bool linear_sm90_supports(const LinearArguments& call);
size_t linear_sm90_workspace_bytes(const LinearArguments& call);
int linear_sm90(const LinearArguments& call, CUstream_st* stream);

// linear/sm80: tensor cores of compute capability 8.0 and newer (mma.sync), if a block can have 128
// KiB of shared memory. Only float32 with kHighest.
bool linear_sm80_supports(const LinearArguments& call);
size_t linear_sm80_workspace_bytes(const LinearArguments& call);
int linear_sm80(const LinearArguments& call, CUstream_st* stream);

// linear/skinny: float32 without tensor cores, for few rows of x, on compute capability 9.0. It
// needs no workspace.
bool linear_skinny_supports(const LinearArguments& call);
int linear_skinny(const LinearArguments& call, CUstream_st* stream);

// `is_needed` is null, or points to an unsigned in the GPU's memory: where that is 0 when the
// kernel runs, nothing is copied.
int transpose(const Transposition& transposition, const unsigned* is_needed, CUstream_st* stream);

// If n is a multiple of 8, or mask is null, the caller may pass the whole matrix as a single row,
// which is the fastest.
int linear_fused_pass(const FusedPassArguments& call, CUstream_st* stream);
size_t linear_fused_pass_backward_workspace_bytes(const FusedPassBackwardArguments& call);
int linear_fused_pass_backward(const FusedPassBackwardArguments& call, CUstream_st* stream);

}  // namespace cuda

// --------------------------------------------------------------------------------------------- CPU
//
// These run on the calling thread. for_each_range (torch_support/elementwise.h) and
// linear/operator/ divide the work among torch's threads, and each thread gets a range begin <= i <
// end. Pointers always point to element 0 of the whole array.

namespace cpu {

// As cuda::relu and cuda::relu_backward, for the elements begin <= i < end. begin is a multiple of
// 8, so that no two threads write one byte of the mask. grad_output is dense or constant. If
// bypasses_caches, results are written by stores that bypass the caches (map_blocks in
// cpu/map_blocks.h).
void relu(const ReluArguments& call, int64_t begin, int64_t end, bool bypasses_caches);
void relu_backward(const ReluBackwardArguments& call, int64_t begin, int64_t end,
                   bool bypasses_caches);

// As cuda::linear_fused_pass, for the elements whose bits are in the bytes begin <= i < end of the
// mask. A byte has the bits of up to eight neighbours in a row. If mask is null, begin and end
// count the bytes that a mask would have, of which there are m * ((n + 7) / 8).
void linear_fused_pass(const FusedPassArguments& call, int64_t begin, int64_t end);

// As cuda::linear_fused_pass_backward, in two steps:
//
//   1. Threads call linear_fused_pass_backward for ranges of units, parts of the matrix (UnitGrid
//      in fused_pass_cpu.cpp). Together the ranges cover all linear_fused_pass_backward_units
//      units. This writes grad_z and, to the workspace, partial sums of its columns.
//   2. If grad_bias is needed, one thread then calls linear_fused_pass_backward_sum, which writes
//      it.
size_t linear_fused_pass_backward_workspace_bytes(const FusedPassBackwardArguments& call);
int64_t linear_fused_pass_backward_units(const FusedPassBackwardArguments& call);
void linear_fused_pass_backward(const FusedPassBackwardArguments& call, int64_t begin, int64_t end);
void linear_fused_pass_backward_sum(const FusedPassBackwardArguments& call);

}  // namespace cpu

}  // namespace kernels
