"""What PyTorch does to Linear -> ReLU -> divide, beside the reference."""

import copy
import io
import pickle

import pytest
import torch
from linear_beside_torch import assert_close, both, samples, wrap
from tensors import (
    FLOATING,
    assert_same_bits,
    linear_modules,
    linear_path,
    recording,
    targets_of,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from model import LinearReluDivide
from model_new import LinearReluDivideNew, _extension

OPERATOR = _extension.operators.linear_relu_divide


@pytest.fixture
def modules(device):
    return linear_modules(6, 10, 3.0, device=device)


# ------------------------------------------------------------------------------------ transforms


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(device, bias):
    weight, b = torch.randn(10, 6, device=device), torch.randn(10, device=device) if bias else None
    for x in (samples(device), samples(device)[:, :6].unflatten(0, (2, 2)), samples(device)[:0]):
        for grad in (False, True):
            tensors = [None if t is None else t.clone() for t in (x, weight, b)]
            for t in tensors:
                if t is not None:
                    t.requires_grad_(grad)
            torch.library.opcheck(OPERATOR, (*tensors, 3.0))
        out, mask = _extension.operators.linear_relu_divide_with_mask(x, weight, b, 3.0)
        torch.library.opcheck(
            _extension.operators.linear_relu_divide_with_mask, (x, weight, b, 3.0)
        )
        for grad_output in (torch.randn_like(out), torch.randn_like(out).requires_grad_()):
            torch.library.opcheck(
                _extension.operators.linear_relu_divide_backward, (grad_output, mask, 3.0, bias)
            )
            for wanted in range(8):
                of_x, of_weight = x if wanted & 2 else None, weight if wanted & 1 else None
                torch.library.opcheck(
                    _extension.operators.linear_relu_divide_gradients,
                    (grad_output, mask, of_x, of_weight, wanted, 3.0),
                )


def test_forward_mode(device, modules):
    x, tangent = samples(device), samples(device)

    def run(module):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            return torch.autograd.forward_ad.unpack_dual(module(dual)).tangent

    both(modules, run)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda x: f(x).pow(2).sum())(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
        lambda f, x: torch.func.vjp(f, x)[1](f(x))[0],
        lambda f, x: torch.func.jacrev(f)(x),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.hessian(lambda x: f(x).pow(3).sum())(x),
        lambda f, x: torch.func.vmap(f)(x),
        lambda f, x: torch.func.vmap(f, in_dims=1, out_dims=1)(x.expand(3, 4, 6).transpose(0, 1)),
        lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).pow(2).sum()))(x),
    ],
)
def test_torch_func(device, modules, transform):
    x = samples(device)
    both(modules, lambda module: transform(module, x))


def test_functional_call_with_gradients_of_the_parameters(device, modules):
    x = samples(device)

    def run(module):
        def loss(parameters, x):
            return torch.func.functional_call(module, parameters, (x,)).pow(2).sum()

        parameters = {name: p.detach() for name, p in module.named_parameters()}
        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        return grads["linear.weight"]

    both(modules, run)


def test_ensembles(device):
    """vmap over stacked parameters."""
    x = samples(device)
    pairs = [linear_modules(6, 10, 3.0, device=device) for _ in range(3)]
    results = []
    for members in zip(*pairs, strict=True):
        parameters, buffers = torch.func.stack_module_state(members)

        def run(parameters, buffers, x, base=members[0]):
            return torch.func.functional_call(base, (parameters, buffers), (x,))

        results.append(torch.func.vmap(run, in_dims=(0, 0, None))(parameters, buffers, x))
    assert_close(*results)


# --------------------------------------------------------------------------------------- tracing


def test_compile_with_gradient_and_dynamic_shapes(device, modules):
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(modules[0], fullgraph=True, dynamic=True, backend=recording(graphs))
    for shape in ((4, 6), (7, 6), (2, 3, 6), (6,)):
        x = torch.randn(shape, device=device, requires_grad=True)
        out = compiled(x)
        out.pow(2).sum().backward()
        want = x.detach().clone().requires_grad_()
        expected = modules[1](want)
        expected.pow(2).sum().backward()
        assert_close(out.detach(), expected.detach())
        assert_close(x.grad, want.grad)
    for mine, theirs in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)
    own = "relu_divide_kernels.linear_relu_divide"
    targets = targets_of(*graphs)
    assert {f"{own}_with_mask.default", f"{own}_gradients.default"} <= targets
    assert not {"aten.mm.default", "aten.addmm.default", "aten.relu.default"} & targets


def test_compile_with_inductor(device, modules):
    torch._dynamo.reset()
    compiled = torch.compile(modules[0], fullgraph=True)
    x = samples(device)
    with torch.no_grad():
        assert_close(compiled(x), modules[1](x))


@pytest.mark.parametrize("strict", [False, True])
def test_export(device, modules, strict):
    program = torch.export.export(modules[0], (samples(device),), strict=strict)
    assert OPERATOR.default in [node.target for node in program.graph.nodes]
    x = samples(device)
    assert_close(program.module()(x), modules[1](x))


def test_make_fx_and_symbolic_trace():
    from torch.fx import symbolic_trace
    from torch.fx.experimental.proxy_tensor import make_fx

    mine, theirs = linear_modules(6, 10)
    x = samples()
    assert_same_bits(make_fx(mine)(x)(x).detach(), theirs(x).detach())
    assert_same_bits(symbolic_trace(mine)(x).detach(), theirs(x).detach())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace():
    mine, theirs = linear_modules(6, 10)
    traced = torch.jit.trace(mine, samples())
    x = samples()
    assert_same_bits(traced(x).detach(), theirs(x).detach())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("divisor", [3.0, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_jit_script(divisor, bias):
    mine, theirs = linear_modules(6, 10, divisor, bias=bias)
    x = samples()
    assert_same_bits(torch.jit.script(mine)(x).detach(), theirs(x).detach())
    for module in (mine, theirs):
        wrap(module)
    assert_same_bits(torch.jit.script(mine)(x).detach(), theirs(x).detach())


def test_meta_and_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    mine, theirs = linear_modules(6, 10, device="meta")
    x = torch.empty(2, 3, 6, device="meta")
    got, want = mine(x), theirs(x)
    assert got.is_meta
    assert (got.shape, got.stride()) == (want.shape, want.stride())
    with FakeTensorMode():
        mine = LinearReluDivideNew(6, 10, 2.0)
        out = mine(torch.empty(2, 6))
        out.sum().backward()
        assert (out.shape, mine.linear.weight.grad.shape) == ((2, 10), (10, 6))
        for name, parameter in list(mine.linear.named_parameters()):
            on_gpu = torch.empty(parameter.shape, device="cuda")
            setattr(mine.linear, name, nn.Parameter(on_gpu, requires_grad=False))
        assert mine(torch.empty(2, 6, device="cuda")).device.type == "cuda"


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
            if isinstance(function, torch._ops.OpOverload):
                seen.append(function)
            return function(*args, **(kwargs or {}))

    mine, _ = linear_modules(6, 10)
    x = samples()
    with torch.no_grad(), Dispatch():
        mine(x)
    with torch.no_grad(), Function():
        mine(x)
    assert seen == [OPERATOR.default] * 2


# ----------------------------------------------------------------------------- modes and settings


def test_inference_mode(device, modules):
    x = samples(device)
    with torch.inference_mode():
        out = modules[0](x)
        assert_close(out, modules[1](x))
    assert out.is_inference()


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_autocast(device, dtype, to, grad):
    modules = linear_modules(6, 10, 3.0, dtype, device)
    x = samples(device, dtype)
    results = []
    for module in modules:
        leaf = x.clone().requires_grad_(grad)
        with torch.autocast(device, dtype=to), torch.set_grad_enabled(grad):
            out = module(leaf)
        assert out.dtype == (torch.float64 if dtype == torch.float64 else to)
        if grad:
            out.sum().backward()
            assert module.linear.weight.grad.dtype == dtype
            results.append((out.detach(), leaf.grad, module.linear.weight.grad))
        else:
            results.append((out,))
    for got, want in zip(*results, strict=True):
        assert_close(got, want)


def test_autocast_with_mixed_dtypes(device, modules):
    x = samples(device).half()
    with torch.autocast(device, dtype=torch.bfloat16):
        both(modules, lambda module: module(x))
    with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(RuntimeError, match="dtype"):
        modules[0](x.double())


def test_deterministic_and_anomaly_mode(device, modules):
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            both(
                modules,
                lambda m: torch.autograd.grad(m(samples(device) * 0 + 1).sum(), m.linear.weight)[0],
            )
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("path", ["auto", "torch"])
def test_cuda_graph_of_forward_and_backward(dtype, path):
    mine, theirs = linear_modules(64, 128, 2.0, dtype, "cuda")
    x, grad_output = (torch.randn(32, n, device="cuda", dtype=dtype) for n in (64, 128))
    x.requires_grad_()

    def step(module):
        out = module(x)
        return out, *torch.autograd.grad(out, [x, *module.parameters()], grad_output)

    with linear_path(path):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(mine)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step(mine)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        grad_output.copy_(torch.randn_like(grad_output))
        for parameter, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            other.copy_(torch.randn_like(other))
            parameter.copy_(other)
    graph.replay()
    with linear_path(path):
        expected = step(mine)
    for got, want in zip(results, expected, strict=True):
        assert_same_bits(got.detach(), want.detach())
    torch.testing.assert_close(results[0], theirs(x), atol=1e-2, rtol=1e-2)


# ---------------------------------------------------------------------------------- the module


def test_copies_and_serialisation(tmp_path):
    mine, theirs = linear_modules(6, 10)
    x = samples()
    want = mine(x).detach()
    torch.save(mine, tmp_path / "module.pt")
    for other in (
        copy.deepcopy(mine),
        pickle.loads(pickle.dumps(mine)),
        torch.load(tmp_path / "module.pt", weights_only=False),
    ):
        assert_same_bits(other(x).detach(), want)
    stored = io.BytesIO()
    torch.save(mine.state_dict(), stored)
    stored.seek(0)
    theirs.load_state_dict(torch.load(stored))
    assert_same_bits(theirs(x).detach(), want)


def test_conversions(device, modules):
    for dtype in (torch.float16, torch.float64):
        for module in modules:
            module.to(dtype)
        both(modules, lambda module, dtype=dtype: module(samples(device, dtype) * 0 + 1))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device, modules, use_reentrant):
    x = samples(device)

    def run(module):
        leaf = x.clone().requires_grad_()
        checkpoint(module, leaf, use_reentrant=use_reentrant).pow(2).sum().backward()
        return leaf.grad

    both(modules, run)


def test_training_reaches_the_same_weights(device, modules):
    x, target = samples(device), torch.rand(4, 10, device=device)

    def run(module):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
        for _ in range(30):
            optimizer.zero_grad()
            loss = (module(x) - target).pow(2).mean()
            loss.backward()
            optimizer.step()
        return module.linear.weight.detach()

    got, want = (run(module) for module in modules)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_threads_share_the_module():
    import threading

    mine, theirs = linear_modules(300, 200)
    x = torch.randn(400, 300)
    results = [None] * 8

    def work(i):
        results[i] = mine(x + i).detach()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in enumerate(results):
        torch.testing.assert_close(result, theirs(x + i).detach())


def test_reference_is_untouched():
    assert LinearReluDivideNew.__init__ is LinearReluDivide.__init__
    assert LinearReluDivide.forward is not LinearReluDivideNew.forward
