"""Mixed calls of both modules from several threads: results stay right, and memory does not grow.

The test takes 5 s on each device, or KERNELS_SOAK_SECONDS, after a warm-up of the same length or
10 s. With `-s` it prints the number of calls and the memory.
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

from model import Model
from model_new import ModelNew
from referee.comparison.compare import first_mismatch
from tests.support.tensors import DTYPES, FLOATING, draw, linear_modules, step

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("KERNELS_SOAK_SECONDS", "5"))
THREADS = 4
# float32 tensors of the last size have more than 32 MiB. On a CPU their memory comes from our pool.
SIZES = [0, 1, 7, 1000, 40_000, 300_000, 9_000_000]
# How often each size is drawn.
WEIGHTS = [100, 100, 100, 100, 100, 30, 1]
SHAPES = [(1, 1), (7, 33), (64, 64), (65, 129), (33, 1024), (300, 257)]  # n, k
ROWS = [0, 1, 5, 64, 129]  # of x for Linear
# RSS varies by about this: buffers of torch and malloc for each thread, code that is loaded late.
SLACK = 128 << 20


def assert_equal(got, want):
    assert (got.dtype, got.device, got.shape) == (want.dtype, want.device, want.shape)
    assert first_mismatch(got, want) is None


class Caller:
    """The calls of one thread, which has its own random numbers and, on a GPU, its own stream."""

    def __init__(self, device, seed):
        self.device = device
        self.choose = random.Random(seed)
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
        """Draw a flat tensor, at any offset, with or without gaps."""
        size = self.choose.choices(SIZES, WEIGHTS)[0]
        dtype = self.choose.choice(dtypes)
        offset = self.choose.randrange(4)
        step = self.choose.choice([1, 1, 2])
        return draw((offset + size * step,), dtype, self.device)[offset::step]

    def relu(self):
        x = self.tensor(DTYPES)
        with torch.set_grad_enabled(self.choose.random() < 0.5):
            assert_equal(ModelNew()(x), Model()(x))

    def relu_gradient(self):
        x = self.tensor(FLOATING)
        assert_equal(*(step(module, x, torch.ones_like(x))[1] for module in (ModelNew(), Model())))

    def linear(self):
        """Use small integers: every sum is exact, so the order of additions does not matter."""
        n, k = self.choose.choice(SHAPES)
        dtype = self.choose.choice(FLOATING)
        ours, reference = self.modules[n, k, dtype]
        shape = (self.choose.choice(ROWS), k)
        with torch.no_grad():
            for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
                b.copy_(a.copy_(torch.randint(-1, 2, a.shape, device=self.device)))
        x = torch.randint(-2, 3, shape, device=self.device).to(dtype)
        if self.choose.random() < 0.5:
            with torch.no_grad():
                assert_equal(ours(x), reference(x))
            return
        grad_output = torch.randint(-1, 2, (len(x), n), device=self.device).to(dtype)
        results = (step(module, x, grad_output) for module in (ours, reference))
        for got, want in zip(*results, strict=True):
            assert_equal(got, want)


def call_for(callers, seconds):
    """Run all callers at once; raise the first error of any."""
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(len(callers)) as pool:
        for call in [pool.submit(caller.run, until) for caller in callers]:
            call.result()


def memory(device):
    """Return the sizes of this process's memory by name, in bytes.

    Free memory of the pool does not count, as the system may take it back.
    """
    gc.collect()
    with suppress(AttributeError):  # glibc returns freed blocks to the system
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


def test_results_stay_right_and_memory_does_not_grow(device):
    callers = [Caller(device, seed) for seed in range(THREADS)]
    call_for(callers, min(SECONDS, 10))  # until every kind of call has been made
    before = memory(device)
    call_for(callers, SECONDS)
    after = memory(device)
    print(f"{device}: {sum(caller.calls for caller in callers):,} calls from {THREADS} threads")
    for name, size in before.items():
        print(f"  {name}: {size >> 20:,} MiB before, {after[name] >> 20:,} MiB after")
        slack = SLACK if name == "RSS" else 0
        assert after[name] <= size + slack, name
