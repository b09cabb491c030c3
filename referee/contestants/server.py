"""The server: a process that has imported torch and that forks the processes of contestants.

`child.main` is what runs in the server and in the forked processes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from referee.contestants import processes
from referee.contestants.errors import EndedError

PACKAGE = Path(__file__).resolve().parent.parent
# The module that runs in the server's process. This process only names it: child/ is above this
# part of the package.
SERVER_MODULE = "referee.child.main"
# The program of the server. Its arguments are the folder that contains the package `referee`, the
# module, and the descriptor of the server's socket.
SERVER_PROGRAM = """
import importlib
import sys

# Without "", the current folder: a file there could hide one of Python's own modules.
sys.path = [sys.argv[1], *filter(None, sys.path)]
module = importlib.import_module(sys.argv[2])
del sys.path[0]  # else graded files could import what is beside the package
module.start(int(sys.argv[3]))
"""
# So that OpenMP's threads do not spin after their work, see `referee/__init__.py`. Spinning threads
# of a contestant would also take cores from the thread that they wait for.
OPENMP_SETTINGS = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
ATTEMPTS = 2  # to fork a contestant: a solution may have ended the server before the first


class Server:
    """A process that has imported torch and that forks the contestants.

    A fork is faster than a new Python. If a solution ends the server, `fork` starts another.

    Args:
        builds: the folder in which graded files build extensions, each in a folder of its own; ""
            for the user's usual folder.

    Attributes:
        gives_walls: whether contestants get namespaces of their own, if the system allows that.
    """

    def __init__(self, builds: str = "") -> None:
        self.gives_walls = True
        self._builds = builds
        self._folders: dict[Path, str] = {}  # by a graded file, see `builds_folder`
        self._process, self._socket = _started_ahead.pop() if _started_ahead else _start_server()

    def builds_folder(self, file: Path) -> str:
        """Return where a graded file builds extensions; "" for the user's usual folder.

        Each file has a folder of its own. In a common one, it could find what another file has
        built under the same name, or wait for ever for the lock of a build that was killed. The
        folder is made when the file's turn comes, under a random name, so that no file graded
        before can have put anything into it.
        """
        if not self._builds:
            return ""
        if file not in self._folders:
            self._folders[file] = tempfile.mkdtemp(dir=self._builds)
        return self._folders[file]

    def fork(self, settings: dict, descriptors: tuple[int, ...]) -> tuple[int, int]:
        """Fork a process; the caller must be in a `with processes.subreaper()` block.

        Args:
            settings: "device", "role" and "most_bytes", see `child.main.start`.
            descriptors: the process's file descriptors: requests, replies, shared memory, output.

        Returns:
            The process's id, and the id of its namespace's init process, 0 if it has no namespace
            of its own.

        Raises:
            EndedError: the server has ended in all attempts.
        """
        servers_settings = {"walls": self.gives_walls, "builds": self._builds}
        request = json.dumps({**settings, **servers_settings}).encode()
        status = 0
        for _ in range(ATTEMPTS):
            ids = self._send(request, descriptors)
            if ids:
                pid, init_pid = ids
                return int(pid), int(init_pid)
            status = self._restart()
        raise EndedError(status, "")

    def close(self) -> None:
        """End the server's process; contestants go on."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        processes.referees_pids.discard(self._process.pid)

    def count_as_own(self) -> None:
        """Count the server's process among the referee's own again, see `processes.referees_pids`.

        The constructor has counted it. But the end of a `processes.subreaper()` block forgets the
        children that were there before it, such as a server that several tests share.
        """
        processes.referees_pids.add(self._process.pid)

    def _send(self, request: bytes, descriptors: tuple[int, ...]) -> list[bytes]:
        """Send a request to the server; return the two ids of its reply, [] if it has ended."""
        try:
            self._process.send_signal(signal.SIGCONT)  # a solution may have stopped it
            socket.send_fds(self._socket, [request], descriptors)
            return self._socket.recv(64).split()
        except ConnectionError:
            return []

    def _restart(self) -> int:
        """Start a server in place of one that has ended; return the old one's exit status."""
        status = self._process.wait()
        self.close()
        self._process, self._socket = _start_server()
        return status


# The process and the socket of the server that `start_ahead` has started, until a `Server` has it.
_started_ahead: list[tuple[subprocess.Popen, socket.socket]] = []


def start_ahead() -> None:
    """Start the process of the next `Server` already now.

    A program calls this before it imports torch itself, so that both imports take place at the same
    time. For that, this module must not import torch.
    """
    _started_ahead.append(_start_server())


def _start_server() -> tuple[subprocess.Popen, socket.socket]:
    """Start a server's process; return it and the socket through which it gets requests."""
    referees_end, servers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with servers_end:
        arguments = [str(PACKAGE.parent), SERVER_MODULE, str(servers_end.fileno())]
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER_PROGRAM, *arguments],
            pass_fds=[servers_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**OPENMP_SETTINGS, **os.environ},  # the user's own settings win
        )
    processes.referees_pids.add(process.pid)
    return process, referees_end
