"""The pool of a CPU's large outputs, and calls for which memory runs out.

The pool keeps the memory of freed outputs for the next ones. Most tests run in a child process,
whose address space they measure or limit.
"""

import shutil
import subprocess

import pytest
import torch

from model_new import ModelNew
from tests.support.compare import assert_same_bits, relu_by_definition
from tests.support.processes import forked, printed

pytestmark = pytest.mark.slow

# The code of each child starts with this. An output of n float32 elements has 64 MiB.
START = """
import os, resource, signal, threading, time
import torch
from model_new import LinearReluDivideNew, ModelNew
torch.set_num_threads(2)
relu = ModelNew()
n = 16 << 20
def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
def limit_address_space(more):
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + more, resource.RLIM_INFINITY))
x = torch.randn(n)
torch.relu(x)  # starts the threads
"""


def run(code, tmp_path, **environment):
    """Run START and the code in a process of its own; return the words that it prints."""
    return printed(START + code, tmp_path, forked, **environment).split()


def run_with(library, code, tmp_path):
    """Run START and the code in a new process, in which a library replaces functions of glibc."""
    printed(START + code, tmp_path, LD_PRELOAD=str(library))


def test_an_environment_variable_switches_the_pool_off(tmp_path):
    """With KERNELS_CPU_POOL=0 the memory of a freed output goes back to the system."""
    code = """
before = address_space()
for _ in range(3):
    out = relu(x)
    assert torch.equal(out, torch.relu(x))
    del out
print(address_space() - before)
"""
    assert int(run(code, tmp_path)[0]) >= 64 << 20
    assert int(run(code, tmp_path, KERNELS_CPU_POOL="0")[0]) < 32 << 20


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_pool_keeps_at_most_an_eighth_of_the_containers_memory(file, tmp_path):
    """An eighth is 130 MiB here, so the pool keeps two of four outputs of 64 MiB."""
    code = f"""
import ctypes, subprocess, sys
path = "/sys/fs/cgroup/{file}"
def mount(*arguments):
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0
CLONE_NEWNS = 0x20000
if ctypes.CDLL(None).unshare(CLONE_NEWNS) or not mount("--make-rprivate", "/") \\
        or not mount("-t", "tmpfs", "none", "/sys/fs/cgroup"):
    sys.exit()
os.makedirs(os.path.dirname(path), exist_ok=True)
with open(path, "w") as limit:
    limit.write(str(8 * (130 << 20)))
before = address_space()
held = [relu(x) for _ in range(4)]
del held
print(address_space() - before)
"""
    kept = run(code, tmp_path)
    if not kept:
        pytest.skip("needs the right to mount")
    assert 128 << 20 <= int(kept[0]) <= 144 << 20


def test_the_pool_keeps_nothing_if_the_address_space_is_limited(tmp_path):
    code = """
relu(x)
limit_address_space(10 << 30)
before = address_space()
out = relu(x[:-600000])  # the free block is too large for it
assert torch.equal(out, torch.relu(x[:-600000]))
del out
print(address_space() - before)
"""
    assert int(run(code, tmp_path)[0]) < 32 << 20


@pytest.mark.parametrize(
    "call",
    [
        "relu(x[: n // 2 + 512])",  # a new block, of another size than those in the pool
        "relu(x[: 7 << 20])",  # too small for the pool: torch's allocator
        "relu(x.requires_grad_())",
        "torch.autograd.grad(relu(leaf), leaf, ones)",
    ],
)
def test_the_pool_returns_its_memory_before_an_allocation_fails(call, tmp_path):
    """The call succeeds, although there is no more memory than the pool has."""
    code = f"""
ones = torch.ones(9 << 20)
leaf = torch.randn(9 << 20).requires_grad_()
held = {call}  # keeps its memory, so that the next call cannot have it
kept = [relu(torch.randn(n + i * (1 << 20))) for i in range(4)]
del kept
limit_address_space(0)
{call}
"""
    run(code, tmp_path)


# By name, calls of both modules; "torch" is torch's own ReLU, for comparison. The child sets k. The
# calls "with mask" and "mask" are the same: they allocate an output and then a mask. The test of a
# GPU leaves room for the output of "mask", so only its mask does not fit.
CALLS = """
x = torch.randn(n)
leaf = torch.randn(n, requires_grad=True)
linear = LinearReluDivideNew(k, 2048, 2.0)
rows = torch.randn(n // 1024, k)
out = relu(leaf)
linear_out = linear(rows.requires_grad_())
cases = {
    "forward": lambda: relu(x),
    "with mask": lambda: relu(leaf),
    "mask": lambda: relu(leaf),
    "backward": lambda: torch.autograd.grad(out, leaf, x, retain_graph=True),
    "torch": lambda: torch.relu(x),
    "linear": lambda: linear(rows.detach()),
    "linear backward": lambda: torch.autograd.grad(linear_out.sum(), rows, retain_graph=True),
}
"""


def test_out_of_memory_raises_the_error_of_torch_and_the_next_call_works(tmp_path):
    """This holds for the forward, with and without a mask, and the backward. No memory leaks."""
    code = """
for name, case in cases.items():
    held = case()  # takes the free block of the pool, so that the next call has to allocate
    sizes = []
    for _ in range(10):
        limit_address_space(40 << 20)
        try:
            case()
        except RuntimeError as error:
            assert "allocate" in str(error), error
        else:
            raise AssertionError(name)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        sizes.append(address_space())
    assert sizes[-1] - sizes[1] < 32 << 20, (name, sizes)
    del held
    case()
"""
    run("k = 16" + CALLS + code, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_out_of_gpu_memory_raises_the_error_of_torch_and_the_next_call_works(
    dtype, precision, tmp_path
):
    """The GPU's memory is limited to the memory in use; for "mask", the output fits as well."""
    settings = f"""
torch.set_float32_matmul_precision({precision!r})
torch.set_default_device("cuda")
torch.set_default_dtype(torch.{dtype})
k = 2048
"""
    code = """
total = torch.cuda.mem_get_info()[1]
for name, case in cases.items():
    held = case()
    more = []
    spare = x.nbytes if name == "mask" else 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)
    for _ in range(3):
        try:
            while True:  # free parts of blocks in use are used up first
                more.append(case())
        except torch.OutOfMemoryError:
            assert len(more) < 20, (name, len(more))
        more.clear()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before, name
    torch.cuda.set_per_process_memory_fraction(1.0)
    after = case()
    pairs = zip(held, after) if isinstance(held, tuple) else [(held, after)]
    assert all(torch.equal(*pair) for pair in pairs), name
    del held, after
os._exit(0)  # an ordinary end may abort: autograd's threads want the interpreter (pytorch #38228)
"""
    run(settings + CALLS + code, tmp_path)


@pytest.mark.gpu
def test_out_of_gpu_memory_leaves_the_pool_of_the_cpu_alone(tmp_path):
    """The failed allocation does not return free blocks of the CPU to the system."""
    code = """
relu(x)  # leaves a free block of 64 MiB in the pool
on_gpu = torch.zeros(8 << 20, device="cuda")
relu(on_gpu[:8])
torch.cuda.empty_cache()
torch.cuda.set_per_process_memory_fraction(1e-6)
before = address_space()
try:
    relu(on_gpu)
except torch.OutOfMemoryError:
    print(before - address_space())
"""
    assert int(run(code, tmp_path)[0]) < 32 << 20


# This replaces glibc's posix_memalign, with which torch allocates at multiples of 64 bytes. glibc's
# malloc aligns to 16 bytes, and returns large blocks 16 bytes after the beginning of a page.
ALIGNED_TO_16 = """
#include <errno.h>
#include <stdlib.h>
int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  *memory = malloc(bytes);
  return *memory == NULL ? ENOMEM : 0;
}
"""


def test_results_are_right_in_memory_that_is_aligned_to_16_bytes_only(tmp_path):
    """Such memory may come from another allocator, where the pool has none.

    Here the address space is limited: it has room for an output and its mask, but not for the
    additional huge pages of a block of the pool.
    """
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "aligned_to_16.so"
    compile_it = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(compile_it, input=ALIGNED_TO_16, text=True, check=True)
    code = """
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
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    assert out.data_ptr() % 64 == 16, (dtype, out.data_ptr())
    assert torch.equal(out, want), dtype
    [grad] = torch.autograd.grad(out, leaf, ones)
    assert torch.equal(grad, (x > 0).to(dtype)), dtype
    held.append(grad)
"""
    run_with(library, code, tmp_path)


# This replaces mmap. Large maps of anonymous memory then begin `below` bytes below a huge page,
# among memory that must not be touched. Not every Linux aligns such maps to huge pages, as 6.18
# does.
BELOW_A_HUGE_PAGE = """
#define _GNU_SOURCE
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
intptr_t below = 0;
static void* map(void* address, size_t bytes, int access, int flags, int file, off_t offset) {
  return (void*)syscall(SYS_mmap, address, bytes, access, flags, file, offset);
}
void* mmap(void* address, size_t bytes, int access, int flags, int file, off_t offset) {
  const size_t page = 2 << 20;
  if (address != NULL || !(flags & MAP_ANONYMOUS) || bytes < (32 << 20))
    return map(address, bytes, access, flags, file, offset);
  char* room = map(NULL, bytes + 4 * page, PROT_NONE, flags, -1, 0);
  if (room == MAP_FAILED) return room;
  const uintptr_t huge_page = ((uintptr_t)room / page + 2) * page;
  return map((char*)huge_page - below, bytes, access, flags | MAP_FIXED, file, offset);
}
"""


def test_a_block_is_mapped_as_a_whole_wherever_the_system_maps_it(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "below_a_huge_page.so"
    compile_it = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(compile_it, input=BELOW_A_HUGE_PAGE, text=True, check=True)
    code = f"""
import ctypes
below = ctypes.c_ssize_t.in_dll(ctypes.CDLL({str(library)!r}), "below")
want = torch.relu(x)
held = []  # keeps the blocks, so that each output gets a new one
for below.value in (0, 4 << 10, 60 << 10, 64 << 10, 1 << 20):
    out = relu(x)
    assert out.data_ptr() % (2 << 20) == 0, (below, out.data_ptr())
    assert torch.equal(out, want), below
    held.append(out)
"""
    run_with(library, code, tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_forked_while_threads_use_the_pool_gives_right_results(tmp_path):
    """It has blocks of its own, even if a thread was in the pool's code at the fork."""
    code = """
torch.set_num_threads(1)
x = torch.randn(n // 2)
want = torch.relu(x)
stop = threading.Event()
def work():
    while not stop.is_set():
        relu(x)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        good = all(torch.equal(relu(x), want) for _ in range(2))
        os._exit(0 if good else 1)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
stop.set()
for thread in threads:
    thread.join()
assert torch.equal(relu(x), want)
"""
    run(code, tmp_path)


def test_copy_on_write_clones_of_large_outputs_keep_their_values():
    """A change of the clone does not change the output, whose memory is from the pool."""
    x = torch.randn(9 << 20)
    out = ModelNew()(x)
    want = relu_by_definition(x)
    clone = out._lazy_clone()
    assert torch._C._is_cow_tensor(out)
    clone.neg_()
    assert_same_bits(out, want)
    assert_same_bits(clone, -want)
    del out
    clone.neg_()
    assert_same_bits(clone, want)
