"""Kind 5: works on a stream of its own, while the timed one flushes the L2 before the call."""

import torch
from common import Timed

STREAM = torch.cuda.Stream()


class ModelNew(Timed):
    def timed(self, x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(STREAM):
            out = torch.relu(x)
        torch.cuda.current_stream().wait_stream(STREAM)
        return out
