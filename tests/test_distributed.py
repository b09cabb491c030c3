"""Several processes on torch's own engine: DTensor, DistributedDataParallel and FSDP2."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensors import linear_modules
from torch import nn

from model import Model
from model_new import ModelNew

WORLD = 2
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def spawn(check, device, folder):
    if device == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} CUDA devices")
    mp.spawn(worker, (check, device, f"file://{folder}/rendezvous"), nprocs=WORLD)


def worker(rank, check, device, rendezvous):
    dist.init_process_group(BACKENDS[device], rendezvous, rank=rank, world_size=WORLD)
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    check(device)
    dist.barrier()
    # Gloo's threads now and then abort a process that ends in the ordinary way ("terminate called
    # without an active exception"), with torch's own ReLU too.
    os._exit(0)


def network(relu):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), relu, nn.Linear(8, 4))


def check_dtensor(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device, (WORLD,))
    for shape in ((4, 6), (5, 7), (1, 3)):
        whole, grad_output = torch.randn(shape, device=device), torch.randn(shape, device=device)
        want = whole.clone().requires_grad_()
        torch.relu(want).backward(grad_output)
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = distribute_tensor(whole, mesh, [placement])
            with torch.no_grad():
                out = ModelNew()(x)
            if min(shape) >= WORLD:  # else a process would hold nothing
                assert out.placements == (placement,)
            assert torch.equal(out.full_tensor(), torch.relu(whole))
            x.requires_grad_()
            ModelNew()(x).backward(distribute_tensor(grad_output, mesh, [placement]))
            assert torch.equal(x.grad.full_tensor(), want.grad)
    part = torch.full((4,), [3.0, -4.0][dist.get_rank()], device=device)
    sum_of_parts = DTensor.from_local(part, mesh, [Partial()])
    assert torch.equal(ModelNew()(sum_of_parts).full_tensor(), torch.zeros(4, device=device))


def same_gradients(mine, theirs):
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        got, want = (
            (t.full_tensor() if hasattr(t, "full_tensor") else t) for t in (a.grad, b.grad)
        )
        torch.testing.assert_close(got, want)


def check_linear_dtensor(device):
    """Weights sharded by rows and by columns, with x as each of them wants it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device, (WORLD,))
    for shape in ((4, 6), (2, 3, 6)):
        last = len(shape) - 1
        for weight_shard, bias_shard, x_placement in (
            (Shard(0), Shard(0), Replicate()),
            (Shard(1), Replicate(), Shard(last)),
            (Replicate(), Replicate(), Shard(0)),
        ):
            mine, theirs = linear_modules(6, 8, -3.0, device=device)
            for name, placement in (("weight", weight_shard), ("bias", bias_shard)):
                whole = getattr(mine.linear, name).detach()
                sharded = nn.Parameter(distribute_tensor(whole, mesh, [placement]))
                setattr(mine.linear, name, sharded)
            whole = torch.randn(shape, device=device)
            dist.broadcast(whole, 0)
            want = whole.clone().requires_grad_()
            expected = theirs(want)
            expected.pow(2).sum().backward()
            x = distribute_tensor(whole, mesh, [x_placement]).requires_grad_()
            out = mine(x)
            torch.testing.assert_close(out.full_tensor(), expected)
            out.pow(2).sum().full_tensor().backward()
            torch.testing.assert_close(x.grad.full_tensor(), want.grad)
            same_gradients(mine, theirs)


def check_tensor_parallel(device):
    """A column-wise layer feeds a row-wise one, on plain inputs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device, (WORLD,))
    pairs = [linear_modules(6, 8, 2.0, device=device), linear_modules(8, 4, -3.0, device=device)]
    mine, theirs = (nn.Sequential(*layers) for layers in zip(*pairs, strict=True))
    plan = {"0.linear": ColwiseParallel(), "1.linear": RowwiseParallel()}
    mine = parallelize_module(mine, mesh, plan)
    for shape in ((5, 6), (2, 3, 6)):
        x = torch.randn(shape, device=device)
        dist.broadcast(x, 0)
        got, want = mine(x), theirs(x)
        torch.testing.assert_close(got, want)
        for module, out in ((mine, got), (theirs, want)):
            module.zero_grad()
            out.pow(2).sum().backward()
        same_gradients(mine, theirs)


def check_linear_ddp(device):
    from torch.nn.parallel import DistributedDataParallel

    ids = [dist.get_rank()] if device == "cuda" else None
    modules = linear_modules(6, 8, 2.0, device=device)
    mine, theirs = (DistributedDataParallel(module, device_ids=ids) for module in modules)
    x = torch.randn(5, 6, device=device) + dist.get_rank()
    for module in (mine, theirs):
        module(x).pow(2).sum().backward()
    same_gradients(mine, theirs)


def check_linear_fsdp(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (WORLD,))
    mine, theirs = (fully_shard(m, mesh=mesh) for m in linear_modules(6, 8, 2.0, device=device))
    x = torch.randn(5, 6, device=device) + dist.get_rank()
    for module in (mine, theirs):
        module(x).pow(2).sum().backward()
    same_gradients(mine, theirs)


def check_ddp(device):
    from torch.nn.parallel import DistributedDataParallel

    ids = [dist.get_rank()] if device == "cuda" else None
    mine = DistributedDataParallel(network(ModelNew()).to(device), device_ids=ids)
    theirs = DistributedDataParallel(network(Model()).to(device), device_ids=ids)
    x = torch.randn(5, 6, device=device) + dist.get_rank()
    for module in (mine, theirs):
        module(x).pow(2).sum().backward()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def check_fsdp(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (WORLD,))
    modules = []
    for relu in (ModelNew(), Model()):
        module = network(relu).to(device)
        for layer in module:
            fully_shard(layer, mesh=mesh)
        modules.append(fully_shard(module, mesh=mesh))
    x = torch.randn(5, 6, device=device) + dist.get_rank()
    for module in modules:
        module(x).pow(2).sum().backward()
    for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())


@pytest.mark.parametrize(
    "check",
    [
        check_dtensor,
        check_ddp,
        check_fsdp,
        check_linear_dtensor,
        check_tensor_parallel,
        check_linear_ddp,
        check_linear_fsdp,
    ],
)
def test_two_processes(device, check, tmp_path):
    spawn(check, device, tmp_path)
