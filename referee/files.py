"""Files that appear whole or not at all; devices and pipes are written to, never replaced."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

# A folder takes no new file, or the file is a mount of its own.
_NOT_REPLACEABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def check_writable(path: Path) -> None:
    """Finds out before the work begins. Opens nothing, for a FIFO would block.

    Raises:
        OSError: `write` would fail.
    """
    there = _status(path)
    if there is None:
        folder = _followed(path).parent
        folder.stat()
        _check_access(folder, os.W_OK | os.X_OK)
    elif stat.S_ISDIR(there.st_mode):
        raise _error(errno.EISDIR, path)
    elif _standard_stream(there) is None:
        if stat.S_ISSOCK(there.st_mode):
            raise _error(errno.ENXIO, path)  # as open has it
        _check_access(path, os.W_OK)


def write(path: Path, text: str | bytes) -> str:
    """Writes a file; returns "", or a sentence if an interruption could have left half of it.

    A new file, flushed to disk, takes the place of the old one; it gets its mode and, as far as
    permitted, its owner. Symbolic links are followed and kept. Where the folder takes no new file,
    the old one is overwritten in place. Devices, pipes and the file that is stdout or stderr
    already are written to.

    Raises:
        OSError: it cannot be written; what a new file was to replace is as it was.
    """
    data = text.encode(errors="backslashreplace") if isinstance(text, str) else text
    there = _status(path)
    stream = there and _standard_stream(there)
    if stream is not None or (there and not stat.S_ISREG(there.st_mode)):
        with os.fdopen(os.dup(stream) if stream else _open(path), "wb") as file:
            file.write(data)
        return ""
    try:
        _replace(_followed(path), there, data)
        return ""
    except OSError as error:
        if there is None or error.errno not in _NOT_REPLACEABLE:
            raise
        reason = error.strerror
    _overwrite(path, there, data)
    return f"{path} was overwritten in place, because it cannot be replaced: {reason}"


def _replace(path: Path, old: os.stat_result | None, data: bytes) -> None:
    new = path.with_name(f".run.py-{secrets.token_hex(8)}")
    mode = 0o666 if old is None else 0o600  # the former less the umask
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if old is not None:
                for owner in ((old.st_uid, -1), (-1, old.st_gid)):
                    with suppress(PermissionError):
                        os.fchown(descriptor, *owner)
                os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
            _write_to_disk(file, data)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _overwrite(path: Path, old: os.stat_result, data: bytes) -> None:
    with os.fdopen(_open(path), "wb") as file:
        try:
            # A full disk shows before a byte is lost.
            os.posix_fallocate(file.fileno(), 0, len(data))
        except OSError:
            os.ftruncate(file.fileno(), old.st_size)
            raise
        os.ftruncate(file.fileno(), len(data))
        _write_to_disk(file, data)


def _open(path: Path) -> int:
    """Neither creates nor truncates, as `open` with "wb" would."""
    return os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)


def _write_to_disk(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _status(path: Path) -> os.stat_result | None:
    with suppress(FileNotFoundError):
        return path.stat()
    return None


def _followed(path: Path) -> Path:
    """Where the symbolic links lead, also if nothing is there."""
    return Path(os.path.realpath(path))


def _standard_stream(there: os.stat_result) -> int | None:
    """The descriptor of stdout or stderr if this is its file, as /dev/stdout is.

    Opened a second time, a file is written from its beginning, and a socket cannot be.
    """
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(there, os.fstat(descriptor)):
                return descriptor
    return None


def _check_access(path: Path, mode: int) -> None:
    if not os.access(path, mode, effective_ids=True):
        read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        raise _error(errno.EROFS if read_only else errno.EACCES, path)


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
