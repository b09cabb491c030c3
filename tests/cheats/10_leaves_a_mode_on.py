"""Kind 10: a plain tensor, and a mode that computes when somebody looks at it."""

import torch
from common import Timed
from torch.overrides import TorchFunctionMode


class Late(TorchFunctionMode):
    todo = ()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.todo:
            (x, out), self.todo = self.todo, ()
            torch.clamp_min(x, 0, out=out)
        return func(*args, **(kwargs or {}))


class ModelNew(Timed):
    def timed(self, x: torch.Tensor) -> torch.Tensor:
        mode, out = Late(), torch.empty_like(x)
        mode.__enter__()
        mode.todo = x, out
        return out
