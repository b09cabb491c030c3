import os
import sys
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take other tests' time
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

SERVERS = {}  # of `one_server`, by the folder of their builds


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
    """Gradings in this process share a server for each environment: it imports torch."""
    from referee import engine

    def start(folder="", imports=(), start_one=engine.Server):
        if folder:  # graded files build there
            folder = str(SERVERS.setdefault("folder", tempfile.mkdtemp()))
        environment = str({**os.environ, "PYTEST_CURRENT_TEST": "", "folder": folder, "imports": imports})
        server = SERVERS.get(environment)
        if server is None:
            server = SERVERS[environment] = start_one(folder, imports)
            server.close = lambda: None
        server.adopt()
        server.walls = True
        return server

    monkeypatch.setattr(engine, "Server", start)
