"""Files that appear whole or not at all; devices and pipes are written to, never replaced."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from referee import console


def check_writable(path: Path) -> None:
    """Raise OSError if `write` would fail. Nothing is opened, for a FIFO would block."""
    (there, stream), target = _status(path), Path(os.path.realpath(path))
    if there and stat.S_ISDIR(there.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stream is not None:
        return
    if there and not os.access(path, os.W_OK, effective_ids=True):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    if there and not stat.S_ISREG(there.st_mode):
        return
    folder = target.parent.stat()
    if not os.access(target.parent, os.W_OK, effective_ids=True):
        raise OSError(errno.EACCES, "its folder takes no new file")
    is_sticky = there and folder.st_mode & stat.S_ISVTX
    if is_sticky and os.geteuid() not in (0, there.st_uid, folder.st_uid):
        raise OSError(errno.EPERM, "its folder lets only the owner replace it")
    mounts = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).splitlines()
    if str(target).replace(" ", r"\040") in (line.split()[4] for line in mounts):
        raise OSError(errno.EBUSY, "a file that is mounted cannot be replaced")


def write(path: Path, text: str | bytes) -> None:
    """Write a file, or raise OSError and leave the old one as it was.

    A new file, flushed to disk, takes the place of the old one; it gets its mode and, as far as
    permitted, its owner. Symbolic links are followed and kept. Devices, pipes and the file that is
    stdout or stderr already are written to.
    """
    data = text.encode(errors="backslashreplace") if isinstance(text, str) else text
    there, stream = _status(path)
    if stream is not None:
        with os.fdopen(os.dup(stream), "wb") as file:
            file.write(data)
    elif there and not stat.S_ISREG(there.st_mode):
        path.write_bytes(data)
    else:
        _replace(Path(os.path.realpath(path)), there, data)  # where symbolic links lead


def try_to_write(path: Path, text: str | bytes) -> bool:
    """Return whether a file could be written; say on stderr why it could not."""
    try:
        write(path, text)
    except OSError as error:
        console.say(f"cannot write {path}: {error.strerror}")
        return False
    return True


def _replace(path: Path, old: os.stat_result | None, data: bytes) -> None:
    new = path.with_name(f".run.py-{secrets.token_hex(8)}")
    mode = 0o666 if old is None else stat.S_IMODE(old.st_mode)  # less the umask
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if old is not None:
                with suppress(PermissionError):
                    os.fchown(descriptor, old.st_uid, old.st_gid)
                with suppress(PermissionError):  # network drives may refuse it
                    os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _status(path: Path) -> tuple[os.stat_result | None, int | None]:
    """Return a file's status, and the descriptor of stdout or stderr if it is theirs.

    /dev/stdout is such a file. Opened a second time, a file would be written from its beginning,
    and a socket cannot be opened.
    """
    try:
        there = path.stat()
    except FileNotFoundError:
        return None, None
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(there, os.fstat(descriptor)):
                return there, descriptor
    return there, None
