// The operator relu(x) for torch. This file decides which calls our kernels compute (relu.cu on a
// GPU, relu_cpu.cpp on a CPU), and records the backward. The backward reads a mask of one bit for
// each element, where torch's backward reads the output.
//
// The output, the mask and the gradient of x are in the memory order of x, so the kernels see
// one-dimensional arrays. Only the gradient of the output may have another order (GradientLayout).

#include <ATen/ExpandUtils.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>

#include "common/sizes.h"
#include "torch_support/elementwise.h"
#include "torch_support/operators.h"

namespace kernels {
namespace {

// The gate: returns true if our kernels compute relu(x). torch's own relu computes all other calls.
bool is_supported(const Tensor& x) {
  return is_plain(x.key_set()) && kernel_dtype(x.scalar_type()).has_value() && x.numel() > 0 &&
         x.is_non_overlapping_and_dense() && !has_tangent(x) && is_aligned(x);
}

// ---------------------------------------------------------------------------------------- forward

// Writes the mask unless it is undefined. x has passed the gate.
Tensor compute_relu(const Tensor& x, const Tensor& mask) {
  const DeviceGuard guard(x);
  const Tensor out = allocate_like(x);
  ReluArguments call{};
  call.dtype = *kernel_dtype(x.scalar_type());
  call.n = x.numel();
  call.x = x.const_data_ptr();
  call.out = out.mutable_data_ptr();
  call.mask = mask.defined() ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  const auto run_on_gpu = [&](auto stream) { return cuda::relu(call, stream); };
  const auto run_on_cpu = [&] {
    for_each_range(out, [&](int64_t begin, int64_t end, bool bypasses_caches) {
      cpu::relu(call, begin, end, bypasses_caches);
    });
  };
  run_on_device(x, run_on_gpu, run_on_cpu);
  return out;
}

// --------------------------------------------------------------------------------------- backward

// The layout of a gradient that is one element everywhere.
constexpr GradientLayout kConstantLayout{/*dimensions=*/1, /*sizes=*/{1}, /*strides=*/{0}};

// Returns a gradient's layout with as few dimensions as possible, or nothing if that is more than
// kMaxDimensions. Two neighbouring dimensions merge into one if one stride covers both.
//
// Example: the output is a contiguous [2, 3, 4], and the gradient has the strides (24, 8, 2). Each
// stride is the size times the stride of the next inner dimension (24 = 3 * 8, 8 = 4 * 2), so all
// three merge into one dimension of size 24 and stride 2.
std::optional<GradientLayout> merged_layout(const Tensor& grad, at::IntArrayRef output_strides) {
  c10::DimVector dimensions;  // without dimensions of size 1
  for (int64_t d = 0; d < grad.dim(); ++d) {
    if (grad.size(d) > 1) dimensions.push_back(d);
  }
  std::sort(dimensions.begin(), dimensions.end(),
            [=](int64_t a, int64_t b) { return output_strides[a] < output_strides[b]; });

  GradientLayout layout = kConstantLayout;  // remains so if the gradient has one element
  int outermost = -1;                       // the layout's outermost dimension so far
  for (const int64_t d : dimensions) {
    const bool can_merge =
        outermost >= 0 && grad.stride(d) == layout.sizes[outermost] * layout.strides[outermost];
    if (can_merge) {
      layout.sizes[outermost] *= grad.size(d);
      continue;
    }
    ++outermost;
    if (outermost == GradientLayout::kMaxDimensions) return std::nullopt;
    layout.sizes[outermost] = grad.size(d);
    layout.strides[outermost] = grad.stride(d);
    layout.dimensions = outermost + 1;
  }
  return layout;
}

// Returns the layout of a gradient, or nothing if torch has to compute the gradient of x: our
// kernels cannot read every layout, and the result must have the strides that torch's would have.
std::optional<GradientLayout> supported_layout(const Tensor& grad, at::IntArrayRef output_strides) {
  const std::optional<GradientLayout> layout = merged_layout(grad, output_strides);
  if (!layout) return std::nullopt;
  if (layout->is_constant()) return layout;  // compute_gradient knows the result's strides

  // torch has special rules for the result's strides in dimensions of size 1. allocate_like follows
  // them if the gradient has the output's strides, is contiguous or is channels_last.
  const bool has_known_strides = grad.strides() == output_strides || grad.is_contiguous() ||
                                 grad.is_contiguous(at::MemoryFormat::ChannelsLast);
  if (layout->is_dense() && has_known_strides && is_aligned(grad)) return layout;

  // The kernel for all other layouts exists only for GPUs, and takes fewer than 2^31 elements. With
  // a dimension of size 1, the result's strides are not known.
  const auto is_one = [](int64_t size) { return size == 1; };
  const bool has_size_one = std::any_of(grad.sizes().begin(), grad.sizes().end(), is_one);
  const bool fits_kernel = grad.is_cuda() && grad.numel() < int64_t{1} << 31;
  if (fits_kernel && !has_size_one) return layout;
  return std::nullopt;
}

// out = mask bit ? grad_output : 0. out is dense, in the memory order of the forward's output.
void select_by_mask(const Tensor& mask, const void* grad_output, const GradientLayout& layout,
                    const Tensor& out) {
  ReluBackwardArguments call{};
  call.dtype = *kernel_dtype(out.scalar_type());
  call.n = out.numel();
  call.grad_output = grad_output;
  call.layout = layout;
  call.mask = mask.const_data_ptr<uint8_t>();
  call.grad_input = out.mutable_data_ptr();
  const auto run_on_gpu = [&](auto stream) { return cuda::relu_backward(call, stream); };
  const auto run_on_cpu = [&] {
    for_each_range(out, [&](int64_t begin, int64_t end, bool bypasses_caches) {
      cpu::relu_backward(call, begin, end, bypasses_caches);
    });
  };
  run_on_device(mask, run_on_gpu, run_on_cpu);
}

// Autograd's record of a forward. It is a Node, not a torch::autograd::Function, which takes GCC
// another second to compile.
struct ReluBackward : Node {
  SavedVariable saved_mask;
  c10::DimVector sizes, strides;  // the output's

  std::string name() const override { return "ReluBackward"; }

  variable_list apply(variable_list&& grads) override {
    const Tensor& grad_output = grads[0];
    if (!grad_output.defined()) return {Tensor()};
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor mask = unpack_saved_mask(saved_mask);
    check_mask(mask, grad_output);
    const DeviceGuard guard(mask);

    const bool is_differentiated = at::GradMode::is_enabled() || has_tangent(grad_output);
    if (!is_differentiated && is_plain(mask.key_set() | grad_output.key_set())) {
      const std::optional<GradientLayout> layout = supported_layout(grad_output, strides);
      if (layout) return {compute_gradient(mask, grad_output, *layout)};
    }
    return {gradient_by_torch(mask, grad_output)};
  }

  // Raises an error if a hook for saved tensors has returned a tensor that cannot be the mask.
  void check_mask(const Tensor& mask, const Tensor& grad_output) const {
    const int64_t bytes = bytes_of_bits(c10::multiply_integers(sizes));
    if (mask.numel() != bytes || mask.device() != grad_output.device()) {
      fail("relu's backward: expected the saved mask, which has " + std::to_string(bytes) +
           " elements on " + grad_output.device().str() + ", got " + describe(mask) +
           ": a hook for saved tensors must keep the number of elements and the device");
    }
  }

  Tensor compute_gradient(const Tensor& mask, const Tensor& grad_output,
                          const GradientLayout& layout) const {
    Tensor out;
    if (layout.is_dense()) {
      out = allocate_like(grad_output);
    } else {
      // The strides of the forward's output. Dimensions of size 1, which only a constant gradient
      // may have here, get the strides that torch gives them.
      const auto dense_strides = at::infer_dense_strides(sizes, strides);
      out = allocate_output(mask, sizes, grad_output.scalar_type(), at::IntArrayRef(dense_strides));
    }
    select_by_mask(mask, grad_output.const_data_ptr(), layout, out);
    return out;
  }

  // Returns the gradient, computed by torch's threshold_backward: for derivatives of the gradient,
  // for vmap, and for gradients that our kernel does not read. threshold_backward asks where the
  // forward's output is above 0. It gets a substitute for that output: a positive number where the
  // mask has a 1, and 0 elsewhere.
  Tensor gradient_by_torch(const Tensor& mask, const Tensor& grad_output) {
    const Tensor substitute = allocate_output(mask, sizes, grad_output.scalar_type(), strides);
    // An element whose bytes are all 0x3c is a positive number in every dtype.
    const Tensor positive = allocate(mask, {sizeof(double)}, at::kByte).fill_(0x3c);
    select_by_mask(mask, positive.const_data_ptr(), kConstantLayout, substitute);
    // In torch's graph, the second argument of threshold_backward has an edge to the forward's
    // node. Because of this edge, x gets zeros as its gradient in a double backward; without it,
    // None. So the substitute gets the same edge.
    if (at::GradMode::is_enabled()) {
      torch::autograd::impl::set_gradient_edge(substitute, {getptr(), 0});
    }
    return at::threshold_backward(grad_output, substitute, /*threshold=*/0);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    saved_mask.reset_data();
  }
};

// ----------------------------------------------------------------------------------- the operator

Tensor relu_by_torch(const Tensor& x) { return at::relu(x); }

Tensor relu_without_autograd(const Tensor& x) {
  if (!is_supported(x)) return relu_by_torch(x);
  return compute_relu(x, /*mask=*/Tensor());
}

Tensor relu_autograd(const Tensor& x) {
  if (!is_supported(x)) return relu_by_torch(x);
  if (!needs_gradient(x)) return compute_relu(x, /*mask=*/Tensor());
  const DeviceGuard guard(x);
  auto node = make_node<ReluBackward>(x);
  const Tensor mask = allocate_output(x, {bytes_of_bits(x.numel())}, at::kByte, std::nullopt);
  const Tensor out = compute_relu(x, mask);
  node->saved_mask = SavedVariable(mask, /*is_output=*/false);
  node->sizes = out.sizes();
  node->strides = out.strides();
  torch::autograd::set_history(out, std::move(node));
  return out;
}

[[maybe_unused]] const Operator relu_operator =
    Operator("relu(Tensor input) -> Tensor")
        .impl_dense(relu_without_autograd)
        .impl(DispatchKey::Autograd, relu_autograd)
        // torch.jit.trace records torch's own relu, which compilers fuse with its neighbours.
        .impl(DispatchKey::Tracer, relu_by_torch)
        .impl(DispatchKey::FuncTorchBatched, relu_by_torch)
        .impl(DispatchKey::CompositeImplicitAutogradNestedTensor, relu_by_torch)
        .impl(DispatchKey::CompositeExplicitAutograd, relu_by_torch);

}  // namespace
}  // namespace kernels
