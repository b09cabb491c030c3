"""A solution in a process of its own, which can be asked, is killed in time, and leaves nothing.

The child may do what it likes: crash, hang, fork, flood its output, write to the pipe of replies.
Its messages are JSON with this side's token, within limits, or the bytes of a tensor in a
mapped file that it can neither shrink nor grow.
"""

import base64
import fcntl
import json
import mmap
import os
import pickle
import secrets
import selectors
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic
from typing import NoReturn

import torch

from referee.memory import free_bytes

ROOT = Path(__file__).resolve().parent.parent
BOOT = (  # files of the current folder are not taken for Python's own modules
    "import sys; sys.path = [sys.argv[1], *filter(None, sys.path)]; "
    "from referee.child.main import start; del sys.path[0]; start(int(sys.argv[2]))"
)
ARENA = 256 << 20  # bytes of the mapped file; pages that nobody touches take no memory
HALF = ARENA // 2
LONGEST_REPLY = 1 << 20
KEPT_OUTPUT = PART = 1 << 16  # bytes, of the end of what the child prints; and of a pipe's content
MEMORY_SHARE = 0.9
# OpenMP's threads would spin for milliseconds after they have finished, on the cores of the process
# that is timed next, or of the thread that they wait for.
THREADS = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}


class EndedError(Exception):
    """The child is gone; the arguments are its status, negative for a signal, and its output."""


class ForgedError(Exception):
    """A reply that the worker did not write."""


class LateError(Exception):
    """The deadline has passed."""


class RaisedError(Exception):
    """The solution raised; the argument describes it, as the worker does."""


class Reply(dict):
    """The worker's; a key that is missing was forged away."""

    def __missing__(self, key: str) -> NoReturn:
        raise ForgedError


class Server(subprocess.Popen):
    """A process of which those of solutions are forks; see `child.main`."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            super().__init__(
                [sys.executable, "-c", BOOT, str(ROOT), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env=THREADS | os.environ,
            )

    def fork(self, device: torch.device, most: int, descriptors: tuple[int, ...]) -> int:
        """A new process, within `reaping`, that may take so many bytes, or all for 0; its id.

        Raises:
            EndedError: the server has ended.
        """
        with suppress(ConnectionError):
            socket.send_fds(self._socket, [json.dumps([str(device), most]).encode()], descriptors)
            if pid := self._socket.recv(64):
                return int(pid)
        raise EndedError(self.wait(), "")

    def close(self) -> None:
        """Ends it; the processes that it forked go on."""
        self.kill()
        self.wait()
        self._socket.close()


class Remote:
    """The child. The deadline is of all requests together, by `monotonic`; inf for our own code."""

    def __init__(self, server: Server, device: torch.device, deadline: float = inf) -> None:
        self.deadline, self._device = deadline, device
        self._replied, self._printed, self._has_ended = b"", b"", False
        self._token = ""  # of the request that is not answered yet
        memory = os.memfd_create("referee", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(memory, ARENA)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        self._arena = torch.frombuffer(mmap.mmap(memory, ARENA), dtype=torch.uint8)
        self._outgoing, self._incoming = self._arena[:HALF], self._arena[HALF:]
        if device.type == "cuda":  # so that the GPU copies from and to it directly
            torch.cuda.cudart().cudaHostRegister(self._arena.data_ptr(), ARENA, 0)
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._output, output = os.pipe()
        most = 0 if deadline == inf else int(MEMORY_SHARE * free_bytes(torch.device("cpu")))
        theirs = (requests, replies, memory, output)
        try:
            self.pid = server.fork(device, most, theirs)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._replies, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)

    def ask(self, op: str, **arguments: object) -> dict:
        """A method of the worker by name, and what it returns.

        Raises:
            EndedError, ForgedError, LateError, RaisedError: there is no answer.
        """
        if self._token:
            self._reply()
        self.begin(op, **arguments)
        return self._reply()

    def begin(self, op: str, **arguments: object) -> None:
        """Sends a request. The next `ask` first waits for its reply, which is lost."""
        self._token = secrets.token_hex(8)
        request = {"op": op, "arguments": arguments, "token": self._token}
        with suppress(BrokenPipeError):  # it ended, which the reading finds out
            os.write(self._requests, json.dumps(request).encode() + b"\n")

    def _reply(self) -> dict:
        """What the worker returns to the latest request."""
        token, self._token = self._token, ""
        while b"\n" not in self._replied:
            if self._replies not in self._selector.get_map():
                raise EndedError(self._end(), self._printed.decode(errors="replace"))
            self._read(3600.0)  # a selector takes no inf
            if len(self._replied) > LONGEST_REPLY:
                raise ForgedError
        text, _, self._replied = self._replied.partition(b"\n")
        try:
            reply = json.loads(text)
            if reply.pop("token") != token or self._replied:
                raise ForgedError
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise ForgedError from None
        if "raised" in reply:
            raise RaisedError(reply["raised"])
        return Reply(reply)

    def put(self, *tensors: torch.Tensor) -> None:
        """Lays the bytes of flat tensors, one after the other, where the child finds them."""
        start = 0
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
            self._outgoing[start : start + len(flat)].copy_(flat)
            start += len(flat)

    def take(self, start: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """A copy of a tensor that the child laid down, on the device."""
        size = dtype.itemsize * torch.Size(shape).numel()
        there = self._incoming[start : start + size].to(self._device, copy=True)
        return there.view(dtype).view(shape)

    def waited(self) -> float:
        """Seconds that the child and this main thread waited for a CPU; 0 if that is not known."""
        paths = [Path(f"/proc/{pid}/schedstat") for pid in (self.pid, os.getpid())]
        with suppress(OSError, IndexError):
            return sum(int(path.read_text().split()[1]) for path in paths) * 1e-9
        return 0.0

    def close(self) -> None:
        """Kills the child."""
        if not self._has_ended:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if self._device.type == "cuda":
            torch.cuda.cudart().cudaHostUnregister(self._arena.data_ptr())
        self._selector.close()
        for descriptor in (self._requests, self._replies, self._output):
            os.close(descriptor)

    def _read(self, longest: float) -> None:
        """Waits at most so many seconds for a part of the replies or of the output."""
        left = self.deadline - monotonic()
        if left <= 0:
            raise LateError
        for key, _ in self._selector.select(min(left, longest)):
            data = os.read(key.fd, PART)
            if not data:
                self._selector.unregister(key.fd)
            elif key.fd == self._output:
                self._printed = (self._printed + data)[-KEPT_OUTPUT:]
            else:
                self._replied += data

    def _end(self) -> int:
        """The status with which it ended; it may have closed the pipe and still be alive."""
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._read(0.01)
        self._has_ended = True
        self._read(0)  # its last words, but not those of what it left behind
        return os.waitstatus_to_exitcode(ended[1])


def pack(value: object) -> str:
    """Any value as a text, for a request."""
    return base64.b64encode(pickle.dumps(value)).decode()
