"""The cache of builds under faults: kills, full disks, other users, broken files.

The sources are a module of Python's C API alone, which compiles in a moment. Processes are forked
from this one, where torch is imported already.
"""

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch.utils.cpp_extension
from torch.utils.cpp_extension import load_inline

from kernels.build import cache
from kernels.build import extension as build
from kernels.build.toolchain import BuildError, cpu_flags, find_toolkit

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
SOURCE = """
#include <Python.h>
#define INIT_(name) PyInit_##name
#define INIT(name) INIT_(name)
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr};
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""
SOURCES = {"tiny.cpp": SOURCE}
STRANGER = 12345  # a user id


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


class Child:
    """A forked process that runs a function; what it writes is in the file `output`."""

    def __init__(self, function, output):
        self.output = output
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


@pytest.fixture
def open_path():
    """A folder that other users may enter, as they may not pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder).resolve()


@pytest.fixture
def root(open_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(open_path / "cache"))
    monkeypatch.delenv("KERNELS_TRUSTED_FOLDER", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    # A forked process can't ask for GPUs if this one uses them.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return open_path / "cache"


@pytest.fixture
def start(tmp_path, root):
    """Starts a process that loads the extension and writes where it was."""
    numbers = iter(range(1000))

    def start(sources=SOURCES, before=lambda: None):
        def run():
            before()
            print(build.load(sources, load_inline).__file__, file=sys.stderr)

        return Child(run, tmp_path / f"output{next(numbers)}")

    return start


@pytest.fixture
def load(start):
    """Loads the extension in a process of its own; returns the library."""

    def load(**arguments):
        status, output = start(**arguments).wait()
        assert status == 0, output
        return Path(output.splitlines()[-1])

    return load


@pytest.fixture
def fail(start):
    """Fails to load the extension in a process of its own; returns the error."""

    def fail(**arguments):
        status, output = start(**arguments).wait()
        assert status == 1
        assert "kernels.build.toolchain.BuildError: " in output
        return output.split("kernels.build.toolchain.BuildError: ")[1]

    return fail


def wait_for(condition, limit=30):
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def is_compiling(root):
    return any(root.glob("*/build-*/main.cpp"))


def folders_of_builds(root):
    return sorted(root.glob("*/build-*"))


@contextlib.contextmanager
def mounted(kind, folder, options):
    """A file system at `folder`; skips the test where this process may not mount."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", kind, "-o", options, "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# ------------------------------------------------------------------------------ kills, many at once


def test_killed_at_any_moment(root, start, load):
    begin = time.monotonic()
    load()
    duration = time.monotonic() - begin
    draw = random.Random(0)
    for _ in range(20):
        for folder in folders_of_builds(root):
            (folder / "manifest.json").unlink(missing_ok=True)
        child = start()
        time.sleep(draw.uniform(0, duration))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert load() == load()
    # Compilers may have outlived their builders, and written what was being removed.
    time.sleep(duration)
    for folder in folders_of_builds(root):
        (folder / "manifest.json").unlink(missing_ok=True)
        os.utime(folder, (0, 0))
    library = load()
    assert folders_of_builds(root) == [library.parent]


def test_interrupted(root, start, load):
    child = start()
    wait_for(lambda: is_compiling(root))
    os.killpg(child.pid, signal.SIGINT)
    status, output = child.wait()
    assert status == 1
    assert output.splitlines()[-1] == "KeyboardInterrupt"
    assert not folders_of_builds(root)
    load()


def test_sixteen_importers_build_once(root, start):
    children = [start() for _ in range(16)]
    outputs = {child.wait() for child in children}
    (folder,) = folders_of_builds(root)
    ((status, library),) = outputs
    assert status == 0
    assert Path(library.strip()).parent == folder


def test_two_threads_load_one_library(root, start):
    def run():
        modules = []
        load = lambda: modules.append(build.load(SOURCES, load_inline))  # noqa: E731
        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({module.__file__ for module in modules}) == 1
        assert len(modules) == 4

    status, output = start(before=run).wait()
    assert status == 0, output


def slow_linker(folder, seconds):
    """A compiler that links only after a while."""
    path = folder / "slow-c++"
    path.write_text(
        '#!/bin/sh\ncase " $* " in *" -shared "*) '
        f'touch "{folder}/linking"; sleep {seconds};; esac\nexec c++ "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_linker_that_outlives_its_builder(root, start, load, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", slow_linker(tmp_path, 2))
    child = start()
    wait_for((tmp_path / "linking").exists)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    library = load()  # while the first linker still sleeps, or writes
    time.sleep(1)
    assert folders_of_builds(root) == [library.parent]
    assert load() == library


def test_stopped_builder(root, start, load, tmp_path, monkeypatch):
    """Others say whom they wait for, and then build by themselves; it may go on afterwards."""
    monkeypatch.setenv("CXX", slow_linker(tmp_path, 1))
    stopped = start()
    wait_for((tmp_path / "linking").exists)
    os.kill(stopped.pid, signal.SIGSTOP)
    monkeypatch.setattr(build, "SILENCE_S", 0.2)
    monkeypatch.setattr(build, "PATIENCE_S", 0.5)
    status, output = start().wait()
    assert status == 0, output
    (folder,) = root.glob("kernels_*")
    assert f"waiting for process {stopped.pid} to build kernels in {folder}" in output
    assert load() == Path(output.splitlines()[-1])  # at once
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait()[0] == 0
    assert len(folders_of_builds(root)) == 2
    load()


@pytest.mark.parametrize("is_killed", [False, True])
def test_fork_while_a_thread_builds(root, start, load, tmp_path, monkeypatch, is_killed):
    """The forked process keeps no lock, whatever becomes of its parent, and can import too."""
    monkeypatch.setenv("CXX", slow_linker(tmp_path, 1))

    def run():
        thread = threading.Thread(target=build.load, args=(SOURCES, load_inline))
        thread.start()
        wait_for((tmp_path / "linking").exists)
        forked = os.fork()
        if forked == 0:
            build.load(SOURCES, load_inline)
            (tmp_path / "loaded").touch()
            time.sleep(30)
            os._exit(0)
        (tmp_path / "forked").write_text(str(forked))
        thread.join()

    builder = start(before=run)
    wait_for((tmp_path / "forked").exists)
    time.sleep(0.1)
    if is_killed:
        os.kill(builder.pid, signal.SIGKILL)
    load()
    builder.wait()
    wait_for((tmp_path / "loaded").exists)
    os.kill(int((tmp_path / "forked").read_text()), signal.SIGKILL)


# ------------------------------------------------------------------------------------- broken files


def shorten(library):
    library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])


def zero(library):
    library.write_bytes(bytes(library.stat().st_size))


def change_a_bit(library):
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def spoil_manifest(library):
    (library.parent / "manifest.json").write_text("[]")


@pytest.mark.parametrize("spoil", [shorten, zero, change_a_bit, Path.unlink, spoil_manifest])
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
    manifest = {"targets": [], "library": cache.fingerprint(library)}
    (library.parent / "manifest.json").write_text(json.dumps(manifest))
    again = load()
    assert set(folders_of_builds(root)) == {library.parent, again.parent}
    assert load() == again


def test_new_build_that_does_not_load(root, fail):
    error = fail(sources={"tiny.cpp": SOURCE.replace("PyInit_", "Other_")})
    assert error.startswith("the library that was just built does not load: ")
    assert not folders_of_builds(root)


def test_symbolic_link_for_a_lock(root, load, fail, tmp_path):
    library = load()
    target = tmp_path / "target"
    target.write_text("precious")
    lock = library.parent.parent / "lock"
    lock.unlink()
    lock.symlink_to(target)
    assert load() == library
    library.unlink()
    assert str(lock) in fail()
    assert target.read_text() == "precious"


# -------------------------------------------------------------------------------- disks and folders


def test_full_disk(root, load, fail):
    with mounted("tmpfs", root, "size=4k,mode=755"):
        # Object and library take 64 KiB each: the sizes end every step of the build.
        ballast = "__attribute__((used)) static const char ballast[1 << 16] = {1};\n"
        sources = {"tiny.cpp": SOURCE + ballast}
        for size in range(4, 132, 8):
            subprocess.run(["mount", "-o", f"remount,size={size}k", root], check=True)
            error = fail(sources=sources)
            assert "No space left on device" in error.splitlines()[0], (size, error)
            assert "TORCH_EXTENSIONS_DIR" in error
            assert not folders_of_builds(root)
        subprocess.run(["mount", "-o", "remount,size=16m", root], check=True)
        load(sources=sources)


def test_read_only_mount(root, load, fail):
    with mounted("tmpfs", root, "size=16m,mode=755"):
        library = load()
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        assert load() == library
        error = fail(sources={"tiny.cpp": SOURCE + "// another"})
        assert f"in {root}: [Errno 30] Read-only file system" in error
        assert "TORCH_EXTENSIONS_DIR" in error


@needs_root
def test_build_of_root_is_loaded_by_a_user_without_write_access(root, start):
    status, output = start().wait()
    assert status == 0, output
    later = start(before=lambda: os.setuid(STRANGER))
    assert later.wait() == (0, output)
    fails = start({"tiny.cpp": SOURCE + "//"}, before=lambda: os.setuid(STRANGER))
    assert f"can't keep a build of the kernels in {root}: [Errno 13]" in fails.wait()[1]


def test_file_in_the_place_of_the_folder(root, fail):
    root.write_text("a file")
    error = fail()
    assert str(root) in error
    assert "Set TORCH_EXTENSIONS_DIR" in error


def test_folder_that_can_not_be_made(root, fail, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/cache")
    error = fail()
    assert "/proc/cache" in error
    assert "Set TORCH_EXTENSIONS_DIR" in error


def test_no_home(fail, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache, "home_folder", lambda: "~")  # as expanduser says it
    assert "this user has no home: set TORCH_EXTENSIONS_DIR" in fail()


@pytest.mark.parametrize("name", ["with spaces", "größe 测试", "it's"])
def test_paths(monkeypatch, tmp_path, load, name):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / name))
    monkeypatch.setenv("MAX_JOBS", "1")
    assert load().is_relative_to(tmp_path / name)


def test_relative_folder(monkeypatch, tmp_path, load):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "relative/cache")
    library = load(before=lambda: os.chdir(tmp_path))
    assert library.is_relative_to(tmp_path / "relative" / "cache")


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_umask(root, load, mask):
    library = load(before=lambda: os.umask(mask))
    assert load() == library
    assert library.stat().st_mode & 0o777 == 0o755 & ~mask


# -------------------------------------------------------------------------------------- other users


def give_to_stranger(path):
    for place in (path, *path.rglob("*")):
        os.chown(place, STRANGER, STRANGER, follow_symlinks=False)


@needs_root
def test_library_planted_in_a_shared_folder(root, load):
    library = load()
    root.chmod(0o1777)
    assert load() == library
    give_to_stranger(library.parent.parent)
    own = load()
    assert own.parent.parent.name == f"{library.parent.parent.name}-0"
    assert load() == own
    give_to_stranger(own.parent.parent)


@needs_root
@pytest.mark.parametrize("which", ["build", "library", "manifest", "both folders"])
def test_files_of_another_user_are_not_loaded(root, load, fail, which):
    library = load()
    folder = library.parent
    if which == "both folders":
        (root / f"{folder.parent.name}-0").mkdir()
        for path in root.iterdir():
            give_to_stranger(path)
        assert f"{folder.parent.name}-0 belongs to user {STRANGER}" in fail()
    else:
        places = {"build": folder, "library": library, "manifest": folder / "manifest.json"}
        os.chown(places[which], STRANGER, STRANGER)
        assert load() != library


@needs_root
@pytest.mark.parametrize("place", ["library", "manifest", "build"])
def test_what_others_may_write_is_not_loaded(load, place):
    library = load()
    folder = library.parent
    path = {"library": library, "manifest": folder / "manifest.json", "build": folder}[place]
    path.chmod(0o775)
    assert load() == library  # the group is root's own
    os.chown(path, 0, STRANGER)
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
        assert f"not in TORCH_EXTENSIONS_DIR: {root} is writable by others" in warning
        assert Path(elsewhere).is_relative_to(open_path / "default")
    (open_path / "default").chmod(0o777)
    assert f"not safe in {root}: {root} is writable by others" in fail()
    for trusted in (root, open_path):
        monkeypatch.setenv("KERNELS_TRUSTED_FOLDER", str(trusted))
        assert load() == library
    monkeypatch.setenv("KERNELS_TRUSTED_FOLDER", str(open_path / "cac"))
    assert "KERNELS_TRUSTED_FOLDER" in fail()


def test_what_others_can_not_reach_is_trusted(root, load, open_path):
    library = load()
    root.chmod(0o777)
    assert f"{root} is writable by others" in cache.intruder(library)
    open_path.chmod(0o700)
    assert load() == library


@needs_root
def test_folder_of_another_user_above(root, load, fail, monkeypatch, open_path):
    library = load()
    monkeypatch.setenv("XDG_CACHE_HOME", str(open_path / "default"))
    os.chown(open_path, STRANGER, STRANGER)
    assert f"{open_path} belongs to user {STRANGER}" in fail()
    monkeypatch.setenv("KERNELS_TRUSTED_FOLDER", str(open_path))
    give_to_stranger(root)
    assert load() == library


def test_what_lies_above_a_home_does_not_matter(root, load, monkeypatch, open_path):
    library = load()
    open_path.chmod(0o777)
    assert f"{open_path} is writable by others" in cache.intruder(root)
    monkeypatch.setattr(cache, "home_folder", lambda: str(root))
    assert load() == library


# ----------------------------------------------------------------------------------------- the name


def test_name_covers_what_the_machine_code_depends_on(monkeypatch):
    def name(sources=SOURCES, flags=("-O3",)):
        return build.build_name(sources, list(flags))

    base = name()
    assert base == name()
    assert base != name({"tiny.cpp": SOURCE + "//"})
    assert base != name(flags=("-O2",))
    for variable in ("CXX", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "another")
            assert base != name()
    for attribute in ("git_version", "__version__"):
        with monkeypatch.context() as patch:
            patch.setattr(torch.version, attribute, "another")
            patch.setattr(torch, "__version__", torch.version.__version__)
            assert base != name()


def test_a_machine_without_avx2_has_a_build_of_its_own(root, load, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    library = load()
    assert "-mavx2" in cpu_flags()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert load().parent.parent != library.parent.parent


def test_finished_build_needs_no_compiler(root, load, monkeypatch):
    monkeypatch.setenv("CXX", "c++")  # a path would be found without PATH
    library = load()
    monkeypatch.setenv("PATH", "/nowhere")
    assert load() == library
    shutil.rmtree(library.parent)
    with pytest.raises(BuildError, match="building the kernels needs"):
        build.load(SOURCES, load_inline)


# ----------------------------------------------------------------------------------- building ahead


def test_build_made_ahead_without_a_gpu(root):
    """It is then loaded without tools, on a machine with a GPU that it covers or without one."""
    if torch.version.cuda is None:
        pytest.skip("needs a torch for CUDA")
    try:
        find_toolkit(torch.utils.cpp_extension.CUDA_HOME, ["sm_80", "sm_90a"])
    except BuildError as error:
        pytest.skip(str(error))
    sources = {**SOURCES, "tiny.cu": "__global__ void kernel() {}\n"}

    def run(code, **environment):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)

    gpus = run("from kernels.build.toolchain import visible_gpus; print(set(visible_gpus()))")
    if gpus not in ("set()\n", "{(9, 0)}\n"):
        pytest.skip("needs GPUs of compute capability 9.0, or none")
    load = (
        "from kernels.build.extension import load\n"
        "from torch.utils.cpp_extension import load_inline\n"
        f"print(load({sources!r}, load_inline).__file__)"
    )
    ahead = run(load, CUDA_VISIBLE_DEVICES="", TORCH_CUDA_ARCH_LIST="8.0;9.0a")
    assert run(load, PATH="/nowhere", TORCH_CUDA_ARCH_LIST="9.0") == ahead
    manifest = json.loads((Path(ahead.strip()).parent / "manifest.json").read_text())
    assert manifest["targets"] == ["sm_80", "sm_90a"]
