"""Finished builds on disk: whose are trusted, which are whole, who builds next.

`<root>/<name>/` holds the builds of one name, each in a folder of its own with all that the build
tools wrote. A build is finished when its `manifest.json` is there, which comes last, by a rename,
and has the size and the SHA-256 of the library. Anything else is never loaded, whoever still writes
to it, and is removed by the next builder.
"""

import contextlib
import fcntl
import grp
import hashlib
import json
import logging
import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# bundle: skip
from kernels.build.toolchain import BuildError

# bundle: end

LOGGER = logging.getLogger("kernels")
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
# Seconds after which a folder that no builder has put its name to is a left-over.
NAMELESS_S = 60.0
# The descriptors of this process's locks.
HELD_DESCRIPTORS: set[int] = set()


def close_held_descriptors() -> None:
    """In a forked child, which would otherwise keep its parent's locks for as long as it lives."""
    while HELD_DESCRIPTORS:
        os.close(HELD_DESCRIPTORS.pop())


os.register_at_fork(after_in_child=close_held_descriptors)


class NamedErrors:
    """Raises an OSError again as a BuildError that names the folder and the remedy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            raise BuildError(
                f"can't keep a build of the kernels in {self.folder}: {error}. Set "
                "TORCH_EXTENSIONS_DIR to a folder that can be written"
            ) from error


def intruder(path: Path) -> str:
    """Who besides this user and root may replace `path`, or a file in it; empty if nobody may.

    They may where `path`, or a folder above, belongs to them or is writable by others or by a group
    that has others in it; but not below a folder that only its owner may enter. A folder with the
    sticky bit, such as /tmp, lets them add files, not touch ours. The folders above a home are the
    system's business. The folder KERNELS_TRUSTED_FOLDER, and all in it, is trusted as it is.
    """
    trusted = os.environ.get("KERNELS_TRUSTED_FOLDER")
    places = (path, *path.parents)
    if trusted and Path(os.path.realpath(trusted)) in places:
        return ""
    home = Path(os.path.realpath(home_folder()))
    found = ""
    for place in places:
        if not os.path.lexists(place):
            continue
        state = place.lstat()
        if state.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to user {state.st_uid}"
        if not state.st_mode & 0o011:
            found = ""
        is_sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
        is_open = state.st_mode & (0o002 if is_own_group(state.st_gid) else 0o022)
        if is_open and not is_sticky and not found:  # so is any symbolic link
            found = f"{place} is writable by others ({stat.filemode(state.st_mode)})"
        if place == home:
            break
    return found


def is_own_group(group_id: int) -> bool:
    """Whether a group has nobody in it but this user, as where everybody has one of their name."""
    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
        return group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}
    return False


def home_folder() -> str:
    """This user's home; `~` where there is none, for which `Path` would raise."""
    return os.path.expanduser("~")  # noqa: PTH111


def cache_root() -> Path:
    """TORCH_EXTENSIONS_DIR, or torch's default where that is not set or others may write to it.

    Raises:
        BuildError: there is no such folder that is safe.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or f"{home_folder()}/.cache"
    default = None if cache.startswith("~") else f"{cache}/torch_extensions"
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    roots = [Path(os.path.realpath(root)) for root in (chosen, default) if root]
    if not roots:
        raise BuildError("this user has no home: set TORCH_EXTENSIONS_DIR to a folder for builds")
    safe = [root for root in roots if not intruder(root)]
    if not safe:
        raise BuildError(
            f"builds of the kernels are not safe in {roots[0]}: {intruder(roots[0])}. Set "
            "TORCH_EXTENSIONS_DIR to a folder that only you may write to, as all above it must be; "
            "or name one that you trust in KERNELS_TRUSTED_FOLDER"
        )
    if safe[0] != roots[0]:
        LOGGER.warning(
            "builds are kept in %s, not in TORCH_EXTENSIONS_DIR: %s. Trust it by "
            "KERNELS_TRUSTED_FOLDER=%s",
            *(safe[0], intruder(roots[0]), roots[0]),
        )
    return safe[0]


def folders(root: Path, name: str) -> list[Path]:
    """Where builds of a name lie: the common folder, and this user's, if the first is another's."""
    return [root / name, root / f"{name}-{os.geteuid()}"]


def own_folder(root: Path, name: str) -> Path:
    """The first of `folders` that is this user's, made if need be.

    Raises:
        BuildError: others may write to it.
    """
    for folder in reversed(root.parents):
        folder.mkdir(mode=0o755, exist_ok=True)
    root.mkdir(mode=0o755, exist_ok=True)
    for folder in folders(root, name):
        folder.mkdir(mode=0o755, exist_ok=True)
        if folder.lstat().st_uid == os.geteuid():
            break
    if intruder(folder):
        raise BuildError(
            f"can't build the kernels in {folder}: {intruder(folder)}. Remove it, or set "
            "TORCH_EXTENSIONS_DIR to another folder"
        )
    return folder


def finished_builds(root: Path, name: str) -> Iterator[tuple[Path, list[str]]]:
    """The libraries that may be loaded, with the targets that each holds code for."""
    for folder in folders(root, name):
        for build in list_folders(folder):
            targets = read_targets(build / f"{name}.so")
            if targets is not None:
                yield build / f"{name}.so", targets


def list_folders(folder: Path) -> list[Path]:
    """The folders in `folder`; none where it can't be read."""
    with contextlib.suppress(OSError):
        entries = os.scandir(folder)
        return sorted(Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def read_targets(library: Path) -> list[str] | None:
    """The targets of a finished build; None where it is not whole, or not to be trusted."""
    path = library.parent / "manifest.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        if not intruder(library) and not intruder(path):
            manifest = json.loads(path.read_bytes())
            if manifest["library"] == fingerprint(library):
                return manifest["targets"]
    return None


def fingerprint(library: Path) -> list[object]:
    """Its size and digest."""
    content = library.read_bytes()
    return [len(content), hashlib.sha256(content).hexdigest()]


def publish(library: Path, targets: list[str]) -> None:
    """Makes a build a finished one, once all of it is on disk."""
    folder = library.parent
    # Readable by whom the umask says, writable by nobody else.
    mode = library.stat().st_mode & 0o755
    library.chmod(mode)
    folder.chmod(mode | 0o700)
    manifest = folder / "manifest.new"
    manifest.write_text(json.dumps({"targets": targets, "library": fingerprint(library)}))
    manifest.chmod(mode & 0o644)
    for path in (library, manifest):
        sync(path)
    manifest.rename(folder / "manifest.json")
    with contextlib.suppress(OSError):  # not every file system can do this with a folder
        sync(folder)
        sync(folder.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.fsync(descriptor)
    os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """A descriptor that locks a file, or None where another holds the lock.

    The system gives the lock back when its holder dies. The file has the holder's process id.
    """
    descriptor = os.open(path, LOCK_FLAGS, 0o600)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        HELD_DESCRIPTORS.add(descriptor)
        with contextlib.suppress(OSError):  # the disk may be full
            os.pwrite(descriptor, f"{os.getpid():<20}".encode(), 0)
        return descriptor
    os.close(descriptor)
    return None


def unlock(descriptor: int) -> None:
    """Gives a lock back, also where a process forked from C has a copy of the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    HELD_DESCRIPTORS.discard(descriptor)
    os.close(descriptor)


def private_folder(folder: Path) -> tuple[Path, int]:
    """A new folder for a build, and the lock that says that its builder lives."""
    build = Path(tempfile.mkdtemp(prefix="build-", dir=folder))
    descriptor = try_lock(build / "builder.new")
    # It is locked before it has the name that `remove_left_overs` looks for.
    (build / "builder.new").rename(build / "builder")
    return build, descriptor


def discard_unfinished(build: Path) -> None:
    """Removes a build that failed."""
    if not (build / "manifest.json").exists():
        shutil.rmtree(build, ignore_errors=True)


def remove_left_overs(folder: Path, name: str) -> None:
    """Removes what dead builders left, and builds that are no longer whole.

    A compiler that outlives its builder may write again what is being removed; then the next
    builder finds the folder, without the file of its builder.
    """
    for build in list_folders(folder):
        if read_targets(build / f"{name}.so") is None:
            with contextlib.suppress(FileNotFoundError):
                if (build / "builder").exists():
                    descriptor = try_lock(build / "builder")
                    if descriptor is not None:
                        shutil.rmtree(build, ignore_errors=True)
                        unlock(descriptor)
                elif time.time() - build.stat().st_mtime > NAMELESS_S:
                    shutil.rmtree(build, ignore_errors=True)
