"""File systems for tests, for example full or read-only ones."""

import os
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def mounted(*arguments):
    """Mount a file system, and unmount it at the end; skip the test if that is not allowed.

    The arguments are those of the command `mount`. The last one is the folder.
    """
    if os.geteuid() != 0:
        pytest.skip("needs the right to mount")
    done = subprocess.run(["mount", *arguments], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", arguments[-1]], check=True)
