// Linear -> ReLU -> divide for torch. Operators:
//
//   linear_relu_divide(x, weight, bias, divisor)              what users call
//   linear_relu_divide_with_mask(x, weight, bias, divisor)    the forward of that, with a mask
//                        [..., bytes] of a bit an element
//   linear_relu_divide_gradients(grad_output, mask, x, weight, output_mask, divisor)    its
//                        backward: the gradients of x, weight and bias for bits 0, 1 and 2 of
//                        output_mask, and empty ones for bits that are off. Without bit 0, weight
//                        is None; without bit 1, x is
//   set_linear_path(name), float32_precision()                for tests
//
// Traces (torch.compile, torch.export) hold the first three.

#include <ATen/Parallel.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <tuple>

#include "linear/run_gemm.h"
#include "torch_support/operators.h"

// From ATen/autocast_mode.h, which includes all of ATen: 2 of 7 s.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, DeviceType device_type);
}  // namespace at::autocast

namespace kernels {
namespace {

using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

// Whether the divisor and its reciprocal are normal floats; false for 0, infinity and NaN. On a GPU
// torch multiplies by the reciprocal, rounded to float from that of a float (2.9) or of a double
// (2.10 and newer). By other divisors it gets NaN and infinity where a division does not: 0 / 1e-39
// is NaN, inf / 1e39 is NaN in 2.9 alone.
bool has_normal_reciprocal(double divisor) {
  const double magnitude = std::abs(divisor);
  return magnitude >= 0x1p-126 && magnitude <= 0x1p126;
}

// ---------------------------------------------------------------------------------------- gate

template <typename Predicate>
bool any(const LinearInputs& in, const Predicate& is) {
  return is(in.x) || is(in.weight) || (in.bias && is(*in.bias));
}

// Whether dtypes, devices and dimensions are such as our kernels serve. Sizes may be symbols.
bool fits_in_kind(const LinearInputs& in) {
  const auto is_odd = [&](const Tensor& t) {
    return t.layout() != at::kStrided || t.is_nested() || t.is_quantized() || has_tangent(t) ||
           t.scalar_type() != in.x.scalar_type() || t.device() != in.x.device();
  };
  return !any(in, is_odd) && kernel_dtype(in.x.scalar_type()) && in.x.dim() > 0 &&
         in.weight.dim() == 2 && (!in.bias || in.bias->dim() == 1) &&
         has_normal_reciprocal(in.divisor);
}

bool fits_in_size(const LinearInputs& in) {
  return in.x.size(-1) == in.weight.size(1) && (!in.bias || in.bias->size(0) == in.weight.size(0));
}

bool is_empty(const LinearInputs& in) { return in.x.numel() == 0 || in.weight.numel() == 0; }

// How a call is served.
enum class Way { kOurs, kTraced, kTorch };

// The gate: our kernels serve dense tensors that fit together, where no derivative but autograd's
// is due. The same of traced ones goes on to the operators. All else is the reference's own ops.
Way way_of(const LinearInputs& in) {
  auto keys = in.x.key_set() | in.weight.key_set();
  if (in.bias) keys = keys | in.bias->key_set();
  if (!fits_in_kind(in)) return Way::kTorch;
  if (is_plain(keys)) return fits_in_size(in) && !is_empty(in) ? Way::kOurs : Way::kTorch;
  const auto local = c10::impl::tls_local_dispatch_key_set();
  const bool is_traced = (keys | local.included_).has(DispatchKey::Python) &&
                         !local.included_.has(DispatchKey::FuncTorchDynamicLayerFrontMode);
  return is_traced ? Way::kTraced : Way::kTorch;
}

Tensor linear_composite(const LinearInputs& in) {
  return at::linear(in.x, in.weight, in.bias).relu().div(in.divisor);
}

// ------------------------------------------------------------------------------------- forward

int64_t mask_row_bytes(int64_t n) { return (n + 7) / 8; }

// A CPU's threads get so many elements at least.
constexpr int64_t kGrain = 32768;

// In place, out = relu(out) / divisor, and the mask if there is one to write.
void run_epilogue(const Tensor& out, double divisor, const Tensor& mask) {
  const DType dtype = *kernel_dtype(out.scalar_type());
  int64_t m = rows_of(out), n = out.size(-1);
  void* const data = out.mutable_data_ptr();
  uint8_t* const bits = mask.defined() ? mask.mutable_data_ptr<uint8_t>() : nullptr;
  if (bits == nullptr || n % 8 == 0) {  // nothing tells the rows apart
    n *= m;
    m = 1;
  }
  run_on_device(
      out,
      [=](auto stream) { return cuda::linear_epilogue(dtype, data, divisor, bits, m, n, stream); },
      [=] {
        at::parallel_for(0, m * mask_row_bytes(n), kGrain / 8, [=](int64_t begin, int64_t end) {
          cpu::linear_epilogue(dtype, data, divisor, bits, n, begin, end);
        });
      });
}

// By our product where choose_path says so, otherwise by torch's and the epilogue. x is contiguous
// or a matrix.
Tensor compute_linear(const LinearInputs& in, const Tensor& mask) {
  const DeviceOf device(in.x);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor x = in.x.dim() == 2 ? in.x : in.x.reshape({-1, in.x.size(-1)});
  Tensor out;
  if (!is_empty(in)) out = launch_linear({x, in.weight, in.bias, in.divisor}, /*relu=*/true, mask);
  if (!out.defined()) {
    out = at::linear(in.x, in.weight, in.bias).contiguous();
    if (out.numel() > 0) run_epilogue(out, in.divisor, mask);
  }
  return in.x.dim() == 2 ? out : out.view(with_last(in.x.sizes(), in.weight.size(0)));
}

Tensor linear_forward(const LinearInputs& in) {
  if (way_of(in) != Way::kOurs) return linear_composite(in);
  return compute_linear(in, Tensor());
}

TwoTensors linear_with_mask_forward(const LinearInputs& in) {
  if (!fits_in_kind(in) || !fits_in_size(in)) {
    fail("linear_relu_divide_with_mask: expected dense floating tensors that fit together");
  }
  const DeviceOf device(in.x);
  const Tensor mask =
      allocate(in.x, with_last(in.x.sizes(), mask_row_bytes(in.weight.size(0))), at::kByte);
  return {compute_linear(in, mask), mask};
}

TwoTensors linear_with_mask_meta(const LinearInputs& in) {
  const Tensor out = linear_composite(in);
  const c10::SymInt bytes = (in.weight.sym_size(0) + 7) / 8;
  const auto options = out.options().dtype(at::kByte);
  return {out, at::empty_symint(with_last(in.x.sym_sizes(), bytes), options)};
}

// ------------------------------------------------------------------------------------ backward

// There is x where weight's gradient is wanted, and weight where x's is.
struct LinearGradients {
  const Tensor& grad_output;
  const Tensor& mask;
  const std::optional<Tensor>& x;
  const std::optional<Tensor>& weight;
  bool wants_bias;
  double divisor;
  // Whether torch makes the gradients of x and weight as their transposes, as autograd would: on a
  // CPU the other way may take ten times as long.
  bool turns_x = false, turns_weight = false;
};

// The gradient of the product, and its sum over all rows, that of bias.
TwoTensors run_epilogue_backward(const LinearGradients& in) {
  const Tensor grad_output = in.grad_output.contiguous();
  const at::ScalarType type = grad_output.scalar_type();
  const DType dtype = *kernel_dtype(type);
  const int64_t m = rows_of(grad_output), n = grad_output.size(-1);
  const Tensor grad_z = allocate(grad_output, grad_output.sizes(), type);
  const Tensor grad_bias = in.wants_bias ? allocate(grad_output, {n}, type) : Tensor();
  const void* const from = grad_output.const_data_ptr();
  const uint8_t* const bits = in.mask.const_data_ptr<uint8_t>();
  void* const to = grad_z.mutable_data_ptr();
  void* const sums = in.wants_bias ? grad_bias.mutable_data_ptr() : nullptr;
  const auto allocate_workspace = [&](int64_t size, at::ScalarType type) {
    return allocate(grad_output, {in.wants_bias ? size : 0}, type);
  };
  run_on_device(
      grad_output,
      [&](auto stream) {
        const Tensor workspace =
            allocate_workspace(cuda::linear_epilogue_backward_workspace(dtype, m, n), at::kByte);
        return cuda::linear_epilogue_backward(dtype, from, bits, in.divisor, to, sums,
                                              workspace.mutable_data_ptr(), m, n, stream);
      },
      [&] {
        const int64_t runs = cpu::linear_epilogue_backward_runs(m);
        const int64_t pieces = runs * cpu::linear_epilogue_backward_strips(n);
        const Tensor workspace =
            allocate_workspace(runs * n, type == at::kDouble ? at::kDouble : at::kFloat);
        void* const run_sums = in.wants_bias ? workspace.mutable_data_ptr() : nullptr;
        const int64_t grain = std::max<int64_t>(kGrain * pieces / (m * n), 1);
        at::parallel_for(0, pieces, grain, [&](int64_t begin, int64_t end) {
          cpu::linear_epilogue_backward(dtype, from, bits, in.divisor, to, run_sums, m, n, begin,
                                        end);
        });
        if (in.wants_bias) cpu::linear_epilogue_backward_sum(dtype, run_sums, sums, m, n);
      });
  return {grad_z, grad_bias};
}

// Whether our kernels may make a product of gradients. Half types are read where they are, or left
// to torch.
bool may_be_ours(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() == at::kFloat) {
    return float32_precision() == Precision::kHighest || !demanded_path ||
           demanded_path == Path::kSm90;
  }
  const auto is_readable = [](const Tensor& t) { return has_rows(t, 16) || has_columns(t, 16); };
  const bool is_large = demanded_path || a.size(0) * b.size(1) >= kLargeResult;
  return a.element_size() == 2 && is_large && is_readable(a) && is_readable(b);
}

// a [i, j] b [j, k]; torch makes the transpose if it `turns`.
Tensor multiply_matrices(const Tensor& a, const Tensor& b, bool turns) {
  if (a.is_cuda() && !at::GradMode::is_enabled() && is_plain(a.key_set() | b.key_set()) &&
      may_be_ours(a, b)) {
    const Tensor out =
        launch_linear({a, b.t(), std::nullopt, /*divisor=*/1.0}, /*relu=*/false, Tensor());
    if (out.defined()) return out;
  }
  return turns ? b.t().mm(a.t()).t() : a.mm(b);
}

// The gradients of x and weight that are wanted; weight's first, which reads z while L2 has it.
ThreeTensors multiply_out(const LinearGradients& in, const TwoTensors& epilogue) {
  const auto& [grad_z, grad_bias] = epilogue;
  const Tensor z = as_matrix(grad_z);
  Tensor grad_x, grad_weight;
  if (in.x) grad_weight = multiply_matrices(z.t(), as_matrix(*in.x), in.turns_weight);
  if (in.weight) {
    grad_x = multiply_matrices(z, *in.weight, in.turns_x);
    if (grad_z.dim() != 2) {
      grad_x = grad_x.view_symint(with_last(grad_z.sym_sizes(), grad_x.sym_size(-1)));
    }
  }
  return {grad_x, grad_weight, grad_bias};
}

// A tensor with the signs of the forward's output, out of the mask.
Tensor signs_of(const LinearGradients& in) {
  return in.mask.unsqueeze(-1)
      .bitwise_right_shift(at::arange(8, in.mask.options()))
      .bitwise_and(1)
      .flatten(-2)
      .narrow_symint(-1, 0, in.grad_output.sym_size(-1))
      .reshape_symint(in.grad_output.sym_sizes())
      .to(in.grad_output.scalar_type());
}

// The gradients by torch's own ops, given such signs.
ThreeTensors gradients_composite(const LinearGradients& in, const Tensor& signs) {
  const Tensor grad_z = at::threshold_backward(in.grad_output.div(in.divisor), signs, 0);
  return multiply_out(in, {grad_z, in.wants_bias ? as_matrix(grad_z).sum(0) : Tensor()});
}

// Operands may come from any graph, or from a hook for saved tensors.
ThreeTensors compute_gradients(const LinearGradients& in) {
  const Tensor &grad = in.grad_output, &mask = in.mask;
  const auto is_like_grad = [&](const Tensor& t) {
    return t.scalar_type() == grad.scalar_type() && t.device() == grad.device();
  };
  if (!kernel_dtype(grad.scalar_type()) || grad.dim() == 0 ||
      (in.x && (!is_like_grad(*in.x) || in.x->dim() == 0 || rows_of(*in.x) != rows_of(grad))) ||
      (in.weight && (!is_like_grad(*in.weight) || in.weight->dim() != 2 ||
                     in.weight->size(0) != grad.size(-1)))) {
    fail("linear_relu_divide_gradients: expected floating tensors that fit together");
  }
  if (mask.scalar_type() != at::kByte || !mask.is_contiguous() || mask.dim() == 0 ||
      mask.device() != grad.device() || rows_of(mask) != rows_of(grad) ||
      mask.size(-1) != mask_row_bytes(grad.size(-1))) {
    fail("mask must be contiguous, uint8, on the gradient's device, with " +
         std::to_string(rows_of(grad)) + " rows of " +
         std::to_string(mask_row_bytes(grad.size(-1))));
  }
  if (grad.numel() == 0) return gradients_composite(in, signs_of(in));
  const DeviceOf device(grad);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return multiply_out(in, run_epilogue_backward(in));
}

// Operators return no undefined tensors, but empty ones.
ThreeTensors with_empty(ThreeTensors gradients, const Tensor& like) {
  const auto defined = [&](const Tensor& t) {
    return t.defined() ? t : at::empty_symint({0}, like.options());
  };
  auto& [x, weight, bias] = gradients;
  return {defined(x), defined(weight), defined(bias)};
}

ThreeTensors linear_gradients_forward(const LinearGradients& in) {
  // Whoever runs a graph may have autocast or gradients on that were off in the forward.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::NoGradGuard no_grad;
  return with_empty(compute_gradients(in), in.grad_output);
}

ThreeTensors linear_gradients_composite(const LinearGradients& in) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return with_empty(gradients_composite(in, signs_of(in)), in.grad_output);
}

// ----------------------------------------------------------------------------------- operators

// The dispatcher's functions: the arguments as the structs of the steps.
template <auto step>
auto of_inputs(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
               double divisor) {
  return step({x, weight, bias, divisor});
}

template <auto step>
ThreeTensors of_gradients(const Tensor& grad_output, const Tensor& mask,
                          const std::optional<Tensor>& x, const std::optional<Tensor>& weight,
                          int64_t output_mask, double divisor) {
  if (output_mask < 0 || output_mask > 7 || weight.has_value() != (output_mask & 1) ||
      x.has_value() != (output_mask >> 1 & 1)) {
    fail("output_mask must be 0 to 7, with weight for bit 0 and input for bit 1, got " +
         std::to_string(output_mask));
  }
  return step({grad_output, mask, x, weight, (output_mask & 4) != 0, divisor});
}

template <typename Function, typename... Arguments>
auto call_operator(Namespace where, const std::string& name, const Arguments&... arguments) {
  const std::string full_name = namespace_name(where) + "::" + name;
  const auto found = c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), "");
  return found.template typed<Function>().call(arguments...);
}

Tensor call_linear(Namespace where, const LinearInputs& in) {
  return call_operator<decltype(of_inputs<linear_forward>)>(where, "linear_relu_divide", in.x,
                                                            in.weight, in.bias, in.divisor);
}

TwoTensors call_linear_with_mask(Namespace where, const LinearInputs& in) {
  return call_operator<decltype(of_inputs<linear_with_mask_forward>)>(
      where, "linear_relu_divide_with_mask", in.x, in.weight, in.bias, in.divisor);
}

ThreeTensors call_gradients(Namespace where, const LinearGradients& in) {
  const int64_t outputs = in.weight.has_value() | in.x.has_value() << 1 | in.wants_bias << 2;
  return call_operator<decltype(of_gradients<linear_gradients_forward>)>(
      where, "linear_relu_divide_gradients", in.grad_output, in.mask, in.x, in.weight, outputs,
      in.divisor);
}

// ------------------------------------------------------------------------------------- autograd

// Autograd's record: the mask, and of x and weight those that the other's gradient needs.
struct LinearReluDivideBackward : Node {
  Namespace where;  // of the forward's operator
  SavedVariable x, weight, mask;
  double divisor;
  bool turns_x, turns_weight;

  std::string name() const override { return "LinearReluDivideBackward"; }

  variable_list apply(variable_list&& grads) override {
    const Tensor& grad_output = grads[0];
    if (!grad_output.defined()) return variable_list(3);
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool wants_x = task_should_compute_output(0),
               wants_weight = task_should_compute_output(1),
               wants_bias = task_should_compute_output(2);
    const Tensor bits = unpack_saved_mask(mask);
    std::optional<Tensor> of_x, of_weight;
    if (wants_weight) of_x = x.unpack();
    if (wants_x) of_weight = weight.unpack();
    const LinearGradients in{grad_output, bits,    of_x,    of_weight,
                             wants_bias,  divisor, turns_x, turns_weight};
    auto [grad_x, grad_weight, grad_bias] = gradients(in);
    return {wants_x ? grad_x : Tensor(), wants_weight ? grad_weight : Tensor(),
            wants_bias ? grad_bias : Tensor()};
  }

  ThreeTensors gradients(const LinearGradients& in) {
    if (at::GradMode::is_enabled()) {
      // By relu's output too, as torch's gradients are, where that gives zeros.
      const Tensor signs = signs_of(in).detach();
      torch::autograd::impl::set_gradient_edge(signs, {getptr(), 0});
      return gradients_composite(in, signs);
    }
    auto keys = in.grad_output.key_set() | in.mask.key_set();
    if (in.x) keys = keys | in.x->key_set();
    if (in.weight) keys = keys | in.weight->key_set();
    const bool is_ours = is_plain(keys) && !has_tangent(in.grad_output);
    if (is_ours) return compute_gradients(in);
    // Under vmap of this backward alone, torch's ops compute the gradients of the whole batch.
    if (is_batched(keys)) return gradients_composite(in, signs_of(in));
    return call_gradients(where, in);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    x.reset_data();
    weight.reset_data();
    mask.reset_data();
  }
};

template <Namespace where>
Tensor linear_autograd(const LinearInputs& in) {
  const Way way = way_of(in);
  if (way == Way::kTorch) return linear_composite(in);
  if (way == Way::kOurs && in.x.dim() > 2 && !in.x.is_contiguous()) {  // as a matrix, or a copy
    const Tensor out = linear_autograd<where>({as_matrix(in.x), in.weight, in.bias, in.divisor});
    return at::_unsafe_view(out, with_last(in.x.sizes(), in.weight.size(0)));
  }
  if (!any(in, wants_gradient)) {
    if (way == Way::kOurs) return compute_linear(in, Tensor());
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_linear(where, in);
  }
  auto [out, mask] = [&] {
    if (way == Way::kOurs) return linear_with_mask_forward(in);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_linear_with_mask(where, in);
  }();
  auto node = make_node<LinearReluDivideBackward>(in.x, in.weight, in.bias);
  if (wants_gradient(in.weight)) node->x = SavedVariable(in.x, /*is_output=*/false);
  if (wants_gradient(in.x)) node->weight = SavedVariable(in.weight, /*is_output=*/false);
  node->where = where;
  node->mask = SavedVariable(mask, /*is_output=*/false);
  node->divisor = in.divisor;
  node->turns_x = way == Way::kOurs && in.x.dim() == 2 && has_columns(in.x, 1);
  node->turns_weight = way == Way::kOurs && !in.weight.is_contiguous();
  torch::autograd::set_history(out, std::move(node));
  return out;
}

// The backward as an operator: by torch's ops where derivatives of the gradients are due.
template <Namespace where>
ThreeTensors linear_gradients_autograd(const LinearGradients& in) {
  const auto is_tracked = [](const Tensor& t) { return wants_gradient(t) || has_tangent(t); };
  if (is_tracked(in.grad_output) || (in.x && is_tracked(*in.x)) ||
      (in.weight && is_tracked(*in.weight))) {
    return linear_gradients_composite(in);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_gradients(where, in);
}

// As autocast treats nn.Linear: everything in its dtype but float64, which it leaves alone.
template <Namespace where>
Tensor linear_autocast(const LinearInputs& in) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::DeviceType device = in.x.device().type();
  const at::ScalarType type = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, device); };
  const Tensor x = cast(in.x), weight = cast(in.weight);
  const std::optional<Tensor> bias = in.bias ? std::optional(cast(*in.bias)) : std::nullopt;
  return call_linear(where, {x, weight, bias, in.divisor});
}

// torch.jit.trace records the stable name, since the traced program may be saved.
Tensor linear_traced(const LinearInputs& in) {
  namespace tracer = torch::jit::tracer;
  const std::shared_ptr<tracer::TracingState> state = tracer::getTracingState();
  const auto symbol =
      c10::Symbol::fromQualString(namespace_name(Namespace::kStable) + "::linear_relu_divide");
  torch::jit::Node* const node = state->createNode(symbol, /*num_outputs=*/0);
  tracer::recordSourceLocation(node);
  tracer::addInputs(node, "input", in.x);
  tracer::addInputs(node, "weight", in.weight);
  tracer::addInputs(node, "bias", in.bias);
  tracer::addInputs(node, "divisor", in.divisor);
  state->insertNode(node);
  const std::function<void()> resume_tracing = tracer::pauseTracing();
  const Tensor out = call_linear(Namespace::kOwn, in);
  resume_tracing();
  tracer::addOutput(node, out);
  return out;
}

// -------------------------------------------------------------------------------- registration

void set_linear_path(c10::string_view name) {
  constexpr c10::string_view kNames[] = {"skinny", "sm90", "sm80", "torch", "auto"};  // as Path
  const auto found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) {
    fail("expected a path among auto, skinny, sm90, sm80, torch, got " + std::string(name));
  }
  demanded_path = name == "auto" ? std::nullopt : std::optional(Path(found - kNames));
}

std::string float32_precision_name() {
  return float32_precision() == Precision::kHigh ? "high" : "highest";
}

[[maybe_unused]] const Operator linear_operators[] = {
    Operator("linear_relu_divide(Tensor input, Tensor weight, Tensor? bias, float divisor) -> "
             "Tensor")
        .dense(of_inputs<linear_forward>)
        .impl(Namespace::kOwn, DispatchKey::Autograd, of_inputs<linear_autograd<Namespace::kOwn>>)
        .impl(Namespace::kStable, DispatchKey::Autograd,
              of_inputs<linear_autograd<Namespace::kStable>>)
        .impl(Namespace::kOwn, DispatchKey::Tracer, of_inputs<linear_traced>)
        .impl(Namespace::kOwn, DispatchKey::AutocastCPU,
              of_inputs<linear_autocast<Namespace::kOwn>>)
        .impl(Namespace::kStable, DispatchKey::AutocastCPU,
              of_inputs<linear_autocast<Namespace::kStable>>)
        .impl(Namespace::kOwn, DispatchKey::AutocastCUDA,
              of_inputs<linear_autocast<Namespace::kOwn>>)
        .impl(Namespace::kStable, DispatchKey::AutocastCUDA,
              of_inputs<linear_autocast<Namespace::kStable>>)
        .impl(DispatchKey::FuncTorchBatched, of_inputs<linear_composite>)
        .impl(DispatchKey::CompositeImplicitAutogradNestedTensor, of_inputs<linear_composite>)
        .impl(DispatchKey::CompositeExplicitAutograd, of_inputs<linear_composite>),
    Operator("linear_relu_divide_with_mask(Tensor input, Tensor weight, Tensor? bias, "
             "float divisor) -> (Tensor, Tensor)")
        .dense(of_inputs<linear_with_mask_forward>)
        .impl(DispatchKey::Meta, of_inputs<linear_with_mask_meta>),
    Operator("linear_relu_divide_gradients(Tensor grad_output, Tensor mask, Tensor? input, "
             "Tensor? weight, int output_mask, float divisor) -> (Tensor, Tensor, Tensor)")
        .dense(of_gradients<linear_gradients_forward>)
        .impl(DispatchKey::Meta, of_gradients<linear_gradients_composite>)
        .impl(Namespace::kOwn, DispatchKey::Autograd,
              of_gradients<linear_gradients_autograd<Namespace::kOwn>>)
        .impl(Namespace::kStable, DispatchKey::Autograd,
              of_gradients<linear_gradients_autograd<Namespace::kStable>>)
        .impl(DispatchKey::FuncTorchBatched, of_gradients<linear_gradients_composite>),
    Operator("set_linear_path(str name) -> ()")
        .impl(DispatchKey::CompositeExplicitAutograd, set_linear_path),
    Operator("float32_precision() -> str")
        .impl(DispatchKey::CompositeExplicitAutograd, float32_precision_name)};

}  // namespace
}  // namespace kernels
