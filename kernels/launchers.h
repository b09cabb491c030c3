// What the kernels offer to bindings.cpp: raw pointers, sizes and a stream. No torch here.

#ifndef KERNELS_LAUNCHERS_H_
#define KERNELS_LAUNCHERS_H_

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // cudaStream_t points to it

namespace kernels {

enum class DType { kFloat32, kFloat64, kFloat16, kBFloat16, kInt8, kInt16, kInt32, kInt64, kUInt8 };

// torch allows no more dimensions than this.
constexpr int kMaxDims = 64;

// Operands of any strides, walked in the memory order of a dense result: element i of the result
// has the coordinates i % size[0], i / size[0] % size[1], ... and is found in operand k at the sum
// of coordinate * stride[k]. Strides are in elements; those of a mask are in bits.
struct Layout {
  int ndim = 0;
  int64_t size[kMaxDims];
  int64_t stride[2][kMaxDims];
};

// The ReLU kernels. x, out, grad_output and grad_input hold n elements of one dtype; mask holds
// (n + 7) / 8 bytes, and bit i % 8 of byte i / 8 tells whether the gradient of element i is kept.
// The masks exist for the floating dtypes only.
//
//   relu                   out[i] = x[i] < 0 ? 0 : x[i]; both dense, in one order. x may be out.
//   relu_strided           the same with x read through layout.stride[0], and written through it
//                          where x is out
//   relu_with_mask         relu, and mask bit i = !(x[i] <= 0), which is true for NaN
//   relu_backward          grad_input[i] = mask bit i ? grad_output[i] : 0. They may be the same.
//   relu_backward_strided  the same with grad_output read through layout.stride[0] and the mask
//                          through layout.stride[1]

namespace cuda {

// Each launches on `stream` of the current device and returns the launch's cudaError_t.
int relu(DType dtype, const void* x, void* out, int64_t n, CUstream_st* stream);
int relu_strided(DType dtype, const void* x, void* out, int64_t n, const Layout& layout,
                 CUstream_st* stream);
int relu_with_mask(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n,
                   CUstream_st* stream);
int relu_backward(DType dtype, const void* grad_output, const uint8_t* mask, void* grad_input,
                  int64_t n, CUstream_st* stream);
int relu_backward_strided(DType dtype, const void* grad_output, const uint8_t* mask,
                          void* grad_input, int64_t n, const Layout& layout, CUstream_st* stream);

}  // namespace cuda

namespace cpu {

// Each works on the elements begin <= i < end, on the calling thread; all pointers are those of
// element 0. Where there is a mask to write, begin is a multiple of 8.
void relu(DType dtype, const void* x, void* out, int64_t begin, int64_t end);
void relu_strided(DType dtype, const void* x, void* out, int64_t begin, int64_t end,
                  const Layout& layout);
void relu_with_mask(DType dtype, const void* x, void* out, uint8_t* mask, int64_t begin,
                    int64_t end);
void relu_backward(DType dtype, const void* grad_output, const uint8_t* mask, void* grad_input,
                   int64_t begin, int64_t end);
void relu_backward_strided(DType dtype, const void* grad_output, const uint8_t* mask,
                           void* grad_input, int64_t begin, int64_t end, const Layout& layout);

// Asks for huge pages behind memory that has not been touched yet.
void advise_huge_pages(void* data, size_t bytes);

}  // namespace cpu

}  // namespace kernels

#endif  // KERNELS_LAUNCHERS_H_
