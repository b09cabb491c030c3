"""Contestants: the processes in which a solution or eager runs, as the referee sees them.

A contestant is stopped except while it answers a request: "When does the clock run?" in README.md
has a picture of a request.

The referee believes nothing in a reply. A process that replies before its results are complete only
stops its clock earlier: the referee compares what the process's memory holds.
"""

import json
import os
import secrets
import selectors
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import monotonic, perf_counter
from typing import NoReturn

import torch

from referee.contestants import namespaces, processes
from referee.contestants.memory import free_bytes, give_back_unused
from referee.contestants.reading import Reader
from referee.contestants.server import EndedError, Server
from referee.contestants.shared import Pool

MAX_REPLY_BYTES = 1 << 22
KEPT_OUTPUT_BYTES = 1 << 16  # of what the process prints, the end is kept
MAX_READ_BYTES = 1 << 16  # of one read from a pipe
MEMORY_SHARE = 0.9  # the part of the free memory that a solution may allocate


class ForgedError(Exception):
    """The reply cannot be the worker's: the solution has sent or changed it."""


class LateError(Exception):
    """The deadline has passed."""


class UnstoppableError(EndedError):
    """The process was killed because something in its tree did not stop."""


class RaisedError(Exception):
    """The solution has raised an exception; the argument is the child's description of it."""


class Reply(dict):
    """A contestant's reply. The worker always sends all keys: a missing one means forgery."""

    def __missing__(self, key: str) -> NoReturn:
        """Raise ForgedError."""
        raise ForgedError


@dataclass(frozen=True)
class _Pipes:
    """The referee's ends of the three pipes to a contestant: file descriptors.

    Attributes:
        requests: the referee writes requests here, without blocking.
        replies: the referee reads replies here.
        output: the referee reads here what the process prints.
    """

    requests: int
    replies: int
    output: int

    @classmethod
    def open(cls) -> tuple["_Pipes", tuple[int, int, int]]:
        """Return the referee's ends and the contestant's ends in the same order."""
        contestants_requests, requests = os.pipe()
        replies, contestants_replies = os.pipe()
        output, contestants_output = os.pipe()
        os.set_blocking(requests, False)
        contestants_ends = contestants_requests, contestants_replies, contestants_output
        return cls(requests, replies, output), contestants_ends

    def close(self) -> None:
        """Close the referee's ends."""
        for descriptor in (self.requests, self.replies, self.output):
            os.close(descriptor)


class Contestant:
    """A process that runs a solution or eager, stopped except while it answers a request.

    Args:
        server: forks the process.
        pool: the shared memory, which the process maps.
        device: where it computes.
        deadline: when a solution must have answered all its requests, by `time.monotonic`. While
            the process is stopped, the deadline moves on, so only its running time counts. None is
            for eager, which has no deadline and no limits on its memory and files.

    Attributes:
        pid: the process's id.
        has_walls: whether it is in a PID namespace of its own.
        seconds: the wall time of the last request: from SIGCONT until the whole tree had stopped,
            and `read_early` had returned.
        reader: reads results in the process's memory.
        span: the addresses at which the process maps the pool, see `shared.Mapping`.
    """

    def __init__(
        self, server: Server, pool: Pool, device: torch.device, deadline: float | None = None
    ) -> None:
        is_solution = deadline is not None
        self.deadline = deadline if is_solution else inf
        self.seconds = 0.0
        self._device = device
        self._unparsed = b""  # what was read from the pipe of replies and is no whole line yet
        self._printed = b""
        self._has_ended = False  # the process was waited for
        self._is_closed = False
        self._stopped_at = monotonic()
        self._pipes, contestants_ends = _Pipes.open()
        try:
            self.pid, self._init_pid = _fork(server, pool, device, is_solution, contestants_ends)
        finally:
            for descriptor in contestants_ends:
                os.close(descriptor)
        if not is_solution:
            processes.own_pids.add(self.pid)
        self.has_walls = self._init_pid != 0
        if self.has_walls:
            processes.own_pids.add(self._init_pid)
        self._tree = processes.Tree(self.pid, is_solution, self._init_pid)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipes.replies, selectors.EVENT_READ)
        self._selector.register(self._pipes.output, selectors.EVENT_READ)
        self.reader = Reader(self.pid, device, pool)
        try:
            first_reply = self._receive(token="")  # not forged: no solution's code has run yet
        except BaseException:
            self.close()
            raise
        self.span = tuple(first_reply["span"])
        self._stop()
        self._stopped_at = monotonic()

    def ask(
        self, op: str, read_early: Callable[[dict], object] | None = None, **arguments: object
    ) -> dict:
        """Have the process call a method of its `child.worker.Worker`; return the method's reply.

        Args:
            op: the method's name.
            read_early: is called with the reply after the process has stopped and before the clock
                stops.
            arguments: the method's arguments; JSON must be able to hold them.

        Raises:
            EndedError: the process has ended.
            UnstoppableError: the process does not stop.
            ForgedError: the reply is not the worker's.
            LateError: the deadline has passed.
            RaisedError: the method has raised.
        """
        token = secrets.token_hex(8)
        request = {"op": op, "arguments": arguments, "token": token}
        rest = self._write(json.dumps(request).encode() + b"\n")
        if self._device.type == "cuda":
            # The GPU must have done the referee's own work: inputs are written, results are read.
            torch.cuda.synchronize(self._device)
            give_back_unused(self._device)
        self.deadline += monotonic() - self._stopped_at
        start = perf_counter()
        self._tree.go_on()
        try:
            if rest:
                self._write_all(rest)
            reply = self._receive(token)
            if "calls" in reply:
                requested_calls = len(arguments.get("inputs", []))
                if len(reply["calls"]) != requested_calls:
                    raise ForgedError
        finally:
            if not self._has_ended:
                self._stop()
            self._stopped_at = monotonic()
        if read_early:
            read_early(reply)
        self.seconds = perf_counter() - start
        return reply

    def printed(self) -> str:
        """Return the end of what the process has printed."""
        return self._printed.decode(errors="replace")

    def close(self) -> None:
        """End the process and everything that it started; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._tree.end()
        if not self._has_ended:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        if self.has_walls:
            namespaces.end(self._init_pid)
            processes.own_pids.discard(self._init_pid)
        processes.own_pids.discard(self.pid)
        self.reader.close()
        self._selector.close()
        self._pipes.close()

    def _stop(self) -> None:
        """Stop the process and all that it started; raise UnstoppableError if one does not stop."""
        if not self._tree.stop():
            raise UnstoppableError(-signal.SIGKILL, self.printed())

    def _write(self, data: bytes) -> bytes:
        """Write as much of a request as the pipe can hold; return the rest."""
        while data:
            try:
                data = data[os.write(self._pipes.requests, data) :]
            except BlockingIOError:  # the pipe is full
                return data
            except BrokenPipeError:  # the process has ended; `_receive` will raise EndedError
                return b""
        return data

    def _write_all(self, data: bytes) -> None:
        """Write the rest of a long request while the process reads it."""
        while data:
            if monotonic() > self.deadline:
                raise LateError
            rest = self._write(data)
            if rest == data:
                self._read(max_seconds=0.001)
            data = rest

    def _receive(self, token: str) -> Reply:
        """Wait for the reply to the request with this token and return it.

        Raises:
            EndedError, ForgedError, LateError, RaisedError: as `ask` does.
        """
        while b"\n" not in self._unparsed:
            if self._pipes.replies not in self._selector.get_map():  # the pipe has ended
                raise EndedError(self._wait_for_status(), self.printed())
            self._read(max_seconds=3600.0)  # a selector accepts no inf
            if len(self._unparsed) > MAX_REPLY_BYTES:
                raise ForgedError
        text, _, self._unparsed = self._unparsed.partition(b"\n")
        try:
            reply = json.loads(text)
            is_answer = reply.pop("token") == token
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise ForgedError from None
        has_more = bool(self._unparsed)  # the worker writes one line for each request
        if not is_answer or has_more or not _has_right_types(reply):
            raise ForgedError
        if "raised" in reply:
            raise RaisedError(reply["raised"])
        return Reply(reply)

    def _read(self, max_seconds: float) -> None:
        """Read the next part of a reply or of the output; wait for it at most so many seconds.

        Raises:
            LateError: the deadline has passed.
        """
        seconds_left = self.deadline - monotonic()
        if seconds_left <= 0:
            raise LateError
        for key, _ in self._selector.select(min(seconds_left, max_seconds)):
            data = os.read(key.fd, MAX_READ_BYTES)
            if not data:
                self._selector.unregister(key.fd)
            elif key.fd == self._pipes.output:
                self._printed = (self._printed + data)[-KEPT_OUTPUT_BYTES:]
            else:
                self._unparsed += data

    def _wait_for_status(self) -> int:
        """Wait for the process's end and return its exit status.

        The process may still be alive: it may only have closed its pipe of replies. Its output is
        read meanwhile because a full pipe would keep it from ending.

        Raises:
            LateError: the deadline has passed.
        """
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        while not pid:
            self._read(max_seconds=0.01)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        self._has_ended = True
        # Reads the last output. It does not wait for the end of the pipe, which the process's
        # children may hold open.
        with suppress(LateError):
            self._read(max_seconds=0)
        return os.waitstatus_to_exitcode(status)


def _fork(
    server: Server,
    pool: Pool,
    device: torch.device,
    is_solution: bool,
    contestants_ends: tuple[int, int, int],
) -> tuple[int, int]:
    """Have the server fork a contestant; return its id and its init process's, see `Server.fork`.

    Args:
        server: forks.
        pool: the shared memory.
        device: where the contestant computes.
        is_solution: whether its memory is limited.
        contestants_ends: the contestant's ends of the pipes: requests, replies, output.
    """
    most_bytes = 0  # no limit
    if is_solution:
        most_bytes = int(MEMORY_SHARE * free_bytes(torch.device("cpu")))
    requests, replies, output = contestants_ends
    settings = {"device": str(device), "most_bytes": most_bytes}
    return server.fork(settings, (requests, replies, pool.descriptor, output))


def _has_right_types(reply: dict) -> bool:
    """Return whether a reply has lists and dictionaries where the referee expects them.

    The content of the dictionaries is checked where it is used.
    """
    calls = reply.get("calls", [])
    if not _is_list_of_dicts(calls) or not _is_list_of_dicts(reply.get("state", [])):
        return False
    if not all(isinstance(reply.get(key, {}), dict) for key in ("raised", "elements")):
        return False
    return all(_is_list_of_dicts(call.get("results")) for call in calls)


def _is_list_of_dicts(value: object) -> bool:
    """Return whether a value is a list and all its parts are dictionaries."""
    return isinstance(value, list) and all(isinstance(part, dict) for part in value)


def was_killed(status: int) -> bool:
    """Return whether an exit status means SIGKILL, which the kernel sends if memory is short."""
    return status == -signal.SIGKILL
