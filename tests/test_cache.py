"""The cache of builds under faults: kills, forks, other hosts, full disks, other users.

A build here takes a moment and writes a library of one function, made once. Processes are forked
from this one, where torch is imported already.
"""

import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.utils.cpp_extension
from processes import mounted, printed

from kernels.build import cache, toolchain
from kernels.build import extension as build

SOURCES = {"tiny/tiny.cpp": 'extern "C" int answer() { return 42; }\n'}
BUILD_S = 0.06  # of the stand-in
STRANGER = 12345  # a user id
HOSTS = ["aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A library."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny.cpp").write_text(SOURCES["tiny/tiny.cpp"])
    subprocess.run(["c++", "-shared", "-fPIC", "tiny.cpp", "-o", "tiny.so"], cwd=folder, check=True)
    return (folder / "tiny.so").read_bytes()


@pytest.fixture
def load_inline(tiny, tmp_path):
    """In the place of torch's: a line in the file `builds`, then the library in two halves."""

    def load_inline(name, build_directory, **_):
        with (tmp_path / "builds").open("a") as file:
            file.write(f"{os.getpid()}\n")
        library = Path(build_directory, f"{name}.so")
        library.write_bytes(tiny[:5000])
        time.sleep(BUILD_S)
        library.write_bytes(tiny)
        torch.ops.load_library(str(library))

    return load_inline


class Child:
    """A forked process that runs a function; what it writes is in the file `output`."""

    def __init__(self, function, output):
        self.output = output
        output.touch()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup switches it off
                sys.stderr = output.open("w", buffering=1)
                os.dup2(sys.stderr.fileno(), 2)
                logging.getLogger().handlers.clear()  # pytest's
                function()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)

    def wait(self):
        """Its exit status, negative for a signal, and its output."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return status, self.output.read_text()

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def library(self):
        status, output = self.wait()
        assert status == 0, output
        return Path(output.splitlines()[-1])

    def error(self):
        status, output = self.wait()
        _, _, error = output.partition("kernels.build.toolchain.BuildError: ")
        assert status == 1 and error, output
        return error


@pytest.fixture
def root(open_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(open_path / "cache"))
    monkeypatch.delenv("KERNELS_TRUSTED_FOLDER", raising=False)
    # A forked process can't ask for GPUs if this one uses them.
    monkeypatch.setattr(toolchain, "cuda_targets", lambda: [])
    return open_path / "cache"


@pytest.fixture
def start(tmp_path, root, load_inline):
    """Starts a process that loads the extension and writes where it was."""
    numbers = iter(range(1000))

    def start(before=lambda: None, sources=SOURCES, load_inline=load_inline):
        def run():
            before()
            build.load("tiny", sources, load_inline)
            (library,) = (path for path in torch.ops.loaded_libraries if "kernels_tiny" in path)
            print(library, file=sys.stderr)

        return Child(run, tmp_path / f"output{next(numbers)}")

    return start


@pytest.fixture
def load(start):
    return lambda *arguments, **options: start(*arguments, **options).library()


@pytest.fixture
def fail(start):
    return lambda *arguments, **options: start(*arguments, **options).error()


def wait_for(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def folders_of_builds(root):
    return sorted(root.glob("*/build-*"))


def builders(tmp_path):
    """The processes that have begun to build."""
    (tmp_path / "builds").touch()
    return (tmp_path / "builds").read_text().split()


def slow(load_inline, seconds, flag):
    """A build that takes a while; the file `flag` says that it goes on."""

    def slow(**arguments):
        flag.touch()
        time.sleep(seconds)
        load_inline(**arguments)

    return slow


def kill_builders(count, root, start, load, host):
    """Kills that many builders at random moments, each on a host of `host()`."""
    load()
    draw = random.Random(count)
    for _ in range(count):
        for folder in folders_of_builds(root):
            (folder / "manifest.json").unlink(missing_ok=True)
        child = start(host(draw))
        time.sleep(draw.uniform(0, 1.5 * BUILD_S))
        child.kill()
        if draw.random() < 0.3:
            load(host(draw))


def on_host(name):
    return lambda: setattr(cache, "HOST", name)


def test_killed_at_any_moment(root, start, load):
    kill_builders(12, root, start, load, lambda draw: lambda: None)
    library = load()
    assert folders_of_builds(root) == [library.parent]
    assert load() == library


@pytest.mark.slow
@pytest.mark.parametrize("lock", ["fails", "grants everybody everything"])
def test_fifty_kills_on_three_hosts(root, start, load, monkeypatch, lock):
    """Hosts that share a folder: none removes what another builds, none leaves its own dead's."""
    monkeypatch.setattr(cache.fcntl, "flock", no_locks if lock == "fails" else lambda *_: None)
    kill_builders(50, root, start, load, lambda draw: on_host(draw.choice(HOSTS)))
    children = [start(on_host(name)) for name in HOSTS * 2]
    assert {child.wait()[0] for child in children} == {0}
    for name in HOSTS:
        load(on_host(name))
    load()
    builds = folders_of_builds(root)
    assert builds
    assert all((folder / "manifest.json").exists() for folder in builds)


def test_a_build_on_another_host_is_left_alone(root, start, load, tmp_path, load_inline):
    """Whatever its age and the lock say, until that host itself finds its process dead."""
    flag = tmp_path / "builds here"
    other = start(on_host(HOSTS[0]), load_inline=slow(load_inline, 1, flag))
    wait_for(flag.exists)
    (folder,) = folders_of_builds(root)
    for path in (folder, *folder.parent.iterdir()):
        os.utime(path, (0, 0))
    (folder.parent / "lock").unlink()  # so that the lock does not reach across hosts
    library = load()
    assert library.parent != folder
    other.kill()
    assert load(on_host(HOSTS[1])) == library
    assert folder.is_dir()
    load(on_host(HOSTS[0]))
    assert folders_of_builds(root) == [library.parent]


def test_a_process_number_that_is_used_again(root, load):
    """It is the start time that tells a left-over's process from a living one."""
    host, number, start_time = cache.process().split("-")
    library = load()
    names = f"{host}-{number}-{start_time}", f"{host}-{number}-5", f"{'0' * 12}-1-5"
    folders = [library.parent.with_name(f"build-{name}-1") for name in names]
    for folder in folders:
        folder.mkdir()
    load()
    assert [folder.exists() for folder in folders] == [True, False, True]


def test_interrupted(root, start, load, tmp_path):
    child = start()
    wait_for(lambda: builders(tmp_path))
    os.killpg(child.pid, signal.SIGINT)
    status, output = child.wait()
    assert status == 1
    assert output.splitlines()[-1] == "KeyboardInterrupt"
    assert not folders_of_builds(root)
    load()


def test_sixteen_importers_build_once(root, start, tmp_path):
    children = [start() for _ in range(16)]
    statuses, outputs = zip(*(child.wait() for child in children), strict=True)
    assert {*statuses} == {0}
    (folder,) = folders_of_builds(root)
    assert {Path(output.splitlines()[-1]).parent for output in outputs} == {folder}
    assert len(builders(tmp_path)) == 1
    waiting = [output for output in outputs if "waiting for another process" in output]
    assert waiting and all(str(folder.parent) in output for output in waiting)


@pytest.mark.parametrize("end", ["published", "killed"])
def test_waiting_ends_at_once(root, start, tmp_path, load_inline, end):
    flag = tmp_path / "builds here"
    builder = start(load_inline=slow(load_inline, 0.5 if end == "published" else 60, flag))
    wait_for(flag.exists)
    waiter = start()
    wait_for(lambda: "waiting for another process" in waiter.output.read_text())
    builder.kill() if end == "killed" else builder.wait()
    begin = time.monotonic()
    assert waiter.wait()[0] == 0
    assert time.monotonic() - begin < 1
    assert len(builders(tmp_path)) == 1
    assert len(folders_of_builds(root)) == 1


def test_two_threads_build_once(root, start, load_inline, tmp_path):
    def run():
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: build.load("tiny", SOURCES, load_inline), range(4)))

    assert start(run).wait()[0] == 0
    assert len(builders(tmp_path)) == 1


def test_stopped_builder(root, start, load, tmp_path, load_inline, monkeypatch):
    """Others build by themselves after a while; it may go on afterwards."""
    flag = tmp_path / "builds here"
    stopped = start(load_inline=slow(load_inline, 0, flag))
    wait_for(flag.exists)
    os.kill(stopped.pid, signal.SIGSTOP)
    monkeypatch.setattr(build, "PATIENCE_S", 0.3)
    library = load()
    assert load() == library  # at once
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait()[0] == 0
    assert len(folders_of_builds(root)) == 2
    load()


@pytest.mark.parametrize("is_killed", [False, True])
def test_fork_while_a_thread_builds(root, start, load, tmp_path, load_inline, is_killed):
    """The forked process keeps no lock, whatever becomes of its parent, and can import too."""
    flag, loaded = tmp_path / "builds here", tmp_path / "loaded"

    def run():
        arguments = ("tiny", SOURCES, slow(load_inline, 0.3, flag))
        thread = threading.Thread(target=build.load, args=arguments)
        thread.start()
        wait_for(flag.exists)
        if os.fork() == 0:
            build.load("tiny", SOURCES, load_inline)
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


def no_locks(*_):
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize(
    "code", ["errno = ENOSYS; return -1", pytest.param("return 0", marks=pytest.mark.slow)]
)
def test_file_systems_without_locks(root, tmp_path, tiny, code):
    """A real flock that fails, or lets everybody have everything: two processes at once."""
    (tmp_path / "shim.c").write_text(f"#include <errno.h>\nint flock(int f, int o) {{ {code}; }}")
    (tmp_path / "tiny.so").write_bytes(tiny)
    subprocess.run(["cc", "-shared", "-fPIC", "shim.c", "-o", "shim.so"], cwd=tmp_path, check=True)
    program = f"""
        import shutil, time, unittest.mock, torch
        from kernels.build import extension, toolchain
        toolchain.cuda_targets, toolchain.torch_tools = list, unittest.mock.MagicMock()
        def load_inline(name, build_directory, **_):
            time.sleep(0.5)
            shutil.copy("tiny.so", f"{{build_directory}}/{{name}}.so")
        for _ in range(2):
            extension.load("tiny", {SOURCES!r}, load_inline)
        print(*torch.ops.loaded_libraries)
    """
    with ThreadPoolExecutor() as pool:
        shim = {"LD_PRELOAD": f"{tmp_path}/shim.so"}
        outputs = list(pool.map(lambda _: printed(program, tmp_path, **shim), range(2)))
    builds = folders_of_builds(root)
    assert all(Path(output.strip()).parent in builds for output in outputs)
    assert all((folder / "manifest.json").exists() for folder in builds)


def test_a_lock_that_can_not_be_opened(root, load, fail, tmp_path):
    """A symbolic link in its place is not followed; a finished build needs none."""
    library = load()
    target, lock = tmp_path / "target", library.parent.parent / "lock"
    target.write_text("precious")
    lock.unlink()
    lock.symlink_to(target)
    assert load() == library
    library.unlink()
    assert str(lock) in fail()
    assert target.read_text() == "precious"


def shorten(path):
    os.truncate(path, path.stat().st_size // 2)


def change_a_bit(library):
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


SPOILS = {
    "shortened": shorten,
    "a bit changed": change_a_bit,
    "missing": Path.unlink,
    "another manifest": lambda library: library.with_name("manifest.json").write_text("[]"),
    "torn manifest": lambda library: shorten(library.with_name("manifest.json")),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_spoilt_build_is_made_again(root, load, spoil):
    library = load()
    spoil(library)
    again = load()
    assert again != library
    assert folders_of_builds(root) == [again.parent]
    assert load() == again


def test_build_that_this_machine_refuses_is_passed_over(root, load):
    """As one linked against a newer glibc. It is left to the machines that made it."""
    library = load()
    library.write_bytes(b"foreign")
    manifest = {"targets": [], "sha256": hashlib.sha256(library.read_bytes()).hexdigest()}
    (library.parent / "manifest.json").write_text(json.dumps(manifest))
    again = load()
    assert set(folders_of_builds(root)) == {library.parent, again.parent}
    assert load() == again


def test_stale_names(monkeypatch, root, load):
    """Whatever the machine code depends on makes another name."""
    names = [load().stem, load(sources={**SOURCES, "tiny/tiny.h": ""}).stem]
    cpu = torch.backends.cpu, "get_cpu_capability"
    changes = [
        ("setenv", "CXX", "c++"),
        ("setenv", "NVCC_PREPEND_FLAGS", "-g"),
        ("setenv", "NVCC_APPEND_FLAGS", "-g"),
        ("setattr", torch.version, "git_version", "another"),
        ("setattr", torch, "__version__", "another"),
        ("setattr", *cpu, lambda: "AVX2"),
        ("setattr", *cpu, lambda: "DEFAULT"),
    ]
    for kind, *change in changes:
        with monkeypatch.context() as patch:
            getattr(patch, kind)(*change)
            names.append(load().stem)
    assert len(set(names)) == len(names) - 1  # one of the last two is this machine's own


@pytest.mark.parametrize("size", [4, 8, 12, 16])
def test_full_disk(root, load, fail, size):
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", f"size={size}k,mode=755", "none", root):
        error = fail()
        assert "No space left on device" in error.splitlines()[0]
        assert "TORCH_EXTENSIONS_DIR" in error
        assert not folders_of_builds(root)
        subprocess.run(["mount", "-o", "remount,size=16m", root], check=True)
        load()


def test_read_only_mount(root, load, fail):
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=16m,mode=755", "none", root):
        library = load()
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        assert load() == library
        assert "Read-only file system" in fail(sources={"tiny/another.cpp": ""})


def test_folder_that_can_not_be_made(root, fail, monkeypatch):
    root.write_text("a file")
    for place in (str(root), "/proc/cache"):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", place)
        error = fail()
        assert place in error and "Set TORCH_EXTENSIONS_DIR" in error
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.os.path, "expanduser", lambda path: path)
    assert "this user has no home. Set TORCH_EXTENSIONS_DIR" in fail()


@pytest.mark.parametrize("name", ["with spaces", "größe 测试", "it's", "relative"])
def test_paths(monkeypatch, tmp_path, load, name):
    folder = tmp_path / name
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", name if name == "relative" else str(folder))
    assert load(lambda: os.chdir(tmp_path)).is_relative_to(folder)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_umask(root, load, mask):
    library = load(lambda: os.umask(mask))
    assert load() == library
    for path in (library.parent, root, library.parent.parent):
        assert path.stat().st_mode & 0o777 == 0o755 & ~mask
    assert library.stat().st_mode & 0o022 == 0


def give_to_stranger(path):
    for place in (path, *path.rglob("*")):
        os.chown(place, STRANGER, STRANGER, follow_symlinks=False)


@needs_root
def test_build_of_root_is_loaded_by_a_user_without_write_access(root, load, fail):
    library = load()
    assert load(lambda: os.setuid(STRANGER)) == library
    error = fail(lambda: os.setuid(STRANGER), sources={"tiny/another.cpp": ""})
    assert "Permission denied" in error and str(root) in error


@needs_root
def test_library_planted_in_a_shared_folder(root, load, fail, monkeypatch, open_path):
    """In a folder as /tmp, which others can only add to."""
    library = load()
    root.chmod(0o1777)
    assert load() == library
    monkeypatch.setenv("XDG_CACHE_HOME", str(open_path / "default"))
    give_to_stranger(library.parent.parent)
    assert load().is_relative_to(open_path / "default")
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    (root / "torch_extensions").mkdir()
    give_to_stranger(root / "torch_extensions")
    assert f"belongs to user {STRANGER}" in fail()


@needs_root
@pytest.mark.parametrize("name", ["", "manifest.json", "library"])
@pytest.mark.parametrize("user", [0, STRANGER])
def test_what_others_may_replace_is_not_loaded(root, load, name, user):
    library = load()
    path = library if name == "library" else library.parent / name
    path.chmod(0o775)
    assert load() == library  # the group is root's own
    os.chown(path, user, STRANGER)
    assert load() != library


@needs_root
def test_root_that_others_may_write_to(root, load, start, fail, monkeypatch, open_path):
    """Builds then go to the user's default folder, unless TORCH_EXTENSIONS_DIR is trusted."""
    library = load()
    monkeypatch.setenv("XDG_CACHE_HOME", str(open_path / "default"))
    os.chown(root, 0, STRANGER)
    for mode in (0o775, 0o757):
        root.chmod(mode)
        status, output = start().wait()
        assert status == 0
        warning, elsewhere = output.splitlines()
        assert f"no builds of the kernels are kept in {root}: {root} is writable" in warning
        assert Path(elsewhere).is_relative_to(open_path / "default")
    (open_path / "default").chmod(0o777)
    assert "is writable by others" in fail()
    for trusted in (root, open_path):
        monkeypatch.setenv("KERNELS_TRUSTED_FOLDER", str(trusted))
        assert load() == library
    monkeypatch.setenv("KERNELS_TRUSTED_FOLDER", str(open_path / "cac"))
    assert "KERNELS_TRUSTED_FOLDER" in fail()


@needs_root
def test_folder_of_another_user_above(root, load, fail, monkeypatch, open_path):
    library = load()
    monkeypatch.setenv("XDG_CACHE_HOME", str(open_path / "default"))
    os.chown(open_path, STRANGER, STRANGER)
    assert f"{open_path} belongs to user {STRANGER}" in fail()
    monkeypatch.setenv("KERNELS_TRUSTED_FOLDER", str(open_path))
    give_to_stranger(root)
    assert load() == library


def test_what_others_can_not_reach_is_trusted(root, load, open_path, monkeypatch):
    library = load()
    root.chmod(0o777)
    assert f"{root} is writable by others" in cache.intruder(library)
    open_path.chmod(0o700)
    assert load() == library
    open_path.chmod(0o777)
    root.chmod(0o755)
    assert f"{open_path} is writable by others" in cache.intruder(library)
    monkeypatch.setenv("HOME", str(root))
    assert load() == library
