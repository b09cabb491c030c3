"""A `linear` that was changed, wrapped or replaced has the effect that it has in the reference."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

from model import Model
from model_new import LinearReluDivideNew, ModelNew
from tests.support.beside_torch import assert_same_results, output_and_gradients, samples
from tests.support.compare import assert_same_bits
from tests.support.tensors import linear_modules


@pytest.fixture
def modules(device):
    return linear_modules(6, 10, 3.0, device=device)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def move(module, name, put):
    """Delete a parameter of `linear`, and let `put` store the parameter plus 1 in another place.

    Wrappers that shard, tie or freeze parameters do that. `put` takes `linear`, name and tensor.
    """
    tensor = getattr(module.linear, name).detach() + 1
    delattr(module.linear, name)
    put(module.linear, name, tensor)


# Changes of a module, each a function of it. Its forward must respect them.


def pre_hook(module):
    module.linear.register_forward_pre_hook(lambda _, args: (args[0] + 1,))


def hook(module):
    module.linear.register_forward_hook(lambda _, args, out: out * 2)


def hook_that_changes_the_divisor(module):
    def change_divisor(*_):
        module.divisor = 7.0

    module.linear.register_forward_hook(change_divisor)


def parametrization(module):
    register_parametrization(module.linear, "weight", nn.Softplus())


def pruning(module):
    prune.l1_unstructured(module.linear, "weight", 0.5)


def subclass(module):
    parameters = module.linear.state_dict()
    module.linear = Doubled(6, 10).to(module.linear.weight.device)
    module.linear.load_state_dict(parameters)


def patched_forward(module):
    module.linear.forward = lambda x: x.sum() + nn.Linear.forward(module.linear, x)


def linear_as_a_function(module):
    base = module._modules.pop("linear")
    module.base = base
    module.linear = lambda x: base(x) + 1


def bias_as_an_attribute(module):
    move(module, "bias", setattr)


def bias_as_a_buffer(module):
    move(module, "bias", nn.Module.register_buffer)


def weight_as_an_attribute(module):
    move(module, "weight", setattr)


def attribute_that_hides_weight(module):
    module.linear.__dict__["weight"] = module.linear.weight * 2


def attribute_that_hides_linear(module):
    module.__dict__["linear"] = nn.Sequential(module.linear, nn.Tanh())


def weight_after_bias(module):
    def put(linear, name, tensor):
        setattr(linear, name, nn.Parameter(tensor))

    move(module, "weight", put)


def sequential(module):
    module.linear = nn.Sequential(module.linear, nn.Tanh())


CHANGES = [
    pre_hook,
    hook,
    hook_that_changes_the_divisor,
    parametrization,
    pruning,
    subclass,
    patched_forward,
    linear_as_a_function,
    bias_as_an_attribute,
    bias_as_a_buffer,
    weight_as_an_attribute,
    attribute_that_hides_weight,
    attribute_that_hides_linear,
    weight_after_bias,
    sequential,
]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_linear_change_the_result(device, modules, change, is_compiled):
    x = samples(device)
    plain = modules[1](x)
    for module in modules:
        change(module)
        module.to(device)
    ours, reference = modules
    if is_compiled:
        torch._dynamo.reset()
        ours = torch.compile(ours, backend="aot_eager")
    out, *_ = assert_same_results((ours, reference), lambda module: output_and_gradients(module, x))
    assert not torch.equal(out, plain)


def test_an_object_whose_class_was_replaced_uses_the_new_class(device, modules):
    """A `Model` may become a ModelNew, and a subclass may define its own `linear`."""
    x = samples(device)
    module = Model()
    module.__class__ = ModelNew
    assert_same_bits(module(x), torch.relu(x))
    own = property(lambda self: lambda x: self._modules["linear"](x) + 9)
    for module in modules:
        module.__class__ = type("Subclass", (type(module),), {"linear": own})
    assert assert_same_results(modules, lambda module: module(x)).min() > 0


@pytest.mark.parametrize("name", ["bias", "weight"])
def test_a_deleted_parameter_raises(device, modules, name):
    for module in modules:
        delattr(module.linear, name)
        with pytest.raises(AttributeError, match=name):
            module(samples(device))


def test_backward_hooks_and_global_hooks_are_called(device, modules):
    seen = []

    def record_backward(*_):
        seen.append("backward")

    def record_forward(module, args, out):
        seen.append(type(module))

    modules[0].linear.register_full_backward_hook(record_backward)
    modules[0](samples(device).requires_grad_()).sum().backward()
    register = nn.modules.module.register_module_forward_hook
    with register(record_forward):
        modules[0](samples(device))
    assert seen == ["backward", nn.Linear, LinearReluDivideNew]


@pytest.mark.parametrize("name", ["_call_impl", "_compiled_call_impl"])
def test_a_linear_with_a_call_of_its_own_is_called(device, modules, name):
    """`nn.Module.compile` sets the second."""
    setattr(modules[0].linear, name, lambda x: x.new_zeros(4, 10))
    assert not modules[0](samples(device)).any()
