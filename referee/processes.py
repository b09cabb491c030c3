"""Processes: those that came since are ended, and what others do to them is looked at."""

import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

PR_SET_CHILD_SUBREAPER = 36
SECONDS_TO_DIE = 10.0
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@contextmanager
def reaping() -> Iterator[set[int]]:
    """Within it, orphans become ours, and at its end all descendants that came since are killed.

    Where this process was started so that the ends of children are ignored, they are no more.

    The set that it gives may be added to: processes that are to live on.
    """
    prctl = ctypes.CDLL(None).prctl
    known = set(descendants(os.getpid()))
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield known
    finally:
        _end_descendants(known)
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def descendants(pid: int, without: set[int] = frozenset()) -> list[int]:
    """The processes below this one, but for some with all that is below them."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (fields := _stat(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found, todo = [], [pid]
    while todo:
        new = [child for child in children.get(todo.pop(), []) if child not in without]
        found += new
        todo += new
    return found


def busy_seconds(without: set[int]) -> float:
    """The processor time so far of the processes below this one, but for some."""
    return sum(map(_cpu_seconds, descendants(os.getpid(), without)))


def standing(pid: int) -> tuple:
    """How a process is scheduled and limited, which another one may change; () if it has ended."""
    try:
        return (
            os.sched_getaffinity(pid),
            os.sched_getscheduler(pid),
            os.getpriority(os.PRIO_PROCESS, pid),
            {kind: resource.prlimit(pid, kind) for kind in LIMITS},
            _stat(pid)[:1] == ["T"],  # stopped
        )
    except ProcessLookupError:
        return ()


def restore(was: tuple) -> None:
    """Gives this process its `standing` back, as far as it may."""
    affinity, _, priority, limits, _ = was
    calls = [(os.sched_setaffinity, 0, affinity), (os.setpriority, os.PRIO_PROCESS, 0, priority)]
    calls += [(resource.setrlimit, *limit) for limit in limits.items()]
    for call, *arguments in calls:
        with suppress(OSError, ValueError):
            call(*arguments)


def _end_descendants(known: set[int]) -> None:
    """Stops them first, so that none forks while others are killed."""
    deadline = monotonic() + SECONDS_TO_DIE
    while (pids := descendants(os.getpid(), known)) and monotonic() < deadline:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        for pid in pids:
            with suppress(ChildProcessError):  # not adopted yet
                os.waitpid(pid, os.WNOHANG)
        sleep(0.001)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/pid/stat after the name: state, parent and so on; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def waited(pid: int) -> float:
    """Seconds that its main thread was ready but without a CPU."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError):  # a kernel without these figures
        return 0.0


def _cpu_seconds(pid: int) -> float:
    fields = _stat(pid)  # of those that it waited for, too
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if fields else 0.0
