"""Walls: a solution can neither see nor harm processes outside its own namespace."""

import json
import mmap
import os
import signal
import time
import traceback
from pathlib import Path

import pytest
import torch
from graded import check
from texts import IMPORTS, correct, module, reference, wrong

from referee import namespaces, processes, records
from referee.engine import Engine, read_files, referee_at_work
from referee.grading import Options
from referee.problem import Problem
from referee.reference_file import load
from referee.timing import Rounds

CPU = torch.device("cpu")


def start(work, walled=True):
    """Fork a process that does some work and ends; return its id, and that of the first process."""
    pid, first = namespaces.fork(walled)
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    return pid, first


def close(pid, first):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if first:
        namespaces.end(first)


def until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.fixture
def walls():
    """Orphans are adopted; skips where the system forbids namespaces."""
    with processes.reaping():
        pid, first = start(signal.pause)
        close(pid, first)
        if not first:
            pytest.skip("the system allows no namespaces of processes")
        yield


@pytest.fixture
def victim():
    """A process of the same user."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def harms(pid):
    """Ways to harm a process."""
    return {
        "end": lambda: os.kill(pid, signal.SIGKILL),
        "stop": lambda: os.kill(pid, signal.SIGSTOP),
        "group": lambda: os.killpg(pid, signal.SIGSTOP),
        "renice": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        "move": lambda: os.sched_setaffinity(pid, {0}),
        "handle": lambda: os.pidfd_open(pid),
        "look": lambda: Path("/proc", str(pid)).stat(),
    }


def test_no_harm_reaches_a_process_outside(walls, victim):
    reads, writes = os.pipe()

    def harm():
        assert os.getpid() == 2  # else it would harm other processes of the user
        found = {}
        for name, act in harms(victim).items():
            try:
                act()
                found[name] = "done"
            except OSError as error:
                found[name] = type(error).__name__
        os.setpriority(os.PRIO_USER, os.getuid(), 19)
        found["unmount"] = namespaces._libc.umount2(b"/proc", 2)
        found["sees"] = sorted(filter(str.isdecimal, (p.name for p in Path("/proc").iterdir())))
        os.write(writes, json.dumps(found).encode())

    before = os.sched_getaffinity(victim), os.getpriority(os.PRIO_PROCESS, victim)
    pid, first = start(harm)
    os.close(writes)
    found = json.loads(os.read(reads, 1 << 12))
    close(pid, first)
    assert found.pop("sees") == ["1", "2"]
    assert found.pop("unmount") == -1
    assert found.pop("look") == "FileNotFoundError"
    assert set(found.values()) == {"ProcessLookupError"}, found
    assert (os.sched_getaffinity(victim), os.getpriority(os.PRIO_PROCESS, victim)) == before
    assert processes.state_of(victim) == "S"


def test_the_first_process_cannot_be_harmed_from_within(walls):
    reads, writes = os.pipe()

    def harm():
        assert os.getpid() == 2  # else it would harm others
        for number in range(1, signal.SIGRTMAX + 1):
            os.kill(1, number)
        os.write(writes, b".")
        signal.pause()

    pid, first = start(harm)
    os.close(writes)
    assert os.read(reads, 1)
    assert until(lambda: processes.state_of(first) == "S")
    assert until(lambda: processes.state_of(pid) == "S")
    close(pid, first)


def test_what_is_left_behind_is_stopped_and_ended(walls):
    memory = mmap.mmap(-1, 16)

    def leave_one():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True:
                    memory[0] = (memory[0] + 1) % 256
            os._exit(0)
        signal.pause()

    pid, first = start(leave_one)
    processes.known.add(first)
    tree = processes.Tree(pid, adopts=True, first=first)
    assert until(lambda: processes.children_of(first))
    (orphan,) = processes.children_of(first)
    for _ in range(3):
        tree.stop()
        before = memory[0]
        time.sleep(0.02)
        assert memory[0] == before
        tree.go_on()
        assert until(lambda before=before: memory[0] != before)
    close(pid, first)
    processes.known.discard(first)
    assert processes.state_of(orphan) == "X"


@pytest.mark.parametrize("who", ["referee", "contestant"])
def test_all_ends_with(walls, who):
    reads, writes = os.pipe()  # at its end when all that hold the other end have ended
    is_there, says_so = os.pipe()

    def leave_one():
        namespaces._libc.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)  # as contestants do
        if os.fork() == 0:
            os.setsid()
            os.write(says_so, b".")
        time.sleep(60)

    referee = os.fork()
    if referee == 0:
        with processes.reaping():
            pid, _ = start(leave_one)
            os.close(writes)
            os.read(is_there, 1)
            os.kill(pid if who == "contestant" else os.getpid(), signal.SIGKILL)
            time.sleep(60)
    os.close(writes)
    started = time.monotonic()
    assert not os.read(reads, 1)
    assert time.monotonic() - started < 10
    os.kill(referee, signal.SIGKILL)
    os.waitpid(referee, 0)


def test_without_namespaces_there_are_no_walls(monkeypatch):
    monkeypatch.setattr(namespaces, "_map_users", lambda pid: False)
    with processes.reaping():
        pid, first = start(signal.pause)
        assert (first, processes.state_of(pid) != "X") == (0, True)
        assert processes.children_of(os.getpid()).count(pid) == 1
        close(pid, first)
        assert not processes._orphans()


PROBLEM = reference("return torch.relu(x)", "[torch.rand(32, 16384)]")
# OUTSIDE are the ids of eager's processes, of the server and the referee. What else is seen is
# harmed only where it is sure to be within walls.
HARMS = """
import os, signal
from contextlib import suppress

seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
assert len(seen) < 4, seen
for pid in OUTSIDE:
    assert not os.path.exists(f"/proc/{pid}")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        continue
    raise AssertionError(f"{pid} can be signalled")
for pid in [*seen, *OUTSIDE]:
    if pid != os.getpid():
        with suppress(OSError):
            HERE
"""
PLAIN = module("return torch.relu(x)")
WRONG = module("return torch.relu(x) + 1")
ACTS = {
    "ends": "os.kill(pid, signal.SIGKILL)",
    "stops": "os.kill(pid, signal.SIGSTOP)",
    "demotes": "os.setpriority(os.PRIO_PROCESS, pid, 19)",
    "moves": "os.sched_setaffinity(pid, {0})",
    "ends_all": "os.kill(-1, signal.SIGKILL)",
}


@pytest.mark.slow
def test_eager_is_not_harmed_and_the_verdict_is_about_the_file(walls, tmp_path):
    (tmp_path / "reference.py").write_text(IMPORTS + PROBLEM)
    problem = Problem("problem", load(tmp_path / "reference.py"), CPU)
    subject = records.Subject("problem", "float32", problem.shape)
    table, found = {}, {}
    with referee_at_work(own_builds=True) as server:
        engine = Engine(problem, server, Options(Rounds(3), 120.0), lambda *_: None)
        try:
            engine.prepare()
            eager = [e.contestant.pid for e in engine._bench.eager]
            outside = str([*eager, server._process.pid, os.getpid()])
            before = [(os.sched_getaffinity(pid), os.getpriority(0, pid)) for pid in eager]
            for name, act in ACTS.items():
                text = HARMS.replace("OUTSIDE", outside).replace("HERE", act)
                table[name] = correct(text + PLAIN)
                table[f"{name}_and_is_wrong"] = wrong(text + WRONG)
            for name, (text, *_) in table.items():
                path = tmp_path / f"{name}.py"
                path.write_text(IMPORTS + text)
                verdict = engine.grade(read_files([path])[0])
                assert verdict.walls
                found[name] = records.record(subject, verdict, str(path))
            assert [e.contestant.pid for e in engine._bench.eager] == eager
            after = [(os.sched_getaffinity(pid), os.getpriority(0, pid)) for pid in eager]
            assert after == before
        finally:
            engine.close()
    check(table, found)
