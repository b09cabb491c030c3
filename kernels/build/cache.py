"""The cache of builds on disk.

    <root>/kernels-<user id>/                 the cache folder; the user's own, mode 0700
        kernels_relu_<key>-<number>/          a finished build, the first one with number 0
            kernels_relu_<key>.so
            manifest.json                     the library's SHA-256, its compilers and targets
        unfinished-<process>-<time>/          a build in progress, or one whose process was killed
        kernels_relu_<key>.lock               held by the process that builds

One key may have several builds: for different GPUs, or by different compilers. Each build is made
in a folder of its own, gets its manifest last, and is published by one rename. A build that does
not match its manifest is removed. The lock only saves work: without it, processes that start at the
same time would each make a build, and each build would be right.

<key> is a digest of the sources, flags and versions (extension.py), <process> the result of
`process_name`.
"""

import atexit
import contextlib
import errno
import fcntl
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
from typing import BinaryIO

from kernels.build.errors import BuildError, say

MANIFEST = "manifest.json"
# The longest wait for another process that builds the same library. That process may be suspended.
LONGEST_WAIT_S = 300.0


@dataclass(frozen=True)
class Build:
    """The library of a build, and what its manifest says about it.

    Attributes:
        library: the shared library.
        targets: the nvcc targets for which it has code; empty if it has code for the CPU only.
        compilers: the version text of each compiler, as in `Toolchain`.
    """

    library: Path
    targets: list[str]
    compilers: dict[str, str]


# ------------------------------------------------------------------------------- the cache folder


def choose_folder() -> Path:
    """Return the cache folder of this user; make it if it is missing.

    The folder is in TORCH_EXTENSIONS_DIR, or else where torch keeps extensions by default. If it
    cannot be made in either place, a temporary folder is used, and removed when the process ends.

    Raises:
        BuildError: no folder can be made anywhere.
    """
    for root in _roots():
        folder = root / f"kernels-{os.geteuid()}"
        reason = _make_private_folder(folder)
        if reason is None:
            return folder
        say(f"no builds are kept in {root}: {reason}")
    try:
        folder = Path(tempfile.mkdtemp(prefix="kernels-"))
    except OSError as error:
        raise BuildError(f"no folder for builds: {error}. Set TORCH_EXTENSIONS_DIR") from None
    atexit.register(_remove_at_exit, folder, os.getpid())
    say(
        f"builds are made in {folder}, and nothing is kept when this process ends. Set "
        "TORCH_EXTENSIONS_DIR to a folder that you may write to"
    )
    return folder


def _roots() -> Iterator[Path]:
    """Yield the folders in which the cache folder may be, the best first."""
    chosen_root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen_root:
        yield Path(os.path.realpath(chosen_root))
    cache = os.environ.get("XDG_CACHE_HOME")
    if not cache:
        cache = os.path.expanduser("~/.cache")  # noqa: PTH111
    if not cache.startswith("~"):  # "~" stays if the user has no home
        yield Path(os.path.realpath(cache)) / "torch_extensions"


def _make_private_folder(folder: Path) -> str | None:
    """Make a folder that only this user may enter, or close an existing folder to others.

    Returns:
        None if the folder can be used, or else the reason why it cannot.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        # stat would follow a symbolic link to a folder of somebody else's choice.
        state = folder.lstat()
    except OSError as error:
        return str(error)
    if not stat.S_ISDIR(state.st_mode):
        return f"{folder} is not a folder"
    if state.st_uid != os.geteuid():
        return f"{folder} belongs to user {state.st_uid}"
    if state.st_mode & 0o077:
        # A file system without modes shows the same mode for all files, and may refuse chmod.
        with contextlib.suppress(OSError):
            folder.chmod(0o700)
    return None


def _remove_at_exit(folder: Path, maker_id: int) -> None:
    """Remove a folder if this is the process that made it, not one forked from that process."""
    if os.getpid() == maker_id:
        shutil.rmtree(folder, ignore_errors=True)


def check_executable(folder: Path) -> None:
    """Raise a BuildError if no library can be loaded from a folder."""
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise BuildError(
            f"{folder} is on a file system that is mounted noexec: no library can be loaded from "
            "there. Set TORCH_EXTENSIONS_DIR to a folder on another file system"
        )


# --------------------------------------------------------------------------------- finished builds


def finished_builds(folder: Path, name: str) -> Iterator[Build]:
    """Yield the finished builds of a library; remove those that do not match their manifest.

    Builds of another user are removed, too. A build that cannot be read now is left alone.
    """
    for build_folder in sorted(folder.glob(f"{name}-*")):
        try:
            build = _read_build(build_folder, name)
        except OSError:  # for example, this process has too many open files
            continue
        if build is None:
            shutil.rmtree(build_folder, ignore_errors=True)
        else:
            yield build


def _read_build(build_folder: Path, name: str) -> Build | None:
    """Return the build in a folder; None if it is damaged, or belongs to another user."""
    library = build_folder / f"{name}.so"
    try:
        manifest = json.loads((build_folder / MANIFEST).read_bytes())
        is_own = library.stat().st_uid == os.geteuid()
        is_whole = manifest["sha256"] == _digest(library)
        build = Build(library, list(manifest["targets"]), dict(manifest["compilers"]))
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None
    return build if is_own and is_whole else None


def publish(unfinished: Path, build: Build) -> None:
    """Finish a build: write its manifest, then give its folder the name of a finished build.

    The name ends with the first number that is free.
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
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


# ------------------------------------------------------------------------------- unfinished builds


@contextlib.contextmanager
def unfinished_folder(folder: Path) -> Iterator[Path]:
    """Make a folder for a build, and remove it at the end.

    If the build succeeds, `publish` renames the folder before the end. Then nothing is removed.
    """
    build_folder = folder / f"unfinished-{process_name()}-{time.monotonic_ns()}"
    build_folder.mkdir(mode=0o700)
    try:
        yield build_folder
    finally:
        shutil.rmtree(build_folder, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished builds of processes that died on this host.

    Several hosts may share the folder. No host can see whether another's processes are alive, so
    each host removes the builds of its own processes only. A machine that was started again is
    another host, as is each container (`_host`). If this host has no name, nothing is removed. The
    compilers of a killed process may write into its folder even after this call; the next call then
    removes the folder.
    """
    if not HOST:
        return
    for build_folder in folder.glob(f"unfinished-{HOST}-*"):
        # unfinished-<process name>-<time>, where a process name is <host>-<process id>-<start time>
        match = re.match(r"unfinished-(?P<builder>\w+-(?P<id>\d+)-\d+)-", build_folder.name)
        # If the builder is dead, a new process may have its id, but not its name.
        if match and process_name(match["id"]) != match["builder"]:
            shutil.rmtree(build_folder, ignore_errors=True)


def _host() -> str:
    """Return a name for the system in which process ids are unique; empty if unknown.

    It is one container during one boot of one machine.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        container = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return ""
    return hashlib.sha256(f"{boot}{container}".encode()).hexdigest()[:12]


HOST = _host()


def process_name(process_id: str = "self") -> str:
    """Return `<host>-<process id>-<start time>`, which is unique if the host has a name.

    Args:
        process_id: the id of a process on this host; "self" for this process.

    Returns:
        The name; empty if the process is dead.
    """
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # proc_pid_stat(5): id (program) state ..., where the program's name may contain anything. The
    # start time is field 22. Field 3, the state, is Z or X after the process has died.
    number = text.split()[0]  # the id in digits, even where process_id is "self"
    state, *fields_from_4 = text.rpartition(")")[2].split()
    start = fields_from_4[22 - 4]
    if state in ("Z", "X"):
        return ""
    return f"{HOST}-{number}-{start}"


# ---------------------------------------------------------------------------------------- the lock

_open_lock_files: set[BinaryIO] = set()


def _close_inherited_locks() -> None:
    """Close the lock files of the process that this one was forked from.

    A lock lasts until every process that has the file open has closed it or ended. If a parent is
    killed while it builds, its child would still hold the parent's lock through the inherited file.
    If the child then built the same library, it would open the lock's file anew, and wait for
    itself.
    """
    while _open_lock_files:
        _open_lock_files.pop().close()


os.register_at_fork(after_in_child=_close_inherited_locks)


@contextlib.contextmanager
def build_lock(folder: Path, name: str) -> Iterator[None]:
    """Wait until no other process builds the same library, then keep others waiting.

    The wait ends after `LONGEST_WAIT_S` seconds, and at once where the file system has no locks.
    Two processes may then build the same library.
    """
    with (folder / f"{name}.lock").open("ab") as lock:
        _open_lock_files.add(lock)
        try:
            _acquire(lock, folder)
            yield
        finally:
            _open_lock_files.discard(lock)  # the end of `with` closes the file: this unlocks it


def _acquire(lock: BinaryIO, folder: Path) -> None:
    """Lock a file as soon as no other process has locked it; give up as `build_lock` says."""
    end = time.monotonic() + LONGEST_WAIT_S
    is_waiting = False
    while time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process has it
            if not is_waiting:
                say(f"waiting for another process, which builds the kernels in {folder}")
            is_waiting = True
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return
        else:
            return
