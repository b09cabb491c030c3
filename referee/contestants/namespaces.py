"""Walls between processes: a contestant's process sees and can signal only what it started itself.

Each contestant gets a PID namespace of its own (see pid_namespaces(7)). Processes outside have no
id in it. So a solution cannot stop, end or slow them, and its /proc does not show them. The PID
namespace belongs to a user namespace: no privilege is needed to make one, and even a solution that
runs as root has no rights over processes outside. Users keep their ids, and so their files.

Four processes take part in the start of a contestant. The init process has the id 1 in the
namespace, the contestant 2. Time runs downwards:

    server                 helper                    init process           contestant
    ------                 ------                    ------------           ----------
    forks the helper
                           makes the namespaces
    maps the users' ids
                           forks the init process
                                                     mounts a new /proc
                           forks the contestant
                           sends both ids, ends      waits for the server   waits for the server
    closes a pipe                                    goes on                goes on

When the helper has ended, the referee adopts the init process and the contestant because it is a
subreaper. It stops, reads and waits for the contestant as for any child, by the id that the
contestant has outside. The init process adopts orphans of the contestant. It ends when the
contestant or the referee ends, and then the kernel kills all other processes of the namespace.

There are no walls in three cases; the helper then forks only the contestant, in no new namespace:

- The system forbids one of these steps, as many containers do.
- The user is not root, but has capabilities. In a user namespace these do not reach files of other
  users, so a solution could not read a file that it can read outside.
- The caller wants none, because a trial has failed (see `wall_trial`).
"""

import os
import select
import signal
import socket
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import NoReturn

from referee.contestants import capabilities, prctl, processes
from referee.contestants.libc import check, libc

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
CONTESTANT_PID = 2  # within the namespace
MAX_DESCRIPTORS = 1 << 20  # the init process closes all below this
# Messages between the server and the helper.
MAX_MESSAGE_BYTES = 64
UNSHARED = b"unshared"  # from the helper: it has made the namespaces
MAPPED = b"mapped"  # from the server: users have the same ids inside as outside
REFUSED = b"refused"  # from the server: the system forbids to map users


def fork(with_walls: bool) -> tuple[int, int]:
    """Fork a contestant. It becomes a child of the referee.

    Like os.fork, this returns twice: in the calling process, the server, and in the contestant.

    Args:
        with_walls: give it a PID namespace of its own if the system allows that.

    Returns:
        In the server: the contestant's id, and the id of its namespace's init process, 0 if it has
        no namespace of its own. In the contestant: (0, 0).

    Raises:
        OSError: the system allows no new process.
    """
    if with_walls and not capabilities.has_some_without_root():
        ids = _fork_by_helper(with_walls=True)
        if ids is not None:
            return ids
    ids = _fork_by_helper(with_walls=False)
    if ids is None:
        raise OSError("no process can be forked")
    return ids


def _fork_by_helper(with_walls: bool) -> tuple[int, int] | None:
    """Fork a contestant by a helper, see the head of this file; it returns twice, like `fork`.

    Args:
        with_walls: give the contestant a PID namespace of its own.

    Returns:
        As `fork` does. In the server: None if the system forbids it.
    """
    to_helper, to_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Nobody writes into this pipe. The server closes its end `adopted` after the helper has ended,
    # which is when the referee has adopted the new processes. These read `until_adopted`: the read
    # returns when `adopted` is closed.
    until_adopted, adopted = os.pipe()
    helper = os.fork()
    if helper == 0:
        to_helper.close()
        os.close(adopted)
        _help(to_server, until_adopted, with_walls)
        return 0, 0  # this is the contestant: the helper has ended in `_help`
    to_server.close()
    os.close(until_adopted)
    with to_helper:
        if with_walls and to_helper.recv(MAX_MESSAGE_BYTES) == UNSHARED:
            is_mapped = _map_users(helper)
            to_helper.send(MAPPED if is_mapped else REFUSED)
        os.waitpid(helper, 0)
        ids = to_helper.recv(MAX_MESSAGE_BYTES).split()  # empty if the helper has failed
    os.close(adopted)
    if not ids:
        return None
    return int(ids[0]), int(ids[1])


def end(init_pid: int) -> None:
    """Kill the init process of a namespace, and so all processes in it; wait until it is gone.

    The init process does not vanish while the namespace has other processes, not even one that has
    ended and for which its parent has not waited. The caller must have waited for the contestant
    before. For children that the contestant has made for the referee, this function waits.
    """
    with suppress(ProcessLookupError):
        os.kill(init_pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        while os.waitpid(init_pid, os.WNOHANG) == (0, 0):
            processes.reap_orphans()
            sleep(1e-4)


def _help(to_server: socket.socket, until_adopted: int, with_walls: bool) -> None:
    """Do the helper's work: fork the init process and the contestant.

    The helper itself ends in this function. Only the contestant returns from it, after the referee
    has adopted it.
    """
    init_pid = 0
    try:
        if with_walls:
            _make_namespaces(to_server)
            init_pid = _fork_init(until_adopted)
        contestant_pid = os.fork()
    except OSError:
        os._exit(1)
    if contestant_pid:
        with suppress(BrokenPipeError):  # the server has been killed
            to_server.send(f"{contestant_pid} {init_pid}".encode())
        os._exit(0)
    to_server.close()
    os.read(until_adopted, 1)
    os.close(until_adopted)
    if with_walls:
        capabilities.drop_gained()


def _make_namespaces(to_server: socket.socket) -> None:
    """Make a user, a PID and a mount namespace; processes that this one forks later are in them.

    Raises:
        OSError: the system forbids it.
    """
    # The init process needs pidfd_open, which Linux has since 5.3. Without it this raises OSError.
    os.close(os.pidfd_open(os.getpid()))
    prctl.show_memory()  # else the server may not write into /proc/PID/uid_map
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS))
    to_server.send(UNSHARED)
    if to_server.recv(MAX_MESSAGE_BYTES) != MAPPED:
        raise PermissionError
    prctl.hide_memory()


def _fork_init(until_adopted: int) -> int:
    """Fork the init process of the namespace; return its id once it has mounted /proc.

    Raises:
        OSError: the system forbids it.
    """
    until_ready, ready = os.pipe()
    init_pid = os.fork()
    if init_pid == 0:
        _be_init(ready, until_adopted)
    os.close(ready)
    is_ready = os.read(until_ready, 1)
    os.close(until_ready)
    if not is_ready:
        os.waitpid(init_pid, 0)
        raise PermissionError
    return init_pid


def _be_init(ready: int, until_adopted: int) -> NoReturn:
    """Do the work of a namespace's init process: mount /proc and wait for the contestant's end.

    Only the referee can end or stop this process. It blocks all signals that can be blocked, and
    the kernel does not deliver SIGKILL and SIGSTOP from inside the namespace to it.

    Args:
        ready: a pipe, into which it writes a byte when /proc is mounted.
        until_adopted: a pipe that ends when the referee has adopted this process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans that it adopts leave no zombies
    if libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID_NODEV_NOEXEC, None):
        os._exit(1)
    capabilities.drop_gained()
    os.write(ready, b".")
    # The contestant's pipes must not stay open here: the referee waits for their end.
    os.closerange(0, until_adopted)
    os.closerange(until_adopted + 1, MAX_DESCRIPTORS)
    os.read(until_adopted, 1)
    prctl.die_with_parent()  # the parent is the referee now
    with suppress(ProcessLookupError):  # the contestant has ended already
        poll = select.poll()
        poll.register(os.pidfd_open(CONTESTANT_PID))
        poll.poll()  # until the contestant ends
    os._exit(0)


def _map_users(pid: int) -> bool:
    """Give users and groups the same ids in a process's user namespace as outside.

    Root may map all users and groups, other users only themselves.

    Returns:
        False if the system forbids it.
    """
    process = Path("/proc", str(pid))
    try:
        if os.geteuid() == 0:
            users = _identity_map("uid_map")
            groups = _identity_map("gid_map")
        else:
            users = f"{os.geteuid()} {os.geteuid()} 1\n"
            groups = f"{os.getegid()} {os.getegid()} 1\n"
            (process / "setgroups").write_text("deny")  # else the system refuses gid_map
        (process / "gid_map").write_text(groups)
        (process / "uid_map").write_text(users)
    except OSError:
        return False
    return True


def _identity_map(name: str) -> str:
    """Return a map of each id to itself, for all ids that this process's own map contains.

    A line of a map has the first id inside, the first id outside, and the number of ids. Example:
    the line "0 100000 65536" of this process's own map becomes "0 0 65536".
    """
    lines = []
    for line in Path("/proc/self", name).read_text().splitlines():
        start, _, count = line.split()
        lines.append(f"{start} {start} {count}\n")
    return "".join(lines)
