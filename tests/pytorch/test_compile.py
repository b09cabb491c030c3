"""Both modules inside compiled and exported models give the reference's results."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from model import LinearReluDivide, Model
from model_new import LinearReluDivideNew, ModelNew, namespaces
from tests.support.beside_torch import output_and_gradients
from tests.support.compare import assert_same_bits
from tests.support.tensors import graph_recorder, linear_modules, slow, targets_of

# The linear operator: in graphs, where its namespace is that of this build; and in exported
# programs, which other builds can load.
OWN = f"{namespaces['linear_relu_divide']}.linear_relu_divide"
STABLE = "relu_divide_kernels.linear_relu_divide"


@pytest.fixture(autouse=True)
def without_earlier_graphs():
    torch._dynamo.reset()


@pytest.fixture(params=["aot_eager", *slow(["inductor"])])
def compile(request):
    """Return torch.compile with one of its backends."""
    return partial(torch.compile, fullgraph=True, backend=request.param)


class Network(nn.Module):
    """A network with a residual: both modules between ops that a compiler fuses."""

    def __init__(self, relu, linear_relu_divide):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.relu = relu()
        self.block = linear_relu_divide(16, 16, 3.0)
        self.norm = nn.LayerNorm(16)
        self.last = linear_relu_divide(16, 9, -2.0)

    def forward(self, x):
        x = self.relu(self.first(x) * 0.5 + 1) - 0.25
        return self.last(self.norm(x + self.block(x))).sigmoid()


def networks(device="cpu"):
    """Return networks of the replacements and of the references, with the same parameters."""
    ours = Network(ModelNew, LinearReluDivideNew)
    reference = Network(Model, LinearReluDivide)
    reference.load_state_dict(ours.state_dict())
    return ours.to(device), reference.to(device)


def assert_same_step(got, want):
    torch.testing.assert_close(tuple(got), want, atol=1e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dynamic", [None, *slow([True, False])])
def test_outputs_and_gradients_of_a_compiled_network_match_the_reference(compile, device, dynamic):
    ours, reference = networks(device)
    compiled = compile(ours, dynamic=dynamic)
    shapes = ((4, 6), (7, 6), (8, 6), (2, 3, 6), (6,), (0, 6))
    for shape in shapes if dynamic else shapes[:2]:
        x = torch.randn(shape, device=device)
        assert_same_step(output_and_gradients(compiled, x), output_and_gradients(reference, x))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), reference(x))


def test_a_graph_of_a_larger_model_has_our_operators_for_linear_and_torch_relu(device):
    """The linear module's forward is one operator, and so are its gradients."""
    graphs = []
    compiled = torch.compile(networks(device)[0], fullgraph=True, backend=graph_recorder(graphs))
    output_and_gradients(compiled, torch.randn(4, 6, device=device))
    forward, backward = map(targets_of, graphs)
    assert {f"{OWN}_with_mask.default", "aten.relu.default"} <= forward
    assert f"{OWN}_gradients.default" in backward
    ours = {name for name in forward | backward if name.startswith("relu_divide_kernels")}
    assert ours == {f"{OWN}_with_mask.default", f"{OWN}_gradients.default"}
    products = [n for n in graphs[1].graph.nodes if str(n.target) == "aten.mm.default"]
    assert len(products) == 2  # the gradients of `first`, which is an nn.Linear


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x.unflatten(0, (3, 4)).transpose(0, 1),
        lambda x: x[:1].expand(12, 12),
    ],
)
def test_x_may_have_any_strides(compile, device, view):
    x = view(torch.randn(12, 12, device=device))
    ours, reference = linear_modules(x.shape[-1], 8, 3.0, device=device)
    compiled = compile(ours)
    assert_same_step(output_and_gradients(compiled, x), output_and_gradients(reference, x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), reference(x))
    relu = compile(ModelNew())(x)
    assert_same_bits(relu, torch.relu(x))
    assert relu.stride() == torch.relu(x).stride()


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11),
    reason="torch 2.9's own meta functions compare sizes that data decide",
)
def test_the_number_of_rows_may_depend_on_data(compile, device):
    """The compiler then cannot assume anything about this number."""
    ours, reference = linear_modules(6, 8, 3.0, device=device)
    x = torch.randn(8, 4, 6, device=device)
    keep = torch.arange(8, device=device) > 2

    def of_kept_rows(module):
        return lambda x: module(x[keep].transpose(0, 1))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = output_and_gradients(ours, x, compile(of_kept_rows(ours)))
        assert_same_step(got, output_and_gradients(reference, x, of_kept_rows(reference)))


@pytest.mark.slow
def test_training_with_reduce_overhead_matches_the_reference(device):
    """On a GPU, CUDA graphs are recorded in the second step and replayed from the third."""
    ours, reference = networks(device)
    compiled = torch.compile(ours, fullgraph=True, mode="reduce-overhead")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, reference)]
    for _ in range(6):
        x = torch.randn(4, 6, device=device)  # a shape for which earlier tests compiled kernels
        torch.compiler.cudagraph_mark_step_begin()
        assert_same_step(
            [t.clone() for t in output_and_gradients(compiled, x)],
            output_and_gradients(reference, x),
        )
        for module, optimizer in zip((compiled, reference), optimizers, strict=True):
            optimizer.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            module(x).square().sum().backward()
            optimizer.step()


@pytest.mark.parametrize("is_module_compiled", [False, True])
def test_gradients_under_activation_checkpointing_match_the_reference(device, is_module_compiled):
    """If a compiled function contains the checkpoint, the backward's graph repeats the forward."""
    ours, reference = networks(device)
    x = torch.randn(4, 6, device=device)
    graphs = []
    compile = partial(torch.compile, fullgraph=True, backend=graph_recorder(graphs))

    def run(module):
        return lambda x: checkpoint(module, x, use_reentrant=False)

    compiled = run(compile(ours)) if is_module_compiled else compile(run(ours))
    leaf = x.clone().requires_grad_()
    out = compiled(leaf)
    got = torch.autograd.grad(out.square().sum(), [leaf, *ours.parameters()])
    assert_same_step((out, *got), output_and_gradients(reference, x))
    repeats_forward = f"{OWN}_with_mask.default" in targets_of(graphs[-1])
    assert repeats_forward != is_module_compiled
    assert f"{OWN}_gradients.default" in targets_of(graphs[-1])


@pytest.mark.parametrize("inside", [False, True])
def test_results_under_autocast_are_close_to_the_reference(compile, device, inside):
    """Autocast may be inside the compiled function, or around it."""
    ours, reference = networks(device)
    x = torch.randn(4, 6, device=device)

    def run(module):
        return torch.autocast(device, dtype=torch.bfloat16)(module.forward)

    compiled = compile(run(ours)) if inside else run(compile(ours))
    results = []
    for module, call in ((ours, compiled), (reference, run(reference))):
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        loss = out.float().square().sum()
        results.append((out, *torch.autograd.grad(loss, [leaf, *module.parameters()])))
    torch.testing.assert_close(*results, atol=5e-2, rtol=5e-2)


def test_autocast_during_the_backward_changes_nothing(compile, device):
    """A graph that was made without autocast does not change its dtypes under autocast."""
    ours, _ = linear_modules(6, 8, 3.0, device=device)
    compiled = compile(ours)
    x = torch.randn(4, 6, device=device, requires_grad=True)
    want = torch.autograd.grad(compiled(x).sum(), [x, ours.linear.weight])
    out = compiled(x)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = torch.autograd.grad(out.sum(), [x, ours.linear.weight])
    assert_same_bits(got, want)


TRANSFORMS = {
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).pow(3).sum()),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).pow(2).sum())),
    "jacfwd": torch.func.jacfwd,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func_in_a_graph_match_the_reference(compile, transform):
    """Second gradients come from torch's formulas."""
    ours, reference = linear_modules(6, 8, 3.0)
    x = torch.randn(4, 6)
    got = compile(transform(ours))(x)
    torch.testing.assert_close(got, transform(reference)(x))


def count_graphs(module, change, calls):
    """Return how many graphs are compiled for `calls` calls, each after a change.

    `change` takes the module and the number of the call, and returns the call's x.
    """
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for i in range(calls):
        compiled(change(module, i))
    return backend.frame_count


def new_divisor(module, i):
    """Give the module another divisor for each call, and return an x of always the same shape."""
    first_divisors = [2.0, -0.5, 7.0]
    module.divisor = first_divisors[i] if i < len(first_divisors) else float(i)
    return torch.ones(4, 6)


def new_rows(_, i):
    """Return an x with another number of rows for each call."""
    return torch.ones(i + 2, 6)


@pytest.mark.parametrize("change", [new_divisor, new_rows])
def test_no_more_graphs_are_compiled_than_for_the_reference(change):
    """A divisor or a number of rows becomes a symbol instead of a reason for another graph."""
    ours, reference = linear_modules(6, 8, 3.0)
    assert count_graphs(ours, change, 12) <= count_graphs(reference, change, 12) <= 3


@pytest.mark.parametrize("number", [float, int])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_divisor_may_change_between_steps(compile, device, number, dtype):
    """From its second value on it is a symbol. Results and gradients are right for each value."""
    ours, reference = linear_modules(6, 8, 3.0, dtype, device)
    compiled = compile(ours)
    x = torch.randn(4, 6, device=device, dtype=dtype)
    for divisor in (2, -3, 5, 0, 7):
        ours.divisor = reference.divisor = number(divisor)
        assert_same_step(output_and_gradients(compiled, x), output_and_gradients(reference, x))
    for divisor in (float("inf"), float("nan")):
        ours.divisor = reference.divisor = divisor
        torch.testing.assert_close(compiled(x), reference(x), equal_nan=True)


@pytest.mark.parametrize("is_symbolic", [False, True])
def test_an_integer_that_may_not_be_exact_as_a_float_goes_to_torch(is_symbolic):
    """The graph does what an eager call does: from 2^53 on, torch's ops compute everything."""
    ours, reference = linear_modules(6, 8, 3)
    graphs = []
    compiled = torch.compile(ours, fullgraph=True, backend=graph_recorder(graphs))
    x = torch.randn(4, 6)
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=is_symbolic), torch.no_grad():
        for divisor in (3, 5, 2**53 - 1, 2**53, -(2**53) - 1):
            ours.divisor = reference.divisor = divisor
            assert_same_bits(compiled(x), reference(x))
    assert f"{OWN}.default" in targets_of(graphs[0])
    assert f"{OWN}.default" not in targets_of(graphs[-1])


def test_layers_with_different_divisors_share_two_graphs():
    """Large models are compiled layer by layer. From the second divisor on, it is a symbol."""
    backend = CompileCounterWithBackend("aot_eager")
    layers = nn.Sequential(*(LinearReluDivideNew(6, 6, 2.0 + i) for i in range(12)))
    want = layers(torch.ones(4, 6))
    for layer in layers:
        layer.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(layers(torch.ones(4, 6)), want)
    assert backend.frame_count == 2


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_that_was_exported_and_saved_can_be_trained(device, strict, tmp_path):
    """The batch may have another size than when the program was exported."""
    ours, reference = networks(device)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(
        ours, (torch.randn(4, 6, device=device),), dynamic_shapes=({0: batch},), strict=strict
    )
    targets = targets_of(program.run_decompositions())
    assert {f"{STABLE}.default", "aten.relu.default"} <= targets
    assert "relu_divide_kernels.relu.default" not in targets
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for rows in (3, 9):
        x = torch.randn(rows, 6, device=device)
        torch.testing.assert_close(loaded(x), reference(x))
    loaded(x).square().sum().backward()
    reference(x).square().sum().backward()
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad)
