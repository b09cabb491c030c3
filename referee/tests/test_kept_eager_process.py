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
from referee.tests.graded import remember_resources
from referee.tests.texts import IMPORTS, reference
from referee.times.timing import RoundLimit

pytestmark = pytest.mark.slow

LINEAR = reference("return self.fc(x)", "[torch.rand(64, 256)]", "self.fc = nn.Linear(256, 192)")
RELU = reference("return torch.relu(x)", "[torch.rand(1024, 262144)]")  # 1 GiB


@pytest.fixture
def all_resources(monkeypatch):
    """Return a list to which each new engine's resources are added."""
    return remember_resources(monkeypatch)


def prepare(text, path, device, server, kept_process, all_resources, before_keeping=None):
    """Time eager alone on a problem, and keep its process; return its id."""
    path.write_text(IMPORTS + text)
    problem = Problem(path.stem, load(path), torch.device(device))
    engine = Engine(problem, server, Options(RoundLimit(3), 120.0), lambda *_: None, kept_process)
    try:
        engine.prepare()
        # The list forgets the resources, so that their memory is freed.
        [eager, *_] = all_resources.pop().eager.members
        if before_keeping:
            before_keeping(eager)
        engine.keep_eager()
        return eager.contestant.pid
    finally:
        engine.close()


def free_bytes():
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kept_process_takes_the_next_problem_and_has_freed_the_last_ones_memory(
    tmp_path, all_resources
):
    with (
        referee_at_work(separate_builds=True) as server,
        closing(KeptEagerProcess()) as kept_process,
    ):
        pids, free = [], []
        for name, text in (("linear", LINEAR), ("relu", RELU), ("relu_again", RELU)):
            pids.append(
                prepare(text, tmp_path / f"{name}.py", "cuda", server, kept_process, all_resources)
            )
            free.append(free_bytes())
    assert len(set(pids)) == 1
    assert free[0] - free[2] < 1 << 28


def test_a_process_that_has_ended_is_replaced(device, tmp_path, all_resources):
    """On a CPU no process is kept, so each problem has new ones."""

    def end(eager):
        os.kill(eager.contestant.pid, signal.SIGKILL)

    with (
        referee_at_work(separate_builds=True) as server,
        closing(KeptEagerProcess()) as kept_process,
    ):
        first = prepare(
            LINEAR, tmp_path / "first.py", device, server, kept_process, all_resources, end
        )
        assert (
            prepare(LINEAR, tmp_path / "second.py", device, server, kept_process, all_resources)
            != first
        )
