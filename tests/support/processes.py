"""Fresh processes that tests start: Python, and host code of the kernels compiled alone."""

import os
import shutil
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
KERNELS = ROOT / "kernels"


def copy_project(folder):
    """What `run.py` needs, in another folder."""
    for name in ("kernels", "problems", "referee"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("model.py", "model_new.py", "run.py"):
        shutil.copy(ROOT / name, folder)


def python(code, folder, path=(ROOT,), **environment):
    """Runs code in a fresh process that starts in `folder`; variables that are None are unset."""
    full = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        env={name: value for name, value in full.items() if value is not None},
        capture_output=True,
        text=True,
    )


def printed(code, folder, **options):
    """What the same code prints; it must not fail."""
    done = python(code, folder, **options)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


def compiled(folder, text, compiler="c++", *flags):
    """A function that runs a program of such a text and returns the words that it prints."""
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    source, program = folder / ("main.cu" if compiler == "nvcc" else "main.cpp"), folder / "main"
    source.write_text(text)
    command = [compiler, "-std=c++17", f"-I{KERNELS}", *flags, source, "-o", program]
    subprocess.run(command, check=True)

    def call(*arguments, text=None):
        command = [program, *(str(int(argument)) for argument in arguments)]
        return subprocess.check_output(command, input=text, text=True).split()

    return call


@contextmanager
def mounted(*arguments):
    """A file system for a while; skips the test where this process may not mount."""
    if os.geteuid() != 0 or subprocess.run(["mount", *arguments], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", arguments[-1]], check=True)
