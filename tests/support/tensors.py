"""Inputs, modules and calls that several tests share."""

from contextlib import contextmanager

import pytest
import torch

from model import LinearReluDivide
from model_new import LinearReluDivideNew, linear_ops

OPERATORS = torch.ops.relu_divide_kernels  # the import of model_new defines them

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGER = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
DTYPES = FLOATING + INTEGER


# By name, a function that returns a view of a matrix: views with any strides, and overlaps.
MATRIX_VIEWS = {
    "rows": lambda x: x[::2],
    "columns": lambda x: x[:, ::2],
    "wide rows": lambda x: x[:, : x.shape[1] // 2],
    "offset": lambda x: x[1:, 1:],
    "transposed": lambda x: x.t().contiguous().t(),
    "one row": lambda x: x[:1].expand(x.shape),
    "one column": lambda x: x[:, :1].expand(x.shape),
    "overlapping": lambda x: x.flatten().as_strided((x.shape[0], x.shape[1] // 2), (3, 1)),
    "flipped": lambda x: x.flip(0)[:, 3:],
    "halves": lambda x: x.unflatten(0, (2, -1)).permute(1, 0, 2),
}


def slow(values):
    """Mark these parameters of a test as slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def draw(shape, dtype, device="cpu"):
    """Draw normal numbers, or integers of the dtype's whole range."""
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, device=device)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype, device=device)


def views(dtype, device="cpu"):
    """Yield a name and a tensor for each of many layouts: aligned or not, with gaps or overlaps."""
    base = draw((6, 10, 8, 12), dtype, device)
    flat = draw((4099,), dtype, device)
    wide = draw((5, 1700), dtype, device)
    yield "contiguous", base
    yield "channels_last", base.contiguous(memory_format=torch.channels_last)
    yield "permuted", base.permute(2, 0, 3, 1)
    yield "transposed", base[0, 0].t()
    yield "channels_last one channel", base[:, :1].contiguous(memory_format=torch.channels_last)
    yield "columns", base[..., 1:]
    yield "every other", base[:, ::2, :, ::3]
    yield "every other, permuted", base[:, ::2].permute(3, 1, 0, 2)
    yield "expanded", base[:1].expand(6, 10, 8, 12)
    yield "expanded inside", base[:, :, :1, :].expand(6, 10, 8, 12)
    yield "expanded scalar", base[0, 0, 0, 0].expand(3, 5)
    yield "overlapping", flat.as_strided((20, 30), (7, 1))
    yield "size 1 with odd strides", flat.as_strided((1, 9, 1, 4), (3, 4, 77, 1))
    yield "long rows", wide[:, 3:]
    yield "long rows, every other", wide[:, 1::2]
    yield "flipped", base.flip(0)
    yield "0-d", base[0, 0, 0, 0]
    yield "empty", base[:0]
    yield "empty, strided", base[:, :0].permute(1, 0, 3, 2)
    for offset in (1, 2, 3, 5, 8):
        yield f"offset {offset}", flat[offset:]
        yield f"offset {offset}, ends early", flat[offset : -offset - 1]


def linear_modules(k, n, divisor=3.0, dtype=torch.float32, device="cpu", bias=True):
    """Return our module and the reference, with the same parameters: weight [n, k], bias [n]."""
    ours = LinearReluDivideNew(k, n, divisor)
    reference = LinearReluDivide(k, n, divisor)
    if not bias:
        ours.linear.bias = reference.linear.bias = None
    reference.load_state_dict(ours.state_dict())
    return ours.to(device, dtype), reference.to(device, dtype)


def step(module, x, grad_output, direction=None):
    """Return the output, and the gradients of x and of the parameters.

    With a `direction`, of x's shape, the last result is a second gradient: that of the sum of
    direction * grad_x, where grad_x is the gradient of x, with respect to grad_output.
    """
    x = x.detach().requires_grad_()
    out = module(x)
    leaves = [x, *module.parameters()]
    grads = torch.autograd.grad(out, leaves, grad_output, retain_graph=direction is not None)
    if direction is not None:
        g = grad_output.detach().requires_grad_()
        [grad_x] = torch.autograd.grad(out, x, g, create_graph=True)
        grads += torch.autograd.grad(grad_x, g, direction)
    return out.detach(), *grads


def capture_graph(run):
    """Capture the call in a CUDA graph; return the graph and the tensors of its results.

    The first call, on a stream of its own, makes what must not be made during the capture.
    """
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        run()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def targets_of(*graphs):
    """Return the names of the operators that the graphs call."""
    nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    return {str(n.target) for n in nodes if isinstance(n.target, torch._ops.OpOverload)}


def graph_recorder(graphs):
    """Return a backend of torch.compile that adds the graphs of forward and backward to a list."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)


@contextmanager
def linear_path(name):
    """Compute products on a GPU by one path: auto, skinny, sm90, sm80 or torch."""
    if name in ("skinny", "sm90") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    linear_ops.set_linear_path(name)
    try:
        yield
    finally:
        linear_ops.set_linear_path("auto")


@contextmanager
def float32_precision(name):
    """Set torch's precision of float32 products: highest, high or medium."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
