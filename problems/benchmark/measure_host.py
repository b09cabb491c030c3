"""`host`: the host's time for small forwards and training steps."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.autograd import grad

from problems.benchmark.modules import make_modules
from problems.benchmark.rounds import compare, time_host_in_turn


@dataclass(frozen=True)
class SmallCall:
    """A module and its input, which are so small that only the host's time counts.

    Attributes:
        title: for the table.
        problem: the problem's name.
        arguments: of the module's constructor.
        shape: of x, and of the output.
    """

    title: str
    problem: str
    arguments: list
    shape: tuple[int, ...]


SMALL_CALLS = [
    SmallCall("ReLU of 1,024", "relu", [], (1024,)),
    SmallCall("[1, 64] -> 64", "linear_relu_divide", [64, 64, 2.0], (1, 64)),
]


def measure_host(device: str, dtype: torch.dtype) -> list[dict]:
    """Return a row for each small call: the host's time for it, without waiting for the GPU."""
    rows = []
    places = ["cpu"] if device == "cpu" else ["cpu", device]
    for small in SMALL_CALLS:
        for place in places:
            for part, times in _time_parts(small, place, dtype).items():
                row = {"call": small.title, "part": part, "device": place}
                rows.append({**row, **asdict(compare(times))})
    return rows


def _time_parts(
    small: SmallCall, place: str, dtype: torch.dtype
) -> dict[str, dict[str, list[float]]]:
    """Return the host's seconds for "forward" and "forward + backward", ours and eager's."""
    modules = make_modules(small.problem, place, dtype, small.arguments)
    ones = torch.ones(small.shape, dtype=dtype, device=place)
    x = ones.clone().requires_grad_()
    steps = {name: _training_step(module, ones) for name, module in modules.items()}
    with torch.no_grad():
        forward = time_host_in_turn(modules, x)
    return {"forward": forward, "forward + backward": time_host_in_turn(steps, x)}


def _training_step(module: nn.Module, grad_output: Tensor) -> Callable[[Tensor], tuple]:
    """Return a function that computes a forward on x, and the gradients of x and parameters."""
    parameters = list(module.parameters())

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return grad(module(x), [x, *parameters], grad_output)

    return step
