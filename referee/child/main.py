"""Forks the processes of solutions, and of eager, each of which answers requests until they end.

The process that forks has imported torch, and computes nothing, so that OpenMP has no threads yet,
and its memory holds nothing but code.
"""

import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import traceback
from contextlib import suppress
from time import sleep

import torch
import torch.fx.experimental.symbolic_shapes  # which every process's first backward imports

from referee.child.worker import Worker

PR_SET_PDEATHSIG = 1
LONGEST_REQUEST = 1 << 12  # bytes, for a process
LONGEST = 1 << 14  # characters of an error message; the whole of a compiler's first errors

_dumps, _loads, _exit, _write = json.dumps, json.loads, os._exit, os.write


def start(descriptor: int) -> None:
    """Answers requests for processes on a socket until it is closed.

    A request has the device and the most bytes of memory of a process, and its descriptors:
    requests, replies, arena, output. The referee adopts the process, for that is a subreaper, and
    is told its id.
    """
    with socket.socket(fileno=descriptor) as processes:
        while True:
            text, descriptors, *_ = socket.recv_fds(processes, LONGEST_REQUEST, 4)
            if not text:
                _exit(0)
            if (helper := os.fork()) == 0:
                helper = os.getpid()
                if os.fork():
                    _exit(0)
                break
            os.waitpid(helper, 0)
            for theirs in descriptors:
                os.close(theirs)
        os.setsid()
        while os.getppid() == helper:  # which is about to end
            sleep(1e-4)
        with suppress(BrokenPipeError):
            processes.send(str(os.getpid()).encode())
    *ours, output = descriptors
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    device, most = json.loads(text)
    _answer_all(*ours, torch.device(device), most)


def _answer_all(requests: int, replies: int, memory: int, device: torch.device, most: int) -> None:
    """What a forked process does, by its descriptors; `most` bytes of memory, or all for 0."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # so that it ends as the referee does
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if most:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    arena = torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.uint8)
    os.close(memory)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # So that the GPU copies from and to it directly.
        torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), len(arena), 0)
    with os.fdopen(requests, "rb") as lines, torch.no_grad():
        worker = Worker(arena, device)
        for line in lines:
            request = _loads(line)
            try:
                reply = getattr(worker, request["op"])(**request["arguments"]) or {}
            except BaseException as error:  # the solution's, SystemExit too
                reply = {"raised": _describe(error, worker.file)}
            data = _dumps(reply | {"token": request["token"]}).encode() + b"\n"
            while data:
                data = data[_write(replies, data) :]
    _exit(0)


def _describe(error: BaseException, file: str) -> dict:
    """An exception in words: its type, its message, the line of the solution that it left."""
    try:
        text = str(error)
    except Exception:  # a __str__ of the solution's
        text = ""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return {
        "type": type(error).__name__[:100],
        "text": text[:LONGEST],
        "line": lines[-1] if lines else None,
        "exits": isinstance(error, SystemExit) and not error.code,
    }
