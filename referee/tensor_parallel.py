"""Linear -> ReLU -> divide with its features shared by several devices, one process each.

`python -m referee.tensor_parallel` compares and times the forward of x `[rows, features]`, which
every process has whole, with a weight of which each has its part of the rows (ColwiseParallel).
"""

import argparse
import importlib
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import spawn

from model import PROBLEMS
from referee.linear_errors import compare_output
from referee.linear_relu_divide import NAMES
from referee.pairs import Modules, alternate, columns, samplers_of
from referee.report import environment, table

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
PROBLEM = "linear_relu_divide"
RATIO = 3  # the table's column of it


def parallelized(kind: type[nn.Module], features: int, mesh: dist.DeviceMesh) -> nn.Module:
    """A module of this kind with equal parameters in all processes, of which each keeps a part."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    module = kind(features, features, 2.0).to(mesh.device_type)
    return parallelize_module(module, mesh, {"linear": ColwiseParallel()})


def part_of(module: nn.Module) -> nn.Module:
    """This process's part of a parallelized reference module, without parallelism."""
    weight, bias = (p.detach().to_local() for p in (module.linear.weight, module.linear.bias))
    part = type(module)(weight.shape[1], 1, module.divisor)
    part.linear.weight, part.linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    part.linear.out_features = len(weight)
    return part


@torch.no_grad()
def measure(rank: int, args: argparse.Namespace, rendezvous: str) -> None:
    """Runs in each process; the first one prints the table."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_float32_matmul_precision(args.precision)
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(BACKENDS[args.device], rendezvous, rank=rank, world_size=args.processes)
    mesh = init_device_mesh(args.device, (args.processes,))
    solution = importlib.import_module("model_new").SOLUTIONS[PROBLEM]
    kinds = solution, PROBLEMS[PROBLEM].reference
    modules = Modules(NAMES, *(parallelized(kind, args.features, mesh) for kind in kinds))
    torch.manual_seed(1)
    x = torch.rand(args.rows, args.features).to(args.device)
    outputs = [module(x) for module in modules.by_name().values()]
    compared = compare_output("output", *outputs, x, part_of(modules.eager))
    del outputs
    dist.barrier()
    times = alternate(samplers_of(modules, x))
    ratios = [
        getattr(compared.solution, metric) / max(getattr(compared.reference, metric), 1e-300)
        for metric in ("max", "mean")
    ]
    row = [f"{args.device}:{rank}", *columns(times, 1e3), *(f"{ratio:.3f}" for ratio in ratios)]
    mine = row, compared.problem()
    every: list = [None] * args.processes
    dist.all_gather_object(every, mine)
    problems = [f"WRONG  process {i}: {why}" for i, (_, why) in enumerate(every) if why]
    if rank == 0:
        titles = ["process", *modules.titles("ms"), "max error / eager's", "mean error / eager's"]
        print(table([titles, *(row for row, _ in every)]))
        print(f"least: {min(float(row[RATIO]) for row, _ in every):.3f} times eager's speed")
        print("\n".join(problems), end="\n" if problems else "", flush=True)
    dist.barrier()
    sys.stdout.flush()
    # Gloo's threads now and then abort a process that ends in the ordinary way.
    os._exit(1 if problems else 0)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=list(BACKENDS), default=best)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--features", type=int, default=8192)
    parser.add_argument("--precision", choices=["highest", "high", "medium"], default="highest")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and torch.cuda.device_count() < args.processes:
        parser.error(f"needs {args.processes} GPUs, found {torch.cuda.device_count()}")
    about = environment(torch.device(args.device))
    print(
        f"{args.processes} x {about['device']}, torch {about['torch']}, CUDA {about['cuda']}, "
        f"x [{args.rows}, {args.features}], precision {args.precision}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (args, f"file://{folder}/rendezvous"), nprocs=args.processes)


if __name__ == "__main__":
    main()
