"""Writes files so that they appear as a whole or not at all.

A regular file is replaced by a new one (`_replace`). Devices, pipes, and the file to which stdout
or stderr leads cannot be replaced: they are written to in place.
"""

import argparse
import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from referee import console


def check_writable(path: Path) -> None:
    """Raise OSError if `write` would fail. No file is opened, because opening a FIFO can block."""
    status = _status(path)
    if status is None:
        _check_replaceable(path.resolve(), None)
        return
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if _standard_stream(status) is not None:
        return
    if not os.access(path, os.W_OK, effective_ids=True):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    if stat.S_ISREG(status.st_mode):
        _check_replaceable(path.resolve(), status)


def writable_path(text: str) -> Path:
    """Return the path of a file that can be written; the `type` of a command's option.

    Raises:
        argparse.ArgumentTypeError: it cannot be written.
    """
    path = Path(text)
    try:
        check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    return path


def _check_replaceable(path: Path, status: os.stat_result | None) -> None:
    """Raise OSError if `_replace` would fail.

    Args:
        path: of the file, not of a symbolic link to it.
        status: of the file; None if there is none.
    """
    folder = path.parent.stat()
    if not os.access(path.parent, os.W_OK, effective_ids=True):
        raise OSError(errno.EACCES, "its folder takes no new file")
    # In a sticky folder such as /tmp, only root and the owners of file and folder may replace it.
    is_sticky = bool(folder.st_mode & stat.S_ISVTX)
    if status and is_sticky and os.geteuid() not in (0, status.st_uid, folder.st_uid):
        raise OSError(errno.EPERM, "its folder lets only the owner replace it")
    # The fifth field of a line is where something is mounted, with \040 for a space.
    mounts = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines()
    if str(path).replace(" ", r"\040") in (line.split()[4] for line in mounts):
        raise OSError(errno.EBUSY, "a file that is mounted cannot be replaced")


def write(path: Path, text: str | bytes) -> None:
    """Write a file.

    Symbolic links stay: the file that they lead to is written.

    Args:
        path: of the file.
        text: its new content.

    Raises:
        OSError: the file cannot be written. A regular file is then as it was.
    """
    data = text.encode(errors="backslashreplace") if isinstance(text, str) else text
    status = _status(path)
    if status is None:
        _replace(path.resolve(), None, data)
        return
    stream = _standard_stream(status)
    if stream is not None:
        with os.fdopen(os.dup(stream), "wb") as file:
            file.write(data)
    elif stat.S_ISREG(status.st_mode):
        _replace(path.resolve(), status, data)
    else:  # a device or a pipe
        path.write_bytes(data)


def try_to_write(path: Path, text: str | bytes) -> bool:
    """Write a file, see `write`; return whether that was possible. If not, stderr says why."""
    try:
        write(path, text)
    except OSError as error:
        console.say(f"cannot write {path}: {error.strerror}")
        return False
    return True


def _replace(path: Path, status: os.stat_result | None, data: bytes) -> None:
    """Write a new file beside the old one, flush it to disk, and rename it to the old one's name.

    The new file gets the old one's mode and, if that is permitted, its owner and group.

    Args:
        path: of the old file.
        status: of the old file; None if there is none.
        data: the new content.
    """
    new = path.with_name(f".referee-{secrets.token_hex(8)}")
    mode = 0o666 if status is None else stat.S_IMODE(status.st_mode)
    # `os.open` takes the umask's bits off the mode; for an old file, fchmod restores them.
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if status is not None:
                with suppress(PermissionError):
                    os.fchown(descriptor, status.st_uid, status.st_gid)
                with suppress(PermissionError):  # a network drive may refuse it
                    os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a file; None if there is none."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _standard_stream(status: os.stat_result) -> int | None:
    """Return 1 if a file is stdout, 2 if it is stderr, else None.

    Such a file must not be opened a second time: a regular file would be overwritten from its
    beginning, and a socket cannot be opened.
    """
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(status, os.fstat(descriptor)):
                return descriptor
    return None
