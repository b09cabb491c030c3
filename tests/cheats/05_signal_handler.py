"""Kind 5: a signal's handler does the work when the timed call is over."""

import signal
import time

import torch
from common import Timed


def work(number: int, frame: object) -> None:
    torch.clamp_min(todo[0], 0, out=todo[1])
    time.sleep(0.05)  # as a larger input's work would take


signal.signal(signal.SIGALRM, work)


class ModelNew(Timed):
    def timed(self, x: torch.Tensor) -> torch.Tensor:
        global todo
        todo = x, torch.zeros_like(x)
        signal.setitimer(signal.ITIMER_REAL, 0.02)  # when the result is about to be read
        return todo[1]
