"""Capabilities: the rights of root, one by one; see capabilities(7).

A process in a new user namespace has all of them. They reach what belongs to the namespace, and the
files of those users that are mapped into it.
"""

import ctypes
import os
from pathlib import Path

from referee.contestants.libc import check, libc

PR_CAPBSET_DROP = 24
CAP_SYS_ADMIN = 21
CAPABILITY_VERSION_3 = 0x20080522


def has_some_without_root() -> bool:
    """Return whether this process has capabilities although its user is not root."""
    status = Path("/proc/self/status").read_text()
    [effective] = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return os.geteuid() != 0 and int(effective, 16) != 0


class _Header(ctypes.Structure):
    """C's struct __user_cap_header_struct.

    `version` says how the sets of capabilities are laid out. `pid` is 0 for the calling process.
    """

    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def drop_gained() -> None:
    """Give up the capabilities that a new user namespace gives.

    Root gives up only CAP_SYS_ADMIN. With it, a process could unmount the namespace's /proc and see
    the system's below it. Root keeps the rest, for example its rights over files.
    """
    libc.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN)  # programs that it executes do not get it back
    header = _Header(CAPABILITY_VERSION_3, 0)
    # The effective, the permitted and the inheritable set have 64 bits each. Elements 0 to 2 are
    # their low 32 bits, with CAP_SYS_ADMIN, and elements 3 to 5 the high ones. Zero: no capability.
    sets = (ctypes.c_uint32 * 6)()
    if os.geteuid() == 0:
        check(libc.capget(ctypes.byref(header), sets))
        for i in range(3):
            sets[i] &= ~(1 << CAP_SYS_ADMIN)
    check(libc.capset(ctypes.byref(header), sets))
