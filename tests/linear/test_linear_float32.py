"""float32 products by our kernels on a GPU: forward and backward are as accurate as torch's."""

import faulthandler
import sys

import pytest
import torch
from torch import nn

from tests.support.compare import (
    assert_as_accurate,
    assert_mask_of,
    assert_same_bits,
    rounding_errors,
)
from tests.support.float32_on_gpu import (
    DIVISOR,
    INF,
    LAYOUTS,
    NAN,
    assert_integers_are_exact,
    assert_max_and_mean_error,
    assert_special_values,
    draw_step,
    forward_summed_at_once,
    grad_of_product,
    slack,
    summed_at_once,
    unaligned,
)
from tests.support.promises import Reference, broken_promises
from tests.support.tensors import (
    FLOAT32_PATHS,
    FP16X3_PATHS,
    OPERATORS,
    capture_graph,
    linear_path,
    step,
)

pytestmark = pytest.mark.gpu

# [m, n, k]. From K = 1024 on the promise holds for any M and N.
LONG = [(1, 513, 1027), (64, 512, 1024), (65, 1001, 1030), (200, 4099, 2053)]
SHORT = [(1, 1, 1), (1, 3, 7), (64, 17, 65), (65, 129, 300), (200, 513, 129), (200, 1, 1000)]
# Shapes for which clusters of Hopper share tiles along K: one tile in many parts, some tiles in few
# parts, and the tiles that whole waves leave over.
SHARED = [(64, 256, 32768), (400, 1100, 4096), (1000, 4000, 2048)]
# A shape for which the M, N and K of all three products are no multiples of anything.
TRAINING = (1030, 1537, 1029)


# Sanitizers run sm90 at both of its precisions, and the other paths at `highest`.
SM90 = {"path": ["sm90"], "precision": ["highest", "high"]}
SKINNY = {"path": ["skinny"], "precision": ["highest"]}
SM80 = {"path": ["sm80"], "precision": ["highest"]}


@pytest.fixture(params=FLOAT32_PATHS)
def path(request):
    with linear_path(request.param):
        yield request.param


@pytest.mark.sanitize(
    "sm90", path=["sm90"], precision=["highest"], shape=[LONG[3]], without=["initcheck"]
)
@pytest.mark.parametrize("shape", LONG + SHARED, ids=str)
def test_the_forward_keeps_its_promise(path, precision, shape):
    """Errors are at most torch's times the slack. The mask is right; making it changes no bit."""
    ours, _, x, _ = draw_step(*shape)
    weight, bias = (p.detach() for p in ours.linear.parameters())
    out, mask = OPERATORS.linear_relu_divide_with_mask(x, weight, bias, DIVISOR)
    torch_out = forward_summed_at_once(x, weight, bias)
    reference = Reference(x, weight, bias, DIVISOR)
    assert broken_promises(out, torch_out, reference, slack(precision)) == []

    assert_mask_of(out, mask)
    with torch.no_grad():
        assert_same_bits(ours(x), out)


# M around multiples of the tiles' rows, and K for which the tiles differ.
TILE_SHAPES = [(m, 262, k) for m in (64, 65, 161, 177, 337, 353, 1024) for k in (512, 1024, 4096)]
# Sanitizers run these of TILE_SHAPES and SHARED.
SHORT_TILES = [(353, 262, 512), (353, 262, 1024)]
LONG_TILES = [(353, 262, 4096)]
SEVERAL_TILES_PER_CLUSTER = [(1000, 4000, 2048)]


@pytest.mark.sanitize("sm90", **SM90, shape=SHORT_TILES + LONG_TILES)
@pytest.mark.sanitize("sm90", **SM90, shape=SEVERAL_TILES_PER_CLUSTER, without=["initcheck"])
@pytest.mark.sanitize("other paths", **SKINNY, shape=SHORT_TILES + LONG_TILES)
@pytest.mark.sanitize("other paths", **SM80, shape=SHORT_TILES)
@pytest.mark.sanitize("other paths", **SM80, shape=LONG_TILES, without=["racecheck"])
@pytest.mark.parametrize("shape", TILE_SHAPES + SHARED, ids=str)
def test_tiles_cover_all_rows_of_x_once(path, precision, shape):
    """So the results of integers have no error.

    On Hopper the tiles of a product have 64, 128, 160 or 176 rows, and the last ones may have fewer
    (sm90/gemm_fp16x3/choose_tiles.h).
    """
    assert_integers_are_exact(*shape)


# x has so many rows that it needs several chunks, for a workspace has at most 254 MiB (chunks.h).
CHUNKED = (200_003, 262, 1024)
WORKSPACE_PATHS = pytest.mark.parametrize("path", FP16X3_PATHS, indirect=True)


@WORKSPACE_PATHS
def test_chunks_cover_all_rows_of_x_once(path, precision):
    """So the results of integers have no error, and special values stay in their rows."""
    assert_integers_are_exact(*CHUNKED)
    ours, reference, x, _ = draw_step(*CHUNKED)
    with torch.no_grad():
        out = ours(x)
        last = ours(x[-70_000:])
        # The number of rows decides which tiles the clusters of Hopper share along K.
        torch.testing.assert_close(last, out[-70_000:], rtol=1e-5, atol=1e-6)
        x[:1000] = spoil(x[:1000])
        x[-1000:] = spoil(x[-1000:])
        assert_special_values(ours(x), reference(x))


@pytest.mark.parametrize("shape", [(65536, 1024, 8192), (4096, 1024, 8192)], ids=str)
@WORKSPACE_PATHS
def test_memory_beside_the_result_is_limited(path, precision, shape):
    """A forward allocates at most 256 MiB beside its result.

    It also allocates at least half of x's bytes, or 128 MiB. So the path has a workspace.
    """
    ours, _, x, _ = draw_step(*shape)
    with torch.no_grad():
        ours(x)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = ours(x)
    beside = torch.cuda.max_memory_allocated() - before - out.nbytes
    assert min(x.nbytes // 2, 128 << 20) <= beside <= 256 << 20


def products_of(module, x, grad_output, results):
    """Return the gradients of x and of weight, each with its two factors."""
    _, grad_x, grad_weight, *_ = results
    grad_z = grad_of_product(results[0], grad_output)
    return (grad_x, grad_z, module.linear.weight.detach()), (grad_weight, grad_z.t(), x)


@pytest.mark.parametrize("path", ["auto", *FLOAT32_PATHS], indirect=True)
def test_gradients_keep_their_promise(path, precision):
    """Their maximum and mean errors are at most torch's, times the slack."""
    ours, _, x, grad_output = draw_step(*TRAINING)
    results = step(ours, x, grad_output)
    for got, a, b in products_of(ours, x, grad_output, results):
        assert got.is_contiguous()
        exact = a.double() @ b.double()
        assert_max_and_mean_error(got, summed_at_once(a, b), exact, slack(precision))


@pytest.mark.sanitize("sm90", **SM90)
@pytest.mark.sanitize("other paths", **SKINNY)
@pytest.mark.sanitize("other paths", **SM80)
@pytest.mark.parametrize("shape", SHORT, ids=str)
def test_short_sums_err_no_more_than_torch_or_by_a_few_roundings(path, precision, shape):
    unit = 2.0**-24 if precision == "highest" else 2.0**-12
    ours, reference, x, grad_output = draw_step(*shape)
    weight, bias = (p.detach() for p in ours.linear.parameters())
    results = step(ours, x, grad_output)
    exact = Reference(x, weight, bias, DIVISOR).out
    allowance = rounding_errors(x, weight, bias, unit) / DIVISOR
    assert_as_accurate(results[0], reference(x).detach(), exact, allowance=allowance)
    for got, a, b in products_of(ours, x, grad_output, results):
        allowance = rounding_errors(a, b.t(), unit=unit)
        assert_as_accurate(got, a @ b, a.double() @ b.double(), allowance=allowance)


# A shape, the path that should be best, and the results for which it should: 0 is the output, 1 the
# gradient of x, 2 the gradient of weight.
BEST_PATHS = [
    ((2050, 4101, 2053), "sm90", [0, 1, 2]),
    ((1000, 3072, 768), "sm90", [0, 1, 2]),
    ((4096, 8192, 16), "sm90", [0]),
    ((64, 8192, 8192), "sm90", [2]),  # a weight's gradient of few rows
    ((1, 4096, 4096), "skinny", [0]),
    ((32, 253, 1024), "skinny", [0]),
    ((32, 253, 1024), "torch", [1, 2]),
    ((64, 2048, 128), "torch", [0, 1, 2]),
    ((9, 64, 63), "torch", [0, 1, 2]),
]


@pytest.mark.parametrize(("shape", "best", "results"), BEST_PATHS, ids=str)
def test_the_best_path_is_chosen_on_hopper(shape, best, results):
    """Results have the bits of the best path, and those of torch's path only if that is best."""
    ours, _, x, grad_output = draw_step(*shape)
    names = ("auto", "sm90", "skinny", "torch")
    found = {}
    for name in names:
        with linear_path(name):
            found[name] = step(ours, x, grad_output)
    auto = found.pop("auto")
    for i in results:
        same = {name for name, other in found.items() if torch.equal(auto[i], other[i])}
        assert best in same
        assert best == "torch" or "torch" not in same


@pytest.mark.sanitize("sm90", path=["sm90"])
@pytest.mark.sanitize("other paths", path=["skinny"])
@pytest.mark.sanitize("other paths", path=["sm80"], shape=[(70, 129, 301)])
@pytest.mark.sanitize("other paths", path=["sm80"], shape=[(65, 130, 1028)], without=["racecheck"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(65, 130, 1028), (70, 129, 301)], ids=str)
def test_the_layout_changes_no_bit(path, layout, shape):
    """This holds for the layout of x, weight and the output's gradient."""
    ours, _, x, grad_output = draw_step(*shape)
    want = step(ours, x, grad_output)
    assert_same_bits(step(ours, layout(x), grad_output), want)
    assert_same_bits(step(ours, x, layout(grad_output)), want)
    ours.linear.weight = nn.Parameter(layout(ours.linear.weight.detach()))
    assert ours.linear.weight.is_contiguous() == (layout is unaligned)
    assert_same_bits(step(ours, x, grad_output), want)


def test_x_may_have_more_dimensions_and_an_expanded_row(path):
    ours, _, x, grad_output = draw_step(60, 130, 1027)
    want = step(ours, x, grad_output)
    deep = step(ours, x.view(3, 4, 5, -1), grad_output.view(3, 4, 5, -1))
    assert_same_bits([a.view(b.shape) for a, b in zip(deep, want, strict=True)], want)
    row = x[:1]
    with torch.no_grad():
        assert_same_bits(ours(row.expand(60, -1)), ours(row.repeat(60, 1)))


def spoil(x):
    """Put special values into rows: an infinity, NaN, both infinities, or 1e30."""
    x = x.clone()
    for row, value in enumerate([INF, -INF, NAN, 1e30]):
        x[row::11, row + 2] = value
    x[4::11, 0] = INF
    x[4::11, -1] = -INF
    return x


@pytest.mark.sanitize("sm90", **SM90, shape=[(65, 1001, 1030)])
@pytest.mark.sanitize("other paths", **SKINNY, shape=[(65, 1001, 1030)])
@pytest.mark.sanitize("other paths", **SM80, shape=[(65, 1001, 1030)])
@pytest.mark.parametrize("spoiled", ["x", "weight", "grad_output"])
@pytest.mark.parametrize("shape", [(65, 1001, 1030), (33, 70, 20)], ids=str)
def test_special_values_come_out_where_torch_has_them(path, precision, shape, spoiled):
    ours, reference, x, grad_output = draw_step(*shape)
    if spoiled == "x":
        x = spoil(x)
    elif spoiled == "grad_output":
        grad_output = spoil(grad_output)
    else:
        for module in (ours, reference):
            module.linear.weight = nn.Parameter(spoil(ours.linear.weight.detach()))
    out, *grads, _ = step(ours, x, grad_output)
    # As in torch, the gradient passes where the output is NaN.
    grad_z = torch.where(out <= 0, 0.0, grad_output / DIVISOR)
    torch_results = reference(x).detach(), grad_z @ ours.linear.weight.detach(), grad_z.t() @ x
    for got, want in zip((out, *grads), torch_results, strict=True):
        assert_special_values(got, want)
    assert any(not want.isfinite().all() for want in torch_results)


def test_a_cuda_graph_can_be_replayed_with_other_operands(path, precision):
    """The graph is captured with plain operands, and replayed with plain and special ones."""
    ours, _, x, grad_output = draw_step(65, 1001, 1030)
    x.requires_grad_()

    def run():
        out = ours(x)
        return out, *torch.autograd.grad(out, [x, *ours.parameters()], grad_output)

    graph, results = capture_graph(run)
    for change in (torch.randn_like, lambda t: spoil(torch.randn_like(t))):
        with torch.no_grad():
            for t in (x, grad_output, ours.linear.weight):
                t.copy_(change(t))
        graph.replay()
        assert_same_bits(results, run())


def test_the_host_never_waits(path):
    """A step returns while the GPU still works, also if special values are computed again."""
    ours, _, x, grad_output = draw_step(65, 1001, 1030)
    x = spoil(x)
    grad_output = spoil(grad_output)
    step(ours, x, grad_output)  # later steps find memory in torch's cache
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)
        step(ours, x, grad_output)
        is_done = torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not is_done


def test_all_work_is_on_the_current_stream(path):
    """Two steps on a delayed stream are right: neither overwrites the other's memory too early."""
    ours, _, x, grad_output = draw_step(65, 1001, 1030)
    want = step(ours, x, grad_output)
    moving = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # delays this stream, but not the default one
        moving.copy_(x)
        got = step(ours, moving, grad_output)
        again = step(ours, moving, grad_output)
    stream.synchronize()
    assert_same_bits((got, again), (want, want))


def test_operands_may_be_on_a_device_that_is_not_current(path):
    """Results are there, with the bits of the current device's."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for shape in ((3, 1001, 1030), (65, 1001, 1030), (257, 1024, 1024)):
        ours, _, x, grad_output = draw_step(*shape)
        want = step(ours, x, grad_output)
        got = step(ours.to("cuda:1"), x.to("cuda:1"), grad_output.to("cuda:1"))
        assert {result.device.index for result in got} == {1}
        assert_same_bits([result.cpu() for result in got], [result.cpu() for result in want])
    assert torch.cuda.current_device() == 0


@pytest.fixture
def at_most_a_minute():
    """End this process if the test takes longer, because a GPU that hangs cannot be interrupted."""
    faulthandler.dump_traceback_later(60, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.usefixtures("at_most_a_minute")
def test_two_streams_at_once_do_not_deadlock(path):
    """Blocks may wait for partial sums although not all blocks fit on the GPU at once."""
    ours, _, x, _ = draw_step(*SHARED[1])
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with torch.no_grad():
        want = ours(x)
        torch.cuda.synchronize()
        results = []
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(ours(x))
    torch.cuda.synchronize()
    assert_same_bits(results, [want] * len(results))
