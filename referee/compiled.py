"""The solution under torch.compile: `python -m referee.compiled [options]`.

ReLU between pointwise ops, and Linear -> ReLU -> divide, each beside the reference compiled alike;
and the latter's training step beside the same uncompiled. Ratios are times of the other in parts
of the compiled solution's.
"""

import argparse
import importlib
from collections.abc import Callable

import torch
from torch import nn

from model import PROBLEMS
from referee import cases
from referee.pairs import Modules, alternate, columns, samplers_of
from referee.report import environment, table
from referee.timing import Names

ELEMENTS = {"cpu": 2**20, "cuda": 2**28}
SIZES = {"cpu": (16, 256), "cuda": (1024, 8192)}  # rows and features
Call = Callable[[torch.Tensor], object]


class Pointwise(nn.Module):
    """relu(x a + b) c + d."""

    def __init__(self, relu: nn.Module) -> None:
        super().__init__()
        self.relu = relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(x * 1.5 + 0.25) * 0.5 - 0.125


def forward(module: nn.Module) -> Call:
    """A call for results alone."""
    return torch.no_grad()(module)


def step(module: nn.Module, grad_output: torch.Tensor) -> Call:
    """A call, and the gradients of its input and the parameters."""
    parameters = list(module.parameters())

    def run(x: torch.Tensor) -> object:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(module(leaf), [leaf, *parameters], grad_output)

    return run


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=list(SIZES), default=best)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--precision", choices=["highest", "high", "medium"], default="highest")
    parser.add_argument("--mode", help="torch.compile's, reduce-overhead say")
    args = parser.parse_args(arguments)
    torch.set_float32_matmul_precision(args.precision)
    device, dtype = torch.device(args.device), cases.DTYPES[args.dtype]
    about = environment(device)
    versions = f"{about['device']}, torch {about['torch']}, CUDA {about['cuda']}"
    print(f"{versions}, {args.dtype}, precision {args.precision}, mode {args.mode}")

    def compiled(module: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        return torch.compile(module, fullgraph=True, mode=args.mode)

    def line(title: str, ours: Call, other: Call, x: torch.Tensor) -> None:
        modules = Modules(Names(solution="ours", eager="other"), ours, other)
        rows.append([title, *columns(alternate(samplers_of(modules, x)), 1e3)])

    rows = [["compiled", "ours ms", "other ms", "other / ours"]]
    solutions = importlib.import_module("model_new").SOLUTIONS
    generator = torch.Generator(device=device)
    x = cases.random((ELEMENTS[device.type],), dtype, device, generator)
    relus = [
        compiled(Pointwise(kind())) for kind in (solutions["relu"], PROBLEMS["relu"].reference)
    ]
    line("relu(x a + b) c + d, forward", *map(forward, relus), x)
    line("relu(x a + b) c + d, step", *(step(relu, torch.ones_like(x)) for relu in relus), x)

    m, n = SIZES[device.type]
    x = cases.random((m, n), dtype, device, generator)
    kinds = solutions["linear_relu_divide"], PROBLEMS["linear_relu_divide"].reference
    mine, theirs = (kind(n, n, 2.0).to(device, dtype) for kind in kinds)
    grad_output = cases.random((m, n), dtype, device, generator)
    ours, eager = compiled(mine), compiled(theirs)
    line("linear, forward", forward(ours), forward(eager), x)
    line("linear, step", step(ours, grad_output), step(eager, grad_output), x)
    line("linear, step, other uncompiled", step(ours, grad_output), step(mine, grad_output), x)
    print(table(rows))


if __name__ == "__main__":
    main()
