"""Inputs, modules and calls that several tests share."""

import random
from contextlib import contextmanager

import pytest
import torch

from model import LinearReluDivide
from model_new import LinearReluDivideNew, linear_ops
from problems.benchmark.paths.kernel_paths import KERNEL_PATHS

OPERATORS = torch.ops.relu_divide_kernels  # the import of model_new defines them

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# The paths whose kernels compute float32 products on a GPU. At `highest` all but skinny use fp16x3.
FLOAT32_PATHS = list(KERNEL_PATHS)
FP16X3_PATHS = [path for path in FLOAT32_PATHS if path != "skinny"]

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


def draw_sizes(seed, count, sizes, largest_product):
    """Draw that many different (m, n, k) of these sizes whose product is not too large."""
    choose = random.Random(seed)
    drawn = set()
    while len(drawn) < count:
        m, n, k = (choose.choice(sizes) for _ in range(3))
        if m * n * k <= largest_product:
            drawn.add((m, n, k))
    return sorted(drawn)


def slow(values):
    """Mark these parameters of a test as slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def draw(shape, dtype, device="cpu"):
    """Draw normal numbers, or integers of the dtype's whole range."""
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, device=device)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype, device=device)


def draw_views(dtype, device="cpu"):
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


VIEWS = [name for name, _ in draw_views(torch.float32)]


def draw_view(name, dtype, device):
    """Return the tensor of `draw_views` with this name, one of VIEWS."""
    return dict(draw_views(dtype, device))[name]


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


def has_code_for_gpu(path):
    """Return whether a path's kernel has code for the GPU. That of sm80 runs on newer GPUs too."""
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    if path == "sm80":
        return capability >= KERNEL_PATHS[path]
    return capability == KERNEL_PATHS[path]


@contextmanager
def linear_path(name):
    """Compute products on a GPU by one path: "auto", or one of `PATHS` of kernel_paths.py."""
    if name in KERNEL_PATHS and not has_code_for_gpu(name):
        pytest.skip(f"needs a GPU of compute capability {KERNEL_PATHS[name] / 10:.1f}")
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
