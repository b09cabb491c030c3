"""Many processes build and load at once; builders are killed, stopped and interrupted.

The fixtures are in `conftest.py`, and the tiny extension in `support/tiny_build.py`.
"""

import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.build import cache
from kernels.build.extension import load_extensions
from tests.support.processes import printed
from tests.support.tiny_build import (
    HOSTS,
    OTHER,
    SOURCES,
    builders,
    delayed,
    folders_of_builds,
    kill_builders,
    pretend_host,
    unfinished,
    wait_for,
)


def fail_to_lock(*_):
    """Fail as flock does on a file system without locks."""
    raise OSError(38, "Function not implemented")


def stay_on_this_host():
    """Do nothing: the process keeps its real host."""


def test_after_kills_at_any_moment_one_build_is_left_and_loads(root, start, load):
    kill_builders(12, root, start, load, lambda draw: stay_on_this_host)
    library = load()
    assert folders_of_builds(root) == [library.parent]
    assert load() == library


@pytest.mark.slow
@pytest.mark.parametrize("lock", ["fails", "grants everybody everything"])
def test_three_hosts_that_share_a_folder_remove_what_their_killed_builders_leave(
    root, start, load, monkeypatch, lock
):
    """This holds although the file system's locks do not work. 50 builders are killed."""
    monkeypatch.setattr("fcntl.flock", fail_to_lock if lock == "fails" else lambda *_: None)
    kill_builders(50, root, start, load, lambda draw: pretend_host(draw.choice(HOSTS)))
    children = [start(pretend_host(name)) for name in HOSTS * 2]
    assert {child.wait()[0] for child in children} == {0}
    for name in HOSTS:
        load(pretend_host(name))
    load()
    builds = folders_of_builds(root)
    assert builds
    assert not unfinished(root)


def test_a_build_on_another_host_is_left_alone(root, start, load, tmp_path, load_inline):
    """The build's age and lock do not matter. Only that host can see that its process is dead."""
    flag = tmp_path / "builds here"
    other = start(pretend_host(HOSTS[0]), load_inline=delayed(load_inline, 1, flag))
    wait_for(flag.exists)
    (folder,) = folders_of_builds(root)
    for path in (folder, *folder.parent.iterdir()):
        os.utime(path, (0, 0))
    for lock in folder.parent.glob("*.lock"):
        lock.unlink()  # as if the lock did not reach across hosts
    library = load()
    assert library.parent != folder
    other.kill()
    load(pretend_host(HOSTS[1]), sources=OTHER)
    assert folder.is_dir()
    load(pretend_host(HOSTS[0]), sources={**OTHER, "a": ""})
    assert not unfinished(root)
    assert load() == library


def test_a_leftover_is_removed_if_another_process_has_the_id_of_its_builder(root, load):
    """The start time distinguishes the builder from the living process with its id."""
    host, number, start_time = cache.process_name().split("-")
    library = load()
    names = f"{host}-{number}-{start_time}", f"{host}-{number}-5", f"{'0' * 12}-1-5"
    folders = [library.parent.with_name(f"unfinished-{name}-1") for name in names]
    for folder in folders:
        folder.mkdir()
    load(sources=OTHER)
    assert [folder.exists() for folder in folders] == [True, False, True]


def test_a_host_without_a_name_removes_no_unfinished_build(root, load):
    """Such a host cannot tell whether the process of a build is alive, here or on another host."""
    library = load()
    names = "unfinished--1-5-1", "unfinished--1", f"unfinished-{HOSTS[0]}-1-5-1"
    folders = [library.parent.with_name(name) for name in names]
    for folder in folders:
        folder.mkdir()
    load(pretend_host(""), sources=OTHER)
    assert all(folder.is_dir() for folder in folders)


def test_ctrl_c_ends_the_import_and_leaves_nothing(root, start, load, tmp_path):
    """It ends with KeyboardInterrupt within seconds, and the next import succeeds."""
    flag = tmp_path / "compiles"

    def compile_for_long(**_):
        flag.touch()
        subprocess.run(["sleep", "30"], check=True)

    child = start(load_inline=compile_for_long)
    wait_for(flag.exists)
    time.sleep(0.2)
    begin = time.monotonic()
    os.killpg(child.pid, signal.SIGINT)
    status, output = child.wait()
    assert status == 1
    assert output.splitlines()[-1] == "KeyboardInterrupt"
    assert time.monotonic() - begin < 5
    assert not folders_of_builds(root)
    load()


def test_sixteen_importers_build_once(root, start, tmp_path, load_inline):
    """All load the same build. Those that wait for it say so, and name the folder."""
    build_slowly = delayed(load_inline, 0.5, tmp_path / "builds here")
    children = [start(load_inline=build_slowly) for _ in range(16)]
    statuses, outputs = zip(*(child.wait() for child in children), strict=True)
    assert {*statuses} == {0}
    (folder,) = folders_of_builds(root)
    assert {Path(output.splitlines()[-1]).parent for output in outputs} == {folder}
    assert len(builders(tmp_path)) == 1
    waiting = [output for output in outputs if "waiting for another process" in output]
    assert waiting
    assert all(str(folder.parent) in output for output in waiting)


@pytest.mark.parametrize("end", ["published", "killed"])
def test_waiting_ends_when_the_builder_ends(root, start, tmp_path, load_inline, end):
    flag = tmp_path / "builds here"
    seconds = 0.5 if end == "published" else 60
    builder = start(load_inline=delayed(load_inline, seconds, flag))
    wait_for(flag.exists)
    waiter = start()
    wait_for(lambda: "waiting for another process" in waiter.output.read_text())
    if end == "killed":
        builder.kill()
    else:
        builder.wait()
    begin = time.monotonic()
    assert waiter.wait()[0] == 0
    assert time.monotonic() - begin < 1
    assert len(builders(tmp_path)) == 1
    assert len(folders_of_builds(root)) == 1


def test_four_threads_build_once(root, start, load_inline, tmp_path):
    """Threads of one process wait for each other as processes do."""

    def run():
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: load_extensions({"tiny": SOURCES}, load_inline), range(4)))

    assert start(run).wait()[0] == 0
    assert len(builders(tmp_path)) == 1


def test_a_stopped_builder_blocks_nobody(root, start, load, tmp_path, load_inline, monkeypatch):
    """Others build by themselves after a while. The stopped builder may continue afterwards."""
    flag = tmp_path / "builds here"
    stopped = start(load_inline=delayed(load_inline, 0, flag))
    wait_for(flag.exists)
    os.kill(stopped.pid, signal.SIGSTOP)
    monkeypatch.setattr(cache, "LONGEST_WAIT_S", 0.3)
    library = load()
    assert load() == library  # at once
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait()[0] == 0
    assert len(folders_of_builds(root)) == 2
    load()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_process_forked_while_a_thread_builds_can_import(
    root, start, load, tmp_path, load_inline, is_killed
):
    """The forked process keeps no lock of its parent: others can import if the parent is killed."""
    flag = tmp_path / "builds here"
    loaded = tmp_path / "loaded"

    def run():
        arguments = ({"tiny": SOURCES}, delayed(load_inline, 0.3, flag))
        thread = threading.Thread(target=load_extensions, args=arguments)
        thread.start()
        wait_for(flag.exists)
        if os.fork() == 0:
            load_extensions({"tiny": SOURCES}, load_inline)
            loaded.touch()
            time.sleep(3)
            os._exit(0)
        time.sleep(60 if is_killed else 0)
        thread.join()

    builder = start(run, load_inline=load_inline)
    wait_for(flag.exists)
    time.sleep(0.1)
    if is_killed:
        os.kill(builder.pid, signal.SIGKILL)
    load()
    builder.wait()
    wait_for(loaded.exists)


@pytest.mark.parametrize(
    "code", ["errno = ENOSYS; return -1", pytest.param("return 0", marks=pytest.mark.slow)]
)
def test_two_processes_can_build_at_once_on_a_file_system_without_locks(root, tmp_path, tiny, code):
    """On such a file system flock always fails, or always succeeds."""
    (tmp_path / "shim.c").write_text(f"#include <errno.h>\nint flock(int f, int o) {{ {code}; }}")
    (tmp_path / "tiny.so").write_bytes(tiny)
    subprocess.run(["cc", "-shared", "-fPIC", "shim.c", "-o", "shim.so"], cwd=tmp_path, check=True)
    program = f"""
        import shutil, time, unittest.mock, torch
        from kernels.build import extension, toolchain
        toolchain.cuda_targets, toolchain.cpp_extension = list, unittest.mock.MagicMock()
        def load_inline(name, build_directory, **_):
            time.sleep(0.5)
            shutil.copy("tiny.so", f"{{build_directory}}/{{name}}.so")
        for _ in range(2):
            extension.load_extensions({{"tiny": {SOURCES!r}}}, load_inline)
    """
    with ThreadPoolExecutor() as pool:
        shim = {"LD_PRELOAD": f"{tmp_path}/shim.so"}
        outputs = list(pool.map(lambda _: printed(program, tmp_path, **shim), range(2)))
    assert outputs == ["", ""]
    assert folders_of_builds(root)
    assert not unfinished(root)
