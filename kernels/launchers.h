// The seam between the kernels and the binding: raw pointers, sizes and a stream. No torch here.

#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // cudaStream_t points to it

namespace kernels {

enum class DType { kFloat32, kFloat64, kFloat16, kBFloat16 };

// The accuracy of float32 products, by torch's names: that of TF32, or that of float32.
enum class Precision { kHigh, kHighest };

// The ReLU kernels. x, out, grad_output and grad_input hold n > 0 elements of one dtype, lie in one
// order and begin at multiples of 16 bytes; mask holds (n + 7) / 8 bytes, and bit i % 8 of byte
// i / 8 tells whether the gradient of element i is kept. No two of them overlap.
//
//   relu           out[i] = x[i] < 0 ? 0 : x[i]; where mask is not null, its bit i = !(x[i] <= 0),
//                  which is true for NaN
//   relu_backward  grad_input[i] = mask bit i ? grad_output[i] : 0. grad_output lies as its layout
//                  says: dense or constant, or on a GPU in another way, at any address, where n is
//                  below 2^31

// Linear -> ReLU -> divide: out[m][n] = relu(sum over k of x[m][k] weight[n][k], + bias[n]) /
// divisor, with the ReLU of above and a true division in float (float64: in double).
//
// Masks of these kernels have a row of (n + 7) / 8 bytes for each row of out; bit j % 8 of byte j /
// 8 is !(z <= 0) for the z that relu of column j sees. The bits behind column n - 1 are 0.
struct LinearArguments {
  DType dtype;          // of everything: float32, float16 or bfloat16
  Precision precision;  // of float32
  int64_t m, n, k;      // none is 0
  const void* x;        // [m, k], rows x_stride elements apart, columns adjacent
  int64_t x_stride;
  const void* weight;  // [n, k], rows weight_stride elements apart, columns adjacent
  int64_t weight_stride;
  // linear_sm90: whether the operand is [k, m], or [k, n], instead. In float32 that may be the
  // weight alone, at kHigh.
  bool x_is_transposed, weight_is_transposed;
  const void* bias;  // [n], or null
  float divisor;
  bool relu;        // or the product, with bias and division, as it is
  void* out;        // [m, n], contiguous
  uint8_t* mask;    // [m, (n + 7) / 8], or null
  void* workspace;  // as many bytes as *_workspace says, aligned to 256, uninitialised
};

// to [rows, columns] = from [columns, rows]^T, float32; both have adjacent columns and rows as far
// apart as their strides say.
struct Transposition {
  const float* from;
  int64_t from_stride;
  float* to;
  int64_t to_stride;
  int64_t rows, columns;
};

// Where the elements of a gradient lie: sizes and strides, in elements, of dimensions in the order
// of the output's memory, the innermost first.
struct GradientLayout {
  static constexpr int kMost = 4;
  int dimensions;
  int64_t sizes[kMost], strides[kMost];

  bool is_dense() const { return dimensions == 1 && strides[0] == 1; }
  bool is_constant() const { return dimensions == 1 && strides[0] == 0; }  // as that of a sum
};

namespace cuda {

// Each launches on `stream` of the current device and returns the launch's cudaError_t.
int relu(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n, CUstream_st* stream);
int relu_backward(DType dtype, const void* grad_output, const GradientLayout& layout,
                  const uint8_t* mask, void* grad_input, int64_t n, CUstream_st* stream);

// Tensor-core kernels, for compute capability 9.0 (wgmma) and for 8.0 and newer (mma.sync).
// `serves` tells whether a problem meets a kernel's demands, `workspace` how many bytes it needs.
bool linear_sm90_supports(const LinearArguments& linear);
size_t linear_sm90_workspace(const LinearArguments& linear);
int linear_sm90(const LinearArguments& linear, CUstream_st* stream);
bool linear_sm80_supports(const LinearArguments& linear);
size_t linear_sm80_workspace(const LinearArguments& linear);
int linear_sm80(const LinearArguments& linear, CUstream_st* stream);
// Few rows of x in float32, for compute capability 9.0: no tensor cores, no workspace.
bool linear_skinny_supports(const LinearArguments& linear);
int linear_skinny(const LinearArguments& linear, CUstream_st* stream);

// Copies nothing where is_needed, which may be null, points to a 0 in the GPU's memory.
int transpose(const Transposition& transposition, const unsigned* is_needed, CUstream_st* stream);

// In place, out [m, n] being the finished product, bias included: out = relu(out) / divisor. mask
// may be null. Any floating dtype.
int linear_epilogue(DType dtype, void* out, double divisor, uint8_t* mask, int64_t m, int64_t n,
                    CUstream_st* stream);
// grad_z[m][n] = mask bit ? grad_output[m][n] / divisor : 0, both contiguous; where grad_bias [n]
// is not null, it gets the column sums of grad_z.
int linear_epilogue_backward(DType dtype, const void* grad_output, const uint8_t* mask,
                             double divisor, void* grad_z, void* grad_bias, void* workspace,
                             int64_t m, int64_t n, CUstream_st* stream);
size_t linear_epilogue_backward_workspace(DType dtype, int64_t m, int64_t n);

}  // namespace cuda

namespace cpu {

// Each works on the elements begin <= i < end, on the calling thread; all pointers are those of
// element 0, and begin is a multiple of 8. streams tells whether all threads' elements together are
// more than a cache holds: results then go past it, to memory.
void relu(DType dtype, const void* x, void* out, uint8_t* mask, int64_t begin, int64_t end,
          bool streams);
void relu_backward(DType dtype, const void* grad_output, bool is_constant, const uint8_t* mask,
                   void* grad_input, int64_t begin, int64_t end, bool streams);

// As cuda::linear_epilogue, for the elements of the bytes begin <= i < end of the mask.
void linear_epilogue(DType dtype, void* out, double divisor, uint8_t* mask, int64_t n,
                     int64_t begin, int64_t end);
// As cuda::linear_epilogue_backward, for the pieces begin <= i < end, of which there are as many as
// runs of rows times strips of columns. sums [runs, n] gets the column sums of each run, where it
// is not null; the last function makes grad_bias of them.
int64_t linear_epilogue_backward_runs(int64_t m, int64_t n);
int64_t linear_epilogue_backward_strips(int64_t n);
void linear_epilogue_backward(DType dtype, const void* grad_output, const uint8_t* mask,
                              double divisor, void* grad_z, double* sums, int64_t m, int64_t n,
                              int64_t begin, int64_t end);
void linear_epilogue_backward_sum(DType dtype, double* sums, void* grad_bias, int64_t m, int64_t n);

}  // namespace cpu

}  // namespace kernels
