"""The forward: bit for bit torch.relu's, on every dtype, shape and layout."""

import ctypes
import re
import threading
from pathlib import Path

import pytest
import torch
from tensors import (
    BITS,
    DTYPES,
    assert_is_relu,
    assert_same_bits,
    draw,
    large_misaligned,
    misaligned,
    random_views,
    relu_by_definition,
    short_views,
    special_values,
    views,
)

from model_new import ModelNew

SMAPS = Path("/proc/self/smaps_rollup")
SIZES = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 1000, 4097, 70001]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(device, dtype):
    for size in SIZES:
        x = draw((size,), dtype, device)
        before = x.clone()
        assert_is_relu(ModelNew()(x), x)
        assert_same_bits(x, before)


@pytest.mark.parametrize("width", range(2, 10))
def test_windows(device, width):
    """Rows that overlap, whole and in parts: with a mask, 2048 elements are made at a time."""
    for rows in range(2048 // width, 2048 // width + 20):
        memory = draw((rows + width - 1,), torch.float32, device)
        x = memory.as_strided((rows, width), (1, 1))
        want = relu_by_definition(x.contiguous())
        assert_same_bits(ModelNew()(x), want)
        assert_same_bits(ModelNew()(x.requires_grad_()).detach(), want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_rows_of_few_vectors(device, dtype):
    """Vectors may overrun a row, but neither the operand, which ends its memory, nor the result."""
    memory = draw((70_000,), dtype, device)
    for width in (2, 3, 7, 9, 31, 33, 63, 65, 255, 257):
        rows = 70_000 // (width + 3)
        gapped = memory[-rows * (width + 3) :].view(rows, width + 3)
        column, row = memory[-rows:, None], memory[None, -width:]
        for x in (gapped[:, 3:], gapped[:, :-3], column.expand(-1, width), row.expand(rows, -1)):
            want = relu_by_definition(x.contiguous())
            assert_same_bits(ModelNew()(x), want)
            if dtype.is_floating_point:
                assert_same_bits(ModelNew()(x.detach().requires_grad_()).detach(), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_short_rows(device, dtype):
    for x in short_views(dtype, device):
        print(tuple(x.shape), x.stride())
        assert_is_relu(ModelNew()(x), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(device, dtype):
    for name, x in views(dtype, device):
        print(name, tuple(x.shape), x.stride())
        before = x.clone()
        assert_is_relu(ModelNew()(x), x)
        assert_same_bits(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_misaligned_input(device, dtype):
    for memory, x in misaligned(dtype, device):
        print(tuple(x.shape), x.storage_offset())
        before = memory.clone()
        assert_is_relu(ModelNew()(x), x)
        assert_same_bits(memory, before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int8])
def test_large_misaligned_input(dtype):
    for memory, x in large_misaligned(dtype):
        print(len(memory), x.storage_offset())
        assert x.data_ptr() % 16 != 0
        assert_is_relu(ModelNew()(x), x)
        want = memory.clone()
        want[x.storage_offset() :][: len(x)] = relu_by_definition(x)
        ModelNew(inplace=True)(x)
        assert_same_bits(memory, want)


def test_random_layouts(device):
    for x in random_views(2000 if device == "cpu" else 500, torch.float32, device):
        print(tuple(x.shape), x.stride())
        assert_is_relu(ModelNew()(x), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(device, dtype):
    values = special_values(dtype, device)
    for repeat in (1, 40):  # off and on the vectors' way
        x = values.repeat(repeat)
        assert_is_relu(ModelNew()(x), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_16_bit_patterns(device, dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).to(device)
    x = patterns.view(dtype)
    assert_is_relu(ModelNew()(x), x)


@pytest.mark.gpu
def test_all_float32_patterns_on_the_gpu():
    model, step = ModelNew(), 2**28
    for start in range(-(2**31), 2**31, step):
        patterns = torch.arange(start, start + step, dtype=torch.int64, device="cuda")
        x = patterns.to(torch.int32).view(torch.float32)
        del patterns
        out = model(x)
        assert torch.equal(out.view(torch.int32), relu_by_definition(x).view(torch.int32))
        reference = torch.relu(x)
        same = (out == reference) | (out.isnan() & reference.isnan())
        assert bool(same.all())


def test_many_float32_patterns_on_the_cpu():
    model = ModelNew()
    for start in range(-(2**31), 2**31, 2**26):
        x = torch.arange(start, start + 2**26, 41, dtype=torch.int64)
        x = x.to(torch.int32).view(torch.float32)
        assert_same_bits(model(x), torch.relu(x))


def test_subnormals_under_flush_denormal():
    """torch flushes them to zeros; ours selects by the bits. Equal as long as the mode is on."""
    x = torch.tensor([-1e-40, 1e-40]).repeat(50)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    got = ModelNew()(x)
    same_in_the_mode = torch.equal(got, torch.relu(x))
    torch.set_flush_denormal(False)
    assert same_in_the_mode
    assert_same_bits(got, relu_by_definition(x))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_several_threads_and_huge_pages(dtype, three_threads):
    """Outputs of more than 32 MiB, with threads that meet in the middle of a page."""
    x = draw((3, 50_000_011 // dtype.itemsize), dtype)
    assert_is_relu(ModelNew()(x), x)
    assert_is_relu(ModelNew()(x.t()), x.t())
    assert_is_relu(ModelNew()(x[:, ::2]), x[:, ::2])
    rows = x.view(-1)[: x.numel() // 7 * 7].view(-1, 7)[:, :5]
    assert_is_relu(ModelNew()(rows), rows)
    want = relu_by_definition(x)
    assert_same_bits(ModelNew(inplace=True)(x), want)


def lazily_freed():
    """Bytes of this process that the system may take."""
    [kilobytes] = re.findall(r"^LazyFree: *(\d+) kB$", SMAPS.read_text(), re.M)
    return int(kilobytes) << 10


@pytest.mark.skipif(not SMAPS.exists(), reason="needs Linux")
def test_memory_of_large_outputs_is_used_again():
    """Never while somebody holds it, and what is kept meanwhile is the system's to take."""
    x = draw((20_000_003,), torch.float32)
    relu = ModelNew()
    first, second = relu(x), relu(-x)
    want = second.clone()
    assert first.data_ptr() != second.data_ptr()
    address, before = first.data_ptr(), lazily_freed()
    del first
    assert lazily_freed() - before > 70 << 20
    third = relu(x)
    assert third.data_ptr() == address
    assert_is_relu(third, x)
    assert_same_bits(second, want)
    thread = threading.Thread(target=lambda: third.set_())
    thread.start()
    thread.join()
    assert relu(x).data_ptr() == address


def test_large_outputs_are_tensors_like_others():
    x = draw((20_000_003,), torch.float32)
    out = ModelNew()(x)
    storage = out.untyped_storage()
    assert storage.nbytes() == x.nbytes and storage.resizable()
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
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16], ids=str)
def test_more_than_2_to_the_31_elements(dtype):
    n = 2**31 + 12345
    x = torch.empty(n, dtype=dtype, device="cuda")
    for part in x.split(2**28):
        part.copy_(draw((part.numel(),), torch.int8, "cuda"))
    overlapping = x.as_strided((3, n - 1000), (500, 1))
    for view in (x, x[1:], x[: n - n % 2].view(2, -1)[:, ::2], overlapping):
        out = ModelNew()(view)
        for start in range(0, view.shape[-1], 2**28):
            got = out[..., start : start + 2**28]
            want = torch.relu(view[..., start : start + 2**28])
            assert torch.equal(got, want)
        del out


@pytest.mark.gpu
def test_current_stream():
    x = draw((1 << 24,), torch.float32, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # holds the stream back; the default stream is free
        x.fill_(-1)
        out = ModelNew()(x)
    stream.synchronize()
    assert int(out.count_nonzero()) == 0


@pytest.mark.gpu
def test_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x = draw((1000,), torch.float32, "cuda:1")
    assert_is_relu(ModelNew()(x), x)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_thread_that_has_not_used_cuda():
    """No context of the device is current there, and with memory at hand nothing makes it so."""
    x = draw((1000,), torch.float32, "cuda")
    model = ModelNew()
    model(x)
    results = []
    thread = threading.Thread(target=lambda: results.extend([model(x), model(x)]))
    thread.start()
    thread.join()
    assert len(results) == 2
    for result in results:
        assert_is_relu(result, x)


@pytest.mark.gpu
def test_context_taken_away():
    x = draw((1000,), torch.float32, "cuda")
    model = ModelNew()
    model(x)
    assert ctypes.CDLL("libcuda.so.1").cuCtxSetCurrent(None) == 0
    for _ in range(2):
        assert_is_relu(model(x), x)


@pytest.mark.gpu
def test_cuda_graph():
    x = draw((1000,), torch.float32, "cuda")
    model = ModelNew()
    model(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x)
    x.copy_(draw((1000,), torch.float32, "cuda"))
    graph.replay()
    assert_same_bits(out, relu_by_definition(x))


def test_fresh_memory_every_time(device):
    x = torch.rand(100, device=device)
    first, second = ModelNew()(x), ModelNew()(x)
    assert first.data_ptr() not in (x.data_ptr(), second.data_ptr())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([True, False]),
        lambda: torch.zeros(3, dtype=torch.complex64),
        lambda: torch.tensor([0, 1, 2**16 - 1], dtype=torch.uint16),
        lambda: torch.tensor([0, 1, 2**32 - 1], dtype=torch.uint32),
        lambda: torch.tensor([0, 1, 2**63], dtype=torch.uint64),
        lambda: torch.zeros(3).to(torch.float8_e4m3fn),
        lambda: [1.0, 2.0],
        lambda: 1.0,
        lambda: None,
    ],
)
def test_what_has_no_kernel_is_torchs(device, make):
    """Its errors; and its results, where a newer torch has them."""
    x = make()
    x = x.to(device) if isinstance(x, torch.Tensor) else x
    for relu, module in ((torch.relu, ModelNew()), (torch.relu_, ModelNew(inplace=True))):
        try:
            want = relu(x.clone() if isinstance(x, torch.Tensor) else x)
        except Exception as error:
            with pytest.raises(type(error)) as got:
                module(x)
            if relu is torch.relu:
                assert str(got.value).splitlines()[0] == str(error).splitlines()[0]
        else:
            assert_same_bits(module(x), want)


def test_opinfo_samples(device):
    # Which may need packages that torch does not bring.
    op_db = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db

    (info,) = [op for op in op_db if op.name == "nn.functional.relu"]
    for dtype in DTYPES:
        for sample in info.sample_inputs(device, dtype):
            if not sample.kwargs.get("inplace"):
                assert_is_relu(ModelNew()(sample.input), sample.input)


def test_cuda_tensors_without_cuda_kernels():
    """The operator's CUDA kernel, called as the dispatcher would call it for a CUDA tensor."""
    import model_new

    if torch.cuda.is_available():
        pytest.skip("the kernels were built with CUDA")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    x = torch.empty(3, device="meta")
    with pytest.raises(RuntimeError, match="built without CUDA"):
        model_new._extension.operators.relu.default.redispatch(keys, x)


def test_bits_of_every_width_are_compared():
    for size, dtype in BITS.items():
        assert torch.empty(0, dtype=dtype).element_size() == size
