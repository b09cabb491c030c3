"""Walls: a solution can neither see nor harm processes outside its own namespace."""

import json
import os
import signal
import socket
import time
import traceback
from pathlib import Path

import pytest
import torch

from referee import engine, records
from referee.contestants import namespaces, prctl, processes, wall_trial
from referee.engine import Engine, read_files, referee_at_work
from referee.grading import Options
from referee.program import command
from referee.reference.file import load
from referee.reference.problem import Problem
from referee.testing.graded import check, remember_resources
from referee.testing.texts import IMPORTS, correct, module, reference, wrong
from referee.tests.counters import Counter, until
from referee.times.round_limit import RoundLimit

CPU = torch.device("cpu")


def start(work):
    """Fork a process that does some work and ends; return its id, and its init process's."""
    pid, init_pid = namespaces.fork(with_walls=True)
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    return pid, init_pid


def close(pid, init_pid):
    """End a process that `start` has started, and its namespace."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if init_pid:
        namespaces.end(init_pid)


@pytest.fixture
def walls():
    """Make the test's process a subreaper; skip the test where the system forbids namespaces."""
    with processes.subreaper():
        pid, init_pid = start(signal.pause)
        close(pid, init_pid)
        if not init_pid:
            pytest.skip("the system allows no namespaces of processes")
        yield


@pytest.fixture
def victim():
    """Return the id of a process of the same user, outside all namespaces."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def harms(pid):
    """Return ways to harm a process, or to see it: by name, functions that try it."""
    return {
        "end": lambda: os.kill(pid, signal.SIGKILL),
        "stop": lambda: os.kill(pid, signal.SIGSTOP),
        "group": lambda: os.killpg(pid, signal.SIGSTOP),
        "renice": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        "move": lambda: os.sched_setaffinity(pid, {0}),
        "handle": lambda: os.pidfd_open(pid),
        "look": lambda: Path("/proc", str(pid)).stat(),
    }


def scheduling_of(pid):
    """Return the cores that a process may use, and its priority."""
    return os.sched_getaffinity(pid), os.getpriority(os.PRIO_PROCESS, pid)


def test_no_harm_reaches_a_process_outside(walls, victim):
    reads, writes = os.pipe()

    def harm():
        assert os.getpid() == 2  # else it would harm other processes of the user
        outcomes = {}
        for name, act in harms(victim).items():
            try:
                act()
                outcomes[name] = "done"
            except OSError as error:
                outcomes[name] = type(error).__name__
        os.setpriority(os.PRIO_USER, os.getuid(), 19)
        outcomes["unmount"] = namespaces.libc.umount2(b"/proc", 2)
        pids = filter(str.isdecimal, (path.name for path in Path("/proc").iterdir()))
        outcomes["visible pids"] = sorted(pids)
        os.write(writes, json.dumps(outcomes).encode())

    scheduling_before = scheduling_of(victim)
    pid, init_pid = start(harm)
    os.close(writes)
    outcomes = json.loads(os.read(reads, 1 << 12))
    close(pid, init_pid)
    assert outcomes.pop("visible pids") == ["1", "2"]
    assert outcomes.pop("unmount") == -1
    assert outcomes.pop("look") == "FileNotFoundError"
    assert set(outcomes.values()) == {"ProcessLookupError"}, outcomes
    assert scheduling_of(victim) == scheduling_before
    assert processes.scheduler_state(victim) == "S"


def test_the_init_process_cannot_be_harmed_from_within(walls):
    reads, writes = os.pipe()

    def harm():
        assert os.getpid() == 2  # else it would harm others
        for number in range(1, signal.SIGRTMAX + 1):
            os.kill(1, number)
        os.write(writes, b".")
        signal.pause()

    pid, init_pid = start(harm)
    os.close(writes)
    assert os.read(reads, 1)
    assert until(lambda: processes.scheduler_state(init_pid) == "S")
    assert until(lambda: processes.scheduler_state(pid) == "S")
    close(pid, init_pid)


def test_orphans_in_a_namespace_are_stopped_and_ended(walls):
    counter = Counter()

    def leave_an_orphan():
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                counter.count()
            os._exit(0)
        signal.pause()

    pid, init_pid = start(leave_an_orphan)
    processes.referees_pids.add(init_pid)
    tree = processes.ProcessTree(pid, is_solution=True, init_pid=init_pid)
    assert until(lambda: processes.children_of(init_pid))
    (orphan,) = processes.children_of(init_pid)
    for _ in range(3):
        assert counter.goes_on()
        rest = tree.stop()
        assert counter.is_still()
        rest.go_on()
    close(pid, init_pid)
    processes.referees_pids.discard(init_pid)
    assert processes.scheduler_state(orphan) == processes.GONE


@pytest.mark.parametrize("who", ["referee", "contestant"])
def test_all_processes_end_if_the_referee_or_the_contestant_ends(walls, who):
    reads, writes = os.pipe()  # `reads` is at its end when all processes that hold `writes` ended
    until_forked, tells_forked = os.pipe()

    def fork_a_child():
        prctl.die_with_parent()  # as contestants do
        if os.fork() == 0:
            os.setsid()
            os.write(tells_forked, b".")
        time.sleep(60)

    referee = os.fork()
    if referee == 0:
        with processes.subreaper():
            pid, _ = start(fork_a_child)
            os.close(writes)
            os.read(until_forked, 1)
            os.kill(pid if who == "contestant" else os.getpid(), signal.SIGKILL)
            time.sleep(60)
    os.close(writes)
    started = time.monotonic()
    assert not os.read(reads, 1)
    assert time.monotonic() - started < 10
    os.kill(referee, signal.SIGKILL)
    os.waitpid(referee, 0)


def test_without_namespaces_there_are_no_walls(monkeypatch):
    """The system lets nobody write the maps of users; see user_namespaces(7)."""
    write_text = Path.write_text

    def write_no_maps(path: Path, *arguments: object, **options: object) -> int:
        if path.name.endswith("_map"):
            raise PermissionError
        return write_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", write_no_maps)
    with processes.subreaper():
        children_before = processes.children_of(os.getpid())
        pid, init_pid = start(signal.pause)
        assert init_pid == 0
        assert processes.scheduler_state(pid) != processes.GONE
        assert processes.children_of(os.getpid()).count(pid) == 1
        close(pid, init_pid)
        assert processes.children_of(os.getpid()) == children_before


@pytest.mark.parametrize("name", ["cuda:99", "no_device"])
def test_the_trial_names_a_device_that_is_not_there(name, monkeypatch, capsys):
    """The trial is the program `wall_trial`: it tries whether a device allows walls."""
    monkeypatch.setattr("sys.argv", ["wall_trial", name])
    assert wall_trial.main() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert name in line


@pytest.mark.slow
def test_the_trial_on_a_cpu_finds_walls(walls, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["wall_trial", "cpu"])
    assert wall_trial.main() == 0
    assert capsys.readouterr().out == "cpu: walls\n"


PROBLEM = reference("return torch.relu(x)", "[torch.rand(32, 16384)]")
# OUTSIDE is replaced by the ids of eager's processes, the server and the referee, HERE by one of
# ACTS. The assertions come first: without walls, other processes of the user would be harmed.
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
def test_eager_is_not_harmed_and_the_verdict_is_about_the_file(walls, tmp_path, monkeypatch):
    (tmp_path / "reference.py").write_text(IMPORTS + PROBLEM)
    problem = Problem("problem", load(tmp_path / "reference.py"), CPU)
    all_resources = remember_resources(monkeypatch)
    subject = records.Subject("problem", "float32", problem.shape)
    table, record_of = {}, {}
    with referee_at_work(separate_builds=True) as server:
        engine = Engine(problem, server, Options(RoundLimit(3), 120.0), lambda *_: None)
        try:
            engine.prepare()
            [resources] = all_resources
            eager_pids = [eager.pid for eager in resources.eager.members]
            outside = str([*processes.referees_pids, os.getpid()])  # the server's and eager's, too
            scheduling_before = [scheduling_of(pid) for pid in eager_pids]
            for name, act in ACTS.items():
                text = HARMS.replace("OUTSIDE", outside).replace("HERE", act)
                table[name] = correct(text + PLAIN)
                table[f"{name}_and_is_wrong"] = wrong(text + WRONG, "beyond the error budget")
            for name, (text, *_) in table.items():
                path = tmp_path / f"{name}.py"
                path.write_text(IMPORTS + text)
                verdict = engine.grade(read_files([path])[0])
                assert verdict.has_walls
                record_of[name] = records.make_record(subject, verdict, str(path))
            assert [eager.pid for eager in resources.eager.members] == eager_pids
            assert [scheduling_of(pid) for pid in eager_pids] == scheduling_before
        finally:
            engine.close()
    check(table, record_of)


@pytest.mark.parametrize("has_walls", [True, False])
def test_the_headline_says_whether_there_are_walls(has_walls, walls, tmp_path, monkeypatch, capsys):
    server = engine.Server

    def make_server(*arguments):
        made = server(*arguments)
        made.gives_walls = has_walls
        return made

    monkeypatch.setattr(engine, "Server", make_server)
    for name, text in (
        ("problem.py", reference("return torch.relu(x)", "[torch.rand(8, 64)]")),
        ("solution.py", module("return torch.relu(x)")),
    ):
        (tmp_path / name).write_text(IMPORTS + text)
    files = [str(tmp_path / "problem.py"), str(tmp_path / "solution.py")]
    assert command.main([*files, "--device", "cpu", "--trials", "1"]) == 0
    headline, *_ = capsys.readouterr().out.splitlines()
    assert headline.endswith("float32; walls" if has_walls else "float32; no walls")


def test_a_helper_whose_server_was_killed_ends_without_a_traceback():
    to_helper, to_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    to_helper.close()  # as the system does if the server is killed
    until_adopted, adopted = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(adopted)
        try:
            namespaces._help(to_server, until_adopted, with_walls=False)
        finally:
            os._exit(1)  # a helper that raised, or the contestant
    for descriptor in (until_adopted, adopted):
        os.close(descriptor)
    to_server.close()
    _, status = os.waitpid(helper, 0)
    assert status == 0
