// ReLU on CUDA: forward, forward that also packs the mask for backward, backward.
//
// Every byte is read once and written once, so the limit is device memory. One 16-byte access a
// thread and one-shot blocks reach what cudaMemcpy reaches; loops, more accesses a thread and bulk
// copies through shared memory all do worse on an H200.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "common.cuh"
#include "launchers.h"

namespace kernels {
namespace {

// x < 0, false for NaN and for -0, which ReLU therefore keeps as they are.
template <typename T>
__device__ bool is_negative(T x) {
  if constexpr (std::is_unsigned_v<T>) {
    return false;
  } else {
    return x < T{0};
  }
}
__device__ bool is_negative(__half x) { return __hlt(x, __ushort_as_half(0)); }
__device__ bool is_negative(__nv_bfloat16 x) { return __hlt(x, __ushort_as_bfloat16(0)); }

// !(x <= 0), true for NaN: torch lets the gradient through there.
template <typename T>
__device__ bool keeps_gradient(T x) {
  return !(x <= T{0});
}
__device__ bool keeps_gradient(__half x) { return !__hle(x, __ushort_as_half(0)); }
__device__ bool keeps_gradient(__nv_bfloat16 x) { return !__hle(x, __ushort_as_bfloat16(0)); }

template <typename T>
__device__ T zero() {
  return T{};
}
template <>
__device__ __half zero() {
  return __ushort_as_half(0);
}
template <>
__device__ __nv_bfloat16 zero() {
  return __ushort_as_bfloat16(0);
}

template <typename T>
__device__ T relu_of(T x) {
  return is_negative(x) ? zero<T>() : x;
}

constexpr int kBlock = 256;
// Scalar accesses a thread keeps in flight where 16-byte accesses are not possible.
constexpr int kUnroll = 4;

// The element that a thread of a one-shot grid starts at.
template <typename T>
__device__ int64_t first_element() {
  return (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * Vector<T>::kSize;
}

template <typename T>
__global__ void __launch_bounds__(kBlock)
    relu_kernel(const T* x, T* out, int64_t n, bool aligned, bool evict_last) {
  const int64_t i = first_element<T>();
  const int64_t end = min(i + Vector<T>::kSize, n);
  if (aligned && end - i == Vector<T>::kSize) {
    Vector<T> v = load_vector(x + i, l2_policy(evict_last));
#pragma unroll
    for (T& value : v.value) value = relu_of(value);
    store_vector(out + i, v);
  } else {
    for (int64_t j = i; j < end; ++j) out[j] = relu_of(x[j]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kBlock)
    relu_with_mask_kernel(const T* x, T* out, uint8_t* mask, int64_t n, bool aligned,
                          bool evict_last) {
  constexpr int kSize = Vector<T>::kSize;
  const int64_t i = first_element<T>();
  const int64_t end = min(i + kSize, n);
  const uint64_t policy = l2_policy(evict_last);
  uint32_t bits = 0;
  if (aligned && end - i == kSize) {
    Vector<T> v = load_vector(x + i, policy);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      bits |= static_cast<uint32_t>(keeps_gradient(v.value[j])) << j;
      v.value[j] = relu_of(v.value[j]);
    }
    store_vector(out + i, v);
  } else {
    for (int64_t j = i; j < end; ++j) {
      bits |= static_cast<uint32_t>(keeps_gradient(x[j])) << (j - i);
      out[j] = relu_of(x[j]);
    }
  }
  // The bits of one byte lie in 8 / kSize neighbouring threads. All threads of a warp get here.
  constexpr int kThreadsPerByte = 8 / kSize;
  static_assert(kThreadsPerByte >= 1, "a thread has at most the bits of one byte");
  const int place = threadIdx.x % kThreadsPerByte;
  bits <<= place * kSize;
#pragma unroll
  for (int lane = 1; lane < kThreadsPerByte; lane *= 2) {
    bits |= __shfl_xor_sync(0xffffffff, bits, lane);
  }
  if (place == 0 && i < n) store_mask(mask + i / 8, bits, policy);
}

template <typename T>
__global__ void __launch_bounds__(kBlock)
    relu_backward_kernel(const T* grad_output, const uint8_t* mask, T* grad_input, int64_t n,
                         bool aligned, bool evict_last) {
  constexpr int kSize = Vector<T>::kSize;
  const int64_t i = first_element<T>();
  if (i >= n) return;
  const int64_t end = min(i + kSize, n);
  const uint64_t policy = l2_policy(evict_last);
  if (aligned && end - i == kSize) {
    // The gradient first: a use of the mask before it would keep this load waiting for that one.
    Vector<T> v = load_vector(grad_output + i, policy);
    const uint32_t bits = load_mask(mask + i / 8, policy) >> (i % 8);
#pragma unroll
    for (int j = 0; j < kSize; ++j) v.value[j] = bits >> j & 1 ? v.value[j] : zero<T>();
    store_vector(grad_input + i, v);
  } else {
    const uint32_t bits = mask[i / 8] >> (i % 8);
    for (int64_t j = i; j < end; ++j) {
      grad_input[j] = bits >> (j - i) & 1 ? grad_output[j] : zero<T>();
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kBlock)
    relu_strided_kernel(const T* x, T* out, int64_t n, const __grid_constant__ Layout layout) {
  const int64_t start = static_cast<int64_t>(blockIdx.x) * (kBlock * kUnroll) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = start + u * kBlock;
    if (i < n) {
      const int64_t from = offsets_of(i, n, layout).first;
      out[x == out ? from : i] = relu_of(x[from]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kBlock)
    relu_backward_strided_kernel(const T* grad_output, const uint8_t* mask, T* grad_input,
                                 int64_t n, const __grid_constant__ Layout layout) {
  const int64_t start = static_cast<int64_t>(blockIdx.x) * (kBlock * kUnroll) + threadIdx.x;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = start + u * kBlock;
    if (i < n) {
      const Offsets at = offsets_of(i, n, layout);
      const bool keep = mask[at.second / 8] >> (at.second % 8) & 1;
      grad_input[i] = keep ? grad_output[at.first] : zero<T>();
    }
  }
}

// From this size on, loads ask L2 to evict their lines last, so that the lines to be written go to
// memory in longer runs. Below, the data fits in L2 and there is nothing to gain.
constexpr int64_t kEvictLastBytes = 64 << 20;

template <typename T>
bool evicts_last(int64_t n) {
  return n * static_cast<int64_t>(sizeof(T)) >= kEvictLastBytes;
}

// A grid of one thread for each 16 bytes, or of kUnroll elements a thread.
template <typename T>
unsigned vector_grid(int64_t n) {
  constexpr int64_t kPerBlock = kBlock * Vector<T>::kSize;
  return static_cast<unsigned>((n + kPerBlock - 1) / kPerBlock);
}
unsigned scalar_grid(int64_t n) {
  constexpr int64_t kPerBlock = kBlock * kUnroll;
  return static_cast<unsigned>((n + kPerBlock - 1) / kPerBlock);
}

// Calls launch with a null pointer of the dtype's element type.
template <typename Launch>
int for_floating(DType dtype, const Launch& launch) {
  switch (dtype) {
    case DType::kFloat32:
      launch(static_cast<float*>(nullptr));
      break;
    case DType::kFloat64:
      launch(static_cast<double*>(nullptr));
      break;
    case DType::kFloat16:
      launch(static_cast<__half*>(nullptr));
      break;
    case DType::kBFloat16:
      launch(static_cast<__nv_bfloat16*>(nullptr));
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

template <typename Launch>
int for_any(DType dtype, const Launch& launch) {
  switch (dtype) {
    case DType::kInt8:
      launch(static_cast<int8_t*>(nullptr));
      break;
    case DType::kInt16:
      launch(static_cast<int16_t*>(nullptr));
      break;
    case DType::kInt32:
      launch(static_cast<int32_t*>(nullptr));
      break;
    case DType::kInt64:
      launch(static_cast<int64_t*>(nullptr));
      break;
    case DType::kUInt8:
      launch(static_cast<uint8_t*>(nullptr));
      break;
    default:
      return for_floating(dtype, launch);
  }
  return cudaGetLastError();
}

}  // namespace

namespace cuda {

int relu(DType dtype, const void* x, void* out, int64_t n, CUstream_st* stream) {
  return for_any(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    relu_kernel<<<vector_grid<T>(n), kBlock, 0, stream>>>(
        static_cast<const T*>(x), static_cast<T*>(out), n, is_vector_aligned(x, out),
        evicts_last<T>(n));
  });
}

int relu_strided(DType dtype, const void* x, void* out, int64_t n, const Layout& layout,
                 CUstream_st* stream) {
  return for_any(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    relu_strided_kernel<<<scalar_grid(n), kBlock, 0, stream>>>(static_cast<const T*>(x),
                                                               static_cast<T*>(out), n, layout);
  });
}

int relu_with_mask(DType dtype, const void* x, void* out, uint8_t* mask, int64_t n,
                   CUstream_st* stream) {
  return for_floating(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    relu_with_mask_kernel<<<vector_grid<T>(n), kBlock, 0, stream>>>(
        static_cast<const T*>(x), static_cast<T*>(out), mask, n, is_vector_aligned(x, out),
        evicts_last<T>(n));
  });
}

int relu_backward(DType dtype, const void* grad_output, const uint8_t* mask, void* grad_input,
                  int64_t n, CUstream_st* stream) {
  return for_floating(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    relu_backward_kernel<<<vector_grid<T>(n), kBlock, 0, stream>>>(
        static_cast<const T*>(grad_output), mask, static_cast<T*>(grad_input), n,
        is_vector_aligned(grad_output, grad_input), evicts_last<T>(n));
  });
}

int relu_backward_strided(DType dtype, const void* grad_output, const uint8_t* mask,
                          void* grad_input, int64_t n, const Layout& layout, CUstream_st* stream) {
  return for_floating(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    relu_backward_strided_kernel<<<scalar_grid(n), kBlock, 0, stream>>>(
        static_cast<const T*>(grad_output), mask, static_cast<T*>(grad_input), n, layout);
  });
}

}  // namespace cuda
}  // namespace kernels
