"""Mixed calls of both modules from several threads: results right, memory flat.

5 s on each device, or as many as the variable KERNELS_SOAK_SECONDS says, after as many or 10 s of
the same to warm up. Prints what it did (-s).
"""

import ctypes
import gc
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
from tensors import DTYPES, FLOATING, draw, linear_modules, step

from model import Model
from model_new import ModelNew
from referee.compare import first_mismatch

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("KERNELS_SOAK_SECONDS", "5"))
THREADS = 4
# The last is from 32 MiB of float32 on: memory of its own kind on a CPU.
SIZES = [0, 1, 7, 1000, 40_000, 300_000, 9_000_000]
WEIGHTS = [100, 100, 100, 100, 100, 30, 1]
SHAPES = [(1, 1), (7, 33), (64, 64), (65, 129), (33, 1024), (300, 257)]  # n, k
ROWS = [0, 1, 5, 64, 129]
# RSS that comes and goes: buffers of torch's and of malloc's for each thread, code met late.
SLACK = 128 << 20


def assert_equal(got, want):
    assert (got.dtype, got.device, got.shape) == (want.dtype, want.device, want.shape)
    assert first_mismatch(got, want) is None


class Caller:
    """One thread's calls, on a stream of its own on a GPU, with random numbers of its own."""

    def __init__(self, device, seed):
        self.device, self.choose = device, random.Random(seed)
        self.calls = 0
        self.modules = {
            (n, k, dtype): linear_modules(k, n, 2.0, dtype, device)
            for n, k in SHAPES
            for dtype in FLOATING
        }

    def run(self, until):
        on_gpu = self.device == "cuda"
        with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
            while time.monotonic() < until:
                self.choose.choice([self.relu, self.relu_gradient, self.linear])()
                self.calls += 1
            if on_gpu:
                torch.cuda.current_stream().synchronize()

    def tensor(self, dtypes):
        """Flat, at any offset, or with gaps."""
        size, dtype = self.choose.choices(SIZES, WEIGHTS)[0], self.choose.choice(dtypes)
        offset, step = self.choose.randrange(4), self.choose.choice([1, 1, 2])
        return draw((offset + size * step,), dtype, self.device)[offset::step]

    def relu(self):
        x = self.tensor(DTYPES)
        with torch.set_grad_enabled(self.choose.random() < 0.5):
            assert_equal(ModelNew()(x), Model()(x))

    def relu_gradient(self):
        x = self.tensor(FLOATING)
        assert_equal(*(step(module, x, torch.ones_like(x))[1] for module in (ModelNew(), Model())))

    def linear(self):
        """Small integers: every sum is exact, so that any two orders agree."""
        (n, k), dtype = self.choose.choice(SHAPES), self.choose.choice(FLOATING)
        mine, theirs = self.modules[n, k, dtype]
        shape = (self.choose.choice(ROWS), k)
        with torch.no_grad():
            for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
                b.copy_(a.copy_(torch.randint(-1, 2, a.shape, device=self.device)))
        x = torch.randint(-2, 3, shape, device=self.device).to(dtype)
        if self.choose.random() < 0.5:
            with torch.no_grad():
                return assert_equal(mine(x), theirs(x))
        grad_output = torch.randint(-1, 2, (len(x), n), device=self.device).to(dtype)
        results = (step(module, x, grad_output) for module in (mine, theirs))
        for got, want in zip(*results, strict=True):
            assert_equal(got, want)


def call_for(callers, seconds):
    """Runs all callers at once; raises the first error of any."""
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(len(callers)) as pool:
        for call in [pool.submit(caller.run, until) for caller in callers]:
            call.result()


def memory(device):
    """Bytes by name; those that the system may take back, as the CPU's page pool, do not count."""
    gc.collect()
    with suppress(AttributeError):  # what glibc keeps of blocks that were freed
        ctypes.CDLL(None).malloc_trim(0)
    found = {}
    if device == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream and thread
        torch.cuda.empty_cache()
        found["allocated"] = torch.cuda.memory_allocated()
        found["reserved"] = torch.cuda.memory_reserved()
    text = Path("/proc/self/smaps_rollup").read_text()
    sizes = {name: int(kB) << 10 for name, kB in re.findall(r"^(\w+): +(\d+) kB$", text, re.M)}
    found["RSS"] = sizes["Rss"] - sizes.get("LazyFree", 0)
    return found


def test_soak(device):
    callers = [Caller(device, seed) for seed in range(THREADS)]
    call_for(callers, min(SECONDS, 10))  # until every kind of call has been made
    before = memory(device)
    call_for(callers, SECONDS)
    after = memory(device)
    print(f"{device}: {sum(caller.calls for caller in callers):,} calls from {THREADS} threads")
    for name, size in before.items():
        print(f"  {name}: {size >> 20:,} MiB before, {after[name] >> 20:,} MiB after")
        assert after[name] <= size + (SLACK if name == "RSS" else 0), name
