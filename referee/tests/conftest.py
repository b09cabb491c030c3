"""Fixtures of the referee's tests, and their markers."""

import os
import tempfile
from functools import cache

import pytest

# OpenMP's threads would spin, and take cores from other tests. Set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch

SERVERS = {}  # the servers of `one_server`, by environment


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "slow: left out by default; -m slow runs these, -m '' all")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


@pytest.fixture(autouse=True)
def one_server(monkeypatch):
    """Let tests share a server: a new one takes seconds to import torch.

    A test with other environment variables gets another server.
    """
    from referee import engine

    new_server = engine.Server

    def shared_server(folder=""):
        if folder:  # graded files build extensions there; one folder is enough for all tests
            folder = folder_of_builds()
        # pytest sets PYTEST_CURRENT_TEST anew for each test; it makes no difference to a server.
        environment = str({**os.environ, "PYTEST_CURRENT_TEST": "", "folder": folder})
        server = SERVERS.get(environment)
        if server is None:
            server = new_server(folder)
            server.close = lambda: None  # the next test uses it again
            SERVERS[environment] = server
        server.count_as_own()
        server.walls = True
        return server

    monkeypatch.setattr(engine, "Server", shared_server)


@cache
def folder_of_builds():
    return tempfile.mkdtemp()
