"""What PyTorch does to Linear -> ReLU -> divide, beside the reference."""

import copy
import io
import pickle

import pytest
import torch
from tensors import (
    FLOATING,
    assert_same_bits,
    linear_modules,
    linear_path,
    recording,
    targets_of,
)
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from model import LinearReluDivide
from model_new import LinearReluDivideNew, _extension

OPERATOR = _extension.operators.linear_relu_divide


def samples(device="cpu", dtype=torch.float32):
    return torch.randn(4, 6, device=device, dtype=dtype)


def assert_close(got, want):
    """Equal on a CPU. On a GPU torch divides by a multiplication."""
    assert (got.dtype, got.shape, got.device) == (want.dtype, want.shape, want.device)
    torch.testing.assert_close(got, want)


@pytest.fixture
def modules(device):
    return linear_modules(6, 10, 3.0, device=device)


def both(modules, run):
    got, want = (run(module) for module in modules)
    assert_close(got, want)
    return got


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


# ------------------------------------------------------- a `linear` that is more than an nn.Linear


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class LowRank(nn.Module):
    """A wrapper as adapters use it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(6, 2), nn.Linear(2, 10)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def wrap(module):
    torch.manual_seed(5)
    module.linear = LowRank(module.linear)


def double(module):
    weights = module.linear.state_dict()
    module.linear = Doubled(6, 10).to(module.linear.weight.device)
    module.linear.load_state_dict(weights)


def patch(module):
    module.linear.forward = lambda x: x.sum() + nn.Linear.forward(module.linear, x)


def replace_by_function(module):
    base = module._modules.pop("linear")
    module.base, module.linear = base, lambda x: base(x) + 1


CHANGES = {
    "pre-hook": lambda m: m.linear.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "hook": lambda m: m.linear.register_forward_hook(lambda _, args, out: out * 2),
    "parametrization": lambda m: register_parametrization(m.linear, "weight", nn.Softplus()),
    "pruning": lambda m: prune.l1_unstructured(m.linear, "weight", 0.5),
    "subclass": double,
    "wrapper": wrap,
    "patched forward": patch,
    "function": replace_by_function,
    "sequential": lambda m: setattr(m, "linear", nn.Sequential(m.linear, nn.Tanh())),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_is_done_to_linear_is_done(device, modules, change):
    x = samples(device)
    plain = modules[1](x)
    for module in modules:
        change(module)
        module.to(device)
    assert not torch.equal(both(modules, lambda module: module(x)), plain)
    for got, want in zip(
        *(torch.autograd.grad(m(x).sum(), list(m.parameters())) for m in modules), strict=True
    ):
        assert_close(got, want)


@pytest.mark.parametrize("owner, name", [(nn.Linear, "forward"), (nn.functional, "linear")])
def test_what_is_done_to_torchs_linear_is_done(modules, owner, name, monkeypatch, device):
    """Low-rank adapters and other precisions reach all modules so."""
    x, before = samples(device), getattr(owner, name)
    plain = modules[0](x)
    monkeypatch.setattr(owner, name, lambda *args: before(*args) + 1)
    assert not torch.equal(both(modules, lambda module: module(x)), plain)


def test_backward_hooks_and_global_hooks(device, modules):
    seen = []
    modules[0].linear.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    modules[0](samples(device).requires_grad_()).sum().backward()
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(type(module))
    )
    try:
        modules[0](samples(device))
    finally:
        handle.remove()
    assert seen == ["backward", nn.Linear, LinearReluDivideNew]


# --------------------------------------------------------------------------------- tensor kinds


class Named(torch.Tensor):
    """A subclass without behaviour of its own."""


class Logged(torch.Tensor):
    """A subclass that serves F.linear itself, as quantized weights do."""

    seen = ()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen = (*cls.seen, function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_subclasses():
    modules = linear_modules(6, 10)
    x = samples()
    got, want = (module(x.as_subclass(Named)) for module in modules)
    assert type(got) is type(want) is Named
    assert_same_bits(
        got.detach().as_subclass(torch.Tensor), want.detach().as_subclass(torch.Tensor)
    )
    weight = nn.Parameter(modules[0].linear.weight.detach().as_subclass(Logged))
    modules[0].linear.weight = weight
    modules[0](x)
    assert nn.functional.linear in Logged.seen


class Table(torch.Tensor):
    """A subclass that serves a few of torch's functions, and no other."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return {nn.functional.linear: cls(), torch.relu: 6.0}.get(function, NotImplemented)


def test_subclasses_that_know_torchs_functions_alone():
    modules = linear_modules(6, 10, 3.0)
    assert [module(samples().as_subclass(Table)) for module in modules] == [2.0, 2.0]


def test_negative_bit_view():
    modules = linear_modules(6, 10)
    x = torch.imag(torch.randn(4, 6, dtype=torch.complex64).conj())
    assert x.is_neg()
    both(modules, lambda module: module(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
        lambda x: torch.nested.nested_tensor([x, x[:2]]),
    ],
    ids=["jagged", "nested"],
)
def test_nested_tensors(make):
    mine, theirs = linear_modules(6, 10)
    x = make(samples())
    for got, want in zip(mine(x).unbind(), theirs(x).unbind(), strict=True):
        assert_same_bits(got.detach(), want.detach())


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_in_inference_mode():
    mine, theirs = linear_modules(6, 10)
    with torch.inference_mode():
        x = torch.nested.nested_tensor([samples(), samples()[:2]])
        for got, want in zip(mine(x).unbind(), theirs(x).unbind(), strict=True):
            assert_same_bits(got, want)


def test_saved_tensor_hooks_that_convert(device, modules):
    x = samples(device)

    def run(module):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            out = module(leaf)
        out.sum().backward()
        return leaf.grad

    both(modules, run)


def test_a_profiler_sees_the_operator(device, modules):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        modules[0](samples(device))
    events = {event.key for event in profile.key_averages()}
    assert "relu_divide_kernels::linear_relu_divide" in events


def test_a_default_device_is_no_mode(modules, monkeypatch, device):
    monkeypatch.setattr(_extension, "linear_of_subclasses", None)
    x = samples(device)
    with torch.device("meta"):
        both(modules, lambda module: module(x))


@pytest.mark.filterwarnings("ignore")
def test_sparse_weight():
    modules = linear_modules(6, 10)
    for module in modules:
        module.linear.weight = nn.Parameter(module.linear.weight.detach().to_sparse_csr(), False)
    both(modules, lambda module: module(samples() * 0 + 1))


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
