"""The referee's side of a process that runs a solution, or eager.

The process is stopped whenever nothing is asked of it. A request goes like this:

    the request is written, while the process is stopped
    the clock starts; SIGCONT
    the process reads the request, works, and writes its reply
    SIGSTOP, to the process and all that it started; all of them have stopped
    the clock stops
    the referee reads what it wants, in the memory of the stopped process

So a solution never runs while its clock does not, but for requests that nobody times: to import
the file, to construct its module, and to free results. The next inputs are not drawn yet at these
times. The referee believes nothing in a reply. A process that forges a reply is only stopped
sooner, and is judged by what its memory holds then.
"""

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic, perf_counter
from typing import NoReturn

import torch

from referee import namespaces, processes
from referee.memory import free_bytes, give_back_unused
from referee.reading import Reader
from referee.shared import Pool

PACKAGE = Path(__file__).resolve().parent
BOOT = (  # files of the current folder are not taken for Python's own modules
    "import sys; sys.path = [sys.argv[1], *filter(None, sys.path)]; "
    "from referee.child.main import start; del sys.path[0]; start(int(sys.argv[2]), sys.argv[3:])"
)
LONGEST_REPLY = 1 << 22  # bytes
KEPT_OUTPUT = 1 << 16  # bytes, of the end of what the process prints
READ_BYTES = 1 << 16  # at most that many are read from a pipe at a time
MEMORY_SHARE = 0.9  # of the free memory, that a solution may allocate
# OpenMP's threads would spin for milliseconds after they have finished, on the cores of the process
# that is timed next, or of the thread that they wait for.
THREADS = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}


class EndedError(Exception):
    """The process is gone; the arguments are its status, negative for a signal, and its output."""


class ForgedError(Exception):
    """A reply that makes no sense."""


class LateError(Exception):
    """The deadline has passed."""


class RaisedError(Exception):
    """The solution raised; the argument describes it, as the child does."""


class Reply(dict):
    """A process's reply. A key that is missing was forged away."""

    def __missing__(self, key: str) -> NoReturn:
        """Raise ForgedError."""
        raise ForgedError


class Server:
    """A process that has imported torch, and of which those of contestants are forks.

    It starts anew where a solution has ended it.

    Args:
        folder: in which graded files build extensions; "" for the user's own.
        imports: modules that it imports, so that no contestant has to.

    Attributes:
        walls: whether processes get namespaces of their own, where the system allows it.
    """

    def __init__(self, folder: str = "", imports: tuple[str, ...] = ()) -> None:
        self.walls = True
        self._imports = imports
        self._environment = THREADS | os.environ
        if folder:
            self._environment["TORCH_EXTENSIONS_DIR"] = folder
        self._process, self._socket = _start_server(self._environment, imports)

    def fork(self, about: dict, descriptors: tuple[int, ...]) -> tuple[int, int]:
        """Return the id of a new process, within `processes.reaping`.

        Returns:
            It, and the id of the first process of its namespace, 0 if it has none of its own.

        Raises:
            EndedError: the server ends at once.
        """
        for _ in range(2):
            with suppress(ConnectionError):
                self._process.send_signal(signal.SIGCONT)  # a solution may have stopped it
                request = json.dumps(about | {"walls": self.walls}).encode()
                socket.send_fds(self._socket, [request], descriptors)
                if ids := self._socket.recv(64).split():
                    return int(ids[0]), int(ids[1])
            status = self._process.wait()
            self.close()
            self._process, self._socket = _start_server(self._environment, self._imports)
        raise EndedError(status, "")

    def is_there(self) -> bool:
        """Return whether its process is still there."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it; the processes that it forked go on."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        processes.known.discard(self._process.pid)

    def adopt(self) -> None:
        """Count its process among the referee's own."""
        processes.known.add(self._process.pid)


def _start_server(
    environment: dict[str, str], imports: tuple[str, ...]
) -> tuple[subprocess.Popen, socket.socket]:
    """Start a server's process; return it, and the socket on which it takes requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(PACKAGE.parent), str(theirs.fileno()), *imports],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
    processes.known.add(process.pid)
    return process, ours


class Contestant:
    """A process under the referee.

    Args:
        server: forks it.
        pool: memory that it maps.
        device: on which it computes.
        deadline: of all requests together, by `monotonic`; it moves by the time for which the
            process is stopped. inf for eager, which is our own code.

    Attributes:
        pid: the process.
        has_walls: whether it is in a namespace of processes of its own.
        seconds: of the last request, from "go on" until all of it had stopped again.
        reader: reads its results.
        span: the addresses at which it maps the pool.
    """

    def __init__(
        self, server: Server, pool: Pool, device: torch.device, deadline: float = inf
    ) -> None:
        self.deadline = deadline
        self.seconds = 0.0
        self._device = device
        self._replied = b""  # bytes of replies that were read, and belong to no complete line yet
        self._printed = b""
        self._has_ended = False
        self._is_closed = False
        self._stopped_at = monotonic()
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._output, output = os.pipe()
        os.set_blocking(self._requests, False)
        is_solution = deadline < inf
        most_bytes = 0  # no limit
        if is_solution:
            most_bytes = int(MEMORY_SHARE * free_bytes(torch.device("cpu")))
        about = {"device": str(device), "most_bytes": most_bytes}
        try:
            descriptors = requests, replies, pool.descriptor, output
            self.pid, self._first = server.fork(about, descriptors)
        finally:
            for descriptor in (requests, replies, output):
                os.close(descriptor)
        if not is_solution:
            processes.known.add(self.pid)
        self.has_walls = self._first != 0
        if self.has_walls:
            processes.known.add(self._first)
        self._tree = processes.Tree(self.pid, is_solution, self._first)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._replies, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)
        self.reader = Reader(self.pid, device)
        try:
            first_reply = self._receive("")  # no code of the solution's has run yet
        except BaseException:
            self.close()
            raise
        self.span = tuple(first_reply["span"])
        self._tree.stop()
        self._stopped_at = monotonic()

    def ask(
        self, op: str, look: Callable[[dict], object] | None = None, **arguments: object
    ) -> dict:
        """Ask for a method of the child's worker by name, and return what it returns.

        Args:
            op: the method.
            look: is called with the reply when the process has stopped, and before the clock stops.
            arguments: of the method.

        Raises:
            EndedError, ForgedError, LateError, RaisedError: there is no answer.
        """
        token = secrets.token_hex(8)
        request = {"op": op, "arguments": arguments, "token": token}
        left = self._write(json.dumps(request).encode() + b"\n")
        if self._device.type == "cuda":  # what was written for it is there, what it wrote is read
            torch.cuda.synchronize(self._device)
            give_back_unused(self._device)
        self.deadline += monotonic() - self._stopped_at  # the referee's own work is nobody's fault
        start = perf_counter()
        self._tree.go_on()
        try:
            if left:
                self._write_all(left)
            reply = self._receive(token)
            if "calls" in reply and len(reply["calls"]) != len(arguments.get("inputs", [])):
                raise ForgedError
        finally:
            if not self._has_ended:
                self._tree.stop()
            self._stopped_at = monotonic()
        if look:
            look(reply)
        self.seconds = perf_counter() - start
        return reply

    def printed(self) -> str:
        """Return the end of what it has printed."""
        return self._printed.decode(errors="replace")

    def close(self) -> None:
        """End it, with everything that it started; a second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._tree.end()
        if not self._has_ended:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        if self.has_walls:
            namespaces.end(self._first)
            processes.known.discard(self._first)
        processes.known.discard(self.pid)
        self.reader.close()
        self._selector.close()
        for descriptor in (self._requests, self._replies, self._output):
            os.close(descriptor)

    def _write(self, data: bytes) -> bytes:
        """Write as much of a request as the pipe takes; return the rest."""
        while data:
            try:
                data = data[os.write(self._requests, data) :]
            except BlockingIOError:
                return data
            except BrokenPipeError:  # it ended, which the reading finds out
                return b""
        return data

    def _write_all(self, data: bytes) -> None:
        """Write the rest of a long request while the process reads it."""
        while data:
            if monotonic() > self.deadline:
                raise LateError
            left = self._write(data)
            if left == data:
                self._read(0.001)
            data = left

    def _receive(self, token: str) -> Reply:
        """Return the reply to the request with this token.

        Raises:
            EndedError, ForgedError, LateError, RaisedError: as `ask` does.
        """
        while b"\n" not in self._replied:
            if self._replies not in self._selector.get_map():
                raise EndedError(self._wait_for_status(), self.printed())
            self._read(3600.0)  # a selector takes no inf
            if len(self._replied) > LONGEST_REPLY:
                raise ForgedError
        text, _, self._replied = self._replied.partition(b"\n")
        try:
            reply = json.loads(text)
            is_right = reply.pop("token") == token and not self._replied
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise ForgedError from None
        if not is_right or not _has_right_types(reply):
            raise ForgedError
        if "raised" in reply:
            raise RaisedError(reply["raised"])
        return Reply(reply)

    def _read(self, longest: float) -> None:
        """Wait at most so many seconds for a part of the replies or of the output."""
        left = self.deadline - monotonic()
        if left <= 0:
            raise LateError
        for key, _ in self._selector.select(min(left, longest)):
            data = os.read(key.fd, READ_BYTES)
            if not data:
                self._selector.unregister(key.fd)
            elif key.fd == self._output:
                self._printed = (self._printed + data)[-KEPT_OUTPUT:]
            else:
                self._replied += data

    def _wait_for_status(self) -> int:
        """Return the status with which it ends; it may have closed the pipe and still be alive."""
        pid = 0
        while not pid:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if not pid:
                self._read(0.01)
        self._has_ended = True
        with suppress(LateError):
            self._read(0)  # its last words, but not those of what it left behind
        return os.waitstatus_to_exitcode(status)


def _has_right_types(reply: dict) -> bool:
    """Return whether the parts of a reply are dictionaries and lists where its readers expect them.

    What the dictionaries say is checked where it is used.
    """
    calls = reply.get("calls", [])
    if not _is_list_of_dicts(calls) or not _is_list_of_dicts(reply.get("state", [])):
        return False
    if not isinstance(reply.get("raised", {}), dict):
        return False
    return all(_is_list_of_dicts(call.get("results")) for call in calls)


def _is_list_of_dicts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(part, dict) for part in value)


def died(status: int) -> bool:
    """Return whether a status is that of a process that was killed, as for want of memory."""
    return status == -signal.SIGKILL
