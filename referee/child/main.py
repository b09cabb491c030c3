"""The server, which forks contestants, and the loop in which a contestant answers requests.

    start                   server: forks a contestant for each request on a socket
      _become_contestant    contestant: sets up its output
        _limit_solution     contestant: if it is a solution, limits its memory and files
        _answer_all         contestant: reads requests, has them handled, writes replies

The server has imported torch but never computes. So it has no OpenMP threads, which a fork would
lose, and no data of any problem in its memory.
"""

import json
import os
import resource
import socket
import traceback
from contextlib import suppress
from typing import NoReturn

import torch
import torch.fx.experimental.symbolic_shapes  # else each contestant's first backward imports it

from referee.child.mapping import Mapping
from referee.child.request_handler import RequestHandler
from referee.contestants import namespaces, prctl
from referee.contestants.descriptions import describe
from referee.contestants.role import Role

MAX_REQUEST_BYTES = 1 << 12  # of a request to fork
MAX_ERROR_CHARACTERS = 1 << 14  # of a message; a compiler's first errors fit
MAX_WRITTEN_BYTES = 16 << 30  # of a file that a solution writes


def start(descriptor: int) -> None:
    """Run the server: fork a contestant for each request on a socket, until that is closed.

    A request is a JSON dictionary with four file descriptors:

        {"device": "cpu",          where the contestant computes
         "role": "solution",       or "eager"
         "most_bytes": 1000000,    limit of a solution's memory
         "walls": true,            whether it gets a PID namespace of its own
         "builds": "/tmp/abc"}     where it builds extensions; "" for the user's usual folder
        descriptors: requests, replies, shared memory, output

    The reply is the text "PID INIT_PID", see `namespaces.fork`. The referee, which is a subreaper,
    adopts the contestant.

    The referee does not stop the server when it stops a solution. So the server hides its memory: a
    solution of the same user must not write into it, and so have it compute meanwhile.

    Args:
        descriptor: the socket's file descriptor.
    """
    prctl.hide_memory()
    with socket.socket(fileno=descriptor) as referee:
        while True:
            text, descriptors, *_ = socket.recv_fds(referee, MAX_REQUEST_BYTES, 4)
            if not text:
                os._exit(0)
            settings = json.loads(text)
            pid, init_pid = namespaces.fork(settings["walls"])
            if pid == 0:
                referee.close()
                _become_contestant(settings, *descriptors)
            with suppress(BrokenPipeError):
                referee.send(f"{pid} {init_pid}".encode())
            for contestants_descriptor in descriptors:
                os.close(contestants_descriptor)


def _become_contestant(
    settings: dict, requests: int, replies: int, pool_descriptor: int, output: int
) -> NoReturn:
    """Do the work of a contestant's process; see `start` for the settings and descriptors."""
    os.setsid()
    for stream in (1, 2):  # stdout and stderr
        os.dup2(output, stream)
    os.close(output)
    prctl.die_with_parent()  # the parent is the referee
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if settings["builds"]:
        os.environ["TORCH_EXTENSIONS_DIR"] = settings["builds"]
    if settings["role"] == Role.SOLUTION:
        _limit_solution(settings["most_bytes"])
    device = torch.device(settings["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _answer_all(requests, replies, pool_descriptor, device)


def _limit_solution(most_bytes: int) -> None:
    """Limit what a solution may allocate and write, and show its memory.

    The referee reads results in the solution's memory. Eager's memory stays hidden, as the server's
    is, so that no solution of the same user can read it.
    """
    prctl.show_memory()
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_WRITTEN_BYTES, MAX_WRITTEN_BYTES))


def _answer_all(
    requests: int, replies: int, pool_descriptor: int, device: torch.device
) -> NoReturn:
    """Answer requests, one JSON line each, until the pipe of requests ends.

    A request is {"method": ..., "arguments": {...}, "token": "..."}, where the method is one of
    `RequestHandler`. The reply is the dictionary that the method returns (an empty one for None),
    or {"raised": ...}, with the same token. A first reply, before all requests, says where the
    shared memory is mapped, and describes a tensor, with which the referee tries what it can read.

    Args:
        requests: the descriptor of the pipe of requests.
        replies: the descriptor of the pipe of replies.
        pool_descriptor: the descriptor of the shared memory.
        device: where the module computes.
    """
    mapping = Mapping(pool_descriptor, device)
    os.close(pool_descriptor)
    handler = RequestHandler(mapping, device)
    sample = torch.zeros(1, device=device)
    first_reply = {"token": "", "addresses": mapping.addresses, "sample": describe(sample)}
    _reply(replies, first_reply)
    with os.fdopen(requests, "rb") as lines, torch.no_grad():
        for line in lines:
            request = json.loads(line)
            try:
                method = getattr(handler, request["method"])
                reply = method(**request["arguments"])
                if reply is None:
                    reply = {}
            except BaseException as error:  # from the solution's code; SystemExit too
                reply = {"raised": _describe(error, handler.file)}
            _reply(replies, reply | {"token": request["token"]})
    os._exit(0)


def _reply(descriptor: int, reply: dict) -> None:
    """Write a reply as one line of JSON."""
    data = json.dumps(reply).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _describe(error: BaseException, file: str) -> dict:
    """Return a description of an exception: the "raised" of a reply.

    "exits" says that the file ends the process as if all were well: by `sys.exit()` for example.

    Args:
        error: the exception.
        file: the path of the solution's file. Of the lines in the traceback that are in this file,
            "line" is the innermost; None if there is none.
    """
    try:
        text = str(error)
    except Exception:  # the solution's own class has a __str__ that raises
        text = ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return {
        "type": type(error).__name__[:100],
        "text": text[:MAX_ERROR_CHARACTERS],
        "line": lines[-1] if lines else None,
        "exits": isinstance(error, SystemExit) and not error.code,
        "traceback": _traceback(error),
    }


def _traceback(error: BaseException) -> str:
    """Return the end of an exception's traceback; "" if it cannot be formatted."""
    try:
        return "".join(traceback.format_exception(error))[-MAX_ERROR_CHARACTERS:]
    except Exception:  # the solution's own class has a __str__ that raises
        return ""
