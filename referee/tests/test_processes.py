"""Processes are stopped and ended, with all that they have started."""

import ctypes
import os
import platform
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import pytest
import torch

from referee import engine
from referee.contestants import prctl, processes
from referee.contestants.contestant import Contestant
from referee.contestants.errors import RaisedError, UnstoppableError, WokenError
from referee.contestants.pool import Pool
from referee.contestants.role import Role
from referee.testing.graded import grade
from referee.testing.texts import correct, error, module, reference
from referee.tests.counters import Counter, until
from referee.verdict import outcome
from referee.verdict_words import ERROR

TIMER_SECONDS = 0.2


@pytest.fixture
def fork():
    """Return a function that forks a process, which does some work for ever.

    The function returns the id of the process. The process and its children end with the test.
    """
    pids = []

    def fork_one(work: Callable[[], NoReturn]) -> int:
        pid = os.fork()
        if pid == 0:
            work()
        pids.append(pid)
        return pid

    yield fork_one
    for pid in pids:
        for each in (*processes.children_of(pid), pid):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        with suppress(ChildProcessError):  # a test may have waited for its end
            os.waitpid(pid, 0)


@pytest.fixture
def sleeper(fork):
    """Return the id of a child process that sleeps."""
    return fork(lambda: time.sleep(600))


def test_a_stopped_tree_does_nothing(fork):
    """A process that it has started, in another session, does nothing either."""
    parents_counter, childs_counter = Counter(), Counter()

    def start_a_child() -> NoReturn:
        if os.fork() == 0:
            os.setsid()
            childs_counter.count()
        parents_counter.count()

    pid = fork(start_a_child)
    tree = processes.ProcessTree(pid, is_solution=False)
    for _ in range(5):
        assert parents_counter.goes_on()
        assert childs_counter.goes_on()
        rest = tree.stop()
        assert parents_counter.is_still()
        assert childs_counter.is_still()
        rest.go_on()
    [child] = processes.children_of(pid)
    tree.end()
    os.waitpid(pid, 0)
    assert until(lambda: processes.scheduler_state(child) in "XZ")


@pytest.mark.parametrize(("states", "has_stopped"), [("TTT", True), ("TRT", False), ("", True)])
def test_a_process_has_stopped_when_all_its_threads_have(states, has_stopped, sleeper, monkeypatch):
    """The states of threads decide for a process that is no child, as the sleeper seems to be."""

    def refuse(*_: object) -> NoReturn:
        raise ChildProcessError

    monkeypatch.setattr(os, "waitid", refuse)
    monkeypatch.setattr(processes, "scheduler_states_of_threads", lambda _: list(states))
    monkeypatch.setattr(processes, "SECONDS_TO_STOP", 0.1)
    rest = processes.ProcessTree(sleeper, is_solution=False).stop()
    assert (rest is not None) == has_stopped


def test_all_threads_have_a_state():
    release = threading.Event()
    threads = [threading.Thread(target=release.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    states = processes.scheduler_states_of_threads(os.getpid())
    release.set()
    for thread in threads:
        thread.join()
    assert len(states) >= len(threads) + 1
    assert processes.GONE not in states
    assert processes.scheduler_states_of_threads(1 << 30) == []


def test_a_tree_that_starts_programs_is_stopped(fork):
    """A thread that waits for a child of vfork(2) cannot be stopped before the child goes on."""

    def start_programs() -> NoReturn:
        while True:
            subprocess.run(["/bin/true"], check=False)

    pid = fork(start_programs)
    tree = processes.ProcessTree(pid, is_solution=False)
    for index in range(200):
        rest = tree.stop()
        assert processes.scheduler_state(pid) == "T"
        rest.go_on()
        time.sleep(index % 5 * 1e-3)  # so that the next stop comes at another point of a start


def test_a_process_that_is_woken_by_another_one_is_stopped_again(fork):
    """A child of the counting process wakes it whenever it has stopped."""
    counter = Counter()

    def count_and_be_woken() -> NoReturn:
        counting = os.getpid()
        if os.fork() == 0:
            while True:
                if processes.scheduler_state(counting) == "T":
                    os.kill(counting, signal.SIGCONT)
        counter.count()

    tree = processes.ProcessTree(fork(count_and_be_woken), is_solution=True)
    for _ in range(40):
        assert counter.goes_on()
        rest = tree.stop()
        rest.note_runs()
        assert counter.is_still()
        assert not rest.was_broken()
        rest.go_on()


@pytest.mark.parametrize("has_timer", [True, False])
def test_a_process_that_a_timer_wakes_is_noticed(has_timer, fork):
    """The kernel sends SIGCONT to the stopped process: nothing runs that could be stopped."""
    counter = Counter()

    def wait_for_timer() -> NoReturn:
        if has_timer:
            start_timer(signal.SIGCONT)
        counter.count()

    tree = processes.ProcessTree(fork(wait_for_timer), is_solution=True)
    assert counter.goes_on()
    rest = tree.stop()
    rest.note_runs()
    time.sleep(2 * TIMER_SECONDS)
    assert rest.was_broken() == has_timer


@pytest.mark.parametrize("is_woken_first", [True, False])
def test_a_process_that_is_woken_starts_another_and_ends(is_woken_first, fork):
    """The other one is in no list of stopped processes, and the woken one leaves no zombie.

    Args:
        is_woken_first: whether the timer wakes the process before its runs are noted.
        fork: the fixture.
    """
    counter = Counter()

    def start_a_helper() -> NoReturn:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the helper vanishes when it ends
        if os.fork() == 0:
            signal.signal(signal.SIGCONT, leave_the_work_to_a_child)
            start_timer(signal.SIGCONT)
            counter.count()
        while True:
            signal.pause()

    with processes.subreaper():
        pid = fork(start_a_helper)
        processes.referees_pids.add(pid)
        tree = processes.ProcessTree(pid, is_solution=True)
        assert counter.goes_on()
        rest = tree.stop()
        if is_woken_first:
            time.sleep(2 * TIMER_SECONDS)
        rest.note_runs()
        if not is_woken_first:
            time.sleep(2 * TIMER_SECONDS)
        assert rest.was_broken()
        assert counter.goes_on()  # in the child
        processes.referees_pids.discard(pid)


def leave_the_work_to_a_child(number: int, frame: object) -> None:
    """End this process; a child goes on with its work, and has such a timer, too."""
    if os.fork() != 0:
        os._exit(0)
    start_timer(signal.SIGCONT)


PTRACE_SEIZE = 0x4206
PTRACE_CONT = 7
WAIT_ALL = 0x40000000  # __WALL: waitpid(2) also waits for threads
PR_SET_PTRACER = 0x59616D61


def test_a_process_that_another_one_adopts_during_the_search_is_noticed(fork, monkeypatch):
    """A woken process has started two more and has stopped again: each is the child of the former.

    When the search has read the children of the first process, the third one ends. The last one
    becomes a child of the first, and is found by no search that goes on below.
    """
    received, sent = os.pipe()

    def start_two(*_: object) -> None:
        signal.signal(signal.SIGCONT, signal.SIG_DFL)
        if os.fork() == 0:
            if os.fork() == 0:
                os.write(sent, f"{os.getpid():10}".encode())
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGSTOP)

    def adopt() -> NoReturn:
        prctl.set_subreaper(is_subreaper=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
        if os.fork() == 0:
            signal.signal(signal.SIGCONT, start_two)
            os.write(sent, b"!")
        while True:
            time.sleep(600)

    first = fork(adopt)
    os.read(received, 1)
    [woken] = processes.children_of(first)
    rest = processes.ProcessTree(first, is_solution=True).stop()
    os.kill(woken, signal.SIGCONT)
    last = int(os.read(received, 10))
    assert until(lambda: processes.scheduler_state(woken) == "T")
    [third] = processes.children_of(woken)
    children_of = processes.children_of

    def end_third_then_read(pid: int) -> list[int]:
        if pid == woken:
            with suppress(ProcessLookupError):
                os.kill(third, signal.SIGKILL)
            assert until(lambda: last in children_of(first))
        return children_of(pid)

    monkeypatch.setattr(processes, "children_of", end_third_then_read)
    rest.note_runs()
    assert rest.was_broken()


def test_a_thread_that_a_tracer_lets_go_on_is_noticed(fork, monkeypatch):
    """Its process has stopped, for waitid(2), and the thread runs.

    The tracer must act before it is stopped itself. The test gives it time for that.
    """
    counter = Counter()
    libc = ctypes.CDLL(None)
    until_traced, traced = os.pipe()

    def let_a_thread_be_traced() -> NoReturn:
        libc.prctl(PR_SET_PTRACER, -1)  # any process may trace this one
        thread = threading.Thread(target=counter.count)
        thread.start()
        if os.fork() == 0:
            is_allowed = libc.ptrace(PTRACE_SEIZE, thread.native_id, 0, 0) == 0
            os.write(traced, b"y" if is_allowed else b"n")
            while is_allowed:
                os.waitpid(-1, WAIT_ALL)
                libc.ptrace(PTRACE_CONT, thread.native_id, 0, 0)
        while True:
            signal.pause()

    tree = processes.ProcessTree(fork(let_a_thread_be_traced), is_solution=True)
    if os.read(until_traced, 1) != b"y":
        pytest.skip("the system allows no tracing")
    monkeypatch.setattr(processes, "_send", lambda *args: (os.kill(*args), time.sleep(0.02)))
    monkeypatch.setattr(processes, "_schedule_counts", lambda _: {})
    for _ in range(50):
        rest = tree.stop()
        if not counter.is_still():
            break
        rest.go_on()  # the tracer was too slow, as on a busy machine
    assert counter.goes_on()
    rest.note_runs()
    assert rest.was_broken()


def test_a_process_that_ends_leaves_a_zombie_whose_end_is_no_run(fork):
    """The zombie may vanish at any time, and nothing has run."""
    pid = fork(lambda: os._exit(0))
    assert until(lambda: processes.is_dead_child(pid))
    tree = processes.ProcessTree(pid, is_solution=True)
    rest = tree.stop()
    rest.note_runs()
    os.waitpid(pid, 0)
    assert not rest.was_broken()


def test_the_reason_for_a_process_that_a_timer_wakes():
    reason = "runs although it is stopped, perhaps woken by a timer; found while importing"
    assert outcome(WokenError(-signal.SIGKILL, ""), "importing") == (ERROR, reason)


def test_a_process_that_is_woken_after_its_method_has_raised_is_noticed():
    cpu = torch.device("cpu")
    pool = Pool(cpu)
    with engine.referee_at_work(separate_builds=True) as server:
        contestant = Contestant(server, pool, cpu, Role.SOLUTION)
        try:
            with pytest.raises(RaisedError):
                contestant.ask("construct", arguments={}, seed=0, dtype="")  # no file is imported
            os.kill(contestant.pid, signal.SIGCONT)
            assert until(lambda: processes.scheduler_state(contestant.pid) == "S")
            with pytest.raises(WokenError):
                contestant.ask("release")
        finally:
            contestant.close()
            pool.close()


def start_timer(number: int) -> None:
    """Have the kernel send a signal to this process every TIMER_SECONDS, by timer_create(2)."""
    libc = ctypes.CDLL(None)
    event = (ctypes.c_int * 16)()  # a struct sigevent, whose third number is the signal's
    event[2] = number
    timer = ctypes.c_void_p()
    assert libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) == 0
    nanoseconds = round(1e9 * TIMER_SECONDS)
    interval_and_time = (ctypes.c_long * 4)(0, nanoseconds, 0, nanoseconds)
    assert libc.timer_settime(timer, 0, interval_and_time, None) == 0


def test_a_tree_that_never_stops_is_killed(sleeper, monkeypatch):
    monkeypatch.setattr(os, "waitid", lambda *_: None)  # says that the process has not stopped
    monkeypatch.setattr(processes, "SECONDS_TO_STOP", 0.1)
    assert not processes.ProcessTree(sleeper, is_solution=False).stop()
    _, status = os.waitpid(sleeper, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    error = UnstoppableError(-signal.SIGKILL, "")
    assert outcome(error, "importing") == (ERROR, "does not obey SIGSTOP while importing")


CLONE_PARENT = 0x8000
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())  # the number of the system call


@pytest.mark.skipif(CLONE is None, reason="needs the number of clone(2) on this machine")
@pytest.mark.parametrize("has_walls", [False, True])
def test_a_child_that_a_solution_forks_for_the_referee_stops_with_it(has_walls, sleeper):
    """The sleeper plays the init process of the solution's namespace."""
    counter = Counter()
    libc = ctypes.CDLL(None)
    with processes.subreaper():
        pid = os.fork()
        if pid == 0:
            is_sibling = libc.syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0) == 0
            if is_sibling:
                counter.count()
            signal.pause()
        processes.referees_pids.add(pid)
        try:
            tree = processes.ProcessTree(
                pid, is_solution=True, init_pid=sleeper if has_walls else 0
            )
            assert counter.goes_on()
            assert tree.stop()
            assert counter.is_still()
            tree.end()
            os.waitpid(pid, 0)
        finally:
            processes.referees_pids.discard(pid)


def test_orphans_are_found_and_ended():
    reads, writes = os.pipe()
    with processes.subreaper():
        parent = os.fork()
        if parent == 0:
            if os.fork() == 0:
                os.setsid()
                os.write(writes, str(os.getpid()).encode())
                signal.pause()
            os._exit(0)
        orphan = int(os.read(reads, 16))
        assert until(lambda: orphan in processes.children_of(os.getpid()))
    assert processes.scheduler_state(parent) == processes.GONE
    assert processes.scheduler_state(orphan) == processes.GONE


def test_nothing_is_graded_where_the_kernel_does_not_list_children(tmp_path, monkeypatch):
    """As a kernel without CONFIG_PROC_CHILDREN, which has no such file in /proc."""
    read = processes._read

    def hide_children(path):
        if path.endswith("/children"):
            raise FileNotFoundError
        return read(path)

    monkeypatch.setattr(processes, "_read", hide_children)
    table = {"plain": error(module("return torch.relu(x)"), "CONFIG_PROC_CHILDREN")}
    grade(reference("return torch.relu(x)", "[torch.rand(8, 64)]"), table, tmp_path)


@pytest.mark.parametrize("content", [None, b"0 0 0\n"])
def test_a_note_says_that_the_kernel_does_not_count_runs(content, tmp_path, monkeypatch):
    """As a kernel without CONFIG_SCHED_INFO, or with these counts switched off."""
    read = processes._read

    def hide_counts(path):
        if not path.endswith("/schedstat"):
            return read(path)
        if content is None:
            raise FileNotFoundError
        return content

    monkeypatch.setattr(processes, "_read", hide_counts)
    table = {"plain": correct(module("return torch.relu(x)"), "does not count how often threads")}
    grade(reference("return torch.relu(x)", "[torch.rand(8, 64)]"), table, tmp_path)
