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
from pathlib import Path
from time import monotonic, sleep
from typing import NoReturn

import torch

from referee.memory import free_bytes
from referee.processes import waited

ROOT = Path(__file__).resolve().parent.parent
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from referee.child.main import start; "
    "sys.path.remove(sys.argv[1]); start(int(sys.argv[2]))"
)
ARENA = 256 << 20  # bytes of the mapped file; pages that nobody touches take no memory
HALF = ARENA // 2
LONGEST_REPLY = 1 << 20
KEPT_OUTPUT = 1 << 16  # of what the child prints, of its beginning and of its end
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


class Server:
    """A process of which those of solutions are forks; see `child.server`."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, str(ROOT), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env=THREADS | os.environ,
            )
        self.pid = self._process.pid

    def fork(self, limits: dict, descriptors: tuple[int, ...]) -> int:
        """A new process, within `reaping`; its id.

        Raises:
            EndedError: the server has ended.
        """
        with suppress(ConnectionError):
            socket.send_fds(self._socket, [json.dumps(limits).encode()], descriptors)
            if pid := self._socket.recv(64):
                return int(pid)
        raise EndedError(self._process.wait(), "")

    def has_ended(self) -> bool:
        """Whether somebody killed it."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Ends it; the processes that it forked go on."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


class Remote:
    """The child, and what it printed.

    Args:
        server: forks it.
        device: where the solution computes.
        deadline: of all requests together, by `monotonic`; None for code of ours.
    """

    def __init__(self, server: Server, device: torch.device, deadline: float | None = None) -> None:
        self.deadline, self._buffer = deadline, b""
        self._first, self._last = b"", b""
        self._status: int | None = None
        memory = os.memfd_create("referee", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(memory, ARENA)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        self._map = mmap.mmap(memory, ARENA)
        self._arena = torch.frombuffer(self._map, dtype=torch.uint8)
        self._outgoing, self._incoming = self._arena[:HALF], self._arena[HALF:]
        self._device = device
        if device.type == "cuda":  # so that the GPU copies from and to it directly
            torch.cuda.cudart().cudaHostRegister(self._arena.data_ptr(), ARENA, 0)
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._output, output = os.pipe()
        limits = {"device": str(device), "bytes": 0}
        if deadline is not None:
            limits["bytes"] = int(MEMORY_SHARE * free_bytes(torch.device("cpu")))
        theirs = (requests, replies, memory, output)
        try:
            self.pid = server.fork(limits, theirs)  # the process id
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._replies, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)

    @property
    def printed(self) -> str:
        """The child's output, without its middle where that was long."""
        return (self._first + self._last).decode(errors="replace")

    def ask(self, op: str, **arguments: object) -> dict:
        """A method of the worker by name, and what it returns.

        Raises:
            EndedError, ForgedError, LateError, RaisedError: there is no answer.
        """
        token = secrets.token_hex(8)
        line = json.dumps({"op": op, "arguments": arguments, "token": token}).encode() + b"\n"
        if self._buffer:
            raise ForgedError
        with suppress(BrokenPipeError):  # it ended, which the reading finds out
            os.write(self._requests, line)
        while b"\n" not in self._buffer:
            self._wait()
        text, _, self._buffer = self._buffer.partition(b"\n")
        try:
            reply = json.loads(text)
            if reply.pop("token") != token or self._buffer:
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
        if size == 0:
            return torch.empty(shape, dtype=dtype, device=self._device)
        there = self._incoming[start : start + size].to(self._device, copy=True)
        return there.view(dtype).view(shape)

    def waited(self) -> float:
        """Seconds that the child's and this process's main thread were ready but without a CPU."""
        return waited(self.pid) + waited(os.getpid())

    def close(self) -> None:
        """Kills the child."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if self._device.type == "cuda":
            torch.cuda.cudart().cudaHostUnregister(self._arena.data_ptr())
        self._selector.close()
        for descriptor in (self._requests, self._replies, self._output):
            os.close(descriptor)

    def _wait(self) -> None:
        """Takes in what comes next, of the replies or of the output."""
        left = None if self.deadline is None else self.deadline - monotonic()
        if left is not None and left <= 0:
            raise LateError
        ready = {key.fileobj for key, _ in self._selector.select(left)}
        if self._output in ready:
            self._drain()
        if self._replies in ready:
            data = os.read(self._replies, 1 << 16)
            self._buffer += data
            if len(self._buffer) > LONGEST_REPLY:
                raise ForgedError
            if not data:
                raise EndedError(self._end(), self.printed)

    def _drain(self) -> None:
        data = os.read(self._output, 1 << 16)
        if not data:
            self._selector.unregister(self._output)
        room = KEPT_OUTPUT - len(self._first)
        self._first += data[:room]
        self._last = (self._last + data[room:])[-KEPT_OUTPUT:]

    def _end(self) -> int:
        """The status with which it ended; it may have closed the pipe and still be alive."""
        self._selector.unregister(self._replies)
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if self.deadline is not None and monotonic() > self.deadline:
                raise LateError
            if self._selector.get_map() and self._selector.select(0.01):
                self._drain()
            else:
                sleep(0.01)
        self._status = os.waitstatus_to_exitcode(ended[1])
        for _ in range(KEPT_OUTPUT >> 8):  # its last words, but not those of what it left behind
            if not (self._selector.get_map() and self._selector.select(0)):
                break
            self._drain()
        return self._status


def pack(value: object) -> str:
    """Any value as a text, for a request."""
    return base64.b64encode(pickle.dumps(value)).decode()
