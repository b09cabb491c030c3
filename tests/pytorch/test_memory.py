"""The pool of a CPU's large outputs, and calls for which memory runs out.

The pool keeps the memory of freed outputs for the next ones. Most tests run a program of
memory_programs.py in a process of its own, whose address space the program measures or limits.
"""

import shutil
import subprocess
from ast import literal_eval

import pytest
import torch

from model_new import ModelNew
from tests.pytorch import memory_programs as programs
from tests.support.compare import assert_same_bits, relu_by_definition
from tests.support.processes import forked, printed, python

pytestmark = pytest.mark.slow


def run(program, tmp_path, *arguments, start=forked, **environment):
    """Run a function of memory_programs.py in a process that `start` starts; return its result."""
    code = f"""
        from tests.pytorch import memory_programs as programs
        print(programs.{program.__name__}(programs.start_threads(), *{arguments!r}))
    """
    return literal_eval(printed(code, tmp_path, start, **environment) or "None")


def built_library(source, tmp_path):
    """Build a C library that replaces functions of glibc; return its path."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "library.so"
    compile_it = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(compile_it, input=source, text=True, check=True)
    return str(library)


def test_an_environment_variable_switches_the_pool_off(tmp_path):
    """With KERNELS_CPU_POOL=0 the memory of a freed output goes back to the system."""
    program = programs.kept_after_three_outputs
    assert run(program, tmp_path) >= 64 << 20
    assert run(program, tmp_path, KERNELS_CPU_POOL="0") < 32 << 20


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_pool_keeps_at_most_an_eighth_of_the_containers_memory(file, tmp_path):
    """An eighth is 130 MiB here, so the pool keeps two of four outputs of 64 MiB."""
    kept = run(programs.kept_in_a_container, tmp_path, file, 8 * (130 << 20))
    if kept is None:
        pytest.skip("needs the right to mount")
    assert 128 << 20 <= kept <= 144 << 20


def test_the_pool_keeps_nothing_if_the_address_space_is_limited(tmp_path):
    assert run(programs.kept_in_a_limited_address_space, tmp_path) < 32 << 20


@pytest.mark.parametrize("call", programs.CALLS_THAT_ALLOCATE)
def test_the_pool_returns_its_memory_before_an_allocation_fails(call, tmp_path):
    """The call succeeds, although there is no more memory than the pool has."""
    run(programs.call_with_the_memory_of_the_pool, tmp_path, call)


def test_out_of_memory_raises_the_error_of_torch_and_the_next_call_works(tmp_path):
    """This holds for the forward, with and without a mask, and the backward. No memory leaks."""
    run(programs.lack_of_memory, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_out_of_gpu_memory_raises_the_error_of_torch_and_the_next_call_works(
    dtype, precision, tmp_path
):
    run(programs.lack_of_gpu_memory, tmp_path, dtype, precision)


@pytest.mark.gpu
def test_out_of_gpu_memory_leaves_the_pool_of_the_cpu_alone(tmp_path):
    """The failed allocation does not return free blocks of the CPU to the system."""
    assert run(programs.freed_by_a_lack_of_gpu_memory, tmp_path) < 32 << 20


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
    """Such memory may come from another allocator, where the pool has none."""
    library = built_library(ALIGNED_TO_16, tmp_path)
    program = programs.results_in_memory_aligned_to_16_bytes
    run(program, tmp_path, start=python, LD_PRELOAD=library)


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
    library = built_library(BELOW_A_HUGE_PAGE, tmp_path)
    program = programs.results_in_blocks_below_a_huge_page
    run(program, tmp_path, library, start=python, LD_PRELOAD=library)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_forked_while_threads_use_the_pool_gives_right_results(tmp_path):
    """It has blocks of its own, even if a thread was in the pool's code at the fork."""
    run(programs.results_after_forks, tmp_path)


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
