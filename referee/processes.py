"""Processes: they are stopped, go on, and are ended, each with all that it started.

The referee is a subreaper: what a process leaves behind becomes the referee's own child, so that
nothing that a solution starts can get out of sight.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
SECONDS_TO_STOP = 10.0
SECONDS_TO_DIE = 10.0
AT_REST = "TtZX"  # states in /proc/PID/stat: stopped, traced, zombie, dead

# Ids of the referee's own processes, and of children that were there before it began. A process
# belongs to the solution under grading if it is a child of the referee that is not in here, or is
# below such a child.
known: set[int] = set()


@contextmanager
def reaping() -> Iterator[None]:
    """Within it, orphans become the referee's children; at its end all that came are ended.

    Meanwhile no process of the same user can read the referee's memory, unless it may read that of
    all processes. Children that other threads of this process start meanwhile are ended, too.
    """
    prctl = ctypes.CDLL(None).prctl
    before = set(children_of(os.getpid()))
    known.update(before)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # whoever started this may have set it
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_DUMPABLE, 0)
    try:
        yield
    finally:
        end_orphans()
        prctl(PR_SET_DUMPABLE, 1)
        prctl(PR_SET_CHILD_SUBREAPER, 0)
        known.difference_update(before)


def children_of(pid: int) -> list[int]:
    """Return the processes that a process started, or adopted, and that are still there."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - it is called very often
            found += _children_of_thread(pid, thread)
    return found


def _children_of_thread(pid: int, thread: int | str) -> list[int]:
    with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:  # noqa: PTH123
        return [int(child) for child in file.read().split()]
    return []


def state_of(pid: int) -> str:
    """Return the letter of a process's state, "X" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return "X"


class Tree:
    """A process and everything below it, which stop and go on as one.

    Args:
        pid: the process at the top, a child of the referee's.
        adopts: whether orphans are its; one tree at a time may adopt.
        first: the first process of its namespace, which has its orphans, see `namespaces`; or 0.
    """

    def __init__(self, pid: int, adopts: bool, first: int = 0) -> None:
        self._pid = pid
        self._adopts = adopts
        self._first = first
        self._stopped: list[int] = []

    def stop(self) -> None:
        """Stop all of it. When this returns, no thread of it runs."""
        stopped: set[int] = set()
        while new := [pid for pid in self._pids() if pid not in stopped]:
            for pid in new:
                _send(pid, signal.SIGSTOP)
            for pid in new:
                _wait_until_stopped(pid)
            stopped.update(new)
        self._stopped = list(stopped)

    def go_on(self) -> None:
        """Let everything that was stopped go on."""
        for pid in self._stopped:
            _send(pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill all of it."""
        self.stop()
        for pid in self._stopped:
            _send(pid, signal.SIGKILL)

    def _pids(self) -> list[int]:
        """Return the process, its orphans if it adopts, and all below these."""
        found = [self._pid]
        if self._first:
            found += children_of(self._first)
        else:
            # The search takes some time: it is made for eager's processes, too, so that all clocks
            # contain it.
            orphans = _orphans(besides=self._pid)
            if self._adopts:
                found += orphans
        for pid in found:  # which grows meanwhile
            found += children_of(pid)
        return found


def end_orphans() -> None:
    """Kill all processes below this one that are not the referee's own."""
    deadline = monotonic() + SECONDS_TO_DIE
    while (orphans := _orphans()) and monotonic() < deadline:
        for pid in orphans:
            below = children_of(pid)
            _send(pid, signal.SIGKILL)
            for child in below:
                _send(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        sleep(0.001)


def _orphans(besides: int = 0) -> list[int]:
    """Return the children of the referee that are not its own, but for one.

    The system gives orphans to the first thread of the process that adopts them.
    """
    own = os.getpid()
    return [pid for pid in _children_of_thread(own, own) if pid not in known and pid != besides]


def _send(pid: int, number: int) -> None:
    """Send a signal to a process, if it is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _wait_until_stopped(pid: int) -> None:
    """Wait until no thread of a process runs, or until it has ended."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return
    deadline = monotonic() + SECONDS_TO_STOP  # it is no child of ours
    while state_of(pid) not in AT_REST and monotonic() < deadline:
        sleep(1e-5)
