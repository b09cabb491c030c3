"""Both modules in two processes: DTensor, DistributedDataParallel and FSDP2.

Each check runs in both processes and compares the whole results with the references'.
"""

import copy
import os
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from model import Model
from model_new import ModelNew, namespaces
from tests.support.tensors import linear_modules

pytestmark = pytest.mark.slow

WORLD = 2
# Imported once, by the server that forks the processes of all checks. model_new is not among them:
# its import asks CUDA for the GPUs, after which a process must not be forked.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.testing",
]
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
OPERATOR = f"{namespaces['linear_relu_divide']}.linear_relu_divide"


def spawn(check, device, folder):
    """Run a check in WORLD processes."""
    if device == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} CUDA devices")
    mp.set_forkserver_preload(PRELOADED)
    arguments = (check, device, f"file://{folder}/rendezvous")
    mp.start_processes(worker, arguments, nprocs=WORLD, start_method="forkserver")


def worker(rank, check, device, rendezvous):
    """Run a check in one of the processes."""
    dist.init_process_group(BACKENDS[device], rendezvous, rank=rank, world_size=WORLD)
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    check(device, init_device_mesh(device, (WORLD,)))
    dist.barrier()
    # Gloo's threads now and then abort a process that ends in the ordinary way ("terminate called
    # without an active exception"), with torch's own ReLU too.
    os._exit(0)


def check_dtensor(device, mesh):
    """ReLU of a DTensor is computed by our operator, keeps the placement, and has gradients."""
    for shape in ((4, 6), (5, 7), (1, 3)):
        values = torch.randn(shape, device=device)
        grad_output = torch.randn(shape, device=device)
        want = values.clone().requires_grad_()
        torch.relu(want).backward(grad_output)
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = distribute_tensor(values, mesh, [placement])
            with torch.no_grad(), torch.profiler.profile() as profile:
                out = ModelNew()(x)
            assert f"{namespaces['relu']}::relu" in {event.key for event in profile.key_averages()}
            if min(shape) >= WORLD:  # otherwise a process would have no rows or columns
                assert out.placements == (placement,)
            assert torch.equal(out.full_tensor(), torch.relu(values))
            x.requires_grad_()
            ModelNew()(x).backward(distribute_tensor(grad_output, mesh, [placement]))
            assert torch.equal(x.grad.full_tensor(), want.grad)
    x_with_gaps = DTensor.from_local(torch.randn(4, 8, device=device)[:, ::2], mesh, [Shard(0)])
    assert ModelNew()(x_with_gaps).stride() == torch.relu(x_with_gaps).stride()
    part = torch.full((4,), [3.0, -4.0][dist.get_rank()], device=device)
    sum_of_parts = DTensor.from_local(part, mesh, [Partial()])
    assert torch.equal(ModelNew()(sum_of_parts).full_tensor(), torch.zeros(4, device=device))


class OperatorRecorder(TorchDispatchMode):
    """Records the names of operators that are called on shards, and of communication."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it calls operators on its shards
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def whole(tensor):
    """Return the whole tensor of a DTensor, or any other tensor unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same_gradients(ours, reference):
    """Assert that the parameters of both modules have close gradients."""
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(a.grad), whole(b.grad))


def gradients(module, x, **options):
    """Return the gradients of x and the parameters, for the sum of the output's squares."""
    leaves = [x, *module.parameters()]
    return torch.autograd.grad(whole(module(x).square().sum()), leaves, **options)


def gradients_of_gradients(module, x):
    """Return the gradients of the sum of all squared gradients."""
    grads = gradients(module, x, create_graph=True)
    norm = sum(whole(grad.square().sum()) for grad in grads)
    return torch.autograd.grad(norm, [x, *module.parameters()])


def shard(module, mesh, weight, bias):
    """Replace the parameters by DTensors with these placements."""
    for name, placement in (("weight", weight), ("bias", bias)):
        parameter = getattr(module.linear, name).detach()
        sharded = distribute_tensor(parameter, mesh, [placement])
        setattr(module.linear, name, nn.Parameter(sharded))


@dataclass(frozen=True)
class Sharding:
    """How the operands of Linear are placed.

    Attributes:
        weight, x: their placements.
        is_ours: whether our operator computes the result. Otherwise torch's product does.
        features: how many the output has.
    """

    weight: Placement
    x: Placement
    is_ours: bool
    features: int = 16

    @property
    def bias(self):
        """Return the placement of the bias, which has an element for each row of weight."""
        return self.weight if self.weight == Shard(0) else Replicate()


def shardings_of_linear(shape):
    """Yield shardings for an x of this shape.

    Our operator computes where no sum over processes comes before ReLU, and needs no communication.
    """
    last = len(shape) - 1
    rows = [Shard(dimension) for dimension in range(last)]
    yield Sharding(Replicate(), Replicate(), is_ours=True)
    yield Sharding(Shard(0), Replicate(), is_ours=True)
    # A shard's 6 features end within a byte of the mask.
    yield Sharding(Shard(0), Replicate(), is_ours=True, features=12)
    for row in rows:
        yield Sharding(Replicate(), row, is_ours=True)
        yield Sharding(Shard(0), row, is_ours=False)  # one of the two is gathered
    yield Sharding(Shard(1), Shard(last), is_ours=False)
    yield Sharding(Shard(1), Replicate(), is_ours=False)
    yield Sharding(Replicate(), Shard(last), is_ours=False)


def check_linear_dtensor(device, mesh):
    """Results and gradients of Linear are right for all placements that torch supports."""
    for shape in ((4, 6), (5, 6), (2, 4, 6), (6,)):
        for sharding in shardings_of_linear(shape):
            check_sharding_of_linear(device, mesh, shape, sharding)


def placements_of_result(module, x):
    """Return the placements of the module's result; None if torch cannot compute it.

    Until torch 2.11, it cannot flatten x if its middle rows are sharded.
    """
    try:
        return module(x).placements
    except RuntimeError:
        return None


def check_sharding_of_linear(device, mesh, shape, sharding):
    """Compare our results and gradients with the reference's, and placements with torch's."""
    case = f"{shape} {sharding}"
    ours, reference = linear_modules(6, sharding.features, -3.0, device=device)
    torch_module = copy.deepcopy(reference)
    for module in (ours, torch_module):
        shard(module, mesh, sharding.weight, sharding.bias)
    x = torch.randn(shape, device=device)
    dist.broadcast(x, 0)
    sharded = distribute_tensor(x, mesh, [sharding.x])
    torch_placements = placements_of_result(torch_module, sharded)
    if torch_placements is None and not sharding.is_ours:
        return

    with torch.inference_mode():
        torch.testing.assert_close(whole(ours(sharded)), reference(x))
    sharded.requires_grad_()
    with OperatorRecorder() as recorder:
        out = ours(sharded)
    assert (f"{OPERATOR}_with_mask.default" in recorder.names) == sharding.is_ours, case
    communicates = any("c10d" in name for name in recorder.names)
    assert not (sharding.is_ours and communicates), case
    torch.testing.assert_close(whole(out), reference(x))
    assert torch_placements in (out.placements, None), case

    leaf = x.clone().requires_grad_()
    compared = [gradients]
    if torch_placements is not None:
        compared.append(gradients_of_gradients)
    for gradients_of in compared:
        got = tuple(map(whole, gradients_of(ours, sharded)))
        torch.testing.assert_close(got, gradients_of(reference, leaf), atol=1e-5, rtol=1e-4)


def check_different_meshes(device, mesh):
    """Torch refuses operands on different meshes, and so does the module: it calls torch's ops."""
    other_mesh = DeviceMesh(device, [1, 0])
    ours, reference = linear_modules(8, 6, device=device)
    x = distribute_tensor(torch.randn(4, 8, device=device), mesh, [Replicate()])
    for names_on_other_mesh in (("weight", "bias"), ("bias",)):
        for name in ("weight", "bias"):
            its_mesh = other_mesh if name in names_on_other_mesh else mesh
            values = whole(getattr(reference.linear, name)).detach()
            sharded = nn.Parameter(distribute_tensor(values, its_mesh, [Shard(0)]))
            setattr(reference.linear, name, sharded)
            setattr(ours.linear, name, sharded)
        messages = []
        for module in (reference, ours):
            with pytest.raises(RuntimeError, match="mesh") as error:
                module(x)
            messages.append(str(error.value).splitlines()[0])
        assert messages[0] == messages[1]


def check_compiled_dtensor(device, mesh):
    """Compiled modules have the right gradients; their graphs contain torch's ops."""
    for weight, bias, x_placement in (
        (Shard(0), Shard(0), Replicate()),
        (Replicate(), Replicate(), Shard(0)),
        (Shard(1), Replicate(), Shard(1)),
    ):
        torch._dynamo.reset()
        ours, reference = linear_modules(6, 16, -3.0, device=device)
        shard(ours, mesh, weight, bias)
        x = torch.randn(4, 6, device=device)
        dist.broadcast(x, 0)
        sharded = distribute_tensor(x, mesh, [x_placement]).requires_grad_()
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        got = gradients(compiled, sharded)
        want = gradients(reference, x.requires_grad_())
        torch.testing.assert_close(tuple(map(whole, got)), want)


def check_tensor_parallel(device, mesh):
    """A layer sharded by columns, then one sharded by rows, train as the references do.

    Their x is a plain tensor.
    """
    for is_compiled in (False, True):
        pairs = [linear_modules(*sizes, 2.0, device=device) for sizes in ((6, 16), (16, 4))]
        ours, reference = (nn.Sequential(*layers) for layers in zip(*pairs, strict=True))
        plan = {"0.linear": ColwiseParallel(), "1.linear": RowwiseParallel()}
        ours = parallelize_module(ours, mesh, plan)
        for shape in ((5, 6), (2, 3, 6)):
            torch._dynamo.reset()
            call = torch.compile(ours, fullgraph=True, backend="aot_eager") if is_compiled else ours
            x = torch.randn(shape, device=device)
            dist.broadcast(x, 0)
            got = call(x)
            want = reference(x)
            torch.testing.assert_close(got, want)
            for module, out in ((ours, got), (reference, want)):
                module.zero_grad()
                out.square().sum().backward()
            assert_same_gradients(ours, reference)


def networks(device):
    """Return a network of our modules and one of the references, with the same parameters."""
    first = linear_modules(6, 8, 2.0, device=device)
    plain = nn.Linear(8, 8)
    last = linear_modules(8, 4, -3.0, device=device)
    ours = nn.Sequential(first[0], plain, ModelNew(), last[0])
    reference = nn.Sequential(first[1], copy.deepcopy(plain), Model(), last[1])
    return ours.to(device), reference.to(device)


def check_wrapped(device, mesh):
    """In DistributedDataParallel and in FSDP2, gradients are those of the wrapped references."""
    ids = [dist.get_rank()] if device == "cuda" else None

    def shard_fully(module):
        for layer in module:
            fully_shard(layer, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    for wrap in (lambda module: DistributedDataParallel(module, device_ids=ids), shard_fully):
        ours, reference = map(wrap, networks(device))
        x = torch.randn(5, 6, device=device) + dist.get_rank()
        for module in (ours, reference):
            module(x).pow(2).sum().backward()
        assert_same_gradients(ours, reference)


CHECKS = [check_dtensor, check_linear_dtensor, check_compiled_dtensor]
CHECKS += [check_different_meshes, check_tensor_parallel, check_wrapped]


@pytest.mark.parametrize("check", CHECKS)
def test_results_of_two_processes_match_the_reference(device, check, tmp_path):
    spawn(check, device, tmp_path)
