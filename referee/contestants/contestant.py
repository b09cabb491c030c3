"""Contestants: the processes in which a solution or eager runs, as the referee sees them.

A contestant is stopped except while it answers a request: "When does the clock run?" in
PROTECTION.md has a picture of a request.

The referee believes nothing in a reply that could make a result right or a time shorter. A process
that replies before its results are complete only stops its clock earlier: the referee compares what
the process's memory holds.
"""

import json
import os
import secrets
import signal
from collections.abc import Callable
from contextlib import suppress
from math import inf
from time import monotonic, perf_counter
from typing import NamedTuple, NoReturn

import torch

from referee.contestants import namespaces, processes
from referee.contestants.errors import (
    EndedError,
    ForgedError,
    RaisedError,
    TimeLimitError,
    UnstoppableError,
    WokenError,
)
from referee.contestants.free_memory import free_bytes, give_back_unused
from referee.contestants.pipes import open_pipes
from referee.contestants.pool import Pool
from referee.contestants.reading import Reader
from referee.contestants.role import Role
from referee.contestants.server import Server

MEMORY_SHARE = 0.9  # the part of the free memory that a solution may allocate


class Reply(dict):
    """A contestant's reply. `RequestHandler` always sends all keys: a missing one means forgery."""

    def __missing__(self, key: str) -> NoReturn:
        """Raise ForgedError."""
        raise ForgedError(f'it has no "{key}"')


class _Request(NamedTuple):
    """A request that waits for its reply.

    Attributes:
        token: random text, which the reply repeats.
        call_count: how many calls the reply must have results of.
        unwritten: the end of the request if the pipe was full; it is written while the process
            reads the beginning.
    """

    token: str
    call_count: int = 0
    unwritten: bytes = b""


class Contestant:
    """A process that runs a solution or eager, stopped except while it answers a request.

    Args:
        server: forks the process.
        pool: the shared memory, which the process maps.
        device: where it computes.
        role: a solution or eager.
        deadline: when the process must have answered all its requests, by `time.monotonic`. While
            the process is stopped, the deadline moves on, so only its running time counts.

    Attributes:
        pid: the process's id.
        has_walls: whether it is in a PID namespace of its own.
        seconds: the wall time of the last request. It begins with SIGCONT, and ends when the whole
            tree has stopped and `read_early` has returned.
        reader: reads results in the process's memory.
        is_readable: whether the system lets the referee read that memory. It is tried before any
            code of a solution runs.
        addresses: where the process maps the shared memory: the first address, and one past the
            last. A result between them is in the referee's memory.
    """

    def __init__(
        self,
        server: Server,
        pool: Pool,
        device: torch.device,
        role: Role,
        deadline: float = inf,
    ) -> None:
        self.deadline = deadline
        self.seconds = 0.0
        self._device = device
        self._has_ended = False  # the process was waited for
        self._is_closed = False
        self._pipes, contestants_ends = open_pipes()
        try:
            self.pid, self._init_pid = _fork(server, pool, device, role, contestants_ends)
        except BaseException:
            self._pipes.close()
            raise
        finally:
            for descriptor in contestants_ends:
                os.close(descriptor)
        if role is Role.EAGER:
            processes.referees_pids.add(self.pid)
        self.has_walls = self._init_pid != 0
        if self.has_walls:
            processes.referees_pids.add(self._init_pid)
        self._tree = processes.ProcessTree(self.pid, role is Role.SOLUTION, self._init_pid)
        self.reader = Reader(self.pid, device, pool)
        try:
            # It is not forged: no solution's code has run yet.
            first_reply = self._receive_and_stop(_Request(token=""))
            self._rest.note_runs()
            self.is_readable = self.reader.can_read(first_reply["sample"])
        except BaseException:
            self.close()
            raise
        self.addresses = tuple(first_reply["addresses"])
        self._begun: _Request | None = None  # nobody has read its reply yet, see `begin`

    def ask(
        self, method: str, read_early: Callable[[dict], object] | None = None, **arguments: object
    ) -> dict:
        """Have the process call a method of its `RequestHandler`; return the method's reply.

        Args:
            method: the method's name.
            read_early: is called with the reply after the process has stopped and before the clock
                stops.
            arguments: the method's arguments; JSON must be able to hold them.

        Raises:
            EndedError: the process has ended.
            UnstoppableError: the process does not stop.
            WokenError: the process has run since the last request.
            ForgedError: the solution has sent or changed the reply.
            TimeLimitError: the deadline has passed.
            RaisedError: the method has raised.
        """
        self._finish_begun()
        request = self._write_request(method, arguments)
        start = perf_counter()
        self._rest.go_on()
        try:
            reply = self._receive_and_stop(request)
            if read_early:
                read_early(reply)
            self.seconds = perf_counter() - start
        finally:
            self._rest.note_runs()  # after the clock has stopped; also if the method has raised
        return reply

    def begin(self, method: str) -> None:
        """Have eager's process call a method without arguments, and go on meanwhile.

        The next request waits for the method's end.

        Args:
            method: as for `ask`.
        """
        self._finish_begun()
        self._begun = self._write_request(method, arguments={})
        self._rest.go_on()

    def printed(self) -> str:
        """Return the end of what the process has printed."""
        return self._pipes.printed()

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
            processes.referees_pids.discard(self._init_pid)
        processes.referees_pids.discard(self.pid)
        self.reader.close()
        self._pipes.close()

    def _write_request(self, method: str, arguments: dict) -> _Request:
        """Write a request to the stopped process, or as much of it as the pipe holds."""
        token = secrets.token_hex(8)
        text = json.dumps({"method": method, "arguments": arguments, "token": token})
        unwritten = self._pipes.write(text.encode() + b"\n")
        self._finish_referees_gpu_work()
        # The request is written before this check: a process that something wakes later than the
        # check has no time to read it and to compute ahead.
        self._check_that_it_has_rested()
        self.deadline += monotonic() - self._stopped_at
        return _Request(token, len(arguments.get("inputs", [])), unwritten)

    def _finish_begun(self) -> None:
        """Wait for the end of the method that `begin` has called, if any, and stop the process."""
        if self._begun is None:
            return
        request = self._begun
        self._begun = None
        self._receive_and_stop(request)

    def _finish_referees_gpu_work(self) -> None:
        """Wait until a GPU has done the referee's work: inputs are written, results are read."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            give_back_unused(self._device)

    def _check_that_it_has_rested(self) -> None:
        """Kill the process and raise WokenError if it has run since the last request.

        If it has been killed meanwhile, as for want of memory, the request will find that out.
        """
        if self._rest.was_broken() and not processes.is_dead_child(self.pid):
            self._tree.kill()
            raise WokenError(-signal.SIGKILL, self.printed())

    def _stop(self) -> processes.Rest:
        """Stop the process and all that it started; raise UnstoppableError if one does not stop."""
        rest = self._tree.stop()
        if rest is None:
            raise UnstoppableError(-signal.SIGKILL, self.printed())
        return rest

    def _receive_and_stop(self, request: _Request) -> Reply:
        """Write the end of a request, wait for its reply, and stop the process; return the reply.

        Raises:
            UnstoppableError: the process does not stop.
            EndedError, ForgedError, TimeLimitError, RaisedError: as `ask` does.
        """
        try:
            self._pipes.write_all(request.unwritten, self.deadline)
            return self._receive(request)
        finally:
            if not self._has_ended:
                self._rest = self._stop()
            self._stopped_at = monotonic()

    def _receive(self, request: _Request) -> Reply:
        """Wait for the reply to a request and return it.

        Raises:
            EndedError, ForgedError, TimeLimitError, RaisedError: as `ask` does.
        """
        line = self._pipes.read_line(self.deadline)
        if line is None:
            raise EndedError(self._wait_for_status(), self.printed())
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            raise ForgedError("it is no JSON") from None
        if not isinstance(reply, dict) or reply.pop("token", None) != request.token:
            raise ForgedError("it does not have the request's token")
        if self._pipes.has_unread_replies:
            raise ForgedError("more than one line came")
        _check_types(reply)
        if "returned" in reply and len(reply["returned"]) != request.call_count:
            count = len(reply["returned"])
            raise ForgedError(f"it has the results of {count} calls, expected {request.call_count}")
        if "raised" in reply:
            raise RaisedError(reply["raised"])
        return Reply(reply)

    def _wait_for_status(self) -> int:
        """Wait for the process's end and return its exit status.

        The process may still be alive: it may only have closed its pipe of replies. Its output is
        read meanwhile because a full pipe would keep it from ending.

        Raises:
            TimeLimitError: the deadline has passed.
        """
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        while not pid:
            self._pipes.read(self.deadline, max_seconds=0.01)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        self._has_ended = True
        # Reads the last output. It does not wait for the end of the pipe, which the process's
        # children may hold open.
        with suppress(TimeLimitError):
            self._pipes.read(self.deadline, max_seconds=0)
        return os.waitstatus_to_exitcode(status)


def _fork(
    server: Server,
    pool: Pool,
    device: torch.device,
    role: Role,
    contestants_ends: tuple[int, int, int],
) -> tuple[int, int]:
    """Have the server fork a contestant; return its id and its init process's, see `Server.fork`.

    Args:
        server: forks.
        pool: the shared memory.
        device: where the contestant computes.
        role: a solution or eager.
        contestants_ends: the contestant's ends of the pipes: requests, replies, output.
    """
    requests, replies, output = contestants_ends
    settings = {
        "device": str(device),
        "role": role,
        "most_bytes": int(MEMORY_SHARE * free_bytes(torch.device("cpu"))),
    }
    return server.fork(settings, (requests, replies, pool.descriptor, output))


def _check_types(reply: dict) -> None:
    """Raise ForgedError unless a reply has lists and dictionaries where the referee expects them.

    The content of the dictionaries is checked where it is used.
    """
    for key in ("raised", "elements"):
        if not isinstance(reply.get(key, {}), dict):
            raise ForgedError(f'its "{key}" is no dictionary')
    for key in ("returned", "state", "buffers"):
        if not _is_list_of_dicts(reply.get(key, [])):
            raise ForgedError(f'its "{key}" is no list of dictionaries')
    for returned_by_call in reply.get("returned", []):
        if not _is_list_of_dicts(returned_by_call.get("results")):
            raise ForgedError('"results" of a call are no list of dictionaries')


def _is_list_of_dicts(value: object) -> bool:
    """Return whether a value is a list and all its parts are dictionaries."""
    return isinstance(value, list) and all(isinstance(part, dict) for part in value)
