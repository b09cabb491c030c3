"""Finished builds on disk.

    <root>/kernels-<user id>/                 the user's own, mode 0700
        kernels_relu_<key>-<number>/          a finished build
            kernels_relu_<key>.so
            manifest.json                     the library's SHA-256, what it was compiled by and for
        unfinished-<process>-<time>/          a build that goes on, or that was killed
        kernels_relu_<key>.lock               held by the process that builds

A build is made in a folder of its own, gets its manifest last, and is finished by one rename. What
does not match its manifest is removed and built again. Nothing depends on the lock: it only keeps
processes that start at the same time from doing the same work.
"""

import atexit
import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernels.build.errors import BuildError, say

MANIFEST = "manifest.json"
PATIENCE_S = 300.0  # another builder may have been stopped; it is waited for no longer


@dataclass(frozen=True)
class Build:
    """A finished build.

    Attributes:
        library: the shared library.
        targets: nvcc's targets that it has code for; empty for the CPU alone.
        compilers: what each compiler said it was, by `cxx` and `nvcc`.
    """

    library: Path
    targets: list[str]
    compilers: dict[str, str]


# ------------------------------------------------------------------------------------- the folder


def choose_folder() -> Path:
    """Return the folder where this user's builds are kept; make it if it is missing.

    It is in TORCH_EXTENSIONS_DIR, or else where torch keeps extensions. Where the folder cannot be
    made, or belongs to somebody else, a temporary one takes its place until the process ends.
    """
    for root in _roots():
        folder = root / f"kernels-{os.geteuid()}"
        reason = _make_own(folder)
        if reason is None:
            return folder
        say(f"no builds are kept in {root}: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="kernels-"))
    atexit.register(_remove_at_exit, folder, os.getpid())
    say(
        f"builds are made in {folder}, and nothing is kept when this process ends. Set "
        "TORCH_EXTENSIONS_DIR to a folder that you may write to"
    )
    return folder


def _roots() -> Iterator[Path]:
    explicit = os.environ.get("TORCH_EXTENSIONS_DIR")
    if explicit:
        yield Path(os.path.realpath(explicit))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    if not cache.startswith("~"):  # a user without a home
        yield Path(os.path.realpath(cache)) / "torch_extensions"


def _make_own(folder: Path) -> str | None:
    """Make a folder that only this user may enter. Return why that is impossible, or None."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        state = folder.lstat()  # a symbolic link would lead to a folder of somebody else's choice
    except OSError as error:
        return str(error)
    if not stat.S_ISDIR(state.st_mode):
        return f"{folder} is no folder"
    if state.st_uid != os.geteuid():
        return f"{folder} belongs to user {state.st_uid}"
    if state.st_mode & 0o077:
        with contextlib.suppress(OSError):  # file systems without modes show what they like
            folder.chmod(0o700)
    return None


def _remove_at_exit(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a forked process has inherited the call, not the folder
        shutil.rmtree(folder, ignore_errors=True)


def check_executable(folder: Path) -> None:
    """Raise a BuildError where no library can be loaded from a folder."""
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise BuildError(
            f"{folder} is on a file system that is mounted noexec: no library can be loaded from "
            "there. Set TORCH_EXTENSIONS_DIR to a folder on another file system"
        )


# --------------------------------------------------------------------------------- finished builds


def finished_builds(folder: Path, name: str) -> Iterator[Build]:
    """Yield the finished builds of a library, and remove what does not match its manifest."""
    for place in sorted(folder.glob(f"{name}-*")):
        build = _read_build(place, name)
        if build is None:
            shutil.rmtree(place, ignore_errors=True)
        else:
            yield build


def _read_build(place: Path, name: str) -> Build | None:
    """Return the build in a folder; None if it is damaged, or not of this user."""
    library = place / f"{name}.so"
    try:
        manifest = json.loads((place / MANIFEST).read_bytes())
        is_own = library.stat().st_uid == os.geteuid()
        is_whole = manifest["sha256"] == _digest(library)
        build = Build(library, list(manifest["targets"]), dict(manifest["compilers"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return build if is_own and is_whole else None


def publish(unfinished: Path, build: Build) -> None:
    """Finish a build: write its manifest, then give its folder the name by which it is found.

    Another process may have finished the same build meanwhile. Then this is one more.
    """
    content = {
        "sha256": _digest(build.library),
        "targets": build.targets,
        "compilers": build.compilers,
    }
    (unfinished / MANIFEST).write_text(json.dumps(content, indent=1))
    for number in itertools.count():
        try:
            unfinished.rename(unfinished.with_name(f"{build.library.stem}-{number}"))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


# ------------------------------------------------------------------------------- unfinished builds


@contextlib.contextmanager
def unfinished_folder(folder: Path) -> Iterator[Path]:
    """Make a folder for a build, and remove it in the end unless it was published."""
    place = folder / f"unfinished-{process_name()}-{time.monotonic_ns()}"
    place.mkdir(mode=0o700)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished builds of this host's dead processes.

    A process on another host that shares the folder cannot be asked, and its build stays until that
    host removes it. The compilers of a killed process may write for a while longer; what they leave
    is removed the next time.
    """
    for place in folder.glob("unfinished-*"):
        host, number, start = _split_name(place.name)
        if host == HOST and process_name(number) != f"{host}-{number}-{start}":
            shutil.rmtree(place, ignore_errors=True)


def _split_name(name: str) -> tuple[str, str, str]:
    match = re.match(r"unfinished-(\w+)-(\d+)-(\d+)-", name)
    return match.groups() if match else ("", "", "")


def _host() -> str:
    """Return a name of this boot of this machine, and of this container; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        container = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}{container}".encode()).hexdigest()[:12]


HOST = _host()


def process_name(number: str = "self") -> str:
    """Return a name that no other process ever has: host, process id, start time.

    Args:
        number: the id of a process, or `self`.

    Returns:
        The name; empty if the process is dead.
    """
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The fields after the program's name, which is in parentheses and may hold anything.
    state, *fields = text.rpartition(")")[2].split()
    process_id, start = text.split()[0], fields[18]
    return "" if state in "ZX" else f"{HOST}-{process_id}-{start}"


# ---------------------------------------------------------------------------------------- the lock


@contextlib.contextmanager
def turn_to_build(folder: Path, name: str) -> Iterator[None]:
    """Wait while another process builds the same library.

    Where the file system has no locks, and where the other process makes no progress for
    `PATIENCE_S` seconds, the work is done twice.
    """
    import filelock  # torch needs it, too; only a build waits for its import

    lock = filelock.FileLock(folder / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say(f"waiting for another process, which builds the kernels in {folder}")
        with contextlib.suppress(filelock.Timeout):
            lock.acquire(timeout=PATIENCE_S, poll_interval=0.05)
    except (OSError, NotImplementedError):
        pass  # a file system without locks
    try:
        yield
    finally:
        lock.release(force=True)
