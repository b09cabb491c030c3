"""One server of the referee for many tests: a new one takes seconds to import torch.

The server is the process from which the referee forks the processes of graded solutions.
"""

import os
from collections.abc import Callable

import pytest

from referee import engine

SERVERS: dict[str, engine.Server] = {}  # by the environment and the folder they run with


def share_server(monkeypatch: pytest.MonkeyPatch, folder_of_builds: Callable[[], str]) -> None:
    """Let a test take the server of the tests before it.

    A test with other environment variables gets another server.

    Args:
        monkeypatch: pytest's fixture.
        folder_of_builds: returns the folder in which the graded files of all tests build their
            extensions.
    """
    new_server = engine.Server

    def shared_server(folder: str = "") -> engine.Server:
        if folder:
            folder = folder_of_builds()
        # pytest sets PYTEST_CURRENT_TEST anew for each test; it makes no difference to a server.
        environment = str({**os.environ, "PYTEST_CURRENT_TEST": "", "folder": folder})
        server = SERVERS.get(environment)
        if server is None:
            server = new_server(folder)
            server.close = lambda: None  # the next test uses it again
            server.builds_folder = lambda _, folder=folder: folder  # what it has built, too
            SERVERS[environment] = server
        server.count_as_own()
        server.gives_walls = True
        return server

    monkeypatch.setattr(engine, "Server", shared_server)
