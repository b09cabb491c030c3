import os
import sys
import tempfile
from pathlib import Path

import pytest

# OpenMP's threads would spin, and take cores from other tests. Set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

SERVERS = {}  # of `one_server`, by environment


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
    """Let tests with the same environment share a server: a new one takes seconds to import torch.

    A shared server builds extensions in one folder for all tests.
    """
    from referee import engine

    def start(folder="", imports=(), start_one=engine.Server):
        if folder:
            folder = str(SERVERS.setdefault("folder", tempfile.mkdtemp()))
        settings = {"PYTEST_CURRENT_TEST": "", "folder": folder, "imports": imports}
        environment = str({**os.environ, **settings})
        server = SERVERS.get(environment)
        if server is None:
            server = SERVERS[environment] = start_one(folder, imports)
            server.close = lambda: None
        server.count_as_own()
        server.walls = True
        return server

    monkeypatch.setattr(engine, "Server", start)
