"""Fixtures of the referee's tests, and their markers."""

import os

import pytest

# OpenMP's threads would spin, and take cores from other tests. Set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch

from referee.contestants import reading
from referee.testing.seeds import seed_only_what_is_there
from referee.testing.shared_server import share_server

seed_only_what_is_there()


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "slow: left out by default; -m slow runs these, -m '' all")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


@pytest.fixture(autouse=True)
def seed():
    """Give every test the same random numbers, in any order of the tests."""
    torch.manual_seed(0)


@pytest.fixture
def unreadable_processes(monkeypatch):
    """Play a system that forbids to read another process, so that results are copied."""

    def refuse(*_: int) -> None:
        raise reading.UnreadableError("Operation not permitted")

    monkeypatch.setattr(reading, "copy_memory", refuse)


@pytest.fixture(scope="session")
def folder_of_builds(tmp_path_factory):
    """Return the folder in which the graded files of all tests build their extensions."""
    return str(tmp_path_factory.mktemp("builds"))


@pytest.fixture(autouse=True)
def one_server(monkeypatch, folder_of_builds):
    """Let the tests share the referee's server."""
    share_server(monkeypatch, lambda: folder_of_builds)
