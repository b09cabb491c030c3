"""PyTorch's other features: modules and operators behave as the references."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from model import LinearReluDivide, Model
from model_new import LinearReluDivideNew, ModelNew, namespaces
from tests.support.beside_torch import (
    assert_same_or_close,
    assert_same_results,
    output_and_gradients,
    samples,
)
from tests.support.compare import assert_same_bits
from tests.support.processes import forked, printed
from tests.support.tensors import (
    FLOATING,
    OPERATORS,
    capture_graph,
    linear_modules,
    linear_path,
    targets_of,
)

# The namespaces of this build's operators.
NAMESPACES = {"relu": namespaces["relu"], "linear": namespaces["linear_relu_divide"]}
# The operator by which each module appears in a graph.
TARGET = {
    "relu": "aten.relu.default",
    "linear": f"{NAMESPACES['linear']}.linear_relu_divide.default",
}


def modules_of(kind, device="cpu", dtype=torch.float32):
    """Return the replacement and the reference; both take `samples`."""
    if kind == "relu":
        return ModelNew(), Model()
    return linear_modules(6, 10, 3.0, dtype, device)


@pytest.fixture(params=["relu", "linear"])
def kind(request):
    return request.param


@pytest.fixture
def modules(kind, device):
    return modules_of(kind, device)


def recording_mode(seen, mode_class):
    """Return a mode of this class that appends the functions that are called to `seen`."""

    def record(self, function, types, args=(), kwargs=None):
        seen.append(function)
        return function(*args, **(kwargs or {}))

    methods = {"__torch_function__": record, "__torch_dispatch__": record}
    return type("Mode", (mode_class,), methods)()


def vmap_over_columns(f, x):
    return torch.func.vmap(f, in_dims=1, out_dims=1)(x.expand(3, 4, 6).transpose(0, 1))


# By name, a function that applies a transform of torch.func to a module f at x.
TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).pow(2).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](f(x))[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).pow(3).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap over columns": vmap_over_columns,
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).pow(2).sum()))(x),
    "functional_call": lambda f, x: torch.func.functional_call(f, {}, (x,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_torch_func_match_the_reference(device, modules, transform):
    x = samples(device)
    assert_same_results(modules, lambda module: TRANSFORMS[transform](module, x))


def test_vmap_over_parameters_matches_the_reference(device):
    """It computes the gradients of each sample, and the outputs of an ensemble."""
    x = samples(device)
    pairs = [linear_modules(6, 10, 3.0, device=device) for _ in range(3)]

    def run(members):
        base = members[0]

        def call(parameters, x):
            return torch.func.functional_call(base, parameters, (x,))

        stacked, _ = torch.func.stack_module_state(members)
        detached = {name: p.detach() for name, p in base.named_parameters()}
        per_sample = torch.func.grad(lambda p, x: call(p, x).pow(2).sum())
        grads = torch.func.vmap(per_sample, in_dims=(None, 0))(detached, x)
        return torch.func.vmap(call, in_dims=(0, None))(stacked, x), grads["linear.weight"]

    assert_same_results(list(zip(*pairs, strict=True)), run)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator(kind, mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    ours, reference = modules_of(kind)
    x = samples()
    with torch.no_grad():
        graph = make_fx(ours, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
        assert TARGET[kind] in targets_of(graph)
        assert_same_or_close(graph(x), reference(x), kind == "relu")


def test_symbolic_trace_records_the_calls_of_the_reference(kind):
    modules = modules_of(kind)
    x = samples()
    graphs = [torch.fx.symbolic_trace(module) for module in modules]
    ours, reference = ([(n.op, n.target) for n in graph.graph.nodes] for graph in graphs)
    assert ours == reference
    assert ("call_function", torch.relu) in ours
    assert_same_or_close(graphs[0](x), modules[1](x), kind == "relu")


def test_results_are_not_views_and_may_be_changed_in_place(device, kind):
    x = samples(device).reshape(2, 2, 6).transpose(0, 1)
    for module in modules_of(kind, device):
        assert not module(x)._is_view()
        with torch.no_grad():
            out = module(x)
        out.mul_(torch.ones_like(out, requires_grad=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_results_of_traced_modules_match_the_reference(kind):
    """The graph of ReLU has torch's op, so the program needs no kernels."""
    ours, reference = modules_of(kind)
    traced = torch.jit.trace(ours, samples())
    assert kind == "linear" or "aten::relu" in str(traced.graph)
    x = samples()
    assert_same_or_close(traced(x), reference(x), kind == "relu")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("inplace", [False, True])
def test_results_and_gradients_of_scripted_relu_match_torch(inplace):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 6), ModelNew(inplace)))
    x = samples()
    layer = scripted[0]
    got = torch.autograd.grad(scripted(x).sum(), layer.weight)
    want = nn.functional.linear(x, layer.weight, layer.bias).relu()
    assert_same_bits(*got, *torch.autograd.grad(want.sum(), layer.weight))
    before = x.clone()
    got = torch.jit.script(ModelNew(inplace))(x)
    assert_same_bits(got, torch.relu(before))
    assert_same_bits(x, got if inplace else before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("divisor", [3.0, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_results_of_scripted_linear_match_the_reference(divisor, bias):
    """This holds for any module in the place of `linear`."""
    modules = linear_modules(6, 10, divisor, bias=bias)
    x = samples()
    assert_same_results((torch.jit.script(modules[0]), modules[1]), lambda module: module(x))
    for module in modules:
        module.linear = nn.Sequential(module.linear, nn.Tanh())
    assert_same_results((torch.jit.script(modules[0]), modules[1]), lambda module: module(x))


def test_shapes_and_strides_of_meta_tensors_match_the_reference(kind):
    ours, reference = modules_of(kind, "meta")
    x = torch.empty(3, 5, 6, device="meta").transpose(0, 1)
    got = ours(x)
    want = reference(x)
    assert got.is_meta
    assert (got.shape, got.stride()) == (want.shape, want.stride())


@pytest.fixture
def fake_tensors():
    """Make all tensors fake: they have no memory, and may be on a GPU that does not exist."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield


def test_gradients_of_fake_tensors_have_the_right_shape(kind, fake_tensors):
    ours = ModelNew() if kind == "relu" else LinearReluDivideNew(6, 10, 3.0)
    x = torch.empty(3, 6, requires_grad=True)
    ours(x).sum().backward()
    assert x.grad.shape == (3, 6)


def test_results_of_fake_tensors_are_on_the_device_of_x(kind, fake_tensors):
    ours = ModelNew() if kind == "relu" else LinearReluDivideNew(6, 10, 3.0)
    if kind == "linear":
        ours.linear.weight = nn.Parameter(torch.empty(10, 6, device="cuda"))
        ours.linear.bias = nn.Parameter(torch.empty(10, device="cuda"))
    with torch.no_grad():
        assert ours(torch.empty(2, 6, device="cuda")).device.type == "cuda"


def test_a_function_mode_sees_the_calls_of_the_reference(kind):
    seen = []
    ours, reference = modules_of(kind)
    x = samples()
    with recording_mode(seen, torch.overrides.TorchFunctionMode):
        got = ours(x)
        calls = seen.copy()
        seen.clear()
        want = reference(x)
    assert calls == seen
    assert torch.relu in calls
    assert_same_or_close(got, want, kind == "relu")


@pytest.mark.parametrize("grad", [False, True])
def test_a_dispatch_mode_sees_the_operators(kind, grad):
    seen = []
    ours, reference = modules_of(kind)
    x = samples().requires_grad_(grad)
    with torch.set_grad_enabled(grad), recording_mode(seen, TorchDispatchMode):
        got = ours(x)
    own = TARGET[kind]
    if kind == "linear" and grad:
        own = own.replace("divide.", "divide_with_mask.")
    assert [name for name in map(str, seen) if "detach" not in name] == [own]
    assert_same_or_close(got, reference(x), kind == "relu")


def test_flops_are_counted(kind):
    """The counter puts hooks on modules and their `linear`. It counts direct calls too."""
    calls = [*modules_of(kind)]
    if kind == "linear":
        weight, bias = calls[0].parameters()
        calls.append(lambda x: OPERATORS.linear_relu_divide(x, weight, bias, 3.0))
    for call in calls:
        x = samples().requires_grad_()
        with FlopCounterMode(display=False) as counter:
            call(x).sum().backward()
        flops_of_three_products = 3 * 2 * 10 * x.numel()
        expected = flops_of_three_products if kind == "linear" else 0
        assert counter.get_total_flops() == expected


def test_flops_are_counted_by_a_counter_that_is_imported_later(tmp_path):
    code = """
        import sys, torch
        from model_new import LinearReluDivideNew
        assert "torch.utils.flop_counter" not in sys.modules
        from torch.utils.flop_counter import FlopCounterMode
        parameters = LinearReluDivideNew(8, 16, 2.0).parameters()
        with FlopCounterMode(display=False) as counter:
            torch.ops.relu_divide_kernels.linear_relu_divide(torch.ones(4, 8), *parameters, 2.0)
        print(counter.get_total_flops())
    """
    assert printed(code, tmp_path, forked).split() == [str(2 * 4 * 8 * 16)]


def test_flops_of_two_versions_are_counted_by_a_counter_that_is_imported_later(tmp_path):
    """Each version has a finder of its own in `sys.meta_path`."""
    code = """
        import torch
        from torch.library import custom_op
        from kernels.linear import flops
        for version in ("first", "second"):
            for name in ("", "_with_mask", "_gradients"):
                custom_op(
                    f"{version}::linear_relu_divide{name}",
                    lambda: None,
                    mutates_args=(),
                    schema="() -> ()",
                )
            flops.register_flops(version)
        from torch.utils.flop_counter import flop_registry
        for version in ("first", "second"):
            print(getattr(torch.ops, version).linear_relu_divide in flop_registry)
    """
    assert printed(code, tmp_path, forked).split() == ["True", "True"]


def test_a_dispatch_mode_may_call_the_modules(kind):
    """Then the modules run inside the call of another operator."""
    x = samples()
    modules = modules_of(kind)
    results = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            with torch.overrides.enable_reentrant_dispatch():
                results.extend(module(args[0]) for module in modules)
            return function(*args)

    with Mode():
        x.sin()
    assert_same_or_close(*results, kind == "relu")


@pytest.mark.parametrize(
    ("owner", "name"), [(torch, "relu"), (nn.functional, "linear"), (nn.Linear, "forward")]
)
def test_a_replacement_of_a_torch_function_is_called(kind, owner, name, monkeypatch, device):
    """Libraries for low-rank adapters or other precisions change all modules in this way."""
    modules = modules_of(kind, device)
    x = samples(device)
    original = getattr(owner, name)
    plain = modules[1](x)
    monkeypatch.setattr(owner, name, lambda *args: original(*args) + 1)
    changed = assert_same_results(modules, lambda module: module(x))
    is_unaffected = kind == "relu" and owner is not torch
    assert torch.equal(changed, plain) == is_unaffected
    torch._dynamo.reset()
    assert_same_results(
        [torch.compile(m, backend="eager") for m in modules], lambda module: module(x)
    )


def test_a_profiler_sees_the_operator(device, kind, modules):
    """This also holds under `with torch.device(...)`, which is a mode, but changes no results."""
    name = {"relu": "relu", "linear": "linear_relu_divide"}[kind]
    x = samples(device)
    for default in (device, "meta"):
        with torch.device(default), torch.profiler.profile() as profile:
            assert_same_results(modules, lambda module: module(x))
        events = {event.key for event in profile.key_averages()}
        assert f"{NAMESPACES[kind]}::{name}" in events


def test_results_in_inference_mode_are_inference_tensors(device, modules):
    x = samples(device).requires_grad_()
    with torch.inference_mode():
        assert assert_same_results(modules, lambda module: module(x)).is_inference()
        assert assert_same_results(
            modules, lambda module: module(samples(device) * 0 + 1)
        ).is_inference()


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
def test_results_and_dtypes_under_autocast_match_the_reference(device, kind, dtype, to):
    x = samples(device, dtype)
    modules = modules_of(kind, device, dtype)
    autocast = torch.autocast(device, dtype=to)
    assert_same_results(
        modules, lambda module: output_and_gradients(module, x, autocast(module.forward))
    )
    with torch.no_grad(), torch.autocast(device, dtype=to):
        out = assert_same_results(modules, lambda module: module(x))
    assert out.dtype == (to if kind == "linear" and dtype != torch.float64 else dtype)


def test_autocast_converts_operands_of_mixed_dtypes_but_not_float64(device):
    modules = linear_modules(6, 10, 3.0, device=device)
    x = samples(device).half()
    with torch.autocast(device, dtype=torch.bfloat16):
        assert_same_results(modules, lambda module: module(x))
    with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(RuntimeError, match="dtype"):
        modules[0](x.double())


def test_results_under_deterministic_and_anomaly_mode_match_the_reference(device, modules):
    x = samples(device)
    torch.use_deterministic_algorithms(mode=True)
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            assert_same_results(modules, lambda module: output_and_gradients(module, x))
    finally:
        torch.use_deterministic_algorithms(mode=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("path", ["auto", "torch"])
def test_a_cuda_graph_of_forward_and_backward_can_be_replayed(kind, dtype, path):
    """A replay with other operands gives the results of a call with them."""
    ours, _ = modules_of(kind, "cuda", dtype)
    x = torch.randn(4096, 6, device="cuda", dtype=dtype, requires_grad=True)
    grad_output = torch.randn_like(ours(x))

    def run():
        out = ours(x)
        return out, *torch.autograd.grad(out, [x, *ours.parameters()], grad_output)

    with linear_path(path):
        graph, results = capture_graph(run)
        with torch.no_grad():
            for tensor in (x, grad_output, *ours.parameters()):
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        assert_same_bits(results, run())


def test_copies_and_saved_modules_give_the_same_results(kind, tmp_path):
    ours, reference = modules_of(kind)
    x = samples()
    want = reference(x)
    torch.save(ours, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), loaded):
        assert_same_or_close(other(x), want, kind == "relu")
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    reference.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert_same_or_close(reference(x), want, kind == "relu")


def test_construction_matches_the_reference(kind):
    """The parameters, the divisor, and the random numbers drawn are the same."""
    kinds = {"relu": (ModelNew, Model), "linear": (LinearReluDivideNew, LinearReluDivide)}[kind]
    assert issubclass(*kinds)
    arguments_of = {"relu": [()], "linear": [(6, 5, 2.0), (1, 1, -3)]}
    for arguments in arguments_of[kind]:
        states = []
        divisors = []
        for module_class in kinds:
            torch.manual_seed(3)
            module = module_class(*arguments)
            states.append({**module.state_dict(), "random": torch.rand(1)})
            divisors.append(repr(getattr(module, "divisor", None)))
        assert list(states[0]) == list(states[1])
        assert_same_bits(states[0].values(), states[1].values())
        assert divisors[0] == divisors[1]


def test_every_result_has_new_memory(device, modules):
    x = samples(device)
    tensors = [x, modules[0](x), modules[0](x), *modules[0].parameters()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_second_backward_raises_as_torch_does(device, modules):
    out = modules[0](samples(device).requires_grad_()).sum()
    out.backward(retain_graph=True)
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_hooks_are_called_in_order(device, modules):
    seen = []
    ours = modules[0]

    def recorder(event):
        def hook(*_):
            seen.append(event)

        return hook

    ours.register_forward_pre_hook(recorder("before"))
    ours.register_forward_hook(recorder("after"))
    ours.register_full_backward_hook(recorder("backward"))
    ours(samples(device).requires_grad_()).sum().backward()
    assert seen == ["before", "after", "backward"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_under_checkpointing_match_the_reference(device, modules, use_reentrant):
    x = samples(device)

    def run(module):
        leaf = x.clone().requires_grad_()
        checkpoint(module, leaf, use_reentrant=use_reentrant).pow(2).sum().backward()
        return leaf.grad

    assert_same_results(modules, run)


# By name, hooks that change how saved tensors are stored.
SAVED = {
    "on the CPU": torch.autograd.graph.save_on_cpu,
    "converted": lambda: saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()),
    "transposed": lambda: saved_tensors_hooks(lambda t: t.t().contiguous(), torch.t),
}


@pytest.mark.parametrize("hooks", SAVED.values(), ids=SAVED)
def test_hooks_that_store_saved_tensors_in_another_way_change_no_result(device, modules, hooks):
    x = samples(device)
    with hooks():
        assert_same_results(modules, lambda module: output_and_gradients(module, x))


def test_a_hook_that_returns_another_mask_raises(device, modules):
    def unpack(saved):
        is_mask = saved.dtype == torch.uint8
        return saved[:1].clone() if is_mask else saved

    with saved_tensors_hooks(lambda t: t, unpack):
        out = modules[0](samples(device).requires_grad_())
    with pytest.raises(RuntimeError, match="a hook for saved tensors must keep"):
        out.sum().backward()


def test_threads_that_share_a_module_get_right_results(kind):
    ours, reference = modules_of(kind)
    x = torch.randn(30_000, 6)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: ours(x + i), range(8)))
    for i, result in enumerate(results):
        assert_same_or_close(result, reference(x + i), kind == "relu")
