"""Walls between processes: a contestant's processes see, and can signal, each other alone.

Linux gives a process a namespace of process ids: what is outside has no id in it. So there is
nothing that a solution could stop, end or slow, and its `/proc` shows nothing else. The namespace
belongs to a namespace of users, so that no privilege is needed to make one, and so that even root's
solutions have no rights over processes outside. Users keep their ids, and thus their files.

A contestant starts like this. The first process has the id 1 within, the contestant 2:

    server                helper                     first process           contestant

    forks the helper      makes the namespaces
    maps its users        forks the first process    shows it in `/proc`
                          forks the contestant       waits                   waits
                          tells their ids, ends
    closes `adopted`                                 goes on                 goes on

When the helper has ended, the referee adopts both: it stops, reads and waits for the contestant as
for any child, by the id that the contestant has outside. The first process adopts what the
contestant leaves behind. It ends when the contestant or the referee does, and when it ends, the
kernel kills all in the namespace.

Where the system forbids any of this, as many containers do, there are no walls: the helper forks
the contestant alone. The same where a user who is not root has capabilities: in the namespace these
would end at files that others own, and a file could not be imported that can be outside.
"""

import ctypes
import os
import select
import signal
import socket
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
CAPABILITY_VERSION_3 = 0x20080522
CONTESTANT = 2  # its id within the namespace
MOST_DESCRIPTORS = 1 << 20
# Messages between the server and the helper.
LONGEST_MESSAGE = 64  # bytes
UNSHARED = b"unshared"  # the helper has made the namespaces
MAPPED = b"mapped"  # users have their ids there
REFUSED = b"refused"

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
    walled = walled and not _has_capabilities()
    dialogue, helpers_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    until_adopted, adopted = os.pipe()  # nobody writes into it: closing it is the sign
    helper = os.fork()
    if helper == 0:
        dialogue.close()
        os.close(adopted)
        _become_contestant(helpers_end, until_adopted, walled)
        return 0, 0
    helpers_end.close()
    os.close(until_adopted)
    with dialogue:
        if walled and dialogue.recv(LONGEST_MESSAGE) == UNSHARED:
            is_mapped = _map_users(helper)
            dialogue.send(MAPPED if is_mapped else REFUSED)
        os.waitpid(helper, 0)
        ids = dialogue.recv(LONGEST_MESSAGE).split()
    os.close(adopted)
    if ids:
        return int(ids[0]), int(ids[1])
    if walled:
        return fork(walled=False)
    raise OSError("no process can be forked")


def _has_capabilities() -> bool:
    """Return whether this process has capabilities, and its user is not root."""
    status = Path("/proc/self/status").read_text()
    [effective] = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return os.geteuid() != 0 and int(effective, 16) != 0


def end(first: int) -> None:
    """Kill the first process of a namespace, and so all in it; wait until it is gone.

    The contestant must have been waited for: the kernel keeps the first process as long as there
    are others.
    """
    with suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(first, 0)


def _become_contestant(dialogue: socket.socket, until_adopted: int, walled: bool) -> None:
    """Do what the helper does; return in the contestant, when the referee has adopted it."""
    first = 0
    try:
        if walled:
            _make_namespaces(dialogue)
            first = _fork_first(until_adopted)
        contestant = os.fork()
    except OSError:
        os._exit(1)
    if contestant:
        dialogue.send(f"{contestant} {first}".encode())
        os._exit(0)
    dialogue.close()
    os.read(until_adopted, 1)
    os.close(until_adopted)
    if walled:
        _drop_capabilities()


def _make_namespaces(dialogue: socket.socket) -> None:
    """Make namespaces for the processes that this one forks from now on.

    Raises:
        OSError: the system forbids it.
    """
    os.close(os.pidfd_open(os.getpid()))  # the first process needs it, Linux 5.3 has it
    _libc.prctl(PR_SET_DUMPABLE, 1)  # else nobody may write into /proc/PID/uid_map
    _check(_libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS))
    dialogue.send(UNSHARED)
    if dialogue.recv(LONGEST_MESSAGE) != MAPPED:
        raise PermissionError
    _libc.prctl(PR_SET_DUMPABLE, 0)


def _fork_first(until_adopted: int) -> int:
    """Fork the first process of the namespace; return its id, once `/proc` shows the namespace.

    Raises:
        OSError: the system forbids it.
    """
    until_ready, ready = os.pipe()
    first = os.fork()
    if first == 0:
        _become_first(ready, until_adopted)
    os.close(ready)
    is_ready = os.read(until_ready, 1)
    os.close(until_ready)
    if not is_ready:
        os.waitpid(first, 0)
        raise PermissionError
    return first


def _become_first(ready: int, until_adopted: int) -> NoReturn:
    """Do what the first process of a namespace does: show it in `/proc`, outlast the contestant.

    It keeps no descriptor of the contestant's, for the referee waits for the end of the
    contestant's pipes. Only the referee can end or stop it: it blocks signals, and the kernel keeps
    SIGKILL and SIGSTOP from within the namespace off it. Processes that it adopts vanish when they
    end.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if _libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID_NODEV_NOEXEC, None):
        os._exit(1)
    _drop_capabilities()
    os.write(ready, b".")
    os.closerange(0, until_adopted)
    os.closerange(until_adopted + 1, MOST_DESCRIPTORS)
    os.read(until_adopted, 1)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends as the referee does
    with suppress(ProcessLookupError):  # the contestant has ended
        end_of_contestant = select.poll()
        end_of_contestant.register(os.pidfd_open(CONTESTANT))
        end_of_contestant.poll()
    os._exit(0)


def _map_users(pid: int) -> bool:
    """Give users and groups the ids within a process's namespace that they have here.

    Root may map all that there are, others themselves alone.

    Returns:
        Whether the system allows it.
    """
    process = Path("/proc", str(pid))
    try:
        if os.geteuid() == 0:
            users = _all_to_themselves("uid_map")
            groups = _all_to_themselves("gid_map")
        else:
            users = f"{os.geteuid()} {os.geteuid()} 1\n"
            groups = f"{os.getegid()} {os.getegid()} 1\n"
            (process / "setgroups").write_text("deny")  # else the system refuses the groups
        (process / "gid_map").write_text(groups)
        (process / "uid_map").write_text(users)
    except OSError:
        return False
    return True


def _all_to_themselves(name: str) -> str:
    """Return a map of all ids that this process's own map has, each to itself.

    A line of a map is the first id within, the first id outside, and how many follow each.
    """
    lines = []
    for line in Path("/proc/self", name).read_text().splitlines():
        start, _, count = line.split()
        lines.append(f"{start} {start} {count}\n")
    return "".join(lines)


class _Header(ctypes.Structure):
    """Whose capabilities are asked for, 0 for this process, and in which layout."""

    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def _drop_capabilities() -> None:
    """Give up the rights that a new namespace gives.

    Root keeps those over files, say, but not the one to unmount `/proc`, under which that of the
    system is.
    """
    _libc.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN)  # for programs that it starts
    header = _Header(CAPABILITY_VERSION_3, 0)
    # The effective, permitted and inheritable ones, 32 bits of each; then the next 32 of each.
    sets = (ctypes.c_uint32 * 6)()
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
