"""Code that replaces torch's functions, before or after our import, sees the modules' calls."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from kernels import interception
from model import LinearReluDivide
from model_new import LinearReluDivideNew, ModelNew, namespaces
from tests.support.processes import forked, printed
from tests.support.tensors import OPERATORS

# Functions that other code replaces: by name, the object and the attribute.
PLACES = {
    "torch.relu": (torch, "relu"),
    "functional.linear": (functional, "linear"),
    "nn.Linear.forward": (nn.Linear, "forward"),
    "nn.Linear.__call__": (nn.Linear, "__call__"),
    "nn.Module.__call__": (nn.Module, "__call__"),
    "nn.Module._call_impl": (nn.Module, "_call_impl"),
    "torch.Tensor.__truediv__": (torch.Tensor, "__truediv__"),
}


def operators_called(function):
    """Return the names of the operators that a function calls."""
    with torch.profiler.profile() as profile:
        function()
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("place", PLACES)
def test_a_replacement_is_called_as_often_as_by_the_reference(monkeypatch, place):
    """Once the replacement is gone, our operator runs again."""
    owner, name = PLACES[place]
    original = getattr(owner, name)
    calls = []

    def recording(*args, **kwargs):
        calls.append(type(args[0]).__name__.removesuffix("New"))
        return original(*args, **kwargs)

    x = torch.ones(2, 4)
    modules = [kind(4, 4, 2.0) for kind in (LinearReluDivide, LinearReluDivideNew)]
    modules[1].load_state_dict(modules[0].state_dict())
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, recording)
        for module in modules:
            calls.clear()
            module(x)
            seen.append(calls[:])
    assert seen[0] == seen[1] != []
    operator = f"{namespaces['linear_relu_divide']}::linear_relu_divide"
    assert operator in operators_called(lambda: modules[1](x))


def test_a_replacement_may_change_the_result(monkeypatch):
    original = nn.Linear.__call__
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: original(self, x) + 1)
    module = LinearReluDivideNew(4, 4, 2.0)
    x = torch.ones(2, 4)
    assert torch.equal(module(x), torch.relu(module.linear(x)) / 2.0)


@pytest.mark.parametrize("place", ["torch.relu", "functional.linear", "nn.Linear.forward"])
def test_a_replacement_from_before_the_import_is_called_until_it_is_gone(place, tmp_path):
    """Our operators run once torch's own function was put back."""
    owner, name = place.rsplit(".", 1)
    count = 2 if name == "relu" else 1  # both modules call torch.relu
    code = f"""
        import torch
        from torch import nn
        from torch.nn import functional
        original = {owner}.{name}
        calls = []
        def recording(*args, **kwargs):
            calls.append(1)
            return original(*args, **kwargs)
        {owner}.{name} = recording
        from model_new import LinearReluDivideNew, ModelNew, namespaces
        relu = ModelNew()
        module = LinearReluDivideNew(4, 4, 2.0)
        x = torch.ones(2, 4)
        module(x)
        relu(x)
        assert len(calls) == {count}, calls
        {owner}.{name} = original
        with torch.profiler.profile() as profile:
            module(x)
            relu(x)
        names = {{event.key for event in profile.key_averages()}}
        for problem in ("relu", "linear_relu_divide"):
            assert f"{{namespaces[problem]}}::{{problem}}" in names, names
        assert len(calls) == {count}, calls
    """
    printed(code, tmp_path, forked)


def test_a_wrapper_that_looks_like_the_torch_function_is_found(monkeypatch):
    """`functools.wraps` copies the name and the module of what is wrapped."""
    import functools

    @functools.wraps(nn.Linear.forward)
    def forward(self, x):
        return functional.linear(x, self.weight, self.bias)

    assert not interception.is_reference_function_replaced()
    monkeypatch.setattr(nn.Linear, "forward", forward)
    assert interception.is_reference_function_replaced()


def test_relu_in_a_graph_is_torch_relu():
    """A direct call of our operator still works."""
    targets = []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compile(ModelNew(), backend=backend)(torch.ones(3))
    assert not [target for target in targets if "relu_divide_kernels" in target]
    assert OPERATORS.relu(torch.ones(3)).tolist() == [1, 1, 1]
