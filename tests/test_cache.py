"""The cache of builds under faults: kills, forks, other hosts, full disks, other users.

A build in these tests is quick: it writes a library of one function, which is compiled once for all
tests. The processes that build are forked from this one, which has imported torch already.
"""

import atexit
import contextlib
import hashlib
import json
import logging
import os
import random
import shutil
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
from kernels.build.extension import load_extensions

# The sources of two extensions.
SOURCES = {"tiny/tiny.cpp": 'extern "C" int answer() { return 42; }\n'}
OTHER = {"tiny/other.cpp": ""}
BUILD_S = 0.06  # the duration of a build
STRANGER = 12345  # the id of another user
# Names of hosts, as `cache.HOST` has.
HOSTS = ["aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return the bytes of a shared library with one function."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny.cpp").write_text(SOURCES["tiny/tiny.cpp"])
    subprocess.run(["c++", "-shared", "-fPIC", "tiny.cpp", "-o", "tiny.so"], cwd=folder, check=True)
    return (folder / "tiny.so").read_bytes()


@pytest.fixture
def load_inline(tiny, tmp_path):
    """Return a function in place of torch's load_inline.

    It adds a line to the file `builds`, and writes the library in two halves.
    """

    def load_inline(name, build_directory, **_):
        with contextlib.suppress(PermissionError), (tmp_path / "builds").open("a") as file:
            file.write(f"{os.getpid()}\n")  # builds of other users are not counted
        library = Path(build_directory, f"{name}.so")
        library.write_bytes(tiny[:5000])
        time.sleep(BUILD_S)
        library.write_bytes(tiny)
        torch.ops.load_library(str(library))

    return load_inline


class Child:
    """A forked process that runs a function; the file `output` has its output."""

    def __init__(self, function, output):
        self.output = output
        output.touch()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)
                # The tests' own process may ignore SIGINT, for example under nohup.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                sys.stderr = output.open("w", buffering=1)
                os.dup2(sys.stderr.fileno(), 2)
                # pytest's handlers are not for this process.
                logging.getLogger().handlers.clear()
                atexit._clear()
                function()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)

    def wait(self):
        """Return the exit status, negative for a signal, and the output."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return status, self.output.read_text()

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def library(self):
        """Wait for success; return the path of the library that the process has loaded."""
        status, output = self.wait()
        assert status == 0, output
        return Path(output.splitlines()[-1])

    def error(self):
        """Wait for a failed build; return the text of the error."""
        status, output = self.wait()
        _, _, error = output.partition("kernels.build.errors.BuildError: ")
        assert status == 1, output
        assert error, output
        return error


@pytest.fixture
def root(open_path, monkeypatch):
    """Return the folder in which each user has a folder; no other folder gets builds."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(open_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(open_path / "default"))
    # A forked process can't ask for GPUs if this one uses them.
    monkeypatch.setattr(toolchain, "cuda_targets", list)
    return open_path / "cache"


def loaded_library():
    """Return the file that this process has mapped. Its folder may have been renamed since."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line[line.index("/") :] for line in lines if "/kernels_tiny" in line)


@pytest.fixture
def start(tmp_path, root, load_inline):
    """Return a function that starts a process, which loads the extension and prints its path."""
    numbers = iter(range(1000))

    def start(before=lambda: None, sources=SOURCES, load_inline=load_inline, at_exit=False):
        def run():
            before()
            load_extensions({"tiny": sources}, load_inline)
            print(loaded_library(), file=sys.stderr)
            if at_exit:
                atexit._run_exitfuncs()

        return Child(run, tmp_path / f"output{next(numbers)}")

    return start


@pytest.fixture
def load(start):
    """Return a function that loads the extension in a new process and returns its path."""
    return lambda *arguments, **options: start(*arguments, **options).library()


@pytest.fixture
def fail(start):
    """Return a function that fails to load the extension in a new process; it returns the error."""
    return lambda *arguments, **options: start(*arguments, **options).error()


def wait_for(condition):
    """Wait until a condition is true, for at most 30 seconds."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def folders_of_builds(root):
    """Return the folders of finished and of unfinished builds."""
    return sorted([*root.glob("kernels-*/kernels_tiny_*-*"), *root.glob("kernels-*/unfinished-*")])


def unfinished(root):
    """Return the folders of unfinished builds."""
    return sorted(root.glob("kernels-*/unfinished-*"))


def builders(tmp_path):
    """Return the numbers of the processes that have begun to build."""
    (tmp_path / "builds").touch()
    return (tmp_path / "builds").read_text().split()


def delayed(load_inline, seconds, flag):
    """Return a load_inline that takes `seconds` longer and first makes the file `flag`."""

    def load_later(**arguments):
        flag.touch()
        time.sleep(seconds)
        load_inline(**arguments)

    return load_later


def kill_builders(count, root, start, load, host):
    """Start builders one after the other, and kill each at a random moment.

    No finished build is left for the next builder. Now and then a builder may finish.

    Args:
        count: how many builders are killed.
        root: the folder of the caches.
        start: the fixture.
        load: the fixture.
        host: a function of random numbers. It returns the function that a builder calls first.
    """
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


def pretend_host(name):
    """Return a function after which a process believes that it is on the host of this name."""

    def set_host():
        cache.HOST = name

    return set_host


def test_after_kills_at_any_moment_one_build_is_left_and_loads(root, start, load):
    kill_builders(12, root, start, load, lambda draw: lambda: None)
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
    """Its age and its lock do not matter. Only that host can see that its process is dead."""
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
    """It cannot tell whether the process of such a build is alive, on this host or another."""
    library = load()
    names = "unfinished--1-5-1", "unfinished--1", f"unfinished-{HOSTS[0]}-1-5-1"
    folders = [library.parent.with_name(name) for name in names]
    for folder in folders:
        folder.mkdir()
    load(pretend_host(""), sources=OTHER)
    assert all(folder.is_dir() for folder in folders)


def test_ctrl_c_stops_the_compilers_and_leaves_nothing(root, start, load, tmp_path):
    """The import ends with KeyboardInterrupt within seconds, and the next one succeeds."""
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
    """All others wait, and say so and where."""
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
    monkeypatch.setattr(cache, "PATIENCE_S", 0.3)
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
    """It holds no lock of its parent, so others can import too, even if the parent is killed."""
    flag, loaded = tmp_path / "builds here", tmp_path / "loaded"

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


def fail_to_lock(*_):
    """Fail as flock does on a file system without locks."""
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize(
    "code", ["errno = ENOSYS; return -1", pytest.param("return 0", marks=pytest.mark.slow)]
)
def test_two_processes_can_build_at_once_on_a_file_system_without_locks(root, tmp_path, tiny, code):
    """There flock always fails, or always succeeds."""
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


def shorten(path):
    os.truncate(path, path.stat().st_size // 2)


def change_a_bit(library):
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


# By name, a function of a library's path that damages its finished build.
DAMAGES = {
    "shortened": shorten,
    "a bit changed": change_a_bit,
    "missing": Path.unlink,
    "another manifest": lambda library: library.with_name("manifest.json").write_text("[]"),
    "torn manifest": lambda library: shorten(library.with_name("manifest.json")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_build_is_built_again(root, load, damage, tmp_path):
    library = load()
    damage(library)
    again = load()
    assert folders_of_builds(root) == [again.parent]
    assert len(builders(tmp_path)) == 2
    assert load() == again
    assert len(builders(tmp_path)) == 2


def test_a_build_that_does_not_load_here_is_kept_for_other_machines(root, load):
    """A library that was linked to a newer glibc is an example."""
    library = load()
    library.write_bytes(b"foreign")
    manifest = json.loads((library.parent / "manifest.json").read_text())
    manifest["sha256"] = hashlib.sha256(library.read_bytes()).hexdigest()
    (library.parent / "manifest.json").write_text(json.dumps(manifest))
    again = load()
    assert set(folders_of_builds(root)) == {library.parent, again.parent}
    assert load() == again


def test_a_build_has_another_name_if_its_machine_code_may_differ(monkeypatch, root, load):
    names = [load().stem, load(sources={**SOURCES, "tiny/tiny.h": ""}).stem]
    cpu = torch.backends.cpu, "get_cpu_capability"
    changes = [
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


def test_another_compiler_builds_again_but_another_name_of_it_does_not(monkeypatch, load, tmp_path):
    library = load()
    for name in ("c++", "g++", shutil.which("c++")):
        monkeypatch.setenv("CXX", name)
        assert load() == library
    other = tmp_path / "other-c++"
    other.write_text("#!/bin/sh\necho other-c++ 99.1 'Free Software Foundation'\n")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    again = load()
    assert again != library
    assert load() == again
    monkeypatch.setenv("CXX", "/nowhere/c++")  # as on a machine without a compiler
    assert load() in (library, again)


# A library has about 15 KiB, so these disks are full at different moments of a build.
@pytest.mark.parametrize("size", [4, 8, 12, 16])
def test_a_full_disk_gives_an_error_and_leaves_nothing(root, load, fail, size):
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", f"size={size}k,mode=755", "none", root):
        (root / f"kernels-{os.geteuid()}").mkdir(mode=0o700)
        error = fail()
        assert "No space left on device" in error.splitlines()[0]
        assert "TORCH_EXTENSIONS_DIR" in error
        assert not folders_of_builds(root)
        subprocess.run(["mount", "-o", "remount,size=16m", root], check=True)
        load()


def test_builds_of_a_read_only_file_system_are_loaded(root, load, fail):
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=16m,mode=755", "none", root):
        library = load()
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        assert load() == library
        assert "Read-only file system" in fail(sources=OTHER)


def test_a_noexec_file_system_gives_an_error_before_anything_is_compiled(
    root, load, fail, tmp_path
):
    root.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=16m,mode=755,noexec", "none", root):
        error = fail()
    assert "is on a file system that is mounted noexec" in error
    assert "Set TORCH_EXTENSIONS_DIR to a folder on another file system" in error
    assert not builders(tmp_path)


def test_the_default_folder_is_used_if_a_folder_can_not_be_made(
    root, start, monkeypatch, open_path
):
    """The default is torch's. The first line of output says that it is used."""
    root.write_text("a file")
    for place in (str(root), "/proc/cache"):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", place)
        status, output = start().wait()
        assert status == 0
        first, library = output.splitlines()
        assert f"no builds are kept in {place}: " in first
        assert Path(library).is_relative_to(open_path / "default" / "torch_extensions")


@pytest.mark.parametrize("home", ["a file", "none"])
def test_a_user_without_a_folder_gets_a_temporary_one(
    root, start, monkeypatch, open_path, home, tmp_path
):
    """It is private, and it is removed when the process ends."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    if home == "none":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(cache.os.path, "expanduser", lambda path: path)
    else:
        (open_path / "default").write_text("a file")
    for _ in range(2):
        status, output = start(at_exit=True).wait()
        assert status == 0
        library = Path(output.splitlines()[-1])
        assert library.is_relative_to(tmp_path)
        assert "nothing is kept when this process ends" in output
        assert "Set TORCH_EXTENSIONS_DIR to a folder that you may write to" in output
        assert not library.exists()
    assert len(builders(tmp_path)) == 2


@pytest.mark.parametrize("name", ["with spaces", "größe 测试", "it's", "relative"])
def test_paths_may_have_any_characters_or_be_relative(monkeypatch, tmp_path, load, name):
    folder = tmp_path / name
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", name if name == "relative" else str(folder))
    assert load(lambda: os.chdir(tmp_path)).is_relative_to(folder)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_nobody_else_may_enter_the_folder(root, load, mask):
    """The mode does not depend on the umask."""
    library = load(lambda: os.umask(mask))
    assert load() == library
    assert library.parent.parent.stat().st_mode & 0o777 == 0o700
    assert root.stat().st_mode & 0o777 == 0o777 & ~mask


def test_a_folder_that_others_may_enter_is_closed(root, load):
    """The next test is about file systems without modes, such as network drives."""
    library = load()
    folder = library.parent.parent
    folder.chmod(0o777)
    assert load() == library
    assert folder.stat().st_mode & 0o777 == 0o700


def test_builds_are_loaded_and_made_on_a_file_system_without_modes(root, load, monkeypatch):
    """There chmod may fail."""
    library = load()
    library.parent.parent.chmod(0o775)

    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "fchmod", refuse)
    monkeypatch.setattr(Path, "chmod", refuse)
    assert load() == library
    assert load(sources=OTHER) != library


def give_to_stranger(path):
    """Give a folder and everything in it to another user."""
    for place in (path, *path.rglob("*")):
        os.chown(place, STRANGER, STRANGER, follow_symlinks=False)


@needs_root
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_of_another_user_is_refused(root, load, start, open_path, kind):
    """In a folder such as /tmp, where everybody can make folders, another user may be first."""
    folder = load().parent.parent
    if kind == "folder":
        give_to_stranger(folder)
    else:
        folder.rename(open_path / "elsewhere")
        folder.symlink_to(open_path / "elsewhere")
    root.chmod(0o1777)
    status, output = start().wait()
    assert status == 0
    reason = f"belongs to user {STRANGER}" if kind == "folder" else "is no folder"
    assert f"no builds are kept in {root}: {folder} {reason}" in output
    assert Path(output.splitlines()[-1]).is_relative_to(open_path / "default")


@needs_root
def test_a_library_of_another_user_is_not_loaded(root, load, tmp_path):
    """Another user may have put it there while the folder was open to others."""
    library = load()
    os.chown(library, STRANGER, STRANGER)
    load()
    assert len(builders(tmp_path)) == 2


@needs_root
def test_users_have_folders_of_their_own(root, load):
    """Two users can share a folder that everybody may write to."""
    root.mkdir(mode=0o777)
    root.chmod(0o1777)
    libraries = [load(), load(lambda: os.setuid(STRANGER))]
    owners = [library.parent.parent.stat().st_uid for library in libraries]
    assert owners == [0, STRANGER]


@needs_root
@pytest.mark.parametrize(
    ("mode", "user", "group"),
    [
        pytest.param(0o755, STRANGER, STRANGER, id="root with another user's home"),
        pytest.param(0o2775, 0, 100, id="a home that the group may write to"),
        pytest.param(0o777, STRANGER, 0, id="a volume that belongs to somebody else"),
    ],
)
def test_parent_folders_may_have_any_owner_and_mode(root, load, open_path, mode, user, group):
    """Homes in containers and on shared machines may belong to other users."""
    root.mkdir()
    os.chown(root, user, group)
    root.chmod(mode)
    library = load()
    assert library.is_relative_to(root)
    assert load() == library


@needs_root
def test_any_user_id_with_group_root(root, load):
    """Such a user can build in a folder of root's group.

    OpenShift starts containers with user ids that are in no list of users.
    """
    root.mkdir()
    os.chown(root, 0, 0)
    root.chmod(0o775)

    def become_user_without_a_name():
        os.setgroups([])
        os.setgid(0)
        os.setuid(1000690000)

    library = load(become_user_without_a_name)
    assert library.is_relative_to(root)
    assert load(become_user_without_a_name) == library
