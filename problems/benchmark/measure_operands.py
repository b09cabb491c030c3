"""`operands`: times and errors of LinearReluDivideNew and of eager, on operands of many kinds.

The unit u of an error is 2^-24 of (|x| |weight|^T + |bias|) / |divisor|.
"""

import sys
from dataclasses import asdict

import torch
from torch import Tensor, nn

from problems.benchmark.modules import make_modules
from problems.benchmark.rounds import compare, time_in_turn
from problems.linear_relu_divide import U32, exact_sums
from problems.operands import draw_case
from referee.comparison.accuracy import element_errors

# Cases of problems/operands.py.
OPERANDS = [
    "uniform",
    "wide lognormal",
    "two wide rows of x",
    "128 wide rows of the weight",
    "inf in one row of x",
    "inf in all rows of x",
]
OPERANDS_AT_HIGHEST = ["last column large", "one-hot x", "outliers in the weight"]
OPERANDS_BELOW_HIGHEST = [
    "int8 weight",
    "zero weight",
    "2:4 sparse weight",
    "inf in every 64th row of x",
]
# M, K and N by kind of device.
SIZE = {"cpu": (128, 128, 128), "cuda": (1024, 8192, 8192)}


@torch.no_grad()
def measure_operands(device: str, dtype: torch.dtype) -> list[dict]:
    """Return a row for each kind of operands: times, and the largest errors against float64."""
    rows = []
    m, k, n = SIZE[device]
    modules = make_modules("linear_relu_divide", device, dtype, [k, n, 2.0])
    names = list(OPERANDS)
    if torch.get_float32_matmul_precision() == "highest":
        names += OPERANDS_AT_HIGHEST
    else:
        names += OPERANDS_BELOW_HIGHEST
    for name in names:
        x, weight, bias = (tensor.to(dtype) for tensor in draw_case(name, m, k, n, device))
        for module in modules.values():
            module.load_state_dict({"linear.weight": weight, "linear.bias": bias})
        largest_errors = _largest_errors(modules, x)
        row = {"operands": name, **asdict(compare(time_in_turn(modules, x)))}
        row |= {f"{owner}_error": error for owner, error in largest_errors.items()}
        rows.append(row)
    return rows


def _largest_errors(modules: dict[str, nn.Module], x: Tensor) -> dict[str, float]:
    """Return the largest error of each module on x, in the unit u."""
    eager = modules["eager"]
    z, magnitude = exact_sums(eager.linear, x)
    exact = torch.relu(z) / eager.divisor
    # Where a magnitude is infinite or NaN, the unit is the smallest normal number. The exact result
    # is infinite, NaN or 0 there, and a right result has the error 0 in any unit.
    unit = magnitude.nan_to_num_(0, 0).div_(abs(eager.divisor)).clamp_min_(sys.float_info.min)
    found = {}
    for name, module in modules.items():
        error = element_errors(module(x), exact.to(x.dtype), exact)
        found[name] = (error / unit).max().item() / U32
    return found
