"""The programs of test_memory.py, which runs each of them in a process of its own.

They measure or limit the address space of their process. Each takes `x`, a large tensor.
"""

import ctypes
import os
import resource
import signal
import subprocess
import threading
from pathlib import Path

import torch

from model_new import LinearReluDivideNew, ModelNew

N = 16 << 20  # an output of so many float32 elements has 64 MiB
relu = ModelNew()


def start_threads():
    """Start the threads of torch, and return an x with N elements."""
    torch.set_num_threads(2)
    x = torch.randn(N)
    torch.relu(x)
    return x


def address_space():
    """Return the bytes of the process's address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def limit_address_space(more):
    """Limit the address space to its present size and so many bytes more."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + more, resource.RLIM_INFINITY))


def unlimit_address_space():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# ---------------------------------------------------------------------------------------- the pool


def kept_after_three_outputs(x):
    """Return the bytes that stay allocated after three outputs, one after the other."""
    before = address_space()
    for _ in range(3):
        out = relu(x)
        assert torch.equal(out, torch.relu(x))
        del out
    return address_space() - before


def kept_in_a_container(x, limit_file, limit):
    """Return the bytes that stay allocated after four outputs at once; None if mounting fails.

    The container's memory is limited by a file of /sys/fs/cgroup.
    """

    def mount(*arguments):
        command = ["mount", *arguments]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    clone_newns = 0x20000
    if ctypes.CDLL(None).unshare(clone_newns) != 0:
        return None
    if not mount("--make-rprivate", "/") or not mount("-t", "tmpfs", "none", "/sys/fs/cgroup"):
        return None
    path = Path("/sys/fs/cgroup", limit_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(limit))
    before = address_space()
    held = [relu(x) for _ in range(4)]
    del held
    return address_space() - before


def kept_in_a_limited_address_space(x):
    """Return the bytes that stay allocated after an output for which the free block is too small.

    The address space is limited after the pool has got this free block.
    """
    relu(x)
    limit_address_space(10 << 30)
    before = address_space()
    out = relu(x[:-600000])
    assert torch.equal(out, torch.relu(x[:-600000]))
    del out
    return address_space() - before


# Calls that need memory, each with x and a leaf of 9 Mi elements.
CALLS_THAT_ALLOCATE = {
    "a new block, of another size than those in the pool": lambda x, _: relu(x[: N // 2 + 512]),
    "too small for the pool: torch's allocator": lambda x, _: relu(x[: 7 << 20]),
    "an output and its mask": lambda x, _: relu(x.requires_grad_()),
    "a gradient": lambda _, leaf: torch.autograd.grad(relu(leaf), leaf, leaf.detach()),
}


def call_with_the_memory_of_the_pool(x, name):
    """Call one of CALLS_THAT_ALLOCATE when there is no more memory than the pool has."""
    call = CALLS_THAT_ALLOCATE[name]
    leaf = torch.randn(9 << 20).requires_grad_()
    held = call(x, leaf)  # keeps its memory, so that the next call cannot have it
    kept = [relu(torch.randn(N + i * (1 << 20))) for i in range(4)]
    del kept
    limit_address_space(0)
    call(x, leaf)
    del held


def results_in_memory_aligned_to_16_bytes(_):
    """Check results and gradients where posix_memalign aligns to no more than 16 bytes.

    The address space has room for an output and its mask, but not for the additional huge pages of
    a block of the pool.
    """
    held = []  # keeps the gradients, whose blocks are from the pool
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.randn((64 << 20) // dtype.itemsize + 77).to(dtype)
        want = torch.relu(x)
        ones = torch.ones_like(x)
        memory = x.clone().data_ptr()
        assert memory % 64 == 16, memory
        leaf = x.detach().requires_grad_()
        mask_bytes = x.numel() // 8
        limit_address_space(x.nbytes + mask_bytes + (1 << 20))
        out = relu(leaf)
        unlimit_address_space()
        assert out.data_ptr() % 64 == 16, (dtype, out.data_ptr())
        assert torch.equal(out, want), dtype
        [grad] = torch.autograd.grad(out, leaf, ones)
        assert torch.equal(grad, (x > 0).to(dtype)), dtype
        held.append(grad)


def results_in_blocks_below_a_huge_page(x, library):
    """Check outputs while the library's mmap lets maps begin so many bytes below a huge page."""
    below = ctypes.c_ssize_t.in_dll(ctypes.CDLL(library), "below")
    want = torch.relu(x)
    held = []  # keeps the blocks, so that each output gets a new one
    for below.value in (0, 4 << 10, 60 << 10, 64 << 10, 1 << 20):
        out = relu(x)
        assert out.data_ptr() % (2 << 20) == 0, (below, out.data_ptr())
        assert torch.equal(out, want), below
        held.append(out)


def results_after_forks(x):
    """Check the outputs of processes that are forked while three threads use the pool."""
    torch.set_num_threads(1)
    x = x[: N // 2]
    want = torch.relu(x)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            relu(x)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(60)  # ends a child that hangs
                good = all(torch.equal(relu(x), want) for _ in range(2))
                os._exit(0 if good else 1)
            status = os.waitpid(child, 0)[1]
            assert status == 0, status
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert torch.equal(relu(x), want)


# ----------------------------------------------------------------------------------- lack of memory


def calls_of_both_modules(k):
    """Return calls by name, on the default device and in the default dtype.

    "torch" is torch's own ReLU, for comparison. The calls "with mask" and "mask" are the same: they
    allocate an output and then a mask. The test of a GPU leaves room for the output of "mask", so
    only its mask does not fit.
    """
    x = torch.randn(N)
    leaf = torch.randn(N, requires_grad=True)
    linear = LinearReluDivideNew(k, 2048, 2.0)
    rows = torch.randn(N // 1024, k)
    out = relu(leaf)
    linear_out = linear(rows.requires_grad_())
    return {
        "forward": lambda: relu(x),
        "with mask": lambda: relu(leaf),
        "mask": lambda: relu(leaf),
        "backward": lambda: torch.autograd.grad(out, leaf, x, retain_graph=True),
        "torch": lambda: torch.relu(x),
        "linear": lambda: linear(rows.detach()),
        "linear backward": lambda: torch.autograd.grad(linear_out.sum(), rows, retain_graph=True),
    }


def lack_of_memory(_):
    """Check that each call raises if memory is short, leaks nothing, and works afterwards."""
    for name, call in calls_of_both_modules(k=16).items():
        held = call()  # takes the free block of the pool, so that the next call has to allocate
        sizes = []
        for _ in range(10):
            limit_address_space(40 << 20)
            try:
                call()
            except RuntimeError as error:
                assert "allocate" in str(error), error
            else:
                raise AssertionError(name)
            unlimit_address_space()
            sizes.append(address_space())
        assert sizes[-1] - sizes[1] < 32 << 20, (name, sizes)
        del held
        call()


def lack_of_gpu_memory(_, dtype, precision):
    """Check that each call raises if GPU memory is short, leaks nothing, and works afterwards.

    The memory is limited to the memory in use; for "mask", the output fits as well.
    """
    torch.set_float32_matmul_precision(precision)
    torch.set_default_device("cuda")
    torch.set_default_dtype(getattr(torch, dtype))
    output_bytes = N * torch.get_default_dtype().itemsize
    total = torch.cuda.mem_get_info()[1]
    for name, call in calls_of_both_modules(k=2048).items():
        held = call()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        limit = torch.cuda.memory_reserved() + (output_bytes if name == "mask" else 0)
        torch.cuda.set_per_process_memory_fraction(limit / total)
        for _ in range(3):
            call_until_gpu_memory_is_short(call, name)
            torch.cuda.synchronize()
            assert torch.cuda.memory_allocated() == before, name
        torch.cuda.set_per_process_memory_fraction(1.0)
        after = call()
        pairs = zip(held, after, strict=True) if isinstance(held, tuple) else [(held, after)]
        assert all(torch.equal(*pair) for pair in pairs), name
        del held, after
    os._exit(
        0
    )  # an ordinary end may abort: autograd's threads want the interpreter (pytorch #38228)


def call_until_gpu_memory_is_short(call, name):
    """Call until the call raises: free parts of blocks in use are used up first."""
    results = []
    try:
        while True:
            results.append(call())
    except torch.OutOfMemoryError:
        assert len(results) < 20, (name, len(results))


def freed_by_a_lack_of_gpu_memory(x):
    """Return how many bytes of the CPU a failed allocation on a GPU gives back to the system."""
    relu(x)  # leaves a free block of 64 MiB in the pool
    on_gpu = torch.zeros(8 << 20, device="cuda")
    relu(on_gpu[:8])
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    before = address_space()
    try:
        relu(on_gpu)
    except torch.OutOfMemoryError:
        return before - address_space()
    raise AssertionError("expected that the GPU's memory is short")
