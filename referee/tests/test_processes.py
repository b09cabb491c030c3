"""Processes are stopped and ended, with all that they have started."""

import ctypes
import mmap
import os
import platform
import signal
import subprocess
import threading
import time
from contextlib import suppress

import pytest

from referee.contestants import processes
from referee.contestants.errors import UnstoppableError
from referee.verdict import outcome
from referee.words import ERROR


def test_a_stopped_tree_does_nothing():
    """Processes that it has started, in other sessions too, do nothing either."""
    memory = mmap.mmap(-1, 16)
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            os.setsid()
        while True:
            memory[0] = (memory[0] + 1) % 256
    tree = processes.Tree(pid, is_solution=False)
    time.sleep(0.1)
    for _ in range(5):
        tree.stop()
        count = memory[0]
        time.sleep(0.02)
        assert memory[0] == count
        tree.go_on()
        end = time.monotonic() + 10
        while memory[0] == count and time.monotonic() < end:
            time.sleep(0.001)
        assert memory[0] != count
    children = processes.children_of(pid)
    tree.end()
    os.waitpid(pid, 0)
    for child in children:
        end = time.monotonic() + 10
        while processes.state_of(child) not in "XZ" and time.monotonic() < end:
            time.sleep(0.001)
        assert processes.state_of(child) in "XZ"


@pytest.mark.parametrize(("states", "is_at_rest"), [("TTT", True), ("TRT", False), ("", True)])
def test_a_process_is_at_rest_when_all_its_threads_are(states, is_at_rest, monkeypatch):
    monkeypatch.setattr(processes, "states_of_threads", lambda _: list(states))
    not_a_child = os.getppid()
    assert processes._is_at_rest(not_a_child) == is_at_rest


def test_all_threads_have_a_state():
    release = threading.Event()
    threads = [threading.Thread(target=release.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    states = processes.states_of_threads(os.getpid())
    release.set()
    for thread in threads:
        thread.join()
    assert len(states) >= len(threads) + 1
    assert processes.GONE not in states
    assert processes.states_of_threads(1 << 30) == []


@pytest.fixture
def sleeper():
    """Return the id of a child process that sleeps."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    yield pid
    with suppress(ProcessLookupError, ChildProcessError):  # a test may have waited for its end
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_tree_that_starts_programs_is_stopped():
    """A thread that waits for a child of vfork(2) cannot be stopped before the child goes on."""
    pid = os.fork()
    if pid == 0:
        while True:
            subprocess.run(["/bin/true"], check=False)
    tree = processes.Tree(pid, is_solution=False)
    for index in range(200):
        assert tree.stop()
        assert processes.state_of(pid) == "T"
        tree.go_on()
        time.sleep(index % 5 * 1e-3)
    tree.end()
    os.waitpid(pid, 0)


def wait_for_change(memory):
    """Wait until a process changes the first byte of shared memory."""
    first, end = memory[0], time.monotonic() + 10
    while memory[0] == first and time.monotonic() < end:
        time.sleep(0.001)
    assert memory[0] != first


def count_in(memory):
    """Count in the first byte of shared memory until the process is killed."""
    while True:
        memory[0] = (memory[0] + 1) % 256


def test_a_process_that_is_woken_by_another_one_is_stopped_again():
    """A child of the counting process wakes it whenever it has stopped.

    `stop` must not return True while one of the two runs. It may give up, but not be deceived.
    """
    memory = mmap.mmap(-1, 16)
    pid = os.fork()
    if pid == 0:
        counter = os.getpid()
        if os.fork() == 0:
            while True:
                if processes.state_of(counter) == "T":
                    os.kill(counter, signal.SIGCONT)
        count_in(memory)
    wait_for_change(memory)
    tree = processes.Tree(pid, is_solution=True)
    for _ in range(40):
        assert tree.stop()
        tree.note_runs()
        count = memory[0]
        time.sleep(0.01)
        assert memory[0] == count
        assert not tree.has_run()
        tree.go_on()
        time.sleep(0.002)
    tree.end()
    os.waitpid(pid, 0)


@pytest.mark.parametrize("has_timer", [True, False])
def test_a_process_that_a_timer_wakes_is_noticed(has_timer):
    """The kernel sends SIGCONT to the stopped process: nothing has run that could be stopped."""
    memory = mmap.mmap(-1, 16)
    libc = ctypes.CDLL(None)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGUSR1, lambda *_: has_timer and start_timer(libc, signal.SIGCONT))
        count_in(memory)
    wait_for_change(memory)
    tree = processes.Tree(pid, is_solution=True)
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.01)
    assert tree.stop()
    tree.note_runs()
    time.sleep(0.3)
    assert tree.has_run() == has_timer
    tree.end()
    os.waitpid(pid, 0)


def start_timer(libc, number, nanoseconds=100_000_000):
    """Have the kernel send a signal to this process later, by timer_create(2)."""
    event = (ctypes.c_int * 16)()  # a struct sigevent, whose third number is the signal's
    event[2] = number
    timer = ctypes.c_void_p()
    assert libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) == 0
    interval_and_time = (ctypes.c_long * 4)(0, 0, 0, nanoseconds)
    assert libc.timer_settime(timer, 0, interval_and_time, None) == 0


def test_a_tree_that_never_stops_is_killed(sleeper, monkeypatch):
    monkeypatch.setattr(processes, "_is_at_rest", lambda _: False)
    monkeypatch.setattr(processes, "SECONDS_TO_STOP", 0.1)
    assert not processes.Tree(sleeper, is_solution=False).stop()
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
    memory = mmap.mmap(-1, 16)
    libc = ctypes.CDLL(None)
    with processes.subreaper():
        pid = os.fork()
        if pid == 0:
            is_sibling = libc.syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0) == 0
            if is_sibling:
                count_in(memory)
            signal.pause()
        processes.own_pids.add(pid)
        try:
            tree = processes.Tree(pid, is_solution=True, init_pid=sleeper if has_walls else 0)
            wait_for_change(memory)
            assert tree.stop()
            count = memory[0]
            time.sleep(0.05)
            assert memory[0] == count
            tree.end()
            os.waitpid(pid, 0)
        finally:
            processes.own_pids.discard(pid)


def test_orphans_are_found_and_ended():
    with processes.subreaper():
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                signal.pause()
            os._exit(0)
        end = time.monotonic() + 10
        while not processes._orphans() and time.monotonic() < end:
            time.sleep(0.001)
        orphans = processes._orphans()
        assert orphans
    assert not any(processes.state_of(pid) in "RSDT" for pid in orphans)
