"""A `linear` that is more than an nn.Linear, and kinds of tensors, beside the reference."""

import pytest
import torch
from linear_beside_torch import assert_close, both, samples, wrap
from tensors import (
    assert_same_bits,
    linear_modules,
)
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

from model_new import LinearReluDivideNew, _extension


@pytest.fixture
def modules(device):
    return linear_modules(6, 10, 3.0, device=device)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


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
