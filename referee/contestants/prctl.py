"""Settings of the calling process by prctl(2): who may read its memory, and when it is killed."""

import signal

from referee.contestants.libc import libc

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def show_memory() -> None:
    """Let processes of the same user read this one's memory and its files in /proc."""
    libc.prctl(PR_SET_DUMPABLE, 1)


def hide_memory() -> None:
    """Let no process read this one's memory, unless it has the right to read that of all."""
    libc.prctl(PR_SET_DUMPABLE, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def set_subreaper(is_subreaper: bool) -> None:
    """Set whether this process adopts the orphans below it."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, int(is_subreaper))
