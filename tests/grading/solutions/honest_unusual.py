"""Rare things that an honest file may do: settings, pools, output, an operator of its own."""

import atexit
import functools
import gc
import logging
import multiprocessing
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import nn

try:
    import no_such_package
except ImportError:
    no_such_package = None

gc.disable()
atexit.register(print, "the end")
signal.signal(signal.SIGUSR1, lambda *_: None)
logging.basicConfig(level=logging.INFO)
torch.set_default_device("cpu")
torch.manual_seed(0)
pool = ThreadPoolExecutor(2)
assert list(pool.map(abs, [1, -1])) == [1, 1]
with multiprocessing.get_context("fork").Pool(1) as processes:
    assert processes.map(abs, [-1]) == [1]


@torch.library.custom_op("unusual::relu", mutates_args=())
def relu(x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(x, min=0)


@functools.lru_cache
def kernel(dtype: torch.dtype) -> functools.partial:
    return functools.partial(relu)


@dataclass(eq=False)
class ModelNew(nn.Module):
    inplace: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self.scratch = None

    def __call__(self, *args: torch.Tensor, **options: object) -> torch.Tensor:
        return super().__call__(*args, **options)

    def forward(self, *args: torch.Tensor, **options: object) -> torch.Tensor:
        [x] = args
        print("forward", x.shape)
        logging.info("forward")
        warnings.warn("forward", stacklevel=1)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.scratch = torch.empty_like(x).copy_(x)  # never returned
        torch.set_num_threads(threads)
        with torch.inference_mode():
            self.last = kernel(x.dtype)(self.scratch)
        return self.last
