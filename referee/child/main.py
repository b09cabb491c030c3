"""Forks the processes of contestants, each of which answers requests until it ends.

The process that forks has imported torch, and computes nothing, so that OpenMP has no threads yet,
and its memory holds nothing but code.
"""

import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import traceback
from contextlib import suppress
from typing import NoReturn

import torch
import torch.fx.experimental.symbolic_shapes  # which every process's first backward imports

from referee import namespaces
from referee.child.worker import Worker
from referee.shared import Mapping

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
LONGEST_REQUEST = 1 << 12  # bytes, for a process
LONGEST_ERROR = 1 << 14  # characters of a message; the whole of a compiler's first errors
LARGEST_FILE = 16 << 30  # bytes of a file that a solution may write


def start(descriptor: int, imports: list[str]) -> None:
    """Answer requests for processes on a socket until it is closed; first import some modules.

    A request has the device and the most bytes of memory of a process, whether it gets walls, and
    its descriptors: requests, replies, the shared memory, output. The referee adopts the process,
    for it is a subreaper, and is told its id, and that of its namespace's first process, or 0.

    What this process starts counts as the referee's own. So no solution of the same user may write
    into its memory.
    """
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    for name in imports:
        with suppress(ImportError):  # who needs the module says so
            importlib.import_module(name)
    with socket.socket(fileno=descriptor) as requests:
        while True:
            text, descriptors, *_ = socket.recv_fds(requests, LONGEST_REQUEST, 4)
            if not text:
                os._exit(0)
            about = json.loads(text)
            pid, first = namespaces.fork(about["walls"])
            if pid == 0:
                requests.close()
                _become_contestant(about, descriptors)
            with suppress(BrokenPipeError):
                requests.send(f"{pid} {first}".encode())
            for theirs in descriptors:
                os.close(theirs)


def _become_contestant(about: dict, descriptors: list[int]) -> NoReturn:
    """Do what a contestant's process does."""
    os.setsid()
    *ours, output = descriptors
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    _answer_all(*ours, torch.device(about["device"]), about["most_bytes"])


def _answer_all(
    requests: int, replies: int, memory: int, device: torch.device, most_bytes: int
) -> NoReturn:
    """Answer requests, by descriptors, until there are no more; `most_bytes` is 0 for no limit."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # so that it ends as the referee does
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if most_bytes:  # a solution, whose results the referee reads; nobody may read eager's
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mapping = Mapping(memory, device)
    os.close(memory)
    worker = Worker(mapping, device)
    _reply(replies, {"token": "", "span": mapping.span})
    with os.fdopen(requests, "rb") as lines, torch.no_grad():
        for line in lines:
            request = json.loads(line)
            try:
                reply = getattr(worker, request["op"])(**request["arguments"]) or {}
            except BaseException as error:  # the solution's, SystemExit too
                reply = {"raised": _describe(error, worker.file)}
            _reply(replies, reply | {"token": request["token"]})
    os._exit(0)


def _reply(descriptor: int, reply: dict) -> None:
    data = json.dumps(reply).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _describe(error: BaseException, file: str) -> dict:
    """Return an exception in words, with the line of the solution's file that raised it."""
    try:
        text = str(error)
    except Exception:  # a __str__ of the solution's
        text = ""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return {
        "type": type(error).__name__[:100],
        "text": text[:LONGEST_ERROR],
        "line": lines[-1] if lines else None,
        "exits": isinstance(error, SystemExit) and not error.code,
        "traceback": _traceback(error),
    }


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))[-LONGEST_ERROR:]
    except Exception:  # a __str__ of the solution's
        return ""
