"""Walls between processes: a contestant's processes see, and can signal, each other alone.

Linux gives a process a namespace of process ids: what is outside has no id in it. So there is
nothing that a solution could stop, end or slow, and its `/proc` shows nothing else. The namespace
belongs to a namespace of users, so that no privilege is needed to make one, and so that even root's
solutions have no rights over processes outside. Users keep their ids, and thus their files.

    server ── helper ──┬── first process (its id within is 1)
       (ends at once)  └── contestant (2)

When the helper has ended, the referee adopts both: it stops, reads and waits for the contestant as
for any child, by the id that the contestant has outside. The first process adopts what the
contestant leaves behind. It ends when the contestant or the referee does, and when it ends, the
kernel kills all in the namespace.

Where the system forbids any of this, as many containers do, there are no walls.
"""

import ctypes
import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
CAP_SYS_ADMIN = 21
CONTESTANT = 2  # its id within the namespace
CAPABILITY_VERSION_3 = 0x20080522
LONGEST_NEWS = 64  # bytes
MOST_DESCRIPTORS = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


def fork(walled: bool) -> tuple[int, int]:
    """Fork a process that the referee, a subreaper above this one, adopts.

    Args:
        walled: whether it gets a namespace of its own, where the system allows it.

    Returns:
        The process's id and that of the first process of its namespace, 0 if it has none. In the
        new process both are 0.

    Raises:
        OSError: there is no such process.
    """
    news, tells = os.pipe()
    waits, permits = os.pipe()  # closed here when the referee has adopted the process
    helper = os.fork()
    if helper == 0:
        os.close(news)
        os.close(permits)
        _become_process(tells, waits, walled)
        return 0, 0
    os.close(tells)
    os.close(waits)
    if walled and os.read(news, 1):
        os.write(permits, b"y" if _map_users(helper) else b"n")
    os.waitpid(helper, 0)
    found = os.read(news, LONGEST_NEWS).split()
    os.close(news)
    os.close(permits)
    if found:
        pid, first = map(int, found)
        return pid, first
    if walled:
        return fork(walled=False)
    raise OSError("no process can be forked")


def end(first: int) -> None:
    """Kill the first process of a namespace, and so all in it; wait until it is gone.

    The contestant must have been waited for: the kernel keeps the first process as long as there
    are others.
    """
    with suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(first, 0)


def _become_process(tells: int, waits: int, walled: bool) -> None:
    """Do what the helper does; return in the new process, when the referee has adopted it."""
    try:
        first = _make_namespace(tells, waits) if walled else 0
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid:
        os.write(tells, f"{pid} {first}".encode())
        os._exit(0)
    os.close(tells)
    os.read(waits, 1)
    os.close(waits)
    if walled:
        _drop_capabilities()


def _make_namespace(tells: int, waits: int) -> int:
    """Make namespaces for the processes that this one forks; return the id of the first process.

    Raises:
        OSError: the system forbids it.
    """
    os.close(os.pidfd_open(os.getpid()))  # Linux 5.3 has it
    _libc.prctl(PR_SET_DUMPABLE, 1)  # else nobody may write into /proc/PID/uid_map
    _check(_libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS))
    os.write(tells, b".")
    if os.read(waits, 1) != b"y":
        raise PermissionError
    _libc.prctl(PR_SET_DUMPABLE, 0)
    ready, says_ready = os.pipe()
    first = os.fork()
    if first == 0:
        _become_first(says_ready, waits)
    os.close(says_ready)
    if not os.read(ready, 1):
        os.waitpid(first, 0)
        raise PermissionError
    os.close(ready)
    return first


def _become_first(says_ready: int, waits: int) -> NoReturn:
    """Do what the first process of a namespace does: show it in `/proc`, outlast the contestant.

    It holds no descriptors, for the referee waits for the end of the contestant's pipes. Only the
    referee can end or stop it: it blocks signals, and the kernel keeps SIGKILL and SIGSTOP from
    within the namespace off it. Processes that it adopts vanish when they end.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if _libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID_NODEV_NOEXEC, None):
        os._exit(1)
    _drop_capabilities()
    os.write(says_ready, b".")
    os.read(waits, 1)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends as the referee does
    os.closerange(0, MOST_DESCRIPTORS)
    with suppress(ProcessLookupError):  # the contestant has ended
        end = select.poll()
        end.register(os.pidfd_open(CONTESTANT))
        end.poll()
    os._exit(0)


def _map_users(pid: int) -> bool:
    """Give users and groups the ids within a process's namespace that they have here.

    Root may map all that there are, others themselves alone.

    Returns:
        Whether the system allows it.
    """
    process = Path("/proc", str(pid))
    try:
        if os.geteuid() != 0:
            (process / "setgroups").write_text("deny")
        for name, own in (("gid_map", os.getegid()), ("uid_map", os.geteuid())):
            ranges = [f"{own} {own} 1"]
            if os.geteuid() == 0:
                own_map = Path("/proc/self", name).read_text().splitlines()
                ranges = [f"{start} {start} {count}" for start, _, count in map(str.split, own_map)]
            (process / name).write_text("\n".join(ranges) + "\n")
    except OSError:
        return False
    return True


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def _drop_capabilities() -> None:
    """Give up the rights that a new namespace gives.

    Root keeps those over files, say, but not the one to unmount `/proc`, under which that of the
    system is.
    """
    _libc.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN)
    header = _Header(CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the same, from bit 32
    if os.geteuid() == 0:
        _check(_libc.capget(ctypes.byref(header), sets))
        for i in range(3):
            sets[i] &= ~(1 << CAP_SYS_ADMIN)
    _check(_libc.capset(ctypes.byref(header), sets))


def _check(status: int) -> None:
    """Raise OSError where a call of the C library has failed."""
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
