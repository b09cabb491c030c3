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
    """Within it, orphans become ours, and at its end all descendants that came since are killed,
    but for those whose ids are added to the set that it gives.
    """
    prctl = ctypes.CDLL(None).prctl
    known = set(_descendants(set()))
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # whoever started this may have set it
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield known
    finally:
        _end_descendants(known)
        prctl(PR_SET_CHILD_SUBREAPER, 0)


def busy_seconds(without: set[int]) -> float:
    """Processor time of the processes below this one, waited-for ones too, but for some."""
    ticks = [int(field) for pid in _descendants(without) for field in _stat(pid)[11:15]]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def standing(pid: int) -> tuple:
    """How a process is scheduled and limited, which another one may change; () if it has ended."""
    with suppress(ProcessLookupError):
        return (
            os.sched_getaffinity(pid),
            os.getpriority(os.PRIO_PROCESS, pid),
            {kind: resource.prlimit(pid, kind) for kind in LIMITS},
            os.sched_getscheduler(pid),
            _stat(pid)[:1] == ["T"],  # stopped
        )
    return ()


def restore(was: tuple) -> None:
    """Gives this process its `standing` back, as far as it may."""
    affinity, priority, limits, *_ = was
    calls = [(os.sched_setaffinity, 0, affinity), (os.setpriority, os.PRIO_PROCESS, 0, priority)]
    calls += [(resource.setrlimit, *limit) for limit in limits.items()]
    for call, *arguments in calls:
        with suppress(OSError, ValueError):
            call(*arguments)


def _descendants(without: set[int]) -> list[int]:
    """The processes below this one, but for some with all that is below them."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (fields := _stat(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [os.getpid()]
    for pid in found:  # which grows meanwhile
        found += [child for child in children.get(pid, []) if child not in without]
    return found[1:]


def _end_descendants(known: set[int]) -> None:
    """Stops them first, so that none forks while others are killed."""
    deadline = monotonic() + SECONDS_TO_DIE
    while (pids := _descendants(known)) and monotonic() < deadline:
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
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []
