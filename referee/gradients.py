"""Does the solution's backward answer as the reference's does?"""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.autograd import grad

from referee.cases import DTYPES, random, special_values
from referee.compare import first_mismatch, layout_mismatch, share_memory

SHAPES = [(), (0,), (1,), (7,), (129,), (3, 4097), (2, 3, 4, 5, 6), (300_007,)]

View = Callable[[torch.Tensor], torch.Tensor]

# A name, and the views of a dense [48, 48] tensor that are the input and the output's gradient.
LAYOUTS: list[tuple[str, View, View]] = [
    ("input transposed", lambda x: x.t(), lambda g: g),
    ("input x[1::2, :33]", lambda x: x[1::2, :33], lambda g: g[:24, :33].contiguous()),
    ("input expanded", lambda x: x[:1].expand(48, 48), lambda g: g),
    ("gradient transposed", lambda x: x, lambda g: g.t()),
    ("gradient g[:, ::2]", lambda x: x[:, :24].contiguous(), lambda g: g[:, ::2]),
    ("gradient expanded rows", lambda x: x, lambda g: g[:1].expand(48, 48)),
    ("gradient expanded scalar", lambda x: x, lambda g: g[0, 0].expand(48, 48)),
    ("both transposed", lambda x: x.t(), lambda g: g.t()),
]


def gradient_checks(
    reference: nn.Module, solution: nn.Module, device: torch.device, seed: int
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """A name and a check for every small case; the check says what is wrong, or None."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, dtype in DTYPES.items():
        if not dtype.is_floating_point:
            continue

        def check(x: torch.Tensor, g: torch.Tensor) -> str | None:
            return check_gradient(reference, solution, x, g)

        def draw(shape: tuple[int, ...], dtype: torch.dtype = dtype) -> torch.Tensor:
            return random(shape, dtype, device, generator)

        values = special_values(dtype).to(device)
        every = values.repeat_interleave(len(values)), values.repeat(len(values))
        yield f"{name}, gradient, special values", lambda every=every: check(*every)
        for shape in SHAPES:
            yield (
                f"{name}, gradient, shape {list(shape)}",
                lambda shape=shape, draw=draw: check(draw(shape), draw(shape)),
            )
        for layout, view, g_view in LAYOUTS:
            yield (
                f"{name}, {layout}",
                lambda v=view, gv=g_view, draw=draw: check(v(draw((48, 48))), gv(draw((48, 48)))),
            )


def check_gradient(
    reference: nn.Module, solution: nn.Module, x: torch.Tensor, grad_output: torch.Tensor
) -> str | None:
    """One backward and the backward of that: values, layout, fresh memory, nothing changed."""
    inputs = {"input": x, "output's gradient": grad_output}
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    got = _differentiate(solution, x, grad_output)
    for name, tensor in inputs.items():
        if changed := first_mismatch(tensor, before[name], exact=True):
            return f"the {name} was changed: {changed}"
    if share_memory(got["gradient"], grad_output):
        return "the gradient shares memory with the output's gradient"
    for name, expected in _differentiate(reference, x, grad_output).items():
        if problem := layout_mismatch(got[name], expected, name):
            return problem
        if mismatch := first_mismatch(got[name], expected):
            return f"{name}: {mismatch}"
    return None


def _differentiate(
    module: nn.Module, x: torch.Tensor, grad_output: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The output, the input's gradient, and what that gradient, as its own, gives the output's."""
    x, g = x.detach().requires_grad_(), grad_output.detach().requires_grad_()
    output = module(x)
    [gradient] = grad(output, x, grad_output, retain_graph=True)
    [differentiable] = grad(output, x, g, create_graph=True)
    [second] = grad(differentiable, g, grad_output)
    return {"output": output.detach(), "gradient": gradient, "second gradient": second}
