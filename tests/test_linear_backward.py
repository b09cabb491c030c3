"""Linear -> ReLU -> divide, gradients: as accurate as the reference's, from one bit an element."""

import random

import pytest
import torch
from compare import as_matrix, assert_as_accurate, assert_mask_of, assert_same_bits, exact_gradients
from tensors import FLOATING, OPERATORS, draw, linear_modules, step
from test_linear_forward import VIEWS
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import linear

SIZES = [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129, 1000]


def assert_right(mine, theirs, x, grad_output):
    """Given the output's signs, which are the kernel's to find, the gradients are as accurate."""
    got, want = step(mine, x, grad_output), step(theirs, x, grad_output)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # By a number, torch would multiply with the reciprocal on a GPU.
    divisor = torch.tensor(float(mine.divisor), dtype=wide, device=x.device)
    keep = got[0] != 0
    quotient = (grad_output.to(wide) / divisor).to(x.dtype)
    grad_z = torch.where(keep, quotient, torch.zeros_like(quotient))
    if x.is_cuda:  # torch's, given the same signs
        leaf, weight = x.detach().requires_grad_(), mine.linear.weight
        own = torch.autograd.grad(linear(leaf, weight), [leaf, weight], grad_z)
    else:
        assert torch.equal(keep, want[0] != 0)
        own = want[1:]
    exact = exact_gradients(x, mine.linear.weight, grad_z)
    for mine_, torchs, true in zip(got[1:3], own[:2], exact[:2], strict=True):
        assert_as_accurate(mine_, torchs.detach(), true.detach())
    if mine.linear.bias is not None:
        assert_sum(got[3], as_matrix(grad_z))


def assert_sum(got, terms):
    """The sums of the columns, within the bound of a float sum in runs of 64, and one rounding."""
    m = terms.shape[0]
    unit = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps / 2
    bound = (64 + m / 64) * unit * terms.double().abs().sum(0)
    exact = terms.double().sum(0)
    if got.dtype in (torch.float16, torch.bfloat16):
        of_dtype = torch.finfo(got.dtype)
        bound += (exact.abs() + bound + of_dtype.smallest_normal) * of_dtype.eps / 2
    assert got.shape == exact.shape
    assert bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradients", ["uniform", "normal"])
def test_gradient_of_bias_errs_at_most_as_eagers(dtype, gradients):
    """On a CPU, against float64: every element, for many and few rows and columns."""
    sizes = [(m, n) for m in (1, 3, 17, 65, 1000) for n in (1, 3, 8, 100, 513, 4096)]
    for m, n in [*sizes, (4097, 33), (65_536, 1), (65_536, 7), (65_536, 130)]:
        mine, theirs = linear_modules(2, n, 3.0, dtype)
        x = draw((m, 2), dtype)
        random = torch.rand(m, n) if gradients == "uniform" else torch.randn(m, n)
        grad_output = random.to(dtype)
        got, want = step(mine, x, grad_output), step(theirs, x, grad_output)
        assert_same_bits(got[0], want[0])
        quotient = grad_output / 3.0
        exact = torch.where(got[0] > 0, quotient, torch.zeros_like(quotient)).double().sum(0)
        error, eagers = ((result[3].double() - exact).abs() for result in (got, want))
        assert bool((error <= eagers).all()), (m, n, float(error.max()), float(eagers.max()))


SHAPES = [(7,), (2, 3, 7), (2, 1, 3, 7), (0, 7), (3, 0, 7), (5, 0)]
LONG = [(4097, 3), (20_001, 8), (300, 2049), (65, 4096), (1001, 24), (1001, 100), (1001, 264)]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_shapes(device, dtype):
    choose = random.Random(1)
    shapes = [(shape, 9) for shape in SHAPES] + [((m, 2), n) for m, n in LONG]
    for _ in range(60):
        m, n, k = (choose.choice(SIZES) for _ in range(3))
        if m * n * k <= 2**20:
            shapes.append(((m, k), n))
    for shape, n in shapes:
        print(shape, n)
        has_bias = (sum(shape) + n) % 4 > 0
        mine, theirs = linear_modules(shape[-1], n, -3.0, dtype, device, bias=has_bias)
        grad_output = draw((*shape[:-1], n), dtype, device)
        assert_right(mine, theirs, draw(shape, dtype, device), grad_output)


@pytest.mark.parametrize("name", ["columns", "rows", "offset", "transposed", "one row", "reversed"])
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_strides(device, name, dtype):
    view = VIEWS[name]
    x = view(draw((12, 20), dtype, device))
    mine, theirs = linear_modules(x.shape[-1], 24, 3.0, dtype, device)
    shape = (*x.shape[:-1], 24)
    assert_right(mine, theirs, x, draw(shape, dtype, device))
    misaligned = draw((x[..., 0].numel() * 24 + 1,), dtype, device)[1:].view(shape)
    assert_right(mine, theirs, x, misaligned)
    assert_right(mine, theirs, x, draw((), dtype, device).expand(shape))
    assert_right(mine, theirs, x, draw(shape[::-1], dtype, device).permute(*range(x.dim())[::-1]))
    weight = view(draw((12, 20), dtype, device)).flatten(0, -2)
    mine, theirs = linear_modules(weight.shape[1], weight.shape[0], 3.0, dtype, device, bias=False)
    mine.linear.weight = theirs.linear.weight = nn.Parameter(weight)
    x = draw((5, weight.shape[1]), dtype, device)
    assert_right(mine, theirs, x, draw((5, weight.shape[0]), dtype, device))


@pytest.mark.parametrize("divisor", [2.0, -0.3, 0.0, float("inf"), float("nan")])
def test_special_values(device, divisor):
    """The gradient is selected, not multiplied: where relu is flat it is 0, whatever comes in."""
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 2.0, -3.0]
    x = torch.tensor(values, device=device).unsqueeze(1)
    mine, theirs = linear_modules(1, 1, divisor, device=device, bias=False)
    for module in (mine, theirs):
        nn.init.ones_(module.linear.weight)
    for grad in values:
        grad_output = torch.full_like(x, grad)
        got, want = step(mine, x, grad_output)[1], step(theirs, x, grad_output)[1]
        if device == "cuda" and divisor in (2.0, -0.3):  # torch multiplies by the reciprocal
            want = torch.where(x <= 0, 0.0, grad_output / torch.tensor(divisor, device=device))
        assert_same_bits(got + 0, want + 0)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_gradients_of_transposed_operands(device, dtype, turned):
    """On a CPU with autograd's strides, which tell how it makes its products."""
    x, weight = draw((16, 24), dtype, device), draw((40, 24), dtype, device)
    x, weight = (
        a.t().contiguous().t() if is_ else a for a, is_ in zip((x, weight), turned, strict=True)
    )
    mine, theirs = linear_modules(24, 40, 2.0, dtype, device)
    for module in (mine, theirs):
        module.linear.weight = nn.Parameter(weight)
    grad_output = draw((16, 40), dtype, device)
    assert_right(mine, theirs, x, grad_output)
    got, want = step(mine, x, grad_output), step(theirs, x, grad_output)
    assert device == "cuda" or [a.stride() for a in got] == [a.stride() for a in want]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("columns", [1, 5, 8, 9, 31, 33, 63, 65, 127, 129, 255, 257, 264, 520])
def test_mask_of_every_layout(device, dtype, columns):
    """Rows of all alignments: bits, order and zeros after the last column."""
    wanted = torch.rand(300, columns, device=device) < 0.5
    x = torch.where(wanted, 1.0, -1.0).to(dtype)
    weight = torch.eye(columns, dtype=dtype, device=device)
    out, mask = OPERATORS.linear_relu_divide_with_mask(x, weight, None, 2.0)
    assert_same_bits(out, torch.where(wanted, 0.5, 0.0).to(dtype))
    assert_mask_of(wanted, mask)


def saved_by(run):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run()
    return sorted([(tuple(t.shape), t.dtype) for t in kept], key=str)


def test_what_is_kept(device):
    """The mask, and of x and weight only what a gradient that is wanted needs."""
    mine, _ = linear_modules(6, 17, device=device)
    x, leaf = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device).requires_grad_()
    bits, inputs, weight = ((4, 3), torch.uint8), ((4, 6), x.dtype), ((17, 6), x.dtype)
    assert saved_by(lambda: mine(leaf)) == sorted([bits, inputs, weight], key=str)
    assert saved_by(lambda: mine(x)) == [bits, inputs]
    mine.linear.weight.requires_grad_(False)
    assert saved_by(lambda: mine(leaf)) == sorted([bits, weight], key=str)
    assert saved_by(lambda: mine(x)) == [bits]
    mine.linear.bias.requires_grad_(False)
    assert saved_by(lambda: mine(x)) == []
    assert mine(x).grad_fn is None
    with torch.no_grad():
        assert mine(leaf).grad_fn is None


def test_changes_after_the_forward(device):
    """The output may change, of which nothing is kept; x and weight may not, as in torch."""
    mine, theirs = linear_modules(6, 17, device=device)
    x = torch.randn(4, 6, device=device).requires_grad_()
    want = step(theirs, x, torch.ones(4, 17, device=device))[1]
    out = mine(x)
    out.detach().zero_()
    out.sum().backward()
    torch.testing.assert_close(x.grad, want)
    for change in (lambda moving: moving, lambda _: mine.linear.weight):
        moving = x * 1
        out = mine(moving)
        with torch.no_grad():
            change(moving).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_x_that_is_no_matrix_may_change_after_the_forward(device):
    """Where only a copy of x is a matrix, the copy is kept; otherwise a change is noticed."""
    grads = []
    for module in linear_modules(6, 17, device=device):
        torch.manual_seed(1)
        x = torch.randn(3, 2, 6, device=device).transpose(0, 1)
        out = module(x)
        x.add_(1)
        out.sum().backward()
        grads.append(module.linear.weight.grad)
        rows = torch.randn(3, 2, 12, device=device)[..., :6]
        out = module(rows)
        rows.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (6,)])
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(device, shape, bias):
    weight = torch.randn(4, 6, dtype=torch.float64, device=device, requires_grad=True)
    x = torch.randn(shape, dtype=torch.float64, device=device)
    while linear(x, weight).abs().min() < 0.05:  # stay away from the kink
        x = torch.randn(shape, dtype=torch.float64, device=device)
    inputs = [x.requires_grad_(), weight]
    if bias:
        inputs.append(torch.zeros(4, dtype=torch.float64, device=device, requires_grad=True))

    def run(x, weight, bias=None):
        return OPERATORS.linear_relu_divide(x, weight, bias, -3.0)

    checks = {"check_batched_grad": True, "check_forward_ad": True}
    checks["check_batched_forward_grad"] = len(shape) > 1  # torch's own product of a vector fails
    assert gradcheck(run, inputs, **checks)
    checks = {"check_batched_grad": True, "check_fwd_over_rev": True, "check_rev_over_rev": True}
    assert gradgradcheck(run, inputs, **checks)


@pytest.mark.parametrize("where", ["x", "linear.weight", "linear.bias", "grad_output", "nowhere"])
def test_double_backward_with_nan(device, where):
    """As the reference's, which multiplies zeros with it; and by every input."""
    modules = linear_modules(6, 17, dtype=torch.float64, device=device)
    drawn = {"x": draw((4, 6), torch.float64, device), "grad_output": torch.ones(4, 17).double()}
    results = []
    for module in modules:
        leaves = {name: tensor.to(device, copy=True) for name, tensor in drawn.items()}
        leaves |= dict(module.named_parameters())
        if where in leaves:
            leaves[where].data.flatten()[3] = float("nan")
        wanted = [leaf.requires_grad_() for leaf in leaves.values()]
        x, grad_output, *parameters = wanted
        out = module(x)
        grads = torch.autograd.grad(out, [x, *parameters], grad_output, create_graph=True)
        assert all(grad.requires_grad for grad in grads)
        results.append(torch.autograd.grad(sum(grad.sum() for grad in grads), wanted))
    torch.testing.assert_close(*results, equal_nan=True)


def test_same_bits_every_time(device):
    mine, _ = linear_modules(64, 513, device=device)
    x = torch.randn(3001, 64, device=device)
    grad_output = torch.randn(3001, 513, device=device)
    first = step(mine, x, grad_output)
    for _ in range(3):
        assert_same_bits(step(mine, x, grad_output), first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(mask=a["mask"].to(torch.int8)), "mask must be"),
        (lambda a: a.update(mask=a["mask"][:-1]), "mask must be"),
        (lambda a: a.update(mask=a["mask"].flatten()), "mask must be"),
        (lambda a: a.update(grad_output=a["grad_output"].to(torch.int32)), "fit together"),
        (lambda a: a.update(grad_output=torch.tensor(1.0)), "fit together"),
        (lambda a: a.update(input=a["input"][1:]), "fit together"),
        (lambda a: a.update(weight=a["weight"].double()), "fit together"),
        (lambda a: a.update(output_mask=6), "output_mask must be"),
        (lambda a: a.update(output_mask=8), "output_mask must be"),
    ],
)
def test_the_operator_checks_its_arguments(change, message):
    arguments = {
        "grad_output": torch.rand(4, 9),
        "mask": torch.zeros(4, 2, dtype=torch.uint8),
        "input": torch.rand(4, 6),
        "weight": torch.rand(9, 6),
        "output_mask": 7,
        "divisor": 2.0,
    }
    change(arguments)
    with pytest.raises(RuntimeError, match=message):
        OPERATORS.linear_relu_divide_gradients(**arguments)
