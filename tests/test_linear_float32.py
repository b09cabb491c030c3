"""float32 on a GPU by kernels of ours, forward and backward: any shape, torch's accuracy."""

import pytest
import torch
from ranges import ONE_PRODUCT_SLACK, Reference, broken_promises
from tensors import (
    assert_as_accurate,
    assert_same_bits,
    float32_precision,
    linear_modules,
    linear_path,
    rounding_errors,
)
from torch import nn
from torch.nn.functional import linear

from model_new import _extension

pytestmark = pytest.mark.gpu

INF, NAN = float("inf"), float("nan")
DIVISOR = 2.0
# [m, n, k]: from K = 1024 on the promise is kept, whatever M and N.
LONG = [(1, 513, 1027), (64, 512, 1024), (65, 1001, 1030), (200, 4099, 2053)]
SHORT = [(1, 1, 1), (1, 3, 7), (64, 17, 65), (65, 129, 300), (200, 513, 129), (200, 1, 1000)]
# On Hopper: one tile in many parts, some in a few, and what a whole round of tiles leaves.
SHARED = [(64, 256, 32768), (400, 1100, 4096), (1000, 4000, 2048)]
# Each of the three products has M, N and K that are multiples of nothing.
TRAINING = (1030, 1537, 1029)


@pytest.fixture(params=["skinny", "sm90", "sm80"])
def path(request):
    with linear_path(request.param):
        yield request.param


def slack(precision):
    return 1.0 if precision == "highest" else ONE_PRODUCT_SLACK


def draw(m, n, k):
    """A module and the reference, x, and the gradient of the output."""
    modules = linear_modules(k, n, DIVISOR, device="cuda")
    return (*modules, torch.randn(m, k, device="cuda"), torch.randn(m, n, device="cuda"))


def step(module, x, grad_output):
    """The output, and the gradients of x, weight and bias."""
    x = x.detach().requires_grad_()
    out = module(x)
    return out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], grad_output)


def grad_of_product(out, grad_output):
    return torch.where(out > 0, grad_output / DIVISOR, 0.0)


def repeated(x, rows):
    """x again and again, in at least so many rows."""
    return x.repeat(-(-rows // x.shape[0]), *[1] * (x.dim() - 1))


def summed_at_once(a, b):
    """torch's a b, as part of a result so large that cuBLAS makes one sum of each row and column.

    Where the result is small it adds up partial sums, which err less: no yardstick for a split.
    """
    return (repeated(a, 1024) @ repeated(b.t(), 4096).t())[: a.shape[0], : b.shape[1]]


def forward_summed_at_once(x, weight, bias):
    z = linear(repeated(x, 1024), repeated(weight, 4096), repeated(bias, 4096))
    return torch.relu(z[: x.shape[0], : weight.shape[0]]) / DIVISOR


def assert_promise(got, trusted, exact, slack):
    """Maximum and mean of the error are at most those of what torch computes."""
    assert got.shape == exact.shape
    for reduce in (torch.max, torch.mean):
        error, allowed = (reduce((t.double() - exact).abs()).item() for t in (got, trusted))
        assert error <= slack * allowed, f"{reduce.__name__} error {error:.3e} of {allowed:.3e}"


def assert_special_values(got, want):
    """Infinities and NaN are where they are to be."""
    for is_special in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(is_special(got), is_special(want))


def assert_mask_of(out, mask):
    """A bit for each element of out, and zeros behind the last of a row."""
    n = out.shape[1]
    bits = mask.unsqueeze(2).bitwise_right_shift(torch.arange(8, device=mask.device)) & 1
    assert torch.equal(bits.flatten(1)[:, :n], (out > 0).to(torch.uint8))
    assert not bits.flatten(1)[:, n:].any()


# -------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("shape", LONG + SHARED, ids=str)
def test_promise(path, precision, shape):
    mine, _, x, _ = draw(*shape)
    weight, bias = (p.detach() for p in mine.linear.parameters())
    out, mask = _extension.operators.linear_relu_divide_with_mask(x, weight, bias, DIVISOR)
    trusted = forward_summed_at_once(x, weight, bias)
    reference = Reference(x, weight, bias, DIVISOR)
    assert broken_promises(out, trusted, reference, slack(precision)) == []

    assert_mask_of(out, mask)
    with torch.no_grad():
        assert_same_bits(mine(x), out)


def assert_exact(m, n, k):
    """Small integers leave no room for errors."""
    x, weight, bias = (
        torch.randint(-8, 9, size, device="cuda").float() for size in ((m, k), (n, k), (n,))
    )
    operators = _extension.operators
    out, mask = operators.linear_relu_divide_with_mask(x, weight, bias, DIVISOR)
    z = x.double() @ weight.double().t() + bias
    assert torch.equal(out.double(), z.relu() / DIVISOR)
    assert_mask_of(out, mask)
    assert_same_bits(operators.linear_relu_divide(x, weight, bias, DIVISOR), out)


@pytest.mark.parametrize("k", [512, 1024, 4096])
@pytest.mark.parametrize("m", [64, 65, 159, 160, 161, 176, 177, 336, 337, 352, 353, 1024])
def test_tiles_of_x_meet(path, precision, m, k):
    """On Hopper they are of 64 rows for short K or few rows, or of 176, and 160 for long K."""
    assert_exact(m, 262, k)


@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_tiles_are_shared(path, precision, shape):
    assert_exact(*shape)


# So many rows of x that a workspace of 256 MiB takes them in several chunks.
CHUNKED = (200_003, 262, 1024)
WORKSPACE_PATHS = pytest.mark.parametrize("path", ["sm90", "sm80"], indirect=True)


@WORKSPACE_PATHS
def test_chunks_of_x_meet(path, precision):
    assert_exact(*CHUNKED)


@WORKSPACE_PATHS
def test_chunks_have_special_values_of_their_own(path, precision):
    mine, theirs, x, _ = draw(*CHUNKED)
    x[:1000], x[-1000:] = spoil(x[:1000]), spoil(x[-1000:])
    with torch.no_grad():
        assert_special_values(mine(x), theirs(x))


@WORKSPACE_PATHS
def test_chunks_change_no_bit(path, precision):
    """Where clusters of Hopper share tiles along K, which they share depends on the rows."""
    mine, _, x, _ = draw(*CHUNKED)
    first, last = slice(0, 70_000), slice(-70_000, None)
    with torch.no_grad():
        out = mine(x)
        for rows in (first, last):
            got = mine(x[rows])
            if path == "sm90" and precision == "highest":
                torch.testing.assert_close(got, out[rows], rtol=1e-5, atol=1e-6)
            else:
                assert_same_bits(got, out[rows])


@pytest.mark.parametrize("shape", [(65536, 1024, 8192), (4096, 1024, 8192)], ids=str)
@WORKSPACE_PATHS
def test_memory_beside_the_result_is_limited(path, precision, shape):
    mine, _, x, _ = draw(*shape)
    with torch.no_grad():
        mine(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = mine(x)
    beside = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert min(x.nbytes // 2, 128 << 20) <= beside <= 256 << 20


@pytest.mark.parametrize("path", ["auto", "skinny", "sm90", "sm80"])
def test_promise_of_the_gradients(path, precision):
    mine, _, x, grad_output = draw(*TRAINING)
    weight = mine.linear.weight.detach()
    with linear_path(path):
        out, grad_x, grad_weight, _ = step(mine, x, grad_output)
    grad_z = grad_of_product(out, grad_output)
    for got, a, b in ((grad_x, grad_z, weight), (grad_weight, grad_z.t(), x)):
        assert got.is_contiguous()
        exact = a.double() @ b.double()
        assert_promise(got, summed_at_once(a, b), exact, slack(precision))


@pytest.mark.parametrize("shape", SHORT, ids=str)
def test_short_sums(path, precision, shape):
    unit = 2.0**-24 if precision == "highest" else 2.0**-12
    mine, theirs, x, grad_output = draw(*shape)
    weight, bias = (p.detach() for p in mine.linear.parameters())
    out, grad_x, grad_weight, _ = step(mine, x, grad_output)
    with torch.no_grad():
        own = theirs(x)
    exact = Reference(x, weight, bias, DIVISOR).out
    allowance = rounding_errors(x, weight, bias, unit) / DIVISOR
    assert_as_accurate(out, own, exact, allowance=allowance)
    grad_z = grad_of_product(out, grad_output)
    for got, a, b in ((grad_x, grad_z, weight), (grad_weight, grad_z.t(), x)):
        allowance = rounding_errors(a, b.t(), unit=unit)
        assert_as_accurate(got, a @ b, a.double() @ b.double(), allowance=allowance)


def test_gradients_follow_the_precision_of_their_own_time(path):
    mine, _, x, grad_output = draw(*TRAINING)
    leaf = x.requires_grad_()
    out = mine(leaf)
    grad_z = grad_of_product(out.detach(), grad_output)
    exact = grad_z.double() @ mine.linear.weight.detach().double()
    errors = []
    for name in ("highest", "high"):
        with float32_precision(name):
            (grad,) = torch.autograd.grad(out, leaf, grad_output, retain_graph=True)
        errors.append((grad.double() - exact).abs().max().item())
    assert errors[0] < errors[1] / 100


# ------------------------------------------------------------------------------ choice of a path


def by_path(name, module, *arguments):
    with linear_path(name):
        return step(module, *arguments)


@pytest.mark.parametrize("shape", [(2048, 2048, 2048), (2050, 4101, 2053)], ids=str)
def test_large_products_are_split(precision, shape):
    best = "sm90" if torch.cuda.get_device_capability() == (9, 0) else "sm80"
    mine, _, x, grad_output = draw(*shape)
    auto, split, torchs = (by_path(name, mine, x, grad_output) for name in ("auto", best, "torch"))
    split_results = 3 if precision == "highest" else 1  # small gradients at `high` are torch's
    for got, want, other in zip(auto[:split_results], split, torchs, strict=False):
        assert_same_bits(got, want)
        assert not torch.equal(got, other)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
@pytest.mark.parametrize("layout", ["rows", "wide rows"])
def test_large_gradients_at_high_are_rounded_once(layout):
    mine, _, x, grad_output = draw(1024, 4096, 4096)
    if layout == "wide rows":  # which fp16 does not carry, and which are made again as TF32
        grad_output[:, ::100] *= torch.logspace(-6, 6, 1024, device="cuda")[:, None]
    with float32_precision("high"):
        auto, own = (by_path(name, mine, x, grad_output) for name in ("auto", "sm90"))
        grad_z = grad_of_product(auto[0], grad_output)
        weight_gradient = grad_z.t() @ x
    assert_same_bits(auto[2], own[2])
    exact = grad_z.double().t() @ x.double()
    errors = [(grad.double() - exact).norm() for grad in (auto[2], weight_gradient)]
    assert errors[0] <= 1.02 * errors[1]


SHORT_K = [(1000, 2048, 512), (4096, 1024, 256), (2048, 4096, 64), (4096, 8192, 16)]


def assert_split(shape, results):
    """That these of output and gradients are sm_90's, and not torch's."""
    mine, _, x, grad_output = draw(*shape)
    split, auto, torchs = (by_path(n, mine, x, grad_output) for n in ("sm90", "auto", "torch"))
    for i in results:
        assert_same_bits(auto[i], split[i])
        assert not torch.equal(auto[i], torchs[i])


@pytest.mark.parametrize("shape", SHORT_K, ids=str)
def test_products_of_short_k_are_split_on_hopper(shape):
    assert_split(shape, [0])


@pytest.mark.parametrize("shape", [(1000, 3072, 768), (1000, 1000, 1000)], ids=str)
def test_gradients_of_short_k_are_split_on_hopper(shape):
    assert_split(shape, [0, 1, 2])


@pytest.mark.parametrize("shape", [(128, 4096, 4096), (64, 8192, 8192)], ids=str)
def test_weight_gradients_of_few_rows_are_split_on_hopper(shape):
    assert_split(shape, [2])


@pytest.mark.parametrize(
    "shape", [(1, 4096, 4096), (8, 64, 64), (32, 253, 1024), (100, 512, 256)], ids=str
)
def test_products_of_few_rows_are_skinny(shape):
    best = "skinny" if torch.cuda.get_device_capability() == (9, 0) else "torch"
    mine, _, x, grad_output = draw(*shape)
    auto, own, torchs = (by_path(name, mine, x, grad_output) for name in ("auto", best, "torch"))
    assert_same_bits(auto[0], own[0])
    for got, want in zip(auto[1:], torchs[1:], strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("shape", [(64, 2048, 128), (256, 2048, 256), (9, 64, 63)], ids=str)
def test_small_products_are_torchs(precision, shape):
    mine, _, x, grad_output = draw(*shape)
    auto, torchs = (by_path(name, mine, x, grad_output) for name in ("auto", "torch"))
    for got, want in zip(auto, torchs, strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("m", [4, 64, 95])
def test_a_weight_without_vectors_is_torchs(m):
    """A copy of it would take longer than the product."""
    mine, _, x, _ = draw(m, 1024, 2048)
    for layout in (unaligned, by_columns):
        mine.linear.weight = nn.Parameter(layout(mine.linear.weight.detach()))
        results = []
        for name in ("auto", "torch"):
            with linear_path(name), torch.no_grad():
                results.append(mine(x))
        assert_same_bits(*results)


# --------------------------------------------------------------------------------------- layouts


def unaligned(x):
    """The same values one element behind a multiple of 16 bytes."""
    moved = torch.empty(x.numel() + 1, device=x.device)[1:].view(x.shape)
    return moved.copy_(x)


def with_gaps(x):
    """The same values in rows that are 3 elements longer."""
    wide = torch.full((x.shape[0], x.shape[1] + 3), NAN, device=x.device)
    wide[:, 1:-2] = x
    return wide[:, 1:-2]


def by_columns(x):
    return x.t().contiguous().t()


def every_other_column(x):
    return x.repeat_interleave(2, 1)[:, ::2]


@pytest.mark.parametrize("layout", [unaligned, with_gaps, by_columns, every_other_column])
@pytest.mark.parametrize("shape", [(65, 130, 1028), (70, 129, 301)], ids=str)
def test_the_layout_changes_no_bit(path, layout, shape):
    mine, _, x, grad_output = draw(*shape)
    want = step(mine, x, grad_output)
    weight = mine.linear.weight
    for got in (step(mine, layout(x), grad_output), step(mine, x, layout(grad_output))):
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
    mine.linear.weight = nn.Parameter(layout(weight.detach()))
    assert not mine.linear.weight.is_contiguous() or layout is unaligned
    for a, b in zip(step(mine, x, grad_output), want, strict=True):
        assert_same_bits(a, b)


def test_more_dimensions_and_one_row_again_and_again(path):
    mine, _, x, grad_output = draw(60, 130, 1027)
    want = step(mine, x, grad_output)
    deep = step(mine, x.view(3, 4, 5, -1), grad_output.view(3, 4, 5, -1))
    for a, b in zip(deep, want, strict=True):
        assert_same_bits(a.view(b.shape), b)
    row = x[:1]
    with torch.no_grad():
        assert_same_bits(mine(row.expand(60, -1)), mine(row.repeat(60, 1)))


# -------------------------------------------------------------------------------- special values


def spoil(x):
    """Rows that no split carries: inf, NaN, both inf, and one value that dwarfs the others."""
    x = x.clone()
    for row, value in enumerate([INF, -INF, NAN, 1e30]):
        x[row::11, row + 2] = value
    x[4::11, 0], x[4::11, -1] = INF, -INF
    return x


@pytest.mark.parametrize("spoiled", ["x", "weight", "grad_output"])
@pytest.mark.parametrize("shape", [(65, 1001, 1030), (33, 70, 20)], ids=str)
def test_special_values_come_out_where_torch_has_them(path, precision, shape, spoiled):
    mine, theirs, x, grad_output = draw(*shape)
    if spoiled == "x":
        x = spoil(x)
    elif spoiled == "grad_output":
        grad_output = spoil(grad_output)
    else:
        for module in (mine, theirs):
            module.linear.weight = nn.Parameter(spoil(mine.linear.weight.detach()))
    out, grad_x, grad_weight, _ = step(mine, x, grad_output)
    with torch.no_grad():
        own = theirs(x)
    # As in torch, the gradient passes where the output is NaN.
    grad_z = torch.where(out <= 0, 0.0, grad_output / DIVISOR)
    pairs = [
        (out, own),
        (grad_x, grad_z @ mine.linear.weight.detach()),
        (grad_weight, grad_z.t() @ x),
    ]
    for got, want in pairs:
        assert_special_values(got, want)
    assert any(not want.isfinite().all() for _, want in pairs)


# ------------------------------------------------------ one product: tiles that are made again


@pytest.fixture
def one_product():
    """sm90's product of fp16, of which tiles of 256 x 256 are made again from TF32."""
    with linear_path("sm90"), float32_precision("high"):
        yield


def put(row, at, value):
    row[at] = value
    return row


def graded(row):
    return row * torch.linspace(-20, 20, len(row), device=row.device).exp2()


# Rows that fp16 does not carry.
WIDE_ROWS = {
    "inf": lambda row: put(row, -1, INF),
    "both infinities": lambda row: put(put(row, 5, INF), -5, -INF),
    "NaN": lambda row: put(row, 500, NAN),
    "graded": graded,
    "all but one are tiny": lambda row: put(row, slice(1, None), 2.0**-38),
}
WIDE_ROWS_OF = {
    "x": WIDE_ROWS
    | {
        "1 in 16 is tiny": lambda row: put(row, slice(0, None, 16), 2.0**-34),
        "subnormal": lambda row: row * 2.0**-130,
    },
    "weight": WIDE_ROWS
    | {
        "1 in 16 is small": lambda row: put(row, slice(0, None, 16), 2.0**-20),
        "outlier": lambda row: put(row, 700, 2.0**20),
    },
}
WIDE = [(side, name) for side in WIDE_ROWS_OF for name in WIDE_ROWS_OF[side]]


def draw_plain(m, n, k):
    """x, weight and bias."""
    return [torch.randn(size, device="cuda") for size in ((m, k), (n, k), (n,))]


def draw_wide(side, name, rows, m=700, n=1100, k=1030):
    """The same with such rows."""
    x, weight, bias = draw_plain(m, n, k)
    operand = x if side == "x" else weight
    for i in range(len(operand))[rows] if isinstance(rows, slice) else rows:
        operand[i] = WIDE_ROWS_OF[side][name](operand[i].clone())
    return x, weight, bias


@pytest.mark.parametrize("rows", [[300], [0, 255, 256, 699], slice(None)], ids=str)
@pytest.mark.parametrize(("side", "name"), WIDE)
def test_wide_rows_are_as_accurate_as_tf32(one_product, side, name, rows):
    x, weight, bias = draw_wide(side, name, rows)
    operators = _extension.operators
    out, mask = operators.linear_relu_divide_with_mask(x, weight, bias, DIVISOR)
    assert_same_bits(operators.linear_relu_divide(x, weight, bias, DIVISOR), out)
    trusted = forward_summed_at_once(x, weight, bias)
    reference = Reference(x, weight, bias, DIVISOR)
    assert broken_promises(out, trusted, reference, ONE_PRODUCT_SLACK) == []
    assert_mask_of(torch.where(out.isnan(), 1.0, out), mask)  # the gradient of NaN passes


@pytest.mark.parametrize("divisor", [2.0, 3.0, -0.7])
@pytest.mark.parametrize("size", [(256, 512, 1024), (257, 260, 1025), (700, 1101, 1030)], ids=str)
def test_tiles_are_made_again_at_any_size(one_product, size, divisor):
    """Small integers leave no room for errors, in whatever way the tiles are stored."""
    m, n, k = size
    x, weight, bias = (
        torch.randint(-8, 9, size, device="cuda").float() for size in ((m, k), (n, k), (n,))
    )
    run = _extension.operators.linear_relu_divide_with_mask
    weight[:, 3] = 0
    results = []
    for value in (1.0, 2.0**100):  # no row of x is wide, then all are
        x[:, 3] = value
        results.append((*run(x, weight, bias, divisor), run(x, weight, None, divisor)[0]))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
    z = x.double() @ weight.double().t() + bias
    torch.testing.assert_close(results[1][0].double(), z.relu() / divisor, rtol=2e-7, atol=0)
    assert_mask_of(z, results[1][1])


@pytest.mark.parametrize("side", ["x", "weight"])
def test_other_tiles_keep_their_bits(one_product, side):
    x, weight, bias = draw_plain(700, 1100, 1030)
    linear_relu_divide = _extension.operators.linear_relu_divide
    before = linear_relu_divide(x, weight, bias, DIVISOR)
    operand, along = (x, 0) if side == "x" else (weight, 1)
    operand[300] = INF
    after = linear_relu_divide(x, weight, bias, DIVISOR)
    kept = [i for i in range(before.shape[along]) if not 256 <= i < 512]
    again = [i for i in range(256, 512) if i != 300]
    kept, again = (torch.tensor(rows, device="cuda") for rows in (kept, again))
    assert_same_bits(after.index_select(along, kept), before.index_select(along, kept))
    before, after = (out.index_select(along, again) for out in (before, after))
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, before, rtol=1e-2, atol=1e-2)


ORDINARY = {
    "normal": lambda w: w,
    "int8": lambda w: (w * 30).clamp(-127, 127).round(),
    "1 in 100 is zero": lambda w: w * (torch.rand_like(w) > 0.01),
    "1 in 100 is not zero": lambda w: w * (torch.rand_like(w) < 0.01),
    "2 of 4": lambda w: w * (torch.arange(w.shape[1], device=w.device) % 4 < 2),
    "lognormal": lambda w: w.sign() * (2 * torch.randn_like(w)).exp(),
    "half precision": lambda w: w.half().float(),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_weights_are_not_made_again(one_product, name):
    """Or nothing would change where the tile is made again for another row's sake."""
    x, weight, bias = draw_plain(256, 512, 2048)
    weight = ORDINARY[name](weight)
    linear_relu_divide = _extension.operators.linear_relu_divide
    before = linear_relu_divide(x, weight, bias, DIVISOR)
    x[255] = INF
    assert not torch.equal(linear_relu_divide(x, weight, bias, DIVISOR)[:255], before[:255])


def test_gradients_where_tiles_are_made_again(one_product):
    mine, _, x, grad_output = draw(300, 520, 1030)
    x[7] = graded(x[7])
    with torch.no_grad():
        mine.linear.weight[9, ::16] = 2.0**-20
    out, *grads = step(mine, x, grad_output)
    grad_z = grad_of_product(out, grad_output)
    weight = mine.linear.weight.detach()
    for got, want in zip(grads, (grad_z @ weight, grad_z.t() @ x, grad_z.sum(0)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3 * want.abs().max().item())


@pytest.mark.parametrize("layout", [unaligned, with_gaps, by_columns, every_other_column])
def test_the_layout_changes_no_bit_of_one_product(one_product, layout):
    for k in (1028, 1031):
        x, weight, bias = draw_wide("x", "graded", [3, 299], 300, 130, k)
        want = _extension.operators.linear_relu_divide(x, weight, bias, DIVISOR)
        for operands in ((layout(x), weight), (x, layout(weight)), (layout(x), layout(weight))):
            assert_same_bits(
                _extension.operators.linear_relu_divide(*operands, bias, DIVISOR), want
            )


# --------------------------------------------------------------------------------------- running


def test_same_bits_every_time(path, precision):
    mine, _, x, grad_output = draw(*TRAINING)
    x, grad_output = spoil(x), spoil(grad_output)
    first = step(mine, x, grad_output)
    for _ in range(3):
        for a, b in zip(first, step(mine, x, grad_output), strict=True):
            assert_same_bits(a, b)


def test_parameters_are_read_in_each_call(path):
    mine, _, x, grad_output = draw(65, 130, 1027)
    fresh = draw(65, 130, 1027)[0]
    before = step(mine, x, grad_output)
    want = step(fresh, x, grad_output)
    with torch.no_grad():
        for parameter, other in zip(mine.parameters(), fresh.parameters(), strict=True):
            parameter.copy_(other)
    assert not torch.equal(before[0], want[0])
    for a, b in zip(step(mine, x, grad_output), want, strict=True):
        assert_same_bits(a, b)
    mine.linear.weight = nn.Parameter(-fresh.linear.weight.detach())
    with torch.no_grad():
        assert_same_bits(mine(-x), fresh(x))


def test_cuda_graph(path, precision):
    """Captured with plain operands, replayed with others, some of which are made again."""
    mine, _, x, grad_output = draw(65, 1001, 1030)
    x.requires_grad_()

    def run():
        out = mine(x)
        return out, *torch.autograd.grad(out, [x, *mine.parameters()], grad_output)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for change in (lambda t: torch.randn_like(t), lambda t: spoil(torch.randn_like(t))):
        with torch.no_grad():
            for t in (x, grad_output, mine.linear.weight):
                t.copy_(change(t))
        graph.replay()
        for got, want in zip(results, run(), strict=True):
            assert_same_bits(got.detach(), want.detach())


def test_the_host_never_waits(path):
    mine, _, x, grad_output = draw(65, 1001, 1030)
    x, grad_output = spoil(x), spoil(grad_output)
    step(mine, x, grad_output)  # fills torch's cache of memory
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        step(mine, x, grad_output)
        is_done = torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not is_done


def test_current_stream(path):
    """All launches are on it, and memory returned in between is not overwritten too early."""
    mine, _, x, grad_output = draw(65, 1001, 1030)
    want = step(mine, x, grad_output)
    moving = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # holds the stream back; the default stream is free
        moving.copy_(x)
        got = step(mine, moving, grad_output)
        again = step(mine, moving, grad_output)
    stream.synchronize()
    for results in (got, again):
        for a, b in zip(results, want, strict=True):
            assert_same_bits(a, b)


def test_device_that_is_not_current(path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for shape in ((3, 1001, 1030), (65, 1001, 1030), (257, 1024, 1024)):
        mine, _, x, grad_output = draw(*shape)
        want = step(mine, x, grad_output)
        got = step(mine.to("cuda:1"), x.to("cuda:1"), grad_output.to("cuda:1"))
        for a, b in zip(got, want, strict=True):
            assert a.device.index == 1
            assert_same_bits(a.cpu(), b.cpu())
    assert torch.cuda.current_device() == 0


def test_two_streams_at_once(path):
    """Blocks that wait for what others leave do so even if not all of them fit on the GPU."""
    mine, _, x, _ = draw(*SHARED[1])
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with torch.no_grad():
        want = mine(x)
        torch.cuda.synchronize()
        results = []
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(mine(x))
    torch.cuda.synchronize()
    for got in results:
        assert_same_bits(got, want)


# -------------------------------------------------------------- gradients that are torch's product


def test_gradient_of_a_gradient(path):
    mine, theirs, x, _ = draw(65, 130, 257)
    results = []
    for module in (mine, theirs):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(module(leaf).square().sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), [leaf, *module.parameters()]))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_functorch_and_autocast(path):
    mine, theirs, x, _ = draw(65, 130, 257)
    got, want = (
        torch.func.grad(lambda x, module=module: module(x).square().sum())(x)
        for module in (mine, theirs)
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    grads = []
    for module in (mine, theirs):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            grads.append(torch.autograd.grad(out.sum(), leaf)[0])
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)
