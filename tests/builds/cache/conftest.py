"""Fixtures of the cache's tests: the folder of the caches, and processes that build and load.

`start` starts a process that loads the tiny extension, and builds it if the cache does not have it.
`load` and `fail` also wait for its end.
"""

import atexit
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from kernels.build import toolchain
from kernels.build.extension import load_extensions
from tests.support.tiny_build import BUILD_S, SOURCES, Child, loaded_library


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

    It adds a line to the file `builds`, and writes first a part of the library, then the whole.
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


@pytest.fixture
def open_path():
    """Return a new folder that other users may enter; pytest's `tmp_path` is closed to them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder).resolve()


@pytest.fixture
def root(open_path, monkeypatch):
    """Return the folder of the caches, in which each user has a folder.

    No build goes to the real user's own folders.
    """
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(open_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(open_path / "default"))
    # A forked process can't ask for GPUs if this one uses them.
    monkeypatch.setattr(toolchain, "cuda_targets", list)
    return open_path / "cache"


@pytest.fixture
def start(tmp_path, root, load_inline):
    """Return a function that starts a process, which loads the extension and prints its path.

    The process calls `before` first. With `at_exit` it calls its exit functions at the end, as a
    process does that was not forked.
    """
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
