"""Linear -> ReLU -> divide, backward.

The gradients are as accurate as the reference's. The output is saved as a mask, one bit for each
element.
"""

from math import prod

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn.functional import linear

from tests.support.compare import (
    as_matrix,
    assert_as_accurate,
    assert_mask_of,
    assert_same_bits,
    exact_gradients,
)
from tests.support.sanitize_markers import ONE_OF_A_WIDTH
from tests.support.tensors import (
    FLOATING,
    MATRIX_VIEWS,
    OPERATORS,
    draw,
    draw_sizes,
    linear_modules,
    linear_path,
    step,
)


def grad_z_where_positive(out, grad_output, divisor):
    """Return the gradient of z = x weight^T + bias: grad_output / divisor, and 0 where out is 0."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    # On a GPU torch multiplies by the reciprocal of a number; it divides by a tensor.
    divisor = torch.tensor(float(divisor), dtype=wide, device=out.device)
    quotient = (grad_output.to(wide) / divisor).to(out.dtype)
    return torch.where(out != 0, quotient, torch.zeros_like(quotient))


def torch_gradients_of_z(x, weight, grad_z):
    """Return torch's gradients of x and weight for this gradient of z."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(linear(x, weight), [x, weight], grad_z)


def assert_right(ours, reference, x, grad_output):
    """Assert that the gradients are as accurate as torch's.

    On a CPU, ReLU passes the same elements as in the reference. On a GPU it may differ, because
    rounding decides whether an output near 0 is positive. So torch's gradients are computed there
    from the gradient of z that follows from our output.
    """
    weight = ours.linear.weight
    out, grad_x, grad_weight, *grad_bias = step(ours, x, grad_output)
    grad_z = grad_z_where_positive(out, grad_output, ours.divisor)
    if x.is_cuda:
        want_x, want_weight = torch_gradients_of_z(x, weight, grad_z)
    else:
        want_out, want_x, want_weight, *_ = step(reference, x, grad_output)
        assert torch.equal(out != 0, want_out != 0)
    exact_x, exact_weight, _ = exact_gradients(x, weight.detach(), grad_z)
    assert_as_accurate(grad_x, want_x, exact_x)
    assert_as_accurate(grad_weight, want_weight, exact_weight)
    if grad_bias:
        assert_sum(grad_bias[0], as_matrix(grad_z))


def assert_sum(got, terms):
    """Assert that `got` has the sum of each column of `terms`, within our bound.

    The bound is that of sums of 64 terms that are then added, and of one rounding to the dtype.
    """
    m = terms.shape[0]
    unit = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps / 2
    bound = (64 + m / 64) * unit * terms.double().abs().sum(0)
    exact = terms.double().sum(0)
    if got.dtype in (torch.float16, torch.bfloat16):
        limits = torch.finfo(got.dtype)
        bound += (exact.abs() + bound + limits.smallest_normal) * limits.eps / 2
    assert got.shape == exact.shape
    assert bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradients", ["uniform", "normal"])
def test_no_element_of_the_gradient_of_the_bias_errs_more_than_eager(dtype, gradients):
    """This is on a CPU, against float64, for few and many rows and columns."""
    sizes = [(m, n) for m in (1, 3, 17, 65, 1000) for n in (1, 3, 8, 100, 513, 4096)]
    for m, n in [*sizes, (4097, 33), (65_536, 1), (65_536, 7), (65_536, 130)]:
        ours, reference = linear_modules(2, n, 3.0, dtype)
        x = draw((m, 2), dtype)
        make = torch.rand if gradients == "uniform" else torch.randn
        grad_output = make(m, n).to(dtype)
        out, _, _, grad_bias = step(ours, x, grad_output)
        eager_out, _, _, eager_grad_bias = step(reference, x, grad_output)
        assert_same_bits(out, eager_out)
        exact = grad_z_where_positive(out, grad_output, 3.0).double().sum(0)
        error = (grad_bias.double() - exact).abs()
        eager_error = (eager_grad_bias.double() - exact).abs()
        assert bool((error <= eager_error).all()), f"m {m}, n {n}: {error.max()}"


SIZES = [1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129, 1000]
# The shape of x, and N: any sizes, any number of dimensions, and empty tensors.
SHAPES = [((m, k), n) for m, n, k in draw_sizes(1, 55, SIZES, largest_product=2**20)]
SHAPES += [(shape, 9) for shape in [(7,), (2, 3, 7), (2, 1, 3, 7), (0, 7), (3, 0, 7), (5, 0)]]
# Many rows or columns, for the sums of the bias's gradient.
SHAPES += [((4097, 2), 3), ((20_001, 2), 8), ((300, 2), 2049), ((65, 2), 4096)]
SHAPES += [((1001, 2), n) for n in (24, 100, 264)]


@pytest.mark.sanitize("linear", dtype=ONE_OF_A_WIDTH)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize(("shape", "n"), SHAPES)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_gradients_are_right_for_any_shape(device, dtype, shape, n):
    has_bias = (sum(shape) + n) % 4 > 0
    ours, reference = linear_modules(shape[-1], n, -3.0, dtype, device, bias=has_bias)
    grad_output = draw((*shape[:-1], n), dtype, device)
    assert_right(ours, reference, draw(shape, dtype, device), grad_output)


ONE_VIEW = {"dtype": ONE_OF_A_WIDTH, "name": ["columns"]}  # under sanitizers
EACH_VIEW = pytest.mark.parametrize(
    "name", ["columns", "rows", "offset", "transposed", "one row", "halves"]
)


@pytest.mark.sanitize("linear", **ONE_VIEW)
@EACH_VIEW
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_gradients_are_right_for_an_x_of_any_strides(device, name, dtype):
    """The output's gradient is dense, misaligned, expanded or permuted."""
    x = MATRIX_VIEWS[name](draw((12, 20), dtype, device))
    ours, reference = linear_modules(x.shape[-1], 24, 3.0, dtype, device)
    shape = (*x.shape[:-1], 24)
    reverse_order = tuple(range(x.dim()))[::-1]
    assert_right(ours, reference, x, draw(shape, dtype, device))
    assert_right(ours, reference, x, draw((prod(shape) + 1,), dtype, device)[1:].view(shape))
    assert_right(ours, reference, x, draw((), dtype, device).expand(shape))
    assert_right(ours, reference, x, draw(shape[::-1], dtype, device).permute(reverse_order))


@pytest.mark.sanitize("linear", **ONE_VIEW)
@EACH_VIEW
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_gradients_are_right_for_a_weight_of_any_strides(device, name, dtype):
    weight = MATRIX_VIEWS[name](draw((12, 20), dtype, device)).flatten(0, -2)
    n, k = weight.shape
    ours, reference = linear_modules(k, n, 3.0, dtype, device, bias=False)
    ours.linear.weight = reference.linear.weight = nn.Parameter(weight)
    x = draw((5, k), dtype, device)
    assert_right(ours, reference, x, draw((5, n), dtype, device))


@pytest.mark.parametrize("divisor", [2.0, -0.3, 0.0, float("inf"), float("nan")])
def test_the_gradient_of_a_special_x_matches_the_reference(device, divisor):
    """Where ReLU is flat, this gradient is 0, also if the output's is infinite or NaN."""
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 2.0, -3.0]
    x = torch.tensor(values, device=device).unsqueeze(1)
    ours, reference = linear_modules(1, 1, divisor, device=device, bias=False)
    for module in (ours, reference):
        nn.init.ones_(module.linear.weight)
    for grad in values:
        grad_output = torch.full_like(x, grad)
        got = step(ours, x, grad_output)[1]
        want = step(reference, x, grad_output)[1]
        if device == "cuda" and divisor in (2.0, -0.3):  # torch multiplies by the reciprocal
            want = torch.where(x <= 0, 0.0, grad_output / torch.tensor(divisor, device=device))
        assert_same_bits(got + 0, want + 0)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("x_is_transposed", [False, True])
@pytest.mark.parametrize("weight_is_transposed", [False, True])
def test_gradients_of_transposed_operands_are_right(
    device, dtype, x_is_transposed, weight_is_transposed
):
    """On a CPU they also have the strides that autograd's products give them."""
    x = draw((16, 24), dtype, device)
    weight = draw((40, 24), dtype, device)
    if x_is_transposed:
        x = x.t().contiguous().t()
    if weight_is_transposed:
        weight = weight.t().contiguous().t()
    ours, reference = linear_modules(24, 40, 2.0, dtype, device)
    for module in (ours, reference):
        module.linear.weight = nn.Parameter(weight)
    grad_output = draw((16, 40), dtype, device)
    assert_right(ours, reference, x, grad_output)
    got = step(ours, x, grad_output)
    want = step(reference, x, grad_output)
    assert device == "cuda" or [a.stride() for a in got] == [a.stride() for a in want]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("columns", [1, 5, 8, 9, 31, 33, 63, 65, 127, 129, 255, 257, 264, 520])
def test_mask_bits_are_right_for_rows_of_any_length_and_alignment(device, dtype, columns):
    """The bits are in order, with zeros after the last column."""
    is_positive = torch.rand(300, columns, device=device) < 0.5
    x = torch.where(is_positive, 1.0, -1.0).to(dtype)
    weight = torch.eye(columns, dtype=dtype, device=device)
    out, mask = OPERATORS.linear_relu_divide_with_mask(x, weight, None, 2.0)
    assert_same_bits(out, torch.where(is_positive, 0.5, 0.0).to(dtype))
    assert_mask_of(is_positive, mask)


def saved_by(run):
    """Return the shapes and dtypes of the tensors that autograd saves for backward."""
    saved = []

    def save(tensor):
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        run()
    return sorted(saved, key=str)


def test_only_the_mask_and_needed_operands_are_saved(device):
    """Backward needs x for the gradient of weight, and weight for the gradient of x."""
    ours, _ = linear_modules(6, 17, device=device)
    x = torch.randn(4, 6, device=device)
    leaf = torch.randn(4, 6, device=device).requires_grad_()
    bits = ((4, 3), torch.uint8)
    inputs = ((4, 6), x.dtype)
    weight = ((17, 6), x.dtype)
    assert saved_by(lambda: ours(leaf)) == sorted([bits, inputs, weight], key=str)
    assert saved_by(lambda: ours(x)) == [bits, inputs]
    ours.linear.weight.requires_grad = False
    assert saved_by(lambda: ours(leaf)) == sorted([bits, weight], key=str)
    assert saved_by(lambda: ours(x)) == [bits]
    ours.linear.bias.requires_grad = False
    assert saved_by(lambda: ours(x)) == []
    assert ours(x).grad_fn is None
    with torch.no_grad():
        assert ours(leaf).grad_fn is None


def test_after_the_forward_the_output_may_change_but_not_x_or_weight(device):
    """The output is not saved. A change of x or weight raises, as in torch."""
    ours, reference = linear_modules(6, 17, device=device)
    x = torch.randn(4, 6, device=device).requires_grad_()
    want = step(reference, x, torch.ones(4, 17, device=device))[1]
    out = ours(x)
    out.detach().zero_()
    out.sum().backward()
    torch.testing.assert_close(x.grad, want)
    for operand in ("x", "weight"):
        changing_x = x * 1
        out = ours(changing_x)
        with torch.no_grad():
            changed = changing_x if operand == "x" else ours.linear.weight
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_x_may_change_after_the_forward_if_its_copy_is_saved(device):
    """The forward copies an x of three dimensions if no view of it is a matrix.

    Otherwise x itself is saved, and a change raises.
    """
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
def test_gradients_agree_with_finite_differences(device, shape, bias):
    """This holds for first and second gradients, also batched and forward-mode."""
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
def test_second_gradients_with_nan_match_the_reference(device, where):
    """The second gradients of all inputs are compared. The reference multiplies zeros by NaN."""
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


@pytest.mark.gpu
def test_gradients_have_tangents_where_a_kernel_would_multiply():
    """Gradients are linear in grad_output: their tangents are the gradients for its tangent."""
    ours, _ = linear_modules(64, 128, device="cuda")
    x = torch.randn(256, 64, device="cuda", requires_grad=True)
    leaves = [x, *ours.parameters()]
    with linear_path("sm90"), forward_ad.dual_level():
        out = ours(x)
        tangent = torch.randn_like(out)
        grad_output = forward_ad.make_dual(torch.randn_like(out), tangent)
        grads = torch.autograd.grad(out, leaves, grad_output, retain_graph=True)
        got = [forward_ad.unpack_dual(grad).tangent for grad in grads]
        want = list(torch.autograd.grad(out, leaves, tangent))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_results_have_the_same_bits_every_time(device):
    ours, _ = linear_modules(64, 513, device=device)
    x = torch.randn(3001, 64, device=device)
    grad_output = torch.randn(3001, 513, device=device)
    first = step(ours, x, grad_output)
    for _ in range(3):
        assert_same_bits(step(ours, x, grad_output), first)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mask", lambda mask: mask.to(torch.int8), "expected the saved mask"),
        ("mask", lambda mask: mask[:-1], "expected the saved mask"),
        ("mask", lambda mask: mask.flatten(), "expected the saved mask"),
        ("grad_output", lambda grad_output: grad_output.to(torch.int32), "fit together"),
        ("grad_output", lambda _: torch.tensor(1.0), "fit together"),
        ("input", lambda x: x[1:], r"fit together, got .* input Float \[3, 6\] on cpu"),
        ("weight", lambda weight: weight.double(), "fit together"),
        ("output_mask", lambda _: 6, "expected weight if and only if bit 0"),
        ("output_mask", lambda _: 8, "expected output_mask from 0 to 7"),
    ],
)
def test_the_gradients_operator_checks_its_arguments(name, change, message):
    """Each change of an argument raises with a message that names the argument or the misfit."""
    arguments = {
        "grad_output": torch.rand(4, 9),
        "mask": torch.zeros(4, 2, dtype=torch.uint8),
        "input": torch.rand(4, 6),
        "weight": torch.rand(9, 6),
        "output_mask": 7,
        "divisor": 2.0,
    }
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        OPERATORS.linear_relu_divide_gradients(**arguments)
