// Linear -> ReLU -> divide on tensors: the choice of path, the operators, autograd. Part of
// module.cpp.

#ifndef KERNELS_BINDING_LINEAR_H_
#define KERNELS_BINDING_LINEAR_H_

#include "binding/relu_autograd.h"

// From ATen/autocast_mode.h, which would bring all of ATen in.
namespace at::autocast {
at::ScalarType get_autocast_dtype(at::DeviceType device_type);
Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
}  // namespace at::autocast

namespace kernels {
namespace {

// The arguments of the operators: x [..., k], weight [n, k], bias [n] or undefined.
struct LinearInputs {
  const Tensor& x;
  const Tensor& weight;
  const Tensor& bias;
  double divisor;
};

// torch's product, bias included.
Tensor torch_linear(const LinearInputs& in) {
  return at::linear(in.x, in.weight, in.bias.defined() ? std::optional(in.bias) : std::nullopt);
}

// All of it out of torch's own ops.
Tensor linear_composite(const LinearInputs& in) { return torch_linear(in).relu().div(in.divisor); }

bool is_dtensor(const Tensor& x) { return python_type(x) == "DTensor"; }

// Says whether each process can make its part of the result alone, given x, weight and bias of
// which some are DTensors; set once, at import.
PyObject* is_product_of_shards = nullptr;

bool ask_is_product_of_shards(const LinearInputs& in) {
  const PyGILState_STATE gil = PyGILState_Ensure();
  const auto wrap = [](const Tensor& t) {
    return t.defined() ? THPVariable_Wrap(t) : Py_NewRef(Py_None);
  };
  PyObject* const arguments[] = {wrap(in.x), wrap(in.weight), wrap(in.bias)};
  PyObject* const answer = PyObject_Vectorcall(is_product_of_shards, arguments, 3, nullptr);
  for (PyObject* argument : arguments) Py_DECREF(argument);
  const bool is_product = answer == Py_True;
  if (answer == nullptr) PyErr_WriteUnraisable(is_product_of_shards);
  Py_XDECREF(answer);
  PyGILState_Release(gil);
  return is_product;
}

// Whether no kernel of ours takes part: torch's ops then do all the work, or raise their errors.
bool is_left_to_torch(const LinearInputs& in) {
  const auto is_ordinary = [](const Tensor& t) {
    return t.layout() == at::kStrided && !t.is_quantized() && !t.is_nested();
  };
  const auto is_shard_or_plain = [&] {
    if (!(in.x.key_set() | in.weight.key_set()).has(at::DispatchKey::Python)) return true;
    if (is_dtensor(in.x) || is_dtensor(in.weight)) return ask_is_product_of_shards(in);
    return !is_wrapper(in.x) && !is_wrapper(in.weight);
  };
  const std::optional<DType> dtype = kernel_dtype(in.x.scalar_type());
  return !dtype || !at::isFloatingType(in.x.scalar_type()) || in.x.dim() == 0 ||
         in.weight.dim() != 2 || (in.bias.defined() && in.bias.dim() != 1) || !is_ordinary(in.x) ||
         !is_ordinary(in.weight) || !is_shard_or_plain();
}

// Whether the divisor and its reciprocal are normal floats; false for 0, infinity and NaN. On a GPU
// torch multiplies by the reciprocal, rounded to float from that of a float (2.9) or of a double
// (2.10 and newer). By other divisors it gets NaN and infinity where a division does not: 0 / 1e-39
// is NaN, inf / 1e39 is NaN in 2.9 alone.
bool has_normal_reciprocal(double divisor) {
  const double magnitude = std::abs(divisor);
  return magnitude >= 0x1p-126 && magnitude <= 0x1p126;
}

// Whether the arguments fit together and the result is not empty. Otherwise torch's ops raise their
// errors, give an empty result its strides, or divide as they do. Symbolic sizes are taken to fit.
bool is_regular(const LinearInputs& in) {
  if (in.x.is_cuda() && !has_normal_reciprocal(in.divisor)) return false;
  const auto is_symbolic = [](const Tensor& t) {
    return t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  if (is_symbolic(in.x) || is_symbolic(in.weight)) return true;
  const auto is_like_x = [&](const Tensor& t) {
    return t.scalar_type() == in.x.scalar_type() && t.device() == in.x.device();
  };
  return is_like_x(in.weight) && in.x.size(-1) == in.weight.size(1) &&
         (!in.bias.defined() || (is_like_x(in.bias) && in.bias.size(0) == in.weight.size(0))) &&
         in.x.numel() > 0 && in.weight.numel() > 0;
}

// ---------------------------------------------------------------------------------------- paths

// How a product on a GPU is computed, x being [m, k] and weight [n, k], by the first line that
// fits. The limits are where the path began to win on an H200 (docs/BENCHMARKS.md has the sweep).
//
//   dtype              GPU          where                                     path
//   float32            9.0          m <= 8                                    kSkinny
//   float32, highest   9.0          m <= 16, or m <= 32 and n k < 2^25; or    kSkinny
//                                   m n <= 2^16, m <= 2^12, n >= 8, and
//                                   n < 32 or m n k <= 2^28; all: k >= 256
//   float16, bfloat16  9.0          m n >= 2^22, k >= 1024, fill 0.9          kSm90
//   float32, highest   9.0          m n >= 2^15, n k >= 2^18, k >= 256,       kSm90
//                                   m >= 17 (96 where a copy of the weight is
//                                   read, as in gradients), n >= 32
//                      8.0, 10.0    m n >= 2^22, k >= 1024                    kSm80
//   float32, high      9.0          m > 512, m n >= 2^22, k >= 1024,          kSm90
//                                   m n k >= 2^33 (2^34 if m > n), fill 0.6
//   all else                                                                  kTorch
//
//   kSkinny       the kernel of skinny.cu, without tensor cores: for products with ReLU, of
//                 weights whose rows begin at multiples of 16 bytes
//   kSm90, kSm80  the kernels of sm90/launch.cu (wgmma) and sm80/launch.cu (mma.sync). The fill is
//                 what the result takes of sm90/launch.cu's rounds of tiles of 256 x 256, one for
//                 each pair of multiprocessors
//   kTorch        torch's product, then linear_epilogue in place. It wins where half types' result
//                 is small, and where float32's sums are short or features few. GPUs between, whose
//                 tensor cores add float16 products in float32 at half their rate, would not gain
//                 from three products
//
// cuBLASLt could add the bias and apply ReLU in its product (at::_addmm_activation, with the
// division in the scale). It is no path: its ReLU makes 0 of NaN.
//
// Half types' kSm90 reads operands with adjacent rows as it reads those with adjacent columns; all
// other paths copy what has no adjacent columns.
//
// The products of the gradients are chosen by the same table, in half types where both operands can
// be read where they are, and in float32 at `high` for results of 2^24 elements and more. Gradients
// that are differentiated again are torch's.
enum class Path { kAuto, kSkinny, kSm90, kSm80, kTorch };
constexpr std::pair<const char*, Path> kPaths[] = {{"auto", Path::kAuto},
                                                   {"skinny", Path::kSkinny},
                                                   {"sm90", Path::kSm90},
                                                   {"sm80", Path::kSm80},
                                                   {"torch", Path::kTorch}};

// The choice of set_linear_path, which is there for tests.
Path chosen_path = Path::kAuto;

// A float32 product on a GPU has the accuracy of TF32 where cuBLAS would round the operands of
// torch's to TF32, or else that of float32. By the first line that fits:
//
//   fp32_precision   NVIDIA_TF32_OVERRIDE   torch's product             ours
//   "bfx9"           any                    nine products of bfloat16   kHighest
//   any              "0"                    float32                     kHighest
//   any              "1"                    TF32                        kHigh
//   "tf32"           any                    TF32                        kHigh
//   "ieee", "none"   any                    float32                     kHighest
//
// fp32_precision is that of torch.backends.cuda.matmul; where that is "none", of
// torch.backends.cudnn; and where that is "none" too, of torch.backends. The older
// set_float32_matmul_precision and allow_tf32 write the first of these, and torch's products read
// nothing else. Context::allowTF32CuBLAS, which raises an error where old and new setters were
// mixed, is for the getter of allow_tf32. cuBLAS reads the variable once, for its first product.
Precision float32_precision() {
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

#ifdef KERNELS_WITH_CUDA
// The share that the result fills of the rounds of tiles that it is made in.
double fill(const Linear& linear) {
  int device, multiprocessors;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const int64_t tiles = (linear.m + 255) / 256 * ((linear.n + 255) / 256);
  const int64_t pairs = multiprocessors / 2, rounds = (tiles + pairs - 1) / pairs;
  return static_cast<double>(linear.m) * linear.n / (rounds * pairs * 256 * 256);
}

bool is_skinny(const Linear& linear) {
  const int64_t m = linear.m, n = linear.n, k = linear.k;
  if (m <= 8) return true;
  const bool is_small =
      m * n <= 1 << 16 && (n < 32 || m * n * k <= 1 << 28) && m <= 1 << 12 && n >= 8;
  const bool has_few_rows = m <= 16 || (m <= 32 && n * k < 1 << 25);
  return linear.precision == Precision::kHighest && k >= 256 && (has_few_rows || is_small);
}

// Elements of a result that half types and one product of float32 need to win.
constexpr int64_t kLargeResult = int64_t{1} << 22;

// The path to try, by dtype, sizes and GPU. has_vectors: whether the weight can be read as it is,
// by 16-byte vectors.
Path choose_path(const Linear& linear, int capability, bool has_vectors) {
  if (chosen_path != Path::kAuto) return chosen_path;
  const int64_t size = linear.m * linear.n, k = linear.k;
  const bool is_float32 = linear.dtype == DType::kFloat32;
  if (capability == 90 && is_float32 && linear.relu && has_vectors && is_skinny(linear)) {
    return Path::kSkinny;
  }
  const bool is_split = is_float32 && linear.precision == Precision::kHighest;
  if (linear.dtype == DType::kFloat64 || k < (is_split ? 256 : 1024)) return Path::kTorch;
  if (is_split) {
    // torch's product of rows with adjacent features is the faster one below 96 rows.
    const int64_t least_rows = linear.relu && has_vectors ? 17 : 96;
    const bool is_sm90s = capability == 90 && linear.m >= least_rows && linear.n >= 32 &&
                          size >= 1 << 15 && linear.n * k >= 1 << 18;
    const bool is_sm80s = (capability == 80 || capability == 100) && size >= 1 << 22 && k >= 1024;
    return is_sm90s ? Path::kSm90 : is_sm80s ? Path::kSm80 : Path::kTorch;
  }
  const int64_t least = int64_t{1} << (linear.m > linear.n ? 34 : 33);
  const bool is_large =
      size >= kLargeResult && (!is_float32 || (linear.m > 512 && size >= least / k));
  const bool is_sm90s = capability == 90 && is_large && fill(linear) >= (is_float32 ? 0.6 : 0.9);
  return is_sm90s ? Path::kSm90 : Path::kTorch;
}

bool serves(Path path, const Linear& linear, int capability) {
  switch (path) {
    case Path::kSkinny:
      return capability == 90 && cuda::linear_skinny_serves(linear);
    case Path::kSm90:
      return capability == 90 && cuda::linear_sm90_serves(linear);
    case Path::kSm80:
      return capability >= 80 && cuda::linear_sm80_serves(linear);
    default:
      return true;
  }
}

// `path`, or torch's, now that the operands' places in memory are known.
Path path_that_serves(Path path, const Linear& linear, int capability) {
  if (serves(path, linear, capability)) return path;
  if (chosen_path != Path::kAuto) {
    fail("the path that set_linear_path chose does not serve this problem");
  }
  return Path::kTorch;
}

// The current device's capability: 10 times the major number, plus the minor one.
int compute_capability() {
  int device, major, minor;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return 10 * major + minor;
}
#endif

// ------------------------------------------------------------------------------------- operators

// The leading dimensions of x as one.
int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d < x.dim() - 1; ++d) rows *= x.size(d);
  return rows;
}

c10::SymInt sym_rows_of(const Tensor& x) {
  c10::SymInt rows = 1;
  for (int64_t d = 0; d < x.dim() - 1; ++d) rows *= x.sym_size(d);
  return rows;
}

// The same as a matrix; what autograd records of it is a view, or a copy where there is no view.
Tensor as_matrix(const Tensor& x) {
  return x.dim() == 2 ? x : x.reshape_symint({sym_rows_of(x), x.sym_size(-1)});
}

// The sizes of a tensor with another last one.
c10::DimVector with_last(at::IntArrayRef sizes, int64_t last) {
  c10::DimVector result(sizes);
  result.back() = last;
  return result;
}

c10::SymDimVector with_last(c10::SymIntArrayRef sizes, const c10::SymInt& last) {
  c10::SymDimVector result(sizes);
  result.back() = last;
  return result;
}

// A matrix with its rows along the leading dimensions of `like`.
Tensor with_rows_of(const Tensor& like, const Tensor& matrix) {
  if (like.dim() == 2) return matrix;
  return matrix.view_symint(with_last(like.sym_sizes(), matrix.sym_size(-1)));
}

int64_t mask_row_bytes(int64_t n) { return (n + 7) / 8; }

// out = relu(out) / divisor, and the mask if there is one to write.
void run_linear_epilogue(DType dtype, const Tensor& out, double divisor, const Tensor& mask) {
  if (out.numel() == 0) return;
  int64_t m = rows_of(out), n = out.size(-1);
  char* const data = static_cast<char*>(out.mutable_data_ptr());
  uint8_t* const bits = mask.defined() ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  if (bits == nullptr || n % 8 == 0) {  // nothing tells the rows apart
    n *= m;
    m = 1;
  }
  KERNELS_ON_CUDA(out, linear_epilogue(dtype, data, divisor, bits, m, n, stream))
  const int64_t size = out.element_size();
  if (m == 1) {
    split(mask_row_bytes(n), kGrain / 8, [&](int64_t begin, int64_t end) {
      cpu::linear_epilogue(dtype, data + begin * 8 * size, divisor, bits ? bits + begin : nullptr,
                           1, std::min(end * 8, n) - begin * 8);
    });
  } else {
    split(m, std::max<int64_t>(kGrain / n, 1), [&](int64_t begin, int64_t end) {
      cpu::linear_epilogue(dtype, data + begin * n * size, divisor,
                           bits + begin * mask_row_bytes(n), end - begin, n);
    });
  }
}

#ifdef KERNELS_WITH_CUDA
// A matrix as the kernels read it: columns adjacent, rows that do not overlap; or the same of its
// transpose.
struct Rows {
  Tensor tensor;
  int64_t stride;
  bool is_transposed = false;
};

// Whether x can be read so, with rows `stride` apart that begin at multiples of `alignment` bytes.
bool is_aligned(const Tensor& x, int64_t stride, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % alignment == 0 &&
         stride * x.element_size() % alignment == 0;
}
bool has_lines(const Tensor& matrix, int64_t alignment, int along, int across) {
  const int64_t stride = matrix.stride(across);
  return matrix.stride(along) == 1 && stride >= matrix.size(along) &&
         is_aligned(matrix, stride, alignment);
}
bool has_rows(const Tensor& matrix, int64_t alignment) {
  return has_lines(matrix, alignment, 1, 0);
}
bool has_columns(const Tensor& matrix, int64_t alignment) {
  return has_lines(matrix, alignment, 0, 1);
}

// The rows of x, which begin at multiples of `alignment` bytes: its own, or those of its transpose
// if they serve too, or of a copy, with padding that nobody reads.
Rows adjacent_columns(const Tensor& x, int64_t alignment, bool takes_transposed) {
  const int64_t columns = x.size(-1), size = x.element_size();
  if (x.is_contiguous() && is_aligned(x, columns, alignment)) return {x, columns};
  const Tensor rows = x.dim() == 2 ? x : x.reshape({-1, columns});
  if (has_rows(rows, alignment)) return {rows, rows.stride(0)};
  if (takes_transposed && has_columns(rows, alignment)) return {rows, rows.stride(1), true};
  const int64_t stride = (columns * size + alignment - 1) / alignment * alignment / size;
  const Tensor padded = allocate(x, {rows.size(0), stride}, std::nullopt, x.scalar_type());
  const Tensor copy = padded.narrow(1, 0, columns);
  constexpr int64_t kMostColumns = 1 << 21;
  if (x.scalar_type() == at::kFloat && rows.stride(0) == 1 && rows.stride(1) >= rows.size(0) &&
      columns <= kMostColumns) {  // 163 us where torch's copy takes 466: [8192, 8192], H200
    const float* const from = rows.const_data_ptr<float>();
    float* const to = copy.mutable_data_ptr<float>();
    launch_on_stream(x, [&](cudaStream_t stream) {
      return cuda::transpose(from, rows.stride(1), to, stride, rows.size(0), columns, stream);
    });
  } else {
    copy.copy_(rows);
  }
  return {copy, stride};
}

// Writes out and mask by the path of choice, or returns false if that is torch's product. Without
// relu, out is the product, with bias and division, as it is.
bool run_linear_kernel(DType dtype, const LinearInputs& in, bool relu, Tensor* out,
                       const Tensor& mask) {
  if (!is_regular(in)) return false;
  const bool is_float32 = dtype == DType::kFloat32;
  Linear linear{};
  linear.dtype = dtype;
  linear.precision = is_float32 ? float32_precision() : Precision::kHigh;
  linear.m = rows_of(in.x);
  linear.n = in.weight.size(0);
  linear.k = in.weight.size(1);
  const Tensor bias = in.bias.defined() ? in.bias.contiguous() : Tensor();
  linear.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  linear.divisor = static_cast<float>(in.divisor);
  linear.relu = relu;
  linear.mask = mask.defined() ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  const int capability = compute_capability();
  const bool has_vectors = has_rows(in.weight, 16);
  Path path = choose_path(linear, capability, has_vectors);
  if (path == Path::kTorch) return false;
  // sm90's copy engine takes rows that begin at multiples of 16 bytes, as the skinny kernel does.
  // An x for three products is split first, wherever its rows begin.
  const int64_t alignment = path == Path::kSm80 ? in.x.element_size() : 16;
  const bool is_split = linear.precision == Precision::kHighest && path != Path::kSkinny;
  const bool takes_transposed = !is_float32 && path == Path::kSm90;
  const Rows x =
      adjacent_columns(in.x, is_split ? in.x.element_size() : alignment, takes_transposed);
  const Rows weight = adjacent_columns(in.weight, alignment, takes_transposed);
  linear.x = x.tensor.const_data_ptr();
  linear.x_stride = x.stride;
  linear.x_is_transposed = x.is_transposed;
  linear.weight = weight.tensor.const_data_ptr();
  linear.weight_stride = weight.stride;
  linear.weight_is_transposed = weight.is_transposed;
  path = path_that_serves(path, linear, capability);
  if (path == Path::kTorch) return false;

  *out = allocate(in.x, with_last(in.x.sizes(), linear.n), std::nullopt, in.x.scalar_type());
  linear.out = out->mutable_data_ptr();
  const size_t bytes = path == Path::kSm90   ? cuda::linear_sm90_workspace(linear)
                       : path == Path::kSm80 ? cuda::linear_sm80_workspace(linear)
                                             : 0;
  Tensor workspace;
  if (bytes > 0) {
    workspace = allocate(in.x, {static_cast<int64_t>(bytes)}, std::nullopt, at::kByte);
    linear.workspace = workspace.mutable_data_ptr();
  }
  launch_on_stream(in.x, [&](cudaStream_t stream) {
    return path == Path::kSm90   ? cuda::linear_sm90(linear, stream)
           : path == Path::kSm80 ? cuda::linear_sm80(linear, stream)
                                 : cuda::linear_skinny(linear, stream);
  });
  return true;
}
#endif

// Returns the output; writes the mask if there is one.
Tensor run_linear(const LinearInputs& in, const Tensor& mask) {
  const DType dtype = floating_dtype(in.x, "input");
  const at::AutoDispatchBelowADInplaceOrView below;
  Tensor out;
#ifdef KERNELS_WITH_CUDA
  if (in.x.is_cuda() && run_linear_kernel(dtype, in, /*relu=*/true, &out, mask)) return out;
#endif
  // Below autograd, torch would multiply the matrices of a tensor with gaps one by one.
  const Tensor x = in.x.dim() > 2 ? in.x.contiguous() : in.x;
  out = with_all_memory(
      [&] { return torch_linear({x, in.weight, in.bias, in.divisor}).contiguous(); });
  run_linear_epilogue(dtype, out, in.divisor, mask);
  return out;
}

Tensor linear_kernel(const LinearInputs& in) {
  if (is_left_to_torch(in) || !is_regular(in)) return linear_composite(in);
  const DeviceOf device(in.x);
  return run_linear(in, Tensor());
}

std::tuple<Tensor, Tensor> linear_with_mask_kernel(const LinearInputs& in) {
  if (is_left_to_torch(in)) fail("linear_relu_divide_with_mask: expected dense floating tensors");
  const DeviceOf device(in.x);
  const Tensor mask = allocate(in.x, with_last(in.x.sizes(), mask_row_bytes(in.weight.size(0))),
                               std::nullopt, at::kByte);
  return {run_linear(in, mask), mask};
}

std::tuple<Tensor, Tensor> linear_with_mask_meta(const LinearInputs& in) {
  const Tensor out = linear_composite(in);
  const c10::SymInt bytes = (in.weight.sym_size(0) + 7) / 8;
  const auto options = out.options().dtype(at::kByte);
  return {out, at::empty_symint(with_last(in.x.sym_sizes(), bytes), options)};
}

// grad_z, the gradient of the product, and its sum over all rows, which is that of the bias; empty
// where nobody wants it.
struct LinearGradients {
  const Tensor& grad_output;
  const Tensor& mask;
  double divisor;
  bool wants_bias;
};

std::tuple<Tensor, Tensor> linear_backward_kernel(const LinearGradients& in) {
  const DType dtype = floating_dtype(in.grad_output, "grad_output");
  const Tensor& mask = in.mask;
  if (in.grad_output.dim() == 0) fail("grad_output must have at least one dimension");
  const int64_t m = rows_of(in.grad_output), n = in.grad_output.size(-1);
  if (mask.scalar_type() != at::kByte || !mask.is_contiguous() || mask.dim() == 0 ||
      rows_of(mask) != m || mask.size(-1) != mask_row_bytes(n) ||
      mask.device() != in.grad_output.device()) {
    fail("mask must be contiguous, uint8, on the gradient's device, with %ld rows of %ld", m,
         mask_row_bytes(n));
  }
  const DeviceOf device(in.grad_output);
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor grad_output = in.grad_output.contiguous();
  const at::ScalarType type = grad_output.scalar_type();
  const Tensor grad_z = allocate(grad_output, grad_output.sizes(), std::nullopt, type);
  const Tensor grad_bias = allocate(grad_output, {in.wants_bias ? n : 0}, std::nullopt, type);
  const void* from = grad_output.const_data_ptr();
  const uint8_t* bits = mask.const_data_ptr<uint8_t>();
  void* const to = grad_z.mutable_data_ptr();
  void* const sums = in.wants_bias ? grad_bias.mutable_data_ptr() : nullptr;
  if (n == 0 || (m == 0 && !in.wants_bias)) return {grad_z, grad_bias};
#ifdef KERNELS_WITH_CUDA
  if (grad_output.is_cuda()) {
    const size_t bytes = in.wants_bias ? cuda::linear_epilogue_backward_workspace(dtype, m, n) : 0;
    const Tensor workspace =
        allocate(grad_output, {static_cast<int64_t>(bytes)}, std::nullopt, at::kByte);
    void* const scratch = workspace.mutable_data_ptr();
    launch_on_stream(grad_output, [&](cudaStream_t stream) {
      return cuda::linear_epilogue_backward(dtype, from, bits, in.divisor, to, sums, scratch, m, n,
                                            stream);
    });
    return {grad_z, grad_bias};
  }
#endif
  const at::ScalarType sum_type = type == at::kDouble ? at::kDouble : at::kFloat;
  const Tensor workspace =
      allocate(grad_output, {in.wants_bias ? 2 * n : 0}, std::nullopt, sum_type);
  void* const scratch = workspace.mutable_data_ptr();
  const int64_t grain = std::max<int64_t>(kGrain / 8 / std::max<int64_t>(m, 1), 1);
  split(mask_row_bytes(n), grain, [&](int64_t begin, int64_t end) {
    cpu::linear_epilogue_backward(dtype, from, bits, in.divisor, to, sums, scratch, m, n, begin * 8,
                                  std::min(end * 8, n));
  });
  return {grad_z, grad_bias};
}

std::tuple<Tensor, Tensor> linear_backward_meta(const LinearGradients& in) {
  const auto options = in.grad_output.options();
  const c10::SymInt n = in.wants_bias ? in.grad_output.sym_size(-1) : c10::SymInt(0);
  return {at::empty_symint(in.grad_output.sym_sizes(), options), at::empty_symint({n}, options)};
}

// A tensor with the signs of the forward's output, out of the mask.
Tensor linear_signs(const LinearGradients& in) {
  const Tensor places = at::arange(8, in.mask.options());
  return in.mask.unsqueeze(-1)
      .bitwise_right_shift(places)
      .bitwise_and(1)
      .flatten(-2)
      .narrow_symint(-1, 0, in.grad_output.sym_size(-1))
      .reshape_symint(in.grad_output.sym_sizes())
      .to(in.grad_output.scalar_type());
}

// The same out of torch's own ops, given such signs, for the transforms that take an operator
// apart and for gradients of gradients.
std::tuple<Tensor, Tensor> linear_backward_by_signs(const LinearGradients& in,
                                                    const Tensor& signs) {
  const Tensor grad_z = at::threshold_backward(in.grad_output.div(in.divisor), signs, 0);
  if (!in.wants_bias) return {grad_z, at::empty_symint({0}, in.grad_output.options())};
  return {grad_z, as_matrix(grad_z).sum(0)};
}

std::tuple<Tensor, Tensor> linear_backward_composite(const LinearGradients& in) {
  return linear_backward_by_signs(in, linear_signs(in));
}

// ----------------------------------------------------------------------------------- dispatcher

Stack stack_of(const LinearInputs& in) {
  return {in.x, in.weight, in.bias.defined() ? c10::IValue(in.bias) : c10::IValue(), in.divisor};
}

// Where the dispatcher would do nothing below autograd but call our kernel; linear heeds autocast.
bool is_dense(const LinearInputs& in) {
  c10::DispatchKeySet keys = in.x.key_set() | in.weight.key_set();
  if (in.bias.defined()) keys = keys | in.bias.key_set();
  return has_only(keys, kDense);
}

Tensor call_linear_operator(const LinearInputs& in) {
  return call_operator(KERNELS_NAMESPACE "::linear_relu_divide", stack_of(in))[0].toTensor();
}

// The operators below autograd. Those of dense tensors go to the kernel straight away.
Tensor call_linear(const LinearInputs& in) {
  if (is_dense(in)) return linear_kernel(in);
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_linear_operator(in);
}

std::tuple<Tensor, Tensor> call_linear_with_mask(const LinearInputs& in) {
  if (is_dense(in)) return linear_with_mask_kernel(in);
  const at::AutoDispatchBelowADInplaceOrView below;
  const Stack stack =
      call_operator(KERNELS_NAMESPACE "::linear_relu_divide_with_mask", stack_of(in));
  return {stack[0].toTensor(), stack[1].toTensor()};
}

std::tuple<Tensor, Tensor> call_linear_backward(const LinearGradients& in) {
  if (is_dense(in.grad_output) && is_dense(in.mask) && !wants_gradient(in.grad_output) &&
      !has_tangent(in.grad_output)) {
    return linear_backward_kernel(in);
  }
  const Stack stack = call_operator(KERNELS_NAMESPACE "::linear_relu_divide_backward",
                                    {in.grad_output, in.mask, in.divisor, in.wants_bias});
  return {stack[0].toTensor(), stack[1].toTensor()};
}

// As autocast treats nn.Linear: everything in its dtype but float64, which it leaves alone.
template <at::DeviceType device, at::DispatchKey key>
Tensor linear_autocast(const LinearInputs& in) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  const at::ScalarType type = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, device); };
  const Tensor x = cast(in.x), weight = cast(in.weight);
  const Tensor bias = in.bias.defined() ? cast(in.bias) : Tensor();
  return call_linear_operator({x, weight, bias, in.divisor});
}

// ------------------------------------------------------------------------------------- autograd

#ifdef KERNELS_WITH_CUDA
// Whether our kernels may make a product of gradients. In float32 they read a copy of b^T, which at
// `high` is worth its time where the result is large: on an H200 2^24 elements took 0.45 to 0.86 of
// the time of torch's product, 2^23 0.76 to 1.26. Half types are read where they are, or left to
// torch.
bool may_be_ours(const Tensor& a, const Tensor& b) {
  constexpr int64_t kLargeGradient = int64_t{1} << 24;
  const int64_t size = a.size(0) * b.size(1);
  if (a.scalar_type() == at::kFloat) {
    return float32_precision() == Precision::kHighest || chosen_path == Path::kSm90 ||
           (chosen_path == Path::kAuto && size >= kLargeGradient);
  }
  const auto is_readable = [](const Tensor& t) { return has_rows(t, 16) || has_columns(t, 16); };
  const bool is_large = chosen_path != Path::kAuto || size >= kLargeResult;
  return a.element_size() == 2 && is_large && is_readable(a) && is_readable(b);
}
#endif

// The products of the gradients: a [i, j] b [j, k]. Our kernels serve where autograd records
// nothing of it.
Tensor product(const Tensor& a, const Tensor& b) {
#ifdef KERNELS_WITH_CUDA
  if (a.is_cuda() && !at::GradMode::is_enabled() && has_only(a.key_set() | b.key_set(), kDense) &&
      !has_tangent(a) && !has_tangent(b) && may_be_ours(a, b)) {
    const DeviceOf device(a);
    const at::AutoDispatchBelowADInplaceOrView below;
    const DType dtype = *kernel_dtype(a.scalar_type());
    const Tensor none;
    Tensor out;
    if (run_linear_kernel(dtype, {a, b.t(), none, /*divisor=*/1.0}, /*relu=*/false, &out,
                          /*mask=*/none)) {
      return out;
    }
  }
#endif
  return with_all_memory([&] { return a.mm(b); });
}

// The gradients of x, where weight is defined, of weight, where x is, and of bias, made of the
// first ones, which are those of the product and of bias.
struct AllGradients {
  LinearGradients first;
  const Tensor& x;
  const Tensor& weight;
};
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

ThreeTensors multiply_out(const AllGradients& in, std::tuple<Tensor, Tensor> first) {
  const auto& [grad_z, grad_bias] = first;
  Tensor grad_x, grad_weight;
  if (in.weight.defined()) {
    grad_x = with_rows_of(grad_z, product(as_matrix(grad_z), in.weight));
  }
  if (in.x.defined()) grad_weight = product(as_matrix(grad_z).t(), as_matrix(in.x));
  return {grad_x, grad_weight, grad_bias};
}

// An operator returns no undefined tensors: those that nobody wants are empty.
ThreeTensors with_empty(ThreeTensors gradients, const at::TensorOptions& options) {
  auto& [grad_x, grad_weight, grad_bias] = gradients;
  for (Tensor* gradient : {&grad_x, &grad_weight}) {
    if (!gradient->defined()) *gradient = at::empty_symint({0}, options);
  }
  return gradients;
}

ThreeTensors linear_gradients_kernel(const AllGradients& in) {
  // Whoever runs a graph may have modes on that were off, or other ones, when it was traced.
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  return with_empty(multiply_out(in, linear_backward_kernel(in.first)),
                    in.first.grad_output.options());
}

ThreeTensors linear_gradients_meta(const AllGradients& in) {
  const Tensor& grad_output = in.first.grad_output;
  if (grad_output.dim() == 0) fail("grad_output must have at least one dimension");
  const auto options = grad_output.options();
  Tensor grad_x, grad_weight;
  if (in.weight.defined()) {
    grad_x = at::empty_symint(with_last(grad_output.sym_sizes(), in.weight.sym_size(1)), options);
  }
  if (in.x.defined()) {
    grad_weight = at::empty_symint({grad_output.sym_size(-1), in.x.sym_size(-1)}, options);
  }
  return with_empty({grad_x, grad_weight, std::get<1>(linear_backward_meta(in.first))}, options);
}

ThreeTensors linear_gradients_composite(const AllGradients& in) {
  return with_empty(multiply_out(in, linear_backward_composite(in.first)),
                    in.first.grad_output.options());
}

bool any(const AllGradients& in, bool (*is)(const Tensor&)) {
  return is(in.first.grad_output) || (in.x.defined() && is(in.x)) ||
         (in.weight.defined() && is(in.weight));
}

// linear_signs of a DTensor, whose bits are taken apart where they lie.
Tensor dtensor_signs(const LinearGradients& in) {
  const Tensor ones = at::ones_like(in.grad_output);
  return std::get<0>(call_linear_backward({ones, in.mask, /*divisor=*/1.0, /*wants_bias=*/false}));
}

ThreeTensors call_linear_gradients_operator(const AllGradients& in) {
  const LinearGradients& first = in.first;
  const auto optional = [](const Tensor& t) {
    return t.defined() ? c10::IValue(t) : c10::IValue();
  };
  const int64_t outputs = in.weight.defined() | in.x.defined() << 1 | first.wants_bias << 2;
  const Stack stack = call_operator(
      KERNELS_NAMESPACE "::linear_relu_divide_gradients",
      {first.grad_output, first.mask, optional(in.x), optional(in.weight), outputs, first.divisor});
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

// Called where autograd records nothing.
ThreeTensors call_linear_gradients(const AllGradients& in) {
  const auto is_not_dense = [](const Tensor& t) { return !is_dense(t) || has_tangent(t); };
  if (!is_dense(in.first.mask) || any(in, is_not_dense)) return call_linear_gradients_operator(in);
  return multiply_out(in, linear_backward_kernel(in.first));
}

// Autograd's record: the mask, and of x and weight those that the other's gradient needs.
struct LinearReluDivideBackward : Node {
  torch::autograd::SavedVariable x, weight, mask;
  double divisor;

  std::string name() const override { return "LinearReluDivideBackward"; }

  variable_list apply(variable_list&& grads) override {
    return gradients(grads[0], divisor, *this);
  }

  // Those that `task`, this node or a LinearReluBackward of it, has to compute.
  variable_list gradients(const Tensor& grad_output, double divisor, const Node& task) {
    variable_list result(3);
    if (!grad_output.defined()) return result;
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool wants_x = task.task_should_compute_output(0),
               wants_weight = task.task_should_compute_output(1),
               wants_bias = task.task_should_compute_output(2);
    const Tensor bits = mask.unpack();
    const Tensor of_x = wants_weight ? x.unpack() : Tensor();
    const Tensor of_weight = wants_x ? weight.unpack() : Tensor();
    const AllGradients in{{grad_output, bits, divisor, wants_bias}, of_x, of_weight};
    auto [grad_x, grad_weight, grad_bias] =
        at::GradMode::is_enabled()
            ? multiply_out(in, linear_backward_by_signs(in.first, differentiable_signs(in.first)))
            : call_linear_gradients(in);
    if (wants_x) result[0] = std::move(grad_x);
    if (wants_weight) result[1] = std::move(grad_weight);
    if (wants_bias) result[2] = std::move(grad_bias);
    return result;
  }

  Tensor differentiable_signs(const LinearGradients& in);

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    x.reset_data();
    weight.reset_data();
    mask.reset_data();
  }
};

// The same without the division: where the gradient of relu's output goes. Only a gradient that is
// differentiated again has one, of zeros: it was selected by that output. As in torch, their
// products with an x or weight that is not finite are NaN.
struct LinearReluBackward : Node {
  NodePointer origin;

  std::string name() const override { return "LinearReluBackward"; }

  variable_list apply(variable_list&& grads) override {
    auto& node = static_cast<LinearReluDivideBackward&>(*origin);
    return node.gradients(grads[0], /*divisor=*/1.0, *this);
  }
};

Tensor LinearReluDivideBackward::differentiable_signs(const LinearGradients& in) {
  const Tensor signs = is_dtensor(in.mask) ? dtensor_signs(in) : linear_signs(in).detach();
  auto node = std::make_unique<LinearReluBackward>();
  node->set_next_edges(torch::autograd::edge_list(next_edges()));
  node->origin = getptr();
  torch::autograd::impl::set_gradient_edge(signs, edge_to(signs, std::move(node)));
  return signs;
}

bool any(const LinearInputs& in, bool (*is)(const Tensor&)) {
  return is(in.x) || is(in.weight) || (in.bias.defined() && is(in.bias));
}

Tensor linear_autograd(const LinearInputs& in) {
  if (is_left_to_torch(in) || !is_regular(in) || any(in, has_tangent) || in_functorch()) {
    return linear_composite(in);
  }
  if (!any(in, wants_gradient)) return call_linear(in);
  using torch::autograd::SavedVariable;
  // Where only a copy of x is a matrix, the copy is what is kept, as at::linear does: x may change.
  // A DTensor is no matrix where its rows lie in several processes.
  const bool is_copied =
      in.x.dim() > 2 && !in.x.is_contiguous() && wants_gradient(in.weight) && !is_dtensor(in.x);
  const Tensor x = is_copied ? as_matrix(in.x) : in.x;
  auto [out, mask] = call_linear_with_mask({x, in.weight, in.bias, in.divisor});
  if (is_copied) {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = with_rows_of(in.x, out);
  }
  auto node = std::make_unique<LinearReluDivideBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(in.x, in.weight, in.bias));
  if (wants_gradient(in.weight)) node->x = SavedVariable(x, /*is_output=*/false);
  if (wants_gradient(in.x)) node->weight = SavedVariable(in.weight, /*is_output=*/false);
  node->mask = SavedVariable(mask, /*is_output=*/false);
  node->divisor = in.divisor;
  torch::autograd::impl::set_gradient_edge(out, edge_to(out, std::move(node)));
  return out;
}

std::tuple<Tensor, Tensor> linear_backward_autograd(const LinearGradients& in) {
  if (wants_gradient(in.grad_output) || has_tangent(in.grad_output) || in_functorch()) {
    return linear_backward_composite(in);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_linear_backward(in);
}

ThreeTensors linear_gradients_autograd(const AllGradients& in) {
  if (any(in, wants_gradient) || any(in, has_tangent) || in_functorch()) {
    return linear_gradients_composite(in);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_linear_gradients_operator(in);
}

}  // namespace
}  // namespace kernels

#endif  // KERNELS_BINDING_LINEAR_H_
