"""Processes that build and load a tiny extension, to test the cache of builds.

A build is quick: it writes a library of one function, which is compiled once for all tests. The
processes that build are forked from this one, which has imported torch already.
"""

import atexit
import logging
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest

from kernels.build import cache

SOURCES = {"tiny/tiny.cpp": 'extern "C" int answer() { return 42; }\n'}
OTHER = {"tiny/other.cpp": ""}
BUILD_S = 0.06  # the duration of a build
STRANGER = 12345  # the id of another user
# Names of hosts, as in `cache.HOST`.
HOSTS = ["aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


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


def loaded_library():
    """Return the present path of the tiny library that this process has loaded."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line[line.index("/") :] for line in lines if "/kernels_tiny" in line)


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

    Before each builder starts, finished builds lose their manifest, so the builder has to build.
    After about 3 in 10 kills, another process builds to its end.

    Args:
        count: how many builders are killed.
        root: the folder of the caches.
        start: starts a builder; the fixture of this name.
        load: builds in a process to its end; the fixture of this name.
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
