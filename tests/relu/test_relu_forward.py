"""ReLU, forward: the bits of torch.relu, for every dtype, shape and layout.

Only NaN, -0.0 and flushed subnormals may have other bits in torch: our kernels keep them.
"""

import itertools
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from model_new import ModelNew
from problems.elementwise import special_values
from tests.support.compare import (
    BITS,
    assert_is_relu,
    assert_same_bits,
    outcome,
    raw_bits,
    relu_by_definition,
)
from tests.support.processes import printed
from tests.support.sanitize_markers import ONE_OF_A_WIDTH
from tests.support.tensors import DTYPES, FLOATING, VIEWS, draw, draw_view

SIZES = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 4097, 70001, 300_007]


@pytest.mark.sanitize("relu", dtype=ONE_OF_A_WIDTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_results_match_torch_for_any_size(device, size, dtype):
    x = draw((size,), dtype, device)
    assert_is_relu(ModelNew()(x), x)


@pytest.mark.sanitize("relu", dtype=ONE_OF_A_WIDTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_results_match_torch_for_any_layout_and_x_does_not_change(device, view, dtype):
    x = draw_view(view, dtype, device)
    before = x.clone()
    assert_is_relu(ModelNew()(x), x)
    assert_same_bits(x, before)


@pytest.mark.sanitize("relu", dtype=ONE_OF_A_WIDTH)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_are_right(device, dtype):
    """These are NaN, infinities, zeros, subnormals and the ends of integers."""
    values = special_values(dtype).to(device)
    for repeat in (1, 40):  # too short for vectors, and long enough
        x = values.repeat(repeat)
        assert_is_relu(ModelNew()(x), x)
        assert_same_bits(ModelNew()(x), relu_by_definition(x))


def edge_patterns(dtype):
    """Return bit patterns at the edges of a floating dtype, as signed integers.

    These are, of both signs, zeros, subnormals, the least and the largest normal numbers, ones,
    infinities, and NaN: quiet and signalling ones with several payloads.
    """
    finfo = torch.finfo(dtype)
    mantissa_bits = round(-math.log2(finfo.eps))
    quiet = 1 << (mantissa_bits - 1)  # the highest bit of the mantissa is 1 in a quiet NaN
    mantissas = [0, 1, 2, quiet - 1, quiet, quiet + 1, 2 * quiet - 1]
    exponent_bits = finfo.bits - 1 - mantissa_bits
    special_exponent = (1 << exponent_bits) - 1  # that of infinities and NaN
    one = special_exponent // 2
    exponents = [0, 1, one, special_exponent - 1, special_exponent]
    positive = [(e << mantissa_bits) + m for e, m in itertools.product(exponents, mantissas)]
    sign_bit = 1 << (finfo.bits - 1)
    return positive + [pattern - sign_bit for pattern in positive]


def filled(pattern, size, dtype, device):
    """Return a vector whose elements all have this bit pattern."""
    integers = torch.full((size,), pattern, dtype=BITS[dtype.itemsize], device=device)
    return integers.view(dtype)


# An element alone, and a vector that ends with an incomplete block: the kernels handle the last 7
# elements apart from the first 64.
FILLED_SIZES = [1, 64 + 7]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_the_bits_of_nan_zeros_and_subnormals_are_kept(device, dtype):
    """Every bit of a value that is not negative is kept, that of a signalling NaN too.

    A negative number gives +0.0. -0.0 and a NaN with a sign are no negative numbers.
    """
    for pattern, size in itertools.product(edge_patterns(dtype), FILLED_SIZES):
        x = filled(pattern, size, dtype, device)
        is_negative = pattern < 0 and not x[0].isnan() and x[0] != 0
        want = filled(0 if is_negative else pattern, size, dtype, device)
        out = ModelNew()(x)
        out_of_training = ModelNew()(x.clone().requires_grad_()).detach()
        assert torch.equal(raw_bits(out), raw_bits(want)), hex(pattern)
        assert torch.equal(raw_bits(out_of_training), raw_bits(want)), hex(pattern)
        assert_is_relu(out, x)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_subnormals_are_not_flushed(device, dtype):
    """Results are the same under `torch.set_flush_denormal(True)`, which acts on CPUs."""
    for pattern in (5, 5 - (1 << 8 * dtype.itemsize - 1)):  # of both signs
        for size in (*FILLED_SIZES, 300_007):
            x = filled(pattern, size, dtype, device)
            want = filled(max(pattern, 0), size, dtype, device)
            if not torch.set_flush_denormal(True):
                pytest.skip("this CPU cannot flush subnormals")
            try:
                out = ModelNew()(x)
            finally:
                torch.set_flush_denormal(False)
            assert torch.equal(raw_bits(out), raw_bits(want))


@pytest.mark.all_patterns
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_bit_pattern_of_half_types_is_right(device, dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).to(device)
    x = patterns.view(dtype)
    assert_is_relu(ModelNew()(x), x)


@pytest.mark.all_patterns
def test_bit_patterns_of_float32_are_right(device):
    """On a GPU all of them are tested, and on a CPU every 641st."""
    model = ModelNew()
    step = 1 if device == "cuda" else 641
    for start in range(-(2**31), 2**31, 2**28):
        patterns = torch.arange(start, start + 2**28, step, dtype=torch.int64, device=device)
        x = patterns.to(torch.int32).view(torch.float32)
        del patterns
        out = model(x)
        reference = torch.relu(x)
        assert torch.equal(out.view(torch.int32), relu_by_definition(x).view(torch.int32))
        same = (out == reference) | (out.isnan() & reference.isnan())
        assert bool(same.all())


@pytest.mark.slow
def test_large_outputs_of_several_threads_are_right(three_threads):
    """In outputs of more than 32 MiB, two threads write to one page."""
    x = draw((3, 12_500_003), torch.float32)
    for view in (x, x.t(), x[:, ::2]):
        assert_is_relu(ModelNew()(view), view)


def lazily_freed():
    """Return the bytes of this process that the system may take back."""
    text = Path("/proc/self/smaps_rollup").read_text()
    kib = re.search(r"^LazyFree: *(\d+) kB$", text, re.M)[1]
    return int(kib) << 10


def test_memory_of_large_outputs_is_used_again():
    """It is used once no tensor holds it. Until then the system may take free memory back."""
    x = draw((20_000_003,), torch.float32)
    relu = ModelNew()
    first = relu(x)
    second = relu(-x)
    want = second.clone()
    assert first.data_ptr() != second.data_ptr()
    address = first.data_ptr()
    before = lazily_freed()
    del first
    assert lazily_freed() - before > 70 << 20
    third = relu(x)
    assert third.data_ptr() == address
    assert_is_relu(third, x)
    assert_same_bits(second, want)
    with ThreadPoolExecutor() as pool:
        pool.submit(third.set_).result()  # frees the memory of `third` in another thread
    assert relu(x).data_ptr() == address


def test_large_outputs_can_be_resized_shared_and_profiled():
    """Their memory is from our pool, but behaves as torch's."""
    x = draw((20_000_003,), torch.float32)
    out = ModelNew()(x)
    storage = out.untyped_storage()
    assert storage.nbytes() == x.nbytes
    assert storage.resizable()
    kept = out[:1000].clone()
    out.resize_(3)
    assert_same_bits(out, kept[:3])
    out.resize_(30_000_000)
    assert_same_bits(out[:1000], kept)
    storage.resize_(0)
    shared = ModelNew()(x).share_memory_()
    assert_same_bits(shared, relu_by_definition(x))
    with torch.profiler.profile(profile_memory=True) as profile:
        ModelNew()(x)
    allocated = [event.self_cpu_memory_usage for event in profile.events()]
    assert max(allocated) >= x.nbytes


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements_are_right():
    """An index does not fit into 32 bits there."""
    x = torch.empty(2**31 + 12345, dtype=torch.float16, device="cuda")
    for part in x.split(2**28):
        part.copy_(draw((part.numel(),), torch.int8, "cuda"))
    out = ModelNew()(x)
    for got, values in zip(out.split(2**28), x.split(2**28), strict=True):
        assert torch.equal(got, torch.relu(values))


@pytest.mark.gpu
def test_all_work_is_on_the_current_stream():
    """A result on a delayed stream has the values that x gets there."""
    x = draw((1 << 24,), torch.float32, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # delays this stream, but not the default one
        x.fill_(-1)
        out = ModelNew()(x)
    stream.synchronize()
    assert int(out.count_nonzero()) == 0


@pytest.mark.gpu
def test_x_may_be_on_a_device_that_is_not_current():
    """The result is right, and the current device stays current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x = draw((1000,), torch.float32, "cuda:1")
    assert_is_relu(ModelNew()(x), x)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([True, False]),
        lambda: torch.zeros(3, dtype=torch.complex64),
        lambda: torch.tensor([0, 1, 2**16 - 1], dtype=torch.uint16),
        lambda: torch.tensor([0, 1, 2**63], dtype=torch.uint64),
        lambda: torch.zeros(3).to(torch.float8_e4m3fn),
        lambda: [1.0, 2.0],
        lambda: 1.0,
        lambda: None,
        nn.UninitializedParameter,
    ],
)
def test_x_without_a_kernel_gives_the_error_or_result_of_torch(device, make):
    """Newer versions of torch have results for some of these."""
    x = make()
    x = x.to(device) if type(x) is torch.Tensor else x
    got = outcome(ModelNew(), x)
    want = outcome(torch.relu, x)
    if isinstance(want, torch.Tensor):
        assert_same_bits(got, want)
    else:
        assert got == want


def test_results_match_torch_for_the_samples_by_which_torch_tests_relu(device):
    """These are the samples with which torch tests its own ReLU."""
    # The module may need packages that do not come with torch.
    op_db = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db

    (info,) = [op for op in op_db if op.name == "nn.functional.relu"]
    for dtype in DTYPES:
        for sample in info.sample_inputs(device, dtype):
            if not sample.kwargs.get("inplace"):
                assert_is_relu(ModelNew()(sample.input), sample.input)


@pytest.mark.gpu
@pytest.mark.slow
def test_cuda_tensors_raise_if_the_build_has_no_cuda_kernels(tmp_path):
    code = """
        import torch
        is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: False
        import model_new
        torch.cuda.is_available = is_available
        try:
            model_new.ModelNew()(torch.ones(4, device="cuda"))
        except RuntimeError as error:
            print(error)
    """
    assert "built without CUDA" in printed(code, tmp_path, TORCH_CUDA_ARCH_LIST=None)


def test_in_place_overwrites_x_and_returns_it(device):
    """This is `ModelNew(inplace=True)`; torch's op does the same."""
    assert f"{ModelNew()} {ModelNew(inplace=True)}" == "ModelNew() ModelNew(inplace=True)"
    x = draw((7, 9), torch.float32, device)[:, ::2]
    want = relu_by_definition(x)
    address = x.data_ptr()
    version = x._version
    assert ModelNew(inplace=True)(x) is x
    assert_same_bits(x, want)
    assert (x.data_ptr(), x._version) == (address, version + 1)
