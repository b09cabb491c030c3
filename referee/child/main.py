"""Answers requests until they end."""

import json
import mmap
import os
import resource
import traceback
from collections.abc import Callable

import torch

from referee.child.server import die_with_parent, serve
from referee.child.worker import Worker

LONGEST = 1 << 14  # characters of an error message; the whole of a compiler's first errors

_dumps, _loads, _exit = json.dumps, json.loads, os._exit


def start(descriptor: int) -> None:
    """What the server's process runs, and each that it forks."""
    main(*serve(descriptor))


def main(requests: int, replies: int, memory: int, limits: dict) -> None:
    """Answers until the requests end.

    Args:
        requests, replies, memory: file descriptors.
        limits: the device, and the most bytes of memory.
    """
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if most := limits["bytes"]:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    mapped = mmap.mmap(memory, 0)
    os.close(memory)
    device = torch.device(limits["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with os.fdopen(requests, "rb") as lines, torch.no_grad():
        arena = torch.frombuffer(mapped, dtype=torch.uint8)
        if device.type == "cuda":  # so that the GPU copies from and to it directly
            torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), len(arena), 0)
        worker = Worker(arena, device)
        for line in lines:
            request = _loads(line)
            reply = _answer(worker, request)
            _write(replies, _dumps(reply | {"token": request["token"]}).encode() + b"\n")
    _exit(0)


def _answer(worker: Worker, request: dict) -> dict:
    try:
        return getattr(worker, request["op"])(**request["arguments"])
    except BaseException as error:  # the solution's, SystemExit too
        return {"raised": _describe(error, worker.file)}


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


def _write(descriptor: int, data: bytes, write: Callable = os.write) -> None:
    while data:
        data = data[write(descriptor, data) :]
