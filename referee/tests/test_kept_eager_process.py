"""Eager's process is kept between two problems on a GPU."""

import os
import signal
from contextlib import closing

import pytest
import torch

from referee.eager_processes import KeptEagerProcess
from referee.engine import Engine, referee_at_work
from referee.grading import Options
from referee.reference.file import load
from referee.reference.problem import Problem
from referee.testing.graded import remember_resources
from referee.testing.texts import IMPORTS, reference
from referee.times.round_limit import RoundLimit

pytestmark = pytest.mark.slow

LINEAR = reference("return self.fc(x)", "[torch.rand(64, 256)]", "self.fc = nn.Linear(256, 192)")
RELU = reference("return torch.relu(x)", "[torch.rand(1024, 262144)]")  # 1 GiB


@pytest.fixture
def time_and_keep(tmp_path, monkeypatch):
    """Return a function that times eager alone on a problem, and then keeps eager's process.

    The function returns the process's id. All its calls share a server and the kept process.
    """
    all_resources = remember_resources(monkeypatch)

    def time_and_keep_eager(text, device, before_keeping=lambda eager: None):
        path = tmp_path / "problem.py"
        path.write_text(IMPORTS + text)
        problem = Problem("problem", load(path), torch.device(device))
        options = Options(RoundLimit(3), 120.0)
        engine = Engine(problem, server, options, lambda *_: None, kept_process)
        try:
            engine.prepare()
            # The list forgets the resources, so that their memory is freed.
            [eager, *_] = all_resources.pop().eager.members
            before_keeping(eager)
            engine.keep_eager()
            return eager.pid
        finally:
            engine.close()

    with (
        referee_at_work(separate_builds=True) as server,
        closing(KeptEagerProcess()) as kept_process,
    ):
        yield time_and_keep_eager


def free_bytes():
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kept_process_takes_the_next_problem_and_has_freed_the_last_ones_memory(time_and_keep):
    pids, free = [], []
    for text in (LINEAR, RELU, RELU):
        pids.append(time_and_keep(text, "cuda"))
        free.append(free_bytes())
    assert len(set(pids)) == 1
    assert free[0] - free[2] < 1 << 28


def test_a_process_that_has_ended_is_replaced(device, time_and_keep):
    """On a CPU no process is kept, so each problem has new ones."""

    def end(eager):
        os.kill(eager.pid, signal.SIGKILL)

    first_pid = time_and_keep(LINEAR, device, before_keeping=end)
    second_pid = time_and_keep(LINEAR, device)
    assert second_pid != first_pid
