"""Everything else that PyTorch does to a module and its operator, beside the reference."""

import copy
import io
import pickle

import numpy
import pytest
import torch
from tensors import FLOATING, assert_same_bits, draw, recording, targets_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from model import Model
from model_new import ModelNew, _extension


def both(run):
    """What `run` makes of the replacement and of the reference."""
    return run(ModelNew()), run(Model())


def samples(device="cpu"):
    return torch.randn(4, 6, device=device)


# ------------------------------------------------------------------------------------ transforms


def test_opcheck(device):
    operators = _extension.operators
    for x in (samples(device), samples(device).t(), samples(device)[:, ::2], samples(device)[:0]):
        for leaf in (x, x.clone().requires_grad_()):
            torch.library.opcheck(operators.relu, (leaf,))
        out, mask = operators.relu_with_mask(x)
        torch.library.opcheck(operators.relu_with_mask, (x,))
        grad = torch.randn_like(x)
        for leaf in (grad, grad.clone().requires_grad_()):
            torch.library.opcheck(operators.relu_backward, (leaf, mask, out.stride()))


def test_forward_mode(device):
    x, tangent = samples(device), samples(device)

    def run(module):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            return torch.autograd.forward_ad.unpack_dual(module(dual)).tangent

    assert_same_bits(*both(run))


def test_forward_over_reverse(device):
    x, tangent = samples(device), samples(device)

    def run(module):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        with torch.autograd.forward_ad.dual_level():
            grad_output = torch.autograd.forward_ad.make_dual(torch.ones_like(x), tangent)
            (grad,) = torch.autograd.grad(out, leaf, grad_output)
            return torch.autograd.forward_ad.unpack_dual(grad).tangent

    assert_same_bits(*both(run))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda x: f(x).pow(2).sum())(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
        lambda f, x: torch.func.vjp(f, x)[1](x)[0],
        lambda f, x: torch.func.jacrev(f)(x),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.hessian(lambda x: f(x).pow(3).sum())(x),
        lambda f, x: torch.func.vmap(f)(x),
        lambda f, x: torch.func.vmap(f, in_dims=1, out_dims=1)(x),
        lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).pow(2).sum()))(x),
        lambda f, x: torch.func.functional_call(f, {}, (x,)),
    ],
)
def test_torch_func(device, transform):
    x = samples(device)
    got, want = both(lambda module: transform(module, x))
    assert_same_bits(got, want)


def test_vmap_of_the_backward(device):
    x, grads = samples(device), torch.randn(5, 4, 6, device=device)

    def run(module):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        return torch.autograd.grad(out, leaf, grads, is_grads_batched=True)[0]

    assert_same_bits(*both(run))


# --------------------------------------------------------------------------------------- tracing


def test_compile_with_gradient_and_dynamic_shapes(device):
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(ModelNew(), fullgraph=True, dynamic=True, backend=recording(graphs))
    for rows in (4, 7, 9):
        x = torch.randn(rows, 6, device=device, requires_grad=True)
        out = compiled(x)
        out.pow(2).sum().backward()
        want = x.detach().clone().requires_grad_()
        Model()(want).pow(2).sum().backward()
        assert_same_bits(out.detach(), torch.relu(x).detach())
        assert_same_bits(x.grad, want.grad)
    targets = targets_of(*graphs)
    assert {"aten.relu.default", "aten.threshold_backward.default"} <= targets
    assert not any(target.startswith("relu_divide_kernels") for target in targets)


def test_compile_with_inductor(device):
    torch._dynamo.reset()
    compiled = torch.compile(ModelNew(), fullgraph=True)
    x = samples(device)
    assert_same_bits(compiled(x), torch.relu(x))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_export(device, strict, inplace):
    program = torch.export.export(
        ModelNew(inplace).to(device), (samples(device),), strict=strict
    ).run_decompositions()
    assert targets_of(program) - {"aten.copy_.default"} == {"aten.relu.default"}
    x = samples(device)
    want = torch.relu(x)
    assert_same_bits(program.module()(x), want)
    assert torch.equal(x, want) == inplace


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = samples()
    graph = make_fx(ModelNew(), tracing_mode=mode)(x)
    assert targets_of(graph) == {"aten.relu.default"}
    assert_same_bits(graph(x), torch.relu(x))


def test_symbolic_trace():
    x = samples()
    graph = torch.fx.symbolic_trace(nn.Sequential(ModelNew()))
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [torch.relu]
    assert_same_bits(graph(x), torch.relu(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace():
    x = samples()
    traced = torch.jit.trace(ModelNew(), x)
    assert "aten::relu" in str(traced.graph)
    assert_same_bits(traced(x + 1), torch.relu(x + 1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("inplace", [False, True])
def test_jit_script(inplace):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 6), ModelNew(inplace)))
    x = samples().requires_grad_()
    scripted(x).sum().backward()
    layer, want = scripted[0], x.detach().clone().requires_grad_()
    torch.relu(nn.functional.linear(want, layer.weight, layer.bias)).sum().backward()
    assert_same_bits(x.grad, want.grad)
    values = samples()
    before = values.clone()
    relu = torch.jit.script(ModelNew(inplace))
    assert ("aten::relu_" if inplace else "aten::relu(") in str(relu.graph)
    got = relu(values)
    assert_same_bits(got, torch.relu(before))
    assert_same_bits(values, got if inplace else before)


def test_meta_and_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    meta = torch.empty(3, 5, device="meta").t()
    got, want = both(lambda module: module(meta))
    assert got.is_meta
    assert (got.shape, got.stride()) == (want.shape, want.stride())
    with FakeTensorMode():
        assert ModelNew()(torch.empty(3, 5, device="cuda")).device.type == "cuda"
        x = torch.empty(3, 5, requires_grad=True)
        got = ModelNew()(x)
        got.sum().backward()
        assert (got.shape, x.grad.shape) == ((3, 5), (3, 5))


def test_modes_see_the_operator():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x = samples()
    with Dispatch():
        ModelNew()(x)
    with Function():
        ModelNew()(x)
    assert seen == [_extension.operators.relu.default] * 2


def test_a_profiler_sees_the_operator(device):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ModelNew()(samples(device))
    assert "relu_divide_kernels::relu" in {event.key for event in profile.key_averages()}


# ----------------------------------------------------------------------------- modes and settings


@pytest.mark.parametrize("inplace", [False, True])
def test_a_default_device_is_no_mode(inplace, monkeypatch):
    """It changes functions that make tensors, so that the call need not go by Python."""
    name = "relu_of_subclass" + "_in_place" * inplace
    called = []
    monkeypatch.setattr(_extension, name, lambda x: called.append(x) or x)
    module, x = ModelNew(inplace), samples()
    with torch.device("meta"):
        assert_same_bits(module(x.clone()), torch.relu(x))
        assert not called
        with torch.overrides.BaseTorchFunctionMode():
            module(x.clone())
    assert len(called) == 1


def test_inference_mode(device):
    x = samples(device).requires_grad_()
    with torch.inference_mode():
        out = ModelNew()(x)
        inside = ModelNew()(samples(device))
    assert out.is_inference()
    assert inside.is_inference()
    assert_same_bits(out.clone(), torch.relu(x).detach())


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_autocast_keeps_the_dtype(device, dtype):
    x = draw((4, 6), dtype, device).requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        assert ModelNew()(x).dtype == Model()(x).dtype == dtype


def test_deterministic_mode(device):
    torch.use_deterministic_algorithms(True)
    try:
        x = samples(device).requires_grad_()
        ModelNew()(x).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(x.grad, (x > 0).float())


def test_anomaly_mode(device):
    x = samples(device).requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        ModelNew()(x).sum().backward()
    assert_same_bits(x.grad, (x > 0).float())


@pytest.mark.gpu
def test_cuda_graph_of_forward_and_backward():
    x = torch.randn(1000, device="cuda", requires_grad=True)
    grad_output = torch.randn(1000, device="cuda")
    module = ModelNew()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(module(x), x, grad_output)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (grad,) = torch.autograd.grad(module(x), x, grad_output)
    with torch.no_grad():
        x.copy_(torch.randn(1000, device="cuda"))
        grad_output.copy_(torch.randn(1000, device="cuda"))
    graph.replay()
    assert_same_bits(grad, torch.where(x > 0, grad_output, torch.zeros_like(x)).detach())


# --------------------------------------------------------------------------------- tensor kinds


class Wrapper(torch.Tensor):
    """A wrapper subclass that stores its tensor transposed."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.t().shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"Wrapper({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = [a.inner if isinstance(a, Wrapper) else a for a in args]
        out = function(*args, **(kwargs or {}))
        return Wrapper(out) if isinstance(out, torch.Tensor) else out


class Named(torch.Tensor):
    """A subclass without behaviour of its own."""


def test_subclasses():
    x = samples()
    out = ModelNew()(x.as_subclass(Named))
    assert type(out) is type(torch.relu(x.as_subclass(Named))) is Named
    out = ModelNew()(Wrapper(x))
    assert type(out) is Wrapper
    assert_same_bits(out.inner, torch.relu(x))


class Table(torch.Tensor):
    """A subclass that serves a few of torch's functions, and no other."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        served = {torch.relu: "relu", nn.functional.relu: "relu in place"}
        return served.get(function, NotImplemented)


class TableOfOperators(torch.Tensor):
    """The same one level below."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return {torch.ops.aten.relu.default: cls()}.get(function, NotImplemented)


def test_subclasses_that_know_torchs_functions_alone():
    x = samples()
    assert ModelNew()(x.as_subclass(Table)) == "relu"
    assert ModelNew(inplace=True)(x.as_subclass(Table)) == "relu in place"
    assert type(ModelNew()(x.as_subclass(TableOfOperators))) is TableOfOperators


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("x", [None, [1.0], numpy.ones(2), nn.UninitializedParameter()], ids=type)
def test_errors_are_torchs(x, inplace):
    with pytest.raises((TypeError, ValueError)) as want:
        nn.functional.relu(x, inplace=True) if inplace else torch.relu(x)
    with pytest.raises(want.type) as got:
        ModelNew(inplace)(x)
    assert str(got.value) == str(want.value)


def test_gradient_of_a_wrapper_subclass():
    inner = samples()
    x = Wrapper(inner).requires_grad_()
    grad_output = Wrapper(torch.randn(4, 6))
    (grad,) = torch.autograd.grad(ModelNew()(x), x, grad_output)
    assert_same_bits(grad.inner, torch.where(inner > 0, grad_output.inner, 0.0))


def test_parameter(device):
    x = nn.Parameter(samples(device))
    ModelNew()(x).sum().backward()
    assert_same_bits(x.grad, (x > 0).float())


def test_negative_bit_view():
    x = torch.imag(torch.randn(50, dtype=torch.complex64).conj())
    assert x.is_neg()
    got, want = both(lambda module: module(x))
    assert_same_bits(got, want)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
        lambda x: torch.nested.nested_tensor([x, x[:2]]),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: x.to_mkldnn(),
    ],
    ids=["coo", "csr", "jagged", "nested", "quantized", "mkldnn"],
)
@pytest.mark.filterwarnings("ignore")
def test_other_kinds_of_tensors(make):
    x = make(samples())
    got, want = both(lambda module: module(x))
    assert (type(got), got.layout) == (type(want), want.layout)
    if got.layout == torch.jagged or got.is_nested:
        pairs = zip(got.unbind(), want.unbind(), strict=True)
    elif got.is_quantized:
        pairs = [(got.dequantize(), want.dequantize())]
    else:
        pairs = [(got.to_dense(), want.to_dense())]
    for mine, theirs in pairs:
        assert_same_bits(mine, theirs)


def test_sparse_gradient():
    x = samples().to_sparse().requires_grad_()

    def run(module):
        (grad,) = torch.autograd.grad(module(x).to_dense().sum(), x)
        return grad.to_dense()

    assert_same_bits(*both(run))


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_in_inference_mode():
    with torch.inference_mode():
        x = torch.nested.nested_tensor([samples(), samples()[:2]])
        for got, want in zip(ModelNew()(x).unbind(), torch.relu(x).unbind(), strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn], ids=str)
def test_gradients_of_dtypes_that_torch_refuses(dtype):
    for module in (Model(), ModelNew()):
        with pytest.raises(NotImplementedError):
            module(samples().to(dtype).requires_grad_())


# ---------------------------------------------------------------------------------- the module


def test_copies_and_serialisation(tmp_path):
    module = nn.Sequential(nn.Linear(6, 6), ModelNew())
    x = samples()
    want = module(x)
    torch.save(module, tmp_path / "module.pt")
    stored = io.BytesIO()
    torch.save(module.state_dict(), stored)
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(tmp_path / "module.pt", weights_only=False),
    ):
        assert_same_bits(other(x), want)
    assert list(ModelNew().state_dict()) == list(Model().state_dict()) == []


def test_conversions(device):
    for dtype in (torch.float16, torch.float64):
        module = nn.Sequential(nn.Linear(6, 6), ModelNew()).to(device, dtype)
        assert module(samples(device).to(dtype)).dtype == dtype
    assert ModelNew().half().double().to(device).train().eval().training is False


def test_hooks(device):
    seen = []
    module = ModelNew()
    module.register_forward_pre_hook(lambda m, args: seen.append("before"))
    module.register_forward_hook(lambda m, args, out: seen.append("after"))
    module.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    module(samples(device).requires_grad_()).sum().backward()
    assert seen == ["before", "after", "backward"]


def test_construction_draws_no_random_numbers():
    torch.manual_seed(3)
    ModelNew()
    got = torch.rand(1)
    torch.manual_seed(3)
    Model()
    assert_same_bits(got, torch.rand(1))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device, use_reentrant):
    x = samples(device).requires_grad_()
    checkpoint(ModelNew(), x, use_reentrant=use_reentrant).pow(2).sum().backward()
    assert_same_bits(x.grad, (2 * torch.relu(x)).detach())


def test_saved_tensor_hooks(device):
    x = samples(device).requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        out = ModelNew()(x)
    out.sum().backward()
    assert_same_bits(x.grad, (x > 0).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_saved_tensor_hooks_that_convert(device, dtype):
    x = samples(device).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(dtype), lambda t: t.t()):
        out = ModelNew()(x.view(-1))
    out.sum().backward()
    assert_same_bits(x.grad, (x > 0).float())


def test_threads_share_the_module():
    import threading

    x = torch.randn(200_000)
    results = [None] * 8

    def work(i):
        results[i] = ModelNew()(x + i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in enumerate(results):
        assert_same_bits(result, torch.relu(x + i))
