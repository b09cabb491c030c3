"""A public harness's clock, and ours, on identical code."""

import pytest
import torch

from referee import harness
from referee.pairs import Modules, alternate, samplers_of
from referee.stats import speed_up
from referee.timing import Names


def test_slow_calls_are_counted_against_the_later_half():
    assert harness.count_slow([1.2] * 6 + [1.0] * 14) == 6
    assert harness.count_slow([1.0] * 20) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert harness.main([]) == 2
    assert "expected a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_referee_sees_no_difference_in_identical_code_after_memory_was_freed():
    x = torch.rand(2**29, device="cuda")
    names = Names(solution="candidate", eager="reference")
    for _ in range(2):  # the freed memory slows what comes next
        freed = torch.empty(2**33, dtype=torch.uint8, device="cuda").fill_(1)
        del freed
        torch.cuda.empty_cache()
        torch.relu(x)
        modules = Modules(names, torch.relu, torch.relu)
        candidate, reference = alternate(samplers_of(modules, x), longest=1.0).values()
        assert speed_up(reference, candidate)[0] == pytest.approx(1, abs=0.005)
