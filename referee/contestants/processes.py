"""Stops, continues and ends processes, each with everything that it started.

The processes of a solution are below one of three others:

    the solution's process    it has started them
    the init process          it has adopted them because their parent has ended, see `namespaces`
    the referee               it has adopted them, for it is a subreaper (see prctl(2)); or the
                              solution's process has started them as its siblings (CLONE_PARENT in
                              clone(2))

Processes are looked up in /proc:

    /proc/PID/stat                 the state of a process
    /proc/PID/task/TID/stat        the state of one of its threads, and whether it is ending
    /proc/PID/task/TID/children    the children of one of its threads
    /proc/PID/task/TID/schedstat   how often the thread has run, among others
"""

import os
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep

from referee.contestants import prctl

SECONDS_TO_STOP = 10.0  # then a tree is killed
SECONDS_TO_REST = 0.01  # then a process that does not stop may be waiting for its child
SECONDS_TO_DIE = 10.0  # then `end_orphans` no longer waits
MAX_PART_BYTES = 1 << 16  # of a file in /proc, for one read(2)
# The letters in /proc/PID/stat for the state of a process.
GONE = "X"  # it is dead; here also: it is not there
ENDED = {"Z", GONE}  # a zombie, or gone
AT_REST = {"T", "t", *ENDED}  # stopped, traced, or ended
# Linux's flag of a thread that is ending or has ended: it runs no code of its program any more.
PF_EXITING = 0x4

# The processes that do not belong to the solution under grading: those of the referee's own code
# (the server, eager, init processes of namespaces), and children from before `subreaper` began.
# Every other child of the referee's first thread, and everything below such a child, belongs to the
# solution.
referees_pids: set[int] = set()


@contextmanager
def subreaper() -> Iterator[None]:
    """Make the referee a subreaper for the time of a `with` block; end all orphans afterwards.

    In this time no process of the same user can read the referee's memory, unless it has the right
    to read that of all processes. Children that the process's first thread starts in this time, and
    those of a thread that ends, are taken for orphans and ended.
    """
    children_before = set(children_of(os.getpid()))
    referees_pids.update(children_before)
    # A process inherits SIG_IGN from the program that starts it. With it, os.waitpid would fail.
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prctl.set_subreaper(is_subreaper=True)
    prctl.hide_memory()
    try:
        yield
    finally:
        end_orphans()
        prctl.show_memory()
        prctl.set_subreaper(is_subreaper=False)
        referees_pids.difference_update(children_before)


def children_of(pid: int) -> list[int]:
    """Return the children of a process, including those that it adopted."""
    children: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - it is called very often
            children += _children_of_thread(pid, thread)
    return children


def _children_of_thread(pid: int, thread: int | str) -> list[int]:
    """Return the children of one thread of a process; none if it is gone."""
    with suppress(OSError):
        return [int(child) for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
    return []


def _read(path: str) -> bytes:
    """Return what a file in /proc contains.

    `open` would take three times as long, and a file is read thousands of times in a grading.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = b""
        while part := os.read(descriptor, MAX_PART_BYTES):
            content += part
    finally:
        os.close(descriptor)
    return content


def lists_children() -> bool:
    """Return whether the kernel lists the children of threads; it needs CONFIG_PROC_CHILDREN."""
    referee = os.getpid()
    try:
        _read(f"/proc/{referee}/task/{referee}/children")
    except OSError:
        return False
    return True


def counts_runs() -> bool:
    """Return whether the kernel counts how often a thread runs.

    If it does, the count of the referee's own thread is above 0.
    """
    counts = _schedule_counts([os.getpid()]).values()
    return any(int(count) > 0 for count in counts)


def scheduler_state(pid: int) -> str:
    """Return the letter that /proc has for a process's state; GONE if the process is not there."""
    return _scheduler_state_in(f"/proc/{pid}")


def has_ended(pid: int) -> bool:
    """Return whether a process, or at least its first thread, is dead, a zombie or not there."""
    return scheduler_state(pid) in ENDED


def is_dead_child(pid: int) -> bool:
    """Return whether a child of the referee is dead, with all its threads, or not there.

    `has_ended` is also true if only the first thread has ended.
    """
    try:
        events = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, pid, events) is not None
    except ChildProcessError:
        return True


def scheduler_states_of_threads(pid: int) -> list[str]:
    """Return the letters for all threads of a process; none if the process is not there."""
    return [_scheduler_state_in(thread) for thread in _folders_of_threads(pid)]


def _folders_of_threads(pid: int) -> list[str]:
    """Return the folders in /proc of all threads of a process; none if the process is not there."""
    folder = f"/proc/{pid}/task"
    with suppress(OSError):
        return [f"{folder}/{thread}" for thread in os.listdir(folder)]  # noqa: PTH208
    return []


def _scheduler_state_in(folder: str) -> str:
    """Return the letter for a process or a thread, which has a folder in /proc."""
    try:
        return _fields_of_stat(folder)[0]
    except OSError:
        return GONE


def _fields_of_stat(folder: str) -> list[str]:
    """Return the fields of a process's or a thread's `stat` that follow the name.

    The name is the second field, and may contain anything, ")" too:

        4712 (a name) S 1 4712 4712 0 -1 4194368 ...
    """
    return _read(f"{folder}/stat").rpartition(b")")[2].decode().split()


def _live_threads(pid: int) -> dict[str, str]:
    """Return the state's letter of each live thread: one that is neither ending nor has ended.

    A thread may be ending when its process stops. It does not stop then, but goes on until it is
    gone. The zombie of a first thread has ended, too, and can vanish at any time.

    Returns:
        The letters by the threads' folders.
    """
    live = {}
    for thread in _folders_of_threads(pid):
        with suppress(OSError):  # this thread is gone
            fields = _fields_of_stat(thread)
            flags = int(fields[6])
            if not flags & PF_EXITING:
                live[thread] = fields[0]
    return live


class ProcessTree:
    """A contestant's process and everything below it, which stop and go on together.

    `Contestant.ask` uses a tree and its `Rest` as follows. Time runs downwards:

        rest.was_broken    whether a thread has run in this rest; if not, the request is made
        ------------------ the referee's clock starts
        rest.go_on         all processes go on; one of them replies
        rest = tree.stop   all processes that a search has found are at rest; a timer or a tracer
                           can still wake one
        ------------------ the clock stops
        rest.note_runs     it is noted how often each thread has run. If a process runs, or is new
                           since `stop`, the rest counts as broken
                           the referee compares results and writes the next inputs
        rest.was_broken    a thread that has run in between has another number than the one noted

    Args:
        pid: the contestant's process, a child of the referee.
        is_solution: whether it is a solution; the referee's other children, except for those in
            `referees_pids`, then belong to this tree. At most one such tree exists at a time.
        init_pid: the init process of its namespace, which adopts the namespace's orphans instead
            of the referee, see `namespaces`; 0 if it has no namespace of its own.
    """

    def __init__(self, pid: int, is_solution: bool, init_pid: int = 0) -> None:
        self._pid = pid
        self.is_solution = is_solution
        self._init_pid = init_pid

    def stop(self) -> "Rest | None":
        """Stop all processes of the tree.

        Until a process has stopped, it can fork, or wake another one that has stopped before. So
        the search is repeated until all processes that it finds are at rest. (A process could fork
        after the search, and stop itself before it is looked at. `Rest.note_runs` finds the new
        process.)

        Returns:
            None if some process does not stop; all processes that a search finds are then killed.
        """
        deadline = monotonic() + SECONDS_TO_STOP
        pids = self.find_pids()
        while running := [pid for pid in pids if not _is_at_rest(pid)]:
            if monotonic() > deadline:
                self.kill()
                return None
            for pid in running:
                _send(pid, signal.SIGSTOP)
            _wait_for_rest(running)
            pids = self.find_pids()
        return Rest(self, pids)

    def kill(self) -> None:
        """Kill all processes of the tree that a search finds, stopped or not."""
        for pid in self.find_pids():
            _send(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill all processes of the tree.

        They are stopped first: a process that runs could fork another one during the search.
        """
        self.stop()
        self.kill()

    def find_pids(self) -> list[int]:
        """Return the contestant's process, the orphans of the tree, and all processes below."""
        pids = [self._pid]
        if self._init_pid:
            pids += children_of(self._init_pid)
        # A solution's clock contains the time of this search. So that eager's does too, eager's
        # tree makes the same search and ignores what it finds.
        orphans = _orphans(except_pid=self._pid)
        if self.is_solution:
            pids += orphans
        return pids + _below(pids)


class Rest:
    """The time from `ProcessTree.stop` to `go_on`, in which no process of a solution may run.

    A solution's rest whose runs nobody has noted counts as broken.

    Args:
        tree: the processes.
        stopped: the ids of those that `stop` has found and stopped.
    """

    def __init__(self, tree: ProcessTree, stopped: list[int]) -> None:
        self._tree = tree
        self._stopped = stopped
        self._was_woken = True  # until `note_runs` has found all at rest
        self._counts: dict[str, bytes] = {}  # how often each thread has run, by its folder in /proc

    def note_runs(self) -> None:
        """Note how often each thread of a solution has run; `was_broken` compares.

        It takes too long for `stop`, during which the clock runs. All threads are looked at: for
        `stop`, a process that another one traces (see ptrace(2)) counts as stopped, although its
        tracer can have let one of its threads go on.

        A process that was woken after `stop`, but before its runs were counted, may have started
        another one and stopped again. Two searches for such a new process are needed. The first one
        may miss it: if the new process's parent ends, a process above adopts it, and the search may
        have read the children of that adopter already. The second search finds it, because it is
        not adopted a second time. It would be only if its adopter ended. But an adopter is the init
        process or the referee, which do not end, or a stopped process, whose end `was_broken` would
        notice.
        """
        if not self._tree.is_solution:
            return
        self._counts = _schedule_counts(self._stopped)
        states = [state for pid in self._stopped for state in _live_threads(pid).values()]
        found = {*self._tree.find_pids(), *self._tree.find_pids()}
        self._was_woken = not (AT_REST.issuperset(states) and found.issubset(self._stopped))

    def was_broken(self) -> bool:
        """Return whether a thread of a solution has run, although it was stopped.

        A timer of the solution can send SIGCONT to its stopped process, for example. If a process
        has ended since `note_runs`, its threads are gone, and that counts as a run, too: it may
        have started another process before.
        """
        if not self._tree.is_solution:
            return False
        return self._was_woken or _schedule_counts(self._stopped) != self._counts

    def go_on(self) -> None:
        """End the rest: continue all processes that `stop` has stopped."""
        for pid in self._stopped:
            _send(pid, signal.SIGCONT)


def _wait_for_rest(pids: list[int]) -> None:
    """Wait a while until processes that got SIGSTOP are at rest.

    If one does not come to rest, all processes below it are woken, and the search in
    `ProcessTree.stop` begins anew.
    """
    for pid in pids:
        if not _comes_to_rest(pid):
            _wake_processes_below(pid)
            return


def _wake_processes_below(pid: int) -> None:
    """Wake the processes below one that does not stop; wait until it stops, but not for long.

    A thread that starts a program by vfork(2), as `subprocess` does, stops only after its child has
    started the program. The child cannot do that while it is stopped itself.
    """
    for child in _below([pid]):
        _send(child, signal.SIGCONT)
    _comes_to_rest(pid)


def _schedule_counts(pids: list[int]) -> dict[str, bytes]:
    """Return how often each thread of some processes has run, as /proc writes this number.

    The kernel counts a run when it puts the thread on a core. Threads that are ending are left out:
    they can vanish although nothing wakes them.
    """
    counts = {}
    for pid in pids:
        for thread in _live_threads(pid):
            with suppress(OSError):
                # "81734 2911 12": nanoseconds on a core, nanoseconds of waiting for one, and runs
                counts[thread] = _read(f"{thread}/schedstat").split()[2]
    return counts


def _below(pids: list[int]) -> list[int]:
    """Return the children of some processes, their children, and so on."""
    below: list[int] = []
    unvisited = deque(pids)
    while unvisited:
        children = children_of(unvisited.popleft())
        below += children
        unvisited += children
    return below


def end_orphans() -> None:
    """Kill all processes that the solution has left behind and wait until they are gone.

    Each pass kills the orphans and their children. Processes below these become children of the
    referee by that, for the next pass. (In a namespace they become children of its init process,
    and all end with it.)
    """
    deadline = monotonic() + SECONDS_TO_DIE
    while (orphans := _orphans()) and monotonic() < deadline:
        for pid in orphans:
            children = children_of(pid)
            _send(pid, signal.SIGKILL)
            for child in children:
                _send(child, signal.SIGKILL)
        reap_orphans()
        sleep(0.001)


def reap_orphans() -> None:
    """Let the processes vanish that the solution has left behind and that have ended."""
    for pid in _orphans():
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _orphans(except_pid: int = 0) -> list[int]:
    """Return the referee's children that are neither its own processes nor `except_pid`.

    They are orphans that the referee has adopted, and siblings that a solution's process has
    started, see the head of this file. Both are children of the referee's first thread, so the
    search looks at no other.
    """
    referee = os.getpid()
    children = _children_of_thread(referee, referee)
    return [pid for pid in children if pid not in referees_pids and pid != except_pid]


def _send(pid: int, number: int) -> None:
    """Send a signal to a process if it is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _comes_to_rest(pid: int) -> bool:
    """Wait at most SECONDS_TO_REST until a process is at rest; return whether it is."""
    end = monotonic() + SECONDS_TO_REST
    while not _is_at_rest(pid):
        if monotonic() > end:
            return False
        os.sched_yield()  # a sleep would add to the clock of a contestant
    return True


def _is_at_rest(pid: int) -> bool:
    """Return whether all threads of a process have stopped or it has ended."""
    try:
        events = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, pid, events) is not None
    except ChildProcessError:
        # It is not a child of the referee, so /proc tells.
        return all(state in AT_REST for state in scheduler_states_of_threads(pid))
