"""The C library, for system calls that Python's `os` does not have."""

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)


def error_of_last_call() -> OSError:
    """Return the error of the last call of a function of `libc`, which has failed."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def check(status: int) -> None:
    """Raise OSError if the status that a function of `libc` returned means failure."""
    if status:
        raise error_of_last_call()
