"""Forks the processes of solutions, and of eager, from one that has imported torch.

It computes nothing, so that OpenMP has no threads yet, and its memory holds nothing but code.
"""

import ctypes
import json
import os
import signal
import socket
from contextlib import suppress
from time import sleep

PR_SET_PDEATHSIG = 1
LONGEST = 1 << 12  # bytes of a request


def die_with_parent() -> None:
    """Lets this process end when the one does that started it, or adopted it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(descriptor: int) -> tuple[int, int, int, dict]:
    """Answers requests on a socket until it is closed; returns in each new process.

    A request has the limits of a process, and its descriptors: requests, replies, arena, output.
    The referee adopts the process, for that is a subreaper, and is told its id.

    Returns:
        What `main` takes.
    """
    die_with_parent()
    with socket.socket(fileno=descriptor) as requests:
        while True:
            text, descriptors, *_ = socket.recv_fds(requests, LONGEST, 4)
            if not text:
                os._exit(0)
            if (helper := os.fork()) == 0:
                helper = os.getpid()
                if os.fork():
                    os._exit(0)
                break
            os.waitpid(helper, 0)
            for theirs in descriptors:
                os.close(theirs)
        os.setsid()
        while os.getppid() == helper:  # which is about to end
            sleep(1e-4)
        with suppress(BrokenPipeError):
            requests.send(str(os.getpid()).encode())
    *ours, output = descriptors
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    return *ours, json.loads(text)
